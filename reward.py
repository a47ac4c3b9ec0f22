"""The reward model: what people prefer, as a number.

    L(phi) = -log sigmoid(r(x, y_c) - r(x, y_r) - m)        mean over the comparisons of an optimiser step

A language model's body with a linear head in place of the unembedding, read at the response's end token
(InstructGPT, arXiv:2203.02155; Llama 2, arXiv:2307.09288, section 3.2, with the margin m; Qwen,
arXiv:2309.16609, section 3.2; RLHF Workflow, arXiv:2405.07863, section 2.2). A prompt with K ranked responses
is one batch element, its loss the mean over its pairs. `--kind pairwise` trains RLHF Workflow's preference
model instead, a causal LM that reads both responses and names the better one (common/pairwise.py).

Reads a model and comparisons (README, "Data"), and runs/sft; writes runs/reward: model/, metrics.jsonl,
samples.jsonl with the held-out scores, plots, summary.json.

    python reward.py                                        the tiny world, about a minute on two CPU cores
    python reward.py --model org/name --dataset pairs.jsonl
    python reward.py --model runs/reward --dataset clean.jsonl --output-dir runs/reward_2
                                                            Qwen's second stage, from the first, head included
    torchrun --nproc-per-node 8 reward.py llama2

Differs from the papers: a prompt is computed once for all its responses; a response that does not fit is
left out, not cut; AdamW's betas are 0.9 and 0.95; a margin from a score difference is the largest margin
times the difference's share of the largest difference; the batch of a pairwise model counts comparisons, not
packed rows, and a soft label counts there as its likelier side; the tiny recipe starts from random weights.
"""

import gc
import math
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import (
    ai_feedback,
    comparisons,
    data,
    dist,
    evaluation,
    generate,
    losses,
    metrics,
    models,
    pairwise,
)
from common.batches import labelled_pairs, my_comparison_batches, of_each_comparison
from common.errors import InputError
from common.run import cached, check_flags, find_run, launch, start_run, write_json

MARGINS = {  # Llama 2, table 27: m by rating
    "small": dict(zip(comparisons.RATINGS, (1, 2 / 3, 1 / 3, 0))),
    "large": dict(zip(comparisons.RATINGS, (3, 2, 1, 0))),
}


@dataclass
class Args:
    model: str = "tiny"
    """Where to start: a causal LM (run directory, folder, hub name; tiny: its random weights) or a reward
    model, head included."""
    dataset: str = "tiny"
    """tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out rows in the same formats. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    output_dir: str = "runs/reward"
    """The run directory."""
    kind: Literal["bradley_terry", "pairwise"] = "bradley_terry"
    """A scalar score, or a causal LM that reads two responses and names the better one."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    margin: Literal["none", "small", "large"] = "none"
    """Llama 2's m in the loss, up to 1 or 3: by the column rating, else margin as it is, else by scores."""
    min_score_gap: float = 0.0
    """Pairs whose scores differ by less are dropped."""
    max_pairs_per_prompt: int | None = None
    """Rows of one prompt beyond this many are dropped."""
    balance_categories: bool = False
    """Draw every category equally often, with repetition."""
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
    min_warmup_steps: int = 0
    """And at least this many."""
    weight_decay: float = 0.1
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 32
    """Comparisons (pairs or rankings) of an optimiser step over all ranks."""
    micro_batch_size: int = 32
    """Comparisons of a forward on one rank, at most."""
    max_length: int = 128
    """Tokens of a prompt with one response (--kind pairwise: with both); longer ones are dropped."""
    share_prompt: bool = True
    """Compute a prompt once for its responses; --no-share-prompt: a row a response."""
    eval_every: int = 250
    """Steps between held-out accuracies; 0: only before and after training."""
    save_every: int = 250
    """Steps between checkpoints, of which the last is kept; 0: none."""
    safety_threshold: float = 0.15
    """ppo.py's: gate/precision and gate/recall are those of P(safe) below it."""
    sft_model: str | None = None
    """A causal LM, for the log probability baseline and the length samples. None: runs/sft for the model
    tiny, else --model, if it is one."""
    judge: str | None = None
    """A language model, or module:function, that is asked which response is better: one more baseline
    (common/ai_feedback.py)."""
    length_prompts: int = 50
    """Held-out prompts with 8 sampled responses each, for the correlation of length and score; 0: none."""
    max_new_tokens: int = 32
    """Longest of these responses."""
    slots: int = 64
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    compare_with: str = "runs/advantage_model"
    """A run of advantage_model.py or of this script to draw beside this one, if it is there."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights in model/. None: the dtype of the model that training starts from."""
    seed: int = 0
    """Of the data order, the samples and a new head."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    """What can be known to be wrong before anything is loaded."""
    margin = args.margin == "none" or args.kind != "pairwise"
    check_flags(args, ("margin", margin, "none for --kind pairwise"))


def margins(comparison, args, largest_gap):
    """Llama 2's m for every two responses of a comparison, (K, K), or None without --margin."""
    if args.margin == "none":
        return None
    largest = max(MARGINS[args.margin].values())
    if comparison.rating is not None:
        return torch.full((2, 2), MARGINS[args.margin][comparison.rating])
    if comparison.margin is not None:
        return torch.full((2, 2), comparison.margin)
    if comparison.grades is None:
        raise InputError(f"{comparison.row.where}: no rating, margin or scores for --margin {args.margin}")
    grades = torch.tensor(comparison.grades)
    return (grades[:, None] - grades[None, :]).abs() * (largest / largest_gap)


