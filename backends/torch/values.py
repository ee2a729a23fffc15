"""Notes at the nodes of a rank's graph of the program's values that they make.

PyTorch keeps the notes through export and archives, so that values can be observed in a graph read
from a rank file as in the original. Export drops the notes of arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, fx

#: Key in a node's `meta` of the dict that PyTorch keeps, and our key in that.
_CUSTOM, _VALUES = "custom", "partitioner.values"
#: Index of a node's only result.
_ONLY = -1


def note_values(known: Mapping[str, object]) -> None:
    """Note at the nodes of a graph which values they make.

    Args:
        known: Node by local value; entries other than nodes are left out.
    """
    for name, node in known.items():
        if not isinstance(node, fx.Node):
            continue
        index: object = _ONLY
        if node.target is operator.getitem:  # export writes these anew
            node, index = node.args[:2]
            assert isinstance(node, fx.Node)
        node.meta.setdefault(_CUSTOM, {}).setdefault(_VALUES, {})[name] = index


def move_notes(node: fx.Node, other: fx.Node) -> None:
    """Note at another node that it makes a node's values from now on."""
    if _CUSTOM in node.meta:
        other.meta[_CUSTOM] = node.meta[_CUSTOM]


def noted_values(
    node: fx.Node, result: object, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some local values, by name, in the result of a node."""
    custom = node.meta.get(_CUSTOM)
    noted = custom.get(_VALUES) if isinstance(custom, dict) else None
    for name, index in noted.items() if isinstance(noted, dict) else ():
        if name not in names:
            continue
        value = result
        if index != _ONLY and isinstance(result, tuple | list):
            value = result[index] if index in range(len(result)) else None
        elif index != _ONLY:  # in files, a getitem node has the notes of the node that it reads
            value = None
        if isinstance(value, Tensor):
            yield name, value
