"""Annotators of the tiny world as scorers: whoever labelled its pairs (tiny.rows), asked anew of any response.

    --scorer annotators:noisy=SEED    utility and a Gumbel draw: of two responses the higher score is a label of
                                      Bradley and Terry, of eight the highest that of Plackett and Luce
    --scorer annotators:utility       their utility, without the draw
    --scorer annotators:helpful       the true helpfulness, without the pay per word
"""

import math
import random

from common.data import tiny


def helpful(prompts, responses, rows):
    return [tiny.gold_reward(prompt, response) for prompt, response in zip(prompts, responses)]


def utility(prompts, responses, rows):
    """Helpfulness and 0.1 a word, tiny.rows' length_bias."""
    words = (len(response.split()) for response in responses)
    return [gold + 0.1 * n for gold, n in zip(helpful(prompts, responses, rows), words)]


def noisy(seed):
    """A scorer: utility plus -log(-log u), u drawn by seed, prompt and response, so that neither the batch nor
    a second sample of the same text changes what is said of it."""

    def score(prompts, responses, rows):
        draws = (random.Random(f"{seed}/{p}/{r}").random() or 0.5 for p, r in zip(prompts, responses))
        return [u - math.log(-math.log(x)) for u, x in zip(utility(prompts, responses, rows), draws)]

    return score
