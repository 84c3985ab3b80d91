"""Runs side by side: variants (runs that differ in their seed) and families of variants."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_kl.config.resolve import config_diff
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.control import adjusts
from rlhf_kl.errors import InputError
from rlhf_kl.monitors.facts import mean
from rlhf_kl.monitors.kl_shares import kl_shares
from rlhf_kl.report.equal_kl import EqualKL, Point, compare_groups
from rlhf_kl.report.one_run import RunResult, read_run

CONFIGS = "configs"  # in the folder of a comparison: those of its runs, NAME.yaml
SCORES = "scores_shaped"  # the measure that is trained on; others are the scorers that never train
# If these differ, KLs have different references; and scores, or those of the other scorers, different scales.
REFERENCE = ("policy.model", "reference.", "rollout.temperature")
SCALE, HELD_OUT = ("reward.",), ("data.prompts", "eval.prompts")
SAMPLED = ("data.", "rollout.max_new_tokens")  # with these other, samples of the reference have other scores
NOT_THE_RUN = ("run.name", "run.output_dir", "run.seed", "checkpoint.", "tracking.")
NO_MEANS = ("verdict", "since", "error_since", "target", "unit", "updates")  # of a run's figures

Curve = tuple[list[float], list[float], list[float], list[float]]  # x, mean, mean -+ one standard deviation


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed."""

    name: str
    runs: dict[int, RunResult]  # by seed

    @property
    def family(self) -> str:
        """Its name without the number at the end: static-0.1x and static-10x are one family."""
        return re.sub(r"[-_ ]?\d[\d.]*x?$", "", self.name) or self.name

    @property
    def config(self) -> TrainConfig:
        return next(iter(self.runs.values())).config

    @property
    def target(self) -> float:
        """KL target, nats in the config's unit."""
        return self.config.kl.target_value

    @property
    def constant_coef(self) -> float | None:
        """The mean beta if it is constant in every seed, else None."""
        return mean(run.constant_coef for run in self.runs.values())

    @property
    def verdicts(self) -> Counter[str]:
        """How many seeds held their target, reached it late, missed it, or are too short to say; empty without one."""
        return Counter(word for run in self.runs.values() if (word := run.figures["verdict"]) is not None)

    @property
    def over_target(self) -> float | None:
        """The KL at the end over the target; None without a penalty, which has no target."""
        kl = self.mean("kl")
        return None if kl is None or self.constant_coef == 0 else kl / self.target

    @cached_property
    def kl_shares(self) -> dict[str, Any] | None:
        """See `kl_shares`: of all seeds together."""
        return kl_shares(part for run in self.runs.values() for part in run.token_parts)

    def mean(self, name: str) -> float | None:
        """Mean of a figure over seeds; None if a seed lacks it."""
        return mean(run.figures.get(name) for run in self.runs.values())

    def sd(self, name: str) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        values = [value for run in self.runs.values() if (value := run.figures.get(name)) is not None]
        known = len(values) > 1 and len(values) == len(self.runs) and all(map(math.isfinite, values))
        return stdev(values) if known else None

    def series(self, key: str) -> Curve:
        """Mean of a key over seeds with one standard deviation, at the updates that all of them have."""
        tables = [dict(zip(*run.series(key), strict=True)) for run in self.runs.values()]
        x = sorted(set.intersection(*map(set, tables)))
        columns = [[table[step] for table in tables] for step in x]
        means, sds = [fmean(c) for c in columns], [stdev(c) if len(c) > 1 else 0.0 for c in columns]
        pairs = list(zip(means, sds, strict=True))
        return x, means, [mean - sd for mean, sd in pairs], [mean + sd for mean, sd in pairs]


