"""Iterative DPO: sample K responses per prompt, pair the best with the worst, and learn to prefer the best.

    r_theta(x, y) = beta (log pi_theta(y | x) - log pi_0(y | x))         the reward that the policy implies
    L(theta)      = -(1/n) sum log sigmoid(r_theta(x, y_w) - r_theta(x, y_l))    over the n pairs of a step
    y_w, y_l      = argmax, argmin over k of r(x, y_k) - lambda |y_k|,   y_1 .. y_K ~ pi_t(. | x)

(DPO, arXiv:2305.18290, eq. 7; "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863, section
3.) In each iteration the newest policy pi_t answers new prompts at several temperatures, an oracle r scores
the responses, and the policy learns from one pair per prompt, the best against the worst (|y| counts
characters). A prompt gives no pair if its best and worst response have the same text, or (our rules) if all
its responses have the same score or the best one has no words, did not end or contains a special token. A
worst response that was cut is kept, without an end-of-sequence token. Optimiser and learning rate start anew
in each iteration, as in the authors' scripts. The reference pi_0 stays the SFT model. `--iterations 0` trains
on given pairs: offline DPO.

Differences from the papers: the rules marked as ours above; AdamW's betas are 0.9 and 0.95 (the DPO paper has
RMSprop); prompts and pairs that are too long are left out instead of cut.

Reads a policy, an oracle (--scorer) and prompts. Writes runs/dpo_iterative: pool.jsonl (every response
sampled), pairs.jsonl, versions/ (each iteration's model and held-out responses), model/ (the last version),
metrics.jsonl, samples.jsonl, plots, summary.json. A checkpoint holds the policy, its optimiser and its step
in the iteration; the rest of what --resume needs is in the other files.

    python dpo_iterative.py                                  the tiny world, about a minute on two CPU cores
    python dpo_iterative.py --iterations 0 --epochs 1 --offline-data tiny --output-dir runs/dpo_all_pairs
    torchrun --nproc-per-node 8 dpo_iterative.py rlhf_workflow --scorer runs/reward
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

# The kit, which the algorithm needs: copy it along
from common import dist, models
from common.batches import Comparison, my_comparison_batches, of_each_comparison, to_device
from common.losses import dpo_loss, length_penalty

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.batches import turns_key
from common.data import comparisons, prompt_sets, splits
from common.loading import checks, pretrained
from common.scoring import functions, scorers
from common.scoring.version_evaluation import DPOEvaluation
from common.run import cli, plots
from common.run.pool import Pool, pairing_metrics, responses_of, rows_of, write_pairs
from common.run.run import Run, launch
from common.run.versions import Versions


@dataclass
class Args:
    # models and data
    model: str = "runs/sft"
    """Policy to start from: a run directory, a model folder or a hub name."""
    reference: str = "sft"
    """Reference pi_0. sft: always --model; last: the newest policy, as in the authors' later scripts; or a
    model. With last, held-out pairs are still compared with --model."""
    scorer: str = "runs/reward"
    """Oracle that ranks responses: a run of reward.py or advantage_model.py, a hub reward model or
    FILE.py:function. Two oracles compare each response with all others: common.programs.pairwise:oracle=RUN
    and common.programs.ai_feedback:oracle=ORG/MODEL."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a file (docs/use/data.md), or a mixture such as a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. Default: tiny's held-out split, else 5 % of the prompts, at most 500."""
    offline_data: str | None = None
    """Pairs or rankings in reward.py's formats for the first iteration (for every iteration with --start-from
    sft)."""
    offline_pairs: int | None = None
    """Number of these pairs to use. Default: all."""
    chat_template: str | None = None
    """Jinja file with a chat template, for a tokenizer without one, or to replace its own."""
    max_length: int = 128
    """Length limit of a prompt with a response, in tokens; offline pairs with a longer one are dropped."""
    # sampling
    iterations: int = 3
    """Rounds of sampling and training; 0: train only on --offline-data."""
    prompts_per_iteration: int | None = 500
    """Prompts per round; those used in the fewest rounds come first. None: an equal share of all prompts."""
    n_samples: int = 8
    """K, the responses per prompt, divided equally among samplers and temperatures."""
    temperatures: tuple[float, ...] = (1.0, 0.7)
    """Sampling temperatures."""
    enhancer: str | None = None
    """Second model that samples half of the responses; "previous" is the version before the newest one."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling; 1: off."""
    max_new_tokens: int = 32
    """Length limit of responses, in tokens."""
    slots: int | None = 256
    """Responses decoded at the same time on one rank; the key-value cache grows with it. None: as many as fit
    on the accelerator, at most 256; 16 without one."""
    chunk_prompts: int = 512
    """Prompts sampled between two writes to disk; a crash loses at most this many."""
    score_batch_size: int = 64
    """Responses in one forward on one rank, of the oracle and, for the KL of held-out responses, of the
    policy and --model."""
    # the loss and its pairs
    length_penalty: float = 0.0
    """Penalty lambda per character of a response, subtracted from its score before the best and worst are
    chosen."""
    start_from: Literal["last", "sft"] = "last"
    """Train the newest policy on this iteration's pairs, or --model on all pairs so far."""
    beta: float = 0.5
    """Strength of the pull towards the reference; a larger beta keeps the policy closer to it."""
    label_smoothing: float = 0.0
    """Assumed share of wrong labels (conservative DPO)."""
    # optimiser steps
    epochs: float = 2.0
    """Passes over the pairs of each iteration."""
    lr: float = 1e-4
    """Peak learning rate of each iteration."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """Learning rate after warm-up: a cosine to 0, a cosine to a tenth of the peak, linear to 0, or
    constant."""
    warmup_ratio: float = 0.03
    """Share of an iteration's steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's weight decay, applied to all parameters, including norms."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    batch_size: int = 32
    """Pairs per optimiser step, over all ranks."""
    micro_batch_size: int = 32
    """Largest number of pairs in one forward on one rank."""
    share_prompt: bool = True
    """One row for a prompt and both its responses, so that the prompt is computed once; with
    --no-share-prompt, one row per response."""
    lora_rank: int = 0
    """Rank of LoRA adapters, trained instead of the weights at ten times --lr; 0: off."""
    gradient_checkpointing: bool = False
    """Recompute activations inside each layer in backward instead of keeping them: less memory, about a third
    more time."""
    # the run
    output_dir: str = "runs/dpo_iterative"
    """Run directory."""
    save_every: int = 50
    """Steps between checkpoints, of which the last is kept. A checkpoint is also written every ten minutes.
    0: no checkpoints."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in model/ (versions/ are float32). bfloat16 halves the file but rounds away much
    of what training in float32 changed; held-out metrics before and after rounding are then printed."""
    eval_prompts: int = 1000
    """Held-out prompts that each version answers once, at temperature 1; 0: off."""
    seed: int = 0
    """Seed of the order of prompts, the samples and the data order."""
    resume: bool = False
    """Continue the run in output_dir; start a new one if there is none."""
    overwrite: bool = False
    """Replace an existing run in output_dir, including its pool."""


