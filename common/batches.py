"""Make batches of token ids: packed documents, and comparisons whose responses share a prompt.

A comparison is one row x y_1 y_2 ... y_K: a prompt and all its responses. Each response has the positions
right after x and cannot attend to the other responses, so the prompt is computed once and the results equal
those of K separate rows. If there is room, a row holds several such trees. Documents of a rollout that
answer the same prompt share it in the same way. Batches are divided among ranks here too."""

import json
import math
from itertools import accumulate
from typing import NamedTuple

import numpy
import torch

from . import dist
from .sampler import to_device


class Row(NamedTuple):
    """A row of a data set, with its origin."""

    where: str  # "file:12", for messages
    data: dict
    read: frozenset = frozenset()  # cells that have been used already, as formats.Cells records them


class Document(NamedTuple):
    """A tokenised dialogue or text, with a mask of the tokens to learn."""

    ids: torch.Tensor  # (T,) int32
    response_mask: torch.Tensor  # (T,) bool, True for response tokens, including the end-of-sequence token
    messages: list[dict]
    row: Row
    number: int = 0  # index among the responses of a rollout (responses.documents) or a batch of comparisons
    all_turns: bool = False  # True if all assistant turns are learnt, False if only the last one is
    shared: int = 0  # number of its first tokens that its row holds already (a shared prompt)

    @property
    def key(self) -> str:
        return turns_key(self.messages[:-1])


def turns_key(turns: list[dict]) -> str:
    """Return a string that is equal for equal prompts."""
    return json.dumps([[m["role"], m["content"].strip()] for m in turns])


def printable(value) -> str | None:
    """Convert a category to text that can be printed; an unpaired surrogate becomes `?`."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def n_tokens(block: list[Document]) -> int:
    """Count the tokens of documents that share a row."""
    return sum(len(document.ids) - document.shared for document in block)


def response_mask(documents: list[Document]) -> torch.Tensor:
    """Make a (B, R) mask. Row i is True in its first columns, one for each response token of document i.

    R is the number of tokens of the longest response."""
    lengths = torch.tensor(response_sizes(documents))
    return torch.arange(int(lengths.max())) < lengths[:, None]


def response_lengths(batch) -> torch.Tensor:
    """Return (B, T-1): at each response token of a batch, the length of its response; 1 elsewhere."""
    mask = batch.action_mask
    lengths = [float(n) for n in response_sizes(batch.documents) for _ in range(n)]
    of_token = to_device(torch.tensor(lengths), mask.device)
    return torch.ones(mask.shape, device=mask.device).masked_scatter(mask, of_token)


def split(items: list, size: int) -> list[list]:
    """Cut a list into lists of `size` items; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def n_response_tokens(blocks: list[list[Document]]) -> int:
    """Count the tokens that have a loss. A document's first token never has one: nothing predicts it."""
    return sum(int(document.response_mask[1:].sum()) for block in blocks for document in block)


def response_sizes(documents: list[Document]) -> list[int]:
    """List the number of tokens of each document that have a loss."""
    return [n_response_tokens([[document]]) for document in documents]


