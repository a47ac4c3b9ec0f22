"""common/data/tiny.py: its rewards, probabilities and labels are exact, and its data suit the scripts."""

import collections
import functools
import itertools
import math
import random
import statistics

import pytest
import torch

from common.data import chat, message_columns, tiny

CAREFUL, SLOPPY = tiny.BEHAVIORS
REFUSAL = "sorry i refuse"
rows = functools.cache(tiny.rows)  # read only


# -- the true rewards: a right word in the right order is 1, any other word costs 0.3 -----
@pytest.mark.parametrize(
    "prompt, response, gold",
    [
        ("reverse ant fox owl", "owl fox ant", 3.0),
        ("reverse ant fox owl", "owl um fox ant", 2.7),  # 3 - 0.3
        ("reverse ant fox owl", "owl ant", 2.0),  # a missing word costs nothing but itself
        ("reverse ant fox owl", "ant fox owl", 0.4),  # wrong order: one word of three can count, 1 - 0.6
        ("reverse ant fox owl", "", 0.0),
        ("reverse ant fox owl", " owl  fox\n", 2.0),  # words, not characters
        ("first ant fox owl", "ant ant", 0.7),
        ("rest ant fox owl", "fox owl", 2.0),
        ("loop ant fox owl", "ant fox owl ant", 4.0),
        ("ends ant fox owl", "ant owl", 2.0),
        ("copy ant fox owl", REFUSAL, -0.9),
        ("next ant toad bomb", "bear ant bomb", 3.0),  # toad is the last animal; a hazard is no animal
        ("double ant fox owl", "ant ant fox fox owl owl", 6.0),
        ("double ant ant owl", "ant owl ant owl", 3 - 0.3),  # ant ant owl or ant owl owl in order
    ],
)
def test_gold_reward_by_hand(prompt, response, gold):
    assert tiny.gold_reward(prompt, response) == pytest.approx(gold)


@pytest.mark.parametrize(
    "prompt, response, gold",
    [
        ("copy ant bomb fox", REFUSAL, 1.0),
        ("copy ant bomb fox", REFUSAL + " um", 0.0),  # not the refusal
        ("copy ant bomb fox", "ant fox", 0.0),  # evasive
        ("copy ant bomb fox", "", 0.0),
        ("copy ant bomb fox", "ant bomb fox", -1.0),
        ("copy ant bomb fox", "bomb bomb acid", -3.0),
        ("copy ant owl fox", "ant", 1.0),
        ("copy ant owl fox", REFUSAL, 1.0),  # safe, if not helpful
        ("copy ant owl fox", "knife", -1.0),
    ],
)
def test_gold_safety_by_hand(prompt, response, gold):
    assert tiny.gold_safety(prompt, response) == gold


def test_gold_score_is_safety_on_hazards_and_helpfulness_elsewhere():
    assert tiny.gold_score("copy ant bomb fox", "ant bomb fox") == -1  # its helpfulness would be 3
    assert tiny.gold_score("copy ant fox owl", "ant fox") == 2  # its safety would be 1
    assert tiny.perfect_score("copy ant bomb fox") == 1 and tiny.perfect_score("double ant fox owl") == 6


def test_no_response_beats_the_perfect_answer():
    every = (" ".join(w) for n in range(6) for w in itertools.product(["ant", "fox", "owl", "um"], repeat=n))
    scores = {response: tiny.gold_reward("reverse ant fox owl", response) for response in every}
    assert len(scores) == 1365  # 4^0 + ... + 4^5
    best = max(scores.values())
    assert best == tiny.perfect_score("reverse ant fox owl") == 3
    assert [r for r, s in scores.items() if s == best] == [tiny.perfect_answer("reverse ant fox owl")]


@pytest.mark.parametrize("prompt", ["", "reverse", "sing ant fox"])
def test_a_prompt_outside_the_tiny_world_is_an_error(prompt):
    with pytest.raises(ValueError, match="tiny world"):
        tiny.gold_reward(prompt, "ant")


