"""`rlhf-kl eval`: held-out perplexity of any causal LM; with a run or a reference, both side by side."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Json, Model, Pickle, Plugins, Quiet, RemoteCode, Step, StoredRun
from rlhf_kl.errors import InputError
from rlhf_kl.text import format_number, hanging, stdout_width
from rlhf_kl.ui import log

if TYPE_CHECKING:
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.models.lm import LM
    from rlhf_kl.rewards.scorer import Scorers
    from rlhf_kl.types import Prompts

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
    run: StoredRun = None,
    model: Model = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The starting policy of a config.")] = None,
    checkpoint: Step = None,
    reference: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Model to compare with.")] = None,
    texts: Annotated[str | None, typer.Option(metavar="FILE", help="Held-out texts; default: the config's.")] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the text.")] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Held-out responses; default: one to each prompt.")
    ] = None,
    as_json: Json = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Held-out perplexity; of a run also exact KL, scores, length and more, beside its reference."""
    from rlhf_kl.builtin.world import is_builtin
    from rlhf_kl.commands.stored import Permissions, check_given, located, of_a_run
    from rlhf_kl.config.schema.base import refuse

    # Errors of the options come before torch is imported.
    sources = {"--run": run, "--model": model, "--config": config}
    if len(given := [option for option, value in sources.items() if value is not None]) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other: name one thing to evaluate")
    if model is not None or config is not None:
        refuse(*of_a_run(plugins=plugins, checkpoint=checkpoint))
    if model is not None and texts is None and not is_builtin(model):
        raise InputError("--model needs --texts, the held-out texts: a file, a hub id, or builtin:NAME")
    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    settings, folder = permissions.opened(run, model, checkpoint, config)
    column = column or settings.eval.column
    check_given({"--model": model, "--reference": reference}, "--texts", texts, column, settings)
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.build.load import Loader
        from rlhf_kl.build.machine import on_this_machine, run_device
        from rlhf_kl.build.parts import build_prompts
        from rlhf_kl.build.world import with_files, world_file
        from rlhf_kl.commands.stored import load_policy, load_run_reference
        from rlhf_kl.models.load import compute_dtype
        from rlhf_kl.models.value import frozen_lm
        from rlhf_kl.run.log import encode_json

    settings = on_this_machine(settings, stored=config is None)
    loader, dtype = Loader.for_run(settings.run, run_device(settings.run)), compute_dtype(settings.run.dtype)
    held = settings.eval
    ref, key = (held.texts, "eval.texts") if texts is None else (located(texts), "--texts")
    limit = held.max_documents if texts is None else None  # it does not limit a named file
    documents = loader.texts(world_file(ref, "heldout"), column, key, held.split, limit=limit)
    if model is None:
        files = with_files(settings, ("data", "eval"))
        rows, settings = loader.prompts(files.data, files.eval), with_files(settings)
        for_scores, for_gold = permissions.refused(settings) if folder is not None else ([], [])
        if for_scores or for_gold:
            names = " and ".join(name for name, refs in (("scores", for_scores), ("gold", for_gold)) if refs)
            code = ", ".join(dict.fromkeys(for_scores + for_gold))
            log.warning(f"{names} left out: they need code that the run names ({code}): --plugins runs it")
        scorers = loader.scorers(settings.reward, reward=not for_scores, gold=not for_gold)
    loaded, tokenizer = load_policy(loader, settings, folder, model, checkpoint)
    policy = frozen_lm(loaded, dtype, loader.device)
    figures = _perplexity(policy, tokenizer, documents, "policy")
    if model is None or reference is not None:
        beside = load_run_reference(loader, settings, reference)
        other = frozen_lm(beside.model, dtype, loader.device)
        figures["reference"] = _perplexity(other, beside.tokenizer, documents, "reference")
    if model is None:
        _, kept = build_prompts(settings, rows, loaded, tokenizer)
        _add_prompts(figures, settings, kept, (policy, other), tokenizer, scorers, samples)
    if as_json:
        print(encode_json(figures, indent=2).decode())
        return
    from rich.console import Console

    from rlhf_kl.report.texts import TITLE, answers

    print(_table(figures))
    Console(highlight=False).print(answers(figures.get("texts", []), TITLE))


def _perplexity(lm: LM, tokenizer: Any, texts: list[str], name: str) -> dict[str, Any]:
    from rlhf_kl.models.perplexity import perplexity_of, safe_exp, text_sums
    from rlhf_kl.ppo.evaluate import standard_error

    with ui.progress(f"reading {len(texts)} documents: {name}") as advance:
        sums = text_sums(lm, tokenizer, texts, advance=advance)
    nats, tokens = zip(*sums.each, strict=True)
    errors = {"perplexity": standard_error(nats, tokens, of=safe_exp), "nats_per_token": standard_error(nats, tokens)}
    return asdict(perplexity_of([sums])) | {"standard_errors": errors}


def _add_prompts(
    figures: dict[str, Any],
    config: TrainConfig,
    kept: Prompts,
    pair: tuple[LM, LM],
    tokenizer: Any,
    scorers: Scorers,
    samples: int | None,
) -> None:
    """Adds the figures of both on held-out prompts, and some of their texts."""
    from rlhf_kl.build.parts import sampling_of
    from rlhf_kl.commands.samples import heldout_rows
    from rlhf_kl.data.prompts import PromptStream
    from rlhf_kl.monitors import worded
    from rlhf_kl.ppo.evaluate import errors_of, figures_of, policy_samples
    from rlhf_kl.report.texts import grouped

    policy = pair[0]
    several = samples or max(len(kept), config.rollout.batch_size)  # some prompts are answered more than once
    prompts = PromptStream(kept, several, config.run.seed).batch(1)
    scorers.begin(config.updates + 1, config.updates)
    with ui.progress(f"sampling {len(prompts)} responses of each", 2 * len(prompts)) as advance:
        own, other = policy_samples(
            *pair,
            prompts,
            range(len(prompts)),
            config.run.seed,
            sampling_of(config, policy.model, tokenizer),
            tokenizer,
            scorers,
            batch_size=config.rollout.batch_size,
            advance=advance,
            shown=len(prompts),
        )
    facts: dict[str, Any] = {}
    found = figures_of(own, other, facts) | {"prompts": len(kept), "responses": len(prompts)}
    for alert in worded(facts):
        log.warning(alert)
    if unscored := found.pop("unscored"):
        log.warning(f"scores: the reward returned None for {unscored} of {len(prompts)} responses: left out")
    figures |= found | {"texts": grouped(heldout_rows(prompts, own, other))}
    errors, of_reference = errors_of(own), errors_of(other)
    figures["standard_errors"] |= errors | {"forward_kl_token": of_reference["kl_token"]}
    beside, found = figures["reference"], figures_of(other, own, {})
    for name in ("scores", "gold", "length", "eos_rate", "distinct_2"):
        beside[name], beside["standard_errors"][name] = found[name], of_reference[name]


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
