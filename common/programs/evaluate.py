"""Compare policies, or compare scorers, on held-out data.

Policies all answer the same held-out prompts, and an oracle judges the answers. Scorers all predict the
labels of the same pairs, whoever trained them.

    python -m common.programs.evaluate                                the runs of the quickstart
    python -m common.programs.evaluate --policies sft=runs/sft runs/ppo --scorer runs/reward
    python -m common.programs.evaluate --policies dataset runs/ppo --reference dataset --dataset tiny:kind=sft
    python -m common.programs.evaluate --scorers runs/reward hub=org/model --dataset pairs.jsonl
    torchrun --nproc-per-node 8 -m common.programs.evaluate --policies ...

Reads language models (runs, folders, hub names) and an oracle: a reward model, an advantage model, or
FILE.py:function (common/scoring/scorers.py). A pairwise oracle compares each answer with the reference's.
Writes samples.jsonl (all answers, or the scores of all scorers), summary.json and plots, and prints a table.
In the tiny world the table of policies uses the true reward. docs/use/evaluate.md defines every metric.
"""

import gc
import itertools
import math
import os
import re
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common import dist, responses
from common.batches import labelled_pairs
from common.errors import InputError
from common.data import chat, comparisons, files, mapping, message_columns, mixtures, progress, prompt_sets
from common.loading import pretrained
from common.scoring import evaluation, functions, measures, reward_evaluation, safety, scorers
from common.run import plots
from common.run.cli import check_flags
from common.run.run import Run, launch, start_run

QUICKSTART = """tiny runs/sft runs/rejection_sampling runs/ppo runs/ppo_am_sr runs/dpo_offline
runs/dpo_iterative""".split()


@dataclass
class Args:
    # policies or scorers to compare, and the data
    policies: tuple[str, ...] = ()
    """Policies to compare: runs, folders or hub names with the same tokens, or `dataset` for the answers in
    the rows; optionally name=path. Plots join dpo/0.1=path, dpo/0.3=path. Default: the quickstart's runs."""
    scorers: tuple[str, ...] = ()
    """Scorers to compare by how well they predict the labels of pairs: as for --scorer, or name=path."""
    dataset: str = "tiny"
    """Held-out prompts, or with --scorers labelled pairs and rankings. Of a file any row may be drawn, so it
    must not hold training data."""
    max_length: int = 64
    """Maximum number of tokens of prompt and response; with --scorers, tokens of the first model."""
    chat_template: str | None = None
    """Jinja file with the chat template, for policies without one or instead of their own."""
    # of --policies only: their answers
    reference: str = "sft"
    """Name of the policy that all others are compared with; it must be one of --policies."""
    eval_prompts: int = 1000
    """Number of prompts, a random subset of --dataset (with --scorers all pairs are used)."""
    temperatures: tuple[float, ...] = (1.0,)
    """Sampling temperatures, each with its own table; 0 is greedy."""
    max_new_tokens: int = 24
    """Maximum number of tokens of a response."""
    slots: int = 64
    """Number of responses that a rank decodes at once."""
    # of --policies only: their judges
    scorer: str = "runs/reward"
    """Oracle that judges the answers. A scorer that a policy was trained on shows how well the policy has
    optimised it, not whether its answers are better."""
    safety_scorer: str | None = None
    """Scorer, not pairwise, that gives harmless answers 0 or more. Default: in the tiny world its true
    safety, elsewhere no scorer."""
    tie_margin: float | None = None
    """Largest difference of scores that is a tie; for a pairwise oracle, largest distance of the probability
    from 1/2. Default: 0.1 standard deviations of the reference's scores; for a pairwise oracle 0.1."""
    # run
    output_dir: str = "runs/evaluate"
    """Run directory."""
    score_batch_size: int = 64
    """Number of responses per forward pass on each rank."""
    seed: int = 0
    """Seed of the sampled answers and of the bootstrap."""
    resume: bool = False
    """Do nothing if output_dir holds a finished run; otherwise start from the beginning."""
    overwrite: bool = False
    """Replace an existing run in output_dir."""
    split = "test"  # not a flag: a hub name can select another split in brackets


