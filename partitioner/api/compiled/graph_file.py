"""`graph.json` of a saved compilation: its plan's graph, which is looked at without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.api.compiled.folder import read_object
from partitioner.foundations.files import ResultError
from partitioner.frontends.inputs import InputRange
from partitioner.ir.graph import Graph
from partitioner.ir.graph_data import GraphDataError, graph_data, graph_of, type_data, type_of

#: Name of the file.
FILE = "graph.json"
VERSION = 1


@dataclass(frozen=True)
class GraphFile:
    """The contents of `graph.json`, see `Model`; contents of weights are left out."""

    name: str
    graph: Graph
    delivered: frozenset[str]
    ranges: Mapping[str, InputRange]

    def write(self, folder: Path) -> None:
        """Write `graph.json`."""
        data = {
            "version": VERSION,
            "name": self.name,
            "delivered": sorted(self.delivered),
            "ranges": {
                name: [type_data(of.type), None if of.span is None else list(of.span)]
                for name, of in self.ranges.items()
            },
            "graph": graph_data(self.graph),
        }
        (folder / FILE).write_text(json.dumps(data, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, folder: Path, digest: str) -> GraphFile:
        """Read `graph.json`.

        Args:
            folder: Folder of a saved compilation.
            digest: Digest of the graph, as the folder's request has it.

        Raises:
            ResultError: It is missing, malformed or of another version, or the graph is another.
        """
        data = read_object(folder, FILE)
        if data.get("version") != VERSION:
            raise ResultError(f"{folder}: {FILE} is version {data.get('version')!r}, not {VERSION}")
        try:
            graph = graph_of(data["graph"])
            stored = cls(
                str(data["name"]), graph, frozenset(data["delivered"]), _ranges(data["ranges"])
            )
        except GraphDataError as error:
            raise ResultError(f"{folder}: {FILE}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResultError(f"{folder}: {FILE} is malformed: {error!r}") from None
        if graph.digest != digest or not stored.delivered <= set(graph.types):
            raise ResultError(
                f"{folder}: {FILE} is not of the graph that request.json is of: it was changed "
                "since; partition again"
            )
        return stored


def _ranges(data: Mapping[str, Any]) -> dict[str, InputRange]:
    ranges = {}
    for name, (type_, span) in data.items():
        if span is not None:
            low, high = span
            if type(low) is not int or type(high) is not int or low >= high:
                raise ValueError(f"range {span} of {name!r}")
            span = low, high
        ranges[name] = InputRange(type_of(type_), span)
    return ranges
