"""`rlhf-kl guide`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.shell import shell_command

PAGES = {
    "tutorial": "KL control step by step, and three ways to fail",
    "kl": "target, beta, controllers, ceiling, alerts, words",
    "models_and_data": "models, adapters, precision, prompts",
    "rewards_and_controllers": "of your own, in a few lines of Python",
    "running": "Python, comparing, resuming, exit codes, files",
    "cluster": "several GPUs and nodes: Slurm, memory",
    "metrics": "every name in metrics.jsonl",
    "evidence": "what a held KL buys",
    "coming_from": "from TRL, OpenRLHF, verl; what has changed",
    "config_reference": "every key of a config, with its default",
}
FOLDER = Path(__file__).parents[1] / "guide"
WIDTH = 80  # most columns of a page: longer lines are hard to read


def guide(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="A page, or the beginning of its name; default: list them.")
    ] = None,
) -> None:
    """Read the guide: KL control, models, rewards, running, clusters, every metric and config key."""
    if page is None:
        width = max(map(len, PAGES))
        for name, line in PAGES.items():
            print(f"{name:{width}}  {line}")
        print(f"\nTo read one: {shell_command()} guide PAGE")
        return
    name = page.removesuffix(".md").lower().replace("-", "_")
    if name not in PAGES:
        found = [known for known in PAGES if name and known.startswith(name)]
        if len(found) != 1:
            hint = f": {' or '.join(found)}?" if found else suggestion(name, PAGES)
            raise InputError(f"guide: no page {page!r}{hint}")
        name = found[0]
    _show(_text(name))


def _show(text: str) -> None:
    """Markdown, at most 80 columns wide: in a pager, or plain where it is piped."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import CodeBlock, Markdown, TableElement
    from rich.syntax import Syntax

    class Cells(TableElement):
        """A table that cuts no word short."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for part in super().__rich_console__(console, options):
                for column in getattr(part, "columns", []):
                    column.overflow = "fold"
                yield part

    class Code(CodeBlock):
        """Code to copy: no margin, and no line is wrapped."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            lines = str(self.text).rstrip()
            code = Syntax(lines, self.lexer_name, theme="ansi_dark").highlight(lines)
            code.rstrip()
            code.no_wrap, code.overflow = True, "ignore"
            yield code

    class Page(Markdown):
        elements = Markdown.elements | {"table_open": Cells, "fence": Code}

    os.environ.setdefault("LESS", "FRX")  # as git has it: colours, and a short page is printed only
    console = Console()
    with console.pager(styles=True):
        console.print(Page(_for_terminal(text)), width=min(console.width, WIDTH), crop=False)


def _for_terminal(text: str) -> str:
    """Pictures as their words, and links to other pages with the page's name."""
    text = re.sub(r"<!-- .* -->\n", "", text)
    text = re.sub(r'<picture>.*?<img [^>]*alt="([^"]*)".*?</picture>', r"*(Picture: \1.)*", text, flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"*(Picture: \1.)*", text)
    text = re.sub(r"\(\[([^\]]*)\]\((\w+)\.md[^)]*\)\)", r"(\1: page \2)", text)
    return re.sub(r"\[([^\]]*)\]\((\w+)\.md[^)]*\)", r"\1 (page \2)", text)


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
