"""Iterative DPO: sample n responses to a prompt, take the best against the worst, prefer one to the other.

    h(x, y)    = beta (log pi_theta(y | x) - log pi_0(y | x))         the reward that the policy implies
    L(theta)   = -(1/n) sum log sigmoid(h(x, y_w) - h(x, y_l))        over the n pairs of an optimiser step
    y_w, y_l   = argmax, argmin over k of r(x, y_k) - lambda |y_k|,   y_1 .. y_n ~ pi_t(. | x)

(DPO, arXiv:2305.18290, eq. 7; "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863, section
3.) Each iteration draws fresh prompts, lets the newest policy answer them at several temperatures, an oracle
rank the answers, and trains on the pairs. pi_0, the SFT model, stays the reference throughout; its log
probabilities are computed once for each pair, and it is freed before training. `--iterations 0` is offline
DPO on given pairs.

Reads a policy, an oracle (--scorer) and prompts; writes runs/dpo_iterative: pool.jsonl (every response
sampled), pairs.jsonl, versions/ (each iteration's model and its samples), model/ (the last one),
metrics.jsonl, samples.jsonl, plots, summary.json.

    python dpo_iterative.py                                  the tiny world, under a minute on two CPU cores
    python dpo_iterative.py --iterations 0 --epochs 1 --offline-data tiny --output-dir runs/dpo_all_pairs
    torchrun --nproc-per-node 8 dpo_iterative.py rlhf_workflow --scorer runs/reward

Differs from the paper: a pair whose better response did not end is dropped; the optimiser and the learning
rate's schedule begin anew in each iteration, as in the authors' scripts.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import comparisons, data, dist, evaluation, generate, losses, metrics, models, pool, scorers
from common.batches import Comparison, my_comparison_batches, of_each_comparison
from common.errors import InputError
from common.run import check_flags, find_run, launch, skip, start_run, write_json


@dataclass
class Args:
    model: str = "runs/sft"
    """The first policy, pi_0: a run directory, a model folder, a hub name."""
    reference: str = "sft"
    """What log probabilities are counted from: sft: --model, in every iteration; last: the newest policy, as
    the authors' scripts have it; or a model."""
    scorer: str = "runs/reward"
    """The oracle: a run of reward.py (--kind pairwise too: each response against all others) or
    advantage_model.py, a hub reward model, or module:function."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    offline_data: str | None = None
    """Pairs or rankings, in reward.py's formats: they join the first iteration's pairs, with --start-from sft
    every iteration's, and are all there is with --iterations 0."""
    offline_pairs: int | None = None
    """So many of them. None: all."""
    output_dir: str = "runs/dpo_iterative"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    iterations: int = 3
    """Rounds of sampling and training; 0: train on --offline-data alone."""
    prompts_per_iteration: int | None = 500
    """Prompts of a round, that no round before had. None: an equal part of all."""
    n_samples: int = 8
    """Responses to a prompt, divided equally among samplers and temperatures."""
    temperatures: tuple[float, ...] = (1.0, 0.7)
    """Of the samples."""
    enhancer: str | None = None
    """Exploration by a second sampler, for half of the responses: a model, or previous: the version before
    the newest one."""
    top_p: float = 1.0
    """Mass of the nucleus to sample from; 1 is off."""
    max_new_tokens: int = 32
    """Longest response."""
    slots: int = 256
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    chunk_prompts: int = 512
    """Prompts between two writes to the pool while sampling: what a crash can cost."""
    length_penalty: float = 0.0
    """lambda: taken off a score for each character of a response before the best and worst are chosen."""
    start_from: Literal["last", "sft"] = "last"
    """Train the newest policy on this iteration's pairs, or --model on all pairs so far."""
    beta: float = 0.5
    """How far preferences may pull the policy from the reference: less with a larger beta."""
    label_smoothing: float = 0.0
    """Share of labels taken to be wrong (conservative DPO)."""
    epochs: float = 2.0
    """Passes over the pairs of an iteration."""
    lr: float = 1e-4
    """Peak learning rate of each iteration."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """After the warm-up: a cosine to 0, a cosine to a tenth of the peak, a line to 0, or constant."""
    warmup_ratio: float = 0.03
    """Share of an iteration's steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 32
    """Pairs of an optimiser step over all ranks."""
    micro_batch_size: int = 32
    """Pairs of a forward on one rank, at most."""
    score_batch_size: int = 64
    """Responses of a forward of the oracle on one rank."""
    max_length: int = 128
    """Tokens of a prompt with a response; offline pairs with a longer one are dropped."""
    share_prompt: bool = True
    """Compute a prompt once for both its responses; --no-share-prompt: a row a response."""
    tie_margin: float | None = None
    """Held-out scores that differ by no more than this tie. None: 0.1 standard deviations of the first
    policy's; of a pairwise oracle, whose scores are probabilities, 0.1."""
    save_every: int = 50
    """Steps between checkpoints, of which the last is kept; 0: none."""
    eval_prompts: int = 1000
    """Held-out prompts to answer once by each version, at temperature 1; 0: none."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights in model/ (versions/ have float32). None: the dtype of the model that training starts
    from."""
    seed: int = 0
    """Of the prompts' order, the samples and the data order."""
    resume: bool = False
    """Go on with the run in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way, its pool included."""


