"""What a loaded model says of a batch: log probabilities of tokens, without a tensor of all logits, and
scores. (common/loading/pretrained.py loads it, common/loading/checks.py checks what it can.)

Log probabilities, in nats:
    logprobs             of each response token of a Batch, (B, T-1): SFT, rejection sampling, PPO
    token_logprobs       the same from ids and masks; the method of the model that logprobs calls
    per_token            logprobs, or values, of a whole rollout, (B, R), on every rank, without a gradient
    response_logprobs    of each response of a ComparisonBatch, (n_responses,), which share prompts: DPO
    logprobs_at          the same of chosen tokens; the method of the model that response_logprobs calls
    next_token_logprobs  of the whole vocabulary after chosen tokens, (n, V): a labeler's A or B
    nll_of_each          minus the sum of each document, in nats per response token: evaluation
"""

import math
import types
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from common import batches, dist, losses
from common.sampler import cache_argument, n_positions as n_positions, to_device

LOGIT_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # of a config, and a power
LOGITS_IN_MEMORY = 2**24  # elements of a chunk of logits on a CPU, 64 MB in fp32, whatever B, T and V are
CHUNKS_KEPT = 4  # of logits on a CPU, at most, that backward finds in memory; more it computes again


def with_methods(model, functions):
    """Make functions of this file that call the model's forward its methods: model.token_logprobs(...). Then
    dist.shard has them gather the weights. Returns the model."""
    for function in functions:
        setattr(model, function.__name__, types.MethodType(function, model))
    model.forward_methods = tuple(function.__name__ for function in functions)
    return model


# -- log probabilities -----------------------------------------------------------------------------
def token_logprobs(
    model, input_ids, action_mask, position_ids=None, temperature=1.0, entropy=False, token_indices=None
):  # fmt: skip
    """log pi(token t+1 | tokens <= t) for every action, computed only where action_mask is True.

    input_ids: (B, T), right-padded: no token sees the padding after it, so there is no attention mask.
    action_mask: (B, T-1) bool, True where token t+1 is an action. temperature: divides the logits.
    position_ids: (B, T); where they begin again at 0, a packed document begins that sees nothing before it.
    token_indices: (2, n), row and column of each True of action_mask; None: asked, and the device waited for.
    Returns (B, T-1) fp32 in nats, 0 where action_mask is False; with entropy=True also the entropy (nats) of
    each of these distributions. Gradients flow through both.

    Call it as a method, `model.token_logprobs(...)`: dist.shard has that gather the weights. The unembedding
    runs on chunks of kept positions, if many again in backward: no (B, T, V) tensor of logits ever exists."""
    rows, columns = action_mask.nonzero().T if token_indices is None else token_indices
    with _computing(model, input_ids):
        hidden = _last_hidden(model, input_ids, position_ids)[rows, columns]
        outputs = _unembed(model, hidden, input_ids[rows, columns + 1], temperature, entropy)
    zeros = torch.zeros(action_mask.shape, device=input_ids.device)
    logprobs, entropies = (zeros.index_put((rows, columns), x) for x in outputs)
    return (logprobs, entropies) if entropy else logprobs


def logprobs(model, batch, temperature=1.0, entropy=False):
    """token_logprobs of a batches.Batch: (B, T-1), and with entropy=True a second one."""
    return model.token_logprobs(
        batch.input_ids, batch.action_mask, batch.position_ids, temperature, entropy, batch.token_indices
    )


@torch.no_grad()
def per_token(forward, model, plan, micro_batch_size) -> list[torch.Tensor]:
    """What forward(model, batch) gives at each response token, one or several (B', T-1), as (B, R)
    tensors on every rank: row i is document i's, 0 behind its response, R the longest one. plan: lists of
    blocks, each of which is divided among ranks and micro-batches as an optimiser step's."""
    documents = [document for blocks in plan for block in blocks for document in block]
    mask = batches.response_mask(sorted(documents, key=lambda document: document.number))
    rows = []
    chunks = {}  # {output of forward: its values at the response tokens, batch by batch}
    results = []
    for blocks in plan:
        for batch in batches.my_micro_batches(blocks, model, micro_batch_size):
            outputs = forward(model, batch)
            for i, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
                chunks.setdefault(i, []).append(output[tuple(batch.token_indices)])
            rows += [document.number for document in batch.documents]
    for of_tokens in chunks.values():
        result = torch.zeros(mask.shape)
        my_rows = torch.zeros(len(rows), mask.shape[1])
        result[rows] = my_rows.masked_scatter(mask[rows], torch.cat(of_tokens).float().cpu())
        if dist.world_size() > 1:  # one rank filled each row, the others have 0
            torch.distributed.all_reduce(result)
        results.append(result)
    return results


