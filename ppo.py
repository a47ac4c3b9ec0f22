"""PPO: raise the reward of a policy's responses, while a KL penalty keeps it close to where it started.

    rewards_t = -beta (log pi_old(y_t) - log pi_0(y_t)) + [t is the response's last token] r(x, y)
    A_t       = sum_k (gamma lambda)^k delta_{t+k},   delta_t = rewards_t + gamma V_old,t+1 - V_old,t
    R_t       = A_t + V_old,t,   after which A is whitened over all of a rollout
    L(theta)  = -(1/n) sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t),   rho = pi_theta / pi_old
    L(phi)    =  (1/n) sum_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t -+ c) - R_t)^2)

The sums run over the n response tokens of an optimiser step; "old" means at the time of the rollout. (Llama
2, arXiv:2307.09288, section 3.2.3; Qwen, arXiv:2309.16609, section 3.2.2.) Four models take part: the policy,
the value model, the reference (pi_0, the frozen first policy) and the scorer. Llama 2's safety gate adds a
second scorer. Two optional losses preserve the policy's earlier abilities:

    + c_ptx (mean NLL of text)                                        the pretrained gradient (Qwen)
    + c_sr (mean over rows of sum_t -log pi_theta(y_t | x, y_<t))     selective rehearsal (2309.10202, eq. 9)

Reads a policy, a scorer and prompts. Writes runs/ppo: model/, metrics.jsonl, samples.jsonl, plots,
summary.json, best/ if --patience is given, and checkpoint/, from which --resume continues.

    python ppo.py                                        the tiny world, half a minute to two on two CPU cores
    python ppo.py --model runs/rejection_sampling        on top of rejection sampling, as Llama 2 does
    torchrun --nproc-per-node 8 ppo.py llama2 --model DIR --scorer runs/reward

Differences from the papers: old log probabilities come from the training forward instead of the sampler, so
the ratio is exactly 1 on the first minibatch. In bfloat16 sampler and training forward differ, so a token's
advantage is weighted by the capped ratio of their probabilities (--importance-cap). The value after the last
token of a truncated response is 0.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

# The kit, which the algorithm needs: copy it along
from common import dist, models, responses
from common.batches import Document, make_blocks, my_micro_batches, n_response_tokens, response_lengths
from common.batches import response_mask, split, to_device
from common.errors import Diverged, NothingToLearn
from common.losses import gae, importance_weights, kl_estimate, masked_sum, ppo_policy_loss, ppo_value_loss
from common.losses import sft_loss, whiten

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.errors import InputError
from common.data import auxiliary, prompt_sets, splits
from common.loading import checks, lora, pretrained
from common.scoring import evaluation, functions, measures, safety, scorers
from common.run import checkpoints, cli, plots
from common.run.run import Run, launch


@dataclass
class Args:
    # models and data
    model: str = "runs/sft"
    """Policy to start from: a run directory, a model folder or a hub name."""
    reference: str | None = None
    """Reference pi_0 of the KL penalty. Default: the policy that training starts from."""
    scorer: str = "runs/reward"
    """Source of scores: a run of reward.py or advantage_model.py, a hub reward model, or FILE.py:function
    (docs/use/scorers.md)."""
    safety_scorer: str | None = None
    """Llama 2's second reward model; its score counts for prompts tagged is_safety and for unsafe
    responses."""
    safety_threshold: float = 0.15
    """Probability of the safety scorer below which a response is unsafe (Llama 2)."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a file (docs/use/data.md), or a mixture such as a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. Default: tiny's held-out split, else 5 % of the prompts, at most 500."""
    chat_template: str | None = None
    """Jinja file with a chat template, for a tokenizer without one, or to replace its own."""
    max_length: int = 128
    """Length limit of a prompt with its response, in tokens, and of a row that packs several of them."""
    # the rollout
    iterations: int = 30
    """Number of rollouts."""
    prompts_per_iteration: int = 64
    """Prompts per rollout, new ones as long as any remain."""
    n_samples: int = 2
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature of rollouts. PPO's log probabilities use it too; the optional losses do not."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling in rollouts; 1: off. Log probabilities are over all tokens."""
    max_new_tokens: int = 32
    """Length limit of responses, in tokens."""
    slots: int | None = 256
    """Responses decoded at the same time on one rank; the key-value cache grows with it. None: as many as fit
    on the accelerator, at most 256; 16 without one."""
    score_batch_size: int = 64
    """Responses in one forward of a scorer on one rank."""
    # the reward
    reward_norm: Literal["none", "whiten", "mean", "mean_std"] = "mean_std"
    """Normalisation of scores. whiten: within a rollout (Llama 2). mean: subtract the running mean of all
    scores so far (Qwen). mean_std: also divide by their standard deviation."""
    missing_eos_penalty: float = 1.0
    """Penalty subtracted from the normalised score of a response that did not end; a rollout in which no
    response ended is skipped. 0: no penalty; the response is scored as if it had ended where it was cut."""
    kl_coef: float = 0.3
    """Coefficient beta of the KL penalty."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL per token, in the penalty and in kl/per_response; the papers use k1
    (docs/learn/kl.md)."""
    max_kl: float = 100.0
    """Mean KL per response of a rollout, in nats, above which the run stops with an error."""
    # advantages and their losses
    gamma: float = 1.0
    """Discount factor of rewards."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Whiten advantages over all response tokens of a rollout."""
    clip_ratio: float = 0.2
    """Clipping range epsilon of the policy ratio."""
    importance_cap: float | None = None
    """Cap of the weight pi_old / q of a token that the sampler drew from its own distribution q; 0: no
    weights. Default: 2 if models compute in bfloat16, else 0."""
    clip_value: float = 0.15
    """Clipping range c of the value, in units of the normalised reward."""
    # other losses
    ptx_dataset: str | None = None
    """Rows of plain `text` for the pretrained gradient; tiny:kind=text in the tiny world."""
    ptx_coef: float = 0.0
    """Weight of the pretrained gradient, whose loss is the mean negative log likelihood of text."""
    ptx_batch_size: int = 64
    """Texts per optimiser step, over all ranks."""
    rehearsal_data: str | None = None
    """Rows in sft.py's formats whose negative log likelihood is added to the loss (eq. 9)."""
    rehearsal_coef: float = 0.01
    """Weight of the rehearsal loss: c_sr above, gamma in eq. 9."""
    rehearsal_batch_size: int = 16
    """Rehearsal rows per optimiser step, over all ranks."""
    rehearsal_norm: Literal["sum", "mean"] = "sum"
    """A row's rehearsal loss: the sum over its tokens, as in eq. 9, or their mean."""
    hold_out_rehearsed: bool = False
    """Exclude the prompts of --rehearsal-data from rollouts."""
    # optimiser steps
    epochs: int = 2
    """Passes over each rollout."""
    minibatch_size: int = 64
    """Responses per optimiser step, over all ranks."""
    micro_batch_size: int = 64
    """Largest number of rows in one forward on one rank; a row has up to --max-length tokens, or one response
    with --no-packing."""
    packing: bool = True
    """Several responses per row; with --no-packing, one row per response, padded to the longest in the
    batch."""
    share_prompt: bool = True
    """A packed row holds a prompt once for its responses; with --no-share-prompt, once per response."""
    lr: float = 1e-4
    """Learning rate of the policy, constant."""
    value_lr: float = 1e-3
    """Learning rate of the value model, constant."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Global norm that each model's gradients are clipped to; 0: no clipping."""
    value_warmup_steps: int = 10
    """Optimiser steps of the value model before the policy starts to learn, rounded up to whole rollouts."""
    freeze_layers: int = 0
    """Number of the policy's first decoder layers to freeze."""
    lora_rank: int = 0
    """Rank of the policy's LoRA adapters, trained instead of its weights at ten times --lr; 0: off. The
    value model is trained in full."""
    gradient_checkpointing: bool = False
    """Recompute activations inside each layer in backward instead of keeping them: less memory, about a third
    more time."""
    # the run
    output_dir: str = "runs/ppo"
    """Run directory."""
    eval_every: int = 10
    """Iterations between evaluations on held-out prompts; 0: only before and after training."""
    eval_prompts: int = 1000
    """Held-out prompts answered once in each evaluation, at temperature 1."""
    patience: int = 0
    """Number of evaluations without a better held-out reward after which the run stops. The best version is
    then exported, not the last; 0: never stop. Its held-out metrics are those that it was chosen by, so they
    are somewhat too good: compare it on other prompts."""
    save_every: int = 10
    """Iterations between checkpoints, of which the last is kept. A checkpoint is also written every ten
    minutes. 0: no checkpoints."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in model/. bfloat16 halves the file but rounds away much of what training in
    float32 changed; held-out metrics before and after rounding are then printed."""
    seed: int = 0
    """Seed of the order of prompts, the samples and the minibatches."""
    resume: bool = False
    """Continue from the last checkpoint in output_dir; start a new run if there is none."""
    overwrite: bool = False
    """Replace an existing run in output_dir."""