def check(args):
    """What can be known to be wrong before anything is loaded."""
    warm = bool(args.temperatures) and all(math.isfinite(t) and t > 0 for t in args.temperatures)
    ways = len(args.temperatures) * (2 if args.enhancer else 1)
    own = args.offline_data and not data.is_tiny(args.offline_data)
    astray = own and not args.iterations and args.eval_prompts and data.is_tiny(args.dataset)
    check_flags(
        args,
        ("iterations", args.iterations >= 1 or args.offline_data, "1 or more without --offline-data"),
        ("n_samples", args.n_samples >= max(2, ways), f"{max(2, ways)} or more, for so many ways to sample"),
        ("temperatures", warm, "one or more above 0: greedy responses are all the same"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("label_smoothing", 0 <= args.label_smoothing < 0.5, "0 or more, below 0.5"),
        ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
        ("dataset", not astray, "prompts to evaluate on, as --offline-data is your own, or --eval-prompts 0"),
    )


# -- sample ----------------------------------------------------------------------------------------
def parts(latest, version, args):
    """[(model, temperature, number of responses)]: who answers each prompt of an iteration."""
    samplers = [latest]
    if args.enhancer == "previous":
        samplers += [f"{args.output_dir}/versions/{version - 1}" if version > 1 else args.model]
    elif args.enhancer:
        samplers += [args.enhancer]
    return [
        (name, temperature, n)
        for name, of_sampler in zip(samplers, equal_parts(args.n_samples, len(samplers)))
        for temperature, n in zip(args.temperatures, equal_parts(of_sampler, len(args.temperatures)))
        if n
    ]


def equal_parts(n, k):
    """n as k numbers that differ by 1 at most, the larger ones first."""
    return [n // k + (i < n % k) for i in range(k)]


def sample_into_pool(responses, held, latest, tokenizer, prompts, version, args, device):
    """The next iteration's responses, all that the pool does not hold yet. held: [the newest policy], if it
    is loaded already, else [None]; emptied, so that no caller keeps it while another one is loaded. Returns
    it if it still is."""
    model = held.pop()
    ways, loaded = parts(latest, version, args), latest if model else None
    plan = [(temperature, n) for _, temperature, n in ways]
    todo = pool.chunks_to_sample(responses, prompts, version + 1, args, plan)
    for (name, temperature, n), chunks in zip(ways, todo):
        if chunks and loaded != name:
            model, loaded = None, name
            model = pool.load(name, tokenizer, args, device, args.gradient_checkpointing)
        if chunks:
            about = {"iteration": version + 1, "model": name, "temperature": temperature}
            pool.sample(responses, model, tokenizer, chunks, n, about, args)
    return model if loaded == latest else None


# -- pairs -----------------------------------------------------------------------------------------
def best_against_worst(responses, prompts, iteration, args):
    """(pairs, {reason: how many prompts gave none}) of an iteration's responses: of each prompt the best and
    the worst by score less the length penalty."""
    groups, pairs = {prompt.key: [] for prompt in prompts}, []
    dropped = dict.fromkeys(("same", "tied", "unfinished"), 0)
    for row in responses:
        if row["iteration"] == iteration and pool.key_of(row) in groups:
            groups[pool.key_of(row)].append(row)
    for prompt in prompts:
        rows = groups[prompt.key]
        if not rows:
            continue
        scores = torch.tensor([row["score"] for row in rows], dtype=torch.float64)
        characters = torch.tensor([len(row["response"]) for row in rows])
        scores = losses.length_penalty(scores, characters, args.length_penalty)
        places = [scores.argmax().item(), scores.argmin().item()]
        best, worst = (rows[i] for i in places)
        if len({row["response"].strip() for row in rows}) == 1:
            dropped["same"] += 1
        elif scores.max() == scores.min():
            dropped["tied"] += 1
        elif best["response"].strip() == worst["response"].strip():
            dropped["same"] += 1
        elif not best["finished"] or not best["response"].strip():
            dropped["unfinished"] += 1  # it would teach not to end
        else:
            ids = [torch.tensor(row["response_ids"], dtype=torch.int32) for row in (best, worst)]
            about = {"row": prompt.row, "source": f"iteration {iteration}", "category": prompt.category}
            about |= {"grades": scores[places].tolist(), "ranks": torch.tensor([0, 1])}
            texts, prompt_ids = [best["response"], worst["response"]], torch.tensor(prompt.ids)
            pairs.append(Comparison(prompt.turns, texts, prompt_ids.int(), ids, **about))
    return pairs, dropped


def offline_pairs(tokenizer, held_out, args):
    """(training, held-out) pairs of --offline-data; of a ranking, the best against the worst. No prompt of
    the held-out prompts is trained on."""
    if not args.offline_data:
        return [], []
    train = comparisons.load(args.offline_data, "train", tokenizer, args.max_length)
    if data.is_tiny(args.offline_data):
        judged = comparisons.load(args.offline_data, "test", tokenizer, args.max_length)
    else:
        train, judged = data.hold_out(train)
    train = data.without_prompts_of(train, held_out, args.offline_data)
    sides = [[two_of(c) for c in some] for some in (train, judged)]
    data.check_same(args.offline_data, tuple(map(comparisons.fingerprint, sides)))
    return generate.a_part(sides[0], args.offline_pairs), generate.a_part(sides[1], 500)


def two_of(c) -> Comparison:
    """A comparison of its best and its worst response, or, of a pair with a soft label, as it is."""
    if len(c.texts) == 2:
        return c
    best, worst = (int(i) for i in (c.ranks.argmin(), c.ranks.argmax()))
    texts, ids = ([some[best], some[worst]] for some in (c.texts, c.response_ids))
    grades, kept = c.grades and [c.grades[best], c.grades[worst]], (c.kept[best], c.kept[worst])
    return c._replace(texts=texts, response_ids=ids, ranks=torch.tensor([0, 1]), grades=grades, kept=kept)


# -- the reference ---------------------------------------------------------------------------------
def with_reference(pairs, name, tokenizer, args, device):
    """The pairs with their log probabilities under the reference, which are computed once for each pair and
    kept in reference.json by the model and by the pair's ids, which tell data and chat template. The
    reference is loaded only if one is missing, and freed."""
    path, known = Path(args.output_dir, "reference.json"), {}
    if dist.is_main() and path.exists():
        with contextlib.suppress(ValueError):  # of a file that something else wrote
            known = json.loads(path.read_text())
    known = dist.gather([known if isinstance(known, dict) else {}])[0]  # rank 0's
    seed = args.seed if name == "tiny" else None  # its weights are a function of it
    version = scorers.version_of(name, [models.identity(name), seed, args.share_prompt])
    if known and version not in known and args.reference != "last":
        if dist.is_main():
            print(f"{path} is of another reference: its pairs are computed anew")
        known = {}
    logprobs, keys = known.setdefault(version, {}), [pair_key(pair) for pair in pairs]
    todo = {key: pair for key, pair in zip(keys, pairs) if key not in logprobs}
    if todo:
        model = pool.load(name, tokenizer, args, device)
        found = pair_logprobs(model, list(todo.values()), tokenizer.pad_token_id, args, device)
        logprobs |= {key: x.tolist() for key, x in zip(todo, found)}
        model = None
        gc.collect()  # now, not when the optimiser has taken its place already
        if dist.is_main():
            write_json(path, known)
    return [pair._replace(ref_logprobs=torch.tensor(logprobs[key])) for key, pair in zip(keys, pairs)]


def pair_key(pair) -> str:
    pieces = [ids.tolist() for ids in (pair.prompt_ids, *pair.response_ids)]
    return hashlib.blake2b(json.dumps(pieces).encode(), digest_size=12).hexdigest()


@torch.no_grad()
def pair_logprobs(model, pairs, pad_id, args, device):
    """log pi(y | x) of both responses of each pair: a list of (2,), on every rank."""
    if args.share_prompt:
        models.check_shared_prompt(model, args.max_length)
    batches = my_comparison_batches(pairs, pad_id, args.micro_batch_size, args.share_prompt, device)
    both = lambda batch: models.response_logprobs(model, batch).view(-1, 2).tolist()  # noqa: E731
    return [torch.tensor(x) for x in of_each_comparison(pairs, batches, both)]


# -- train -----------------------------------------------------------------------------------------
def pairs_loss(logprobs, pairs, n, args):
    """losses.dpo_loss of pairs with known reference log probabilities. logprobs: (2 pairs,)."""
    chosen, rejected = logprobs.view(-1, 2).T
    references = [pair.ref_logprobs for pair in pairs] or [torch.zeros(2)]
    ref_chosen, ref_rejected = torch.stack(references)[: len(pairs)].to(logprobs).T
    labels = [1.0 if pair.preference is None else pair.preference for pair in pairs]
    soft = {"preference": torch.tensor(labels).to(logprobs), "label_smoothing": args.label_smoothing}
    return losses.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, args.beta, **soft, n_rows=n)


SUMS = ("loss_sum", "n_correct", "chosen_reward_sum", "rejected_reward_sum")


def update(model, optimizer, pairs, pad_id, args, device):
    """One optimiser step on `pairs`, over all ranks. Returns its figures, means over the pairs; where the
    loss or the gradient's norm is not finite, the weights stay as they were."""
    optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(len(SUMS) + 2, dtype=torch.float64)
    for batch in my_comparison_batches(pairs, pad_id, args.micro_batch_size, args.share_prompt, device):
        logprobs = models.response_logprobs(model, batch)  # (2 pairs of this rank,)
        loss, of_batch = pairs_loss(logprobs, batch.comparisons, len(pairs), args)
        (loss * dist.world_size()).backward()  # FSDP averages gradients over ranks, the loss is their sum
        both = logprobs.detach().view(-1, 2).sum(0).tolist()
        sums += torch.tensor([*(float(of_batch[key]) for key in SUMS), *both], dtype=torch.float64)
    numbers = [x / len(pairs) for x in dist.all_sum(*sums)]
    grad_norm = dist.clip_grad_norm(model, args.max_grad_norm)
    if math.isfinite(numbers[0]) and math.isfinite(grad_norm):  # the same on all ranks
        optimizer.step()
    names = ("loss/dpo", "train/accuracy", "reward/chosen", "reward/rejected")
    row = dict(zip((*names, "logps/chosen", "logps/rejected"), numbers))
    row["reward/margin"] = row["reward/chosen"] - row["reward/rejected"]
    return row | {"optim/grad_norm": grad_norm}


def train(model, pairs, tokenizer, iteration, log, first_step, args, device):
    """Train the model on the pairs, if any, and write versions/ITERATION. Goes on from a checkpoint of this
    iteration. Returns the run's number of optimiser steps so far."""
    checkpoint = f"{args.output_dir}/checkpoint"
    steps_per_epoch = math.ceil(len(pairs) / args.batch_size)
    n_steps = max(1, round(args.epochs * steps_per_epoch)) if pairs else 0
    if args.share_prompt:
        models.check_shared_prompt(model, args.max_length)
    betas, decay = (0.9, 0.95), args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=decay, fused=True)
    done, order_of = 0, None
    if dist.checkpoint_state(checkpoint).get("iteration") == iteration:
        done = dist.load_checkpoint(checkpoint, {"policy": (model, optimizer)})["done"]
    bar = metrics.progress(n_steps, done, f"iteration {iteration}")
    for done in range(done, n_steps):
        begin = time.time()
        epoch, index = divmod(done, steps_per_epoch)
        if epoch != order_of:  # each epoch's order, one for all ranks
            seed, order_of = dist.seed_of(args.seed, "order", iteration, epoch), epoch
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        batch = [pairs[i] for i in order[index * args.batch_size : (index + 1) * args.batch_size]]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * dist.schedule(done + 1, n_steps, args)
        row = update(model, optimizer, batch, tokenizer.pad_token_id, args, device)
        if not (math.isfinite(row["loss/dpo"]) and math.isfinite(row["optim/grad_norm"])):
            bar.close()
            raise InputError(
                f"iteration {iteration}, step {done + 1}: loss {row['loss/dpo']}, gradient norm "
                f"{row['optim/grad_norm']}. The step was not taken; lower --lr or look at pairs.jsonl"
            )
        row |= {"optim/lr": optimizer.param_groups[0]["lr"], "data/pairs": len(batch)}
        row["perf/pairs_per_s"] = len(batch) / (time.time() - begin)
        log.log(first_step + done + 1, iteration, **row)
        numbers = {"loss": row["loss/dpo"], "margin": row["reward/margin"], "accuracy": row["train/accuracy"]}
        bar.set_postfix({key: f"{x:.3f}" for key, x in numbers.items()})
        bar.update()
        if args.save_every and (done + 1) % args.save_every == 0:
            state = {"iteration": iteration, "done": done + 1, "first_step": first_step}
            state["logged_rows"] = log.n_rows
            dist.save_checkpoint(checkpoint, first_step + done + 1, {"policy": (model, optimizer)}, state)
    bar.close()
    optimizer.zero_grad(set_to_none=True)  # what follows needs no gradients
    path = f"{args.output_dir}/versions/{iteration}"
    dist.save_model(model, tokenizer, path)
    return first_step + n_steps