def best_against_worst(sampled, scores, iteration, args):
    """Pair the best response to each prompt with the worst, by score minus the length penalty.

    sampled: [(prompt, response)]. scores: one number for each. iteration: becomes the source of the
      comparisons.
    Returns (comparisons, {reason: number of prompts without a pair}). Reasons: "same": all responses, or the
    best and the worst, have the same text. "tied": all have the same score. "unfinished": the best one did
    not end (learning it would teach the policy not to end), has no words or contains a special token.
    Of several with the best score, the first without such a fault is taken."""
    groups, chosen, dropped = {}, [], {"same": 0, "tied": 0, "unfinished": 0}
    for (prompt, response), score in zip(sampled, scores, strict=True):
        groups.setdefault(prompt.key, []).append((prompt, response, score))
    for group in groups.values():
        prompt = group[0][0]
        answers = [response for _, response, _ in group]
        rewards = torch.tensor([score for _, _, score in group], dtype=torch.float64)
        characters = torch.tensor([len(response.text) for response in answers])
        rewards = length_penalty(rewards, characters, args.length_penalty)
        best = answers[max(range(len(answers)), key=lambda i: (rewards[i].item(), answers[i].usable))]
        worst = answers[rewards.argmin()]
        if len({response.text.strip() for response in answers}) == 1:
            dropped["same"] += 1
        elif rewards.max() == rewards.min():
            dropped["tied"] += 1
        elif best.text.strip() == worst.text.strip():  # equal texts can have different scores
            dropped["same"] += 1
        elif not best.usable:
            dropped["unfinished"] += 1
        else:
            pair = Comparison(
                prompt=prompt.turns,
                texts=[best.text, worst.text],
                prompt_ids=torch.tensor(prompt.ids).int(),
                response_ids=[torch.tensor(response.ids).int() for response in (best, worst)],
                ranks=torch.tensor([0, 1]),
                source=f"iteration {iteration}",
                row=prompt.row,
                label_scores=[rewards.max().item(), rewards.min().item()],
                category=prompt.category,
            )
            chosen.append(pair)
    return chosen, dropped


