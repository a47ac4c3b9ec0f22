"""Check what a loaded model supports: documents that share a row, responses that share a prompt, slots.

The file needs only the kit, so that it can be copied with it, in its folder."""

import math
from functools import partial

import torch

from .. import batches, dist, models, sampler

WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")


def window(config) -> int:
    """Return the smallest attention window of a model's layers, in tokens; 0 if all attend to everything."""
    sizes = [getattr(config.get_text_config(), key, None) for key in WINDOWS]
    return min((size for size in sizes if isinstance(size, int)), default=0)


def recurrent(model) -> bool:
    """Return whether a layer passes a state from token to token, which masks and positions cannot reset."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return getattr(model, "_is_stateful", False) or "conv" in kinds or "linear_attention" in kinds


@torch.no_grad()
def packs(model) -> bool:
    """Check that documents in one row do not see each other, and print a line if they do.

    Transformers separates documents by their positions, but not in every model. Every rank must call it."""
    documents = [batches.Document(ids, torch.arange(len(ids)) > 0, [], None) for ids in _texts(model, 5, 7)]
    rows = [documents, documents[::-1]], [[document] for document in documents + documents[::-1]]
    packed, alone = (batches.collate(blocks, pad_id=0, device=model.device) for blocks in rows)
    forward = models.state_values if hasattr(model, "head_outputs") else models.logprobs
    otherwise = "documents in a row would see each other: each has a row of its own"
    return _are_as_alone(model, lambda x: forward(model, x)[x.action_mask], packed, alone, otherwise)


@torch.no_grad()
def shares_prompts(model, max_length) -> bool:
    """Check that responses sharing a prompt in one row get the results of separate rows, or print a line.

    Not every model supports 4-D masks and positions. A prompt with one response is longer than the model's
    window, if max_length, their limit, allows it. GPT-Neo's windows (`window_size`) count columns: for them
    the row with all responses is always longer. Every rank must call it."""
    length = min(max(8, window(model.config) * 3 // 2), max_length)
    half = length // 2
    n = window(model.config) // max(1, half) if hasattr(model.config, "window_size") else 1
    prompt, *responses = _texts(model, half, half - 1, *[length - half] * max(1, n))
    comparison = batches.Comparison([], [], prompt, responses, torch.arange(len(responses)), "", None)
    collate = partial(batches.collate_comparisons, [comparison], pad_id=0, device=model.device)
    shared, alone = collate(share_prompt=True), collate(share_prompt=False)
    forward = models.scores_of if hasattr(model, "head_outputs") else models.response_logprobs
    otherwise = "responses cannot share their prompt: each has its own copy of it"
    return _are_as_alone(model, partial(forward, model), shared, alone, otherwise)


def fit_rows(args, models):
    """Switch off --packing and --share-prompt if one of these models does not support them.

    A lora.FrozenBase, which is no module, is not tested: it computes with the policy's weights, in the
    policy's dtype."""
    models = [model for model in models if isinstance(model, torch.nn.Module)]
    args.packing = args.packing and all(map(packs, models))
    shares = partial(shares_prompts, max_length=args.max_length)
    args.share_prompt = args.packing and args.share_prompt and all(map(shares, models))


def _texts(model, *lengths):
    """Make texts of these lengths from tokens of the model's vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    return [(torch.arange(n) * k + 1).int() % vocabulary for k, n in enumerate(lengths, 3)]


def _are_as_alone(model, outputs_of, together, alone, otherwise) -> bool:
    """Check that sharing a row does not change a model's outputs, on any rank; if it does, print `otherwise`.

    together, alone: batches with the same texts in shared rows and in rows of their own. The difference must
    be negligible next to the effect of wrong position ids, or be rounding."""
    positions = torch.arange(together.input_ids.shape[1], device=model.device).expand_as(together.input_ids)
    dtype = getattr(model, "compute_dtype", torch.float32)
    flash = "flash" in model.config._attn_implementation
    half_only = flash or model.config._attn_implementation == "varlen"
    # FSDP has a dtype of its own, and so have LoRA's frozen weights
    fixed = half_only or dist.is_sharded(model) or any(p.dtype != torch.float32 for p in model.parameters())
    outputs_of(alone)  # a family that cannot compute in bfloat16 fails here, and run.launch prints one line
    model.compute_dtype = dtype if fixed else torch.float32
    try:
        if flash and getattr(together, "attention_mask", None) is not None:
            raise ValueError("flash attention reads a 4-D mask as 2-D padding, out of bounds")
        apart, shared, wrong = map(outputs_of, (alone, together, together._replace(position_ids=positions)))
        gap, change, size = (x.abs().max().item() for x in (shared - apart, wrong - apart, apart))
    except (RuntimeError, ValueError):  # BLOOM and GPT-1 do not support such a mask
        gap, change, size = 1, 0, 0
    model.compute_dtype = dtype
    close = 0.05 if fixed and dtype != torch.float32 else 1e-3
    # Positions hardly matter to random weights: rounding, 2^-23 of the outputs, can be 0.3 % of their effect
    holds = all(dist.gather([gap <= max(close * change, size / 2**22) and not recurrent(model)]))
    if not holds and dist.is_main():
        print(f"{model.config.model_type}: {otherwise}")
    return holds


# -- room for samples -------------------------------------------------------------------------------
def cache_bytes(config, dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, as the sampler stores them.

    Windows save nothing in the sampler. Layers without keys, and low-rank heads, are counted in full."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * dtype.itemsize


def fit_slots(args, learning):
    """Choose args.slots from the free memory if it is None; print a line if a given number does not fit.

    The choice is the largest power of two, at most 256, whose cache fits next to the loaded models, and 16
    without an accelerator. Room is left for AdamW's moments (8 bytes a weight), which do not exist yet, for
    the sampler's copy of weights that are not in the compute dtype, and a tenth of the memory for prompts,
    logits and fragmentation. learning: the models that are trained, the policy first. Every rank must call
    it."""
    policy = learning[0]
    if policy.device.type in ("cpu", "mps"):
        args.slots = args.slots or 16
        return
    dtype = policy.compute_dtype
    # sft.py and scorers answer prompts of up to --max-length
    beyond = 0 if hasattr(args, "iterations") else args.max_new_tokens
    length = sampler.cache_columns(args.max_length + beyond, policy.device)
    slot = length * cache_bytes(policy.config, dtype) / dist.ranks_per_copy
    free, total = torch.accelerator.get_memory_info(policy.device)
    n_learning = sum(p.numel() for model in learning for p in model.parameters() if p.requires_grad)
    copied = [p.numel() for p in policy.parameters() if dist.is_sharded(policy) or p.dtype != dtype]
    room = free - total / 10 - 8 * n_learning / (dist.shard_size or dist.world_size())
    room -= dtype.itemsize * sum(copied) / dist.ranks_per_copy
    fitting = min(dist.gather([max(1, int(room / slot))]))
    if args.slots is None:
        args.slots = min(256, 2 ** int(math.log2(fitting)))
    elif args.slots > fitting and dist.is_main():
        size = f"cache of {args.slots} x {length:,} tokens takes {args.slots * slot / 1e9:.1f} GB"
        print(f"--slots {args.slots}: {size}, {room / 1e9:.0f} GB are free. Use --slots {fitting} or less")