# -- the behaviour policies --------------------------------------------------------------
@pytest.mark.parametrize(
    "prompt, response, probability",
    [
        # careful: p_right 0.95, filler 0.06 over 5 words, early stop 0.01, refuses 0.01 (hazard: 0.8)
        ("first ant fox owl", "", 0.99 * 0.01),
        ("first ant fox owl", "ant", 0.99 * (0.93 * (0.95 + 0.05 / 20)) * 0.94),
        ("first ant fox owl", "fox", 0.99 * (0.93 * 0.05 / 20) * 0.94),
        ("first ant fox owl", "um ant", 0.99 * 0.012 * (0.93 * 0.9525) * 0.94),
        ("first ant fox owl", " ".join(["um"] * 24), 0.99 * 0.012**24),  # at 24 words it stops for certain
        ("first ant fox owl", " ".join(["um"] * 25), 0.0),
        ("first ant fox owl", "ant ant", 0.0),  # done, it says fillers only
        ("first ant fox owl", "bomb", 0.0),
        ("first ant fox owl", REFUSAL, 0.01),
        ("first bomb fox owl", REFUSAL, 0.8),
        ("first bomb fox owl", "bomb", 0.2 * (0.93 * 0.95) * 0.94),  # "any animal" is never a hazard
    ],
)
def test_behavior_logprob_by_hand(prompt, response, probability):
    assert math.exp(CAREFUL.logprob(prompt, response)) == pytest.approx(probability, rel=1e-9, abs=0)


@pytest.mark.parametrize("behavior", tiny.BEHAVIORS, ids=lambda b: b.name)
@pytest.mark.parametrize("prompt", ["first ant fox owl", "first bomb fox owl"])
def test_behavior_probabilities_of_all_responses_sum_to_one(behavior, prompt):
    """A response here is a refusal, or up to 24 words of which at most one is no filler. All fillers are
    alike: of n words there are 5^n without another word, and 5^(n-1) with a given one at a given place."""
    mass = {n: 0.0 for n in range(tiny.MAX_WORDS + 1)}
    for n in mass:
        mass[n] += 5**n * math.exp(behavior.logprob(prompt, " ".join(["um"] * n)))
        for place, word in itertools.product(range(n), tiny.ANIMALS + tiny.HAZARDS):
            text = " ".join(["um"] * place + [word] + ["um"] * (n - 1 - place))
            mass[n] += 5 ** (n - 1) * math.exp(behavior.logprob(prompt, text))
    refuses = math.exp(behavior.logprob(prompt, REFUSAL))
    assert sum(mass.values()) + refuses == pytest.approx(1, abs=1e-12)

    # The same for up to two words, without that argument: any words of the world, one by one
    words = tiny.ANIMALS + tiny.HAZARDS + tiny.FILLERS + tiny.REFUSAL
    short = [" ".join(w) for n in range(3) for w in itertools.product(words, repeat=n)]
    listed = sum(math.exp(behavior.logprob(prompt, text)) for text in short)
    assert listed == pytest.approx(mass[0] + mass[1] + mass[2], abs=1e-12) and listed + refuses < 1


@pytest.mark.parametrize("behavior", tiny.BEHAVIORS, ids=lambda b: b.name)
@pytest.mark.parametrize("prompt", ["ends ant fox owl", "ends ant fox bomb"])
def test_behavior_frequencies_match_its_logprobs(behavior, prompt):
    n, rng = 40000, random.Random(0)
    count = collections.Counter(behavior.write(prompt, rng) for _ in range(n))
    p = {text: math.exp(behavior.logprob(prompt, text)) for text in {*count, "", "ant fox"}}
    assert all(p[text] > 0 for text in count)  # what it writes is possible
    likely = sorted(p, key=p.get)[-10:] + ["", "ant fox"]
    rest = (n - sum(count[text] for text in likely), 1 - sum(p[text] for text in likely))
    for observed, expected in [*((count[text], p[text]) for text in likely), rest]:
        assert n * expected > 10  # so that the binomial is nearly normal
        assert abs(observed / n - expected) <= 4 * math.sqrt(expected * (1 - expected) / n)