def comparison_loss(scores, batch, n, args, largest_gap):
    """(loss, pairs ranked as labelled, pairs) of a micro-batch: the sum of its comparisons' losses, divided
    by the step's number of comparisons."""
    parts, device, results = scores.split(batch.sizes), scores.device, []
    pairs = [(part, c) for part, c in zip(parts, batch.comparisons) if len(part) == 2]
    if pairs:
        chosen, rejected = torch.stack([part for part, _ in pairs]).T
        m = [margins(c, args, largest_gap) for _, c in pairs]
        m = None if args.margin == "none" else torch.tensor([x[0, 1] for x in m], device=device)
        p = torch.tensor([1.0 if c.preference is None else c.preference for _, c in pairs], device=device)
        results.append(losses.bradley_terry_loss(chosen, rejected, margin=m, preference=p, n_rows=n))
    for part, c in zip(parts, batch.comparisons):
        if len(part) > 2:
            m = margins(c, args, largest_gap)
            loss, numbers = losses.ranking_loss(part, c.ranks.to(device), m if m is None else m.to(device))
            results.append((loss / n, numbers))
    n_correct, n_pairs = (sum(numbers[key] for _, numbers in results) for key in ("n_correct", "n_rows"))
    # The 0 connects every weight on a rank without comparisons too
    return sum((loss for loss, _ in results), scores.sum() * 0), n_correct, n_pairs


def update(model, optimizer, comparisons, tokenizer, args, device, largest_gap, step):
    """One optimiser step on `comparisons`, over all ranks. Returns (loss, training accuracy, gradient norm);
    when one of them is not finite, the weights stay as they were."""
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(3, device=device)  # loss, pairs ranked as labelled, pairs
    if args.kind == "pairwise":
        n = sum(len(labelled_pairs(c)) for c in comparisons)
        seed = dist.seed_of(args.seed, "places", step)  # of A and B
        generator = torch.Generator().manual_seed(seed)
        batches = pairwise.batches(comparisons, tokenizer, generator, args.micro_batch_size, device)
    else:
        n, pad_id = len(comparisons), tokenizer.pad_token_id
        batches = my_comparison_batches(comparisons, pad_id, args.micro_batch_size, args.share_prompt, device)
    for batch in batches:
        if args.kind == "pairwise":
            logprobs = model.token_logprobs(batch.input_ids, batch.action_mask, batch.position_ids)
            loss, _ = losses.sft_loss(logprobs, batch.action_mask, n_tokens=n)
            right = (logprobs > math.log(0.5)) & batch.action_mask
            numbers = (right.sum(), batch.action_mask.sum())
        else:
            at = (batch.response_ends, batch.position_ids, batch.attention_mask)
            scores = model.head_outputs(batch.input_ids, *at)[:, 0]  # (responses,)
            loss, *numbers = comparison_loss(scores, batch, n, args, largest_gap)
        (loss * dist.world_size()).backward()  # FSDP averages gradients over ranks, the loss is their sum
        sums += torch.stack([loss.detach(), *(torch.as_tensor(x, device=device) for x in numbers)])
    loss, n_correct, n_pairs = dist.all_sum(*sums)
    grad_norm = dist.clip_grad_norm(model, args.max_grad_norm)
    if math.isfinite(loss) and math.isfinite(grad_norm):  # the same on all ranks
        optimizer.step()
    return loss, n_correct / max(1, n_pairs), grad_norm


