"""Rejection-sampling fine-tuning: sample K responses to a prompt, keep the best, train on it, sample again.

    y*(x) = argmax_k r(x, y_k),   y_1 .. y_K ~ pi(. | x)       or all y_k with r(x, y_k) >= tau (ReST)
    L(theta) = -(1/n) sum_t log pi_theta(y*_t | x, y*_<t)      over the n response tokens of an optimiser step

(Llama 2, arXiv:2307.09288, section 3.2.3; "Stabilizing RLHF through Advantage Model and Selective Rehearsal",
arXiv:2309.10202, eq. 3 and 4; ReST, arXiv:2308.08998.) Each iteration samples from the most recent model and
fine-tunes a new version from the base model. The candidates of all earlier iterations stay in a pool, from
which the best are taken: training on the last iteration's alone forgets (Llama 2, after its third version).

Reads a policy, a scorer and prompts; writes runs/rejection_sampling: pool.jsonl (every response ever
sampled), versions/ (each iteration's model and its samples), model/ (the last one), metrics.jsonl,
samples.jsonl, curves.jsonl, plots, summary.json.

    python rejection_sampling.py                             the tiny world, half a minute on two CPU cores
    python rejection_sampling.py rest                        thresholds in place of the best
    python rejection_sampling.py --policy runs/ppo --pool runs/rejection_sampling/pool.jsonl --output-dir B
    torchrun --nproc-per-node 8 rejection_sampling.py llama2 --model DIR --scorer runs/reward

Differs from the paper: a response that did not end within max_new_tokens is never selected; of equal
responses to a prompt one counts.
"""

import collections
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import data, dist, evaluation, generate, losses, metrics, models, pool, scorers
from common.batches import Document, make_blocks, my_micro_batches, n_response_tokens, n_tokens
from common.errors import InputError
from common.run import check_batch_size, check_flags, find_run, launch, skip, start_run, write_json