def logprobs_at(model, input_ids, token_indices, targets, position_ids=None, attention_mask=None):
    """log pi(target | what a token sees), for rows in which responses share a prompt.

    input_ids: (B, T). token_indices: (2, n), rows and columns of the tokens that see all before a target.
    targets: (n,) token ids. position_ids, attention_mask: as head_outputs takes them. Returns (n,) fp32,
    nats. Call it as a method, like token_logprobs."""
    with _computing(model, input_ids):
        hidden = _last_hidden(model, input_ids, position_ids, attention_mask)
        return _unembed(model, hidden[token_indices[0], token_indices[1]], targets)[0]


def _last_hidden(model, input_ids, position_ids=None, attention_mask=None):
    """(B, T, H) last hidden states. position_ids, attention_mask: as head_outputs takes them."""
    if attention_mask is not None:
        attention_mask = _masks(model.config.get_text_config(), attention_mask, position_ids)
    options = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
    return model.base_model(input_ids=input_ids, **options).last_hidden_state


def _masks(config, mask, position_ids):
    """A (B, 1, T, T) bool mask as a model's attention reads it: with its window of positions, if it has one,
    which may be that of some layers only; for eager attention, which adds it to the scores, 0 and -inf."""
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    masks = {"full_attention": mask}
    window = getattr(config, "sliding_window", None)
    if window and "sliding_attention" in kinds and mask.shape[-1] > window:
        query, key = position_ids[:, None, :, None], position_ids[:, None, None, :]
        masks["sliding_attention"] = mask & (key > query - window)
    if config._attn_implementation == "eager":
        masks = {kind: torch.where(mask, 0.0, -math.inf) for kind, mask in masks.items()}
    one_for_all = kinds == {"sliding_attention"} or len(masks) == 1
    return [*masks.values()][-1] if one_for_all else masks


