"""Search spaces of plans: the device groups that nodes may run on.

intra: one group of all devices, as a 1-D or 2-D mesh. inter: every device alone. hybrid: equal
sub-meshes. Each space is one problem of the same form; opaque nodes always stay on one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from partitioner.ir.checks import is_a, is_whole
from partitioner.ir.errors import OptionError
from partitioner.ir.mesh import COPIES, DeviceMesh

#: The spaces to search: operators sharded, operators placed whole, or both; or whole copies.
Strategy = Literal["auto", "intra", "inter", "copies"]


class SearchError(OptionError):
    """Wrong usage: a request for a search space that does not exist."""


@dataclass(frozen=True)
class Family:
    """A search space."""

    name: str  #: "intra", "inter", "hybrid", "copies" or, for one device, "single".
    groups: tuple[DeviceMesh, ...]  #: Device groups that nodes with a rule may run on.
    homes: tuple[DeviceMesh, ...]  #: Single-device groups that opaque nodes may run on.
    symmetric: bool  #: Whether a uniform cluster makes the groups interchangeable.

    def __str__(self) -> str:
        sizes = sorted({group.size() for group in self.groups})
        if len(sizes) > 1:
            shown = " and ".join(map(str, sizes))
            return f"{self.name} ({len(self.groups)} groups of {shown} devices)"
        shape = " ".join(f"{axis}={size}" for axis, size in self.groups[0].axes)
        number = len(self.groups)
        count = f"{number} {'groups of' if shape else 'x'} " if number > 1 else ""
        return f"{self.name} ({count}{shape or 'one device'})"


def families(
    strategy: str,
    devices: int,
    mesh: Mapping[str, int] | None = None,
    pinned: Collection[tuple[int, ...]] = (),
    kept: Sequence[DeviceMesh] = (),
) -> tuple[Family, ...]:
    """Search spaces of a strategy ("auto", "intra", "inter"), the cheapest to search first.

    Of "copies", each of which may be on one device, it is that of one.

    `mesh` has the axis sizes that intra plans must use; None searches all 1-D and 2-D meshes.
    `pinned` are the groups, ascending, that some nodes must run on: where no space has all of them,
    one of these groups and of the devices that are left is searched, too.
    `kept` are the meshes of a plan that is kept: a searched mesh of the same shape has their axes.

    Raises:
        SearchError: There is no such strategy, or the mesh is malformed or has another size.
    """
    check_space(strategy, devices, mesh)
    home = (DeviceMesh.single(0),)
    if devices == 1 or strategy == "copies":
        return (Family("single", home, home, symmetric=False),)
    sizes = [size for size in range(2, devices) if devices % size == 0]
    spaces: list[Family] = []
    if strategy != "inter":
        grids = ((devices,), *((devices // size, size) for size in sizes))
        meshes = [*map(DeviceMesh.grid, grids)] if mesh is None else [DeviceMesh.of(mesh)]
        spaces += [Family("intra", (one,), home, symmetric=False) for one in meshes]
    if strategy != "intra" and mesh is None:
        spaces.insert(1, _groups("inter", devices, 1))
    if strategy == "auto" and mesh is None:
        spaces += [_groups("hybrid", devices // size, size) for size in sizes]
        if not any(set(pinned) <= {group.devices for group in family.groups} for family in spaces):
            # the space of the pinned groups and, each alone, the devices in none of them
            left = sorted(set(range(devices)).difference(*pinned))
            groups_of = sorted({*pinned, *((device,) for device in left)})
            groups = tuple(DeviceMesh.grid((len(own),), own) for own in groups_of)
            homes = tuple(map(DeviceMesh.single, range(devices)))
            spaces.append(Family("hybrid", groups, homes, symmetric=False))
    if mesh is None and kept:
        named = ((one, tuple(group.named_as(kept) for group in one.groups)) for one in spaces)
        spaces = [replace(family, groups=groups) for family, groups in named]
    return tuple(spaces)


def check_space(strategy: str, devices: int, mesh: Mapping[str, int] | None) -> None:
    """Refuse a request without a search space; see `families`.

    A mesh of stages alone leaves the devices of each to the search.
    """
    check_strategy(strategy)
    check_mesh(mesh)
    if mesh is not None and [*mesh] == ["pp"] and devices % mesh["pp"] == 0:
        return
    if mesh is not None and math.prod(mesh.values()) != devices:
        shape = " * ".join(f"{axis}({size})" for axis, size in mesh.items())
        raise SearchError(f"mesh {shape} = {math.prod(mesh.values())} != {devices} devices")
    if mesh is not None and strategy in ("inter", "copies") and devices > 1:
        raise SearchError(
            "--mesh shapes intra plans, which shard operators; leave it out with strategy "
            f"{strategy!r}"
        )


def check_strategy(strategy: str) -> None:
    """Refuse an unknown strategy."""
    if strategy not in get_args(Strategy):
        raise SearchError(f"strategy {strategy!r} is not auto, intra, inter or copies")


def check_mesh(mesh: Mapping[str, int] | None) -> None:
    """Refuse a mesh that is not a mapping from axis names to sizes."""
    if mesh is not None and not is_a(mesh, Mapping):
        raise SearchError(f"mesh is {mesh!r}; give sizes by axis, as {{'dp': 2, 'tp': 2}}")
    for axis, size in (mesh or {}).items():
        if not is_a(axis, str) or not axis.isidentifier():
            raise SearchError(f"mesh axis {axis!r}: axis names are letters, digits and _")
        if not is_whole(size) or size < 1:
            raise SearchError(f"mesh axis {axis!r} has size {size!r}, not a whole number above 0")
    if COPIES in (mesh or {}):
        raise SearchError(
            f"mesh axis {COPIES!r} is that of whole copies: ask for strategy 'copies'"
        )


def _groups(name: str, count: int, size: int) -> Family:
    groups = tuple(
        DeviceMesh.grid((size,), tuple(range(g * size, (g + 1) * size))) for g in range(count)
    )
    homes = tuple(DeviceMesh.single(group.devices[0]) for group in groups)
    return Family(name, groups, homes, symmetric=True)
