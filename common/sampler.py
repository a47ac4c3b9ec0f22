"""Sample from any transformers causal LM with full attention, with a KV cache whose rows differ in length.
Needs torch and transformers, for a progress bar tqdm: copy this file anywhere. It also talks, in a terminal:

    python -m common.sampler --model DIR --prompt "..."

A fixed number of slots decodes together. Each slot holds one response at its own length, so no row waits for
a longer one; when a response ends, the next one takes its slot at once. The n responses to a prompt share one
run over the prompt. The cost of a step follows the rows that are alive:

    refill   run new prompts once (prefill); copy keys and values into free slots, once for each response
    choose   draw a token for every row; rows that drew a stop id, or are long enough, are done
    compact  move the last live row into the hole that a finished one leaves, so that live rows come first
    step     one forward, one token a row, which writes keys and values at each row's own length

The model's generation_config is never read: tokens are drawn from softmax(logits / temperature), cut by
top_k, then by top_p.
"""

import contextlib
import inspect
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

PREFILL_TOKENS = 4096  # prompts are prefilled together up to this many tokens
LARGE_VOCABULARY, FEW = 4096, 64  # tokens and rows, see _few_rows_unembedded
_checked = weakref.WeakKeyDictionary()  # models whose ragged cache was compared with a plain forward


class Rollout(NamedTuple):
    """B = len(prompts) * n responses in prompt-major order: row i answers prompt i // n."""

    prompt_index: torch.Tensor  # (B,) int64
    response_tokens: torch.Tensor  # (B, R) int64, right-padded with pad_id; R is the longest response
    sample_mask: torch.Tensor  # (B, R) bool, True for response tokens, the stop id included
    sample_logprobs: torch.Tensor  # (B, R) fp32, nats, of the distribution sampled from; 0 beyond the mask
    finished: torch.Tensor  # (B,) bool, True if a stop id ended the response, False if max_new_tokens cut it


@torch.no_grad()
def sample(
    model, prompts, *, n=1, max_new_tokens, stop_ids, pad_id,
    temperature=1.0, top_p=1.0, top_k=0, slots=64, seed=None, progress=False,
):  # fmt: skip
    """Draw n responses to each prompt. Returns a Rollout on the model's device.

    model: a transformers causal LM. One that FSDP shards belongs inside `consolidated(model)`: outside of it
      every forward gathers weights, and ranks that decode different numbers of steps wait for ever.
    prompts: lists of token ids of any lengths, at least one token each.
    stop_ids: ids that end a response; the one that does belongs to it.
    temperature: divides the logits; 0 is greedy. top_k: only so many most likely tokens stay; 0 is off.
    top_p: of these, only the smallest set of most likely tokens whose mass reaches top_p stays; 1 is off.
    slots: rows that decode together; memory grows with slots * (longest prompt + max_new_tokens).
    seed: of a generator of this call's own; None: torch's global generator. What a row draws depends on the
      rows beside it: the same call gives the same responses, another number of slots gives others.
    progress: True shows a bar (of tqdm); or a bar of one's own, with tqdm's update and set_postfix.
    Raises ValueError for unusable arguments, for models whose attention is not full, and for NaN logits."""
    _check_arguments(prompts, n, max_new_tokens, temperature, top_p, top_k, slots)
    was_training = model.training
    model.eval()  # no dropout; and in training mode gradient checkpointing would drop the cache
    try:
        _check_model(model, prompts, max_new_tokens)
        choice = (temperature, top_p, top_k)
        with _few_rows_unembedded(model):
            return _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, choice, slots, seed, progress)
    finally:
        model.train(was_training)


