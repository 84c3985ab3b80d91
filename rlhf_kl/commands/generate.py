"""`rlhf-kl generate`: what a policy writes, with its reference beside it and the KL of every token."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.build import build_prompts, prompt_format, usable_prompts
from rlhf_kl.commands.load import Loader
from rlhf_kl.commands.session import run_device
from rlhf_kl.commands.stored import NO_PERMISSIONS, Permissions, load_run_policy, load_run_reference, located
from rlhf_kl.commands.world import with_files, world_file
from rlhf_kl.config.schema import PromptsSection, TrainConfig
from rlhf_kl.data.prompts import PromptFormat, Prompts, PromptStream
from rlhf_kl.errors import InputError, RunFailed
from rlhf_kl.evaluate import SHOWN, token_rows
from rlhf_kl.memory import fitting_batches
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype, context_length, eos_ids
from rlhf_kl.models.value import ActorCritic, frozen_lm
from rlhf_kl.rewards.scorer import REWARD
from rlhf_kl.rollout.collect import measure, respond, response_layout
from rlhf_kl.rollout.states import ReferenceStates
from rlhf_kl.run.folder import RunFolder, check_writable, newest_run, write_atomic
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch, Sampling
from rlhf_kl.ui import log

ROWS = 32  # responses in a batch, fewer if memory is full


@dataclass(frozen=True)
class GenerateRequest:
    """The options of the command line; None = not given: then the run's own value."""

    run: Path | None = None
    model: str | None = None
    checkpoint: int | None = None
    prompts: tuple[str, ...] = ()
    file: str | None = None
    column: str | None = None
    output: Path | None = None
    samples: int = 1
    with_reference: bool = False
    scores: bool = False
    max_new_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    permissions: Permissions = NO_PERMISSIONS

    @property
    def has_prompts(self) -> bool:
        """Whether it names prompts; else those are read that `train` shows."""
        return bool(self.prompts) or self.file is not None


Sample = dict[str, Any]


def run_generate(request: GenerateRequest) -> list[Sample]:
    """One mapping for each response: prompt, response, ended; on request also score, reference, kl and tokens.

    With `output` they are written there as .jsonl too.
    """
    _check(request)
    folder, permissions = None, request.permissions
    if request.model is not None:
        config = permissions.added_to(TrainConfig.model_validate({}))
    else:
        folder = RunFolder(request.run or newest_run(finished=True))
        config = permissions.run_config(folder)
        if request.scores and (refused := permissions.refused(config)[0]):
            raise InputError(f"--scores needs code that the run names ({', '.join(refused)}): --plugins runs it")
        sections = ("policy", "reference", *["reward"] * request.scores)
        config = with_files(config, sections if request.has_prompts else (*sections, "data", "eval"))
    loader = Loader.for_run(config.run, run_device(config.run))
    with ui.waiting("loading the models and prompts"):
        writer = _Writer(request, config, loader, folder)
    with ui.progress("sampling", len(writer.prompts) * request.samples) as advance:
        samples = []
        for batch in writer.batches():
            samples += batch
            advance(len(batch))
    if request.output is not None:
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        try:
            write_atomic(request.output, lines)
        except OSError as error:
            raise RunFailed(f"--output: {request.output}: cannot be written: {error.strerror or error}") from error
        log.info(f"{len(samples)} responses in {request.output}")
    return samples


def _check(request: GenerateRequest) -> None:
    problems = []
    if request.run is not None and request.model is not None:
        problems.append("--run and --model exclude each other: name one policy")
    if request.prompts and request.file is not None:
        problems.append("--prompt and --prompts exclude each other: name prompts, or a file of them")
    if request.model is not None and not request.has_prompts:
        problems.append("name prompts with --prompt, or a file of them with --prompts")
    if request.model is not None:
        given = {
            "--checkpoint": request.checkpoint,
            "--with-reference": request.with_reference,
            "--scores": request.scores,
            "--plugins": request.permissions.plugins,
        }
        problems += [f"{name} belongs to a run: name one with --run" for name, value in given.items() if value]
    if (path := request.output) is not None and path.suffix != ".jsonl":
        problems.append(f"--output: {path}: must end in .jsonl")
    elif path is not None:
        try:
            check_writable(path)  # before sampling: an error afterwards would lose the samples
        except OSError as error:
            problems.append(f"--output: {path}: cannot be written: {error.strerror or error}")
    if problems:
        raise InputError(*problems)