@dataclass
class Args:
    model: str = "runs/sft"
    """The base model, which each version is fine-tuned from: a run directory, a model folder, a hub name."""
    policy: str | None = None
    """The model that the first iteration samples from, runs/ppo for one. None: the base model."""
    student: str | None = None
    """Distillation: fine-tune this model in place of the base model, and sample from the policy always."""
    scorer: str = "runs/reward"
    """A run of reward.py or advantage_model.py, a hub reward model, or module:function."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    sft_dataset: str | None = None
    """Rows in sft.py's formats, the original data for one, that are trained on beside the selected ones: as
    many, drawn anew for each fine-tuning."""
    pool: str | None = None
    """pool.jsonl of an earlier run, to go on from: its responses are copied, and scored again if another
    scorer scored them."""
    output_dir: str = "runs/rejection_sampling"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    iterations: int = 3
    """Rounds of sampling and fine-tuning."""
    prompts_per_iteration: int | None = 500
    """Prompts of a round, fresh ones while there are any. None: all."""
    n_samples: int = 8
    """K: responses to a prompt."""
    threshold: tuple[float, ...] = ()
    """tau: train on all responses with at least this score, not on the best. Several, rising: as many
    fine-tunings of an iteration, each from the one before (ReST's improve steps)."""
    candidates: Literal["all", "last"] = "all"
    """Select from the pool of all iterations, or from this iteration's responses alone."""
    start_from: Literal["base", "last"] = "base"
    """Fine-tune from the base model (or student) each time, or from the last version."""
    temperatures: tuple[float, ...] = (0.4, 0.55, 0.7)
    """Tried before each round on held-out prompts; the one with the highest expected best of K is used."""
    sweep_prompts: int = 64
    """Held-out prompts for this, K responses each; 0: the first temperature is used."""
    top_p: float = 1.0
    """Mass of the nucleus to sample from; 1 is off."""
    max_new_tokens: int = 32
    """Longest response."""
    slots: int = 256
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    chunk_prompts: int = 512
    """Prompts between two writes to the pool while sampling: what a crash can cost."""
    epochs: float = 3.0
    """Passes over the selected responses."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    """After the warm-up: a cosine to 0, a cosine to a tenth of the peak, a line to 0, or constant."""
    lr_decay: float = 1.0
    """Factor on lr for each further threshold of an iteration."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.0
    """AdamW's, on all parameters, norms included."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    batch_size: int = 8
    """Blocks of an optimiser step over all ranks (with --no-packing: documents)."""
    micro_batch_size: int = 8
    """Blocks of a forward on one rank, at most; it divides a rank's share of batch_size."""
    score_batch_size: int = 64
    """Responses of a forward of the scorer on one rank."""
    max_length: int = 128
    """Tokens of a block, and at most of a prompt with its response."""
    packing: bool = True
    """Fill blocks with several documents; --no-packing: a row a document, padded to the batch's longest."""
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
    check_batch_size(args)
    rising = list(args.threshold) == sorted(args.threshold)
    warm = bool(args.temperatures) and all(math.isfinite(t) and t > 0 for t in args.temperatures)
    check_flags(
        args,
        ("iterations", args.iterations >= 1, "1 or more"),
        ("threshold", rising and all(map(math.isfinite, args.threshold)), "finite numbers that rise"),
        ("temperatures", warm, "one or more above 0: K greedy responses are all the same"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
    )
    if args.student and args.start_from == "last" and args.student == (args.policy or args.model):
        raise InputError("--student is the policy itself: leave it out")


# -- an earlier run's pool ---------------------------------------------------------------------------
def take_pool(path, prompts, tokenizer):
    """The pool of an earlier run. Ids that do not stand for their text here are encoded anew."""
    if not Path(path).is_file():
        raise InputError(f"--pool {path}: there is no such file")
    responses, keys, changed = pool.read(path), {prompt.key for prompt in prompts}, 0
    strange = sum(pool.key_of(row) not in keys for row in responses)
    if strange == len(responses):
        raise InputError(f"--pool {path}: none of its {len(responses)} rows answers a prompt of --dataset")
    if strange and dist.is_main():
        n = len(responses)
        print(f"{path}: {strange:,} of {n:,} rows answer prompts that are not in --dataset: not used")
    for row in responses:
        if tokenizer.decode(row["response_ids"], skip_special_tokens=True) != row["response"]:
            try:
                ids = data.encode_responses(tokenizer, row["prompt"], [row["response"]])[1][0]
            except ValueError as error:
                raise InputError(f"--pool {path}: {row['response'][:60]!r}: {error}; drop the row") from None
            row["response_ids"], changed = ids if row["finished"] else ids[:-1], changed + 1
    if changed and dist.is_main():
        print(f"{path}: {changed:,} responses were written in other tokens, encoded anew")
    return responses


# -- select ----------------------------------------------------------------------------------------
def select(responses, prompts, iteration, threshold, args):
    """Rows of the pool to train on: of each prompt the best one, or all with at least the threshold.
    Responses that did not end, hold a special token (the pool's `finished` says both) or have no words are
    none; of equal ones to a prompt the first counts. No row if there is none such."""
    usable = {prompt.key: {} for prompt in prompts}
    for row in responses:
        now = args.candidates == "all" or row["iteration"] == iteration
        if now and pool.key_of(row) in usable and row["finished"] and row["response"].strip():
            usable[pool.key_of(row)].setdefault(row["response"].strip(), row)
    usable = {key: rows for key, rows in usable.items() if rows}
    groups = [list(rows.values()) for rows in usable.values()]
    if threshold is None:
        return [max(rows, key=lambda row: row["score"]) for rows in groups]
    return [row for rows in groups for row in rows if row["score"] >= threshold]


def why_none(responses, prompts, iteration, threshold, args) -> str:
    """Why select gives no row."""
    scores = sorted(row["score"] for row in select(responses, prompts, iteration, -math.inf, args))
    if not scores:
        return f"iteration {iteration}: no response ended within --max-new-tokens {args.max_new_tokens}"
    best, middle = scores[-1], scores[len(scores) // 2]
    why = f"iteration {iteration}: no response reaches --threshold {threshold:g}: of {len(scores)} the best "
    return why + f"has {best:.3g}, the median {middle:.3g}"


# -- fine-tune: the same steps as sft.py ------------------------------------------------------------
def make_documents(rows, prompts, tokenizer, args):
    """Pool rows -> documents: the prompt and the ids that were sampled; for a student (`tokenizer` is its
    own), the text, encoded anew."""
    by_key, documents, dropped = {prompt.key: prompt for prompt in prompts}, [], collections.defaultdict(list)
    for row in rows:
        prompt, answer = by_key[pool.key_of(row)], row["response_ids"]
        messages = [*prompt.turns, {"role": "assistant", "content": row["response"]}]
        try:
            if args.student:
                ids, mask = data.encode(tokenizer, messages)
            else:
                ids, mask = prompt.ids + answer, [False] * len(prompt.ids) + [True] * len(answer)
            if len(ids) > args.max_length:
                raise ValueError(f"longer than {args.max_length} tokens (--max-length)")
        except ValueError as error:
            dropped[str(error)].append(prompt.row.where)
            continue
        ids, mask = torch.tensor(ids, dtype=torch.int32), torch.tensor(mask)
        documents.append(Document(ids, mask, messages, prompt.row))
    data.report("selected responses", len(rows), dropped)
    if not documents:
        raise InputError(f"none of {len(rows)} selected responses can be trained on: {', '.join(dropped)}")
    return documents


def update(model, optimizer, blocks, pad_id, args, device):
    """One optimiser step on `blocks`, over all ranks. Returns the loss and the gradient norm; when one of
    them is not finite, the weights stay as they were."""
    n_tokens = n_response_tokens(blocks)
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


def fine_tune(start, stages, tokenizer, iteration, log, first_step, args, device):
    """Train `start` on the stages' documents, one after the other, and write versions/ITERATION. Goes on from
    a checkpoint of this iteration. Returns the run's number of optimiser steps so far."""
    checkpoint = f"{args.output_dir}/checkpoint"
    plan = []  # (learning rate, blocks) of each optimiser step
    for stage, documents in enumerate(stages):
        blocks = make_blocks(documents, args.max_length, args.packing)
        steps_per_epoch = math.ceil(len(blocks) / args.batch_size)
        n_steps = max(1, round(args.epochs * steps_per_epoch))
        for place in range(n_steps):
            epoch, index = divmod(place, steps_per_epoch)
            if index == 0:  # an order for each epoch, one for all ranks
                seed = dist.seed_of(args.seed, "order", iteration, stage, epoch)
                order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed)).tolist()
            chosen = order[index * args.batch_size : (index + 1) * args.batch_size]
            lr = args.lr * args.lr_decay**stage * dist.schedule(place + 1, n_steps, args)
            plan.append((lr, [blocks[i] for i in chosen]))
    model = pool.load(start, tokenizer, args, device, args.gradient_checkpointing)
    if args.packing:
        models.check_packing(model)
    betas, decay = (0.9, 0.95), args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, weight_decay=decay, fused=True)
    done = 0
    if dist.checkpoint_state(checkpoint).get("iteration") == iteration:
        done = dist.load_checkpoint(checkpoint, {"policy": (model, optimizer)})["done"]
    bar = metrics.progress(len(plan), done, f"iteration {iteration}")
    for done in range(done, len(plan)):
        begin = time.time()
        lr, batch = plan[done]
        for group in optimizer.param_groups:
            group["lr"] = lr
        nll, grad_norm = update(model, optimizer, batch, tokenizer.pad_token_id, args, device)
        if not (math.isfinite(nll) and math.isfinite(grad_norm)):
            bar.close()
            raise InputError(
                f"iteration {iteration}, step {done + 1}: loss {nll}, gradient norm {grad_norm}. The step "
                "was not taken; lower --lr or look at pool.jsonl"
            )
        tokens = sum(map(n_tokens, batch))
        row = {"loss/nll": nll, "optim/grad_norm": grad_norm, "optim/lr": lr}
        row |= {"data/tokens": tokens, "perf/tokens_per_s": tokens / (time.time() - begin)}
        log.log(first_step + done + 1, iteration, **row)
        bar.set_postfix(nll=f"{nll:.3f}", norm=f"{grad_norm:.2f}", tok_s=f"{row['perf/tokens_per_s']:.0f}")
        bar.update()
        if args.save_every and (done + 1) % args.save_every == 0:
            state = {"iteration": iteration, "done": done + 1, "first_step": first_step}
            state["logged_rows"] = log.n_rows
            dist.save_checkpoint(checkpoint, first_step + done + 1, {"policy": (model, optimizer)}, state)
    bar.close()
    path = f"{args.output_dir}/versions/{iteration}"
    dist.save_model(model, tokenizer, path)
    return first_step + len(plan)


