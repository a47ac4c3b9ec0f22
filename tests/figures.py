"""Check that a picture can be read: its ticks, legends and margins."""

import itertools


def tick_labels(axis) -> list:
    """The visible labels of an xaxis or a yaxis."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def legend_texts(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def assert_readable(figure):
    """Ticks do not overlap and are not TeX, legends cover no curve, nothing is cut off."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = tick_labels(axis)
            assert 2 <= len(labels) <= 25 and not any("mathdefault" in label.get_text() for label in labels)
            for a, b in itertools.pairwise(labels):
                assert not a.get_window_extent().overlaps(b.get_window_extent()), (a, b)
        if axes.get_legend():
            covered = [axes.bbox, *(label.get_window_extent() for label in tick_labels(axes.xaxis))]
            legend = axes.get_legend().get_window_extent()
            assert not any(legend.overlaps(box) for box in (*covered, axes.xaxis.label.get_window_extent()))
        assert axes.get_title() and axes.get_xlabel()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
