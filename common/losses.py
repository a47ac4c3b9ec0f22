"""The math of every script: pure functions of tensors, torch only. Copy this file anywhere.

Shapes: B rows, T tokens a row. Per-token tensors are (B, T-1): index t belongs to the state after tokens <= t
and to the action, token t+1. Every mask is True where a value is KEPT. Reductions go through masked_sum and
masked_mean alone, which use torch.where: what a mask leaves out has no effect, not even NaN.

A loss returns (loss, metrics). Its n_tokens or n_rows are the response tokens or pairs of the whole optimiser
step, over all micro-batches and ranks, so that their gradients add up to those of one big batch; None: this
batch's own. Metrics are detached sums of this batch alone, its own n_tokens or n_rows among them (ratio_max
is a maximum). Losses never multiply by the number of ranks: dist.backward does, as FSDP averages gradients.

Every function raises ValueError on unequal shapes, and a loss on an empty batch if its count is None; with a
count an empty batch has loss 0.
"""

import torch
from torch.nn.functional import logsigmoid


def masked_sum(x, mask, dim=None):
    """Sum of x where mask is True, a tensor.

    x: any shape, gradient flows. mask: bool, the shape of x. dim: the dimension(s) to reduce; None: all."""
    _same_shape(x=x, mask=mask)
    return torch.where(mask, x, torch.zeros_like(x)).sum(dim)


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is True, a tensor; ValueError where it would be of nothing.

    x: any shape, gradient flows. mask: bool, the shape of x. dim: the dimension(s) to reduce; None: all."""
    total = masked_sum(x, mask, dim)
    count = mask.sum(dim)
    if (count == 0).any():
        raise ValueError("masked_mean: the mask keeps nothing, the mean of no values is undefined")
    return total / count


def whiten(x, mask):
    """(x - mean) / sqrt(var), mean and population variance of the values where mask is True; else 0.

    x: any shape. mask: bool, the shape of x.
    Returns a tensor like x. Raises ValueError where a mean would be of nothing."""
    mean = masked_mean(x, mask)
    var = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) / (var + 1e-8) ** 0.5, torch.zeros_like(x))


def sft_loss(logprobs, action_mask, n_tokens=None):
    """Supervised fine-tuning: the negative log likelihood of the response tokens, averaged over tokens.

    L = -(1 / n_tokens) sum_{b,t} action_mask[b, t] * logprobs[b, t]
    (rlhf_workflow section 3.1; llama2_rlhf zeroes the loss on the prompt in the same way.)

    logprobs: (B, T-1), nats, log pi(token t+1 | tokens <= t), gradient flows.
    action_mask: (B, T-1) bool, True where token t+1 is a response token, the end token included.
    Returns (loss, {"nll_sum": nats, "n_tokens": count})."""
    _same_shape(logprobs=logprobs, action_mask=action_mask)
    nll_sum = -masked_sum(logprobs, action_mask)
    kept = action_mask.sum()
    if n_tokens is None and kept == 0:
        raise ValueError("sft_loss: action_mask keeps no token, there is no response to learn from")
    loss = nll_sum / (kept if n_tokens is None else n_tokens)
    return loss, {"nll_sum": nll_sum.detach(), "n_tokens": kept}


def bradley_terry_loss(chosen_scores, rejected_scores, margin=None, preference=None, n_rows=None):
    """The reward model's loss on pairs, with Llama 2's margin and soft labels.

    Delta = chosen_scores - rejected_scores
    L = -(1 / n_rows) sum_b [ preference * log sigmoid(Delta - margin)
                              + (1 - preference) * log sigmoid(-Delta - margin) ]
    (InstructGPT, arXiv:2203.02155, eq. 1, without margin and preference; Llama 2, arXiv:2307.09288, eq. 2,
    has the margin m; distilled RLAIF, arXiv:2309.00267, soft labels. A margin asks more of each term's side.)

    chosen_scores, rejected_scores: (n,), reward units, gradient flows.
    margin: (n,) or None for 0, reward units, at least 0: m, in the loss and never in the accuracy.
    preference: (n,) or None for 1, unitless in [0, 1]: the probability that "chosen" is the better one.
    Returns (loss, {"loss_sum": nats, "n_correct": pairs ranked as labelled, ties counting 1/2, "n_rows": n}).
    Raises ValueError on a preference outside [0, 1]."""
    margin = torch.zeros_like(chosen_scores) if margin is None else margin
    given = preference
    preference = torch.ones_like(chosen_scores) if preference is None else preference
    _same_shape(chosen=chosen_scores, rejected=rejected_scores, margin=margin, preference=preference)
    if given is not None and not ((given >= 0) & (given <= 1)).all():
        raise ValueError("bradley_terry_loss: a preference is a probability, from 0 to 1")
    difference = chosen_scores - rejected_scores
    loss_sum = -(
        preference * logsigmoid(difference - margin) + (1 - preference) * logsigmoid(-difference - margin)
    ).sum()
    return _mean_over_rows("bradley_terry_loss", loss_sum, n_rows, difference * (preference - 0.5).sign())


def ranking_loss(scores, ranks, margin=None):
    """K ranked responses to one prompt: Bradley-Terry on all pairs of different rank, their mean.

    L = -(1 / n_pairs) sum_{i, j: ranks[i] + 1 <= ranks[j]} log sigmoid(scores[i] - scores[j] - margin[i, j])
    (InstructGPT, arXiv:2203.02155, eq. 1: a prompt's pairs are one batch element: a response is learnt once.)

    scores: (K,), reward units, gradient flows. ranks: (K,), 0 is best; may be on a CPU. Ranks less
      than 1 apart are ties: whole ranks if equal, others where a score has to be some gap ahead to be better.
    margin: (K, K) or None for 0, reward units: as in bradley_terry_loss.
    Returns (loss, metrics) as bradley_terry_loss does, for these pairs.
    Raises ValueError if no two ranks are 1 apart."""
    _same_shape(scores=scores, ranks=ranks)
    better, worse = torch.nonzero(ranks[:, None] + 1 <= ranks[None, :], as_tuple=True)
    if len(better) == 0:
        raise ValueError("ranking_loss: no response is better than another, there is nothing to learn from")
    margin = None if margin is None else margin[better, worse].to(scores.device, non_blocking=scores.is_cuda)
    better, worse = (x.to(scores.device, non_blocking=scores.is_cuda) for x in (better, worse))
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
    Returns (n,), reward units. Raises ValueError unless N > K."""
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
    Returns (loss, {"loss_sum": nats, "rank_loss_sum": nats, of the first term alone, "n_correct": pairs
      ranked as labelled, ties counting 1/2, "n_rows": n})."""
    _same_shape(chosen=chosen_advantages, rejected=rejected_advantages)
    difference = chosen_advantages - rejected_advantages
    rank_sum = -logsigmoid(difference).sum()
    bound_sum = -(logsigmoid(bound - chosen_advantages) + logsigmoid(bound + rejected_advantages)).sum()
    loss, sums = _mean_over_rows("advantage_model_loss", rank_sum + bound_sum, n_rows, difference)
    return loss, {**sums, "rank_loss_sum": rank_sum.detach()}


def kl_estimate(logprobs, ref_logprobs, kind="k1"):
    """Per-token estimates of KL(policy || reference) from tokens that the policy drew.

    With d = logprobs - ref_logprobs: k1 = d, unbiased, may be negative; k2 = d^2 / 2; k3 = exp(-d) - 1 + d,
    unbiased and never negative (J. Schulman, "Approximating KL Divergence", 2020). The papers' penalty is k1.

    logprobs, ref_logprobs: the same shape, nats, gradient flows. kind: "k1", "k2" or "k3".
    Returns a tensor of that shape, nats. Raises ValueError on another kind."""
    _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimate: kind {kind!r} is not k1, k2 or k3")


def safety_gated_score(safety_logits, helpfulness_logits, is_safety_prompt, threshold=0.15):
    """Llama 2's R_c: the safety score where safety is at stake, the helpfulness score elsewhere.

    R_c = R_s if is_safety_prompt or sigmoid(R_s) < threshold else R_h
    (Llama 2, arXiv:2307.09288, section 3.2.3; its WHITEN(LOGIT(R_c)) takes logits, which both are already.)

    safety_logits, helpfulness_logits: (B,), logits. is_safety_prompt: (B,) bool. threshold: a probability.
    Returns (B,), logits. (common/scoring/scorers.py asks for ppo.py.)"""
    _same_shape(safety=safety_logits, helpfulness=helpfulness_logits, is_safety_prompt=is_safety_prompt)
    gated = is_safety_prompt | (safety_logits.sigmoid() < threshold)
    return torch.where(gated, safety_logits, helpfulness_logits)


def length_penalty(scores, n_characters, coef):
    """scores - coef * n_characters: what best and worst responses are chosen by, so that length does not win.

    (RLHF Workflow, arXiv:2405.07863, section 4.2's ablation, with coef = 0.001.)

    scores: (B,), reward units. n_characters: (B,), of the responses' texts. coef: reward units a character.
    Returns (B,), reward units."""
    _same_shape(scores=scores, n_characters=n_characters)
    return scores - coef * n_characters.to(scores.dtype)


def gae(rewards, values, action_mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation within each response.

    delta_t = rewards_t + gamma * values_{t+1} - values_t
    advantages_t = delta_t + gamma * lam * advantages_{t+1},  returns_t = advantages_t + values_t
    (Schulman et al., arXiv:1506.02438, eq. 16; Llama 2 and Qwen train PPO with it.) Values and advantages
    after a response's last token are 0, whether it ended or was cut.

    rewards: (B, T-1), reward units, of the action at t. values: (B, T-1), reward units, of the state before
      it. action_mask: (B, T-1) bool, the response tokens of a row. No gradient flows.
    Returns (advantages, returns), (B, T-1) each, 0 where action_mask is False; neither is whitened."""
    _same_shape(rewards=rewards, values=values, action_mask=action_mask)
    zeros = torch.zeros_like(values)
    rewards = torch.where(action_mask, rewards, zeros).detach()
    values = torch.where(action_mask, values, zeros).detach()  # so that a next value beyond the end is 0
    advantages = torch.zeros_like(values)
    next_value = next_advantage = zeros[:, 0]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(action_mask[:, t], delta + gamma * lam * next_advantage, zeros[:, 0])
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def group_advantages(rewards, n, leave_one_out=False, scale=True):
    """The advantage of each response over the n responses to its prompt: PPO without a value model.

    GRPO      (r_i - mean of r) / (std of r + 1e-4)           (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
    Dr. GRPO  r_i - mean of r, with scale=False               (Liu et al., arXiv:2503.20783, section 3.2)
    RLOO      r_i - mean of the other n - 1 rewards, with leave_one_out=True, scale=False: n / (n - 1) times
              Dr. GRPO's                                      (Ahmadian et al., arXiv:2402.14740, eq. 5)
    The standard deviation is that of a sample, with n - 1. In a group of equal rewards all advantages are 0.

    rewards: (B,), reward units, the n responses to a prompt one after the other; n: 2 or more. No gradient
      flows. ValueError for another B or n.
    Returns (B,): with scale=True without a unit, else reward units."""
    if n < 2 or rewards.dim() != 1 or len(rewards) % n:
        raise ValueError(f"group_advantages: rewards {tuple(rewards.shape)} are no groups of {n}, 2 or more")
    groups = rewards.detach().view(-1, n)
    advantages = groups - groups.mean(1, keepdim=True)
    if leave_one_out:
        advantages = advantages * n / (n - 1)
    if scale:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.view(-1)


def importance_weights(old_logprobs, sample_logprobs, action_mask, cap):
    """The weight of each token's advantage where the sampler drew from another distribution q than pi_old:

    w_t = min(pi_old(y_t) / q(y_t), cap)

    With these weights, the policy loss over tokens that q drew estimates the loss over tokens of pi_old; the
    cap bounds its variance and lets some bias in. q differs from pi_old by rounding (sampling and training
    round bfloat16 differently), by top-p, and if another program samples. (Truncated importance sampling: rho
    of IMPALA, Espeholt et al., arXiv:1802.01561, eq. 1.)

    old_logprobs, sample_logprobs: (B, T-1) nats, log pi_old and log q. action_mask: (B, T-1) bool. cap: > 0.
    Returns (B, T-1), without a unit, 1 where action_mask is False. No gradient flows."""
    _same_shape(old_logprobs=old_logprobs, sample_logprobs=sample_logprobs, action_mask=action_mask)
    gap = torch.where(action_mask, old_logprobs - sample_logprobs, torch.zeros_like(old_logprobs)).detach()
    return torch.where(action_mask, gap.exp().clamp(max=cap), torch.ones_like(gap))


def ppo_policy_loss(logprobs, old_logprobs, advantages, action_mask, clip_ratio=0.2, n_tokens=None):
    """PPO's clipped policy loss, averaged over response tokens.

    ratio = exp(logprobs - old_logprobs)
    L = -(1 / n_tokens) sum min(ratio * advantages, clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantages)
    (Schulman et al., arXiv:1707.06347, eq. 7.)

    logprobs: (B, T-1), nats, gradient flows. old_logprobs: (B, T-1), nats, of the policy that the rollout
      came from, by the same forward. advantages: (B, T-1), whitened as a rule. action_mask: (B, T-1) bool.
    Returns (loss, {"loss_sum", "n_tokens", "n_clipped": tokens where the clipped term is the smaller one,
      "ratio_sum", "ratio_max": the largest, no sum, "approx_kl_sum": ratio - 1 - log ratio})."""
    tensors = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    _same_shape(**tensors, action_mask=action_mask)
    logratio = torch.where(action_mask, logprobs - old_logprobs.detach(), torch.zeros_like(logprobs))
    ratio = logratio.exp()
    advantages = advantages.detach()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    loss_sum = -masked_sum(torch.minimum(plain, clipped), action_mask)
    n = action_mask.sum()
    if n_tokens is None and n == 0:
        raise ValueError("ppo_policy_loss: action_mask keeps no token, there is no action to learn from")
    with torch.no_grad():
        metrics = {"loss_sum": loss_sum.detach(), "n_tokens": n, "ratio_sum": masked_sum(ratio, action_mask)}
        metrics["n_clipped"] = ((clipped < plain) & action_mask).sum()
        metrics["ratio_max"] = torch.where(action_mask, ratio, torch.zeros_like(ratio)).max()
        metrics["approx_kl_sum"] = masked_sum(torch.expm1(logratio) - logratio, action_mask)
    return loss_sum / (n if n_tokens is None else n_tokens), metrics


def ppo_value_loss(values, old_values, returns, action_mask, clip_value=0.15, n_tokens=None):
    """PPO's clipped value loss, averaged over response tokens.

    L = (1 / n_tokens) sum 1/2 max((values - returns)^2, (clip(values, old_values +- clip_value) - returns)^2)
    (Qwen, arXiv:2309.16609, section 3.2.2, clips at 0.15, which presumes rewards of about unit scale.)

    values: (B, T-1), reward units, gradient flows. old_values: (B, T-1), before the iteration's first update.
    returns: (B, T-1), reward units, unwhitened advantages + old_values. action_mask: (B, T-1) bool.
    Returns (loss, {"loss_sum", "n_tokens", "n_clipped": tokens whose clipped error is the larger one})."""
    tensors = {"values": values, "old_values": old_values, "returns": returns}
    _same_shape(**tensors, action_mask=action_mask)
    zeros = torch.zeros_like(values)  # 0 * NaN in a gradient would be NaN
    values = torch.where(action_mask, values, zeros)
    old_values, returns = (torch.where(action_mask, x, zeros).detach() for x in (old_values, returns))
    near = old_values + (values - old_values).clamp(-clip_value, clip_value)
    error, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss_sum = masked_sum(torch.maximum(error, clipped), action_mask) / 2
    n = action_mask.sum()
    if n_tokens is None and n == 0:
        raise ValueError("ppo_value_loss: action_mask keeps no token, there is no value to learn")
    n_clipped = ((clipped > error) & action_mask).sum()
    metrics = {"loss_sum": loss_sum.detach(), "n_tokens": n, "n_clipped": n_clipped}
    return loss_sum / (n if n_tokens is None else n_tokens), metrics


def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta,
    label_smoothing=0.0, preference=None, n_rows=None,
):  # fmt: skip
    """Direct preference optimisation: trains the reward that the policy implies, on pairs.

    h = beta * [(chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)]
    L = -(1 / n_rows) sum_b [ p * log sigmoid(h) + (1 - p) * log sigmoid(-h) ]
    p = (1 - label_smoothing) * preference + label_smoothing * (1 - preference)
    (Rafailov et al., arXiv:2305.18290, eq. 7, where p = 1; E. Mitchell, "A note on DPO with noisy
    preferences", 2023, has label smoothing.) The implicit reward is beta * (logprobs - ref_logprobs).

    chosen_logprobs, rejected_logprobs: (n,), nats, log pi(y | x) summed over the tokens of a response, with
      its end token, if it has one; gradient flows. ref_*: (n,), the same under the reference, no gradient.
    beta: nats per nat, above 0. label_smoothing: in [0, 0.5): the share of labels taken to be wrong.
    preference: (n,) or None for 1, in [0, 1]: the probability that "chosen" is the better one.
    Returns (loss, {"loss_sum": nats, "n_correct": pairs whose implicit rewards are ranked as labelled, ties
      counting 1/2, "n_rows": n, "chosen_reward_sum", "rejected_reward_sum"}).
    Raises ValueError on a preference or label_smoothing out of its range."""
    preference = torch.ones_like(chosen_logprobs) if preference is None else preference
    tensors = {"chosen": chosen_logprobs, "rejected": rejected_logprobs, "preference": preference}
    _same_shape(**tensors, ref_chosen=ref_chosen_logprobs, ref_rejected=ref_rejected_logprobs)
    if not ((preference >= 0) & (preference <= 1)).all():
        raise ValueError("dpo_loss: a preference is a probability, from 0 to 1")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo_loss: label_smoothing {label_smoothing} is not from 0 to below 0.5")
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs.detach())
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs.detach())
    h = chosen_rewards - rejected_rewards
    p = (1 - label_smoothing) * preference + label_smoothing * (1 - preference)
    loss_sum = -(p * logsigmoid(h) + (1 - p) * logsigmoid(-h)).sum()
    loss, metrics = _mean_over_rows("dpo_loss", loss_sum, n_rows, h * (preference - 0.5).sign())
    metrics["chosen_reward_sum"] = chosen_rewards.detach().sum()
    metrics["rejected_reward_sum"] = rejected_rewards.detach().sum()
    return loss, metrics


