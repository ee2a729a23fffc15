"""Runs the steps of a rank for one or several requests in flight, or in micro-batches.

In which order is a matter of `turns`. The executor is a generator that pauses before it waits for
data, so that one process can run all ranks in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnxruntime as ort
import torch

from partitioner.backends.errors import BackendError, failing, one_line
from partitioner.backends.onnx.files.load import constants_outside
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.onnx.running.turns import Action, Role, Turns
from partitioner.backends.onnx.sessions.segments import SessionConfig, Sessions
from partitioner.backends.regions import write_region
from partitioner.backends.tensors import combine, from_numpy, torch_dtype
from partitioner.ir.exchange import Region
from partitioner.ir.program import CommKind
from partitioner.ir.types import TensorType, onnx_dtype

Values = dict[str, torch.Tensor]


class Communicator(Protocol):
    """Exchange of data between ranks, which call `send` and `receive` in order of steps."""

    def begin(self, turns: Turns) -> None:
        """Announce the turns of the next run."""

    def send(self, cut: Cut, number: int, source: torch.Tensor) -> None:
        """Hand over this rank's parts of a pass, without waiting for a later turn."""

    def receive(self, cut: Cut, number: int, target: torch.Tensor) -> torch.Tensor:
        """The value received: `target`, filled, or a dense tensor of its own in its place.

        For an all-reduce `target` may be the source's own memory.
        """

    def finish(self) -> None:
        """Wait until all data that was handed over has left."""


@dataclass(frozen=True)
class Waiting:
    """A rank needs the data of a cut in a pass now."""

    cut: Cut
    number: int


@dataclass(frozen=True)
class Done:
    """A request is done on a rank; `values` are outputs and those to keep, by local name.

    In micro-batches, they are of all of them, as `arrays.local_inputs` has inputs.
    """

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


@dataclass(frozen=True)
class Places:
    """Where results of a request go that runs alone and as a whole; others go to new memory."""

    into: Mapping[str, torch.Tensor] = field(default_factory=dict)  #: By local name.
    #: Requests of one turn are likely to have their values at the same places.
    turn: int = 0


#: Gets an action that was just done and the values of its pass.
Observer = Callable[[Action, Mapping[str, torch.Tensor]], None]