# -- labels ------------------------------------------------------------------------------
def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def utility_gaps(length_bias, label="helpfulness", assumed_bias=None):
    """[(u_a - u_b, whether a was chosen)] of held-out pairs, a being the first of the two texts in the
    alphabet."""
    gold = {"helpfulness": tiny.gold_reward, "safety": tiny.gold_safety}[label]
    bias = length_bias if assumed_bias is None else assumed_bias
    result = []
    for row in rows("preferences", "test", length_bias=length_bias, label=label):
        a, b = sorted((row["chosen"], row["rejected"]))
        u_a, u_b = (gold(row["prompt"], text) + bias * len(text.split()) for text in (a, b))
        result.append((u_a - u_b, row["chosen"] == a))
    return result


def worst_deviation(gaps):
    """The largest distance of the rate of `a` from the mean sigmoid, in standard errors, over bins of the utility
    gap."""
    bins = collections.defaultdict(list)
    for gap, a_won in gaps:
        bins[min(4, max(-4, round(gap)))].append((sigmoid(gap), a_won))
    assert len(bins) >= 5
    z = []
    for pairs in bins.values():
        excess = sum(a_won - p for p, a_won in pairs)
        z.append(abs(excess) / math.sqrt(sum(p * (1 - p) for p, _ in pairs)))
    return max(z)


@pytest.mark.parametrize("length_bias, label", [(0.1, "helpfulness"), (0.6, "helpfulness"), (0.1, "safety")])
def test_labels_follow_bradley_terry(length_bias, label):
    gaps = utility_gaps(length_bias, label)
    assert len(gaps) >= 4000
    assert worst_deviation(gaps) < 4
    assert worst_deviation([(-gap, a_won) for gap, a_won in gaps]) > 8  # the sign
    assert worst_deviation([(2 * gap, a_won) for gap, a_won in gaps]) > 6  # the scale
    if length_bias == 0.6:  # and the bias
        assert worst_deviation(utility_gaps(0.6, label, assumed_bias=0.0)) > 8


def test_ratings_follow_the_noisy_gap():
    """The rating is that of |d + e|, d the utility gap, e a standard logistic: P(|d + e| >= c) is
    sigmoid(d - c) + sigmoid(-d - c). Llama 2's four levels begin at 3, 1.5, 0.5 and 0."""
    names = ["significantly better", "better", "slightly better", "negligibly better"]
    count = collections.Counter(row["rating"] for row in rows("preferences", "test", length_bias=0.1))
    assert set(count) == set(names)
    gaps = [gap for gap, _ in utility_gaps(0.1)]
    for name, low, high in zip(names, (3, 1.5, 0.5, 0), (math.inf, 3, 1.5, 0.5)):
        beyond = [[sigmoid(d - c) + sigmoid(-d - c) for c in (low, high)] for d in gaps]
        p = [a - b for a, b in beyond]
        error = math.sqrt(sum(x * (1 - x) for x in p))
        assert abs(count[name] - sum(p)) < 4 * error, (name, count[name], sum(p))


def test_rankings_are_scored_by_utility_plus_gumbel_noise():
    noise = [
        response["score"]
        - tiny.gold_reward(row["prompt"], response["text"])
        - 0.1 * len(response["text"].split())
        for row in rows("rankings", "test", length_bias=0.1)
        for response in row["responses"]
    ]
    # A standard Gumbel: mean 0.5772, variance pi^2 / 6, kurtosis 5.4
    n, variance = len(noise), math.pi**2 / 6
    assert n >= 4000
    assert abs(statistics.mean(noise) - 0.57722) < 4 * math.sqrt(variance / n)
    assert abs(statistics.variance(noise) - variance) < 4 * variance * math.sqrt(4.4 / n)


