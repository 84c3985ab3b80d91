"""Generated configs and data files: every one is read, or refused in words with exit code 2.

500 of them in the slow tests, always the same; `make fuzz` draws 10,000 new ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_kl.config.resolve import flat, load_config
from rlhf_kl.config.schema.supervised import PairsSection, SFTDataSection
from rlhf_kl.data.files import load_rows
from rlhf_kl.data.rows import read_labels, read_texts
from rlhf_kl.errors import InputError
from rlhf_kl.training.sets import example_reader, pair_reader

GENERATED = settings(
    max_examples=int(os.environ.get("RLHF_KL_FUZZ", "500")) // 2,
    deadline=None,
    derandomize="RLHF_KL_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# ---- configs: a good one with some of its values replaced ----

KINDS: dict[str, Any] = {"train": "smoke.yaml", "sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}
GOOD = {kind: load_config(kind, file).model_dump(mode="json") for kind, file in KINDS.items()}
ODD = (
    *(math.nan, math.inf, -math.inf, 0, -1, -0.5, 1, 0.5, 10**30, 1e-320, 10**400, True, False, None),
    *("", " ", "\n", "\x1b[2J", "\u202egnp.exe", "/dev/null", "~root/x", "." * 300, "a" * 5000, "builtin:../x"),
    *("auto", "null", "nan", "os:system", "nowhere.py:f", "mine.py:", ":", "a:b:c", "{}", "1.5x", "0x", "pid", "-"),
    *([], {}, [[]], [None], {"kind": "fixed"}, {"kind": None}, {"": {}}, {"a": {"b": 1}}),
)
VALUES = st.sampled_from(ODD) | st.text(max_size=20) | st.floats() | st.integers() | st.lists(st.integers(), max_size=3)
KEYS = st.sampled_from(["kind", "", "extends", "__class__", "model_config", "a.b", "run"]) | st.text(max_size=8)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    config = json.loads(json.dumps(GOOD[draw(st.sampled_from(sorted(GOOD)))]))
    for _ in range(draw(st.integers(1, 4))):
        *parents, name = draw(st.sampled_from(list(flat(config)))).split(".")
        parents = parents[: draw(st.integers(0, len(parents)))] if draw(st.booleans()) else parents
        section = config
        for key in parents:
            section = section[key] if isinstance(section.get(key), dict) else section  # a key may hold a dot
        section[draw(KEYS) if draw(st.booleans()) else name] = deepcopy(draw(VALUES))  # ODD must stay as it is
    return config


@GENERATED
@given(config=configs(), style=st.sampled_from([None, '"', "'"]))
def test_configs_with_odd_values(
    config: dict[str, Any], style: str, rlhf_kl: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    file.write_text(yaml.safe_dump(config, allow_unicode=False, default_style=style))
    code, _, err = rlhf_kl("config", "validate", file)
    assert code in (0, 2), err
    lines = err.removesuffix("\n").split("\n")
    assert code == 0 or all(line.startswith("error: ") and min(line) >= " " for line in lines), lines


# ---- data files ----

TABLE = b'text,prompt,chosen,rejected,label\n"one, two",a,"b ""c""","d\ne",1\nzw\xc3\xb6lf,x,u,,0.5\n'
ROWS = [
    {"text": "one, two", "prompt": "a", "chosen": 'b "c"', "rejected": "d\ne", "label": 1},
    {"text": "zwölf", "prompt": "x", "chosen": [{"role": "user", "content": "u"}], "rejected": "", "label": "0.5"},
    {"text": "", "prompt": None, "chosen": "same", "rejected": "same", "label": math.nan},
]
SOUND = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    ".json": json.dumps(ROWS).encode(),
    ".csv": TABLE,
    ".txt": b"one, two\n\nzw\xc3\xb6lf\n",
}
INSERTS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b'"', b",", b"{", b"]", b"\\ud800", b"1e999", b"NaN"),
    *(b"9" * 5000, b"null", b'{"text": {"text": []}}\n', b'{"text": 3}\n', b'"text"\n'),
)
PIECES = st.binary(max_size=6) | st.sampled_from(INSERTS)


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file with some bytes replaced, inserted, cut out or cut off."""
    suffix = draw(st.sampled_from(sorted(SOUND)))
    data = SOUND[suffix]
    for _ in range(draw(st.integers(0, 4))):
        at, gap = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 0, 1, 2, 7, 40, 10**6]))
        data = data[:at] + draw(PIECES) + data[at + gap :]
    return suffix, data


@GENERATED
@given(file=data_files())
def test_data_files(file: tuple[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Errors: none but InputError."""
    path = Path(f"{tmp_path_factory.getbasetemp()}/fuzzed{file[0]}")
    path.write_bytes(file[1])
    where = str(path)
    readers: list[Callable[[Any, str], Any]] = [
        partial(read_texts, column="text", template="{prompt}: {label}"),
        example_reader(SFTDataSection(texts="f", prompt_column="prompt", response_column="chosen")),
        pair_reader(PairsSection(pairs="f", prompt_column=None)),
        partial(read_labels, text="text", label="label"),
    ]
    for reader in readers:
        with contextlib.suppress(InputError):
            reader(load_rows(where, "train"), where)
