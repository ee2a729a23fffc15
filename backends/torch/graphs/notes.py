"""Notes at the nodes of a rank's graph: the program's values and steps that they are of.

PyTorch keeps the notes through export and archives, so that values can be observed in a graph read
from a rank file as in the original. Export drops the notes of arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, fx

#: A node of the plan by its name, or a communication by its position in the global order.
Task: TypeAlias = str | int

#: Key in a collective's `meta`: the communications that it carries.
COMM = "partitioner.comm"
#: Key in the `meta` of a call: the operator, if another function is called in its place.
OPERATOR = "partitioner.operator"
#: Key in a node's `meta` of the dict that PyTorch keeps, and our key in that.
_CUSTOM, _VALUES = "custom", "partitioner.values"
_TASKS = "partitioner.tasks"
#: Index of a node's only result.
_ONLY = -1


def note_values(known: Mapping[str, object]) -> None:
    """Note at the nodes of a graph which values they make; other entries are left out."""
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
    values = node.meta.get(_CUSTOM, {}).get(_VALUES)
    if values is not None:
        other.meta.setdefault(_CUSTOM, {})[_VALUES] = values


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


def note_tasks(nodes: Iterable[fx.Node], tasks: Iterable[Task]) -> None:
    """Note at nodes that do not say it yet which tasks of the plan they are of."""
    listed = list(tasks)
    for node in nodes:
        node.meta.setdefault(_CUSTOM, {}).setdefault(_TASKS, listed)


def join_tasks(graph: fx.Graph, joined: Mapping[Task, Sequence[Task]]) -> None:
    """Note at the nodes of some tasks that they are of all tasks that these were joined to."""
    for node in graph.nodes:
        tasks = noted_tasks(node)
        if len(tasks) == 1 and tasks[0] in joined:
            node.meta[_CUSTOM][_TASKS] = list(joined[tasks[0]])


def noted_tasks(node: fx.Node) -> tuple[Task, ...]:
    """The tasks that a node is of; none if it does not say."""
    custom = node.meta.get(_CUSTOM)
    tasks = custom.get(_TASKS) if isinstance(custom, dict) else None
    return tuple(tasks) if isinstance(tasks, list) else ()
