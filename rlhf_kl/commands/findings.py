"""`rlhf-kl doctor`: every check that would save a wasted run, before the run.

It starts like `train` and makes an update; where its responses were short, one more of full length.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import psutil
import torch

from rlhf_kl import ui
from rlhf_kl.config.resolve import gradient_notes, unused_notes
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.supervised import PairsSection
from rlhf_kl.control.tilt import best_of_n
from rlhf_kl.data import sets
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import read_pairs
from rlhf_kl.errors import EngineFailed, GuardStop, InputError, MemoryFull
from rlhf_kl.events import UpdateSkipped, worded
from rlhf_kl.memory import LESS_MEMORY, free_memory, memory_is_full
from rlhf_kl.models.lora import checkpointed, has_adapter
from rlhf_kl.models.pretrained import context_length, parameter_count, size_words
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.optim import usual_learning_rate
from rlhf_kl.ppo.checks import check_first
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.scorer import REWARD
from rlhf_kl.run.checkpoint import checkpoint_size, interval_words, usual_interval, volume
from rlhf_kl.run.log import check_installed, peak_memory_mb
from rlhf_kl.seeding import seed_libraries
from rlhf_kl.supervised.figures import histogram, pair_figures, sketch
from rlhf_kl.text import duration
from rlhf_kl.train.device import SLOWER, bfloat16_slowdown, on_this_machine, run_device
from rlhf_kl.train.load import Loader
from rlhf_kl.train.loop import evaluate_policy
from rlhf_kl.train.setup import Setup, build_setup, learning_rate
from rlhf_kl.train.start import Training, check_sizes, prepare_training
from rlhf_kl.train.world_files import with_files
from rlhf_kl.types import RolloutBatch

SHARE = 0.85  # usable share of the free memory
PROBES = 64  # prompts that the tokenizer checks read
PAIRS = 200
SAMPLES = 3  # responses that are shown
LOW_ACCURACY = 0.6
FEW_END = 0.1  # of the responses: fewer, and the penalty for the others is most of the score
FEW_VALUES = 5
NEARLY = 0.9  # of the tokens of the largest update: the first one shows its memory
BEST_OF = 16  # responses, of which the best is the measure of a gain
FEWER = 20  # updates of a shorter run: below 15 no target is judged
RATE_FACTOR = 5.0  # rates in use lie within a factor of 3 of the usual one


class Finding(NamedTuple):
    """One line: level, topic, result of a check, and advice."""

    level: Literal["fine", "doubtful", "fatal"]
    topic: str
    text: str
    change: str = ""


def judged(topic: str, good: bool, text: str, change: str = "") -> Finding:
    """Fine where it is `good`; else doubtful, with advice."""
    return Finding("fine", topic, text) if good else Finding("doubtful", topic, text, change)


def run_doctor(config: TrainConfig, pairs: str | None = None, processes: int = 1) -> list[Finding]:
    """All findings; a fatal one ends the checks.

    `pairs`: held-out preference pairs to test the reward model on. `processes`: the number that will train together;
    here one process makes the update, and nothing is sharded.
    """
    findings: list[Finding] = []
    try:
        findings += check_config(config, processes)
        config = on_this_machine(config)
        device = run_device(config.run)
        setup = build_setup(config, device)
        config = with_files(setup.resolved(config))
        loader = Loader(config.run, device)
        findings += [check_dtype(config, device), check_rate(config, setup.policy.module)]
        findings += [*check_tokenizers(config, setup, loader), *check_context(config, setup)]
        findings += check_reward_model(config, setup, pairs)
        findings += check_updates(config, setup)
    except InputError as error:
        findings += [Finding("fatal", "config", problem) for problem in error.problems]
    except (GuardStop, EngineFailed) as error:
        findings.append(Finding("fatal", "start", str(error)))
    except MemoryFull as error:
        findings.append(Finding("fatal", "memory", error.work, error.change))
    except (RuntimeError, MemoryError) as error:
        if not memory_is_full(error):
            raise
        findings.append(Finding("fatal", "memory", "memory is full: the run does not fit", LESS_MEMORY["train"]))
    return findings


# ---- before the update


def check_config(config: TrainConfig, processes: int) -> Iterator[Finding]:
    """Settings without effect, or that do not belong together. Errors: InputError for what cannot run."""
    if processes > 1:
        check_sizes(config, processes)
    elif config.policy.shard or config.reference.shard:
        message = "policy.shard and reference.shard have no effect in one process"
        yield judged("config", False, message, "doctor --processes N, with the N of the training")
    check_installed(config.tracking.trackers)
    for note in unused_notes(config):
        yield judged("config", False, note, "leave the key out")


def check_dtype(config: TrainConfig, device: torch.device) -> Finding:
    """Whether the number type suits this device."""
    slowdown = bfloat16_slowdown(config.run)
    message = f"{config.run.dtype} on {device}; master weights float32"
    if slowdown > SLOWER:
        message += f"; a product takes {slowdown:.2g} times as long as in float32"
    return judged("dtype", slowdown <= SLOWER, message, "run.dtype=float32")


def check_rate(config: TrainConfig, policy: Any) -> Finding:
    """Whether the learning rate is near the usual one for a policy of this size."""
    rate, adapter, size = learning_rate(config, policy), has_adapter(policy), parameter_count(policy)
    usual = usual_learning_rate(size, adapter=adapter)
    message = f"learning rate {rate:.2g} for {size_words(policy)}"
    if config.ppo.learning_rate == "auto":
        return judged("rate", True, f"{message}, chosen by size (auto)")
    ratio = rate / usual
    if 1 / RATE_FACTOR <= ratio <= RATE_FACTOR:
        return judged("rate", True, f"{message}; usual is about {usual:.2g}")
    side = f"{ratio:.2g} times" if ratio > 1 else f"{1 / ratio:.2g} times less than"
    return judged("rate", False, f"{message}: {side} the usual {usual:.2g}", f"ppo.learning_rate={usual:g}, or auto")


def check_tokenizers(config: TrainConfig, setup: Setup, loader: Loader) -> Iterator[Finding]:
    """Whether policy and reference read the prompts alike."""
    if config.reference.model is None:
        return
    texts = setup.prompts.table.texts[:PROBES]
    other = loader.tokenizer(config.reference.model, "reference.model")
    if encode_all(other, texts) == encode_all(setup.tokenizer, texts):
        yield judged("tokenizer", True, "policy and reference tokenize the prompts alike")
    else:
        yield Finding("fatal", "tokenizer", "policy and reference tokenize prompts differently", "reference.model")


def check_context(config: TrainConfig, setup: Setup) -> Iterator[Finding]:
    """Whether prompt and response fit into what policy and reward model read."""
    new, limit = config.rollout.max_new_tokens, context_length(setup.policy.model)
    message = f"longest prompt {setup.prompts.longest} tokens and {new} new ones"
    message += "; the model's config names no limit" if limit is None else f" fit into {limit}"
    yield judged("context", limit is not None, message, "make sure that the model was trained on texts of this length")
    reward = setup.scorers.model
    if reward is not None and reward.limit is not None:
        prompts = setup.prompts.table.asked
        most = new + max(map(len, reward.encode(prompts, [""] * len(prompts))))
        if most > reward.limit:
            message = (
                f"the reward model reads {reward.limit} tokens, but texts have up to {most}: it loses the "
                "beginning of the longest"
            )
            yield judged("context", False, message, "a lower rollout.max_new_tokens, or shorter prompts")


def check_reward_model(config: TrainConfig, setup: Setup, pairs: str | None) -> Iterator[Finding]:
    """Its accuracy on `pairs`, else the one that its training has written beside it."""
    reward = setup.scorers.model
    if reward is None:
        return
    accuracy, where = None, "the held-out data of its training"
    if pairs is not None:
        section = PairsSection(pairs=pairs, eval_pairs=pairs, chat_template=reward.form.chat)
        held = sets.load("--pairs", pairs, section.split, partial(read_pairs, data=section))[:PAIRS]
        prompts = [pair.prompt for pair in held]
        chosen = reward.score(prompts, [pair.chosen for pair in held])
        rejected = reward.score(prompts, [pair.rejected for pair in held])
        accuracy, where = pair_figures(chosen, rejected)["eval/accuracy"], f"{len(held)} held-out pairs"
    else:
        folder = Path(config.reward.model or "")
        for summary in (folder / "summary.json", folder.parent / "summary.json"):  # of the built-in world; of a run
            if summary.is_file():
                accuracy = json.loads(summary.read_text(encoding="utf-8")).get("final", {}).get("eval/accuracy")
                break
    if accuracy is None:
        message = "the accuracy of the reward model is unknown"
        yield judged("reward", False, message, "measure it: doctor --pairs FILE")
        return
    message, good = f"the reward model is right on {accuracy:.0%} of {where}", accuracy >= LOW_ACCURACY
    message += "" if good else ", and guessing on 50%"
    yield judged("reward", good, message, "train it on more pairs, or use another reward.model")


# ---- the update


def check_updates(whole: TrainConfig, setup: Setup) -> Iterator[Finding]:
    """The start of the run and its first update, measured; then the memory of the largest one."""
    began = time.perf_counter()
    seed_libraries(whole.run.seed)
    unsharded = {name: getattr(whole, name).model_copy(update={"shard": False}) for name in ("policy", "reference")}
    config = whole.model_copy(update=unsharded)
    training = prepare_training(config, setup)
    start = time.perf_counter() - began
    same = setup.reference_is_initial_policy
    message = f"the policy {'begins as' if same else 'has other weights than'} its reference, padding changes nothing, "
    message += "no tensor is shared"
    advice = (
        "reference.model=null, if the policy shall stay near its start: a policy far away loses what it has learned"
    )
    yield judged("start", same, message, advice)
    yield from check_scores(training)
    yield from check_targets(config, training.reference_scores)
    yield from check_beta(config, training)
    with ui.progress("one update"):
        result = training.trainer.update(1)
    events = list(result.events)
    if skips := [event for event in events if isinstance(event, UpdateSkipped)]:
        yield Finding("fatal", "update", skips[-1].reason)
        return
    row = update_row(result, config)
    update = time.perf_counter() - began - start
    with ui.progress("one evaluation"):
        evaluated, _ = evaluate_policy(config, setup, training.plan, events)
    evaluation = time.perf_counter() - began - start - update
    yield check_samples(result.rollout, setup.scorers.model)
    yield check_endings(config, setup, row)
    check_first(row, float32=config.run.dtype == "float32")
    for alert in worded(events):
        yield judged("update", False, alert)
    perplexity = f"held-out perplexity {evaluated['eval/perplexity']:.2f} after this update"
    yield judged("eval", True, f"{perplexity}, on {training.plan.texts} texts")
    evaluations = 2 + (config.updates - 1) // training.plan.every
    message = f"{config.updates} updates of {update:.1f} s, {evaluations} evaluations of {evaluation:.1f} s"
    yield judged("time", True, f"{message}: {run_time(config.updates, training.plan.every, start, update, evaluation)}")
    yield check_checkpoints(config, training, update)
    yield check_memory(whole, setup.policy.device, *largest_update(setup, training.trainer, result.rollout))


def run_time(updates: int, every: int, start: float, update: float, evaluation: float) -> str:
    """How long a run takes, and a shorter one; seconds of its start, of an update and of one of its evaluations."""

    def about(count: int) -> str:
        return f"about {duration(start + count * update + (2 + (count - 1) // every) * evaluation)}"

    shorter = f"`train --updates {FEWER}`: {about(FEWER)}" if updates > FEWER else "`train --updates N` makes N"
    return f"{about(updates)} in all; {shorter}"


def check_checkpoints(config: TrainConfig, training: Training, update: float) -> Finding:
    """How often there is one, where an `update` takes so many seconds, and whether the run's folder has room for them.

    One more than `checkpoint.keep` may stay, and the next is complete before an older one goes.
    """
    size = checkpoint_size(checkpointed(training.trainer.model.modules), training.trainer.optimizer)
    written, folder = config.checkpoint.every, Path(config.run.output_dir).absolute()
    every = usual_interval(size, config.updates) if written == "auto" else written
    text = interval_words(every, size, "updates", auto=written == "auto", seconds=update)
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    if not os.access(there, os.W_OK):
        return Finding("fatal", "checkpoint", f"{there} cannot be written", "run.output_dir, or --output-dir of train")
    room, need = shutil.disk_usage(there).free, (config.checkpoint.keep + 2) * size
    text += f"; {config.checkpoint.keep + 2} of them take {volume(need)}, of {volume(room)} that are free"
    return judged("checkpoint", need < room, text, "room on the disk, another run.output_dir or checkpoint.keep=1")


def largest_update(setup: Setup, trainer: PPOTrainer, first: RolloutBatch) -> tuple[int, float]:
    """Peak memory in bytes (on a CPU, of this process), and the share that was measured of an update's most tokens.

    Where the `first` had fewer than NEARLY, one more is made, of the longest prompts and responses of full length.
    """
    stream, table, size = setup.prompts, setup.prompts.table, setup.prompts.batch_size
    longest = table.pick(sorted(range(len(table)), key=lambda i: len(table.ids[i]))[-size // stream.samples :])
    most = size * (fmean(map(len, longest.ids)) + setup.sampling.max_new_tokens)
    share = int(first.prompt_mask.sum() + first.mask.sum()) / most
    if share >= NEARLY and not trainer.config.ppo.value_warmup:  # the policy was trained
        return int(peak_memory_mb(setup.policy.device) * 2**20), share
    trainer.rollouts.prompts = PromptStream(longest, size, stream.seed, stream.samples)
    trainer.rollouts.sampling = replace(setup.sampling, eos_ids=[-1])  # no token
    with ui.progress("one update with responses of full length"):
        trainer.update(2 + trainer.config.ppo.value_warmup)  # with a policy that is trained
    return int(peak_memory_mb(setup.policy.device) * 2**20), 1.0


def check_memory(config: TrainConfig, device: torch.device, peak: int, tokens: float) -> Finding:
    """Whether the largest update fits, by its peak in one process: of several that shard each holds less."""
    own = torch.cuda.memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    room = int(SHARE * (free_memory(device) + own))
    where = f"an update with {tokens:.0%} of the most tokens possible, measured in one process"
    message = f"{peak / 2**30:.2f} GiB at the peak of {where}; {room / 2**30:.1f} GiB to use"
    share = "" if config.policy.shard else "policy.shard=true with several processes, "
    change = f"a smaller ppo.microbatch_size, {share}policy.lora={{}} or policy.gradient_checkpointing=true"
    return judged("memory", peak <= room, message, change)


def check_scores(training: Training) -> Iterator[Finding]:
    """The shaped scores of the reference's samples: warnings, and whether there are enough different ones."""
    scores = training.reference_scores
    shaped = torch.tensor(scores.shaped)
    bars = sketch(histogram({"all": shaped})["all"])
    message = f"shaped scores of {len(shaped)} reference samples {shaped.min():.2f} [{bars}] {shaped.max():.2f}"
    warnings = worded(scores.start_events())
    for warning in warnings:
        yield judged("scores", False, f"{message}; {warning}")  # which ends with advice
    different = len(set(scores.shaped))
    if different < FEW_VALUES:
        message += f"; only {different} different values"
        advice = "ppo.advantage=rloo with rollout.samples_per_prompt=4, which compares responses to one prompt"
        yield judged("scores", training.trainer.config.critic is None, message, advice)
    elif not warnings:
        yield judged("scores", True, message)


