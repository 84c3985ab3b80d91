"""From a YAML file and `--set` to a checked config, or to all of its problems at once."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

from pydantic import ValidationError

from rlhf_kl.components import is_reference, nearest, reference_file, suggestion
from rlhf_kl.config.describe import describe_errors, wrong_keys
from rlhf_kl.config.plugins import construction_problems, controller_problems, raw_terms, reward_problems
from rlhf_kl.config.schema import (
    KIND_NAMES,
    MODELS,
    AnyConfig,
    ControllerSection,
    Kind,
    KLSection,
    Location,
    PPOSection,
    RewardModelConfig,
    RewardSection,
    RolloutSection,
    Section,
    SFTConfig,
    TermSection,
    TrainConfig,
    section_of,
)
from rlhf_kl.config.yaml import dump_yaml, parse_yaml, read_yaml
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers.factory import stored_name

MAX_CHAIN = 20
MAX_KEY_DEPTH = 10
BUILTIN = "builtin:"
BUILTIN_NAMES = ("reviews", "reviews-small")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
OWN_SECTIONS: dict[Kind, set[str]] = {
    "train": {"reference", "reward", "rollout", "ppo", "kl"},
    "sft": {"sft"},
    "reward-model": {"reward_model"},
}
# Mappings whose keys depend on their `kind`: a new kind drops the old one's.
BY_KIND: dict[str, type[RewardSection] | type[ControllerSection]] = {
    "reward": RewardSection,
    "kl.controller": ControllerSection,
}


AnySection = TypeVar("AnySection", bound=Section)


@overload
def load_config(kind: Literal["train"], file: str | Path, overrides: Sequence[str] = ()) -> TrainConfig: ...
@overload
def load_config(kind: Literal["sft"], file: str | Path, overrides: Sequence[str] = ()) -> SFTConfig: ...
@overload
def load_config(
    kind: Literal["reward-model"], file: str | Path, overrides: Sequence[str] = ()
) -> RewardModelConfig: ...


def load_config(kind: Kind, file: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """Read, merge and check a config.

    file: a path, or a name that is looked up (`find_config`).
    overrides: "a.b=value" each, the value in YAML; together one mapping that the file is the parent of.
    Raises InputError with every problem found.
    """
    path = find_config(file)
    fragment, problems = _parse_overrides(overrides)
    raw = _merge(_read_file(path, chain=[]), fragment)
    _require_kind(kind, raw, path)
    return _validated(kind, raw, problems, name=path.stem)


def load_any(file: str | Path, overrides: Sequence[str] = ()) -> tuple[Kind, AnyConfig]:
    """`load_config` of a file whose kind is told from its sections."""
    path = find_config(file)
    fragment, problems = _parse_overrides(overrides)
    raw = _merge(_read_file(path, chain=[]), fragment)
    kind = detect_kind(raw)
    _require_kind(kind, raw, path)
    return kind, _validated(kind, raw, problems, name=path.stem)


def load_variant(
    base: Path, fragment: Mapping[str, Any], folders: Sequence[Path], overrides: Sequence[str] = ()
) -> TrainConfig:
    """A train config with a fragment on top, as if a file that extends it held the fragment.

    base: a file (`find_config`). folders: where relative paths of the fragment are looked for. Raises InputError.
    """
    parent = _read_file(base, chain=[])
    _require_kind("train", parent, base)
    raw = _merge(parent, _absolute(dict(fragment), folders))
    changes, problems = _parse_overrides(overrides)
    return cast(TrainConfig, _validated("train", _merge(raw, changes), problems, name=base.stem))


def detect_kind(raw: Mapping[str, Any]) -> Kind:
    """The command that a merged mapping is for; train unless it has another one's section."""
    return next((kind for kind in ("sft", "reward-model") if OWN_SECTIONS[kind] & raw.keys()), "train")


def dump_config(config: AnyConfig) -> str:
    """YAML with every key written, that loads back to an equal config."""
    return dump_yaml(config.model_dump())


