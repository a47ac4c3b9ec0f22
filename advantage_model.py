"""The Advantage Model: how much more a response gets than the policy is expected to get on its prompt.

    a(x, y) = r(x, y) - ((N - K) / N) e(x) - (1/N) sum_k rho_k(x, y) r(x, y),    rho_k = pi(y|x) / pi'_k(y|x)
    L(phi)  = -[log sigmoid(a_c - a_r) + log sigmoid(m - a_c) + log sigmoid(m + a_r)], mean over comparisons

"Stabilizing RLHF through Advantage Model and Selective Rehearsal" (arXiv:2309.10202), eq. 8 and 6, m = 2.5.
One head with two outputs: r is read at the response's end token, e, the expected reward of the policy (eq.
7), at the prompt's last token. K other policies wrote the responses; by default K = 0, and a = r - e. Eq. 6
then sees r and e only through their difference, and pulls e to the middle between the better and the worse
responses of the DATA. `--expected-reward-samples n` also regresses e to the mean r of n responses of the
policy, which is what eq. 7 says. Only a is a score: r + c(x) and e + c(x) have the same loss for any c.

Reads a model and comparisons (README, "Data"), and runs/sft; writes runs/advantage_model: model/,
metrics.jsonl, samples.jsonl with the held-out scores, plots, summary.json.

    python advantage_model.py                               the tiny world, about a minute on two CPU cores
    python advantage_model.py --model org/name --dataset pairs.jsonl
    torchrun --nproc-per-node 8 advantage_model.py advantage_model

Differs from the paper: it gives no form for e, here an output of the same head; ratios are clipped, carry no
gradient, and count as 1 where they are unknown (evaluation, PPO); a prompt is computed once for its
responses; a response that does not fit is left out, not cut; AdamW's betas are 0.9 and 0.95; a soft label
counts as its likelier side; the tiny recipe starts from random weights.
"""

import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import ai_feedback, comparisons, data, dist, evaluation, generate, losses, metrics, models, tiny
from common.batches import labelled_pairs, my_comparison_batches, of_each_comparison
from common.comparisons import column, seq_logprobs
from common.errors import InputError
from common.run import cached, check_flags, find_run, launch, start_run, write_json


@dataclass
class Args:
    model: str = "tiny"
    """Where to start: a causal LM (run directory, folder, hub name; tiny: its random weights) or an advantage
    model, head included."""
    dataset: str = "tiny"
    """tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out rows in the same formats. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    output_dir: str = "runs/advantage_model"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    bound: float = 2.5
    """m(x): advantages of better responses are kept below it, those of worse ones above minus it."""
    n_others: int = 0
    """K: how many other policies' ratios enter eq. 8."""
    n_policies: int | None = None
    """N, more than K. None: K + 1."""
    ratio_clip: float = 1.0
    """Ratios pi / pi'_k are at most this; K times it must stay below N."""
    policy: str | None = None
    """pi: whose expected reward e is. None: runs/sft for the model tiny, else --model, if it is a causal
    LM."""
    judge: str | None = None
    """A language model, or module:function, that is asked which response is better: one more baseline
    (common/ai_feedback.py)."""
    behavior_policies: tuple[str, ...] = ()
    """The K causal LMs pi'_k, where rows have no column chosen_behavior_logprobs and its like."""
    expected_reward_samples: int = 0
    """Responses of the policy to each training prompt, to whose mean reward e is regressed; 0: eq. 6
    alone."""
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
    """Tokens of a prompt with one response; longer ones are dropped."""
    share_prompt: bool = True
    """Compute a prompt once for its responses; --no-share-prompt: a row a response."""
    eval_every: int = 250
    """Steps between held-out accuracies; 0: only before and after training."""
    save_every: int = 250
    """Steps between checkpoints, of which the last is kept; 0: none."""
    length_prompts: int = 50
    """Held-out prompts with 8 sampled responses each, for the correlation of length and score, and e; 0:
    none."""
    max_new_tokens: int = 32
    """Longest of these responses."""
    slots: int = 64
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    compare_with: str = "runs/reward"
    """A run of reward.py or of this script to draw beside this one, if it is there."""
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
    check_flags(args, ("n_policies", n_policies(args) > args.n_others, "more than --n-others"))
    if args.n_others * args.ratio_clip >= n_policies(args):
        raise InputError(
            f"--n-others {args.n_others} times --ratio-clip {args.ratio_clip} reaches --n-policies "
            f"{n_policies(args)}: r's coefficient in eq. 8 could vanish or turn negative; raise --n-policies"
        )
    if len(args.behavior_policies) not in (0, args.n_others):
        raise InputError(f"--behavior-policies: {len(args.behavior_policies)} for --n-others {args.n_others}")