def plan_steps(pairs, iteration, args):
    """Return the pairs of each optimiser step of an iteration, in a new order each epoch."""
    steps, steps_per_epoch = [], math.ceil(len(pairs) / args.batch_size)
    for step in range(max(1, round(args.epochs * steps_per_epoch)) if pairs else 0):
        epoch, index = divmod(step, steps_per_epoch)
        order = dist.shuffled(len(pairs), args.seed, "order", iteration, epoch)
        steps.append([pairs[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]])
    return steps


def pair_logprobs(model, pairs, args):
    """Compute log pi(y | x) of both responses of each pair: a list of (2,), no gradient, on all ranks."""
    each = lambda model, batch: list(models.response_logprobs(model, batch).view(-1, 2).cpu())  # noqa: E731
    return of_each_comparison(each, model, pairs, args.micro_batch_size, args.share_prompt)


def with_reference(pairs, logprobs):
    """Add log pi_0 of both responses to each pair. logprobs: result of pair_logprobs for the reference."""
    return [pair._replace(ref_logprobs=of_pair) for pair, of_pair in zip(pairs, logprobs, strict=True)]


def pairs_loss(logprobs, pairs, n, args):
    """Compute losses.dpo_loss of pairs that have reference log probabilities.

    logprobs: (2 * pairs,), the policy's: chosen, rejected, chosen, rejected, ...
    n: number of pairs in the optimiser step."""
    chosen, rejected = logprobs.view(-1, 2).T
    references = torch.cat([torch.zeros(0), *(pair.ref_logprobs for pair in pairs)])
    ref_chosen, ref_rejected = to_device(references, logprobs.device).view(-1, 2).T
    labels = [1.0 if pair.preference is None else pair.preference for pair in pairs]
    # The loss checks soft labels, which waits for the device
    labels = to_device(torch.tensor(labels), logprobs.device) if set(labels) - {1.0} else None
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta, args.label_smoothing, labels, n)


def pair_metrics(policy, pairs, args):
    """Compute loss, accuracy and margin of the implicit reward on held-out pairs."""
    logprobs = pair_logprobs(policy, pairs, args)
    losses = [pairs_loss(of_pair, [pair], 1, args)[0].item() for of_pair, pair in zip(logprobs, pairs)]
    _, sums = pairs_loss(torch.cat(logprobs), pairs, len(pairs), args)
    means = {name: float(total) / len(pairs) for name, total in sums.items()}
    return {
        "pairs/loss": means["loss_sum"],
        "pairs/accuracy": means["n_correct"],
        "pairs/margin": means["chosen_reward_sum"] - means["rejected_reward_sum"],
        "losses": losses,  # one per pair
    }