@dataclass
class Agent:
    """The models, each sharded by dist.shard, and the optimisers of the two that learn."""

    policy: torch.nn.Module  # a causal LM with the methods of models.py (pretrained.load_policy)
    value: torch.nn.Module  # a model whose head has one output
    reference: torch.nn.Module  # pi_0, frozen
    tokenizer: object  # shared by all of them
    policy_optimizer: torch.optim.Optimizer
    value_optimizer: torch.optim.Optimizer


@dataclass
class Rollout:
    """B responses and everything computed from them, on the CPU, the same on every rank.

    Per-token tensors are (B, R), where R is the longest response, and 0 where `mask` is False. (The sampler's
    Samples are only tokens and their log probabilities.)"""

    sampled: list[tuple[responses.Prompt, responses.Response]]  # one per response
    documents: list[Document]  # prompt and response as ids; `number` is the row in the tensors below
    mask: torch.Tensor  # (B, R) bool
    finished: torch.Tensor  # (B,) bool, True if the response ended with an end-of-sequence token
    scores: torch.Tensor | None = None  # (B,), as the scorer returns them
    response_rewards: torch.Tensor | None = None  # (B,) r(x, y): normalised scores minus the penalty
    sample_logprobs: torch.Tensor | None = None  # log q, of the sampler; this and all below are (B, R)
    old_logprobs: torch.Tensor | None = None  # log pi_old
    entropies: torch.Tensor | None = None  # entropy of pi_old
    ref_logprobs: torch.Tensor | None = None  # log pi_0
    old_values: torch.Tensor | None = None  # V_old
    advantages: torch.Tensor | None = None  # A, whitened, times the importance weights
    returns: torch.Tensor | None = None  # R = A before whitening, plus V_old

    def in_batch(self, x, batch):
        """Lay out per-token values x (B, R) like a batch's response tokens: (B', T-1), 0 elsewhere."""
        rows = [document.number for document in batch.documents]
        of_tokens = to_device(x[rows][self.mask[rows]], batch.input_ids.device)
        return of_tokens.new_zeros(batch.action_mask.shape).masked_scatter(batch.action_mask, of_tokens)


