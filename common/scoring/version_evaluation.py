"""Evaluate each version of the policy of rejection sampling and iterative DPO on held-out prompts."""

from functools import partial

import torch

from common import dist, responses
from common.data import comparisons, mixtures
from common.loading import pretrained
from common.scoring import measures, scorers
from common.scoring.evaluation import SAMPLE_METRICS, describe_samples, kl_of, logprobs_of, sampler_metrics


def comparable(evaluations, version) -> dict:
    """Return {version: samples} of the versions that were scored by the same scorer as `version`. --resume
    may have changed the scorer, and scores of different scorers cannot be compared."""
    scorer = evaluations[version].get("scorer")
    return {version: x["samples"] for version, x in evaluations.items() if x.get("scorer") == scorer}


def gains_over(evaluations, version, names: dict) -> dict[str, float]:
    """Compute the paired differences of score and true reward between `version` and other versions.

    names: {name for the metric: other version}. Versions that are missing or not comparable are left out."""
    same = comparable(evaluations, version)
    samples = evaluations[version]["samples"]
    metrics = {}
    for name, other in names.items():
        if other in same and other != version:
            keys = {f"eval/score_over_{name}": "score", f"gold/score_over_{name}": "gold"}
            metrics.update(measures.gains(same[other], samples, keys))
    return metrics


class RejectionSamplingEvaluation:
    """The evaluation of rejection_sampling.py. Calling it with a version of the policy returns, for held-out
    prompts:

    samples: one response to each prompt at temperature 1.
    curves: for each temperature, the expected largest and median score among N responses, N = 1..K, and
      `best`, the expected score of the response that would be selected from K.
    temperature: the one with the highest `best`.
    scorer: the version of the scorer."""

    def __init__(self, held_out, scorer, tokenizer, args):
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.args = args
        self.prompts = mixtures.random_subset(held_out, args.eval_prompts)
        self.swept = mixtures.random_subset(held_out, args.sweep_prompts) if args.n_samples else []
        self.fingerprint = [prompt.key for prompt in self.prompts]

    def __call__(self, policy, version, evaluations) -> dict:
        args = self.args
        k = self.args.n_samples
        sample = partial(responses.answers, policy, self.tokenizer, args=args)
        score = partial(scorers.score, self.scorer, batch_size=args.score_batch_size)
        seed = partial(dist.seed_of, args.seed, "study", version)
        with dist.consolidated(policy):  # gathers the weights once for all sampling
            # The same seed in all evaluations of a run: less noise in gains
            pairs = sample(self.prompts, seed=dist.seed_of(args.seed, "eval")) if self.prompts else []
            ways = enumerate(args.temperatures if self.swept else (), 1)
            rounds = [sample(self.swept, n=k, temperature=t, top_p=args.top_p, seed=seed(i)) for i, t in ways]
        samples = describe_samples(pairs, args.eval_dataset or args.dataset, score=score(pairs))
        curves = []
        scored = [torch.tensor(score(answers)).view(-1, k) for answers in rounds]
        # To choose the temperature, a response that could not be selected gets the lowest score of all
        lowest = min((scores.min().item() for scores in scored), default=0.0)
        for temperature, answers, scores in zip(args.temperatures, rounds, scored):
            largest, median = measures.best_of_n(scores)
            selectable = torch.where(torch.tensor([r.usable for _, r in answers]).view(-1, k), scores, lowest)
            curves.append({
                "policy": f"version {version}", "scorer": self.scorer.version,
                "finished": sum(response.finished for _, response in answers) / len(answers),
                "temperature": temperature, "max": largest, "median": median,
                "best": measures.best_of_n(selectable)[0][-1],
            })  # fmt: skip
        chosen = max(curves, key=lambda curve: curve["best"], default={"temperature": args.temperatures[0]})
        curves = [{**curve, "chosen": curve is chosen} for curve in curves]
        evaluation = {"samples": samples, "curves": curves, "temperature": chosen["temperature"]}
        return {**evaluation, "scorer": self.scorer.version}

    def metrics_of(self, evaluations, version) -> dict[str, float]:
        """Compute the metrics of a version: means of its samples, its sweep at the chosen temperature, and
        paired differences to the first version and to the previous one."""
        evaluation = evaluations[version]
        metrics = measures.means(evaluation["samples"], SAMPLE_METRICS)
        for curve in [curve for curve in evaluation["curves"] if curve["chosen"]]:
            metrics.update({f"sweep/{key}": curve[key][-1] for key in ("max", "median")})
            metrics["sweep/temperature"] = curve["temperature"]
        compared_with = {"first": min(evaluations), "before": version - 1}
        return {**metrics, **gains_over(evaluations, version, compared_with)}


