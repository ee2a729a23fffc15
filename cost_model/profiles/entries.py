"""Measurements of operators and communications, and estimates of seconds with their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A measurement of a form."""

    form: str  #: `Form.key`, or `whole_key` of a model.
    op: str  #: `Form.family`; of a model "whole model".
    dtype: str  #: Element type that it computes in.
    flops: float  #: FLOPs of the form.
    moved_bytes: int  #: Bytes that it reads and writes.
    seconds: float  #: Median of the repeats.
    spread: float  #: Half the distance of the quartiles, as a share of the median.
    repeats: int  #: Number of timed runs.
    backend: str  #: What ran it, with its version: "onnxruntime 1.31.0".
    measured_at: str  #: Date and time, ISO 8601, UTC.
    #: Number of processes that ran the form at once, each with its own operands: they share the
    #: memory's bandwidth and the caches.
    processes: int = 1


@dataclass(frozen=True)
class LinkEntry:
    """A measurement of a communication."""

    #: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send": one that
    #: is waited for at once; with " beside" behind it, one that passes beside compute. Of ranks of
    #: several groups of the level below, see `in_groups` and `over` of
    #: `cost_model.profiles.database`; "border" of what a communication takes beside, in ONNX
    #: Runtime.
    kind: str
    ranks: int  #: Number of ranks that take part, all at once.
    #: Bytes of the whole tensor of a gather, of the local tensor of a reduction or an all-to-all,
    #: and of a message or broadcast.
    nbytes: int
    seconds: float  #: Median over the repeats of what it adds to the compute of the slowest rank.
    spread: float  #: As of an `Entry`.
    repeats: int  #: Number of timed runs.
    backend: str  #: "gloo, torch 2.13.0"; of a border that of operators.
    measured_at: str  #: Date and time, ISO 8601, UTC.


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operator, and where they come from."""

    seconds: float  #: On one device.
    source: str  #: "measured", "fitted", "published" (by others, on such a device) or "datasheet".
    #: Spread of the measurements behind them, as a share; 0 for "published" and "datasheet", which
    #: have none.
    error: float = 0.0
