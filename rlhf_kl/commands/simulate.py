"""`rlhf-kl simulate`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Set, local, numbers
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.text import text_table

if TYPE_CHECKING:
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.control.guard import Guard
    from rlhf_kl.control.plant import SimulatedUpdate

MOST_ROWS = 20  # of the table
PLANT_NATS = 2.0  # per sequence: the target of a plant whose unit is the token


Kind = Annotated[str | None, typer.Option(metavar="KIND", help="Name of a controller, file.py:Class or module:Class.")]
FromConfig = Annotated[
    str | None, typer.Option(metavar="FILE", help="Take controller, target and sizes from this config.")
]
MeasuredKL = Annotated[str | None, typer.Option(metavar="KL,KL,...", help="Measured KLs: no policy is simulated.")]
Speed = Annotated[
    float, typer.Option(metavar="X", min=1e-6, max=1.0, help="Policy: share of the way to its final KL in one update.")
]
Noise = Annotated[float, typer.Option(metavar="X", min=0.0, help="Policy: relative spread of a measured KL.")]
NoiseSeed = Annotated[int, typer.Option(metavar="N", help="Policy: seed of its noise.")]
Episodes = Annotated[int | None, typer.Option(metavar="N", min=1, help="Responses per update (64).")]
Updates = Annotated[int | None, typer.Option(metavar="N", min=1, help="Updates to simulate (60).")]
Target = Annotated[
    str | None, typer.Option(metavar="KL", help="Target KL in nats, or conservative, moderate or aggressive.")
]
Coef = Annotated[float | None, typer.Option(metavar="BETA", help="Starting beta.")]
Rows = Annotated[bool, typer.Option("--json", help="One JSON list of rows.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", callback=local, help="Draw KL and beta.")]


def simulate(
    controller: Kind = None,
    config: FromConfig = None,
    sets: Set = None,
    kl: MeasuredKL = None,
    speed: Speed = 0.2,
    noise: Noise = 0.05,
    seed: NoiseSeed = 0,
    episodes: Episodes = None,
    updates: Updates = None,
    target: Target = None,
    coef: Coef = None,
    as_json: Rows = False,
    plot: Plot = None,
) -> None:
    """Run a KL controller on given KLs or on a simulated policy: no model, in seconds."""
    from rlhf_kl.control.plant import Plant, example_scores, simulate_plant, simulate_sequence, tilt_law
    from rlhf_kl.events import worded

    if sets and config is None:
        raise InputError("--set changes a config: it needs --config")
    ui.start()
    kls = None if kl is None else numbers("--kl", kl)
    wanted = Wanted(controller, None if target is None else _nats(target), coef, episodes, updates)
    if config is not None:
        wanted.fill(config, sets or [])
    episodes, updates = wanted.episodes or 64, wanted.updates or (60 if kls is None else len(kls))
    control = wanted.control(episodes, updates)
    aim = wanted.target_of(control)
    notes: list[str] = []
    if kls is None:
        policy = Plant(tilt_law(example_scores()), speed, noise, wanted.length or PLANT_NATS / aim, seed)
        notes += worded(control.start_events(updates, episodes))
        rows = simulate_plant(control, policy, updates, episodes)
    else:
        rows = simulate_sequence(control, kls, episodes, notes)
    for note in notes:
        print(note, file=sys.stderr)
    if plot is not None:
        _draw(rows, aim, plot)
    if as_json:
        # NaN is no JSON: a KL that was not measured is null, as in metrics.jsonl
        print(json.dumps([{k: v if math.isfinite(v) else None for k, v in r._asdict().items()} for r in rows]))
    else:
        print(f"{wanted.kind}, target {aim:g} nats, {episodes} responses per update\n")
        _show(rows, aim)


def _nats(target: str) -> float:
    """The target that a command line names: a number above 0, or a word that `kl.target` takes."""
    from rlhf_kl.config.schema.control import PRESETS

    with contextlib.suppress(ValueError):
        if 0.0 < (nats := PRESETS.get(target) or float(target)) < math.inf:
            return nats
    raise InputError(f"--target: {target!r} is no number above 0{suggestion(target, PRESETS)}")


@dataclass
class Wanted:
    """The controller and the sizes that the command line names; a config says what it leaves out."""

    controller: str | None
    target: float | None  # nats
    coef: float | None  # the starting beta
    episodes: int | None  # of an update
    updates: int | None
    options: dict[str, Any] = field(default_factory=dict)  # of the controller
    total: int | None = None  # episodes of the run, where the config alone decides them
    length: float | None = None  # tokens of a response

    @property
    def kind(self) -> str:
        """The stored name of the controller."""
        from rlhf_kl.control import stored_name

        return stored_name(self.controller or "adaptive")

    def fill(self, file: str, sets: Sequence[str]) -> None:
        """Take from the config what is not named."""
        from rlhf_kl.config.resolve import load_config

        run: TrainConfig = load_config("train", file, sets)
        section = run.kl.controller
        if self.controller is None or self.kind == section.kind:
            self.controller = section.kind
            self.options = {name: value for name, value in section.arguments.items() if name != "coef"}
        if self.coef is None and not isinstance(section.coef, str):
            self.coef = section.coef
        self.target = self.target or run.kl.target_value
        self.length = 1.0 if run.kl.unit == "sequence" else None
        if self.episodes is None and self.updates is None:
            self.total = max(1, run.ppo.total_episodes - run.ppo.value_warmup * run.rollout.batch_size)
        self.episodes = self.episodes or run.rollout.batch_size
        self.updates = self.updates or run.controlled_updates

    def control(self, episodes: int, updates: int) -> Guard:
        """The controller of a run with these sizes."""
        from rlhf_kl.control import law_class, make_controller, option_names

        options = dict(self.options)
        if self.coef is not None and "coef" in option_names(law_class(self.kind)):
            options["coef"] = self.coef
        total = self.total or episodes * updates
        return make_controller(self.kind, options, target=self.target, total_episodes=total, batch_size=episodes)

    def target_of(self, control: Guard) -> float:
        """The target in nats, else the controller's own, else 0.1."""
        from rlhf_kl.control import CONTROLLER_PROVIDED

        own = (getattr(control.law, name, None) for name in CONTROLLER_PROVIDED["target"])
        return float(self.target or next(filter(None, own), 0.1))


