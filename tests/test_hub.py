from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.hub import hub_name, model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("gpt2", ("gpt2", None, None)),
        ("owner/name", ("owner/name", None, None)),
        ("owner/name@v1.0", ("owner/name", None, "v1.0")),
        ("owner/name:part-1@refs/pr/3", ("owner/name", "part-1", "refs/pr/3")),
        ("runs/mine/final", None),
        ("no such thing", None),
        ("owner/name@", None),
    ],
)
def test_a_hub_id_taken_apart(ref: str, parts: tuple[str | None, ...] | None) -> None:
    assert hub_name(ref) == parts


def test_a_local_folder_comes_before_the_hub(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert model_folder(str(tmp_path)) == str(tmp_path)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds `owner/name` at one commit, which `main` was when it was downloaded."""
    import huggingface_hub.constants

    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_downloaded_files_need_no_network(cached: Path) -> None:
    assert Path(model_folder("owner/name")) == cached
    with pytest.raises(InputError, match=r"^owner/name@v2: .*cache"):
        model_folder("owner/name@v2")
    for ref in ("runs/mine/final", "owner/name:subset", "no such thing"):
        with pytest.raises(InputError, match="nor a hub id"):
            model_folder(ref)
