"""Rejection-sampling fine-tuning: sample K responses per prompt, train on the best one, sample again.

    y*(x) = argmax_k r(x, y_k),   y_1 .. y_K ~ pi(. | x)       or all y_k with r(x, y_k) >= tau (ReST)
    L(theta) = -(1/n) sum_t log pi_theta(y*_t | x, y*_<t)      over the n response tokens of an optimiser step

(Llama 2, arXiv:2307.09288, section 3.2.3; "Stabilizing RLHF through Advantage Model and Selective Rehearsal",
arXiv:2309.10202, eq. 3 and 4; ReST, arXiv:2308.08998.) Each iteration samples from the most recent model and
fine-tunes a new version from the base model. Responses of all iterations stay in a pool, and the best are
selected from the whole pool: up to its third version Llama 2 used only the last iteration's responses, and
it forgot.

For each prompt the response with the highest score in the pool is selected; with thresholds, all responses
that reach them. Differences from the paper: responses that did not end within max_new_tokens, have no words
or contain a special token are never selected; equal responses to a prompt count once; and without thresholds
a prompt with two or more responses is left out if the best has the lowest score of all candidates.

Reads a policy, a scorer and prompts. Writes runs/rejection_sampling: pool.jsonl (every response sampled for
selection), versions/ (each iteration's model and its results on held-out prompts), model/ (the last version),
metrics.jsonl, samples.jsonl, curves.jsonl, plots, summary.json. A checkpoint holds the version in training,
its optimiser and its step; the rest of what --resume needs is in pool.jsonl and versions/.

    python rejection_sampling.py                             the tiny world, about a minute on two CPU cores
    python rejection_sampling.py rest                        thresholds instead of the best
    python rejection_sampling.py --policy runs/ppo --pool runs/rejection_sampling/pool.jsonl --output-dir B
                                                             PPO's policy and an earlier pool
    python rejection_sampling.py --model SMALL --pool runs/rejection_sampling/pool.jsonl --n-samples 0 \\
        --iterations 1 --output-dir C                        distillation: a small model learns from a pool
    torchrun --nproc-per-node 8 rejection_sampling.py llama2 --model DIR --scorer runs/reward
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

# The kit, which the algorithm needs: copy it along
from common import dist, models, responses
from common.batches import make_blocks, my_micro_batches, n_response_tokens, n_tokens
from common.losses import sft_loss

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.data import demonstrations, prompt_sets
from common.loading import checks, pretrained
from common.scoring import functions, scorers, version_evaluation
from common.run import cli, plots
from common.run.pool import Pool, candidates, load_pool, responses_of, rows_of, selection_metrics
from common.run.run import Run, launch
from common.run.versions import Versions


@dataclass
class Args:
    # models and data
    model: str = "runs/sft"
    """Base model that each version is fine-tuned from: a run directory, a model folder or a hub name."""
    policy: str | None = None
    """Model that the first iteration samples from, for example runs/ppo. Default: the base model."""
    scorer: str = "runs/reward"
    """Source of scores: a run of reward.py or advantage_model.py, a hub reward model, or FILE.py:function
    (docs/use/scorers.md)."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a file (docs/use/data.md), or a mixture such as a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. Default: tiny's held-out split, else 5 % of the prompts, at most 500."""
    sft_dataset: str | None = None
    """Rows in sft.py's formats, for example the original SFT data, drawn anew for each fine-tuning: as many
    as there are selected responses, or all if they are fewer."""
    pool: str | None = None
    """pool.jsonl of an earlier run to continue from: its responses are copied, and scored again if their
    scorer was a different one."""
    chat_template: str | None = None
    """Jinja file with a chat template, for a tokenizer without one, or to replace its own."""
    max_length: int = 128
    """Length of a block in tokens, and length limit of a prompt with its response."""
    # sampling
    iterations: int = 3
    """Rounds of sampling and fine-tuning."""
    prompts_per_iteration: int | None = 500
    """Prompts per round; prompts that were not used yet come first. None: all."""
    n_samples: int = 8
    """K, the responses per prompt; 0: no sampling, --model learns from the responses of --pool (with
    --candidates last, from those of its last iteration)."""
    temperatures: tuple[float, ...] = (0.4, 0.55, 0.7)
    """Sampling temperatures, compared on held-out prompts before each round; the one with the highest
    expected best of K is used."""
    sweep_prompts: int = 64
    """Held-out prompts for this comparison, K responses each; 0: no comparison, the first temperature is
    used."""
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
    """Responses in one forward of the scorer on one rank."""
    # selection
    threshold: tuple[float, ...] = ()
    """Score from which all responses are trained on, instead of the best one per prompt. Several rising
    thresholds mean several fine-tunings per iteration, each starting from the one before (ReST's improve
    steps)."""
    candidates: Literal["all", "last"] = "all"
    """Select from the pool of all iterations, or only from this iteration's responses."""
    # fine-tuning
    start_from: Literal["base", "last"] = "base"
    """Fine-tune from the base model each time, or from the last version."""
    epochs: float = 3.0
    """Passes over the selected responses."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """Learning rate after warm-up: a cosine to 0, a cosine to a tenth of the peak, linear to 0, or
    constant."""
    lr_decay: float = 1.0
    """Factor on --lr for each further threshold of an iteration."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's weight decay, applied to all parameters, including norms."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    batch_size: int = 8
    """Blocks per optimiser step, over all ranks (documents with --no-packing)."""
    micro_batch_size: int = 8
    """Largest number of blocks in one forward on one rank."""
    packing: bool = True
    """Several documents per block; with --no-packing, one row per document, padded to the longest in the
    batch."""
    gradient_checkpointing: bool = False
    """Recompute activations inside each layer in backward instead of keeping them: less memory, about a third
    more time."""
    # the run
    output_dir: str = "runs/rejection_sampling"
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


