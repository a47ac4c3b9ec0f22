"""The tasks of docs/results/real_model.sh: all prompts differ, each has one correct answer, and a tenth of
the labels is wrong. And the table of docs/results/real_reward.sh."""

import random
import sys

import processes
import pytest

from common.data import files

sys.path.append(str(processes.ROOT / "tests" / "benchmarks"))
import real_reward  # noqa: E402
import real_task  # noqa: E402


def test_only_the_bare_answer_is_correct():
    made = real_task.rows("add+extract+sort", 30, seed=0)
    assert len({row["prompt"] for row in made}) == 30 and made[1]["category"] == "extract"
    assert all(eval(row["prompt"][8:-1]) == int(row["completion"]) for row in made[::3])
    row = {"completion": "74"}
    assert real_task.correct([""] * 4, ["74", " 74\n", "740", "It is 74"], [row] * 4) == [1, 1, 0, 0]


def test_a_tenth_of_the_labels_is_wrong():
    answers = [(f"{i}", text, text == "yes") for i in range(2000) for text in ("no", "yes")]
    pairs = real_task.labelled([*answers, ("alone", "yes", True)], 0.1, random.Random(0))
    assert len(pairs) == 2000 and 160 < sum(pair["chosen"] == "no" for pair in pairs) < 240


def test_right_answers_rank_above_their_different_wrong_ones():
    answers = [("a", text, text == "A", "upper") for text in ("A", "x", "x", "A", "y")]
    answers += [("b", "B", True, "upper"), ("c", "5", False, "extract")]  # no pair
    answers += [("d", text, text == "3", "extract") for text in ("3", "7", "8")]
    of = lambda *texts: [{"text": text, "score": float(i == 0)} for i, text in enumerate(texts)]
    first = {"prompt": "a", "responses": of("A", "x", "y"), "category": "upper"}
    last = {"prompt": "d", "responses": of("3", "7", "8"), "category": "extract"}
    assert real_task.ranked_answers(answers) == [first, last]
    assert real_task.ranked_answers(answers, 3) == [first, {**last, "responses": of("3", "7")}]
    assert real_task.ranked_answers(answers, 2) == [first]


def rows(right, prompts):
    return [{"prompt": prompt, "right": value} for prompt, value in zip(prompts, right, strict=True)]


def test_a_gain_has_the_wider_interval_of_prompts_and_seeds():
    before = [rows([0, 0, 1, 0], "abcd"), rows([0, 1, 0, 0], "efgh")]
    after = [rows([1, 1, 1, 0], "abcd"), rows([0, 1, 1, 0], "efgh")]
    # by prompt: three of eight differences are 1, 1.96 x sqrt(8 x 0.375 x 0.625 x 8 / 7) / 8
    assert real_reward.gain(before, after) == pytest.approx((0.375, 0.358643), abs=1e-6)
    # by seed, two methods of two seeds: 4.303 x 0.2 / sqrt(2)
    assert real_reward.gain(before, after, 0.2, 2) == pytest.approx((0.375, 0.608536), abs=1e-6)
    assert real_reward.gain(before, after, 0.1, 2)[1] == pytest.approx(0.358643, abs=1e-6)


def test_the_spread_over_seeds_is_pooled_over_methods():
    # (0.5, 0.25) deviates by 0.125 twice, (0.5, 0.5, 0.5) not: squares 0.03125 of 1 + 2 degrees; one seed has none
    assert real_reward.spread([[0.5, 0.25], [0.5, 0.5, 0.5], [9.0]]) == pytest.approx((0.102062, 3), abs=1e-6)
    assert real_reward.spread([[0.5], [0.2]]) == (0.0, 0)


def test_over_one_method_the_luck_of_its_seeds_counts_once():
    """Shares of two seeds: ppo 0 and 1, one method 1/2 and 1/2, the other 1/2 and 0."""
    share = {"sft": (0, 0), "ppo": (0, 4), "a": (2, 2), "b": (2, 0)}  # right of four
    of = lambda n, seed: rows([1] * n + [0] * (4 - n), [f"{seed}{i}" for i in range(4)])
    answers = {policy: {seed: of(n, seed) for seed, n in enumerate(counts)} for policy, counts in share.items()}
    # second less first seed 1, 0, -1/2: mean 1/6; squares of the deviations 25/36, 1/36, 16/36; half of them is spread
    # over the two seeds, of 2 degrees of freedom
    of_arm = (25 + 1 + 16) / 36 / 2 / 2
    deviation, freedom = real_reward.between([[*answers[policy].values()] for policy in ("ppo", "a", "b")])
    assert (deviation, freedom) == (pytest.approx((2 * of_arm) ** 0.5), 2)
    half = 4.303 * deviation / 2**0.5
    cells = real_reward.over(answers, "ppo")
    assert [*cells] == ["a", "b"] and cells["a"][1] == f"+0.00 [{-half:+.2f}, {half:+.2f}]"
    assert real_reward.between([[of(1, 0)], [of(2, 0)]]) == (0.0, 0)  # one seed
    assert [*real_reward.over(answers, "sft")] == ["ppo", "a", "b"]


