"""`rlhf-kl guide`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import rlhf_kl
from rlhf_kl.components import suggestion
from rlhf_kl.errors import InputError

PAGES = (
    "kl",
    "models_and_data",
    "rewards_and_controllers",
    "running",
    "coming_from",
    "measurements",
    "config_reference",
    "changes",
)
FOLDER = Path(rlhf_kl.__file__).parent / "guide"
WIDTH = 100  # most columns of a page: longer lines are hard to read


def guide(
    page: Annotated[str | None, typer.Argument(metavar="[PAGE]", help="Name of a page; default: list them.")] = None,
) -> None:
    """Read the guide: KL control, models, rewards, running, other trainers, measurements, every config key."""
    if page is None:
        width = max(map(len, PAGES))
        for name in PAGES:
            print(f"{name:{width}}  {_text(name).partition(chr(10))[0].lstrip('# ')}")
        print("\nTo read one: rlhf-kl guide PAGE")
        return
    name = page.removesuffix(".md")
    if name not in PAGES:
        raise InputError(f"guide: no page {page!r}{suggestion(name, PAGES)}")
    if not sys.stdout.isatty():
        print(_text(name), end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "FRX")  # as git has it: colours, and a short page is printed only
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(_text(name)), width=min(console.width, WIDTH))


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
