"""The math of every script: pure functions of tensors, torch only. Copy this file anywhere.

Shapes: B rows, T tokens a row. Per-token tensors are (B, T-1): index t belongs to the state after tokens <= t
and to the action, token t+1. Every mask is True where a value is KEPT. Reductions go through masked_sum and
masked_mean alone, which use torch.where: what a mask leaves out changes nothing, were it NaN.

A loss returns (loss, metrics); metrics are detached scalars. Losses never multiply by the number of ranks:
the scripts do, because FSDP averages gradients.
"""

import torch
from torch.nn.functional import logsigmoid


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


def bradley_terry_loss(chosen_scores, rejected_scores, margin=None, preference=None, n_rows=None):
    """The reward model's loss on pairs, with Llama 2's margin and soft labels.

    Delta = chosen_scores - rejected_scores - margin
    L = -(1 / n_rows) sum_b [ preference * log sigmoid(Delta) + (1 - preference) * log sigmoid(-Delta) ]
    (InstructGPT, arXiv:2203.02155, eq. 1, without margin and preference; Llama 2, arXiv:2307.09288, eq. 2,
    has the margin m; distilled RLAIF, arXiv:2309.00267, the soft labels.) Given both, the second term is
    log sigmoid(rejected_scores - chosen_scores - margin): a margin asks more of the side that a term prefers.

    chosen_scores, rejected_scores: (n,), reward units, gradient flows.
    margin: (n,) or None for 0, reward units, at least 0: m, in the loss and never in the accuracy.
    preference: (n,) or None for 1, unitless in [0, 1]: the probability that "chosen" is the better one.
    n_rows: pairs of the whole optimiser step, over all micro-batches and ranks; None: this batch's.
    Returns (loss, {"loss_sum": nats, "n_correct": pairs ranked as labelled, ties counting 1/2, "n_rows": n}),
      sums of this batch, which add up over micro-batches and ranks.
    Raises ValueError on unequal shapes, a preference outside [0, 1], or no pair when n_rows is None."""
    margin = torch.zeros_like(chosen_scores) if margin is None else margin
    preference = torch.ones_like(chosen_scores) if preference is None else preference
    _same_shape(chosen=chosen_scores, rejected=rejected_scores, margin=margin, preference=preference)
    if not ((preference >= 0) & (preference <= 1)).all():
        raise ValueError("bradley_terry_loss: a preference is a probability, from 0 to 1")
    difference = chosen_scores - rejected_scores
    loss_sum = -(
        preference * logsigmoid(difference - margin) + (1 - preference) * logsigmoid(-difference - margin)
    ).sum()
    return _mean_over_rows("bradley_terry_loss", loss_sum, n_rows, difference * (preference - 0.5).sign())


def ranking_loss(scores, ranks, margin=None):
    """K ranked responses to one prompt: Bradley-Terry on all pairs of different rank, their mean.

    L = -(1 / n_pairs) sum_{i, j: ranks[i] < ranks[j]} log sigmoid(scores[i] - scores[j] - margin[i, j])
    (InstructGPT, arXiv:2203.02155, eq. 1: the pairs of a prompt are one batch element, or each response would
    be learnt K - 1 times an epoch.)

    scores: (K,), reward units, gradient flows. ranks: (K,), 0 is best, equal ranks are ties.
    margin: (K, K) or None for 0, reward units: as in bradley_terry_loss.
    Returns (loss, metrics) as bradley_terry_loss does, for these pairs.
    Raises ValueError on unequal shapes, or if no two ranks differ."""
    _same_shape(scores=scores, ranks=ranks)
    better, worse = torch.nonzero(ranks[:, None] < ranks[None, :], as_tuple=True)
    if len(better) == 0:
        raise ValueError("ranking_loss: no response is better than another, there is nothing to learn from")
    margin = None if margin is None else margin[better, worse]
    return bradley_terry_loss(scores[better], scores[worse], margin)


def advantage_score(scores, expected_scores, ratios=None, n_policies=None):
    """The advantage of a response over what the policy is expected to get.

    a = scores - ((N - K) / N) * expected_scores - (1 / N) sum_{k=1..K} ratios[:, k] * scores
    (Advantage Model, arXiv:2309.10202, eq. 8; N and K are its hyper-parameters.)

    scores: (n,), r(x, y), reward units, gradient flows.
    expected_scores: (n,), e(x), the expected reward of the policy on the same prompt, gradient flows.
    ratios: (n, K), pi(y|x) / pi'_k(y|x) for each of the K other policies whose responses are in the data,
      unitless, no gradient; None: K = 0, so that a = r - e.
    n_policies: N, more than K; None: K + 1. At N = K the expected reward would have no weight.
    Returns (n,), reward units.
    Raises ValueError on unequal shapes, or unless N > K."""
    _same_shape(scores=scores, expected_scores=expected_scores)
    ratios = scores.new_zeros(*scores.shape, 0) if ratios is None else ratios.detach()
    if ratios.shape[:-1] != scores.shape:
        raise ValueError(f"shapes differ: scores {tuple(scores.shape)}, ratios {tuple(ratios.shape)}")
    k = ratios.shape[-1]
    n = k + 1 if n_policies is None else n_policies
    if n <= k:
        raise ValueError(f"advantage_score: n_policies {n} must be more than the {k} other policies")
    return scores - (n - k) / n * expected_scores - (ratios * scores[..., None]).sum(-1) / n


def advantage_model_loss(chosen_advantages, rejected_advantages, bound=2.5, n_rows=None):
    """The Advantage Model's loss on pairs: ranked, and kept within a bound.

    L = -(1 / n_rows) sum_b [ log sigmoid(a_c - a_r) + log sigmoid(bound - a_c) + log sigmoid(bound + a_r) ]
    (Advantage Model, arXiv:2309.10202, eq. 6, where the bound is m(x) = 2.5.)

    chosen_advantages, rejected_advantages: (n,), a_c and a_r, reward units, gradient flows.
    bound: a number or (n,), reward units.
    n_rows: pairs of the whole optimiser step, over all micro-batches and ranks; None: this batch's.
    Returns (loss, {"loss_sum": nats, "rank_loss_sum": nats, of the first term alone, "n_correct": pairs
      ranked as labelled, ties counting 1/2, "n_rows": n}), sums of this batch.
    Raises ValueError on unequal shapes, or no pair when n_rows is None."""
    _same_shape(chosen=chosen_advantages, rejected=rejected_advantages)
    difference = chosen_advantages - rejected_advantages
    rank_sum = -logsigmoid(difference).sum()
    bound_sum = -(logsigmoid(bound - chosen_advantages) + logsigmoid(bound + rejected_advantages)).sum()
    loss, parts = _mean_over_rows("advantage_model_loss", rank_sum + bound_sum, n_rows, difference)
    return loss, {**parts, "rank_loss_sum": rank_sum.detach()}


def _mean_over_rows(name, loss_sum, n_rows, signs):
    """(loss, metrics) of pairs; signs: (n,), above 0 where a pair is ranked as labelled, 0 for a tie."""
    if n_rows is None and len(signs) == 0:
        raise ValueError(f"{name}: there is no pair to learn from")
    n_correct = (torch.sign(signs.detach()) + 1).sum() / 2
    n = n_correct.new_tensor(len(signs))
    metrics = {"loss_sum": loss_sum.detach(), "n_correct": n_correct, "n_rows": n}
    return loss_sum / (len(signs) if n_rows is None else n_rows), metrics


def _same_shape(**tensors):
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
