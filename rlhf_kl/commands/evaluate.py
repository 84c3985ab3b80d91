"""`rlhf-kl eval`: held-out perplexity of any causal LM; with a run or a reference, both side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhf_kl import ui
from rlhf_kl.build.load import Loader
from rlhf_kl.build.machine import on_this_machine, run_device
from rlhf_kl.build.parts import build_prompts, sampling_of
from rlhf_kl.build.world import with_files, world_file
from rlhf_kl.commands.samples import heldout_rows
from rlhf_kl.commands.stored import EvalRequest, load_policy, load_run_reference, located
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import Prompts, PromptStream
from rlhf_kl.evaluate import errors_of, figures_of, perplexity_of, policy_samples, safe_exp, standard_error, text_sums
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype
from rlhf_kl.models.value import frozen_lm
from rlhf_kl.monitors import worded
from rlhf_kl.report.texts import grouped
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.ui import log


def run_eval(request: EvalRequest) -> dict[str, Any]:
    """The figures of `eval --json`, by their keys: of a model on texts; of a run also on its held-out prompts.

    With their `standard_errors`, those of a reference under `reference`, and some `texts` as `held_out_texts` has them.
    """
    config, folder = request.resolved()
    config = on_this_machine(config, stored=request.config is None)
    loader, rows = Loader.for_run(config.run, run_device(config.run)), None
    texts, dtype = _texts(request, config, loader), compute_dtype(config.run.dtype)
    if request.model is None:
        files = with_files(config, ("data", "eval"))
        rows, config = loader.prompts(files.data, files.eval), with_files(config)
        scorers = _scorers(request, config, loader, of_run=folder is not None)
    model, tokenizer = load_policy(loader, config, folder, request.model, request.checkpoint)
    policy = frozen_lm(model, dtype, loader.device)
    figures = _perplexity(policy, tokenizer, texts, "policy")
    if request.model is not None and request.reference is None:
        return figures
    beside = load_run_reference(loader, config, request.reference)
    reference = frozen_lm(beside.model, dtype, loader.device)
    figures["reference"] = _perplexity(reference, beside.tokenizer, texts, "reference")
    if rows is not None:
        _, kept = build_prompts(config, rows, model, tokenizer)
        _add_prompts(figures, config, kept, (policy, reference), tokenizer, scorers, request.samples)
    return figures


def _texts(request: EvalRequest, config: TrainConfig, loader: Loader) -> list[str]:
    section, texts = config.eval, request.texts
    ref, key = (section.texts, "eval.texts") if texts is None else (located(texts), "--texts")
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
    kept: Prompts,
    pair: tuple[LM, LM],
    tokenizer: Any,
    scorers: Scorers,
    samples: int | None,
) -> None:
    """Adds the figures of both on held-out prompts, and some of their texts."""
    policy = pair[0]
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
