"""What stops a command from outside is one line: interrupts, streams, limits of the system."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from partitioner import examples
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import run_job
from partitioner.cli.main import main
from partitioner.cli.process import noting_interrupts, with_streams

#: Runs a command that says on the descriptor of the first argument when it begins to import.
READY = """
import os, sys
from partitioner.cli import main as command
run, ready = command._run, int(sys.argv.pop(1))
def begin(args):
    os.close(ready)
    return run(args)
command._run = begin
sys.exit(command.main())
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.onnx and m.partition."""
    folder = tmp_path_factory.mktemp("process")
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), folder / "m.onnx")
    options = ["--cluster", "2xideal", "-q", "-o", str(folder / "m.partition")]
    assert main([str(folder / "m.onnx"), *options]) == 0
    return folder


PROFILE = ("--profile", "p.sqlite")
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "schedule": ["schedule", "1f1b", "--stages", "2", "--micro-batches", "2"],
    "show": ["show", "m.partition"],
    "explain": ["explain", "m.partition"],
    "diff": ["diff", "m.partition", "m.partition"],
    "report": ["report", "m.partition", "-o", "r.html"],
    "draw": ["draw", "m.partition", "--dot", "g.dot"],
    "verify": ["verify", "m.partition"],
    "run": ["run", "m.partition"],
    "plan": ["m.onnx", "--devices", "2", "-q", "-o", "p.partition", "--force"],
    "dump": ["m.onnx", "--devices", "2", "--strategy", "intra", "--dump-problem", "p.json"],
    "sweep": ["sweep", "m.onnx", "--devices", "1,2", "-q"],
    "profile": [*("profile", "m.onnx", "--devices", "1", "--time-limit", "1"), *PROFILE],
}
QUICK = ("version", "schedule")
SILENT = ("plan", "draw")


def names(quick: tuple[str, ...], mark: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(n, marks=[] if n in quick else [mark]) for n in COMMANDS]


# Interrupts --------------------------------------------------------------------------------------


def interrupted_at(home: Path, name: str, moment_s: float) -> tuple[int, str]:
    """The exit code and stderr of a command that is interrupted after so many seconds."""
    read, ready = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", READY, str(ready), *COMMANDS[name]],
        cwd=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(ready,),
    )
    os.close(ready)
    try:
        assert os.read(read, 1) == b""  # it was closed
        time.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        os.close(read)
        process.kill()
        process.wait()
    return process.returncode, said


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        pytest.param("schedule", 2, id="schedule"),
        pytest.param("plan", 8, marks=pytest.mark.slow, id="plan"),
        *(
            pytest.param(name, 20, marks=[pytest.mark.sweep, pytest.mark.timeout(600)])
            for name in COMMANDS
        ),
    ],
)
def test_an_interrupt_at_any_moment_is_one_line(home: Path, name: str, moments: int) -> None:
    code, _ = 130, ""
    for number in range(moments):
        moment_s = 2.0 * number / moments if moments > 2 else 0.1 * number
        code, said = interrupted_at(home, name, moment_s)
        lines = [line for line in said.splitlines() if not line.endswith(" ...")]
        if code == 130:
            assert lines == ["partition: interrupted"], moment_s
        else:  # it was over, or nearly
            assert code in (0, -signal.SIGINT), (moment_s, said)
            assert "Traceback" not in said, moment_s


@pytest.fixture
def own_handlers() -> Iterator[None]:
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_waits_for_an_import_and_a_second_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    lines = ["import os, signal", *["os.kill(os.getpid(), signal.SIGINT)"] * count]
    (tmp_path / "takes_interrupts.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "takes_interrupts", raising=False)

    def work() -> None:
        __import__("takes_interrupts")
        time.sleep(20)

    with noting_interrupts(), pytest.raises(KeyboardInterrupt):
        work()
    assert ("takes_interrupts" in sys.modules) == (count == 1)


@pytest.mark.usefixtures("own_handlers")
def test_an_interrupt_that_python_drops_is_sent_again() -> None:
    with noting_interrupts() as interrupts:
        interrupts.dropped(SimpleNamespace(exc_value=KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            time.sleep(20)
    assert interrupts.came


@pytest.mark.usefixtures("own_handlers")
def test_an_interrupt_that_a_library_turns_into_an_error_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import") from None
        return 0

    monkeypatch.setattr("partitioner.cli.main._run", run)
    assert main() == 130
    assert capsys.readouterr().err == "partition: interrupted\n"


@pytest.mark.usefixtures("own_handlers")
def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of `nohup`, and of jobs in the background
    with noting_interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts.came
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# Streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(QUICK, pytest.mark.slow))
@pytest.mark.parametrize("kind", ["closed", "full"])
def test_a_stdout_that_cannot_be_written_is_one_line(home: Path, name: str, kind: str) -> None:
    run = 'exec "$@" >&-' if kind == "closed" else 'exec "$@" >/dev/full'
    done = subprocess.run(
        ["sh", "-c", run, "sh", sys.executable, "-m", "partitioner", *COMMANDS[name]],
        cwd=home,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    reason = os.strerror(errno.EBADF if kind == "closed" else errno.ENOSPC)
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    prints = name not in SILENT
    assert lines == [f"partition: the output cannot be written: {reason}"] * prints
    assert done.returncode == int(prints)


def test_files_are_not_taken_for_streams_that_are_closed(home: Path) -> None:
    run = 'exec "$@" >&- 2>&- <&-'
    done = subprocess.run(
        ["sh", "-c", run, "sh", sys.executable, "-m", "partitioner", *COMMANDS["draw"]],
        cwd=home,
        check=False,
    )
    assert done.returncode == 0  # it prints nothing
    text = (home / "g.dot").read_text()
    assert text.startswith("digraph")
    assert text.endswith("}\n")


@pytest.mark.parametrize("name", names(QUICK, pytest.mark.slow))
def test_a_reader_that_has_enough_ends_a_command_silently(home: Path, name: str) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" | true', "sh", sys.executable, "-m", "partitioner", *COMMANDS[name]],
        cwd=home,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if not line.endswith(" ...")] == []


# Limits ------------------------------------------------------------------------------------------


def too_many(*_: object) -> int:
    cause = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "libtorch.so")
    raise ImportError("torch cannot be loaded") from cause


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (too_many, r"partition: Too many open files: \d+ are allowed; raise it with `ulimit -n`\n"),
        (lambda: int(bytearray(2**62)[0]), r"partition: out of memory\n"),
    ],
)
def test_a_limit_of_the_system_is_one_line(
    error: object, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_streams(error) == 1  # type: ignore[arg-type]
    assert re.fullmatch(line, capsys.readouterr().err)


def test_errors_of_ours_keep_their_traceback() -> None:
    def wrong() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with_streams(wrong)
    with pytest.raises(FileNotFoundError):  # no file is a stream
        with_streams(lambda: len(Path("none").read_bytes()))


def test_ranks_that_could_not_open_their_connections_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(
        BackendError,
        match=r"^2 ranks need some 56 open files each, and 20 are allowed: raise the limit with "
        r"`ulimit -n`$",
    ):
        run_job(tmp_path, 2, {"runner": "partitioner.backends.onnx.rank"})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_twenty_open_files_do_or_are_one_line(home: Path, name: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", sys.executable, "-m", "partitioner"]
        + COMMANDS[name],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    if done.returncode:
        (line,) = (one for one in done.stderr.splitlines() if not one.endswith(" ..."))
        assert "open files" in line
    assert (done.returncode == 1) is (name == "run")


# Help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["help"], "partition [OPTIONS] COMMAND"),
        (["help", "help"], "partition [OPTIONS] COMMAND"),
        (["help", "show"], "partition show [OPTIONS]"),
        (["help", "compile"], "partition plan [OPTIONS]"),
        (["compile", "--help"], "partition plan [OPTIONS]"),
    ],
)
def test_help_answers(arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert f"Usage: {usage}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["help", "shwo"], "unknown command 'shwo' (there are plan, "),
        (["help", "shwo"], "; did you mean 'show'?"),
        (
            ["compile", "m.onnx"],
            "; did you mean 'partition plan MODEL', for short 'partition MODEL'?",
        ),
    ],
)
def test_a_command_that_is_not_there_says_which_is(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_a_model_called_help_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "help").write_bytes(b"no model")
    assert main(["help"]) == 1
    assert "help" in capsys.readouterr().err


def test_a_plan_without_devices_says_how_to_split(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    line = "partition: planning for one device: pass --devices N to split over N of them\n"
    options = ["m.onnx", "-o", "one.partition", "--force"]
    assert main(options) == 0
    assert line in capsys.readouterr().err
    for more in (["--devices", "1"], ["--cluster", "1xideal"], ["-q"]):
        assert main([*options, *more]) == 0
        assert line not in capsys.readouterr().err