def check_targets(config: TrainConfig, scores: ReferenceScores) -> Iterator[Finding]:
    """The most score at low KLs: that of the tilted reference samples, as far as they tell (none: equal scores)."""
    curve, unit, target = scores.tilt_curve(), config.kl.unit, config.kl.target_value
    size, (tilted, groups) = scores.length if unit == "token" else 1.0, scores.to_tilt()
    best = [point for point in best_of_n(tilted, groups or [0] * len(tilted)) if point.n <= BEST_OF][-1]
    limit = curve[-1]["kl"] / size if curve else 0.0
    ladder = [kl for power in range(-5, 3) for kl in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if kl <= limit]
    kls = sorted({*ladder[-4:], *([target] if target <= limit else [])})
    gains = {0.0: 0.0} | {kl: gain for kl in kls if (gain := scores.most_gain(kl * size)) is not None}
    if len(gains) == 1:
        return
    rows = [[f"KL per {unit}", *(f"{kl:g}" for kl in gains)]]
    rows += [["most shaped score", *(f"{scores.mean + gain:.2f}" for gain in gains.values())]]
    if best.n > 1:
        rows += [[f"of best of {best.n}", *(f"{gain / best.gain:.0%}" for gain in gains.values())]]
    table = "\n".join(f"{name:<17}" + "".join(f"{cell:>7}" for cell in cells) for name, *cells in rows)
    note = f"nats; the {len(scores.shaped)} reference samples, weighted by their scores, tell nothing above {limit:.2g}"
    yield judged("targets", True, f"{table}\n{note}" + (f" (the target is {target:g})" if target > limit else ""))


