"""The reward model: predict human preferences as a number for each response.

    L(phi) = -log sigmoid(r(x, y_c) - r(x, y_r) - m)        mean over the comparisons of an optimiser step

y_c is the chosen (better) response, y_r the rejected one. The model is a language model's body with a linear
head instead of the unembedding, read at the response's end-of-sequence token. (InstructGPT, arXiv:2203.02155;
Llama 2, arXiv:2307.09288, section 3.2, with the margin m; Qwen, arXiv:2309.16609, section 3.2; RLHF Workflow,
arXiv:2405.07863, section 2.2.) A prompt with K ranked responses is one batch element, whose loss is the mean
over its pairs. A soft label weights both orders of a pair. RLHF Workflow's other preference model, which
reads two responses at once, is in common/programs/pairwise.py.

Reads a model, comparisons (docs/use/data.md) and, with --model tiny, runs/sft. Writes runs/reward: model/,
metrics.jsonl, samples.jsonl with the held-out scores, plots, summary.json, and checkpoint/, from which
--resume continues.

    python reward.py                                        the tiny world, 1 to 2 minutes on two CPU cores
    python reward.py --model org/name --dataset pairs.jsonl
    python reward.py --model runs/reward --dataset clean.jsonl --output-dir runs/reward_2   (Qwen's 2nd stage)
    torchrun --nproc-per-node 8 reward.py llama2

Differences from the papers: a prompt is computed once for all its responses; responses that are too long are
left out instead of cut; AdamW's betas are 0.9 and 0.95; a margin derived from scores is proportional to the
pair's score difference, and largest for the largest difference in the data set; the tiny recipe starts from
random weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

# The kit, which the algorithm needs: copy it along
from common import dist, models
from common.batches import my_comparison_batches, to_device
from common.losses import bradley_terry_loss, ranking_loss

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.data import comparisons
from common.loading import checks, pretrained
from common.scoring import measures, reward_evaluation, safety
from common.run import plots
from common.run.run import Run, launch


@dataclass
class Args:
    # models and data
    model: str = "tiny"
    """Model to start from, a causal LM or a reward model: tiny, a hub name, a folder or a run directory."""
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
    # the loss
    margin: Literal["none", "small", "large"] = "none"
    """Llama 2's margin in the loss. From the column rating or from scores: at most 1 (small) or 3 (large).
    Without a rating the column margin counts as it is."""
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
    safety_threshold: float = 0.15
    """Threshold of ppo.py's safety gate; gate/precision and gate/recall measure P(safe) below it."""
    sft_model: str | None = None
    """Causal LM for the likelihood baseline and for samples. Default: runs/sft for the model tiny, else
    --model if it is a causal LM."""
    length_prompts: int = 50
    """Prompts, held-out ones first, that --sft-model answers 8 times each to correlate length with score; 0:
    off."""
    max_new_tokens: int = 32
    """Length limit of these responses, in tokens."""
    slots: int | None = 64
    """Responses decoded at the same time on one rank; the key-value cache grows with it. None: as many as fit
    on the accelerator, at most 256; 16 without one."""
    # the run
    output_dir: str = "runs/reward"
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


def comparison_loss(scores, batch, n, sums):
    """Compute the loss of a micro-batch of comparisons: the sum of their losses, divided by n.

    All pairs go through one call, the chosen response first, unless a soft label favours the other. The loss
    of a ranking is the mean over its pairs.
    scores: (responses,), in the order of the comparisons. n: number of comparisons in the optimiser step.
    Metrics, which count pairs, are added to `sums`."""
    loss = scores.sum() * 0  # connects all weights to the loss, even without comparisons
    scored = list(zip(batch.comparisons, scores.split(batch.sizes)))
    pairs = [(c, pair_scores) for c, pair_scores in scored if len(pair_scores) == 2]
    if pairs:
        chosen, rejected = torch.stack([pair_scores for _, pair_scores in pairs]).T
        margin = [0.0 if c.margins is None else c.margins[0, 1] for c, _ in pairs]
        preference = [1.0 if c.preference is None else c.preference for c, _ in pairs]
        margin, preference = to_device(torch.tensor([margin, preference]), scores.device)
        # The loss checks soft labels, which waits for the device
        preference = preference if any(c.preference is not None for c, _ in pairs) else None
        pair_loss, pair_metrics = bradley_terry_loss(chosen, rejected, margin, preference, n_rows=n)
        loss = loss + pair_loss
        sums.add(pair_metrics)
    for c, ranking_scores in scored:
        if len(ranking_scores) > 2:
            mean_loss, ranking_metrics = ranking_loss(ranking_scores, c.ranks, c.margins)
            loss = loss + mean_loss / n
            sums.add(ranking_metrics)
    return loss


