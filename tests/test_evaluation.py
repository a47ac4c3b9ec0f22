"""common/evaluation.py: rows of samples.jsonl, length and score. (What its objects say of a model: the tests of
the scripts.)"""

from functools import partial
from types import SimpleNamespace

import pytest
from scorers import TOKENIZER, user

from common import evaluation, generate


def test_describe_sample_tells_the_true_reward_of_the_tiny_world_alone():
    turns, text = [user("reverse ant fox owl")], "owl um fox"
    ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
    describe = partial(
        evaluation.describe_sample, turns, generate.Response(ids, text, True), category="reverse", score=0.5
    )
    row = describe(true_reward=False)
    assert row == {
        "prompt": turns,
        "response": "owl um fox",
        "tokens": 4,
        "finished": True,
        "category": "reverse",
        "score": 0.5,
    }
    known = describe(true_reward=True)
    assert known == {**row, "gold": 1.7, "perfect": 3.0}  # two right words, one needless


def test_length_figures_are_of_prompts_with_three_samples_or_more_that_vary():
    """Correlations 1, 1 and 0; of two samples, of equal lengths or scores there are none."""
    lengths = [[10, 20, 30], [3, 2, 1], [1, 2, 3], [1, 2], [7, 7, 7], [1, 2, 3]]
    scores = [[1, 2, 3], [3, 2, 1], [1, 0, 1], [1, 2], [1, 2, 3], [2, 2, 2]]
    sampled = [SimpleNamespace(samples=[range(n) for n in of_prompt]) for of_prompt in lengths]
    figures = evaluation.length_figures(sampled, scores)
    assert figures == {"length/correlation": pytest.approx(2 / 3), "length/prompts": 3}
    assert evaluation.length_figures(sampled[3:], scores[3:]) == {}