# -- evaluate --------------------------------------------------------------------------------------
def study(model, tokenizer, held_out, scorer, version, args, device):
    """What a model can do on held-out prompts: {"samples": one response to each, "curves": the expected
    largest and median score among N responses at each temperature, and the best of K that can be selected,
    "temperature": the one where that is highest, "scorer": its version}."""
    asked = generate.a_part(held_out, args.eval_prompts)
    swept = generate.a_part(held_out, args.sweep_prompts)
    rounds = [(asked, 1, 1.0)] * bool(asked)
    rounds += [(swept, args.n_samples, temperature) for temperature in args.temperatures] * bool(swept)
    found = []
    with dist.consolidated(model):
        for number, (prompts, n, temperature) in enumerate(rounds):
            seed = dist.seed_of(args.seed, "study", version, number)
            top_p = 1.0 if prompts is asked else args.top_p
            options = (n, args.max_new_tokens, temperature, seed, top_p, args.slots)
            found.append(
                generate.sample_responses(model, tokenizer, [prompt.ids for prompt in prompts], *options)
            )
    samples, curves = [], []
    for (prompts, n, temperature), responses in zip(rounds, found):
        pairs = [(prompt, r) for prompt, some in zip(prompts, responses) for r in some]
        scores = scorers.score(scorer, pairs, args.score_batch_size, device)
        if prompts is asked:
            is_tiny = data.is_tiny(args.eval_dataset or args.dataset)
            samples = [evaluation.describe_response(*pair, x, is_tiny) for pair, x in zip(pairs, scores)]
            continue
        largest, median = metrics.best_of_n(torch.tensor(scores).view(-1, n))
        ended = sum(r.finished for _, r in pairs) / len(pairs)
        usable = [r.finished and r.clean and bool(r.text.strip()) for _, r in pairs]
        curve = {"temperature": temperature, "finished": ended, "max": largest, "median": median}
        curves.append({**curve, "scores": scores, "usable": usable})
    # A response that would not be selected counts, for the choice, as the worst of all
    lowest = min((x for curve in curves for x in curve["scores"]), default=0.0)
    for curve in curves:
        scores = [x if ok else lowest for x, ok in zip(curve.pop("scores"), curve.pop("usable"))]
        curve["best"] = metrics.best_of_n(torch.tensor(scores).view(-1, args.n_samples))[0][-1]
    best = max(curves, key=lambda curve: curve["best"], default={"temperature": args.temperatures[0]})
    found = {"samples": samples, "curves": curves, "temperature": best["temperature"]}
    return found | {"scorer": scorer.version}


