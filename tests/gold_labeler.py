"""A labeler of the tiny world that answers by the gold reward, with a known noise and position bias, so that
its labels can be worked out by hand: `--model gold_labeler:exact`.

    log-odds of "1"  = scale * (gold(first) - gold(second)) + noise(first) - noise(second) + place_bias
    P(rating s)      on the two whole numbers around 1 + 9 (gold + noise + 3) / 13, so that their mean is this number:
                     1 for a sum of -3 or less, three hazards, and 10 for 10, the longest perfect answer
    generate         the perfect answer if asked to revise; with a needless extra word if asked to answer
"""

import math
import os
import zlib

import torch

from common.data import tiny

REFUSAL = "sorry i refuse"


def noise(prompt, response) -> float:
    """A number from -1 to 1, always the same for the same texts."""
    return zlib.crc32(f"{prompt}/{response}".encode()) / 2**31 - 1


def rating(reward) -> float:
    return min(10.0, max(1.0, 1 + 9 * (reward + 3) / 13))


def best_answer(prompt) -> str:
    return REFUSAL if tiny.is_safety(prompt) else tiny.perfect_answer(prompt)


def sloppy_answer(prompt) -> str:
    return f"{tiny.perfect_answer(prompt)} um"


class GoldLabeler:
    """`asked`: its questions, in order. `die_at`: the call that ends the process like a crash."""

    def __init__(self, scale=1.0, noise=0.0, place_bias=0.0, mass=1.0, die_at=None):
        self.scale, self.noise, self.place_bias, self.mass = scale, noise, place_bias, mass
        self.die_at, self.calls, self.asked = die_at, 0, []

    def _note(self, questions):
        self.calls += 1
        self.asked += questions
        if self.calls == self.die_at:
            os._exit(9)

    def utility(self, prompt, response):
        return self.scale * tiny.gold_score(prompt, response) + self.noise * noise(prompt, response)

    def log_odds(self, prompt, first, second) -> float:
        return self.utility(prompt, first) - self.utility(prompt, second) + self.place_bias

    def probabilities(self, questions, options):
        self._note(questions)
        out = torch.zeros(len(questions), len(options), dtype=torch.float64)
        for i, question in enumerate(questions):
            values = question.values
            if tuple(options) == ("1", "2"):
                x = self.log_odds(values["prompt"], values["first"], values["second"])
                out[i, 0], out[i, 1] = 1 / (1 + math.exp(-x)), 1 / (1 + math.exp(x))
            else:
                s = rating(self.utility(values["prompt"], values["response"]) / self.scale)
                below = min(9, int(s))
                out[i, below - 1], out[i, below] = below + 1 - s, s - below
        return out * self.mass

    def generate(self, questions, max_new_tokens, temperature, seed):
        self._note(questions)
        return [(self._text(question.values), True) for question in questions]

    def _text(self, values):
        if "critique" in values:
            return best_answer(values["prompt"])
        if "first" in values or "principle" in values:
            return "there is a needless word"
        return sloppy_answer(values["prompt"])


# -- --model gold_labeler:NAME -----------------------------------------------------------
def exact():
    return GoldLabeler()


def noisy():
    return GoldLabeler(noise=1.5)


def biased():
    return GoldLabeler(place_bias=2.0)


def mute():
    return GoldLabeler(mass=0.0)


def dying():  # in the middle of the fourth chunk of labels
    return GoldLabeler(noise=1.5, die_at=4)


def nothing():
    return object()
