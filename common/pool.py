"""What rejection sampling and iterative DPO share: a pool of scored responses that outlives a crash, and the
versions of a policy that were made from it.

The pool is a list of rows, the same on every rank, and the file `output_dir`/pool.jsonl, to which responses
are appended chunk by chunk, as they are sampled:

    {"prompt": messages, "response": text, "response_ids": [...], "finished": it ended, and holds no special
     token before its end, "iteration", "model", "temperature": what it was drawn from, "chunk": number,
     "score", "scorer": the version that gave it, null before}
"""

import collections
import gc
import json
import os
import shutil
from pathlib import Path

import torch
import transformers

from common import dist, generate, metrics, models, scorers
from common.batches import turns_key
from common.errors import InputError


# -- the pool --------------------------------------------------------------------------------------
def key_of(row) -> str:
    """rollout.Prompt.key of the prompt that a row answers."""
    return turns_key(row["prompt"])


def read(path) -> list[dict]:
    """The rows of a pool file, on every rank. Its last line may be cut, by a crash in the middle of a write:
    then it is left out, and this is said."""
    rows, lines = [], []
    if dist.is_main():
        lines = Path(path).read_text("utf-8", errors="replace").split("\n") if Path(path).is_file() else []
    needed = ("prompt", "response", "response_ids", "finished", "iteration", "chunk", "score", "scorer")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line else None
            if row is not None and any(key not in row for key in needed):
                raise ValueError("it lacks a column of " + ", ".join(needed))
            if row and not all(isinstance(i, int) for i in row["response_ids"]):
                raise ValueError("response_ids are no integers")
            if row and not all(isinstance(m["content"], str) and m["role"] for m in row["prompt"]):
                raise ValueError("prompt is no list of messages")
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise InputError(f"{path}:{number}: no row of a pool ({error}); mend or drop it") from None
            print(f"{path}:{number}: the last line is cut, a crash's trace: left out")
            continue
        rows += [row] if row else []
    return dist.gather(rows)  # rank 0's


def write(path, pool):
    """Replace the file, whole or not at all. Every rank must call it."""
    if dist.is_main():
        metrics.write_jsonl(path, pool)
    dist.barrier()


def chunks_to_sample(pool, prompts, iteration, args, plan) -> list[list[tuple[int, list]]]:
    """For each (temperature or None: any, responses to a prompt) of the plan, [(number, prompts)] of the
    chunks of --chunk-prompts prompts that the pool does not hold whole. Other rows of this iteration, of a
    chunk that a crash cut or of another plan, are left out: a chunk is sampled whole."""
    size, held, whole, todo = args.chunk_prompts, collections.defaultdict(list), set(), []
    for row in pool:
        if row["iteration"] == iteration:
            held[row["chunk"]].append((key_of(row), row["temperature"]))
    starts = range(0, len(prompts), size)
    for part, (temperature, n) in enumerate(plan):
        todo.append([])
        for number, start in enumerate(starts, part * len(starts)):
            some = prompts[start : start + size]
            wanted = collections.Counter({prompt.key: n for prompt in some})
            same = all(temperature in (None, t) for _, t in held[number])
            if same and collections.Counter(key for key, _ in held[number]) == wanted:
                whole.add(number)
            else:
                todo[-1].append((number, some))
    kept = [row for row in pool if row["iteration"] != iteration or row["chunk"] in whole]
    if len(kept) < len(pool):
        pool[:] = kept
        write(f"{args.output_dir}/pool.jsonl", pool)
    return todo


def sample(pool, policy, tokenizer, chunks, n, about, args):
    """n responses to each prompt from `policy`, appended to the pool and to its file chunk by chunk. about:
    iteration, model and temperature, which each row of the pool tells."""
    with dist.consolidated(policy):  # the weights are gathered once; inside, ranks need not decode in step
        for number, prompts in chunks:
            seed = dist.seed_of(args.seed, "sample", about["iteration"], number)
            options = (n, args.max_new_tokens, about["temperature"], seed, args.top_p, args.slots)
            found = generate.sample_responses(policy, tokenizer, [prompt.ids for prompt in prompts], *options)
            rows = [
                {"prompt": prompt.turns, "response": r.text, "response_ids": r.ids}
                | {"finished": r.finished and r.clean, **about, "chunk": number}
                | {"score": None, "scorer": None}
                for prompt, responses in zip(prompts, found)
                for r in responses
            ]
            pool += rows
            if dist.is_main():
                metrics.append_jsonl(f"{args.output_dir}/pool.jsonl", rows)