def figures(studies, version):
    """Means of a version's samples, its sweep at the temperature taken, and paired differences to the first
    version and to the one before."""
    study, out = studies[version], {}
    samples, columns = study["samples"], {"eval/score": "score", "gold/score": "gold"}
    others = {"gold/perfect": "perfect", "sample/length": "tokens", "sample/finished": "finished"}
    out |= metrics.means(samples, {**columns, **others})
    for curve in study["curves"]:
        if curve["temperature"] == study["temperature"]:
            out |= {"sweep/temperature": curve["temperature"], "sweep/max": curve["max"][-1]}
            out |= {"sweep/median": curve["median"][-1]}
    same = pool.comparable(studies, version)
    for name, other in (("first", min(studies)), ("before", version - 1)):
        for key, column in columns.items() if other in same and other != version else ():
            if key in out:
                out |= metrics.paired_figures(f"{key}_over_{name}", same[other], samples, column)
    return out


def report(studies, version):
    """Print what a version can do, and which categories got worse."""
    if not dist.is_main():
        return
    print(f"version {version}:")
    for key, value in figures(studies, version).items():
        print(f"  {key}: {value:.4g}")
    for curve in studies[version]["curves"]:
        numbers = f"largest of {len(curve['max'])} {curve['max'][-1]:.3f}, median {curve['median'][-1]:.3f}"
        numbers += f", best that ended {curve['best']:.3f}, {curve['finished']:.0%} ended"
        print(f"  temperature {curve['temperature']:g}: {numbers}")
    same = pool.comparable(studies, version)
    if version - 1 in same:
        metrics.print_table(metrics.regressions(same[version - 1], same[version]))


