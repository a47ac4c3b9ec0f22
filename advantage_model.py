"""The Advantage Model: predict how much better a response is than the policy's expected reward on its prompt.

    a(x, y) = r(x, y) - ((N - K) / N) e(x) - (1/N) sum_k rho_k(x, y) r(x, y),    rho_k = pi(y|x) / pi'_k(y|x)
    L(phi)  = -[log sigmoid(a_c - a_r) + log sigmoid(m - a_c) + log sigmoid(m + a_r)], mean over comparisons

"Stabilizing RLHF through Advantage Model and Selective Rehearsal" (arXiv:2309.10202), eq. 8 and 6, m = 2.5.
One head has two outputs. r is read at the response's end-of-sequence token, and e, the policy's expected
reward (eq. 7), at the prompt's last token. K other policies wrote the responses. By default K = 0, and then
a = r - e. Eq. 6 depends only on this difference, and it pulls e to the middle between the better and the
worse responses in the DATA. `--expected-reward-samples n` also regresses e on the policy's mean r, as eq. 7
defines it, over those of n responses that ended. Only a is a score: with K = 0, adding any c(x) to both r and
e leaves the loss unchanged.

Reads a model, comparisons (docs/use/data.md) and, with --model tiny, runs/sft. Writes runs/advantage_model:
model/, metrics.jsonl, samples.jsonl with the held-out scores, plots, summary.json, and checkpoint/, from
which --resume continues.

    python advantage_model.py                               the tiny world, 1 to 2 minutes on two CPU cores
    python advantage_model.py --model org/name --dataset pairs.jsonl
    torchrun --nproc-per-node 8 advantage_model.py advantage_model

Differences from the paper: the paper does not say how e is computed; here it is an output of the same head.
Ratios are clipped, have no gradient, and count as 1 if they are unknown (evaluation, PPO). A prompt is
computed once for its responses, responses that are too long are left out instead of cut, AdamW's betas are
0.9 and 0.95, a soft label counts as its more likely side, and the tiny recipe starts from random weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

# The kit, which the algorithm needs: copy it along
from common import dist, models
from common.batches import labelled_pairs, my_comparison_batches, to_device
from common.losses import advantage_model_loss, advantage_score

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.errors import InputError
from common.data import comparisons
from common.loading import checks, pretrained
from common.scoring import measures, reward_evaluation
from common.run import cli, plots
from common.run.run import Run, launch


@dataclass
class Args:
    # models and data
    model: str = "tiny"
    """Model to start from, a causal LM or an advantage model: tiny, a hub name, a folder or a run
    directory."""
    dataset: str = "tiny"
    """Training data: tiny, a hub name, a file (docs/use/data.md), or a mixture such as a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out data in the same formats. Default: tiny's held-out split, else 5 % of prompts, at most 500."""
    chat_template: str | None = None
    """Jinja file with a chat template, for a tokenizer without one, or to replace its own."""
    max_length: int = 128
    """Length limit of a prompt with one response, in tokens; longer ones are dropped."""
    min_score_gap: float = 0.0
    """Smallest difference in annotators' scores; pairs with a smaller one are dropped."""
    max_pairs_per_prompt: int | None = None
    """Largest number of rows for one prompt; further ones are dropped."""
    balance_categories: bool = False
    """Draw all categories equally often, repeating rows of the smaller ones."""
    # the advantage and its loss
    bound: float = 2.5
    """Soft bound m(x): the loss pushes advantages of better responses down from it, and those of worse
    ones up from -m(x)."""
    n_others: int = 0
    """K of eq. 8, the number of other policies with ratios."""
    n_policies: int | None = None
    """N of eq. 8, more than K. Default: K + 1."""
    ratio_clip: float = 1.0
    """Upper limit of the ratios pi / pi'_k; K times it must be less than N."""
    policy: str | None = None
    """The policy pi of the expected reward e(x). Default: runs/sft for the model tiny, else --model if it is
    a causal LM."""
    behavior_policies: tuple[str, ...] = ()
    """The K causal LMs pi'_k, if rows have no columns such as chosen_behavior_logprobs."""
    expected_reward_samples: int = 0
    """Responses of the policy to each training prompt; e(x) is regressed on the mean reward of those that
    ended. 0: off."""
    # optimiser steps
    epochs: float = 2.0
    """Passes over the data; large models overfit in the second."""
    max_steps: int | None = None
    """Number of optimiser steps, instead of --epochs."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """Learning rate after warm-up: a cosine to 0, a cosine to a tenth of the peak, linear to 0, or
    constant."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    min_warmup_steps: int = 0
    """Smallest number of warm-up steps."""
    weight_decay: float = 0.1
    """AdamW's weight decay, applied to all parameters, including norms."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    batch_size: int = 32
    """Comparisons (pairs or rankings) per optimiser step, over all ranks."""
    micro_batch_size: int = 32
    """Largest number of comparisons in one forward on one rank."""
    share_prompt: bool = True
    """One row for a prompt and all its responses, so that the prompt is computed once; with
    --no-share-prompt, one row per response."""
    gradient_checkpointing: bool = False
    """Recompute activations inside each layer in backward instead of keeping them: less memory, about a third
    more time."""
    # evaluation
    eval_every: int = 250
    """Steps between evaluations of the held-out accuracy; 0: only before and after training."""
    length_prompts: int = 50
    """Held-out prompts that the policy answers 8 times each, to check e(x) and correlate length with score;
    0: off."""
    max_new_tokens: int = 32
    """Length limit of these responses, in tokens."""
    slots: int | None = 64
    """Responses decoded at the same time on one rank; the key-value cache grows with it. None: as many as fit
    on the accelerator, at most 256; 16 without one."""
    # the run
    output_dir: str = "runs/advantage_model"
    """Run directory."""
    save_every: int = 250
    """Steps between checkpoints, of which the last is kept. A checkpoint is also written every ten minutes.
    0: no checkpoints."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in model/. bfloat16 halves the file but rounds away much of what training in
    float32 changed; held-out metrics before and after rounding are then printed."""
    seed: int = 0
    """Seed of the data order, the samples, a new head's weights and, for tiny, all initial weights."""
    resume: bool = False
    """Continue from the last checkpoint in output_dir; start a new run if there is none."""
    overwrite: bool = False
    """Replace an existing run in output_dir."""


