"""The versions of a policy that rejection sampling and iterative DPO make, one an iteration, and what is
found out of each on held-out prompts."""

import gc
from functools import partial

import torch

from common import checkpoints, dist, files, loading, metrics, responses, scorers
from common.batches import random_subset
from common.evaluation import FIGURES, describe_samples, kl_of

SHOWN = "eval/score gold/score eval/kl sft/score_win pairs/accuracy eval/score_over_before".split()

EVALUATE_AGAIN = "Remove it: the version is then evaluated again."


class Versions:
    """The versions of a policy that a run makes, one an iteration: versions/N is the model, versions/N.json
    its evaluation, what `evaluate` found that it does. Version `first` is the model that all began from.

    What a resumed run does again is decided here: no version or evaluation that is there. The last checkpoint
    holds the policy, its optimiser and, as JSON, {"iteration": the version that is trained, "step": of its
    steps, "first_step": all steps before, "logged_rows"}.

    evaluate: a RejectionSamplingEvaluation or DPOEvaluation, below. step: the optimiser steps of all
      versions so far."""

    def __init__(self, run, tokenizer, start: str):
        """start: the name of the model that is the first version."""
        self.run, self.args, self.tokenizer, self.start = run, run.args, tokenizer, start
        self.folder, self.loaded, self.policy = run.folder / "versions", None, None

    def begin(self, first: int = 0):
        """After run.begin: look what is there, and cut from metrics.jsonl what will be done again. first: the
        number of the first version; a resumed run has one already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        evaluations, made, rows = {}, [], []
        if dist.is_main():
            paths = [path for path in self.folder.glob("*.json") if path.stem.isdigit()]
            evaluations = {int(path.stem): self.read_evaluation(path) for path in paths}
            made = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
            rows = metrics.read_jsonl(self.run.folder / "metrics.jsonl")
        evaluations, self.made, rows = dist.gather([(evaluations, made, rows)])[0]  # as rank 0 sees them
        self.evaluations = dict(sorted(evaluations.items()))
        self.first = min(self.evaluations, default=first)
        newest = max([*evaluations, *self.made], default=-1)
        kept = [row for row in rows if row["iteration"] <= newest]
        if newest not in evaluations:  # all of the newest version but its evaluation's row
            kept = [r for r in kept if r["iteration"] < newest or r.keys() & {"optim/lr", "pool/score"}]
        self.step = kept[-1]["step"] if kept else 0
        saved = checkpoints.checkpoint_state(self.run.checkpoint)
        if saved.get("iteration") == newest + 1:
            kept = rows[: saved["logged_rows"]]
            self.step = saved["first_step"]
        self.run.metrics = metrics.Metrics(self.run.folder, keep_rows=len(kept))

    def read_evaluation(self, path):
        """A versions/N.json. InputError for one that cannot be."""
        def check(evaluation):
            self.evaluate.figures({0: evaluation, 1: evaluation}, 1)
            evaluation["step"] + sum(sample["tokens"] for sample in evaluation["samples"])

        return files.read_json(path, EVALUATE_AGAIN, check)

    def iterations(self, n: int):
        """first + 1, first + 2, ...: the iterations whose version is not there yet, after a evaluation of the
        version before each of them. The last version is studied by finish."""
        self.last = self.first + n
        for iteration in range(self.first + 1, self.last + 1):
            self.evaluate_version(iteration - 1)
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

    def ask(self, name: str, forward, items, args) -> list:
        """forward(model, items, args) for the policy of this name, which is loaded and freed again unless it
        is the one in memory. Without items nothing is loaded."""
        if items and name != self.loaded:
            return loading.ask_policy(name, self.tokenizer, args, self.run.device, forward, items, args)
        return forward(self.policy, items, args) if items else []

    def evaluate_version(self, version: int):
        """Write what evaluate(policy, version, evaluations) returns; log and print the version's metrics."""
        if version not in self.evaluations:
            policy = self.load(self.path(version))
            evaluate = partial(self.evaluate, version=version, evaluations=self.evaluations)
            if version == self.last:  # its metrics are those of the exported model
                def metrics_of(evaluation):
                    return self.evaluate.figures({**self.evaluations, version: evaluation}, version)

                evaluation = self.run.evaluate_export(policy, evaluate, metrics_of)
            else:
                evaluation = evaluate(policy)
            self.evaluations[version] = {**evaluation, "step": self.step}
            self.run.log(self.figures(version), self.step, version)
            if dist.is_main():
                metrics.write_json(self.folder / f"{version}.json", self.evaluations[version])
        if dist.is_main():
            figures = self.figures(version)
            shown = ", ".join(f"{key} {figures[key]:.3g}" for key in SHOWN if key in figures)
            print(f"version {version}: {shown}")

    def figures(self, version: int) -> dict[str, float]:
        return self.evaluate.figures(self.evaluations, version)

    def began_training(self, version: int) -> bool:
        """Whether the last checkpoint is of this version: then what led to it is logged already."""
        return checkpoints.checkpoint_state(self.run.checkpoint).get("iteration") == version

    def train(self, version: int, n_steps: int, optimizer):
        """run.steps for the policy that is loaded, from the last checkpoint on if it is of this version; then
        it becomes versions/N, in float32 whatever is exported in the end."""
        run = self.run
        run.modules = {"policy": (self.policy, optimizer)}
        run.state = {"iteration": version, "step": 0, "first_step": self.step}
        if self.began_training(version):
            run.state = checkpoints.load_checkpoint(run.checkpoint, run.modules)
        yield from run.steps(n_steps)
        self.step += n_steps
        checkpoints.save_model(self.policy, self.tokenizer, self.path(version))
        self.loaded = None if hasattr(self.policy, "merge_adapters") else self.path(version)  # see lora.py
        run.modules = {}  # the optimiser's memory

    def skip(self, why: str) -> dict[str, int]:
        """run.skip of an iteration, whose version is then the one before."""
        in_a_row = sum(evaluation["step"] == self.step for evaluation in self.evaluations.values())
        return self.run.skip(why, in_a_row)

    def finish(self, summary: dict):
        """Study the last version, and write what a finished run holds (run.write_results)."""
        self.evaluate_version(self.last)
        rows = [{"version": v, **row} for v, x in self.evaluations.items() for row in x["samples"]]
        curves = [curve for evaluation in self.evaluations.values() for curve in evaluation.get("curves", ())]
        if curves and dist.is_main():
            metrics.write_jsonl(self.run.folder / "curves.jsonl", curves)
        figures = {str(v): self.figures(v) for v in self.evaluations}
        before = figures[str(self.first)] if self.first in comparable(self.evaluations, self.last) else {}
        summary = {**summary, "steps": self.step, "versions": figures}
        model, after = self.load(self.path(self.last)), figures[str(self.last)]
        self.run.write_results(model, self.tokenizer, rows, summary, before, after)