def select(sampled, scores, threshold=None):
    """Select the best response to each prompt, or with a threshold (ReST) every response that reaches it.

    Responses that did not end, have no words or contain a special token are never selected; of equal
    responses the first counts. Without a threshold, a prompt with two or more responses is left out if its
    best has the lowest of these scores. (With scores of 0 and 1 it would be a wrong answer.)

    sampled: [(prompt, response)]. scores: one number for each.
    Returns (indices into `sampled`, number of prompts left out for that reason)."""
    groups, chosen, n_left_out = {}, [], 0
    for i, (prompt, _) in enumerate(sampled):
        groups.setdefault(prompt.key, []).append(i)
    lowest = min(scores, default=0.0)
    for group in groups.values():
        usable = {}  # text -> index
        for i in group:
            response = sampled[i][1]
            if response.usable:
                usable.setdefault(response.text.strip(), i)
        if threshold is not None:
            chosen += [i for i in usable.values() if scores[i] >= threshold]
        elif usable:
            best = max(usable.values(), key=lambda i: scores[i])
            if len(group) > 1 and scores[best] == lowest:
                n_left_out += 1
            else:
                chosen.append(best)
    return chosen, n_left_out


def plan_steps(stages, iteration, args):
    """Return [(learning rate, blocks)] for the optimiser steps of one fine-tuning, the same on every rank.

    stages: lists of documents. More than one are ReST's improve steps, one after the other. In each stage the
      documents are packed once, and the blocks shuffled in every epoch."""
    plan = []
    for stage, documents in enumerate(stages):
        blocks = make_blocks(documents, args.max_length, args.packing)
        steps_per_epoch = math.ceil(len(blocks) / args.batch_size)
        n_steps = max(1, round(args.epochs * steps_per_epoch)) if documents else 0
        for step in range(n_steps):
            epoch, index = divmod(step, steps_per_epoch)
            order = dist.shuffled(len(blocks), args.seed, "order", iteration, stage, epoch)
            chosen = order[index * args.batch_size : (index + 1) * args.batch_size]
            lr = args.lr * args.lr_decay**stage * dist.schedule(step + 1, n_steps, args)
            plan.append((lr, [blocks[i] for i in chosen]))
    return plan


