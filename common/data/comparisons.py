"""Turn rows of pairs and rankings into comparisons (batches.Comparison).

`load` reads rows in the preference and ranking formats, filters them, and prints the reasons for the rows
that it drops.
"""

import collections
import contextlib
import functools
import itertools
import math
import zlib

import torch

from common import dist, models
from common.batches import Comparison, labelled_pairs, of_each_comparison, printable, turns_key
from common.errors import InputError
from common.data import chat, formats, mapping, message_columns, mixtures, progress, splits

RATINGS = ("significantly better", "better", "slightly better", "negligibly better")  # Llama 2's four levels
MARGINS = {  # Llama 2, table 27: the margin m by rating
    "small": dict(zip(RATINGS, (1, 2 / 3, 1 / 3, 0))),
    "large": dict(zip(RATINGS, (3, 2, 1, 0))),
}

OF_EACH = ("gold", "utility", "is_safe", "behavior_logprobs")  # columns with a value for each response


# -- rows -> comparisons ---------------------------------------------------------------------------
def load(spec, split, tokenizer, max_length, min_score_gap=0.0, max_per_prompt=None) -> list[Comparison]:
    """Load the comparisons of a data set, filtered, and the same on every rank.

    The number of dropped rows and the reasons are printed. Raises InputError if no comparison is left.

    spec, split: as in mixtures.load_rows; of `tiny`, the pairs are loaded.
    max_length: limit in tokens of a prompt plus one response. A longer response is left out, never cut,
      because a response is scored at its end-of-sequence token.
    min_score_gap: the least difference between the scores of a pair. It applies to the pairs of a ranking
      too.
    max_per_prompt: the number of rows of one prompt that are used, the first ones; None: all."""
    per_prompt = collections.Counter()
    rows = joined(mixtures.load_rows(spec, "preferences", split), tokenizer)
    labelled = functools.partial(_labelled, min_score_gap=min_score_gap)
    labelled = mapping.read(rows, labelled, spec, "comparisons", tokenizer)
    # Tokenising is shared between the ranks
    tokens = mapping.map_over_ranks(labelled, lambda c: chat.encode_responses(tokenizer, c.prompt, c.texts))

    def comparison(row, given):
        c, (prompt_ids, response_ids) = given
        chat.check_known(tokenizer, prompt_ids)
        c = _with_ids(c._replace(row=row), prompt_ids, response_ids, max_length)
        if max_per_prompt and per_prompt[c.key] >= max_per_prompt:
            raise ValueError(f"the prompt has {max_per_prompt} rows already (--max-pairs-per-prompt)")
        per_prompt[c.key] += 1
        return c

    loaded = mapping.map_rows(rows, comparison, spec, tokens)
    pairs = [c for c in loaded if len(c.texts) == 2]
    texts_of = lambda c: [text.strip() for text in c.texts]
    labels = {(c.key, texts_of(c)[i], texts_of(c)[j]) for c in pairs for i, j in labelled_pairs(c)}

    def unopposed(c):  # if two rows label the same responses in opposite ways, both are dropped
        texts = texts_of(c)
        if labels >= {(c.key, *texts), (c.key, *texts[::-1])}:
            raise ValueError("another row has the opposite label for the same responses")
        return c

    kept = mapping.map_rows(loaded, unopposed, spec)
    rankings = [c for c in kept if c.row.data.get("responses")]
    n_left_out = sum(len(c.row.data["responses"]) - len(c.indices) for c in rankings)
    if n_left_out and dist.is_main():
        why = f"longer than {max_length} tokens, or the same as another response"
        print(f"{spec}: left out {n_left_out:,} responses of rankings: {why}")
    return kept


