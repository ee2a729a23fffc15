"""The cuts that a link class has of its own: balanced, and in proportion to the devices' speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from partitioner.ir.layout import DimLayout, share_cut
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.rule import Rule

Axes = tuple[str, ...]
ClassCut = Mapping[str, DimLayout]  #: Layout of every factor of one link class.


@dataclass(frozen=True)
class ClassCuts:
    """Cuts on one mesh.

    Attributes:
        mesh: The device group.
        speeds: Of its devices, in the mesh's order, in any one unit; None if they are equal.
    """

    mesh: DeviceMesh
    speeds: tuple[float, ...] | None

    def own(self, rule: Rule, link: tuple[str, ...], axes: Axes) -> tuple[ClassCut, ...]:
        """The balanced cut of a class, and the one in proportion to speed if it is another.

        By speed, the factors of a class are cut in proportion to each other, as far as they have
        a common divisor of at least one unit a part.
        """
        sizes = {name: rule.factors[name].size for name in link}
        even = {name: self._even(size, axes) for name, size in sizes.items()}
        if all(self._by_speed(size, axes) == even[name] for name, size in sizes.items()):
            return (even,)
        units = math.gcd(*sizes.values())
        whole = min(units, *sizes.values()) >= self.mesh.size(axes)
        shared = {
            name: self._by_speed(size, axes, size // units if whole else 1)
            for name, size in sizes.items()
        }
        return (even,) if shared == even else (even, shared)

    def complete(self, rule: Rule, axes: Axes, found: ClassCut) -> ClassCut:
        """Cuts for the factors that are linked to those found: in proportion, else of its kind.

        In proportion, because the parts of a fused projection are cut between the same heads.
        """
        whole: dict[str, DimLayout] = {}
        for link in rule.links:
            like = next((found[name] for name in link if name in found), None)
            if like is not None:
                cut = self._by_speed if self.is_by_speed((like,)) else self._even
                sizes = {name: rule.factors[name].size for name in link}
                whole |= {n: _scaled(like, size) or cut(size, axes) for n, size in sizes.items()}
        return {**whole, **found}

    def is_by_speed(self, layouts: Iterable[DimLayout]) -> bool:
        """Whether parts lie nearer to those in proportion to speed than to balanced ones."""
        if self.speeds is None:
            return False
        nearer = 0
        for layout in layouts:
            size, axes = layout.size, layout.axes
            nearer += _distance(layout, self._even(size, axes))
            nearer -= _distance(layout, self._by_speed(size, axes))
        return nearer > 0

    def _even(self, size: int, axes: Axes) -> DimLayout:
        return DimLayout.even(size, axes, self.mesh)

    def _by_speed(self, size: int, axes: Axes, unit: int = 1) -> DimLayout:
        """In proportion to speed; balanced if speeds are equal or there are too few elements."""
        weights = _weights(self.mesh, axes, self.speeds) if self.speeds is not None else (1.0,)
        if len(set(weights)) == 1 or size // unit < len(weights):
            return self._even(size, axes)
        return DimLayout.cut(axes, [share_cut(size, weights, unit)])


@lru_cache(maxsize=4096)
def _weights(mesh: DeviceMesh, axes: Axes, speeds: tuple[float, ...]) -> tuple[float, ...]:
    """Speed of the slowest device at each coordinate: all at one coordinate have parts alike."""
    weights = [math.inf] * mesh.size(axes)
    for (_, point), speed in zip(mesh.coords(), speeds, strict=True):
        index = mesh.linear(axes, point)
        weights[index] = min(weights[index], speed)
    return tuple(weights)


def _distance(one: DimLayout, other: DimLayout) -> int:
    return sum(abs(a - b) for a, b in zip(one.sizes(), other.sizes(), strict=True))


@lru_cache(maxsize=65536)
def _scaled(layout: DimLayout, size: int) -> DimLayout | None:
    """The same cut of a dim of another size; None if that would cut an element."""
    parts = [[part * size for part in cuts] for cuts in layout.segments]
    if not layout.size or any(part % layout.size for cuts in parts for part in cuts):
        return None
    return DimLayout.cut(
        layout.axes, [tuple(part // layout.size for part in cuts) for cuts in parts]
    )