def n_policies(args):
    return args.n_others + 1 if args.n_policies is None else args.n_policies


def comparison_loss(rewards, expected, batch, n, args):
    """(loss, regression, pairs ranked as labelled, pairs) of a micro-batch: sums over its comparisons of eq.
    6 and of e's squared error, divided by the step's number of comparisons.

    rewards: (responses,), r(x, y), samples included. expected: (comparisons,), e(x)."""
    zero = rewards.sum() * 0 + expected.sum() * 0  # connects every weight, also on a rank without comparisons
    if not batch.comparisons:
        return zero, zero.detach(), 0, 0
    sizes = torch.tensor(batch.sizes, device=rewards.device)
    ratios = torch.cat([c.ratios for c in batch.comparisons]).to(rewards.device)  # (responses, K)
    advantages = losses.advantage_score(rewards, expected.repeat_interleave(sizes), ratios, n_policies(args))
    of_one, results, start = [], [], 0  # of_one: (better, worse) of the comparisons that are one pair
    for c, size in zip(batch.comparisons, batch.sizes):
        pairs = [(start + better, start + worse) for better, worse in labelled_pairs(c)]
        if len(pairs) == 1:
            of_one += pairs
        elif pairs:
            better, worse = torch.tensor(pairs, device=rewards.device).T
            loss, numbers = losses.advantage_model_loss(advantages[better], advantages[worse], args.bound)
            results.append((loss / n, numbers))
        start += size
    if of_one:
        better, worse = torch.tensor(of_one, device=rewards.device).T
        a_c, a_r = advantages[better], advantages[worse]
        results.append(losses.advantage_model_loss(a_c, a_r, args.bound, n_rows=n))
    regression = zero
    if args.expected_reward_samples:
        parts = zip(batch.comparisons, rewards.detach().split(batch.sizes), expected)
        samples = [(part[len(c.response_ids) :], e) for c, part, e in parts]
        regression = zero + sum((e - part.mean()) ** 2 for part, e in samples if len(part)) / n
    n_correct, n_pairs = (sum(x[key] for _, x in results) for key in ("n_correct", "n_rows"))
    return zero + sum(loss for loss, _ in results), regression, n_correct, n_pairs


def read_head(model, batch):
    """(r at the end of every response, e at the end of every prompt)."""
    where = torch.cat([batch.response_ends, batch.prompt_ends], 1)
    out = model.head_outputs(batch.input_ids, where, batch.position_ids, batch.attention_mask)
    n = batch.response_ends.shape[1]
    return out[:n, 0], out[n:, 1]


def update(model, optimizer, comparisons, pad_id, args, device):
    """One optimiser step on `comparisons`, over all ranks. Returns (loss, squared error of e, training
    accuracy, gradient norm); when one of them is not finite, the weights stay as they were."""
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(4, device=device)
    for batch in my_comparison_batches(comparisons, pad_id, args.micro_batch_size, args.share_prompt, device):
        rewards, expected = read_head(model, batch)
        loss, regression, *numbers = comparison_loss(rewards, expected, batch, len(comparisons), args)
        # FSDP averages gradients over ranks, the loss is their sum
        ((loss + regression) * dist.world_size()).backward()
        parts = (loss.detach(), regression.detach(), *numbers)
        sums += torch.stack([torch.as_tensor(x, device=device) for x in parts])
    loss, regression, n_correct, n_pairs = dist.all_sum(*sums)
    grad_norm = dist.clip_grad_norm(model, args.max_grad_norm)
    if math.isfinite(loss + regression) and math.isfinite(grad_norm):  # the same on all ranks
        optimizer.step()
    return loss, regression, n_correct / max(1, n_pairs), grad_norm


@torch.no_grad()
def outputs_of(model, comparisons, pad_id, args, device):
    """(r of each response, e) of each comparison, on every rank."""

    def outputs(batch):
        rewards, expected = read_head(model, batch)
        return [(part.tolist(), e) for part, e in zip(rewards.split(batch.sizes), expected.tolist())]

    how = (pad_id, args.micro_batch_size, args.share_prompt, device)
    return of_each_comparison(comparisons, my_comparison_batches(comparisons, *how), outputs)


def evaluate(model, held_out, pad_id, args, device):
    """(figures, rows): the measures of metrics.pair_figures on the held-out comparisons, and their
    advantages, all ratios taken as 1."""
    rows = [comparisons.describe(c) for c in held_out]
    for row, (rewards, e) in zip(rows, outputs_of(model, held_out, pad_id, args, device)):
        rewards = torch.tensor(rewards)
        advantages = models.advantages(model, rewards, torch.full_like(rewards, e))
        for response, advantage in zip(row["responses"], advantages.tolist()):
            response["score"] = advantage
    return metrics.pair_figures(rows), rows