# -- evaluate --------------------------------------------------------------------------------------
def study(model, version, before, tokenizer, held_out, judged, scorer, reference, args, device):
    """What a version does on held-out prompts and pairs: {"samples": one response to each prompt, "pairs":
    the implicit reward's figures on the pairs}. before: version 0's samples. A pairwise oracle's score is the
    probability that the response beats version 0's. reference: the one that training has, or --model."""
    found, pad_id = {"samples": [], "pairs": {}}, tokenizer.pad_token_id
    found["scorer"] = scorer and scorer.version
    asked = generate.a_part(held_out, args.eval_prompts)
    if judged:
        judged = with_reference(judged, reference, tokenizer, args, device)
        ours = torch.cat(pair_logprobs(model, judged, pad_id, args, device))
        _, numbers = pairs_loss(ours, judged, len(judged), args)
        means = {key: float(numbers[key]) / len(judged) for key in SUMS}
        found["pairs"] = {"pairs/loss": means["loss_sum"], "pairs/accuracy": means["n_correct"]}
        found["pairs"]["pairs/margin"] = means["chosen_reward_sum"] - means["rejected_reward_sum"]
    if not asked:
        return found
    seed = dist.seed_of(args.seed, "eval")
    with dist.consolidated(model):
        options = (1, args.max_new_tokens, 1.0, seed, 1.0, args.slots)
        answers = generate.sample_responses(model, tokenizer, [prompt.ids for prompt in asked], *options)
    pairs = [(prompt, response) for prompt, (response,) in zip(asked, answers)]
    if scorer.pairwise and version == 0:
        scores = [0.5] * len(pairs)
    elif scorer.pairwise:
        others = [generate.Response([], row["response"], row["finished"]) for row in before]
        both = [(prompt, r) for (prompt, ours), other in zip(pairs, others) for r in (ours, other)]
        scores = scorers.score(scorer, both, args.score_batch_size, device)[::2]
    else:
        scores = scorers.score(scorer, pairs, args.score_batch_size, device)
    is_tiny = data.is_tiny(args.eval_dataset or args.dataset)
    samples = [evaluation.describe_response(*pair, x, is_tiny) for pair, x in zip(pairs, scores)]
    documents = [generate.document(*pair) for pair in pairs]
    ours = theirs = models.seq_logprobs(model, documents, pad_id, args.score_batch_size, device)
    if version:
        first = pool.load(args.model, tokenizer, args, device)
        theirs = models.seq_logprobs(first, documents, pad_id, args.score_batch_size, device)
        first = None
        gc.collect()
    for row, a, b in zip(samples, ours, theirs):
        row["kl"] = a - b  # k1, of a whole response
    return found | {"samples": samples}


