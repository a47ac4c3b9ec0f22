"""Supervised fine-tuning: teach a model good answers. RL and DPO start from the result.

    L(theta) = -(1/n) sum_t log pi_theta(y_t | x, y_<t)        over the n response tokens of an optimiser step

The loss covers the response including its end-of-sequence token, and not the prompt. In a dialogue
(`messages`) the model learns every answer, in other rows the last one. A document that is too long is cut and
then has no end-of-sequence token. Several documents share a block without attending to each other. (RLHF
Workflow, arXiv:2405.07863, section 3.1; without the prompt as in Llama 2, arXiv:2307.09288, section 3.1.)

Reads a model and rows with a response, or dialogues (docs/use/data.md). Writes runs/sft: model/,
metrics.jsonl, samples.jsonl, plots, summary.json, and checkpoint/, from which --resume continues.

    python sft.py                                           the tiny world, 1 to 2 minutes on two CPU cores
    python sft.py --model org/name --dataset rows.jsonl     any chat model and data
    torchrun --nproc-per-node 8 sft.py rlhf_workflow --chat-template docs/templates/llama3.jinja

Differences from RLHF Workflow: the paper does not say which tokens count; in the authors' TRL script prompts
count too, and documents of a block attend to each other. AdamW's betas are 0.9 and 0.95.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

# The kit, which the algorithm needs: copy it along
from common import dist, models
from common.batches import make_blocks, my_micro_batches, n_response_tokens, n_tokens
from common.losses import sft_loss

# Needed only by the program around the algorithm: data, runs, evaluation, checkpoints
from common.data import demonstrations, splits
from common.loading import checks, pretrained
from common.scoring import evaluation
from common.run import plots
from common.run.run import Run, launch


@dataclass
class Args:
    # data
    model: str = "tiny"
    """Model to start from: tiny, a hub name, a model folder or a run directory."""
    dataset: str = "tiny"
    """Training data: tiny, a hub name, a file (docs/use/data.md), or a mixture such as a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out data in the same formats. Default: tiny's held-out split, else 5 % of prompts, at most 500."""
    chat_template: str | None = None
    """Jinja file with a chat template, for a tokenizer without one, or to replace its own."""
    max_length: int = 128
    """Length of a block in tokens; longer documents are cut."""
    packing: bool = True
    """Several documents per block; with --no-packing, one row per document, padded to the longest in the
    batch."""
    # optimiser steps
    epochs: float = 3.0
    """Passes over the data."""
    max_steps: int | None = None
    """Number of optimiser steps, instead of --epochs."""
    lr: float = 3e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """Learning rate after warm-up: a cosine to 0, a cosine to a tenth of the peak, linear to 0, or
    constant."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's weight decay, applied to all parameters, including norms."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    batch_size: int = 16
    """Blocks per optimiser step, over all ranks (documents with --no-packing)."""
    micro_batch_size: int = 8
    """Largest number of blocks in one forward on one rank."""
    lora_rank: int = 0
    """Rank of LoRA adapters, trained instead of the weights at ten times --lr; 0: off."""
    gradient_checkpointing: bool = False
    """Recompute activations inside each layer in backward instead of keeping them: less memory, about a third
    more time."""
    # evaluation
    eval_every: int = 50
    """Steps between evaluations of the held-out loss; 0: only before and after training."""
    sample_prompts: int = 200
    """Held-out prompts answered before and after training, to measure length and gold score; 0: off."""
    max_new_tokens: int = 32
    """Length limit of sampled responses, in tokens."""
    slots: int | None = 64
    """Responses decoded at the same time on one rank; the key-value cache grows with it. None: as many as fit
    on the accelerator, at most 256; 16 without one."""
    temperature: float = 1.0
    """Sampling temperature."""
    # the run
    output_dir: str = "runs/sft"
    """Run directory."""
    save_every: int = 50
    """Steps between checkpoints, of which the last is kept. A checkpoint is also written every ten minutes.
    0: no checkpoints."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in model/. bfloat16 halves the file but rounds away much of what training in
    float32 changed; held-out metrics before and after rounding are then printed."""
    seed: int = 0
    """Seed of the data order, the samples and, for tiny, the initial weights."""
    resume: bool = False
    """Continue from the last checkpoint in output_dir; start a new run if there is none."""
    overwrite: bool = False
    """Replace an existing run in output_dir."""


def update(model, optimizer, blocks, args):
    """Take one optimiser step on `blocks` and return (loss, gradient norm).

    Every rank has all blocks and computes its share, so n counts the response tokens over all micro-batches
    and ranks."""
    n = n_response_tokens(blocks)
    sums = dist.Sums()
    for batch in my_micro_batches(blocks, model, args.micro_batch_size):
        logprobs = models.logprobs(model, batch)  # (B, T-1), 0 if token t+1 is not a response token
        loss, loss_metrics = sft_loss(logprobs, batch.action_mask, n_tokens=n)
        dist.backward(loss)  # times the number of ranks, since FSDP averages
        sums.add(loss_metrics)
    nll = sums.over_ranks()["nll_sum"] / n
    # clips gradients; raises an error, without a step, if the loss or a gradient is not finite
    [grad_norm] = dist.optimizer_step([model], [optimizer], nll, args.max_grad_norm)
    return nll, grad_norm


# -- the program around the algorithm --------------------------------------------------------------
# To use the algorithm in another project, copy everything above this line, without the imports that only the
# program needs, and the kit, seven files of common/. README.md ("Copying an algorithm") shows how.
PANELS = {"loss": ["loss/nll", "eval/nll"], "rate": ["optim/lr"], "norm": ["optim/grad_norm"]}
PLOTS = [partial(plots.curves, panels=PANELS)]


def main(args: Args):
    run = Run(args, "sft", plots=PLOTS)
    if run.finished:
        return

    # data and model
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    pretrained.check_policy(args.model, None, args, sampled=False)
    load = partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=args.max_length)
    train, held_out = splits.train_and_held_out(args.dataset, args.eval_dataset, load, tokenizer)
    checkpointing = args.gradient_checkpointing
    model = pretrained.load_policy(args.model, tokenizer, checkpointing, args.seed, args.lora_rank)
    model = dist.shard(model, run.device)
    args.packing = args.packing and checks.packs(model)  # prints a line if the model does not support it

    # blocks: rows of packed documents, packed once, the same on every rank
    blocks = make_blocks(train, args.max_length, args.packing)
    steps_per_epoch = math.ceil(len(blocks) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))
    evaluate = evaluation.HeldOutDocuments(held_out, tokenizer, args)
    optimizer = dist.adamw(model, args.lr, args)

    # Everything is loaded and checked: only now replace an old run, or load the checkpoint to resume from
    plan = f"{total_steps} optimiser steps of {args.batch_size} rows, "
    plan += f"{total_steps / steps_per_epoch:.4g} epochs of {len(train):,} documents in {len(blocks):,} rows"
    run.begin(plan=plan, modules={"policy": (model, optimizer)}, held_out=evaluate.fingerprint)
    run.log_before(evaluate, model)

    for step in run.steps(total_steps):  # also writes a checkpoint every --save-every steps
        # the blocks of this step: the same on every rank, in a new order each epoch
        epoch, index = divmod(step - 1, steps_per_epoch)
        order = dist.shuffled(len(blocks), args.seed, "order", epoch)
        chosen = order[index * args.batch_size : (index + 1) * args.batch_size]
        step_blocks = [blocks[i] for i in chosen]
        lr = dist.set_lr(optimizer, args.lr * dist.schedule(step, total_steps, args))
        nll, grad_norm = update(model, optimizer, step_blocks, args)

        row = {
            "loss/nll": nll,
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "data/documents": sum(len(block) for block in step_blocks),
            "data/response_tokens": n_response_tokens(step_blocks),
            "data/tokens": sum(n_tokens(block) for block in step_blocks),
        }
        row["perf/tokens_per_s"] = row["data/tokens"] / run.seconds()
        if run.due(args.eval_every):
            row.update(evaluate.loss(model))  # without sampling
        run.log(row, step, epoch, shown=("loss/nll", "optim/grad_norm", "perf/tokens_per_s"))

    run.finish(
        model,
        tokenizer,
        after=run.evaluate_export(model, evaluate),
        samples=evaluate.samples,
        summary={"steps": run.state["step"], "documents": len(train), "blocks": len(blocks)},
        shown=("eval/nll", "gold/score"),
    )


LARGE = Args(  # our values, for 7B
    warmup_ratio=0.03, max_length=2048, micro_batch_size=1, eval_every=200, save_every=200,
    sample_prompts=32, max_new_tokens=512, slots=None, gradient_checkpointing=True,
)  # fmt: skip
RECIPES = {
    "tiny": ("a 0.6M Llama on the tiny world: the default, one to two minutes on two CPU cores", Args()),
    "base": (
        "a pretrained chat model: the default if the model or the data are not the tiny world's",
        Args(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
            epochs=2.0, lr=2e-5,  # Llama 2 (arXiv:2307.09288), section 3.1
            warmup_ratio=0.03,  # RLHF Workflow, section 3.1
            # Ours. Not packed: a few hundred short documents would make only a handful of steps
            packing=False, batch_size=8, micro_batch_size=4, max_length=1024, eval_every=100, save_every=100,
            sample_prompts=32, max_new_tokens=256, slots=32,
        ),
    ),
    "large": (
        "your own model of 1 to 13B on 8 GPUs of 80 GB; give --model and --dataset",
        replace(
            LARGE, model="Qwen/Qwen2.5-7B-Instruct", max_length=4096,
            epochs=2.0, lr=2e-5, weight_decay=0.1, batch_size=64,  # Llama 2, section 3.1
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's SFT of Llama-3-8B; give --chat-template docs/templates/llama3.jinja",
        replace(
            LARGE, model="meta-llama/Meta-Llama-3-8B", dataset="RLHFlow/RLHFlow-SFT-Dataset-ver2",
            # section 3.1; the data above are the authors', the last line is from their code
            epochs=1.0, lr=2e-5, warmup_ratio=0.03, lr_schedule="cosine", batch_size=32, max_length=8192,
            weight_decay=0.0, max_grad_norm=1.0,
        ),
    ),
    "rlhf_workflow_preference": (
        "RLHF Workflow's pairwise preference model, on the rows of python -m common.programs.pairwise",
        replace(
            LARGE, model="meta-llama/Meta-Llama-3-8B-Instruct", dataset="runs/pairs/train.jsonl",
            # section 2.2, like the default warm-up
            epochs=1.0, lr=5e-6, lr_schedule="cosine", batch_size=128, max_length=3072,
            eval_dataset="runs/pairs/held_out.jsonl", sample_prompts=0,
        ),
    ),
    "llama2": (
        "Llama 2's SFT; give --chat-template docs/templates/llama2.jinja",
        replace(
            LARGE, model="meta-llama/Llama-2-7b-hf",
            dataset="HuggingFaceH4/ultrachat_200k[train_sft]",  # ours: Meta's 27,540 answers are not public
            epochs=2.0, lr=2e-5, weight_decay=0.1, batch_size=64, max_length=4096,  # section 3.1
        ),
    ),
    "dpo": (
        "the SFT before DPO, on the preferred answers; give --chat-template docs/templates/chat.jinja",
        replace(
            LARGE, model="EleutherAI/pythia-2.8b", dataset="Anthropic/hh-rlhf",  # arXiv:2305.18290, section 6
            epochs=1.0, lr=5e-7, lr_schedule="constant_with_warmup", warmup_ratio=0.06, batch_size=64,
            packing=False, max_length=512, max_grad_norm=10.0,  # the authors' code, 150 of 2,500 steps
        ),
    ),
    "summarize": (
        "Stiennon et al.'s SFT on Reddit's TL;DR; give --chat-template docs/templates/chat.jinja",
        replace(
            LARGE, model="EleutherAI/pythia-1.4b-deduped", dataset="trl-lib/tldr",  # paper: a GPT-3 of 1.3B
            # arXiv:2009.01325, appendix B.1; lr 2.83e-5 for 6.7B. InstructGPT (arXiv:2203.02155, appendix
            # C.1): 16 epochs with 32 rows per step, lr 9.65e-6 falling to a tenth, and dropout 0.2
            epochs=1.0, lr=6.35e-5, lr_schedule="cosine", batch_size=128,
            # Not given. 512 tokens of max_length are for the post (table 4)
            packing=False, warmup_ratio=0.0, weight_decay=0.0, max_length=640, max_new_tokens=64,
        ),
    ),
    "constitutional": (
        "Constitutional AI's SL-CAI, on the rows of python -m common.programs.ai_feedback revise",
        replace(
            LARGE, model="meta-llama/Llama-2-7b-hf", dataset="runs/revisions/rows.jsonl", packing=False,
            # arXiv:2212.08073, section 3.2; lr is half of that in pretraining, 3e-4 (Llama 2, table 1)
            lr=1.5e-4, epochs=1.0, lr_schedule="constant_with_warmup", warmup_ratio=0.0, batch_size=1024,
        ),
    ),
}  # fmt: skip

if __name__ == "__main__":
    launch(main, RECIPES)
