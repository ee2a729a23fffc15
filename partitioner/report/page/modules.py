"""The modules that readers know a model by: its layers, and what is beside them.

The first part of a module path (`blocks.paths`) that has a number is a layer. Modules that hold
layers are told by their parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.pieces.folding import Path, is_name


@dataclass(frozen=True)
class Modules:
    """The layers among module paths."""

    paths: Collection[Path]

    def unit(self, path: Path) -> Path:
        """The layer of a path, or its module outside layers; () of what has no such module."""
        if not path or not is_name(path[0]) or path in self._around:
            return ()
        at = layer_at(path)
        if at < len(path):
            return path[: at + 1]
        return path[: 1 + max(depth for depth in range(len(path)) if path[:depth] in self._around)]

    def text(self, path: Path) -> str:
        """A path without what the paths of all layers begin with: "h.3.attn"."""
        return ".".join(path[self._shared :] if path[: self._shared] in self._around else path)

    @cached_property
    def _around(self) -> Collection[Path]:
        """List what holds layers, and what is around that."""
        held = {path[:depth] for path in self._stems for depth in range(len(path))}
        return held | {()}

    @cached_property
    def _stems(self) -> Sequence[Path]:
        """The paths of all layers, without their numbers."""
        found: dict[Path, None] = {}
        for path in self.paths:
            at = layer_at(path)
            if at < len(path) and is_name(path[0]):
                found[(*path[:at], path[at].rsplit(".", 1)[0])] = None
        return list(found)

    @cached_property
    def _shared(self) -> int:
        """Count the parts that the paths of all layers begin with."""
        if not self._stems:
            return 0
        holders = [stem[:-1] for stem in self._stems]
        same = (len(set(parts)) == 1 for parts in zip(*holders, strict=False))
        return next((at for at, equal in enumerate(same) if not equal), min(map(len, holders)))


def layer_at(path: Path) -> int:
    """Find where a path has its layer; its length if it has none."""
    numbered = (at for at, part in enumerate(path) if re.search(r"\.\d+$", part))
    return next(numbered, len(path))