def figures(studies, version, args):
    """Means of a version's samples, its figures on the held-out pairs, and its samples against those of the
    first version and of the one before."""
    samples, out = studies[version]["samples"], dict(studies[version]["pairs"])
    same = pool.comparable(studies, version)
    columns = {"eval/score": "score", "gold/score": "gold", "gold/perfect": "perfect", "eval/kl": "kl"}
    out |= metrics.means(samples, {**columns, "sample/length": "tokens", "sample/finished": "finished"})
    if version and samples and 0 in same:
        out |= metrics.against(same[0], samples, args.tie_margin, "sft/")
    if version > 1 and samples and version - 1 in same:
        for key, column in (("eval/score", "score"), ("gold/score", "gold")):
            if key in out:
                out |= metrics.paired_figures(f"{key}_over_before", same[version - 1], samples, column)
    return out


def report(studies, version, args):
    """Print what a version can do, and which categories got worse."""
    if not dist.is_main():
        return
    print(f"version {version}:")
    for key, value in figures(studies, version, args).items():
        print(f"  {key}: {value:.4g}")
    same = pool.comparable(studies, version)
    if version - 1 in same:
        metrics.print_table(metrics.regressions(same[version - 1], same[version]))


def pool_figures(responses, pairs, dropped, iteration):
    """Of this iteration's responses, and of the pairs made of them."""
    rows, by_prompt = [row for row in responses if row["iteration"] == iteration], {}
    for row in rows:
        by_prompt.setdefault(pool.key_of(row), []).append(row["score"])
    out = {"pool/responses": len(rows), "pool/score": sum(row["score"] for row in rows) / len(rows)}
    for key, take in (("best", max), ("worst", min)):
        out[f"pool/{key}"] = sum(map(take, by_prompt.values())) / len(by_prompt)
    out["pool/finished"] = sum(row["finished"] for row in rows) / len(rows)
    out["pool/length"] = sum(len(row["response_ids"]) for row in rows) / len(rows)
    out["pool/characters"] = sum(len(row["response"]) for row in rows) / len(rows)
    out |= {"pairs/kept": len(pairs), **{f"pairs/{reason}": n for reason, n in dropped.items()}}
    for i, side in enumerate(("chosen", "rejected")) if pairs else ():
        out[f"pairs/{side}_score"] = sum(pair.grades[i] for pair in pairs) / len(pairs)
        out[f"pairs/{side}_length"] = sum(len(pair.response_ids[i]) for pair in pairs) / len(pairs)
    return out


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # 2. data
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    reference = {"sft": args.model}.get(args.reference, args.reference)
    enhancer = args.enhancer if args.enhancer != "previous" else None
    for name in (args.model, reference, enhancer):  # the model's own vocabulary is its own
        if name not in (None, "last"):
            models.check_causal_lm(name, tokenizer if name != args.model else None, args.chat_template)
            models.check_room(args.max_length, name)
    for name in filter(None, (args.model, enhancer)) if args.iterations or args.eval_prompts else ():
        generate.check_sampled(name)
    prompts, held_out = generate.train_and_held_out(args, tokenizer)
    offline, judged = offline_pairs(tokenizer, held_out, args)
    prompts = data.without_prompts_of(prompts, judged, args.dataset)
    n = args.prompts_per_iteration or max(1, len(prompts) // max(1, args.iterations))
    if n * args.iterations > len(prompts):
        raise InputError(
            f"{args.dataset}: {args.iterations} iterations of {n} fresh prompts need "
            f"{n * args.iterations}, there are {len(prompts)}: lower --iterations or --prompts-per-iteration"
        )

    # 3. models: the oracle stays, policies and the reference come and go
    scorer = None
    if args.iterations or args.eval_prompts:
        scorer = scorers.load_scorer(args.scorer, tokenizer, device, pairwise=True)
        if not scorer.same_tokens and dist.is_main():
            print(f"{args.scorer} has other tokens or another chat template: it scores the text")
        scorers.check_room(scorer, args.max_length)
        if args.tie_margin is None and scorer.pairwise:
            args = dataclasses.replace(args, tie_margin=0.1)
    model = None  # the newest policy, where it is loaded
    fixed_reference = args.model if reference == "last" else reference
    if args.share_prompt and state != "resume":  # now, not when all is sampled
        for name in dict.fromkeys([fixed_reference, args.model]):
            model = None  # before another one comes
            model = pool.load(name, tokenizer, args, device, args.gradient_checkpointing)
            models.check_shared_prompt(model, args.max_length)

    # 4. the pool, and where to go on
    asked = [prompt.key for prompt in generate.a_part(held_out, args.eval_prompts)]
    asked.append(comparisons.fingerprint(judged))
    start_run(args, "dpo_iterative", state, held_out=asked)  # only now is an old run in output_dir replaced
    versions, pool_file = Path(args.output_dir, "versions"), f"{args.output_dir}/pool.jsonl"
    studies, made = pool.versions_of(args, state)
    responses = pool.read(pool_file) if state == "resume" else []
    versions.mkdir(parents=True, exist_ok=True)
    pool.write(pool_file, responses)
    log, step = pool.resume_log(args, studies, made, "loss/dpo")
    checkpoint, last = f"{args.output_dir}/checkpoint", max(1, args.iterations)
    dtype = models.export_dtype(args.model, args.save_dtype)

    # 5. loop
    for version in range(last + 1):
        # study the newest policy
        latest = str(versions / str(version)) if version else args.model
        if version not in studies:
            if model is None:
                model = pool.load(latest, tokenizer, args, device, args.gradient_checkpointing)
            if version == last:
                dist.round_weights(model, dtype)  # as model/ has them
            before = studies[0]["samples"] if version else []
            about = (tokenizer, held_out, judged, scorer, fixed_reference, args, device)
            found = studies[version] = study(model, version, before, *about)
            log.log(step, version, **figures(studies, version, args))
            found |= {"step": step, "logged_rows": log.n_rows}
            if dist.is_main():
                write_json(versions / f"{version}.json", found)
        report(studies, version, args)
        iteration = version + 1
        if version == last or iteration in made:
            continue

        pairs, earlier = (offline if iteration == 1 else []), []
        if args.iterations:
            # sample responses to fresh prompts
            began = time.time()
            asked = generate.fresh_prompts(prompts, n, iteration, args.seed)
            options = (tokenizer, asked, version, args, device)
            held, model = [model], None
            model, sampled = sample_into_pool(responses, held, latest, *options), time.time()

            # score them, and pair the best with the worst
            pool.score(responses, scorer, prompts, args, device)
            made_now, dropped = best_against_worst(responses, asked, iteration, args)
            pairs = pairs + made_now
            row = pool_figures(responses, made_now, dropped, iteration)
            row |= {"perf/sample_s": sampled - began, "perf/score_s": time.time() - sampled}
            if not pairs:  # the next version is this one
                why = f"iteration {iteration}: no pair in {len(asked)} prompts: {dropped['same']} had one "
                why += f"response only, {dropped['tied']} one score only, of {dropped['unfinished']} the "
                why += "best did not end within --max-new-tokens"
                in_a_row = sum(found["step"] == step for found in studies.values())  # since the last step
                row |= skip(in_a_row, args.iterations, why)
            if dist.checkpoint_state(checkpoint).get("iteration") != iteration:
                log.log(step, iteration, **row)
        if args.start_from == "sft" and iteration > 1 and pairs:  # all pairs so far
            earlier = [*offline]
            for t in range(1, iteration):
                asked = generate.fresh_prompts(prompts, n, t, args.seed)
                earlier += best_against_worst(responses, asked, t, args)[0]

        # log probabilities under the reference, once; then train
        pi_0 = latest if reference == "last" else reference
        learnt = with_reference([*pairs, *earlier], pi_0, tokenizer, args, device)
        write_pairs(pairs, iteration, args)
        start = latest if args.start_from == "last" or not pairs else args.model
        if model is None or start != latest:
            model = None
            model = pool.load(start, tokenizer, args, device, args.gradient_checkpointing)
        step = train(model, learnt, tokenizer, iteration, log, step, args, device)

    # 6. save
    if dist.is_main():
        pool.save_last(args, last, dtype)
        rows = [{"version": v, **row} for v, found in studies.items() for row in found["samples"]]
        metrics.write_jsonl(f"{args.output_dir}/samples.jsonl", rows)
        panels = {"reward": ["eval/score", "gold/score", "pool/best", "pool/worst"]}
        panels |= {"length (tokens)": ["sample/length", "pairs/chosen_length", "pairs/rejected_length"]}
        metrics.plot_metrics(args.output_dir, panels, "iterations.png", x="iteration")
        panels = {"loss": ["loss/dpo"], "implicit reward": ["reward/chosen", "reward/rejected"]}
        metrics.plot_metrics(args.output_dir, {**panels, "accuracy": ["train/accuracy", "pairs/accuracy"]})
        curves = {"oracle": "eval/score", "true reward": "gold/score"}
        metrics.plot_frontier(args.output_dir, "eval/kl", curves)
        same = pool.comparable(studies, last)
        ends = {f"version {v}": same[v] for v in (0, last) if same.get(v)}
        metrics.plot_lengths(args.output_dir, ends)
        after = {str(version): figures(studies, version, args) for version in studies}
        table = metrics.regressions(same[0], same[last]) if 0 in same else []
        numbers = {"steps": step, "pool": len(responses), "versions": after, "categories": table}
        write_json(f"{args.output_dir}/summary.json", numbers)  # last
        if 0 in same:
            metrics.say_if_worse(after["0"], after[str(last)])
        models.report_export(f"{args.output_dir}/model", args.model, args.seed)


def write_pairs(pairs, iteration, args):
    """pairs.jsonl: the pairs that are new in an iteration, in a format that reward.py and --offline-data
    read; those of the iterations before stay."""
    if not dist.is_main():
        return
    path = f"{args.output_dir}/pairs.jsonl"
    rows = [row for row in metrics.read_jsonl(path) if row["iteration"] < iteration]
    for pair in pairs:
        row = {"prompt": pair.prompt, "chosen": pair.texts[0], "rejected": pair.texts[1]}
        row |= {"iteration": iteration, "source": pair.source, "category": pair.category}
        if pair.grades:
            row |= {"chosen_score": pair.grades[0], "rejected_score": pair.grades[1]}
        rows.append(row if pair.preference is None else {**row, "preference": pair.preference})
    metrics.write_jsonl(path, rows)


RECIPES = {
    "tiny": (
        "the tiny world, three iterations of 500 prompts: the default, under a minute on two CPU cores",
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            beta=0.1,  # RLHF Workflow, section 3.3, as lr
            lr=5e-7,
            warmup_ratio=0.1,  # Zephyr's (the alignment handbook)
            prompts_per_iteration=None,  # ours, as all below
            max_new_tokens=256,
            slots=32,
            batch_size=16,
            micro_batch_size=2,
            score_batch_size=8,
            max_length=1024,
            eval_prompts=200,
        ),
    ),
    "rlhf_workflow": (
        "RLHF Workflow's three iterations of 20,000 prompts; --length-penalty 0.001 for its concise model",
        Args(
            model="RLHFlow/LLaMA3-SFT",  # the authors' SFT model
            scorer="sfairXC/FsfairX-LLaMA3-RM-v0.1",  # the authors' Bradley-Terry reward model
            dataset="RLHFlow/prompt-collection-v0.1",  # of which the paper takes 60K, not named
            prompts_per_iteration=20_000,  # section 3.3, as all below
            max_new_tokens=2048,
            slots=16,
            beta=0.1,
            epochs=2.0,
            lr=5e-7,
            batch_size=128,
            micro_batch_size=2,
            score_batch_size=8,
            max_length=4096,  # not said
            eval_prompts=500,  # ours
            gradient_checkpointing=True,
        ),
    ),
    "zephyr": (
        "offline DPO on UltraFeedback, the alignment handbook's recipe for Zephyr-7B",
        Args(
            model="alignment-handbook/zephyr-7b-sft-full",  # recipes/zephyr-7b-beta/dpo, as all below
            offline_data="HuggingFaceH4/ultrafeedback_binarized[train_prefs]",
            dataset="HuggingFaceH4/ultrafeedback_binarized[test_prefs]",  # prompts for the evaluation alone
            iterations=0,
            max_new_tokens=512,  # ours, of the evaluation
            beta=0.01,
            epochs=1.0,
            lr=5e-7,
            warmup_ratio=0.1,
            batch_size=128,  # 8 GPUs with 8 pairs, 2 of them accumulated
            micro_batch_size=8,
            max_length=1024,
            eval_prompts=0,  # ours: the sampler refuses Mistral's window of attention
            gradient_checkpointing=True,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
