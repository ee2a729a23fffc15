"""Time in which functions of the solver are compiled, which no search's clock counts."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numba
import pytest

from partitioner.solver import work
from partitioner.solver.pairwise import jit
from partitioner.solver.work import NOTICE, Compilation, Work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The second that the machine's clock shows."""
    shown = [100.0]
    monkeypatch.setattr(work.time, "monotonic", lambda: shown[0])
    return shown


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    """The compilation of this process, with nothing compiled so far."""
    new = Compilation()
    monkeypatch.setattr(work, "COMPILATION", new)
    return new


def test_the_clock_of_a_search_stands_while_anything_is_compiled(
    clock: list[float], compilation: Compilation
) -> None:
    search = Work.within(30)
    clock[0] += 10
    compilation.begin()
    clock[0] += 50
    assert search.left_s == 20  # also before the compilation has ended
    compilation.begin()  # a function that the first one calls, or one of another thread
    clock[0] += 50
    compilation.end()
    clock[0] += 50
    compilation.end()
    assert (search.left_s, search.late) == (20, False)
    clock[0] += 20
    assert search.late
    assert compilation.seconds == 150


def test_it_is_said_once_to_all_who_wait(compilation: Compilation) -> None:
    said: list[str] = []
    other: list[str] = []
    with compilation.told_to(said.append), compilation.told_to(other.append):
        assert not said
        for _ in range(2):
            compilation.begin()
            compilation.end()
    assert said == other == [NOTICE]
    compilation.begin()
    compilation.end()
    assert said == other == [NOTICE]
    with compilation.told_to(said.append):
        pass
    compilation.begin()
    assert said == [NOTICE]


def test_threads_that_compile_at_once_are_counted_once(
    compilation: Compilation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "time", time)

    def compile_one() -> None:
        compilation.begin()
        time.sleep(0.05)
        compilation.end()

    start = time.monotonic()
    threads = [threading.Thread(target=compile_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.05 <= compilation.seconds <= time.monotonic() - start


#: Compiles the one function of the solver that calls no other, and says how and where.
DRAW = """
from partitioner.solver.work import COMPILATION
from partitioner.solver.pairwise.jit import draw, seeded
with COMPILATION.told_to(print):
    draw(seeded(1), 10)
print(sum(draw.stats.cache_hits.values()), COMPILATION.seconds > 0, draw._cache.cache_path)
"""


def lines(folder: Path) -> list[str]:
    """The output of `DRAW` in a process of its own, by the cache folder of its user."""
    plain = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, "-W", "error", "-c", DRAW]
    environment = {**plain, "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_compiled_functions_are_kept_in_the_users_cache_folder(tmp_path: Path) -> None:
    notice, facts = lines(tmp_path)
    assert notice == NOTICE
    assert facts.startswith(f"0 True {tmp_path}/partitioner/compiled/")
    (again,) = lines(tmp_path)
    assert again == facts.replace("0 True", "1 False")


def kept_at() -> Path:
    """The folder of a function that is compiled from now on."""
    return Path(jit.jit(jit.draw.py_func)._cache.cache_path)


def test_they_are_kept_where_numba_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(tmp_path / "numba"))
    assert kept_at().parent == tmp_path / "numba"


def test_without_a_cache_folder_they_are_kept_beside_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit.config, "CACHE_DIR", "")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_at() == Path(jit.__file__).parent / "__pycache__"


def test_where_nothing_can_be_written_functions_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit._Kept, "_locator_classes", [])
    jit.jit(jit.draw.py_func)
    monkeypatch.undo()
    kept = jit._Cache(jit.draw.py_func)
    monkeypatch.setattr(kept, "_save_overload", full)
    kept.save_overload(None, None)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


def test_functions_of_others_need_no_module() -> None:
    """As those of generated code, which users compile in the same process."""
    made: dict[str, Any] = {}
    exec("def add(a, b): return a + b", made)
    assert made["add"].__module__ is None
    assert numba.njit(made["add"])(1, 2) == 3