def _show(rows: list[SimulatedUpdate], target: float) -> None:
    from rlhf_kl.control.plant import conclusion
    from rlhf_kl.control.verdict import in_band

    every = -(-len(rows) // MOST_ROWS)
    body = []
    for step, kl, coef, coef_next in rows:
        if step % every == 0 or step in (1, len(rows)):
            ratio = kl / target
            band = "in range" if in_band(ratio) else ""
            body.append([str(step), f"{kl:.4f}", f"{ratio:.2f}", band, f"{coef:.4f}", f"{coef_next:.4f}"])
    print(text_table(("update", "KL", "KL/target", "", "beta", "next beta"), body))
    if every > 1:
        print(f"(1 update in {every}; --json has all)")
    print("", *conclusion(rows, target), sep="\n")


def _draw(rows: list[SimulatedUpdate], target: float | None, file: Path) -> None:
    """KL with its target above, beta below. The format is that of the file's suffix."""
    from rlhf_kl.report.drawing import Chart, Line, log_if_wide, save_sheet

    steps, coefs = [row.step for row in rows], [row.coef for row in rows]
    kl = Chart("kl", "KL", "nats", [Line("KL", "kl", steps, [row.kl for row in rows])], target=target)
    log = log_if_wide(min(coefs), max(coefs))
    beta = Chart("beta", "Beta", "beta", [Line("beta", "beta", steps, coefs)], log=log)
    try:
        save_sheet([kl, beta], file, columns=1)
    except ValueError as error:
        raise InputError(f"--plot {file}: {error}") from None
