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
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from rlhf_kl import ui
from rlhf_kl.clock import peak_memory_mb
from rlhf_kl.commands.fitting import USABLE, memory_findings
from rlhf_kl.config.resolve import gradient_notes, unused_notes
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.reward import EACH
from rlhf_kl.config.schema.supervised import PairsSection
from rlhf_kl.control.tilt import best_of_n
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import GuardStop, InputError, MemoryFull, ServiceFailed
from rlhf_kl.events import UpdateSkipped, worded
from rlhf_kl.memory import LESS_MEMORY, all_memory, free_memory, memory_is_full
from rlhf_kl.models.lora import checkpointed, has_adapter
from rlhf_kl.models.pretrained import context_length, parameter_count, size_words
from rlhf_kl.monitors.readiness import FEW_VALUES, Finding, judge, judge_terms
from rlhf_kl.optim import usual_learning_rate
from rlhf_kl.ppo.checks import check_first
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.run.interval import checkpoint_size, interval_words, usual_interval, volume
from rlhf_kl.run.log import check_installed
from rlhf_kl.seeding import seed_libraries
from rlhf_kl.supervised.figures import histogram, pair_figures, sketch
from rlhf_kl.text import counted, cut, duration, stdout_width
from rlhf_kl.training import sets
from rlhf_kl.training.device import SLOWER, half_slowdown, run_device
from rlhf_kl.training.evaluation import evaluate_policy
from rlhf_kl.training.footprint import Place
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.setup import Setup, build_setup, start_engine
from rlhf_kl.training.start import Training, check_sizes, prepare_training
from rlhf_kl.training.trainer import learning_rate
from rlhf_kl.types import REWARD, RolloutBatch

PAIRS = 200
BESIDE = 38  # columns of a terminal that the numbers of `targets` leave to words
SAMPLES = 3  # responses that are shown
NEARLY = 0.9  # of the tokens of the largest update: the first one shows its memory
BEST_OF = 16  # responses, of which the best is the measure of a gain
FEWER = 20  # updates of a shorter run: below 15 no target is judged


def run_doctor(config: TrainConfig, pairs: str | None = None, processes: int = 1) -> list[Finding]:
    """All findings; a fatal one ends the checks.

    `pairs`: held-out preference pairs to test the reward model on. `processes`: the number that will train together;
    here one process makes the update, and nothing is sharded.
    """
    findings: list[Finding] = []
    try:
        findings += check_config(config, processes)
        device = run_device(config.run)
        resolved = resolve(config)
        chat = config.data.chat_template  # as it is written; the resolved config has what was decided
        setup, config = build_setup(resolved, device), resolved.config
        start_engine(config, setup)
        findings += [check_dtype(config, device), check_rate(config, setup.policy.module)]
        findings += [*check_chat(setup, chat), *check_context(config, setup)]
        findings += check_reward_model(config, setup, pairs)
        findings += check_updates(config, setup, processes)
    except InputError as error:
        findings += [Finding("fatal", "config", problem) for problem in error.problems]
    except (GuardStop, ServiceFailed) as error:
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
        yield judge("shard")
    check_installed(config.tracking.trackers)
    for note in unused_notes(config):
        yield judge("unused", note=note)


def check_dtype(config: TrainConfig, device: torch.device) -> Finding:
    """Whether the number type suits this device."""
    slowdown = half_slowdown(config.run)
    return judge("dtype", dtype=config.run.dtype, device=device, slowdown=slowdown, slower=SLOWER)


def check_rate(config: TrainConfig, policy: Any) -> Finding:
    """Whether the learning rate is near the usual one for a policy of this size."""
    rate, adapter, size = learning_rate(config, policy), has_adapter(policy), parameter_count(policy)
    usual = usual_learning_rate(size, adapter=adapter)
    return judge("rate", rate=rate, size=size_words(policy), usual=usual, ratio=rate / usual)


def check_chat(setup: Setup, chat: bool | str) -> Iterator[Finding]:
    """Whether plain prompts leave a chat template unused (`chat`: auto)."""
    if chat == "auto" and setup.tokenizer.chat_template and not setup.prompts.table.rendered:
        yield judge("chat")


def check_context(config: TrainConfig, setup: Setup) -> Iterator[Finding]:
    """Whether prompt and response fit into what policy and reward models read, and what these read."""
    new, limit, prompts = config.rollout.max_new_tokens, context_length(setup.policy.model), setup.prompts.table.asked
    yield judge("context", longest=setup.prompts.longest, new=new, limit=limit)
    for reward in setup.scorers.models.values():
        facts = {"key": reward.key, "shown": repr(reward.shown()), "limit": reward.limit, "new": new}
        yield judge("reads", **facts, doubt=reward.doubt, advice=reward.advice)
        sizes = map(len, reward.encode(prompts, [""] * len(prompts)))
        if over := sum(reward.limit is not None and size + new > reward.limit for size in sizes):
            yield judge("reward context", **facts, cut=over, count=len(prompts))