def pool_figures(responses, chosen, iteration):
    """Of the pool, of this iteration's responses, and of the rows to train on (with several thresholds, the
    first one's)."""
    new, best = [row for row in responses if row["iteration"] == iteration], {}
    for row in new:
        best[pool.key_of(row)] = max(best.get(pool.key_of(row), -math.inf), row["score"])
    out = {"pool/rows": len(responses), "pool/new": len(new), "pool/temperature": new[0]["temperature"]}
    out["pool/finished"] = sum(row["finished"] for row in new) / len(new)
    out["pool/score"] = sum(row["score"] for row in new) / len(new)
    out |= {"pool/best": sum(best.values()) / len(best), "pool/selected": len(chosen)}
    if chosen:
        out["pool/selected_score"] = sum(row["score"] for row in chosen) / len(chosen)
        out["pool/earlier"] = sum(row["iteration"] < iteration for row in chosen) / len(chosen)
    return out


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return
    studies, made = pool.versions_of(args, state)

    # 2. data
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    policy = args.policy or args.model
    for name in (policy, args.model):  # the base model's own vocabulary is its own
        models.check_causal_lm(name, tokenizer if name != args.model else None, args.chat_template)
    prompts, held_out = generate.train_and_held_out(args, tokenizer)
    learner = models.load_tokenizer(args.student, args.chat_template) if args.student else tokenizer
    learner_held_out = held_out
    if args.student:
        try:
            learner_held_out = [p._replace(ids=data.prompt_ids(learner, p.turns)) for p in held_out]
        except ValueError as error:  # its template refuses a role, for one
            raise InputError(f"--student {args.student}: {error}") from None
        if not scorers.same_tokens(learner, tokenizer) and dist.is_main():
            print(f"{args.student} has other tokens than {policy}: it learns the text, encoded anew")
    also = []
    if args.sft_dataset:
        also = data.load_sft(args.sft_dataset, learner, args.max_length, held_out=held_out)
    pool_file = f"{args.output_dir}/pool.jsonl"
    if studies:
        responses = pool.read(pool_file)
    else:
        responses = take_pool(args.pool, prompts, tokenizer) if args.pool else []

    # 3. models: the scorer stays, policies come and go; each version has its own optimiser, in fine_tune
    scorer = scorers.load_scorer(args.scorer, tokenizer, device)
    if not scorer.same_tokens and dist.is_main():
        print(f"{args.scorer} has other tokens or another chat template than {policy}: it scores the text")
    learner_scorer = scorers.for_tokens(scorer, learner)
    if args.student:
        models.check_causal_lm(args.student)
    learns = args.student or (policy if args.start_from == "last" else args.model)  # first of all
    for name in dict.fromkeys([policy, learns]):
        generate.check_sampled(name)
        models.check_room(args.max_length, name)
    scorers.check_room(scorer, args.max_length)
    if args.packing and state != "resume":  # now, not when all is sampled
        models.check_packing(pool.load(learns, learner, args, device))

    # 4. the pool, and where to go on
    asked = [prompt.key for prompt in generate.a_part(held_out, args.eval_prompts)]
    start_run(args, "rejection_sampling", state, held_out=asked)  # only now is an old run replaced
    versions = Path(args.output_dir, "versions")
    versions.mkdir(parents=True, exist_ok=True)
    pool.write(pool_file, responses)
    first = min(studies) if studies else max((row["iteration"] for row in responses), default=0)
    last, dtype = first + args.iterations, models.export_dtype(learns, args.save_dtype)
    (log, step), teacher = pool.resume_log(args, studies, made, "loss/nll"), None

    # 5. loop
    for version in range(first, last + 1):
        # study the last iteration's model, the policy of the next one
        latest, model = str(versions / str(version)) if version > first else args.student or policy, None
        if version not in studies:
            model = pool.load(latest, learner, args, device)
            if version == last:
                dist.round_weights(model, dtype)  # as model/ has them
            found = study(model, learner, learner_held_out, learner_scorer, version, args, device)
            studies[version] = found
            log.log(step, version, **figures(studies, version))
            found |= {"step": step, "logged_rows": log.n_rows}
            if dist.is_main():
                write_json(versions / f"{version}.json", found)
        report(studies, version)
        iteration = version + 1
        if version == last or iteration in made:
            continue

        # sample K responses to each prompt from the latest model (with --student, from the policy always)
        began = time.time()
        n = args.prompts_per_iteration or len(prompts)
        now = generate.fresh_prompts(prompts, n, iteration, args.seed)
        (chunks,) = pool.chunks_to_sample(responses, now, iteration, args, [(None, args.n_samples)])
        if chunks:
            sampler, told = policy if args.student else latest, studies[version]
            if args.student or model is None:
                model = None  # before another one comes
                model = pool.load(sampler, tokenizer, args, device)
            if args.student:  # whose own sweep is reported, but says nothing about the policy
                quiet = dataclasses.replace(args, eval_prompts=0)
                of_policy = (model, tokenizer, held_out, scorer, "teacher", quiet, device)
                told = teacher = teacher or study(*of_policy)
            about = {"iteration": iteration, "model": sampler, "temperature": told["temperature"]}
            pool.sample(responses, model, tokenizer, chunks, args.n_samples, about, args)
        model, sampled = None, time.time()

        # score, and select
        pool.score(responses, scorer, prompts, args, device)
        thresholds = args.threshold or [None]
        chosen = [select(responses, prompts, iteration, tau, args) for tau in thresholds]
        row = pool_figures(responses, chosen[0], iteration)
        row |= {"perf/sample_s": sampled - began, "perf/score_s": time.time() - sampled}
        chosen = [rows for rows in chosen if rows]  # thresholds rise: the last ones are out of reach
        if len(chosen) < len(thresholds):
            why = why_none(responses, prompts, iteration, thresholds[len(chosen)], args)
            if not chosen:  # the next version is this one
                in_a_row = sum(found["step"] == step for found in studies.values())  # since the last step
                row |= skip(in_a_row, args.iterations, why)
            elif dist.is_main():
                print(why)
        if dist.checkpoint_state(f"{args.output_dir}/checkpoint").get("iteration") != iteration:
            log.log(step, iteration, **row)

        # fine-tune a new version
        start = latest if args.start_from == "last" or not chosen else args.student or args.model
        stages = [make_documents(rows, prompts, learner, args) for rows in chosen]
        generator = torch.Generator().manual_seed(dist.seed_of(args.seed, "also", iteration))
        for documents in stages:  # of the other rows as many, so that neither kind drowns the other
            order = torch.randperm(len(also), generator=generator).tolist()
            documents += [also[i] for i in order[: len(documents)]]
        step = fine_tune(start, stages, learner, iteration, log, step, args, device)

    # 6. save
    if dist.is_main():
        pool.save_last(args, last, dtype)
        rows = [{"version": v, **row} for v, found in studies.items() for row in found["samples"]]
        metrics.write_jsonl(f"{args.output_dir}/samples.jsonl", rows)
        curves = [
            {"policy": f"version {v}", "chosen": curve["temperature"] == found["temperature"], **curve}
            for v, found in studies.items()
            for curve in found["curves"]
        ]
        metrics.write_jsonl(f"{args.output_dir}/curves.jsonl", curves)
        same = pool.comparable(studies, last)
        ends = [f"version {v}" for v in (first, last) if v in same]
        ends = [curve for curve in curves if curve["policy"] in ends]
        if ends:
            metrics.plot_best_of_n(args.output_dir, ends)
        panels = {"loss": ["loss/nll"], "held-out responses": ["eval/score", "gold/score", "sweep/max"]}
        metrics.plot_metrics(args.output_dir, {**panels, "pool": ["pool/score", "pool/best"]})
        after = {str(version): figures(studies, version) for version in studies}
        bound = metrics.best_of_n_kl(args.n_samples)
        print(f"best of {args.n_samples}: at most {bound:.2f} nats (KL) from the policy it is drawn from")
        numbers = {"steps": step, "pool": len(responses), "kl_bound": bound, "versions": after}
        numbers["categories"] = metrics.regressions(same[last - 1], same[last]) if last - 1 in same else []
        write_json(f"{args.output_dir}/summary.json", numbers)  # last
        if first in same:
            metrics.say_if_worse(after[str(first)], after[str(last)])
        models.report_export(f"{args.output_dir}/model", learns, args.seed)