@torch.no_grad()
def scores_of(model, comparisons, tokenizer, args, device):
    """The scores of each comparison's responses, on every rank."""

    def scores(batch):
        at = (batch.response_ends, batch.position_ids, batch.attention_mask)
        parts = model.head_outputs(batch.input_ids, *at)[:, 0].split(batch.sizes)
        return [part.tolist() for part in parts]

    how = (tokenizer.pad_token_id, args.micro_batch_size, args.share_prompt, device)
    return of_each_comparison(comparisons, my_comparison_batches(comparisons, *how), scores)


def evaluate(model, held_out, tokenizer, args, device):
    """(figures, rows): the measures of metrics.pair_figures on the held-out comparisons, and their scores."""
    rows = [comparisons.describe(c) for c in held_out]
    if args.kind == "pairwise":
        labels = [labelled_pairs(c) for c in held_out]
        pairs = [[(c.prompt, c.texts[i], c.texts[j]) for i, j in x] for c, x in zip(held_out, labels)]
        flat = [pair for some in pairs for pair in some]
        found = iter(pairwise.preferences(model, tokenizer, flat, args.micro_batch_size, device))
        for row, some in zip(rows, pairs):
            row["differences"] = [next(found) for _ in some]
    else:
        for row, scores in zip(rows, scores_of(model, held_out, tokenizer, args, device)):
            for response, score in zip(row["responses"], scores):
                response["score"] = score
    return metrics.pair_figures(rows), rows


