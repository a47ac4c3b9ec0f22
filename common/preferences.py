"""Pairs and rankings -> comparisons -> batches in which the responses to a prompt share it.

`load` reads rows of the README's preference and ranking formats, filters them, and says what it dropped and
why; `batches` lays comparisons out for a scalar head; `seq_logprobs` gives log pi(y | x) of their responses.

A prompt's responses follow it in one row, x y_1 y_2 ... y_K, every response at the positions right after x
and blind to the other ones: the prompt is computed once, and the scores are those of K separate rows. Several
such trees share a row while there is room.
"""

import collections
import itertools
import math
import zlib
from typing import NamedTuple

import torch
from tqdm import tqdm

from common import data, dist, metrics, models, rollout

ROW = 64  # tokens that a row of packed trees may have, even if each tree is shorter
RATINGS = ("significantly better", "better", "slightly better", "negligibly better")  # Llama 2's four levels


class Comparison(NamedTuple):
    prompt: list[dict]  # messages
    texts: list[str]  # K responses; of a pair, the chosen one first
    prompt_ids: torch.Tensor  # (P,) int32
    response_ids: list[torch.Tensor]  # K of (R,) int32, the end token included
    ranks: torch.Tensor  # (K,), 0 is best, equal ranks are ties
    source: str  # the data set, for figures and tables
    row: data.Row
    rating: str | None = None  # one of RATINGS
    margin: float | None = None  # Llama 2's m as the row gives it
    grades: list[float] | None = None  # the K scores that the labels come from
    preference: float | None = None  # P(texts[0] is better), a soft label
    category: str | None = None
    kept: tuple = (0, 1)  # which of the row's responses these are
    samples: tuple = ()  # more responses to the prompt, ids like response_ids, without a label
    ratios: torch.Tensor | None = None  # (responses and samples, k), the advantage model's, eq. 8
    ref_logprobs: torch.Tensor | None = None  # (K,), DPO's, log pi_0(y | x) of each response, nats

    @property
    def messages(self):  # as data.Document has them, for data.hold_out and its like
        return [*self.prompt, {"role": "assistant", "content": self.texts[0]}]

    @property
    def key(self) -> str:
        return data.turns_key(self.prompt)

    @property
    def n_tokens(self):
        return len(self.prompt_ids) + sum(map(len, (*self.response_ids, *self.samples)))


# -- rows -> comparisons ---------------------------------------------------------------------------
def load(spec, split, tokenizer, max_length, min_score_gap=0.0, max_per_prompt=None) -> list[Comparison]:
    """The comparisons of a data set (data.load_rows' `spec`; of `tiny`, the pairs), filtered. Every rank gets
    the same. What is dropped, and why, is printed; InputError if nothing is left.

    max_length: tokens of a prompt and one response. A longer response is left out, never cut: a response is
      scored at its end token. min_score_gap: a pair whose scores differ by less is left out, a ranking's
      pairs of this kind are ties. max_per_prompt: the first rows of a prompt that count."""
    dropped, found, per_prompt = collections.defaultdict(list), [], collections.Counter()
    rows = _with_labels_as_pairs(data.load_rows(spec, "preferences", split), dropped)
    n_rows = len(rows) + sum(map(len, dropped.values()))
    for row in tqdm(rows, desc=f"tokenise {spec}", unit="row", leave=False, disable=not dist.is_main()):
        try:
            comparison = _comparison(row, tokenizer, max_length, min_score_gap)
            key = data.prompt_key(comparison.messages)
            if max_per_prompt and per_prompt[key] >= max_per_prompt:
                raise ValueError(f"the prompt has {max_per_prompt} rows already (--max-pairs-per-prompt)")
        except ValueError as error:
            dropped[str(error)].append(row.where)
            continue
        per_prompt[key] += 1
        found.append((key, comparison))
    # One says that a is better than b, another that b is better than a: neither is kept
    said = collections.defaultdict(set)
    for key, c in found:
        if len(c.texts) == 2:
            said[key, frozenset(c.texts)] |= {c.texts[i] for i, _ in labelled_pairs(c)}
    kept = []
    for key, c in found:
        if len(c.texts) == 2 and len(said[key, frozenset(c.texts)]) > 1:
            dropped["another row has the opposite label for the same responses"].append(c.row.where)
        else:
            kept.append(c)
    data.report(spec, n_rows, dropped)
    left_out = sum(len(c.row.data["responses"]) - len(c.kept) for c in kept if c.row.data.get("responses"))
    if left_out and dist.is_main():
        why = f"longer than {max_length} tokens, or the same as another one"
        print(f"{spec}: left out {left_out:,} responses of rankings, {why}")
    if not kept:
        raise data.none_left(spec, n_rows, dropped)
    return kept


