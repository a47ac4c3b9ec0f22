"""Compute log probabilities, values and scores with a loaded model, never holding logits (B, T, V) in memory.

common/loading/pretrained.py loads models; common/loading/checks.py checks that they do what is needed here.
Importing this file makes transformers' own SDPA masks additive in the whole process; results stay the same.

The functions for log probabilities (nats):
    logprobs             each response token of a Batch, (B, T-1): SFT, rejection sampling, PPO
    token_logprobs       the same from ids and masks; logprobs calls it as a method of the model
    per_token            log probabilities or values of a whole rollout, (B, R), on every rank, no gradient
    response_logprobs    each response of a batch of comparisons, (n_responses,), prompts shared: DPO
"""

import types
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, masking_utils, modeling_flash_attention_utils as flash_utils

from . import batches, dist, losses
from .sampler import n_positions as n_positions, to_device

LOGIT_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # config key -> power
LOGITS_IN_MEMORY = 2**24  # logits in one chunk on a CPU: 64 MB in fp32, whatever B, T and V are
CHUNKS_KEPT = 4  # a batch with more chunks (of this size) does not keep them: backward computes them again


def with_methods(model, functions):
    """Attach functions of this file to the model as methods (model.token_logprobs(...)); return the model.

    dist.shard registers these methods with FSDP, so that calling one gathers the sharded weights."""
    for function in functions:
        setattr(model, function.__name__, types.MethodType(function, model))
    model.forward_methods = tuple(function.__name__ for function in functions)
    return model


# -- log probabilities -----------------------------------------------------------------------------
def token_logprobs(
    model, input_ids, action_mask, position_ids=None, temperature=1.0, entropy=False, token_indices=None,
    attention_mask=None, sources=None,
):  # fmt: skip
    """Compute log pi(token t+1 | tokens 0..t) wherever action_mask is True.

    Call it as a method, `model.token_logprobs(...)`, which gathers sharded weights. The unembedding runs on
    chunks of the selected positions; if there are many chunks, backward recomputes them. A (B, T, V) tensor
    of logits never exists.

    input_ids: (B, T), right-padded. Padding comes after all real tokens, so no attention mask is needed.
    action_mask: (B, T-1) bool, True if token t+1 is an action.
    position_ids: (B, T). Every 0 starts a packed document, which attends to nothing before it.
    temperature: divides the logits.
    token_indices: (2, n), row and column of each True in action_mask. None: read from the mask, which makes
      Python wait for the device.
    attention_mask: see head_outputs.
    sources: (2, n), row and column of the token that predicts each action. None: the token before it.
    Returns (B, T-1), fp32, nats, 0 where action_mask is False. With entropy=True, returns a pair: these and
    the entropy (nats) of each of the distributions. Gradients flow through both."""
    rows, columns = action_mask.nonzero().T if token_indices is None else token_indices
    with computing(model, input_ids):
        hidden = _last_hidden(model, input_ids, position_ids, attention_mask)
        hidden = hidden[tuple((rows, columns) if sources is None else sources)]
        outputs = _unembed(model, hidden, input_ids[rows, columns + 1], temperature, entropy)
    zeros = torch.zeros(action_mask.shape, device=input_ids.device)
    logprobs, entropies = (zeros.index_put((rows, columns), x) for x in outputs)
    return (logprobs, entropies) if entropy else logprobs


def logprobs(model, batch, temperature=1.0, entropy=False):
    """Compute token_logprobs of a batches.Batch: (B, T-1), or a pair of them with entropy=True.

    model: has the method token_logprobs (with_methods)."""
    return model.token_logprobs(
        batch.input_ids, batch.action_mask, batch.position_ids, temperature, entropy, batch.token_indices,
        batch.attention_mask, batch.sources,
    )  # fmt: skip


