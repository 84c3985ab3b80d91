"""Templates into pages."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import metadata
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_kl.report.plots.chart import Chart
from rlhf_kl.report.plots.render import svg
from rlhf_kl.report.plots.style import css


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("rlhf_kl.report.pages", "templates"),
        autoescape=True,  # every text of a run is data
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_page(template: str, *, refresh: int | None = None, **values: Any) -> str:
    """A whole page. `refresh`: seconds after which a browser reads it again."""
    environment = _environment()
    script = environment.loader.get_source(environment, "page.js")[0] if environment.loader else ""
    return environment.get_template(template).render(
        colours=Markup(css()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # no other script may run
        refresh=refresh,
        version=_version(),
        **values,
    )


def chart_values(chart: Chart) -> dict[str, Any]:
    """A chart as the template shows it; small charts have their figures in the subtitle."""
    return {"title": chart.title, "svg": Markup(svg(chart)), "caption": chart.caption or chart.subtitle}


def _version() -> str:
    try:
        return metadata.version("rlhf-kl")
    except metadata.PackageNotFoundError:
        return ""