# -- what is found out of a version ----------------------------------------------------------------
def comparable(evaluations, version) -> dict:
    """{version: its samples} of those that one scorer scored, for --resume may bring another."""
    scorer = evaluations[version].get("scorer")
    return {version: x["samples"] for version, x in evaluations.items() if x.get("scorer") == scorer}


def gains_over(evaluations, version, names: dict) -> dict[str, float]:
    """The paired differences of score and true reward to other versions. names: {name: version}."""
    same, samples, figures = comparable(evaluations, version), evaluations[version]["samples"], {}
    for name, other in names.items():
        if other in same and other != version:
            keys = {f"eval/score_over_{name}": "score", f"gold/score_over_{name}": "gold"}
            figures.update(metrics.gains(same[other], samples, keys))
    return figures


class RejectionSamplingEvaluation:
    """What rejection_sampling.py finds out of a version on held-out prompts: {"samples": one response to each
    at temperature 1, "curves": the expected largest and median score among N responses at each temperature,
    and the best of K to select, "temperature": the one where that is highest, "scorer": its version}."""

    def __init__(self, held_out, scorer, tokenizer, args):
        self.scorer, self.tokenizer, self.args = scorer, tokenizer, args
        self.prompts = random_subset(held_out, args.eval_prompts)
        self.swept = random_subset(held_out, args.sweep_prompts) if args.n_samples else []
        self.fingerprint = [prompt.key for prompt in self.prompts]

    def __call__(self, policy, version, evaluations) -> dict:
        args, k = self.args, self.args.n_samples
        sample = partial(responses.answers, policy, self.tokenizer, args=args)
        score = partial(scorers.score, self.scorer, batch_size=args.score_batch_size)
        seed = partial(dist.seed_of, args.seed, "study", version)
        rounds, first = [], 1 if self.prompts else 0
        with dist.consolidated(policy):  # the weights are gathered once
            pairs = sample(self.prompts, seed=seed(0)) if self.prompts else []
            for i, t in enumerate(args.temperatures if self.swept else (), first):
                rounds.append(sample(self.swept, n=k, temperature=t, top_p=args.top_p, seed=seed(i)))
        samples = describe_samples(pairs, args.eval_dataset or args.dataset, score=score(pairs))
        curves, scored = [], [torch.tensor(score(answers)).view(-1, k) for answers in rounds]
        # A response that would not be selected counts, for the choice, as the worst of all
        lowest = min((scores.min().item() for scores in scored), default=0.0)
        for temperature, answers, scores in zip(args.temperatures, rounds, scored):
            largest, median = metrics.best_of_n(scores)
            usable = [r.finished and r.clean and bool(r.text.strip()) for _, r in answers]
            selectable = torch.where(torch.tensor(usable).view(-1, k), scores, lowest)
            curves.append({
                "policy": f"version {version}", "scorer": self.scorer.version,
                "finished": sum(response.finished for _, response in answers) / len(answers),
                "temperature": temperature, "max": largest, "median": median,
                "best": metrics.best_of_n(selectable)[0][-1],
            })  # fmt: skip
        chosen = max(curves, key=lambda curve: curve["best"], default={"temperature": args.temperatures[0]})
        curves = [{**curve, "chosen": curve is chosen} for curve in curves]
        evaluation = {"samples": samples, "curves": curves, "temperature": chosen["temperature"]}
        return {**evaluation, "scorer": self.scorer.version}

    def figures(self, evaluations, version) -> dict[str, float]:
        """Means of a version's samples, its sweep at the temperature taken, and paired differences to the
        first version and to the one before."""
        evaluation = evaluations[version]
        figures = metrics.means(evaluation["samples"], FIGURES)
        for curve in [curve for curve in evaluation["curves"] if curve["chosen"]]:
            figures.update({f"sweep/{key}": curve[key][-1] for key in ("max", "median")})
            figures["sweep/temperature"] = curve["temperature"]
        compared_with = {"first": min(evaluations), "before": version - 1}
        return {**figures, **gains_over(evaluations, version, compared_with)}