def blocks_of(documents, numbers, args):
    """Pack the documents with these numbers into rows of --max-length tokens, evenly for all ranks."""
    chosen = [documents[i] for i in sorted(numbers)]
    return make_blocks(chosen, args.max_length, args.packing, dist.world_size(), args.share_prompt)


def normalise(scores, statistics, kind):
    """Normalise the scores of a rollout as --reward-norm says.

    scores: (B,). statistics: [count, mean, sum of squared deviations] of all scores so far. It is updated in
      place, and includes this rollout's scores when they are normalised.
    Returns (B,)."""
    n, mean = len(scores), scores.double().mean().item()
    squares = ((scores.double() - mean) ** 2).sum().item()
    # Chan et al.'s update: it merges the two means and sums of squares without keeping old scores
    total, shift = statistics[0] + n, mean - statistics[1]
    statistics[2] += squares + shift**2 * statistics[0] * n / total
    statistics[1] += shift * n / total
    statistics[0] = total
    if kind == "whiten":
        return whiten(scores, torch.ones_like(scores, dtype=torch.bool))
    if kind == "none":
        return scores
    deviation = max((statistics[2] / total) ** 0.5, 1e-4) if kind == "mean_std" else 1.0
    return (scores - statistics[1]) / deviation


def minibatches_of(n_responses, iteration, args):
    """Return the minibatches of each epoch, lists of response numbers, in a new random order per epoch."""
    orders = [dist.shuffled(n_responses, args.seed, "minibatches", iteration, i) for i in range(args.epochs)]
    return [split(order, args.minibatch_size) for order in orders]


def sampler_weights(rollout, args):
    """Return importance weights (B, R) that correct for the sampler's distribution; 1.0 if they are off."""
    if not args.importance_cap:
        return 1.0
    old = rollout.old_logprobs
    return importance_weights(old, rollout.sample_logprobs, rollout.mask, args.importance_cap)


def estimate_advantages(rollout, args):
    """Compute the rollout's advantages and returns; return the mean KL in nats per response."""
    kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, args.kl_estimator)  # (B, R)
    token_rewards = -args.kl_coef * kl
    last = rollout.mask.sum(1) - 1  # the end-of-sequence token, or the last one before the cut
    token_rewards[torch.arange(len(last)), last] += rollout.response_rewards
    advantages, rollout.returns = gae(token_rewards, rollout.old_values, rollout.mask, args.gamma, args.lam)
    if args.whiten_advantages:
        advantages = whiten(advantages, rollout.mask)  # every rank has the whole rollout
    rollout.advantages = advantages * sampler_weights(rollout, args)  # 0 outside the mask
    return masked_sum(kl, rollout.mask).item() / len(last)