def update(model, optimizer, blocks, args):
    """Take one optimiser step on `blocks`, as in sft.py, and return (loss, gradient norm)."""
    n, sums = n_response_tokens(blocks), dist.Sums()
    for batch in my_micro_batches(blocks, model, args.micro_batch_size):
        logprobs = models.logprobs(model, batch)  # (B, T-1), 0 if token t+1 is not a response token
        loss, loss_metrics = sft_loss(logprobs, batch.action_mask, n_tokens=n)
        dist.backward(loss)
        sums.add(loss_metrics)
    nll = sums.over_ranks()["nll_sum"] / n
    # clips gradients; raises an error, without a step, if the loss or a gradient is not finite
    [grad_norm] = dist.optimizer_step([model], [optimizer], nll, args.max_grad_norm)
    return nll, grad_norm


def fine_tune(model, optimizer, plan, steps, args):
    """Train on the plan of plan_steps and yield (step, {metric: value}) after each step.

    steps: numbers of the steps to take: 1 to len(plan), or the remaining ones of a resumed run."""
    for step in steps:
        lr, blocks = plan[step - 1]
        dist.set_lr(optimizer, lr)
        nll, grad_norm = update(model, optimizer, blocks, args)
        tokens = sum(n_tokens(block) for block in blocks)
        yield step, {"loss/nll": nll, "optim/grad_norm": grad_norm, "optim/lr": lr, "data/tokens": tokens}


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
# responses.answers of the kit samples, and you bring the scores. main numbers the four steps of an iteration.
def check(args):
    """Check the flags before anything is loaded."""
    rising = list(args.threshold) == sorted(args.threshold)
    warm = bool(args.temperatures) and all(math.isfinite(t) and t > 0 for t in args.temperatures)
    sampled = args.n_samples or (args.pool and args.iterations == 1)
    cli.check_flags(
        args,
        ("iterations", args.iterations >= 1, "1 or more"),
        ("n_samples", sampled, "1 or more without --pool and --iterations 1"),
        ("threshold", rising and all(map(math.isfinite, args.threshold)), "finite numbers that rise"),
        ("temperatures", warm, "one or more above 0: K greedy responses are all the same"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
    )


def plan_of(n_prompts, prompts, args) -> str:
    """Describe how many prompts, responses and steps the run will take, for its first lines."""
    plan = f"{args.iterations} iterations of {n_prompts:,} of {len(prompts):,} prompts, {args.n_samples} "
    return plan + f"responses each; fine-tuning for {args.epochs:g} epochs on those selected"


def why_none(sampled, scores, iteration, threshold, args) -> str:
    """Explain why `select` selected no response."""
    usable, _ = select(sampled, scores, -math.inf)
    ranked = sorted(scores[i] for i in usable)
    if not ranked:
        why = f"did not end within --max-new-tokens {args.max_new_tokens}, is empty or has a special token"
        return f"iteration {iteration}: no response can be selected: each {why}"
    if threshold is None:
        return f"iteration {iteration}: every response that ended has the lowest score, {ranked[0]:g}"
    return (
        f"iteration {iteration}: no response reaches --threshold {threshold:g}: of {len(ranked)} the best "
        f"has {ranked[-1]:.3g}, the median {ranked[len(ranked) // 2]:.3g}"
    )


def stages_of(selected, sft_documents, iteration, args):
    """Return the documents of each stage: the selected responses, and at most as many --sft-dataset rows.

    selected: for each stage a list of (prompt, response); their token ids are kept as sampled."""
    generator = torch.Generator().manual_seed(dist.seed_of(args.seed, "also", iteration))
    stages = [responses.documents(chosen) for chosen in selected]
    for documents in stages:
        order = torch.randperm(len(sft_documents), generator=generator).tolist()
        documents.extend(sft_documents[i] for i in order[: len(documents)])
    return stages


PANELS = {
    "loss": ["loss/nll"],
    "held-out responses": ["eval/score", "gold/score", "sweep/max"],
    "pool": ["pool/score", "pool/best"],
}
PLOTS = [partial(plots.curves, panels=PANELS), plots.best_of_n]


def main(args: Args):
    run = Run(args, "rejection_sampling", check, PLOTS)
    if run.finished:
        return
    functions.try_functions(args)  # a broken FILE.py:function should fail now, not after hours

    # data: prompts to sample for, held-out prompts, and optionally SFT rows and an earlier run's pool
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    policy = args.policy or args.model
    for name in dict.fromkeys([args.model, policy]):
        pretrained.check_policy(name, tokenizer, args, sampled=bool(args.n_samples or args.eval_prompts))
    prompts, held_out = prompt_sets.train_and_held_out(args, tokenizer)
    sft_documents, pool_rows = [], rows_of(run)
    if args.sft_dataset:
        load_sft = partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=args.max_length)
        sft_documents = load_sft(args.sft_dataset, held_out=held_out)
    if args.pool and not run.resumed:
        pool_rows = load_pool(args.pool, prompts, tokenizer, args.max_length)

    # models: the scorer stays in memory, policies are loaded one at a time, each with its own optimiser
    scorer = scorers.load_scorer(args.scorer, tokenizer, run.device, args.max_length)
    scorers.check_prompts(scorer, [*prompts, *held_out])
    versions = Versions(run, tokenizer, policy)
    versions.evaluate = version_evaluation.RejectionSamplingEvaluation(held_out, scorer, tokenizer, args)
    if args.packing:  # check now, not after hours of sampling
        args.packing = checks.packs(versions.load(policy if args.start_from == "last" else args.model))

    n_prompts = min(args.prompts_per_iteration or len(prompts), len(prompts))
    # Everything is loaded and checked: only now replace an old run
    run.begin(plan=plan_of(n_prompts, prompts, args), held_out=versions.evaluate.fingerprint)
    pool = Pool(run, pool_rows)
    newest = max((row["iteration"] for row in pool.rows), default=0)
    # With a pool of three iterations this run begins at 4; without sampling, at 3, which is fine-tuned again
    if not args.n_samples:
        newest = max(0, newest - 1)
    versions.begin(newest)

    for iteration in versions.iterations(args.iterations):  # also evaluates the version before it
        # 1. sample: K responses to each of this iteration's prompts from the newest version, into the pool
        latest = versions.path(iteration - 1)
        if args.n_samples:
            fresh = prompt_sets.least_used(prompts, n_prompts, pool.uses_before(iteration), args.seed)
            temperature = versions.evaluations[iteration - 1]["temperature"]
            pool.sample([(latest, temperature, args.n_samples)], fresh, iteration, versions)
        run.lap("sample")

        # 2. score the responses that this scorer has not scored yet
        pool.score(scorer, prompts)
        run.lap("score")

        # 3. select the best response to each prompt, or with thresholds (ReST) all that reach each of them
        rows = candidates(pool.rows, prompts, None if args.candidates == "all" else iteration)
        sampled = responses_of(rows, prompts)
        scores = [row["score"] for row in rows]
        thresholds = args.threshold or [None]
        selections = [select(sampled, scores, threshold) for threshold in thresholds]
        places, n_left_out = selections[0]
        row = {**pool.parts, **selection_metrics(pool.rows, [rows[i] for i in places], iteration)}
        if not args.threshold:
            row["pool/all_lowest"] = n_left_out
        if n_left_out and dist.is_main():
            why = "all responses that could be selected have the lowest score"
            print(f"iteration {iteration}: {n_left_out} prompts left out, {why}")
        # thresholds rise, so the highest may select nothing
        selected = [[sampled[i] for i in places] for places, _ in selections if places]
        if len(selected) < len(thresholds):
            why = why_none(sampled, scores, iteration, thresholds[len(selected)], args)
            if not selected:  # nothing to learn: the next version equals this one
                row.update(versions.skip(why))
            elif dist.is_main():
                print(why)
        if not versions.began_training(iteration):  # else it was logged before --resume
            run.log(row, versions.step, iteration)

        # 4. fine-tune a new version from the base model, or from the last one
        stages = stages_of(selected, sft_documents, iteration, args)
        plan = plan_steps(stages, iteration, args)
        model = versions.load(latest if args.start_from == "last" or not selected else args.model)
        optimizer = dist.adamw(model, args.lr, args)
        if dist.is_main():
            n_documents = sum(map(len, stages))
            print(f"iteration {iteration}: {len(plan)} optimiser steps on {n_documents:,} documents")
        # versions.train writes checkpoints, and after the last step the new version, which it evaluates
        steps = versions.train(iteration, len(plan), optimizer)
        for step, row in fine_tune(model, optimizer, plan, steps, args):
            row["perf/tokens_per_s"] = row["data/tokens"] / run.seconds()
            run.log(row, versions.step + step, iteration, shown=("loss/nll", "optim/grad_norm"))
        model = optimizer = None  # free the memory before the next model is loaded

    n = args.n_samples
    kl_bound = math.log(n) - (n - 1) / n if n else None  # nats, bounds KL(best of n || sampled)
    versions.finish({"pool": len(pool.rows), "kl_bound": kl_bound})


