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
from partitioner.backends.onnx.executor import Action, Executor, Role
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.onnx.steps import Cut, RankModel
from partitioner.backends.simulator import Simulator
from partitioner.ir.types import DTYPE_BITS


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes of one rank.

    Attributes:
        weights: Of its constants.
        held: What ONNX Runtime holds for them before the first kernel, packed copies included,
            over all segments. A packed copy takes the place of the original, which stays on
            disk (96 MiB of weights grew a process by 105 MiB with packing and without).
        peak: Most at one time beside those: a segment's own activations or a communication's
            parts in transit, and the values that live between segments.
    """

    weights: int
    held: int
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return max(self.weights, self.held) + self.peak


@dataclass(frozen=True)
class _SegmentBytes:
    idle: int
    peak: int


def measured_bytes(
    directory: Path,
    rank: int,
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "all",
) -> MeasuredBytes:
    """Run one request in lock-step and measure one rank.

    Args:
        directory: Folder of rank files.
        rank: Which to measure.
        inputs: Whole inputs by name.
        optimization: ONNX Runtime's level, see `SessionConfig`.

    Raises:
        BackendError: No such rank, a wrong file or input, or no profile was written.
    """
    live: dict[int, int] = {}

    def observe(action: Action, values: Mapping[str, torch.Tensor]) -> None:
        if action.role is not Role.SEND:
            live[action.index] = _live_bytes(values)

    with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as folder:
        config = SessionConfig(optimization=optimization, profile=Path(folder))
        simulator = Simulator(directory, configs={rank: config}, observers={rank: observe})
        if not 0 <= rank < len(simulator.executors):
            raise BackendError(f"rank {rank} is not one of {len(simulator.executors)}")
        simulator.run([inputs])
        executor = simulator.executors[rank]
        segments = _segments(executor)
    model = executor.model
    moments = [
        bytes_ + (segments[index].peak - segments[index].idle if index in segments else 0)
        for index, bytes_ in live.items()
    ]
    moments += [
        live.get(index, 0) + _transit_bytes(step)
        for index, step in enumerate(model.steps)
        if isinstance(step, Cut)
    ]
    held = sum(segment.idle for segment in segments.values())
    return MeasuredBytes(_weight_bytes(model), held, max(moments, default=0))


def _segments(executor: Executor) -> dict[int, _SegmentBytes]:
    return {
        index: _profile(Path(session.end_profiling()))
        for index, session in executor.sessions.items()
    }


def _profile(path: Path) -> _SegmentBytes:
    """What a session held before its first kernel, and at most."""
    events = json.loads(path.read_text())
    kernels = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    stats = [args for args in kernels if "mem_bytes_requested_in_use" in args]
    if len(stats) != len(kernels):
        raise BackendError("this ONNX Runtime's profile does not report bytes in use")
    in_use = [int(args["mem_bytes_requested_in_use"]) for args in stats]
    if not in_use:
        return _SegmentBytes(0, 0)
    idle = in_use[0] - int(stats[0]["mem_requested_in_use_delta"])
    return _SegmentBytes(idle, max(in_use))


def _live_bytes(values: Mapping[str, torch.Tensor]) -> int:
    """Bytes of tensors, each memory once."""
    storages = {value.untyped_storage().data_ptr(): value for value in values.values()}
    return sum(value.untyped_storage().nbytes() for value in storages.values())


def _weight_bytes(model: RankModel) -> int:
    return sum(model.types[name].nbytes for name in model.constants)


def _transit_bytes(cut: Cut) -> int:
    """Parts on their way: what others send here, packed, before it is in place."""
    arriving = sum(
        transfer.numel
        for transfer in cut.comm.transfers
        if transfer.target == cut.rank != transfer.source
    )
    return (arriving * DTYPE_BITS[cut.comm.dtype] + 7) // 8