def update(agent, rollout, minibatch, extra, policy_learns, args):
    """Take one optimiser step of the value model and, after its warm-up, of the policy.

    Every rank has the whole rollout and computes its share of the minibatch.
    minibatch: indices of responses in the rollout.
    extra: {"ptx" or "rehearsal": documents} for the optional losses.
    policy_learns: False during the value model's warm-up.
    Returns sums over tokens and gradient norms, by name. Raises NotFinite if one of them is not finite."""
    n = int(rollout.mask[minibatch].sum())  # response tokens over all micro-batches and ranks
    blocks = blocks_of(rollout.documents, minibatch, args)
    sums = dist.Sums()
    for batch in my_micro_batches(blocks, agent.policy, args.micro_batch_size):
        mask = batch.action_mask
        values = models.state_values(agent.value, batch)
        old_values = rollout.in_batch(rollout.old_values, batch)
        returns = rollout.in_batch(rollout.returns, batch)
        loss, value_sums = ppo_value_loss(values, old_values, returns, mask, args.clip_value, n_tokens=n)
        dist.backward(loss)
        sums.add(value_sums, "value/")
        if policy_learns:
            logprobs = models.logprobs(agent.policy, batch, args.temperature)
            old = rollout.in_batch(rollout.old_logprobs, batch)
            advantages = rollout.in_batch(rollout.advantages, batch)
            loss, policy_sums = ppo_policy_loss(logprobs, old, advantages, mask, args.clip_ratio, n_tokens=n)
            dist.backward(loss)
            sums.add(policy_sums, "policy/")
    if policy_learns:
        for name, documents in extra.items():
            nll_backward(agent.policy, name, documents, sums, args)
    totals = sums.over_ranks()
    trained = [agent.policy, agent.value] if policy_learns else [agent.value]
    optimizers = [agent.policy_optimizer, agent.value_optimizer] if policy_learns else [agent.value_optimizer]
    loss = (totals["value/loss_sum"] + totals.get("policy/loss_sum", 0.0)) / n
    loss += args.ptx_coef * totals.get("ptx/loss", 0.0)
    loss += args.rehearsal_coef * totals.get("rehearsal/loss", 0.0)
    # If the loss or a gradient is not finite, this raises an error and no model changes
    norms = dist.optimizer_step(trained, optimizers, loss, args.max_grad_norm)
    policy_norm = norms[0] if policy_learns else 0.0
    return {**totals, "n": n, "policy/grad_norm": policy_norm, "value/grad_norm": norms[-1]}


def nll_backward(policy, name, documents, sums, args):
    """Add the gradient of one of the optional losses, times its coefficient.

    name: "ptx", the pretrained gradient, is a mean over tokens. "rehearsal" (arXiv:2309.10202, eq. 9) is a
      sum over the tokens of a row (or their mean, --rehearsal-norm), averaged over rows."""
    coef = args.ptx_coef if name == "ptx" else args.rehearsal_coef
    blocks = blocks_of(documents, range(len(documents)), args)
    for batch in my_micro_batches(blocks, policy, args.micro_batch_size):
        logprobs = models.logprobs(policy, batch)
        if name == "ptx":
            loss, _ = sft_loss(logprobs, batch.action_mask, n_tokens=n_response_tokens([documents]))
        else:
            weights = 1 / response_lengths(batch) if args.rehearsal_norm == "mean" else 1.0
            loss = -masked_sum(logprobs * weights, batch.action_mask) / len(documents)
        dist.backward(coef * loss)
        sums.add({f"{name}/loss": loss, f"{name}/n_tokens": batch.action_mask.sum()})


