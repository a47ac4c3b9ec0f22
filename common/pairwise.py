"""The pairwise preference model of RLHF Workflow (arXiv:2405.07863, section 2.2): a causal LM that reads a
prompt and two responses, and whose next token, A or B, names the better one.

    [CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}   ->   A or B

common/train_pairwise.py trains it. An oracle that sees both responses at once can prefer in a circle, which
no scalar score can.
"""

import math

import torch

from common import data, dist
from common.batches import Document, collate, labelled_pairs, make_blocks
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
            check_fits(c, tokenizer, max_length)
            kept.append(c)
        except ValueError as error:
            dropped.setdefault(str(error), []).append(c.row.where)
    data.report(f"{name}, as pairs", len(comparisons), dropped)
    if not kept:
        raise InputError(f"{name}: no pair can be used: {'; '.join(dropped)}")
    return kept


def check_fits(comparison, tokenizer, max_length):
    """ValueError if a labelled pair of the comparison cannot be written, is too long, or if there is none."""
    if not labelled_pairs(comparison):
        raise ValueError("a tie")
    for better, worse in labelled_pairs(comparison):
        for letter in "AB":
            pair = comparison.texts[better], comparison.texts[worse]
            if len(document(tokenizer, comparison.prompt, *pair, letter).ids) > max_length:
                raise ValueError(f"longer than {max_length} tokens (--max-length)")


def documents(comparisons, tokenizer, seed) -> list[Document]:
    """Every labelled pair, in an order drawn at random, with the letter of the better response."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for c in comparisons:
        for better, worse in labelled_pairs(c):
            if torch.rand((), generator=generator) < 0.5:
                written.append(document(tokenizer, c.prompt, c.texts[better], c.texts[worse], "A"))
            else:
                written.append(document(tokenizer, c.prompt, c.texts[worse], c.texts[better], "B"))
    return written


def my_packed_batches(documents, model, size):
    """This rank's share of the documents in batches of at most `size` for `model`, each packed into rows as
    long as its longest document; the same number of batches on every rank."""
    for share in dist.my_batches(documents, size, n_tokens):
        longest = max(map(n_tokens, share), default=0)
        yield collate(make_blocks(share, longest), model.config.pad_token_id, model.device)


def n_tokens(document) -> int:
    return len(document.ids)


@torch.no_grad()
def preferences(model, tokenizer, pairs, micro_batch_size) -> list[float]:
    """log P(a beats b) / P(b beats a) for each (prompt messages, a, b) of `pairs`, the same on every rank.

    P is p(A) / (p(A) + p(B)), averaged over both orders, since one order alone favours a place. Every rank
    must call it with the same pairs."""
    if not pairs:
        return []
    letters = [int(document(tokenizer, *pairs[0], letter).ids[-1]) for letter in "AB"]
    rows = []  # (pair, whether b stands first, document)
    for i, (prompt, a, b) in enumerate(pairs):
        rows.append((i, False, document(tokenizer, prompt, a, b)))
        rows.append((i, True, document(tokenizer, prompt, b, a)))
    longest = max(n_tokens(row[2]) for row in rows)
    config = getattr(model, "config", None)
    room = getattr(config and config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > room:
        raise ValueError(f"a prompt and two responses have {longest} tokens, the model has {room} positions")
    probabilities = []
    for share in dist.my_batches(rows, micro_batch_size, lambda row: n_tokens(row[2])):
        input_ids = collate([[d] for _, _, d in share], tokenizer.pad_token_id, model.device).input_ids
        ends = [
            n_tokens(d) - 2 for _, _, d in share
        ]  # the last token before the letter, which it does not see
        where = torch.tensor([list(range(len(ends))), ends], dtype=torch.long, device=model.device)
        logprobs = model.next_token_logprobs(input_ids, where)[:, letters]  # (n, 2)
        p_first = torch.softmax(logprobs.double(), -1)[:, 0].tolist()  # p(A) / (p(A) + p(B))
        probabilities += [(i, 1 - p if swapped else p) for (i, swapped, _), p in zip(share, p_first)]
    mean = [0.0] * len(pairs)
    for i, p in dist.gather(probabilities):
        mean[i] += p / 2
    return [math.log(max(p, 1e-12)) - math.log(max(1 - p, 1e-12)) for p in mean]