def _unembed(model, hidden, targets, temperature=1.0, entropy=False):
    """(log probabilities, entropies) of (n, H) hidden states and (n,) targets, chunk by chunk. On a rank
    without loss n is 0: empty tensors still connect every weight to the gradient."""
    head = model.get_output_embeddings()
    chunks = []
    # Chunks' gradients of the unembedding are summed in bf16 on an accelerator: fewer chunks, less rounding
    elements = LOGITS_IN_MEMORY * (1 if head.weight.device.type == "cpu" else 8)
    size = max(1, elements // head.weight.shape[0])
    kept = max(size, CHUNKS_KEPT * LOGITS_IN_MEMORY // head.weight.shape[0])  # so few stay in memory
    again = torch.is_grad_enabled() and len(targets) > kept
    outputs_of = partial(checkpoint, _chunk, use_reentrant=False) if again else _chunk
    for some_hidden, some_targets in zip(hidden.split(size), targets.split(size)):
        chunks.append(outputs_of(model, some_hidden, some_targets, temperature, entropy))
    joined = lambda i: torch.cat([outputs[i] for outputs in chunks])
    return [joined(i) for i in range(len(chunks[0]))]


def next_token_logprobs(model, input_ids, token_indices, before=()):
    """log pi of every token that may follow the tokens at token_indices: (n, V) fp32, nats.

    input_ids: (B, T), right-padded. token_indices: (2, n), rows and columns. before: token ids in front of
    every row, which are run once (not by a recurrent model). For a model that is not sharded. The head
    computes in fp32 whatever the body does: in bf16 the logits of two likely tokens are often the same."""
    with _computing(model, input_ids):
        options = {"use_cache": False}
        if before:
            first = torch.tensor([before], device=input_ids.device)
            name = cache_argument(model.config, type(model.base_model))
            kept = getattr(model.base_model(input_ids=first, use_cache=True), name)
            kept.batch_repeat_interleave(len(input_ids))
            options = {name: kept, "use_cache": True}
        hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.float()
    hidden = hidden[token_indices[0], token_indices[1]].float()
    logits = torch.nn.functional.linear(hidden, head.weight.float(), bias)
    return _scaled(logits, model.config.get_text_config()).log_softmax(-1)


@torch.no_grad()
def nll_of_each(model, blocks, micro_batch_size) -> list[float]:
    """The negative log likelihood of each document of blocks (batches.make_blocks), in nats per response
    token of an average document: their mean is that of all response tokens. The same on every rank; every
    rank must call it."""
    documents = [document for block in blocks for document in block]
    sums = []
    place = {id(document): i for i, document in enumerate(documents)}
    for batch in batches.my_micro_batches(blocks, model, micro_batch_size):
        of_tokens = logprobs(model, batch)[tuple(batch.token_indices)].float().cpu().double()
        sizes = [batches.n_response_tokens([[document]]) for document in batch.documents]
        of_documents = [-x.sum().item() for x in of_tokens.split(sizes)]
        sums += zip([place[id(document)] for document in batch.documents], of_documents)
    scale = len(documents) / batches.n_response_tokens(blocks)
    return [nll * scale for _, nll in sorted(dist.gather(sums))]


def _computing(model, input_ids):
    """Autocast to the compute dtype, bf16 on a GPU. A model that FSDP shards has FSDP cast, and the root's
    weights kept after the forward for the backward to come: without gradient none comes."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    sharded = dist.is_sharded(model)
    if sharded:
        keep = torch.is_grad_enabled() or getattr(model, "is_consolidated", False)
        model.set_reshard_after_forward(not keep, recurse=False)
    return torch.autocast(input_ids.device.type, dtype, enabled=dtype != torch.float32 and not sharded)


def _scaled(logits, config):
    """What a family does to its logits after the unembedding. (pretrained.py checks that this is all.)"""
    for key, power in LOGIT_FACTORS.items():
        factor = getattr(config, key, None)
        logits = logits if factor in (None, 1) else logits * factor**power
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def _chunk(model, hidden, targets, temperature, entropy):
    logits = model.get_output_embeddings()(hidden).float()  # (n, V); a log-softmax in bf16 is off by 1e-2
    logits = _scaled(logits, model.config.get_text_config())
    logits = logits if temperature == 1 else logits / temperature
    all_logprobs = logits.log_softmax(-1)
    logprobs = -torch.nn.functional.nll_loss(all_logprobs, targets, reduction="none")
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


# -- scores ----------------------------------------------------------------------------------------
def head_outputs(model, input_ids, token_indices, position_ids=None, attention_mask=None):
    """The scalar head's outputs at some tokens.

    input_ids: (B, T), right-padded. token_indices: (2, n), rows and columns of the tokens to read.
    position_ids, attention_mask: (B, T) and (B, 1, T, T) bool, True where a query may look, for rows in which
      responses share a prompt (batches.collate_comparisons); None: plain causal rows.
    Returns (n, number of outputs) in fp32. Call it as a method, `model.head_outputs(...)`: dist.shard has
      that gather the weights. The head computes in fp32 whatever the body does: rounded scores tie."""
    with _computing(model, input_ids):
        hidden = _last_hidden(model, input_ids, position_ids, attention_mask)
    return model.score(hidden[token_indices[0], token_indices[1]].float())


def rewards_and_expected(model, batch):
    """(r at the end of every response, (responses,); the second output at the end of every prompt,
    (comparisons,)) of a batches.ComparisonBatch, by an advantage model."""
    token_indices = torch.cat([batch.response_ends, batch.prompt_ends], 1)
    outputs = model.head_outputs(batch.input_ids, token_indices, batch.position_ids, batch.attention_mask)
    n = batch.response_ends.shape[1]
    return outputs[:n, 0], outputs[n:, 1]


def scores_of(model, batch):
    """The score of every response of a batches.ComparisonBatch, (responses,): r(x, y) of a reward model; of
    an advantage model a(x, y), eq. 8, with the ratios to other policies, which are unknown, taken as 1."""
    if model.config.num_labels == 1:
        outputs = model.head_outputs(
            batch.input_ids, batch.response_ends, batch.position_ids, batch.attention_mask
        )
        return outputs[:, 0]
    rewards, expected = rewards_and_expected(model, batch)
    sizes = torch.tensor(batch.sizes, dtype=torch.long)  # also of no comparison
    n_policies, n_others = (model.config.advantage_model[key] for key in ("n_policies", "n_others"))
    expected = expected.repeat_interleave(to_device(sizes, rewards.device), output_size=len(rewards))
    return losses.advantage_score(rewards, expected, rewards.new_ones(len(rewards), n_others), n_policies)


def state_values(model, batch):
    """V of the state before each response token, by a model with one output: (B, T-1) fp32, 0 elsewhere.
    Index t is read at token t, which sees the tokens up to t and not the action, token t+1."""
    outputs = model.head_outputs(batch.input_ids, batch.token_indices, batch.position_ids)[:, 0]
    return outputs.new_zeros(batch.action_mask.shape).index_put(tuple(batch.token_indices), outputs)


def response_logprobs(model, batch) -> torch.Tensor:
    """log pi(y | x), a sum over y's tokens (nats), of every response of a batch, comparison by comparison:
    (n_responses,), gradient flows."""
    none = torch.zeros(0, dtype=torch.long)  # of no comparison
    texts = [ids for c in batch.comparisons for ids in (*c.response_ids, *c.samples)]
    sizes = torch.tensor(batch.sizes, dtype=torch.long)
    lengths = torch.tensor([len(ids) for ids in texts], dtype=torch.long)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    prompt = torch.arange(len(sizes)).repeat_interleave(sizes)  # of each response
    within = torch.cat([none, *(torch.arange(len(ids)) for ids in texts)])  # in its response
    on_cpu = torch.cat([none, *texts]), within, owner, prompt, lengths
    targets, within, owner, prompt, lengths = (to_device(x, batch.input_ids.device) for x in on_cpu)
    rows, ends = batch.response_ends
    before = batch.prompt_ends[1][prompt]
    # A response's first token comes after the prompt's last one, which may stand far before it
    columns = torch.where(within == 0, before[owner], (ends - lengths)[owner] + within)
    token_indices = torch.stack([rows[owner], columns])
    logprobs = model.logprobs_at(
        batch.input_ids, token_indices, targets, batch.position_ids, batch.attention_mask
    )
    return logprobs.new_zeros(len(lengths)).index_add(0, owner, logprobs)
