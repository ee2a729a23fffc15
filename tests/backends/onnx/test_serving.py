"""Ranks of ONNX models as processes that stay up between requests."""

import contextlib
import gc
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import partitioner
from helpers.drawn import drawn_plans
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends import launch, waiting
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.serving import Session

PLANS = {
    "cut": {"strategy": "intra", "devices": 2},
    "placed": {"strategy": "inter", "devices": 3},
    "copies": {"strategy": "copies", "devices": 2},
    "micro-batches": {"devices": 2, "parallel": "pp", "micro_batches": 2, "objective": "latency"},
}


def planned(name: str) -> Compiled:
    model = drawn_plans.mlp(layers=4)
    return partitioner.compile(model, **PLANS[name])  # type: ignore[call-overload, no-any-return]


def drawn(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32)}


def processes(session: Session) -> dict[int, int]:
    """The process of each rank."""
    listed = json.loads((session._ranks.folder / "processes.json").read_text())
    return {rank: pid for rank, (pid, _) in listed}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("name", PLANS)
def test_requests_have_the_results_of_a_run(name: str) -> None:
    with planned(name) as result:
        wanted = [result.run(drawn(seed)) for seed in range(7)]
        with result.session() as session:
            pids = processes(session).values()
            for seed in (0, 1):
                assert same(session.run(drawn(seed)), wanted[seed])
            together = session.run_all([drawn(seed) for seed in range(7)])
            assert all(map(same, together, wanted))
            assert session.run_all([]) == []
            assert all(map(is_alive, pids))
        assert not any(map(is_alive, pids))
        with pytest.raises(BackendError, match="the session is closed"):
            session.run(drawn(0))


def test_levels_of_optimization_are_those_of_a_run() -> None:
    with planned("cut") as result, result.session(optimization="disable") as session:
        assert same(session.run(drawn(1)), result.run(drawn(1), optimization="disable"))


def test_whole_copies_take_turns() -> None:
    with planned("copies") as result, result.session() as session:
        for seed in range(3):
            session.run(drawn(seed))
        steps = (session._ranks.folder / "steps").read_bytes()
    counts = [int.from_bytes(steps[at : at + 8], "little") for at in (0, 8)]
    assert counts == [3, 2]  # a step has begun on each before its first request


def test_wrong_inputs_leave_the_session_as_it_is() -> None:
    with planned("cut") as result, result.session() as session:
        with pytest.raises(BackendError, match=r"input 'x' .* is missing"):
            session.run({})
        with pytest.raises(BackendError, match="has shape"):
            session.run_all([drawn(0), {"x": np.zeros((4, 7), np.float32)}])
        for wrong in (None, drawn(0)["x"], [drawn(0)]):
            with pytest.raises(BackendError, match=r"not a dict of arrays by name \('x'\)"):
                session.run(wrong)  # type: ignore[arg-type]
        foreign = {"x": drawn(0)["x"].astype(">f4")}
        with pytest.raises(BackendError, match="elements in another machine's order of bytes"):
            session.run(foreign)
        assert session.is_open
        assert same(session.run(drawn(0)), result.run(drawn(0)))


def test_requests_may_come_from_a_generator() -> None:
    with planned("cut") as result, result.session() as session:
        found = session.run_all(drawn(seed) for seed in range(3))
        assert all(map(same, found, [result.run(drawn(seed)) for seed in range(3)]))


def test_a_signal_handler_closes_the_session_that_its_thread_runs() -> None:
    with planned("cut") as result, result.session() as session:
        pids = processes(session)
        os.kill(pids[1], signal.SIGSTOP)  # so that the request waits
        said: list[str] = []

        def stop(*_: object) -> None:
            try:
                session.run(drawn(0))
            except BackendError as error:
                said.append(str(error))
            session.close()

        before = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(BackendError, match="was closed while a request ran"):
                session.run(drawn(0))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert said == ["a signal handler cannot run a request while its thread does"]
        while any(waiting.process_of(pid)[0] for pid in pids.values()):
            time.sleep(0.05)
        with pytest.raises(BackendError, match="the session is closed"):
            session.run(drawn(0))


def test_a_stopped_rank_is_named_though_it_reads_no_large_inputs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "LOOK_S", 0.1)
    monkeypatch.setitem(waiting._NAMED_AFTER_S, "stopped", 0.2)
    model = examples.build("mlp", layers=1, hidden=512, batch=2048)
    x = np.ones((2048, 512), np.float32)
    with partitioner.compile(model, devices=2, strategy="intra") as result:
        (name,) = result.graph.inputs
        with result.session() as session:
            pid = processes(session)[0]
            os.kill(pid, signal.SIGSTOP)
            goes_on = threading.Timer(3.0, os.kill, (pid, signal.SIGCONT))
            goes_on.start()
            found = session.run({name: x})
            goes_on.join()
        assert same(found, result.run({name: x}))
    assert f"its process {pid} is stopped" in capfd.readouterr().err


def test_a_rank_that_is_killed_ends_the_session() -> None:
    with planned("cut") as result, result.session() as session:
        pids = processes(session)
        os.kill(pids[1], signal.SIGKILL)
        line = r"rank 1 was killed by signal 9 \(SIGKILL\)"
        with pytest.raises(BackendError, match=line):
            session.run(drawn(0))
        assert not any(map(is_alive, pids.values()))
        with pytest.raises(BackendError, match=f"the session has ended: {line}"):
            session.run(drawn(0))
        assert not session.is_open


def test_the_end_of_ranks_is_told_though_their_folder_is_gone() -> None:
    with planned("cut") as result, result.session() as session:
        pids = processes(session)
        shutil.rmtree(session._ranks.folder)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(BackendError, match=r"what they said is lost: .* was removed"):
            session.run(drawn(0))


def test_a_forked_process_leaves_the_session_alone() -> None:
    with planned("cut") as result, result.session() as session:
        child = os.fork()
        if not child:
            said = 1
            with contextlib.suppress(BaseException):
                session.close()
                try:
                    session.run(drawn(0))
                except BackendError as error:
                    said = 0 if "is of another process" in str(error) else 2
            os._exit(said)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(session.run(drawn(0)), result.run(drawn(0)))


def test_a_session_keeps_the_files_of_its_result() -> None:
    session = planned("cut").session()
    gc.collect()
    with session:
        assert all(map(Path.is_file, (session.folder / f"rank{rank}.onnx" for rank in (0, 1))))


def test_a_file_that_does_not_load_is_named(tmp_path: Path) -> None:
    with planned("cut") as result:
        result.save(tmp_path / "m.partition")
        (tmp_path / "m.partition" / "rank1.onnx").write_bytes(b"no model")
        with pytest.raises(BackendError, match=r"rank1\.onnx"):
            Session(tmp_path / "m.partition")


def test_a_module_says_what_stays_up() -> None:
    program = partitioner.compile(torch.nn.Linear(8, 8), torch.randn(4, 8), devices=2)
    with pytest.raises(BackendError, match=r"under torchrun, as program\.module\(\)"):
        program.session()