class Executor:
    """A rank with its sessions open; `observe` sees each action of each pass when it is done."""

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
        segments = (a.index for a in self.actions if a.role is Role.COMPUTE)
        self.sessions = Sessions.of(model, config, segments)
        gpu = config.gpu
        self._device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._constants = self.fed(
            {name: model.constant(name) for name in constants_outside(model)}
        )
        self._kept = frozenset((*(o.value for o in model.header.outputs), *model.keep))
        batch = model.header.batch
        self._parts = 1 if batch is None else batch.parts.count
        #: Of values to return, how many of a request there are.
        self._times = dict.fromkeys(self._kept, self._parts)
        if batch is not None:
            self._times |= {o.value: len(batch.regions(o.whole)) for o in model.header.outputs}
        #: Values that the micro-batches of a request have in common.
        self._once = frozenset(
            name
            for action in self.actions
            if batch is not None and batch.order.phases.is_once(action.phase)
            for name in action.writes
        )
        self._frees: dict[bool, Mapping[Action, list[str]]] = {}  # in phases or not
        self.places = Places()  #: Of the next request.
        #: Of sessions that stay open, by step and turn.
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self._nowhere = torch.empty(1, device=self._device)  # of tensors without elements
        self._in_place = frozenset(_in_place(model.steps, self._kept))

    def fed(self, arrays: Mapping[str, np.ndarray]) -> Values:
        """Local values by name, on the device."""
        return {
            name: from_numpy(array, self.model.types[name].dtype).to(self._device)
            for name, array in arrays.items()
        }

    def run(self, feeds: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[Waiting | Done]:
        """Run requests, given by their local inputs: see `fed` and `arrays.local_inputs`.

        Yields:
            `Waiting` before each receive, `Done` after each request.

        Raises:
            BackendError: ONNX Runtime or a communication fails.
        """
        batch = self.model.header.batch
        turns = Turns.of(batch, len(feeds))
        in_phases = turns.passes > 1 or batch is not None
        if in_phases not in self._frees:
            kept = self._kept | self._once
            self._frees[in_phases] = _frees(self.actions, kept, in_phases=in_phases)
        frees = self._frees[in_phases]
        flying: dict[int, Values] = {}
        results: dict[int, Values] = defaultdict(dict)  # of all micro-batches, by request
        self.communicator.begin(turns)
        for turn in turns.of_rank(self.model.rank, self.actions):
            for action, number in turn.actions:
                values = self._values(flying, number, feeds)
                yield from self._act(action, number, values)
                self._put(action, number, values, results)
                if self.observe is not None:
                    self.observe(action, values)
                for name in frees[action]:
                    values.pop(name, None)
            if turn.done is not None:
                numbers = range(turn.done * self._parts, (turn.done + 1) * self._parts)
                passes = [self._values(flying, number, feeds) for number in numbers]
                for number in numbers:
                    del flying[number]
                # what is to be returned, some of which the passes have put together
                made = results.pop(turn.done, {})
                for name in self._kept - made.keys():
                    parts = [values[name] for values in passes[: self._times[name]]]
                    made[name] = parts[0] if batch is None else torch.stack(parts)
                yield Done(turn.done, made)
        self.communicator.finish()

    def _values(
        self, flying: dict[int, Values], number: int, feeds: Sequence[Mapping[str, torch.Tensor]]
    ) -> Values:
        """The values of a pass that live, its inputs when it begins.

        What micro-batches have in common, the first computes, and the others take over.
        """
        if number not in flying:
            request, micro_batch = divmod(number, self._parts)
            feed = feeds[request]
            if self.model.header.batch is not None:
                feed = {name: of[min(micro_batch, len(of) - 1)] for name, of in feed.items()}
            shared = flying.get(number - micro_batch, {}) if micro_batch else {}
            once = {name: value for name, value in shared.items() if name in self._once}
            flying[number] = {**self._constants, **once, **feed}
        return flying[number]

    def _put(self, action: Action, number: int, values: Values, results: dict[int, Values]) -> None:
        """Put the values to return that a micro-batch has made beside those of the others."""
        if self.model.header.batch is None:
            return
        request, micro_batch = divmod(number, self._parts)
        for name in self._kept.intersection(action.writes) - self._once:
            value, made = values[name], results[request]
            if micro_batch < self._times[name]:
                if name not in made:
                    made[name] = value.new_empty((self._times[name], *value.shape))
                made[name][micro_batch].copy_(value)
                values[name] = made[name][micro_batch]

    def _act(self, action: Action, number: int, values: Values) -> Iterator[Waiting]:
        step = self.model.steps[action.index]
        if isinstance(step, Segment):
            self._compute(action.index, step, values)
        elif action.role is Role.SEND:
            with failing(f"rank {self.model.rank}:", step):
                self.communicator.send(step, number, values[step.comm.source])
        elif step.keeps_all:
            values[step.comm.target] = values[step.comm.source]
        else:
            in_place = step.comm.target in self._in_place
            assert step.target is not None
            name = step.comm.target
            target = values[step.comm.source] if in_place else self._place(name, step.target)
            yield Waiting(step, number)
            with failing(f"rank {self.model.rank}:", step):
                values[step.comm.target] = self.communicator.receive(step, number, target)

    def _place(self, name: str, type_: TensorType) -> torch.Tensor:
        place = self.places.into.get(name)
        return self._empty(type_) if place is None else place

    def _empty(self, type_: TensorType) -> torch.Tensor:
        return torch.empty(type_.shape, dtype=torch_dtype(type_.dtype), device=self._device)

    def _compute(self, index: int, segment: Segment, values: Values) -> None:
        for name in segment.writes:
            if name not in self.model.bounded:  # else its size is not known
                values[name] = self._place(name, self.model.types[name])
        with self.sessions.opened(index) as session:
            key = index, self.places.turn
            binding = self._bindings.get(key)
            if binding is None:
                binding = _Binding(session, session.io_binding(), self._nowhere.data_ptr())
            if segment.block is None:
                self._bindings[key] = binding
            self._run(binding, segment, values)

    def _run(self, binding: _Binding, segment: Segment, values: Values) -> None:
        types, device, io = self.model.types, self._device, binding.io
        for name in segment.reads:
            binding.place(io.bind_input, name, types[name], values[name])
        for name in segment.writes:
            if name in self.model.bounded:
                io.bind_output(name, device.type, device.index or 0)
            else:
                binding.place(io.bind_output, name, types[name], values[name])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            binding.session.run_with_iobinding(io)
        except Exception as error:
            raise BackendError(
                f"rank {self.model.rank}: ONNX Runtime: {one_line(error)}"
            ) from error
        for index, name in enumerate(segment.writes):
            if name in self.model.bounded:
                array = io.get_outputs()[index].numpy()
                values[name] = from_numpy(array, types[name].dtype).to(device)


@dataclass(frozen=True)
class _Binding:
    """A session with the memory of its inputs and outputs, whose addresses are by name."""

    session: ort.InferenceSession
    io: ort.IOBinding
    nowhere: int  # the address of tensors without elements
    addresses: dict[str, int] = field(default_factory=dict)

    def place(
        self, bind: Callable[..., None], name: str, type_: TensorType, at: torch.Tensor
    ) -> None:
        """Tell the session where a value lies, if that has changed since its last run."""
        address = at.data_ptr() or self.nowhere
        if self.addresses.get(name) != address:
            index, element = at.device.index or 0, onnx_dtype(type_.dtype)
            bind(name, at.device.type, index, element, type_.shape, address)
            self.addresses[name] = address


def _actions(steps: Sequence[Segment | Cut]) -> Iterator[Action]:
    for index, step in enumerate(steps):
        if isinstance(step, Segment):
            if step.writes:
                yield Action(index, Role.COMPUTE, step.phase, step.reads, step.writes)
            continue
        if step.source is not None:
            yield Action(index, Role.SEND, step.comm.phase, step.reads, ())
        if step.target is not None:
            yield Action(index, Role.RECEIVE, step.comm.target_phase, step.reads, step.writes)


def _frees(
    actions: Sequence[Action], kept: frozenset[str], *, in_phases: bool
) -> Mapping[Action, list[str]]:
    ordered = sorted(actions, key=lambda a: (a.phase if in_phases else 0, a.index, a.role))
    last = {name: action for action in ordered for name in (*action.reads, *action.writes)}
    frees: dict[Action, list[str]] = {action: [] for action in actions}
    for name, action in last.items():
        if name not in kept:
            frees[action].append(name)
    return frees


def _in_place(steps: Sequence[Segment | Cut], kept: frozenset[str]) -> Iterator[str]:
    """Targets of all-reduces that may overwrite their source: nothing else reads it."""
    reads = Counter(name for step in steps for name in step.reads)
    computed = {name for step in steps if isinstance(step, Segment) for name in step.writes}
    for step in steps:
        if isinstance(step, Cut) and step.comm.kind is CommKind.ALL_REDUCE:
            source = step.comm.source
            if source in computed and source not in kept and reads[source] == 1:
                yield step.comm.target