def joined(rows, tokenizer=None):
    """Join rows of single completions into pairs by their `label` (KTO) or `score`.

    Every two completions of a prompt with different values make a pair, and the one with the higher value
    is chosen; scores only within a data set, because each has its own unit. Rows of other kinds are kept
    unchanged, and so are the completions of a prompt that has no pair."""
    kept = []
    single = collections.defaultdict(list)
    for row in rows:
        column = "score" if row.data.get("label") is None else "label"
        paths = {*row.read, column, "chosen_score", "rejected_score"}  # the last two are written below
        cells = mapping.cells_of({**row.data, "label": None}, paths, tokenizer)
        try:
            if "chosen" in cells or "responses" in cells:
                raise ValueError("it is a pair or a ranking already")
            number = formats.number(row.data.get(column))
            *prompt, last = message_columns.sft_messages(cells)[0]
        except ValueError:  # its reader will raise the same error and report it
            kept.append(row)
        else:
            unit = row.where.rpartition(":")[0] * (column == "score")  # every data set has its own
            single[column, unit, turns_key(prompt)].append((row._replace(read=paths), prompt, last, number))
    for (column, *_), rows in single.items():
        pairs = [(a, b) for a, b in itertools.product(rows, rows) if a[-1] > b[-1]]
        for (row, prompt, chosen, score), (_, _, rejected, other) in pairs:
            sides = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}
            # The prompt already has the turns of these columns
            sides.update(dict.fromkeys((*message_columns.DIALOGUES, "history", "system")))
            if column == "score":
                sides.update(chosen_score=score, rejected_score=other)
            kept.append(row._replace(data={**row.data, **sides}))
        kept += [] if pairs else [row for row, *_ in rows]
    return kept


def load_split(args, tokenizer) -> tuple[list[Comparison], list[Comparison]]:
    """Load the training and the held-out comparisons of a command; print a table of both."""
    limits = {"min_score_gap": args.min_score_gap, "max_per_prompt": args.max_pairs_per_prompt}
    load_one = functools.partial(load, tokenizer=tokenizer, max_length=args.max_length, **limits)
    train, held_out = splits.train_and_held_out(args.dataset, args.eval_dataset, load_one, tokenizer)
    if args.balance_categories and not any(c.category for c in train):
        raise InputError(f"--balance-categories: {args.dataset} has no column category (see --columns)")
    unscored = sum(not c.label_scores for c in train) if args.min_score_gap else 0
    if unscored and unscored == len(train):
        raise InputError(f"--min-score-gap: {args.dataset} has no scores of its responses (see --columns)")
    if unscored:
        n = f"{unscored:,} of {len(train):,}"
        progress.note(f"--min-score-gap: {n} comparisons have no scores and are kept")
    progress.print_table(statistics(train, held_out))
    return train, held_out


def load_offline(args, tokenizer, held_out) -> tuple[list[Comparison], list[Comparison]]:
    """Load the (training, held-out) pairs of --offline-data; ([], []) without the flag.

    A ranking becomes the pair of its best and its worst response. Training pairs do not share a prompt
    with `held_out`. At most --offline-pairs of them are used, and at most 500 held-out pairs."""
    if not args.offline_data:
        return [], []

    def load_one(spec, split):
        return [best_and_worst(c) for c in load(spec, split, tokenizer, args.max_length)]

    train, test = splits.train_and_held_out(args.offline_data, None, load_one, tokenizer)
    train = splits.without_prompts_of(train, held_out, args.offline_data)
    return mixtures.random_subset(train, args.offline_pairs), mixtures.random_subset(test, 500)


def best_and_worst(c) -> Comparison:
    """Reduce a comparison to its best and its worst response.

    A comparison of two responses is returned unchanged, because it may have a soft label."""
    if len(c.texts) == 2:
        return c
    pair = select_responses(c, [c.ranks.argmin().item(), c.ranks.argmax().item()])
    return pair._replace(ranks=torch.tensor([0, 1]))


def select_responses(c, positions):
    """Return the comparison with only the responses at these positions, in this order."""
    columns = {"texts": c.texts, "response_ids": c.response_ids, "label_scores": c.label_scores}
    columns = {name: column and [column[i] for i in positions] for name, column in columns.items()}
    return c._replace(ranks=c.ranks[positions], indices=tuple(c.indices[i] for i in positions), **columns)


