"""A chart in, SVG text out, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from hvdsync.tools.bench.report import Chart


def draw(chart: Chart) -> str:
    """The chart as an ``<svg>`` element that fits the width of what it stands in."""
    bars = len(chart.x) * len(chart.series)
    height = 0.17 * bars + 1.5 if chart.kind == "rows" else 4.2
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    if chart.kind != "lines":
        _bars(axes, chart)
    else:
        for name, values in chart.series.items():
            pairs = [(x, y) for x, y in zip(chart.x, values, strict=True) if y is not None]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], marker="o", label=name)
        axes.set_xscale(chart.x_scale)
    if chart.kind != "rows":
        axes.set_yscale(chart.y_scale)
    if chart.marked is not None:
        mark = axes.axvline if chart.kind == "rows" else axes.axhline
        mark(chart.marked, color="black", linewidth=1, linestyle="--")
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="best")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _bars(axes: Any, chart: Chart) -> None:
    """Upright bars, or for "rows" lying ones, those of a place side by side."""
    lying = chart.kind == "rows"
    draw_bars = axes.barh if lying else axes.bar
    width = 0.8 / max(len(chart.series), 1)
    places = np.arange(len(chart.x))
    for i, (name, values) in enumerate(chart.series.items()):
        lengths = [np.nan if value is None else value for value in values]
        draw_bars(places + (i + 0.5) * width - 0.4, lengths, width, label=name)
    if not lying:
        axes.set_xticks(places, chart.x)
        return
    axes.set_yticks(places, chart.x)
    axes.set_ylim(len(chart.x) - 0.5, -0.5)
    axes.set_xscale(chart.x_scale)
    if chart.x_scale == "log":
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
