"""Lines in a picture: an SVG element for a page. No script, no style from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 720
_HEIGHT: Final = 260
_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 30
_BOTTOM: Final = 40


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right; None as y leaves a gap."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]


def line_plot(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """All lines over the same axes, which begin at 0 and end at a round number above everything."""
    x_ticks = ticks(max((x for line in lines for x, _ in line.points), default=0.0))
    y_ticks = ticks(max((y for line in lines for _, y in line.points if y is not None), default=0.0))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + x / x_ticks[-1] * (right - _LEFT)

    def down(y: float) -> float:
        return bottom - y / y_ticks[-1] * (bottom - _TOP)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    ]
    for y in y_ticks:
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{across(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="4" y="{_TOP - 12}">{escape(y_name)}</text>')
    for number, line in enumerate(lines):
        for piece in _pieces(line.points):
            points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in piece)
            if len(piece) == 1:
                x, y = piece[0]
                parts.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2" fill="{line.colour}"/>')
            else:
                parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>')
        x = _LEFT + 110 + 110 * number
        parts.append(
            f'<line x1="{x}" x2="{x + 16}" y1="{_TOP - 16}" y2="{_TOP - 16}" stroke="{line.colour}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 20}" y="{_TOP - 12}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def ticks(highest: float) -> list[float]:
    """Four to ten round numbers from 0 to one that is not below the highest: steps of 1, 2 or 5 and zeros."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(size * power for size in (1, 2, 5, 10) if highest / (size * power) <= 8)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _pieces(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The points between gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]
