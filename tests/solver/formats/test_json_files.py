"""Reading JSON files that others wrote: one line names the file and what is wrong with it."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.problems.piper_files import piper as piper_file
from helpers.problems.solver_instances import dnnp as dnnp_file
from partitioner.solver.formats import dnnp, iopddl, json_files, piper
from partitioner.solver.formats.files import read_problem
from partitioner.solver.formats.json_files import FormatError, read

PARSERS = (
    iopddl.parse,
    iopddl.parse_solution,
    dnnp.parse,
    dnnp.parse_split,
    piper.parse,
    piper.parse_plan,
)
IOPDDL = {
    "name": "one",
    "nodes": {"intervals": [[0, 1]], "costs": [[1]], "usages": [[1]]},
    "edges": {"nodes": [], "costs": []},
    "usage_limit": 1,
}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"nodes\n", r"not JSON \(Expecting value"),
        (b"\xff\xfe{", "not JSON"),
        (b'{"problem": ', "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"problem": ' + b"9" * 10_000 + b"}", "not JSON"),
        (gzip.compress(b"{}", mtime=0)[:-9], "broken gzip file"),
        (gzip.compress(b"{}" * 99, mtime=0)[:10] + b"\x07" * 20, "broken gzip file"),
        (gzip.compress(b"not json", mtime=0), "not JSON"),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    for parse in PARSERS:
        with pytest.raises(FormatError, match=rf"p\.json: {words}") as caught:
            read(path, parse)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parse", PARSERS)
def test_errors_name_the_file_once(tmp_path: Path, parse: Callable[[Any], object]) -> None:
    path = tmp_path / "bad.json"
    path.write_text("[true]")
    with pytest.raises(FormatError, match=r"bad\.json: .*(list|no \"problem\" object)") as caught:
        read(path, parse)
    assert str(caught.value).count(str(path)) == 1
    with pytest.raises(FormatError, match=r"none\.json: No such file or directory"):
        read(tmp_path / "none.json", parse)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_files_are_read_plain_or_gzipped(tmp_path: Path, name: str) -> None:
    for parse, content in ((dnnp.parse, dnnp_file(0)), (piper.parse, piper_file(0))):
        json_files.write_json(content, tmp_path / name)
        assert read(tmp_path / name, parse) == parse(content)


def test_a_packed_file_may_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_BYTES", 10_000)
    packer = zlib.compressobj(wbits=31)
    (tmp_path / "p.gz").write_bytes(packer.compress(b" " * 10**6) + packer.flush())
    with pytest.raises(FormatError, match="more than 10000 bytes"):
        read(tmp_path / "p.gz", iopddl.parse)


@pytest.mark.parametrize(
    ("content", "recognised"),
    [
        ({"problem": IOPDDL}, iopddl.parse),
        (dnnp_file(0), dnnp.parse),
        (piper_file(0), piper.parse),
        ({}, None),
        ([], None),
        ({"nodes": {}, "maxFPGAs": 1, "maxDevices": 1}, None),
    ],
)
def test_content_tells_the_format(content: Any, recognised: object, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(content))
    if recognised is None:
        with pytest.raises(FormatError, match="no known kind of problem"):
            read_problem(path)
    else:
        assert read_problem(path)[0].parse == recognised
