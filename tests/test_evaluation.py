"""common/evaluation.py: rows of samples.jsonl. (What its objects say of a model: the tests of the scripts.)"""

from types import SimpleNamespace

import pytest
from scorers import TOKENIZER, prompt

from common import evaluation, generate
from common.batches import Row


def test_describe_samples_tells_the_true_reward_of_the_tiny_world_alone():
    asked = prompt("reverse ant fox owl")._replace(row=Row("rows:1", {"category": "reverse"}))
    ids = [*TOKENIZER("owl um fox")["input_ids"], TOKENIZER.eos_token_id]
    pairs = [
        (asked, generate.Response(ids, "owl um fox", True)),
        (asked, generate.Response([5], "ant", False)),
    ]
    first, second = evaluation.describe_samples(pairs, "rows.jsonl", score=[0.5, 2.0])
    said = {"prompt": asked.turns, "response": "owl um fox", "tokens": 4, "finished": True}
    assert first == {**said, "category": "reverse", "score": 0.5} and second["score"] == 2.0
    known = evaluation.describe_samples(pairs, "tiny", score=[0.5, 2.0])
    assert known[0] == {**first, "gold": 1.7, "perfect": 3.0}  # two right words, one needless
    assert evaluation.describe_samples(pairs, "rows.jsonl")[0] == said


def test_length_figures_are_of_prompts_with_three_samples_or_more_that_vary():
    """Correlations 1, 1 and 0; of two samples, of equal lengths or scores there are none."""
    lengths = [[10, 20, 30], [3, 2, 1], [1, 2, 3], [1, 2], [7, 7, 7], [1, 2, 3]]
    scores = [[1, 2, 3], [3, 2, 1], [1, 0, 1], [1, 2], [1, 2, 3], [2, 2, 2]]
    sampled = [SimpleNamespace(samples=[range(n) for n in of_prompt]) for of_prompt in lengths]
    figures = evaluation.length_figures(sampled, scores)
    assert figures == {"length/correlation": pytest.approx(2 / 3), "length/prompts": 3}
    assert evaluation.length_figures(sampled[3:], scores[3:]) == {}
