"""common/evaluation.py: rows of samples.jsonl. (What its objects say of a model: the tests of the scripts.)"""

from functools import partial

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
