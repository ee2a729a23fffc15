"""Runs the steps of a rank for one or several requests in flight.

With several requests, round t runs phase p of request t - p, in step order; a single request runs
all steps in order. The executor is a generator that pauses before it waits for data, so that one
process can run all ranks in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import onnxruntime as ort
import torch

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.onnx.load import constants_outside
from partitioner.backends.onnx.sessions import SessionConfig, open_session
from partitioner.backends.onnx.steps import Cut, RankModel, Segment
from partitioner.backends.regions import write_region
from partitioner.backends.tensors import combine, from_numpy, torch_dtype
from partitioner.ir.exchange import Region
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.ir.program import CommKind
from partitioner.ir.types import TensorType

Values = dict[str, torch.Tensor]


class Communicator(Protocol):
    """Exchange of data between ranks, which call `send` and `receive` in order of steps."""

    def begin(self, requests: int) -> None:
        """Announce how many requests the next run has."""

    def send(self, cut: Cut, request: int, source: torch.Tensor) -> None:
        """Hand over this rank's parts, without waiting for a later round."""

    def receive(self, cut: Cut, request: int, target: torch.Tensor) -> torch.Tensor:
        """The value received: `target`, filled, or a dense tensor of its own in its place.

        For an all-reduce `target` may be the source's own memory.
        """

    def finish(self) -> None:
        """Wait until all data that was handed over has left."""


class Role(IntEnum):
    """A rank's roles in a step, in the order in which it does them."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True)
class Action:
    """A rank's part in one step, done for every request.

    Attributes:
        index: Of the step.
        role: Computing, sending or receiving.
        phase: Pipeline phase it happens in.
        reads: Values that must be there.
        writes: Values that are there afterwards.
    """

    index: int
    role: Role
    phase: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Waiting:
    """A rank needs the data of a cut now."""

    cut: Cut
    request: int


@dataclass(frozen=True)
class Done:
    """A request is done on a rank; `values` are outputs and those to keep, by local name."""

    request: int
    values: Mapping[str, torch.Tensor]


def write_parts(
    cut: Cut, parts: Iterable[tuple[Region, torch.Tensor]], target: torch.Tensor
) -> None:
    """Write packed parts to their regions; reduce those of one region, first to last."""
    if not cut.reduces:
        for region, part in parts:
            write_region(target, region, part)
        return
    terms: dict[Region, list[torch.Tensor]] = {}
    for region, part in parts:
        terms.setdefault(region, []).append(part)
    for region, summands in terms.items():
        write_region(target, region, combine(summands, cut.comm.reduce))


def round_of(phase: int, request: int, requests: int) -> int:
    """The round in which a phase of a request runs; one request alone has a single round."""
    return request + phase if requests > 1 else 0


#: Gets an action that was just done and the values of its request.
Observer = Callable[[Action, Mapping[str, torch.Tensor]], None]


class Executor:
    """A rank with its sessions open.

    Args:
        model: The rank's file.
        communicator: Its side of the communications.
        config: How segments run.
        observe: Called after each action of each request with the values that live then.

    Raises:
        BackendError: ONNX Runtime refuses a segment.
    """

    def __init__(
        self,
        model: RankModel,
        communicator: Communicator,
        config: SessionConfig,
        observe: Observer | None = None,
    ) -> None:
        self.model = model
        self.communicator = communicator
        self.config = config
        self.observe = observe
        self.actions = tuple(_actions(model.steps))
        self.sessions: Mapping[int, ort.InferenceSession] = {
            action.index: open_session(model, step, config)
            for action in self.actions
            if isinstance(step := model.steps[action.index], Segment)
        }
        self._constants = {
            name: from_numpy(model.constant(name), type_.dtype).to(config.device)
            for name, type_ in constants_outside(model).items()
        }
        self._kept = frozenset((*(o.value for o in model.header.outputs), *model.keep))
        self._nowhere = torch.empty(1, device=config.device)  # of tensors without elements
        self._in_place = frozenset(_in_place(model.steps, self._kept))

    def run(self, feeds: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[Waiting | Done]:
        """Run requests, given by their local inputs, which are contiguous and on the device.

        Yields:
            `Waiting` before each receive, `Done` after each request.

        Raises:
            BackendError: ONNX Runtime or a communication fails.
        """
        requests = len(feeds)
        frees = _frees(self.actions, self._kept, staggered=requests > 1)
        last = max((action.phase for action in self.actions), default=0)
        flying: dict[int, Values] = {}
        self.communicator.begin(requests)
        for round_ in range(round_of(last, requests - 1, requests) + 1):
            for action in self.actions:
                request = round_ - round_of(action.phase, 0, requests)
                if 0 <= request < requests:
                    values = flying.setdefault(request, {**self._constants, **feeds[request]})
                    yield from self._act(action, request, values)
                    if self.observe is not None:
                        self.observe(action, values)
                    for name in frees[action]:
                        values.pop(name, None)
            request = round_ - round_of(last, 0, requests)
            if request >= 0:
                values = flying.pop(request, {**self._constants, **feeds[request]})
                yield Done(request, {name: values[name] for name in self._kept})
        self.communicator.finish()

    def _act(self, action: Action, request: int, values: Values) -> Iterator[Waiting]:
        step = self.model.steps[action.index]
        if isinstance(step, Segment):
            self._compute(action.index, step, values)
        elif action.role is Role.SEND:
            with _failing(self.model.rank, step):
                self.communicator.send(step, request, values[step.comm.source])
        elif step.keeps_all:
            values[step.comm.target] = values[step.comm.source]
        else:
            in_place = step.comm.target in self._in_place
            assert step.target is not None
            target = values[step.comm.source] if in_place else self._empty(step.target)
            yield Waiting(step, request)
            with _failing(self.model.rank, step):
                values[step.comm.target] = self.communicator.receive(step, request, target)

    def _empty(self, type_: TensorType) -> torch.Tensor:
        return torch.empty(type_.shape, dtype=torch_dtype(type_.dtype), device=self.config.device)

    def _compute(self, index: int, segment: Segment, values: Values) -> None:
        session, types = self.sessions[index], self.model.types
        binding = session.io_binding()
        for name in segment.inputs:
            binding.bind_input(name, *self._memory(values[name], types[name]))
        for name in segment.outputs:
            values[name] = self._empty(types[name])
            binding.bind_output(name, *self._memory(values[name], types[name]))
        if self.config.device.type == "cuda":
            torch.cuda.synchronize(self.config.device)
        try:
            session.run_with_iobinding(binding)
        except Exception as error:
            raise BackendError(
                f"rank {self.model.rank}: ONNX Runtime: {one_line(error)}"
            ) from error

    def _memory(
        self, tensor: torch.Tensor, type_: TensorType
    ) -> tuple[str, int, int, tuple[int, ...], int]:
        """Arguments of ONNX Runtime's binding: device, its index, element type, sizes, address."""
        device = tensor.device
        address = tensor.data_ptr() or self._nowhere.data_ptr()
        return device.type, device.index or 0, onnx_dtype(type_.dtype), type_.shape, address


