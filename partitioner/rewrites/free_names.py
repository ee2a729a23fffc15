"""Names for what a rewriting of a graph adds to it."""

from __future__ import annotations


def free_name(name: str, taken: set[str]) -> str:
    """The name, or with a number that makes it free; it is then taken."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    taken.add(free)
    return free