def metrics_of(rollout, steps):
    """Compute the metrics of an iteration, most of them means over the tokens of all its steps.

    The first minibatch has metrics of its own, policy/first_*: the policy has not changed yet, so its ratio
    must be 1 and its approximate KL 0."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    n = total["n"]
    returns = rollout.returns[rollout.mask]
    errors = returns - rollout.old_values[rollout.mask]
    drawn, old = rollout.sample_logprobs[rollout.mask], rollout.old_logprobs[rollout.mask]
    row = {
        "reward/score": rollout.scores.mean().item(),
        "reward/deviation": rollout.scores.std(correction=0).item(),
        "reward/normalised": rollout.response_rewards.mean().item(),
        "rollout/finished": rollout.finished.float().mean().item(),
        "rollout/length": sum(len(response.ids) for _, response in rollout.sampled) / len(rollout.sampled),
        "loss/value": total["value/loss_sum"] / n,
        "value/clipped": total["value/n_clipped"] / n,
        "value/explained_variance": 1 - (errors.var(correction=0) / returns.var(correction=0)).item(),
        "optim/value_grad_norm": total["value/grad_norm"] / len(steps),
        "policy/entropy": rollout.entropies[rollout.mask].mean().item(),
        "policy/sampler_kl": kl_estimate(drawn, old, "k3").mean().item(),
        "policy/sampler_ratio_max": (drawn - old).abs().max().exp().item(),
    }
    if "policy/loss_sum" in total:  # absent while only the value model learns
        row["loss/policy"] = total["policy/loss_sum"] / n
        row["policy/ratio_mean"] = total["policy/ratio_sum"] / n
        row["policy/ratio_max"] = max(step["policy/ratio_max"] for step in steps)
        row["policy/clipped"] = total["policy/n_clipped"] / n
        row["policy/approx_kl"] = total["policy/approx_kl_sum"] / n
        row["policy/first_ratio_max"] = steps[0]["policy/ratio_max"]
        row["policy/first_approx_kl"] = steps[0]["policy/approx_kl_sum"] / steps[0]["n"]
        row["optim/policy_grad_norm"] = total["policy/grad_norm"] / len(steps)
    if "ptx/loss" in total:
        row["loss/ptx"] = total["ptx/loss"] / len(steps)
        row["ptx/tokens_ratio"] = total["ptx/n_tokens"] / n
    if "rehearsal/loss" in total:
        row["loss/rehearsal"] = total["rehearsal/loss"] / len(steps)
    return row


def fresh_state():
    """Return the state passed between iterations: optimiser steps, policy steps, statistics of scores."""
    return {"optimizer_steps": 0, "policy_steps": 0, "score_statistics": [0, 0.0, 0.0]}


def run_iteration(
    agent, prompts, score, state, iteration, args, extra_of=lambda step: {}, lap=lambda name: None
):  # fmt: skip
    """Run one iteration: sample, score, estimate, update. Every rank must call it.

    prompts: list of responses.Prompt, the same on every rank.
    score: function of [(prompt, response)] that returns (B,) fp32 scores on the CPU, the same on every rank.
    state: from fresh_state; updated in place.
    iteration: 1, 2, ...; with args.seed it determines the random draws.
    extra_of: function of the policy's step number that returns {"ptx" or "rehearsal": documents} for the
      optional losses.
    lap: function called with the name of each of the four steps when it is done.
    Returns (Rollout, {metric: number}). Raises NothingToLearn if no response ended and there is a penalty for
    that, Diverged if the KL exceeds --max-kl, NotFinite if a loss or gradient is not finite, InputError if
    the policy cannot be sampled, ValueError if scores are not finite or a prompt and its response do not fit
    into --max-length."""
    # 1. sample: n responses to each prompt. Ranks sample different prompts, then exchange the responses
    seed = dist.seed_of(args.seed, "rollout", iteration)
    options = {"n": args.n_samples, "temperature": args.temperature, "top_p": args.top_p}
    sampled = responses.answers(agent.policy, agent.tokenizer, prompts, args, seed, **options)
    documents = responses.documents(sampled)
    finished = torch.tensor([response.finished for _, response in sampled])
    rollout = Rollout(sampled, documents, response_mask(documents), finished)
    drawn = torch.tensor([x for _, response in sampled for x in response.logprobs])
    rollout.sample_logprobs = torch.zeros(rollout.mask.shape).masked_scatter(rollout.mask, drawn)
    if not finished.any() and args.missing_eos_penalty:
        why = f"iteration {iteration}: no response ended within {args.max_new_tokens} tokens: raise "
        why += "--max-new-tokens, or let sft.py teach the model to end first, or set --missing-eos-penalty 0"
        raise NothingToLearn(why)
    lap("sample")

    # 2. score: one number per response, normalised; responses that did not end get a penalty
    rollout.scores = score(sampled)
    if rollout.scores.shape != finished.shape or not rollout.scores.isfinite().all():
        raise ValueError(f"expected {len(finished)} finite scores, got {rollout.scores}")
    normalised = normalise(rollout.scores, state["score_statistics"], args.reward_norm)
    rollout.response_rewards = normalised - args.missing_eos_penalty * (~finished).float()
    lap("score")

    # 3. estimate: log pi_old, log pi_0 and V of each response token, then KL penalty, GAE and whitening. The
    # forwards use the same micro-batches as the first epoch: pi / pi_old is exactly 1 before the first update
    minibatches = minibatches_of(len(sampled), iteration, args)
    first_epoch = [blocks_of(documents, minibatch, args) for minibatch in minibatches[0]]
    per_token = partial(models.per_token, plan=first_epoch, micro_batch_size=args.micro_batch_size)
    logprobs = partial(models.logprobs, temperature=args.temperature)
    rollout.old_logprobs, rollout.entropies = per_token(partial(logprobs, entropy=True), agent.policy)
    [rollout.ref_logprobs] = per_token(logprobs, agent.reference)
    [rollout.old_values] = per_token(models.state_values, agent.value)
    kl = estimate_advantages(rollout, args)
    if not kl <= args.max_kl:
        why = f"iteration {iteration}: the KL is {kl:.1f} nats per response (--max-kl {args.max_kl:g})"
        raise Diverged(f"{why}: lower --lr or raise --kl-coef (or --max-kl, if --reference is far)")
    lap("estimate")

    # 4. update: one optimiser step per minibatch; during warm-up only the value model learns
    policy_learns = state["optimizer_steps"] >= args.value_warmup_steps
    steps = []
    for minibatch in sum(minibatches, []):  # all epochs
        extra = extra_of(state["policy_steps"])
        steps.append(update(agent, rollout, minibatch, extra, policy_learns, args))
        state["optimizer_steps"] += 1
        state["policy_steps"] += policy_learns
    lap("update")
    return rollout, {**metrics_of(rollout, steps), "kl/per_response": kl}


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
def check(args):
    """Check the flags before anything is loaded."""
    size = args.prompts_per_iteration * args.n_samples  # responses of a rollout
    divides = args.minibatch_size >= 1 and size % args.minibatch_size == 0
    default_threshold = args.safety_threshold == Args.safety_threshold
    divisors = [n for n in range(1, size + 1) if size % n == 0 and n <= max(1, args.minibatch_size)]
    divisor = f"a divisor of a rollout's {size} responses: try {max(divisors, default=1)}"
    cli.check_flags(
        args,
        ("iterations", args.iterations >= 1, "1 or more"),
        ("n_samples", args.n_samples >= 1, "1 or more"),
        ("temperature", args.temperature > 0, "more than 0: a greedy rollout explores nothing"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("minibatch_size", divides, divisor),
        ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
        ("ptx_coef", args.ptx_coef == 0 or args.ptx_dataset, "0 without --ptx-dataset"),
        ("safety_threshold", default_threshold or args.safety_scorer, "also --safety-scorer"),
        ("importance_cap", not args.importance_cap or args.importance_cap >= 1, "0, or 1 or more"),
        ("hold_out_rehearsed", args.rehearsal_data or not args.hold_out_rehearsed, "also --rehearsal-data"),
    )


def n_steps(prompts, iterations, args) -> int:
    """Count the optimiser steps of this number of iterations."""
    size = min(args.prompts_per_iteration, len(prompts)) * args.n_samples
    return iterations * args.epochs * math.ceil(size / args.minibatch_size)


def check_data(prompts, held_out, args):
    """Check the flags that depend on the data."""
    evaluates = args.eval_every and args.eval_prompts and held_out
    before_last = n_steps(prompts, args.iterations - 1, args)
    moves = f"at most the {before_last} steps before the last of --iterations {args.iterations}: the policy"
    cli.check_flags(
        args,
        ("patience", not args.patience or evaluates, "0 without --eval-every and held-out prompts"),
        ("value_warmup_steps", args.value_warmup_steps <= before_last, f"{moves} would never move"),
    )


def plan_of(prompts, args) -> str:
    """Describe how many prompts, responses and steps the run will take, for its first lines."""
    n_prompts = min(args.prompts_per_iteration, len(prompts))
    plan = f"{args.iterations} iterations of {n_prompts} prompts, {args.n_samples} responses each "
    plan += f"({args.iterations * n_prompts / len(prompts):.4g} passes over {len(prompts):,} prompts); "
    plan += f"{n_steps(prompts, args.iterations, args):,} optimiser steps"
    if args.value_warmup_steps:
        plan += f", the first {args.value_warmup_steps} or more only for the value model"
    return plan


PANELS = {
    "win rate over the first policy": ["sft/score_win_rate", "sft/gold_win_rate"],
    "reward": ["reward/score", "eval/score", "reward/gold", "gold/score"],
    "KL per response": ["kl/per_response", "eval/kl"],
    "entropy": ["policy/entropy"],
    "value": ["value/explained_variance", "loss/value"],
}
PLOTS = [partial(plots.curves, panels=PANELS), plots.frontier]


def load_policy(args, tokenizer, device):
    """Load and shard the policy, with its first --freeze-layers layers frozen."""
    policy = pretrained.load_policy(
        args.model, tokenizer, args.gradient_checkpointing, args.seed, args.lora_rank
    )
    for layer in dist.decoder_layers(policy)[: args.freeze_layers]:
        layer.requires_grad_(False)
    if not any(weight.requires_grad for weight in policy.parameters()):
        raise InputError(f"--freeze-layers {args.freeze_layers} with --lora-rank leaves nothing to train")
    return dist.shard(policy, device)


SHOWN = ("eval/score sft/score_win_rate gold/score gold/no_hazard gold/hazard eval/kl eval/entropy "
         "eval/ptx_nll").split()  # fmt: skip


def is_lora_on_reference(args) -> bool:
    """Return whether the frozen weights under the policy's adapters serve as the reference."""
    return args.lora_rank > 0 and args.reference in (None, args.model)