def from_policy(name, train, held_out, columns, tokenizer, args, device):
    """What other models are asked for before training, as JSON for run.cached: baselines on the held-out
    pairs (`before`), `ratios` (comparisons, responses, K), `samples` for the regression of e and
    `held_out_samples`, 8 responses to each of some prompts."""
    if args.behavior_policies:
        columns = behavior_logprobs(train, tokenizer, args, device)
    policy = name and dist.shard(models.load_policy(name, tokenizer, seed=args.seed), device)
    ask = (tokenizer.pad_token_id, args.micro_batch_size, device)
    answers = {"before": evaluation.baselines(policy, held_out, *ask)}
    answers |= {"ratios": [], "samples": [], "held_out_samples": []}
    if args.judge:
        answers["before"] |= ai_feedback.baseline(args.judge, held_out, device)
    if policy is None:
        return answers
    if args.n_others:
        ours = comparisons.seq_logprobs(policy, train, *ask)
        ratios = [(x[:, None] - y).exp() for x, y in zip(ours, columns)]
        answers["before"]["ratio/clipped"] = (torch.cat(ratios) > args.ratio_clip).double().mean().item()
        answers["ratios"] = [x.clamp(max=args.ratio_clip).tolist() for x in ratios]
    prompts = comparisons.one_of_each_prompt(held_out)[: args.length_prompts]
    for key, some, n in (("samples", train, args.expected_reward_samples), ("held_out_samples", prompts, 8)):
        if n and some:
            options = (tokenizer, n, args.max_new_tokens, dist.seed_of(args.seed, key), args.slots)
            found = evaluation.policy_samples(policy, some, *options)
            answers[key] = [[ids.tolist() for ids in of_prompt] for of_prompt in found]
    return answers


def behavior_columns(comparisons, args):
    """log pi'_k(y | x) of every response, (responses, K) for each comparison, from the columns
    chosen_behavior_logprobs and rejected_behavior_logprobs (of a ranking: behavior_logprobs of each
    response), lists of K numbers or more."""
    found = []
    for c in comparisons:
        try:
            values = [x[: args.n_others] for x in column(c, "behavior_logprobs")]
            found.append(torch.tensor(values, dtype=torch.float32).reshape(len(c.texts), args.n_others))
            if not (found[-1] <= 0).all():  # NaN, or a probability without its logarithm
                raise ValueError
        except (TypeError, ValueError, RuntimeError):
            wanted = "chosen_behavior_logprobs and rejected_behavior_logprobs"
            mend = f"lists of {args.n_others} numbers of at most 0, or --behavior-policies"
            raise InputError(f"{c.row.where}: --n-others wants {wanted}, {mend}") from None
    return found


def behavior_logprobs(comparisons, tokenizer, args, device):
    """The same from --behavior-policies."""
    columns = []
    for name in args.behavior_policies:
        model = dist.shard(models.load_policy(name, tokenizer), device)
        ask = (tokenizer.pad_token_id, args.micro_batch_size, device)
        columns.append(seq_logprobs(model, comparisons, *ask))
        del model
        gc.collect()  # one policy at a time: its methods are bound to it, a cycle that holds its weights
    return [torch.stack(of_one, 1) for of_one in zip(*columns)]


def with_answers(train, held_out, answers, args):
    """(training comparisons with ratios and samples, held-out prompts with samples)."""
    n, k = args.expected_reward_samples, args.n_others
    for i, c in enumerate(train):
        ratios = torch.tensor(answers["ratios"][i]) if k else torch.zeros(len(c.response_ids), 0)
        samples = [torch.tensor(ids, dtype=torch.int32) for ids in answers["samples"][i]] if n else []
        # Samples enter no advantage: their ratios only fill the place
        train[i] = c._replace(ratios=torch.cat([ratios, torch.ones(len(samples), k)]), samples=tuple(samples))
    prompts = zip(comparisons.one_of_each_prompt(held_out), answers["held_out_samples"])
    return train, [comparisons.with_samples_only(c, found) for c, found in prompts if found]


