"""Fuzzing of the command line: mutated files go through `partition` and `partition verify`.

Samples run one by one in a process of their own, whose memory and CPU seconds are watched from
outside: a crash or a hang there is a fault of that sample, and the next process goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

import partitioner
from helpers.onnx_files.mutated_models import mutate_bytes, mutate_model, mutate_text, small_models
from partitioner import examples
from partitioner.cli.main import main

#: Most CPU seconds of a sample, and bytes that it may take in memory or write.
MOST_S, MOST_BYTES = 10, 2**31
#: A sample that waits uses no CPU seconds: this is the most on the wall clock.
MOST_WALL_S = 120
#: Address space of a sample beyond that of an idle process: protects the machine.
_ROOM_BYTES = 6 * 2**30
#: Samples of one process.
_TURNS = 500
#: The models of the zoo that are small: mutations of the others mostly meet weights.
_ZOO = ("tiny", "mlp", "llama")

#: What a sample may end as; any other end is a fault.
GOOD = ("equal", "no reference", "other shapes", "refused")


@dataclass(frozen=True)
class Sample:
    """Files to write, and the command lines to run in their folder, one after the other.

    A command that ends with another code than 0 is the last one.
    """

    files: Mapping[str, bytes]
    commands: Sequence[Sequence[str]]


@dataclass
class Table:
    """How samples ended: a count by end, and the number and text of each fault."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, number: int, end: str, text: str) -> None:
        """Count a sample."""
        self.counts[end] += 1
        if end not in GOOD:
            self.faults[number] = end, text

    def __str__(self) -> str:
        rows = [f"{self.counts.total():8,} samples"]
        ends = (*GOOD, *(end for end in _FAULTS), *sorted({*self.counts} - {*GOOD, *_FAULTS}))
        return "\n".join([*rows, *(f"{self.counts[end]:8,} {end}" for end in ends)])


#: The faults that the table always lists.
_FAULTS = ("traceback", "several lines", "wrong", "ranks fail", "hang", "memory", "disk", "crash")


@cache
def base_models() -> tuple[ModelProto, ...]:
    """Small models, and one node of each operator: its operands all inputs, and the first alone."""
    smallest: dict[tuple[str, str], ModelProto] = {}
    for test in load_model_tests(kind="node"):
        nodes = test.model.graph.node if test.model is not None else ()
        is_preview = "preview" in "".join(node.domain for node in nodes)
        if len(nodes) != 1 or not test.data_sets or is_preview:
            continue
        key, model = (nodes[0].domain, nodes[0].op_type), _in_reach(test.model)
        if key not in smallest or model.ByteSize() < smallest[key].ByteSize():
            smallest[key] = model
            smallest[(*key, "weights")] = _with_weights(model, test.data_sets[0][0])
    operators = [smallest[key] for key in sorted(smallest, key=str)]
    return (*small_models().values(), *map(examples.build, _ZOO), *operators)


def _in_reach(model: ModelProto) -> ModelProto:
    """The model in an opset and an IR version that ONNX Runtime reads."""
    out = ModelProto()
    out.CopyFrom(model)
    out.ir_version = 10
    for opset in out.opset_import:
        opset.version = min(opset.version, 5 if opset.domain == "ai.onnx.ml" else 24)
    return out


def _with_weights(model: ModelProto, operands: Sequence[object]) -> ModelProto:
    """The model with all operands but the first as weights."""
    out = ModelProto()
    out.CopyFrom(model)
    for value, operand in list(zip(model.graph.input, operands, strict=False))[1:]:
        if isinstance(operand, np.ndarray | np.generic) and np.asarray(operand).dtype != object:
            array = np.asarray(operand)
            out.graph.initializer.append(numpy_helper.from_array(array, value.name))
            out.graph.input.remove(value)
    return out


def structure(number: int) -> Sample:
    """A model with some parts of its message changed."""
    bases = base_models()
    model = mutate_model(bases[number % len(bases)], number)
    return _of_model(model.SerializeToString())


