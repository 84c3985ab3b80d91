"""`rlhf-kl generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.cli.options import Pickle, Plugins, Quiet, RemoteCode
from rlhf_kl.text import safe_text, stdout_width

SHADES = ((0.05, ""), (0.5, "yellow"), (2.0, "dark_orange3"), (float("inf"), "red"))  # nats of a token


def generate(
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Any causal language model.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="A checkpoint, not the final model.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt. Repeatable. Without one: two held-out prompts.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file of prompts; - reads lines of stdin.")
    ] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the prompts.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a .jsonl file, not to stdout.")] = None,
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
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.commands.generate import GenerateRequest, run_generate
        from rlhf_kl.commands.stored import Permissions

    request = GenerateRequest(
        run=run,
        model=model,
        checkpoint=checkpoint,
        prompts=tuple(prompt or ()),
        file=prompts,
        column=column,
        output=output,
        samples=samples,
        with_reference=with_reference,
        scores=scores,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        permissions=Permissions(plugins, trust_remote_code, allow_pickle),
    )
    results = run_generate(request)
    if output is not None:
        return
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        _show(results)


def _show(samples: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console, width = Console(soft_wrap=True), stdout_width()

    def show(label: str, text: Text) -> None:
        """Broken between words in a terminal."""
        if width is not None:
            lines = text.wrap(console, max(20, width - len(label)))
            text = Text("\n" + " " * len(label)).join(lines)
        console.print(Text.assemble((label, "bold"), text))

    for number, sample in enumerate(samples):
        if number:
            console.print()
        show("", Text(safe_text(sample["prompt"], keep_newlines=True), style="cyan"))
        show("policy     ", _coloured(sample) + Text(_figures(sample), style="dim"))
        if "reference" in sample:
            score = f"  ({_score(sample['reference_score'])})" if "reference_score" in sample else ""
            show("reference  ", Text(safe_text(sample["reference"], keep_newlines=True)) + Text(score, style="dim"))


def _coloured(sample: dict[str, Any]) -> Any:
    """The response; if the KL is known, a token with a larger KL is redder."""
    from rich.text import Text

    if "tokens" not in sample:
        return Text(safe_text(sample["response"], keep_newlines=True))
    text = Text()
    for token in sample["tokens"]:
        style = next(style for bound, style in SHADES if token["kl"] < bound)
        text.append(safe_text(token["text"], keep_newlines=True), style=style)
    return text


def _score(score: float | None) -> str:
    return "not scored" if score is None else f"score {score:.2f}"


def _figures(sample: dict[str, Any]) -> str:
    parts = [_score(sample["score"])] if "score" in sample else []
    if "kl" in sample:
        parts.append(f"KL {sample['kl']:.3f} nats, {sample['kl_token']:.4f} per token")
    if not sample["ended"]:
        parts.append("cut off")
    return f"  ({'; '.join(parts)})" if parts else ""