def json_schema(kind: Kind) -> dict[str, Any]:
    """JSON Schema of a config file, for editors."""
    schema = MODELS[kind].model_json_schema()
    extends = {"type": "string", "description": "Another config that this one is written on top of."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_diff(a: AnyConfig, b: AnyConfig) -> list[str]:
    """ "key: old -> new" for every dotted key whose value differs."""
    old, new = flat(a.model_dump()), flat(b.model_dump())
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, after = (_shown(values, key) for values in (old, new))
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _shown(values: Mapping[str, Any], key: str) -> str:
    return dump_yaml([values[key]])[2:].strip() if key in values else "(absent)"


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


# ---- finding files ----


def shipped_configs() -> Path:
    """Folder of the configs that come with the package: in the wheel, else beside an editable install."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str | Path, *, folder: Path | None = None, but: Path | None = None) -> Path:
    """The config file `name`, from: `folder`, the working directory, its configs/, the shipped configs.

    but: a file that is passed over (one that extends its namesake).
    Raises InputError, naming the nearest file there is.
    """
    here = Path.cwd()
    places = [here, here / "configs", shipped_configs()]
    if folder is not None:
        places.insert(0, folder)
    given = Path(os.path.expanduser(name))
    for place in places:
        path = place / given
        if _exists(path) and not path.is_dir() and (but is None or path.resolve() != but):
            return path.resolve()
    if _exists(here / given) and (here / given).is_dir():
        raise InputError(f"{name} is a folder, not a config file")
    known = {path.stem: path.name for place in places for path in _yaml_files(place) if path.resolve() != but}
    close = nearest(given.stem, known)  # without the ending, which all have in common
    hint = f"; did you mean {known[close]}?" if close else f"; there are {', '.join(sorted(known.values()))}"
    raise InputError(f"no config {str(name)!r}{hint}")


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # name too long, NUL
        return False


# ---- reading and merging ----


def _read_file(path: Path, chain: list[Path]) -> dict[str, Any]:
    if path in chain:
        names = " -> ".join(str(link) for link in [*chain[chain.index(path) :], path])
        raise InputError(f"configs extend each other in a circle: {names}")
    if len(chain) == MAX_CHAIN:
        raise InputError(f"{chain[0]}: more than {MAX_CHAIN} configs extend one another")
    raw = read_yaml(path)
    parent_name = raw.pop("extends", None)
    raw = _absolute(raw, [path.parent, Path.cwd()])
    if parent_name is None:
        return raw
    if not isinstance(parent_name, str) or not parent_name:
        raise InputError(f"{path}: extends must be the name of a config file: {parent_name!r}")
    try:
        parent = find_config(parent_name, folder=path.parent, but=path)
    except InputError as error:
        raise InputError(*(f"{path}: extends: {problem}" for problem in error.problems)) from None
    return _merge(_read_file(parent, [*chain, path]), raw)


def _parse_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """All `--set` as one fragment, and what is wrong with those that are left out of it."""
    problems: list[str] = []
    fragment: dict[str, Any] = {}
    read: list[tuple[str, dict[str, Any]]] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > MAX_KEY_DEPTH:
            problems.append(f"--set {text!r}: write section.key=value")
            continue
        try:
            parsed = parse_yaml(value, where=f"--set {key.strip()}")
        except InputError as error:
            problems += error.problems
            continue
        for part in reversed(parts):
            parsed = {part: parsed}
        contradicted = [other for other, mapping in read if _contradict(mapping, parsed)]
        problems += [f"--set {other!r} and --set {text!r} contradict each other: drop one" for other in contradicted]
        if contradicted:
            continue
        # No rule of kinds here: `--set kl.controller.kp=1 --set kl.controller.kind=pid` is one mapping.
        fragment = _merge_plain(fragment, parsed)
        read.append((text, parsed))
    return _absolute(fragment, [Path.cwd()]), problems


def _contradict(a: Any, b: Any) -> bool:
    """Whether one holds a single value where the other holds a mapping.

    Of two single values the later wins, and of a mapping and null, which leaves a section out.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return any(_contradict(a[key], b[key]) for key in a.keys() & b.keys())
    return a is not None and b is not None and isinstance(a, dict) != isinstance(b, dict)


def _merge_plain(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge_plain(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _merge(parent: dict[str, Any], child: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The child's values win; where it changes a `kind`, the parent's options of the old kind go."""
    merged = dict(parent)
    if where in BY_KIND and "kind" in child and _kind_of(where, child) != _kind_of(where, parent):
        merged = {key: value for key, value in parent.items() if key in BY_KIND[where].general}
    for key, value in child.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value, f"{where}.{key}" if where else key)
        else:
            merged[key] = value
    return merged


def _kind_of(where: str, section: Mapping[str, Any]) -> Any:
    kind = section.get("kind", BY_KIND[where].model_fields["kind"].default)
    return stored_name(kind) if isinstance(kind, str) else kind


# ---- paths ----


def _locations(model: type[Section], prefix: str = "") -> Iterator[tuple[str, Location]]:
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Location):
                yield prefix + name, mark
        section = section_of(field.annotation)
        if section is not None:
            yield from _locations(section, f"{prefix}{name}.")


def _absolute(raw: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Whatever exists on disk, as an absolute path. The first folder that has it wins."""
    raw = copy.deepcopy(raw)
    for key, location in {key: mark for model in MODELS.values() for key, mark in _locations(model)}.items():
        holder, name = _holder(raw, key)
        value = holder.get(name)
        if not isinstance(value, str) or not value or value.startswith(BUILTIN):
            continue
        holder[name] = _located(value, location, folders)
    for _, holder, name, location in _term_locations(raw):
        holder[name] = _located(holder[name], location, folders)
    return raw


def _term_locations(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, Location]]:
    """Dotted key, holder, name and mark of what the terms of a reward may name on disk."""
    reward, _ = _holder(raw, "reward.terms")
    for term_name, term in raw_terms(reward).items():
        for name, mark in _locations(TermSection):
            value = term.get(name)
            if isinstance(value, str) and value and not value.startswith(BUILTIN):
                yield f"reward.terms.{term_name}.{name}", term, name, mark


def _located(value: str, location: Location, folders: Sequence[Path]) -> str:
    if location.plugin:
        file = reference_file(value, folders) or _copied(value, folders[0])
        if file is not None:
            return f"{file}:{value.rpartition(':')[2]}"
    if location.path:
        for folder in folders:
            path = folder / os.path.expanduser(value)
            if _exists(path):
                return os.path.abspath(path)
    return value


def _copied(value: str, folder: Path) -> Path | None:
    """The copy of a plugin that a run keeps beside its config, for when the file itself has gone."""
    file = Path(value.rpartition(":")[0])
    # Of two files of one name the second is kept under another.
    if not file.is_absolute() or not (folder / "config.yaml").is_file() or (folder / f"{file.stem}-2.py").exists():
        return None
    return reference_file(f"{file.name}:{value.rpartition(':')[2]}", [folder])


def _holder(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted key (an empty one if there is none), and its last part."""
    *parents, name = key.split(".")
    for parent in parents:
        child = raw.get(parent)
        if not isinstance(child, dict):
            return {}, name
        raw = child
    return raw, name


def _source_problems(kind: Kind, raw: dict[str, Any]) -> list[str]:
    problems = []
    for key, location in _locations(MODELS[kind]):
        holder, name = _holder(raw, key)
        value = holder.get(name)
        if not location.path or not isinstance(value, str) or (location.plugin and is_reference(value)):
            continue
        if value.startswith(BUILTIN):
            if value.removeprefix(BUILTIN) not in BUILTIN_NAMES:
                hint = suggestion(value.removeprefix(BUILTIN), BUILTIN_NAMES, prefix=BUILTIN)
                problems.append(f"{key}: no built-in {value!r}{hint}")
        elif _looks_like_path(value) and not _exists(Path(os.path.expanduser(value))):
            problems.append(f"{key}: no such file: {value}")
    for key, holder, name, location in _term_locations(raw):
        value = holder[name]
        if location.path and _looks_like_path(value) and not _exists(Path(os.path.expanduser(value))):
            problems.append(f"{key}: no such file: {value}")
    return problems


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~")) or value.lower().endswith(DATA_SUFFIXES)


# ---- checking ----


def _require_kind(kind: Kind, raw: Mapping[str, Any], path: Path) -> None:
    found = [other for other in KIND_NAMES if OWN_SECTIONS[other] & raw.keys()]
    if found and kind not in found:
        raise InputError(f"{path} is a config for `rlhf-kl {found[0]}`, not for `rlhf-kl {kind}`")
    if not found and "variants" in raw:
        raise InputError(f"{path} is a config for `rlhf-kl compare`, not for `rlhf-kl {kind}`")


def _validated(kind: Kind, raw: dict[str, Any], problems: Sequence[str] = (), *, name: str) -> AnyConfig:
    """The config of a merged mapping; `problems` are what was already found before."""
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)
    known, config, found = check_mapping(MODELS[kind], raw)
    problems = [*problems, *found]
    problems += _source_problems(kind, known)
    if kind == "train":
        problems += _component_problems(known)
    if problems or config is None:
        raise InputError(*dict.fromkeys(problems))
    output_dir = os.path.abspath(os.path.expanduser(config.run.output_dir))
    run_section = config.run.model_copy(update={"output_dir": output_dir})
    return config.model_copy(update={"run": run_section})


def check_mapping(model: type[AnySection], raw: dict[str, Any]) -> tuple[dict[str, Any], AnySection | None, list[str]]:
    """`raw` less its unknown keys, the config where it can be made, and the problems; nothing on disk is looked for."""
    problems: list[str] = []
    known = _without_unknown(model, raw, "", _all_keys(model), problems)
    try:
        return known, model.model_validate(known), problems
    except ValidationError as error:
        return known, None, [*problems, *describe_errors(error, model), *_hidden_problems(model, known, error)]


def _hidden_problems(model: type[Section], known: dict[str, Any], error: ValidationError) -> list[str]:
    """What right keys do not agree on: of a section with a wrong one pydantic does not ask that.

    So the wrong ones are left out, and with them every line that would speak of their defaults.
    """
    wrong = {key.removesuffix(".kind") for key in wrong_keys(error, model)}  # what else it holds depends on its kind
    rest = copy.deepcopy(known)
    for key in wrong:
        holder, name = _holder(rest, key)
        holder.pop(name, None)
    try:
        model.model_validate(rest)
    except ValidationError as again:
        return [line for line in describe_errors(again, model) if not any(_names(line, key) for key in wrong)]
    return []


def _names(line: str, key: str) -> bool:
    """Whether a problem speaks of `key` or of what is below it."""
    return any(f"{word}.".startswith(f"{key}.") for word in re.findall(r"[\w.]+", line))


def _component_problems(raw: dict[str, Any]) -> list[str]:
    controller, _ = _holder(raw, "kl.controller.kind")
    reward, _ = _holder(raw, "reward.kind")
    problems = controller_problems(controller) + reward_problems(reward)
    kl, ppo, rollout = (_section(cls, raw.get(key)) for cls, key in _CONSTRUCTION)
    if not problems and kl is not None and ppo is not None and rollout is not None:
        problems = construction_problems(cast(KLSection, kl), cast(PPOSection, ppo), cast(RolloutSection, rollout))
    return problems


_CONSTRUCTION: tuple[tuple[type[Section], str], ...] = (
    (KLSection, "kl"),
    (PPOSection, "ppo"),
    (RolloutSection, "rollout"),
)


def _section(cls: type[Section], raw: Any) -> Section | None:
    try:
        return cls.model_validate({} if raw is None else raw)
    except ValidationError:
        return None


def _all_keys(model: type[Section], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        section = section_of(field.annotation)
        if section is not None:
            keys += _all_keys(section, f"{prefix}{name}.")
    return keys


def _without_unknown(
    model: type[Section], raw: dict[str, Any], where: str, all_keys: list[str], problems: list[str]
) -> dict[str, Any]:
    """`raw` less the keys that `model` does not have, which become problems; so do NaN and infinity."""
    known: dict[str, Any] = {}
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is not None:
            section = section_of(field.annotation)
            if section is not None and isinstance(value, dict):
                value = _without_unknown(section, value, f"{where}{key}.", all_keys, problems)
            known[key] = value
        elif not _takes_options(model, raw):
            problems.append(f"{where}{key}: unknown key{_key_hint(key, where, all_keys)}")
        elif not _finite(value):
            problems.append(f"{where}{key} must be a finite number")
        else:
            known[key] = value
    return known


def _takes_options(model: type[Section], raw: Mapping[str, Any]) -> bool:
    if model is RewardSection:
        return bool(_kind_of("reward", raw) != "model")
    return model is ControllerSection


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def _key_hint(key: str, where: str, all_keys: Iterable[str]) -> str:
    """The same key in another section, else the nearest here, else the nearest anywhere."""
    leaves: dict[str, list[str]] = {}
    for dotted in all_keys:
        leaves.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    here = [
        dotted.removeprefix(where)
        for dotted in all_keys
        if dotted.startswith(where) and "." not in dotted.removeprefix(where)
    ]
    close = nearest(key, here)
    if key not in leaves and close is not None:
        return f"; did you mean {where}{close}?"
    leaf = key if key in leaves else nearest(key, leaves)
    if leaf is not None:
        return f"; did you mean {' or '.join(leaves[leaf][:3])}?"
    return f"; valid: {', '.join(here)}"