def n_policies(args):
    """Return N of eq. 8."""
    return args.n_others + 1 if args.n_policies is None else args.n_policies


def comparison_loss(rewards, expected, batch, n, sums, args):
    """Compute eq. 6 for a micro-batch of comparisons: the sum of their losses, divided by n.

    A ranking's loss is the mean over its pairs.
    rewards: (responses,), r(x, y); in each comparison labelled responses come first, then the policy's
      samples.
    expected: (comparisons,), e(x). n: number of comparisons in the optimiser step.
    Metrics, which count pairs, are added to `sums`."""
    device = rewards.device
    loss = rewards.sum() * 0 + expected.sum() * 0  # connects all weights, even without comparisons
    if not batch.comparisons:
        return loss
    sizes = to_device(torch.tensor(batch.sizes), device)
    ratios = None  # of K = 0
    if args.n_others:
        ratios = to_device(torch.cat([c.ratios for c in batch.comparisons]), device)  # (responses, K)
    expected = expected.repeat_interleave(sizes, output_size=len(rewards))
    advantages = advantage_score(rewards, expected, ratios, n_policies(args))
    single = []  # comparisons with one pair; all of them go through one call
    for c, of_c in zip(batch.comparisons, advantages.split(batch.sizes)):
        pairs = labelled_pairs(c)
        if len(pairs) == 1:
            single.append(torch.stack([of_c[place] for place in pairs[0]]))
        elif pairs:
            better, worse = to_device(torch.tensor(pairs), device).T
            mean_loss, loss_metrics = advantage_model_loss(of_c[better], of_c[worse], args.bound)
            loss = loss + mean_loss / n
            sums.add(loss_metrics)
    if single:
        chosen, rejected = torch.stack(single).T
        pair_loss, loss_metrics = advantage_model_loss(chosen, rejected, args.bound, n_rows=n)
        loss = loss + pair_loss
        sums.add(loss_metrics)
    return loss


