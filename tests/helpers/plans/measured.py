"""Bytes that a rank really takes, by ONNX Runtime's own profile.

Without interpreter and libraries, and for one request at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.measuring.recording import (
    HeldBytes,
    LiveBytes,
    held_bytes,
    kernels_of,
)
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions.segments import SessionConfig


def measured_bytes(
    directory: Path,
    rank: int,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "all",
) -> HeldBytes:
    """Bytes that a rank takes in a lock-step run of a folder of rank files.

    Raises:
        BackendError: No such rank, a wrong file or input, or no profile was written.
    """
    live = LiveBytes()
    with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as folder:
        config = SessionConfig(optimization=optimization, profile=Path(folder))
        simulator = Simulator(directory, configs={rank: config}, observers={rank: live})
        if not 0 <= rank < len(simulator.executors):
            raise BackendError(f"rank {rank} is not one of {len(simulator.executors)}")
        simulator.run([inputs])
        executor = simulator.executors[rank]
        runs = kernels_of(executor)
    return held_bytes(executor.model, live.by_step, runs, shared=False)
