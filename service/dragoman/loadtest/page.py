"""A report as one HTML file, which opens without a network: the table, the limits, three plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from dragoman.loadtest.plot import Line, line_plot
from dragoman.loadtest.report import Figures, Latency, Report

_BLUE: Final = "#1f6feb"
_GREEN: Final = "#2da44e"
_RED: Final = "#cf222e"
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
.held { color: #2da44e; } .missed { color: #cf222e; }
"""


def html_page(report: Report, title: str) -> str:
    """The whole document."""
    missed = report.exceeded()
    limits = [
        *([f"p99 {report.slo.max_p99_ms:g} ms"] if report.slo.max_p99_ms is not None else []),
        *(
            [f"p99 to the first piece {report.slo.max_p99_first_ms:g} ms"]
            if report.slo.max_p99_first_ms is not None
            else []
        ),
        *([f"error rate {report.slo.max_error_rate:g}"] if report.slo.max_error_rate is not None else []),
    ]
    if missed:
        level = f'<p class="missed">Service level missed: {escape("; ".join(missed))}.</p>'
    elif limits:
        level = f'<p class="held">Service level held: at most {escape(", ".join(limits))}.</p>'
    else:
        level = "<p>No service level was asked for.</p>"
    asked = "a closed loop" if report.asked_rate is None else f"{report.asked_rate:g} requests a second asked"
    body = [
        f"<h1>{escape(title)}</h1>",
        level,
        f"<p>{asked}, {report.all.achieved_rate:.1f} answered, {report.all.goodput:.1f} within the service level; "
        f"{report.duration_seconds:.1f} s; requests left at most {report.max_send_lag_ms:.1f} ms late.</p>",
        "<p>Latency counts from when a request was due, of OK answers alone.</p>",
        _table({"all": report.all, **report.parts}),
        _errors(report.all),
        *_plots(report),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(rows: dict[str, Figures]) -> str:
    head = ("", "requests", "OK", "errors", "cancelled", "good/s", "p50 ms", "p95 ms", "p99 ms", "max ms")
    first = ("first p50", "first p99")
    lines = [_row("th", (*head, *first))]
    for name, figures in rows.items():
        counts = (figures.requests, figures.ok, figures.num_errors, figures.cancelled)
        lines.append(
            _row(
                "td",
                (
                    name,
                    *map(str, counts),
                    f"{figures.goodput:.1f}",
                    *_times(figures.latency_ms),
                    *_ends(figures.first_ms),
                ),
            )
        )
    return f"<table>{''.join(lines)}</table>"


def _row(cell: str, values: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(value)}</{cell}>' for value in values)}</tr>"


def _times(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-"] * 4
    return [f"{value:.1f}" for value in (latency.p50, latency.p95, latency.p99, latency.max)]


def _ends(latency: Latency | None) -> list[str]:
    return ["-"] * 2 if latency is None else [f"{latency.p50:.1f}", f"{latency.p99:.1f}"]


def _errors(figures: Figures) -> str:
    if not figures.errors:
        return "<p>No errors.</p>"
    rows = "".join(_row("td", (status, str(count))) for status, count in sorted(figures.errors.items()))
    return f"<h2>Errors</h2><table>{rows}</table>"


def _plots(report: Report) -> list[str]:
    moments, long = report.timeline, report.moment_seconds
    rates = [
        Line("due", "#999", [(m.seconds, m.due / long) for m in moments]),
        Line("OK", _GREEN, [(m.seconds, m.ok / long) for m in moments]),
        Line("errors", _RED, [(m.seconds, m.errors / long) for m in moments]),
    ]
    latencies = [
        Line("p50", _BLUE, [(m.seconds, m.p50_ms) for m in moments]),
        Line("p99", _RED, [(m.seconds, m.p99_ms) for m in moments]),
    ]
    return [
        "<h2>Requests by when they were due</h2>",
        line_plot("Requests by when they were due", "seconds", "a second", rates),
        "<h2>Latency by when they were due</h2>",
        line_plot("Latency by when they were due", "seconds", "ms", latencies),
        "<h2>Latency by share of the answers</h2>",
        line_plot(
            "Latency by share of the answers", "% of the answers", "ms", [Line("within", _BLUE, report.percentiles_ms)]
        ),
    ]