def _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, choice, slots, seed, progress):
    device = next(model.parameters()).device
    n_rows = len(prompts) * n
    slots = min(slots, n_rows)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    stop = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=device)
    tokens = torch.full((n_rows, max_new_tokens), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(n_rows, max_new_tokens, device=device)
    n_tokens = torch.zeros(n_rows, dtype=torch.long, device=device)
    finished = torch.zeros(n_rows, dtype=torch.bool, device=device)

    # Longest prompts first: rows beside each other have like lengths, and little of the cache is read in vain
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    waiting = deque(i * n + j for i in order for j in range(n))  # rows without a slot yet, as output rows
    prefilled = {}  # prompt -> (its keys and values, its last logits), of the last prompts that were run
    cache = RaggedCache(model, slots, max(map(len, prompts)) + max_new_tokens)
    row = torch.zeros(slots, dtype=torch.long, device=device)  # which output row a slot holds
    length = torch.zeros(slots, dtype=torch.long, device=device)  # its tokens with cached keys and values
    live, logits = 0, None  # slots 0 to live - 1 are decoding; logits (live, V) of their next tokens
    if progress is True:
        from tqdm import tqdm

        progress = tqdm(total=n_rows, desc="sample", unit="row", leave=False)

    while live or waiting:
        # refill
        new = [waiting.popleft() for _ in range(min(slots - live, len(waiting)))]
        if new:
            first = []
            for j, r in enumerate(new):
                if r // n not in prefilled:  # then no row of the prompts before is left
                    prefilled = None  # so that one group is held, not two
                    prefilled = _prefill(model, prompts, list(dict.fromkeys(r // n for r in new[j:])))
                cache.fill(live + j, prefilled[r // n][0])
                row[live + j], length[live + j] = r, len(prompts[r // n])
                first.append(prefilled[r // n][1])
            logits = torch.stack(first) if live == 0 else torch.cat([logits, torch.stack(first)])
            live += len(new)
            prefilled = {i: kept for i, kept in prefilled.items() if waiting and i == waiting[0] // n}

        # choose
        token, logprob = choose(logits, *choice, generator)
        rows, at = row[:live], n_tokens[row[:live]]
        tokens[rows, at], logprobs[rows, at] = token, logprob
        n_tokens[rows] = at + 1
        finished[rows] = torch.isin(token, stop)
        done = (finished[rows] | (at + 1 == max_new_tokens)).tolist()

        # compact
        left = live - sum(done)
        holes = [slot for slot in range(left) if done[slot]]
        movers = [slot for slot in range(left, live) if not done[slot]]
        cache.move(movers, holes)
        for state in (row, length, token) if holes else ():
            state[holes] = state[movers]
        if progress:
            progress.update(live - left)
            progress.set_postfix(live=left, waiting=len(waiting), refresh=False)
        live = left

        # step
        if live:
            logits = _step(model, cache, token[:live], length[:live])
            length[:live] += 1

    if logprobs.isnan().any():
        raise ValueError("sample: the model gives NaN logits")
    mask = torch.arange(int(n_tokens.max()), device=device) < n_tokens[:, None]  # (B, R)
    index = torch.arange(n_rows, device=device) // n
    longest = mask.shape[1]
    return Rollout(index, tokens[:, :longest].clone(), mask, logprobs[:, :longest].clone(), finished)


def choose(logits, temperature, top_p, top_k, generator=None):
    """Draw one token a row: logits (S, V) -> (tokens (S,), log probabilities (S,) fp32 of the distribution
    they were drawn from)."""
    if temperature == 0:  # a point mass: log 1 = 0
        largest, token = logits.float().max(-1)
        return token, largest * 0  # 0, or NaN where a logit is, for the check at the end
    probs = (logits.float() / temperature).softmax(-1)
    if top_p == 1 and not 0 < top_k < probs.shape[-1]:
        place, logprob = _draw(probs, generator)
        return place[:, 0], logprob
    probs, ids = _most_likely(probs, top_p, top_k)
    place, logprob = _draw(probs, generator)
    return ids.gather(1, place)[:, 0], logprob


def _most_likely(probs, top_p, top_k):
    """probs (S, V) -> (kept probabilities, most likely first and 0 where cut; their ids), cut by top_k, then
    by top_p of what is left."""
    vocabulary = probs.shape[-1]
    if 0 < top_k < vocabulary:
        ranked, ids = probs.topk(top_k)
        whole = ranked.sum(-1, keepdim=True)
    else:  # sorting a whole vocabulary can cost more than the model: try the first thousand tokens
        ranked, ids = probs.topk(min(1024, vocabulary))
        whole = probs.sum(-1, keepdim=True)  # not exactly 1: fp32 sums of a vocabulary are off by up to 1e-5
        if (ranked.sum(-1, keepdim=True) < top_p * whole).any():
            ranked, ids = probs.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked  # mass of the more likely tokens
    return torch.where(before < top_p * whole, ranked, 0.0), ids


def _draw(probs, generator):
    """One draw a row from unnormalised probs (S, V) by inversion: the first token whose cumulated mass
    exceeds a uniform share of the whole. A token of mass 0 adds nothing to the sum and so is never the
    first."""
    mass = probs.cumsum(-1)
    share = torch.rand(probs.shape[0], 1, device=probs.device, generator=generator) * mass[:, -1:]
    place = torch.searchsorted(mass, share, right=True).clamp_(max=probs.shape[-1] - 1)
    # share can round up to the whole mass, beyond every token: take the most likely one
    place = torch.where(probs.gather(1, place) > 0, place, probs.argmax(-1, keepdim=True))
    return place, (probs.gather(1, place) / mass[:, -1:]).log()[:, 0]


# -- the cache -------------------------------------------------------------------------------------
class _Layer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, size, head_dim), allocated when the first row comes."""

    is_sliding = False

    def lazy_initialization(self, keys, values):
        shape = (self.slots, keys.shape[1], self.size)
        self.keys = torch.zeros(*shape, keys.shape[3], dtype=keys.dtype, device=keys.device)
        self.values = torch.zeros(*shape, values.shape[3], dtype=values.dtype, device=values.device)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Write one new token a live row at that row's own length; return all that the live rows have."""
        slot, length, width = self.step
        self.keys[slot, :, length] = key_states[:, :, 0]
        self.values[slot, :, length] = value_states[:, :, 0]
        return self.keys[: len(slot), :, :width], self.values[: len(slot), :, :width]

    def get_mask_sizes(self, query_length):
        return self.step[2], 0

    def get_seq_length(self):
        return self.step[2] - 1

    def get_max_length(self):
        return self.size


class RaggedCache(Cache):
    """A transformers cache for one token a row and step, whose rows have different lengths."""

    def __init__(self, model, slots, size):
        super().__init__(layers=[_Layer() for _ in range(model.config.get_text_config().num_hidden_layers)])
        for layer in self.layers:
            layer.slots, layer.size = slots, size

    def fill(self, slot, keys_values):
        """Put a prompt's keys and values, a list over layers of (heads, P, head_dim) pairs, into a slot."""
        for layer, (keys, values) in zip(self.layers, keys_values):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[slot, :, : keys.shape[1]] = keys
            layer.values[slot, :, : values.shape[1]] = values

    def move(self, sources, targets):
        for layer in self.layers:
            for source, target in zip(sources, targets):
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]

    def begin(self, live, length):
        """Before a step: live rows' lengths (live,) -> its attention mask (live, 1, 1, width) bool: a row's
        new token sees the row and itself, not what a longer row or an earlier one left behind."""
        width = int(length.max()) + 1
        for layer in self.layers:
            layer.step = (torch.arange(live, device=length.device), length, width)
        return (torch.arange(width, device=length.device) <= length[:, None])[:, None, None]


def _prefill(model, prompts, which):
    """Run the first of the prompts `which`, as many as PREFILL_TOKENS hold, right-padded (causal attention
    never looks at the padding) -> {prompt: (its keys and values, a (heads, P, head_dim) pair a layer, and its
    last logits (V,))}."""
    device, width = next(model.parameters()).device, len(prompts[which[0]])  # the longest comes first
    group = which[: max(1, PREFILL_TOKENS // width)]
    lengths = [len(prompts[i]) for i in group]
    ids = torch.tensor([prompts[i] + [0] * (width - len(prompts[i])) for i in group], device=device)
    places, place = (torch.tensor(lengths, device=device) - 1).unique(return_inverse=True)
    options = {"logits_to_keep": places} if _takes(model, "logits_to_keep") else {}  # at the ends only
    kept = DynamicCache(config=model.config.get_text_config())
    logits = model(input_ids=ids, past_key_values=kept, use_cache=True, **options).logits
    last = logits[torch.arange(len(group), device=device), place if options else places[place]]
    ours = [(j, slice(None), slice(length)) for j, length in enumerate(lengths)]
    pairs = [[(layer.keys[at], layer.values[at]) for layer in kept.layers] for at in ours]
    return {i: (pair, row) for i, pair, row in zip(group, pairs, last)}


def _step(model, cache, tokens, length):
    """One decoding step: tokens (live,), cached lengths (live,) -> logits (live, V) of the next token."""
    mask = cache.begin(len(tokens), length)
    inputs = {"input_ids": tokens[:, None], "position_ids": length[:, None], "attention_mask": mask}
    return model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]


@contextlib.contextmanager
def _few_rows_unembedded(model):
    """On a CPU, a large unembedding of up to FEW rows as (W x^T)^T in place of x W^T: MKL needs 1.2 to 7
    times as long for the second, which is most of a small model's step."""

    def forward(hidden):
        rows = hidden.flatten(0, -2)
        if len(rows) > FEW:
            return torch.nn.functional.linear(hidden, head.weight)
        return (head.weight @ rows.T).T.contiguous().unflatten(0, hidden.shape[:-1])

    head = model.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and head.bias is None and "forward" not in vars(head)
    if not plain or head.weight.device.type != "cpu" or head.weight.shape[0] < LARGE_VOCABULARY:
        yield
        return
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


# -- checks ----------------------------------------------------------------------------------------
def _check_arguments(prompts, n, max_new_tokens, temperature, top_p, top_k, slots):
    least = {"n": 1, "max_new_tokens": 1, "slots": 1, "top_k": 0, "temperature": 0}
    for name, value in zip(least, (n, max_new_tokens, slots, top_k, temperature)):
        if not value >= least[name]:
            raise ValueError(f"sample: {name} = {value}, wanted at least {least[name]}")
    if not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p = {top_p}, wanted 0 < top_p <= 1")
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty or len(prompts) == 0:
        raise ValueError(f"sample: prompt {empty[0]} has no tokens" if empty else "sample: no prompts")


def check_attention(config):
    """ValueError unless all attention of a model with this (text) config is full."""
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers is None and window is not None or set(layers or ["full_attention"]) != {"full_attention"}:
        what = f"a sliding window of {window}" if layers is None else ", ".join(sorted(set(layers)))
        raise ValueError(f"sample: {config.model_type} has {what}; the sampler knows full attention only")
    if getattr(config, "alibi", False):
        raise ValueError(f"sample: {config.model_type} has ALiBi; the sampler needs position_ids")


def _check_model(model, prompts, max_new_tokens):
    """Refuse what a ragged cache would get wrong, silently or not; then, once a model, try a short ragged
    batch against a plain forward."""
    config = model.config.get_text_config()
    kind = config.model_type
    longest, room = max(map(len, prompts)) + max_new_tokens, getattr(config, "max_position_embeddings", None)
    if room is not None and longest > room:
        raise ValueError(f"sample: prompt + max_new_tokens = {longest} tokens, {kind} has {room} positions")
    if _checked.get(model):
        return
    check_attention(config)
    takes_positions = _takes(model, "position_ids") and _takes(model, "past_key_values")
    if not takes_positions:
        raise ValueError(f"sample: {kind} takes no position_ids (ALiBi or recurrent); the sampler needs them")
    # Two rows of different lengths: if the model did not honour mask, positions or cache, the longer one's
    # leftovers would show in the shorter one
    device, vocabulary = next(model.parameters()).device, config.vocab_size
    rows = [[(7 * i + 3) % vocabulary for i in range(6)], [(5 * i + 1) % vocabulary for i in range(4)]]
    plain = [model(input_ids=torch.tensor([x], device=device), use_cache=False).logits[0, -1] for x in rows]
    cache, length = RaggedCache(model, 2, 8), torch.tensor([4, 2], device=device)
    prefilled = _prefill(model, [rows[0][:4], rows[1][:2]], [0, 1])
    for slot in (0, 1):
        cache.fill(slot, prefilled[slot][0])
    for step in (0, 1):
        token = torch.tensor([rows[0][4 + step], rows[1][2 + step]], device=device)
        logits = _step(model, cache, token, length + step)
    tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1  # logits of half precision differ by rounding
    for got, want in zip(logits.float(), plain):
        if not (got - want.float()).abs().max() <= tolerance * (1 + want.float().abs().max()):
            raise ValueError(f"sample: {kind} gives other logits with a ragged cache than without")
    _checked[model] = True


def _takes(model, argument):
    return argument in inspect.signature(type(model).forward).parameters


# -- talk ------------------------------------------------------------------------------------------
@dataclass
class Args:
    model: str
    """A folder written by save_pretrained, a run directory of the scripts (model/ inside), or a hub name."""
    prompt: str
    """What the user says."""
    n: int = 1
    """Responses."""
    max_new_tokens: int = 256
    """Longest response."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Mass of the nucleus; 1 is off."""
    top_k: int = 0
    """Most likely tokens that stay; 0 is off."""
    seed: int | None = None
    """None: other responses each time."""


def main(args: Args):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    inside = Path(args.model, "model")
    name = inside if (inside / "config.json").exists() else args.model
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).to(device)
    text = args.prompt
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    room = getattr(model.config.get_text_config(), "max_position_embeddings", 10**9) - len(prompt)
    if room < 1:
        raise SystemExit(f"error: the prompt's {len(prompt)} tokens leave no room for an answer")
    out = sample(
        model, [prompt], n=args.n, max_new_tokens=min(args.max_new_tokens, room), stop_ids=stop_ids, pad_id=0,
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed,
    )  # fmt: skip
    for tokens, mask in zip(out.response_tokens, out.sample_mask):
        print(tokenizer.decode(tokens[mask], skip_special_tokens=True))


if __name__ == "__main__":
    import tyro

    sys.stdout.reconfigure(errors="replace")  # a console need not know every character
    main(tyro.cli(Args))
