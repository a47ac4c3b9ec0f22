"""The math of every script: pure functions of tensors, torch only. Copy this file anywhere.

Shapes: B rows, T tokens a row. Per-token tensors are (B, T-1): index t belongs to the state after tokens <= t
and to the action, token t+1. Every mask is True where a value is KEPT. Reductions go through masked_sum and
masked_mean alone, which use torch.where: what a mask leaves out changes nothing, were it NaN.

A loss returns (loss, metrics); metrics are detached scalars. Losses never multiply by the number of ranks:
the scripts do, because FSDP averages gradients.
"""

import torch


def masked_sum(x, mask, dim=None):
    """Sum of x where mask is True.

    x: any shape, gradient flows. mask: bool, the shape of x. dim: the dimension(s) to reduce, None for all.
    Returns a tensor. Raises ValueError on unequal shapes."""
    _same_shape(x=x, mask=mask)
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is True.

    x: any shape, gradient flows. mask: bool, the shape of x. dim: the dimension(s) to reduce, None for all.
    Returns a tensor. Raises ValueError on unequal shapes, or where a mean would be of nothing."""
    _same_shape(x=x, mask=mask)
    count = mask.sum() if dim is None else mask.sum(dim)
    if (count == 0).any():
        raise ValueError("masked_mean: the mask keeps nothing, the mean of no values is undefined")
    return masked_sum(x, mask, dim) / count


def sft_loss(logprobs, action_mask, n_tokens=None):
    """Supervised fine-tuning: the negative log likelihood of the response tokens, averaged over tokens.

    L = -(1 / n_tokens) sum_{b,t} action_mask[b, t] * logprobs[b, t]
    (rlhf_workflow section 3.1; llama2_rlhf zeroes the loss on the prompt in the same way.)

    logprobs: (B, T-1), nats, log pi(token t+1 | tokens <= t), gradient flows.
    action_mask: (B, T-1) bool, True where token t+1 is a response token, the end token included.
    n_tokens: how many response tokens the whole optimiser step has, over all micro-batches and ranks, so that
      the gradients of micro-batches add up to that of one big batch; None: this batch's own count.
    Returns (loss, {"nll_sum": nats, "n_tokens": count}), sums of this batch, which add up over micro-batches
      and ranks.
    Raises ValueError on unequal shapes, or on an empty mask when n_tokens is None (with n_tokens an empty
      mask is a loss of 0)."""
    _same_shape(logprobs=logprobs, action_mask=action_mask)
    nll_sum, kept = -masked_sum(logprobs, action_mask), action_mask.sum()
    if n_tokens is None and kept == 0:
        raise ValueError("sft_loss: action_mask keeps no token, there is no response to learn from")
    loss = nll_sum / (kept if n_tokens is None else n_tokens)
    return loss, {"nll_sum": nll_sum.detach(), "n_tokens": kept}


def _same_shape(**tensors):
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