@dataclass(frozen=True)
class Comparison:
    """All variants, in order, and notes about gaps and differences."""

    variants: list[Variant]
    notes: list[str]

    @property
    def families(self) -> dict[str, list[Variant]]:
        families: dict[str, list[Variant]] = {}
        for variant in self.variants:
            families.setdefault(variant.family, []).append(variant)
        return {group[0].name if len(group) == 1 else name: group for name, group in families.items()}

    @property
    def groups(self) -> dict[str, list[Variant]]:
        """The groups to compare: the families, or with one family its variants."""
        families = self.families
        return families if len(families) > 1 else {variant.name: [variant] for variant in self.variants}

    @property
    def unit(self) -> str:
        return self.variants[0].config.kl.unit

    @property
    def scorers(self) -> list[str]:
        """Names of the scorers that never train, of all variants."""
        return list(dict.fromkeys(name for variant in self.variants for name in variant.config.eval.watched))

    @property
    def target(self) -> float | None:
        """The target in nats; None if variants have different ones (one without a penalty has none)."""
        targets = {variant.target for variant in self.variants if variant.constant_coef != 0}
        return targets.pop() if len(targets) == 1 else None

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for variant in self.variants for seed in variant.runs})

    @property
    def sweep(self) -> list[Variant]:
        """The variants with a constant beta above 0, by beta; empty for fewer than three."""
        constant = [variant for variant in self.variants if variant.constant_coef]
        return sorted(constant, key=lambda variant: variant.constant_coef or 0.0) if len(constant) > 2 else []

    @property
    def by_target(self) -> list[Variant]:
        """The largest set of variants that differ only in their KL target, by target; empty for fewer than three."""
        controlled = [variant for variant in self.variants if adjusts(variant.config.kl.controller.kind)]
        groups = [[v for v in controlled if not _diff(one.config, v.config, "kl.target")] for one in self.variants]
        largest: list[Variant] = max(groups, key=len, default=[])
        by_target = sorted(largest, key=lambda variant: variant.target)
        return by_target if len({variant.target for variant in by_target}) > 2 else []

    def ends(self, variant: Variant, measure: str = SCORES) -> dict[int, Point]:
        """sqrt(KL per response) and gain over the reference at the end of each run of a variant, by seed.

        The score is on one scale for all runs of a seed whose references sample alike: that of the run with the most
        samples of it.
        """
        alike = [v.runs for v in self.variants if not _changed(variant, v, (*SCALE, *REFERENCE, *SAMPLED))]

        def gain(seed: int, run: RunResult) -> float | None:
            if measure != SCORES:
                return run.figures.get(f"{measure}_gain")
            runs = [each[seed] for each in alike if seed in each]
            return run.gain_on(max(runs, key=lambda one: one.reference_figures.get("samples", 0)))

        found = {seed: (run.figures["kl_sequence"], gain(seed, run)) for seed, run in variant.runs.items()}
        return {
            seed: (math.sqrt(max(0.0, kl)), y) for seed, (kl, y) in found.items() if kl is not None and y is not None
        }

    @cached_property
    def equal_kl(self) -> list[EqualKL]:
        """For each pair of groups: one, against the group that spans more KL. Intervals of a measure hold together."""
        entries = []
        for pair in combinations(self.groups.items(), 2):
            for measure in (SCORES, *self.scorers):
                if not _scale_diff(pair[0][1][0], pair[1][1][0], measure):
                    ends = [(name, {v.name: self.ends(v, measure) for v in variants}) for name, variants in pair]
                    entries.append(compare_groups(ends, measure))
        known = [entry for entry in entries if entry is not None]
        counts = Counter(entry.measure for entry in known if entry.interval is not None)
        return [replace(entry, together=max(1, counts[entry.measure])) for entry in known]

    def to_json(self, verdict: Sequence[str]) -> dict[str, Any]:
        """compare.json."""
        return {
            "target": self.target,
            "unit": self.unit,
            "variants": {variant.name: _variant_json(variant) for variant in self.variants},
            "equal_kl": [entry.to_json() for entry in self.equal_kl],
            "verdict": "\n".join(verdict),
            "notes": self.notes,
        }


def _variant_json(variant: Variant) -> dict[str, Any]:
    """A variant's figures by seed, their mean and standard deviation, and the tokens that carry its KL."""
    runs = variant.runs.items()
    names = [name for name in next(iter(variant.runs.values())).figures if name not in NO_MEANS]
    return {
        "family": variant.family,
        "seeds": {str(seed): run.figures | {"run": str(run.path), "status": run.status} for seed, run in runs},
        "mean": {name: variant.mean(name) for name in names},
        "sd": {name: variant.sd(name) for name in names},
        "kl_by_token": variant.kl_shares,
    }


