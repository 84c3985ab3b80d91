"""Runs side by side: variants (runs that differ in their seed) and families of variants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rlhf_kl.config.load import config_diff
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers import adjusts
from rlhf_kl.report.equal_kl import EqualKL, Group, Point, compare_groups
from rlhf_kl.report.run import RunFigures, RunResult, read_run

# If these differ, scores have different scales, or KLs different references.
SCALE = ("reward.", "policy.model", "reference.", "rollout.temperature")
NOT_THE_RUN = ("run.name", "run.output_dir", "run.seed", "checkpoint.", "tracking.")
GAINS = {"scores_shaped": "score_gain", "gold": "gold_gain"}  # measure at equal KL -> its gain over the reference

Curve = tuple[list[float], list[float], list[float], list[float]]  # x, mean, mean -+ one standard deviation


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed."""

    name: str
    family: str  # variants that differ only in their (starting) beta
    runs: dict[int, RunResult]  # by seed

    @property
    def config(self) -> TrainConfig:
        return next(iter(self.runs.values())).config

    @property
    def target(self) -> float:
        """KL target, nats in the config's unit."""
        return self.config.kl.target_value

    @cached_property
    def figures(self) -> dict[int, RunFigures]:
        """By seed."""
        return {seed: run.figures for seed, run in self.runs.items()}

    def values(self, name: str) -> list[float]:
        """A figure of all seeds that have it."""
        return [value for figures in self.figures.values() if (value := getattr(figures, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Mean over seeds; None if a seed lacks the figure."""
        values = self.values(name)
        return fmean(values) if values and len(values) == len(self.runs) else None

    def sd(self, name: str) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        values = self.values(name)
        if len(values) < 2 or len(values) < len(self.runs):
            return None
        return stdev(values) if all(map(math.isfinite, values)) else None

    def ends(self, measure: str) -> dict[int, Point]:
        """sqrt(KL per response) and gain over the reference at the end of each run, by seed."""
        return {
            seed: (math.sqrt(max(0.0, figures.kl_sequence)), gain)
            for seed, figures in self.figures.items()
            if figures.kl_sequence is not None and (gain := getattr(figures, GAINS[measure])) is not None
        }

    @property
    def held(self) -> bool | None:
        """Whether the KL of every seed stayed at its target; None if a run is too short to judge."""
        verdicts = [figures.held for figures in self.figures.values()]
        return None if None in verdicts else all(verdicts)

    @property
    def is_controlled(self) -> bool:
        """Whether beta depends on the KL."""
        return adjusts(self.config.kl.controller.kind)

    @property
    def constant_coef(self) -> float | None:
        """The mean beta if it is constant in every seed, else None."""
        coefs = [coef for run in self.runs.values() if (coef := run.constant_coef) is not None]
        return fmean(coefs) if coefs and len(coefs) == len(self.runs) else None

    def series(self, key: str) -> Curve:
        """Mean of a key over seeds, at the updates that all of them have."""
        tables = [dict(zip(*run.series(key), strict=True)) for run in self.runs.values()]
        shared = sorted(set.intersection(*map(set, tables)))
        columns = [[table[x] for table in tables] for x in shared]
        return mean_curve(shared, [fmean(c) for c in columns], [stdev(c) if len(c) > 1 else 0.0 for c in columns])


def mean_curve(x: list[float], means: list[float], sds: list[float]) -> Curve:
    """A curve with its band."""
    low, high = [m - s for m, s in zip(means, sds, strict=True)], [m + s for m, s in zip(means, sds, strict=True)]
    return x, means, low, high


class BestTarget(NamedTuple):
    """The KL target with the highest mean gold, in nats, and the targets whose gold is hardly lower."""

    target: float
    gold: float
    lowest: float  # target whose gold plus its standard deviation over seeds reaches the highest
    highest: float


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
        return families

    @property
    def groups(self) -> dict[str, list[Variant]]:
        """The groups to compare: the families, or with one family its variants."""
        families = self.families
        return families if len(families) > 1 else {variant.name: [variant] for variant in self.variants}

    @property
    def unit(self) -> str:
        return self.variants[0].config.kl.unit

    @property
    def target(self) -> float | None:
        """The target in nats; None if variants have different ones."""
        targets = {variant.target for variant in self.variants}
        return targets.pop() if len(targets) == 1 else None

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for variant in self.variants for seed in variant.runs})

    @cached_property
    def sweep(self) -> list[Variant]:
        """The largest family of at least three constant betas, by beta; empty without one."""
        families = [
            family for family in self.families.values()
            if len(family) > 2 and all(variant.constant_coef for variant in family)
        ]  # fmt: skip
        largest: list[Variant] = max(families, key=len, default=[])
        return sorted(largest, key=lambda variant: variant.constant_coef or 0.0)

    @cached_property
    def by_target(self) -> list[Variant]:
        """The largest set of variants that differ only in their KL target (at least three), by target; else empty."""
        groups = [
            [other for other in self.variants if other.is_controlled and _same_but_for(("kl.target",), one, other)]
            for one in self.variants
        ]
        largest = max(groups, key=len, default=[])
        by_target = sorted(largest, key=lambda variant: variant.target)
        return by_target if len({variant.target for variant in by_target}) > 2 else []

    @cached_property
    def best_target(self) -> BestTarget | None:
        """Over the variants of `by_target`; None without them or without gold."""
        golds = [
            (mean, variant.sd("gold") or 0.0, variant.target)
            for variant in self.by_target
            if (mean := variant.mean("gold")) is not None
        ]
        if not golds:
            return None
        gold, _, target = max(golds)
        near = [other for mean, sd, other in golds if mean + sd >= gold]
        return BestTarget(target, gold, min(near), max(near))

    @cached_property
    def equal_kl(self) -> list[EqualKL]:
        """For each pair of groups: one group and its variants, against the group that spans more KL."""
        return [
            entry
            for (first, members), (second, others) in combinations(self.groups.items(), 2)
            if not _scale_diff(members[0], others[0])
            for measure in GAINS
            for entry in compare_groups(_group(first, members, measure), _group(second, others, measure), measure)
        ]

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


def _group(name: str, variants: Sequence[Variant], measure: str) -> Group:
    return Group(name, {variant.name: variant.ends(measure) for variant in variants})


def _variant_json(variant: Variant) -> dict[str, Any]:
    """A variant's figures by seed, their mean and standard deviation."""
    by_seed = {
        str(seed): asdict(run.figures) | {"run": str(run.path), "status": run.status}
        for seed, run in variant.runs.items()
    }
    names = [name for name in asdict(next(iter(variant.figures.values()))) if name not in ("held", "settled")]
    return {
        "family": variant.family,
        "seeds": by_seed,
        "mean": {name: variant.mean(name) for name in names},
        "sd": {name: variant.sd(name) for name in names},
    }


def read_comparison(paths: Sequence[Path], names: Mapping[Path, str] | None = None) -> Comparison:
    """Runs from their folders; a folder of a comparison stands for its runs.

    names: the variant of each path, if known; else runs whose configs differ only in the seed are one
    variant. Errors: InputError.
    """
    runs = [read_run(path) for path in _run_folders(paths)]
    if len({run.unit for run in runs}) > 1:
        raise InputError("the runs count KL in different units (token, sequence): compare them separately")
    variants: dict[str, list[RunResult]] = {}
    for run in runs:
        name = names[run.path] if names else _variant_name(run, variants)
        variants.setdefault(name, []).append(run)
    families = _families({name: members[0].config for name, members in variants.items()})
    compared = [Variant(name, families[name], _by_seed(name, members)) for name, members in variants.items()]
    return Comparison(compared, _notes(compared))


def _run_folders(paths: Sequence[Path]) -> list[Path]:
    folders: list[Path] = []
    for path in paths:
        inside = sorted((path / "runs").glob("*/config.yaml")) if not (path / "config.yaml").is_file() else []
        folders += [config.parent for config in inside] or [path]
    return list(dict.fromkeys(folders))


def _variant_name(run: RunResult, variants: Mapping[str, list[RunResult]]) -> str:
    """The variant whose config differs only in the seed, else a new name from the folder's name."""
    for name, members in variants.items():
        if all(line.startswith(NOT_THE_RUN) for line in config_diff(run.config, members[0].config)):
            return name
    return _free_name(re.sub(r"-s\d+$", "", run.path.resolve().name), variants)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    numbered = (f"{name}-{i}" for i in range(2, len(taken) + 3))
    return next(label for label in (name, *numbered) if label not in taken)


def _families(configs: Mapping[str, TrainConfig]) -> dict[str, str]:
    """Variant -> family: the shared start of its members' names, else its first member's controller."""
    families: list[list[str]] = []
    for name, config in configs.items():
        for family in families:
            lines = config_diff(configs[family[0]], config)
            if all(line.startswith((*NOT_THE_RUN, "kl.controller.coef")) for line in lines):
                family.append(name)
                break
        else:
            families.append([name])
    labels: dict[str, list[str]] = {}
    for family in families:
        label = _shared_start(family) or configs[family[0]].kl.controller.kind
        labels[_free_name(label, labels)] = family
    return {name: label for label, family in labels.items() for name in family}


def _shared_start(names: Sequence[str]) -> str:
    """The shared start of all names, without a number or a dash at the end; a single name whole."""
    if len(names) == 1:
        return names[0]
    length = next((i for i, column in enumerate(zip(*names, strict=False)) if len(set(column)) > 1), 0)
    return re.sub(r"[-_. \d]+$", "", names[0][:length])


def _by_seed(name: str, runs: Sequence[RunResult]) -> dict[int, RunResult]:
    by_seed: dict[int, RunResult] = {}
    for run in runs:
        if (other := by_seed.setdefault(run.seed, run)) is not run:
            raise InputError(f"{other.path} and {run.path} are the same run: {name}, seed {run.seed}")
    return dict(sorted(by_seed.items()))


def _notes(variants: Sequence[Variant]) -> list[str]:
    notes = []
    runs = [run for variant in variants for run in variant.runs.values()]
    lengths = sorted({len(run.updates) for run in runs})
    if len(lengths) > 1:
        notes.append(
            f"the runs have between {lengths[0]} and {lengths[-1]} updates: a variant's curve ends with its shortest "
            "seed, and each run is judged by its own second half"
        )
    seeds = {run.seed for run in runs}
    if len(seeds) == 1:
        notes.append("one seed: without a spread over seeds no difference can be judged")
    for variant in variants:
        if missing := sorted(seeds - set(variant.runs)):
            notes.append(f"{variant.name}: seed {', '.join(map(str, missing))} missing")
    notes += [f"{run.path.name}: {note}" for run in runs for note in run.notes]
    first = variants[0]
    for other in variants[1:]:
        if changed := _scale_diff(first, other):
            notes.append(f"scores of {first.name} and {other.name} are not comparable at equal KL: {changed[0]}")
    targets = sorted({variant.target for variant in variants})
    if len(targets) > 1:
        notes.append(f"the variants have different targets: {', '.join(f'{target:g}' for target in targets)}")
    return notes


def _same_but_for(keys: tuple[str, ...], a: Variant, b: Variant) -> bool:
    """Whether two variants differ in these settings only."""
    return all(line.startswith((*NOT_THE_RUN, *keys)) for line in config_diff(a.config, b.config))


def _scale_diff(a: Variant, b: Variant) -> list[str]:
    """Differences in settings that make scores or KLs of two variants incomparable."""
    return [line for line in config_diff(a.config, b.config) if line.startswith(SCALE)]
