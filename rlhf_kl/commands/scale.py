"""`rlhf-kl scale`: one finished run at other KL targets, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Json, Pickle, Plugins, Quiet, RemoteCode, numbers
from rlhf_kl.errors import InputError
from rlhf_kl.shell import short_path
from rlhf_kl.text import counted, duration, read_number, stdout_width
from rlhf_kl.ui import log

if TYPE_CHECKING:
    from rlhf_kl.commands.stored import Permissions
    from rlhf_kl.commands.subject import Subject
    from rlhf_kl.ppo.heldout import Samples
    from rlhf_kl.run.folder import RunFolder

STEPS = (0.25, 0.5, 1.0, 1.5, 2.0)  # default targets, over the run's
FARTHEST = 1.5  # times what training has added: beyond it nothing was measured
SAME = 0.02  # a scale so near to one that was measured is not measured again
CLOSE = 0.05  # of the target: no further try
TRIES = 3
SECONDS = 15.0  # of the sampling at one scale, as long as that is FEWEST responses
FEWEST, MOST = 64, 256  # responses, where the command line names no number


FinishedRun = Annotated[Path | None, typer.Argument(metavar="RUN", help="A finished run; default: the newest.")]
Targets = Annotated[
    str | None, typer.Option(metavar="X,Y,...", help="KL targets in the run's unit; default: around the run's.")
]
Responses = Annotated[
    int | None,
    typer.Option(metavar="N", min=8, help="Held-out responses at each target; default: 256, or 64 of a slow model."),
]
Save = Annotated[
    float | None,
    typer.Option(metavar="TARGET", min=1e-9, help="Write the policy at it: RUN/scaled-TARGET; of scale.json at once."),
]


def scale(
    run: FinishedRun = None,
    targets: Targets = None,
    samples: Responses = None,
    save: Save = None,
    as_json: Json = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Which target? One finished run at lower and higher KL: score, perplexity and texts, without training.

    It scales what training has added to the reference's weights: near the reference the KL goes with the square
    of the scale.
    """
    from rlhf_kl.commands.stored import Permissions

    asked = None if targets is None else numbers("--targets", targets, 1e-9)
    ui.start(quiet)
    document, text = frontier(run, Permissions(plugins, trust_remote_code, allow_pickle), asked, samples, save)
    if as_json:
        from rlhf_kl.run.log import encode_json

        text = encode_json(document, indent=2).decode()
    print(text)


def frontier(
    run: Path | None,
    permissions: Permissions,
    targets: Sequence[float] | None = None,
    samples: int | None = None,
    save: float | None = None,
    given: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], str]:
    """The document of scale.json, and its table; also written into the run's folder, with pictures.

    `targets`: KLs in the run's unit; None: around the run's. `save`: one at which the policy is written. `given`: see
    `resolve`. A policy at a target that scale.json has is written without measuring again. Errors: InputError for a run
    that has not ended, or whose policy began elsewhere than its reference.
    """
    config, folder = permissions.opened(run, None, None)
    assert folder is not None
    if not folder.final.is_dir():
        raise InputError(f"{folder.path}: has not ended, so there is no final/ to scale")
    with ui.progress("loading torch"):
        from rlhf_kl.commands.subject import Subject
        from rlhf_kl.control import adjusts
        from rlhf_kl.report.side_by_side import write_scaled
        from rlhf_kl.run.log import read_jsonl
    permissions.tell_changed(folder, config, exactly=("policy.model", "reference.model"))
    save = None if save is None else shown(save)
    known = None if save is None or targets or samples else measured(folder, save)
    if samples is None and known is None:
        samples, why = usual_samples(read_jsonl(folder.metrics), config.rollout.batch_size)
        log.info(f"{samples} responses at each target{why} (--samples N draws another number)")
    subject = Subject(config, folder, permissions, given=given or {}, scored=known is None)
    if not subject.began_at_reference(folder.final):
        raise InputError(
            f"{folder.path}: the policy did not begin as its reference ({config.reference.model}), so nothing is known "
            "of the weights between them: train at other targets (compare)"
        )
    table = Scaled(subject, samples, known)
    if known is not None and save is not None:
        return known, table.save(save, folder.path / f"scaled-{save:g}")
    goal = config.kl.target_value if adjusts(config.kl.controller.kind) else table.kl(1.0)
    wanted = {*(targets or ()), *([] if save is None else [save])}
    wanted |= {_rounded(step * goal) for step in STEPS} if targets is None else set()
    log.info(f"{counted(len(wanted), 'target')} and the trained policy, each sampled up to {TRIES} times")
    for target in sorted(wanted, key=lambda one: abs(math.log(one / table.kl(1.0)))):  # each helps the next
        table.reach(target)
    document = table.to_json()
    text = write_scaled(document, folder, config.run.name, stdout_width())
    if save is not None:
        log.info(table.save(save, folder.path / f"scaled-{save:g}"))
    return document, text


