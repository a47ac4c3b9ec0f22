"""The math of every script: pure functions of tensors, torch only. Copy this file anywhere.

Shapes: B rows of T tokens. Per-token tensors are (B, T-1): index t describes the state after tokens 0..t and
the action taken in it, which is token t+1. A mask is True at the values to KEEP. Reductions under a mask
use torch.where, so masked values have no effect, even if they are NaN. Functions of whole rollouts also take
(B, R), column t for response token t, as ppo.py does.

A loss returns (loss, metrics). It is divided by n_tokens or n_rows: the number of response tokens or pairs in
the whole optimiser step, over all micro-batches and ranks. Gradients of micro-batches then add up to the
gradient of one big batch. With None the loss counts this batch only, as ranking_loss always does. Metrics are
detached sums over this batch, including its own n_tokens or n_rows (ratio_max is a maximum). FSDP averages
gradients over ranks; dist.backward makes up for it, so no loss here multiplies by the number of ranks.

Log probabilities of sampled tokens are those at the sampling temperature: of logits divided by it.

Every function raises ValueError if shapes differ. A loss raises it for an empty batch too, unless it is given
a count; then the loss of an empty batch is 0.
"""

import torch
from torch.nn.functional import logsigmoid


def masked_sum(x, mask, dim=None):
    """Sum x where mask is True.

    x: any shape, gradient flows. mask: bool, same shape as x. dim: dimension(s) to reduce; None: all."""
    _same_shape(x=x, mask=mask)
    return torch.where(mask, x, torch.zeros_like(x)).sum(dim)


def masked_mean(x, mask, dim=None):
    """Average x where mask is True. Raises ValueError if a mean has no values.

    x: any shape, gradient flows. mask: bool, same shape as x. dim: dimension(s) to reduce; None: all."""
    total = masked_sum(x, mask, dim)
    count = mask.sum(dim)
    if (count == 0).any():
        raise ValueError("masked_mean: the mask keeps nothing, the mean of no values is undefined")
    return total / count


def whiten(x, mask):
    """Shift and scale x to mean 0 and variance 1: (x - mean) / sqrt(var + 1e-8).

    Mean and variance (divided by n, not n - 1) are those of the values where mask is True.
    x: any shape. mask: bool, same shape as x.
    Returns a tensor like x, 0 where mask is False. Raises ValueError if the mask keeps nothing."""
    mean = masked_mean(x, mask)
    difference = torch.where(mask, x - mean, torch.zeros_like(x))
    var = masked_mean(difference**2, mask)
    return difference / (var + 1e-8) ** 0.5


def sft_loss(logprobs, action_mask, n_tokens=None):
    """Compute the loss of supervised fine-tuning: negative log likelihood, averaged over response tokens.

    L = -(1 / n_tokens) sum_{b,t} action_mask[b, t] * logprobs[b, t]
    (RLHF Workflow, arXiv:2405.07863, section 3.1. It is Llama 2, arXiv:2307.09288, section 3.1, that masks
    the prompt.)

    logprobs: (B, T-1), nats, log pi(token t+1 | tokens 0..t), gradient flows.
    action_mask: (B, T-1) bool, True if token t+1 is a response token; the end-of-sequence token is one.
    Returns (loss, {"nll_sum": nats, "n_tokens": count})."""
    _same_shape(logprobs=logprobs, action_mask=action_mask)
    nll_sum = -masked_sum(logprobs, action_mask)
    kept = action_mask.sum()
    if n_tokens is None and kept == 0:
        raise ValueError("sft_loss: action_mask keeps no token, there is no response to learn from")
    loss = nll_sum / (kept if n_tokens is None else n_tokens)
    return loss, {"nll_sum": nll_sum.detach(), "n_tokens": kept}


