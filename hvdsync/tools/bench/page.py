"""A report and its drawings in, one HTML page out that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvdsync.tools.bench.report import Report


def render(report: Report, drawings: Sequence[str]) -> str:
    """The page's text; ``drawings`` are ``<svg>`` elements, one for each chart."""
    environment = Environment(
        loader=PackageLoader("hvdsync.tools.bench", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("page.html.j2")
    return template.render(report=report, drawings=[Markup(drawing) for drawing in drawings])
