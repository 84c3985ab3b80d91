"""`rlhf-kl generate`: what a policy writes, with its reference beside it and the KL of every token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Json, Model, Pickle, Plugins, Quiet, RemoteCode, Step, StoredRun
from rlhf_kl.errors import InputError

Prompt = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; default: two held-out ones.")]
PromptsFile = Annotated[str | None, typer.Option("--prompts", metavar="FILE", help="A file of prompts; -: stdin.")]
Column = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column of the prompts. Default: the run's, with its template.")
]
Count = Annotated[int, typer.Option(metavar="N", min=1, help="Responses to each prompt.")]
WithReference = Annotated[
    bool, typer.Option("--with-reference", help="Also the reference's response, and the KL of every token.")
]
WithScores = Annotated[bool, typer.Option("--scores", help="Score responses with the run's reward.")]
NewTokens = Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: the run's.")]
Temperature = Annotated[float | None, typer.Option(metavar="X", min=1e-6, help="Default: the run's.")]
SampleSeed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the samples.")]


def generate(
    run: StoredRun = None,
    model: Model = None,
    checkpoint: Step = None,
    prompt: Prompt = None,
    prompts: PromptsFile = None,
    column: Column = None,
    samples: Count = 1,
    with_reference: WithReference = False,
    scores: WithScores = False,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    seed: SampleSeed = 0,
    as_json: Json = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Sample responses from a run's policy, or from any model."""
    # Errors of the options come before torch is imported.
    from rlhf_kl.commands.stored import Permissions, check_given, of_a_run
    from rlhf_kl.config.schema.sections import refuse

    of_runs = of_a_run(checkpoint=checkpoint, with_reference=with_reference, scores=scores, plugins=plugins)
    refuse(*excluded(run, model, prompt, prompts), *(of_runs if model is not None else ()))
    ui.start(quiet)
    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    config, folder = permissions.opened(run, model, checkpoint)
    refused = {key: ref for key, ref in permissions.refused(config).items() if key.startswith("reward")}
    if folder is not None and scores and refused:
        code = ", ".join(dict.fromkeys(refused.values()))
        raise InputError(f"--scores needs code or a server of the run ({code}): --plugins runs it")
    plain = None if config.data.template and not column else prompts  # a template names columns of its own
    check_given({"--model": model}, "--prompts", plain, column or config.data.column, config)
    unread = ["eval.texts", "eval.scorers"] + ["reward"] * (not scores) + ["reference"] * (not with_reference)
    permissions.tell_changed(folder, config, *unread, *["data", "eval"] * (bool(prompt) or prompts is not None))
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    rollout = config.rollout.model_copy(update={name: value for name, value in given.items() if value is not None})
    config = config.model_copy(update={"rollout": rollout})
    with ui.progress("loading torch"):
        from rlhf_kl.commands.responses import chosen_prompts, load_models, response_rows
    with ui.progress("loading the models and prompts"):
        models = load_models(config, folder, model, checkpoint, reference=with_reference, scores=scores)
        chosen = chosen_prompts(models, prompt or (), prompts, column)
    rows = response_rows(models, chosen, samples, seed)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show(rows, with_reference=with_reference)


def excluded(run: object, model: object, prompt: Sequence[str] | None, prompts: str | None) -> list[str]:
    """What is wrong with the options that name a policy and prompts."""
    problems = []
    if run is not None and model is not None:
        problems.append("--run and --model exclude each other: name one policy")
    if prompt and prompts is not None:
        problems.append("--prompt and --prompts exclude each other: name prompts, or a file of them")
    if model is not None and not prompt and prompts is None:
        problems.append("name prompts with --prompt, or a file of them with --prompts")
    return problems


def show(rows: Sequence[Mapping[str, Any]], *, with_reference: bool) -> None:
    """The responses as texts, below their prompts."""
    from rich.console import Console

    from rlhf_kl.report.texts import answers

    texts = [{"prompt": row["prompt"], "policy": [{**row, "text": row["response"]}]} for row in rows]
    for shown, row in zip(texts, rows, strict=True):
        if with_reference:
            shown["reference"] = {"text": row["reference"], "score": row.get("reference_score")}
    Console(highlight=False).print(answers(texts, "KL in nats per response:" if with_reference else ""))
