"""`rlhf-kl eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.cli.options import Pickle, Plugins, Quiet, RemoteCode

LABELS = {
    "perplexity": "held-out perplexity",
    "nats_per_token": "  nats per token",
    "bits_per_byte": "  bits per byte",
    "tokens": "  tokens",
    "bytes": "  bytes",
    "documents": "  documents",
    "kl_token": "KL per token",
    "kl_sequence": "KL per response",
    "forward_kl_token": "forgetting",
    "scores": "score",
    "gold": "gold score",
    "length": "response length",
    "eos_rate": "share with an EOS",
    "distinct_2": "distinct word pairs",
}


def evaluate(
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Any causal language model.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The starting policy of a config.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="A checkpoint, not the final model.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Model to compare with.")] = None,
    texts: Annotated[str | None, typer.Option(metavar="FILE", help="Held-out texts; default: the config's.")] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Held-out perplexity; of a run also exact KL, scores, length and more, beside its reference."""
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.commands.evaluate import EvalRequest, run_eval
        from rlhf_kl.commands.stored import Permissions

    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    request = EvalRequest(run, model, config, checkpoint, reference, texts, column, permissions)
    figures = run_eval(request)
    print(json.dumps(figures, indent=2) if as_json else _table(figures))


def _table(figures: dict[str, Any]) -> str:
    """Name, value, and the reference's value where there is one."""
    beside = figures.get("reference", {})
    rows = [("", "policy", "reference")] if beside else []
    for name, value in figures.items():
        if name != "reference" and value is not None:
            rows.append((LABELS[name], _shown(value), _shown(beside.get(name))))
    width = max(12, *(2 + len(cell) for row in rows for cell in row[1:]))
    label = max(map(len, LABELS.values()))
    lines = [f"{name:<{label}}{own:>{width}}{other:>{width}}".rstrip() for name, own, other in rows]
    if "forward_kl_token" in figures:
        lines.append("KL and forgetting in nats. Forgetting: KL(reference || policy), per token.")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4f}"
