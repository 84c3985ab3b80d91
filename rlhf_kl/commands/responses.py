"""The responses that `rlhf-kl generate` shows: sampled, and perhaps scored and compared with the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_kl import ui
from rlhf_kl.commands.stored import load_policy, load_reference, located, scorers_of_run
from rlhf_kl.config.named import scorers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.files import read_lines
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import PromptRow
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import context_length
from rlhf_kl.ppo.heldout import NO_SCORERS, SHOWN, HeldOut
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.training import sets
from rlhf_kl.training.device import on_this_machine, run_device
from rlhf_kl.training.load import Loader
from rlhf_kl.training.samples import score_at, token_rows
from rlhf_kl.training.setup import build_prompts, sampling_of, usable_prompts
from rlhf_kl.training.world_files import with_files
from rlhf_kl.types import REWARD, Prompts
from rlhf_kl.ui import log


class Models(NamedTuple):
    """What answers, and what judges the answers."""

    config: TrainConfig
    policy: LM
    tokenizer: Any
    reference: LM | None
    scorers: Scorers


def load_models(
    config: TrainConfig,
    folder: RunFolder | None,
    model: str | None,
    checkpoint: int | None,
    *,
    reference: bool,
    scores: bool,
) -> Models:
    """`model`, or the policy of a run's `folder` at a checkpoint; with its reference and scorers where asked for."""
    if folder is not None:
        config = with_files(config, ("policy", "reference", "data", "eval", *["reward"] * scores))
    config = on_this_machine(config, stored=True)
    loader = Loader(config.run, run_device(config.run))
    reward = {key: scorer for key, scorer in scorers_of(config).items() if key.startswith(REWARD)}
    scorers = scorers_of_run(loader, config, folder, reward, checkpoint) if scores else NO_SCORERS
    policy, tokenizer = load_policy(loader, config, folder, model, checkpoint)
    other = load_reference(loader, config, (policy, tokenizer))[0] if reference else None
    scorers.begin(config.updates + 1, config.updates)
    return Models(config, policy, tokenizer, other, scorers)


def chosen_prompts(models: Models, texts: Sequence[str], file: str | None, column: str | None) -> Prompts:
    """Those of the command line or of its file (-: stdin), else those that `train` shows."""
    config, policy, tokenizer = models.config, models.policy.model, models.tokenizer
    form = config.data.model_copy(update={"first_tokens": None})  # a prompt that was typed is not cut
    key, rows = "--prompt", [PromptRow(text, {}) for text in texts]
    if file == "-":
        key, rows = "--prompts -", [PromptRow(row["text"], {}) for row in read_lines(sys.stdin.buffer.read(), "stdin")]
    elif file is not None:
        key, ref = "--prompts", located(file)
        if column and form.template:
            log.info("--column: these prompts are taken as they are, without the run's data.template")
        known = {"column": column} if column else {"column": form.column, "template": form.template}
        section = PromptsSection(prompts=ref, chat_template=form.chat_template, **known)
        rows = sets.load(key, ref, "test", sets.prompt_reader(section))
    elif not texts:
        _, kept = build_prompts(config, sets.prompts(config.data, config.eval), policy, tokenizer)
        return PromptStream(kept, min(SHOWN, len(kept)), config.run.seed).batch(1)
    context = context_length(policy)
    room = None if context is None else context - config.rollout.max_new_tokens
    return usable_prompts(key, rows, policy, tokenizer, room, form)


def response_rows(models: Models, prompts: Prompts, samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` responses to each prompt, as `generate --json` prints them; KL in nats."""
    config, policy, tokenizer, reference, scorers = models
    batch = prompts.pick([i for i in range(len(prompts)) for _ in range(samples)])
    held = HeldOut(
        policy,
        reference,
        tokenizer,
        sampling_of(config, policy.model, tokenizer),
        batch,
        scorers=scorers,
        seed=seed,
        purpose="generate",  # noise by position: a response does not depend on the number of other responses
        batch=config.rollout.batch_size,
    )
    with ui.progress("sampling", len(batch) * (1 if reference is None else 2)) as advance:
        own, other = held.samples(advance=advance)
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(batch.texts):
        row = {"prompt": text, "response": own.texts[i], "ended": own.ended[i]}
        if own.scores:
            row["score"] = score_at(own.scores, i)
        if reference is not None:
            kl = {"kl": own.kl[i], "kl_token": own.kl[i] / own.lengths[i]}
            row |= {"reference": other.texts[i], **kl, "tokens": token_rows(tokenizer, *own.tokens[i])}
            if own.scores:
                row["reference_score"] = score_at(other.scores, i)
        rows.append(row)
    return rows
