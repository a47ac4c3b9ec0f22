"""The versions of the policy in rejection sampling and iterative DPO: one per iteration."""

import gc
from functools import partial

from common import dist
from common.data import files
from common.loading import checks, pretrained
from common.scoring import version_evaluation
from common.run import checkpoints, logs

SHOWN = "eval/score gold/score eval/kl sft/score_win_rate pairs/accuracy eval/score_over_before".split()

EVALUATE_AGAIN = "Remove it: the version is then evaluated again."


class Versions:
    """The versions of the policy that a run makes, one per iteration. versions/N is the model of version N,
    versions/N.json its evaluation. Version `first` is the model that the run starts from.

    A resumed run repeats no version and no evaluation that is on disk. The last checkpoint holds the policy,
    its optimiser and the state {"iteration": the version in training, "step": its steps so far, "first_step":
    the steps of all earlier versions, "logged_rows": rows of metrics.jsonl}.

    evaluate: a RejectionSamplingEvaluation or DPOEvaluation (version_evaluation.py), set by the script.
    step: optimiser steps of all versions so far."""

    def __init__(self, run, tokenizer, start: str):
        """start: name of the model that is the first version."""
        self.run = run
        self.args = run.args
        self.tokenizer = tokenizer
        self.start = start
        self.folder = run.folder / "versions"
        self.loaded = None
        self.policy = None

    def begin(self, first: int = 0):
        """Find the versions and evaluations on disk, and remove the rows of metrics.jsonl that will be logged
        again. Call it after run.begin. first: number of the first version in a new run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        evaluations = {}
        made = []
        rows = []
        if dist.is_main():
            paths = [path for path in self.folder.glob("*.json") if path.stem.isdigit()]
            evaluations = {int(path.stem): self.read_evaluation(path) for path in paths}
            made = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
            rows = files.read_jsonl(self.run.folder / "metrics.jsonl")
        evaluations, made, rows = dist.gather([(evaluations, made, rows)])[0]  # as rank 0 sees them
        self.evaluations = dict(sorted(evaluations.items()))
        self.first = min([*evaluations, *(version - 1 for version in made)], default=first)
        self.newest = max([*evaluations, *made], default=-1)
        kept = [row for row in rows if row["iteration"] <= self.newest]
        if self.newest not in evaluations:  # keep the newest version's rows, but not that of an evaluation
            kept = [r for r in kept if r["iteration"] < self.newest or r.keys() & {"optim/lr", "pool/score"}]
        self.step = kept[-1]["step"] if kept else 0
        saved = checkpoints.checkpoint_state(self.run.checkpoint)
        if saved.get("iteration") == self.newest + 1:
            kept = rows[: saved["logged_rows"]]
            self.step = saved["first_step"]
        self.step_of = {row["iteration"]: row["step"] for row in kept}
        self.run.metrics = logs.Metrics(self.run.folder, keep_rows=len(kept))

    def read_evaluation(self, path):
        """Read a versions/N.json. Raises InputError if it is not an evaluation."""
        def check(evaluation):
            self.evaluate.metrics_of({0: evaluation, 1: evaluation}, 1)
            evaluation["step"] + sum(sample["tokens"] for sample in evaluation["samples"])

        return files.read_json(path, EVALUATE_AGAIN, check)

    def iterations(self, n: int):
        """Yield those of the iterations first + 1, ..., first + n that come after the newest version on disk.
        Before each one, evaluate the previous version; `finish` evaluates the last version."""
        self.last = self.first + n
        for iteration in range(self.first + 1, self.last + 1):
            self.evaluate_version(iteration - 1)
            if iteration > self.newest:  # models of older ones may have been removed for room
                self.run.begin_round()
                yield iteration

    def path(self, version: int) -> str:
        """Return the folder, or for the first version the name, of a version's model."""
        return self.start if version == self.first else str(self.folder / str(version))

    def load(self, name: str):
        """Load the policy of this name, sharded, unless it is the one in memory. The previous policy is freed
        first, so callers must not keep a reference to it."""
        if self.loaded != name:
            self.loaded = self.policy = None
            gc.collect()  # bound methods make a reference cycle, which would keep the weights alive
            args = self.args
            rank = getattr(self.args, "lora_rank", 0)
            checkpointing = args.gradient_checkpointing
            policy = pretrained.load_policy(name, self.tokenizer, checkpointing, args.seed, rank)
            self.loaded = name
            self.policy = dist.shard(policy, self.run.device)
            checks.fit_slots(args, [self.policy])
        return self.policy

    def ask(self, name: str, forward, items, args) -> list:
        """Return forward(model, items, args) for the policy of this name. If it is not in memory, load it for
        the call and free it again. Without items nothing is loaded."""
        if items and name != self.loaded:
            answer = lambda policy: forward(policy, items, args)
            return pretrained.ask_policy(name, self.tokenizer, args, self.run.device, answer)
        return forward(self.policy, items, args) if items else []

    def evaluate_version(self, version: int):
        """Evaluate a version, save the evaluation and log its metrics, unless that was done before. Print the
        metrics in any case."""
        if version not in self.evaluations:
            policy = self.load(self.path(version))
            evaluate = partial(self.evaluate, version=version, evaluations=self.evaluations)
            if version == self.last:  # evaluate the weights as they will be exported
                metrics_of = lambda x: self.evaluate.metrics_of({**self.evaluations, version: x}, version)
                evaluation = self.run.evaluate_export(policy, evaluate, metrics_of)
            else:
                evaluation = evaluate(policy)
            is_newest = version > max(self.evaluations, default=-1)  # else a user removed its file
            step = self.step if is_newest else self.step_of.get(version, self.step)
            self.evaluations[version] = {**evaluation, "step": step}
            self.evaluations = dict(sorted(self.evaluations.items()))
            if is_newest:
                self.run.log(self.metrics_of(version), self.step, version)
            if dist.is_main():
                files.write_json(self.folder / f"{version}.json", self.evaluations[version])
        if dist.is_main():
            metrics = self.metrics_of(version)
            shown = ", ".join(f"{key} {metrics[key]:.3g}" for key in SHOWN if key in metrics)
            print(f"version {version}: {shown}")

    def metrics_of(self, version: int) -> dict[str, float]:
        """Compute a version's metrics from the evaluations so far."""
        return self.evaluate.metrics_of(self.evaluations, version)

    def began_training(self, version: int) -> bool:
        """Return whether the last checkpoint is of this version. Its sampling and scoring are then logged
        already."""
        return checkpoints.checkpoint_state(self.run.checkpoint).get("iteration") == version

    def train(self, version: int, n_steps: int, optimizer):
        """Yield run.steps for the loaded policy, from the last checkpoint if that is of this version. Then
        save the policy as versions/N, in float32 whatever the dtype of the export."""
        run = self.run
        run.modules = {"policy": (self.policy, optimizer)}
        run.state = {"iteration": version, "step": 0, "first_step": self.step}
        if self.began_training(version):
            run.state = checkpoints.load_checkpoint(run.checkpoint, run.modules)
        yield from run.steps(n_steps)
        self.step += run.state["step"]
        checkpoints.save_model(self.policy, self.tokenizer, self.path(version))
        # With LoRA, load the saved model again: the next version starts with new adapters, as after --resume
        self.loaded = None if getattr(self.args, "lora_rank", 0) else self.path(version)
        run.modules = {}  # frees the optimiser's memory

    def skip(self, why: str) -> dict[str, int]:
        """Skip an iteration (run.skip): its version is then the same as the previous one."""
        # Versions of skipped iterations have the same number of steps as the current one
        in_a_row = sum(evaluation["step"] == self.step for evaluation in self.evaluations.values())
        return self.run.skip(f"{why} (--resume keeps its responses, --overwrite starts anew)", in_a_row)

    def finish(self, summary: dict):
        """Evaluate the last version, and write the results of the finished run (run.write_results)."""
        self.evaluate_version(self.last)
        # --resume may have come with fewer --iterations
        made = {v: x for v, x in self.evaluations.items() if v <= self.last}
        rows = [{"version": v, **row} for v, x in made.items() for row in x["samples"]]
        curves = [curve for evaluation in made.values() for curve in evaluation.get("curves", ())]
        if curves and dist.is_main():
            files.write_jsonl(self.run.folder / "curves.jsonl", curves)
        metrics = {str(v): self.metrics_of(v) for v in made}
        same = version_evaluation.comparable(made, self.last)
        before = metrics[str(self.first)] if self.first in same else {}
        summary = {**summary, "steps": made[self.last]["step"], "versions": metrics}
        model = self.load(self.path(self.last))
        self.run.write_results(model, self.tokenizer, rows, summary, before, metrics[str(self.last)])
