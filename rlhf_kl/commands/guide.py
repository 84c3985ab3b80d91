"""`rlhf-kl guide`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

import rlhf_kl
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.program import shell_command

PAGES = (
    *("tutorial", "kl", "questions", "lab", "models_and_data", "rewards_and_controllers", "running", "metrics"),
    *("coming_from", "measurements", "agent", "config_reference", "changes"),
)
FOLDER = Path(rlhf_kl.__file__).parent / "guide"
WIDTH = 100  # most columns of a page: longer lines are hard to read


def guide(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="A page, or the beginning of its name; default: list them.")
    ] = None,
) -> None:
    """Read the guide: KL control, questions, a lab, models, rewards, running, every metric and config key."""
    if page is None:
        width = max(map(len, PAGES))
        for name in PAGES:
            print(f"{name:{width}}  {_text(name).partition(chr(10))[0].lstrip('# ')}")
        print(f"\nTo read one: {shell_command()} guide PAGE")
        return
    name = page.removesuffix(".md").lower().replace("-", "_")
    if name not in PAGES:
        found = [known for known in PAGES if name and known.startswith(name)]
        if len(found) != 1:
            hint = f": {' or '.join(found)}?" if found else suggestion(name, PAGES)
            raise InputError(f"guide: no page {page!r}{hint}")
        name = found[0]
    if not sys.stdout.isatty():
        print(_text(name), end="")
        return
    _show(_text(name))


def _show(text: str) -> None:
    """Markdown in a pager, at most 100 columns wide."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown, TableElement

    class Cells(TableElement):
        """A table that cuts no word short."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for part in super().__rich_console__(console, options):
                for column in getattr(part, "columns", []):
                    column.overflow = "fold"
                yield part

    class Page(Markdown):
        elements = Markdown.elements | {"table_open": Cells}

    os.environ.setdefault("LESS", "FRX")  # as git has it: colours, and a short page is printed only
    console = Console()
    with console.pager(styles=True):
        console.print(Page(_for_terminal(text)), width=min(console.width, WIDTH))


def _for_terminal(text: str) -> str:
    """Pictures as their words, and links to other pages with the page's name."""
    text = re.sub(r"<!-- .* -->\n", "", text)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"*(Picture: \1.)*", text)
    return re.sub(r"\[([^\]]*)\]\((\w+)\.md[^)]*\)", r"\1 (page \2)", text)


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
