"""Sample from a transformers causal LM with a key-value cache whose rows differ in length.

Works with almost every model that generates in left-padded batches: full attention, sliding windows,
attention sinks, ALiBi, and convolutions or recurrences between attention layers. Others are refused at their
first use. Needs only torch, numpy, tqdm and transformers 5.21 or newer, so the file can be copied anywhere.
`sample` draws responses; `join` puts prompts and responses together as rows for a loss. To chat with a model
in a terminal (needs tyro): python sampler.py --model DIR (here: python -m common.sampler --model DIR)

A fixed number of slots decodes together. Each slot holds one response at its own length, so no row waits for
a longer one, and when a response ends, the next takes over its slot at once. The n responses to a prompt
share one forward over the prompt. A step costs in proportion to the rows that are still decoding:

    refill   run new prompts once (prefill) and copy their cache into free slots, once per response
    choose   draw a token for every row; a row is done if it drew a stop id or reached max_new_tokens
    compact  move the last live row into the slot of a finished one, so that the live rows come first
    step     run one token per row; all rows write their keys and values into the same cache column
"""

import contextlib
import functools
import inspect
import itertools
import math
import operator
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers.utils.versions import require_version

require_version("transformers>=5.21")  # older caches cannot be filled slot by slot
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

PREFILL_TOKENS = 4096  # limit of tokens in one prefill batch; its prompts wait in memory until slots are free
SIMILAR_LENGTH = 0.8  # a prefill batch takes prompts of at least this share of the longest one's length
SPARE_COLUMNS = 32  # extra cache columns: steps between two moves of all rows back to the first columns
SMALL_WINDOW = 300  # tokens; the check at first use samples past sliding windows up to this size
LAYERS = """DynamicLayer DynamicSlidingWindowLayer LinearAttentionLayer LinearAttentionAndFullAttentionLayer
LinearAttentionAndSlidingWindowAttentionLayer DummyLayer""".split()  # supported cache layers of transformers
LARGE_MATRIX = 2**18  # weights; see _few_rows
CACHES = "cache", "past_key_values", "cache_params"  # the forward's argument in transformers 5.24, and before
GRAPH_AFTER = 8  # steps of one shape on a CUDA GPU after which it is captured as a graph; math.inf: never
WORKS_AHEAD = ("cuda", "xpu")  # devices that compute while Python continues; reading a result waits for them


class Samples(NamedTuple):
    """B = len(prompts) * n responses in prompt-major order: row i answers prompt i // n."""

    prompt_index: torch.Tensor  # (B,) int64
    response_tokens: torch.Tensor  # (B, R) int64, right-padded with pad_id; R is the longest response
    sample_mask: torch.Tensor  # (B, R) bool, True for response tokens, including the stop id
    sample_logprobs: torch.Tensor  # (B, R) fp32, nats, of the distribution sampled from; 0 outside mask
    finished: torch.Tensor  # (B,) bool, True if a stop id ended the response, False if max_new_tokens cut it


@torch.no_grad()
def sample(
    model, prompts, *, n=1, max_new_tokens, stop_ids, pad_id,
    temperature=1.0, top_p=1.0, top_k=0, vocab_size=0, slots=64, seed=None, progress=False,
):  # fmt: skip
    """Draw n responses to each prompt and return them as Samples on the model's device.

    The model's generation_config is ignored: all settings are arguments.

    model: a transformers causal LM. If it is sharded by FSDP, sample inside `dist.consolidated(model)`.
      Otherwise every step gathers the weights, and ranks that need different numbers of steps deadlock.
    prompts: the output of a tokenizer or of apply_chat_template (attention_mask tells padding apart), or
      token ids without padding: lists of any length from 1, an array or tensor (N, P), or one prompt (P,).
    stop_ids: one id or several that end a response; the stop id is part of it. None: only length ends it.
    temperature: divides the logits; 0 is greedy.
    top_k: keep this number of most likely tokens; 0 keeps all.
    top_p: of these, keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all.
    vocab_size: draw only ids below it; 0: any id that has a logit. Embeddings often have more rows than
      there are tokens, and an id that is no token may be out of range for a smaller model of the family.
    slots: rows that decode together. Memory grows with slots * (longest prompt + max_new_tokens).
    seed: seeds a generator used by this call only; None uses torch's global generator. A row's draws depend
      on the rows that decode with it: the same call repeats exactly, but a different number of slots does
      not.
    max_new_tokens: length limit of a response. pad_id: fills response_tokens after the end of a response.
    progress: True shows a tqdm bar; or pass an object with an `update(n)` method.
    Raises ValueError for arguments out of range and unsupported models, FloatingPointError for NaN logits."""
    usable = {
        "n": n >= 1, "max_new_tokens": max_new_tokens >= 1, "slots": slots >= 1, "top_p": 0 < top_p <= 1,
        "temperature": temperature >= 0, "top_k": top_k >= 0, "vocab_size": vocab_size >= 0,
    }  # fmt: skip
    if not all(usable.values()):
        raise ValueError(f"sample: out of range: {[name for name in usable if not usable[name]]}")
    prompts = token_ids(prompts)
    choice = (temperature, top_p, top_k, vocab_size)
    is_one = isinstance(stop_ids, int) or getattr(stop_ids, "ndim", 1) == 0  # int, numpy or torch scalar
    stop_ids = [] if stop_ids is None else [stop_ids] if is_one else stop_ids
    with _sampling(model):
        _check_model(model, prompts, max_new_tokens)
        return _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, choice, slots, seed, progress)