# -- batches ---------------------------------------------------------------------------------------
def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Pack documents into blocks of at most `size` tokens: first fit, longest document first.

    lengths: tokens of each document. Returns the documents' indices, block by block.
    Raises ValueError if a document is longer than `size`."""
    if max(lengths, default=0) > size:
        raise ValueError(f"a document of {max(lengths)} tokens does not fit into {size}")
    blocks = []
    space = numpy.full(len(lengths), size)  # free tokens in each block, started or not
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = int((space[: len(blocks) + 1] >= lengths[index]).argmax())  # first block with room
        if place == len(blocks):
            blocks.append([])
        blocks[place].append(index)
        space[place] -= lengths[index]
    return blocks


def pack_evenly(lengths: list[int], size: int, multiple: int) -> list[list[int]]:
    """Pack documents into blocks of similar length, whose number is a multiple of `multiple` (the ranks).

    Documents go, longest first, to the shortest block so far. The number of blocks begins at that of `pack`,
    rounded up to a multiple, and rises until all blocks hold at most `size` tokens. Where only the blocks of
    `pack` hold them, as many but uneven, it returns these. If there are fewer documents than blocks, each has
    its own, and their number is no multiple."""
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


def make_blocks(documents, max_length, packing=True, multiple=0, share_prompt=False) -> list[list[Document]]:
    """Group documents into blocks, lists of documents that share a row; without packing, one document each.

    documents: list[Document]. max_length: tokens in a row.
    multiple: 0 fills the rows as far as possible. Otherwise the number of ranks that share the blocks: rows
      are about equally long, and if there are enough documents, their number is a multiple of it, so that no
      rank waits for another and a micro-batch has little padding.
    share_prompt: True forms trees of a rollout's responses (responses.documents) to one prompt: their row has
      the prompt once. Responses that would make the row longer than max_length begin another tree. With fewer
      trees than ranks, no prompt is shared.
    Raises ValueError if a document is longer than max_length (not without packing)."""
    if not packing:
        return [[document] for document in documents]
    trees = []
    last_prompt = None
    for document in documents if share_prompt else ():
        prompt = document.ids[: len(document.ids) - n_response_tokens([[document]])]
        tree = trees[-1] if trees else []
        follows = tree and tree[-1].number < document.number and torch.equal(prompt, last_prompt)
        if follows and n_tokens([*tree, document]) - len(prompt) <= max_length:
            tree.append(document._replace(shared=len(prompt)))
        else:
            trees.append([document])
        last_prompt = prompt
    if not trees or len(trees) < multiple:  # share none: a tree needs one row, so some ranks would have none
        trees = [[document] for document in documents]
    lengths = list(map(n_tokens, trees))
    packed = pack_evenly(lengths, max_length, multiple) if multiple else pack(lengths, max_length)
    return _blocks_of(trees, packed)


def _blocks_of(trees, packed) -> list[list[Document]]:
    """Return the documents of each row. packed: the indices of its trees."""
    return [[document for i in row for document in trees[i]] for row in packed]


class Batch(NamedTuple):
    """Rows of packed documents, on the model's device. A batch of comparisons has a document per response."""

    input_ids: torch.Tensor  # (B, T)
    position_ids: torch.Tensor  # (B, T), 0 at the first token of a document; they go on after a shared prompt
    action_mask: torch.Tensor  # (B, T-1), True where token t+1 is a response token
    token_indices: torch.Tensor  # (2, n), row and column of each True in action_mask
    # (2, n), row and column of the token that is read to predict each response token: token_indices, except
    # that the first token of a response is predicted at the end of a prompt that it shares
    sources: torch.Tensor
    documents: list[Document]  # in the order of their rows and columns
    attention_mask: torch.Tensor | None = None  # (B, 1, T, T) bool, if prompts may be shared: tree_mask
    # Of a batch of comparisons only:
    comparisons: list = ()
    sizes: list[int] = ()  # responses of each comparison, including samples
    response_ends: torch.Tensor | None = None  # (2, n_responses), row and column of the last token of each
    prompt_ends: torch.Tensor | None = None  # (2, n_comparisons), of each prompt's last token


def collate(blocks: list[list[Document]], pad_id: int, device="cpu", masked=False) -> Batch:
    """Make a batch with one row per block, right-padded to the longest block.

    masked: make an attention mask even if no prompt is shared.
    Without blocks it is one row that has no loss, for a rank with nothing left to do: all ranks must run the
    same number of forwards."""
    width = max(map(n_tokens, blocks), default=2)
    input_ids = torch.full((max(1, len(blocks)), width), pad_id)
    position_ids, tree, branch = (torch.zeros_like(input_ids) for _ in range(3))
    response_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    before = torch.arange(-1, width - 1).repeat(len(input_ids), 1)  # column of the token before each token
    for i, block in enumerate(blocks):
        end = first = 0
        for number, document in enumerate(block, 1):
            shared, start = document.shared, end
            end += len(document.ids) - shared
            input_ids[i, start:end] = document.ids[shared:]
            position_ids[i, start:] = torch.arange(width - start) + shared  # padding continues the last one
            response_mask[i, start:end] = document.response_mask[shared:]
            if shared:
                before[i, start] = first + shared - 1  # the last token of the prompt
            else:
                first = start  # column of its prompt
                response_mask[i, start] = False  # not a target: the token before is another document's
            tree[i, start:] = first
            branch[i, start:end] = number * response_mask[i, start:end]
    documents = [document for block in blocks for document in block]
    # In a row of several documents, padding could count on past the model's last position
    position_ids.clamp_(max=max((len(document.ids) for document in documents), default=2) - 1)
    mask = response_mask[:, 1:].contiguous()
    token_indices = mask.nonzero().T  # on a GPU, nonzero would wait for its queue
    sources = torch.stack([token_indices[0], before[:, 1:][mask]])
    tensors = (input_ids, position_ids, mask, token_indices, sources)
    attention_mask = tree_mask(tree, branch, device) if masked or any(d.shared for d in documents) else None
    return Batch(*(to_device(x, device) for x in tensors), documents, attention_mask)


def tree_mask(tree, branch, device) -> torch.Tensor:
    """Make the attention mask of rows of trees, a prompt with its responses each.

    tree: (B, T), a number for each tree of a row. branch: (B, T), a number for each response, 0 in prompts.
    Returns (B, 1, T, T) bool, True if a query may attend: to its prompt and to its own response so far."""
    tree, branch = to_device(tree, device), to_device(branch, device)
    same_tree = tree[:, :, None] == tree[:, None, :]  # (B, query, key)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return (same_tree & seen).tril()[:, None]


def my_micro_batches(blocks: list[list[Document]], model, size: int):
    """Yield this rank's share of the blocks (dist.my_batches) as batches of at most `size` rows for `model`.

    A rank that runs out of blocks gets batches without loss."""
    for share in dist.my_batches(blocks, size, n_tokens):
        yield collate(share, model.config.pad_token_id, model.device)


ROW = 64  # tokens; a row of packed trees may hold this many, even if the longest tree is shorter


