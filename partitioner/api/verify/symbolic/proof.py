"""The verdict on rank programs that were followed: proven, wrong, or not proven."""

from __future__ import annotations

from dataclasses import dataclass

from partitioner.foundations import units

#: Note on a verdict on the graph of a plan in blocks, which computes a model block by block.
IN_BLOCKS = "as its blocks compute it"


@dataclass(frozen=True)
class Refusal:
    """The first step of a rank that is not the model's."""

    rank: int
    step: str  #: The node, communication, constant or output; "" of the program as a whole.
    why: str
    is_wrong: bool  #: Whether it contradicts the model; else it cannot be followed.

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"rank {self.rank}", self.step))) + f": {self.why}"


@dataclass(frozen=True)
class Proof:
    """The result of a symbolic verification; true if the ranks are proven to compute the model.

    Attributes:
        ranks: Number of ranks followed.
        refusal: The first step that is wrong or cannot be followed; None if there is none.
        unread: Constants whose values were not compared, as their files are not here.
        notes: What the verdict is of, where that is not all of the rank files.
    """

    ranks: int
    refusal: Refusal | None = None
    unread: int = 0
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Tell whether all ranks together are proven to compute the whole model."""
        return self.refusal is None

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 proven, 1 wrong, 4 not proven."""
        if self.refusal is None:
            return 0
        return 1 if self.refusal.is_wrong else 4

    def __bool__(self) -> bool:
        return self.proven

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if self.refusal is None:
            return "proven"
        return "WRONG" if self.refusal.is_wrong else "not proven"

    @property
    def line(self) -> str:
        """The result with what it is of, in one line."""
        return ", ".join((self._said, *self.notes))

    @property
    def _said(self) -> str:
        if self.refusal is not None:
            return f"{self.verdict}: {self.refusal}"
        compute = "computes" if self.ranks == 1 else "compute"
        return f"{self.verdict}: {units.count(self.ranks, 'rank')} {compute} the whole model"

    def __str__(self) -> str:
        if self.refusal is not None:
            return self._said
        lines = [self._said]
        if self.unread:
            lines.append(
                f"  the values of {units.count(self.unread, 'constant')} were not compared"
            )
        return "\n".join((*lines, *(f"  {note}" for note in self.notes)))
