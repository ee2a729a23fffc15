"""Measurements of operators and communications, and estimates of seconds with their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A measurement of a form.

    Attributes:
        form: `Form.key`, or `whole_key` of a model.
        op: `Form.family`; of a model "whole model".
        dtype: Element type that it computes in.
        flops: FLOPs of the form.
        moved_bytes: Bytes that it reads and writes.
        seconds: Median of the repeats.
        spread: Half the distance of the quartiles, as a share of the median.
        repeats: Number of timed runs.
        backend: What ran it, with its version: "onnxruntime 1.31.0".
        measured_at: Date and time, ISO 8601, UTC.
        processes: Number of processes that ran the form at once, each with its own operands: they
            share the memory's bandwidth and the caches.
    """

    form: str
    op: str
    dtype: str
    flops: float
    moved_bytes: int
    seconds: float
    spread: float
    repeats: int
    backend: str
    measured_at: str
    processes: int = 1


@dataclass(frozen=True)
class LinkEntry:
    """A measurement of a communication.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send": one
            that is waited for at once; with " beside" behind it, one that passes beside compute.
            Of ranks of several groups of the level below, see `in_groups` and `over` of
            `cost_model.profiles.database`; "border" of what a communication takes beside, in
            ONNX Runtime.
        ranks: Number of ranks that take part, all at once.
        nbytes: Bytes of the whole tensor of a gather, of the local tensor of a reduction or an
            all-to-all, and of a message or broadcast.
        seconds: Median over the repeats of what it adds to the compute of the slowest rank.
        spread: As of an `Entry`.
        repeats: Number of timed runs.
        backend: "gloo, torch 2.13.0"; of a border that of operators.
        measured_at: Date and time, ISO 8601, UTC.
    """

    kind: str
    ranks: int
    nbytes: int
    seconds: float
    spread: float
    repeats: int
    backend: str
    measured_at: str


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operator, and where they come from.

    Attributes:
        seconds: On one device.
        source: "measured", "fitted", "published" (by others, on such a device) or "datasheet".
        error: Spread of the measurements behind them, as a share; 0 for "published" and
            "datasheet", which have none.
    """

    seconds: float
    source: str
    error: float = 0.0
