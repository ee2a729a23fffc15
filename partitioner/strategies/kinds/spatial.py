"""Spatial parallelism as constraints on a graph: what works on images is cut along their dims.

Axes "d", "h" and "w" cut depth, height and width: the third last, the second last and the last dim
that windows slide over. An axis of another name cuts the first dim that none of these cuts and that
has an element for each device: height of images. Windows say where these dims are; from there they
are followed through the rules, so that every operator on an image is cut along it, gradients too.
The rest is solved: halos, where a chain of layers computes rows twice, and layers after the images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from partitioner.ir.graph import Graph
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.kinds.batch import Dim, follow
from partitioner.strategies.kinds.kind import Asked, whole_operators

#: Usual names of the mesh axes; the first if no mesh is given.
AXES = ("spatial", "d", "h", "w")
#: Dims of an image, counted from the end: names of axes, and for people.
_NAMED = {"d": -3, "h": -2, "w": -1}
_WORDS = {-3: "depth", -2: "height", -1: "width"}

Factors = Mapping[str, Mapping[int, str]]  #: By node: its factor that is each dim of an image.


def spatial_constraints(asked: Asked) -> Constraints:
    """Nodes on images, to be cut over the mesh axes of the kind."""
    graph, axes = asked.graph, asked.axes
    factors = image_factors(graph)
    busy = {}
    for axis, dim in _dims_of(graph, axes).items():
        if (largest := _largest(graph, dim)) < axes[axis]:
            raise ConstraintError(
                f"parallel spatial: axis {axis!r} has {axes[axis]} devices, and no convolution, "
                f"pool or resize has a {_word(dim)} of more than {largest}"
            )
        busy[axis] = {name: frozenset({dims[dim]}) for name, dims in factors.items() if dim in dims}
    return Constraints(busy=busy)


def spatial_notes(asked: Asked, plan: Plan) -> tuple[str, ...]:
    """Operators of the forward pass with windows that a plan does not cut along their image."""
    graph, notes = asked.graph, list[str]()
    factors, rules = image_factors(graph), rules_of(graph)
    for axis, dim in _dims_of(graph, asked.axes).items():
        slid = {
            name: (dims[dim],)
            for name, dims in factors.items()
            if dim in dims and _slides(rules[name])
        }
        if whole := whole_operators(graph, plan, axis, slid):
            cut = f"cut along {_word(dim)} over axis {axis}"
            notes.append(f"parallel spatial: {whole} cannot be {cut}")
    return tuple(notes)


@lru_cache(maxsize=8)
def image_factors(graph: Graph) -> Factors:
    """The factors that are dims of an image, counted from the end, of each node that has one."""
    by_node, seeds = defaultdict[str, dict[int, str]](dict), defaultdict[int, list[Dim]](list)
    rules = {name: rule for name, rule in rules_of(graph).items() if isinstance(rule, Rule)}
    for name, rule in rules.items():
        for operand, factor in rule.windows:
            value, dim = graph.by_name[name].inputs[operand], rule.dim_of(operand, factor)
            place = dim - graph.types[value].rank
            by_node[name][place] = factor
            seeds[place].append((value, dim))
    for place, dims in seeds.items():
        for name, factors in follow(graph, dims).factors.items():
            if len(factors) == 1:
                by_node[name].setdefault(place, *factors)
    return by_node


def _dims_of(graph: Graph, axes: Mapping[str, int]) -> Mapping[str, int]:
    """The dim of an image, counted from the end, that each axis cuts.

    An axis without a dim of its own cuts the first that is left, or the first that is large enough.
    If no window of the model slides over such a dim, a ConstraintError says so.
    """
    known = sorted({dim for dims in image_factors(graph).values() for dim in dims})
    free = [dim for dim in known if dim not in [_NAMED.get(axis) for axis in axes]]
    chosen = {}
    for axis, size in axes.items():
        dim = _NAMED.get(axis)
        if dim is None and free:
            dim = next((dim for dim in free if _largest(graph, dim) >= size), free[0])
            free.remove(dim)
        if dim is None or dim not in known:
            words = ", ".join(map(_word, known))
            raise ConstraintError(
                f"parallel spatial: axis {axis!r} has no dim to cut; windows of the model slide "
                f"over {words or 'no dims'}"
            )
        chosen[axis] = dim
    return chosen


def _word(dim: int) -> str:
    """A dim of an image for people; windows over channels of a volume slide over its dim -4."""
    return _WORDS.get(dim, f"dim {dim}")


def _largest(graph: Graph, dim: int) -> int:
    """Elements of a dim of the largest image that windows slide over."""
    rules = rules_of(graph)
    sizes = (
        rule.factors[dims[dim]].size
        for name, dims in image_factors(graph).items()
        if dim in dims and isinstance(rule := rules[name], Rule) and _slides(rule)
    )
    return max(sizes, default=0)


def _slides(rule: Rule | str) -> bool:
    return isinstance(rule, Rule) and bool(rule.windows)