@torch.no_grad()
def per_token(forward, model, plan, micro_batch_size) -> list[torch.Tensor]:
    """Run a forward over a whole rollout and return its per-token outputs as (B, R) tensors on every rank.

    forward: forward(model, batch) -> one (B', T-1) tensor or a tuple of them, such as logprobs.
    plan: lists of blocks. Each list is divided among ranks and micro-batches like one optimiser step, so that
      the numbers equal those of the training forward.
    Row i belongs to document number i: its response's tokens from column 0, then 0. R is the longest
      response. Raises ValueError unless the documents have the numbers 0, 1, ... (responses.documents)."""
    documents = [document for blocks in plan for block in blocks for document in block]
    documents.sort(key=lambda document: document.number)
    if any(document.number != i for i, document in enumerate(documents)):
        raise ValueError("per_token: the documents do not have the numbers 0, 1, ..., each once")
    mask = batches.response_mask(documents)
    rows = []
    chunks = {}  # number of the output -> its values at the response tokens, one tensor per batch
    results = []
    for blocks in plan:
        for batch in batches.my_micro_batches(blocks, model, micro_batch_size):
            outputs = forward(model, batch)
            for i, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
                chunks.setdefault(i, []).append(output[tuple(batch.token_indices)])
            rows += [document.number for document in batch.documents]
    for of_tokens in chunks.values():
        result = torch.zeros(mask.shape)
        result[rows] = result[rows].masked_scatter(mask[rows], torch.cat(of_tokens).float().cpu())
        if dist.world_size() > 1:  # each row was computed by one rank and is 0 on the others
            torch.distributed.all_reduce(result)
        results.append(result)
    return results


def _last_hidden(model, input_ids, position_ids=None, attention_mask=None):
    """Return the last hidden states, (B, T, H). position_ids, attention_mask: see head_outputs."""
    if attention_mask is not None:
        attention_mask = _masks(model.config.get_text_config(), attention_mask, position_ids, model.dtype)
    options = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
    kernel = model.config._attn_implementation
    if position_ids is not None and attention_mask is None and ("flash" in kernel or kernel == "varlen"):
        # From positions, transformers' flash attention finds packed documents only in a batch of one row
        (q, k), (longest, _) = flash_utils.prepare_fa_kwargs_from_position_ids(position_ids)
        longest = longest.item()  # once, or every layer would wait for it
        options.update(cu_seq_lens_q=q, cu_seq_lens_k=k, max_length_q=longest, max_length_k=longest)
        # Transformers keeps a 4-D mask, so it makes none of (B, 1, T, T); _varlen does not read it
        options["attention_mask"] = q.new_zeros(1, 1, 1, 1) if kernel == "varlen" else None
    return model.base_model(input_ids=input_ids, **options).last_hidden_state


def _masks(config, mask, position_ids, dtype):
    """Convert a (B, 1, T, T) bool mask to what the model's attention expects.

    Layers with a sliding window get a mask restricted to it; if only some layers have one, the result is a
    dictionary by layer type. dtype: of the model's weights. Returns additive masks (see _additive)."""
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    masks = {"full_attention": mask}
    window = getattr(config, "sliding_window", None)
    if window and "sliding_attention" in kinds and mask.shape[-1] > window:
        query, key = position_ids[:, None, :, None], position_ids[:, None, None, :]
        masks["sliding_attention"] = mask & (key > query - window)
    masks = {kind: _additive(mask, dtype) for kind, mask in masks.items()}
    one_for_all = kinds == {"sliding_attention"} or len(masks) == 1
    return [*masks.values()][-1] if one_for_all else masks


def _additive(mask, dtype):
    """Convert a bool mask (True: may attend) to the numbers 0 and -inf that are added to attention scores.

    SDPA would convert a bool mask in every layer and keep each copy for backward; this one is made once. Rows
    start at multiples of 8 elements, or CUDA's memory-efficient kernel would copy the mask in every layer.
    dtype: used unless autocast has a dtype of its own."""
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind := mask.device.type) else dtype
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    return torch.where(padded, mask.new_zeros((), dtype=dtype), -torch.inf)[..., : mask.shape[-1]]


