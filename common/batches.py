"""Token ids -> batches: packed documents, comparisons whose responses share a prompt, a rank's share of both.

A prompt's responses follow it in one row, x y_1 y_2 ... y_K, every response at the positions right after x
and blind to the other ones: the prompt is computed once, and the results are those of K separate rows.
Several such trees share a row while there is room."""

import json
import math
import unicodedata
import zlib
from typing import NamedTuple

import numpy
import torch

from common import dist
from common.sampler import to_device

RATINGS = ("significantly better", "better", "slightly better", "negligibly better")  # Llama 2's four levels


class Row(NamedTuple):
    where: str  # "file:12", for messages
    data: dict
    read: frozenset = frozenset()  # what of it is used already, as formats.Cells notes it


class Document(NamedTuple):
    ids: torch.Tensor  # (T,) int32
    response_mask: torch.Tensor  # (T,) bool, True for response tokens, the end token included
    messages: list[dict]
    row: Row
    number: int = 0  # its place among the responses of a rollout
    all_turns: bool = False  # every answer of the messages is learnt, not the last one alone

    @property
    def key(self) -> str:
        return turns_key(self.messages[:-1])

    @property
    def questions(self) -> dict[tuple, int]:
        answers = [i for i, m in enumerate(self.messages[:-1]) if self.all_turns and m["role"] == "assistant"]
        return held_out_keys(self.messages[:i] for i in [*answers, -1])


def turns_key(turns: list[dict]) -> str:
    """A string that two prompts share when they are the same."""
    return json.dumps([[m["role"], m["content"].strip()] for m in turns])


def held_out_keys(prompts) -> dict[tuple, int]:
    """{question: a hash of it} of every prompt (turns) whose answer a row teaches: the keys by which rows of
    any kind are held out, and nothing else is.

    A question is a prompt without system turns: they say how to answer, not what, and rows of one question
    may have different ones. Case, white space and Unicode's forms of a character do not tell two questions
    apart: files spell one differently, and to hold out, or drop, a row too many does no harm. The hash, by
    which some are chosen, is of the prompt as it is spelt."""
    questions = {}
    for turns in prompts:
        turns = [m for m in turns if m["role"] not in ("system", "developer")]
        texts = (unicodedata.normalize("NFKC", m["content"]).casefold().split() for m in turns)
        questions[tuple(map(" ".join, texts))] = zlib.crc32(turns_key(turns).encode())
    return questions


def random_subset(items, n, name=lambda item: item.key):
    """n of some prompts, comparisons or rows, by the hash of their name and in their order: a sample of all
    of a mixture or of a file that is sorted, where the first n would be of one kind."""
    chosen = sorted(range(len(items)), key=lambda i: zlib.crc32(name(items[i]).encode()))[:n]
    return [items[i] for i in sorted(chosen)]


def printable(value) -> str | None:
    """A category as text, in which half a character becomes `?`."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def n_tokens(block: list[Document]) -> int:
    return sum(len(document.ids) for document in block)


def response_mask(documents: list[Document]) -> torch.Tensor:
    """(B, R): True in row i for as many tokens as the response of document i has, R those of the longest."""
    lengths = torch.tensor([n_response_tokens([[document]]) for document in documents])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def response_lengths(batch) -> torch.Tensor:
    """(B, T-1): at each response token of a batch the number of tokens of its response; 1 elsewhere."""
    lengths = [n_response_tokens([[document]]) for document in batch.documents]
    mask = batch.action_mask
    of_token = to_device(torch.tensor([float(n) for n in lengths for _ in range(n)]), mask.device)
    return torch.ones(mask.shape, device=mask.device).masked_scatter(mask, of_token)


def split(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def n_response_tokens(blocks: list[list[Document]]) -> int:
    """Tokens with loss: the first one of a document is none, whatever its mask says."""
    return sum(int(document.response_mask[1:].sum()) for block in blocks for document in block)


# -- batches ---------------------------------------------------------------------------------------
def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Indices of documents, packed into blocks of at most `size` tokens: first fit, longest first."""
    if max(lengths, default=0) > size:
        raise ValueError(f"a document of {max(lengths)} tokens does not fit into {size}")
    blocks = []
    space = numpy.full(len(lengths), size)  # room in each block, those not begun included
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = int((space[: len(blocks) + 1] >= lengths[index]).argmax())  # the first with room
        if place == len(blocks):
            blocks.append([])
        blocks[place].append(index)
        space[place] -= lengths[index]
    return blocks