def check_beta(config: TrainConfig, training: Training) -> Iterator[Finding]:
    """Where beta starts and how far it can move."""
    control, batch = training.trainer.controller, config.rollout.batch_size
    warnings = [*worded(control.start_events(config.controlled_updates, batch)), *gradient_notes(config)]
    for warning in warnings:
        yield judged("beta", False, warning)
    if not warnings:
        low, high = control.beta_range(config.controlled_updates, batch)
        course = "stays there" if low == high else f"can move between {low:.3g} and {high:.3g} in this run"
        yield judged("beta", True, f"starts at {control.beta:.4g} and {course}")


def check_samples(rollout: RolloutBatch, reward: RewardModel | None) -> Finding:
    """Responses of the starting policy with their scores; doubtful where most of a batch are the same text."""
    scores = rollout.scores[REWARD].tolist()
    rows = list(zip(rollout.prompts, rollout.responses, scores, strict=True))[:SAMPLES]
    message = "; ".join(f"{prompt[-30:]!r} -> {response[:60]!r}, score {score:.4g}" for prompt, response, score in rows)
    if reward is not None:
        message += f". The score is {reward.words()}"
    text, count = Counter(response.strip() for response in rollout.responses).most_common(1)[0]
    if 2 * count > len(scores):
        message += f"; {count / len(scores):.0%} of {len(scores)} responses are the same text, {text[:60]!r}"
    advice = "prompts that end where the model's training texts go on (a space at the end may be too much, or missing)"
    return judged("samples", 2 * count <= len(scores), message, advice)


def check_endings(config: TrainConfig, setup: Setup, row: dict[str, Any]) -> Finding:
    """Whether responses end, where it costs if they do not."""
    names = [setup.tokenizer.decode([token]) for token in setup.sampling.eos_ids]
    rate, length, lost = row["rollout/eos_rate"], row["rollout/response_length"], config.reward.missing_eos_penalty
    message = f"{rate:.0%} of responses end ({' or '.join(names)}), {length:.0f} tokens long on average; "
    message += f"the others lose {lost:g} (reward.missing_eos_penalty)" if lost else "not to end costs nothing"
    advice = "a larger rollout.max_new_tokens, or reward.missing_eos_penalty=0: else it learns to end before all else"
    return judged("EOS", rate > FEW_END or not lost, message, advice)
