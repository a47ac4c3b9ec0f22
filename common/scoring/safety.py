"""Llama 2's pair of reward models: the safety gate, and the logistic regression that calibrates it."""

import zlib
from functools import partial

import torch

from common.losses import safety_gated_score
from common.data import progress
from common.scoring import scorers


class Gated:
    """The scorer of ppo.py. With --safety-scorer it is Llama 2's pair: the safety model's score is used for
    prompts tagged `is_safety` and for responses that this model finds unsafe."""

    def __init__(self, scorer, safety, args):
        self.scorer = scorer
        self.safety = safety
        self.args = args

    def score(self, pairs) -> torch.Tensor:
        """Score each (prompt, response): (B,), on every rank.

        Sets `metrics`: the means of --scorer's parts, and `reward/gated`, the share of responses that got the
        safety model's score."""
        args = self.args
        scores, part_means = scorers.score_and_parts(self.scorer, pairs, args.score_batch_size)
        self.metrics = {**part_means, "reward/gated": 0.0}
        scores = torch.tensor(scores)
        if self.safety:
            safety = torch.tensor(scorers.score(self.safety, pairs, args.score_batch_size))
            tagged = torch.tensor([bool(prompt.row.data.get("is_safety")) for prompt, _ in pairs])
            gated = tagged | (safety.sigmoid() < args.safety_threshold)
            self.metrics["reward/gated"] = gated.float().mean().item()
            scores = safety_gated_score(safety, scores, tagged, args.safety_threshold)
        if len(scores) > 1 and (scores == scores[0]).all():
            progress.note(f"all {len(scores)} responses have the score {scores[0]:g}: it teaches nothing")
        return scores


def load_gated(args, tokenizer, device) -> Gated:
    """Load --scorer and --safety-scorer. tokenizer: the policy's."""
    load = partial(scorers.load_scorer, tokenizer=tokenizer, device=device, max_length=args.max_length)
    scorer = load(args.scorer)
    safety = args.safety_scorer and load(args.safety_scorer, safety=True)
    return Gated(scorer, safety, args)


def fit_logistic_regression(x, won, n_games, penalty) -> torch.Tensor:
    """Fit a logistic regression P(win) = sigma(x w) and return its weights w, (..., features). They maximise
    the log-likelihood of `won` in `n_games` games minus w' penalty w / 2.

    x: (n, features). won: (..., n). penalty: (features, features). All in float64, since Newton's method runs
    until the step is below 1e-10."""
    weights = won.new_zeros(*won.shape[:-1], x.shape[1])
    for _ in range(1000):
        p = (weights @ x.T).sigmoid()
        curvature = (x.T * (n_games * p * (1 - p))[..., None, :]) @ x + penalty
        slope = (won - n_games * p) @ x - weights @ penalty
        step = torch.linalg.solve(curvature, slope)
        far = (step @ x.T).abs().amax(-1, keepdim=True) + 1e-12  # largest change of a logit
        step = step * far.log1p() / far  # full Newton steps can overshoot and never converge
        weights = weights + step
        if step.abs().max() < 1e-10:
            break
    return weights


def fit_safety_gate(rows, threshold):
    """Calibrate a safety model: fit P(safe) = sigmoid(scale * r + bias) by logistic regression. The fit is
    needed because the Bradley-Terry loss leaves the offset of r free.

    Responses that are labelled safe or unsafe are split into two halves by prompt: one is for the fit, the
    other measures how well P(safe) < threshold finds unsafe responses.
    Returns ({"scale", "bias"}, metrics), or (None, {}) if a half lacks safe or unsafe responses."""
    halves = [], []
    for row in rows:
        half = halves[zlib.crc32(repr(row["prompt"]).encode()) % 2]  # by prompt: no prompt is in both halves
        half.extend((r["score"], float(r["is_safe"])) for r in row["responses"] if "is_safe" in r)
    if not all({is_safe for _, is_safe in half} == {0.0, 1.0} for half in halves):
        return None, {}
    (score, safe), (test_score, test_safe) = (torch.tensor(half).double().T for half in halves)
    x = torch.stack([score - score.mean(), torch.ones_like(score)], 1)  # centred: the penalty needs a zero
    penalty = 2e-4 * len(x) * torch.eye(2).to(x)  # adds 1e-4 |weights|^2 to the mean loss
    scale, bias = fit_logistic_regression(x, safe, n_games=1, penalty=penalty).tolist()
    bias -= scale * score.mean().item()
    caught, unsafe = torch.sigmoid(scale * test_score + bias) < threshold, test_safe == 0
    n_caught, n_both = caught.sum().item(), (caught & unsafe).sum().item()
    recall = n_both / unsafe.sum().item()
    metrics = {"gate/responses": len(caught), "gate/caught": n_caught, "gate/recall": recall}
    if n_caught:
        metrics["gate/precision"] = n_both / n_caught
    return {"scale": scale, "bias": bias}, metrics