def regression_loss(rewards, expected, batch, n):
    """Compute the squared error between e(x) and the mean r of the policy's samples (eq. 7), divided by n.

    No gradient flows through r. A comparison without samples adds nothing."""
    squared_error = expected.sum() * 0
    for c, of_c, e in zip(batch.comparisons, rewards.detach().split(batch.sizes), expected):
        of_samples = of_c[len(c.response_ids) :]  # samples come after labelled responses
        if len(of_samples):
            squared_error = squared_error + (e - of_samples.mean()) ** 2
    return squared_error / n


def update(model, optimizer, comparisons, args):
    """Take one optimiser step on a list of comparisons (batches.Comparison).

    Every rank has all comparisons and computes its share.
    Returns (loss, squared error of e, share of pairs ranked as labelled, gradient norm)."""
    n = len(comparisons)
    sums = dist.Sums()
    for batch in my_comparison_batches(comparisons, model, args.micro_batch_size, args.share_prompt):
        rewards, expected = models.rewards_and_expected(model, batch)
        loss = comparison_loss(rewards, expected, batch, n, sums, args)
        regression = regression_loss(rewards, expected, batch, n)
        dist.backward(loss + regression)
        sums.add({"loss": loss, "regression": regression})
    totals = sums.over_ranks()
    whole_loss = totals["loss"] + totals["regression"]
    # clips gradients; raises an error, without a step, if the loss or a gradient is not finite
    [grad_norm] = dist.optimizer_step([model], [optimizer], whole_loss, args.max_grad_norm)
    accuracy = totals["n_correct"] / totals["n_rows"] if "n_rows" in totals else 0.5  # else all are ties
    return totals["loss"], totals["regression"], accuracy, grad_norm


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
def check(args):
    """Check the flags before anything is loaded."""
    cli.check_flags(args, ("n_policies", n_policies(args) > args.n_others, "more than --n-others"))
    if args.n_others * args.ratio_clip >= n_policies(args):
        raise InputError(
            f"--n-others {args.n_others} times --ratio-clip {args.ratio_clip} reaches --n-policies "
            f"{n_policies(args)}: r's coefficient in eq. 8 could vanish or turn negative; raise --n-policies"
        )
    if len(args.behavior_policies) not in (0, args.n_others):
        raise InputError(f"--behavior-policies: {len(args.behavior_policies)} for --n-others {args.n_others}")


