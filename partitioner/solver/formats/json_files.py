"""JSON files of problems, plain or gzipped, whoever wrote them."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from partitioner.files import write_file
from partitioner.solver.problem import SolverError

#: Larger files are refused, packed or not; the largest of the contest has 0.1 GB.
MAX_BYTES = 2 * 10**9


class FormatError(SolverError):
    """A file that is not what its format asks for."""


def read_json(path: Path) -> Any:
    """The content of a JSON file, plain or gzipped.

    Raises:
        FormatError: The file cannot be read, is too large or is not JSON.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise FormatError(f"{path}: more than {MAX_BYTES} bytes")
        return json.loads(text)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{path}: broken gzip file ({error})") from None
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: not JSON ({error})") from None


def write_json(data: Any, path: Path) -> None:
    """Write a JSON file, whole or not at all; gzipped if its name ends in `.gz`.

    Raises:
        FileError: It cannot be written.
    """
    text = json.dumps(data, allow_nan=False).encode()
    write_file(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
