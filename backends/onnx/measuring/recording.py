"""The record of a rank's steps: its kernels by ONNX Runtime's profile, its communications timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from onnx import NodeProto

from partitioner.backends.observed import Event, Role, Step
from partitioner.backends.onnx.files.messages import DOMAIN, ORIGIN_KEY
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.onnx.measuring.timing import Kernel, kernel_runs, nodes_of_kernels
from partitioner.backends.onnx.running.executor import Executor
from partitioner.backends.onnx.running.turns import Action
from partitioner.backends.onnx.running.turns import Role as Part
from partitioner.ir.types import DTYPE_BITS

#: Prefix of the names of nodes that cut a part of a local tensor: the communication's position is
#: behind (see `slices`).
_SLICE = f"{DOMAIN}.slice"
_ROLES = {Part.SEND: Role.SEND, Part.RECEIVE: Role.RECEIVE}

_Work = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass
class LiveBytes:
    """Observes an executor: bytes of the values that live between segments, at each action."""

    by_step: dict[int, int] = field(default_factory=dict)  #: By the index of the rank's step.

    def __call__(self, action: Action, values: Mapping[str, torch.Tensor]) -> None:
        """See `executor.Observer`."""
        if action.role is not Part.SEND:
            storages = {value.untyped_storage().data_ptr(): value for value in values.values()}
            self.by_step[action.index] = sum(
                value.untyped_storage().nbytes() for value in storages.values()
            )


@dataclass
class Spans:
    """Observes an executor: when each action of a step began and ended."""

    actions: list[tuple[Action, float, float]] = field(default_factory=list)
    _last_s: float = 0.0

    def begin(self) -> float:
        """Begin a step now; returns the time."""
        self.actions = []
        self._last_s = time.perf_counter()
        return self._last_s

    def __call__(self, action: Action, values: Mapping[str, torch.Tensor]) -> None:
        """See `executor.Observer`."""
        del values
        now = time.perf_counter()
        self.actions.append((action, self._last_s, now))
        self._last_s = time.perf_counter()


def record(
    executor: Executor, serve: Callable[[], object], barrier: Callable[[], None], steps: int
) -> tuple[tuple[Step, ...], int]:
    """Serve a request to warm up and then `steps` recorded ones; all ranks must call it.

    The sessions, which write their graphs, end their profiles here.

    Returns:
        The steps, and the most bytes that the rank held.
    """
    model, live, spans = executor.model, LiveBytes(), Spans()
    executor.observe = live
    serve()
    executor.observe = spans
    timed = []
    for _ in range(steps):
        barrier()
        begin = spans.begin()
        serve()
        timed.append((begin, time.perf_counter(), spans.actions))
    executor.observe = None
    runs = kernels_of(executor)
    names: dict[int, Mapping[str, _Work]] = {}
    for index in runs:
        by_kernel = nodes_of_kernels(model.segment(index).nodes, executor.sessions.graph_of(index))
        names[index] = {kernel: _work_of(nodes) for kernel, nodes in by_kernel.items()}

    def events(number: int, actions: Iterable[tuple[Action, float, float]]) -> Iterator[Event]:
        for action, begin, end in actions:
            step = model.steps[action.index]
            if isinstance(step, Cut):
                seqs, role = (step.comm.seq,), _ROLES[action.role]
                yield Event((), seqs, step.comm.kind.value, role, begin, end)
                continue
            for kernel in runs[action.index][number]:
                nodes, comms = names[action.index].get(kernel.name, ((), ()))
                label = kernel.op if nodes or comms else f"{kernel.op} {kernel.name}"
                first, last = end + kernel.begin_s, end + kernel.end_s
                yield Event(nodes, comms, label, Role.COMPUTE, first, last)

    recorded = tuple(
        Step(begin, end, tuple(events(number, actions)))
        for number, (begin, end, actions) in enumerate(timed, 1)
    )
    return recorded, held_bytes(model, live.by_step, runs, shared=True).total


def _work_of(nodes: Iterable[NodeProto]) -> _Work:
    """The plan's nodes, and local communications, that nodes of a rank file compute."""
    names: dict[str, None] = {}
    comms: dict[int, None] = {}
    for node in nodes:
        if node.name.startswith(_SLICE):
            comms[int(node.name.removeprefix(_SLICE).partition(".")[0])] = None
        else:
            origin = (one.value for one in node.metadata_props if one.key == ORIGIN_KEY)
            names[next(origin, node.name)] = None
    return tuple(names), tuple(comms)


