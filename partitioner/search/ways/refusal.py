"""One refusal for all ways: the one that comes nearest, and the least changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partitioner.search.what_would_fit import Change
from partitioner.solver import Infeasible


class Nearly(Infeasible):
    """No plan of a way fits the request as it is, but one is known under a change of it.

    Attributes:
        changes: The changes.
    """

    def __init__(self, changes: tuple[Change, ...]) -> None:
        super().__init__("", proven=False)
        self.changes = changes


def joined(
    refusals: Sequence[Infeasible], changes: Iterable[Change], left: Sequence[str]
) -> Infeasible:
    """The refusal of all ways.

    Args:
        refusals: Those of the ways that were searched; at least one.
        changes: Under which plans are known. Of several limits of memory the least is said.
        left: Why other ways were not searched, a clause each.
    """
    short = [refusal for refusal in refusals if refusal.device is not None]
    nearest = min(short, key=lambda refusal: refusal.bytes_short, default=refusals[0])
    clauses = [str(one) for one in refusals if one is not nearest and one.device is None]
    clauses = [*(text for text in clauses if text), *left]
    ways = tuple(dict.fromkeys(change.text for change in _least(changes)))
    fits = f"; it fits {' or '.join(ways)}" if ways else ""
    text = "; ".join([f"{nearest}{fits}", *dict.fromkeys(clauses)])
    return nearest.saying(text, ways)


def _least(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The changes, of those that give more memory the one that gives least."""
    changes = tuple(changes)
    limits = [c.memory_bytes for c in changes if c.memory_bytes is not None]
    return tuple(c for c in changes if c.memory_bytes is None or c.memory_bytes == min(limits))
