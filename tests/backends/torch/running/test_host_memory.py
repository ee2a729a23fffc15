import ctypes
import os
import platform
import subprocess
import sys

import pytest

from partitioner.backends.torch.running.host_memory import keep_freed_memory

_SCRIPT = """
import resource
import sys
import torch
from partitioner.backends.torch.running.host_memory import keep_freed_memory
torch.set_num_threads(1)
is_kept = keep_freed_memory() if sys.argv[1] == "kept" else None

def step():
    some = [torch.zeros(12 * 2**20) for _ in range(3)]  # 48 MiB each: above glibc's largest default
    del some

for _ in range(8):  # glibc before 2.38 seldom reuses aligned memory at once
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages_cleared(kept: str) -> tuple[str, int]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    out = subprocess.run(
        [sys.executable, "-c", _SCRIPT, kept],
        env={**plain, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    said, faults = out.stdout.split()
    return said, int(faults)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_later_steps_meet_no_new_pages() -> None:
    _, faults = _pages_cleared("plain")
    said, kept_faults = _pages_cleared("kept")
    assert said == "True"
    assert kept_faults < 50 < faults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_settings_of_the_environment_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the allocator is asked for"))
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory.__wrapped__()
