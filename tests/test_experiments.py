"""tests/benchmarks/experiments.py: its intervals by hand, verdicts, claims at equal KL, and the page that shows
them."""

import dataclasses
import importlib
import math
import random
import re
import sys
import types
from pathlib import Path

import annotators
import processes
import pytest
import torch
import trained_labeler

from common.data import files, prompt_sets, tiny
from common.programs import ai_feedback, pairwise

ROOT = processes.ROOT


@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    yield importlib.import_module("experiments")
    for name in ("experiments", "peers", "verdicts"):  # peers puts the root before tests/benchmarks, once
        sys.modules.pop(name)


@pytest.fixture
def verdicts(experiments):
    return experiments.verdicts


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


# -- intervals -------------------------------------------------------------------------------------
def test_students_quantiles_are_those_of_the_tables_or_a_little_larger(verdicts):
    between = {1.5: 6.5, 2.5: 3.558, 7: 2.365, 12: 2.179, 25: 2.060, 1000: 1.962}
    for df, exact in between.items():
        assert exact - 1e-3 <= verdicts.quantile(df) <= (1.15 if df < 2 else 1.03) * exact
    assert verdicts.quantile(4) == 2.776 and verdicts.quantile(math.inf) == 1.96


def test_an_interval_over_the_first_policy_by_hand(verdicts):
    """Gains of two seeds on four prompts: seeds' means 2 and 4, prompts' means 2, 4, 2, 4, residuals of 1/2:
    Var(seeds) / S = 2 / 2, Var(prompts) / P = 4/3 / 4, Var(residual) / (S P) = 8/4 / 3 / 8."""
    gains = doubles([[[1.5, 2.5, 0.5, 3.5], [2.5, 5.5, 3.5, 4.5]]])
    first = doubles([[7.0, -2.0, 0.0, 1.0]] * 2)
    x = verdicts.difference(doubles([[1.0, 1.0]]), gains + first, first)
    variance = 1 + 1 / 3 - 1 / 12
    df = variance**2 / (1**2 / 1 + (1 / 3) ** 2 / 3)
    half = verdicts.quantile(df) * math.sqrt(variance)
    assert x.mean == 3 and x.by_seed == [2.0, 4.0]
    assert [x.low, x.high] == pytest.approx([3 - half, 3 + half])
    assert x.seen == pytest.approx(half + 0.842 * math.sqrt(variance))
    pooled = gains.flatten()  # as if the seeds had asked eight other prompts: far too narrow here
    assert 1.96 * pooled.std().item() / math.sqrt(8) < 0.4 * half


def test_the_interval_over_prompts_is_wider_if_seeds_agree(verdicts):
    gains = doubles([[[1.0, 2.0, 3.0, 6.0]] * 2])
    x = verdicts.difference(doubles([[1.0, 1.0]]), gains, torch.zeros(2, 4, dtype=torch.float64))
    half = 3.182 * math.sqrt(14 / 3 / 4)  # 3 degrees of freedom
    assert [x.mean, x.high] == pytest.approx([3, 3 + half])
    one = verdicts.difference(doubles([[1.0]]), gains[:, :1], torch.zeros(1, 4, dtype=torch.float64))
    assert one[:3] == pytest.approx(x[:3])  # of one seed there is no other way