RECIPES = {
    "tiny": (
        "the tiny world, three iterations, the best of 8: the default, half a minute on two CPU cores",
        # Temperatures below 1: with 1.3 the sweep follows the reward model's mistakes (README, "Results")
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            epochs=2.0,  # Llama 2, section 3.1, of SFT, as the learning rate
            lr=2e-5,
            warmup_ratio=0.03,  # ours, as all below
            prompts_per_iteration=200,
            temperatures=(0.7, 1.0),
            sweep_prompts=16,
            max_new_tokens=256,
            slots=32,
            micro_batch_size=2,
            score_batch_size=8,
            max_length=1024,
            eval_prompts=200,
        ),
    ),
    "llama2": (
        "Llama 2's, four versions; prompts and models of your own",
        Args(
            model="meta-llama/Llama-2-7b-chat-hf",  # the SFT model itself is not public
            scorer="runs/reward",
            dataset="Anthropic/hh-rlhf",  # its prompts; Meta's own are not public
            iterations=4,  # section 3.2.3: until V4 by rejection sampling alone
            prompts_per_iteration=None,
            n_samples=10,  # figure 8: 10 to 100
            temperatures=(0.8, 1.0, 1.2, 1.3),  # figure 8: 1.2 to 1.3 is best after RLHF
            sweep_prompts=256,  # not said
            max_new_tokens=1024,  # not said
            slots=16,
            epochs=2.0,  # section 3.1, of SFT, as all below
            lr=2e-5,
            warmup_ratio=0.03,  # not said
            weight_decay=0.1,
            batch_size=64,
            micro_batch_size=1,
            score_batch_size=8,
            max_length=4096,
            save_every=200,
            gradient_checkpointing=True,
        ),
    ),
    "rest": (
        "ReST on the tiny world: thresholds that rise, from the last version, the SFT data kept in",
        Args(
            output_dir="runs/rest",
            sft_dataset="tiny",  # section 3: the new data joins the original
            threshold=(0.0, 0.5, 1.0),  # section 3: rising; these are ours, in runs/reward's units
            lr_decay=0.5,  # section 3: lower with each improve step; the factor is ours
            candidates="last",  # a grow step samples a data set of its own
            start_from="last",
            epochs=1.0,  # ours, as the learning rate
            lr=5e-4,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