def test_answers_to_one_prompt_in_two_seeds_count_as_one_prompt():
    before = [rows([0, 0], "ab"), rows([0, 0], "ab")]
    after = [rows([1, 0], "ab"), rows([1, 0], "ab")]
    # sums of two clusters are 1 and -1 from the mean: 1.96 x sqrt(2 x 2) / 4; four prompts would have 0.57
    assert real_reward.gain(before, after) == pytest.approx((0.5, 0.98))


def test_the_table_of_hand_made_answers(tmp_path):
    lines = ["seed 1, ppo: 100 s, 90 s of CPU", "seed 2, ppo: 99 s, 150 s of CPU", "seed 3, ppo: 9 s, 9 s of CPU"]
    lines += [f"seed {seed}, {step}: 60 s, 60 s of CPU" for seed in (1, 2, 3) for step in ("sft", "grpo")]
    (tmp_path / "times.txt").write_text("\n".join(lines))
    folders = [tmp_path / "1", tmp_path / "2"]
    texts = {"sft": ("A", "2", "a", "4"), "ppo": ("A", "1", "B", "4"), "grpo": ("A", "2", "B", "4")}  # two of each seed
    for seed, folder in enumerate(folders):
        asked = [(f"say a {seed}", "A" if seed == 0 else "B", "upper"), (f"count {seed}", "13"[seed], "extract")]
        test = [{"prompt": q, "completion": right, "category": task} for q, right, task in asked]
        (folder / "answers").mkdir(parents=True)
        files.write_jsonl(folder / "test.jsonl", test)
        answers = []
        for policy, responses in texts.items():
            for (question, _, _), text in zip(asked, responses[2 * seed :]):
                row = {"policy": policy, "prompt": [{"role": "user", "content": question}], "response": text}
                answers.append({**row, "kl": 2.0 * (policy == "ppo"), "finished": text != "4"})
        files.write_jsonl(folder / "answers" / "samples.jsonl", answers)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in real_reward.gains(folders)]
    assert cells[2] == ["SFT", "25 %", "", "", "50, 0", "50 %", "0 %", "0.0", "75%", "1"]
    assert cells[3][:2] == ["PPO", "25 -> 75 %"] and cells[3][2].startswith("+0.50") and cells[3][3] == ""
    assert cells[3][4:] == ["100, 50", "100 %", "50 %", "2.0", "75%", "2"]
    assert cells[4][:2] == ["GRPO", "25 -> 50 %"] and cells[4][2].startswith("+0.25")
    assert cells[4][3].startswith("-0.25") and cells[4][4] == "50, 50"
    # a method that one seed lacks is compared in the others alone
    rows_of = files.read_jsonl(folders[0] / "answers" / "samples.jsonl")
    files.write_jsonl(folders[0] / "answers" / "samples.jsonl", [row for row in rows_of if row["policy"] == "sft"])
    last = real_reward.gains(folders)[-1].split("|")
    assert last[2].strip() == "0 -> 50 %" and last[5].strip() == "-, 50"
    assert last[4].strip().startswith("+0.00")  # over PPO in seed 2


def test_cells_of_arms_and_of_a_proxy():
    def answers(*numbers):  # whether it is right, and its score
        names = zip("ab", ("upper", "extract"), numbers, strict=True)
        return [{"prompt": p, "category": c, "right": right, "score": s, "kl": 1.0} for p, c, (right, s) in names]

    before = [answers((0, 1.0), (1, 3.0)), answers((0, 0.0), (0, 2.0))]
    after = [answers((1, 4.0), (1, 4.0)), answers((1, 1.0), (0, 1.0))]
    [cells] = real_reward.compared([(before, after)])
    assert cells[0] == "25 -> 75 %" and cells[1].startswith("+0.50")
    assert cells[2:] == ["100, 50", "50 %", "100 %", "1.0"]
    # means rise by 2 and 0, and both seeds' scores before deviate by the square root of 2: (1.41 + 0) / 2
    assert real_reward.proxy(before, after) == "+0.7"


def test_rollouts_of_metrics(tmp_path):
    files.write_json(tmp_path / "args.json", {"args": {"prompts_per_iteration": 16, "n_samples": 4}})
    metrics = [{"step": 0}, {"reward/score": 0.2}, {"eval/score": 1.0}, {"reward/score": 0.4}]
    files.write_jsonl(tmp_path / "metrics.jsonl", metrics)
    assert real_reward.rollouts(tmp_path) == (64, [0.2, 0.4])
