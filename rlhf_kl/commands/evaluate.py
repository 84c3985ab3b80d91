"""`rlhf-kl eval`: held-out perplexity of any causal LM; with a run or a reference, both side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.commands.build import build_prompts, sampling_of
from rlhf_kl.commands.load import Loader
from rlhf_kl.commands.session import make_accelerator, on_this_machine
from rlhf_kl.commands.stored import NO_PERMISSIONS, Permissions, load_run_policy, load_run_reference, located
from rlhf_kl.commands.world import with_files, world_file
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import InputError
from rlhf_kl.evaluate import Perplexity, perplexity, policy_figures
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype
from rlhf_kl.models.value import frozen_lm
from rlhf_kl.monitors import worded
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
    permissions: Permissions = NO_PERMISSIONS


def run_eval(request: EvalRequest) -> dict[str, Any]:
    """The figures of `eval --json`, by their keys."""
    given = [f"--{name}" for name in ("run", "model", "config") if getattr(request, name) is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other: name one thing to evaluate")
    if request.permissions.plugins and (request.model is not None or request.config is not None):
        raise InputError("--plugins belongs to a run: name one with --run")
    if request.model is not None:
        return _eval_model(request)
    if request.config is not None and request.checkpoint is not None:
        raise InputError("--checkpoint belongs to a run: name one with --run")
    if request.config is not None:  # the user chose it, so its own permissions count
        config = request.permissions.added_to(load_config("train", request.config))
        return _eval_run(request, on_this_machine(config), None)
    folder = RunFolder(request.run or newest_run(finished=True))
    return _eval_run(request, request.permissions.run_config(folder), folder)


def _eval_model(request: EvalRequest) -> dict[str, Any]:
    if request.checkpoint is not None:
        raise InputError("--checkpoint belongs to a run: name one with --run")
    if request.texts is None and not is_builtin(request.model):
        raise InputError("--model needs --texts, the held-out texts: a file, a hub id, or builtin:NAME")
    world = {"policy": {"model": request.model}} if is_builtin(request.model) else {}
    config = request.permissions.added_to(TrainConfig.model_validate(world))
    accelerator = make_accelerator(config.run)
    loader = Loader.for_run(config.run, accelerator.device)
    assert request.model is not None
    texts = _texts(request, config, loader)
    model_folder = world_file(located(request.model), "policy")
    loaded = loader.language_model(model_folder, "--model")
    model = frozen_lm(loaded.model, compute_dtype(config.run.dtype), accelerator.device)
    figures = _perplexity(model, loaded.tokenizer, texts, "model")
    if request.reference is None:
        return asdict(figures)
    beside = loader.language_model(world_file(located(request.reference), "policy"), "--reference")
    reference = frozen_lm(beside.model, compute_dtype(config.run.dtype), accelerator.device)
    other = _perplexity(reference, beside.tokenizer, texts, "reference")
    return asdict(figures) | {"reference": asdict(other)}


def _eval_run(request: EvalRequest, config: TrainConfig, folder: RunFolder | None) -> dict[str, Any]:
    accelerator = make_accelerator(config.run)
    loader = Loader.for_run(config.run, accelerator.device)
    dtype = compute_dtype(config.run.dtype)
    for_scores, for_gold = request.permissions.refused(config) if folder is not None else ([], [])
    config = with_files(config)
    model, tokenizer = load_run_policy(loader, config, folder, request.checkpoint)
    policy = frozen_lm(model, dtype, accelerator.device)
    ref = request.reference and world_file(request.reference, "policy")
    beside = load_run_reference(loader, config, ref)
    reference = frozen_lm(beside.model, dtype, accelerator.device)
    texts = _texts(request, config, loader)
    figures = _perplexity(policy, tokenizer, texts, "policy")
    other = _perplexity(reference, beside.tokenizer, texts, "reference")
    _, kept = build_prompts(config, loader, model, tokenizer)
    prompts = PromptStream(kept.texts, tokenizer, len(kept.texts), config.run.seed, kept.rows).batch(1)
    scorers = _scorers(config, for_scores, for_gold, loader)
    scorers.begin(config.updates + 1, config.updates)
    facts: dict[str, Any] = {}
    with ui.progress(f"sampling {len(prompts)} responses of each", 2 * len(prompts)) as advance:
        on_prompts = policy_figures(
            policy,
            reference,
            prompts,
            config.run.seed,
            sampling_of(config, model, tokenizer),
            tokenizer,
            scorers,
            batch_size=config.rollout.batch_size,
            facts=facts,
            advance=advance,
        )
    for alert in worded(facts):
        log.warning(alert)
    found = asdict(on_prompts)
    if unscored := found.pop("unscored"):
        log.warning(f"scores: the reward returned None for {unscored} of {len(prompts)} responses: left out")
    return asdict(figures) | {"reference": asdict(other)} | found


def _scorers(config: TrainConfig, for_scores: list[str], for_gold: list[str], loader: Loader) -> Scorers:
    """The scorers, without those of a run's plugins that have no permission."""
    if for_scores or for_gold:
        names = " and ".join(["scores"] * bool(for_scores) + ["gold"] * bool(for_gold))
        plugins = ", ".join(dict.fromkeys(for_scores + for_gold))
        log.warning(f"{names} left out: they need code that the run names ({plugins}): --plugins runs it")
    return loader.scorers(config.reward, reward=not for_scores, gold=not for_gold)


def _texts(request: EvalRequest, config: TrainConfig, loader: Loader) -> list[str]:
    section, ref, key = config.eval, config.eval.texts, "eval.texts"
    if request.texts is not None:
        ref, key = located(request.texts), "--texts"
    limit = section.max_documents if request.texts is None else None  # it does not limit a named file
    file = world_file(ref, "heldout")
    return loader.texts(file, request.column or section.column, key, section.split, limit=limit)


def _perplexity(lm: LM, tokenizer: Any, texts: list[str], name: str) -> Perplexity:
    with ui.progress(f"reading {len(texts)} documents: {name}") as advance:
        return perplexity(lm, tokenizer, texts, advance=advance)