def policy_figures(model, samples, tokenizer, args, device):
    """(figures, length correlations) from the policy's own responses to held-out prompts: is e(x) the mean r
    of them, as eq. 7 says? `expected/bias` and `expected/rmse` are of e - mean r, over prompts, in standard
    deviations of r within a prompt; the samples' own noise is taken off the second. On the tiny world also
    the correlation of e with the policy's mean true reward on a prompt."""
    if not samples:
        return {}, []
    rows, errors, within, noise, gold = [], [], [], [], []
    is_tiny = data.is_tiny(args.eval_dataset or args.dataset)
    for c, (rewards, e) in zip(samples, outputs_of(model, samples, tokenizer.pad_token_id, args, device)):
        responses = [{"tokens": len(ids), "score": r} for ids, r in zip(c.samples, rewards)]
        rows.append({"responses": responses})
        rewards = torch.tensor(rewards)
        if len(rewards) > 1:
            errors.append(e - rewards.mean())
            within.append(rewards.var())
            noise.append(rewards.var() / len(rewards))  # of the mean of so few samples
        if is_tiny and c.samples:
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in c.samples]
            golds = [tiny.gold_score(c.prompt[-1]["content"], text) for text in texts]
            gold.append((float(e), sum(golds) / len(golds)))
    if not errors:
        return {}, []
    errors, deviation = torch.stack(errors), torch.stack(within).mean().sqrt()
    lengths = metrics.length_correlations(rows)
    rmse = (errors.square().mean() - torch.stack(noise).mean()).clamp(min=0).sqrt()
    figures = {"expected/bias": errors.mean() / deviation, "expected/rmse": rmse / deviation}
    figures |= metrics.length_figures(lengths)
    figures |= {"gold/expected_correlation": metrics.correlation(*zip(*gold))} if gold else {}
    return {key: float(value) for key, value in figures.items()}, lengths


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # 2. data: every rank has the same comparisons, and takes its share of each optimiser step's
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    policy = models.sft_model(args.model, args.policy)
    for name in filter(None, (policy, *args.behavior_policies)):  # the model's own vocabulary is its own
        models.check_causal_lm(name, tokenizer if name != args.model else None, args.chat_template)
    if policy and (args.length_prompts or args.expected_reward_samples):
        generate.check_sampled(policy, "--length-prompts 0 --expected-reward-samples 0 does without samples")
    if args.judge:
        ai_feedback.check_labeler(args.judge, "--judge")
    options = (args.max_length, args.min_score_gap, args.max_pairs_per_prompt)
    load = lambda spec, split: comparisons.load(spec, split, tokenizer, *options)  # noqa: E731
    train, held_out = data.train_and_held_out(args, load)
    prints = [comparisons.fingerprint(some) for some in (train, held_out)]
    data.check_same(args.dataset, tuple(prints))
    columns = behavior_columns(train, args) if args.n_others and not args.behavior_policies else []
    if (args.n_others or args.expected_reward_samples) and policy is None:
        raise InputError(f"{args.model} is no causal LM: name the --policy that ratios and e are of")
    table = comparisons.statistics(train) + comparisons.statistics(held_out, " (held out)")
    metrics.print_table(table)
    if args.balance_categories and not any(c.category for c in train):
        raise InputError(f"--balance-categories: {args.dataset} has no column category")
    steps_per_epoch = math.ceil(len(train) / args.batch_size)
    total_steps = args.max_steps or max(1, round(args.epochs * steps_per_epoch))

    # 3. models
    model = models.load_scorer(args.model, tokenizer, 2, args.gradient_checkpointing, args.seed)
    of_scores = {"n_policies": n_policies(args), "n_others": args.n_others, "bound": args.bound}
    model.config.advantage_model = of_scores
    models.check_room(args.max_length, args.model, model.config)
    model = dist.shard(model, device)
    if args.share_prompt:
        models.check_shared_prompt(model, args.max_length)
    key = {"models": [models.identity(x) for x in (args.model, policy) if x]}
    key |= {"judge": args.judge and ai_feedback.identity(args.judge)}
    key |= {"behavior": [models.identity(x) for x in args.behavior_policies]}
    key |= {"ratios": [args.n_others, args.ratio_clip], "n": args.expected_reward_samples}
    key |= {"samples": [args.length_prompts, args.max_new_tokens, args.seed]}
    key |= {"data": prints}
    start_run(args, "advantage_model", state, held_out=prints[1])  # only now is an old run replaced
    ask = (policy, train, held_out, columns, tokenizer, args, device)
    answers = cached(args, key, lambda: from_policy(*ask))
    gc.collect()  # the policies, whose methods are bound to them: cycles
    before, (train, samples) = answers["before"], with_answers(train, held_out, answers, args)
    dtype = models.export_dtype(args.model, args.save_dtype)

    # 4. optimisers
    betas, decay = (0.9, 0.95), args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=decay, fused=True)
    checkpoint, saved = f"{args.output_dir}/checkpoint", None
    if state == "resume":
        saved = dist.load_checkpoint(checkpoint, {"advantage": (model, optimizer)})
    step = saved["step"] if saved else 0
    log = metrics.Metrics(args.output_dir, keep_rows=saved["logged_rows"] if saved else None)

    # 5. loop
    if saved:
        before = saved["before"]
    else:
        before |= evaluate(model, held_out, tokenizer.pad_token_id, args, device)[0]
        log.log(0, 0, **before)
    bar, order_of = metrics.progress(total_steps, step, "advantage"), None
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
        results = update(model, optimizer, batch, tokenizer.pad_token_id, args, device)
        loss, regression, accuracy, grad_norm = results
        if not (math.isfinite(loss + regression) and math.isfinite(grad_norm)):
            bar.close()
            raise InputError(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm}. The step was not taken; lower "
                f"--lr or look at the data. The last good checkpoint, if there is one, is in {checkpoint}"
            )
        seconds = time.time() - start
        row = {"loss/advantage": loss, "train/accuracy": accuracy, "optim/grad_norm": grad_norm}
        row |= {"loss/expected_reward": regression} if args.expected_reward_samples else {}
        row |= {"optim/lr": lr, "data/comparisons": len(batch)}
        row |= {"perf/comparisons_per_s": len(batch) / seconds}
        step += 1
        if args.eval_every and step % args.eval_every == 0 and step < total_steps:
            row |= evaluate(model, held_out, tokenizer.pad_token_id, args, device)[0]
        log.log(step, epoch, **row)
        speed = row["perf/comparisons_per_s"]
        bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}", rows_s=f"{speed:.0f}")
        bar.update()
        if args.save_every and step % args.save_every == 0:
            resume_state = {"step": step, "before": before, "logged_rows": log.n_rows}
            dist.save_checkpoint(checkpoint, step, {"advantage": (model, optimizer)}, resume_state)
    bar.close()

    # 6. save
    dist.round_weights(model, dtype)  # held-out figures are of what is exported
    after, rows = evaluate(model, held_out, tokenizer.pad_token_id, args, device)
    after |= {**metrics.known_figures(rows), "eval/category_spread": metrics.category_spread(rows)}
    figures, lengths = policy_figures(model, samples, tokenizer, args, device)
    after |= figures
    if not math.isfinite(after.get("eval/nll", 0.0)):
        raise InputError(f"held-out loss {after['eval/nll']} after step {step}: no export; lower --lr")
    after = {key: value for key, value in after.items() if not math.isnan(value)}  # of nothing, or no spread
    log.log(step, (step - 1) // steps_per_epoch, **after)
    models.read_at_end_token(model, tokenizer)
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
        panels = {"loss": ["loss/advantage", "eval/nll"], "accuracy": ["train/accuracy", "eval/accuracy"]}
        metrics.plot_metrics(args.output_dir, {**panels, "norm": ["optim/grad_norm"]})
        figures = {"before": before, "after": after, "data": table}
        write_json(f"{args.output_dir}/summary.json", {"steps": step, **figures})  # last
        metrics.say_if_worse(before, after)
        models.report_export(f"{args.output_dir}/model", args.model, args.seed)


RECIPES = {
    "tiny": (
        "the tiny world, from random weights: the default, under a minute on two CPU cores",
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",  # a chat model that two CPU cores can train
            epochs=1.0,  # section 4.1, as the schedule and the warm-up
            lr=1e-5,  # Llama 2's (arXiv:2307.09288, section 3.2.2) of a reward model
            lr_schedule="cosine_with_min_lr",
            warmup_ratio=0.1,
            batch_size=16,  # ours, as all below: a few hundred comparisons are some twenty steps
            micro_batch_size=4,
            max_length=1024,
            length_prompts=16,
            max_new_tokens=256,
            slots=32,
        ),
    ),
    "advantage_model": (
        "the paper's run on HH-RLHF, from another model of 7B",
        Args(
            model="Qwen/Qwen2.5-7B-Instruct",  # the paper's BLOOMZ-7B (section 4.1) has ALiBi, without SDPA
            dataset="Anthropic/hh-rlhf",
            epochs=1.0,  # section 4.1, as all below
            lr=5e-6,
            lr_schedule="cosine_with_min_lr",
            warmup_ratio=0.1,
            weight_decay=0.0,  # not said
            batch_size=180,
            bound=2.5,  # section 3.1
            micro_batch_size=4,
            max_length=2048,
            max_new_tokens=512,
            slots=16,
            gradient_checkpointing=True,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