class _Writer:
    """The models and prompts of one command."""

    def __init__(self, request: GenerateRequest, config: TrainConfig, loader: Loader, folder: RunFolder | None) -> None:
        self.request = request
        self.reference: LM | None = None
        dtype = compute_dtype(config.run.dtype)
        if request.model is not None:
            loaded = loader.language_model(world_file(located(request.model), "policy"), "--model")
            policy, self.tokenizer, form = loaded.model, loaded.tokenizer, PromptFormat()
        else:
            policy, self.tokenizer = load_run_policy(loader, config, folder, request.checkpoint)
            form = replace(prompt_format(config.data), first_tokens=None)  # a prompt that was typed is not cut
            if request.with_reference:
                self.reference = frozen_lm(load_run_reference(loader, config).model, dtype, loader.device)
        self.policy = frozen_lm(policy, dtype, loader.device)
        self.scorers = loader.scorers(config.reward, gold=False) if request.scores else None
        if self.scorers is not None:
            self.scorers.begin(config.updates + 1, config.updates)
        self.sampling = Sampling(
            max_new_tokens=request.max_new_tokens or config.rollout.max_new_tokens,
            temperature=request.temperature or config.rollout.temperature,
            eos_ids=eos_ids(policy, self.tokenizer),
            pad_id=self.tokenizer.pad_token_id,
        )
        self.prompts = self._prompts(config, loader, policy, form)

    def _prompts(self, config: TrainConfig, loader: Loader, policy: Any, form: PromptFormat) -> Prompts:
        request, key = self.request, "--prompt"
        texts: Sequence[str] = request.prompts
        if not request.has_prompts:
            _, kept = build_prompts(config, loader, policy, self.tokenizer)
            key = "eval.prompts"
            texts = PromptStream(kept.texts, self.tokenizer, SHOWN, config.run.seed, kept.rows).batch(1).texts
        elif request.file == "-":
            key, texts = "--prompts -", sys.stdin.read().splitlines()
        elif request.file is not None:
            key, ref = "--prompts", located(request.file)
            section = PromptsSection(prompts=ref, column=request.column or "prompt", chat_template=form.chat)
            texts = loader.all_prompts(section, key, ref, "test")
        context = context_length(policy)
        room = None if context is None else context - self.sampling.max_new_tokens
        return usable_prompts(key, texts, policy, self.tokenizer, room, form)

    def batches(self) -> Iterator[list[Sample]]:
        """The samples, batch by batch."""
        prompts, request = self.prompts, self.request
        stream = PromptStream(prompts.texts, self.tokenizer, 1, 0, prompts.rows)
        places = [i for i in range(len(prompts)) for _ in range(request.samples)]
        # Noise by position: a response does not depend on the number of other responses.
        noise = uniforms(len(places), self.sampling.max_new_tokens, request.seed, "generate")

        def write(start: int, stop: int) -> list[Sample]:
            return self._batch(stream.pick(places[start:stop]), noise[start:stop])

        change = "use a lower --max-new-tokens or shorter prompts"
        yield from fitting_batches(len(places), ROWS, write, change)

    def _batch(self, batch: PromptBatch, noise: Any) -> list[Sample]:
        _, sampled, responses = respond(self.policy, batch, noise, self.sampling, self.tokenizer)
        rows: list[Sample] = [
            {"prompt": prompt, "response": response, "ended": ended}
            for prompt, response, ended in zip(batch.texts, responses, sampled.ended.tolist(), strict=True)
        ]
        self._score("score", rows, batch, responses)
        if self.reference is None:
            return rows
        beside = respond(self.reference, batch, noise, self.sampling, self.tokenizer).texts
        layout = response_layout(batch, sampled)
        stats = measure(ActorCritic(self.policy), ReferenceStates(self.reference), layout, self.sampling.temperature)
        for i, row in enumerate(rows):
            length = int(sampled.mask[i].sum())
            columns = (sampled.ids, stats.logprobs, stats.ref_logprobs, stats.exact_kl)
            tokens = token_rows(self.tokenizer, *(column[i, :length] for column in columns))
            kl = sum(token["kl"] for token in tokens)
            row |= {"reference": beside[i], "kl": kl, "kl_token": kl / length, "tokens": tokens}
        self._score("reference_score", rows, batch, beside)
        return rows

    def _score(self, name: str, rows: list[Sample], batch: PromptBatch, responses: Sequence[str]) -> None:
        if self.scorers is not None:
            scores = self.scorers(batch.texts, responses).values[REWARD].tolist()
            for row, score in zip(rows, scores, strict=True):
                row[name] = None if math.isnan(score) else score
