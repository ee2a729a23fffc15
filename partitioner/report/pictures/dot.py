"""A partitioned graph as Graphviz source (https://graphviz.org/doc/info/lang.html)."""

from __future__ import annotations

from partitioner.report.pictures.canvas import (
    COMM,
    FAINT,
    LIGHT,
    QUIET,
    STRONG,
    group_colour,
    shown,
    tint,
)
from partitioner.report.pictures.fold import comm_lines, group_indices, how_cut
from partitioner.report.planned import Planned
from partitioner.report.steps import INPUT, NODE, OUTPUT, Terminal, edges, placed_nodes


def dot(result: Planned) -> str:
    """The text of a .dot file: a cluster for each device group, communications on the edges.

    A cut node has a strong colour and its cut as text, a replicated one is dashed. An edge that
    needs communications is vermillion, with their kind, bytes and seconds; dotted if an earlier one
    has them.
    """
    placed = placed_nodes(result.schedule)
    ids: dict[Terminal, str] = {(NODE, one.node.name): f"n{i}" for i, one in enumerate(placed)}
    ids.update({(INPUT, value): f"i{i}" for i, value in enumerate(result.graph.inputs)})
    ids.update({(OUTPUT, value): f"o{i}" for i, value in enumerate(result.graph.outputs)})
    title = _quoted(f"{shown(result.graph.name)} on {shown(result.cluster.name)}")
    lines = [
        "digraph plan {",
        f"  graph [label={title} labelloc=t fontname=Helvetica compound=true]",
        "  node [shape=box style=filled fontname=Helvetica fontsize=10 margin=0.08]",
        "  edge [fontname=Helvetica fontsize=9 arrowsize=0.6]",
    ]
    for mesh, index in group_indices(result).items():
        colour = group_colour(index)
        nodes = []
        for node in (one for one in placed if one.mesh == mesh):
            cut, name = how_cut(node), node.node.name
            label = "\n".join(filter(None, (shown(name), shown(node.node.op), shown(cut))))
            look = f'fillcolor="{tint(colour, STRONG if node.layouts else LIGHT)}" color="{colour}"'
            look += ' style="filled,dashed"' if cut == "replicated" else ""
            nodes.append(f"{ids[NODE, name]} [label={_quoted(label)} {look}]")
        if nodes:
            lines += [
                f"  subgraph cluster_{index} {{",
                f"    graph [label={_quoted(f'group {index}: {mesh}')} style=filled",
                f'      color="{colour}" fillcolor="{tint(colour, FAINT)}"]',
                *(f"    {node}" for node in nodes),
                "  }",
            ]
    for kind, values in ((INPUT, result.graph.inputs), (OUTPUT, result.graph.outputs)):
        for value in values:
            label = _quoted(f"{shown(value)}\n{result.graph.types[value]}")
            look = f'shape=ellipse fillcolor=white color="{QUIET}"'
            lines.append(f"  {ids[kind, value]} [label={label} {look}]")
    for edge in edges(result.graph, result.schedule):
        look = f"tooltip={_quoted(shown(edge.value))}"
        if edge.crosses:
            text = _quoted("\n".join(comm_lines(edge.new) if edge.new else ["(the same)"]))
            style = "bold" if edge.new else "dotted"
            look = f'label={text} style={style} color="{COMM}" fontcolor="{COMM}" {look}'
        lines.append(f"  {ids[edge.source]} -> {ids[edge.target]} [{look}]")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    """A quoted string; Graphviz would read escapes and, in labels, entities like &amp;."""
    safe = text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return '"' + safe.replace("\n", "\\n") + '"'