def _with_labels_as_pairs(rows, dropped):
    """The rows; those of one completion and its `label` (KTO's) as pairs, each true one of a prompt with each
    false one. Without an equal prompt of the other label there is none."""
    out, labelled = [], collections.defaultdict(lambda: ([], []))
    for row in rows:
        values = row.data
        is_other = values.get("chosen") is not None or values.get("responses") is not None
        if is_other or "completion" not in values or "label" not in values:
            out.append(row)
        elif values["label"] not in (False, True):
            dropped["label is neither true nor false"].append(row.where)
        else:
            prompt = repr([values.get(name) for name in ("system", "prompt", "instruction", "input")])
            labelled[prompt][bool(values["label"])].append(row)
    for worse, better in labelled.values():
        for a, b in itertools.product(better, worse):
            sides = {"chosen": a.data["completion"], "rejected": b.data["completion"]}
            out.append(a._replace(data={**a.data, **sides}))
        if not (worse and better):
            reason = "a label makes a pair where its prompt has both a true and a false completion"
            dropped[reason] += [row.where for row in worse + better]
    return out


def _comparison(row, tokenizer, max_length, min_score_gap):
    """ValueError says why a row is left out."""
    values, is_ranking = row.data, row.data.get("responses") is not None
    category = None if values.get("category") is None else str(values["category"])
    about = {"row": row, "source": row.where.rpartition(":")[0], "category": category}
    if is_ranking:
        prompt, texts, grades = _ranking(values)
        ranks = _ranks(grades, min_score_gap)
    elif "chosen" in values and "rejected" in values:
        prompt, texts = _pair(values)
        grades, ranks = _pair_grades(values), [0, 1]
        if grades and grades[0] < grades[1]:
            raise ValueError("the scores contradict the label")
        if grades and grades[0] - grades[1] < min_score_gap:
            raise ValueError(f"the scores differ by less than {min_score_gap} (--min-score-gap)")
        about |= {"rating": _rating(values), "margin": _number(values, "margin", 0, math.inf)}
        about["preference"] = preference = _number(values, "preference", 0, 1)
        if preference is not None:  # 1/2 is a label too, of a tie
            ranks = [int(preference < 0.5), int(preference > 0.5)]
    else:
        wanted = "chosen + rejected, perhaps with prompt; prompt or instruction + responses"
        raise ValueError(f"columns {data.columns(values)} are no preference row, wanted {wanted}")
    first = {}  # of equal texts the first one counts
    for i, text in enumerate(texts):
        first.setdefault(text.strip(), i)
    if len(first) < 2:
        raise ValueError("the responses are the same")
    for text in texts:
        messages = data.check_messages([*prompt, {"role": "assistant", "content": text}])
    prompt_ids, response_ids = data.encode_responses(tokenizer, messages[:-1], texts)
    data.check_known(tokenizer, prompt_ids)
    prompt_ids = torch.tensor(prompt_ids, dtype=torch.int32)
    response_ids = [torch.tensor(ids, dtype=torch.int32) for ids in response_ids]
    fits = [i for i in first.values() if len(prompt_ids) + len(response_ids[i]) <= max_length]
    if is_ranking:
        fits.sort(key=lambda i: ranks[i])  # best first, as the chosen one of a pair
    if len(fits) < 2:
        raise ValueError(f"longer than {max_length} tokens (--max-length)")
    texts, response_ids, ranks = ([column[i] for i in fits] for column in (texts, response_ids, ranks))
    if len(set(ranks)) == 1 and about.get("preference") is None:
        raise ValueError("no response is better than another")
    about |= {"grades": grades and [grades[i] for i in fits], "kept": tuple(fits)}
    return Comparison(messages[:-1], texts, prompt_ids, response_ids, torch.tensor(ranks), **about)


