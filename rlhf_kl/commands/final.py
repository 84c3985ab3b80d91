"""What a finished run shows and leaves: closing figures, `final/`, and with `--merge` a merged adapter, `merged/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_kl.build.load import Loader
from rlhf_kl.build.parts import Setup
from rlhf_kl.commands.card import model_card
from rlhf_kl.commands.stored import Permissions
from rlhf_kl.config.schema import RewardModelConfig, ScorerSection, SFTConfig, TrainConfig
from rlhf_kl.distributed import tensors_of
from rlhf_kl.errors import InputError
from rlhf_kl.models.load import save_generation, save_model
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.monitors import collapsed
from rlhf_kl.program import shell_command, short_path
from rlhf_kl.report.control import closing_note, is_update, start_to_end, verdict_text
from rlhf_kl.rewards.model import save_reward_model
from rlhf_kl.run.folder import RunFolder, write_folder
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.status import duration
from rlhf_kl.text import format_number
from rlhf_kl.trainers.reward_figures import sketch
from rlhf_kl.ui import log

Closing = tuple[dict[str, object], list[str]]


def train_closing(summary: dict[str, Any], config: TrainConfig) -> Closing:
    """Figures and next steps after `train`. config: knows where the run is now, which its summary may not."""
    final, closing, place = summary["final"], summary["closing"], short_path(config.run.output_dir)
    control = summary["control"]
    share = None if control["verdict"] == "short" else summary.get("tilt_share")
    same = collapsed(final)  # which a gain in score does not make good
    figures = {name: start_to_end(figure) for name, figure in closing.items()}
    shown: dict[str, str | None] = {
        "updates": f"{summary['steps']} in {duration(summary['seconds'])}",
        f"KL per {control['unit']}": f"{format_number(control['kl'])}, {verdict_text(control)}",
        "score": figures.get("score"),
        "score gain": None if same or share is None else f"{share:.0%} of the most that this KL allows",
        "responses": "nearly all are the same text" if same else None,
        "true score (gold)": figures.get("gold"),
        "beta": figures.get("beta"),
        "held-out perplexity": figures.get("perplexity"),
        "figures": closing_note(control["updates"], config),
    }
    return {name: text for name, text in shown.items() if text is not None}, [
        f"{shell_command()} report {place}",
        f"{shell_command()} eval --run {place}" + " --plugins" * any(Permissions().refused(config)),
        f"{shell_command('tensorboard')} --logdir {place}",
        f"{place}/samples.jsonl  responses, token by token",
        f"{place}/final          the policy",
    ]


def supervised_closing(summary: dict[str, Any], config: SFTConfig | RewardModelConfig) -> Closing:
    """Figures and next steps after `sft` and `reward-model`, as `train_closing`."""
    final = summary["final"]
    figures: dict[str, object] = {"steps": f"{summary['steps']} in {duration(summary['seconds'])}"}
    figures |= {
        f"held-out {key.removeprefix('eval/').replace('_', ' ')}": f"{value:.3f}"
        for key, value in final.items()
        if key.startswith("eval/")
    }
    histogram = summary.get("heldout", {}).get("histogram", {})
    for name, counts in histogram.items():
        if name != "edges":
            low, high = histogram["edges"][0], histogram["edges"][-1]
            figures[f"scores, {name}"] = f"{low:.2f} [{sketch(counts)}] {high:.2f}"
    place = short_path(config.run.output_dir)
    return figures, [f"{shell_command('tensorboard')} --logdir {place}", f"{place}/final  the model"]


def write_final(folder: Path, model: ActorCritic, setup: Setup, card: str, *, keep: bool) -> None:
    """A folder that plain transformers loads, with a model card; the value function in a file of its own.

    All processes call it together, since each may hold a part of the weights; the one with `keep` writes.
    """

    def whole(module: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in tensors_of(module) if keep}

    parts = model.modules
    policy: Any = parts.pop("policy")
    tensors, value = whole(policy) if setup.sharded else None, whole(parts)

    def write(place: Path) -> None:
        save_model(policy, setup.tokenizer, place, tensors)
        save_file(value, place / "value.safetensors")
        (place / "README.md").write_text(card, encoding="utf-8")

    if keep:
        if changed := save_generation(policy, setup.sampling):
            log.info(f"{folder.name}/generation_config.json is that of the rollouts: {changed}")
        write_folder(folder, write)


def require_adapter(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Errors: InputError if the run trains a whole model; called before the run."""
    model = config.policy.model
    # A reward model begins with the adapter of its language model merged.
    local = model is not None and Path(model).is_dir() and not isinstance(config, RewardModelConfig)
    if config.policy.lora is None and not (local and is_adapter(str(model))):
        raise InputError("--merge: the run trains no adapter, so final/ is already the whole model: leave --merge out")


def merge_final(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Write `merged/` from `final/`."""
    folder = RunFolder(Path(config.run.output_dir))
    loader, final = Loader.for_run(config.run, "cpu"), str(folder.final)
    if isinstance(config, RewardModelConfig):
        reward = loader.reward_model(final, "--merge", ScorerSection())
        write_folder(folder.merged, lambda place: save_reward_model(reward, place))
    else:
        loaded = loader.language_model(final, "--merge")

        def write(place: Path) -> None:
            save_model(loaded.model, loaded.tokenizer, place)
            if isinstance(config, TrainConfig):
                rows = list(read_jsonl(folder.metrics))
                card = model_card(config, [row for row in rows if is_update(row)], rows[-1], adapter=False)
                (place / "README.md").write_text(card, encoding="utf-8")

        write_folder(folder.merged, write)
    log.info(f"{folder.merged} holds the merged model")