def update(model, optimizer, comparisons, args):
    """Take one optimiser step on a list of comparisons (batches.Comparison).

    Every rank has all comparisons and computes its share.
    Returns (loss, share of pairs ranked as labelled, gradient norm)."""
    sums = dist.Sums()
    for batch in my_comparison_batches(comparisons, model, args.micro_batch_size, args.share_prompt):
        scores = models.scores_of(model, batch)  # (responses,)
        loss = comparison_loss(scores, batch, len(comparisons), sums)
        dist.backward(loss)
        sums.add({"loss": loss})
    totals = sums.over_ranks()
    # clips gradients; raises an error, without a step, if the loss or a gradient is not finite
    [grad_norm] = dist.optimizer_step([model], [optimizer], totals["loss"], args.max_grad_norm)
    accuracy = totals["n_correct"] / totals["n_rows"]
    return totals["loss"], accuracy, grad_norm


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
def main(args: Args):
    run = Run(args, "reward", plots=[plots.scorer])
    if run.finished:
        return

    # data: comparisons, the same on every rank, without equal or contradictory ones; the only ties are soft
    # labels of 1/2
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    pretrained.check_room(args.max_length, args.model)
    args.sft_model = reward_evaluation.check_sft_model(args.sft_model, tokenizer, args)
    train, held_out = comparisons.load_split(args, tokenizer)
    train = comparisons.with_margins(train, args.margin)
    steps_per_epoch = math.ceil(len(train) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # model: a language model's body with a head of one output
    model = pretrained.load_scorer(args.model, tokenizer, 1, args.gradient_checkpointing, args.seed)
    model = dist.shard(model, run.device)
    # prints a line if the model does not support it
    args.share_prompt = args.share_prompt and checks.shares_prompts(model, args.max_length)
    evaluate = reward_evaluation.HeldOutComparisons(held_out, args)
    optimizer = dist.adamw(model, args.lr, args)
    # Everything is loaded and checked: only now replace an old run, or load the checkpoint to resume from
    plan = f"{total_steps} optimiser steps of {args.batch_size} comparisons, "
    plan += f"{total_steps / steps_per_epoch:.4g} epochs of {len(train):,}"
    run.begin(plan=plan, modules={"reward": (model, optimizer)}, held_out=evaluate.fingerprint)
    run.log_before(evaluate, model)

    for step in run.steps(total_steps):  # also writes a checkpoint every --save-every steps
        # the same order on every rank, a new one each epoch
        epoch, index = divmod(step - 1, steps_per_epoch)
        order = comparisons.epoch_order(train, args.balance_categories, args.seed, epoch)
        batch = [train[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]

        lr = dist.set_lr(optimizer, args.lr * dist.schedule(step, total_steps, args))
        loss, accuracy, grad_norm = update(model, optimizer, batch, args)

        row = {
            "loss/reward": loss,
            "train/accuracy": accuracy,
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "data/comparisons": len(batch),
            "perf/comparisons_per_s": len(batch) / run.seconds(),
        }
        if run.due(args.eval_every):
            row.update(evaluate(model))
        run.log(row, step, epoch, shown=("loss/reward", "train/accuracy", "perf/comparisons_per_s"))

    # after training: accuracy, calibration, and baselines that rank by length or by SFT log probability
    after = {**run.evaluate_export(model, evaluate), **measures.known_metrics(evaluate.samples)}
    length_metrics = reward_evaluation.length_bias(model, args.sft_model, train, held_out, tokenizer, args)
    gate, gate_metrics = safety.fit_safety_gate(evaluate.samples, args.safety_threshold)
    model.config.safety_gate = gate  # for ppo.py; None also removes the gate of an earlier stage
    pretrained.read_at_end_token(model, tokenizer)  # so that other tools read the score there too
    run.finish(
        model,
        tokenizer,
        after={**after, **length_metrics, **gate_metrics},
        samples=evaluate.samples,
        summary={"steps": run.state["step"], "data": comparisons.statistics(train, held_out)},
        shown=("eval/accuracy", "eval/nll", "eval/ece", "baseline/length_accuracy", "gold/correlation"),
    )


BASE = Args(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
    # Llama 2, section 3.2.2: a second epoch overfits
    epochs=1.0, lr=1e-5, lr_schedule="cosine_with_min_lr", warmup_ratio=0.03, min_warmup_steps=5,
    # Ours: a few hundred comparisons make some twenty steps
    batch_size=16, micro_batch_size=4, max_length=1024, length_prompts=16, max_new_tokens=256, slots=32,
)  # fmt: skip
LARGE = dict(micro_batch_size=4, max_new_tokens=512, slots=None, gradient_checkpointing=True)  # ours: memory
RECIPES = {
    "tiny": ("the tiny world, from random weights: the default, one to two minutes on two CPU cores", Args()),
    "base": ("a pretrained chat model: the default if the model or the data are not the tiny world's", BASE),
    "large": (
        "your own model of 1 to 13B on 8 GPUs of 80 GB; give --model and --dataset",
        # 128 instead of Llama 2's 512: tens of thousands of comparisons would make few steps
        replace(BASE, model="Qwen/Qwen2.5-7B-Instruct", batch_size=128, max_length=4096, **LARGE),
    ),
    "llama2": (
        "Llama 2's reward model, on an open part of its data",
        Args(
            model="meta-llama/Llama-2-7b-chat-hf",  # section 3.2.2: from a chat checkpoint
            dataset="Anthropic/hh-rlhf",  # one of the open sets in table 6; Meta's own is not public
            margin="none",  # --margin small or large (table 27) on rows with a `rating`, which hh-rlhf lacks
            # section 3.2.2 (lr for 70B: 5e-6). It keeps the optimiser of section 2.2, hence weight_decay;
            # that one's eps is 1e-5, here 1e-8. max_length is the model's context
            epochs=1.0, lr=1e-5, lr_schedule="cosine_with_min_lr", warmup_ratio=0.03, min_warmup_steps=5,
            batch_size=512, max_length=4096, weight_decay=0.1, **LARGE,
        ),
    ),
    "qwen": (
        "Qwen's reward model; its second stage is a second run with --model runs/reward and cleaner data",
        Args(
            # Section 3.2.1 starts from a pretrained model; we need one with a chat template
            model="Qwen/Qwen2.5-7B-Instruct", dataset="Anthropic/hh-rlhf",  # Qwen's data are not public
            # Section 3.2.1 balances the prompts to annotate; we could only balance rows with a `category`
            balance_categories=False,
            epochs=1.0, lr=3e-6, lr_schedule="constant_with_warmup", batch_size=64, max_length=2048,  # 3.2.1
            warmup_ratio=0.0, weight_decay=0.0, **LARGE,  # not given
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's; its pairwise preference model is python sft.py rlhf_workflow_preference",
        Args(
            model="meta-llama/Meta-Llama-3-8B-Instruct",  # section 2.2
            dataset="hendrydong/preference_700K",  # the authors' published mixture
            # sections 2.2 and 2.3, like the default cosine
            epochs=1.0, lr=2e-6, warmup_ratio=0.03, batch_size=512, length_prompts=2000,
            weight_decay=0.001, max_length=4096, **LARGE,  # weight_decay: the authors' code
        ),
    ),
    "summarize": (
        "Stiennon et al.'s, of summaries; python sft.py summarize comes first",
        Args(
            model="runs/sft", dataset="trl-lib/tldr-preference",  # the paper's comparisons, as pairs
            # arXiv:2009.01325, appendix B.1, like the model and the default cosine; lr 5e-6 for 6.7B.
            # InstructGPT (arXiv:2203.02155, appendix C.2): lr 9e-6 falling to a tenth; 64 rankings of 4 to 9
            # responses per step
            epochs=1.0, lr=1.5e-5, batch_size=64,
            warmup_ratio=0.0, weight_decay=0.0, max_length=640, **LARGE,  # not given
        ),
    ),
    "rlaif": (
        "RLAIF's, on the rows of python -m common.programs.ai_feedback label",
        Args(
            model="Qwen/Qwen2.5-7B-Instruct",  # the paper's, PaLM 2 XS, is not public
            # arXiv:2309.00267, appendix G: 2 or 3 epochs, until the curves are flat; batch_size for
            # dialogues (128 for summaries); 1,024 tokens for the prompt and 128 for the response
            dataset="runs/labels/rows.jsonl", epochs=2.0, lr=1e-5, batch_size=32, max_length=1152,
            lr_schedule="constant_with_warmup", warmup_ratio=0.0, weight_decay=0.0, **LARGE,  # not given
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
