"""Saved folders as a stranger may hand them over, and special files in place of ours.

No command runs code that a folder holds or names, waits for ever, eats the memory, prints a
traceback, or ends well with other numbers.
"""

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import partitioner
from partitioner import examples
from partitioner.cli.main import main

#: Seconds that a command may take; a plan of this size takes about one.
LIMIT_S = 60
#: Bytes that a command may take beyond what this process has.
MEMORY = 3 * 2**30
PLANTED = """
import os, pathlib
pathlib.Path(os.environ["MARKER"]).write_text(__name__)
def build():
    import torch
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""

Tamper = Callable[[Path], object]


@dataclass(frozen=True)
class Ended:
    """How a command ended: -1 for one that took too long."""

    code: int
    text: str
    seconds: float


def command(argv: list[str], cwd: Path) -> Ended:
    """Run a command in a process of its own, with limits."""
    began, (reader, writer) = time.monotonic(), os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os._exit(_run(argv, cwd, writer))
    os.close(writer)
    text, end = b"", began + LIMIT_S
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        block = os.read(reader, 2**16)
        text += block
        if not block:
            break
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        return Ended(-1, text.decode(), time.monotonic() - began)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    return Ended(os.waitstatus_to_exitcode(status), text.decode(errors="replace"), seconds)


def _run(argv: list[str], cwd: Path, writer: int) -> int:
    try:
        os.setpgid(0, 0)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
        os.chdir(cwd)
        out = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(out):
            code = main(argv)
        os.write(writer, out.getvalue()[:4000].encode())
        return code
    except BaseException as error:  # noqa: BLE001 - shown to the parent
        os.write(writer, f"Traceback: {type(error).__name__}: {error}"[:4000].encode())
        return 99


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of an ONNX model, a .pt2 file and a factory, with inputs, and a planted module."""
    folder = tmp_path_factory.mktemp("hostile")
    model = examples.build("mlp", layers=2, hidden=48, batch=4)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    torch.manual_seed(0)
    net, example = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU()), (torch.ones(4, 8),)
    torch.export.save(torch.export.export(net, example, strict=False), folder / "net.pt2")
    options: Any = {"cluster": "2xideal", "strategy": "intra"}
    partitioner.compile(folder / "m.onnx", **options).save(folder / "onnx.partition")
    partitioner.compile(folder / "net.pt2", **options).save(folder / "pt2.partition")
    partitioner.compile(net, example, **options).save(folder / "factory.partition")
    for kind in ("onnx", "pt2", "factory"):
        outputs = str(folder / f"{kind}.npz")
        assert main(["run", str(folder / f"{kind}.partition"), "--outputs", outputs]) == 0
    return folder


