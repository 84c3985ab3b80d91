"""`rlhf-kl generate`: what a policy writes, with its reference beside it and the KL of every token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf_kl import ui
from rlhf_kl.build.load import Loader
from rlhf_kl.build.machine import on_this_machine, run_device
from rlhf_kl.build.parts import build_prompts, prompt_format, sampling_of, usable_prompts
from rlhf_kl.build.world import with_files
from rlhf_kl.commands.samples import score_at
from rlhf_kl.commands.stored import GenerateRequest, load_policy, load_run_reference, located
from rlhf_kl.config.schema import PromptsSection, TrainConfig
from rlhf_kl.data.prompts import Prompts, PromptStream
from rlhf_kl.evaluate import NO_SCORERS, SHOWN, policy_samples
from rlhf_kl.models.load import compute_dtype, context_length
from rlhf_kl.models.value import frozen_lm


def run_generate(request: GenerateRequest) -> list[dict[str, Any]]:
    """One mapping for each response: prompt, response, ended; on request also score, reference, kl and tokens."""
    config, folder = request.resolved()
    if folder is not None:
        config = with_files(config, ("policy", "reference", "data", "eval", *["reward"] * request.scores))
    given = {"max_new_tokens": request.max_new_tokens, "temperature": request.temperature}
    rollout = config.rollout.model_copy(update={name: value for name, value in given.items() if value is not None})
    config = on_this_machine(config.model_copy(update={"rollout": rollout}), stored=True)
    loader, dtype, reference = Loader.for_run(config.run, run_device(config.run)), compute_dtype(config.run.dtype), None
    with ui.waiting("loading the models and prompts"):
        scorers = loader.scorers(config.reward, gold=False) if request.scores else NO_SCORERS
        model, tokenizer = load_policy(loader, config, folder, request.model, request.checkpoint)
        if request.with_reference:
            reference = frozen_lm(load_run_reference(loader, config).model, dtype, loader.device)
        scorers.begin(config.updates + 1, config.updates)
        prompts = _prompts(request, config, loader, model, tokenizer)
    places = [i for i in range(len(prompts)) for _ in range(request.samples)]
    batch = PromptStream(prompts.texts, tokenizer, 1, 0, prompts.rows).pick(places)
    with ui.progress("sampling", len(batch) * (1 if reference is None else 2)) as advance:
        own, other = policy_samples(
            frozen_lm(model, dtype, loader.device),
            reference,
            batch,
            range(len(batch)),  # noise by position: a response does not depend on the number of other responses
            request.seed,
            sampling_of(config, model, tokenizer),
            tokenizer,
            scorers,
            advance=advance,
            purpose="generate",
            shown=len(batch),
        )
    samples = []
    for i, prompt in enumerate(batch.texts):
        row = {"prompt": prompt, "response": own.texts[i], "ended": own.ended[i]}
        if request.scores:
            row["score"] = score_at(own.scores, i)
        if reference is not None:
            kl = {"kl": own.kl[i], "kl_token": own.kl[i] / own.lengths[i], "tokens": own.tokens[i]}
            row |= {"reference": other.texts[i], **kl}
            if request.scores:
                row["reference_score"] = score_at(other.scores, i)
        samples.append(row)
    return samples


def _prompts(request: GenerateRequest, config: TrainConfig, loader: Loader, policy: Any, tokenizer: Any) -> Prompts:
    form = replace(prompt_format(config.data), first_tokens=None)  # a prompt that was typed is not cut
    key = "--prompt"
    texts: Sequence[str] = request.prompts
    if request.file == "-":
        key, texts = "--prompts -", sys.stdin.read().splitlines()
    elif request.file is not None:
        key, ref = "--prompts", located(request.file)
        section = PromptsSection(prompts=ref, column=request.column or "prompt", chat_template=form.chat)
        texts = loader.all_prompts(section, key, ref, "test")
    elif not texts:  # those that `train` shows
        _, kept = build_prompts(config, loader.prompts(config.data, config.eval), policy, tokenizer)
        key, size = "eval.prompts", min(SHOWN, len(kept.texts))
        texts = PromptStream(kept.texts, tokenizer, size, config.run.seed, kept.rows).batch(1).texts
    context = context_length(policy)
    room = None if context is None else context - config.rollout.max_new_tokens
    return usable_prompts(key, texts, policy, tokenizer, room, form)