def bradley_terry_loss(chosen_scores, rejected_scores, margin=None, preference=None, n_rows=None):
    """Compute the reward model's loss on pairs, optionally with Llama 2's margin or soft labels.

    Delta = chosen_scores - rejected_scores
    L = -(1 / n_rows) sum_b [ preference * log sigmoid(Delta - margin)
                              + (1 - preference) * log sigmoid(-Delta - margin) ]
    (Without margin and preference: InstructGPT, arXiv:2203.02155, eq. 1. The margin m: Llama 2,
    arXiv:2307.09288, eq. 2. Soft labels: distilled RLAIF, arXiv:2309.00267. With a soft label, the margin
    raises the bar for either side.)

    chosen_scores, rejected_scores: (n,), reward units, gradient flows.
    margin: (n,), reward units, at least 0; None is 0. It counts in the loss but not in the accuracy.
    preference: (n,), in [0, 1], the probability that "chosen" is the better response; None is 1.
    Returns (loss, {"loss_sum": nats, "n_correct": pairs ranked as labelled, a tie counts 1/2, "n_rows": n}).
    Raises ValueError for a preference outside [0, 1]."""
    if preference is not None and not ((preference >= 0) & (preference <= 1)).all():
        raise ValueError("bradley_terry_loss: a preference is a probability, from 0 to 1")
    margin = torch.zeros_like(chosen_scores) if margin is None else margin
    preference = torch.ones_like(chosen_scores) if preference is None else preference
    _same_shape(chosen=chosen_scores, rejected=rejected_scores, margin=margin, preference=preference)
    difference = chosen_scores - rejected_scores
    loss_sum = -(
        preference * logsigmoid(difference - margin) + (1 - preference) * logsigmoid(-difference - margin)
    ).sum()
    return _mean_over_rows("bradley_terry_loss", loss_sum, n_rows, difference * (preference - 0.5).sign())


def ranking_loss(scores, ranks, margin=None):
    """Compute the loss of K ranked responses to one prompt: Bradley-Terry, averaged over their pairs.

    L = -(1 / n_pairs) sum_{i, j: ranks[i] + 1 <= ranks[j]} log sigmoid(scores[i] - scores[j] - margin[i, j])
    (InstructGPT, arXiv:2203.02155, eq. 1. All pairs of a prompt are one batch element there, so that a
    response goes through the model once.)

    scores: (K,), reward units, gradient flows.
    ranks: (K,), 0 is the best; may be on the CPU. Ranks less than 1 apart are ties and make no pair, so
      fractional ranks can demand a minimum gap.
    margin: (K, K), reward units, as in bradley_terry_loss; None is 0.
    Returns (loss, metrics) of these pairs, as bradley_terry_loss does.
    Raises ValueError if no two ranks are at least 1 apart."""
    _same_shape(scores=scores, ranks=ranks)
    _same_shape(margin=margin, pairs=ranks[:, None] - ranks)
    better, worse = torch.nonzero(ranks[:, None] + 1 <= ranks[None, :], as_tuple=True)
    if len(better) == 0:
        raise ValueError("ranking_loss: no response is better than another, there is nothing to learn from")
    margin = None if margin is None else margin[better, worse].to(scores.device, non_blocking=scores.is_cuda)
    better, worse = (x.to(scores.device, non_blocking=scores.is_cuda) for x in (better, worse))
    return bradley_terry_loss(scores[better], scores[worse], margin)


