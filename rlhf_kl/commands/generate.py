"""`rlhf-kl generate`: what a policy writes, with its reference beside it and the KL of every token."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Json, Model, Pickle, Plugins, Quiet, RemoteCode, Step, StoredRun
from rlhf_kl.errors import InputError

if TYPE_CHECKING:
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.types import Prompts


def generate(
    run: StoredRun = None,
    model: Model = None,
    checkpoint: Step = None,
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
    as_json: Json = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Sample responses from a run's policy, or from any model."""
    from rlhf_kl.commands.stored import Permissions, check_given, of_a_run
    from rlhf_kl.config.schema.sections import refuse

    # Errors of the options come before torch is imported.
    problems = []
    if run is not None and model is not None:
        problems.append("--run and --model exclude each other: name one policy")
    if prompt and prompts is not None:
        problems.append("--prompt and --prompts exclude each other: name prompts, or a file of them")
    if model is not None and not prompt and prompts is None:
        problems.append("name prompts with --prompt, or a file of them with --prompts")
    if model is not None:
        problems += of_a_run(checkpoint=checkpoint, with_reference=with_reference, scores=scores, plugins=plugins)
    refuse(*problems)
    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    config, folder = permissions.opened(run, model, checkpoint)
    if folder is not None and scores and (refused := permissions.refused(config)):
        raise InputError(f"--scores needs code that the run names ({', '.join(refused)}): --plugins runs it")
    check_given({"--model": model}, "--prompts", prompts, column or "prompt", config)
    ui.start(quiet)
    with ui.progress("loading torch"):
        from rlhf_kl.commands.stored import load_policy, load_reference
        from rlhf_kl.ppo.heldout_samples import NO_SCORERS, policy_samples, token_rows
        from rlhf_kl.train.device import on_this_machine, run_device
        from rlhf_kl.train.load import Loader
        from rlhf_kl.train.samples import score_at
        from rlhf_kl.train.setup import sampling_of
        from rlhf_kl.train.world_files import with_files

    if folder is not None:
        config = with_files(config, ("policy", "reference", "data", "eval", *["reward"] * scores))
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    rollout = config.rollout.model_copy(update={name: value for name, value in given.items() if value is not None})
    config = on_this_machine(config.model_copy(update={"rollout": rollout}), stored=True)
    loader, reference = Loader(config.run, run_device(config.run)), None
    with ui.progress("loading the models and prompts"):
        scorers = loader.scorers(config.reward, gold=False) if scores else NO_SCORERS
        policy, tokenizer = load_policy(loader, config, folder, model, checkpoint)
        if with_reference:
            reference, _ = load_reference(loader, config)
        scorers.begin(config.updates + 1, config.updates)
        chosen = _prompts(prompt or (), prompts, column, config, policy.model, tokenizer)
    places = [i for i in range(len(chosen)) for _ in range(samples)]
    batch = chosen.pick(places)
    with ui.progress("sampling", len(batch) * (1 if reference is None else 2)) as advance:
        own, other = policy_samples(
            policy,
            reference,
            batch,
            range(len(batch)),  # noise by position: a response does not depend on the number of other responses
            seed,
            sampling_of(config, policy.model, tokenizer),
            tokenizer,
            scorers,
            advance=advance,
            purpose="generate",
            shown=len(batch),
        )
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(batch.texts):
        row = {"prompt": text, "response": own.texts[i], "ended": own.ended[i]}
        if scores:
            row["score"] = score_at(own.scores, i)
        if reference is not None:
            kl = {"kl": own.kl[i], "kl_token": own.kl[i] / own.lengths[i]}
            row |= {"reference": other.texts[i], **kl, "tokens": token_rows(tokenizer, *own.tokens[i])}
            if scores:
                row["reference_score"] = score_at(other.scores, i)
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    from rlhf_kl.report.texts import answers

    texts = [{"prompt": row["prompt"], "policy": [row | {"text": row["response"]}]} for row in rows]
    for shown, row in zip(texts, rows, strict=True):
        if with_reference:
            shown["reference"] = {"text": row["reference"], "score": row.get("reference_score")}
    Console(highlight=False).print(answers(texts, "KL in nats per response:" if with_reference else ""))


def _prompts(
    texts: Sequence[str],
    file: str | None,
    column: str | None,
    config: TrainConfig,
    policy: Any,
    tokenizer: Any,
) -> Prompts:
    """Those of the command line or of its file, else those that `train` shows."""
    from rlhf_kl.commands.stored import located
    from rlhf_kl.config.schema.training import PromptsSection
    from rlhf_kl.data.files import read_lines
    from rlhf_kl.data.prompts import PromptStream
    from rlhf_kl.data.rows import PromptRow
    from rlhf_kl.models.pretrained import context_length
    from rlhf_kl.ppo.heldout_samples import SHOWN
    from rlhf_kl.train import sets
    from rlhf_kl.train.setup import build_prompts, usable_prompts

    form = config.data.model_copy(update={"first_tokens": None})  # a prompt that was typed is not cut
    key, rows = "--prompt", [PromptRow(text, {}) for text in texts]
    if file == "-":
        key, rows = "--prompts -", [PromptRow(row["text"], {}) for row in read_lines(sys.stdin.buffer.read(), "stdin")]
    elif file is not None:
        key, ref = "--prompts", located(file)
        section = PromptsSection(prompts=ref, column=column or "prompt", chat_template=form.chat_template)
        rows = sets.load(key, ref, "test", sets.prompt_reader(section))
    elif not texts:
        _, kept = build_prompts(config, sets.prompts(config.data, config.eval), policy, tokenizer)
        return PromptStream(kept, min(SHOWN, len(kept)), config.run.seed).batch(1)
    context = context_length(policy)
    room = None if context is None else context - config.rollout.max_new_tokens
    return usable_prompts(key, rows, policy, tokenizer, room, form)
