"""How busy other processes keep the cores while something is measured."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partitioner.api.profiling import busy
from partitioner.api.profiling.busy import Others
from partitioner.api.profiling.profiled import BUSY, UNSTABLE, Profiled


def profiled(**figures: float | None) -> Profiled:
    return Profiled(
        file=Path("p.sqlite"),
        device="cpu",
        machine="cpu",
        threads=1,
        measured=3,
        links=0,
        unknown_links=0,
        seconds=1.0,
        limit_s=2.0,
        **figures,  # type: ignore[arg-type]
    )


def stat(path: Path, busy_ticks: int, guest_ticks: int = 0) -> None:
    """Cores 0 and 1 have run for as many ticks, core 2 for a million."""
    cores = "".join(
        f"cpu{core} {ticks} 0 0 999 99 0 0 0 {guest_ticks} 0\n"
        for core, ticks in ((0, busy_ticks), (1, busy_ticks), (2, 1_000_000))
    )
    path.write_text(f"cpu  1 2 3\n{cores}intr 5\n")


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for /proc/stat, where a second passes between two looks at the clock."""
    clock = iter(range(10))
    monkeypatch.setattr(busy, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    return tmp_path / "stat"


def test_the_share_of_others_is_what_this_process_did_not_run(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    spent = iter([5.0, 5.5])
    monkeypatch.setattr(busy, "_own_s", lambda: next(spent))
    stat(second, 100)
    others = Others(frozenset({0, 1}), _began_s=-1.0, _own_s=busy._own_s())
    stat(second, 100 + ticks // 2, guest_ticks=10**6)  # half a second on each core
    assert others.share() == pytest.approx(0.25)  # (1 - 0.5) of 2 seconds


def test_nobody_tells(second: Path) -> None:
    assert Others(frozenset({0})).share() is None
    stat(second, 100)
    assert Others(frozenset({0})).share() == 0.0


def test_processes_that_were_waited_for_are_ones_own() -> None:
    if not Path("/proc/stat").exists():
        pytest.skip("Linux only")
    others = Others()
    before_s = busy._own_s()
    loop = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
    assert busy._own_s() - before_s > 0.25  # the system counts in ticks
    share = others.share()
    assert share is not None
    assert 0.0 <= share <= 1.0


def test_a_busy_machine_and_runs_that_differ_are_told() -> None:
    quiet = str(profiled(busy_share=BUSY, unstable=0))
    assert "note" not in quiet
    assert "note" not in str(profiled(busy_share=None))
    assert "other processes took 41.5 % of these cores" in str(profiled(busy_share=0.415))
    noisy = str(profiled(unstable=2, spread=2.47))
    assert "the runs of 2 forms differ by up to 247 %" in noisy
    assert UNSTABLE < 2.47