def advantage_score(scores, expected_scores, ratios=None, n_policies=None):
    """Compute the Advantage Model's score: how much better a response is than the policy's expected reward.

    a = scores - ((N - K) / N) * expected_scores - (1 / N) sum_{k=1..K} ratios[:, k] * scores
    (Advantage Model, arXiv:2309.10202, eq. 8; N is a hyper-parameter, K the number of other policies.)

    scores: (n,), r(x, y), reward units, gradient flows.
    expected_scores: (n,), e(x), the policy's expected reward on the same prompt, gradient flows.
    ratios: (n, K), pi(y|x) / pi'_k(y|x) for each of the K other policies whose responses are in the data;
      no gradient. None means K = 0, so that a = r - e.
    n_policies: N; None means K + 1. It must exceed K, or the expected reward would have no weight.
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
    """Compute the Advantage Model's loss on pairs: rank them, and keep advantages within a bound.

    L = -(1 / n_rows) sum_b [ log sigmoid(a_c - a_r) + log sigmoid(bound - a_c) + log sigmoid(bound + a_r) ]
    (Advantage Model, arXiv:2309.10202, eq. 6; its bound m(x) is 2.5.)

    chosen_advantages, rejected_advantages: (n,), a_c and a_r, reward units, gradient flows.
    bound: a number or (n,), reward units.
    Returns (loss, {"loss_sum": nats, "rank_loss_sum": nats, the first term, "n_correct": pairs ranked as
      labelled, a tie counts 1/2, "n_rows": n})."""
    _same_shape(chosen=chosen_advantages, rejected=rejected_advantages, bound=bound)
    difference = chosen_advantages - rejected_advantages
    rank_sum = -logsigmoid(difference).sum()
    bound_sum = -(logsigmoid(bound - chosen_advantages) + logsigmoid(bound + rejected_advantages)).sum()
    loss, sums = _mean_over_rows("advantage_model_loss", rank_sum + bound_sum, n_rows, difference)
    return loss, {**sums, "rank_loss_sum": rank_sum.detach()}


def kl_estimate(logprobs, ref_logprobs, kind="k1"):
    """Estimate KL(policy || reference) at each token, from tokens that the policy sampled.

    With d = logprobs - ref_logprobs:
    k1 = d               unbiased, may be negative; the penalty in the papers
    k2 = d^2 / 2         biased, never negative
    k3 = exp(-d) - 1 + d unbiased, never negative
    (J. Schulman, "Approximating KL Divergence", 2020.)

    logprobs, ref_logprobs: same shape, nats, gradient flows. kind: "k1", "k2" or "k3".
    Returns a tensor of that shape, nats. Raises ValueError for any other kind."""
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
    """Combine two reward models as Llama 2 does: the safety score if safety is at stake, else helpfulness.

    safety_logits if is_safety_prompt or sigmoid(safety_logits) < threshold else helpfulness_logits
    (R_c of Llama 2, arXiv:2307.09288, section 3.2.3. The paper then whitens LOGIT(R_c); both scores here are
    logits already. common/scoring/safety.py calls this for ppo.py.)

    safety_logits, helpfulness_logits: (B,), logits. is_safety_prompt: (B,) bool. threshold: a probability.
    Returns (B,), logits."""
    _same_shape(safety=safety_logits, helpfulness=helpfulness_logits, is_safety_prompt=is_safety_prompt)
    gated = is_safety_prompt | (safety_logits.sigmoid() < threshold)
    return torch.where(gated, safety_logits, helpfulness_logits)


def length_penalty(scores, n_characters, coef):
    """Subtract a penalty for length from the scores that choose the best and worst responses.

    scores - coef * n_characters
    (RLHF Workflow, arXiv:2405.07863, ablation in section 4.2, with coef = 0.001.)

    scores: (B,), reward units. n_characters: (B,), length of each response's text.
    coef: reward units per character.
    Returns (B,), reward units."""
    _same_shape(scores=scores, n_characters=n_characters)
    return scores - coef * n_characters.to(scores.dtype)


def gae(rewards, values, action_mask, gamma=1.0, lam=0.95):
    """Compute generalised advantage estimates and returns within each response.

    delta_t = rewards_t + gamma * values_{t+1} - values_t
    advantages_t = delta_t + gamma * lam * advantages_{t+1},  returns_t = advantages_t + values_t
    (Schulman et al., arXiv:1506.02438, eq. 16, the usual way in PPO; Llama 2 and Qwen do not name theirs.)
    Values and advantages after the last token of a response are 0, whether the response ended or was cut.

    rewards: (B, T-1), reward units, for the action at t.
    values: (B, T-1), reward units, of the state in which that action is taken.
    action_mask: (B, T-1) bool, the response tokens of each row.
    Returns (advantages, returns), each (B, T-1), 0 where action_mask is False, not whitened, without
      gradient."""
    _same_shape(rewards=rewards, values=values, action_mask=action_mask)
    zeros = torch.zeros_like(values)
    rewards = torch.where(action_mask, rewards, zeros).detach()
    values = torch.where(action_mask, values, zeros).detach()  # so the value after the last token is 0
    advantages = torch.zeros_like(values)
    next_value = next_advantage = zeros[:, 0]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(action_mask[:, t], delta + gamma * lam * next_advantage, zeros[:, 0])
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def group_advantages(rewards, n, leave_one_out=False, scale=True):
    """Compare each of the n responses to a prompt with the others: advantages without a value model.

    GRPO      (r_i - mean of r) / (std of r + 1e-4)           (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
    Dr. GRPO  r_i - mean of r, with scale=False               (Liu et al., arXiv:2503.20783, section 3.2)
    RLOO      r_i - mean of the other n - 1 rewards, with leave_one_out=True, scale=False: n / (n - 1) times
              Dr. GRPO's                                      (Ahmadian et al., arXiv:2402.14740, eq. 5)
    The standard deviation divides by n - 1. If all rewards of a group are equal, its advantages are 0.

    rewards: (B,), reward units, the n responses to a prompt next to each other. n: at least 2.
    Returns (B,), reward units (no unit if scale is True), without gradient.
    Raises ValueError if n is below 2 or B is not a multiple of n."""
    if n < 2 or rewards.dim() != 1 or len(rewards) % n:
        raise ValueError(f"group_advantages: rewards {tuple(rewards.shape)} are no groups of {n}, 2 or more")
    groups = rewards.detach().view(-1, n)
    groups = groups - groups[:, :1]  # equal rewards become exactly 0: the mean of 7 times 0.1 is not 0.1
    advantages = groups - groups.mean(1, keepdim=True)
    if leave_one_out:
        advantages = advantages * n / (n - 1)
    if scale:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.view(-1)


def importance_weights(old_logprobs, sample_logprobs, action_mask, cap):
    """Compute a weight for each token's advantage that corrects for the sampler's own distribution q.

    w_t = min(pi_old(y_t) / q(y_t), cap)
    (Truncated importance sampling; rho in IMPALA, Espeholt et al., arXiv:1802.01561, eq. 1.)

    The sampler's q differs from pi_old because sampling and training round bfloat16 differently, with top-p,
    where rows of the embeddings belong to no token, or if another program samples. With these weights, and
    given a token's prefix, the loss over tokens from q estimates the loss over tokens from pi_old; the cap
    limits its variance at the price of some bias. Two things stay uncorrected: how often q reaches the
    prefix, and tokens outside of top-p, which q never draws.

    old_logprobs, sample_logprobs: (B, T-1), nats, log pi_old and log q.
    action_mask: (B, T-1) bool. cap: above 0.
    Returns (B, T-1), no unit, 1 where action_mask is False, without gradient."""
    _same_shape(old_logprobs=old_logprobs, sample_logprobs=sample_logprobs, action_mask=action_mask)
    gap = torch.where(action_mask, old_logprobs - sample_logprobs, torch.zeros_like(old_logprobs)).detach()
    return torch.where(action_mask, gap.exp().clamp(max=cap), torch.ones_like(gap))


def ppo_policy_loss(logprobs, old_logprobs, advantages, action_mask, clip_ratio=0.2, n_tokens=None):
    """Compute PPO's clipped policy loss, averaged over response tokens.

    ratio = exp(logprobs - old_logprobs)
    L = -(1 / n_tokens) sum min(ratio * advantages, clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantages)
    (Schulman et al., arXiv:1707.06347, eq. 7.)

    logprobs: (B, T-1), nats, gradient flows.
    old_logprobs: (B, T-1), nats, of the policy that sampled the rollout, computed by the same forward as
      logprobs (not by the sampler), so that the ratio starts at exactly 1.
    advantages: (B, T-1), usually whitened. action_mask: (B, T-1) bool.
    Returns (loss, {"loss_sum", "n_tokens", "n_clipped": tokens whose clipped term is the smaller one,
      "ratio_sum", "ratio_max": a maximum, not a sum, "approx_kl_sum": sum of ratio - 1 - log ratio})."""
    tensors = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    _same_shape(**tensors, action_mask=action_mask)
    logratio = torch.where(action_mask, logprobs - old_logprobs.detach(), torch.zeros_like(logprobs))
    advantages = advantages.detach()
    # An infinite ratio's gradient times a clipped token's 0 would be NaN; unclipped, its loss is infinite
    ratio = torch.where(advantages >= 0, logratio.clamp(max=80), logratio).exp()
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    loss_sum = -masked_sum(torch.minimum(plain, clipped), action_mask)
    n = action_mask.sum()
    if n_tokens is None and n == 0:
        raise ValueError("ppo_policy_loss: action_mask keeps no token, there is no action to learn from")
    with torch.no_grad():
        metrics = {"loss_sum": loss_sum.detach(), "n_tokens": n, "ratio_sum": masked_sum(ratio, action_mask)}
        metrics["n_clipped"] = ((clipped < plain) & action_mask).sum()
        # With a 0, since there may be no rows
        metrics["ratio_max"] = torch.cat([(ratio * action_mask).flatten(), ratio.new_zeros(1)]).max()
        metrics["approx_kl_sum"] = masked_sum(torch.expm1(logratio) - logratio, action_mask)
    return loss_sum / (n if n_tokens is None else n_tokens), metrics


def ppo_value_loss(values, old_values, returns, action_mask, clip_value=0.15, n_tokens=None):
    """Compute PPO's clipped value loss, averaged over response tokens.

    L = (1 / n_tokens) sum 1/2 max((values - returns)^2, (clip(values, old_values +- clip_value) - returns)^2)
    (Qwen, arXiv:2309.16609, section 3.2.2, clips at 0.15, which suits rewards of about unit scale.)

    values: (B, T-1), reward units, gradient flows.
    old_values: (B, T-1), reward units, before the first update of this iteration.
    returns: (B, T-1), reward units: advantages before whitening, plus old_values.
    action_mask: (B, T-1) bool.
    Returns (loss, {"loss_sum", "n_tokens", "n_clipped": tokens whose clipped error is the larger one})."""
    tensors = {"values": values, "old_values": old_values, "returns": returns}
    _same_shape(**tensors, action_mask=action_mask)
    zeros = torch.zeros_like(values)  # masking the inputs, since 0 * NaN in a gradient would be NaN
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
    """Compute the DPO loss: on pairs, train the reward that the policy itself implies.

    h = beta * [(chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)]
    L = -(1 / n_rows) sum_b [ p * log sigmoid(h) + (1 - p) * log sigmoid(-h) ]
    p = (1 - label_smoothing) * preference + label_smoothing * (1 - preference)
    (Rafailov et al., arXiv:2305.18290, eq. 7, has p = 1. Label smoothing: E. Mitchell, "A note on DPO with
    noisy preferences", 2023.) The implicit reward is beta * (logprobs - ref_logprobs).

    chosen_logprobs, rejected_logprobs: (n,), nats, log pi(y | x) summed over the tokens of a response,
      including its end-of-sequence token if it has one; gradient flows.
    ref_chosen_logprobs, ref_rejected_logprobs: (n,), the same under the reference, no gradient.
    beta: above 0, reward units per nat. label_smoothing: in [0, 0.5), assumed share of wrong labels.
    preference: (n,), in [0, 1], the probability that "chosen" is the better response; None is 1.
    Returns (loss, {"loss_sum": nats, "n_correct": pairs whose implicit rewards are ranked as labelled, a tie
      counts 1/2, "n_rows": n, "chosen_reward_sum", "rejected_reward_sum"}).
    Raises ValueError if preference or label_smoothing is out of range."""
    if preference is not None and not ((preference >= 0) & (preference <= 1)).all():
        raise ValueError("dpo_loss: a preference is a probability, from 0 to 1")
    preference = torch.ones_like(chosen_logprobs) if preference is None else preference
    tensors = {"chosen": chosen_logprobs, "rejected": rejected_logprobs, "preference": preference}
    _same_shape(**tensors, ref_chosen=ref_chosen_logprobs, ref_rejected=ref_rejected_logprobs)
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
    """Compute the CPL loss (docs/learn/cpl.patch): pairs without a reference, later tokens discounted.

    S(y) = alpha * sum_t gamma^t log pi(y_t | x, y_<t),   t = 0 at a response's first token
    L = -(1 / n_rows) sum_b log sigmoid(S_c - lam * S_r)
    (Contrastive preference learning, Hejna et al., arXiv:2310.13639, section 3.)

    CPL assumes that annotators prefer the response with less regret: the log odds of a preference are
    sum_t gamma^t (A_c,t - A_r,t), where A are the advantages of the best policy. The policy that maximises
    return + alpha * entropy is pi = exp(A / alpha), so alpha log pi can replace A, and S can replace the
    reward of y minus the value of x. S is negative, so lam < 1 (the paper's conservative bias) acts as a
    margin of (1 - lam) |S_r| and lowers the loss of data that the policy finds more probable. Every further
    token lowers S, so S ranks short responses higher; where the chosen ones are longer, the loss corrects
    this, and the policy learns to write longer. gamma = lam = 1 is dpo_loss with references of 0.

    chosen_logprobs, rejected_logprobs: (n, T-1), nats, gradient flows; T may differ between the two.
    chosen_mask, rejected_mask: (n, T-1) bool, the tokens of the one response in each row, including its
      end-of-sequence token.
    alpha: above 0. gamma, lam: above 0, at most 1.
    Returns (loss, metrics) as dpo_loss does, with S as the implicit reward.
    Raises ValueError if gamma or lam is out of range."""
    if not (0 < gamma <= 1 and 0 < lam <= 1):
        raise ValueError(f"cpl_loss: gamma {gamma} or lam {lam} is not above 0 and at most 1")
    rewards = []
    for logprobs, mask in ((chosen_logprobs, chosen_mask), (rejected_logprobs, rejected_mask)):
        _same_shape(logprobs=logprobs, mask=mask)
        t = mask.cumsum(1) - 1  # counted from the response's first token
        rewards.append(alpha * masked_sum(gamma**t * logprobs, mask, dim=1))
    chosen, rejected = rewards
    loss, metrics = bradley_terry_loss(chosen, rejected, margin=(lam - 1) * rejected, n_rows=n_rows)
    metrics["chosen_reward_sum"] = chosen.detach().sum()
    metrics["rejected_reward_sum"] = rejected.detach().sum()
    return loss, metrics


def _mean_over_rows(name, loss_sum, n_rows, signs):
    """Return (loss, metrics) of pairs. signs: (n,), positive if ranked as labelled, 0 for a tie."""
    if signs.dim() != 1:
        raise ValueError(f"{name}: expected one number per response, (n,), not {tuple(signs.shape)}")
    if n_rows is None and len(signs) == 0:
        raise ValueError(f"{name}: there is no pair to learn from")
    n_correct = (torch.sign(signs.detach().float()) + 1).sum() / 2
    n = torch.full_like(n_correct, len(signs))
    metrics = {"loss_sum": loss_sum.detach(), "n_correct": n_correct, "n_rows": n}
    return loss_sum / (len(signs) if n_rows is None else n_rows), metrics


def _same_shape(**tensors):
    """Raise ValueError if shapes differ. Arguments without a shape (a number, None) are not compared."""
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if hasattr(x, "shape")}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
