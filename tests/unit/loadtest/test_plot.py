"""Pictures of lines."""

import xml.etree.ElementTree as ElementTree

import pytest

from dragoman.loadtest.plot import Line, line_plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("highest", "expected"),
    [
        (0.0, [0, 1]),
        (8.0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (8.1, [0, 2, 4, 6, 8, 10]),
        (47.0, [0, 10, 20, 30, 40, 50]),
        (1000.0, [0, 200, 400, 600, 800, 1000]),
        (0.02, [0, 0.005, 0.01, 0.015, 0.02]),
    ],
)
def test_ticks_are_round_and_reach_the_highest_value(highest, expected):
    """Steps of 1, 2 or 5 and zeros."""
    assert ticks(highest) == pytest.approx(expected)


def test_points_lie_where_their_values_say():
    """The highest at the top tick, 0 at the bottom, in equal steps from left to right."""
    svg = ElementTree.fromstring(line_plot("title", "x", "y", [Line("a", "red", [(0, 0.0), (5, 50.0), (10, 100.0)])]))
    (line,) = svg.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]

    assert [x for x, _ in points] == pytest.approx([64, 386, 708])
    assert [y for _, y in points] == pytest.approx([220, 125, 30])


def test_a_gap_in_the_values_is_a_gap_in_the_line():
    """Where there was no answer, nothing is drawn; a lone value is a dot."""
    points = [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, None), (5, 1.0), (6, 2.0)]
    svg = ElementTree.fromstring(line_plot("title", "x", "y", [Line("a", "red", points)]))

    assert len(list(svg.iter(f"{SVG}polyline"))) == 2
    assert len(list(svg.iter(f"{SVG}circle"))) == 1


def test_names_are_escaped():
    """A name is text, whatever it holds."""
    svg = ElementTree.fromstring(line_plot('<b> & "c"', "<x>", "&y", [Line("<a>", "red", [])]))

    assert svg.attrib["aria-label"] == '<b> & "c"'
    assert {"<x>", "&y", "<a>"} <= {text.text for text in svg.iter(f"{SVG}text")}
