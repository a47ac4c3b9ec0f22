"""Labelers of the tiny world that learned from people's labels of other pairs (experiments.py, group labelers): the
pairwise preference models of common/programs/pairwise.py, `--model trained_labeler:same_size_0`, where 0 is the seed.
Each is asked in both orders, so that the place of a response says nothing."""

from functools import partial

import torch

from common.programs import pairwise


class TrainedLabeler:
    def __init__(self, path):
        self.log_odds = pairwise.oracle(path)

    def probabilities(self, questions, options):
        values = [question.values for question in questions]
        duels = [([{"role": "user", "content": v["prompt"]}], v["first"], v["second"]) for v in values]
        p = torch.tensor(self.log_odds(duels), dtype=torch.float64).sigmoid()
        return torch.stack([p, 1 - p], dim=1)

    def generate(self, questions, max_new_tokens, temperature, seed):
        raise NotImplementedError("it only compares")


for size in ("smaller", "same_size", "larger"):
    for seed in range(10):
        folder = f"runs/experiments/labelers/{seed}/{size}_labeler"
        globals()[f"{size}_{seed}"] = partial(TrainedLabeler, folder)