def raw(number: int) -> Sample:
    """A model's file with some bytes changed."""
    bases = base_models()
    return _of_model(mutate_bytes(bases[number % len(bases)].SerializeToString(), number))


def _of_model(data: bytes) -> Sample:
    return Sample({"m.onnx": data}, (_PLAN, _VERIFY))


_PLAN = ("m.onnx", "--devices", "2", "--time-limit", "1", "-o", "out", "--force", "-q")
_VERIFY = ("verify", "out")

_CLUSTER = """
name = "lab"

[[devices]]
preset = "a100-40g"
memory_bytes = "36GiB"

[[devices]]
count = 1
name = "card"
memory_bytes = "24GB"
memory_bytes_per_s = 0.8e12
launch_s = 4e-6
peak_flops_per_s = { float32 = 30e12, float16 = 120e12 }

[[levels]]
name = "bridge"
size = 2
bandwidth_bytes_per_s = 100e9
latency_s = 1e-6
reduce_bytes_per_s = 1e12
overlap = 0.5
"""
_PINS = """
[[pin]]
nodes = ["layer0.*"]
device = 1

[[pin]]
op = "Relu"
device = 1

[[pin]]
tensor = "y"
replicate = true

[[pin]]
tensor = "layer1.weight"
cut = true
axis = "tp"
"""


