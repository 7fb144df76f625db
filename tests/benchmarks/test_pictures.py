"""Pictures of results: legend, labels, and the error where matplotlib is missing."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import pictures
from benchmarks.pictures import Bar, Point, max_length_picture, seconds_per_step_picture
from longctx.launch.terminal import token_label

BARS = [Bar("one device", 1, None), Bar("TRL ring", 2, 40_000), Bar("hybrid", 4, 3_000_000)]


def test_a_legend_lies_beside_the_title_and_ticks_are_plain_numbers(tmp_path, monkeypatch) -> None:
    """The seconds lie within one power of 10, where matplotlib writes minor ticks as 6 × 10⁻¹."""
    figures, save = [], pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, *given: (figures.append(figure), save(figure, *given)))
    points = [Point("ring", 2, 4096, 0.6), Point("ulysses", 2, 8192, 0.9)]
    max_length_picture(tmp_path / "a.png", BARS, title="Longest sequences: " + 60 * "m", note="predicted")
    seconds_per_step_picture(tmp_path / "b.png", points, title="Seconds per step: " + 60 * "m")
    for figure in figures:
        [legend], [title] = figure.legends, [text for text in figure.texts if "mmm" in text.get_text()]
        assert not legend.get_window_extent().overlaps(title.get_window_extent())
    bars, seconds = (figure.axes[0].yaxis for figure in figures)
    assert bars.get_view_interval()[0] == 0
    for axis in (bars, seconds):
        labels = [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]
        assert len(labels) > 1
        assert all(re.fullmatch(r"[\d.]+[kM]?", label) for label in labels), labels


def test_without_matplotlib_the_way_to_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'pip install "matplotlib>=3'):
        max_length_picture(tmp_path / "a.png", BARS, title="tiny")


@pytest.mark.parametrize(
    ("tokens", "three", "two"),
    [
        (0.3, "0", "0"),
        (999, "999", "999"),
        (32768, "32.8k", "33k"),
        (999_600, "1M", "1M"),
        (1 << 20, "1.05M", "1M"),
        (1_949_000, "1.95M", "1.9M"),
        (12_700_000, "12.7M", "13M"),
        (1_900_000_000, "1,900M", "1,900M"),
    ],
)
def test_labels_are_short_and_1k_is_1000(tokens, three, two) -> None:
    assert (token_label(tokens), token_label(tokens, 2)) == (three, two)
