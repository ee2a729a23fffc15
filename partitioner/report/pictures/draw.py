"""The partitioned graph as a picture of a page's size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from partitioner.report.pictures.canvas import (
    COMM,
    GROUPS,
    INK,
    LIGHT,
    PAPER,
    QUIET,
    STRONG,
    draw_file,
    drawable,
    group_colour,
    tint,
)
from partitioner.report.pictures.fold import (
    Arc,
    Diagram,
    End,
    box_lines,
    comm_lines,
    fold,
    group_indices,
    terminal_lines,
)
from partitioner.report.pictures.layers import Layout, Point, arrange
from partitioner.report.pictures.timeline import draw_timeline
from partitioner.report.planned import Planned
from partitioner.report.steps import INPUT, OUTPUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_BOXES", "draw_graph", "draw_timeline"]

MAX_BOXES = 60  #: Larger graphs are drawn folded.

_BOX_INCHES = 1.45  #: Width of a box.
_ROW_INCHES = 0.42  #: From layer to layer.
_BOX_SHARE = 0.58  #: Height of a box, of a layer's.
_ASPECT = 1.25  #: Height over width that the picture aims at.
_FONT, _SMALL = 6.0, 5.0  #: In points.
_LABEL = 0.5  #: Room on the right for the labels of edges, in boxes.
_MAX_LEGEND = 24  #: Device groups in the legend.
_CORNER_INCHES = 0.25  #: Distance from a corner within which an edge is curved.
_MIN_INCHES = 3.5  #: Width of the smallest picture: a column of a page.


def draw_graph(result: Planned, path: str | Path, *, boxes: int = MAX_BOXES) -> None:
    """Draw the partitioned graph, folded (`fold`) to at most `boxes` boxes.

    Each device group has a colour; cut nodes have a strong one and their cut as text, replicated
    ones are dashed. Edges that need communications are thick and vermillion, with kind, bytes
    between devices and seconds where they are first needed.
    """
    draw_file(path, lambda: _figure(result, fold(result, boxes)))


def _figure(result: Planned, diagram: Diagram) -> Figure:
    from matplotlib.figure import Figure

    graph, cluster, pictured = result.graph, result.cluster, nx.DiGraph()
    pictured.add_nodes_from(end for end in diagram.terminals if end[0] == INPUT)
    pictured.add_nodes_from(range(len(diagram.boxes)))
    pictured.add_nodes_from(end for end in diagram.terminals if end[0] == OUTPUT)
    pictured.add_edges_from(_downward(arc) for arc in diagram.arcs)
    layout = arrange(pictured, _ASPECT * _BOX_INCHES / _ROW_INCHES)
    many = len(result.plan.groups) > len(GROUPS)  # colours repeat: boxes must name their group
    label = _LABEL if any(arc.comms for arc in diagram.arcs) else 0.0
    wide = max(_MIN_INCHES, (layout.width + 0.2 + label) * _BOX_INCHES)
    figure = Figure(figsize=(wide, (layout.rows + 2.6) * _ROW_INCHES))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    spare = (wide / _BOX_INCHES - layout.width - label) / 2
    axes.set_xlim(-spare, layout.width + label + spare)
    axes.set_ylim(layout.rows + 0.9, -1.7)
    axes.axis("off")
    for arc in diagram.arcs:
        _draw_arc(axes, layout, arc)
    numbers = group_indices(result)
    for index, box in enumerate(diagram.boxes):
        group = numbers[box.mesh]
        colour = group_colour(group)
        _rectangle(
            axes,
            layout.at[index],
            facecolor=tint(colour, STRONG if box.is_cut else LIGHT),
            edgecolor=tint(colour, 1.0),
            linestyle="--" if box.cut == "replicated" else "-",
            linewidth=0.8,
        )
        lines = box_lines(box, f"group {group}" if many else "")
        _two_lines(axes, layout.at[index], lines)
    for end, values in diagram.terminals.items():
        at = layout.at[end]
        _rectangle(axes, at, facecolor=PAPER, edgecolor=QUIET, linewidth=0.6, rounding=0.08)
        first_type = str(graph.types[values[0]])
        _two_lines(axes, at, terminal_lines(values, end[0], first_type))
    count = f"{len(graph.nodes)} nodes"
    if len(diagram.boxes) < len(graph.nodes):
        count += f" in {len(diagram.boxes)} boxes"
    title = f"{drawable(graph.name, 40)} on {drawable(cluster.name, 40)}, {count}"
    top = 1 - 0.08 / figure.get_figheight()
    figure.text(0.5, top, title, ha="center", va="top", fontsize=8)
    _legend(figure, result, diagram, many=many)
    return figure


def _draw_arc(axes: Axes, layout: Layout, arc: Arc) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Outline

    edge = _downward(arc)
    (x0, y0), *between, (x1, y1) = layout.routes[edge]
    points = [(x0, y0 + _BOX_SHARE / 2), *between, (x1, y1 - _BOX_SHARE / 2)]
    if edge != (arc.source, arc.target):
        points.reverse()
    colour, width = (COMM, 1.3) if arc.needs_comm else (QUIET, 0.6)
    # Corners are round, all else is straight.
    vertices, codes = [points[0]], [int(Outline.MOVETO)]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_toward(here, before), here, _toward(here, after)]
        codes += [int(Outline.LINETO), int(Outline.CURVE3), int(Outline.CURVE3)]
    vertices, codes = [*vertices, points[-1]], [*codes, int(Outline.LINETO)]
    axes.add_patch(
        FancyArrowPatch(
            path=Outline(vertices, codes),
            arrowstyle="-|>",
            mutation_scale=5,
            color=colour,
            linewidth=width,
            linestyle=":" if arc.needs_comm and not arc.comms else "-",
            shrinkA=0,
            shrinkB=0,
            zorder=2 if arc.needs_comm else 1,
            joinstyle="round",
        )
    )
    if arc.comms:
        (x0, y0), (x1, y1) = points[0], points[1]
        axes.text(
            (x0 + x1) / 2 + 0.02,
            (y0 + y1) / 2,
            "\n".join(comm_lines(arc.comms)),
            fontsize=_SMALL,
            color=COMM,
            ha="left",
            va="center",
            zorder=5,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
        )


def _legend(figure: Figure, result: Planned, diagram: Diagram, *, many: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {box.mesh for box in diagram.boxes}
    groups = [(mesh, i) for mesh, i in group_indices(result).items() if mesh in used]
    entries: list[Any] = [
        Patch(facecolor=tint(group_colour(i), STRONG), edgecolor=group_colour(i), label=name)
        for mesh, i in groups[:_MAX_LEGEND]
        for name in (f"{i}: {mesh}" if many else str(mesh),)
    ]
    if len(groups) > _MAX_LEGEND:
        entries.append(Patch(visible=False, label=f"and {len(groups) - _MAX_LEGEND} more"))
    if any(box.is_cut for box in diagram.boxes):
        entries.append(Patch(facecolor=tint(INK, 0.35), edgecolor=INK, label="cut"))
    if any(box.cut == "replicated" for box in diagram.boxes):
        pale = tint(INK, 0.1)
        entries.append(Patch(facecolor=pale, edgecolor=INK, linestyle="--", label="replicated"))
    if any(arc.needs_comm for arc in diagram.arcs):
        entries.append(Line2D([], [], color=COMM, linewidth=1.3, label="communication"))
    columns = max(1, min(len(entries), int(figure.get_figwidth() / 1.1)))
    figure.legend(handles=entries, loc="lower center", ncols=columns, fontsize=_FONT, frameon=False)


def _downward(arc: Arc) -> tuple[End, End]:
    """The ends of the arc, the upper first: stretches (`fold`) may feed each other both ways."""
    if isinstance(arc.source, int) and isinstance(arc.target, int) and arc.source > arc.target:
        return arc.target, arc.source
    return arc.source, arc.target


def _rectangle(axes: Axes, at: Point, *, rounding: float = 0.04, **look: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch(
        (at[0] - 0.5, at[1] - _BOX_SHARE / 2),
        1.0,
        _BOX_SHARE,
        boxstyle=f"round,pad=0,rounding_size={rounding}",
        mutation_aspect=_BOX_INCHES / _ROW_INCHES,
        zorder=3,
        **look,
    )
    axes.add_patch(box)


def _two_lines(axes: Axes, at: Point, lines: Sequence[str]) -> None:
    for line, shift, size, colour in zip(
        lines, (-0.12, 0.14), (_FONT, _SMALL), (INK, "#444444"), strict=True
    ):
        look: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
        axes.text(at[0], at[1] + shift, line, fontsize=size, color=colour, **look)


def _toward(corner: Point, other: Point) -> Point:
    """The point `_CORNER_INCHES` from the corner towards another, at most half way."""
    x, y = other[0] - corner[0], other[1] - corner[1]
    inches = math.hypot(x * _BOX_INCHES, y * _ROW_INCHES)
    share = min(0.5, _CORNER_INCHES / inches) if inches else 0.0
    return corner[0] + share * x, corner[1] + share * y
