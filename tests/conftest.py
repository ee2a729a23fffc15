"""Models for all tests, made once a session and shared by the xdist workers."""

import gc
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

from helpers.plans.search_clock import count_computed_seconds
from helpers.processes.fork_server import ForkServer
from helpers.processes.torch_jobs import RunJob, job_scripts
from partitioner import examples

# Each worker and each rank that it starts has one thread: more of them only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No plan of an earlier run: tests of the cache name a folder of their own.
os.environ["PARTITIONER_CACHE"] = "off"

count_computed_seconds()

Models = Callable[[str], Path]

# Graphs are many small objects: at the default thresholds a tenth of the time is collection.
gc.set_threshold(50_000, 20, 20)

# The same examples each time, however slow the machine is.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes consecutive files, whose tests share models, and steals at the end."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many slow cases most are `sweep`, by a checksum of their names.

    One of three of 16 cases and more stay, and half of 8 and more. Of a test marked `one_in(n)`
    every n-th case runs by default, by the same checksum, and the others are `slow`.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    cases = Counter(_test_name(item) for item in slow)
    for item in slow:
        count = cases[_test_name(item)]
        share = 3 if count >= 16 else 2 if count >= 8 else 1
        if _checksum(item) % share:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
            item.add_marker("sweep")
    _keep_one_in(items)


def _keep_one_in(items: Sequence[pytest.Item]) -> None:
    """Make most cases of tests marked `one_in` slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_apart = any(item.get_closest_marker(name) for name in ("slow", "sweep"))
        if item.get_closest_marker("one_in") and not is_apart:
            tests.setdefault(_test_name(item), []).append(item)
    for cases in tests.values():
        (share,) = cases[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        for position, item in enumerate(sorted(cases, key=_checksum)):
            if position % share:
                item.add_marker("slow")


def _test_name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _checksum(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The session's folder, shared by the workers: the parent of each worker's folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def zoo(model_folder: Path) -> Models:
    """zoo(name) is the file of an example model (`examples.NAMES`) of default sizes."""

    def write(name: str, path: Path) -> None:
        path.write_bytes(examples.build(name).SerializeToString())

    return _cached(model_folder / "zoo", write)


@pytest.fixture(scope="session")
def exported(model_folder: Path) -> Models:
    """exported(name) is the file of a `models.SOURCES` model exported by torch."""

    def write(name: str, path: Path) -> None:
        from helpers.onnx_files import models

        models.export(name, path)

    return _cached(model_folder / "exported", write)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts processes that have imported everything."""
    server = ForkServer()
    yield server
    server.end()


@pytest.fixture(scope="module", autouse=True)
def _forked_workers(request: pytest.FixtureRequest, fork_server: ForkServer) -> Iterator[None]:
    """Runs on ranks begin with a fork, except in the tests of such processes and the commands."""
    folder, name = request.path.parent.name, request.path.name
    with pytest.MonkeyPatch.context() as patch:
        if folder != "cli" and name != "test_processes.py":
            forks = SimpleNamespace(**vars(subprocess) | {"Popen": fork_server.popen})
            patch.setattr("partitioner.backends.launch.subprocess", forks)
        yield


@pytest.fixture(scope="module")
def run_job(fork_server: ForkServer) -> Iterator[RunJob]:
    """run_job(script, job) runs a job of a script in tests/jobs, which is started once a module."""
    with job_scripts(fork_server.popen) as run:
        yield run


def _cached(folder: Path, write: Callable[[str, Path], None]) -> Models:
    """Make `folder/name.onnx` on first request, in one process only."""
    folder.mkdir(exist_ok=True)

    def get(name: str) -> Path:
        path = folder / f"{name}.onnx"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                part = path.with_suffix(".part")
                write(name, part)
                part.replace(path)
        return path

    return get