def measured(folder: RunFolder, target: float) -> dict[str, Any] | None:
    """What scale.json tells, if it has this target and is of the run's present policy."""
    file = folder.scale[0]
    if not file.is_file() or file.stat().st_mtime < folder.final.stat().st_mtime:
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    return document if target in [shown(row["target"]) for row in document["rows"]] else None


def shown(target: float) -> float:
    """A target as commands and tables write it."""
    return float(f"{target:g}")


def usual_samples(rows: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[int, str]:
    """Responses at each target, and how long they take. `rows`: of the run, which measured that of a batch."""
    seconds = [value for row in rows if (value := read_number(row, "time/rollout_s")) is not None]
    each = median(seconds) / batch_size if seconds else 0.0
    fitting = MOST if each * MOST <= SECONDS else max(FEWEST, int(SECONDS / each))
    return fitting, f": about {duration(each * fitting)} each" if each else ""


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


class Scaled:
    """theta_ref + s (theta - theta_ref) for several s, each measured on its own samples.

    Near the reference the KL is quadratic in the way from it. (Interpolation towards the start: Rame et al. 2024,
    WARP, 2406.16768, section 3.)
    """

    def __init__(self, subject: Subject, samples: int | None, known: Mapping[str, Any] | None = None) -> None:
        """Measures the policy as it was trained, or takes what is `known`, of scale.json.

        Errors: InputError if policy and reference are different models.
        """
        import torch

        self.subject, self.unit = subject, subject.config.kl.unit
        assert subject.reference is not None
        own, there = (dict(lm.module.named_parameters()) for lm in (subject.policy, subject.reference))
        other = next((name for name, p in own.items() if name not in there or there[name].shape != p.shape), None)
        if other is not None:
            raise InputError(f"the policy is no scaled reference: the reference has no {other} of its size")
        with torch.no_grad():
            self.way = [(p, there[name], p - there[name]) for name, p in own.items()]
        self.held = subject.held_out(samples)
        self.reference: dict[str, Any] = {}
        self.rows: dict[float, dict[str, Any]] = {}  # by scale
        self.samples: dict[float, Samples] = {}  # by scale, the reference's at 0
        self.scales: dict[float, float] = {}  # by target
        self.too_far: list[float] = []
        if known is not None:
            self.reference, self.rows = known["reference"], {row["scale"]: row for row in known["rows"]}
            self.scales = {shown(row["target"]): row["scale"] for row in known["rows"]}
            return
        self.measure(1.0)
        if not self.kl(1.0) > 0:
            raise InputError("the policy is its reference: there is nothing to scale")

    def place(self, share: float) -> None:
        import torch

        with torch.no_grad():
            for p, reference, added in self.way:
                torch.add(reference, added, alpha=share, out=p)

    def measure(self, share: float, target: str = "as trained") -> None:
        """Add the row of a scale."""
        from rlhf_kl.ppo.heldout import own_figures

        self.place(share)
        name = f"scale {share:.3g}, {target}"
        figures = self.subject.of_texts(self.held, name)
        found, own, other = self.subject.of_prompts(self.held, name)
        self.samples[share] = own
        if not self.reference:  # which is scored once
            self.samples[0.0] = other
            self.reference = self.subject.of_texts(self.held, "reference") | own_figures(other)
        self.rows[share] = {"scale": share, **figures, **found, "texts": _median_texts(self.held.prompts.texts, own)}

    def kl(self, share: float) -> float:
        """The KL that was measured at a scale, in the run's unit."""
        return float(self.rows[share][f"kl_{self.unit}"])

    def reach(self, target: float) -> None:
        """Find the scale of a target: measure where its KL should be, until it is there or the tries are used up."""
        for _ in range(TRIES):
            share = self.share_of(target)
            if share > FARTHEST:
                self.too_far.append(target)
                if (near := self.scales.pop(target, None)) is not None:
                    self.scales[_rounded(self.kl(near))] = near  # as far as it went
                return
            if not any(abs(one - share) < SAME * share for one in self.rows):
                self.measure(share, f"target {target:g}")
            self.scales[target] = min(self.rows, key=lambda one: abs(math.log(target / self.kl(one))))
            if abs(self.kl(self.scales[target]) / target - 1) < CLOSE:
                return

    def share_of(self, target: float) -> float:
        """Where the KL should have this value: between two measured scales on their power law, else by the square."""
        logs = [(math.log(self.kl(share) / target), math.log(share)) for share in self.rows]
        below, above = (
            max((p for p in logs if p[0] <= 0), default=None),
            min((p for p in logs if p[0] > 0), default=None),
        )
        if below is None or above is None:
            excess, scale = below or above or (0.0, 0.0)
            return math.exp(scale - excess / 2)
        return math.exp(below[1] - below[0] * (above[1] - below[1]) / (above[0] - below[0]))

    def to_json(self) -> dict[str, Any]:
        """scale.json: a row for each target and the trained policy, the reference's figures, targets too far away."""
        from rlhf_kl.commands.subject import different

        scales = dict(self.scales)
        if 1.0 not in scales.values():
            scales[_rounded(self.kl(1.0))] = 1.0
        rows, before = [], 0.0
        for target in sorted(scales):
            share = scales[target]
            rise = rise_error(self.samples[before], self.samples[share])
            rows.append({"target": target, **self.rows[share], "score_rise_stderr": rise})
            before = share
        return {
            "unit": self.unit,
            "responses": len(self.held.prompts),
            "prompts": different(self.held.prompts),
            "rows": rows,
            "reference": self.reference,
            "too_far": self.too_far,
        }

    def save(self, target: float, place: Path) -> str:
        """Write the policy of a target as an ordinary model folder with its card; a sentence that says so."""
        from rlhf_kl.models.pretrained import save_generation, save_model
        from rlhf_kl.run.folder import write_folder
        from rlhf_kl.training.card import scaled_card

        if target not in self.scales:
            raise InputError(f"--save {target:g}: is over {FARTHEST} times what training has added: train a run there")
        share, model = self.scales[target], self.subject.policy.model
        self.place(share)
        save_generation(model, self.held.sampling)
        card = scaled_card(self.subject.config, self.rows[share], self.reference)

        def write(folder: Path) -> None:
            save_model(model, self.held.tokenizer, folder)
            (folder / "README.md").write_text(card, encoding="utf-8")

        write_folder(place, write)
        return f"{short_path(str(place))} holds the policy at a KL of {self.kl(share):.3g} nats per {self.unit}"


def rise_error(before: Samples, after: Samples) -> float | None:
    """Standard error of the mean score after less that before: the prompts and the noise are the same."""
    from rlhf_kl.ppo.heldout import STDERR, Samples, errors_of

    rises = [b - a for a, b in zip(before.scores, after.scores, strict=False)]
    return errors_of(Samples(texts=after.texts, scores=rises, prompts=after.prompts))[f"scores{STDERR}"]


def _median_texts(prompts: Sequence[str], own: Samples) -> list[dict[str, Any]]:
    """Of the first two prompts the response of median score, of a single one two; without scores the first ones.

    They are the same prompts at every target, so that their texts can be compared.
    """
    from rlhf_kl.training.samples import from_median

    ordered = []
    for prompt in list(dict.fromkeys(prompts))[:2]:
        rows = [i for i in range(len(own.texts)) if prompts[i] == prompt]
        ordered.append([rows[j] for j in from_median([own.scores[i] for i in rows if own.scores])] or rows)
    chosen = [rows[0] for rows in ordered] if len(ordered) > 1 else ordered[0][:2]
    watched = own.watched.items()
    return [
        {"prompt": prompts[i], "text": own.texts[i], "kl": own.kl[i], **{name: each[i] for name, each in watched}}
        | ({"score": own.scores[i]} if own.scores and math.isfinite(own.scores[i]) else {})
        for i in chosen
    ]
