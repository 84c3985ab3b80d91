"""Runs one command line in every process of a group; at its end the first one tells how many layers were whole at once.

Of the layers of all sharded models: in passes of sampling, in others without gradients, and in those of training. And
how many passes FSDP still remembers. With OLD=1 it is as in torch before 2.13, where it does not forget them itself.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from rlhf_kl import cli, sharding
from rlhf_kl.models.lm import LM

if __name__ == "__main__":
    layers: list[Any] = []
    most: Counter[str] = Counter()
    samples = [False]

    def count(*_: Any) -> None:
        whole = sum(not any(sharding.is_sharded(p) for p in layer.parameters() if p.dim() > 1) for layer in layers)
        phase = "sampling" if samples[0] else "training" if torch.is_grad_enabled() else "reading"
        most[phase] = max(most[phase], whole)

    shard, sample = sharding.shard, LM.sample

    def noting(given: Any, *options: Any) -> None:
        given = list(given)
        shard(given, *options)
        for layer in given:
            layer.register_forward_pre_hook(count)
        layers.extend(given)

    def sampling(*options: Any) -> Any:
        samples[0] = True
        try:
            return sample(*options)
        finally:
            samples[0] = False

    sharding.shard, LM.sample = noting, sampling  # type: ignore[assignment, method-assign]
    if os.environ["OLD"] == "1":
        del FSDPModule.reset_iter_state
    code = cli.run(sys.argv[1:])
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
    kept = sum(len(group.comm_ctx.post_forward_order) + len(group._post_forward_indices) for group in groups)
    if os.environ["RANK"] == "0":
        print(f"of {len(layers)} layers: {dict(sorted(most.items()))}; {kept} passes remembered")
    if code:
        sys.exit(code)