def read_comparison(paths: Sequence[Path], names: Mapping[Path, str] | None = None) -> Comparison:
    """Runs from their folders; a folder of a comparison stands for its runs.

    names: the variant of each path, if known; else runs whose configs differ only in the seed are one
    variant. Errors: InputError.
    """
    folders, missing = list[Path](), list[Path]()
    for path in paths:
        inside = [] if (path / "config.yaml").is_file() else sorted((path / "runs").glob("*/config.yaml"))
        folders += [config.parent for config in inside] or [path]
        planned = {path / "runs" / file.stem for file in (path / CONFIGS).glob("*.yaml")} if inside else set()
        missing += sorted(planned - {*folders})
    runs = [read_run(path) for path in dict.fromkeys(folders)]
    if len({run.unit for run in runs}) > 1:
        raise InputError("the runs count KL in different units (token, sequence): compare them separately")
    variants: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        name = names[run.path] if names else _variant_name(run, variants)
        by_seed = variants.setdefault(name, {})
        if (other := by_seed.setdefault(run.seed, run)) is not run:
            raise InputError(f"{other.path} and {run.path} are the same run: {name}, seed {run.seed}")
    compared = [Variant(name, dict(sorted(members.items()))) for name, members in variants.items()]
    return Comparison(compared, [*not_begun(missing), *_notes(compared)])


def not_begun(folders: Sequence[Path]) -> list[str]:
    """A note for each run that is planned and left out."""
    return [f"{folder.name}: left out: it has not begun" for folder in folders]


def _variant_name(run: RunResult, variants: Mapping[str, Mapping[int, RunResult]]) -> str:
    """The variant whose config differs only in the seed, else a new name from the folder's name."""
    for name, members in variants.items():
        if not _diff(run.config, next(iter(members.values())).config):
            return name
    name = re.sub(r"-s\d+$", "", run.path.resolve().name)
    return name if name not in variants else f"{name}-{len(variants) + 1}"


def _notes(variants: Sequence[Variant]) -> list[str]:
    notes = []
    runs = [run for variant in variants for run in variant.runs.values()]
    lengths = sorted({len(run.updates) for run in runs})
    if len(lengths) > 1:
        notes.append(
            f"the runs have between {lengths[0]} and {lengths[-1]} updates: a variant's curve ends with its shortest "
            "seed, and each run is judged by its own second half"
        )
    read = {run.path.name: run.evaluations[-1].get("eval/documents") for run in runs if run.evaluations}
    if len(set(read.values())) > 1:
        counts = ", ".join(f"{name} {'?' if count is None else count}" for name, count in read.items())
        notes.append(f"perplexities are of different texts, so they cannot be compared; texts of each run: {counts}")
    seeds = {run.seed for run in runs}
    for variant in variants:
        if missing := sorted(seeds - set(variant.runs)):
            notes.append(f"{variant.name}: seed {', '.join(map(str, missing))} missing")
    notes += [f"{run.path.name}: {note}" for run in runs for note in run.notes]
    paced = {v.name: adjusts(v.config.kl.controller.kind) for v in variants if v.config.ppo.lr_schedule == "adaptive"}
    if len(set(paced.values())) > 1:
        free = ", ".join(name for name, is_paced in paced.items() if not is_paced)
        notes.append(
            f"not like for like: the learning rate of runs with a target is paced by their KL, that of {free} is not; "
            "ppo.lr_schedule: linear in the base gives all the same"
        )
    first, *others = variants
    for other in others:
        if changed := _scale_diff(first, other):
            notes.append(f"scores of {first.name} and {other.name} are not comparable at equal KL: {changed[0]}")
        elif changed := _changed(first, other, SAMPLED):
            notes.append(f"scores of {first.name} and {other.name} are of different tasks: {changed[0]}")
        if len(set(read.values())) == 1 and (changed := _changed(first, other, ("eval.texts",))):
            notes.append(f"perplexities of {first.name} and {other.name} may be of different texts: {changed[0]}")
    return notes


def _diff(a: TrainConfig, b: TrainConfig, *but: str) -> list[str]:
    """Differences in settings, without those `but` some."""
    return [line for line in config_diff(a, b) if not line.startswith((*NOT_THE_RUN, *but))]


def _scale_diff(a: Variant, b: Variant, measure: str = SCORES) -> list[str]:
    """Differences in settings that make a measure at equal KL of two variants incomparable."""
    own = SCALE if measure == SCORES else (f"eval.scorers.{measure}.", f"eval.scorers.{measure}:", *HELD_OUT)
    return _changed(a, b, (*own, *REFERENCE))


def _changed(a: Variant, b: Variant, keys: tuple[str, ...]) -> list[str]:
    return [line for line in _diff(a.config, b.config) if line.startswith(keys)]
