"""What rejection sampling and iterative DPO share: a pool of scored responses that outlives a crash, and the
versions of a policy that were made from it.

The pool is a list of rows, the same on every rank, and the file `output_dir`/pool.jsonl:

    {"prompt": messages, "response": text, "response_ids": [...], "finished": it ended, and holds no special
     token before its end, "iteration", "model", "temperature": what it was drawn from, "chunk": number,
     "score", "scorer": the version that gave it, null before}
"""

import collections
import gc
import itertools
import json
from pathlib import Path

from common import data, dist, evaluation, formats, generate, loading, metrics, scorers
from common.batches import Row, split, turns_key
from common.metrics import write_json

# -- the pool --------------------------------------------------------------------------------------
SHOWN = "eval/score gold/score eval/kl sft/score_win pairs/accuracy eval/score_over_before".split()
COLUMNS = "prompt response response_ids finished iteration model temperature chunk score scorer".split()


def take(path, prompts, tokenizer, max_length) -> list[dict]:
    """The rows of an earlier run's pool that answer one of these prompts, with it in at most max_length
    tokens; others are counted and named. Ids that do not stand for their text here are encoded anew."""
    lengths = {prompt.key: len(prompt.ids) for prompt in prompts}

    def fitting(row):
        values = row.data
        if not set(COLUMNS) <= set(values):
            raise ValueError(f"no row of a pool, which has {', '.join(COLUMNS)}")
        key = turns_key(values["prompt"])
        if key not in lengths:
            raise ValueError("the prompt is not in --dataset")
        if tokenizer.decode(values["response_ids"], skip_special_tokens=True) != values["response"]:
            ids = data.encode_responses(tokenizer, values["prompt"], [values["response"]])[1][0]
            values["response_ids"] = ids if values["finished"] else ids[:-1]
        if lengths[key] + len(values["response_ids"]) > max_length:
            raise ValueError(f"longer than {max_length} tokens (--max-length)")
        return values

    rows = [Row(f"{path}:{place}", values) for place, values in formats.read_file(Path(path))]
    return data.made_of(rows, fitting, f"--pool {path}")


class Pool:
    """Every response that a run sampled, with its scores: `rows` and the file pool.jsonl."""

    def __init__(self, run, rows=()):
        """rows: those of an earlier run; a run that is gone on with has its own."""
        self.args, self.path = run.args, f"{run.folder}/pool.jsonl"
        if run.resumed:  # rank 0's on every rank, up to a line that a crash cut
            rows = dist.gather(metrics.read_jsonl(self.path) if dist.is_main() else [])
        self.rows = list(rows)
        self.write()

    def write(self):
        """Replace the file, whole or not at all. Every rank must call it."""
        if dist.is_main():
            metrics.write_jsonl(self.path, self.rows)
        dist.barrier()

    def sample(self, samplers, prompts, iteration, versions):
        """Responses to each prompt, from each of the samplers [(model name, temperature, number of
        responses)], appended to the pool chunk by chunk; what is there already is not sampled again."""
        args = self.args
        for (name, temperature, n), chunks in zip(samplers, self.missing(samplers, prompts, iteration)):
            if not chunks:
                continue
            policy = versions.load(name)
            with dist.consolidated(policy):  # the weights are gathered once for all chunks
                for number, chunk in chunks:
                    seed = dist.seed_of(args.seed, "sample", iteration, number)
                    options = {"n": n, "temperature": temperature, "top_p": args.top_p}
                    pairs = generate.answers(policy, versions.tokenizer, chunk, args, seed, **options)
                    rows = []
                    for prompt, response in pairs:
                        row = {"prompt": prompt.turns, "response": response.text}
                        row.update(response_ids=response.ids, finished=response.finished and response.clean)
                        row.update(iteration=iteration, model=name, temperature=temperature, chunk=number)
                        rows.append({**row, "score": None, "scorer": None})
                    self.rows += rows
                    if dist.is_main():
                        metrics.append_jsonl(self.path, rows)

    def missing(self, samplers, prompts, iteration) -> list[list[tuple[int, list]]]:
        """For each sampler [(number, prompts)] of the chunks of --chunk-prompts prompts that the pool does
        not hold whole. Other rows of this iteration, of a chunk that a crash cut or of another plan, are left
        out: a chunk is sampled whole."""
        held, numbers = collections.defaultdict(list), itertools.count()
        for row in self.rows:
            if row["iteration"] == iteration:
                held[row["chunk"]].append((turns_key(row["prompt"]), row["temperature"]))
        whole, missing = set(), []
        for _, temperature, n in samplers:
            missing.append([])
            for chunk, number in zip(split(prompts, self.args.chunk_prompts), numbers):
                if held[number] == [(prompt.key, temperature) for prompt in chunk for _ in range(n)]:
                    whole.add(number)
                else:
                    missing[-1].append((number, chunk))
        kept = [row for row in self.rows if row["iteration"] != iteration or row["chunk"] in whole]
        if len(kept) < len(self.rows):
            self.rows = kept
            self.write()
        return missing

    def score(self, scorer, prompts):
        """Score the rows that another scorer scored or none has: scores of different ones cannot be compared.
        The file is replaced whole. `parts` are then the means of the parts of these scores."""
        self.parts, keys = {}, {prompt.key for prompt in prompts}
        others = [row for row in self.rows if row["scorer"] != scorer.version]
        old = [row for row in others if turns_key(row["prompt"]) in keys]
        if not old:
            return
        size, pairs = self.args.score_batch_size, answers(old, prompts)
        scores, self.parts = scorers.score_and_parts(scorer, pairs, size)
        for row, score in zip(old, scores):
            row["score"], row["scorer"] = score, scorer.version
        self.write()