@cache
def _saved() -> tuple[bytes, Mapping[str, bytes]]:
    """A model, and the folder of its plan."""
    model = examples.build("mlp", layers=2, hidden=8, batch=4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(model.SerializeToString())
        result = partitioner.compile(path, cluster="2xideal", strategy="intra")
        out = result.save(Path(folder) / "out")
        files = {f"out/{file.name}": file.read_bytes() for file in sorted(out.iterdir())}
    return model.SerializeToString(), files


def documents(number: int) -> Sample:
    """A plan, a cluster or a file of constraints, with some bytes or words changed."""
    model, files = _saved()
    kind, turn = number % 4, number // 4
    if kind == 0:  # the plan of a folder
        request = json.dumps({**json.loads(files["out/request.json"]), "model": "../m.onnx"})
        plan = mutate_text(files["out/plan.json"], turn)
        saved = {**files, "out/request.json": request.encode(), "out/plan.json": plan}
        return Sample({"m.onnx": model, **saved}, (("show", "out"), ("explain", "out"), _VERIFY))
    if kind == 1:
        plan = mutate_text(files["out/plan.json"], turn)
        return Sample(
            {"m.onnx": model, "p.json": plan}, ((*_PLAN, "--constraints", "p.json"), _VERIFY)
        )
    if kind == 2:
        text = mutate_text(_CLUSTER.encode(), turn)
        command = ("m.onnx", "--cluster", "c.toml", *_PLAN[3:])
        return Sample({"m.onnx": model, "c.toml": text}, (command, _VERIFY))
    pins = mutate_text(_PINS.encode(), turn)
    return Sample({"m.onnx": model, "c.toml": pins}, ((*_PLAN, "--constraints", "c.toml"), _VERIFY))


#: The kinds of samples by name.
KINDS: Mapping[str, Callable[[int], Sample]] = {
    "structure": structure,
    "bytes": raw,
    "documents": documents,
}


def run_sample(sample: Sample, folder: Path) -> tuple[str, str]:
    """The end of a sample, and its text."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in sample.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return _run_commands(sample)
    finally:
        os.chdir(before)


def _run_commands(sample: Sample) -> tuple[str, str]:
    for command in sample.commands:
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(list(command))
        except BaseException:  # noqa: BLE001 - what the fuzzer looks for
            return "traceback", traceback.format_exc()
        said, printed = err.getvalue(), out.getvalue()
        if "machine's memory is too small" in said:
            return "memory", said
        if _written(Path()) > MOST_BYTES // 2:
            return "disk", f"{_written(Path()):,} bytes"
        if command[0] == "verify":
            return _verified(code, said, printed)
        lines = len(said.splitlines())
        if code not in (0, 1, 3) or (code and lines != 1) or "Traceback" in said:
            return "several lines", said
        if code:
            return "refused", said
    raise AssertionError("the last command is verify")


def _verified(code: object, said: str, printed: str) -> tuple[str, str]:
    if code == 0:
        return "equal", ""
    if "DIFFERENT" in printed:
        return "wrong", printed
    if said.count("\n") != 1 or "Traceback" in said:
        return "several lines", said
    if "computed output shape for this run is" in said:  # the model declares what its data decides
        return "other shapes", said
    if "plan.json" in said:  # verify refuses a folder with an edited plan
        return "refused", said
    return ("ranks fail" if said.startswith("partition: rank") else "no reference"), said


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fuzz(kind: str, numbers: Sequence[int], say: Callable[[str], None]) -> Table:
    """Run samples by number, each in a watched process."""
    table, left = Table(), list(numbers)
    KINDS[kind](0)  # what all samples share is made before the processes are
    with tempfile.TemporaryDirectory() as folder:
        _compile_solvers(Path(folder) / "sample")
        while left:
            done = 0
            for number, end, text in _watched(kind, left[:_TURNS], Path(folder) / "sample"):
                table.add(number, end, text)
                if end not in GOOD:
                    say(f"{kind} {number}: {end}: {text}")
                done += 1
            left = left[done:]
            say(f"{table.counts.total()} of {len(numbers)}: {dict(table.counts)}")
    return table


def _compile_solvers(folder: Path) -> None:
    """Let numba compile and keep what it does, so that no sample is charged with it."""
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    types = [helper.make_tensor_value_info(name, 1, [2**21, 2**21]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "huge", types[:1], types[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    child = os.fork()
    if not child:
        run_sample(_of_model(model.SerializeToString()), folder)
        os._exit(0)
    os.waitpid(child, 0)


def _watched(kind: str, numbers: Sequence[int], folder: Path) -> Iterator[tuple[int, str, str]]:
    """The ends of samples of one process, up to the one at which it dies or is stopped."""
    ends, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        _work(kind, numbers, folder, sink)
    os.close(sink)
    try:
        with os.fdopen(ends, "rb", buffering=0) as pipe:
            lines = _lines(pipe, child)
            for number in numbers:
                line = next(lines)
                if line:
                    end, text = json.loads(line)
                    yield number, end, text
                    continue
                if line is None:
                    yield number, "hang", f"over {MOST_S} CPU s or {MOST_WALL_S} s"
                else:
                    yield number, "crash", "the process died"
                return
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _lines(pipe: io.FileIO, child: int) -> Iterator[bytes | None]:
    """The lines of a process; empty when it died, None when one takes too long."""
    read = b""
    while True:
        start = _cpu_s(child)
        for _ in range(MOST_WALL_S):
            if b"\n" in read or _cpu_s(child) - start > MOST_S:
                break
            while b"\n" not in read and select.select([pipe], [], [], 1)[0]:
                part = pipe.read(65536)
                if not part:
                    yield b""
                    return
                read += part
        line, end, read = read.partition(b"\n")
        yield line if end else None


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(kind: str, numbers: Sequence[int], folder: Path, sink: int) -> None:
    """The watched process: writes a line for each sample, and ends."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # ONNX Runtime's own lines
    most = _memory("VmSize") + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with os.fdopen(sink, "wb", buffering=0) as pipe:
        for number in numbers:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            before = _memory("VmRSS")
            end, text = run_sample(KINDS[kind](number), folder)
            grown = _memory("VmHWM") - before
            if grown > MOST_BYTES and end in GOOD:
                end, text = "memory", f"{grown:,} bytes"
            pipe.write(json.dumps([end, text]).encode() + b"\n")
    os._exit(0)


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