def check_reward_model(config: TrainConfig, setup: Setup, pairs: str | None) -> Iterator[Finding]:
    """Its accuracy on `pairs`, else the one that its training has written beside it."""
    reward = setup.scorers.model
    if reward is None:
        return
    accuracy, chance, where = None, 0.5, "the held-out data of its training"
    if pairs is not None:
        section = PairsSection(pairs=pairs, eval_pairs=pairs, chat_template=reward.form.chat)
        held = sets.load("--pairs", pairs, section.eval_split, sets.pair_reader(section), PAIRS)
        prompts = [pair.prompt for pair in held]
        chosen = reward.score(prompts, [pair.chosen for pair in held])
        rejected = reward.score(prompts, [pair.rejected for pair in held])
        accuracy, where = pair_figures(chosen, rejected)["eval/accuracy"], f"{len(held)} held-out pairs"
    else:
        folder = Path(config.reward.model or "")
        for summary in (folder / "summary.json", folder.parent / "summary.json"):  # of the built-in world; of a run
            if summary.is_file():
                final = json.loads(summary.read_text(encoding="utf-8")).get("final", {})
                accuracy, chance = final.get("eval/accuracy"), final.get("eval/majority", chance)  # of pairs, of labels
                break
    known = None if accuracy is None else {"accuracy": accuracy, "chance": chance, "where": where}
    yield judge("no accuracy") if known is None else judge("accuracy", **known)


# ---- the update


def check_updates(whole: TrainConfig, setup: Setup, processes: int) -> Iterator[Finding]:
    """The start of the run and its first update, measured; then the memory of the largest one.

    Where there will be several processes, what each needs is computed.
    """
    began = time.perf_counter()
    seed_libraries(whole.run.seed)
    unsharded = {name: getattr(whole, name).model_copy(update={"shard": False}) for name in ("policy", "reference")}
    config = whole.model_copy(update=unsharded)
    training = prepare_training(config, setup)
    start = time.perf_counter() - began
    same = setup.reference_is_initial_policy
    yield judge("start", same=same, begins="begins as" if same else "has other weights than")
    yield from check_scores(training)
    if figures := training.reference_scores.terms:
        weights = {name: term.weight for name, term in (config.reward.terms or {}).items()}
        yield judge_terms(weights, figures, each=config.reward.normalize == EACH)
    yield from check_targets(config, training.reference_scores)
    yield from check_beta(config, training)
    with ui.progress("one update"):
        result = training.trainer.update(1)
    events = list(result.events)
    if skips := [event for event in events if isinstance(event, UpdateSkipped)]:
        yield Finding("fatal", "update", skips[-1].reason)
        return
    row = update_row(result, training.trainer.settings)
    update = time.perf_counter() - began - start
    with ui.progress("one evaluation"):
        evaluated, *_ = evaluate_policy(training.heldout, same, 2, events)
    evaluation = time.perf_counter() - began - start - update
    yield check_samples(result.rollout, setup.scorers.model)
    yield check_endings(config, setup, row)
    check_first(row, float32=config.run.dtype == "float32")
    for alert in worded(events):
        yield Finding("doubtful", "update", alert)  # which ends with advice
    words = setup.policy.model.config.get_text_config().vocab_size
    yield judge("eval", perplexity=evaluated["eval/perplexity"], texts=evaluated["eval/documents"], words=words)
    every = config.eval.updates_between
    evaluations = 2 + (config.updates - 1) // every
    message = f"{counted(config.updates, 'update')} of {update:.1f} s, {evaluations} evaluations of {evaluation:.1f} s"
    yield Finding("fine", "time", f"{message}: {run_time(config.updates, every, start, update, evaluation)}")
    yield check_checkpoints(config, training, update)
    device = setup.policy.device
    if processes == 1:
        yield check_memory(whole, device, *largest_update(setup, training.trainer, result.rollout))
    else:
        yield from memory_findings(
            whole, Place(device, processes, all_memory(device, processes), setup.prompts.longest)
        )


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
    count, room = config.checkpoint.keep + 2, shutil.disk_usage(there).free
    fits, need = count * size < room, volume(count * size)
    return judge("checkpoint", often=text, count=count, need=need, room=volume(room), fits=fits)