def _actions(steps: Sequence[Segment | Cut]) -> Iterator[Action]:
    for index, step in enumerate(steps):
        if isinstance(step, Segment):
            if step.outputs:
                yield Action(index, Role.COMPUTE, step.phase, step.inputs, step.outputs)
            continue
        comm = step.comm
        if step.source is not None:
            yield Action(index, Role.SEND, comm.phase, (comm.source,), ())
        if step.target is not None:
            reads = (comm.source,) if step.source is not None else ()
            yield Action(index, Role.RECEIVE, comm.target_phase, reads, (comm.target,))


def _frees(
    actions: Sequence[Action], kept: frozenset[str], *, staggered: bool
) -> Mapping[Action, tuple[str, ...]]:
    """Per action, the values that no later action of the same request reads."""
    ordered = sorted(actions, key=lambda a: (a.phase if staggered else 0, a.index, a.role))
    last: dict[str, Action] = {}
    for action in ordered:
        last.update(dict.fromkeys((*action.reads, *action.writes), action))
    frees: dict[Action, tuple[str, ...]] = dict.fromkeys(actions, ())
    for name, action in last.items():
        if name not in kept:
            frees[action] += (name,)
    return frees


def _in_place(steps: Sequence[Segment | Cut], kept: frozenset[str]) -> Iterator[str]:
    """Targets of all-reduces that may overwrite their source: nothing else reads it."""
    reads = Counter(
        name
        for step in steps
        for name in (step.inputs if isinstance(step, Segment) else step.reads)
    )
    computed = {name for step in steps if isinstance(step, Segment) for name in step.outputs}
    for step in steps:
        if isinstance(step, Cut) and step.comm.kind is CommKind.ALL_REDUCE:
            source = step.comm.source
            if source in computed and source not in kept and reads[source] == 1:
                yield step.comm.target


@contextmanager
def _failing(rank: int, cut: Cut) -> Iterator[None]:
    """Name the rank and the communication in errors of the library."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"rank {rank}: {cut}: {one_line(error)}") from error