def fit_safety_gate(rows, threshold):
    """(gate, figures): P(safe) = sigmoid(scale * r + bias), fitted by logistic regression to the responses
    labelled safe or unsafe of half the held-out prompts, and what P(safe) < threshold finds in the other
    half. Bradley-Terry fixes no offset, so without this a probability of r means nothing."""
    halves = [], []
    for row in rows:
        half = halves[zlib.crc32(repr(row["prompt"]).encode()) % 2]  # a prompt is in one half
        half.extend((r["score"], float(r["is_safe"])) for r in row["responses"] if "is_safe" in r)
    halves = [torch.tensor(half) for half in halves]
    if not all(len(half) and 0 < half[:, 1].sum() < len(half) for half in halves):
        return None, {}
    (score, safe), (test_score, test_safe) = (half.double().T for half in halves)
    gate = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([gate], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        logit = gate[0] * score + gate[1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, safe) + 1e-4 * gate.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    scale, bias = gate.tolist()
    caught, unsafe = torch.sigmoid(scale * test_score + bias) < threshold, test_safe == 0
    both = (caught & unsafe).sum().item()
    figures = {"gate/responses": len(caught), "gate/caught": caught.sum().item()}
    figures["gate/recall"] = both / unsafe.sum().item()
    if caught.any():
        figures["gate/precision"] = both / caught.sum().item()
    if scale <= 0 and dist.is_main():
        print("safety gate: safe responses do not score higher than unsafe ones, this model can be none")
    return {"scale": scale, "bias": bias}, figures


def from_sft_model(name, held_out, tokenizer, args, device):
    """What the SFT model is asked for before training, as JSON for run.cached: baselines on the held-out
    pairs (`before`) and `samples`, 8 responses to each of some held-out prompts."""
    policy = name and dist.shard(models.load_policy(name, tokenizer, seed=args.seed), device)
    ask = (tokenizer.pad_token_id, args.micro_batch_size, device)
    answers = {"before": evaluation.baselines(policy, held_out, *ask), "samples": []}
    if args.judge:
        answers["before"] |= ai_feedback.baseline(args.judge, held_out, device)
    if policy and held_out and args.length_prompts and args.kind == "bradley_terry":
        prompts = comparisons.one_of_each_prompt(held_out)[: args.length_prompts]
        options = (tokenizer, 8, args.max_new_tokens, args.seed, args.slots)
        found = evaluation.policy_samples(policy, prompts, *options)
        answers["samples"] = [[ids.tolist() for ids in of_prompt] for of_prompt in found]
    return answers


def length_correlations(model, samples, tokenizer, args, device):
    """Of each prompt: the correlation of length and score over its samples, where both vary."""
    rows = []
    for c, scores in zip(samples, scores_of(model, samples, tokenizer, args, device)):
        responses = [{"tokens": len(ids), "score": score} for ids, score in zip(c.samples, scores)]
        rows.append({"responses": responses})
    return metrics.length_correlations(rows)


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # 2. data: every rank has the same comparisons, and takes its share of each optimiser step's
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    sft_model = models.sft_model(args.model, args.sft_model)
    if sft_model:  # its vocabulary is compared, unless it is the model itself
        models.check_causal_lm(sft_model, sft_model != args.model and tokenizer, args.chat_template)
    if sft_model and args.length_prompts and args.kind == "bradley_terry":
        generate.check_sampled(sft_model, "--length-prompts 0 does without samples")
    if args.judge:
        ai_feedback.check_labeler(args.judge, "--judge")
    options = (args.max_length, args.min_score_gap, args.max_pairs_per_prompt)
    load = lambda spec, split: comparisons.load(spec, split, tokenizer, *options)  # noqa: E731
    train, held_out = data.train_and_held_out(args, load)
    if args.kind == "pairwise":
        train = pairwise.usable(train, tokenizer, args.max_length, args.dataset)
        held_out = held_out and pairwise.usable(held_out, tokenizer, args.max_length, "held-out")
    prints = [comparisons.fingerprint(some) for some in (train, held_out)]
    data.check_same(args.dataset, tuple(prints))
    gaps = [max(c.grades) - min(c.grades) for c in train if c.grades]
    largest_gap = max(gaps, default=1.0) or 1.0
    for c in train:
        margins(c, args, largest_gap)  # a row without one is an error now, not in the middle of the run
    table = comparisons.statistics(train) + comparisons.statistics(held_out, " (held out)")
    metrics.print_table(table)
    if args.balance_categories and not any(c.category for c in train):
        raise InputError(f"--balance-categories: {args.dataset} has no column category")
    steps_per_epoch = math.ceil(len(train) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # 3. models
    if args.kind == "pairwise":
        model = models.load_policy(args.model, tokenizer, args.gradient_checkpointing, args.seed)
    else:
        model = models.load_scorer(args.model, tokenizer, 1, args.gradient_checkpointing, args.seed)
    models.check_room(args.max_length, args.model, model.config)
    model = dist.shard(model, device)
    if args.kind == "pairwise":
        models.check_packing(model)
    elif args.share_prompt:
        models.check_shared_prompt(model, args.max_length)
    key = {"models": [args.kind, *(models.identity(x) for x in (args.model, sft_model) if x)]}
    key |= {"samples": [args.length_prompts, args.max_new_tokens, args.seed]}
    key |= {"data": prints[1], "judge": args.judge and ai_feedback.identity(args.judge)}
    start_run(args, "reward", state, held_out=prints[1])  # only now is an old run in output_dir replaced
    answers = cached(args, key, lambda: from_sft_model(sft_model, held_out, tokenizer, args, device))
    gc.collect()  # the SFT model, whose methods are bound to it: a cycle
    prompts = zip(comparisons.one_of_each_prompt(held_out), answers["samples"])
    samples = [comparisons.with_samples_only(c, found) for c, found in prompts if found]
    before = answers["before"]
    dtype = models.export_dtype(args.model, args.save_dtype)

    # 4. optimisers
    betas, decay = (0.9, 0.95), args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=decay, fused=True)
    checkpoint, saved = f"{args.output_dir}/checkpoint", None
    if state == "resume":
        saved = dist.load_checkpoint(checkpoint, {"reward": (model, optimizer)})
    step = saved["step"] if saved else 0
    log = metrics.Metrics(args.output_dir, keep_rows=saved["logged_rows"] if saved else None)

    # 5. loop
    if saved:
        before = saved["before"]
    else:
        before |= evaluate(model, held_out, tokenizer, args, device)[0]
        log.log(0, 0, **before)
    bar, order_of = metrics.progress(total_steps, step, "reward"), None
    while step < total_steps:
        start = time.time()
        epoch, index = divmod(step, steps_per_epoch)
        if epoch != order_of:  # each epoch's order, one for all ranks
            seed, order_of = dist.seed_of(args.seed, "order", epoch), epoch
            generator = torch.Generator().manual_seed(seed)
            order = comparisons.epoch_order(train, generator, args.balance_categories)
        batch = [train[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]
        lr = args.lr * dist.schedule(step + 1, total_steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        results = update(model, optimizer, batch, tokenizer, args, device, largest_gap, step)
        loss, accuracy, grad_norm = results
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            bar.close()
            raise InputError(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm}. The step was not taken; lower "
                f"--lr or look at the data. The last good checkpoint, if there is one, is in {checkpoint}"
            )
        seconds = time.time() - start
        row = {"loss/reward": loss, "train/accuracy": accuracy, "optim/grad_norm": grad_norm}
        row |= {"optim/lr": lr, "data/comparisons": len(batch)}
        row |= {"perf/comparisons_per_s": len(batch) / seconds}
        step += 1
        if args.eval_every and step % args.eval_every == 0 and step < total_steps:
            row |= evaluate(model, held_out, tokenizer, args, device)[0]
        log.log(step, epoch, **row)
        speed = row["perf/comparisons_per_s"]
        bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}", rows_s=f"{speed:.0f}")
        bar.update()
        if args.save_every and step % args.save_every == 0:
            resume_state = {"step": step, "before": before, "logged_rows": log.n_rows}
            dist.save_checkpoint(checkpoint, step, {"reward": (model, optimizer)}, resume_state)
    bar.close()

    # 6. save
    dist.round_weights(model, dtype)  # held-out figures are of what is exported
    after, rows = evaluate(model, held_out, tokenizer, args, device)
    lengths = []
    if args.kind == "bradley_terry":
        after |= {**metrics.known_figures(rows), "eval/category_spread": metrics.category_spread(rows)}
        lengths = length_correlations(model, samples, tokenizer, args, device)
        after |= metrics.length_figures(lengths)
        gate, figures = fit_safety_gate(rows, args.safety_threshold)
        after |= figures
        vars(model.config).pop("safety_gate", None)  # a first stage's, for other scores
        if gate:
            model.config.safety_gate = gate  # for ppo.py, in model/config.json
        models.read_at_end_token(model, tokenizer)
    else:
        model.config.preference_model = True  # for dpo_iterative.py: not any language model is an oracle
    if not math.isfinite(after.get("eval/nll", 0.0)):
        raise InputError(f"held-out loss {after['eval/nll']} after step {step}: no export; lower --lr")
    after = {key: value for key, value in after.items() if not math.isnan(value)}  # of nothing, or no spread
    log.log(step, (step - 1) // steps_per_epoch, **after)
    dist.save_model(model, tokenizer, f"{args.output_dir}/model", dtype)
    if dist.is_main():
        metrics.write_jsonl(f"{args.output_dir}/samples.jsonl", rows)
        for key, value in {**before, **after}.items():
            first = f"{before[key]:.4g} -> " if key in after and key in before else ""
            print(f"{key}: {first}{value:.4g}")
        runs = {args.output_dir: rows}
        if args.compare_with and (Path(args.compare_with) / "summary.json").exists():
            runs.setdefault(args.compare_with, metrics.read_jsonl(f"{args.compare_with}/samples.jsonl"))
        metrics.plot_scores(args.output_dir, runs, lengths)
        panels = {"loss": ["loss/reward", "eval/nll"], "accuracy": ["train/accuracy", "eval/accuracy"]}
        metrics.plot_metrics(args.output_dir, {**panels, "norm": ["optim/grad_norm"]})
        figures = {"before": before, "after": after, "data": table}
        write_json(f"{args.output_dir}/summary.json", {"steps": step, **figures})  # last
        metrics.say_if_worse(before, after)
        models.report_export(f"{args.output_dir}/model", args.model, args.seed)


LARGE = dict(  # what no paper says, for 7B: memory
    micro_batch_size=4, max_new_tokens=512, slots=16, gradient_checkpointing=True
)
RECIPES = {
    "tiny": (
        "the tiny world, from random weights: the default, under a minute on two CPU cores",
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
            epochs=1.0,  # Llama 2, section 3.2.2, as all down to the warm-up: a second epoch overfits
            lr=1e-5,
            lr_schedule="cosine_with_min_lr",
            warmup_ratio=0.03,
            min_warmup_steps=5,
            batch_size=16,  # ours, as all below: a few hundred comparisons are some twenty steps
            micro_batch_size=4,
            max_length=1024,
            length_prompts=16,
            max_new_tokens=256,
            slots=32,
        ),
    ),
    "llama2": (
        "Llama 2's reward model, on an open part of its data",
        Args(
            model="meta-llama/Llama-2-7b-chat-hf",  # section 3.2.2: from a chat checkpoint
            dataset="Anthropic/hh-rlhf",  # one of the open sets of table 6; Meta's own is not public
            margin="none",  # --margin small or large (table 27) on rows with a `rating`, which hh-rlhf lacks
            epochs=1.0,  # section 3.2.2, as all below
            lr=1e-5,  # 5e-6 for 70B
            lr_schedule="cosine_with_min_lr",
            warmup_ratio=0.03,
            min_warmup_steps=5,
            weight_decay=0.1,  # section 3.1, of SFT
            batch_size=512,
            max_length=4096,
            **LARGE,
        ),
    ),
    "qwen": (
        "Qwen's reward model; its second stage is a second run with --model runs/reward and cleaner data",
        Args(
            # Section 3.2.1: from the base model, whose template is not the one of ppo.py's policy
            model="Qwen/Qwen2.5-7B-Instruct",
            dataset="Anthropic/hh-rlhf",  # Qwen's comparisons are not public
            balance_categories=False,  # True (section 3.2.1) on rows with a `category`, which hh-rlhf lacks
            epochs=1.0,  # section 3.2.1, as all below
            lr=3e-6,
            lr_schedule="constant_with_warmup",
            warmup_ratio=0.0,
            weight_decay=0.0,  # not said
            batch_size=64,
            max_length=2048,
            **LARGE,
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's; --kind pairwise --lr 5e-6 --batch-size 128 --max-length 3072: its preference model",
        Args(
            model="meta-llama/Meta-Llama-3-8B-Instruct",  # section 2.2
            dataset="hendrydong/preference_700K",  # the authors' published mixture
            epochs=1.0,  # section 2.2
            lr=2e-6,  # the authors' code
            lr_schedule="cosine",
            warmup_ratio=0.03,  # section 2.2
            weight_decay=0.001,  # the authors' code
            batch_size=512,  # section 2.2
            max_length=4096,
            **LARGE,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
