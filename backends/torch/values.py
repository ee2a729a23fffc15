"""Which values of a rank's program the nodes of its graph make.

The notes lie where PyTorch keeps them through export and archives, so that a graph read from a rank
file can be watched as well as the one that it was written from. Export drops those of arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

#: PyTorch's key in a node's `meta` of what it carries along, and ours in that.
_CUSTOM, _VALUES = "custom", "partitioner.values"
#: Index of a result that is all that a node gives.
_ALL = -1


def note_values(known: Mapping[str, object]) -> None:
    """Note at the nodes of a graph which values they make.

    Args:
        known: Node by local value; what is no node is left out.
    """
    for name, node in known.items():
        if not isinstance(node, fx.Node):
            continue
        made: tuple[object, object] = (node, _ALL)
        if node.target is operator.getitem:  # export writes these anew
            made = node.args[0], node.args[1]
        maker, index = made
        assert isinstance(maker, fx.Node)
        maker.meta.setdefault(_CUSTOM, {}).setdefault(_VALUES, {})[name] = index


def move_notes(node: fx.Node, other: fx.Node) -> None:
    """Another node now makes the values of a node."""
    if _CUSTOM in node.meta:
        other.meta[_CUSTOM] = node.meta[_CUSTOM]


def noted_values(
    node: fx.Node, made: object, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of some values that a node makes.

    Args:
        node: The node.
        made: What it gave.
        names: Local values that are asked for.
    """
    custom = node.meta.get(_CUSTOM)
    noted = custom.get(_VALUES) if isinstance(custom, dict) else None
    for name, index in noted.items() if isinstance(noted, dict) else ():
        if name not in names:
            continue
        found = made
        if index != _ALL and isinstance(made, tuple | list):
            found = made[index] if index in range(len(made)) else None
        elif index != _ALL:  # in files, what takes a result apart has the notes of all of them
            found = None
        if isinstance(found, torch.Tensor):
            yield name, found
