from __future__ import annotations

import pytest

import rlhf_kl


@pytest.mark.parametrize("name", rlhf_kl.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    public = getattr(rlhf_kl, name)
    assert public.__name__ == {"KLController": "Law"}.get(name, name)
    assert (public.__doc__ or "").strip()
    assert name in dir(rlhf_kl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        rlhf_kl.nonsense  # noqa: B018
