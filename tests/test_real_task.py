"""The tasks of docs/results/real_model.sh: different prompts, one right answer, labels of which a tenth is wrong."""

import random
import sys

import processes

sys.path.append(str(processes.ROOT / "tests" / "benchmarks"))
import real_task  # noqa: E402


def test_only_the_answer_alone_is_right():
    made = real_task.rows("add+extract+sort", 30, seed=0)
    assert len({row["prompt"] for row in made}) == 30 and made[1]["category"] == "extract"
    assert all(eval(row["prompt"][8:-1]) == int(row["completion"]) for row in made[::3])
    row = {"completion": "74"}
    assert real_task.correct([""] * 4, ["74", " 74\n", "740", "It is 74"], [row] * 4) == [1, 1, 0, 0]


def test_a_tenth_of_the_labels_is_wrong():
    answers = [(f"{i}", text, text == "yes") for i in range(2000) for text in ("no", "yes")]
    pairs = real_task.labelled([*answers, ("alone", "yes", True)], 0.1, random.Random(0))
    assert len(pairs) == 2000 and 160 < sum(pair["chosen"] == "no" for pair in pairs) < 240
