"""The pure pieces of the plots: scales, ticks, words, colours, SVG."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.bench.report import scales, svg
from gradsync.bench.report.bars import Bar, bar_plot
from gradsync.bench.report.colours import DARK, LIGHT, SLOTS, Style, Theme, css, styles_of
from gradsync.bench.report.lines import Axis, Curve, Point, line_plot
from gradsync.bench.report.spread import Spread, spread_plot
from gradsync.bench.report.timeline import MOST_RANKS, Lanes, timeline_plot
from gradsync.bench.result import Timeline

STYLE = Style(slot="2", shape=2)
WORDS = {"name": "n", "title": "a <title>", "subtitle": "b & c", "says": "d"}
SHOWN = Axis(title="size", show=scales.number)
positive = st.floats(min_value=1e-7, max_value=1e7)


# ------------------------------------------------------------------------- scales


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-2, 1e6), most=st.integers(3, 9))
def test_ticks_lie_inside_evenly_and_are_not_too_many(low, span, most):
    ticks = scales.linear_ticks(low, low + span, most)
    assert 1 <= len(ticks) <= most
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@given(low=positive, factor=st.floats(1.2, 1e9))
def test_ticks_of_a_logarithmic_axis_lie_inside_and_rise(low, factor):
    ticks = scales.log_ticks(low, low * factor)
    assert 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in ticks)


@given(low=st.floats(0.01, 0.99), high=st.floats(1.01, 100))
def test_one_is_always_among_the_ticks_of_ratios(low, high):
    assert 1.0 in scales.ratio_ticks(low, high)


@given(low=positive, factor=st.floats(1.1, 1e6), share=st.floats(-1, 2), is_log=st.booleans())
def test_a_scale_never_leaves_the_plot_and_keeps_the_order(low, factor, share, is_log):
    scale = scales.Scale(low=low, high=low * factor, start=300, end=20, is_log=is_log)
    value = low + share * (low * factor - low)
    assert 20 - 1e-6 <= scale(value) <= 300 + 1e-6
    assert scale(low) == pytest.approx(300)
    assert scale(low * factor) == pytest.approx(20)


def test_a_scale_of_one_value_puts_it_in_the_middle():
    assert scales.Scale(low=2, high=2, start=0, end=10, is_log=True)(2) == 5


@pytest.mark.parametrize(
    ("value", "shown"), [(1e-6, "1 µs"), (0.00025, "250 µs"), (1.0, "1 s"), (0.001, "1 ms")]
)
def test_times_of_ticks_have_the_unit_that_suits(value, shown):
    assert scales.short_time(value) == shown


# ------------------------------------------------------------------------- colours


def luminance(colour: str) -> float:
    linear = [_linear(channel) for channel in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _channels(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


# How eyes that lack one kind of cone see linear RGB: Machado, Oliveira and Fernandes (2009).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red ones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green ones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}


def lab(colour: str, eyes: str) -> tuple[float, float, float]:
    linear = [_linear(channel) for channel in _channels(colour)]
    seen = [
        min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in EYES[eyes]
    ]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        _cube_root(sum(a * b for a, b in zip(row, seen, strict=True)) / w)
        for row, w in zip(to_xyz, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _cube_root(value: float) -> float:
    return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_stands_out_from_the_page(theme: Theme):
    for colour in (*theme.series, theme.none):
        assert contrast(colour, theme.surface) >= 3, colour
    for colour in (theme.ink, theme.muted):
        assert contrast(colour, theme.surface) >= 4.5, colour


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_usual_colours_differ_for_all_eyes(theme: Theme, eyes: str):
    usual = {"none": theme.none, **dict(enumerate(theme.series[:4]))}
    for (a, one), (b, other) in itertools.combinations(usual.items(), 2):
        ends = zip(lab(one, eyes), lab(other, eyes), strict=True)
        distance = sum((x - y) ** 2 for x, y in ends) ** 0.5
        assert distance >= 15, (a, one, b, other, round(distance, 1))


def test_each_label_has_a_colour_of_its_own_and_the_usual_ones_keep_theirs():
    labels = [
        "gradsync/gradsync",
        "torch/gloo",
        "torch/gradsync",
        "none",
        "x",
        "gradsync/gloo/bf16",
    ]
    styles = styles_of(labels)
    assert styles["torch/gloo"].slot == "0"
    assert styles["gradsync/gradsync"].slot == "2"
    assert len({style.slot for style in styles.values()}) == len(labels)
    assert len(styles_of(f"own{n}" for n in range(3 * SLOTS))) == 3 * SLOTS


# ------------------------------------------------------------------------- drawings


def elements(figure: svg.Figure) -> list[ET.Element]:
    """Well-formed, and all places are numbers inside the drawing."""
    root = ET.fromstring(svg.standalone(figure, css(LIGHT)))
    found = list(root.iter())
    for element in found:
        for key in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            if key in element.attrib:
                limit = svg.WIDTH if "x" in key else figure.height
                assert -svg.MARGIN <= float(element.attrib[key]) <= limit, element.attrib
    return found


def words_of(figure: svg.Figure) -> list[str]:
    return [each.text or "" for each in elements(figure) if each.tag.endswith("}text")]


def test_words_are_escaped_and_a_reader_of_the_screen_gets_title_and_description():
    figure = line_plot(
        [Curve(label="<x>", style=STYLE, points=[Point(x=1, y=2), Point(x=2, y=3)])],
        numbers="x is 3", x_axis=SHOWN, y_axis=SHOWN, **WORDS,
    )  # fmt: skip
    drawn = svg.inline(figure)
    root = ET.fromstring(drawn)
    assert root.attrib["role"] == "img"
    title, description = root.attrib["aria-labelledby"].split()
    named = {each.attrib.get("id"): each.text for each in root.iter()}
    assert named[title] == "a <title>, b & c"
    assert named[description] == "d x is 3"
    assert "<x>" in words_of(figure)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("xs", [[4], [1, 2], [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]])
def test_curves_fit_whatever_their_values(xs, is_log):
    curve = Curve(label="c", style=STYLE, points=[Point(x=x, y=x**3, low=x, high=x**4) for x in xs])
    axis = Axis(title="y", show=scales.number, is_log=is_log)
    figure = line_plot([curve], x_axis=SHOWN, y_axis=axis, **WORDS)
    assert "size" in words_of(figure)
    assert sum(each.tag.endswith("}path") for each in elements(figure)) >= len(xs)


def test_the_runs_are_in_the_legend_only_where_there_are_several():
    points = [Point(x=1, y=1), Point(x=2, y=2)]
    curves = [Curve(label="c", style=STYLE, points=points, run=run) for run in (0, 2)]
    several = line_plot(curves, x_axis=SHOWN, y_axis=SHOWN, run_names=["a", "b", "d"], **WORDS)
    assert {"a", "d"} <= set(words_of(several))
    assert "b" not in words_of(several)
    single = line_plot(curves[:1], x_axis=SHOWN, y_axis=SHOWN, run_names=["a"], **WORDS)
    assert "a" not in words_of(single)


@pytest.mark.parametrize("value", [0.01, 0.97, 1.0, 1.02, 250.0])
def test_bars_fit_whatever_the_ratio(value):
    bars = [
        Bar(group="2 ranks", label="a", style=STYLE, value=value, verdict="too few to tell"),
        Bar(group="2 ranks", label="b", style=STYLE, value=value, low=value / 2, high=value * 2),
        Bar(group="4 ranks", label="very long " * 20, style=STYLE, value=value),
    ]
    words = words_of(bar_plot(bars, axis="ratio", **WORDS))
    assert words.count("2 ranks") == 1
    assert f"{value:.2f} [{value / 2:.2f} … {value * 2:.2f}]" in words
    assert any(each.startswith("very long") and each.endswith("…") for each in words)


def test_a_few_very_slow_steps_do_not_squeeze_the_others():
    usual = [1.0 + n / 1000 for n in range(100)]
    figure = spread_plot([Spread(label="a", style=STYLE, seconds=[*usual, 90.0, 80.0])], **WORDS)
    assert "2 slower →" in words_of(figure)
    places = [float(e.attrib["cx"]) for e in elements(figure) if e.tag.endswith("}circle")]
    assert len(places) == 100
    assert max(places) > svg.WIDTH / 2


def test_a_timeline_shows_what_is_exposed_and_says_where_ranks_are_left_out():
    lines = [
        Timeline(rank=rank, forward=1, backward=2, communication=5, exposed=0.5)
        for rank in range(20)
    ]
    figure = timeline_plot([Lanes(label="x", style=STYLE, timelines=lines)], **WORDS)
    words = words_of(figure)
    assert words.count(f"rank {MOST_RANKS - 1}") == 1
    assert f"rank {MOST_RANKS}" not in words
    hints = [each.text or "" for each in elements(figure) if each.tag.endswith("}title")]
    assert "x, rank 0: exposed 500.00 ms" in hints
    assert "x, rank 0: hidden 3.000 s" in hints  # it cannot have begun before the step