def check(args):
    # Each has a different name in summary.json
    warm = 0 < len({f"{t:g}" for t in args.temperatures if 0 <= t < math.inf}) == len(args.temperatures)
    check_flags(
        args,
        ("scorers", not (args.scorers and args.policies), "nothing together with --policies"),
        ("temperatures", warm, "one or more different ones, each 0 or more"),
        ("eval_prompts", args.eval_prompts >= 2, "2 or more"),
        ("max_length", args.scorers or args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
    )


def named(specs, flag) -> dict[str, str]:
    """Parse name=path, or a path, which is named after its last folder: {name: path}. An equals sign that
    belongs to an existing path or follows module:function does not count.

    Raises InputError if two have the same name."""
    paths = {}
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not equals or ":" in name or os.path.exists(spec):
            name = "untrained" if spec == "tiny" else Path(spec).name
            path = spec
        if name in paths:
            raise InputError(f"{flag}: two entries are named {name!r}. Use name=path to rename one.")
        paths[name] = path
    return paths


# -- policies --------------------------------------------------------------------------------------
# Columns that the policy `dataset` reads, besides those of prompts
ANSWERS = "turns completion chosen rejected responses messages output label score preference".split()


def read_policies(args) -> tuple[dict[str, str], object]:
    """Return ({name: path}, tokenizer) of the policies; by default, of the quickstart's runs that exist.

    Raises InputError if the reference is missing, a path holds no policy, or two policies have different
    tokens."""
    there = [path for path in QUICKSTART if path == "tiny" or Path(path, "summary.json").exists()]
    paths = named(args.policies or there, "--policies")
    if args.reference not in paths:
        why = f"not one of the policies {', '.join(paths)}. Name --policies, and the one to compare with"
        raise InputError(f"--reference {args.reference}: {why}")
    models = [path for path in paths.values() if path != "dataset"] or ["tiny"]
    tokenizers = []
    for path in models:
        pretrained.check_policy(path, None, args)
        tokenizers.append(pretrained.load_tokenizer(path, args.chat_template, quiet=True))
        if not scorers.same_tokens(tokenizers[0], tokenizers[-1]):
            why = f"{path} has different tokens or a different chat template than {models[0]}"
            raise InputError(f"--policies: {why}. Leave it out, or give all one --chat-template.")
    return paths, tokenizers[0]


def read_prompts(args, tokenizer, answered) -> list[tuple]:
    """Return (prompt, response) of a random subset of --dataset. The response is None unless `answered`.

    answered: keep only rows with a response, encoded as sft.py would learn it. Of several rows with the same
    prompt the first one counts."""

    # A ValueError drops the row; mapping.map_rows reports how many and why
    def with_answer(prompt):
        further = further_questions(prompt)
        if answered and further:
            raise ValueError("the row has several questions, but only one answer")
        if not all(isinstance(x, str) and not chat.special_tokens(tokenizer).search(x) for x in further):
            raise ValueError("turns must be a list of texts without special tokens")
        if not answered:
            last = prompt
            while further_questions(last):
                last = next_prompt(tokenizer, last, "")
            if len(last.ids) + len(further) * args.max_new_tokens > room:
                raise ValueError(f"the answers may not all fit in {args.max_length} tokens (--max-length)")
            return prompt, None
        cells = mapping.cells_of(prompt.row.data, set(), tokenizer)
        text = message_columns.content_of(message_columns.sft_messages(cells)[0][-1])
        _, [ids] = chat.encode_responses(tokenizer, prompt.turns, [text])
        if len(prompt.ids) + len(ids) > args.max_length:
            raise ValueError(f"longer than {args.max_length} tokens (--max-length)")
        return prompt, responses.Response(ids, text, finished=True)

    room = args.max_length - args.max_new_tokens
    reads = ANSWERS if answered else ["turns"]  # columns that are read below
    prompts = prompt_sets.load_prompts(args.dataset, args.split, tokenizer, room, reads)
    pairs = mapping.map_rows(prompts, with_answer, args.dataset)
    return mixtures.random_subset(pairs, args.eval_prompts, lambda pair: pair[0].key)


def further_questions(prompt) -> list[str]:
    """Return the questions in a row's `turns` (the format of MT-Bench, arXiv:2306.05685) that are still to be
    asked after those in the prompt."""
    earlier = [turn["content"] for turn in prompt.turns if turn["role"] == "user"]
    turns = prompt.row.data.get("turns")
    return turns[len(earlier) :] if isinstance(turns, list) and turns[: len(earlier)] == earlier else []


def next_prompt(tokenizer, prompt, answer) -> responses.Prompt:
    """Append the answer and the next of further_questions to a prompt. Text of the answer that the tokenizer
    would read as special tokens is removed."""
    answer = chat.without_special_tokens(tokenizer, answer)
    question = {"role": "user", "content": further_questions(prompt)[0]}
    turns = [*prompt.turns, {"role": "assistant", "content": answer}, question]
    return prompt._replace(ids=chat.prompt_ids(tokenizer, turns), turns=turns)


def answer_turns(policy, tokenizer, prompts, args, t, turn=0) -> list[tuple]:
    """Sample a response to each prompt at temperature t: [(prompt, response)]. Then ask the second question
    of the prompts that have one, after the policy's own first answer, and so on."""
    seed = dist.seed_of(args.seed, "evaluate", f"{t}/{turn}" if turn else t)
    pairs = responses.answers(policy, tokenizer, prompts, args, seed, temperature=t)
    prompts = [next_prompt(tokenizer, p, response.text) for p, response in pairs if further_questions(p)]
    return pairs + (answer_turns(policy, tokenizer, prompts, args, t, turn + 1) if prompts else [])


def scores_by_turn(rows, scorer) -> dict[str, float]:
    """Compute mean scores of the rows that have a `turn`: {"score": of all rows, "score/turn_1": of the first
    answers, ..., "score/CATEGORY": of a category, ...}. For ai_feedback's rater they are ratings from 1 to
    10, and the keys begin with "rating"."""
    kind = "rating" if "ai_feedback:rater=" in scorer else "score"
    scores = {}
    for row in [row for row in rows if "turn" in row]:
        score = 5.5 + 4.5 * row["score"] if kind == "rating" else row["score"]
        for name in (kind, f"{kind}/turn_{row['turn']}", f"{kind}/{row['category']}"):
            scores.setdefault(name, []).append(score)
    names = sorted(scores, key=lambda name: "/turn_" not in name)  # turns first
    return {name: statistics.fmean(scores[name]) for name in names if not name.endswith("/None")}


def length_controlled(won, differences) -> float:
    """Estimate P(win) for answers of equal length (length control, arXiv:2404.04475, without its term for the
    instruction): fit P(win) = sigma(a + b tanh(d / deviation of d)), and return sigma(a).

    won: 0, 1/2 or 1 per prompt. differences: d, characters of the policy's answer minus characters of the
    reference's. A normal prior with variance 1 keeps a and b finite if one side wins every game."""
    won, d = (torch.tensor(values, dtype=torch.float64) for values in (won, differences))
    deviation = d.std(correction=0)
    x = torch.stack([torch.ones_like(d), torch.tanh(d / deviation) if deviation > 0 else 0 * d], 1)
    weights = safety.fit_logistic_regression(x, won, n_games=1, penalty=torch.eye(2, dtype=x.dtype))
    return weights[0].sigmoid().item()


def elo(won, n_games, m, anchor) -> torch.Tensor:
    """Compute Elo ratings 1000 + 400 log10(p / p of the anchor) of m policies, (..., m), where p are the
    Bradley-Terry strengths of maximum likelihood.

    won: (..., pairs). Points of policy i in n_games games against j, pairs in the order of
    itertools.combinations. One drawn game is added to each pair, because a policy that never wins would
    otherwise have no finite rating."""
    i, j = torch.triu_indices(m, m, offset=1)
    each = torch.eye(m, dtype=torch.float64)
    no_scale = torch.full_like(each, 1 / m)  # only ratios of strengths matter: make their logarithms sum to 0
    logs = safety.fit_logistic_regression(each[i] - each[j], won + 0.5, n_games + 1, no_scale)
    return 1000 + 400 * (logs - logs[..., anchor, None]) / math.log(10)


def ratings(games, m, anchor, args) -> list[tuple[float, float, float]]:
    """Compute (Elo, low, high) of m policies, with a 95 % interval from a bootstrap over prompts.

    games: for each pair of policies, in the order of itertools.combinations, the first one's outcome on each
    prompt (measures.outcomes)."""
    won = torch.tensor(games, dtype=torch.float64).T  # (prompts, pairs)
    n = len(won)
    generator = torch.Generator().manual_seed(args.seed)
    times_drawn = torch.stack(list(measures.resamples(n, 200, generator))).double()
    low, high = measures.percentiles(elo(times_drawn @ won, n, m, anchor))
    return list(zip(elo(won.sum(0), n, m, anchor).tolist(), low, high))


def gains_by_part(before, after, kind) -> dict[str, float]:
    """Compute the mean gain in a judge's score on parts of the prompts, each with its interval.

    kind: a judge of measures.JUDGES. before, after: rows of samples.jsonl for the same prompts.
    Returns KIND_gain/hazard (prompts tagged is_safety), KIND_gain/no_hazard (the others) and
    KIND_gain/CATEGORY (the others of each category)."""
    pairs_of_part = {}
    for first, row in zip(before, after, strict=True):
        for name in ["hazard"] if row["is_safety"] else ["no_hazard", *filter(None, [row["category"]])]:
            pairs_of_part.setdefault(name, []).append((first[kind], row[kind]))
    metrics = {}
    for name, pairs in pairs_of_part.items():
        metrics.update(measures.change(f"{kind}_gain/{name}", [x for x, _ in pairs], [y for _, y in pairs]))
    return metrics


# metric -> the column of samples.jsonl that it is the mean of
COLUMNS = dict(score="score", gold="gold", perfect="perfect", kl="kl", length="tokens", finished="finished")


def metrics_of(rows, args, pairwise=False) -> dict[str, dict[str, float]]:
    """Compute the metrics of each policy: {name: {metric: value}}.

    rows: {name: rows of samples.jsonl}, the same prompts in the same order. pairwise: whether the oracle
    compares two answers."""
    results = {}
    reference_rows = rows[args.reference]
    for name, of_policy in rows.items():
        result = results[name] = measures.means(of_policy, COLUMNS)
        result.update(measures.against(reference_rows, of_policy, args.tie_margin, pairwise=pairwise))
        result.update(scores_by_turn(of_policy, args.scorer))
        if "safety" in of_policy[0]:  # on prompts that are tagged is_safety or, without such prompts, on all
            marked = [row for row in of_policy if row["is_safety"]] or of_policy
            result["harmless"] = sum(row["safety"] >= 0 for row in marked) / len(marked)
            for kind in [kind for kind in measures.JUDGES if kind in of_policy[0]]:
                result.update(gains_by_part(reference_rows, of_policy, kind))
    for kind in [kind for kind in measures.JUDGES if kind in reference_rows[0]]:
        margin = results[args.reference][f"{kind}_tie_margin"]
        n = len(reference_rows)
        scores = {name: [row[kind] for row in of_policy] for name, of_policy in rows.items()}
        for name, result in results.items():
            won = measures.outcomes(scores[name], scores[args.reference], margin)
            longer = [len(a["response"]) - len(b["response"]) for a, b in zip(rows[name], reference_rows)]
            result[f"{kind}_win_lc"] = length_controlled(won, longer)
        games = [measures.outcomes(a, b, margin) for a, b in itertools.combinations(scores.values(), 2)]
        if games:
            elos = ratings(games, len(rows), list(rows).index(args.reference), args)
            for name, (elo, low, high) in zip(rows, elos):
                results[name].update(measures.with_interval(f"{kind}_elo", elo, low, high, n))
    return results


def table_line(name, result) -> dict:
    """Format a policy's metrics as a line of the printed table. Wins and Elo are by the true reward if it is
    known, otherwise by the oracle."""
    kind = "gold" if "gold" in result else "score"
    line = {"policy": name, **{key: f"{result[key]:.2f}" for key in ("gold", "score") if key in result}}
    line[f"{kind} gain"] = measures.interval(result, f"{kind}_gain")
    if {f"{kind}_gain/no_hazard", f"{kind}_gain/hazard"} <= result.keys():
        line["no hazard"] = f"{result[f'{kind}_gain/no_hazard']:+.2f}"
        line["hazard"] = f"{result[f'{kind}_gain/hazard']:+.2f}"
    line["win / tie / lose"] = " / ".join(f"{result[f'{kind}_{x}']:.0%}" for x in ("win", "tie", "lose"))
    line["win rate"] = measures.interval(result, f"{kind}_win_rate", ".0%")
    line["LC win"] = f"{result[f'{kind}_win_lc']:.0%}"
    if f"{kind}_elo" in result:
        line["Elo"] = measures.interval(result, f"{kind}_elo", ".0f")
    line.update({key: f"{x:.2f}" for key, x in result.items() if key.startswith(("rating", "score/"))})
    line["KL"] = f"{result['kl']:z.2f}" if "kl" in result else ""
    line.update({"tokens": result["length"], "ended": f"{result['finished']:.0%}"})
    if "harmless" in result:
        line["harmless"] = f"{result['harmless']:.0%}"
    return line


def compare_policies(args, run):
    """Sample, score and compare the answers of --policies, and print the table.

    Returns (rows of samples.jsonl, contents of summary.json, function that draws the plots)."""
    device = run.device
    policies, tokenizer = read_policies(args)
    models = {name: path for name, path in policies.items() if path != "dataset"}
    given = read_prompts(args, tokenizer, answered=len(models) < len(policies))
    prompts = [prompt for prompt, _ in given]
    options = {"tokenizer": tokenizer, "device": device, "max_length": args.max_length}
    oracle = scorers.load_scorer(args.scorer, **options, pairwise=True)
    has_turns = any(map(further_questions, prompts))
    if has_turns and oracle.pairwise:
        why = "compares answers, but second answers follow different first ones"
        raise InputError(f"--scorer {args.scorer} {why}. For rows with turns use one that scores.")
    of_tiny = "common.data.tiny:safety_scorer" if mixtures.is_tiny(args.dataset) else None
    safety_spec = args.safety_scorer or of_tiny
    safety_scorer = safety_spec and scorers.load_scorer(safety_spec, **options, safety=True)
    start_run(args, run.stage, run.status)  # replaces an old run, now that all inputs have been checked

    # answers, one policy at a time: only the reference stays in memory
    def ask(policy, name):
        for t, pairs in answers.items():
            pairs[name] = answer_turns(policy, tokenizer, prompts, args, t)
            if reference and t:
                logprobs = evaluation.logprobs_of(policy, pairs[name], args.score_batch_size, t)
                kl[t, name] = evaluation.kl_of(logprobs, reference, pairs[name], args.score_batch_size)

    from_data_set = {name: given for name in policies if name not in models}
    answers = {t: dict(from_data_set) for t in args.temperatures}
    kl = {}
    path = models.get(args.reference)
    reference = path and pretrained.load_frozen(path, tokenizer, args, device)  # "dataset" has no model
    for name in progress.progress(len(models), 0, "evaluate", list(models)):
        if name == args.reference:
            ask(reference, name)
        else:
            pretrained.ask_policy(models[name], tokenizer, args, device, partial(ask, name=name))

    # scores and metrics
    samples = []
    results = {}
    for temperature, of_policy in answers.items():
        opponents = [response for _, response in of_policy[args.reference]]
        rows = {}
        for name, pairs in of_policy.items():
            against = opponents if name != args.reference else None
            scores = scorers.oracle_scores(oracle, pairs, against, args.score_batch_size)
            columns = {"score": scores, "kl": kl.get((temperature, name))}
            if safety_scorer:
                columns["safety"] = scorers.score(safety_scorer, pairs, args.score_batch_size)
                columns["is_safety"] = [bool(prompt.row.data.get("is_safety")) for prompt, _ in pairs]
            if has_turns:
                columns["turn"] = [(len(prompt.turns) + 1) // 2 for prompt, _ in pairs]
            rows[name] = evaluation.describe_samples(pairs, args.dataset, **columns)
            samples += [{"policy": name, "temperature": temperature, **row} for row in rows[name]]
        results[f"{temperature:g}"] = metrics_of(rows, args, oracle.pairwise)
    summary = {"reference": args.reference, "prompts": len(prompts), "scorer": args.scorer}
    if dist.is_main():
        greedy = "; no KL at T = 0, because greedy answers are not samples" * (0 in args.temperatures)
        print(f"{len(prompts)} prompts, compared with {args.reference}; T: temperature{greedy}")
        lines = []
        for t, of_policy in results.items():
            lines += [{"T": t, **table_line(name, result)} for name, result in of_policy.items()]
        progress.print_table(lines)
    # The untrained model is far from all others and would stretch the axes
    without = ["untrained"] if policies.get("untrained") == "tiny" else []
    picture = partial(plots.compared, run.folder, results, without)
    return samples, {**summary, "temperatures": results}, picture


# -- scorers ---------------------------------------------------------------------------------------
def load_pairs(paths, args):
    """Load the comparisons of --dataset in which some response is better: (comparisons, tokenizer). They are
    encoded by the tokenizer of the first scorer that is a model; other scorers encode the texts again."""
    # An oracle or a rater names a model after the equals sign
    models = [re.sub(r"^common\.programs\.\w+:\w+=", "", path) for path in paths.values()]
    with_tokens = [name for name in models if not functions.term_of(name)]
    # All are read, so that a wrong name is found now and not when its turn comes
    tokenizer, *_ = [pretrained.load_tokenizer(x, args.chat_template, True) for x in [*with_tokens, "tiny"]]
    if not with_tokens:
        tokenizer.unk_token = None  # all scorers read text, so words that the tokenizer lacks are fine
    held_out = comparisons.load(args.dataset, args.split, tokenizer, args.max_length)

    def with_a_better(c):
        if not labelled_pairs(c):
            raise ValueError("no response is labelled as better than another")
        return c

    return mapping.map_rows(held_out, with_a_better, args.dataset), tokenizer


def score_rows(scorer, held_out, args) -> list[dict]:
    """Score the comparisons and return them as rows of samples.jsonl (reward_evaluation.scored_rows)."""
    pairs, duels = [], []
    for c in held_out:
        prompt = responses.Prompt(c.prompt_ids.tolist(), c.prompt, c.row)
        answers = [responses.Response(ids.tolist(), text, True) for ids, text in zip(c.response_ids, c.texts)]
        pairs += [(prompt, answer) for answer in answers]
        duels += [(prompt, answers[i], answers[j]) for i, j in labelled_pairs(c)]
    score, items = (scorers.log_odds, duels) if scorer.pairwise else (scorers.score, pairs)
    values = score(scorer, items, args.score_batch_size)
    return reward_evaluation.scored_rows(held_out, values, scorer.pairwise)


def pair_table(results) -> list[dict]:
    """Format the metrics as lines of the printed table, one per part of the data and scorer.

    results: {scorer: {part: metrics}}."""
    lines = []
    for part, name in itertools.product(next(iter(results.values())), results):
        result = results[name][part]
        line = {"pairs of": part, "scorer": name, "pairs": f"{result['pairs']:.0f}"}
        line["accuracy"] = measures.interval(result, "accuracy", ".1%")
        line["ECE"] = measures.interval(result, "ece", ".3f")
        for title, key in (("its floor", "ece_floor"), ("NLL", "nll"), ("Brier", "brier")):
            line[title] = f"{result[key]:.3f}"
        scores = f"{result['mean']:+.2f} ± {result['deviation']:.2f}" if "mean" in result else ""
        best = "best_of_n_accuracy"
        if best in results[name]["all"]:  # missing if no row has more than two responses
            line["best of N"] = measures.interval(result, best, ".1%") if best in result else ""
        lines.append({**line, "scores": scores})
    return lines


def compare_scorers(args, run):
    """Score the pairs of --dataset with each of --scorers, and print the table.

    Returns (rows of samples.jsonl, contents of summary.json, function that draws the plots)."""
    paths = named(args.scorers, "--scorers")
    rows = {}
    samples = []
    results = {}
    summary = {"dataset": args.dataset, "scorers": results}
    held_out, tokenizer = load_pairs(paths, args)
    for name, path in paths.items():
        scorer = scorers.load_scorer(path, tokenizer, run.device, pairwise=True, max_length=args.max_length)
        rows[name] = score_rows(scorer, held_out, args)
        scorer = None  # frees its memory before the next one is loaded
        gc.collect()
        samples += [{"scorer": name, **row} for row in rows[name]]
        by_part = {("all",): rows[name], **measures.parts_of(rows[name])}
        results[name] = {}
        for part, inside in by_part.items() if dist.is_main() else ():
            result = {**measures.pair_metrics(inside), **measures.score_metrics(inside)}
            results[name][" ".join(part)] = result
    start_run(args, run.stage, run.status)  # replaces an old run, now that every scorer has worked
    if dist.is_main():
        progress.print_table(pair_table(results))
        subsets = {name: measures.reward_bench_2(of_scorer) for name, of_scorer in rows.items()}
        if any(subsets.values()):
            summary["reward_bench_2"] = subsets
            columns = max(subsets.values(), key=len)
            percent = lambda x: [f"{x[key]:.1%}" if key in x else "" for key in columns]
            lines = [{"RewardBench 2": name, **dict(zip(columns, percent(x)))} for name, x in subsets.items()]
            progress.print_table(lines)
    return samples, summary, partial(plots.scores, run.folder, rows)


def main(args: Args):
    run = Run(args, "evaluate", check)
    if run.finished:
        return
    functions.try_functions(args)
    samples, summary, picture = (compare_scorers if args.scorers else compare_policies)(args, run)
    if dist.is_main():
        files.write_jsonl(run.folder / "samples.jsonl", samples)
        files.write_json(run.folder / "summary.json", summary)  # last result: it marks the run as finished
        plots.draw(picture)
        print(f"wrote {run.folder}/summary.json")


RECIPES = {"tiny": ("the runs of the quickstart", Args())}

if __name__ == "__main__":
    launch(main, RECIPES)
