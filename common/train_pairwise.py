"""RLHF Workflow's preference model (arXiv:2405.07863, section 2.2): which of two responses is the better one.

    L(theta) = -log p_theta(letter | [CONTEXT] x [RESPONSE A] a [RESPONSE B] b)    mean over an optimiser step

A causal LM reads a prompt and two responses in an order drawn at random; the only token with loss is the
letter, A or B, that names the better one (common/pairwise.py). Pairs are packed, and none sees another one.

Reads what reward.py reads; writes runs/train_pairwise, a scorer for dpo_iterative.py and common.evaluate,
with the log odds of held-out pairs in samples.jsonl.

    python -m common.train_pairwise --model runs/sft        the tiny world, about a minute on two CPU cores
    torchrun --nproc-per-node 8 -m common.train_pairwise rlhf_workflow

Differs from the paper: an optimiser step counts comparisons, not packed rows; both orders are averaged when
the model is asked; a soft label counts as its likelier side; AdamW's betas are 0.9 and 0.95.
"""

import math
from dataclasses import dataclass
from typing import Literal

from common import comparisons, dist, evaluation, loading, models, pairwise, plots
from common.losses import sft_loss
from common.run import Run, launch


@dataclass
class Args:
    # models and data
    model: str = "tiny"
    """Where to start: tiny, a hub name, a folder or a run directory, of a causal LM."""
    dataset: str = "tiny"
    """tiny, a hub name, a file (docs/data.md), or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out rows in the same formats. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    max_length: int = 128
    """Tokens of a prompt with both responses; longer ones are dropped."""
    min_score_gap: float = 0.0
    """Pairs whose scores differ by less are dropped."""
    max_pairs_per_prompt: int | None = None
    """Rows of one prompt beyond this many are dropped."""
    balance_categories: bool = False
    """Draw every category equally often, with repetition."""
    # optimiser steps
    epochs: float = 2.0
    """Passes over the data; large models overfit in the second."""
    max_steps: int | None = None
    """This many optimiser steps instead of epochs."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """After the warm-up: a cosine to 0, a cosine to a tenth of the peak, a line to 0, or constant."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 32
    """Comparisons (pairs or rankings) of an optimiser step over all ranks."""
    micro_batch_size: int = 32
    """Pairs of a forward on one rank, at most."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    # the run
    eval_every: int = 250
    """Steps between held-out accuracies; 0: only before and after training."""
    output_dir: str = "runs/train_pairwise"
    """The run directory."""
    save_every: int = 250
    """Steps between checkpoints, of which the last is kept; 0: none."""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights in model/. None: the dtype of the model that training starts from."""
    seed: int = 0
    """Of the data order and the places of A and B."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def update(model, optimizer, documents, args):
    """One optimiser step on `documents`, over all ranks: (loss, share with p(letter) > 1/2, gradient norm).
    Every rank has all documents and computes its share of them."""
    n = len(documents)
    sums = dist.Sums()
    for batch in pairwise.my_packed_batches(documents, model, args.micro_batch_size):
        logprobs = models.logprobs(model, batch)  # (B, T-1), 0 where no letter follows
        loss, loss_metrics = sft_loss(logprobs, batch.action_mask, n_tokens=n)
        dist.backward(loss)
        right = (logprobs > math.log(0.5)) & batch.action_mask
        sums.add({**loss_metrics, "n_correct": right.sum()})
    totals = sums.over_ranks()
    loss = totals["nll_sum"] / n
    [grad_norm] = dist.optimizer_step([model], [optimizer], loss, args.max_grad_norm)
    return loss, totals["n_correct"] / n, grad_norm


def main(args: Args):
    run = Run(args, "train_pairwise", plots=[plots.scorer])
    if run.finished:
        return

    # data: comparisons, the same on every rank
    tokenizer = loading.load_tokenizer(args.model, args.chat_template)
    train, held_out = comparisons.load_split(args, tokenizer)
    train = pairwise.usable(train, tokenizer, args.max_length, args.dataset)
    held_out = held_out and pairwise.usable(held_out, tokenizer, args.max_length, "held-out")
    steps_per_epoch = math.ceil(len(train) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # model: a causal LM
    model = loading.load_policy(args.model, tokenizer, args.gradient_checkpointing, args.seed)
    model.config.preference_model = True  # not every language model can be asked for a letter
    loading.check_room(args.max_length, args.model, model.config)
    model = dist.shard(model, run.device)
    model.packs = models.packs(model)
    evaluate = evaluation.HeldOutComparisons(held_out, args, tokenizer)
    optimizer = dist.adamw(model, args.lr, args)
    # only now is an old run replaced, or a checkpoint loaded
    run.begin(modules={"reward": (model, optimizer)}, held_out=comparisons.fingerprint(held_out))
    run.log_before(evaluate, model)

    for step in run.steps(total_steps):
        # the same order on every rank, another one in each epoch
        epoch, index = divmod(step - 1, steps_per_epoch)
        order = comparisons.epoch_order(train, args.balance_categories, args.seed, epoch)
        batch = [train[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]
        documents = pairwise.documents(batch, tokenizer, dist.seed_of(args.seed, "places", step - 1))

        lr = dist.set_lr(optimizer, args.lr * dist.schedule(step, total_steps, args))
        loss, accuracy, grad_norm = update(model, optimizer, documents, args)

        row = {"loss/reward": loss, "train/accuracy": accuracy, "optim/grad_norm": grad_norm, "optim/lr": lr}
        row.update({"data/comparisons": len(batch), "perf/comparisons_per_s": len(batch) / run.seconds()})
        if run.due(args.eval_every):
            row.update(evaluate(model))
        run.log(row, step, epoch, shown=("loss/reward", "train/accuracy", "perf/comparisons_per_s"))

    run.round_weights(model)
    after = {**evaluate(model), **evaluate.known_figures()}
    run.finish(
        model, tokenizer, after=after, samples=evaluate.samples,
        summary={"steps": total_steps, "data": comparisons.statistics(train, held_out)},
        shown=("eval/accuracy", "eval/nll", "eval/ece", "baseline/length_accuracy"),
    )  # fmt: skip


RECIPES = {
    "tiny": ("the tiny world, from random weights: the default, about a minute on two CPU cores", Args()),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
            # as in reward.py, but for two responses
            epochs=1.0, lr=1e-5, lr_schedule="cosine_with_min_lr", warmup_ratio=0.03, batch_size=16,
            micro_batch_size=4, max_length=2048,
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's preference model",
        Args(
            model="meta-llama/Meta-Llama-3-8B-Instruct",  # section 2.2
            dataset="hendrydong/preference_700K",  # the authors' published mixture
            epochs=1.0, lr_schedule="cosine", warmup_ratio=0.03,  # section 2.2
            lr=5e-6, batch_size=128, max_length=3072,  # the authors' code
            weight_decay=0.0,  # not said
            micro_batch_size=4, gradient_checkpointing=True,  # ours: memory
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