def _sdpa_mask(dtype=torch.float32, **options):
    """Make transformers' own mask for SDPA additive, for example that of packed rows. dtype: embeddings'."""
    mask = masking_utils.sdpa_mask(**options)
    return None if mask is None else _additive(mask, dtype)


masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _sdpa_mask)  # the documented way to replace it


def _varlen(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=0, **options):
    """Compute the attention of packed documents with torch's varlen_attn, and any other with SDPA.

    This is `--attention varlen`, called by every layer of a model. The kernel takes each document's bounds,
    needs no mask and shares keys among grouped queries; it exists for CUDA and in half precision only.

    query: (B, H, T, D). key, value: (B, key-value heads, T, D).
    cu_seq_lens_q: the bounds, counted over all rows, from _last_hidden; None: `attention_mask` tells.
    Returns ((B, T, H, D), None)."""
    if cu_seq_lens_q is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    if any(torch.is_tensor(x) or x for x in map(options.get, ("dropout", "softcap", "s_aux"))):
        raise ValueError("varlen_attn has no dropout, no attention sinks and no soft cap")
    from torch.nn.attention import varlen

    # Under autocast, rotary embeddings return fp32; value comes straight from a linear layer
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
    window = (options.get("sliding_window") or 0) - 1, 0  # tokens before and after a query; -1: all
    settings = {"scale": options.get("scaling"), "window_size": window, "enable_gqa": True}
    mixed = varlen.varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **settings)
    return mixed.unflatten(0, (len(query), -1)), None


AttentionInterface.register("varlen", _varlen)
masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("varlen", _sdpa_mask)