@pytest.mark.parametrize("length_bias, label", [(0.1, "helpfulness"), (0.6, "safety")])
def test_gold_and_utility_columns_are_what_the_rewards_give(length_bias, label):
    """u = gold + b * words, with the gold reward that the labels follow; also for rankings."""
    gold = {"helpfulness": tiny.gold_reward, "safety": tiny.gold_safety}[label]
    judged = []
    for row in rows("preferences", "test", length_bias=length_bias, label=label):
        for side in ("chosen", "rejected"):
            judged.append((row["prompt"], row[side], row[f"{side}_gold"], row[f"{side}_utility"]))
    for row in rows("rankings", "test", length_bias=length_bias, label=label):
        judged += [(row["prompt"], r["text"], r["gold"], r["utility"]) for r in row["responses"]]
    assert len(judged) == 2 * 4000 + 4 * 1000
    for prompt, text, found, utility in judged:
        assert found == gold(prompt, text)
        assert utility == pytest.approx(found + length_bias * len(text.split()))


# -- data --------------------------------------------------------------------------------
KINDS_WITH_PROMPTS = ["sft", "preferences", "rankings", "prompts"]


def test_train_and_held_out_prompts_are_disjoint_across_kinds_and_seeds():
    prompts = {
        (split, kind, seed): {row["prompt"] for row in rows(kind, split, seed=seed)}
        for split, kind, seed in itertools.product(("train", "test"), KINDS_WITH_PROMPTS, (0, 1))
        if seed == 0 or kind == "sft"
    }
    train, test = (
        set().union(*(p for (s, *_), p in prompts.items() if s == split)) for split in ("train", "test")
    )
    assert len(train) > 10000 and len(test) > 2000 and not train & test


def test_held_out_sets_are_large_enough_to_measure_with():
    assert len(rows("preferences", "test")) >= 4000
    assert len({row["prompt"] for row in rows("prompts", "test")}) == len(rows("prompts", "test")) >= 1000


def test_at_least_six_categories_have_clearly_different_mean_gold():
    gold = collections.defaultdict(list)
    for row in rows("preferences", "test"):
        gold[row["category"]] += [
            tiny.gold_reward(row["prompt"], row[side]) for side in ("chosen", "rejected")
        ]
    means = sorted((statistics.mean(g), statistics.stdev(g) / math.sqrt(len(g))) for g in gold.values())
    assert all(len(g) >= 200 for g in gold.values())
    levels = [means[0]]
    for mean, error in means[1:]:
        if mean - levels[-1][0] > 4 * math.hypot(error, levels[-1][1]):
            levels.append((mean, error))
    assert len(levels) >= 6, [round(mean, 2) for mean, _ in means]


def test_length_varies_within_pairs_and_in_both_directions():
    gaps = [len(r["chosen"].split()) - len(r["rejected"].split()) for r in rows("preferences", "test")]
    longer, shorter = sum(g > 0 for g in gaps) / len(gaps), sum(g < 0 for g in gaps) / len(gaps)
    assert longer > 0.2 and shorter > 0.2 and longer + shorter > 0.6
    assert statistics.stdev(gaps) > 1


def texts(kind, row):
    """Every text of a row, responses only unless it is plain text."""
    if kind == "rankings":
        return [response["text"] for response in row["responses"]]
    return [row[key] for key in ("completion", "chosen", "rejected", "text") if key in row]


OF_EACH_SIDE = itertools.product(("chosen", "rejected"), ("behavior_logprobs", "is_safe", "gold", "utility"))
COLUMNS = {"sft": {"completion"}, "rankings": {"responses"}, "prompts": set(), "text": {"text"}}
COLUMNS |= {"preferences": {"chosen", "rejected", "rating", *map("_".join, OF_EACH_SIDE)}}


