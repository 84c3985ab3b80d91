"""Loads what a config or a command line names: language models, adapters and scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_kl import ui
from rlhf_kl.config.named import NOTHING, Given, NamedPlugin, load_reward
from rlhf_kl.config.schema.reward import SERVERS, SUM, ScorerSection, TermSection
from rlhf_kl.config.schema.sections import RunSection, TunedSection
from rlhf_kl.errors import InputError, blame
from rlhf_kl.hub import GGUF, model_folder
from rlhf_kl.models.gguf import gguf_folder
from rlhf_kl.models.labels import check_label
from rlhf_kl.models.lm import LM, check_range, enable_recompute
from rlhf_kl.models.lora import (
    LANGUAGE_MODEL,
    adapter_base,
    add_adapter,
    blame_base,
    is_adapter,
    load_adapter,
    merge,
    require_classifier_adapter,
)
from rlhf_kl.models.pretrained import (
    Access,
    compute_dtype,
    is_classifier,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    read_as_float32,
)
from rlhf_kl.models.scratch import classifier_from_lm
from rlhf_kl.models.tokens import encode
from rlhf_kl.models.value import freeze, frozen_lm
from rlhf_kl.rewards.model import FORMAT_KEY, RewardModel, remember_format, text_format
from rlhf_kl.rewards.plugin import PluginReward, RemoteReward, TRLReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.seeding import derive_seed
from rlhf_kl.types import REWARD
from rlhf_kl.ui import log

PROBE = "The quick brown fox jumps over the lazy dog, 12 of 345 times!"  # which two tokenizers read,
PROBES = 64  # and so many texts of the run


@dataclass(frozen=True)
class Loaded:
    """A causal language model or a classifier, with its tokenizer."""

    model: Any
    tokenizer: Any
    folder: str  # of the model, or of its adapter
    began_as_adapter: bool


class Loader:
    """Turns the names in a config into models and scorers; a hub id is downloaded or taken from the cache.

    `key` is the config key of a name. Errors: InputError, with the key in front.
    """

    def __init__(
        self, run: RunSection | None = None, device: Any = "cpu", *, mapped: bool = False, given: Given = NOTHING
    ) -> None:
        """`run`: the section of a config. `device`: of the models that are only read.

        `mapped`: models are sharded later, and until then their weights stay in their files, see `Access`.
        `given`: see `load_reward`.
        """
        run = run or RunSection()
        self.device: Any = "cpu" if mapped else device
        self.dtype = compute_dtype(run.dtype)
        self.given = given
        self.access = Access(remote_code=run.trust_remote_code, pickle=run.allow_pickle)
        self.mapped = replace(self.access, mapped=mapped)  # of a whole model; an adapter's base is float32

    # ---- models

    def folder(self, ref: str) -> str:
        """The local folder of a model; that of a GGUF file lies in the cache."""
        found = model_folder(ref, pickled=self.access.pickle)
        return gguf_folder(found) if found.endswith(GGUF) else found

    def tokenizer(self, ref: str, key: str) -> Any:
        """The tokenizer of a model, without the model; of an adapter that has none, that of its base."""
        with blame(key):
            return self._tokenizer(self.folder(ref))

    def _tokenizer(self, folder: str) -> Any:
        if not is_adapter(folder) or _has_tokenizer(folder):
            return load_tokenizer(folder, self.access)
        with blame_base(folder):
            return self._tokenizer(self.folder(adapter_base(folder)))

    def language_model(self, ref: str, key: str, *, keep_adapter: bool = False, adapted: bool = False) -> Loaded:
        """The model behind a folder or hub id; an adapter is merged into its base unless `keep_adapter`.

        `adapted`: it gets an adapter next, so it is float32.
        """
        access = self.access if adapted else self.mapped
        with ui.progress(f"loading {key}"), blame(key):
            loaded = self._language_model(ref, access, keep_adapter=keep_adapter)
            check_range(loaded.model, self.dtype)
            return loaded

    def _language_model(self, ref: str, access: Access, *, keep_adapter: bool = False) -> Loaded:
        folder = self.folder(ref)
        if not is_adapter(folder):
            return Loaded(load_causal_lm(folder, access), load_tokenizer(folder, access), folder, False)
        with blame_base(folder):
            base = self._language_model(adapter_base(folder), self.access)  # which may itself be an adapter
        model = load_adapter(base.model, folder)
        tokenizer = self._tokenizer_of_adapter(folder, base.tokenizer)
        return Loaded(model if keep_adapter else merge(model), tokenizer, folder, True)

    def frozen(self, model: Any) -> LM:
        """A language model that is only read, on the device."""
        return frozen_lm(model, self.dtype, self.device)

    def trained_model(self, ref: str, section: TunedSection, seed: int) -> Loaded:
        """`policy.model`, to be trained in a run with this seed: with a fresh adapter if the config names one.

        An adapter is trained further, or with a fresh one merged first.
        """
        fresh = section.lora is not None
        loaded = self.language_model(ref, "policy.model", keep_adapter=not fresh, adapted=fresh)
        model = tuned(loaded.model, section, base_name(ref, loaded), seed)
        return Loaded(model, loaded.tokenizer, loaded.folder, loaded.began_as_adapter and section.lora is None)

    def reward_model(self, ref: str, key: str, section: ScorerSection) -> RewardModel:
        """A sequence classifier as a scorer; an adapter is merged into its base."""
        with ui.progress(f"loading {key}"), blame(key):
            folder = self.folder(ref)
            if is_adapter(folder):
                model, tokenizer = self._classifier_of_adapter(folder, section.label)
            else:
                model = load_reward_model(folder, self.mapped, section.label)
                tokenizer = load_tokenizer(folder, self.access)
            check_range(model, self.dtype)
            form = {"chat": section.chat_template, "append_eos": section.append_eos, "pair": section.text_pair}
            model = freeze(model).to(self.device)
            with read_as_float32(model):
                options: Any = {"form": text_format(model, **form), "label": section.label, "dtype": self.dtype}
                reward = RewardModel(model, tokenizer, **options, key=key)
            if section.append_eos is not None and (reward.encoder or reward.form.chat):
                ends = "its chat template (as its folder says)" if reward.form.chat else "an encoder's tokenizer"
                unread = f"{key.removesuffix('.model')}.append_eos is not read: {section.append_eos}"
                raise InputError(f"{ends} ends the text, so {unread}")
        if not (reward.encoder or hasattr(model.config, FORMAT_KEY) or section.append_eos is not None):
            reward.ignored = reward.model.config.get_text_config().pad_token_id
        reward.doubt, reward.advice = _doubt(reward, section, key.removesuffix(".model"))
        if reward.doubt:
            log.warning(f"{key}: {reward.doubt}: set {reward.advice}")
        return reward

    def _classifier_of_adapter(self, folder: str, label: str | None) -> tuple[Any, Any]:
        """The merged classifier of an adapter's folder, and its tokenizer; the base may be a language model."""
        require_classifier_adapter(folder)
        ref = adapter_base(folder)
        with blame_base(folder):
            base = self.folder(ref)
        if is_classifier(base):
            tokenizer = load_tokenizer(base, self.access)
            model = load_reward_model(base, self.access, label)
        else:
            lm = self._language_model(ref, self.access)
            tokenizer = lm.tokenizer
            model = classifier_from_lm(lm.model, lm.tokenizer, self.access)  # its head comes with the adapter
            with blame(folder):
                check_label(model, label)
        merged = merge(load_adapter(model, folder))
        remember_format(merged, folder)
        return merged, self._tokenizer_of_adapter(folder, tokenizer)

    def _tokenizer_of_adapter(self, folder: str, base: Any) -> Any:
        return load_tokenizer(folder, self.access) if _has_tokenizer(folder) else base

    # ---- scorers

    def scorers(
        self, sections: Mapping[str, ScorerSection], limit: float | None = None, system: str | None = None
    ) -> Scorers:
        """The scorers of these sections by key, as `scorers_of` a config; a sum is its terms.

        `limit`: seconds that a call of a function may take. `system`: message before chats that have none.
        """
        found = []
        for key, section in sections.items():
            if section.kind != SUM:
                name = key.removeprefix(f"{REWARD}.").removeprefix("eval.")
                weight = section.weight if isinstance(section, TermSection) else 1.0
                found.append(Scorer(name, self._scorer(section, key, limit), weight))
        scorers = Scorers(*found)
        for model in scorers.models.values():
            model.system = system
        return scorers

    def _scorer(self, scorer: ScorerSection, where: str, limit: float | None) -> RewardModel | PluginReward:
        if scorer.kind == "model":
            assert scorer.model is not None
            return self.reward_model(scorer.model, f"{where}.model", scorer)
        plugin = NamedPlugin(f"{where}.kind", scorer.kind, scorer.options, scorer.interface == "trl")
        target, arguments = load_reward(plugin, self.given)
        kind = RemoteReward if plugin.ref in SERVERS else TRLReward if plugin.trl else PluginReward
        return kind(target, arguments, limit)


