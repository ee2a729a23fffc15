"""The cheapest paths over the positions of an order, of steps that hold bytes while they run.

A step keeps some of what it holds for the rest of the path. What it holds beside what steps before
it keep is within the room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

#: Most paths to a position that are followed: where constants of many sizes may stay or be loaded,
#: the paths of which none is both cheaper and lighter grow with the number of subsets.
MOST_PATHS = 64

Run = TypeVar("Run")


class Step(NamedTuple, Generic[Run]):
    """A way from a position to a later one.

    Attributes:
        stop: The later position.
        seconds: Seconds.
        held_bytes: Most bytes that it holds.
        kept_bytes: Of these, those that are held behind it.
        run: What it is; None for a node as it is.
    """

    stop: int
    seconds: float
    held_bytes: int
    kept_bytes: int
    run: Run | None = None


class Path(NamedTuple, Generic[Run]):
    """The way from the first position to another one."""

    seconds: float = 0.0
    kept_bytes: int = 0
    runs: tuple[Run, ...] = ()


def cheapest(
    steps: Mapping[int, Sequence[Step[Run]]], begin: int, stops: Collection[int], room: float
) -> Mapping[int, Path[Run]]:
    """The cheapest path within the room from a position to each stop that has one.

    Args:
        steps: By the position at which each begins.
        stops: Positions, and the last of them ends all paths.
    """
    paths: dict[int, list[Path[Run]]] = {begin: [Path()]}
    found = {}
    for at in range(begin, max(stops) + 1):
        here = undominated(paths.pop(at, ()))
        if here and at in stops:
            found[at] = here[0]
        for path in here:
            for step in steps.get(at, ()):
                if path.kept_bytes + step.held_bytes <= room:
                    runs = path.runs if step.run is None else (*path.runs, step.run)
                    kept = path.kept_bytes + step.kept_bytes
                    longer = Path(path.seconds + step.seconds, kept, runs)
                    paths.setdefault(step.stop, []).append(longer)
    return found


def undominated(paths: Sequence[Path[Run]]) -> Sequence[Path[Run]]:
    """The paths than which none is both cheaper and keeps less, the cheapest first.

    Of more than `MOST_PATHS` it keeps so many, the cheapest and the lightest among them.
    """
    front: list[Path[Run]] = []
    for path in sorted(paths, key=lambda path: (path.seconds, path.kept_bytes, len(path.runs))):
        if not front or path.kept_bytes < front[-1].kept_bytes:
            front.append(path)
    if len(front) <= MOST_PATHS:
        return front
    return [front[i * (len(front) - 1) // (MOST_PATHS - 1)] for i in range(MOST_PATHS)]
