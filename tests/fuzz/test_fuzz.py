"""Generated configs and data files: every one is read, or refused in words with exit code 2.

500 of them in the ordinary tests, always the same; `make fuzz` draws 10,000 new ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_kl.config.load import load_config
from rlhf_kl.data.files import load_rows
from rlhf_kl.data.texts import read_examples, read_labels, read_pairs, read_texts
from rlhf_kl.errors import InputError

Cli = Callable[..., Any]
MANY = int(os.environ.get("RLHF_KL_FUZZ", "500"))
SHARES = {"configs": 0.6, "files": 0.4}


def generated(share: str) -> Any:
    """Settings for a share of all examples; without RLHF_KL_FUZZ the same ones every time."""
    return settings(
        max_examples=max(1, round(MANY * SHARES[share])),
        deadline=None,
        derandomize="RLHF_KL_FUZZ" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def assert_in_words(outcome: Any) -> None:
    """Success, or exit 2 with lines that are errors, printable, and no traceback."""
    assert outcome.code in (0, 2), outcome
    if outcome.code == 2:
        lines = outcome.err.split("\n")
        assert lines.pop() == ""
        assert lines
        for line in lines:
            assert line.startswith("error: "), line
            assert not {unicodedata.category(character) for character in line} & {"Cc", "Cs", "Zl", "Zp"}, line


# ---- configs: a good one with some of its values replaced ----


def starting_points() -> dict[str, dict[str, Any]]:
    kinds: dict[str, Any] = {"train": "smoke.yaml", "sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}
    return {kind: load_config(kind, file).model_dump(mode="json") for kind, file in kinds.items()}


GOOD = starting_points()


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, item in value.items():
        found.append((*prefix, key))
        if isinstance(item, dict):
            found += paths(item, (*prefix, key))
    return found


NUMBERS = (math.nan, math.inf, -math.inf, 0, 0.0, -1, -0.5, 1, 2, 3, 0.5, 1.0, 10**30, -(10**30), 1e-320, 1e300)
WORDS = (
    *("", " ", "\n", "\x1b[2J\x1b]0;owned\x07", "\x00", "\u202egnp.exe", "/", "/dev/null", "../../etc/passwd"),
    *("~root/x", "." * 300, "a" * 5000, "builtin:reviews", "builtin:../x", "builtin:", "auto", "model", "null"),
    *("nan", "1e400", "0x10", "os:system", "json:loads", "nowhere.py:f", "mine.py:", ":", "a:b:c", "{}", "%s%n"),
    *("1.5x", "0x", "9" * 9 + "x", "fixed", "pid", "schedule", "adaptive", "cuda:99999999999", "-", "conservative"),
)
OTHERS = (
    True,
    False,
    None,
    10**400,
    [],
    {},
    [[]],
    [None],
    {"kind": "fixed"},
    {"kind": None},
    {"": {}},
    {"a": {"b": 1}},
)
HOSTILE = st.sampled_from([*NUMBERS, *WORDS, *OTHERS])
KEYS = st.sampled_from(["kind", "", "extends", "lerning_rate", "__class__", "model_config", "a.b", "\n", "é", "run"])
VALUES = HOSTILE | st.text(max_size=20) | st.floats() | st.integers() | st.lists(st.integers(), max_size=3)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    config = json.loads(json.dumps(GOOD[draw(st.sampled_from(sorted(GOOD)))]))
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths(config)))
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        deed = draw(st.sampled_from(["replace", "replace", "replace", "add", "drop"]))
        if deed == "replace":
            holder[path[-1]] = draw(VALUES)
        elif deed == "add":
            holder[draw(KEYS | st.text(max_size=8))] = draw(VALUES)
        else:
            del holder[path[-1]]
        if not paths(config):
            break
    return config


@generated("configs")
@given(config=configs(), style=st.sampled_from(["", '"', "'"]))
def test_configs_with_hostile_values(
    config: dict[str, Any], style: str, rlhf_kl: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    file.write_text(yaml.safe_dump(config, allow_unicode=False, default_style=style or None))
    assert_in_words(rlhf_kl("config", "validate", file))


# ---- data files ----

ROWS = [
    {"text": "one, two", "prompt": "a", "chosen": 'b "c"', "rejected": "d\ne", "label": 1},
    {"text": "zwölf 🙂", "prompt": "x", "chosen": [{"role": "user", "content": "u"}], "rejected": "", "label": "0.5"},
    {"text": "", "prompt": None, "chosen": "same", "rejected": "same", "label": math.nan},
]


def sound_files() -> dict[str, bytes]:
    import csv

    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        ".json": json.dumps(ROWS).encode(),
        ".csv": table.getvalue().encode(),
        ".txt": "\n".join(str(row["text"]) for row in ROWS).encode(),
    }


SOUND = sound_files()
PIECES_OF_FILES = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n\n", b'"', b"'", b",", b"{", b"["),
    *(b"}", b"]", b"\\ud800", b"\\u0000", b"1e999", b"NaN", b"-Infinity", b"9" * 5000, b"[" * 3000, b"null", b"{}"),
    *(b"true", b"\x1b[2J", b'{"text": {"text": []}}\n', b'{"text": 3}\n', b'"text"\n', b'{"text": "' + b"a" * 2000),
)
INSERTS = st.sampled_from(PIECES_OF_FILES) | st.binary(max_size=6)


@st.composite
def edited(draw: st.DrawFn, data: bytes, inserts: st.SearchStrategy[bytes] = INSERTS) -> bytes:
    """Some bytes replaced, inserted, cut out or cut off."""
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        gap = draw(st.sampled_from([0, 0, 1, 2, 7, 40, 10**6]))
        data = data[:at] + draw(inserts) + data[at + gap :]
    return data


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes]:
    suffix = draw(st.sampled_from(sorted(SOUND)))
    return suffix, draw(edited(SOUND[suffix]) | st.binary(max_size=40))


def read_every_way(path: Path) -> None:
    """As texts, examples, pairs and labels. Errors: none but InputError."""
    readers: list[Callable[[Any], Any]] = [
        lambda rows: read_texts(rows, "text", None, str(path)),
        lambda rows: read_texts(rows, "text", "{prompt}: {label}", str(path)),
        lambda rows: read_examples(rows, "prompt", "chosen", None, str(path)),
        lambda rows: read_pairs(rows, None, "chosen", "rejected", None, str(path)),
        lambda rows: read_pairs(rows, "prompt", "chosen", "rejected", None, str(path)),
        lambda rows: read_labels(rows, "text", "label", str(path)),
    ]
    for reader in readers:
        with contextlib.suppress(InputError):
            reader(load_rows(str(path), "train"))


@generated("files")
@given(file=data_files())
def test_data_files(file: tuple[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    suffix, data = file
    path = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    path.write_bytes(data)
    read_every_way(path)