def _has_tokenizer(folder: str) -> bool:
    return (Path(folder) / "tokenizer_config.json").is_file()


def _doubt(reward: RewardModel, section: ScorerSection, where: str) -> tuple[str, str]:
    """What is guessed of how a reward model reads prompt and response, and what to set; "" where it is known."""
    labels = [str(name).lower() for name in reward.model.config.id2label.values()]
    if reward.form.pair or reward.form.chat or hasattr(reward.model.config, FORMAT_KEY):
        return "", ""
    if reward.tokenizer.chat_template and section.chat_template is None:
        return "its chat template is not used", f"{where}.chat_template=true, if it was trained on chats; else false"
    likely = reward.has_types or len(labels) == 1 or any("entail" in label for label in labels)  # to read pairs
    if reward.encoder and likely and section.text_pair is None:
        return (
            "it reads one text, not a pair",
            f"{where}.text_pair=true, if it was trained on pairs of texts; else false",
        )
    return "", ""


# ---- models to train


def base_name(ref: str, loaded: Loaded) -> str:
    """The base in a fresh adapter's config: the folder of a local model, else the hub id."""
    return loaded.folder if Path(ref).is_dir() else ref


def tuned(
    model: Any, section: TunedSection, ref: str, seed: int, task: Literal["CAUSAL_LM", "SEQ_CLS"] = LANGUAGE_MODEL
) -> Any:
    """The model with the fresh adapter and the gradient checkpointing of `policy`.

    `ref`: the model's name, for the adapter's config; `seed`: of the run.
    """
    if (lora := section.lora) is not None:
        options: dict[str, Any] = {"ref": ref, "seed": derive_seed(seed, "adapter"), "task": task}
        with blame("policy.lora"):
            model = add_adapter(model, r=lora.r, alpha=lora.alpha, target_modules=lora.target_modules, **options)
    if section.gradient_checkpointing:
        with blame("policy.gradient_checkpointing"):
            enable_recompute(model)
    return model


def check_reference(policy: Any, tokenizer: Any, reference: Any, other: Any, texts: Sequence[str] = ()) -> None:
    """Errors: InputError where there is no KL between two models: they have other tokens, or read texts as others.

    `other`: the reference's tokenizer. `texts`: those of the run.
    """
    if reference.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise InputError("has another vocabulary than policy.model, so there is no KL between them")
    for text in (PROBE, *texts[:PROBES]):
        if encode(tokenizer, text, bos=False) != encode(other, text, bos=False):  # a bos is the policy's in both
            raise InputError(f"reads {text[:40]!r} as other tokens than policy.model, so there is no KL between them")
