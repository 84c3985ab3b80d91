"""`rlhf-kl generate`: what a policy writes, with its reference beside it and the KL of every token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.build import prompt_format
from rlhf_kl.commands.load import Loaded, Loader
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.stored import NO_PERMISSIONS, Permissions, load_run_policy, load_run_reference, located
from rlhf_kl.commands.world import with_files, world_file
from rlhf_kl.config.schema import PromptsSection, TrainConfig
from rlhf_kl.data.prompts import PromptFormat, Prompts, PromptStream, prepare_prompts
from rlhf_kl.errors import InputError, RunFailed, blame
from rlhf_kl.memory import fitting_batches
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import check_vocabulary, compute_dtype, context_length, eos_ids
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


Sample = dict[str, Any]


def run_generate(request: GenerateRequest) -> list[Sample]:
    """One mapping for each response: prompt, response, ended; on request also score, reference, kl and tokens.

    With `output` they are written there as .jsonl too.
    """
    _check(request)
    chosen = request.permissions.added_to(TrainConfig.model_validate({}))
    config = chosen
    if request.model is None:
        needed = ("policy", "reference", *["reward"] * request.scores)
        config = with_files(_run_config(request), needed)
    accelerator = make_accelerator(config.run)
    loader = Loader.for_run(config.run, accelerator.device)
    with ui.waiting("loading the models and prompts"):
        writer = _Writer(request, config, loader)
    with ui.progress("sampling", len(writer.prompts) * request.samples) as advance:
        samples = []
        for batch in writer.batches():
            samples += batch
            advance(len(batch))
    if request.output is not None:
        _write(request.output, samples)
        log.info(f"{len(samples)} responses in {request.output}")
    return samples


def _write(path: Path, samples: list[Sample]) -> None:
    try:
        write_atomic(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    except OSError as error:
        raise RunFailed(f"--output: {path}: cannot be written: {error.strerror or error}") from error


def _check(request: GenerateRequest) -> None:
    problems = []
    if request.run is not None and request.model is not None:
        problems.append("--run and --model exclude each other: name one policy")
    if bool(request.prompts) == (request.file is not None):
        problems.append("name prompts with --prompt, or a file of them with --prompts")
    if request.model is not None:
        given = {
            "--checkpoint": request.checkpoint,
            "--with-reference": request.with_reference,
            "--scores": request.scores,
            "--plugins": request.permissions.plugins,
        }
        problems += [f"{name} belongs to a run: name one with --run" for name, value in given.items() if value]
    if request.output is not None:
        problems += _output_problems(request.output)
    if problems:
        raise InputError(*problems)


def _output_problems(path: Path) -> list[str]:
    if path.suffix != ".jsonl":
        return [f"--output: {path}: must end in .jsonl"]
    try:
        check_writable(path)  # before sampling: an error afterwards would lose the samples
    except OSError as error:
        return [f"--output: {path}: cannot be written: {error.strerror or error}"]
    return []


def _run_config(request: GenerateRequest) -> TrainConfig:
    config = request.permissions.run_config(RunFolder(request.run or newest_run(finished=True)))
    refused = request.permissions.refused(config)[0] if request.scores else []
    if refused:
        raise InputError(f"--scores needs code that the run names ({', '.join(refused)}): --plugins runs it")
    return config


class _Writer:
    """The models and prompts of one command."""

    def __init__(self, request: GenerateRequest, config: TrainConfig, loader: Loader) -> None:
        self.request, self.loader = request, loader
        self.reference: LM | None = None
        dtype = compute_dtype(config.run.dtype)
        if request.model is not None:
            ref = world_file(located(request.model), "policy")
            loaded = loader.language_model(ref, "--model")
            policy, self.tokenizer, form = loaded.model, loaded.tokenizer, PromptFormat()
        else:
            folder = RunFolder(request.run or newest_run(finished=True))
            policy, self.tokenizer = load_run_policy(loader, config, folder, request.checkpoint)
            written = prompt_format(config.data)
            form = replace(written, first_tokens=None)  # a prompt that was typed is not cut
            if request.with_reference:
                beside: Loaded = load_run_reference(loader, config)
                self.reference = frozen_lm(beside.model, dtype, loader.device)
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
        self.prompts = self._prompts(policy, form)

    def _prompts(self, policy: Any, form: PromptFormat) -> Prompts:
        request, where = self.request, "--prompt"
        texts: Sequence[str] = request.prompts
        if request.file is not None:
            where, ref = "--prompts", located(request.file)
            section = PromptsSection(prompts=ref, column=request.column or "prompt", chat_template=form.chat)
            texts = self.loader.all_prompts(section, where, ref, "test")
        context = context_length(policy)
        room = None if context is None else context - self.sampling.max_new_tokens
        with blame(where):
            prompts = prepare_prompts(texts, self.tokenizer, room, form)
            check_vocabulary(policy, self.tokenizer, prompts.rows)
        if prompts.note:
            log.info(f"{where}: {prompts.note}")
        return prompts

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

    def _scores(self, batch: PromptBatch, responses: Sequence[str]) -> list[float | None]:
        assert self.scorers is not None
        scores = self.scorers(batch.texts, responses).values[REWARD].tolist()
        return [None if math.isnan(score) else score for score in scores]

    def _batch(self, batch: PromptBatch, noise: Any) -> list[Sample]:
        _, sampled, responses = respond(self.policy, batch, noise, self.sampling, self.tokenizer)
        rows: list[Sample] = [
            {"prompt": prompt, "response": response, "ended": ended}
            for prompt, response, ended in zip(batch.texts, responses, sampled.ended.tolist(), strict=True)
        ]
        if self.scorers is not None:
            scores = self._scores(batch, responses)
            rows = [row | {"score": score} for row, score in zip(rows, scores, strict=True)]
        if self.reference is None:
            return rows
        beside = respond(self.reference, batch, noise, self.sampling, self.tokenizer).texts
        layout = response_layout(batch, sampled)
        stats = measure(ActorCritic(self.policy), ReferenceStates(self.reference), layout, self.sampling.temperature)
        for i, row in enumerate(rows):
            length = int(sampled.mask[i].sum())
            kl = stats.exact_kl[i, :length].tolist()
            columns = zip(
                sampled.ids[i, :length].tolist(),
                stats.logprobs[i, :length].tolist(),
                stats.ref_logprobs[i, :length].tolist(),
                kl,
                strict=True,
            )
            row |= {"reference": beside[i], "kl": sum(kl), "kl_token": sum(kl) / length}
            row["tokens"] = [
                {"text": self.tokenizer.decode([token]), "logprob": p, "ref_logprob": q, "kl": nats}
                for token, p, q, nats in columns
            ]
        if self.scorers is not None:
            scores = self._scores(batch, beside)
            for row, score in zip(rows, scores, strict=True):
                row["reference_score"] = score
        return rows