class DPOEvaluation:
    """What dpo_iterative.py finds out of a version: {"samples": one response at temperature 1 to each
    held-out prompt, "pairs": what `pair_figures`(policy, held_out_pairs, args) says, "scorer": its version}.
    A pairwise oracle's score is the probability that a response beats version 0's."""

    def __init__(self, held_out, held_out_pairs, pair_figures, scorer, tokenizer, args):
        """scorer: None where there are no --eval-prompts."""
        self.prompts = random_subset(held_out, args.eval_prompts)
        self.held_out_pairs, self.pair_figures = held_out_pairs, pair_figures
        self.scorer, self.tokenizer, self.args = scorer, tokenizer, args
        self.fingerprint = [*(prompt.key for prompt in self.prompts), *(pair.row for pair in held_out_pairs)]

    def __call__(self, policy, version, evaluations) -> dict:
        pairs = self.held_out_pairs
        figures = self.pair_figures(policy, pairs, self.args) if pairs else {}
        samples = self.answer(policy, version, evaluations) if self.prompts else []
        return {"samples": samples, "pairs": figures, "scorer": self.scorer and self.scorer.version}

    def answer(self, policy, version, evaluations) -> list[dict]:
        args, seed = self.args, dist.seed_of(self.args.seed, "eval")  # one seed whenever a run asks
        size, device = args.score_batch_size, policy.device
        pairs = responses.answers(policy, self.tokenizer, self.prompts, args, seed)
        first = evaluations[0]["samples"] if version else []
        opponents = [responses.Response([], row["response"], row["finished"]) for row in first]
        scores, kl = scorers.oracle_scores(self.scorer, pairs, opponents, size), [0.0] * len(pairs)
        if version:
            kl_to = partial(kl_of, policy)
            kl = loading.ask_policy(args.model, self.tokenizer, args, device, kl_to, pairs, size)
        return describe_samples(pairs, args.eval_dataset or args.dataset, score=scores, kl=kl)

    def figures(self, evaluations, version) -> dict[str, float]:
        """Means of a version's samples, its figures on the held-out pairs, and its samples against those of
        the first version and of the one before."""
        samples = evaluations[version]["samples"]
        figures = {**evaluations[version]["pairs"], **metrics.means(samples, FIGURES)}
        losses = figures.pop("losses", None)  # of each pair
        if version and losses:
            figures.update(metrics.change("pairs/loss_change", evaluations[0]["pairs"]["losses"], losses))
        same = comparable(evaluations, version)
        if version and samples and 0 in same:
            figures.update(metrics.against(same[0], samples, None, "sft/", self.scorer.pairwise))
        if version > 1:
            figures.update(gains_over(evaluations, version, {"before": version - 1}))
        return figures
