"""`rlhf-kl eval`: held-out perplexity of any causal LM; with a run or a reference, both side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.commands.build import build_prompts, sampling_of
from rlhf_kl.commands.load import Loader
from rlhf_kl.commands.samples import heldout_rows
from rlhf_kl.commands.session import on_this_machine, run_device
from rlhf_kl.commands.stored import NO_PERMISSIONS, Permissions, load_policy, load_run_reference, located
from rlhf_kl.commands.world import with_files, world_file
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import InputError
from rlhf_kl.evaluate import errors_of, figures_of, perplexity_of, policy_samples, safe_exp, standard_error, text_sums
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype
from rlhf_kl.models.value import frozen_lm
from rlhf_kl.monitors import worded
from rlhf_kl.report.texts import grouped
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.run.folder import RunFolder, newest_run
from rlhf_kl.ui import log


@dataclass(frozen=True)
class EvalRequest:
    """The options of the command line; None = not given."""

    run: Path | None = None
    model: str | None = None
    config: str | None = None
    checkpoint: int | None = None
    reference: str | None = None
    texts: str | None = None
    column: str | None = None
    samples: int | None = None
    permissions: Permissions = NO_PERMISSIONS


def run_eval(request: EvalRequest) -> dict[str, Any]:
    """The figures of `eval --json`, by their keys: of a model on texts; of a run also on its held-out prompts.

    With their `standard_errors`, those of a reference under `reference`, and some `texts` as `held_out_texts` has them.
    """
    _check(request)
    folder = None
    if request.model is not None:
        world = {"policy": {"model": request.model}} if is_builtin(request.model) else {}
        config = request.permissions.added_to(TrainConfig.model_validate(world | {"run": {"dtype": "auto"}}))
    elif request.config is not None:  # the user chose it, so its own permissions count
        config = request.permissions.added_to(load_config("train", request.config))
    else:
        folder = RunFolder(request.run or newest_run(finished=True))
        config = request.permissions.run_config(folder)
    config = on_this_machine(config, stored=request.config is None)
    loader = Loader.for_run(config.run, run_device(config.run))
    texts, dtype = _texts(request, config, loader), compute_dtype(config.run.dtype)
    config = config if request.model is not None else with_files(config)
    model, tokenizer = load_policy(loader, config, folder, request.model, request.checkpoint)
    policy = frozen_lm(model, dtype, loader.device)
    figures = _perplexity(policy, tokenizer, texts, "policy")
    if request.model is not None and request.reference is None:
        return figures
    beside = load_run_reference(loader, config, request.reference)
    reference = frozen_lm(beside.model, dtype, loader.device)
    figures["reference"] = _perplexity(reference, beside.tokenizer, texts, "reference")
    if request.model is None:
        scorers = _scorers(request, config, loader, of_run=folder is not None)
        _add_prompts(figures, config, loader, (policy, reference), tokenizer, scorers, request.samples)
    return figures


def _check(request: EvalRequest) -> None:
    given = [f"--{name}" for name in ("run", "model", "config") if getattr(request, name) is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other: name one thing to evaluate")
    for_runs = {"--plugins": request.permissions.plugins, "--checkpoint": request.checkpoint is not None}
    if given and given != ["--run"] and any(for_runs.values()):
        names = [name for name, value in for_runs.items() if value]
        raise InputError(*(f"{name} belongs to a run: name one with --run" for name in names))
    if request.model is not None and request.texts is None and not is_builtin(request.model):
        raise InputError("--model needs --texts, the held-out texts: a file, a hub id, or builtin:NAME")


def _texts(request: EvalRequest, config: TrainConfig, loader: Loader) -> list[str]:
    section, ref, key = config.eval, config.eval.texts, "eval.texts"
    if request.texts is not None:
        ref, key = located(request.texts), "--texts"
    limit = section.max_documents if request.texts is None else None  # it does not limit a named file
    file = world_file(ref, "heldout")
    return loader.texts(file, request.column or section.column, key, section.split, limit=limit)


def _perplexity(lm: LM, tokenizer: Any, texts: list[str], name: str) -> dict[str, Any]:
    with ui.progress(f"reading {len(texts)} documents: {name}") as advance:
        sums = text_sums(lm, tokenizer, texts, advance=advance)
    nats, tokens = zip(*sums.each, strict=True)
    errors = {"perplexity": standard_error(nats, tokens, of=safe_exp), "nats_per_token": standard_error(nats, tokens)}
    return asdict(perplexity_of([sums])) | {"standard_errors": errors}


def _scorers(request: EvalRequest, config: TrainConfig, loader: Loader, *, of_run: bool) -> Scorers:
    """The scorers, without those of a run's plugins that have no permission."""
    for_scores, for_gold = request.permissions.refused(config) if of_run else ([], [])
    if for_scores or for_gold:
        names = " and ".join(["scores"] * bool(for_scores) + ["gold"] * bool(for_gold))
        plugins = ", ".join(dict.fromkeys(for_scores + for_gold))
        log.warning(f"{names} left out: they need code that the run names ({plugins}): --plugins runs it")
    return loader.scorers(config.reward, reward=not for_scores, gold=not for_gold)


def _add_prompts(
    figures: dict[str, Any],
    config: TrainConfig,
    loader: Loader,
    pair: tuple[LM, LM],
    tokenizer: Any,
    scorers: Scorers,
    samples: int | None,
) -> None:
    """Adds the figures of both on held-out prompts, and some of their texts."""
    policy = pair[0]
    _, kept = build_prompts(config, loader, policy.model, tokenizer)
    several = samples or max(len(kept), config.rollout.batch_size)  # some prompts are answered more than once
    prompts = PromptStream(kept.texts, tokenizer, several, config.run.seed, kept.rows).batch(1)
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
    figures |= found | {"texts": grouped(heldout_rows(prompts.texts, own, other))}
    errors, of_reference = errors_of(own), errors_of(other)
    figures["standard_errors"] |= errors | {"forward_kl_token": of_reference["kl_token"]}
    beside, found = figures["reference"], figures_of(other, own, {})
    for name in ("scores", "gold", "length", "eos_rate", "distinct_2"):
        beside[name], beside["standard_errors"][name] = found[name], of_reference[name]