def _labelled(row, min_score_gap) -> Comparison:
    """Read a row as a comparison of all its responses, still without token ids.

    Raises ValueError, with the reason, if the row cannot be used."""
    values = row.data
    # RewardBench calls it subset
    category = values.get("subset") if values.get("category") is None else values["category"]
    labels = {"category": printable(category)}
    if values.get("responses") is not None:
        prompt, texts, label_scores = _ranking(values, values["responses"])
        ranks = _ranks(label_scores, min_score_gap)
    else:
        prompt, texts = _pair(values)
        label_scores = None
        ranks = [0, 1]
        rating = values.get("rating")
        for names in (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected")):
            if label_scores is None and all(name in values for name in names):
                label_scores = [_number(values, name, -math.inf, math.inf) for name in names]
        if rating is not None and rating not in RATINGS:
            raise formats.unreadable("rating", rating, f"not one of {', '.join(RATINGS)}")
        preference = _number(values, "preference", 0, 1)
        if label_scores and _ahead(label_scores, preference) < _least(min_score_gap):
            raise ValueError(f"the scores contradict the label or are within --min-score-gap {min_score_gap}")
        labels.update(rating=rating, margin=_number(values, "margin", 0, math.inf), preference=preference)
        if preference is not None:  # 0.5 is a label too: a tie
            ranks = [int(preference < 0.5), int(preference > 0.5)]
    if len({text.strip() for text in texts}) < 2:
        raise ValueError("the responses are the same")
    for text in texts:
        messages = message_columns.check_messages([*prompt, {"role": "assistant", "content": text}])
    ranks = torch.tensor(ranks, dtype=torch.float64 if isinstance(ranks[0], float) else torch.long)
    prompt = messages[:-1]
    source = row.where.rpartition(":")[0]
    labels.update(label_scores=label_scores, indices=tuple(range(len(texts))))
    for name in OF_EACH:
        cells = _of_each(values, name, labels["indices"])  # so that the column counts as read
        if name == "is_safe" and cells and not all(cell in (False, True) for cell in cells):
            raise formats.unreadable("is_safe", cells, "neither true nor false")
    if category == "Ties":  # of RewardBench 2: the id names the question
        values.get("id")
    return Comparison(prompt, texts, None, [], ranks, source, row, **labels)


def _with_ids(c, prompt_ids, response_ids, max_length):
    """Add token ids, and keep the different responses that fit into max_length tokens with the prompt.

    The responses of a ranking are sorted, best first. Raises ValueError if fewer than two responses are
    left, or if no response is better than another."""
    first = {text.strip(): i for i, text in reversed([*enumerate(c.texts)])}  # of equal texts the first
    fits = [i for i in sorted(first.values()) if len(prompt_ids) + len(response_ids[i]) <= max_length]
    if c.row.data.get("responses") is not None:
        fits.sort(key=c.ranks.tolist().__getitem__)  # best first, as in a pair
    if len(fits) < 2:
        raise ValueError(f"longer than {max_length} tokens (--max-length)")
    prompt_ids, *response_ids = (torch.tensor(ids, dtype=torch.int32) for ids in (prompt_ids, *response_ids))
    c = select_responses(c._replace(prompt_ids=prompt_ids, response_ids=response_ids), fits)
    if not labelled_pairs(c) and c.preference is None:
        raise ValueError("no response is better than another")
    return c


def with_margins(comparisons, size) -> list[Comparison]:
    """Add Llama 2's margin m for every two responses of each comparison, (K, K).

    The margin is MARGINS[size] of the column `rating`. Without a rating it is the column `margin`. Without
    either it comes from the scores: the largest m, times the difference of the two scores divided by the
    largest difference in the same data set, because every data set has its own unit of scores.

    size: a key of MARGINS; "none" returns the comparisons unchanged.

    Raises InputError for a row without rating, margin and scores."""
    if size == "none":
        return comparisons
    largest = collections.Counter()  # data set -> its largest difference of scores
    for c in comparisons:
        largest[c.source] = max(largest[c.source], max(c.label_scores or [0]) - min(c.label_scores or [0]))

    def margins(c):
        margin = c.margin if c.rating is None else MARGINS[size][c.rating]
        if margin is not None:
            return torch.full((len(c.texts), len(c.texts)), float(margin))
        if c.label_scores is None:
            raise InputError(f"{c.row.where}: --margin {size} needs a rating, a margin or scores")
        label_scores = torch.tensor(c.label_scores)
        scale = max(MARGINS[size].values()) / (largest[c.source] or 1.0)
        return (label_scores[:, None] - label_scores[None, :]).abs() * scale

    return [c._replace(margins=margins(c)) for c in comparisons]


def pair_of(values, where) -> tuple[list[dict], list[str], float | None]:
    """Read (prompt messages, two texts, P(the first text is better)) from a preference row.

    The probability comes from the row's label. For a ranking, two responses whose scores differ are drawn
    by a hash of `where`, the row's place. For responses without scores, the first two are returned and the
    probability is None. Raises ValueError, with the reason, if the row has no such pair."""
    responses = values.get("responses")
    if responses is None:
        prompt, texts = _pair(values)
        label = _number(values, "preference", 0, 1)
        return prompt, texts, 1.0 if label is None else label
    if isinstance(responses, list) and all(isinstance(r, dict) and "score" not in r for r in responses):
        prompt, texts, _ = _ranking(values, [{**r, "score": i} for i, r in enumerate(responses[:2])])
        return prompt, texts, None
    prompt, texts, label_scores = _ranking(values, responses)
    twos = itertools.permutations(zip(texts, label_scores), 2)
    pairs = [(a, b) for a, b in twos if a[1] != b[1] and a[0].strip() != b[0].strip()]
    if not pairs:
        raise ValueError("no response is better than another")
    (first, grade), (second, other) = pairs[zlib.crc32(where.encode()) % len(pairs)]
    return prompt, [first, second], float(grade > other)


def column(comparison, name) -> list | None:
    """Return the values of column `name` for the comparison's responses, or None if a value is missing.

    They are read from `name` of each of the row's `responses`, or from chosen_`name` and rejected_`name`."""
    return _of_each(comparison.row.data, name, comparison.indices)


def _of_each(values, name, indices):
    """Return `name` of the row's responses at these indices, or None if a value is missing."""
    if values.get("responses") is not None:
        cells = [values["responses"][i].get(name) for i in indices]
    else:
        cells = [values.get(f"{('chosen', 'rejected')[i]}_{name}") for i in indices]
    return None if None in cells else cells


def _ranking(values, responses):
    """Read (prompt messages, texts, scores) of a row with these `responses`; ValueError if that fails."""
    texts, label_scores = message_columns.ranking(responses)
    if len(texts) < 2:
        raise ValueError("a ranking needs at least two responses")
    return message_columns.check_prompt(message_columns.prompt_of(values) or [], values), texts, label_scores


def _ranks(label_scores, gap):
    """Convert scores to ranks; 0 is best. Responses whose ranks differ by 1 or more make a labelled pair.

    Without a gap, the rank is the number of distinct better scores. With a gap, it is the distance to the
    best score in units of the gap: two responses then make a pair exactly if their scores differ by at
    least the gap, whatever lies between them."""
    if gap:
        return [(max(label_scores) - grade) / _least(gap) for grade in label_scores]
    better = sorted(set(label_scores), reverse=True)
    return [better.index(grade) for grade in label_scores]


def _least(gap) -> float:
    """Return the smallest difference that counts as `gap`, a little less than `gap` because of rounding.

    0.9 - 0.8 is less than 0.1, in float32 by 4 parts in 10 million."""
    return gap * (1 - 1e-4)


def _ahead(label_scores, preference) -> float:
    """Return how much higher the score of the preferred response is than that of the other one.

    The soft label says which response is preferred; without it, the first one is. For a tie, the absolute
    difference is returned."""
    ahead = label_scores[0] - label_scores[1]
    if preference == 0.5:
        return abs(ahead)
    return ahead if preference is None or preference > 0.5 else -ahead


def _no_pair(values) -> ValueError:
    """Return the error for a row that has neither two sides nor `responses`."""
    if values.keys() >= {"chosen", "rejected"}:
        return ValueError("no response")
    for name in [name for name in ("label", "score") if name in values]:
        formats.number(values[name], name)
        with contextlib.suppress(formats.WrongColumns):
            message_columns.sft_messages({**values, "label": None})
            return ValueError("no other completion of the same prompt has a different label or score")
    return formats.WrongColumns(values, "preference")


def _pair(values):
    """Read (prompt messages, [chosen, rejected]) of a row; each side is read like a demonstration.

    Raises ValueError, with the reason, if that fails."""
    if "chosen" not in values or "rejected" not in values:
        raise _no_pair(values)
    (*prompt, chosen), (*other, rejected) = (
        message_columns.check_messages(message_columns.answered(values, values[side]), values)
        for side in ("chosen", "rejected")
    )
    if turns_key(prompt) != turns_key(other):
        raise ValueError("chosen and rejected have different prompts")
    return prompt, [message_columns.content_of(chosen), message_columns.content_of(rejected)]


def _number(values, name, low, high):
    """Return the number in column `name`, or None if the row has no value there.

    Raises ValueError if it is no number from `low` to `high`."""
    value = values.get(name)
    if value is None:
        return None
    number = formats.number(value, name)
    if isinstance(value, bool) or not low <= number <= high:
        raise formats.unreadable(name, value, f"not a number from {low} to {high}")
    return number


def statistics(train: list[Comparison], held_out: list[Comparison]) -> list[dict]:
    """Summarise data sets in a table with one row for each, the held-out sets last.

    Its columns are the numbers of rows, of different prompts and of pairs, and the mean tokens of a prompt
    and of the two responses of a pair (as in RLHF Workflow, table 1)."""
    table = []
    for note, comparisons in (("", train), (" (held out)", held_out)):
        for source in sorted({c.source for c in comparisons}):
            rows = [c for c in comparisons if c.source == source]
            pairs = [(c.response_ids[i], c.response_ids[j]) for c in rows for i, j in labelled_pairs(c)]
            chosen = sum(len(better) for better, _ in pairs) / max(1, len(pairs))
            rejected = sum(len(worse) for _, worse in pairs) / max(1, len(pairs))
            prompts = sum(len(c.prompt_ids) for c in rows) / len(rows)
            table.append({
                "data": source + note, "rows": len(rows), "prompts": len({c.key for c in rows}),
                "pairs": len(pairs), "prompt_tokens": prompts, "chosen_tokens": chosen,
                "rejected_tokens": rejected,
            })  # fmt: skip
    return table


def fingerprint(held_out: list[Comparison]) -> list:
    """Fingerprint held-out comparisons, for identity.py: their columns, and the responses that are compared,
    which depend on --max-length and --min-score-gap."""
    return [[c.row.data, c.texts, c.ranks.tolist()] for c in held_out]


def describe(comparison) -> dict:
    """Return a comparison as a row of samples.jsonl, without a model's scores. measures.py reads it too."""
    columns = zip(comparison.texts, comparison.response_ids, comparison.ranks.tolist())
    responses = [{"text": text, "tokens": len(ids), "rank": rank} for text, ids, rank in columns]
    for name in ("gold", "utility", "is_safe"):  # gold and utility are from the tiny world
        values = column(comparison, name) or []
        if all(value in (0, 1) if name == "is_safe" else type(value) is float for value in values):
            for response, value in zip(responses, values):
                response[name] = value
    row = {"prompt": comparison.prompt, "source": comparison.source, "category": comparison.category}
    labels = {"preference": comparison.preference, "responses": responses}
    labels["id"] = printable(comparison.row.data.get("id"))
    return {**row, **{name: value for name, value in labels.items() if value is not None}}


def epoch_order(comparisons: list[Comparison], balanced: bool, seed: int, epoch: int) -> list[int]:
    """Return the indices of one epoch.

    Every comparison comes once. If `balanced`, the same number of indices is drawn with replacement, and
    every category is equally likely (Qwen balances the prompts to be annotated over some 6,600 tags)."""
    if not balanced:
        return dist.shuffled(len(comparisons), seed, "order", epoch)
    counts = collections.Counter(c.category for c in comparisons)
    weights = torch.tensor([1.0 / counts[c.category] for c in comparisons])
    generator = torch.Generator().manual_seed(dist.seed_of(seed, "order", epoch))
    return torch.multinomial(weights, len(comparisons), replacement=True, generator=generator).tolist()


@torch.no_grad()
def seq_logprobs(model, comparisons, micro_batch_size) -> list[torch.Tensor]:
    """Compute log pi(y | x) of every response y, the sum over its tokens, in nats.

    Returns a tensor (K,) for each comparison, the same on every rank. Every rank must call it."""
    each = [c._replace(response_ids=[ids]) for c in comparisons for ids in c.response_ids]
    forward = lambda model, batch: models.response_logprobs(model, batch).tolist()
    logprobs = of_each_comparison(forward, model, each, micro_batch_size, share_prompt=False)
    return list(torch.tensor(logprobs).split([len(c.response_ids) for c in comparisons]))
