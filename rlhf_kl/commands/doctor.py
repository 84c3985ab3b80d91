"""`rlhf-kl doctor`: every check that would save a wasted run, before the run.

It starts like `train`, makes one update, and writes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.commands.finding import Finding
from rlhf_kl.commands.fit import dtype_finding, perplexity_finding, rate_finding
from rlhf_kl.commands.memory import SHARE, estimate_memory, free_memory, largest_microbatch, microbatch_rows
from rlhf_kl.commands.parts import Parts, build_parts
from rlhf_kl.commands.resolver import Resolver
from rlhf_kl.commands.session import make_accelerator, on_this_machine
from rlhf_kl.commands.training import Training, check_sizes, evaluate_policy, prepare_training
from rlhf_kl.config.notes import gradient_notes, unused_notes, world_notes
from rlhf_kl.config.schema import PairsSection, TrainConfig
from rlhf_kl.errors import GuardStop, InputError, MemoryFull
from rlhf_kl.memory import memory_is_full
from rlhf_kl.models.load import context_length, load_tokenizer
from rlhf_kl.models.text import encode_all
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.failures import LESS_MEMORY
from rlhf_kl.run.trackers import check_installed
from rlhf_kl.trainers.guards import NonFiniteRollout
from rlhf_kl.trainers.metrics import update_row
from rlhf_kl.trainers.reward_figures import histogram, pair_figures, sketch

PROBES = 64  # prompts that the tokenizer checks read
PAIRS = 200
LOW_ACCURACY = 0.6
# Settings of a generation config that change the sampling distribution, with the values that do not change it.
# What to do about a warning that another module words, by its first word.
ADVICE = {
    "coef-moved": "wider kl.controller.min_coef and max_coef",
    "controller-too-slow": "kl.controller.kind=adaptive, a smaller horizon, or more updates",
    "kl-gradient": "kl.placement=reward with kl.estimator=k1",
    "out-of-memory": "a smaller ppo.microbatch_size",
}
FILTERS = {
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "temperature": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
}


def run_doctor(
    config: TrainConfig, display: TrainingDisplay, pairs: str | None = None, processes: int = 1
) -> list[Finding]:
    """All findings; a fatal one ends the checks.

    `pairs`: held-out preference pairs to test the reward model on. `processes`: the number that will train together;
    here one process makes the update, and nothing is sharded.
    """
    found: list[Finding] = []
    try:
        if processes > 1:
            check_sizes(config, processes)
        elif config.policy.shard or config.reference.shard:
            words = "policy.shard and reference.shard have no effect in one process"
            found.append(Finding("doubtful", "config", words, "doctor --processes N, with the N of the training"))
        check_installed(config.tracking.trackers)
        config = on_this_machine(config)
        accelerator = make_accelerator(config.run)
        parts = build_parts(config, accelerator, display)
        resolver = Resolver.for_run(config.run, display, accelerator.device)
        found += [dtype_finding(config, parts.policy), rate_finding(config, parts.policy.module)]
        found += [Finding("doubtful", "config", note, "leave the key out") for note in unused_notes(config)]
        found += [Finding("doubtful", "config", note, "name your own in its place") for note in world_notes(config)]
        found += _filters(parts)
        found += _tokenizers(config, parts, resolver)
        found += _context(config, parts)
        found += _reward_model(config, parts, resolver, pairs)
        found += _memory(config, parts, accelerator.device, processes)
        found += _one_update(alone(config), parts, display)
    except InputError as error:
        found += [Finding("fatal", "config", problem) for problem in error.problems]
    except GuardStop as error:
        found.append(Finding("fatal", "start", str(error)))
    except MemoryFull as error:
        found.append(Finding("fatal", "memory", error.work, error.change))
    except (RuntimeError, MemoryError) as error:
        if not memory_is_full(error):
            raise
        found.append(Finding("fatal", "memory", "memory is full: the run does not fit", LESS_MEMORY))
    return found


def _filters(parts: Parts) -> Iterator[Finding]:
    settings = parts.policy.model.generation_config
    carried = {name: getattr(settings, name, None) for name in FILTERS}
    odd = [f"{name} {value}" for name, value in carried.items() if value not in FILTERS[name]]
    if odd:
        yield Finding(
            "doubtful",
            "sampling",
            f"the policy's generation config sets {', '.join(odd)}: rollouts ignore it (the KL would be wrong), "
            "but `generate` of other programs uses it",
            "remove it from generation_config.json",
        )
    else:
        yield Finding("fine", "sampling", "rollouts and generation config draw from the whole distribution")


def _tokenizers(config: TrainConfig, parts: Parts, resolver: Resolver) -> Iterator[Finding]:
    tokenizer, texts = parts.tokenizer, parts.prompts.texts[:PROBES]
    if config.reference.model is not None:
        folder = resolver.policy(config.reference.model, "reference.model")
        other = load_tokenizer(folder, "reference.model", resolver.access)
        if encode_all(other, texts) != encode_all(tokenizer, texts):
            yield Finding("fatal", "tokenizer", "policy and reference tokenize prompts differently", "reference.model")
        else:
            yield Finding("fine", "tokenizer", "policy and reference tokenize the prompts alike")
    rows = encode_all(tokenizer, texts, bos=False)
    back: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    lost = [text for text, again in zip(texts, back, strict=True) if again != text]
    if lost:
        sample = f"{lost[0][:40]!r} comes back as {back[texts.index(lost[0])][:40]!r}"
        words = f"{len(lost)} of {len(texts)} prompts change when they are encoded and decoded: {sample}"
        yield Finding("doubtful", "tokenizer", words, "clean these prompts, or use another tokenizer")
    else:
        yield Finding("fine", "tokenizer", f"{len(texts)} prompts are the same after encoding and decoding")
    if isinstance(parts.reward, RewardModel):
        same = parts.reward.tokenizer.get_vocab() == tokenizer.get_vocab()
        words = "the policy's" if same else "another one: responses are decoded and encoded again"
        yield Finding("fine", "tokenizer", f"the reward model uses {words}")


def _context(config: TrainConfig, parts: Parts) -> Iterator[Finding]:
    longest = max(len(row) for row in parts.prompts.rows)
    new, limit = config.rollout.max_new_tokens, context_length(parts.policy.model)
    words = f"longest prompt {longest} tokens and {new} new ones"
    if limit is None:
        words += "; the model's config names no limit"
        yield Finding("doubtful", "context", words, "make sure that the model was trained on texts of this length")
    else:
        yield Finding("fine", "context", f"{words} fit into {limit}")
    if isinstance(parts.reward, RewardModel) and parts.reward.limit is not None:
        most = max(len(row) for row in parts.reward.encode(parts.prompts.texts, [""] * len(parts.prompts.texts)))
        if most + new > parts.reward.limit:
            yield Finding(
                "doubtful",
                "context",
                f"the reward model reads {parts.reward.limit} tokens, but texts have up to {most + new}: it loses the "
                "beginning of the longest",
                "a lower rollout.max_new_tokens, or shorter prompts",
            )


def _reward_model(config: TrainConfig, parts: Parts, resolver: Resolver, pairs: str | None) -> Iterator[Finding]:
    if not isinstance(parts.reward, RewardModel):
        return
    ref = config.reward.model or ""
    accuracy: float | None = None
    if pairs is not None or is_builtin(ref):
        section = PairsSection(pairs=pairs or ref, eval_pairs=pairs, chat_template=parts.reward.form.chat)
        held = (resolver.pairs(section)[1] if pairs is None else resolver.all_pairs(section))[:PAIRS]
        prompts = [pair.prompt for pair in held]
        chosen = parts.reward.score(prompts, [pair.chosen for pair in held])
        rejected = parts.reward.score(prompts, [pair.rejected for pair in held])
        accuracy, where = pair_figures(chosen, rejected)["eval/accuracy"], f"{len(held)} held-out pairs"
    else:
        summary = Path(ref).parent / "summary.json"
        if summary.is_file():
            accuracy = json.loads(summary.read_text(encoding="utf-8")).get("final", {}).get("eval/accuracy")
        where = "the held-out data of its training"
    if accuracy is None:
        words = "the accuracy of the reward model is unknown"
        yield Finding("doubtful", "reward", words, "measure it: doctor --pairs FILE")
    elif accuracy < LOW_ACCURACY:
        words = f"the reward model is right on {accuracy:.0%} of {where}, and guessing on 50%"
        yield Finding("doubtful", "reward", words, "train it on more pairs, or use another reward.model")
    else:
        yield Finding("fine", "reward", f"the reward model is right on {accuracy:.0%} of {where}")


def alone(config: TrainConfig) -> TrainConfig:
    """The config for one process: nothing is sharded."""
    whole = {"shard": False}
    sections = {
        "policy": config.policy.model_copy(update=whole),
        "reference": config.reference.model_copy(update=whole),
    }
    return config.model_copy(update=sections)


def _memory(config: TrainConfig, parts: Parts, device: torch.device, processes: int) -> Iterator[Finding]:
    tokens = max(len(row) for row in parts.prompts.rows) + config.rollout.max_new_tokens
    estimate, room = estimate_memory(config, parts, tokens, processes), int(SHARE * free_memory(device))
    minibatch = config.minibatch_size // processes
    rows = min(microbatch_rows(config, parts.policy.model, device, tokens), minibatch)
    need = estimate.total(rows)
    words = f"about {need / 2**30:.2f} GiB with {rows} responses in a pass, {room / 2**30:.1f} GiB to use"
    words = words if processes == 1 else f"in each of {processes} processes {words}"
    most = largest_microbatch(estimate, minibatch, room)
    if need <= room:
        yield Finding("fine", "memory", f"{words}; up to {most} fit")
    elif most is not None:
        yield Finding("doubtful", "memory", words, f"ppo.microbatch_size={most}")
    else:
        share = "" if config.policy.shard else "policy.shard=true with several processes, "
        change = share + "policy.lora={} or policy.gradient_checkpointing=true, a smaller model, fewer tokens"
        yield Finding("doubtful", "memory", f"{words}; not even 1 fits", change)


def _one_update(config: TrainConfig, parts: Parts, display: TrainingDisplay) -> Iterator[Finding]:
    began = time.perf_counter()
    training = prepare_training(config, parts, display)
    setup = time.perf_counter() - began
    yield Finding("fine", "start", "policy and reference agree, padding changes nothing, no tensor is shared")
    yield from _scores(training)
    yield from _beta(config, training)
    try:
        with display.waiting("one update"):
            result = training.trainer.update(1)
    except NonFiniteRollout as failure:
        yield Finding("fatal", "update", str(failure))
        return
    row, alerts = update_row(result, config), list(result.alerts)
    update = time.perf_counter() - began - setup
    with display.waiting("one evaluation"):
        evaluated = evaluate_policy(config, parts, alerts.append)
    evaluation = time.perf_counter() - began - setup - update
    yield from _endings(config, parts, row)
    if row["policy/logratio_first_max"] > 1e-3 and config.run.dtype == "float32":
        yield Finding("fatal", "start", "the policy disagrees with its own rollout before the first step")
    for alert in alerts:
        yield _warned("update", alert)
    yield perplexity_finding(evaluated["eval/perplexity"], parts.texts, parts.tokenizer)
    looks = 2 + (config.updates - 1) // config.eval.every
    seconds = setup + config.updates * update + looks * evaluation
    yield Finding(
        "fine",
        "time",
        f"{config.updates} updates of {update:.1f} s, {looks} evaluations of {evaluation:.1f} s: "
        f"about {_duration(seconds)} in all",
    )


def _scores(training: Training) -> Iterator[Finding]:
    shaped = torch.tensor(training.reference_scores.shaped)
    shown = histogram({"all": shaped})
    bars = f"{shaped.min():.2f} [{sketch(shown['all'])}] {shaped.max():.2f}"
    words = f"shaped scores of {len(shaped)} reference samples {bars}"
    different = len(set(training.reference_scores.shaped))
    for warning in training.reference_scores.start_warnings():
        yield Finding("doubtful", "scores", f"{words}; {warning}")  # which ends with advice
    if different < len(shaped) / 20:
        words += f"; only {different} different values: the policy learns slowly from a coarse score"
        yield Finding("doubtful", "scores", words, "a reward with more values, or a sum of several (reward.kind=sum)")
    elif not training.reference_scores.start_warnings():
        yield Finding("fine", "scores", words)


def _beta(config: TrainConfig, training: Training) -> Iterator[Finding]:
    control, batch = training.trainer.controller, config.rollout.batch_size
    low, high = control.reach(config.controlled_updates, batch)
    warnings = [*control.start_warnings(config.controlled_updates, batch), *gradient_notes(config)]
    for warning in warnings:
        yield _warned("beta", warning)
    if not warnings:
        course = "stays there" if low == high else f"can move between {low:.3g} and {high:.3g} in this run"
        yield Finding("fine", "beta", f"starts at {control.coef:.4g} and {course}")


def _warned(topic: str, warning: str) -> Finding:
    """A warning of the start or of an update, with advice where its text has none."""
    return Finding("doubtful", topic, warning, ADVICE.get(warning.partition(":")[0], ""))


def _endings(config: TrainConfig, parts: Parts, row: dict[str, Any]) -> Iterator[Finding]:
    names = [parts.tokenizer.decode([token]) for token in parts.sampling.eos_ids]
    rate, length = row["rollout/eos_rate"], row["rollout/response_length"]
    words = f"{rate:.0%} of responses end ({' or '.join(names)}), {length:.0f} tokens long on average"
    if rate == 0 and config.reward.missing_eos_penalty == 0:
        yield Finding("fine", "EOS", f"{words}; reward.missing_eos_penalty is 0, so this costs nothing")
    elif rate == 0:
        yield Finding("doubtful", "EOS", words, "a larger rollout.max_new_tokens, or reward.missing_eos_penalty=0")
    elif length < 2:
        words += ": the policy ends at once"
        yield Finding("doubtful", "EOS", words, "let prompts stop where its training texts go on")
    else:
        yield Finding("fine", "EOS", words)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
