"""Names of nodes and results: each node has one, each output is a value of its own.

ONNX lets a node leave optional results out, but ONNX Runtime does not let every op do so: its
Attention needs both present results or none where there are past keys, its BatchNormalization and
Split crash on a result without a name. So absent results are named where the op needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from partitioner.frontends.onnx.reading.checks import (
    all_graphs,
    all_nodes,
    nested_graphs,
    own_opset,
)

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def fresh(name: str, taken: set[str | None]) -> str:
    """`name`, or `name_k` with the first k from 1 that is free; it is then taken."""
    count, free = 0, name
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    taken.add(free)
    return free


def name_nodes(nodes: Iterable[NodeProto]) -> None:
    """Give each unnamed node, in place, the name `Op_k`, k the first number that is free."""
    taken = {node.name for node in nodes}
    counts: dict[str, int] = {}
    for node in nodes:
        while not node.name:
            count = counts.get(node.op_type, 0)
            counts[node.op_type] = count + 1
            name = f"{node.op_type}_{count}"
            node.name = "" if name in taken else name


def distinct_outputs(graph: GraphProto) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Give an output that is an input, an initializer or a repeated output its own value, in place.

    Returns:
        The user's name of each such output, which it keeps, by the value's name; a note on each
        that is repeated, which cannot keep it.
    """
    sources = {value.name for value in (*graph.input, *graph.initializer)}
    taken: set[str | None] = {value.name for value in graph.output} | sources
    taken.update(name for node in graph.node for name in node.output)
    names: dict[str, str] = {}
    notes, seen = [], set[str]()
    for value in graph.output:
        user = value.name
        if user in sources or user in seen:
            value.name = fresh(f"{user}_output", taken)
            graph.node.add(
                op_type="Identity", name=f"Identity_{value.name}", input=[user], output=[value.name]
            )
            if user in seen:
                notes.append(
                    f"output {user!r} repeats another output: it is returned as {value.name!r}"
                )
            else:
                names[value.name] = user
        seen.add(user)
    return names, tuple(notes)


def name_results(proto: ModelProto) -> None:
    """Name the absent results that their op needs, and drop absent ones at the end, in place."""
    taken = {name for node in all_nodes(proto) for name in node.output}
    taken.update(name for function in proto.functions for name in function.input)
    for graph in all_graphs(proto):
        taken.update(value.name for value in (*graph.input, *graph.initializer))
    for holder in (proto, *proto.functions):
        opset = own_opset(holder)
        nodes = holder.graph.node if isinstance(holder, ModelProto) else holder.node
        for inner in (nodes, *(body.node for body in nested_graphs(nodes))):
            for node in inner:
                if node.domain == "" and "" in node.output and onnx.defs.has(node.op_type, opset):
                    _name_absent(node, onnx.defs.get_schema(node.op_type, opset), taken)


def _name_absent(node: NodeProto, schema: onnx.defs.OpSchema, taken: set[str]) -> None:
    results, formals = list(node.output), schema.outputs
    if any(a.name == "training_mode" and a.i for a in node.attribute):
        needed = [node.op_type == "BatchNormalization"] * len(results)
    else:
        options = [formals[min(i, len(formals) - 1)].option for i in range(len(results))]
        needed = [option != _OPTIONAL for option in options]
    count = last_present(bool(name) or must for name, must in zip(results, needed, strict=True))
    del node.output[count:]
    for index, name in enumerate(node.output):
        if not name and (needed[index] or node.op_type in {"Attention", "BatchNormalization"}):
            names = (f"{node.op_type}_unread_{number}" for number in itertools.count())
            node.output[index] = next(name for name in names if name not in taken)
            taken.add(node.output[index])


def last_present(present: Iterable[bool]) -> int:
    """The number of places up to the last one that is present."""
    return max((index + 1 for index, there in enumerate(present) if there), default=0)
