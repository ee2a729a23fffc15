"""Ranks as real processes: the same results, and nothing left when something goes wrong."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers.onnx_files.rank_files import save_edited
from helpers.plans import rank_programs as hand
from helpers.plans.rank_cases import CASES, check
from helpers.processes.torch_jobs import RunJob, free_port, rank_environment
from partitioner.backends import launch, process_group
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit
from partitioner.backends.onnx.local import run_local

pytestmark = pytest.mark.timeout(240)


def workers() -> dict[int, list[str]]:
    """Command lines of living worker processes, ranks included, by process id, oldest first."""
    processes: list[tuple[int, int, list[str]]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            state, start = fields[0], int(fields[19])
            if "partitioner.backends.worker" in words and state != "Z":
                processes.append((start, int(entry.name), words))
    return {pid: words for _, pid, words in sorted(processes)}


def still_there(private: Path, patience_s: float = 30) -> list[list[str]]:
    """Workers of a test that live on; killed ones get a few seconds, as the machine may be busy."""
    until = time.monotonic() + patience_s
    while True:
        left = [w for w in workers().values() if any(str(private) in word for word in w)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for rank files; afterwards no worker and no temporary folder may be left."""
    private = tmp_path / "tmp"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    yield tmp_path
    assert still_there(private) == []
    assert list(private.iterdir()) == []


