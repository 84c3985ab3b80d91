"""`rlhf-kl generate`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Pickle, Plugins, Quiet, RemoteCode


def generate(
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Any causal language model.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="A checkpoint, not the final model.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; default: two held-out ones.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="A file of prompts; -: stdin.")] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the prompts.")] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Responses to each prompt.")] = 1,
    with_reference: Annotated[
        bool, typer.Option("--with-reference", help="Also the reference's response, and the KL of every token.")
    ] = False,
    scores: Annotated[bool, typer.Option("--scores", help="Score responses with the run's reward.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: the run's.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", min=1e-6, help="Default: the run's.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Sample responses from a run's policy, or from any model."""
    from rlhf_kl.commands.stored import GenerateRequest, Permissions

    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    asked = partial(GenerateRequest, run, model, checkpoint, tuple(prompt or ()), prompts, column)
    request = asked(samples, with_reference, scores, max_new_tokens, temperature, seed, permissions)
    request.resolved()  # its errors come before torch is imported
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.commands.generate import run_generate

    results = run_generate(request)
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    from rlhf_kl.report.texts import text_table

    texts = [{"prompt": row["prompt"], "policy": [row | {"text": row["response"]}]} for row in results]
    for text, row in zip(texts, results, strict=True):
        if with_reference:
            text["reference"] = {"text": row["reference"], "score": row.get("reference_score")}
    Console(highlight=False).print(text_table(texts, "KL in nats per response:" if with_reference else ""))
