"""An explanation as a picture. It needs matplotlib, which the runtime does without."""

from __future__ import annotations

import warnings
from pathlib import Path

from dragoman.explanation import Heatmap, shown

INCHES = 0.3  # a word
MAX_INCHES = 100.0  # either way: 12,000 pixels


def write_png(found: Heatmap, title: str, out: Path) -> bool:
    """Write source against target, dark where the weight is large; False where the font lacks characters.

    Raises OSError where the file cannot be written.
    """
    from matplotlib.figure import Figure  # an extra; every module of this package can be imported without

    width = min(3.0 + INCHES * len(found.source), MAX_INCHES)
    height = min(2.0 + INCHES * len(found.target), MAX_INCHES)
    figure = Figure(figsize=(width, height), layout="constrained")  # not pyplot: it needs no screen
    axes = figure.subplots()
    image = axes.imshow(found.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(found.source)), [shown(word) for word in found.source], rotation=60, ha="left")
    axes.set_yticks(range(len(found.target)), [shown(word) for word in found.target])
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a word with dollar signs is no formula
    axes.set_xlabel(title, parse_math=False)
    figure.colorbar(image, ax=axes, label="share of the attention")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(out, format="png", dpi=120)
    return not any("missing from" in str(warning.message) for warning in caught)