class DPOEvaluation:
    """The evaluation of dpo_iterative.py. Calling it with a version of the policy returns:

    samples: one response at temperature 1 to each held-out prompt. With a pairwise oracle, its score is the
      probability that it beats the response of version 0.
    pairs: the result of pair_metrics(policy, held_out_pairs, args).
    sampler: the result of sampler_metrics for these responses.
    scorer: the version of the scorer. pairwise: whether it compares two responses."""

    def __init__(self, held_out, held_out_pairs, pair_metrics, scorer, tokenizer, args):
        """scorer: None if --eval-prompts is 0."""
        self.prompts = mixtures.random_subset(held_out, args.eval_prompts)
        self.held_out_pairs = held_out_pairs
        self.pair_metrics = pair_metrics
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.args = args
        self.fingerprint = [p.key for p in self.prompts] + comparisons.fingerprint(held_out_pairs)

    def __call__(self, policy, version, evaluations) -> dict:
        pairs = self.held_out_pairs
        metrics = self.pair_metrics(policy, pairs, self.args) if pairs else {}
        samples, sampler = self.answer(policy, version, evaluations) if self.prompts else ([], {})
        scorer = self.scorer and self.scorer.version
        pairwise = self.scorer and self.scorer.pairwise
        results = {"samples": samples, "pairs": metrics, "sampler": sampler}
        return {**results, "scorer": scorer, "pairwise": pairwise}

    def answer(self, policy, version, evaluations) -> tuple[list[dict], dict[str, float]]:
        args = self.args
        seed = dist.seed_of(args.seed, "eval")  # the same in all evaluations of a run: less noise in gains
        size = args.score_batch_size
        pairs = responses.answers(policy, self.tokenizer, self.prompts, args, seed)
        first = evaluations[0]["samples"] if version else []
        opponents = [responses.Response([], row["response"], row["finished"]) for row in first]
        scores = scorers.oracle_scores(self.scorer, pairs, opponents, size)
        logprobs = logprobs_of(policy, pairs, size)  # for the KL, and to check the sampler
        kl = [0.0] * len(pairs)
        if version:
            kl_to = partial(kl_of, logprobs, pairs=pairs, size=size)
            kl = pretrained.ask_policy(args.model, self.tokenizer, args, policy.device, kl_to)
        samples = describe_samples(pairs, args.eval_dataset or args.dataset, score=scores, kl=kl)
        return samples, sampler_metrics(pairs, logprobs)

    def metrics_of(self, evaluations, version) -> dict[str, float]:
        """Compute the metrics of a version: means of its samples, metrics on the held-out pairs and of the
        sampler, and comparisons of its samples with those of the first and the previous version."""
        evaluation = evaluations[version]
        samples = evaluation["samples"]
        metrics = {**evaluation["pairs"], **measures.means(samples, SAMPLE_METRICS)}
        metrics.update(evaluation.get("sampler", {}))  # a run begun before it was measured has no sampler
        losses = metrics.pop("losses", None)  # one per pair
        if version and losses:
            metrics.update(measures.change("pairs/loss_change", evaluations[0]["pairs"]["losses"], losses))
        same = comparable(evaluations, version)
        if version and samples and 0 in same:
            pairwise = evaluation.get("pairwise", self.scorer.pairwise)  # --resume may change the scorer
            metrics.update(measures.against(same[0], samples, None, "sft/", pairwise))
        if version > 1:
            metrics.update(gains_over(evaluations, version, {"before": version - 1}))
        return metrics