def changed(name: str, change: Callable[[Any], object]) -> Tamper:
    """Change the data of a JSON file in place."""

    def tamper(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return tamper


def flipped(name: str, at: float, bit: int = 3) -> Tamper:
    """Flip a bit at a share of a file."""

    def tamper(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= 1 << bit
        (folder / name).write_bytes(data)

    return tamper


def cut(name: str, share: float) -> Tamper:
    """Cut a file off."""

    def tamper(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, int(size * share))

    return tamper


def special(name: str, kind: str) -> Tamper:
    """Put something in the place of a file that is no plain file."""

    def tamper(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "sparse":
            path.touch()
            os.truncate(path, 2**40)
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            path.symlink_to(kind)

    return tamper


def plant(*names: str) -> Tamper:
    """Put Python files in a folder and beside it, that leave a mark when they are imported."""

    def tamper(folder: Path) -> None:
        for name in names:
            (folder / name).write_text(PLANTED)
            (folder.parent / name).write_text(PLANTED)

    return tamper


def both(*tampers: Tamper) -> Tamper:
    def tamper(folder: Path) -> None:
        for one in tampers:
            one(folder)

    return tamper


def node(key: str, value: object) -> Tamper:
    """Change a field of the first node of the stored graph."""
    return changed("graph.json", lambda data: data["graph"]["nodes"][0].update({key: value}))


def header(change: Callable[[Any], object]) -> Tamper:
    """Change the header of the first rank's ONNX file."""

    def tamper(folder: Path) -> None:
        path = folder / "rank0.onnx"
        model = onnx.load_from_string(path.read_bytes())
        entry = next(e for e in model.metadata_props if e.key == "partitioner.program")
        data = json.loads(entry.value)
        change(data)
        entry.value = json.dumps(data)
        path.write_bytes(model.SerializeToString())

    return tamper


def weights_elsewhere(place: str) -> Tamper:
    """Let the first rank's weights lie elsewhere."""

    def tamper(folder: Path) -> None:
        path = folder / "rank0.onnx"
        model = onnx.load_from_string(path.read_bytes())
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = place
        path.write_bytes(model.SerializeToString())

    return tamper


MODULES = ("planted.py", "torch.py", "json.py", "numpy.py", "onnxruntime.py", "sitecustomize.py")
LOOK = (["show", "p", "--all"], ["explain", "p"], ["report", "p"], ["diff", "p", "p"])
DRAW = ["draw", "p", "--dot", "d.dot", "--timeline", "t.json"]
RUN = ["run", "p", "--outputs", "o.npz"]
VERIFY = ["verify", "p"]

FACTORY = {"kind": "module", "factory": "planted:build", "file": "", "folder": ".", "call": "x"}
FACTORY |= {"training": False, "optimizer": "adamw", "at_rest": "", "loads": []}  # type: ignore[dict-item]

#: Ways to spoil a folder: the plan, the tampering, the commands that are tried, and whether each of
#: them may still succeed.
TAMPERED: dict[str, tuple[str, Tamper, tuple[list[str], ...]]] = {
    "planted module": ("factory", both(
        plant(*MODULES), changed("request.json", lambda d: d.update(FACTORY))
    ), (*LOOK, DRAW, RUN, VERIFY)),
    "planted module of an ONNX plan": ("onnx", both(
        plant(*MODULES), changed("request.json", lambda d: d.update(FACTORY))
    ), (*LOOK, DRAW, RUN, VERIFY)),
    "planted, no graph": ("factory", both(
        plant(*MODULES), changed("request.json", lambda d: d.update(FACTORY)),
        lambda folder: (folder / "graph.json").unlink(),
    ), (*LOOK, DRAW, RUN, VERIFY)),
    "factory is a shell command": ("factory", changed(
        "request.json", lambda d: d.update({**FACTORY, "factory": "a;touch MARKER;b:c"})
    ), (VERIFY, LOOK[0])),
    "model is a device": ("onnx", changed(
        "request.json", lambda d: d.update(model="/dev/zero")
    ), (VERIFY, *LOOK)),
    "file is a device": ("pt2", changed(
        "request.json", lambda d: d.update(file="/dev/zero")
    ), (VERIFY, *LOOK)),
    "link to write through": ("onnx", special("report.html", "../outside"), (LOOK[2],)),
    "plan is a list": ("onnx", changed("plan.json", lambda d: d.update(nodes=[])), LOOK),
    "graph is nothing": ("onnx", changed("graph.json", lambda d: d.update(graph=None)), LOOK),
    "nodes without inputs": ("onnx", node("inputs", []), (*LOOK, RUN)),
    "an attribute that is a bomb": ("onnx", node("attrs", {"a": {"array": ["int64", [2**40], ""]}}),
        LOOK),
    "nested branches": ("onnx", node("attrs", {"a": {"graph": {"name": "x"}}}), LOOK),
    "huge dims": ("onnx", changed(
        "graph.json",
        lambda d: d["graph"].update(types={n: ["float32", [2**62]] for n in d["graph"]["types"]}),
    ), LOOK),
    "ranks without end": ("onnx", header(lambda d: d.update(ranks=10**9)), (RUN, VERIFY)),
    "another whole input": ("onnx", header(
        lambda d: d["whole_inputs"].update(x=["float32", [2**40]])
    ), (RUN, VERIFY)),
    "weights in a device": ("onnx", weights_elsewhere("/dev/zero"), (RUN, VERIFY)),
    "weights elsewhere": ("onnx", weights_elsewhere("../../m.onnx"), (RUN, VERIFY)),
    "no weights": ("onnx", lambda folder: (folder / "rank1.weights").unlink(), (RUN, VERIFY)),
    "weights of the other rank": ("onnx", lambda folder: shutil.copy(
        folder / "rank0.weights", folder / "rank1.weights"
    ), (RUN, VERIFY)),
    **{
        f"flipped {name} at {at}": (kind, flipped(name, at), (RUN, VERIFY))
        for kind, names in {
            "onnx": ("rank0.weights", "rank1.onnx", "graph.json", "plan.json"),
            "pt2": ("rank0.pt2", "rank1.pt2", "inputs.npz"),
        }.items()
        for name in names
        for at in (0.31, 0.64)
    },
    **{
        f"cut {name} to {share}": (kind, cut(name, share), (RUN, VERIFY, LOOK[0]))
        for kind, names in {
            "onnx": ("rank0.weights", "rank0.onnx", "graph.json"),
            "pt2": ("rank0.pt2", "inputs.npz"),
        }.items()
        for name in names
        for share in (0.0, 0.7)
    },
    **{
        f"{name} is {what}": (kind, special(name, what), (*LOOK[:1], RUN, VERIFY))
        for kind, names in {
            "onnx": ("plan.json", "summary.json", "request.json", "graph.json", "rank0.onnx",
                     "rank1.weights"),
            "pt2": ("rank1.pt2", "inputs.npz"),
        }.items()
        for name in names
        for what in ("fifo", "/dev/zero", "sparse")
    },
    "measured.json is a FIFO": ("onnx", special("measured.json", "fifo"), LOOK),
    "graph.json is the kernel's log": ("onnx", special("graph.json", "/proc/kmsg"), (LOOK[0],)),
    "a loop of links": ("onnx", special("plan.json", "loop"), (LOOK[0], RUN)),
    "a folder": ("onnx", special("graph.json", "folder"), (LOOK[0], RUN)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TAMPERED)
def test_a_folder_of_a_stranger(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, tamper, commands = TAMPERED[name]
    marker = tmp_path / "MARKER"
    monkeypatch.setenv("MARKER", str(marker))
    shutil.copytree(home / f"{kind}.partition", tmp_path / "p")
    (tmp_path / "outside").write_text("mine")
    tamper(tmp_path / "p")
    for argv in commands:
        ended = command(argv, tmp_path)
        assert not marker.exists(), (argv, marker.read_text())
        assert (tmp_path / "outside").read_text() == "mine"
        assert ended.code in (0, 1), (argv, ended)
        assert "Traceback" not in ended.text, (argv, ended)
        if ended.code:
            assert ended.text.count("\n") == 1, (argv, ended)
        elif argv is RUN:
            same_outputs(home / f"{kind}.npz", tmp_path / "o.npz")


def same_outputs(expected: Path, written: Path) -> None:
    with np.load(expected) as whole, np.load(written) as ours:
        assert set(whole.files) == set(ours.files)
        for output in whole.files:
            np.testing.assert_array_equal(whole[output], ours[output])
