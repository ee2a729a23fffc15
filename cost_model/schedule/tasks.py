"""Tasks of a schedule, and the parts of values that several phases of a device read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.ir.layout import Placement
from partitioner.ir.phases import PhaseError, StepOrder
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm

Key = tuple[str, Placement]  #: A value under one placement.
LocalKey = tuple[int, Key]  #: Its part on one device.


@dataclass(frozen=True)
class Task:
    """A node on its group, or a communication."""

    name: str  #: Name of the node, or kind and value of the communication.
    #: Seconds by device that it occupies. Of a communication that passes beside compute (see
    #: `cost_model.prices.reshard`), those that are not hidden.
    devices: Mapping[int, float]
    reads: tuple[LocalKey, ...]  #: Local tensors that it reads.
    writes: tuple[tuple[int, Key, int], ...]  #: Local tensors that it writes, with their bytes.
    placed: PlacedNode | None = None  #: The node; None for communications.
    #: The communication, with its place in the global order as `seq`; None for nodes.
    comm: Comm | None = None
    phase: int = 0  #: Phase of its step, of `Schedule.order`; of the sending side.
    target_phase: int = 0  #: Phase in which the targets of a communication receive.
    #: Moves between groups from the inputs on, by which several requests in flight take turns (see
    #: `simulate`); of the sending side.
    hops: int = 0
    target_hops: int = 0  #: The same of the targets of a communication.
    #: (new, old) local tensors: new names of existing buffers.
    aliases: tuple[tuple[LocalKey, LocalKey], ...] = ()
    #: Seconds by device that it takes beside compute.
    hidden: Mapping[int, float] = field(default_factory=dict)
    #: Whether it is priced as one that may share a bucket, before buckets are known.
    may_share: bool = False

    @property
    def kind(self) -> str:
        """Lane of the task: "compute" or, of communications and aliases, "comm"."""
        return "comm" if self.comm is not None or self.placed is None else "compute"

    @property
    def of_node(self) -> str:
        """Name of the node that is computed or communicated for; "" for new names of tensors."""
        if self.comm is not None:
            return self.comm.why
        return self.name if self.placed is not None else ""

    @property
    def returns(self) -> bool:
        """Tell whether it is the moment at which devices wait for a result that they return."""
        return self.placed is None and self.comm is None and not self.aliases

    @property
    def waits(self) -> bool:
        """Tell whether the task's devices wait for each other: a node's do if it sends inside."""
        return self.kind == "comm" or (self.placed is not None and bool(self.placed.sent))

    @property
    def meetings(self) -> frozenset[tuple[int, ...]]:
        """The sets of devices that wait for each other within a phase, in it alone."""
        if self.comm is not None:
            return frozenset({self.comm.meeting} - {()})
        if self.placed is None or not self.placed.sent:
            return frozenset()
        return frozenset(self.placed.group(point) for _, point in self.placed.mesh.coords())

    @property
    def whole_s(self) -> Mapping[int, float]:
        """Seconds by device, with those that it takes beside compute."""
        return {device: s + self.hidden.get(device, 0.0) for device, s in self.devices.items()}

    @cached_property
    def sending(self) -> Mapping[int, float]:
        """Seconds by device of a communication's sources."""
        assert self.comm is not None
        return {d: seconds for d, seconds in self.devices.items() if d in self.comm.sources()}

    @cached_property
    def receiving(self) -> Mapping[int, float]:
        """Seconds by device of a communication's targets."""
        assert self.comm is not None
        return {d: seconds for d, seconds in self.devices.items() if d in self.comm.targets()}

    @property
    def longest_s(self) -> float:
        """Seconds on the device that it occupies longest."""
        return max(self.devices.values(), default=0.0)


@dataclass(frozen=True)
class NeededPart:
    """A part of a value that several phases of its devices read, in no order that data decide."""

    why: str  #: The node that reads it before it is there.
    value: str  #: Name of the value.
    order: StepOrder  #: The order of the phases.
    device: int  #: A device that holds the part.
    made: int  #: The phase that makes the value.
    #: Phases that read the part, or that were to fetch it. In split schedules a lane of two stages
    #: may run the weight gradients of one before or behind the backward pass of the other one, from
    #: micro-batch to micro-batch.
    readers: frozenset[int]

    def and_by(self, other: NeededPart) -> NeededPart:
        """The same part with the readers of both."""
        return replace(other, readers=self.readers | other.readers)

    @property
    def phase(self) -> int:
        """The last phase in which the device may fetch the part for all its readers.

        Raises:
            PhaseError: There is none.
        """
        earlier = [phase for phase in self.order.own(self.device) if phase <= min(self.readers)]
        before = [phase for phase in earlier if self._serves(phase)]
        if not before:
            shown = (" ".join(map(str, self.order.phases.of(p))) for p in sorted(self.readers))
            raise PhaseError(
                f"{self.why!r} reads {self.value!r}, which device {self.device} needs in "
                f"{' and '.join(shown)}: it has no phase in which it could get it for both"
            )
        return max(before)

    def _serves(self, phase: int) -> bool:
        is_before = self.order.is_before
        return (phase == self.made or is_before(self.made, phase, self.device)) and all(
            phase == reader or is_before(phase, reader, self.device) for reader in self.readers
        )
