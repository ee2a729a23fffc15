"""Profiles that are made up: the same seconds for each whole operator of a graph."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from partitioner.cost_model.prices.compute import shape_at
from partitioner.cost_model.profiles.database import write_entries
from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import form_of
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place


def write_profile(
    file: Path,
    graph: Graph,
    seconds: float,
    *,
    device: str,
    threads: int,
    processes: int,
    spread: float = 0.0,
) -> None:
    """Add an entry for the form of each whole operator."""
    whole = [place(graph, node, DeviceMesh.single(0), {}, None) for node in graph.nodes]
    forms = {form_of(graph, node, partial(shape_at, {})).key: node.node.op for node in whole}
    entries = [
        Entry(form, op, "float32", 1.0, 1, seconds, spread, 9, "backend", "2026", processes)
        for form, op in forms.items()
    ]
    write_entries(file, device, threads, entries)