BASE = Args(
    epochs=2.0, lr=2e-5,  # Llama 2, section 3.1 (SFT)
    # Ours. Not packed: short responses would make only a few packed rows, and so few steps
    warmup_ratio=0.03, packing=False, prompts_per_iteration=200, temperatures=(0.7, 1.0), sweep_prompts=16,
    max_new_tokens=256, slots=32, micro_batch_size=2, score_batch_size=8, max_length=1024, eval_prompts=200,
)  # fmt: skip
RECIPES = {
    "tiny": (
        "the tiny world, three iterations, the best of 8: the default, about a minute on two CPU cores",
        Args(),  # no temperature above 1: at 1.3 the choice follows the reward model's mistakes (see docs/)
    ),
    "base": ("a pretrained chat model: the default if the model or the data are not the tiny world's", BASE),
    "large": (
        "your own model of 1 to 13B on 8 GPUs of 80 GB; give --model and --dataset",
        replace(
            BASE, model="Qwen/Qwen2.5-7B-Instruct", n_samples=16,  # Llama 2, figure 8: 10 to 100
            packing=True, weight_decay=0.1, batch_size=64,  # section 3.1 (SFT)
            prompts_per_iteration=2000, sweep_prompts=64, max_new_tokens=1024, max_length=4096,
            micro_batch_size=1, gradient_checkpointing=True,
        ),
    ),
    "llama2": (
        "Llama 2's, four versions; prompts and models of your own",
        Args(
            model="meta-llama/Llama-2-7b-chat-hf",  # the SFT model itself is not public
            dataset="Anthropic/hh-rlhf",  # its prompts; Meta's own are not public
            # section 3.2.3: up to V4 only rejection sampling; figure 8: 10 to 100 samples, and after RLHF
            # temperatures of 1.2 to 1.3 are best
            iterations=4, prompts_per_iteration=None, n_samples=10, temperatures=(0.8, 1.0, 1.2, 1.3),
            epochs=2.0, lr=2e-5, weight_decay=0.1, batch_size=64, max_length=4096,  # section 3.1 (SFT)
            sweep_prompts=256, max_new_tokens=1024, warmup_ratio=0.03,  # not given
            slots=None, micro_batch_size=1, score_batch_size=8, save_every=200, gradient_checkpointing=True,
        ),
    ),
    "rest": (
        "ReST on the tiny world: thresholds that rise, from the last version, the SFT data kept in",
        Args(
            # section 3: new data is added to the original; thresholds rise and lr falls in each improve step;
            # each grow step samples a new data set. The values are ours, thresholds in runs/reward's units
            output_dir="runs/rest", sft_dataset="tiny", threshold=(0.0, 0.5, 1.0), lr_decay=0.5,
            candidates="last", start_from="last", epochs=1.0, lr=5e-4,
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