def cpl_loss(
    chosen_logprobs, rejected_logprobs, chosen_mask, rejected_mask, alpha, gamma=1.0, lam=1.0, n_rows=None
):
    """Contrastive preference learning (docs/cpl.patch): pairs without a reference, later tokens discounted.

    S(y) = alpha * sum_t gamma^t log pi(y_t | x, y_<t),   t = 0 at a response's first token
    L = -(1 / n_rows) sum_b log sigmoid(S_c - lam * S_r)
    (Hejna et al., arXiv:2310.13639, section 3.) People are taken to prefer what regrets less: log odds of
    sum_t gamma^t (A_c,t - A_r,t), A the best policy's advantages. The policy of the highest return + alpha *
    entropy is pi = exp(A / alpha), so alpha log pi stands for A, and S for y's reward less the value of x.
    S is below 0: a lam below 1, the paper's conservative bias, is a margin of (1 - lam) |S_r|, and likelier
    data a lower loss. Each token lowers S: short responses win. gamma = lam = 1 is dpo_loss, references 0.

    *_logprobs: (n, T-1), nats, gradient flows. *_mask: (n, T-1) bool, the tokens of a row's one response, its
      end token included. T may differ between the sides. alpha: above 0. gamma, lam: above 0, at most 1.
    Returns (loss, metrics) as dpo_loss does, S the implicit reward. ValueError on other gamma or lam."""
    if not (0 < gamma <= 1 and 0 < lam <= 1):
        raise ValueError(f"cpl_loss: gamma {gamma} or lam {lam} is not above 0 and at most 1")
    rewards = []
    for logprobs, mask in ((chosen_logprobs, chosen_mask), (rejected_logprobs, rejected_mask)):
        _same_shape(logprobs=logprobs, mask=mask)
        t = mask.cumsum(1) - 1  # wherever in its row a response begins
        rewards.append(alpha * masked_sum(gamma**t * logprobs, mask, dim=1))
    chosen, rejected = rewards
    loss, metrics = bradley_terry_loss(chosen, rejected, margin=(lam - 1) * rejected, n_rows=n_rows)
    metrics["chosen_reward_sum"] = chosen.detach().sum()
    metrics["rejected_reward_sum"] = rejected.detach().sum()
    return loss, metrics


def _mean_over_rows(name, loss_sum, n_rows, signs):
    """(loss, metrics) of pairs; signs: (n,), above 0 where a pair is ranked as labelled, 0 for a tie."""
    if n_rows is None and len(signs) == 0:
        raise ValueError(f"{name}: there is no pair to learn from")
    n_correct = (torch.sign(signs.detach()) + 1).sum() / 2
    n = torch.full_like(n_correct, len(signs))
    metrics = {"loss_sum": loss_sum.detach(), "n_correct": n_correct, "n_rows": n}
    return loss_sum / (len(signs) if n_rows is None else n_rows), metrics


def _same_shape(**tensors):
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
