"""The pairwise preference model of RLHF Workflow (arXiv:2405.07863, section 2.2): a causal LM that reads a
prompt and two responses, and whose next token, A or B, names the better one.

    [CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}   ->   A or B

common/train_pairwise.py trains it. An oracle that sees both responses at once can prefer in a circle, which
no scalar score can.
"""

import math

import torch

from common import data, dist, models
from common.batches import Document, collate, labelled_pairs, make_blocks


def document(tokenizer, prompt: list[dict], a: str, b: str, letter="A") -> Document:
    """What the model reads and its answer, `letter`, the only token with loss, right after the opening of an
    answer: what a template writes around an answer (a space, empty thoughts, a second end token) is not
    read. ValueError if the letter is no single token of the tokenizer's, or the text cannot be encoded."""
    text = f"[CONTEXT] {data.transcript(prompt)} [RESPONSE A] {a} [RESPONSE B] {b}"
    question = {"role": "user", "content": text}
    ids, mask = data.encode(tokenizer, [question, {"role": "assistant", "content": letter}])
    opening = ids[: mask.index(True)]
    data.check_known(tokenizer, opening)
    answer = tokenizer(letter, add_special_tokens=False)["input_ids"]
    if len(answer) != 1 or answer == [tokenizer.unk_token_id]:
        raise ValueError(f"{letter!r} is not one token of this tokenizer's")
    ids = torch.tensor(opening + answer, dtype=torch.int32)
    return Document(ids, torch.arange(len(ids)) == len(opening), [question], None)


def usable(comparisons, tokenizer, max_length, name) -> list:
    """The comparisons of which every labelled pair can be written as a document of at most max_length tokens;
    what is dropped is counted and printed. InputError if nothing is left."""

    def written(c):
        pairs = [(c.texts[better], c.texts[worse]) for better, worse in labelled_pairs(c)]
        if not pairs:
            raise ValueError("a tie")
        if max(len(document(tokenizer, c.prompt, a, b, x).ids) for a, b in pairs for x in "AB") > max_length:
            raise ValueError(f"longer than {max_length} tokens (--max-length)")
        return c

    return data.made_of(comparisons, written, f"{name}, as pairs")


def documents(comparisons, tokenizer, seed) -> list[Document]:
    """Every labelled pair, in an order drawn at random, with the letter of the better response."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for c in comparisons:
        for better, worse in labelled_pairs(c):
            a, b, letter = better, worse, "A"
            if torch.rand((), generator=generator) >= 0.5:
                a, b, letter = worse, better, "B"
            written.append(document(tokenizer, c.prompt, c.texts[a], c.texts[b], letter))
    return written


def my_packed_batches(documents, model, size):
    """This rank's share of the documents in batches of at most `size` for `model`, each packed into rows as
    long as its longest document; the same number of batches on every rank."""
    for share in dist.my_batches(documents, size, lambda d: len(d.ids)):
        longest = max((len(d.ids) for d in share), default=0)
        blocks = make_blocks(share, longest, getattr(model, "packs", True))  # see train_pairwise.py
        yield collate(blocks, model.config.pad_token_id, model.device)


@torch.no_grad()
def preferences(model, tokenizer, pairs, micro_batch_size) -> list[float]:
    """log P(a beats b) / P(b beats a) for each (prompt messages, a, b) of `pairs`, the same on every rank.

    P is p(A) / (p(A) + p(B)), averaged over both orders, since one order alone favours a place. Every rank
    must call it with the same pairs."""
    if not pairs:
        return []
    letters = [int(document(tokenizer, *pairs[0], letter).ids[-1]) for letter in "AB"]
    both_orders = [texts for prompt, a, b in pairs for texts in ((prompt, a, b), (prompt, b, a))]
    documents = [document(tokenizer, *texts)._replace(number=i) for i, texts in enumerate(both_orders)]
    longest, room = max(len(d.ids) for d in documents), models.n_positions(model.config)
    if longest > room:
        raise ValueError(f"a prompt and two responses have {longest} tokens, the model has {room} positions")
    p_first = []  # (number, p(A) / (p(A) + p(B)))
    for share in dist.my_batches(documents, micro_batch_size, lambda d: len(d.ids)):
        batch = collate([[d] for d in share], tokenizer.pad_token_id, model.device)
        where = batch.action_mask.nonzero().T  # the last token before each letter, which it does not see
        logprobs = model.next_token_logprobs(batch.input_ids, where)[:, letters]  # (n, 2)
        p_first += zip((d.number for d in share), torch.softmax(logprobs.double(), -1)[:, 0].tolist())
    p_first = [p for _, p in sorted(dist.gather(p_first))]
    means = [(p + (1 - swapped)) / 2 for p, swapped in zip(p_first[::2], p_first[1::2])]
    return [math.log(max(p, 1e-12)) - math.log(max(1 - p, 1e-12)) for p in means]