def update(model, optimizer, pairs, args):
    """Take one optimiser step on `pairs` and return its metrics, means over the pairs.

    Every rank has all pairs and computes its share."""
    n, sums = len(pairs), dist.Sums()
    for batch in my_comparison_batches(pairs, model, args.micro_batch_size, args.share_prompt):
        logprobs = models.response_logprobs(model, batch)  # (2 * pairs of this rank,), sums over tokens
        loss, loss_metrics = pairs_loss(logprobs, batch.comparisons, n, args)
        dist.backward(loss)
        chosen, rejected = logprobs.view(-1, 2).sum(0)
        sums.add({**loss_metrics, "chosen_logprob_sum": chosen, "rejected_logprob_sum": rejected})
    means = {name: total / n for name, total in sums.over_ranks().items()}
    [grad_norm] = dist.optimizer_step([model], [optimizer], means["loss_sum"], args.max_grad_norm)
    return {
        "loss/dpo": means["loss_sum"],
        "train/accuracy": means["n_correct"],
        "reward/chosen": means["chosen_reward_sum"],
        "reward/rejected": means["rejected_reward_sum"],
        "reward/margin": means["chosen_reward_sum"] - means["rejected_reward_sum"],
        "logps/chosen": means["chosen_logprob_sum"],
        "logps/rejected": means["rejected_logprob_sum"],
        "optim/grad_norm": grad_norm,
        "data/pairs": n,
    }