def pack_evenly(lengths: list[int], size: int, multiple: int) -> list[list[int]]:
    """Pack as `pack` does, into the least multiple of `multiple` blocks that fits: each document, longest
    first, goes to the shortest block. Fewer documents than blocks have a block each."""
    first_fit = pack(lengths, size)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    n = math.ceil(len(first_fit) / multiple) * multiple
    while True:
        blocks = [[] for _ in range(n)]
        room = numpy.full(n, size)
        for index in longest_first:
            shortest = int(room.argmax())
            blocks[shortest].append(index)
            room[shortest] -= lengths[index]
        if room.min(initial=0) >= 0:
            return [block for block in blocks if block]
        if n == len(first_fit):
            return first_fit
        n += multiple


def make_blocks(
    documents: list[Document], max_length: int, packing=True, multiple=1
) -> list[list[Document]]:
    """Documents -> blocks, lists of documents that share a row: packed, or one each. multiple: ranks that
    share the blocks; their number becomes a multiple of it, and the rows about equally long."""
    if not packing:
        return [[document] for document in documents]
    lengths = [len(document.ids) for document in documents]
    packed = pack(lengths, max_length) if multiple == 1 else pack_evenly(lengths, max_length, multiple)
    return [[documents[i] for i in block] for block in packed]


class Batch(NamedTuple):
    input_ids: torch.Tensor  # (B, T)
    position_ids: torch.Tensor  # (B, T), 0 at the first token of each document
    action_mask: torch.Tensor  # (B, T-1), True where token t+1 is a response token
    token_indices: torch.Tensor  # (2, n), row and column of each True
    documents: list[Document]  # row by row


def collate(blocks: list[list[Document]], pad_id: int, device="cpu") -> Batch:
    """One row a block, right-padded to the longest block. No blocks: one row that carries no loss, for a rank
    that has nothing left to do while others still have (all must run the same number of forwards)."""
    width = max(map(n_tokens, blocks), default=2)
    input_ids = torch.full((max(1, len(blocks)), width), pad_id)
    position_ids = torch.zeros_like(input_ids)
    response_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for i, block in enumerate(blocks):
        start = 0
        for document in block:
            end = start + len(document.ids)
            input_ids[i, start:end] = document.ids
            position_ids[i, start:] = torch.arange(width - start)  # padding goes on with the last one
            response_mask[i, start:end] = document.response_mask
            response_mask[i, start] = False  # what stands before it is another document: no target
            start = end
    documents = [document for block in blocks for document in block]
    mask = response_mask[:, 1:].contiguous()
    tensors = (input_ids, position_ids, mask, mask.nonzero().T)  # on a device, nonzero would wait for it
    return Batch(*(to_device(x, device) for x in tensors), documents)


def my_micro_batches(blocks: list[list[Document]], model, size: int):
    """This rank's share of the blocks (dist.my_batches) as batches of at most `size` rows for `model`. A rank
    that runs out of blocks gets batches that carry no loss."""
    for share in dist.my_batches(blocks, size, n_tokens):
        yield collate(share, model.config.pad_token_id, model.device)


ROW = 64  # tokens that a row of packed trees may have, even if each tree is shorter


class Comparison(NamedTuple):
    prompt: list[dict]  # messages
    texts: list[str]  # K responses; of a pair, the chosen one first
    prompt_ids: torch.Tensor  # (P,) int32
    response_ids: list[torch.Tensor]  # K of (R,) int32, the end token included
    ranks: torch.Tensor  # (K,), 0 is best; one that is behind by less than 1 is no worse
    source: str  # the data set, for metrics and tables
    row: Row
    rating: str | None = None  # one of RATINGS
    margin: float | None = None  # Llama 2's m as the row gives it
    margins: torch.Tensor | None = None  # (K, K), Llama 2's m of every two responses in the loss
    label_scores: list[float] | None = None  # the K scores that the labels come from
    preference: float | None = None  # P(texts[0] is better), a soft label
    category: str | None = None
    indices: tuple = (0, 1)  # which of the row's responses these are
    samples: tuple = ()  # more responses to the prompt, ids like response_ids, without a label
    ratios: torch.Tensor | None = None  # (responses and samples, k), the advantage model's, eq. 8
    ref_logprobs: torch.Tensor | None = None  # (K,), DPO's, log pi_0(y | x) of each response, nats

    @property
    def key(self) -> str:
        return turns_key(self.prompt)

    @property
    def questions(self) -> dict[tuple, int]:
        return held_out_keys([self.prompt])

    @property
    def n_tokens(self):
        return len(self.prompt_ids) + sum(map(len, (*self.response_ids, *self.samples)))