def _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, choice, slots, seed, progress):
    """Run the sampling loop; the arguments are those of `sample`, checked and unpacked."""
    temperature, top_p, top_k, vocab_size = choice
    device = next(model.parameters()).device
    n_rows = len(prompts) * n
    slots = min(slots, n_rows)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    stop = torch.tensor(sorted(set(map(int, stop_ids))), dtype=torch.long, device=device)
    n_tokens = [0] * n_rows
    finished = set()  # output rows that ended with a stop id
    drawn = []  # (tokens, log probabilities) of each step
    drawn_rows = []  # the output row of each of these tokens

    # Longest prompts first: rows that decode together then have similar lengths, so few of the cache columns
    # that attention reads are padding
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    waiting = deque(i * n + j for i in order for j in range(n))  # output rows without a slot yet
    prefilled = {}  # prompt -> (cache, row in it, logits after the prompt) for the latest prefill batch
    cache = RaggedCache(model, slots, max(map(len, prompts)), max_new_tokens)
    graphs = _Graphs(model, cache)
    live = []  # output rows that are decoding; live[i] is in slot i
    logits = None  # (live, V), for their next tokens
    ahead = device.type in WORKS_AHEAD
    if progress is True:
        progress = tqdm(total=n_rows, desc="sample", unit="row", leave=False)

    def step(token):
        mask = cache.begin([len(prompts[row // n]) + n_tokens[row] - 1 for row in live])  # tokens cached
        token = torch.nn.functional.pad(token, (0, len(mask) - len(live)))
        return graphs.step(token[:, None], mask)[: len(live)]

    while live or waiting:
        # refill
        new = [waiting.popleft() for _ in range(min(slots - len(live), len(waiting)))]
        if new:
            first = []
            for j, r in enumerate(new):
                if r // n not in prefilled:  # every row of the last batch has its slot: run the next batch
                    prefilled = None  # free the old cache first, so that only one is in memory
                    prefilled = _prefill(model, prompts, order[order.index(r // n) :])
                cache.fill(len(live) + j, *prefilled[r // n][:2], len(prompts[r // n]))
                first.append(prefilled[r // n][2])
            logits = torch.cat([logits, torch.stack(first)]) if live else torch.stack(first)
            live += new
            prefilled = prefilled if waiting else None

        # choose
        token, logprob = choose(logits[:, : vocab_size or None], temperature, top_p, top_k, generator)
        if hasattr(model, "agree_on"):  # several ranks run one model, see tensor_parallel.py
            model.agree_on(token)
            model.agree_on(logprob)
        drawn.append((token, logprob))
        drawn_rows += live
        for row in live:
            n_tokens[row] += 1
        stopped = torch.isin(token, stop)
        following = token
        if ahead and any(n_tokens[row] < max_new_tokens for row in live):
            # Queue the next step, finished rows included, before asking which rows have finished. The device
            # then has work while Python reads the answer
            stopped = stopped.to("cpu", non_blocking=True)
            copied = torch.Event(device)
            with torch.accelerator.device_index(device.index):  # the device whose stream copies
                copied.record()
            following = step(token)
            copied.synchronize()
        finished.update(row for row, stops in zip(live, stopped.tolist()) if stops)
        done = [row in finished or n_tokens[row] == max_new_tokens for row in live]

        # compact
        left = len(live) - sum(done)
        holes = [slot for slot in range(left) if done[slot]]
        movers = [slot for slot in range(left, len(live)) if not done[slot]]
        if holes:
            sources, targets = to_device([movers, holes], device)
            cache.move(sources, targets)
            following = following.index_copy(0, targets, following[sources])  # `drawn` keeps the old tensor
            for source, target in zip(movers, holes):
                live[target] = live[source]
        if hasattr(progress, "update"):  # not `if progress`: a tqdm bar without total has no truth value
            progress.update(len(live) - left)
        live = live[:left]

        # step
        logits = following[:left] if ahead or not live else step(following[:left])

    mask = torch.arange(max(n_tokens), device=device) < to_device(n_tokens, device)[:, None]  # (B, R)
    order = to_device(torch.tensor(drawn_rows).argsort(stable=True), device)  # by row, then by time
    tokens = torch.cat([tokens for tokens, _ in drawn])[order]
    logprobs = torch.cat([logprobs for _, logprobs in drawn])[order]
    if logprobs.isnan().any():
        raise FloatingPointError("sample: the model gives NaN logits")
    tokens = tokens.new_full(mask.shape, pad_id).masked_scatter(mask, tokens)
    logprobs = logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)
    finished = to_device([row in finished for row in range(n_rows)], device)
    return Samples(torch.arange(n_rows, device=device) // n, tokens, mask, logprobs, finished)


def to_device(x, device):
    """Copy a CPU tensor or a list of numbers to the device without waiting for the device's queue."""
    x = torch.as_tensor(x)
    if torch.device(device).type not in WORKS_AHEAD:  # on Apple's MPS the source could be freed too early
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # only pinned memory is copied without waiting


def choose(logits, temperature, top_p, top_k, generator=None):
    """Draw one token per row: logits (S, V) -> (tokens (S,), their log probabilities (S,), fp32).

    Log probabilities are those of the distribution that was drawn from: after temperature, top-k and
      top-p."""
    if temperature == 0:  # greedy is a point mass, and log 1 = 0
        largest, token = logits.float().max(-1)
        return token, largest * 0  # 0, or NaN for NaN logits, which the check at the end of _sample finds
    probs = (logits.float() / temperature).softmax(-1)
    ids = None
    if top_p < 1 or 0 < top_k < probs.shape[-1]:
        probs, ids = _most_likely(probs, top_p, top_k)
    place, logprob = _draw(probs, generator)
    token = place if ids is None else ids.gather(1, place)
    return token[:, 0], logprob


def _most_likely(probs, top_p, top_k):
    """Apply top-k, then top-p: probs (S, V) -> (probabilities, most likely first, 0 if cut; their ids)."""
    vocabulary = probs.shape[-1]
    if 0 < top_k < vocabulary:
        ranked, ids = probs.topk(top_k)
        whole = ranked.sum(-1, keepdim=True)
    else:  # sorting a whole vocabulary can cost more than the model, so try the top 1,024 tokens, then more
        ranked, ids = probs.topk(min(1024, vocabulary))
        whole = probs.sum(-1, keepdim=True)  # not exactly 1: an fp32 sum over a vocabulary errs by up to 1e-5
        # On a GPU, Python waits here for whether they suffice. Without that, each step would have to sort the
        # vocabulary: 4.8 s instead of 0.32 s for 64 rows of 151,936 tokens on a CPU core
        while ranked.shape[1] < vocabulary and (ranked.sum(-1, keepdim=True) < top_p * whole).any():
            ranked, ids = probs.topk(min(8 * ranked.shape[1], vocabulary))
    before = ranked.cumsum(-1) - ranked  # probability of all more likely tokens
    return torch.where(before < top_p * whole, ranked, 0.0), ids


def _draw(probs, generator):
    """Draw one token per row from unnormalised probs (S, V); return (indices, log probabilities).

    Inverse transform sampling: take the first token whose cumulative mass exceeds a uniform share of the
    total. A token of mass 0 can never be that one."""
    mass = probs.cumsum(-1)
    share = torch.rand(probs.shape[0], 1, device=probs.device, generator=generator) * mass[:, -1:]
    place = torch.searchsorted(mass, share, right=True).clamp_(max=probs.shape[-1] - 1)
    # rounding can lift the share to the total mass, past the last token: take the most likely token then
    place = torch.where(probs.gather(1, place) > 0, place, probs.argmax(-1, keepdim=True))
    return place, (probs.gather(1, place) / mass[:, -1:]).log()[:, 0]


# -- prompts ---------------------------------------------------------------------------------------
def token_ids(prompts) -> list[list[int]]:
    """Convert prompts, in any form that `sample` takes, to one list of token ids each, without padding."""
    given = prompts if isinstance(prompts, Mapping) else {"input_ids": prompts}
    ids = given.get("input_ids")
    mask = given.get("attention_mask")
    try:
        rows, masks = ([ids], [mask]) if np.ndim(ids[0]) == 0 else (ids, mask)
        rows = [[operator.index(token) for token in row] for row in rows]
        if mask is not None:
            rows = [list(itertools.compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]
        if not all(rows):
            raise ValueError("a prompt without tokens")
    except (TypeError, ValueError, IndexError):
        wanted = "token ids, at least one a prompt, or what apply_chat_template returns"
        raise ValueError(f"sample: prompts must be {wanted}, got {str(prompts)[:60]!r}") from None
    return rows


def join(prompts, samples, pad_id=0):
    """Join each of B responses to its prompt, as inputs of a forward and the losses.

    Returns (input_ids, attention_mask, action_mask):
    input_ids: (B, T) int64, right-padded with pad_id. attention_mask: (B, T) int64, 0 for padding.
    action_mask: (B, T-1) bool, True at t if token t+1 is a response token; the stop id is one.
    To lay out per-token values (B, R) of the samples, such as sample_logprobs, like action_mask:
    values.new_zeros(action_mask.shape).masked_scatter(action_mask, values[samples.sample_mask])."""
    index = samples.prompt_index
    prompts = token_ids(prompts)
    starts = index.new_tensor([len(prompt) for prompt in prompts])[index, None]  # (B, 1), start of responses
    ends = starts + samples.sample_mask.sum(1, keepdim=True)
    place = torch.arange(int(ends.max()), device=index.device)
    response_mask = (place >= starts) & (place < ends)
    input_ids = index.new_full(response_mask.shape, pad_id)
    input_ids[place < starts] = index.new_tensor([token for i in index for token in prompts[i]])
    input_ids[response_mask] = samples.response_tokens[samples.sample_mask]
    return input_ids, (place < ends).long(), response_mask[:, 1:]


# -- the cache -------------------------------------------------------------------------------------
class _Layer(LinearAttentionAndFullAttentionLayer):
    """Hold one layer's cache for every slot: keys and values, and the states of convolutions or recurrences.

    States have no length dimension; the parent class updates them."""

    def __init__(self, like, slots, columns):
        super().__init__(getattr(like, "number_of_states", 1))
        self.has_previous_state = dict.fromkeys(self.has_previous_state, True)
        self.is_sliding = hasattr(like, "sliding_window")
        self.window = like.sliding_window if self.is_sliding else columns
        self.slots = slots
        self.columns = columns
        self.tokens = {}  # "keys", "values" -> (slots, heads, columns, head_dim)
        self.states = {}  # ("conv_states" or "recurrent_states", index) -> (slots, ...)

    def fill(self, slot, end, prefilled, row, length):
        """Copy one row of a prefilled layer into a slot, so that its last token is in column end - 1."""
        for kind in ("keys", "values") if getattr(prefilled, "keys", None) is not None else ():
            rows = getattr(prefilled, kind)
            if kind not in self.tokens:
                self.tokens[kind] = rows.new_zeros(self.slots, rows.shape[1], self.columns, rows.shape[3])
            last = min(length, rows.shape[2])  # a sliding-window layer keeps only its window
            self.tokens[kind][slot, :, end - last : end] = rows[row, :, -last:]
        for kind in ("conv_states", "recurrent_states"):
            for i, state in getattr(prefilled, kind, {}).items():
                if state is not None:
                    if (kind, i) not in self.states:
                        self.lazy_initialization(**{kind: state}, state_idx=i)
                        self.states[kind, i] = state.new_zeros(self.slots, *state.shape[1:])
                    self.states[kind, i][slot] = state[row]

    def begin(self, live, start, stop, end, place):
        """Prepare a step of the first `live` rows that writes column `place` and reads columns start to stop.

        place: end - 1, as a number or a tensor. A sliding-window layer reads only its window before `end`."""
        self.live = live
        self.longest = stop - start - 1
        self.read = slice(max(start, end - self.window), stop)
        self.place = place
        for (kind, i), state in self.states.items():
            getattr(self, kind)[i] = state[:live]  # a view: the step writes into the slots

    def update(self, new_keys, new_values, *args, **kwargs):
        """Write one new token per live row; return the live rows' keys and values inside the window."""
        for tokens, new in zip(self.tokens.values(), (new_keys, new_values)):
            if isinstance(self.place, int):
                tokens[: self.live, :, self.place] = new[:, :, 0]
            else:
                tokens[: self.live].index_copy_(2, self.place, new)
        return [x[: self.live, :, self.read] for x in self.tokens.values()]

    def get_mask_sizes(self, query_length):
        width = self.read.stop - self.read.start
        return width, self.longest + 1 - width

    def get_seq_length(self):
        return self.longest


def _width_multiple(device) -> int:
    """Return the number that the width of a decoding step is rounded up to a multiple of.

    If it is not 1, rows are also rounded up, to a power of two. A GPU selects, and sometimes builds, an
    attention kernel for each new shape, so few shapes are worth some masked columns and idle rows. On a CPU
    these only cost time."""
    return 1 if device.type == "cpu" else 64


def cache_columns(n_tokens, device) -> int:
    """Return the columns of a cache for rows of up to n_tokens tokens, rounded like a step's width."""
    multiple = _width_multiple(device)
    return math.ceil(n_tokens / multiple) * multiple + SPARE_COLUMNS


class RaggedCache(Cache):
    """A transformers cache for decoding one token per row and step, with rows of different lengths.

    All rows end in the same column. The model sees a left-padded batch and derives positions, masks and
    windows from it as usual. If steps can be captured as CUDA graphs, a step reads from the first column on,
    so that where it reads depends on its shape only; the mask then ends in free columns."""

    def __init__(self, model, slots, longest_prompt, max_new_tokens):
        self.device = next(model.parameters()).device
        self.multiple = _width_multiple(self.device)
        columns = cache_columns(longest_prompt + max_new_tokens, self.device)
        likes = DynamicCache(config=model.config).layers
        config = model.config
        super().__init__(layers=[_Layer(like, slots, columns) for like in likes])
        # With full attention in all layers, pass the finished mask, so that the model need not build it anew
        full = all(type(like) is DynamicLayer for like in likes) and not getattr(config, "alibi", False)
        taken = _arguments(type(model), type(config))
        # varlen, of models.py, decodes with SDPA
        self.is_plain = full and config._attn_implementation in ("sdpa", "varlen") and "position_ids" in taken
        self.in_place = False  # set by _Graphs
        self.place = torch.zeros(1, dtype=torch.long, device=self.device)  # the column that a step writes
        self.slots = slots
        self.columns = columns
        self.longest_prompt = longest_prompt
        self.held = longest_prompt  # length of the longest live row, or of the longest prompt
        self.end = columns  # all rows end in the column before this one

    def fill(self, slot, prefilled, row, length):
        """Copy a prefilled prompt of `length` tokens, row `row` of the cache `prefilled`, into a slot."""
        for layer, prefilled_layer in zip(self.layers, prefilled.layers):
            layer.fill(slot, self.end, prefilled_layer, row, length)

    def move(self, sources, targets):
        """Copy the rows in slots `sources` to slots `targets`."""
        columns = slice(self.end - self.held, self.end)
        for layer in self.layers:
            for tokens in layer.tokens.values():
                tokens[targets, :, columns] = tokens[sources, :, columns]
            for state in layer.states.values():
                state[targets] = state[sources]

    def begin(self, lengths):
        """Make room for one more token; live rows' lengths -> attention mask (rows, columns read), bool.

        The number of rows may be rounded up. Each further row sees only its own new token and writes into a
        free slot, in which `fill` overwrites everything that a later response sees."""
        longest = max(lengths)
        self.held = max(self.longest_prompt, longest)
        room = 0 if self.in_place else self.multiple - 1  # to round the longest row up
        wasted = self.in_place and self.end - self.held >= self.multiple  # columns that are read for no row
        if self.end == self.columns or wasted:  # move all rows back
            end = min(self.held + room, self.columns - SPARE_COLUMNS)
            for tokens in (tokens for layer in self.layers for tokens in layer.tokens.values()):
                tokens[:, :, end - self.held : end] = tokens[:, :, self.end - self.held : self.end].clone()
            self.end = end
        self.end += 1
        self.held = max(self.held, longest + 1)
        width = math.ceil((self.end if self.in_place else longest + 1) / self.multiple) * self.multiple
        start, stop, place = self.end - width, self.end, self.end - 1
        if self.in_place:
            start, stop, place = 0, min(width, self.columns), self.place.fill_(self.end - 1)
        if self.multiple > 1:
            lengths = lengths + [0] * (min(2 ** (len(lengths) - 1).bit_length(), self.slots) - len(lengths))
        for layer in self.layers:
            layer.begin(len(lengths), start, stop, self.end, place)
        # How far each column lies before the new token's, which has 0; below 0 are free columns
        back = torch.arange(self.end - 1 - start, self.end - 1 - stop, -1, device=self.device)
        return (back >= 0) & (back <= to_device(lengths, self.device)[:, None])


class _Graphs:
    """Run decoding steps; on a CUDA GPU, those of a frequent shape as a CUDA graph.

    A step of a model of 1B parameters starts hundreds of kernels, and Python takes longer to start them than
    the GPU to run them (docs/results/gpu.md). A graph starts them all at once: the same kernels on the same
    memory. So each shape of a step has a graph, and its inputs are copied to where the graph reads them.
    Graphs last for one call of `sample`, since the weights may move afterwards."""

    def __init__(self, model, cache):
        self.model = model
        self.cache = cache
        self.counts = Counter()  # shape of the mask -> number of its steps
        self.graphs = {}  # shape -> (graph, its tokens, its mask)
        self.pool = None  # memory that all graphs share, since only one runs at a time
        self.logits = None  # (slots, V), to which all graphs write
        # A graph would leave out what hooks do: FSDP's gather weights, those of a shared model add up
        hooks = (hook for m in model.modules() for hook in (m._forward_pre_hooks, m._forward_hooks))
        fails = getattr(model, "capture_fails", False)
        self.usable = cache.is_plain and cache.device.type == "cuda" and not any(hooks) and not fails
        cache.in_place = self.usable

    def step(self, ids, mask):
        """Return what _next_logits returns. The next step may overwrite it."""
        shape = mask.shape
        if shape not in self.graphs:
            logits = _next_logits(self.model, ids, mask, self.cache)
            self.counts[shape] += 1
            if self.usable and self.counts[shape] >= GRAPH_AFTER:
                self.capture(ids.clone(), mask.clone(), logits)
            return logits
        graph, own_ids, own_mask = self.graphs[shape]
        own_ids.copy_(ids)
        own_mask.copy_(mask)
        graph.replay()
        return self.logits[: len(ids)]

    def capture(self, ids, mask, logits):
        """Record a step, without running it, whose graph reads these two tensors. logits: like its own."""
        if self.logits is None:
            self.logits = logits.new_empty(self.cache.slots, logits.shape[-1])
            self.pool = torch.cuda.graph_pool_handle()
        graph, device = torch.cuda.CUDAGraph(), self.cache.device
        options = {"pool": self.pool, "stream": _stream(device), "capture_error_mode": "thread_local"}
        back = torch.cuda.stream(torch.cuda.current_stream(device))  # a capture that fails does not go back
        try:
            with back, torch.cuda.graph(graph, **options):
                self.logits[: len(ids)] = _next_logits(self.model, ids, mask, self.cache)
            self.graphs[mask.shape] = graph, ids, mask
        except RuntimeError:  # the forward waits for the GPU, as dynamic rotary embeddings do
            self.model.capture_fails, self.usable = True, False


@functools.cache
def _stream(device):
    """Return the stream for captures on a GPU: one, because cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


def _prefill(model, prompts, which):
    """Run one left-padded batch of prompts: the first of `which`, and later ones that fit.

    which: indices of waiting prompts, longest first.
    A batch has prompts of similar length (SIMILAR_LENGTH) and at most PREFILL_TOKENS tokens.
    Returns {prompt: (cache of the batch, row in it, logits after the prompt (V,))}."""
    device = next(model.parameters()).device
    width = len(prompts[which[0]])  # the longest comes first
    group = [i for i in which[: max(1, PREFILL_TOKENS // width)] if len(prompts[i]) >= SIMILAR_LENGTH * width]
    paddings = [width - len(prompts[i]) for i in group]
    ids = to_device([[0] * padding + prompts[i] for i, padding in zip(group, paddings)], device)
    mask = torch.arange(width, device=device) >= to_device(paddings, device)[:, None]
    cache = DynamicCache(config=model.config)
    logits = _next_logits(model, ids, mask, cache)
    return {i: (cache, row, logits[row]) for row, i in enumerate(group)}


def _next_logits(model, ids, mask, cache):
    """Run the last tokens of left-padded rows and return logits (B, V) for the tokens that follow.

    ids: (B, 1 or more), the tokens not yet in `cache`. mask: (B, T) bool, of all tokens."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {"position_ids": positions, "logits_to_keep": 1}
    taken = _arguments(type(model), type(model.config))
    options = {name: value for name, value in options.items() if name in taken}
    mask = mask[:, None, None] if getattr(cache, "is_plain", False) else mask.long()
    options[cache_argument(model.config, type(model))] = cache
    return model(input_ids=ids, attention_mask=mask, use_cache=True, **options).logits[:, -1]


@contextlib.contextmanager
def _sampling(model):
    """Put the model into evaluation mode, and speed up products with few rows in fp32 on a CPU.

    Evaluation mode turns dropout off, and gradient checkpointing, which would drop the cache. A step of few
    rows spends most of its time in large matrices; see _few_rows."""
    plain = [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]
    large = [m for m in plain if m.bias is None and m.weight.numel() >= LARGE_MATRIX]
    large = [m for m in large if m.weight.device.type == "cpu" and m.weight.dtype == torch.float32]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for linear in large:
            linear.forward = functools.partial(_few_rows, linear)
        yield
    finally:
        for linear in large:
            del linear.forward
        for module in training:
            module.training = True


def _few_rows(linear, x):
    """Compute x W^T, for few rows as (W x^T)^T, with a single row doubled.

    MKL computes x W^T of one or two rows on one thread, and slowly. The more outputs per input, the more rows
    are still faster in the other order (docs/results/benchmarks.md)."""
    n_outputs, n_inputs = linear.weight.shape
    rows = x.flatten(0, -2)
    if len(rows) > min(64, math.ceil(4 * n_outputs / n_inputs)):
        return torch.nn.functional.linear(x, linear.weight)
    doubled = rows.repeat(2, 1) if len(rows) == 1 else rows  # a view with stride 0 would take 3 times as long
    return (linear.weight @ doubled.T).T[: len(rows)].contiguous().unflatten(0, x.shape[:-1])


# -- checks ----------------------------------------------------------------------------------------
def check_attention(config, model_class=None):
    """Raise ValueError unless all cache layers of a model with this text config are among LAYERS."""
    layers = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    if not cache_argument(config, model_class) or not layers <= set(LAYERS):
        raise ValueError(f"sample: the sampler does not know how {config.model_type} keeps what it has read")


def cache_argument(config, model_class=None):
    """Return the name of the forward's argument for a cache, or None if the model takes no cache.

    config: the model's text config. model_class: its class, if it is not transformers' own for that
      config."""
    return next((name for name in _arguments(model_class, type(config)) if name in CACHES), None)


def _check_model(model, prompts, max_new_tokens):
    """Raise ValueError if a ragged cache would give wrong logits.

    The first time a model is sampled, short rows of different lengths are compared with plain forwards."""
    config = model.config.get_text_config()
    kind = config.model_type
    room = n_positions(config)
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > room:
        raise ValueError(f"sample: prompt + max_new_tokens = {longest} tokens, {kind} has {room} positions")
    if getattr(model, "ragged_cache_works", False):
        return
    check_attention(config, type(model))
    # Two rows of similar length, both longer than a small window, are prefilled together, a shorter one by
    # itself. If the model ignored mask, positions or cache, padding or tokens outside the window would change
    # its logits
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", 0) for layer in layers] + [getattr(config, "window_size", 0)]
    size = min(16 + max([window for window in windows if window <= SMALL_WINDOW], default=0), room)
    row_of = lambda length: [(7 * i + length) % config.vocab_size for i in range(length)]
    rows = list(map(row_of, (size - 4, size - 6, size // 2)))
    samples = _sample(model, rows, 1, 4, [], 0, (1.0, 1.0, 0, 0), slots=3, seed=0, progress=False)
    for row, tokens, logprobs in zip(rows, samples.response_tokens, samples.sample_logprobs):
        ids = torch.cat([torch.tensor(row, device=tokens.device), tokens])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(row) - 1 : -1]
        want = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        dtypes = {logits.dtype, *(weight.dtype for weight in model.parameters())}
        tolerance = 1e-3 if dtypes == {torch.float32} else 0.1  # half precision rounds differently
        if not (logprobs - want).abs().max() <= tolerance * (1 + logits.float().abs().max()):
            raise ValueError(f"sample: {kind} gives other logits with a ragged cache than without")
    model.ragged_cache_works = True


def n_positions(config) -> int:
    """Return how many tokens a row may have.

    For longrope this is the original length, since rotary frequencies change beyond it. For Llama 4 it is
    less than floor_scale, where transformers begins to scale queries by their column in the batch."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    limit = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", sys.maxsize))  # MPT's
    return min(limit, getattr(config, "floor_scale", sys.maxsize) - 1)


@functools.cache
def _arguments(model_class, config_class) -> list[str]:
    """Return the argument names of a model's forward.

    If the forward passes on **kwargs, or model_class is None, add those of transformers' own causal LM for
    this config."""
    names = []
    for kind in filter(None, (model_class, transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None))):
        parameters = inspect.signature(kind.forward).parameters
        names += parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


# -- talk ------------------------------------------------------------------------------------------
@dataclass
class Args:
    model: str  # a folder of save_pretrained, a run directory (model/ inside) or a hub name
    prompt: str | None = None  # user message; None: chat, with one turn per line of input
    system: str | None = None  # system message
    scorer: str | None = None  # reward model (folder, run or hub name; no function) that scores each answer
    n: int = 1  # responses per message; a chat continues from the last one
    max_new_tokens: int = 256  # length limit of a response, in tokens
    temperature: float = 1.0  # sampling temperature; 0 is greedy
    top_p: float = 1.0  # probability mass of nucleus sampling; 1 keeps all tokens
    top_k: int = 0  # number of most likely tokens to sample from; 0 keeps all
    seed: int | None = None  # seed of sampling; None: different responses each time


@torch.no_grad()
def main(args: Args):
    """Answer one prompt, or chat line by line, in the terminal."""
    model, tokenizer = _load(transformers.AutoModelForCausalLM, args.model)
    scorer = args.scorer and _load(transformers.AutoModelForSequenceClassification, args.scorer)
    if scorer and scorer[0].config.num_labels > 1:
        sys.exit(f"{args.scorer} has {scorer[0].config.num_labels} outputs: give --scorer a reward model")
    stop_ids = {tokenizer.eos_token_id, *np.ravel(model.generation_config.eos_token_id)} - {None}
    vocab_size = 1 + max(tokenizer.get_vocab().values())  # later rows of the embeddings are no tokens
    dialogue = [{"role": "system", "content": args.system}] if args.system else []
    for text in filter(None, map(str.strip, sys.stdin)) if args.prompt is None else [args.prompt]:
        turns = [*dialogue, {"role": "user", "content": text}]
        prompt = tokenizer(text)  # without a chat template: text to continue
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        room = n_positions(model.config) - len(prompt["input_ids"])
        samples = sample(
            model, prompt, n=args.n, max_new_tokens=max(1, min(args.max_new_tokens, room)), stop_ids=stop_ids,
            pad_id=0, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed,
            vocab_size=vocab_size,
        )  # fmt: skip
        for tokens, mask in zip(samples.response_tokens, samples.sample_mask):
            answer = tokenizer.decode(tokens[mask], skip_special_tokens=True)
            dialogue = [*turns, {"role": "assistant", "content": answer}]
            print(answer, flush=True)
            if scorer:
                ids = scorer[1].apply_chat_template(dialogue, return_tensors="pt")["input_ids"]
                print(f"score {scorer[0](ids.to(model.device)).logits[0, 0]:.3f}", flush=True)


def _load(kind, name):
    """Load (model, tokenizer) from a folder, run or hub name; kind: the transformers class to load."""
    path = Path(name, "model") if Path(name, "model", "config.json").exists() else name
    model, info = kind.from_pretrained(path, output_loading_info=True)
    if info["missing_keys"]:  # they would be random
        raise ValueError(f"{name} lacks {', '.join(sorted(info['missing_keys']))}: a model of another kind?")
    model = model.to(torch.accelerator.current_accelerator(True) or "cpu")
    model.config.pad_token_id = None  # read scores at the last token, even if it is the padding id
    return model, transformers.AutoTokenizer.from_pretrained(path)


if __name__ == "__main__":
    import tyro

    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # the console may lack some characters
    try:
        with contextlib.suppress(KeyboardInterrupt):
            main(tyro.cli(Args))
    except Exception as error:  # an unusable name, flag or template
        raise SystemExit("error: " + str(error).split("\n")[0]) from None