def main(args: Args):
    run = Run(args, "ppo", check, PLOTS)
    if run.finished:
        return
    functions.try_functions(args)  # a broken FILE.py:function should fail now, not after hours

    # data: prompts for rollouts, held-out prompts, rows of the optional losses
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    for name in (args.model, args.reference or args.model):
        pretrained.check_policy(name, tokenizer, args, sampled=name == args.model)
    prompts, held_out = prompt_sets.train_and_held_out(args, tokenizer)
    extra_data, held_out_text = auxiliary.load_extra(args, tokenizer, held_out)
    if args.hold_out_rehearsed:
        prompts = splits.without_prompts_of(prompts, extra_data["rehearsal"], args.dataset)
    check_data(prompts, held_out, args)

    # models: policy and value model learn. If possible, the value model starts as a copy of the scorer, in
    # units of the normalised rewards
    scorer = safety.load_gated(args, tokenizer, run.device)
    for each in (scorer.scorer, scorer.safety):
        scorers.check_prompts(each, [*prompts, *held_out])
    policy = load_policy(args, tokenizer, run.device)
    reference = lora.FrozenBase(policy)  # with LoRA, the weights under the policy's adapters
    if not is_lora_on_reference(args):
        reference = pretrained.load_frozen(args.reference or args.model, tokenizer, args, run.device)
    value = scorers.load_value_model(scorer, policy, tokenizer, prompts, args, run.device, run.resumed)
    checks.fit_rows(args, (policy, reference, value))
    if args.importance_cap is None:
        args.importance_cap = 0.0 if policy.compute_dtype == torch.float32 else 2.0
    policy_optimizer = dist.adamw(policy, args.lr, args)
    value_optimizer = dist.adamw(value, args.value_lr, args)
    agent = Agent(policy, value, reference, tokenizer, policy_optimizer, value_optimizer)
    extra_of = partial(auxiliary.next_extra, extra_data, args=args)  # reshuffled each pass

    # Everything is loaded and checked: only now replace an old run, or load the checkpoint to resume from
    modules = {"policy": (policy, policy_optimizer), "value": (value, value_optimizer)}
    evaluate = evaluation.HeldOutPrompts(held_out, scorer, reference, tokenizer, args, held_out_text)
    plan = plan_of(prompts, args)
    state = run.begin(plan=plan, modules=modules, state=fresh_state(), held_out=evaluate.fingerprint)
    run.log_before(evaluate, policy, keep_samples=True)
    evaluate.first = state.get("samples", [])  # later responses are compared with these (win rate)
    best, only_policy = run.folder / "best", {"policy": modules["policy"]}
    if args.patience and "best_version" not in state:  # the best policy so far is the current one
        score = -math.inf if state["step"] else state["before"].get("eval/score", 0.0)
        state["best_version"] = {"score": score, "evaluations_since": 0, "iteration": state["step"]}
        checkpoints.save_checkpoint(best, state["step"], only_policy, {})

    for iteration in run.steps(args.iterations):  # also writes a checkpoint every --save-every iterations
        if args.patience and state["best_version"]["evaluations_since"] >= args.patience:
            break

        batch_prompts = prompt_sets.fresh_prompts(prompts, args.prompts_per_iteration, iteration, args.seed)
        try:  # 1. sample, 2. score, 3. estimate, 4. update
            rollout, row = run_iteration(
                agent, batch_prompts, scorer.score, state, iteration, args, extra_of, run.lap
            )
        except NothingToLearn as error:
            row = run.skip(str(error))
        else:
            state["skipped"] = 0  # iterations skipped in a row; run.skip gives up at five
            samples = evaluation.describe_samples(rollout.sampled, args.dataset)
            row.update({**scorer.metrics, **measures.means(samples, {"reward/gold": "gold"})})
            row["perf/tokens_per_s"] = rollout.mask.sum().item() / run.seconds()
        if run.due(args.eval_every) or (args.patience and iteration == args.iterations):
            row.update(evaluate(policy))
        if args.patience and "eval/score" in row:
            state["best_version"]["evaluations_since"] += 1
            if row["eval/score"] > state["best_version"]["score"]:
                version = {"score": row["eval/score"], "evaluations_since": 0, "iteration": iteration}
                state["best_version"] = version
                # Also keep the version that the last checkpoint calls the best: --resume would start there
                kept = checkpoints.checkpoint_state(run.checkpoint).get("best_version", {}).get("iteration")
                checkpoints.save_checkpoint(best, iteration, only_policy, {}, keep=kept)
        shown = ("reward/score", "kl/per_response", "policy/entropy")
        run.log(row, state["optimizer_steps"], iteration, shown)

    exported = state["best_version"]["iteration"] if args.patience else state["step"]
    if args.patience:
        checkpoints.load_checkpoint(best, only_policy, step=exported)
    if is_lora_on_reference(args):  # the export merges adapters into the weights that served as reference
        evaluate.reference = pretrained.load_frozen(args.model, tokenizer, args, run.device)
    run.finish(
        policy, tokenizer, after=run.evaluate_export(policy, evaluate), samples=evaluate.samples,
        summary={"iterations": state["step"], "exported_iteration": exported},
        shown=SHOWN,
    )  # fmt: skip


