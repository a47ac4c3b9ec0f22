"""common/run/plots.py: the content of a picture, and whether it can be read."""

import itertools
import random

import pytest
from figures import assert_readable, legend_texts, tick_labels

from common.data import files
from common.run import logs, plots


def points_of(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def test_each_title_has_a_panel_drawn_from_the_rows_with_its_metrics(tmp_path):
    log = logs.Metrics(tmp_path)
    for step in (1, 2, 3):
        log.log(step, 0, **{"loss/nll": step * 10, "my/own": 1}, **({"eval/nll": 5} if step == 2 else {}))
    panels = {"loss": ["loss/nll", "eval/nll"], "mine": ["my/own"], "none": ["nowhere"]}
    figure = plots.curves(tmp_path, panels, name="x.png")
    assert_readable(figure)
    loss, _, none = figure.axes
    assert points_of(loss) == [([1, 2, 3], [10, 20, 30]), ([2], [5])]
    assert legend_texts(loss) == ["loss/nll", "eval/nll"] and not none.lines
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    assert (tmp_path / "x.png").exists()


def test_the_frontier_is_drawn_from_rows_that_have_both_metrics(tmp_path):
    rows = [{"eval/kl": 0.0, "eval/score": 1.0}, {"eval/score": 2.0}]
    files.write_jsonl(tmp_path / "metrics.jsonl", rows[1:])
    assert plots.frontier(tmp_path) is None
    rows.append({"eval/kl": 1.0, "eval/score": 3.0, "gold/score": 1.0})
    files.write_jsonl(tmp_path / "metrics.jsonl", rows)
    figure = plots.frontier(tmp_path)
    assert_readable(figure)
    (axes,) = figure.axes
    assert points_of(axes) == [([0, 1], [1, 3]), ([1], [1])]
    assert legend_texts(axes) == ["eval/score", "gold/score"]
    assert axes.get_xlabel() == "eval/kl"


def curve(policy, temperature, chosen, largest, scorer="s"):
    row = {"policy": policy, "scorer": scorer, "temperature": temperature, "chosen": chosen}
    return {**row, "max": [1, largest], "median": [1, largest / 2]}


def test_best_of_n_is_drawn_for_the_first_and_last_version(tmp_path):
    first = [curve("version 0", 0.7, True, 2), curve("version 0", 1.0, False, 3)]
    last = [curve("version 2", 0.7, False, 5), curve("version 2", 1.0, True, 6)]
    files.write_jsonl(tmp_path / "curves.jsonl", [*first, curve("version 1", 1.0, True, 9), *last])
    figure = plots.best_of_n(tmp_path)
    assert_readable(figure)
    left, right = figure.axes
    assert points_of(left) == [([1, 2], [1, y]) for y in (2, 1, 6, 3)]  # largest and median of each
    assert points_of(right) == [([1, 2], [1, y]) for y in (2, 3, 5, 6)]
    names = ["version 0, T = 0.7", "version 0, T = 1", "version 2, T = 0.7", "version 2, T = 1"]
    assert legend_texts(right) == names
    assert legend_texts(left) == [f"{name}: {x}" for name in (names[0], names[3]) for x in ("largest", "median")]
    assert (tmp_path / "best_of_n.png").exists()
    # what another scorer scored cannot be compared
    files.write_jsonl(tmp_path / "curves.jsonl", [*first, curve("version 1", 0.7, True, 4, scorer="t")])
    assert legend_texts(plots.best_of_n(tmp_path).axes[1]) == ["version 1, T = 0.7"]
    files.write_jsonl(tmp_path / "curves.jsonl", [])
    assert plots.best_of_n(tmp_path) is None


def pairs(n, seed):
    rng, names = random.Random(seed), ["first", "reverse", "llmbar-adver-neighbor", "llmbar-adver-manual"]
    return [
        {"category": rng.choice(names), "responses": [{"rank": i, "score": rng.gauss(1 - i)} for i in (0, 1)]}
        for _ in range(n)
    ]


def test_scores_have_a_panel_for_each_available_measure(tmp_path):
    first, second = pairs(400, 1), pairs(300, 2)
    compares = [{**row, "differences": [1.0]} for row in second]
    accuracy, histogram, categories = "accuracy", "scores", "scores by category"
    many = [{**row, "category": f"a subset of number {i % 25}"} for i, row in enumerate(first)]
    for scorers, titles in (
        ({"runs/reward": first, "runs/advantage_model": second}, [accuracy, histogram, histogram, categories]),
        ({"reward": many, "other": many}, [accuracy, histogram, histogram, categories]),
        ({"pairwise": compares, "reward": first}, [accuracy, histogram, categories]),
        ({"pairwise": compares}, [accuracy]),
        ({"reward": first, "pairwise": compares}, [accuracy, histogram, categories]),
        ({"x" * 200: first[:1]}, [accuracy, histogram]),
    ):
        figure = plots.scores(tmp_path, scorers)
        assert_readable(figure)
        assert [axes.get_title() for axes in figure.axes] == titles
    assert plots.scores(tmp_path, {"reward": []}) is None


def test_every_scorer_has_its_own_histogram_of_better_and_worse_responses(tmp_path):
    """Of pairs 0 < 4, 1.05 < 4 and 2.05 < 3.05: of 40 bins from 0 to 4 the better ones are in 30 and, twice, in
    39, the worse ones in 0, 10 and 20; tenths of these scores are so in bins of a tenth of the width."""
    rows = [
        {"category": "a", "responses": [{"rank": 0, "score": x}, {"rank": 1, "score": y}]}
        for x, y in ((4.0, 0.0), (4.0, 1.05), (3.05, 2.05))
    ]
    tenths, compares = [], [{**row, "differences": [1.0]} for row in rows]
    for row in rows:
        tenths.append({**row, "responses": [{**r, "score": r["score"] / 10} for r in row["responses"]]})
    figure = plots.scores(tmp_path, {"reward": rows, "pairwise": compares, "advantage": tenths})
    assert len(figure.axes) == 3
    for axes, name, width in zip(figure.axes[1:], ("reward", "advantage"), (0.1, 0.01)):
        bars = [[bar for bar in bars if bar.get_height()] for bars in axes.containers]
        places = [[round(bar.get_x() / width) for bar in of_side] for of_side in bars]
        shares = [[bar.get_height() * bar.get_width() for bar in of_side] for of_side in bars]
        assert places == [[30, 39], [0, 10, 20]]
        assert shares == [pytest.approx([1 / 3, 2 / 3], rel=1e-3), pytest.approx([1 / 3] * 3, rel=1e-3)]
        assert legend_texts(axes) == [f"better responses, {name}", f"worse responses, {name}"]


def test_scores_by_category_are_each_scorers_mean_and_deviation(tmp_path):
    scores = {"a": [1.0, 3.0], "b": [0.0, -4.0]}
    rows = [
        {"category": name, "responses": [{"rank": i, "score": x} for i, x in enumerate(both)]}
        for name, both in scores.items()
    ]
    halves = [{**row, "responses": [{**r, "score": r["score"] / 2} for r in row["responses"]]} for row in rows]
    axes = plots.scores(tmp_path, {"reward": rows, "advantage": halves}).axes[3]
    drawn = [(line.get_xdata(), segments.get_segments()) for line, _, [segments] in axes.containers]
    assert [list(x) for x, _ in drawn] == [[2, -2], [1, -1]]
    assert [[abs(b[0] - a[0]) / 2 for a, b in bars] for _, bars in drawn] == [[1, 2], [0.5, 1]]
    assert [label.get_text() for label in tick_labels(axes.yaxis)] == ["a", "b"]
    assert legend_texts(axes) == ["reward", "advantage"]


def test_accuracy_is_drawn_by_tenths_of_the_pairs_with_ties_as_half(tmp_path):
    responses = [[{"rank": 0, "score": d}, {"rank": 1, "score": 0.0}] for d in (3.0, -1.0, 1.0, 0.0) * 5]
    figure = plots.scores(tmp_path, {"reward": [{"category": "", "responses": x} for x in responses]})
    drawn, calibrated = points_of(figure.axes[0])
    assert drawn == ([0, 0, 0.5, *[1] * 4, 2, 3, 3], [0.5, 0.5, 0.25, *[0.5] * 4, 1, 1, 1])
    assert calibrated[0][-1] == 3 and calibrated[1][0] == 0.5


def test_a_plot_that_fails_prints_one_line(capsys):
    plots.draw(lambda: 1 / 0)
    assert capsys.readouterr().out == "a plot could not be drawn: ZeroDivisionError: division by zero\n"



# -- policies that are compared --------------------------------------------------------------------
def results_to_plot(**kls):
    """Results of policies: name -> KL, None if it is unknown."""
    return {
        name: {"score": 1.0, "gold": 2.0, **({} if kl is None else {"kl": kl})} for name, kl in kls.items()
    }


@pytest.mark.parametrize(
    "kls, ticks",
    [
        ({"far": 90.6, "sft": 0.0, "ppo": 0.54, "dpo": 1.82}, ["0", "1", "10", "100"]),
        ({"sft": -0.02, "ppo": 12.0}, ["0", "1", "10"]),
        ({"sft": 0.0, "ppo": 0.5, "dpo": 1.0}, ["0", "1"]),
    ],
)
def test_the_frontier_has_readable_ticks_and_every_policys_name_at_its_point(kls, ticks, tmp_path):
    results = {"1": results_to_plot(**kls, unknown=None, left_out=1.0), "0": results_to_plot(**kls)}
    frontier = plots.compared(tmp_path, results, ["left_out"])
    assert_readable(frontier)
    for axes, kind in zip(frontier.axes, ("the scorer", "the true reward"), strict=True):
        assert {text.get_text(): text.xy[0] for text in axes.texts} == kls and not axes.get_legend()
        assert axes.get_title() == f"{kind} against the KL" and "nats" in axes.get_xlabel()
        assert [label.get_text() for label in tick_labels(axes.xaxis)] == ticks
    assert (tmp_path / "frontier.png").exists()


def test_the_names_of_points_cover_neither_points_nor_each_other(tmp_path):
    """Four policies nearly in one place, one at the right edge."""
    kls = {"rejection_sampling": 1.8, "ppo": 0.5, "ppo_am_sr": 0.5, "dpo_offline": 0.48, "dpo_iterative": 2.6}
    results = results_to_plot(**kls, sft=0.0)
    results["sft"] |= {"score": 0.0, "gold": 1.0}
    for axes in plots.compared(tmp_path, {"1": results}).axes:
        dots = axes.transData.transform([text.xy for text in axes.texts])
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 6
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert not any(box.contains(*dot) for box in boxes for dot in dots)
        assert all(axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 for box in boxes)


def test_policies_of_one_family_are_a_curve_in_order_of_their_kl_with_labels(tmp_path):
    results = results_to_plot(**{"dpo/0.1": 3.0, "sft": 0.0, "dpo/1": 0.5, "dpo/0.3": 1.0, "ppo/0.1": 2.0})
    results["dpo/0.3"]["gold"] = 5.0
    frontier = plots.compared(tmp_path, {"1": results})
    assert_readable(frontier)
    gold = frontier.axes[1]
    assert points_of(gold) == [([0.5, 1, 3], [2, 5, 2]), ([0], [2]), ([2], [2])]
    labels = {text.get_text(): text.xy for text in gold.texts}
    assert labels == {"1": (0.5, 2), "0.3": (1, 5), "dpo/0.1": (3, 2), "sft": (0, 2), "ppo/0.1": (2, 2)}
    assert plots.compared(tmp_path, {"1": results_to_plot(a=0.0, b=None)}) is None


@pytest.mark.parametrize("low, high", [(1.0, 1.0000000000000004), (1e17, 1e17 + 32), (0.0, 5e-324), (2.0, 2.0)])
def test_nearly_equal_scores_are_drawn(low, high, tmp_path):
    responses = [{"rank": i, "score": score} for i, score in enumerate((high, low))]
    rows = [{"prompt": [], "source": "a", "category": None, "responses": responses}]
    assert plots.scores(tmp_path, {"a": rows}) and (tmp_path / "scores.png").exists()
