"""A chart in, SVG text out, drawn by matplotlib without a display."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.figure import Figure

from hvdsync.tools.bench.report import Chart


def draw(chart: Chart) -> str:
    """The chart as an ``<svg>`` element that fits the width of what it stands in."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    if chart.kind == "bars":
        _bars(axes, chart)
    else:
        for name, values in chart.series.items():
            pairs = [(x, y) for x, y in zip(chart.x, values, strict=True) if y is not None]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], marker="o", label=name)
        axes.set_xscale(chart.x_scale)
    axes.set_yscale(chart.y_scale)
    if chart.marked is not None:
        axes.axhline(chart.marked, color="black", linewidth=1, linestyle="--")
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="best")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _bars(axes: object, chart: Chart) -> None:
    width = 0.8 / max(len(chart.series), 1)
    places = np.arange(len(chart.x))
    for i, (name, values) in enumerate(chart.series.items()):
        heights = [np.nan if value is None else value for value in values]
        axes.bar(places + (i + 0.5) * width - 0.4, heights, width, label=name)  # type: ignore[attr-defined]
    axes.set_xticks(places, chart.x)  # type: ignore[attr-defined]