def test_the_seeds_part_between_arms_is_pooled_over_all_arms_of_the_group(verdicts):
    """Two arms that differ by 1 in both seeds by luck; the third one shows how much a seed can move one arm."""
    means = doubles([[1.0, 3.0], [2.0, 4.0], [0.0, 8.0]])
    arms = means[:, :, None].repeat(1, 1, 5)
    weights = doubles([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    x = verdicts.difference(weights, arms, arms[0])
    # second less first seed 2, 2, 8: 2 less than the mean 4, twice, and 4 more; halved, squared, over 2 seeds
    of_arm = (2**2 + 2**2 + 4**2) / 4 * 2 / ((3 - 1) * (2 - 1))
    half = verdicts.quantile(2) * math.sqrt(2 * of_arm / 2)
    assert [x.mean, x.low, x.high] == pytest.approx([1, 1 - half, 1 + half])
    alone = verdicts.difference(weights[:2], arms[:2], arms[0])
    assert alone.low == alone.high == 1  # the same two arms without the third: the wrong certainty
    assert x.own[:2] == (1, 1)


def test_the_interval_of_two_arms_alone_counts_seeds_and_prompts(verdicts):
    """Differences of two seeds on four prompts, those of the interval over the first policy by hand; a third arm, which
    varies more, widens the pooled interval alone."""
    by_hand = doubles([[1.5, 2.5, 0.5, 3.5], [2.5, 5.5, 3.5, 4.5]])
    other = doubles([[7.0, -2.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    arms = torch.stack([other, other + by_hand, 9 * by_hand.flip(0)])
    x = verdicts.difference(doubles([[-1.0] * 2, [1.0] * 2, [0.0] * 2]), arms, other)
    variance = 1 + 1 / 3 - 1 / 12
    t = verdicts.quantile(variance**2 / (1**2 / 1 + (1 / 3) ** 2 / 3))
    assert x.own == pytest.approx([3 - t * variance**0.5, 3 + t * variance**0.5, (t + 0.842) * variance**0.5])
    assert x.high > x.own[1] + 1
    assert verdicts.with_own_seeds(x)[:4] == (3, x.low, x.high, x.seen)
    narrow = x._replace(low=2.9, high=3.1, seen=0.1)
    assert verdicts.with_own_seeds(narrow)[1:4] == x.own


@pytest.mark.parametrize("values", [[[[1.0]]], [[[math.nan, 1.0]]], [[[]]]])
def test_one_number_and_a_diverged_arm_have_no_interval(values, verdicts):
    with pytest.raises(ValueError, match="no interval from [012] numbers"):
        verdicts.difference(doubles([[1.0]]), doubles(values), doubles(values)[0] * 0)
    with pytest.raises(ValueError, match="no interval from 1 numbers"):
        verdicts.of_seeds([0.3])


def test_seeds_alone_by_hand(verdicts):
    _, low, high, *_ = verdicts.of_seeds([1.0, 2.0, 3.0])  # mean 2, deviation 1, error 1 / sqrt(3), t of 2
    assert abs(low - (2 - 4.303 / 3**0.5)) < 1e-9 and abs(high - (2 + 4.303 / 3**0.5)) < 1e-9


def test_a_verdict_needs_the_pooled_interval_and_that_of_its_own_seeds(experiments):
    def judged(by_seed, **fields):
        claim = dataclasses.asdict(experiments.Claim("a", "b", **{"row": 1, **fields}))
        own = experiments.verdicts.of_seeds(by_seed).own if by_seed[1:] else (0.05, 0.15, 0.07)
        x = {"mean": 0.1, "low": 0.05, "high": 0.15, "seen": 0.07, "by_seed": by_seed, "own": own}
        line = {**claim, "seeds": len(by_seed), "difference": x}
        return experiments.verdict_of(line), experiments.result_of(line)

    # Own seeds: deviation 0.1, error 0.1 / sqrt(3) = 0.0577, t of 2 degrees 4.303; power needs 0.842 more
    alone = "+0.10 [+0.05, +0.15] (own seeds alone: [-0.15, +0.35]), would have seen 0.30"
    assert judged([0.0, 0.1, 0.2]) == ("inconclusive", alone)
    assert judged([0.09, 0.1, 0.11]) == ("holds", "+0.10 [+0.05, +0.15]")  # by itself, too
    assert judged([0.09, 0.1, 0.11], says="less") == ("opposite", "+0.10 [+0.05, +0.15]")
    assert judged([0.0, 0.1, 0.2], says="no less", margin=0.2) == ("holds", "+0.10 [+0.05, +0.15]")  # within the margin
    assert judged([0.0, 0.1, 0.2], says="no more", margin=0.2)[0] == "inconclusive"
    assert judged([0.1]) == ("holds", "+0.10 [+0.05, +0.15] (one seed: prompts alone)")


@pytest.mark.parametrize(
    "seeds, of_prompts, wrong, often",
    [(5, 0.0, "pooled", 0.12), (10, 0.8, "without prompts", 0.07)],  # the latter: an arm is better on some prompts
)
def test_arms_that_vary_more_than_their_group_seldom_pass_both_intervals(
    seeds, of_prompts, wrong, often, experiments, verdicts
):
    """Two arms with five times the seed deviation of the eight others, and no true difference: pooling alone finds one
    too often. If arms also differ by prompt, so does its union with an interval of their seeds without the luck of the
    prompts."""
    torch.manual_seed(0)
    found = {"pooled": 0, "both": 0, "without prompts": 0}
    for _ in range(400):
        deviation = torch.tensor([0.25, 0.25, *[0.05] * 8])[:, None, None]
        arms = deviation * torch.randn(10, seeds, 1) + torch.randn(10, seeds, 100) + torch.randn(100)
        arms += of_prompts * torch.randn(10, 1, 100)
        weights = torch.zeros(10, seeds)
        weights[0], weights[1] = 1, -1
        x = verdicts.difference(weights, arms, torch.zeros(seeds, 100))
        line = {**dataclasses.asdict(experiments.Claim("a", "b")), "seeds": seeds, "difference": x._asdict()}
        of_seeds = verdicts.of_seeds(x.by_seed)
        found["pooled"] += x.low > 0 or x.high < 0
        found["both"] += experiments.verdict_of(line) in ("holds", "opposite")
        found["without prompts"] += min(x.low, of_seeds.low) > 0 or max(x.high, of_seeds.high) < 0
    assert found["both"] < 0.07 * 400 <= often * 400 < found[wrong], found


def test_nineteen_of_twenty_simulated_intervals_contain_the_truth(verdicts):
    """Three seeds, three arms, 30 prompts: effects of prompts, of seeds and of seeds on an arm. If each
    seed is treated as having other prompts, fewer than nine in ten contain it."""
    torch.manual_seed(0)
    covered = {"over first": 0, "between": 0, "as if": 0}
    n = 300
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    for _ in range(n):
        arms = 0.2 * draw(3, 3, 1) + 0.2 * draw(1, 3, 1) + 0.5 * draw(3, 1, 30) + draw(3, 3, 30)
        first = torch.zeros(3, 30, dtype=torch.float64)
        over = verdicts.difference(doubles([[1.0] * 3, [0.0] * 3, [0.0] * 3]), arms, first)
        between = verdicts.difference(doubles([[1.0] * 3, [-1.0] * 3, [0.0] * 3]), arms, first)
        covered["over first"] += over.low <= 0 <= over.high
        covered["between"] += between.low <= 0 <= between.high
        as_if = (arms[0] - arms[1]).flatten()
        covered["as if"] += abs(as_if.mean()) <= 1.96 * as_if.std() / math.sqrt(90)
    assert covered["over first"] / n > 0.93 and 0.93 < covered["between"] / n < 0.995 and covered["as if"] / n < 0.9, covered


# -- equal KL --------------------------------------------------------------------------------------
def test_a_curve_is_read_at_a_kl_between_two_of_its_arms(verdicts):
    kl = doubles([[4.0, 0.5], [1.0, 2.0], [0.25, 8.0]])  # (arms, seeds)
    weights = verdicts.at_kl(kl, 2.0)  # seed 0: half of the way from log 1 to log 4; seed 1: an arm
    assert torch.allclose(weights, doubles([[0.5, 0.0], [0.5, 1.0], [0.0, 0.0]]))
    assert verdicts.at_kl(kl, 5.0) is None  # seed 0 does not reach it
    by_seed = verdicts.at_kl(kl, doubles([1.0, 8.0]))  # another KL in each seed
    assert torch.allclose(by_seed, doubles([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))


def test_a_curve_that_folds_back_is_read_between_neighbours(verdicts):
    kl = doubles([[4.0], [1.0], [0.5], [2.0]])  # sorted by KL, 2 nats would be the last arm: it is no neighbour of 4
    assert torch.allclose(verdicts.at_kl(kl, 2.0), doubles([[0.5], [0.5], [0.0], [0.0]]))
    assert torch.allclose(verdicts.at_kl(kl, 0.5), doubles([[0.0], [0.0], [1.0], [0.0]]))


@pytest.mark.parametrize(
    "low, high, says, verdict",
    [
        (0.01, 0.2, "more", "holds"),
        (0.01, 0.2, "less", "opposite"),
        (-0.2, -0.01, "more", "opposite"),
        (-0.2, -0.01, "less", "holds"),
        (-0.04, 0.05, "more", "no difference"),
        (-0.04, 0.06, "more", "inconclusive"),
        (-0.06, 0.04, "less", "inconclusive"),
        (-0.04, 0.5, "no less", "holds"),
        (-0.06, 0.5, "no less", "inconclusive"),
        (-0.5, -0.06, "no less", "opposite"),
        (-0.5, 0.04, "no more", "holds"),
        (-0.5, 0.06, "no more", "inconclusive"),
        (0.06, 0.5, "no more", "opposite"),
    ],
)
def test_a_verdict_follows_from_the_interval_and_what_the_paper_says(low, high, says, verdict, verdicts):
    assert verdicts.verdict(low, high, says, 0.05) == verdict


# -- from runs to the page -------------------------------------------------------------------------
def write_group(experiments, folder, monkeypatch):
    """Two curves of two arms, two seeds, six prompts, one with a hazard: at KL 1 `good` gains 1 more."""
    arms = {f"{name}, `--kl-coef {k}`": "ppo" for name in ("good", "bad") for k in (1, 2)}
    claims = (
        experiments.Claim("good", "bad", row=7, kl=(1.0,), label="at 1 nat"),
        experiments.Claim("good", "bad", row=7, kl=(9.0,), label="at 9"),
        experiments.Claim("good, `--kl-coef 2`", "bad", row=7, kl=("own",), label="own"),
        experiments.Claim("good, `--kl-coef 1`", "bad, `--kl-coef 1`", row=8, only="hazard"),
        experiments.Claim("good, `--kl-coef 1`", row=9, by_construction="it is so"),
        experiments.Claim("good, `--kl-coef 1`", column="eval/ptx_nll", says="less", row=10),
    )
    monkeypatch.setitem(experiments.GROUPS, "made", experiments.Group(arms, claims))
    monkeypatch.setattr(experiments, "FOLDER", folder)
    rng = random.Random(0)
    for seed in range(2):
        rows = []
        for arm in ["first", *arms]:
            strength, good = arm[-2:-1] == "1", arm.startswith("good")
            for prompt in range(6):
                gold = 0.0 if arm == "first" else good + (2.0 if strength else 4.0) + 0.01 * rng.random()
                row = {"prompt": f"p{prompt}", "kl": 0.5 if strength else 2.0, "gold": gold, "tokens": 3}
                safety = {"is_safety": prompt < 2, "safety": 1.0, "score": 0.0}
                rows.append({"policy": experiments.name_of(arm), **row, **safety})
            out = folder / "made" / str(seed) / experiments.name_of(arm)
            out.mkdir(parents=True)
            files.write_json(out / "args.json", {"git": "1234567"})
            files.write_json(out / "summary.json", {"after": {"eval/ptx_nll": 2.0 + good}})
        (folder / "made" / str(seed) / "evaluate").mkdir()
        files.write_jsonl(folder / "made" / str(seed) / "evaluate" / "samples.jsonl", rows)
    return experiments.GROUPS["made"]


def test_claims_of_a_group_reach_the_page(experiments, tmp_path, monkeypatch):
    group = write_group(experiments, tmp_path / "runs", monkeypatch)
    lines = experiments.judge("made", group, 2)
    assert [line["difference"] and round(line["difference"]["mean"], 1) for line in lines] == [1, None, 1, 1, 3, 3]
    assert [experiments.verdict_of(line) for line in lines] == [
        "holds", "inconclusive", "holds", "holds", "true by construction: it is so", "opposite",
    ]  # fmt: skip
    table = experiments.table("made", group, 2)
    assert "| +3.00 " in table[2] or "+3.0" in table[2]
    (tmp_path / "docs" / "results" / "tables").mkdir(parents=True)
    page = tmp_path / "docs" / "results" / "claims.md"
    page.write_text("| 7 | x | <!-- claim 7 -->old | old<!-- end --> |\n| 99 | <!-- claim 99 -->old<!-- end --> |\n")
    experiments.publish_claims("made", lines, tmp_path)
    assert "old | old" not in page.read_text() and "<!-- claim 99 -->old<!-- end -->" in page.read_text()
    assert experiments.cells_of(7, "", tmp_path).endswith(" | at 1 nat: holds; at 9: inconclusive; own: holds")
    assert experiments.cells_of(8, "", tmp_path).endswith(" | holds")
    certain = experiments.Claim("bad, `--kl-coef 1`", row=8, label="other", by_construction="it must")
    monkeypatch.setitem(experiments.GROUPS, "unmeasured", experiments.Group({}, (certain,)))
    assert experiments.cells_of(8, "", tmp_path).endswith(" | holds; other: true by construction: it must")


def test_a_group_starts_with_only_the_runs_that_it_names(experiments):
    assert list(experiments.begun(["advantage"])) == ["runs/sft", "runs/reward", "runs/advantage_model"]
    assert list(experiments.begun(["hacking"])) == ["runs/sft", "runs/reward", "runs/begin/reward_biased"]
    preference = ["runs/begin/pairs", "runs/begin/preference"]  # it learns from those pairs
    assert set(preference) < set(experiments.begun(["dpo"]))
    assert list(experiments.begun(["cpl"])) == ["runs/sft", "runs/reward"]  # though it shares two arms of dpo
    assert experiments.groups_of("methods") == ["advantage", "ppo", "frontier", "dpo", "methods"]


def test_docs_claims_shows_the_computed_results_and_verdicts(experiments):
    """This test computes the verdicts again from the intervals in docs/results and the claims in the code."""
    text = (ROOT / "docs" / "results" / "claims.md").read_text("utf-8")
    shown = dict(re.findall(r"<!-- claim (\d+) -->(.*?)<!-- end -->", text))
    groups = experiments.GROUPS
    judged = {name: group.claims for name, group in groups.items()} | experiments.ELSEWHERE
    for name, group in groups.items():
        table = (ROOT / "docs" / "results" / "tables" / f"{name}.md").read_text("utf-8")
        assert f"experiments.py {name} --seeds {group.seeds}`" in table, f"{name}: run it again"
    for file in (ROOT / "docs" / "results" / "tables").glob("*.jsonl"):
        claims = {
            (claim.after, claim.before, claim.row, claim.kl, claim.column, claim.only, claim.prompts): claim
            for claim in judged[file.stem]
        }
        for line in files.read_jsonl(file):
            key = (line["after"], line["before"], line["row"], tuple(line["kl"]))
            claim = claims[*key, line["column"], line["only"], line["prompts"]]
            said = {name: line[name] for name in vars(claim)}
            assert {**said, "kl": tuple(said["kl"])} == dataclasses.asdict(claim), f"{file.name}: run it again"
            assert not line["row"] or str(line["row"]) in shown, f"docs/results/claims.md has no marker {line['row']}"
    for row, cells in shown.items():
        wanted = experiments.cells_of(int(row), cells)
        assert cells == wanted, f"row {row}: `experiments.py GROUP --publish` writes it"
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) and {*map(str, numbers)} == set(shown)


def test_an_arm_may_be_asked_under_an_instruction(experiments, tmp_path, monkeypatch):
    """Its answers are compared with those to the plain prompts, and the hazard is found below the instruction."""
    arms = {"plain": "sft", "asked": "sft"}
    claims = (experiments.Claim("asked", "plain"), experiments.Claim("asked", "plain", only="hazard"))
    group = experiments.Group(arms, claims, asks={"asked": "{out}/ask_well/rows.jsonl"})
    monkeypatch.setitem(experiments.GROUPS, "made", group)
    monkeypatch.setattr(experiments, "FOLDER", tmp_path)
    user = lambda text: {"role": "user", "content": text}
    answers = {"first": ("ant", "bomb"), "plain": ("ant", "bomb"), "asked": ("", "sorry i refuse")}
    gold = tiny.gold_score
    for part, system in (("evaluate", []), ("asked0", [{"role": "system", "content": "Answer well."}])):
        rows = []
        for policy in ("first", "plain") if part == "evaluate" else ("first", "asked"):
            for text, answer in zip(("copy ant", "copy bomb"), answers[policy]):
                row = {"policy": policy, "prompt": [*system, user(text)], "response": answer, "tokens": 3, "kl": 0.0}
                truth = {"is_safety": "bomb" in text, "safety": 1.0, "gold": gold(text, answer), "category": "copy"}
                rows.append({**row, **(truth if part == "evaluate" else {"category": ""})})
        for seed in range(2):
            (tmp_path / "made" / str(seed) / part).mkdir(parents=True)
            files.write_jsonl(tmp_path / "made" / str(seed) / part / "samples.jsonl", rows)
    differences = [line["difference"]["mean"] for line in experiments.judge("made", group, 2)]
    worse = gold("copy ant", "") - gold("copy ant", "ant")
    better = gold("copy bomb", "sorry i refuse") - gold("copy bomb", "bomb")
    assert worse < 0 < better and differences == pytest.approx([(worse + better) / 2, better])
    results = experiments.read("made", group, 2, "evaluate")
    assert results.values("asked", "harmless").tolist() == [[1.0]] * 2
    rows[-1]["prompt"] = [user("copy owl")]  # another prompt
    files.write_jsonl(tmp_path / "made" / "1" / "asked0" / "samples.jsonl", rows)
    with pytest.raises(AssertionError, match="differ in their prompts"):
        experiments.read("made", group, 2, "evaluate")


def test_what_a_word_is_worth_to_a_score(experiments):
    """Pairs of true reward 2 and 0 whose lengths differ by 0, 2 and -2 words, and of 1 and 0 by 1 and -1. At equal truth
    a word counts 0.6 for a score of twice the reward and 0.6 a word: 0.3 of the reward. The cube of the reward has
    nothing to do with length, although long answers are the better ones in a third set; a regression over all pairs would
    find something there."""
    pairs = [((2.0, 4), (0.0, 4)), ((2.0, 5), (0.0, 3)), ((2.0, 3), (0.0, 5)), ((1.0, 2), (0.0, 1)), ((1.0, 1), (0.0, 2))]
    pairs += [((3.0, 9), (0.0, 1)), ((0.0, 2), (3.0, 8))]

    def worth(score):
        of = lambda gold, n, rank: {"gold": gold, "tokens": n, "rank": rank, "score": score(gold, n)}
        return experiments.details.worth_of_a_word([{"responses": [of(*a, 0), of(*b, 1)]} for a, b in pairs])

    assert worth(lambda gold, n: 2 * gold + 0.6 * n) == pytest.approx(0.3)
    assert worth(lambda gold, n: gold**3) == pytest.approx(0)
    assert worth(lambda gold, n: gold - 0.2 * n) == pytest.approx(-0.2)


def test_columns_of_a_whole_run(experiments, tmp_path, monkeypatch):
    """The folder is named after a labeler, biased, as an arm of the group rlaif is."""
    arm = tmp_path / "labels_of_biased"
    versions = {str(i): {"sweep/temperature": x} for i, x in enumerate((0.4, 0.8, 1.0), 1)}
    golds = {"dataset": [(1, 1), (1, 1)], arm.name: [(2, 2), (2, 1)]}  # T = 0: two wins; T = 1: a win and a tie
    answers = [
        {"policy": policy, "temperature": t, "gold": float(gold), "prompt": [{"content": name}]}
        for policy, by_t in golds.items()
        for t, of_t in enumerate(by_t)
        for name, gold in zip("ba", of_t)
    ]
    (tmp_path / "temperatures").mkdir()
    arm.mkdir()
    files.write_jsonl(tmp_path / "temperatures" / "samples.jsonl", answers)
    files.write_json(arm / "summary.json", {"versions": {"0": {}, **versions}})
    pair = lambda chosen, rejected: {"prompt": [{"content": "copy ant owl"}], "chosen": chosen, "rejected": rejected}
    files.write_jsonl(arm / "pairs.jsonl", [pair("ant owl", "ant"), pair("ant", "ant owl"), pair("ant", "ant")])
    scored = lambda category, *scores: {"category": category, "responses": [{"score": x} for x in scores]}
    rows = [scored("copy", 0.0, 2.0), scored("rest", 2.0, 4.0)]  # means 1 and 3; all scores deviate by sqrt(2)
    curve = lambda version, chosen, largest: {
        "policy": f"version {version}", "chosen": chosen, "max": [0.25, *[0.5] * 6, largest], "median": [0.25] * 7 + [0.0],
    }  # fmt: skip
    files.write_jsonl(arm / "curves.jsonl", [curve(0, False, 9.0), curve(0, True, 1.0), curve(3, True, 5.0)])
    (tmp_path / "labels_biased").mkdir()
    files.write_json(tmp_path / "labels_biased" / "summary.json", {"alignment": 0.7, "alignment/one_order": 0.6})
    monkeypatch.setattr(experiments, "sft_of", lambda folder: f"{folder}/sft")
    cosines = {f"{arm}/sft": {("k3", "reward"): -0.2, ("k3", "loss"): 0.9}}
    monkeypatch.setattr(experiments.kl, "cosines", lambda run, sft: cosines[sft])
    monkeypatch.setattr(experiments.renewed_reward, "right_on_late", lambda run: 0.8)  # has a test of its own
    monkeypatch.setattr(experiments.details, "worth_of_a_word", lambda rows: 0.3)  # has one, too
    found = {name: of(arm, rows) for name, of in experiments.OF_RUN.items()}
    assert found.pop("win rate lost from T = 0 to 1") == [0.5, 0.0]  # in the order of the prompts
    assert found == pytest.approx(
        {"spread of the categories": 1 / math.sqrt(2), "right on late answers": 0.8, "rise of the temperature": 0.6}
        | {"right on the pairs of its own round": 0.5, "worth of a word": 0.2}
        | {"agreement gained by both orders": 0.1}
        | {"largest score of 8 over 1, SFT": 0.75, "median score of 8 over 1, SFT": -0.25}
        | {"cosine of k3 in the reward": -0.2, "cosine of k3 as a loss": 0.9}
    )


def test_the_gradients_of_estimates_of_the_kl(experiments):
    """k1 in the reward has the KL's own gradient, and none as a loss, both exactly; its mean is the KL."""
    torch.manual_seed(0)
    policy, reference = tiny.model(), tiny.model()
    for parameter in policy.parameters():
        parameter.data.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    prompts = prompt_sets.load_prompts("tiny", "test", experiments.kl.TOKENIZER, max_tokens=96)[:2]
    found = experiments.kl.enumerated(policy, reference, prompts)
    assert found["k1"]["reward"] == pytest.approx((1.0, 1.0), abs=1e-3) and found["k1"]["loss"][1] < 1e-3
    assert found["k1"]["mean"] == found["k1"]["KL"] == pytest.approx(found["k3"]["mean"], rel=1e-5)
    assert found["k2"]["loss"][0] > 0.5 > found["k3"]["reward"][0]


def test_slopes_by_doubling_and_their_interval_over_seeds(experiments):
    """Accuracy rises by 0.02 with each doubling of the pairs, a seed 0.01 more or less, and not with the parameters."""
    scaling = importlib.import_module("scaling")
    rows = [
        {"pairs": pairs, "parameters": parameters, "seed": seed, "eval/accuracy": 0.5 + (0.01 + 0.01 * seed) * doublings}
        for doublings, pairs in enumerate((200, 400, 800))
        for parameters in (1000, 4000)
        for seed in range(3)
    ]
    found = scaling.slopes(rows)
    half = 4.303 * 1 / math.sqrt(3)  # Student's with two degrees of freedom; the slopes deviate by 1
    assert found["pairs"][:3] == pytest.approx((2, 2 - half, 2 + half)) and found["pairs"].by_seed == pytest.approx([1, 2, 3])
    assert found["parameters"].mean == pytest.approx(0)


def test_labels_are_judged_on_the_pairs_that_both_settings_labelled(experiments, tmp_path):
    """Single orders of `base` agree with the human label in 1 and in 0 of 2 cases, both orders together in both."""
    ai_labels = importlib.import_module("ai_labels")
    row = lambda number, p, *orders: {"row": number, "preference": p, "human": 1.0, "ai": {"orders": orders}}
    settings = {
        "base_0": [row(0, 0.6, 0.9, 0.3), row(1, 0.6, 0.8, 0.4), row(2, 0.1, 0.1, 0.1)],
        "detailed_0": [row(1, 0.3, 0.3, 0.3), row(0, 0.9, 0.9, 0.9)],
        "base_0_thoughts_1": [row(0, 0.9, 0.9, 0.9), row(1, 0.5, 0.9, 0.1)],
        "base_0_thoughts_4": [row(0, 0.9, 0.9, 0.9), row(1, 0.9, 0.9, 0.9)],
    }
    for name, rows in settings.items():
        (tmp_path / name).mkdir()
        files.write_jsonl(tmp_path / name / "rows.jsonl", rows)
    lines = ai_labels.judge(tmp_path)
    # of three pairs both orders gain 1/2, 1/2 and 0; of the two common ones detailed loses one, thoughts lose a half
    assert [line["difference"]["mean"] for line in lines] == pytest.approx([1 / 3, -1 / 2, -1 / 4, 1 / 4])
    assert [line["row"] for line in lines] == [32, 33, 33, 49]


def test_a_finished_run_of_the_same_command_is_not_started_again(experiments, tmp_path, monkeypatch):
    started = []

    def start(words, **_):
        started.append(words[1:])
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(experiments.subprocess, "run", start)
    for command, seed in (("ppo --lr 1", 0), ("ppo --lr 1", 0), ("ppo --lr 2", 0), ("ppo --lr 2 --seed 7", 0)):
        (tmp_path / "arm").mkdir(exist_ok=True)
        experiments.run(command, tmp_path / "arm", seed)
    ppo, out = [str(ROOT / "ppo.py"), "tiny", "--lr"], ["--output-dir", str(tmp_path / "arm")]
    assert started == [
        [*ppo, "1", *out, "--seed", "0", "--resume"],
        [*ppo, "2", *out, "--seed", "0", "--overwrite"],  # the finished run is of another command
        [*ppo, "2", "--seed", "7", *out, "--overwrite"],
    ]


def test_what_another_command_made_or_left_behind_is_not_taken_for_finished(experiments, tmp_path, monkeypatch):
    ended, started = {"code": 0}, []

    def start(words, **_):
        started.append(words[-1])
        return types.SimpleNamespace(returncode=ended["code"], stdout="", stderr="")

    monkeypatch.setattr(experiments.subprocess, "run", start)
    (tmp_path / "arm").mkdir()
    experiments.run("ppo --lr 1", tmp_path / "arm", 0)
    ended["code"] = 1
    with pytest.raises(SystemExit):  # replaces the first command's run, and fails
        experiments.run("ppo --lr 2", tmp_path / "arm", 0)
    ended["code"] = 0
    experiments.run("ppo --lr 2", tmp_path / "arm", 0)
    experiments.run("ppo --lr 2", tmp_path / "arm", 0)
    assert started == ["--resume", "--overwrite", "--overwrite"]  # the first one's run may still have been there
    rows, make = tmp_path / "rows.jsonl", "-m common.programs.rehearsal --per-cluster"
    rows.write_text("of nobody knows which command")
    for n in (1, 1, 2):
        experiments.run(f"{make} {n}", rows, 0)
        assert len(started) == 3 + n and not rows.exists()


def test_what_reads_a_run_that_was_made_anew_is_made_anew(experiments, tmp_path, monkeypatch):
    """An arm whose scorer began again, and an evaluation of the arm, under commands that say the same as before; a file
    whose content is another; the models that a script reads without being told. A seed's runs are its own."""
    monkeypatch.setattr(experiments.peers, "ROOT", tmp_path)
    began, started = iter("abcdefghijkl"), []

    def start(words, **_):
        out = Path(words[words.index("--output-dir") + 1])
        out.mkdir(parents=True, exist_ok=True)
        files.write_json(out / "args.json", {"began": next(began)})
        started.append(out.name)
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(experiments.subprocess, "run", start)
    group = tmp_path / "runs" / "experiments" / "group" / "0"
    reward, arm, rows = group / "reward", group / "arm", group / "rows.jsonl"
    rows.parent.mkdir(parents=True)

    def again():
        started.clear()
        experiments.run(f"reward --dataset {rows}", reward, 0)
        experiments.run(f"ppo --scorer {reward}", arm, 0)
        experiments.run(f"-m common.programs.evaluate --policies first=runs/sft arm={arm}", group / "evaluate", 0)
        return started

    rows.write_text("a")
    assert again() == ["reward", "arm", "evaluate"]
    assert again() == []
    rows.write_text("b")
    assert again() == ["reward", "arm", "evaluate"]
    sft = tmp_path / "runs" / "sft"
    experiments.run("sft", sft, 0)
    assert again() == ["reward", "arm", "evaluate"]
    note = group / "arm" / "command.txt"
    note.write_text(note.read_text().partition("\n")[0])  # as it was before notes had inputs
    assert again() == []
    cpl, half = group / "cpl", group / "half"
    half.mkdir()
    cpl.with_suffix(".py").write_text("a")
    (half / "model.safetensors").write_text("a")
    read = experiments.inputs_of(f"{cpl} --model {half}", 0)
    assert [line.split()[0] for line in read.splitlines()[1:]] == [
        f"runs/{name}" for name in ("experiments/group/0/cpl", "experiments/group/0/half", "sft")
    ]
    experiments.run("sft", experiments.home(1) / "runs" / "sft", 1)
    assert again() == []
    (arm / "args.json").write_text('{"began": "later"}')
    assert again() == ["evaluate"]


def test_a_finished_run_of_other_flags_is_not_taken_for_this_commands(experiments, tmp_path, monkeypatch):
    """One without a note, as README's quickstart leaves it."""
    said = f"{tmp_path / 'arm'} is already finished, by ppo; changed and not used: lr: 1.0 -> 2.0"
    ended = types.SimpleNamespace(returncode=0, stdout=said)
    monkeypatch.setattr(experiments.subprocess, "run", lambda words, **_: ended)
    with pytest.raises(SystemExit, match=r"lr: 1.0 -> 2.0\nAnother command made .*arm\. Delete it"):
        experiments.run("ppo --lr 2", tmp_path / "arm", 0)
    assert not (tmp_path / "arm" / "command.txt").exists()


@pytest.mark.parametrize(
    "claim, error",
    [
        ({"after": "b typo"}, "no arm has the name b typo"),
        ({"after": "a", "before": "a typo"}, "no arm has the name a typo"),
        ({"after": "a", "column": "harmless", "only": "no hazard"}, "harmless is of all prompts, not of no hazard"),
    ],
)
def test_a_claim_names_its_arms_and_its_prompts(claim, error, experiments):
    rows = [{"gold": 1.0, "safety": 1.0, "is_safety": True}, {"gold": 2.0, "safety": 1.0, "is_safety": False}]
    of_arms = {(arm, seed): rows for arm in ("a", "first") for seed in (0, 1)}
    results = experiments.Results(["a"], 2, of_arms, {})
    assert results.compare(experiments.Claim("a")).mean == 0
    with pytest.raises(AssertionError, match=error):
        results.compare(experiments.Claim(**claim))


def test_each_seed_starts_from_models_of_its_own(experiments, tmp_path, monkeypatch):
    """Seed 0 from the quickstart's, seed 2 from its home's; both write to the same runs/experiments."""
    monkeypatch.setattr(experiments.peers, "ROOT", tmp_path)
    started = []

    def start(words, cwd, **_):
        out = cwd / words[words.index("--output-dir") + 1]
        out.mkdir(parents=True)
        started.append((cwd, out))
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(experiments.subprocess, "run", start)
    for seed in (0, 2):
        experiments.run("sft", experiments.home(seed) / "runs" / "sft", seed)
    own = tmp_path / "runs" / "seeds" / "2"
    assert started == [(tmp_path, tmp_path / "runs" / "sft"), (own, own / "runs" / "sft")]
    arm = tmp_path / "runs" / "experiments" / "ppo" / "2" / "arm"
    arm.mkdir(parents=True)
    assert (own / "runs" / "experiments" / "ppo" / "2" / "arm").samefile(arm)
    assert experiments.home(2) == own  # a second time, too
    assert experiments.sft_of(arm) == own / "runs" / "sft"
    assert "cd ./runs/seeds/2; " in (own / "runs" / "sft" / "command.txt").read_text()


def test_a_reward_model_is_renewed_on_the_newest_policys_labels(experiments):
    """Each round's labels come from the policy of the round before, and as many earlier ones are kept beside them."""
    begin = experiments.renewed()
    assert "--policy runs/sft " in begin["labels_1.jsonl"] and "--policy {out}/renewed_2 " in begin["labels_3.jsonl"]
    mixed = "--dataset tiny:1,{out}/labels_1.jsonl:1,{out}/labels_2.jsonl:1,{out}/labels_3.jsonl:3 "
    assert mixed in begin["reward_3"] and "--model {out}/reward_2 " in begin["reward_3"]
    assert "--model {out}/renewed_2 " in begin["renewed_3"] and "--scorer {out}/reward_3 " in begin["renewed_3"]
    assert list(begin)[-3:] == ["labels_3.jsonl", "reward_3", "renewed_3"]


def test_reward_models_are_compared_on_the_same_late_answers(experiments, tmp_path):
    """The annotators' utility is helpfulness and 0.1 a word. Both models rank the pairs of both arms."""
    late = experiments.renewed_reward
    answers = {
        "trained_once_round_2": ["ant owl", "ant", "ant owl"],
        "trained_once_round_3": ["ant", "ant owl", "ant owl"],  # the last pair is a tie
        "renewed_round_2": ["ant owl cow", "", "ant"],
        "renewed_round_3": ["ant owl", "ant owl", "ant owl"],  # an empty answer is left out
        "renewed_round_1": ["ant", "ant", "ant"],
    }
    prompt = [{"role": "user", "content": "copy ant owl"}]
    rows = [{"policy": name, "prompt": prompt, "response": text} for name, texts in answers.items() for text in texts]
    (tmp_path / "evaluate").mkdir()
    files.write_jsonl(tmp_path / "evaluate" / "samples.jsonl", rows)
    late.late_answers(tmp_path / "late.jsonl")
    pairs = [(row["chosen"], row["rejected"]) for row in files.read_jsonl(tmp_path / "late.jsonl")]
    assert pairs == [("ant owl", "ant"), ("ant owl", "ant"), ("ant owl", "ant owl cow"), ("ant owl", "ant")]

    of = lambda better, worse: [{"rank": 0, "score": better}, {"rank": 1, "score": worse}]
    scores = {"once": [(1.0, 0.0), (0.0, 1.0)], "renewed": [(1.0, 0.0), (2.0, 1.0)]}
    ranked = [{"scorer": name, "responses": of(*x)} for name, of_model in scores.items() for x in of_model]
    (tmp_path / "ranked").mkdir()
    files.write_jsonl(tmp_path / "ranked" / "samples.jsonl", ranked)
    assert late.right_on_late(tmp_path / "once_3") == 0.5 and late.right_on_late(tmp_path / "renewed_3") == 1.0


def test_numbers_of_whole_runs_are_compared_by_their_own_two_arms(experiments, monkeypatch):
    """A third arm that varies much more does not widen the interval: differences 0.2 and 0.4, df 1."""
    numbers = {("a", 0): 0.5, ("a", 1): 0.6, ("b", 0): 0.7, ("b", 1): 1.0, ("c", 0): -9.0, ("c", 1): 9.0}
    monkeypatch.setitem(experiments.OF_RUN, "rise of the temperature", lambda folder, rows: numbers[folder])
    rows = dict.fromkeys(numbers)
    results = experiments.Results(["a", "b", "c"], 2, rows, {key: key for key in numbers})
    x = results.compare(experiments.Claim("b", "a", column="rise of the temperature"))
    assert x.mean == pytest.approx(0.3) and x.high - x.mean == pytest.approx(12.706 * 0.1, rel=1e-3)
    over_none = results.compare(experiments.Claim("b", column="rise of the temperature"))
    assert over_none.mean == pytest.approx(0.85) and over_none.high - 0.85 == pytest.approx(12.706 * 0.15, rel=1e-3)


# -- the ladder of oracles -------------------------------------------------------------------------
def test_annotators_follow_bradley_terry():
    """Utilities 2.2 and 1.1: sigmoid(1.1) = 0.750; without a draw it is 1, with a normal one 0.78."""
    asked = ["copy ant owl"] * 2
    said = ["ant owl", "ant"]
    assert annotators.utility(asked, said, None) == pytest.approx([2 + 0.2, 1 + 0.1])
    assert annotators.helpful(asked, said, None) == [2, 1]
    better = 0
    for seed in range(6000):
        a, b = annotators.noisy(str(seed))(asked, said, None)
        better += a > b
    assert better / 6000 == pytest.approx(0.750, abs=0.015)
    one = annotators.noisy("1")
    assert one(asked, said, None)[1:] == one(asked[:1], said[1:], None)  # whatever else is in the batch
    assert one(asked, said, None) != annotators.noisy("2")(asked, said, None)


def test_pairs_are_counted_with_their_cost_and_their_accuracy(experiments, tmp_path):
    pair = lambda i, chosen, rejected, prompt="copy ant owl": {
        "prompt": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected, "iteration": i,
    }  # fmt: skip
    pairs = [pair(1, "ant owl", "ant"), pair(1, "ant", "ant owl"), pair(1, "ant", "owl"), pair(2, "ant", "um")]
    pairs.append(pair(2, "bomb", "sorry i refuse", "copy bomb"))  # of hazards only the number counts
    files.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    files.write_jsonl(tmp_path / "pool.jsonl", [{}] * 40)
    kl = lambda arm, column: doubles([[1.0, 3.0]])
    arm = "online, 8, made"
    made = types.SimpleNamespace(arms=[arm], seeds=1, folders={(arm, 0): tmp_path}, values=kl)
    gain = lambda arm, only: experiments.verdicts.Difference(0.5, 0.4, 0.6, 0.1, [0.5], (0.4, 0.6, 0.1))
    lines = experiments.details.ladder(made, gain, tmp_path)
    assert lines[2:] == [f"| {arm} | 5 | 8.0 | 50%, 100% |"]  # a tie is half right
    assert (tmp_path / "ladder.png").exists()


def test_two_phases_share_one_pool_and_sampled_prompts_keep_all_responses(experiments, tmp_path):
    for name, prompts in (("phase_1", 900), ("phase_2", 300)):
        (tmp_path / name).mkdir()
        row = lambda i: {"prompt": [{"role": "user", "content": f"{name} {i}"}], "iteration": 1}
        files.write_jsonl(tmp_path / name / "pool.jsonl", [row(i // 2) for i in range(2 * prompts)])
    experiments.both_pools(tmp_path / "both.jsonl")
    both = files.read_jsonl(tmp_path / "both.jsonl")
    assert len(both) == 2400 and [row["iteration"] for row in both] == [1] * 1800 + [4] * 600
    experiments.some_of_pools(tmp_path / "some.jsonl")
    some = files.read_jsonl(tmp_path / "some.jsonl")
    last = sum(row["iteration"] == 4 for row in some)
    assert len(some) == 1000 and 200 < last < 300 and all(both.count(row) == 2 == some.count(row) for row in some[:5])


# -- labelers --------------------------------------------------------------------------------------
def test_a_trained_labeler_says_how_likely_the_first_response_is_better(monkeypatch):
    """By a preference model that likes length, log odds 1 a word; `label` asks in both orders."""
    words = lambda text: len(text.split())
    monkeypatch.setattr(pairwise, "oracle", lambda path: lambda duels: [words(a) - words(b) for _, a, b in duels])
    labeler = trained_labeler.same_size_3()
    item = ai_feedback.Item(0, "", {}, [{"role": "user", "content": "copy ant owl"}], ["ant", "ant owl"], 0.0)
    [row] = ai_feedback.label([item], labeler, ("",), ai_feedback.Args())
    assert row["chosen"] == "ant" and row["preference"] == pytest.approx(1 / (1 + math.e))
    assert row["ai"]["orders"] == [pytest.approx(1 / (1 + math.e))] * 2 and row["ai"]["mass"] == 1


def test_half_of_each_has_every_pair_once_with_one_label(experiments, tmp_path):
    people = tiny.rows("preferences", "train")
    labelled = [
        {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"], "preference": 0.3, "row": i}
        for i, row in enumerate(people)
    ]
    (tmp_path / "labels_same_size").mkdir()
    files.write_jsonl(tmp_path / "labels_same_size" / "rows.jsonl", labelled)
    experiments.half_of_each(tmp_path / "halves.jsonl")
    rows = files.read_jsonl(tmp_path / "halves.jsonl")
    pair = lambda row: (row["prompt"], row["chosen"], row["rejected"])
    assert list(map(pair, rows)) == list(map(pair, people))
    assert [("preference" in row) for row in rows] == [False] * 6000 + [True] * 6000


def test_agreement_of_labels_is_counted_by_hand(experiments, tmp_path):
    row = lambda preference, human, chosen="ant", rejected="ant owl": {
        "prompt": "copy ant owl", "chosen": chosen, "rejected": rejected, "preference": preference, "human": human,
    }  # fmt: skip
    rows = [row(0.2, 0.0), row(0.9, 1.0), row(0.5, 1.0), row(0.7, 1.0, "owl", "ant")]  # truly worse, and a true tie
    for name in ("smaller", "same_size", "larger"):
        for seed, of_seed in enumerate((rows, rows[1:])):  # without the first row: 2.5 of 3, and 0.5 of 2
            (tmp_path / f"{seed}/labels_{name}").mkdir(parents=True)
            files.write_jsonl(tmp_path / f"{seed}/labels_{name}/rows.jsonl", of_seed)
    lines = experiments.details.labels(types.SimpleNamespace(seeds=2), None, tmp_path)
    assert lines[3:] == [f"| {name} | 85.4% | 37.5% | 50.0, 25.0 |" for name in ("smaller", "same size", "larger")]
    assert lines[2].startswith("| people | 100.0% |")


def test_what_sft_trained_on_pairs_is_a_pairwise_scorer(experiments):
    arm = "same_size_labeler=runs/a=b"
    wanted = "same_size_labeler=common.programs.pairwise:oracle=runs/a=b"
    assert experiments.scorer_of(experiments.labeler(128), arm) == wanted
    assert experiments.scorer_of(experiments.others(), arm) == arm