def largest_update(setup: Setup, trainer: PPOTrainer, first: RolloutBatch) -> tuple[int, float]:
    """Peak memory in bytes (on a CPU, of this process), and the share that was measured of an update's most tokens.

    Where the `first` had fewer than NEARLY, one more is made, of the longest prompts and responses of full length.
    """
    stream, table, size = setup.prompts, setup.prompts.table, setup.prompts.batch_size
    longest = table.pick(sorted(range(len(table)), key=lambda i: len(table.ids[i]))[-size // stream.samples :])
    most = size * (fmean(map(len, longest.ids)) + setup.sampling.max_new_tokens)
    share = int(first.prompt_mask.sum() + first.mask.sum()) / most
    if share >= NEARLY and not trainer.settings.value_warmup:  # the policy was trained
        return int(peak_memory_mb(setup.policy.device) * 2**20), share
    endless = replace(setup.sampling, eos_ids=[-1])  # no token
    stream = PromptStream(longest, size, stream.seed, stream.samples)
    trainer.rollouts.parts = replace(setup, prompts=stream, sampling=endless)
    with ui.progress("one update with responses of full length"):
        trainer.update(2 + trainer.settings.value_warmup)  # with a policy that is trained
    return int(peak_memory_mb(setup.policy.device) * 2**20), 1.0


def check_memory(config: TrainConfig, device: torch.device, peak: int, tokens: float) -> Finding:
    """Whether the largest update fits, by its peak."""
    own = torch.cuda.memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    room = int(USABLE * (free_memory(device) + own))
    share = "" if config.policy.shard else "policy.shard=true with several processes, "
    return judge("memory", peak=peak / 2**30, room=room / 2**30, tokens=tokens, share=share)


def check_scores(training: Training) -> Iterator[Finding]:
    """The shaped scores of the reference's samples: warnings, and whether there are enough different ones."""
    scores = training.reference_scores
    shaped, different = torch.tensor(scores.shaped), len(set(scores.shaped))
    bars = sketch(histogram({"all": shaped})["all"])
    facts = {"count": len(shaped), "low": shaped.min(), "bars": bars, "high": shaped.max(), "different": different}
    warnings = worded(scores.start_events())
    for warning in warnings:
        yield judge("scores", **facts, warning=warning)
    if different < FEW_VALUES:
        yield judge("few scores", **facts, critic=training.trainer.settings.critic is not None)
    elif not warnings:
        yield judge("scores", **facts, warning=None)


def check_targets(config: TrainConfig, scores: ReferenceScores) -> Iterator[Finding]:
    """The most score at low KLs: that of the tilted reference samples, as far as they tell (none: equal scores)."""
    curve, unit, target = scores.tilt_curve(), config.kl.unit, config.kl.target_value
    size, (tilted, groups) = scores.length if unit == "token" else 1.0, scores.to_tilt()
    best = [point for point in best_of_n(tilted, groups or [0] * len(tilted)) if point.n <= BEST_OF][-1]
    limit = curve[-1]["kl"] / size if curve else 0.0
    ladder = [kl for power in range(-5, 3) for kl in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if kl <= limit]
    columns = max(3, min(6, ((stdout_width() or 80) - BESIDE) // 7))  # no KL, some of the ladder, and the target
    kls = sorted({*ladder[2 - columns :], *([target] if target <= limit else [])})
    gains = {0.0: 0.0} | {kl: gain for kl in kls if (gain := scores.most_gain(kl * size)) is not None}
    if len(gains) == 1:
        return
    rows = [[f"KL per {unit}", *(f"{kl:g}" for kl in gains)]]
    rows += [["most shaped score", *(f"{scores.mean + gain:.2f}" for gain in gains.values())]]
    if best.n > 1:
        rows += [[f"of best of {best.n}", *(f"{gain / best.gain:.0%}" for gain in gains.values())]]
    table = "\n".join(f"{name:<17}" + "".join(f"{cell:>7}" for cell in cells) for name, *cells in rows)
    note = f"nats; {len(scores.shaped)} reference samples are too few to tell the score above a KL of {limit:.2g}"
    yield Finding("fine", "targets", f"{table}\n{note}" + (f" (the target is {target:g})" if target > limit else ""))


def check_beta(config: TrainConfig, training: Training) -> Iterator[Finding]:
    """Where beta starts and how far it can move."""
    control, batch = training.trainer.controller, config.rollout.batch_size
    warnings = [*worded(control.start_events(config.controlled_updates, batch)), *gradient_notes(config)]
    for warning in warnings:
        yield Finding("doubtful", "beta", warning)
    if not warnings:
        low, high = control.beta_range(config.controlled_updates, batch)
        course = "stays there" if low == high else f"can move between {low:.3g} and {high:.3g} in this run"
        yield Finding("fine", "beta", f"starts at {control.beta:.4g} and {course}")


def check_samples(rollout: RolloutBatch, reward: RewardModel | None) -> Finding:
    """Responses of the starting policy with their scores; doubtful where most of a batch are the same text."""
    scores = rollout.scores[REWARD].tolist()
    rows = list(zip(rollout.prompts, rollout.responses, scores, strict=True))[:SAMPLES]
    message = "\n".join(f"{cut(asked, -30)!r} -> {cut(response, 60)!r}: {score:.4g}" for asked, response, score in rows)
    if reward is not None:
        message += f"\nThe score is {reward.words()}"
    text, count = Counter(response.strip() for response in rollout.responses).most_common(1)[0]
    return judge("samples", shown=message, most=count, count=len(scores), share=count / len(scores), text=text[:60])


def check_endings(config: TrainConfig, setup: Setup, row: dict[str, Any]) -> Finding:
    """Whether responses end, where it costs if they do not."""
    names = [setup.tokenizer.decode([token]) for token in setup.sampling.eos_ids]
    rate, length, lost = row["rollout/eos_rate"], row["rollout/response_length"], config.reward.missing_eos_penalty
    facts = {"rate": rate, "names": " or ".join(names), "length": length, "lost": lost}
    return judge("endings" if lost else "free endings", **facts)
