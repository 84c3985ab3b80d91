"""`rlhf-kl eval`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Pickle, Plugins, Quiet, RemoteCode
from rlhf_kl.text import format_number, hanging, stdout_width

LABELS = {
    "scores": "score",
    "gold": "gold score",
    "kl_token": "KL per token",
    "kl_sequence": "KL per response",
    "forward_kl_token": "forgetting",
    "length": "response length",
    "eos_rate": "share with an EOS",
    "distinct_2": "distinct word pairs",
    "prompts": "held-out prompts",
    "responses": "  responses",
    "perplexity": "held-out perplexity",
    "nats_per_token": "  nats per token",
    "bits_per_byte": "  bits per byte",
    "tokens": "  tokens",
    "bytes": "  bytes",
    "documents": "  documents",
}


def evaluate(
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Any causal language model.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The starting policy of a config.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="A checkpoint, not the final model.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Model to compare with.")] = None,
    texts: Annotated[str | None, typer.Option(metavar="FILE", help="Held-out texts; default: the config's.")] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the text.")] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Held-out responses; default: one to each prompt.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Held-out perplexity; of a run also exact KL, scores, length and more, beside its reference."""
    from rlhf_kl.commands.stored import EvalRequest, Permissions

    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    request = EvalRequest(run, model, config, checkpoint, reference, texts, column, samples, permissions)
    request.resolved()  # its errors come before torch is imported
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.commands.evaluate import run_eval
        from rlhf_kl.run.log import encode_json

    figures = run_eval(request)
    if as_json:
        print(encode_json(figures, indent=2).decode())
        return
    from rich.console import Console

    from rlhf_kl.report.texts import TITLE, text_table

    print(_table(figures))
    Console(highlight=False).print(text_table(figures.get("texts", []), TITLE))


def _table(figures: dict[str, Any]) -> str:
    """Name, value and standard error, beside those of the reference where there is one."""
    columns = [figures, figures["reference"]] if "reference" in figures else [figures]
    rows = [["", "policy", "reference"]] if len(columns) > 1 else []
    rows += [[label, *(_shown(of, key) for of in columns)] for key, label in LABELS.items() if key in figures]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows if row[1]]
    several = figures.get("responses", 0) > figures.get("prompts", 0)
    notes = f"±: one standard error{' (for these few prompts only)' if several else ''}."
    if "forward_kl_token" in figures:
        notes += " KL in nats. Forgetting: KL of the reference to the policy, per token."
    return "\n".join([*lines, hanging(notes, stdout_width() or 80, 0)])


def _shown(figures: dict[str, Any], key: str) -> str:
    value, error = figures.get(key), figures["standard_errors"].get(key)
    if value is None or isinstance(value, int):
        return "" if value is None else str(value)
    if error is None:
        return format_number(value, 4)
    digits = min(4, max(0, 1 - math.floor(math.log10(error)))) if error else 4  # two of the error
    return f"{value:.{digits}f} ± {error:.{digits}f}"
