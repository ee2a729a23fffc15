"""Arrays that two processes of this machine send each other over a pipe, as bytes: no code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np

#: The arrays of each of several requests, by name.
Arrays = Sequence[Mapping[str, np.ndarray]]


def send_arrays(connection: Connection, requests: Arrays) -> None:
    """Send the arrays of requests; an OSError if the other side is gone."""
    listed = [
        [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
        for arrays in requests
    ]
    connection.send_bytes(json.dumps(listed).encode())
    for arrays in requests:
        for array in arrays.values():
            if array.size:
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                connection.send_bytes(raw.data)


def receive_arrays(connection: Connection) -> list[dict[str, np.ndarray]]:
    """Receive the arrays of requests; an EOFError or OSError if the other side is gone."""
    requests = []
    for listed in json.loads(connection.recv_bytes()):
        arrays = {}
        for name, dtype, shape in listed:
            array = np.empty(shape, np.dtype(dtype))
            if array.size:
                connection.recv_bytes_into(array.reshape(-1).view(np.uint8).data)
            arrays[name] = array
        requests.append(arrays)
    return requests