def _unembed(model, hidden, targets, temperature=1.0, entropy=False):
    """Compute log probabilities and entropies, (n,) each, from (n, H) hidden states and (n,) targets.

    On a rank whose micro-batch has no response tokens n is 0. The empty tensors still connect every weight to
    the loss, which FSDP needs for its gradient reduction."""
    head = model.get_output_embeddings()
    # In bf16 each chunk's gradient of the unembedding is rounded when added up: fewer chunks, less rounding
    elements = LOGITS_IN_MEMORY * (1 if head.weight.device.type == "cpu" else 8)
    size = max(1, elements // head.weight.shape[0])
    kept = max(size, CHUNKS_KEPT * LOGITS_IN_MEMORY // head.weight.shape[0])  # positions
    again = torch.is_grad_enabled() and len(targets) > kept
    outputs_of = partial(checkpoint, _chunk, use_reentrant=False) if again else _chunk
    pieces = zip(hidden.split(size), targets.split(size))
    chunks = [outputs_of(model, x, ids, temperature, entropy) for x, ids in pieces]
    return torch.cat([x for x, _ in chunks]), torch.cat([x for _, x in chunks])


def computing(model, input_ids):
    """Return the context of a forward: autocast to the model's compute dtype (dist.compute_dtype_of).

    FSDP casts a sharded model itself. Its root weights stay gathered after the forward only if a backward
    will follow, or the model is consolidated."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    sharded = dist.is_sharded(model)
    if sharded:
        keep = torch.is_grad_enabled() or getattr(model, "is_consolidated", False)
        model.set_reshard_after_forward(not keep, recurse=False)
    return torch.autocast(input_ids.device.type, dtype, enabled=dtype != torch.float32 and not sharded)


def scaled(logits, config):
    """Apply a model family's scale and soft cap to its logits. (pretrained.py checks that it is all.)"""
    for key, power in LOGIT_FACTORS.items():
        factor = getattr(config, key, None)
        logits = logits if factor in (None, 1) else logits * factor**power
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def _chunk(model, hidden, targets, temperature, entropy):
    """Compute (log probabilities, entropies) of one chunk of hidden states; entropies: 0 if not asked for."""
    # (n, V) in fp32, because a log-softmax in bf16 is off by 1e-2
    logits = scaled(model.get_output_embeddings()(hidden).float(), model.config.get_text_config())
    logits = logits if temperature == 1 else logits / temperature
    all_logprobs = logits.log_softmax(-1)
    logprobs = -torch.nn.functional.nll_loss(all_logprobs, targets, reduction="none")
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


# -- scores ----------------------------------------------------------------------------------------
def head_outputs(model, input_ids, token_indices, position_ids=None, attention_mask=None):
    """Compute the outputs of a reward, value or advantage model's head at selected tokens.

    Call it as a method, `model.head_outputs(...)`, which gathers sharded weights. The head computes in fp32
    even if the body does not, because rounded scores would tie; its own weights must be fp32.

    input_ids: (B, T), right-padded. token_indices: (2, n), row and column of the tokens to read.
    position_ids, attention_mask: (B, T) and (B, 1, T, T) bool, True if a query may attend. Both: rows whose
      responses share a prompt (batches.tree_mask). position_ids only: packed documents. Neither:
      plain causal rows.
    Returns (n, number of outputs), fp32."""
    with computing(model, input_ids):
        hidden = _last_hidden(model, input_ids, position_ids, attention_mask)
    return model.score(hidden[token_indices[0], token_indices[1]].float())


def rewards_and_expected(model, batch):
    """Compute an advantage model's two outputs on a batch of comparisons.

    Returns (rewards, expected). rewards: (n_responses,), r at the end of each response. expected:
    (n_comparisons,), the second output, e, at the end of each prompt."""
    token_indices = torch.cat([batch.response_ends, batch.prompt_ends], 1)
    outputs = model.head_outputs(batch.input_ids, token_indices, batch.position_ids, batch.attention_mask)
    n = batch.response_ends.shape[1]
    return outputs[:n, 0], outputs[n:, 1]


def scores_of(model, batch):
    """Compute the score of each response of a batch of comparisons, (responses,).

    A reward model gives r(x, y), an advantage model a(x, y) (arXiv:2309.10202, eq. 8). Ratios to other
    policies are unknown here and taken as 1. An advantage model's config.advantage_model holds N and K of
    eq. 8: {"n_policies": N, "n_others": K}."""
    if model.config.num_labels == 1:
        ends = batch.response_ends
        return model.head_outputs(batch.input_ids, ends, batch.position_ids, batch.attention_mask)[:, 0]
    rewards, expected = rewards_and_expected(model, batch)
    sizes = torch.tensor(batch.sizes, dtype=torch.long)  # dtype given, since the list may be empty
    n_policies, n_others = (model.config.advantage_model[key] for key in ("n_policies", "n_others"))
    expected = expected.repeat_interleave(to_device(sizes, rewards.device), output_size=len(rewards))
    return losses.advantage_score(rewards, expected, rewards.new_ones(len(rewards), n_others), n_policies)


def state_values(model, batch):
    """Compute the value of the state before each response token, with a model that has one output.

    Returns (B, T-1), fp32, 0 at other tokens. Index t is read at token t, which has seen tokens 0..t but not
    the action, token t+1."""
    outputs = model.head_outputs(batch.input_ids, batch.sources, batch.position_ids, batch.attention_mask)
    return outputs.new_zeros(batch.action_mask.shape).index_put(tuple(batch.token_indices), outputs[:, 0])


def response_logprobs(model, batch) -> torch.Tensor:
    """Compute log pi(y | x), summed over the tokens of y, for each response of a batch of comparisons.

    model: has the method token_logprobs (with_methods).
    Returns (n_responses,), nats, in the order of the comparisons; gradient flows."""
    of_tokens = logprobs(model, batch)[tuple(batch.token_indices)]
    sizes = batches.response_sizes(batch.documents)
    owners = [document.number for document, n in zip(batch.documents, sizes) for _ in range(n)]
    owners = to_device(torch.tensor(owners, dtype=torch.long), of_tokens.device)  # each token's response
    return of_tokens.new_zeros(len(sizes)).index_add(0, owners, of_tokens)