def score(pool, scorer, prompts, args, device):
    """Score, with the current scorer, the rows that another one scored or none has: scores of different
    reward models cannot be compared. The file is replaced whole."""
    by_key = {prompt.key: prompt for prompt in prompts}
    old = [r for r in pool if r["scorer"] != scorer.version and key_of(r) in by_key]
    if not old:
        return
    n_before = sum(r["scorer"] is not None for r in old)
    if n_before and dist.is_main():
        print(f"pool: {n_before:,} responses that another scorer scored are scored again")
    pairs = [
        (by_key[key_of(r)], generate.Response(r["response_ids"], r["response"], r["finished"])) for r in old
    ]
    for row, x in zip(old, scorers.score(scorer, pairs, args.score_batch_size, device)):
        row |= {"score": x, "scorer": scorer.version}
    write(f"{args.output_dir}/pool.jsonl", pool)


# -- versions: versions/N is a model, versions/N.json what it was found to do -------------------------
def load(name, tokenizer, args, device, gradient_checkpointing=False):
    """A policy, sharded, after what was loaded before is gone."""
    gc.collect()  # a model's methods are bound to it, a cycle that holds its weights
    return dist.shard(models.load_policy(name, tokenizer, gradient_checkpointing, args.seed), device)


def versions_of(args, state) -> tuple[dict[int, dict], list[int]]:
    """({version: its .json} of a run that is gone on with, the versions that are there as models), as rank 0
    sees them."""
    folder, studies, made = Path(args.output_dir, "versions"), [], []
    for path in folder.glob("*") if state == "resume" and dist.is_main() else ():
        if path.suffix == ".json" and path.stem.isdigit():
            studies.append((int(path.stem), json.loads(path.read_text())))
        elif path.name.isdigit():
            made.append(int(path.name))
    return dict(sorted(dist.gather(studies))), sorted(dist.gather(made))


def resume_log(args, studies, made, loss):
    """(metrics log without the rows of what has to be done again, optimiser steps taken before the iteration
    to go on with). loss: the key that a row of an optimiser step has; of an iteration that was skipped there
    is the row of its pool alone."""
    newest = max([*studies, *made], default=-1)
    saved = dist.checkpoint_state(f"{args.output_dir}/checkpoint")
    rows, keep, step = metrics.read_jsonl(f"{args.output_dir}/metrics.jsonl") if dist.is_main() else [], 0, 0
    if saved and saved["iteration"] == newest + 1:
        keep, step = saved["logged_rows"], saved["first_step"]
    elif newest in studies:
        keep, step = studies[newest]["logged_rows"], studies[newest]["step"]
    elif made:  # trained and written, but not studied
        kept = [(i + 1, r["step"]) for i, r in enumerate(rows) if r.keys() & {loss, "pool/score"}]
        keep, step = dist.gather(kept)[-1]
    return metrics.Metrics(args.output_dir, keep_rows=keep), step


def comparable(studies, version) -> dict:
    """{version: its samples} of those that one scorer scored, for --resume may bring another."""
    scorer = studies[version].get("scorer")
    return {v: found["samples"] for v, found in studies.items() if found.get("scorer") == scorer}


def save_last(args, version, dtype):
    """model/ becomes versions/VERSION in `dtype`, whole or not at all; on rank 0. In float32, which versions
    have, its files are hard links where the disk has such."""
    final, temporary = Path(args.output_dir, "model"), Path(args.output_dir, "model.tmp")
    source = Path(args.output_dir, "versions", str(version))
    shutil.rmtree(temporary, ignore_errors=True)
    if dtype == torch.float32:
        try:
            shutil.copytree(source, temporary, copy_function=os.link)
        except OSError:
            shutil.copytree(source, temporary, dirs_exist_ok=True)
    else:
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("*.safetensors*"))
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
