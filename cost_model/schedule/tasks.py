"""Tasks of a schedule: nodes on their groups, and communications between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partitioner.ir.layout import Placement
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm

Key = tuple[str, Placement]  #: A value under one placement.
LocalKey = tuple[int, Key]  #: Its part on one device.


@dataclass(frozen=True)
class Task:
    """A node on its group, or a communication."""

    name: str  #: Name of the node, or kind and value of the communication.
    #: Seconds by device that it occupies. Of a communication that passes beside compute (see
    #: `cost_model.prices.overlap`), those that are not hidden.
    devices: Mapping[int, float]
    reads: tuple[LocalKey, ...]  #: Local tensors that it reads.
    writes: tuple[tuple[int, Key, int], ...]  #: Local tensors that it writes, with their bytes.
    placed: PlacedNode | None = None  #: The node; None for communications.
    #: The communication, with its place in the global order as `seq`; None for nodes.
    comm: Comm | None = None
    phase: int = 0  #: Cross-group hops from the inputs (see `Compute.phase`); of the sending side.
    target_phase: int = 0  #: Phase in which the targets of a communication receive.
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
    def waits(self) -> bool:
        """Tell whether the task's devices wait for each other: a node's do if it sends inside."""
        return self.kind == "comm" or (self.placed is not None and bool(self.placed.sent))

    @property
    def longest_s(self) -> float:
        """Seconds on the device that it occupies longest."""
        return max(self.devices.values(), default=0.0)
