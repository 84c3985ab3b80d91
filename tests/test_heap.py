from __future__ import annotations

import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
TAKE_AND_FREE = """
import resource, torch
from rlhf_kl.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
print(keep_freed_memory(), plain, (faults(), faults())[1])
"""


def measured(**variables: str) -> list[str]:
    environment = {"PATH": "/usr/bin:/bin"} | variables
    result = subprocess.run(
        [sys.executable, "-c", TAKE_AND_FREE], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.split()


@glibc
def test_freed_memory_comes_back_without_the_system() -> None:
    kept, plain, later = measured()
    assert kept == "True"
    assert int(plain) > 100  # ten blocks of pages of 4 KiB or 2 MiB
    assert int(later) < int(plain) / 5


@glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_stays(name: str) -> None:
    values = {"MALLOC_TRIM_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    assert measured(**{name: values[name]})[0] == "False"
