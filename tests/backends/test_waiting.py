"""A rank that does not run is named, and what waits for it goes on when it does."""

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import partitioner
from partitioner import examples
from partitioner.backends import launch, waiting
from partitioner.backends.waiting import Lookout, Steps, process_of
from partitioner.run.local import run_directory

STOPPED = "its process {pid} is stopped; it goes on with `kill -CONT {pid}`"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, str]]:
    """The state and start of processes by number, in place of the machine's."""
    listed: dict[int, tuple[str, str]] = {}
    monkeypatch.setattr(waiting, "process_of", lambda pid: listed.get(pid, ("", "")))
    return listed


def watched(
    states: dict[int, tuple[str, str]], *seen: tuple[float, str]
) -> list[tuple[float, str]]:
    """What is said, and when, of a rank 1 that is in these states at these times."""
    said: list[tuple[float, str]] = []
    clock = Clock()
    lookout = Lookout(
        {0: (10, "a"), 1: (11, "b")}, lambda: 3, lambda line: said.append((clock.now, line)), clock
    )
    states[10] = ("S", "a")
    for clock.now, state in seen:
        states[11] = (state, "b") if state else ("", "")
        lookout.look()
    return said


def test_a_stopped_rank_is_named_once_and_when_it_goes_on(
    states: dict[int, tuple[str, str]],
) -> None:
    said = watched(states, *((float(t), "T") for t in range(0, 40, 2)), (40.0, "R"), (42.0, "R"))
    assert said == [
        (
            8.0,
            f"waiting for rank 1 in step 3: {STOPPED.format(pid=11)}",
        ),
        (40.0, "rank 1 goes on"),
    ]


def test_a_rank_that_reads_its_memory_back_is_named(states: dict[int, tuple[str, str]]) -> None:
    said = watched(states, *((float(t), "D") for t in range(0, 30, 2)))
    ((when, line),) = said
    assert when == 20.0
    assert line == (
        "waiting for rank 1 in step 3: its process 11 is waiting for the disk, as if it were "
        "swapped out"
    )


@pytest.mark.parametrize("states_seen", ["RSDRSDRSDR", "TRTRTRTRTR", "SSSSSSSSSS"])
def test_a_rank_that_runs_now_and_then_is_not(
    states: dict[int, tuple[str, str]], states_seen: str
) -> None:
    assert not watched(states, *((4.0 * t, state) for t, state in enumerate(states_seen)))


def test_a_rank_that_ends_is_left_to_those_who_see_it_end(
    states: dict[int, tuple[str, str]],
) -> None:
    said = watched(states, (0.0, "T"), (10.0, "T"), (12.0, ""), (20.0, ""))
    assert [when for when, _ in said] == [10.0]


def test_another_process_of_the_same_number_is_none_of_ours(
    states: dict[int, tuple[str, str]],
) -> None:
    said: list[str] = []
    clock = Clock()
    lookout = Lookout({1: (11, "b")}, lambda: 1, said.append, clock)
    for clock.now in (0.0, 10.0, 20.0):
        states[11] = ("T", "later")
        lookout.look()
    assert not said


def test_the_first_rank_that_runs_speaks(states: dict[int, tuple[str, str]]) -> None:
    lookout = Lookout({rank: (rank, "a") for rank in range(3)}, lambda: 1, lambda _: None)
    states |= {0: ("T", "a"), 1: ("S", "a"), 2: ("R", "a")}
    lookout.look()
    assert lookout.first_running == 1


def test_the_state_of_this_process() -> None:
    state, start = process_of(os.getpid())
    assert state == "R"
    assert start.isdecimal()
    assert process_of(2**22 + 1) == ("", "")


def test_steps_are_read_by_others(tmp_path: Path) -> None:
    assert Steps.latest(tmp_path) == 0
    for rank, count in enumerate((3, 2)):
        steps = Steps()
        steps.keep_in(tmp_path, rank)
        for _ in range(count - 1):
            steps.begin()
    assert Steps.latest(tmp_path) == 3


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of the next job, whose rank 1 is stopped until that is said."""
    said: list[str] = []

    def lookout_of(folder: Path) -> Lookout | None:
        lookout = waiting.lookout_of(folder)
        if lookout is None:
            return None
        pid, _ = lookout.processes[1]
        os.kill(pid, signal.SIGSTOP)

        def say(line: str) -> None:
            said.append(line.replace(str(pid), "{pid}"))
            os.kill(pid, signal.SIGCONT)

        return replace(lookout, say=say)

    monkeypatch.setattr(launch, "lookout_of", lookout_of)
    monkeypatch.setattr(launch, "LOOK_S", 0.05)
    monkeypatch.setattr(waiting, "_NAMED_AFTER_S", dict.fromkeys(waiting._NAMED_AFTER_S, 0.2))
    return said


def check_run(run: Callable[[], object], said: list[str]) -> None:
    run()
    assert re.fullmatch(rf"waiting for rank 1 in step \d+: {re.escape(STOPPED)}", said[0])
    assert set(said[1:]) <= {"rank 1 goes on"}


@pytest.mark.slow
def test_a_stopped_rank_of_an_onnx_plan(tmp_path: Path, stopped: list[str]) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), tmp_path / "m.onnx")
    program = partitioner.compile(tmp_path / "m.onnx", cluster="2xideal")
    program.save(tmp_path / "m.partition")
    check_run(lambda: run_directory(tmp_path / "m.partition", None, None, requests=3), stopped)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_a_stopped_rank_of_a_module(stopped: list[str], *, training: bool) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    program = partitioner.compile(
        Loss(), torch.ones(4, 8), cluster="2xideal", training=training, strategy="intra"
    )
    check_run(lambda: program.profile(torch.ones(4, 8), steps=2), stopped)
    assert np.isfinite(program.cost)


def test_the_processes_of_a_job_are_listed_whole(tmp_path: Path) -> None:
    assert waiting.lookout_of(tmp_path) is None
    waiting.write_processes(tmp_path, {os.getpid(): 0})
    lookout = waiting.lookout_of(tmp_path)
    assert lookout is not None
    assert lookout.processes == {0: (os.getpid(), process_of(os.getpid())[1])}
    assert [path.name for path in tmp_path.iterdir()] == ["processes.json"]
    json.loads((tmp_path / "processes.json").read_text())
