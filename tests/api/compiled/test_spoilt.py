"""Every field of a saved compilation's files, spoilt: refused in one line, or used."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

import partitioner
from partitioner import examples
from partitioner.backends import launch
from partitioner.backends.errors import BackendError
from partitioner.cli.main import main

Key = tuple[str | int, ...]

VALUES = [None, True, -1, 0, 10**30, 10**400, 2.5, math.nan, "", "\0", "\ud800", "x" * 5000]
VALUES += ["tp:9,0", [], [None], {}, {"a": 1}]
LESS, MORE = object(), object()  #: The field removed; an entry added to it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = examples.build("mlp", layers=2, hidden=8, batch=4)
    result = partitioner.compile(model, cluster="2xideal", strategy="intra")
    return result.save(tmp_path_factory.mktemp("spoilt") / "m.partition")


def fields(data: Any, at: Key = ()) -> Iterator[Key]:
    """The path of every field."""
    yield at
    if isinstance(data, dict | list):
        keys = data if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield from fields(data[key], (*at, key))


def spoilt(data: Any, at: Key, value: object) -> Any:
    if not at:
        return value
    whole = copy.deepcopy(data)
    inner = whole
    for key in at[:-1]:
        inner = inner[key]
    if value is LESS:
        del inner[at[-1]]
    elif value is not MORE:
        inner[at[-1]] = value
    elif isinstance(inner[at[-1]], dict):
        inner[at[-1]]["more"] = 1
    elif isinstance(inner[at[-1]], list):
        inner[at[-1]].append(1)
    return whole


def ways(data: Any) -> Iterator[tuple[Key, object]]:
    for at in fields(data):
        yield from ((at, value) for value in VALUES)
        yield from ((at, value) for value in (LESS, MORE) if at)


def check(argv: list[str], change: object, capsys: pytest.CaptureFixture[str]) -> int:
    code = main(argv)
    err = capsys.readouterr().err
    assert code in (0, 1), change
    assert err.count("\n") == 1 or (code == 0 and not err), (change, err)
    return code


SPOILT = (
    "request.json",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("plan.json", "summary.json")),
)


@pytest.mark.parametrize("name", SPOILT)
def test_json_files(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / name
    text = path.read_text()
    data = json.loads(text)
    codes = set()
    for at, value in ways(data):
        path.write_text(json.dumps(spoilt(data, at, value)))
        codes.add(check(["show", str(folder)], (at, value), capsys))
    path.write_text(text)
    assert codes == {0, 1}
    assert main(["verify", str(folder)]) == 0


@pytest.mark.slow
def test_headers_of_rank_files(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers that pass the checks would start the ranks."""

    def start(*_: object) -> None:
        raise BackendError("started")

    monkeypatch.setattr(launch, "_run", start)
    path = folder / "rank0.onnx"
    content = path.read_bytes()
    model = onnx.load_from_string(content)
    entry = next(e for e in model.metadata_props if e.key == "partitioner.program")
    data = json.loads(entry.value)
    for at, value in ways(data):
        entry.value = json.dumps(spoilt(data, at, value))
        path.write_bytes(model.SerializeToString())
        assert check(["run", str(folder)], (at, value), capsys) == 1
        if at[:1] in {("inputs",), ("outputs",), ("whole_outputs",), ("comms",)}:
            check(["verify", str(folder)], (at, value), capsys)
    path.write_bytes(content)
    assert main(["verify", str(folder)]) == 0
