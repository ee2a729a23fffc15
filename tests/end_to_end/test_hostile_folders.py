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
from collections.abc import Callable, Iterator
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
    result = partitioner.compile(folder / "m.onnx", cluster="2xideal", strategy="intra")
    result.save(folder / "onnx.partition")
    torch.manual_seed(0)
    net, example = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU()), (torch.ones(4, 8),)
    torch.export.save(torch.export.export(net, example, strict=False), folder / "net.pt2")
    options: Any = {"cluster": "2xideal", "strategy": "intra"}
    partitioner.compile(folder / "net.pt2", **options).save(folder / "pt2.partition")
    partitioner.compile(net, example, **options).save(folder / "factory.partition")
    arrays = {name: np.ones(result.graph.types[name].shape, np.float32) for name in ("x",)}
    np.savez(folder / "in.npz", **arrays)
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