def mine(folder: Path) -> list[int]:
    """Process ids of the worker of a test, and of its ranks, oldest first."""
    return [p for p, words in workers().items() if any(str(folder) in word for word in words)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_over_gloo(run_job: RunJob, case: str) -> None:
    run_job("processes/gloo_jobs.py", case)


@pytest.mark.slow
def test_run_local_measures_several_requests(folder: Path) -> None:
    case = hand.pipeline()
    emit(case.programs, case.graph, folder)
    done = run_local(folder, case.inputs, requests=3)
    check(case, done.outputs)
    assert 0 < done.seconds < 100


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"input 'x' \(float32\[4,6\]\) is missing; given: none"),
        ({"x": hand.random(4, 5)}, r"input 'x' has shape \(4, 5\), not \(4, 6\)"),
        (
            {"x": hand.random(4, 6, dtype="float64")},
            "input 'x' holds float64 elements, not float32",
        ),
        ({"x": hand.random(4, 6), "z": hand.random(1)}, "input 'z' is not one of the model's: 'x'"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_starts(
    folder: Path, inputs: dict[str, np.ndarray], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = hand.tensor_parallel()
    emit(case.programs, case.graph, folder)
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(BackendError, match=message):
        run_local(folder, inputs)


@pytest.mark.slow
def test_a_rank_that_raises_stops_all_and_is_named(folder: Path) -> None:
    case = hand.tensor_parallel()
    emit(case.programs, case.graph, folder)
    path = folder / "rank1.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    save_edited(model, path)
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"^rank 1: ONNX Runtime: .*NoSuchOperator"):
        run_local(folder, case.inputs)
    assert time.monotonic() - start < 100


def endless(folder: Path) -> dict[str, np.ndarray]:
    """Rank files that take minutes to run."""
    case = hand.tensor_parallel()
    emit(case.programs, case.graph, folder)
    return case.inputs


def when_running(folder: Path, act: Callable[[list[int]], None]) -> threading.Thread:
    """Call `act` with the worker's and the ranks' process ids once both ranks are there."""

    def wait() -> None:
        for _ in range(2000):
            pids = mine(folder / "tmp")
            if len(pids) == 3:
                time.sleep(0.5)
                act(pids)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_killed_rank_stops_all_and_is_named(folder: Path) -> None:
    inputs = endless(folder)
    killed: list[float] = []

    def kill(pids: list[int]) -> None:
        killed.append(time.monotonic())
        os.kill(pids[2], signal.SIGKILL)

    thread = when_running(folder, kill)
    with pytest.raises(BackendError, match=r"^rank 1 was killed by signal 9 \(SIGKILL\)$"):
        run_local(folder, inputs, requests=1_000_000)
    thread.join()
    assert time.monotonic() - killed[0] < 30


@pytest.mark.slow
def test_a_killed_watcher_takes_its_ranks_along(folder: Path) -> None:
    inputs = endless(folder)
    thread = when_running(folder, lambda pids: os.kill(pids[0], signal.SIGKILL))
    with pytest.raises(BackendError, match="the process that watches the ranks ended with code -9"):
        run_local(folder, inputs, requests=1_000_000)
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_caller_leaves_nothing(folder: Path, how: signal.Signals) -> None:
    inputs = endless(folder)
    np.savez(folder / "in.npz", x=inputs["x"])
    code = (
        "import signal, sys, numpy as np; from pathlib import Path\n"
        # a shell starts its background jobs, and CI may start the tests, with SIGINT ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from partitioner.backends.onnx.local import run_local\n"
        "run_local(Path(sys.argv[1]), dict(np.load(sys.argv[1] + '/in.npz')), 1_000_000)\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )
    thread = when_running(folder, lambda _: caller.send_signal(how))
    try:
        assert caller.wait(150) != 0
    finally:
        caller.kill()
    thread.join()
    for _ in range(600):  # after SIGTERM the worker notices that its caller is gone
        if not mine(folder / "tmp") and not list((folder / "tmp").iterdir()):
            break
        time.sleep(0.05)


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "partitioner.run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_torchrun(tmp_path: Path) -> None:
    case = hand.tensor_parallel()
    folder = tmp_path / "plan"
    folder.mkdir()
    emit(case.programs, case.graph, folder)
    np.savez(tmp_path / "in.npz", **case.inputs)
    paths = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    done = torchrun(2, str(folder), *paths, "--requests", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "measured on this machine: 3 requests in" in done.stdout
    with np.load(tmp_path / "out.npz") as outputs:
        check(case, dict(outputs))


@pytest.mark.slow
def test_torchrun_with_a_wrong_input_says_so_and_stops(tmp_path: Path) -> None:
    case = hand.tensor_parallel()
    emit(case.programs, case.graph, tmp_path)
    np.savez(tmp_path / "in.npz", x=hand.random(2, 2))
    done = torchrun(2, str(tmp_path), "--inputs", str(tmp_path / "in.npz"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    where = f"rank 0: inputs {tmp_path / 'in.npz'}: "
    assert said == [f"{where}input 'x' has shape (2, 2), not (4, 6)"]  # rank 1 does not echo it


def start_rank(folder: Path, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """A rank of two on a host of its own, with a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "partitioner.run", str(folder), *arguments],
        env=rank_environment(rank, 2, port),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two_hosts(tmp_path: Path, case: hand.Case) -> list[Path]:
    """Folders of two hosts, each with the file of its own rank only."""
    folders = [tmp_path / f"host{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        emit(case.programs, case.graph, folder)
        for file in folder.glob(f"rank{1 - rank}.*"):
            file.unlink()
    return folders


@pytest.mark.slow
def test_hosts_need_the_files_of_their_own_ranks_only(tmp_path: Path) -> None:
    case, port = hand.tensor_parallel(), free_port()
    folders = two_hosts(tmp_path, case)
    np.savez(tmp_path / "in.npz", **case.inputs)
    paths = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    ranks = [start_rank(folder, rank, port, *paths) for rank, folder in enumerate(folders)]
    said = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    with np.load(tmp_path / "out.npz") as outputs:
        check(case, dict(outputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), r"rank 1: .*host1/rank1\.onnx: .*No such file"),
        (lambda file: file.write_bytes(b"x"), r"rank 1: .*host1/rank1\.onnx: "),
    ],
    ids=["missing", "broken"],
)
def test_a_rank_that_cannot_start_ends_all(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    case, port = hand.tensor_parallel(), free_port()
    folders = two_hosts(tmp_path, case)
    spoil(folders[1] / "rank1.onnx")
    np.savez(tmp_path / "in.npz", **case.inputs)
    paths = ["--inputs", str(tmp_path / "in.npz")]
    ranks = [start_rank(folder, rank, port, *paths) for rank, folder in enumerate(folders)]
    for rank in ranks:
        _, error = rank.communicate(timeout=60)
        assert rank.returncode == 1
        (line,) = (line for line in error.splitlines() if line.startswith("rank "))
        assert re.match(message, line)


def test_a_rank_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "START_S", 0.5)
    with pytest.raises(BackendError, match=r"^rank 1 has not come to 'here' in 0\.5 s$"):
        process_group.Start.of_environment()
