"""Sample from any transformers causal LM with full attention, with a KV cache whose rows have different lengths. Needs torch and
transformers only; copy this file anywhere. `python -m common.sampler --model DIR --prompt "..."` talks to a model.

A batch of `slots` rows decodes together. Each slot holds one response and its own length, so no row waits for a longer one: when a
response ends, the slot is refilled at once with the next one, and the n responses to a prompt share one run over the prompt. Cost per
step follows the rows that are alive:

  refill    run new prompts once (prefill), copy their keys and values into free slots, one copy for each of the n responses
  choose    draw a token for every row from its last logits; rows that drew a stop id, or are long enough, are done
  compact   move the last live row into the hole that a finished one leaves, so that live rows are always the first ones
  step      one forward of the live rows, one token each, which writes keys and values at each row's own length

The model's generation_config is never read: what is sampled from is softmax(logits / temperature), cut by top_k, then by top_p.
"""

import inspect
import sys
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

PREFILL_TOKENS = 4096  # prompts are prefilled together up to this many tokens
_checked = weakref.WeakKeyDictionary()  # models whose ragged cache was compared with a plain forward


class Rollout(NamedTuple):
    """B = len(prompts) * n responses in prompt-major order: row i answers prompt i // n."""

    prompt_index: torch.Tensor  # (B,) int64
    response_tokens: torch.Tensor  # (B, R) int64, right-padded with pad_id; R is the longest response
    sample_mask: torch.Tensor  # (B, R) bool, True for response tokens, the stop id included
    sample_logprobs: torch.Tensor  # (B, R) fp32, nats, of the distribution sampled from (after temperature, top_k and top_p); 0 elsewhere
    finished: torch.Tensor  # (B,) bool, True if the response ended with a stop id, False if max_new_tokens cut it


@torch.no_grad()
def sample(model, prompts, *, n=1, max_new_tokens, stop_ids, pad_id, temperature=1.0, top_p=1.0, top_k=0, slots=64, seed=None, progress=False):
    """Draw n responses to each prompt; see Rollout for what is returned, on the model's device.

    model: a transformers causal LM (of FSDP-sharded ones, inside `consolidated(model)`: outside of it every forward gathers weights,
      and ranks that decode different numbers of steps wait for each other for ever).
    prompts: lists of token ids of any lengths, at least one token each. stop_ids: ids that end a response and belong to it.
    temperature: divides the logits; 0 is greedy. top_p: smallest set of most likely tokens whose mass reaches it; 1 is off.
    top_k: how many of the most likely tokens stay; 0 is off. slots: rows that decode together (memory: slots * longest row).
    seed: of a generator of this call alone; None: torch's global generator. The draw of a row depends on the rows beside it, so the
      same call gives the same responses, another number of slots others.
    progress: True shows a bar. Raises ValueError for unusable arguments and for models whose attention is not full."""
    _check_arguments(prompts, n, max_new_tokens, temperature, top_p, top_k, slots)
    was_training = model.training
    model.eval()  # dropout off; with gradient checkpointing on, transformers would drop the cache in training mode
    try:
        _check_model(model, prompts, max_new_tokens, pad_id)
        return _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, temperature, top_p, top_k, slots, seed, progress)
    finally:
        model.train(was_training)


