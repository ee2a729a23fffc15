"""Bytes that a rank really takes, by ONNX Runtime's own profile.

Without interpreter and libraries, and for one request at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.executor import Action, Role
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.onnx.simulator import Simulator
from partitioner.backends.onnx.steps import Cut
from partitioner.ir.types import DTYPE_BITS


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes of one rank.

    Attributes:
        weights: Of its constants.
        sessions: Held by ONNX Runtime for them before the first kernel, packed copies included,
            over all segments. A packed copy takes the place of the original, which stays on
            disk (96 MiB of weights grew a process by 105 MiB with packing and without).
        peak: Most at one time beside those: a segment's own activations or a communication's
            parts in transit, and the values that live between segments.
    """

    weights: int
    sessions: int
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return max(self.weights, self.sessions) + self.peak


def measured_bytes(
    directory: Path,
    rank: int,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "all",
) -> MeasuredBytes:
    """Bytes that a rank takes in a lock-step run of a folder of rank files.

    Raises:
        BackendError: No such rank, a wrong file or input, or no profile was written.
    """
    live: dict[int, int] = {}  # bytes of the values between segments, by index of the step

    def observe(action: Action, values: Mapping[str, torch.Tensor]) -> None:
        if action.role is not Role.SEND:
            storages = {value.untyped_storage().data_ptr(): value for value in values.values()}
            live[action.index] = sum(v.untyped_storage().nbytes() for v in storages.values())

    with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as folder:
        config = SessionConfig(optimization=optimization, profile=Path(folder))
        simulator = Simulator(directory, configs={rank: config}, observers={rank: observe})
        if not 0 <= rank < len(simulator.executors):
            raise BackendError(f"rank {rank} is not one of {len(simulator.executors)}")
        simulator.run([inputs])
        executor = simulator.executors[rank]
        profiles = {
            index: _profile(Path(session.end_profiling()))
            for index, session in executor.sessions.items()
        }
    model = executor.model
    moments = []
    for index, live_bytes in live.items():
        idle, most = profiles.get(index, (0, 0))
        moments.append(live_bytes + most - idle)
    for index, step in enumerate(model.steps):
        if isinstance(step, Cut):
            moments.append(live.get(index, 0) + _transit_bytes(step))
    return MeasuredBytes(
        weights=sum(model.types[name].nbytes for name in model.constants),
        sessions=sum(idle for idle, _ in profiles.values()),
        peak=max(moments, default=0),
    )


def _profile(path: Path) -> tuple[int, int]:
    """Bytes that a session holds before its first kernel, and at most."""
    events = json.loads(path.read_text())
    kernels = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    if any("mem_bytes_requested_in_use" not in kernel for kernel in kernels):
        raise BackendError("this ONNX Runtime's profile does not report bytes in use")
    if not kernels:
        return 0, 0
    in_use = [int(kernel["mem_bytes_requested_in_use"]) for kernel in kernels]
    return in_use[0] - int(kernels[0]["mem_requested_in_use_delta"]), max(in_use)


def _transit_bytes(cut: Cut) -> int:
    """Parts on their way: what others send here, packed, before it is in place."""
    arriving = sum(
        transfer.numel
        for transfer in cut.comm.transfers
        if transfer.target == cut.rank != transfer.source
    )
    return (arriving * DTYPE_BITS[cut.comm.dtype] + 7) // 8