def pair_of(values, where) -> tuple[list[dict], list[str], float | None]:
    """(prompt messages, two texts, P(the first is the better one) by the row's label) of a preference row; of
    a ranking, two of its responses, drawn by the row's place, whose scores differ. Responses without scores
    are a pair without a label. ValueError says why there is none."""
    responses = values.get("responses")
    if responses is None:
        if not values.get("chosen") or not values.get("rejected"):
            raise ValueError("neither chosen and rejected nor responses")
        prompt, texts = _pair(values)
        label = _number(values, "preference", 0, 1)
        return prompt, texts, 1.0 if label is None else label
    objects = isinstance(responses, list) and all(isinstance(r, dict) for r in responses)
    if objects and not any("score" in r for r in responses):
        values = {**values, "responses": [{**r, "score": i} for i, r in enumerate(responses[:2])]}
        return *_ranking(values)[:2], None
    prompt, texts, grades = _ranking(values)
    places = itertools.permutations(range(len(texts)), 2)
    pairs = [(i, j) for i, j in places if grades[i] != grades[j] and texts[i].strip() != texts[j].strip()]
    if not pairs:
        raise ValueError("no response is better than another")
    i, j = pairs[zlib.crc32(where.encode()) % len(pairs)]
    return prompt, [texts[i], texts[j]], float(grades[i] > grades[j])


def column(comparison, name) -> list | None:
    """What the row says of each response in `name` of its `responses`, or in chosen_`name` and
    rejected_`name`; None if it does not say it of all."""
    values = comparison.row.data
    if values.get("responses") is not None:
        found = [values["responses"][i].get(name) for i in comparison.kept]
    else:
        found = [values.get(f"{('chosen', 'rejected')[i]}_{name}") for i in comparison.kept]
    return None if None in found else found


def _prompt(values):
    return data.check_prompt(data.turns(data.question(values), "user"), values.get("system"))


def _answer(side):
    turns = data.turns(side, "assistant")
    if len(turns) != 1 or not isinstance(turns[0], dict):
        raise ValueError("chosen or rejected is not one answer")
    return data.text_of(turns[0])


def _ranking(values):
    """(prompt messages, texts, scores) of a row of `responses`."""
    responses = values["responses"]
    try:
        texts = [r["text"] for r in responses]
        if any(isinstance(r["score"], bool) for r in responses):
            raise TypeError
        grades = [float(r["score"]) for r in responses]
        if not all(map(math.isfinite, grades)):
            raise ValueError
    except (TypeError, KeyError, ValueError, OverflowError):
        raise ValueError("responses is no list of {text, score}") from None
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("responses is no list of {text, score}")
    if len(texts) < 2:
        raise ValueError("a ranking needs two responses or more")
    return _prompt(values), texts, grades


def _ranks(grades, gap):
    """Rank 0 is the best score; a score less than `gap` below the next better one shares its rank."""
    ranks, order = [0] * len(grades), sorted(range(len(grades)), key=lambda i: -grades[i])
    for above, i in zip(order, order[1:]):
        fall = grades[above] - grades[i]
        ranks[i] = ranks[above] + (fall > 0 and fall >= gap)
    return ranks


def _pair(values):
    """(prompt messages, [chosen, rejected]) of a row; both may be whole dialogues, with or without `prompt`
    beside them."""
    sides = [values["chosen"], values["rejected"]]
    if not all(isinstance(side, str | list) and side for side in sides):
        raise ValueError("an empty side")
    if all(map(data.is_dialogue, sides)) or data.question(values) is None:
        system = values.get("system")
        chosen, rejected = (data.check_messages(data.dialogue(side), system) for side in sides)
        if data.prompt_key(chosen) != data.prompt_key(rejected):
            raise ValueError("chosen and rejected have different prompts")
        return chosen[:-1], [chosen[-1]["content"], rejected[-1]["content"]]
    return _prompt(values), [_answer(side) for side in sides]