def main(args: Args):
    run = Run(args, "advantage_model", check, plots=[plots.scorer])
    if run.finished:
        return

    # data: comparisons, the same on every rank, without equal or contradictory ones; the only ties are soft
    # labels of 1/2. With ratios to the K other policies, and samples of the policy for the regression of e
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    pretrained.check_room(args.max_length, args.model)
    args.policy = reward_evaluation.check_sft_model(args.policy, tokenizer, args)
    train, held_out = comparisons.load_split(args, tokenizer)
    train, ratio_metrics = reward_evaluation.with_policy_answers(
        train, args.policy, tokenizer, args, run.device
    )
    steps_per_epoch = math.ceil(len(train) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # model: a language model's body with a head of two outputs, r and e
    model = pretrained.load_scorer(args.model, tokenizer, 2, args.gradient_checkpointing, args.seed)
    model.config.advantage_model = {
        "n_policies": n_policies(args),
        "n_others": args.n_others,
        "bound": args.bound,
    }
    model = dist.shard(model, run.device)
    # prints a line if the model does not support it
    args.share_prompt = args.share_prompt and checks.shares_prompts(model, args.max_length)
    evaluate = reward_evaluation.HeldOutComparisons(held_out, args)
    optimizer = dist.adamw(model, args.lr, args)
    # Everything is loaded and checked: only now replace an old run, or load the checkpoint to resume from
    plan = f"{total_steps} optimiser steps of {args.batch_size} comparisons, "
    plan += f"{total_steps / steps_per_epoch:.4g} epochs of {len(train):,}"
    run.begin(plan=plan, modules={"advantage": (model, optimizer)}, held_out=evaluate.fingerprint)
    run.log_before(evaluate, model)

    for step in run.steps(total_steps):  # also writes a checkpoint every --save-every steps
        # the same order on every rank, a new one each epoch
        epoch, index = divmod(step - 1, steps_per_epoch)
        order = comparisons.epoch_order(train, args.balance_categories, args.seed, epoch)
        batch = [train[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]

        lr = dist.set_lr(optimizer, args.lr * dist.schedule(step, total_steps, args))
        loss, regression, accuracy, grad_norm = update(model, optimizer, batch, args)

        row = {
            "loss/advantage": loss,
            "train/accuracy": accuracy,
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "data/comparisons": len(batch),
            "perf/comparisons_per_s": len(batch) / run.seconds(),
        }
        if args.expected_reward_samples:
            row["loss/expected_reward"] = regression
        if run.due(args.eval_every):
            row.update(evaluate(model))
        run.log(row, step, epoch, shown=("loss/advantage", "train/accuracy", "perf/comparisons_per_s"))

    # after training: compare e(x) with the policy's mean reward, and ranking by length or log probability
    after = {**run.evaluate_export(model, evaluate), **measures.known_metrics(evaluate.samples)}
    metrics = reward_evaluation.expected_reward_metrics(model, args.policy, held_out, tokenizer, args)
    pretrained.read_at_end_token(model, tokenizer)  # so that other tools read the score there too
    run.finish(
        model,
        tokenizer,
        after={**after, **ratio_metrics, **metrics},
        samples=evaluate.samples,
        summary={"steps": run.state["step"], "data": comparisons.statistics(train, held_out)},
        shown=("eval/accuracy", "eval/nll", "eval/ece", "baseline/length_accuracy", "expected/bias"),
    )


BASE = Args(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
    epochs=1.0, lr_schedule="cosine_with_min_lr", warmup_ratio=0.1,  # section 4.2
    lr=1e-5,  # Llama 2's for reward models (arXiv:2307.09288, section 3.2.2)
    # Ours: a few hundred comparisons make some twenty steps
    batch_size=16, micro_batch_size=4, max_length=1024, length_prompts=16, max_new_tokens=256, slots=32,
)  # fmt: skip
RECIPES = {
    "tiny": ("the tiny world, from random weights: the default, one to two minutes on two CPU cores", Args()),
    "base": ("a pretrained chat model: the default if the model or the data are not the tiny world's", BASE),
    "large": (
        "your own model of 1 to 13B on 8 GPUs of 80 GB; give --model and --dataset",
        replace(
            BASE, model="Qwen/Qwen2.5-7B-Instruct", lr=5e-6,  # section 4.2
            batch_size=128, max_length=4096, max_new_tokens=512, slots=None, gradient_checkpointing=True,
        ),
    ),
    "advantage_model": (
        "the paper's run on HH-RLHF, from another model of 7B",
        Args(
            model="Qwen/Qwen2.5-7B-Instruct",  # the paper's BLOOMZ-7B (section 4.1) has ALiBi, without SDPA
            dataset="Anthropic/hh-rlhf", bound=2.5,  # section 3.1
            # section 4.2
            epochs=1.0, lr=5e-6, lr_schedule="cosine_with_min_lr", warmup_ratio=0.1, batch_size=180,
            # Not given, or ours
            weight_decay=0.0, micro_batch_size=4, max_length=2048, max_new_tokens=512, slots=None,
            gradient_checkpointing=True,
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