def kernels_of(executor: Executor) -> Mapping[int, list[tuple[Kernel, ...]]]:
    """Kernels of each run of each segment, by the index of its step; ends the profiles."""
    profiles = executor.sessions.end_profiling()
    return {
        index: [kernels for file in files for kernels in kernel_runs(file)]
        for index, files in profiles.items()
    }


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one rank, without interpreter and libraries, for one request at a time."""

    weights: int  #: Of its constants.
    #: Held by ONNX Runtime for them before the first kernel, packed copies included, over all
    #: segments but those of blocks. A packed copy takes the place of the original, which stays on
    #: disk (96 MiB of weights grew a process by 105 MiB with packing and without).
    sessions: int
    #: Most at one time beside those: a segment's own activations or a communication's parts in
    #: transit, the values that live between segments, and the sessions of blocks that are open
    #: then.
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return max(self.weights, self.sessions) + self.peak


def held_bytes(
    model: RankModel,
    live: Mapping[int, int],
    runs: Mapping[int, Sequence[Sequence[Kernel]]],
    *,
    shared: bool,
) -> HeldBytes:
    """The most bytes that a rank held, by the indices of its steps.

    `live` are bytes of the values between segments while a step runs, and `runs` the kernels of
    each run of a segment's session. An allocator that is `shared` counts for all of them.
    """
    idle = {
        index: kernels[0][0].in_use_bytes - kernels[0][0].taken_bytes
        for index, kernels in runs.items()
        if kernels and kernels[0]
    }
    most = {
        index: max(kernel.in_use_bytes for kernels in runs[index] for kernel in kernels)
        for index in idle
    }
    opened = _opened_bytes(model, idle)
    moments = [
        nbytes + most.get(at, 0) - idle.get(at, 0) + opened.get(at, 0)
        for at, nbytes in live.items()
    ]
    for index, step in enumerate(model.steps):
        if isinstance(step, Cut):  # what others send here, packed, before it is in place
            arriving = (t for t in step.comm.transfers if t.target == step.rank != t.source)
            bits = sum(t.numel for t in arriving) * DTYPE_BITS[step.comm.dtype]
            moments.append(live.get(index, 0) + (bits + 7) // 8 + opened.get(index, 0))
    stays = [nbytes for at, nbytes in idle.items() if model.segment(at).block is None]
    segments = [step for step in model.steps if isinstance(step, Segment)]
    in_turn = {name for one in segments if one.block is not None for name in one.constants}
    in_turn -= {name for one in segments if one.block is None for name in one.constants}
    return HeldBytes(
        weights=sum(model.types[name].nbytes for name in model.constants if name not in in_turn),
        sessions=min(stays, default=0) if shared else sum(stays),
        peak=max(moments, default=0),
    )


def _opened_bytes(model: RankModel, idle: Mapping[int, int]) -> Mapping[int, int]:
    """Bytes of the sessions open at each step, by its index: a block's, and the next block's."""

    def own(index: int) -> int:
        step = model.segment(index)
        return max(idle.get(index, 0), sum(model.types[name].nbytes for name in step.constants))

    steps = enumerate(model.steps)
    blocks = [i for i, step in steps if isinstance(step, Segment) and step.block is not None]
    opened = {}
    for at in range(len(model.steps)) if blocks else ():
        ahead = next((i for i in blocks if i > at), None) if at >= blocks[0] else None
        opened[at] = (own(at) if at in blocks else 0) + (own(ahead) if ahead is not None else 0)
    return opened