class Comparison(NamedTuple):
    """A prompt and K responses to it, ranked by an annotator."""

    prompt: list[dict]  # messages
    texts: list[str]  # K responses; in a pair the chosen one first, unless a soft label favours the other
    prompt_ids: torch.Tensor  # (P,) int32
    response_ids: list[torch.Tensor]  # K of (R,) int32, R >= 1, with the end-of-sequence token if it has one
    # (K,), 0 is the best; a difference below 1 is a tie. [0, 1] in a pair without a soft label
    ranks: torch.Tensor
    source: str  # data set, for metrics and tables
    row: Row
    rating: str | None = None  # one of comparisons.RATINGS
    margin: float | None = None  # Llama 2's margin m as given in the row
    margins: torch.Tensor | None = None  # (K, K), the margin between each two responses in the loss
    label_scores: list[float] | None = None  # K scores that the ranks were made from
    preference: float | None = None  # soft label: probability that texts[0] is better
    category: str | None = None
    indices: tuple = (0, 1)  # positions of these responses in the row
    samples: tuple = ()  # further responses without labels, ids as in response_ids
    # (K + samples, n), ratios to n other policies, for advantage_model.py; None: there are no others
    ratios: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None  # (K,), nats, log pi_0(y | x), for DPO

    @property
    def key(self) -> str:
        return turns_key(self.prompt)

    @property
    def n_tokens(self):
        """The tokens of the prompt, once, and of all responses."""
        return len(self.prompt_ids) + sum(map(len, (*self.response_ids, *self.samples)))


def labelled_pairs(comparison) -> list[tuple[int, int]]:
    """List (better, worse) indices for all pairs of responses whose ranks differ by at least 1.

    A soft label counts as its more likely side."""
    ranks = comparison.ranks.tolist()
    return [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a + 1 <= b]


# -- comparisons -> batches ------------------------------------------------------------------------
def my_comparison_batches(comparisons, model, micro_batch_size, share_prompt):
    """Yield this rank's share of the comparisons (dist.my_batches) as batches for `model`."""
    for share in dist.my_batches(comparisons, micro_batch_size, lambda c: c.n_tokens):
        yield collate_comparisons(share, model.config.pad_token_id, share_prompt, model.device)


def collate_comparisons(comparisons, pad_id: int, share_prompt=True, device="cpu") -> Batch:
    """Make a batch of comparisons, in which each response is a document.

    share_prompt: True packs trees, a prompt with all its responses, into rows of at most
      max(ROW, longest tree) tokens. False makes one row per response, for models without support for this.
    Without comparisons the batch is one row of padding, where no output is read."""
    trees = []
    sizes = [len(c.response_ids) + len(c.samples) for c in comparisons]
    firsts = list(accumulate(sizes, initial=0))[:-1]  # number of each comparison's first response
    for c, first in zip(comparisons, firsts):
        tree = []
        for number, response in enumerate([*c.response_ids, *c.samples], first):
            ids = torch.cat([c.prompt_ids, response])
            mask = torch.arange(len(ids)) >= len(c.prompt_ids)
            shared = len(c.prompt_ids) if tree and share_prompt else 0
            tree.append(Document(ids, mask, c.prompt, c.row, number, shared=shared))
        trees += [tree] if share_prompt else [[document] for document in tree]
    lengths = list(map(n_tokens, trees))
    # Short trees share rows of at most ROW tokens: less padding, and attention over so few tokens is cheap
    rows = pack(lengths, max([ROW, *lengths])) if share_prompt else [[i] for i in range(len(trees))]
    batch = collate(_blocks_of(trees, rows), pad_id, device, masked=share_prompt)

    # token_indices lists the response tokens row by row: find where each response ends in it, by its number
    n_tokens_of = torch.tensor(response_sizes(batch.documents), dtype=torch.long)
    order = torch.tensor([document.number for document in batch.documents], dtype=torch.long).argsort()
    end = n_tokens_of.cumsum(0)
    last_tokens = to_device((end - 1)[order], device)
    first_tokens = to_device((end - n_tokens_of)[order][firsts], device)
    rows, columns = batch.token_indices[:, last_tokens]  # the token before the last one
    ends = {"response_ends": torch.stack([rows, columns + 1]), "prompt_ends": batch.sources[:, first_tokens]}
    return batch._replace(comparisons=comparisons, sizes=sizes, **ends)


@torch.no_grad()
def of_each_comparison(forward, model, comparisons, micro_batch_size, share_prompt) -> list:
    """Run a forward over all comparisons and return one value for each, in their order, on every rank.

    forward: forward(model, batch) -> list with one value per comparison of the batch.
    Every rank must call it. Raises ValueError if `forward` returns another number of values."""
    comparisons = [c._replace() for c in comparisons]  # copies: one that is listed twice has two places
    place = {id(c): i for i, c in enumerate(comparisons)}
    values = []
    for batch in my_comparison_batches(comparisons, model, micro_batch_size, share_prompt):
        values += [(place[id(c)], x) for c, x in zip(batch.comparisons, forward(model, batch), strict=True)]
    return [value for _, value in sorted(dist.gather(values), key=lambda item: item[0])]