def labelled_pairs(comparison) -> list[tuple[int, int]]:
    """(better, worse) for all pairs of responses whose ranks are 1 or more apart, of a soft label by its
    likelier side."""
    ranks = comparison.ranks.tolist()
    return [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a + 1 <= b]


# -- comparisons -> batches ------------------------------------------------------------------------
class ComparisonBatch(NamedTuple):
    input_ids: torch.Tensor  # (B, T)
    position_ids: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor | None  # (B, 1, T, T) bool, True where a query may look; None: causal
    prompt_ends: torch.Tensor  # (2, n_comparisons), row and column of each prompt's last token
    response_ends: torch.Tensor  # (2, n_responses), of each response's end token, comparison by comparison
    sizes: list[int]  # responses of each comparison, samples included
    comparisons: list[Comparison]


def my_comparison_batches(comparisons, model, micro_batch_size, share_prompt):
    """This rank's share of `comparisons` (dist.my_batches), as batches for `model`."""
    for share in dist.my_batches(comparisons, micro_batch_size, lambda c: c.n_tokens):
        yield collate_comparisons(share, model.config.pad_token_id, share_prompt, model.device)


def collate_comparisons(comparisons, pad_id: int, share_prompt=True, device="cpu") -> ComparisonBatch:
    """share_prompt: prompts with all their responses, packed into rows as long as the longest of them or ROW;
    else one row a response, for models that read neither such masks nor positions. No comparisons: a row of
    padding at which nothing is read."""
    trees = []  # (place of its comparison, its prompt and responses)
    for i, c in enumerate(comparisons):
        responses = [*c.response_ids, *c.samples]
        rows = [responses] if share_prompt else [[ids] for ids in responses]
        trees += [(i, [c.prompt_ids, *row]) for row in rows]
    lengths = [sum(map(len, pieces)) for _, pieces in trees]
    rows = [[i] for i in range(len(trees))]
    if share_prompt:  # rows of some length pack tighter, and cost little attention
        rows = pack(lengths, max([ROW, *lengths]))
    row_length = lambda row: sum(lengths[i] for i in row)
    width = max(map(row_length, rows), default=2)
    input_ids = torch.full((max(1, len(rows)), width), pad_id)
    position_ids, tree, branch = (torch.zeros_like(input_ids) for _ in range(3))
    ends = [[] for _ in comparisons]  # of its prompt (of one in several rows, the first), of its responses
    for row, places in enumerate(rows):
        column = 0
        for number, (i, pieces) in enumerate((trees[place] for place in places), 1):
            for piece, ids in enumerate(pieces):
                start = len(pieces[0]) if piece else 0
                here = slice(column, column + len(ids))
                input_ids[row, here] = ids
                position_ids[row, here] = torch.arange(start, start + len(ids))
                tree[row, here], branch[row, here] = number, piece
                column += len(ids)
                if piece or not ends[i]:
                    ends[i].append((row, column - 1))
    mask = None
    if share_prompt:
        tree, branch = to_device(tree, device), to_device(branch, device)
        same_tree = tree[:, :, None] == tree[:, None, :]  # (B, query, key)
        seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        mask = (same_tree & seen & torch.ones(width, width, dtype=torch.bool, device=device).tril())[:, None]
    else:  # on over the padding: transformers takes a position that falls for the start of a packed document
        position_ids = torch.arange(width).expand_as(input_ids).clone()
    prompt_ends = torch.tensor([end[0] for end in ends], dtype=torch.long).reshape(-1, 2).T
    response_ends = [place for end in ends for place in end[1:]]
    response_ends = torch.tensor(response_ends, dtype=torch.long).reshape(-1, 2).T
    tensors = (input_ids, position_ids, prompt_ends, response_ends)
    input_ids, position_ids, prompt_ends, response_ends = (to_device(x, device) for x in tensors)
    sizes = [len(c.response_ids) + len(c.samples) for c in comparisons]
    return ComparisonBatch(input_ids, position_ids, mask, prompt_ends, response_ends, sizes, comparisons)


@torch.no_grad()
def of_each_comparison(forward, model, comparisons, micro_batch_size, share_prompt) -> list:
    """What `forward`(model, batch), a list with a value for each comparison of a batch, says of every
    comparison, on every rank. Every rank must call it."""
    place = {id(c): i for i, c in enumerate(comparisons)}
    values = []
    for batch in my_comparison_batches(comparisons, model, micro_batch_size, share_prompt):
        values += [(place[id(c)], value) for c, value in zip(batch.comparisons, forward(model, batch))]
    return [value for _, value in sorted(dist.gather(values), key=lambda item: item[0])]
