"""The commands that train: `rlhf-kl train`, `rlhf-kl sft` and `rlhf-kl reward-model`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import (
    Config,
    Json,
    Merge,
    OutputDir,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    Set,
    Updates,
    read_config,
)
from rlhf_kl.run.folder import RunFolder, check_folder
from rlhf_kl.shell import shell_command, short_path
from rlhf_kl.text import duration, format_number, score_text, scorer_label, start_to_end
from rlhf_kl.ui import log

if TYPE_CHECKING:
    from rlhf_kl.config.schema import RewardModelConfig, SFTConfig, TrainConfig
    from rlhf_kl.config.schema.sections import RunSection
    from rlhf_kl.run.run import Run

Closing = tuple[dict[str, object], list[str]]


def train(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    updates: Updates = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a policy with PPO and keep its KL to the reference at the target."""
    settings = read_config("train", config, set_, output_dir, seed, updates)
    ui.start(quiet)
    refuse_taken(settings.run, resume=resume, overwrite=overwrite)
    with ui.progress("loading torch"):
        from rlhf_kl.report.texts import held_out_texts, titled_answers
        from rlhf_kl.run.log import encode_json
        from rlhf_kl.training.loop import run_train

    summary = train_command(run_train, settings, resume=resume, overwrite=overwrite, merge=merge)
    if summary and as_json:
        print(encode_json(summary, indent=2).decode())
    elif summary:
        texts = titled_answers(held_out_texts(Path(settings.run.output_dir)))
        ui.print_summary(*train_closing(summary, settings), texts)


def supervised(
    context: typer.Context,  # `sft` or `reward-model`, as the command is called
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    kind: Any = context.info_name
    settings = read_config(kind, config, set_, output_dir, seed)
    ui.start(quiet)
    refuse_taken(settings.run, resume=resume, overwrite=overwrite)
    with ui.progress("loading torch"):
        from rlhf_kl.commands.sft import run_supervised

    if summary := train_command(run_supervised, settings, resume=resume, overwrite=overwrite, merge=merge):
        ui.print_summary(*supervised_closing(summary, settings))


def refuse_taken(run: RunSection, *, resume: bool, overwrite: bool) -> None:
    """Refuse the folder of another run before torch is imported; of several processes one may have begun to write."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        check_folder(RunFolder(Path(run.output_dir)), resume=resume, overwrite=overwrite)


def train_command(
    work: Callable[[Any, Run], dict[str, Any]], config: Any, *, resume: bool, overwrite: bool, merge: bool = False
) -> dict[str, Any]:
    """Open the run and do its work; a finished run with --resume gives its summary. `merge`: then write merged/.

    Of several processes the first one writes the folder; the others give {}.
    """
    from rlhf_kl.config.inputs import tell_copies
    from rlhf_kl.memory import keep_freed_memory
    from rlhf_kl.run.log import check_installed
    from rlhf_kl.run.opened import open_run
    from rlhf_kl.run.signals import ending_on_sigterm
    from rlhf_kl.training.device import joined, on_this_machine, pick_device
    from rlhf_kl.training.final import merge_final, require_adapter

    if merge:
        require_adapter(config)
    check_installed(config.tracking.trackers)
    tell_copies(config)
    if pick_device(config.run).type == "cpu":  # beside a GPU, other programs can use it
        keep_freed_memory()
    config = on_this_machine(config)  # the stored config repeats the run on any machine
    with (
        ending_on_sigterm(),
        joined(config.run) as ranks,
        open_run(config, ranks, resume=resume, overwrite=overwrite) as run,
    ):
        if run.finished is None and not ranks.writes:
            ui.silence()
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if ranks.writes and precision not in ("no", {"bfloat16": "bf16", "float16": "fp16"}.get(config.run.dtype)):
            log.warning(
                f"accelerate's --mixed_precision {precision} is not used: run.dtype decides ({config.run.dtype})"
            )
        summary = work(config, run) if run.finished is None else run.finished
    if merge and ranks.writes:
        merge_final(config)
    return summary if ranks.writes else {}


def train_closing(summary: dict[str, Any], config: TrainConfig) -> Closing:
    """Figures and next steps after `train`. config: knows where the run is now, which its summary may not."""
    from rlhf_kl.commands.stored import Permissions
    from rlhf_kl.control.verdict import verdict_text
    from rlhf_kl.monitors.alarms import collapsed
    from rlhf_kl.monitors.facts import closing_note

    final, closing, place = summary["final"], summary["closing"], short_path(config.run.output_dir)
    control = summary["control"]
    share = None if control["verdict"] == "short" else summary.get("tilt_share")
    same = collapsed(final)  # which a gain in score does not make good
    figures = {name: start_to_end(figure) for name, figure in closing.items()}
    if "scores" in closing:
        figures["scores"] = score_text(closing["scores"], summary.get("score_error"))
    scorers = {
        scorer_label(name): score_text(closing[name], final.get(f"eval/{name}_stderr"))
        for name in config.eval.watched
        if name in closing
    }
    if (error := final.get("eval/perplexity_stderr")) is not None:
        figures["perplexity"] = score_text(closing["perplexity"], error)
    shown: dict[str, str | None] = {
        "updates": f"{summary['steps']} in {duration(summary['seconds'])}",
        f"KL per {control['unit']}": f"{format_number(control['kl'])}, {verdict_text(control)}",
        "score": figures.get("scores"),
        "score gain": None if same or share is None else f"{share:.0%} of the most that this KL allows",
        "responses": "nearly all are the same text" if same else None,
        **scorers,
        "response length": f"{figures['length']} tokens" if "length" in figures else None,
        "beta": figures.get("beta"),
        "held-out perplexity": figures.get("perplexity"),
        "figures": closing_note(control["updates"]),
    }
    return {name: text for name, text in shown.items() if text is not None}, [
        f"{shell_command()} report {place}",
        f"{shell_command()} eval --run {place}{' --plugins' if Permissions().refused(config) else ''}",
        f"{shell_command('tensorboard')} --logdir {place}",
        f"{place}/samples.jsonl  responses, token by token",
        f"{place}/final          the policy",
    ]


def supervised_closing(summary: dict[str, Any], config: SFTConfig | RewardModelConfig) -> Closing:
    """Figures and next steps after `sft` and `reward-model`, as `train_closing`."""
    figures: dict[str, object] = {"steps": f"{summary['steps']} in {duration(summary['seconds'])}"}
    for key, value in summary["final"].items():
        if key.startswith("eval/"):
            figures[f"held-out {key.removeprefix('eval/').replace('_', ' ')}"] = f"{value:.3f}"
    place = short_path(config.run.output_dir)
    return figures, [f"{shell_command('tensorboard')} --logdir {place}", f"{place}/final  the model"]