def answers(rows, prompts) -> list[tuple[generate.Prompt, generate.Response]]:
    """The (prompt, response) that each row is of; all of them answer one of the prompts."""
    by_key, pairs = {prompt.key: prompt for prompt in prompts}, []
    for row in rows:
        response = generate.Response(row["response_ids"], row["response"], row["finished"])
        pairs.append((by_key[turns_key(row["prompt"])], response))
    return pairs


def write_pairs(folder, pairs, iteration):
    """pairs.jsonl: the pairs that are new in an iteration, in a format that reward.py and --offline-data
    read; those of the iterations before stay."""
    if not dist.is_main():
        return
    rows = [row for row in metrics.read_jsonl(folder / "pairs.jsonl") if row["iteration"] < iteration]
    for pair in pairs:
        row = {"prompt": pair.prompt, "chosen": pair.texts[0], "rejected": pair.texts[1]}
        row.update(iteration=iteration, source=pair.source, category=pair.category)
        if pair.grades:
            row["chosen_score"], row["rejected_score"] = pair.grades
        if pair.preference is not None:
            row["preference"] = pair.preference
        rows.append(row)
    metrics.write_jsonl(folder / "pairs.jsonl", rows)


# -- the versions -----------------------------------------------------------------------------------
class Versions:
    """The versions of a policy that a run makes, one an iteration: versions/N is the model, versions/N.json
    its study, what `evaluate` found that it does. Version `first` is the model that all began from.

    What a resumed run does again is decided here: no version or study that is there. The last checkpoint
    holds the policy, its optimiser and, as JSON, {"iteration": the version that is trained, "step": of its
    steps, "first_step": all steps before, "logged_rows"}.

    evaluate: an object of evaluation.py. step: the optimiser steps of all versions so far."""

    def __init__(self, run, tokenizer, start: str):
        """start: the name of the model that is the first version."""
        self.run, self.args, self.tokenizer, self.start = run, run.args, tokenizer, start
        self.folder, self.loaded, self.policy = run.folder / "versions", None, None

    def begin(self, first: int = 0):
        """After run.begin: look what is there, and cut from metrics.jsonl what will be done again. first: the
        number of the first version; a resumed run has one already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        studies, made, rows = {}, [], []
        if dist.is_main():
            studies = {int(path.stem): json.loads(path.read_text()) for path in self.folder.glob("*.json")}
            made = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
            rows = metrics.read_jsonl(self.run.folder / "metrics.jsonl")
        studies, self.made, rows = dist.gather([(studies, made, rows)])[0]  # as rank 0 sees them
        self.studies = dict(sorted(studies.items()))
        self.first = min(self.studies, default=first)
        newest = max([*studies, *self.made], default=-1)
        kept = [row for row in rows if row["iteration"] <= newest]
        if newest not in studies:  # all of the newest version but its study's row
            kept = [r for r in kept if r["iteration"] < newest or r.keys() & {"optim/lr", "pool/score"}]
        self.step = kept[-1]["step"] if kept else 0
        saved = dist.checkpoint_state(self.run.checkpoint)
        if saved.get("iteration") == newest + 1:
            kept = rows[: saved["logged_rows"]]
            self.step = saved["first_step"]
        self.run.metrics = metrics.Metrics(self.run.folder, keep_rows=len(kept))

    def iterations(self, n: int):
        """first + 1, first + 2, ...: the iterations whose version is not there yet, after a study of the
        version before each of them. The last version is studied by finish."""
        self.last = self.first + n
        for iteration in range(self.first + 1, self.last + 1):
            self.study(iteration - 1)
            if iteration not in self.made:
                self.run.begin_round()
                yield iteration

    def path(self, version: int) -> str:
        return self.start if version == self.first else str(self.folder / str(version))

    def load(self, name: str):
        """The policy of this name, sharded. Hold the one before it no more: its memory is let go first."""
        if self.loaded != name:
            self.loaded = self.policy = None
            gc.collect()  # a model's methods are bound to it, a cycle that holds its weights
            args, rank = self.args, getattr(self.args, "lora_rank", 0)
            policy = loading.load_policy(name, self.tokenizer, args.gradient_checkpointing, args.seed, rank)
            self.loaded, self.policy = name, dist.shard(policy, self.run.device)
        return self.policy

    def with_reference(self, pairs, name: str, pair_logprobs) -> list:
        """The pairs with log pi_0 of both responses, as pair_logprobs(model, pairs, args) gives them for the
        policy of this name, which is loaded for it and freed."""
        if not pairs:
            return []
        args, device = self.args, self.run.device
        found = evaluation.ask_policy(name, self.tokenizer, args, device, pair_logprobs, pairs, args)
        return [pair._replace(ref_logprobs=x) for pair, x in zip(pairs, found)]

    def study(self, version: int):
        """What evaluate(policy, version, studies) says of a version, written to versions/N.json; its figures
        are logged and printed."""
        if version not in self.studies:
            policy = self.load(self.path(version))
            if version == self.last:
                self.run.round_weights(policy)  # its figures are those of what is exported
            self.studies[version] = {**self.evaluate(policy, version, self.studies), "step": self.step}
            self.run.log(self.figures(version), self.step, version)
            if dist.is_main():
                write_json(self.folder / f"{version}.json", self.studies[version])
        if dist.is_main():
            figures = self.figures(version)
            shown = ", ".join(f"{key} {figures[key]:.3g}" for key in SHOWN if key in figures)
            print(f"version {version}: {shown}")

    def figures(self, version: int) -> dict[str, float]:
        return self.evaluate.figures(self.studies, version)

    def began_training(self, version: int) -> bool:
        """Whether the last checkpoint is of this version: then what led to it is logged already."""
        return dist.checkpoint_state(self.run.checkpoint).get("iteration") == version

    def train(self, version: int, n_steps: int, optimizer):
        """run.steps for the policy that is loaded, from the last checkpoint on if it is of this version; then
        it becomes versions/N, in float32 whatever is exported in the end."""
        run = self.run
        run.modules = {"policy": (self.policy, optimizer)}
        run.state = {"iteration": version, "step": 0, "first_step": self.step}
        if self.began_training(version):
            run.state = dist.load_checkpoint(run.checkpoint, run.modules)
        yield from run.steps(n_steps)
        self.step += n_steps
        dist.save_model(self.policy, self.tokenizer, self.path(version))
        self.loaded = None if hasattr(self.policy, "merged") else self.path(version)  # adapters: see lora.py
        self.made.append(version)
        run.modules = {}  # the optimiser's memory

    def skip(self, why: str) -> dict[str, int]:
        """run.skip of an iteration, whose version is then the one before."""
        in_a_row = sum(study["step"] == self.step for study in self.studies.values())
        return self.run.skip(why, in_a_row)

    def finish(self, summary: dict):
        """Study the last version, and write what a finished run holds (run.write_results)."""
        self.study(self.last)
        rows = [{"version": v, **row} for v, study in self.studies.items() for row in study["samples"]]
        curves = [curve for study in self.studies.values() for curve in study.get("curves", ())]
        if curves and dist.is_main():
            metrics.write_jsonl(self.run.folder / "curves.jsonl", curves)
        figures = {str(v): self.figures(v) for v in self.studies}
        is_first_comparable = self.first in evaluation.comparable(self.studies, self.last)
        before = figures[str(self.first)] if is_first_comparable else {}
        summary = {**summary, "steps": self.step, "versions": figures}
        model, after = self.load(self.path(self.last)), figures[str(self.last)]
        self.run.write_results(model, self.tokenizer, rows, summary, before, after)
        dist.barrier()
