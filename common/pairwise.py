"""The pairwise preference model of RLHF Workflow (arXiv:2405.07863, section 2.2): a causal LM that reads a
prompt and two responses, and whose next token, A or B, names the better one.

    [CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}   ->   A or B

reward.py trains it (`--kind pairwise`). An oracle that sees both responses at once can prefer in a circle,
which no scalar score can.
"""

import math

import torch

from common import data, dist
from common.batches import Document, collate, labelled_pairs, pack
from common.errors import InputError


def instruction(prompt: list[dict], a: str, b: str) -> str:
    """The text that the model reads. A prompt of several turns has a line for each, `role: text`."""
    return f"[CONTEXT] {data.transcript(prompt)} [RESPONSE A] {a} [RESPONSE B] {b}"


def document(tokenizer, prompt, a, b, letter="A") -> Document:
    """The instruction and its answer, `letter`, the only token with loss, right after the opening of an
    answer: what a template writes around an answer (a space, empty thoughts, a second end token) is not
    read. ValueError if the letter is no single token of the tokenizer's, or the text cannot be encoded."""
    question = {"role": "user", "content": instruction(prompt, a, b)}
    opening = data.encode_responses(tokenizer, [question], [])[0]
    data.check_known(tokenizer, opening)
    answer = tokenizer(letter, add_special_tokens=False)["input_ids"]
    if len(answer) != 1 or answer == [tokenizer.unk_token_id]:
        raise ValueError(f"{letter!r} is not one token of this tokenizer's")
    ids = torch.tensor(opening + answer, dtype=torch.int32)
    messages = [question, {"role": "assistant", "content": letter}]
    return Document(ids, torch.arange(len(ids)) == len(opening), messages, None)


def usable(comparisons, tokenizer, max_length, name) -> list:
    """The comparisons of which every labelled pair can be written as a document of at most max_length tokens;
    what is dropped is counted and printed. InputError if nothing is left."""
    kept, dropped = [], {}
    for c in comparisons:
        try:
            pairs = [(c.texts[i], c.texts[j]) for i, j in labelled_pairs(c)]
            documents = [document(tokenizer, c.prompt, *pair, letter) for pair in pairs for letter in "AB"]
            lengths = [len(d.ids) for d in documents]
            if max(lengths, default=0) > max_length or not lengths:
                raise ValueError(f"longer than {max_length} tokens (--max-length)" if lengths else "a tie")
            kept.append(c)
        except ValueError as error:
            dropped.setdefault(str(error), []).append(c.row.where)
    data.report(f"{name}, as pairs", len(comparisons), dropped)
    if not kept:
        raise InputError(f"{name}: no pair can be used: {'; '.join(dropped)}")
    return kept


def batches(comparisons, tokenizer, generator, micro_batch_size, device):
    """This rank's share of the comparisons' labelled pairs, each in an order drawn at random, as batches of
    packed documents (data.Batch); the same number on every rank."""
    documents = []
    for c in comparisons:
        for better, worse in labelled_pairs(c):
            first = bool(torch.rand((), generator=generator) < 0.5)
            texts = (c.texts[better], c.texts[worse]) if first else (c.texts[worse], c.texts[better])
            documents.append(document(tokenizer, c.prompt, *texts, "A" if first else "B"))
    for some in dist.my_batches(documents, micro_batch_size, lambda d: len(d.ids)):
        lengths = [len(d.ids) for d in some]
        blocks = pack(lengths, max(lengths)) if some else []
        yield collate([[some[i] for i in block] for block in blocks], tokenizer.pad_token_id, device)


@torch.no_grad()
def preferences(model, tokenizer, pairs, micro_batch_size, device) -> list[float]:
    """log P(a beats b) / P(b beats a) for each (prompt messages, a, b) of `pairs`, the same on every rank.

    P is p(A) / (p(A) + p(B)), averaged over both orders, since one order alone favours a place. Every rank
    must call it with the same pairs."""
    if not pairs:
        return []
    letters = [int(document(tokenizer, *pairs[0], letter).ids[-1]) for letter in "AB"]
    rows = [
        (i, order, document(tokenizer, prompt, *((a, b) if order == 0 else (b, a))))
        for i, (prompt, a, b) in enumerate(pairs)
        for order in (0, 1)
    ]
    longest = max(len(d.ids) for _, _, d in rows)
    config = getattr(model, "config", None)
    room = getattr(config and config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > room:
        raise ValueError(f"a prompt and two responses have {longest} tokens, the model has {room} positions")
    found = []
    for some in dist.my_batches(rows, micro_batch_size, lambda row: len(row[2].ids)):
        input_ids = collate([[d] for _, _, d in some], tokenizer.pad_token_id, device).input_ids
        ends = [len(d.ids) - 2 for _, _, d in some]  # the last token before the letter, which it does not see
        where = torch.tensor([list(range(len(ends))), ends], dtype=torch.long, device=device)
        logprobs = model.next_token_logprobs(input_ids, where)[:, letters]  # (n, 2)
        p = torch.softmax(logprobs.double(), -1)[:, 0].tolist()  # p(A) / (p(A) + p(B))
        found += [(i, x if order == 0 else 1 - x) for (i, order, _), x in zip(some, p)]
    total = [0.0] * len(pairs)
    for i, x in dist.gather(found):
        total[i] += x / 2
    return [math.log(max(x, 1e-12)) - math.log(max(1 - x, 1e-12)) for x in total]