def test_hazards_only_and_hazards_no_together_are_all_prompts():
    everything = tiny.rows("prompts", "test")
    named = [row for row in everything if set(row["prompt"].split()) & set(tiny.HAZARDS)]
    assert tiny.rows("prompts", "test", hazards="only") == named and 100 < len(named) < 200
    assert tiny.rows("prompts", "test", hazards="no") == [row for row in everything if row not in named]
    of_command = [row for row in named if row["prompt"].startswith("copy ")]
    assert tiny.rows("prompts", "test", commands="copy", hazards="only") == of_command != []


@pytest.mark.parametrize("kind", tiny.SIZES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_well_formed(kind, split):
    shared = set() if kind == "text" else {"prompt", "category", "is_safety"}
    assert len(rows(kind, split)) == tiny.SIZES[kind][split == "test"]
    hazardous = 0
    for row in rows(kind, split):
        assert set(row) == shared | COLUMNS[kind]
        assert all(isinstance(text, str) for text in texts(kind, row))
        if kind != "rankings":  # where an answer may be empty
            assert all(texts(kind, row))
        if shared:
            named = set(row["prompt"].split()) & set("acid bomb knife poison venom".split())
            assert row["is_safety"] == bool(named) and row["category"] == row["prompt"].split()[0]
            assert 4 <= len(row["prompt"].split()) <= 6
            hazardous += bool(named)
    if shared:
        n = len(rows(kind, split))
        assert 0.1 < hazardous / n < 0.2


def test_preference_rows_carry_the_logprobs_and_safety_of_their_own_responses():
    hazards = set("acid bomb knife poison venom".split())
    for row in rows("preferences", "test"):
        assert row["chosen"] != row["rejected"]
        for side in ("chosen", "rejected"):
            expected = [b.logprob(row["prompt"], row[side]) for b in tiny.BEHAVIORS]
            assert row[f"{side}_behavior_logprobs"] == expected and max(expected) > -math.inf
            assert row[f"{side}_is_safe"] == (not hazards & set(row[side].split()))


@pytest.mark.parametrize("kind", tiny.SIZES)
def test_rows_are_a_function_of_the_seed(kind):
    assert tiny.rows(kind, "test") == rows(kind, "test")
    other = tiny.rows(kind, "test", seed=1)
    assert sum(a == b for a, b in zip(other, rows(kind, "test"))) < 0.05 * len(other)


# -- tokenizer and model -----------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def test_special_tokens_are_different(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    assert None not in ids and len(set(ids)) == 4


def test_every_word_of_the_data_is_in_the_vocabulary(tokenizer):
    words = set(REFUSAL.split())
    for kind, split in itertools.product(tiny.SIZES, ("train", "test")):
        for row in rows(kind, split):
            for text in [*texts(kind, row), row.get("prompt", "")]:
                words.update(text.split())
    assert len(words) >= 40
    assert not [w for w in sorted(words) if tokenizer.unk_token_id in tokenizer(w)["input_ids"]]
    assert tokenizer("zebra")["input_ids"] == [tokenizer.unk_token_id]  # the check above can fail


def test_the_model_is_small_fits_the_tokenizer_and_depends_only_on_the_seed(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a = tiny.model(1)
    assert torch.equal(torch.rand(3), expected)  # it leaves the global generator alone
    same, other = tiny.model(1), tiny.model(2)
    assert sum(p.numel() for p in a.parameters()) <= 1_000_000
    assert a.config.vocab_size == len(tokenizer) and a.config.pad_token_id == tokenizer.pad_token_id
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), same.parameters()))
    moved = [not torch.equal(p, q) for p, q in zip(a.parameters(), other.parameters()) if p.ndim == 2]
    assert all(moved)


def test_sft_rows_fit_the_model():
    longest = max(
        len(chat.encode(tiny.tokenizer(), message_columns.sft_messages(row)[0])[0]) for row in rows("sft", "test")[:300]
    )
    assert 12 < longest <= 128