def _pair_grades(values):
    for names in (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected")):
        if all(values.get(name) is not None for name in names):
            return [_number(values, name, -math.inf, math.inf) for name in names]
    return None


def _rating(values):
    rating = values.get("rating")
    if rating is not None and rating not in RATINGS:
        raise ValueError(f"rating {repr(rating)[:40]} is none of {', '.join(RATINGS)}")
    return rating


def _number(values, name, low, high):
    value = values.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} {repr(value)[:40]} is no number from {low} to {high}") from None


def labelled_pairs(comparison) -> list[tuple[int, int]]:
    """(better, worse) for all pairs of responses of different rank. A soft label counts as its likelier
    side."""
    ranks = comparison.ranks.tolist()
    return [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b]


def statistics(comparisons: list[Comparison], note="") -> list[dict]:
    """One row a data set, its name and `note` first: its rows and pairs, and the mean tokens of a prompt and
    of the two responses of a pair."""
    table = []
    for source in sorted({c.source for c in comparisons}):
        mine = [c for c in comparisons if c.source == source]
        lengths = [[len(c.response_ids[i]) for i in pair] for c in mine for pair in labelled_pairs(c)]
        prompt = sum(len(c.prompt_ids) for c in mine) / len(mine)
        row = {"data": source + note, "rows": len(mine), "pairs": len(lengths), "prompt_tokens": prompt}
        for key, side in (("chosen_tokens", 0), ("rejected_tokens", 1)):
            row[key] = sum(pair[side] for pair in lengths) / max(1, len(lengths))
        table.append(row)
    return table


def one_of_each_prompt(comparisons) -> list[Comparison]:
    return list({data.prompt_key(c.messages): c for c in comparisons}.values())


def with_samples_only(comparison, samples) -> Comparison:
    """The prompt with these responses (lists of ids) in place of the labelled ones."""
    ids = tuple(torch.tensor(x, dtype=torch.int32) for x in samples)
    return comparison._replace(samples=ids, response_ids=[], texts=[""], ranks=torch.zeros(0))


def fingerprint(comparisons) -> int:
    """A number that changes with any token or column of the comparisons, or their order."""
    number = 0
    for c in comparisons:
        parts = [ids.numpy().tobytes() for ids in (c.prompt_ids, *c.response_ids)]
        for part in (*parts, repr(c.row.data).encode()):
            number = zlib.crc32(part, number)
    return number


def describe(comparison) -> dict:
    """A comparison as a row of samples.jsonl and of the measures in metrics.py, without its scores."""
    responses = [
        {"text": text, "tokens": len(ids), "rank": rank}
        for text, ids, rank in zip(comparison.texts, comparison.response_ids, comparison.ranks.tolist())
    ]
    for name, kind in (("gold", float), ("utility", float), ("is_safe", bool)):  # two are the tiny world's
        values = column(comparison, name) or []
        if all(type(value) is kind for value in values):
            for response, value in zip(responses, values):
                response[name] = value
    row = {"prompt": comparison.prompt, "source": comparison.source, "category": comparison.category}
    return {**row, "responses": responses}


def epoch_order(comparisons: list[Comparison], generator, balanced: bool) -> list[int]:
    """Indices of one epoch: every comparison once, or, balanced, as many draws with every category equally
    likely (Qwen balances its prompts over some 6,600 tags)."""
    if not balanced:
        return torch.randperm(len(comparisons), generator=generator).tolist()
    counts = collections.Counter(c.category for c in comparisons)
    weights = torch.tensor([1.0 / counts[c.category] for c in comparisons])
    return torch.multinomial(weights, len(comparisons), replacement=True, generator=generator).tolist()


# -- comparisons -> batches ------------------------------------------------------------------------
class Batch(NamedTuple):
    input_ids: torch.Tensor  # (B, T)
    position_ids: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor | None  # (B, 1, T, T) bool, True where a query may look; None: causal
    prompt_ends: torch.Tensor  # (2, n_comparisons), row and column of each prompt's last token
    response_ends: torch.Tensor  # (2, n_responses), of each response's end token, comparison by comparison
    sizes: list[int]  # responses of each comparison, samples included
    comparisons: list[Comparison]