def _sample(model, prompts, n, max_new_tokens, stop_ids, pad_id, temperature, top_p, top_k, slots, seed, progress):
    device = next(model.parameters()).device
    n_rows = len(prompts) * n
    slots = min(slots, n_rows)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    stop = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=device)
    tokens = torch.full((n_rows, max_new_tokens), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(n_rows, max_new_tokens, device=device)
    n_tokens = torch.zeros(n_rows, dtype=torch.long, device=device)
    finished = torch.zeros(n_rows, dtype=torch.bool, device=device)

    # Longest prompts first: rows beside each other are then of similar length, and so little of the cache is read in vain
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    waiting = [i * n + j for i in order for j in range(n)]  # rows without a slot yet, as indices into the output
    prefilled = {}  # prompt -> (its keys and values, its last logits), kept while some of its n rows still wait
    cache = RaggedCache(model, slots, max(map(len, prompts)) + max_new_tokens, device)
    row = torch.zeros(slots, dtype=torch.long, device=device)  # which output row a slot holds
    length = torch.zeros(slots, dtype=torch.long, device=device)  # tokens of the slot whose keys and values are cached
    logits, live, next_waiting = None, 0, 0
    bar = _bar(n_rows, progress)

    while live or next_waiting < n_rows:
        # refill
        if live < slots and next_waiting < n_rows:
            new = waiting[next_waiting : next_waiting + slots - live]
            next_waiting += len(new)
            _prefill(model, [prompts[i] for i in dict.fromkeys(r // n for r in new) if i not in prefilled],
                     [i for i in dict.fromkeys(r // n for r in new) if i not in prefilled], prefilled)
            first = []
            for slot, r in enumerate(new, live):
                keys_values, last = prefilled[r // n]
                cache.fill(slot, keys_values)
                length[slot] = len(prompts[r // n])
                first.append(last)
            row[live : live + len(new)] = torch.tensor(new, device=device)
            live += len(new)
            still = {r // n for r in waiting[next_waiting : next_waiting + n]}
            prefilled = {i: kept for i, kept in prefilled.items() if i in still}
            logits = torch.cat([logits, torch.stack(first)]) if logits is not None else torch.stack(first)

        # choose
        token, logprob = choose(logits, temperature, top_p, top_k, generator)
        at = n_tokens[row[:live]]
        tokens[row[:live], at], logprobs[row[:live], at] = token, logprob
        n_tokens[row[:live]] += 1
        stopped = torch.isin(token, stop)
        finished[row[:live]] = stopped
        done = (stopped | (at + 1 == max_new_tokens)).tolist()

        # compact
        keep = [slot for slot in range(live) if not done[slot]]
        bar(live - len(keep), live)
        holes = [slot for slot in range(min(len(keep), live)) if done[slot]]
        movers = [slot for slot in keep if slot >= len(keep)]
        cache.move(movers, holes)
        for state in (row, length, token):
            state[holes] = state[movers]
        live = len(keep)
        if live == 0:
            logits = None
            continue

        # step
        logits = _step(model, cache, token[:live], length[:live])
        length[:live] += 1

    longest = int(n_tokens.max())
    mask = torch.arange(longest, device=device) < n_tokens[:, None]
    index = torch.arange(n_rows, device=device) // n
    return Rollout(index, tokens[:, :longest].contiguous(), mask, logprobs[:, :longest].contiguous(), finished)


def choose(logits, temperature, top_p, top_k, generator=None):
    """Draw one token a row: logits (S, V) -> (tokens (S,), log probabilities (S,) fp32 of the distribution they were drawn from)."""
    if temperature == 0:  # a point mass: log 1 = 0
        token = logits.argmax(-1)
        return token, torch.zeros(token.shape, device=logits.device)
    logits = logits.float() / temperature
    if top_p < 1 or 0 < top_k < logits.shape[-1]:
        k = top_k if 0 < top_k < logits.shape[-1] else logits.shape[-1]
        ranked, ids = logits.topk(k, sorted=True)
        probs = ranked.softmax(-1)
        probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)  # keep a token if the more likely ones have not reached top_p
        place, logprob = _draw(probs, generator)
        return ids.gather(1, place)[:, 0], logprob
    place, logprob = _draw(logits.softmax(-1), generator)
    return place[:, 0], logprob


def _draw(probs, generator):
    """One draw a row from unnormalised probs (S, V) by inversion: the first token whose cumulated mass exceeds a uniform share of the
    whole. A token of mass 0 adds nothing to the sum and so is never the first."""
    mass = probs.cumsum(-1)
    share = torch.rand(probs.shape[0], 1, device=probs.device, generator=generator) * mass[:, -1:]
    place = torch.searchsorted(mass, share, right=True).clamp_(max=probs.shape[-1] - 1)
    # share can round up to the whole mass: then the token is the last one that has any
    place = torch.where(probs.gather(1, place) > 0, place, probs.argmax(-1, keepdim=True))
    return place, (probs.gather(1, place) / mass[:, -1:]).log()[:, 0]


# -- the cache -------------------------------------------------------------------------------------------------------------------------
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

    def __init__(self, model, slots, size, device):
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
        """Before a step: the live rows' lengths (live,). Returns the step's attention mask (live, 1, 1, width) bool: a row's new token
        sees its own tokens and itself, not what a longer row or an older one left behind."""
        width = int(length.max()) + 1
        for layer in self.layers:
            layer.step = (torch.arange(live, device=length.device), length, width)
        return (torch.arange(width, device=length.device) <= length[:, None])[:, None, None]


def _prefill(model, prompts, names, into):
    """Run prompts once, right-padded (causal attention never looks at the padding), and keep for each its keys, values and last logits."""
    device = next(model.parameters()).device
    while prompts:
        count = max(1, min(len(prompts), PREFILL_TOKENS // len(prompts[0])))  # the first is the longest
        group, prompts, group_names, names = prompts[:count], prompts[count:], names[:count], names[count:]
        width = len(group[0])
        ids = torch.tensor([prompt + [prompt[-1]] * (width - len(prompt)) for prompt in group], device=device)
        ends = torch.tensor([len(prompt) - 1 for prompt in group], device=device)
        wanted, place = ends.unique(return_inverse=True)  # logits at the ends only
        options = {"logits_to_keep": wanted} if _takes(model, "logits_to_keep") else {}
        out = model(input_ids=ids, past_key_values=DynamicCache(config=model.config.get_text_config()), use_cache=True, **options)
        last = out.logits[torch.arange(count, device=device), place if options else ends]
        for i, name in enumerate(group_names):
            end = len(group[i])
            into[name] = ([(layer.keys[i, :, :end], layer.values[i, :, :end]) for layer in out.past_key_values.layers], last[i])


def _step(model, cache, tokens, length):
    """One decoding step: tokens (live,), cached lengths (live,) -> logits (live, V) of the next token."""
    mask = cache.begin(len(tokens), length)
    return model(input_ids=tokens[:, None], position_ids=length[:, None], attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1]


# -- checks ----------------------------------------------------------------------------------------------------------------------------
def _check_arguments(prompts, n, max_new_tokens, temperature, top_p, top_k, slots):
    for name, value, least in (("n", n, 1), ("max_new_tokens", max_new_tokens, 1), ("slots", slots, 1), ("top_k", top_k, 0), ("temperature", temperature, 0)):
        if not value >= least:
            raise ValueError(f"sample: {name} = {value}, wanted at least {least}")
    if not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p = {top_p}, wanted 0 < top_p <= 1")
    if len(prompts) == 0:
        raise ValueError("sample: no prompts")
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise ValueError(f"sample: prompt {empty[0]} has no tokens")


def _check_model(model, prompts, max_new_tokens, pad_id):
    """Refuse what a ragged cache would get wrong, silently or not; then try one short ragged batch against a plain forward."""
    config = model.config.get_text_config()
    kind = config.model_type
    longest, room = max(map(len, prompts)) + max_new_tokens, getattr(config, "max_position_embeddings", None)
    if room is not None and longest > room:
        raise ValueError(f"sample: the longest prompt and max_new_tokens make {longest} tokens, the model ({kind}) has {room} positions")
    if _checked.get(model):
        return
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers != {"full_attention"} or (window is not None and getattr(config, "layer_types", None) is None):
        what = ", ".join(sorted(layers - {"full_attention"})) or f"a sliding window of {window}"
        raise ValueError(f"sample: {kind} has {what}; the sampler knows full attention only")
    if getattr(config, "alibi", False) or not _takes(model, "position_ids") or not _takes(model, "past_key_values"):
        raise ValueError(f"sample: {kind} takes no position_ids (ALiBi or recurrent); the sampler knows full attention with positions only")
    # The longer row's leftovers would show in the shorter one, if the mask, the positions or the writing of the cache were not honoured
    device, vocabulary = next(model.parameters()).device, config.vocab_size
    ids = [[(7 * i + 3) % vocabulary for i in range(6)], [(5 * i + 1) % vocabulary for i in range(4)]]
    plain = [model(input_ids=torch.tensor([x], device=device), use_cache=False).logits[0, -1].float() for x in ids]
    prefilled, cache, length = {}, RaggedCache(model, 2, 8, device), torch.tensor([4, 2], device=device)
    _prefill(model, [ids[0][:4], ids[1][:2]], [0, 1], prefilled)
    for slot in (0, 1):
        cache.fill(slot, prefilled[slot][0])
    for step in (0, 1):
        logits = _step(model, cache, torch.tensor([ids[0][4 + step], ids[1][2 + step]], device=device), length + step)
    tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1  # logits of half precision differ by rounding
    for got, want in zip(logits.float(), plain):
        if not (got - want).abs().max() <= tolerance * (1 + want.abs().max()):
            raise ValueError(f"sample: {kind} gives other logits with a ragged cache than without a cache; the sampler cannot be trusted with it")
    _checked[model] = True


def _takes(model, argument):
    return argument in inspect.signature(type(model).forward).parameters


def _bar(total, progress):
    if not progress:
        return lambda ended, live: None
    from tqdm import tqdm

    bar = tqdm(total=total, desc="sample", unit="row", leave=False, file=sys.stderr)

    def advance(ended, live):
        bar.update(ended)
        bar.set_postfix(live=live, refresh=False)
        if bar.n >= total:
            bar.close()

    return advance


# -- talk ------------------------------------------------------------------------------------------------------------------------------
@dataclass
class Args:
    model: str
    """A folder written by save_pretrained (for a run of the scripts, its model/), or a hub name."""
    prompt: str
    """What the user says."""
    n: int = 1
    """Responses."""
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def main(args: Args):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to("cuda" if torch.cuda.is_available() else "cpu")
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt = tokenizer(args.prompt)["input_ids"]
    stop = tokenizer.eos_token_id
    out = sample(
        model, [prompt], n=args.n, max_new_tokens=args.max_new_tokens, stop_ids=[] if stop is None else [stop], pad_id=stop or 0,
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed,
    )
    for tokens, mask in zip(out.response_tokens, out.sample_mask):
        print(tokenizer.decode(tokens[mask], skip_special_tokens=True))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
