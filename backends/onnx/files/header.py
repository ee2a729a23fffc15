"""The description in a rank file of ONNX: one JSON text in the model's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable

from onnx import ModelProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import (
    Header,
    Origin,
    count,
    header_data,
    parse_header,
    parse_region,
)
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Transfer
from partitioner.ir.pieces.batch_parts import BatchParts
from partitioner.ir.program import Programs, RankProgram

#: Domain of the communication operators and of the keys in metadata.
DOMAIN = "partitioner"
#: Version of what rank files hold; files of another version are refused.
FORMAT_VERSION = 2
#: Keys of the model's metadata.
PROGRAM_KEY = f"{DOMAIN}.program"
VERSION_KEY = f"{DOMAIN}.format_version"
#: Keys of a node's metadata.
PHASE_KEY = f"{DOMAIN}.phase"
ORIGIN_KEY = f"{DOMAIN}.origin"
BLOCK_KEY = f"{DOMAIN}.block"
#: Metadata of convolutions that ONNX Runtime is to compute in plain layouts, with their segment.
PLAIN_KEY = f"{DOMAIN}.plain"


def write_header(
    model: ModelProto,
    program: RankProgram,
    programs: Programs,
    comms: int,
    origin: Origin,
    parts: BatchParts | None,
) -> None:
    """Add the description of one rank to its file's metadata (`model` is modified)."""
    data = header_data(program, programs, comms, origin, parts)
    model.metadata_props.add(key=VERSION_KEY, value=str(FORMAT_VERSION))
    model.metadata_props.add(key=PROGRAM_KEY, value=json.dumps(data, separators=(",", ":")))


def read_header(model: ModelProto, where: str) -> Header:
    """The description in a rank file, which errors call `where`.

    Raises:
        BackendError: It is no rank file, or one of another version.
    """
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if PROGRAM_KEY not in metadata:
        raise BackendError(f"{where} is not a rank file: its metadata lacks {PROGRAM_KEY!r}")
    version = metadata.get(VERSION_KEY)
    if version != str(FORMAT_VERSION):
        raise BackendError(f"{where} has format version {version}, this is {FORMAT_VERSION}")
    try:
        return parse_header(json.loads(metadata[PROGRAM_KEY]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(f"{where}: metadata {PROGRAM_KEY!r}: {one_line(error)}") from error


def dump_transfers(transfers: Iterable[Transfer]) -> str:
    """Transfers as JSON: `[[source, target, read, write], ...]`."""
    rows = [(t.source, t.target, t.read, t.write) for t in transfers]
    return json.dumps(rows, separators=(",", ":"))


def parse_transfers(text: str) -> tuple[Transfer, ...]:
    """Transfers from JSON."""
    return tuple(
        Transfer(count(source), count(target), parse_region(read) or (), parse_region(write) or ())
        for source, target, read, write in json.loads(text)
    )