def batches(comparisons, pad_id, micro_batch_size, share_prompt, device):
    """This rank's share of `comparisons` (dist.batches), collated."""
    for some in dist.batches(comparisons, micro_batch_size, lambda c: c.n_tokens):
        yield collate(some, pad_id, share_prompt, device)


def collate(comparisons: list[Comparison], pad_id: int, share_prompt=True, device="cpu") -> Batch:
    """share_prompt: prompts with all their responses, packed into rows as long as the longest of them or ROW;
    else one row a response, for models that read neither such masks nor positions. No comparisons: a row of
    padding at which nothing is read."""
    if share_prompt:
        trees = [(c.prompt_ids, [*c.response_ids, *c.samples]) for c in comparisons]
    else:
        trees = [(c.prompt_ids, [ids]) for c in comparisons for ids in (*c.response_ids, *c.samples)]
    lengths = [len(prompt) + sum(map(len, responses)) for prompt, responses in trees]
    width, rows = max(lengths, default=2), [[i] for i in range(len(trees))] or [[]]
    if share_prompt and trees:  # rows of some length pack tighter, and cost little attention
        rows = data.pack(lengths, max(width, ROW))
        width = max(sum(lengths[i] for i in row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    position_ids, tree, branch = (torch.zeros_like(input_ids) for _ in range(3))
    prompt_ends, response_ends = [(0, 0)] * len(trees), [[] for _ in trees]
    # Of each prompt and response: its place, first position, tree, branch, length; and its ids
    pieces, texts = [], [torch.zeros(0, dtype=torch.int32)]
    for row, indices in enumerate(rows):
        start = 0
        for number, index in enumerate(indices, 1):
            prompt, responses = trees[index]
            for piece, ids in enumerate([prompt, *responses]):
                pieces.append((row * width + start, len(prompt) if piece else 0, number, piece, len(ids)))
                texts.append(ids)
                start += len(ids)
                if piece:
                    response_ends[index].append((row, start - 1))
                else:
                    prompt_ends[index] = (row, start - 1)
    place, first, number, piece, sizes = torch.tensor(pieces, dtype=torch.long).view(-1, 5).T
    within = torch.arange(sizes.sum()) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = place.repeat_interleave(sizes) + within
    input_ids.view(-1)[place] = torch.cat(texts).to(input_ids)
    position_ids.view(-1)[place] = first.repeat_interleave(sizes) + within
    tree.view(-1)[place], branch.view(-1)[place] = (x.repeat_interleave(sizes) for x in (number, piece))
    mask = None
    if share_prompt:
        tree, branch = tree.to(device), branch.to(device)
        ours = tree[:, :, None] == tree[:, None, :]  # (B, query, key)
        seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        mask = (ours & seen & torch.ones(width, width, dtype=torch.bool, device=device).tril())[:, None]
    else:  # on over the padding: transformers takes a position that falls for the start of a packed document
        position_ids = torch.arange(width).expand_as(input_ids).clone()
    sizes = [len(c.response_ids) + len(c.samples) for c in comparisons]
    if not share_prompt:  # the prompt of a comparison's first row
        starts = itertools.accumulate(sizes, initial=0)
        prompt_ends = [prompt_ends[start] for start, _ in zip(starts, sizes)]
    ends = [end for tree_ends in response_ends for end in tree_ends]
    where = (torch.tensor(at, dtype=torch.long).reshape(-1, 2).T.to(device) for at in (prompt_ends, ends))
    return Batch(input_ids.to(device), position_ids.to(device), mask, *where, sizes, comparisons)


def of_each(comparisons, batches_, forward) -> list:
    """What `forward` says of each comparison, on every rank. batches_: this rank's share, by `batches`;
    forward: Batch -> a list with a value for each of its comparisons. Every rank must call it."""
    place, found = {id(c): i for i, c in enumerate(comparisons)}, []
    for batch in batches_:
        found += zip((place[id(c)] for c in batch.comparisons), forward(batch))
    return [value for _, value in sorted(dist.gather(found), key=lambda item: item[0])]


def response_logprobs(model, batch) -> torch.Tensor:
    """log pi(y | x), a sum over y's tokens (nats), of every response of a batch, comparison by comparison:
    (n_responses,), gradient flows."""
    device = batch.input_ids.device
    texts = [ids for c in batch.comparisons for ids in (*c.response_ids, *c.samples)]
    targets = torch.cat([torch.zeros(0, dtype=torch.long), *texts]).to(device)
    sizes, lengths = (torch.tensor(x, dtype=torch.long) for x in (batch.sizes, [len(ids) for ids in texts]))
    begin = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    within = (torch.arange(len(begin)) - begin).to(device)  # a token's place in its response
    owner = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    prompt = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)  # of each response
    (rows, ends), before = batch.response_ends, batch.prompt_ends[1][prompt]
    # A response's first token comes after the prompt's last one, which may stand far before it
    columns = torch.where(within == 0, before[owner], (ends - lengths.to(device))[owner] + within)
    where = torch.stack([rows[owner], columns])
    logprobs = model.logprobs_at(batch.input_ids, where, targets, batch.position_ids, batch.attention_mask)
    return logprobs.new_zeros(len(lengths)).index_add(0, owner, logprobs)


def seq_logprobs(model, comparisons, pad_id, micro_batch_size, device) -> list[torch.Tensor]:
    """log pi(y | x), a sum over y's tokens (nats), of every response: (K,) for each comparison, the same on
    every rank. Every rank must call it."""
    documents = [
        data.Document(
            torch.cat([c.prompt_ids, ids]),
            torch.arange(len(c.prompt_ids) + len(ids)) >= len(c.prompt_ids),
            [],
            c.row,
        )
        for c in comparisons
        for ids in c.response_ids
    ]
    found = torch.tensor(models.seq_logprobs(model, documents, pad_id, micro_batch_size, device))
    return list(found.split([len(c.response_ids) for c in comparisons]))


def baselines(policy, comparisons, pad_id, micro_batch_size, device) -> dict[str, float]:
    """Accuracy, on the labelled pairs, of two scores that a reward model must beat: length and log
    probability under `policy` (None: length alone). Every rank must call it."""
    pairs = [(i, a, b) for i, c in enumerate(comparisons) for a, b in labelled_pairs(c)]
    if not pairs:
        return {}
    scores = {"baseline/length_accuracy": [[len(ids) for ids in c.response_ids] for c in comparisons]}
    if policy is not None:
        logprobs = seq_logprobs(policy, comparisons, pad_id, micro_batch_size, device)
        scores["baseline/sft_logprob_accuracy"] = [x.tolist() for x in logprobs]
    return {key: metrics.accuracy(x[i][a] - x[i][b] for i, a, b in pairs) for key, x in scores.items()}


def policy_samples(model, comparisons, tokenizer, n, max_new_tokens, seed, slots=64) -> list[tuple]:
    """n sampled responses of a policy to each comparison's prompt, as ids, the same on every rank, without
    those that did not end: a score is read at an end token. Prompts that leave no room get none. Every rank
    must call it."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf) - max_new_tokens
    fits = [(i, c) for i, c in enumerate(comparisons) if len(c.prompt_ids) <= room]
    out, asked = [[] for _ in comparisons], [c.prompt_ids.tolist() for _, c in fits]
    with dist.consolidated(model):  # inside, ranks may decode different numbers of steps, or none
        found = rollout.rollout(model, tokenizer, asked, n, max_new_tokens, seed=seed, slots=slots)
    for (i, _), responses in zip(fits, found):
        ended = [[*r.ids[:-1], tokenizer.eos_token_id] for r in responses if r.finished]
        out[i] = [torch.tensor(ids, dtype=torch.int32) for ids in ended]
    n_ended = sum(map(len, out))
    if n_ended < n * len(comparisons) and dist.is_main():
        print(f"{n_ended} of {n * len(comparisons)} samples ended within {max_new_tokens} tokens and count")
    return [tuple(ids) for ids in out]
