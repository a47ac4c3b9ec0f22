"""Supervised fine-tuning: the policy that every other script starts from.

    L(theta) = - (1 / n) sum over response tokens t of  log pi_theta(y_t | x, y_<t)        n: response tokens of the optimiser step

The prompt carries no loss, the end token does. Documents are packed into blocks, and a document never sees another one
(RLHF Workflow, arXiv:2405.07863, section 3.1; Llama 2, arXiv:2307.09288, section 3.1).

Reads a model and rows with one response each (README, "Data"); writes runs/sft: model/, metrics.jsonl, samples.jsonl, plots, summary.json.

    python sft.py                                                       the tiny world, under a minute on two CPU cores
    python sft.py --model org/name --dataset rows.jsonl                 any chat model and data
    torchrun --nproc-per-node 8 sft.py rlhf_workflow --chat-template llama3.jinja

Differs from the paper: blocks are packed without attention across documents, where the authors' packing lets them see each other.
"""

import math
import time
from dataclasses import dataclass

import torch
from transformers import get_scheduler

from common import data, dist, losses, metrics, models, tiny
from common.run import InputError, launch, start_run, write_json
from common.sampler import sample


@dataclass
class Args:
    model: str = "tiny"
    """Where to start: tiny, a hub name, a model folder, or a run directory."""
    dataset: str = "tiny"
    """tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out rows in the same formats. None: tiny's own held-out split; otherwise 5 % of the prompts, at most 500, are held out."""
    output_dir: str = "runs/sft"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    epochs: float = 3.0
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after this many optimiser steps; the learning rate schedule ends there too."""
    lr: float = 3e-3
    """Peak learning rate."""
    lr_schedule: str = "cosine"
    """cosine, linear, constant_with_warmup or another of transformers' schedules; the first three fall to 0, 0 and not at all."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 16
    """Blocks of an optimiser step over all ranks (with --no-packing: documents)."""
    micro_batch_size: int = 16
    """Blocks of a forward on one rank; batch_size is a multiple of ranks times this."""
    max_length: int = 128
    """Tokens of a block, and at most of a document."""
    packing: bool = True
    """Fill blocks with several documents; --no-packing gives each document a row of its own, padded to the longest of its batch."""
    eval_every: int = 50
    """Steps between held-out losses; 0: only before and after training."""
    save_every: int = 50
    """Steps between checkpoints, of which the last is kept; 0: none."""
    sample_prompts: int = 200
    """Held-out prompts that are answered before and after training, for samples.jsonl and, on tiny, the gold score; 0: none."""
    max_new_tokens: int = 32
    """Longest sampled response."""
    temperature: float = 1.0
    """Of the samples."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    attn_implementation: str = "sdpa"
    """Of transformers: sdpa, flash_attention_2 or flex_attention (the last two on GPU)."""
    save_dtype: str = "float32"
    """Of the weights in model/: float32, bfloat16 or float16."""
    seed: int = 0
    """Of the data order, the samples and, for tiny, the first weights."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = start_run(args, stage="sft")
    if state == "finished":
        return dist.is_main() and print(f"{args.output_dir} is finished already")

    # 2. data: the same documents and blocks on every rank; ranks take turns in each step's blocks
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    train = data.sft_documents(data.load_rows(args.dataset, "sft"), tokenizer, args.max_length, args.dataset)
    if args.eval_dataset or data.is_tiny(args.dataset):
        held_out_rows = data.load_rows(args.eval_dataset or args.dataset, "sft", split="test")
        held_out = data.sft_documents(held_out_rows, tokenizer, args.max_length, args.eval_dataset or "held-out")
        train = data.without_prompts_of(train, held_out, args.dataset)
    else:
        train, held_out = data.hold_out(train)
    blocks = make_blocks(train, args)
    steps_per_epoch = math.ceil(len(blocks) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # 3. model
    model = models.load_policy(
        args.model, tokenizer, seed=args.seed, attn_implementation=args.attn_implementation, gradient_checkpointing=args.gradient_checkpointing
    )
    model = dist.shard(model, device)
    if args.packing:
        models.check_packing(model)

    # 4. optimiser
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    scheduler = get_scheduler(args.lr_schedule, optimizer, math.ceil(args.warmup_ratio * total_steps), total_steps)
    step, results = 0, {}
    if state == "resume":
        saved = dist.load_checkpoint(f"{args.output_dir}/checkpoint", {"policy": (model, optimizer)})
        scheduler.load_state_dict(saved["scheduler"])
        step, results = saved["step"], saved["results"]
    log = metrics.Metrics(args.output_dir, keep_rows=saved["logged_rows"] if state == "resume" else None)

    # 5. loop
    if not results:
        results = {"before": evaluate(model, tokenizer, held_out, args, device)}
        log.log(0, 0, **results["before"])
    bar = metrics.progress(total_steps, step, "sft")
    while step < total_steps:
        started = time.time()
        epoch, index = divmod(step, steps_per_epoch)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(args.seed + epoch)).tolist()
        batch = [blocks[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]
        nll, grad_norm, n_tokens = update(model, optimizer, batch, tokenizer.pad_token_id, args, device, step)
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        step += 1
        seconds = time.time() - started
        row = {"loss/nll": nll, "optim/lr": lr, "optim/grad_norm": grad_norm, "data/response_tokens": n_tokens, "data/documents": sum(map(len, batch))}
        row["perf/tokens"] = sum(len(d.ids) for block in batch for d in block)
        row["perf/tokens_per_s"] = row["perf/tokens"] / seconds
        if args.eval_every and step % args.eval_every == 0 and step < total_steps:
            row["eval/nll"] = held_out_nll(model, held_out, tokenizer.pad_token_id, args, device)
        log.log(step, epoch, **row)
        bar.set_postfix(nll=f"{nll:.3f}", norm=f"{grad_norm:.2f}", tok_s=f"{row['perf/tokens_per_s']:,.0f}", refresh=False)
        bar.update()
        if args.save_every and step % args.save_every == 0:
            to_resume = {"step": step, "scheduler": scheduler.state_dict(), "results": results, "logged_rows": log.n_rows}
            dist.save_checkpoint(f"{args.output_dir}/checkpoint", step, {"policy": (model, optimizer)}, to_resume)
    bar.close()

    # 6. save
    results["after"] = evaluate(model, tokenizer, held_out, args, device, table=True)
    log.log(step, (step - 1) // steps_per_epoch, **results["after"])
    dist.save_model(model, tokenizer, f"{args.output_dir}/model", getattr(torch, args.save_dtype))
    if dist.is_main():
        panels = {"loss (nats per response token)": ["loss/nll", "eval/nll"], "learning rate": ["optim/lr"], "gradient norm": ["optim/grad_norm"]}
        metrics.plot_metrics(args.output_dir, panels)
        write_json(f"{args.output_dir}/summary.json", {"steps": step, "documents": len(train), "blocks": len(blocks), **results})
        print("\n".join(f"{key}: {results['before'][key]:.4f} -> {value:.4f}" for key, value in results["after"].items()))
        print(f"wrote {args.output_dir}/model")


def check(args):
    """What can be known to be wrong before anything is loaded."""
    ranks = dist.world_size()
    if args.batch_size < 1 or args.micro_batch_size < 1 or args.batch_size % (ranks * args.micro_batch_size):
        whole = max(1, ranks * max(1, args.micro_batch_size))
        raise InputError(
            f"--batch-size {args.batch_size} is no multiple of {ranks} rank(s) x --micro-batch-size {args.micro_batch_size} = {whole}: "
            f"try --batch-size {math.ceil(max(1, args.batch_size) / whole) * whole}, or another --micro-batch-size"
        )
    if args.max_length < 2 or args.epochs <= 0 or (args.max_steps is not None and args.max_steps < 1) or args.lr < 0:
        raise InputError("--max-length wants at least 2, --epochs more than 0, --max-steps at least 1, --lr at least 0")
    if args.save_dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"--save-dtype {args.save_dtype}: wanted float32, bfloat16 or float16")


def make_blocks(documents, args):
    """Documents -> blocks of documents: packed, or one each."""
    if not args.packing:
        return [[d] for d in documents]
    return [[documents[i] for i in block] for block in data.pack([len(d.ids) for d in documents], args.max_length)]


def micro_batches(blocks, pad_id, micro_batch_size, device):
    """This rank's share of the blocks, as batches. Every rank gets the same number of them, the last ones perhaps without loss."""
    by_length = sorted(blocks, key=lambda block: -sum(len(d.ids) for d in block))  # rows of a batch are of like length: little padding
    mine = by_length[dist.rank() :: dist.world_size()]
    most = math.ceil(len(blocks) / dist.world_size())  # what the rank with the longest share has
    for start in range(0, most, micro_batch_size):
        yield data.collate(mine[start : start + micro_batch_size], pad_id, device)


def n_response_tokens(blocks):
    return sum(int(d.response_mask[1:].sum()) for block in blocks for d in block)


def update(model, optimizer, blocks, pad_id, args, device, step):
    """One optimiser step on `blocks`, over all ranks. Returns the loss, the gradient norm and the number of response tokens."""
    n_tokens = n_response_tokens(blocks)  # of all micro-batches and ranks: every rank knows all blocks
    optimizer.zero_grad(set_to_none=True)
    nll_sum = torch.zeros((), device=device)
    for batch in micro_batches(blocks, pad_id, args.micro_batch_size, device):
        logprobs = model.token_logprobs(batch.input_ids, batch.action_mask, position_ids=batch.position_ids)  # (B, T-1)
        loss, parts = losses.sft_loss(logprobs, batch.action_mask, n_tokens=n_tokens)
        (loss * dist.world_size()).backward()  # FSDP averages gradients over ranks, the loss is a sum over them
        nll_sum += parts["nll_sum"]
    nll = dist.all_sum(nll_sum)[0] / n_tokens
    grad_norm = dist.clip_grad_norm(model, args.max_grad_norm)
    if not (math.isfinite(nll) and math.isfinite(grad_norm)):
        raise InputError(
            f"step {step + 1}: loss {nll}, gradient norm {grad_norm}; the weights were left as they were. Lower --lr or look at the data; "
            f"--resume goes on from the last checkpoint in {args.output_dir}/checkpoint, if there is one"
        )
    optimizer.step()
    return nll, grad_norm, n_tokens


@torch.no_grad()
def held_out_nll(model, documents, pad_id, args, device):
    """Mean negative log likelihood of the held-out response tokens, in nats, over all ranks."""
    blocks, total = make_blocks(documents, args), 0.0
    for batch in micro_batches(blocks, pad_id, args.micro_batch_size, device):
        logprobs = model.token_logprobs(batch.input_ids, batch.action_mask, position_ids=batch.position_ids)
        total -= losses.masked_sum(logprobs, batch.action_mask).item()
    return dist.all_sum(total)[0] / n_response_tokens(blocks)


def evaluate(model, tokenizer, held_out, args, device, table=False):
    """Held-out loss; samples for held-out prompts; on the tiny world, their gold score. table: write samples.jsonl and show some."""
    result = {"eval/nll": held_out_nll(model, held_out, tokenizer.pad_token_id, args, device)} if held_out else {}
    prompts = list({data.prompt_key(d.messages): d.messages[:-1] for d in held_out}.values())[: args.sample_prompts]
    ids = [data.prompt_ids(tokenizer, messages) for messages in prompts]
    room = min(args.max_length, getattr(model.config.get_text_config(), "max_position_embeddings", args.max_length))
    keep = [i for i in range(len(prompts)) if len(ids[i]) + args.max_new_tokens <= room]
    mine = keep[dist.rank() :: dist.world_size()]
    samples = []
    with dist.consolidated(model):
        if mine:
            seed = args.seed * 1000 + dist.rank()
            out = sample(
                model, [ids[i] for i in mine], max_new_tokens=args.max_new_tokens, stop_ids=[tokenizer.eos_token_id],
                pad_id=tokenizer.pad_token_id, temperature=args.temperature, seed=seed, progress=dist.is_main(),
            )
            for i, tokens, mask, finished in zip(mine, out.response_tokens, out.sample_mask, out.finished.tolist()):
                text = tokenizer.decode(tokens[mask], skip_special_tokens=True)
                samples.append({"prompt": prompts[i], "response": text, "tokens": int(mask.sum()), "finished": finished})
    samples = sorted(dist.gather(samples), key=lambda s: str(s["prompt"]))
    if samples:
        result["sample/length"] = sum(s["tokens"] for s in samples) / len(samples)
        result["sample/finished"] = sum(s["finished"] for s in samples) / len(samples)
    if samples and data.is_tiny(args.eval_dataset or args.dataset):
        for s in samples:
            question = s["prompt"][-1]["content"]
            s["gold"], s["perfect"] = tiny.gold_score(question, s["response"]), tiny.perfect_score(question)
        result["gold/score"] = sum(s["gold"] for s in samples) / len(samples)
        result["gold/perfect"] = sum(s["perfect"] for s in samples) / len(samples)
    if table and dist.is_main():
        metrics.write_jsonl(f"{args.output_dir}/samples.jsonl", samples)
        for s in samples[:5]:
            gold = f"  gold {s['gold']:.1f} of {s['perfect']:.1f}" if "gold" in s else ""
            print(f"  {s['prompt'][-1]['content'][:60]!r} -> {s['response'][:80]!r}{gold}")
    return result


RECIPES = {
    "tiny": ("a 0.6M Llama on the tiny world, three epochs: the default, under a minute on two CPU cores", Args()),
    "rlhf_workflow": (
        "RLHF Workflow's SFT of Llama-3-8B; give --chat-template with Llama 3's",
        Args(
            model="meta-llama/Meta-Llama-3-8B",
            dataset="RLHFlow/RLHFlow-SFT-Dataset-ver2",  # the authors' published mixture
            epochs=1.0,  # section 3.1
            lr=2e-5,  # the authors' code, as weight_decay and max_grad_norm; the number is lost in the paper's text
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
            gradient_checkpointing=True,
            save_dtype="bfloat16",
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