def learn(model, optimizer, plan, steps, args):
    """Train on the plan of plan_steps; yield (step, {metric: value}) after each step.

    steps: numbers of the steps to take: 1 to len(plan), or the remaining ones of a resumed run."""
    for step in steps:
        lr = dist.set_lr(optimizer, args.lr * dist.schedule(step, len(plan), args))
        yield step, {"optim/lr": lr, **update(model, optimizer, plan[step - 1], args)}


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
# responses.answers of the kit samples, and you bring the scores. main numbers the four steps of an iteration.
def check(args):
    """Check the flags before anything is loaded."""
    warm = bool(args.temperatures) and all(math.isfinite(t) and t > 0 for t in args.temperatures)
    ways = len(args.temperatures) * (2 if args.enhancer else 1)
    fits = args.max_length > args.max_new_tokens or not (args.iterations or args.eval_prompts)
    cli.check_flags(
        args,
        ("iterations", args.iterations >= 1 or args.offline_data, "1 or more without --offline-data"),
        ("n_samples", args.n_samples >= max(2, ways), f"{max(2, ways)} or more, one for each way to sample"),
        ("temperatures", warm, "one or more above 0: greedy responses are all the same"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("label_smoothing", 0 <= args.label_smoothing < 0.5, "0 or more, below 0.5"),
        ("max_length", fits, "more than --max-new-tokens"),
        ("offline_pairs", args.offline_data or not args.offline_pairs, "also --offline-data"),
    )


def samplers(versions, iteration, args):
    """Return [(model, temperature, number of responses)] for each prompt of an iteration.

    Responses are dealt in turn to the models, and those of a model in turn to the temperatures."""
    names = [versions.path(iteration - 1)]
    if args.enhancer:
        previous = versions.path(max(0, iteration - 2))
        names.append(previous if args.enhancer == "previous" else args.enhancer)
    shares = []
    for i, name in enumerate(names):
        of_model = len(range(i, args.n_samples, len(names)))  # this model's share
        for j, temperature in enumerate(args.temperatures):
            shares.append((name, temperature, len(range(j, of_model, len(args.temperatures)))))
    return shares


def load_data(args, tokenizer, samples):
    """Load (prompts, held-out prompts, offline pairs, held-out pairs); training never sees a held-out prompt.

    samples: whether responses are sampled at all, in training or in evaluations."""
    prompts, held_out = [], []
    if samples:
        prompts, held_out = prompt_sets.train_and_held_out(args, tokenizer)
    elif args.eval_dataset:  # not answered, but pairs with these prompts are not trained on
        held_out = prompt_sets.load_prompts(args.eval_dataset, "test", tokenizer, args.max_length)
    offline, held_out_pairs = comparisons.load_offline(args, tokenizer, held_out)
    if samples:
        prompts = splits.without_prompts_of(prompts, held_out_pairs, args.dataset)
    return prompts, held_out, offline, held_out_pairs


def plan_of(offline, n_prompts, prompts, args) -> str:
    """Describe how many prompts, responses and steps the run will take, for its first lines."""
    plan = f"{len(offline):,} offline pairs; " if offline else ""
    if not args.iterations:
        return plan + f"{args.epochs:g} epochs on them"
    plan += f"{args.iterations} iterations of {n_prompts:,} of {len(prompts):,} prompts, "
    plan += f"{args.n_samples} responses and at most one pair each; "
    return plan + f"{args.epochs:g} epochs on an iteration's pairs"


def why_none(dropped, iteration) -> str:
    """Explain why no prompt gave a pair."""
    reasons = "in {same} all responses, or best and worst, are the same; in {tied} all have one score; "
    reasons += "in {unfinished} the best did not end within --max-new-tokens (raise it, or let sft.py teach "
    reasons += "the model to end), is empty or has a special token"
    return f"iteration {iteration}: no pair in {sum(dropped.values())} prompts: {reasons.format(**dropped)}"


def new_pairs_of(pool, prompts, iteration, args):
    """Pair the pool's responses of one iteration to these prompts (best_against_worst), in the order in which
    they were sampled."""
    keys = {prompt.key for prompt in prompts}
    rows = [row for row in pool.rows if row["iteration"] == iteration and turns_key(row["prompt"]) in keys]
    rows.sort(key=lambda row: row["chunk"])
    return best_against_worst(responses_of(rows, prompts), [row["score"] for row in rows], iteration, args)


PANELS = {
    "loss": ["loss/dpo"],
    "implicit reward": ["reward/chosen", "reward/rejected"],
    "accuracy": ["train/accuracy", "pairs/accuracy"],
}
BY_ITERATION = {
    "reward": ["eval/score", "gold/score", "pool/best", "pool/worst"],
    "length (tokens)": ["sample/length", "pairs/chosen_length", "pairs/rejected_length"],
}
by_iteration = partial(plots.curves, panels=BY_ITERATION, name="iterations.png", x="iteration")
PLOTS = [by_iteration, partial(plots.curves, panels=PANELS), plots.frontier]


def main(args: Args):
    run = Run(args, "dpo_iterative", check, PLOTS)
    if run.finished:
        return
    functions.try_functions(args)  # a broken FILE.py:function should fail now, not after hours

    # data: prompts to sample for, held-out prompts, and optionally given pairs
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    reference = args.model if args.reference in ("sft", "last") else args.reference
    samples = bool(args.iterations or args.eval_prompts)
    pretrained.check_policy(args.model, tokenizer, args, samples)
    pretrained.check_policy(reference, tokenizer, args, sampled=False)
    if args.enhancer not in (None, "previous"):
        pretrained.check_policy(args.enhancer, tokenizer, args, samples)
    prompts, held_out, offline, held_out_pairs = load_data(args, tokenizer, samples)
    pool_rows = rows_of(run)  # not empty if the run is resumed
    equal_share = max(1, len(prompts) // max(1, args.iterations))
    n_prompts = min(args.prompts_per_iteration or equal_share, len(prompts))

    # models, sharded over ranks: the oracle stays in memory, policies and reference are loaded when needed
    scorer = None
    if samples:
        scorer = scorers.load_scorer(args.scorer, tokenizer, run.device, args.max_length, pairwise=True)
        scorers.check_prompts(scorer, [*prompts, *held_out])
    versions = Versions(run, tokenizer, args.model)
    for name in dict.fromkeys([reference, args.model]):  # check now, not after hours of sampling
        args.share_prompt = args.share_prompt and checks.shares_prompts(versions.load(name), args.max_length)
    evaluate = DPOEvaluation(held_out, held_out_pairs, pair_metrics, scorer, tokenizer, args)
    versions.evaluate = evaluate

    plan = plan_of(offline, n_prompts, prompts, args)
    run.begin(plan=plan, held_out=evaluate.fingerprint)  # only now replace an old run
    versions.begin()
    pool = Pool(run, pool_rows)
    ref_logprobs = versions.ask(reference, pair_logprobs, held_out_pairs, args)
    evaluate.held_out_pairs = with_reference(held_out_pairs, ref_logprobs)
    pairs_by = {}  # iteration -> pairs
    with_pi_0 = {}  # (iteration, pi_0) -> the same pairs with ref_logprobs

    for iteration in versions.iterations(max(1, args.iterations)):  # also evaluates the version before it
        latest = versions.path(iteration - 1)
        pairs = offline if iteration == 1 else []
        if args.iterations:
            # 1. sample responses to the prompts used least from the newest policy, into the pool
            fresh = prompt_sets.least_used(prompts, n_prompts, pool.uses_before(iteration), args.seed)
            pool.sample(samplers(versions, iteration, args), fresh, iteration, versions)
            run.lap("sample")

            # 2. score responses of any iteration that this oracle has not scored yet
            pool.score(scorer, prompts)
            run.lap("score")

            # 3. pair the best response to each prompt with the worst
            new_pairs, dropped = new_pairs_of(pool, prompts, iteration, args)
            pairs = pairs + new_pairs
            row = {**pool.parts, **pairing_metrics(pool.rows, new_pairs, dropped, iteration)}
            if not pairs:  # nothing to learn: the next version equals this one
                row.update(versions.skip(why_none(dropped, iteration)))
            if not versions.began_training(iteration):  # else it was logged before --resume
                run.log(row, versions.step, iteration)

        # 4. train the newest policy on the new pairs, or --model on all so far
        start = args.model if args.start_from == "sft" and pairs else latest
        iterations = [iteration] if start == latest else [iteration, *range(1, iteration)]
        pi_0 = latest if args.reference == "last" else reference  # runs once over each pair, then freed
        pairs_by[iteration] = pairs
        for i in iterations:
            if i not in pairs_by:  # made before the run was resumed: make them again
                again, _ = new_pairs_of(pool, prompts, i, args)
                pairs_by[i] = offline + again if i == 1 else again
            if (i, pi_0) not in with_pi_0:
                ref_logprobs = versions.ask(pi_0, pair_logprobs, pairs_by[i], args)
                with_pi_0[i, pi_0] = with_reference(pairs_by[i], ref_logprobs)
        to_learn = [pair for i in iterations for pair in with_pi_0[i, pi_0]]
        write_pairs(run.folder, pairs, iteration)  # new pairs; earlier ones are in the file
        model = versions.load(start)
        plan = plan_steps(to_learn, iteration, args)
        optimizer = dist.adamw(model, args.lr, args)
        if dist.is_main():
            print(f"iteration {iteration}: {len(plan)} optimiser steps on {len(to_learn):,} pairs")
        # versions.train writes checkpoints, and after the last step the new version, which it evaluates
        steps = versions.train(iteration, len(plan), optimizer)
        for step, row in learn(model, optimizer, plan, steps, args):
            row["perf/pairs_per_s"] = row["data/pairs"] / run.seconds()
            run.log(row, versions.step + step, iteration, ("loss/dpo", "reward/margin", "train/accuracy"))
        model = optimizer = None  # free the memory before the next model is loaded

    versions.finish({"pool": len(pool.rows)})


BASE = Args(
    epochs=2.0,  # RLHF Workflow, section 3.3
    beta=0.1,  # the same
    warmup_ratio=0.1,  # Zephyr's (the alignment handbook)
    # Ours, chosen by experiment (docs/use/recipes.md): 5e-7 learns nothing from a few hundred pairs
    lr=1e-5, batch_size=8, prompts_per_iteration=None, max_new_tokens=256, max_length=1024,
    slots=32, micro_batch_size=2, score_batch_size=8, eval_prompts=200,
)  # fmt: skip
RECIPES = {
    "tiny": ("the tiny world: the default, about a minute on two CPU cores", Args()),
    "base": ("a pretrained chat model: the default if the model or the data are not the tiny world's", BASE),
    "large": (
        "your own model of 1 to 13B on 8 GPUs of 80 GB; give --model and --dataset",
        replace(
            BASE, model="Qwen/Qwen2.5-7B-Instruct", lr=5e-7, batch_size=128,  # RLHF Workflow, section 3.3
            prompts_per_iteration=2000, max_new_tokens=1024, max_length=4096, gradient_checkpointing=True,
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's three iterations of 20,000 prompts; --length-penalty 0.001 for its concise model",
        Args(
            model="RLHFlow/LLaMA3-SFT", scorer="sfairXC/FsfairX-LLaMA3-RM-v0.1",  # the authors'
            # The authors' run_loop.sh takes one in each iteration, here they are mixed. The paper names only
            # the full set that they come from, RLHFlow/prompt-collection-v0.1
            dataset="RLHFlow/iterative-prompt-v1-iter1-20K,RLHFlow/iterative-prompt-v1-iter2-20K,"
            "RLHFlow/iterative-prompt-v1-iter3-20K",
            # section 3.3
            prompts_per_iteration=20_000, max_new_tokens=2048, beta=0.1, epochs=2.0, lr=5e-7, batch_size=128,
            max_length=4096,  # ours, like the next line; run_loop.sh has 2,048
            eval_prompts=500, slots=None, micro_batch_size=2, score_batch_size=8, gradient_checkpointing=True,
        ),
    ),
    "zephyr": (
        "offline DPO on UltraFeedback, the alignment handbook's recipe for Zephyr-7B",
        Args(
            model="alignment-handbook/zephyr-7b-sft-full",  # recipes/zephyr-7b-beta/dpo, unless noted
            offline_data="HuggingFaceH4/ultrafeedback_binarized[train_prefs]",
            dataset="HuggingFaceH4/ultrafeedback_binarized[test_prefs]",  # only prompts for the evaluation
            iterations=0, beta=0.01, epochs=1.0, lr=5e-7, warmup_ratio=0.1, max_length=1024,
            batch_size=128, micro_batch_size=8, gradient_checkpointing=True,  # 8 GPUs x 8 pairs x 2 steps
            max_new_tokens=512, eval_prompts=0,  # ours: no scorer is needed
        ),
    ),
    "rlhf_workflow_offline": (
        "RLHF Workflow's baseline, offline DPO on Nectar's best and worst answers",
        Args(
            model="RLHFlow/LLaMA3-SFT",
            dataset="RLHFlow/prompt-collection-v0.1",  # only prompts for the evaluation
            offline_data="berkeley-nest/Nectar", iterations=0,  # appendix B, like the next line
            epochs=1.0, batch_size=128, lr=5e-7,
            beta=0.1,  # section 3.3 (iterative DPO), like the default warm-up of 0.03
            # Ours, as is the choice of the best and the worst answer
            micro_batch_size=2, max_new_tokens=512, max_length=4096, eval_prompts=0,
            gradient_checkpointing=True,
        ),
    ),
    "dpo": (
        "the DPO paper's dialogues; python sft.py dpo comes first",
        Args(
            offline_data="Anthropic/hh-rlhf", iterations=0,  # arXiv:2305.18290, section 6
            dataset="Anthropic/hh-rlhf[test]",  # only prompts for the evaluation
            # Appendix B (beta: 0.5 for summaries; warm-up is 150 of 2,500 steps), then the authors' code
            beta=0.1, batch_size=64, lr=1e-6, warmup_ratio=0.06,
            epochs=1.0, lr_schedule="constant_with_warmup", max_grad_norm=10.0, max_length=512,
            max_new_tokens=256, micro_batch_size=8, eval_prompts=0, gradient_checkpointing=True,  # ours
        ),
    ),
    "summarize": (
        "the DPO paper's summaries; python sft.py summarize comes first",
        Args(
            offline_data="trl-lib/tldr-preference",  # section 6: the comparisons of arXiv:2009.01325
            dataset="trl-lib/tldr[test]",  # only prompts for the evaluation
            # Appendix B: all but beta as for dialogues; warm-up is 150 of 1,451 steps
            iterations=0, beta=0.5, batch_size=64, lr=1e-6, warmup_ratio=0.103, epochs=1.0,
            lr_schedule="constant_with_warmup", max_grad_norm=10.0,  # the authors' code
            max_length=640, max_new_tokens=64, micro_batch_size=8, eval_prompts=0,  # ours
            gradient_checkpointing=True,
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
