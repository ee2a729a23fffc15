"""Parts of values that several phases of a device read, and the phase that fetches them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partitioner.ir.phases import PhaseError, StepOrder


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
        """Tell whether a phase runs behind the one that makes the value, and before all readers."""
        is_before = self.order.is_before
        return (phase == self.made or is_before(self.made, phase, self.device)) and all(
            phase == reader or is_before(phase, reader, self.device) for reader in self.readers
        )