LARGE = Args(  # for 7B; kl_coef and value_lr are Qwen's (section 3.2.2), the rest is ours
    model="Qwen/Qwen2.5-7B-Instruct", dataset="Anthropic/hh-rlhf",  # the papers' own are not public
    iterations=200, prompts_per_iteration=256, n_samples=1, minibatch_size=64, epochs=1, kl_coef=0.04,
    value_lr=5e-6, value_warmup_steps=0, missing_eos_penalty=0.0, max_length=2048, max_new_tokens=1024,
    slots=None, micro_batch_size=1, score_batch_size=8, eval_prompts=256, gradient_checkpointing=True,
)  # fmt: skip
RECIPES = {
    "tiny": ("the tiny world: the default, half a minute to two on two CPU cores", Args()),
    "base": (
        "a pretrained chat model: the default if the model or the data are not the tiny world's",
        Args(
            kl_coef=0.04,  # Qwen (arXiv:2309.16609), section 3.2.2
            # Ours, chosen by experiment (docs/use/recipes.md): the papers' 1e-6 needs hundreds of rollouts
            lr=1e-5, value_lr=2e-5, value_warmup_steps=4, epochs=2,
            iterations=20, prompts_per_iteration=16, n_samples=4, minibatch_size=32,
            micro_batch_size=4, score_batch_size=8, max_new_tokens=256, max_length=1024, slots=32,
            eval_prompts=100,
        ),
    ),
    "large": (
        "your own model of 1 to 8B on 8 GPUs of 80 GB; give --model and --dataset",
        replace(LARGE, n_samples=4, prompts_per_iteration=128, lr=1e-6, eval_every=10, patience=10),
    ),
    "llama2": (
        "Llama 2's PPO; give --safety-scorer for its gate",
        replace(
            LARGE, model="meta-llama/Llama-2-7b-chat-hf",  # the paper starts from rejection sampling
            # section 3.2.3, like the lines below: 200 to 400 iterations, chosen by held-out prompts
            iterations=400, eval_every=10, patience=20,
            prompts_per_iteration=512, n_samples=1, epochs=1, minibatch_size=64,  # one step per minibatch
            reward_norm="whiten", clip_ratio=0.2, lr=1e-6, value_lr=1e-6, adam_eps=1e-5, weight_decay=0.1,
            max_grad_norm=1.0, kl_coef=0.01,  # 0.005 for 34B and 70B
            clip_value=0.2, max_length=4096,  # not given
        ),
    ),
    "qwen": (
        "Qwen's PPO; --ptx-dataset FILE --ptx-coef for its pretrained gradient, whose weight is not given",
        replace(
            LARGE, n_samples=2, top_p=0.9, reward_norm="mean", kl_coef=0.04,  # section 3.2.2, like the rest
            lr=1e-6, value_lr=5e-6, clip_value=0.15, value_warmup_steps=50,
        ),
    ),
    "advantage_model": (
        "AM-PPO-SR of Advantage Model + Selective Rehearsal",
        replace(
            LARGE, scorer="runs/advantage_model", reward_norm="none",  # not given; advantages lie around 0
            iterations=100, prompts_per_iteration=256, minibatch_size=256,  # section 4.2, like lr: 100 steps
            lr=5e-7, rehearsal_coef=0.01, rehearsal_norm="sum",
            rehearsal_data="runs/rehearsal.jsonl",  # from python -m common.programs.rehearsal (section 3.2)
        ),
    ),
    "summarize": (
        "Stiennon et al.'s summaries; sft.py summarize and reward.py summarize come first",
        replace(
            LARGE, model="runs/sft", dataset="trl-lib/tldr",
            # arXiv:2009.01325, appendix B.1: a million episodes. Its lr falls to 0; here it is constant. For
            # 6.7B 256 episodes per iteration, lr 7e-6. InstructGPT (arXiv:2203.02155, appendix C.4): 256,000
            # episodes, 1 epoch of 8 minibatches, kl_coef 0.02, value_lr 9e-6, pretrained gradient times 27.8
            iterations=1953, prompts_per_iteration=512, epochs=4, lr=1.5e-5, kl_coef=0.05, lam=0.95,
            # Not given, nor is the temperature (InstructGPT: 1). The paper shifts scores so that the
            # data's own summaries have mean 0
            value_lr=1.5e-5, minibatch_size=512, reward_norm="none", max_length=640, max_new_tokens=64,
        ),
    ),
    "rlaif": (
        "RLAIF's dialogues; --scorer common.programs.ai_feedback:rater=ORG/LABELER is direct RLAIF",
        replace(
            LARGE, prompts_per_iteration=128, minibatch_size=128, temperature=0.9, lr=1e-5, kl_coef=0.05,
            # arXiv:2309.00267, appendix G, like the line above: 8 passes over 160,800 prompts
            iterations=10_050, max_length=1152, max_new_tokens=128,
            # REINFORCE with a baseline (appendix F) equals one PPO step per rollout with full returns
            lam=1.0, whiten_advantages=False, reward_norm="none", value_lr=1e-5,  # the last two are not given
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
