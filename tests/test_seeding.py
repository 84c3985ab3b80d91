from __future__ import annotations

import torch

from rlhf_kl.seeding import derive_seed, shuffled, uniforms


def test_a_seed_depends_on_every_part_of_its_purpose() -> None:
    seeds = [
        derive_seed(0),
        derive_seed(1),
        derive_seed(0, "rollout"),
        derive_seed(0, "rollout", 1),
        derive_seed(0, "rollout", 11),
        derive_seed(0, "rollout", 1, 1),
        derive_seed(0, "evaluation"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine() -> None:
    """Recorded: a change would give every old run other samples."""
    assert derive_seed(0, "rollout", 1) == 8911054625556009685


def test_the_global_stream_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = uniforms(2, 3, 0, "x")
    shuffled(5, 0, "x")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(uniforms(2, 3, 0, "x"), one)


def test_noise_is_uniform_in_the_unit_interval() -> None:
    noise = uniforms(200, 100, 0, "x")
    assert noise.dtype == torch.float64
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    counts = torch.histc(noise.float(), bins=10, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 28  # 9 degrees of freedom, one in a thousand


def test_a_shuffle_is_a_permutation() -> None:
    order = shuffled(50, 0, "prompts", 1)
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() != list(range(50))
