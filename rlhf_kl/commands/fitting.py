"""`rlhf-kl doctor --device-memory`: whether a run fits, and what to change where it does not. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any, Literal

import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.sections import LoraSection
from rlhf_kl.data.prepare import prepare_prompts
from rlhf_kl.errors import InputError
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.pretrained import Access, load_tokenizer
from rlhf_kl.monitors.readiness import Finding
from rlhf_kl.run.interval import volume
from rlhf_kl.training import sets
from rlhf_kl.training.footprint import Footprint, Place, total
from rlhf_kl.training.outlines import Outlines, outlines
from rlhf_kl.training.resolved import decided_chat
from rlhf_kl.training.start import check_sizes
from rlhf_kl.training.world_files import with_files

USABLE = 0.85  # of a device's memory: the rest is for its context, libraries, messages and gaps
ASSUMED = 512  # tokens of a prompt, where neither the prompts nor `data.first_tokens` tell
PROBES = 64  # prompts that are encoded: the longest texts
SMALL = 0.01  # of a phase: smaller parts are not listed
SHARDS, ADAPTER = "policy.shard=true, reference.shard=true", "policy.lora={}"
# What needs less memory, in the order in which it is tried; without an adapter first, which is another training.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    SHARDS: {"policy": {"shard": True}, "reference": {"shard": True}},
    "policy.gradient_checkpointing=true": {"policy": {"gradient_checkpointing": True}},
    "rollout.engine=vllm": {"rollout": {"engine": "vllm"}},
    ADAPTER: {"policy": {"lora": LoraSection()}},
}

Outlined = Callable[[bool], Outlines]


def run_fitting(config: TrainConfig, processes: int, memory: int) -> list[Finding]:
    """Whether each phase fits into a device of `memory` bytes, one for each process.

    The device is taken for a GPU that computes in 16 bits, unless `run.device` and `run.dtype` say otherwise.
    """
    device = torch.device("cuda" if config.run.device == "auto" else config.run.device)
    if config.run.dtype == "auto":
        config = changed(config, {"run": {"dtype": "bfloat16" if device.type == "cuda" else "float32"}})
    try:
        check_sizes(config, processes)
        config = with_files(config)
        prompt = longest_prompt(config) or config.data.first_tokens
        findings = [*memory_findings(config, Place(device, processes, memory, prompt or ASSUMED))]
    except InputError as error:
        return [Finding("fatal", "config", problem) for problem in error.problems]
    if prompt is None:
        advice = "data.first_tokens, or the prompts and the tokenizer in their places"
        text = f"the prompts cannot be read here: the longest one is taken to have {ASSUMED} tokens"
        findings.insert(0, Finding("doubtful", "context", text, advice))
    return findings


def longest_prompt(config: TrainConfig) -> int | None:
    """Tokens of the longest prompt; None where the prompts or the tokenizer are not here."""
    data = config.data
    try:
        rows = sorted(sets.prompts(data, config.eval)[0], key=lambda row: len(row.text))[-PROBES:]
        tokenizer = load_tokenizer(config.policy.model, Access(remote_code=config.run.trust_remote_code))
        form: dict[str, Any] = {"options": data.chat_options, "first_tokens": data.first_tokens}
        chat = decided_chat(data, rows, tokenizer)
        prompts, _ = prepare_prompts(rows, tokenizer, None, chat=chat, system=data.system, **form)
    except InputError:
        return None
    return max(map(len, prompts.ids))


def memory_findings(config: TrainConfig, place: Place) -> Iterator[Finding]:
    """A line for each phase; the largest has the advice. Errors: InputError as `outlines`."""
    new, change, models = config.rollout.max_new_tokens, "", outliner(config, place.prompt)
    sums = Footprint(config, models(False), place)
    if not fits(sums):
        found = fitting_changes(config, models, place)
        change = "more devices, larger ones, or a smaller model" if found is None else ", ".join(found)
    devices = f"{place.processes} process{'es' * (place.processes > 1)} with {volume(place.memory)} each"
    where = f"{devices}, of which {USABLE:.0%} are to use"
    text = f"computed for {where}, {place.prompt} + {new} tokens, {config.run.dtype}"
    yield Finding("fine", "memory", text)
    if sums.policy.rough:
        text = f"what passes of a {sums.policy.shape.model_type} model keep is a rough estimate"
        yield Finding("doubtful", "memory", text, "leave room for twice the activations")
    if sums.engine_needs > sums.engine:
        text = f"the engine needs {sums.engine_needs:.0%} of a device, and has {sums.engine:.0%}"
        yield Finding("fatal", "memory", text, change)
    phases = sums.phases()
    largest = max(phases, key=lambda name: total(phases[name]))
    for name, parts in phases.items():
        size = total(parts)
        shown = ", ".join(f"{part} {volume(each)}" for part, each in parts.items() if each > SMALL * size)
        level: Literal["fine", "fatal"] = "fine" if size <= USABLE * place.memory else "fatal"
        yield Finding(level, "memory", f"{name}: {volume(size)} ({shown})", change if name == largest else "")


# ---- what to change


def outliner(config: TrainConfig, prompt: int) -> Outlined:
    """The models of a config, outlined once, and with the adapter that `CHANGES` adds."""
    return cache(lambda adapter: outlines(changed(config, CHANGES[ADAPTER] if adapter else {}), prompt))


def fits(sums: Footprint) -> bool:
    """Whether the largest phase fits, and the engine into its share."""
    return sums.engine_needs <= sums.engine and max(map(total, sums.phases().values())) <= USABLE * sums.place.memory


def fitting_changes(config: TrainConfig, models: Outlined, place: Place) -> list[str] | None:
    """The fewest changes with which a run fits; None if it never does."""
    known = [key for key, change in CHANGES.items() if changed(config, change) != config]  # others change nothing
    useless = ([SHARDS] if place.processes == 1 else []) + [ADAPTER] * has_adapter(models(False).policy.model)
    known = [key for key in known if key not in useless]
    every = [keys for count in range(len(known) + 1) for keys in combinations(known, count)]
    for keys in sorted(every, key=lambda keys: ADAPTER in keys):
        other, words = config, list(keys)
        for key in keys:
            other = changed(other, CHANGES[key])
        sums = Footprint(other, models(ADAPTER in keys), place)
        if sums.engine_needs > sums.engine:
            options = other.rollout.engine_options | {"gpu_memory_utilization": sums.engine_needs}
            other = changed(other, {"rollout": {"engine_options": options}})
            words.append(f"rollout.engine_options.gpu_memory_utilization={sums.engine_needs:g}")
        smaller = [rows for rows in range(sums.rows_of_a_pass, 0, -1) if config.minibatch_size % rows == 0]
        for rows in (None, *smaller):
            tried = other if rows is None else changed(other, {"ppo": {"microbatch_size": rows}})
            if fits(Footprint(tried, models(ADAPTER in keys), place)):
                return words + [f"ppo.microbatch_size={rows}"] * (rows is not None)
    return None


def changed(config: TrainConfig, changes: dict[str, dict[str, Any]]) -> TrainConfig:
    """The config with other values in its sections."""
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)
