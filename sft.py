"""Supervised fine-tuning: the policy that every other script starts from.

    L(theta) = -(1/n) sum_t log pi_theta(y_t | x, y_<t)        over the n response tokens of an optimiser step

The prompt carries no loss, the end token does. Documents are packed into blocks, and a document never sees
another one (RLHF Workflow, arXiv:2405.07863, section 3.1; Llama 2, arXiv:2307.09288, section 3.1).

Reads a model and rows with a response, or dialogues (README, "Data"); writes runs/sft: model/,
metrics.jsonl, samples.jsonl, plots, summary.json.

    python sft.py                                           the tiny world, under a minute on two CPU cores
    python sft.py --model org/name --dataset rows.jsonl     any chat model and data
    torchrun --nproc-per-node 8 sft.py rlhf_workflow --chat-template llama3.jinja

Differs from the paper: blocks are packed without attention across documents, where the authors' packing lets
them see each other; AdamW's betas are 0.9 and 0.95.
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

from common import data, dist, generate, losses, metrics, models, tiny
from common.batches import make_blocks, my_micro_batches, n_response_tokens, n_tokens, prompt_key
from common.errors import InputError
from common.run import check_batch_size, check_flags, find_run, launch, start_run, write_json


@dataclass
class Args:
    model: str = "tiny"
    """Where to start: tiny, a hub name, a model folder, or a run directory."""
    dataset: str = "tiny"
    """tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out rows in the same formats. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    output_dir: str = "runs/sft"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    epochs: float = 3.0
    """Passes over the data."""
    max_steps: int | None = None
    """This many optimiser steps instead of epochs."""
    lr: float = 3e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """After the warm-up: a cosine to 0, a cosine to a tenth of the peak, a line to 0, or constant."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 16
    """Blocks of an optimiser step over all ranks (with --no-packing: documents)."""
    micro_batch_size: int = 8
    """Blocks of a forward on one rank, at most; it divides a rank's share of batch_size."""
    max_length: int = 128
    """Tokens of a block, and at most of a document."""
    packing: bool = True
    """Fill blocks with several documents; --no-packing: a row a document, padded to the batch's longest."""
    eval_every: int = 50
    """Steps between held-out losses; 0: only before and after training."""
    save_every: int = 50
    """Steps between checkpoints, of which the last is kept; 0: none."""
    sample_prompts: int = 200
    """Held-out prompts to answer before and after training, for samples.jsonl and the gold score; 0: none."""
    max_new_tokens: int = 32
    """Longest sampled response."""
    temperature: float = 1.0
    """Of the samples."""
    slots: int = 64
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights in model/. None: the dtype of the model that training starts from."""
    seed: int = 0
    """Of the data order, the samples and, for tiny, the first weights."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    """What can be known to be wrong before anything is loaded."""
    check_batch_size(args)
    check_flags(args)


def update(model, optimizer, blocks, pad_id, args, device):
    """One optimiser step on `blocks`, over all ranks. Returns the loss and the gradient norm; when one of
    them is not finite, the weights stay as they were."""
    n_tokens = n_response_tokens(blocks)  # of all micro-batches and ranks: every rank knows all blocks
    optimizer.zero_grad(set_to_none=True)
    nll_sum = torch.zeros((), device=device)
    for batch in my_micro_batches(blocks, pad_id, args.micro_batch_size, device):
        logprobs = model.token_logprobs(batch.input_ids, batch.action_mask, batch.position_ids)  # (B, T-1)
        loss, parts = losses.sft_loss(logprobs, batch.action_mask, n_tokens=n_tokens)
        (loss * dist.world_size()).backward()  # FSDP averages gradients over ranks, the loss is their sum
        nll_sum += parts["nll_sum"]
    nll, grad_norm = dist.all_sum(nll_sum)[0] / n_tokens, dist.clip_grad_norm(model, args.max_grad_norm)
    if math.isfinite(nll) and math.isfinite(grad_norm):  # the same on all ranks
        optimizer.step()
    return nll, grad_norm


def held_out_nll(model, documents, pad_id, args, device):
    blocks = make_blocks(documents, args.max_length, args.packing)
    return models.mean_nll(model, blocks, pad_id, args.micro_batch_size, device)


def answer(model, tokenizer, documents, args):
    """Responses to the first prompts of the held-out documents, as rows of samples.jsonl, on every rank."""
    if not args.sample_prompts:
        return []
    room = getattr(model.config.get_text_config(), "max_position_embeddings", args.max_length)
    prompts = []
    for messages in {prompt_key(d.messages): d.messages[:-1] for d in documents}.values():
        ids = data.prompt_ids(tokenizer, messages)
        if len(ids) + args.max_new_tokens <= room:
            prompts.append((messages, ids))
        if len(prompts) == args.sample_prompts:  # the rest need not be tokenised
            break
    options = {"temperature": args.temperature, "seed": args.seed, "slots": args.slots}
    try:
        with dist.consolidated(model):  # inside, ranks may decode different numbers of steps, or none
            asked = [ids for _, ids in prompts]
            found = generate.sample_responses(model, tokenizer, asked, 1, args.max_new_tokens, **options)
    except InputError as error:  # it takes no positions, for one
        raise InputError(f"{error}; --sample-prompts 0 trains without samples") from None
    return [
        {"prompt": messages, "response": r.text, "tokens": len(r.ids), "finished": r.finished}
        for (messages, _), (r,) in zip(prompts, found)
    ]


def evaluate(model, tokenizer, held_out, args, device):
    """(figures, samples): the held-out loss, and length and, on the tiny world, gold score of samples."""
    figures, samples = {}, answer(model, tokenizer, held_out, args)
    if held_out:
        figures["eval/nll"] = held_out_nll(model, held_out, tokenizer.pad_token_id, args, device)
    if data.is_tiny(args.eval_dataset or args.dataset):
        for row in samples:
            question = row["prompt"][-1]["content"]
            row["gold"] = tiny.gold_score(question, row["response"])
            row["perfect"] = tiny.perfect_score(question)
    columns = {"sample/length": "tokens", "sample/finished": "finished"}
    columns |= {"gold/score": "gold", "gold/perfect": "perfect"}
    return figures | metrics.means(samples, columns), samples


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # 2. data: every rank makes the same blocks, and takes its share of each optimiser step's
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    of = (tokenizer, args.max_length)
    train, held_out = data.train_and_held_out(args, lambda spec, split: data.load_sft(spec, *of, split))
    blocks = make_blocks(train, args.max_length, args.packing)
    data.check_same(args.dataset, (len(blocks), n_response_tokens(blocks)))
    steps_per_epoch = math.ceil(len(blocks) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # 3. models
    model = models.load_policy(args.model, tokenizer, args.gradient_checkpointing, args.seed)
    models.check_room(args.max_length, args.model, model.config)
    model = dist.shard(model, device)
    if args.packing:
        models.check_packing(model)
    if args.sample_prompts:
        generate.check_sampled(args.model, "--sample-prompts 0 trains without samples")
    held_out_ids = [document.ids.tolist() for document in held_out]
    start_run(args, "sft", state, held_out=held_out_ids)  # only now is an old run in output_dir replaced
    dtype = models.export_dtype(args.model, args.save_dtype)

    # 4. optimisers
    betas, decay = (0.9, 0.95), args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=decay, fused=True)
    checkpoint, saved = f"{args.output_dir}/checkpoint", None
    if state == "resume":
        saved = dist.load_checkpoint(checkpoint, {"policy": (model, optimizer)})
    step = saved["step"] if saved else 0
    log = metrics.Metrics(args.output_dir, keep_rows=saved["logged_rows"] if saved else None)

    # 5. loop
    if saved:
        before = saved["before"]
    else:
        before, _ = evaluate(model, tokenizer, held_out, args, device)
        log.log(0, 0, **before)
    bar = metrics.progress(total_steps, step, "sft")
    while step < total_steps:
        start = time.time()
        epoch, index = divmod(step, steps_per_epoch)
        seed = dist.seed_of(args.seed, "order", epoch)  # each epoch's order, one for all ranks
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        batch = [blocks[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]
        lr = args.lr * dist.schedule(step + 1, total_steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        nll, grad_norm = update(model, optimizer, batch, tokenizer.pad_token_id, args, device)
        if not (math.isfinite(nll) and math.isfinite(grad_norm)):
            bar.close()
            raise InputError(
                f"step {step + 1}: loss {nll}, gradient norm {grad_norm}. The step was not taken; lower --lr "
                f"or look at the data. The last good checkpoint, if --save-every made one, is in {checkpoint}"
            )
        row = {"loss/nll": nll, "optim/grad_norm": grad_norm, "optim/lr": lr}
        step += 1
        tokens = sum(map(n_tokens, batch))
        row |= {"data/documents": sum(map(len, batch)), "data/response_tokens": n_response_tokens(batch)}
        row |= {"data/tokens": tokens, "perf/tokens_per_s": tokens / (time.time() - start)}
        if args.eval_every and step % args.eval_every == 0 and step < total_steps and held_out:
            row["eval/nll"] = held_out_nll(model, held_out, tokenizer.pad_token_id, args, device)
        log.log(step, epoch, **row)
        bar.set_postfix(nll=f"{nll:.3f}", norm=f"{grad_norm:.2f}", tok_s=f"{row['perf/tokens_per_s']:.0f}")
        bar.update()
        if args.save_every and step % args.save_every == 0:
            resume_state = {"step": step, "before": before, "logged_rows": log.n_rows}
            dist.save_checkpoint(checkpoint, step, {"policy": (model, optimizer)}, resume_state)
    bar.close()

    # 6. save
    dist.round_weights(model, dtype)  # held-out figures are of what is exported
    after, samples = evaluate(model, tokenizer, held_out, args, device)
    if not math.isfinite(after.get("eval/nll", 0.0)):
        raise InputError(f"held-out loss {after['eval/nll']} after step {step}: no export; lower --lr")
    log.log(step, (step - 1) // steps_per_epoch, **after)
    dist.save_model(model, tokenizer, f"{args.output_dir}/model", dtype)
    if dist.is_main():
        metrics.write_jsonl(f"{args.output_dir}/samples.jsonl", samples)
        for row in samples[:5]:
            gold = f"  gold {row['gold']:.1f} of {row['perfect']:.1f}" if "gold" in row else ""
            print(f"  {row['prompt'][-1]['content'][:60]!r} -> {row['response'][:80]!r}{gold}")
        for key, value in after.items():
            print(f"{key}: {before.get(key, math.nan):.4f} -> {value:.4f}")
        panels = {"loss": ["loss/nll", "eval/nll"], "rate": ["optim/lr"], "norm": ["optim/grad_norm"]}
        metrics.plot_metrics(args.output_dir, panels)
        sizes = {"steps": step, "documents": len(train), "blocks": len(blocks)}
        write_json(f"{args.output_dir}/summary.json", {**sizes, "before": before, "after": after})  # last
        metrics.say_if_worse(before, after)
        models.report_export(f"{args.output_dir}/model", args.model, args.seed)


RECIPES = {
    "tiny": (
        "a 0.6M Llama on the tiny world, three epochs: the default, under a minute on two CPU cores",
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
            epochs=2.0,  # Llama 2 (arXiv:2307.09288), section 3.1, as the learning rate
            lr=2e-5,
            warmup_ratio=0.03,  # RLHF Workflow, section 3.1
            batch_size=16,  # ours, as all below: a few hundred rows are some ten steps
            micro_batch_size=2,
            max_length=1024,
            eval_every=100,
            save_every=100,
            sample_prompts=32,
            max_new_tokens=256,
            slots=32,
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's SFT of Llama-3-8B; give --chat-template with Llama 3's",
        Args(
            model="meta-llama/Meta-Llama-3-8B",
            dataset="RLHFlow/RLHFlow-SFT-Dataset-ver2",  # the authors' published mixture
            epochs=1.0,  # section 3.1
            lr=2e-5,  # the authors' code, as are weight_decay and max_grad_norm
            lr_schedule="cosine",
            warmup_ratio=0.03,  # section 3.1
            weight_decay=0.0,
            max_grad_norm=1.0,
            batch_size=32,  # section 3.1: blocks of 8192 tokens
            micro_batch_size=1,
            max_length=8192,
            eval_every=200,
            save_every=200,
            sample_prompts=32,
            max_new_tokens=512,
            slots=16,
            gradient_checkpointing=True,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
