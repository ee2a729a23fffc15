"""Factor rules: the loops of an op, and the dims of its tensors in terms of them.

A rule is written like an einsum over *factors* (loops of the op): ``b m k, b k n -> b m n``.
A dim is a factor, a compound ``(h d)`` of factors, major first (reshapes), a sum ``a + b`` of such
terms one after the other (Concat, Split, Slice), or ``1``. Everything else about an op follows
from its rule: the cuts that it allows, the layouts that a cut gives to operands and results,
pending reductions, local sizes, FLOPs. The notation follows Shardy's OpShardingRule.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from partitioner.ir.errors import IRError
from partitioner.ir.layout import (
    DimLayout,
    Interval,
    LayoutError,
    Segments,
    Sharding,
    concat,
    cut_text,
    product,
    split,
)
from partitioner.ir.loops.factors import (
    CUTTABLE,
    LOOPS,
    PENDING,
    PENDING_SIZE,
    DimExpr,
    Dims,
    Dispatch,
    Factor,
    FactorKind,
    Term,
    dim_text,
    listed,
    names_of,
    parse_dim,
    runs_of,
    single,
    solve_sizes,
)
from partitioner.ir.loops.windows import Parts, Window
from partitioner.ir.mesh import DeviceMesh

Names = str | Iterable[str]  #: Of factors: "m k" or ["m", "k"].
Tensors = str | Sequence[str | Sequence[str] | None]  #: Dims: "b m k, k n", or of each tensor.
Layouts = Mapping[str, DimLayout]  #: Layout of every cut factor.
Shardings = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]  #: Of operands, of results.


@dataclass(frozen=True)
class Rule:
    """The factor rule of one node."""

    factors: Mapping[str, Factor]
    #: Dims of every operand; None for an absent operand, or one that every device needs whole (a
    #: shape, a scalar setting).
    operands: tuple[Dims | None, ...]
    results: tuple[Dims | None, ...]  #: Dims of every result; None for an absent one.
    operand_shapes: tuple[tuple[int, ...], ...]  #: Sizes of every operand (() for absent).
    result_shapes: tuple[tuple[int, ...], ...]  #: Sizes of every result (() for absent).
    #: Operands that are added to the reduced result (a bias). They are partial where a summed
    #: factor that they lack is cut, so that they count once.
    addends: frozenset[int] = frozenset()
    #: Operands in which the op is jointly linear: the op of sums of parts is the sum of the op of
    #: the parts. Such a rule has a factor `PENDING` of kind LINEAR; cutting it over an axis means
    #: that these operands, and the results, are partial there.
    linear: frozenset[int] = frozenset()
    #: By operand and factor: that operand's dim is not the loop itself, but what a sliding window
    #: reads. A part of the loop needs a part of the dim with a halo. Or the dim lies in parts, one
    #: for each position of the loop; that may be a result too, counted behind the operands.
    windows: Mapping[tuple[int, str], Window | Parts] = field(default_factory=dict)
    #: Factors whose product is the number of loop iterations (default: all loops).
    points: tuple[str, ...] = ()
    flops_per_point: float = 0.0  #: FLOPs an iteration (a multiply-add counts 2), on average.
    #: Factor along which the FLOPs of an iteration grow evenly from the first, as of the rows of a
    #: causal mask; "" if they are the same throughout.
    rising: str = ""
    #: The two factors that one axis may cut both: iterations are sent to their device inside of the
    #: node; None without such.
    dispatch: Dispatch | None = None
    _cuts: dict[object, Shardings] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _layouts: dict[object, Layouts | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        operands: Tensors,
        results: Tensors,
        operand_shapes: Sequence[Sequence[int] | None],
        result_shapes: Sequence[Sequence[int] | None],
        *,
        sizes: Mapping[str, int] | None = None,
        reduce: Names | Mapping[str, str] = (),
        whole: Names = (),
        windows: Mapping[tuple[int, str], Window | Parts] | None = None,
        dropped: Names = (),
        summed: Names = (),
        rising: str = "",
        addends: Iterable[int] = (),
        linear: Iterable[int] = (),
        points: Names | None = None,
        flops: float = 0.0,
        dispatch: Dispatch | None = None,
    ) -> Rule:
        """Build and check a rule.

        Tensors are written ``"b m k, k n"`` or as lists of dims (``["b", "m", "k"]``); ``"_"`` or
        None is an operand outside the loops. ``s..`` stands for as many dims as the tensor has
        beside the others: ``s0 s1`` of an image. Shapes are None where a tensor is absent; dims
        given for it are ignored. `sizes` are those of factors that are no dim by themselves,
        `reduce` the factors in no result, which are summed, or maps them to another reduction.
        Factors in `whole` may not be cut; those in `dropped`, of elements that no result depends
        on, may be. Factors in `summed` are loops of some results, and those that lack them are sums
        over them, also where no result that has them is read. For `rising`, `dispatch` and
        `windows`, see `Rule`; factors of windows have the size of another dim.
        """
        sides = listed(operands, operand_shapes), listed(results, result_shapes)
        assert None not in sides[1] or None in result_shapes, f"a result without dims: {results}"
        runs = runs_of((*sides[0], *sides[1]), (*operand_shapes, *result_shapes))

        def expanded(names: Names) -> list[str]:
            given = names.split() if isinstance(names, str) else names
            return [part for name in given for part in runs.get(name, (name,))]

        ins, outs = (
            tuple(None if dims is None else tuple(map(parse_dim, expanded(dims))) for dims in side)
            for side in sides
        )
        if not isinstance(reduce, Mapping):
            reduce = dict.fromkeys(expanded(reduce), "sum")
        in_shapes = tuple(tuple(s) if s is not None else () for s in operand_shapes)
        out_shapes = tuple(tuple(s) if s is not None else () for s in result_shapes)
        slides = _checked_windows(windows or {}, (*ins, *outs), (*in_shapes, *out_shapes))
        loops = [
            None if dims is None else tuple(() if (i, single(e)) in slides else e for e in dims)
            for i, dims in enumerate((*ins, *outs))
        ]
        known = solve_sizes(
            (*loops[len(ins) :], *loops[: len(ins)]),
            (*out_shapes, *in_shapes),
            dict(sizes or {}),
        )
        sums = frozenset(expanded(summed))
        kinds = {
            **dict.fromkeys((*reduce, *sums), FactorKind.REDUCE),
            **dict.fromkeys((*names_of(outs), *expanded(dropped)), FactorKind.PASS),
            **dict.fromkeys(expanded(whole), FactorKind.WHOLE),
        }
        factors = {}
        for name in names_of((*ins, *outs)):
            if name not in kinds:
                raise IRError(
                    f"factor {name!r} is in no result, has no reduction and is not whole or dropped"
                )
            if name not in known:
                raise IRError(f"factor {name!r} has no size")
            reduction = reduce.get(name, "") if kinds[name] is FactorKind.REDUCE else ""
            reduction = "sum" if name in sums else reduction
            factors[name] = Factor(name, known[name], kinds[name], reduction)
        default_points = tuple(factors)
        if linear_operands := frozenset(linear):
            factors[PENDING] = Factor(PENDING, PENDING_SIZE, FactorKind.LINEAR, "sum")
        rule = cls(
            factors,
            ins,
            outs,
            in_shapes,
            out_shapes,
            frozenset(addends),
            linear_operands,
            slides,
            default_points if points is None else tuple(expanded(points)),
            flops,
            rising,
            dispatch,
        )
        rule._check()
        return rule

    def __str__(self) -> str:
        """``"m=4 k=6 (reduction) n=8: (m, k), (k, n) -> (m, n)"``."""
        notes = {FactorKind.PASS: "", FactorKind.REDUCE: " (reduction)"}
        windowed = {name for _, name in self.windows}
        factors = [
            f"{name}={factor.size}{notes.get(factor.kind, f' ({factor.kind})')}"
            f"{' (window)' if name in windowed else ''}"
            for name, factor in self.factors.items()
        ]
        sides = [
            ", ".join("_" if d is None else f"({', '.join(map(dim_text, d))})" for d in tensors)
            for tensors in (self.operands, self.results)
        ]
        return f"{' '.join(factors) or 'no factors'}: {' -> '.join(sides)}"

    @cached_property
    def key(self) -> Hashable:
        """A hashable value, equal for equal rules."""
        mappings = ("factors", "windows")
        names = [item.name for item in fields(self) if item.compare and item.name not in mappings]
        items = (tuple(getattr(self, name).items()) for name in mappings)
        return (*items, *(getattr(self, name) for name in names))

    @cached_property
    def links(self) -> tuple[tuple[str, ...], ...]:
        """Classes of factors that are cut together, as terms of a sum are, if all may be cut."""
        parent = {name: name for name in self.factors}

        def root(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        for dims in (*self.operands, *self.results):
            for expr in dims or ():
                heads = [term[0] for term in expr if term]
                for head in heads[1:]:
                    parent[root(head)] = root(heads[0])
        classes: dict[str, list[str]] = {}
        for name in self.factors:
            classes.setdefault(root(name), []).append(name)
        return tuple(
            tuple(members)
            for members in classes.values()
            if all(self.factors[name].kind in CUTTABLE for name in members)
        )

    @cached_property
    def read(self) -> frozenset[str]:
        """Factors of the operands' dims."""
        return frozenset(names_of(self.operands))

    @cached_property
    def is_pointwise(self) -> bool:
        """Tell whether each result element depends on one element of each operand."""
        kinds = {factor.kind for factor in self.factors.values()}
        loops = names_of(self.results[:1]).keys()
        return (
            not self.windows
            and kinds <= {FactorKind.PASS, FactorKind.LINEAR}
            and all(names_of([dims]).keys() <= loops for dims in (*self.operands, *self.results))
        )

    @cached_property
    def is_product(self) -> bool:
        """Tell whether two operands share a summed factor, and each has one of its own."""
        names = [names_of([dims]).keys() for dims in self.operands if dims is not None]
        summed = {n for n, factor in self.factors.items() if factor.kind is FactorKind.REDUCE}
        return self.flops_per_point > 0 and any(
            a & b & summed and a - b and b - a for a, b in itertools.combinations(names, 2)
        )

    def window(self, operand: int, expr: DimExpr) -> Window | Parts | None:
        """The window over a dim of an operand, or of a result behind them; None without one."""
        return self.windows.get((operand, single(expr))) if self.windows else None

    def dim_of(self, operand: int, name: str) -> int:
        """The dim of an operand, or of a result behind them, with the window of a factor."""
        dims = (*self.operands, *self.results)[operand]
        return [single(expr) for expr in dims or ()].index(name)

    def slides(self, layouts: Layouts) -> bool:
        """Test whether a cut gives devices windows: parts of equal sizes, but not alike."""
        return any(name in layouts for _, name in self.windows)

    @property
    def flops(self) -> float:
        """FLOPs of the whole op."""
        return self.flops_per_point * math.prod(self.factors[name].size for name in self.points)

    def local_sizes(
        self, layouts: Layouts, mesh: DeviceMesh, point: Mapping[str, int]
    ) -> dict[str, int]:
        """Size of every factor at a mesh coordinate."""
        return {
            name: layouts[name].local_size(mesh, point) if name in layouts else factor.size
            for name, factor in self.factors.items()
        }

    def dispatched(self, layouts: Layouts) -> tuple[str, ...]:
        """The axes along which devices send each other iterations, in the order of the mesh."""
        if self.dispatch is None or not {self.dispatch.rows, self.dispatch.owners} <= set(layouts):
            return ()
        rows, owners = layouts[self.dispatch.rows], layouts[self.dispatch.owners]
        return tuple(axis for axis in rows.axes if axis in owners.axes)

    def inside(self, layouts: Layouts, mesh: DeviceMesh) -> Layouts:
        """The cut under which devices compute: of rows that were sent, all count on a device."""
        axes = self.dispatched(layouts)
        if not axes or self.dispatch is None:
            return layouts
        rows = layouts[self.dispatch.rows].without(axes, mesh)
        others = {name: at for name, at in layouts.items() if name != self.dispatch.rows}
        return {**others, self.dispatch.rows: rows} if rows.axes else others

    def local_flops(self, layouts: Layouts, mesh: DeviceMesh, point: Mapping[str, int]) -> float:
        """FLOPs at a mesh coordinate."""
        layouts = self.inside(layouts, mesh)
        local = self.local_sizes(layouts, mesh, point)
        flops = self.flops_per_point * math.prod(local[name] for name in self.points)
        return flops * self.work(layouts, mesh, point)

    def is_uneven(self, layouts: Layouts) -> bool:
        """Test whether devices may have unequal work though their parts are of equal sizes."""
        return self.rising in layouts or self._has_loads(layouts)

    def _has_loads(self, layouts: Layouts) -> bool:
        dispatch = self.dispatch
        return dispatch is not None and bool(dispatch.loads) and dispatch.owners in layouts

    def work(self, layouts: Layouts, mesh: DeviceMesh, point: Mapping[str, int]) -> float:
        """FLOPs of an iteration at a mesh coordinate, over those of all on average."""
        work = self.popularity(layouts, mesh, point)
        if self.rising in layouts:
            work *= self.steepness(layouts[self.rising].pieces(mesh, point))
        return work

    def popularity(self, layouts: Layouts, mesh: DeviceMesh, point: Mapping[str, int]) -> float:
        """Weigh what a mesh coordinate gets of the choices: 1 is as many owners' average share."""
        if self.dispatch is None or not self._has_loads(layouts):
            return 1.0
        at = layouts[self.dispatch.owners]
        count = at.local_size(mesh, point)
        return self.dispatch.load(at.pieces(mesh, point), at.size) * at.size / max(count, 1)

    def steepness(self, pieces: Iterable[Interval]) -> float:
        """FLOPs of an iteration in a part of the rising factor, over those of all on average."""
        size, held = self.factors[self.rising].size, tuple(pieces)
        count = sum(length for _, length in held)
        work = sum(length * (2 * start + length + 1) / (size + 1) for start, length in held)
        return work / count if count else 1.0

    def shardings(self, layouts: Layouts, mesh: DeviceMesh) -> Shardings:
        """Shardings of operands and results under a cut, made once; LayoutError if it has none."""
        key = mesh, tuple(layouts.items())
        if key not in self._cuts:
            self._cuts[key] = self._shardings(layouts, mesh)
        return self._cuts[key]

    def _shardings(self, layouts: Layouts, mesh: DeviceMesh) -> Shardings:
        cut = [[name for name in link if name in layouts] for link in self.links]
        used = [axis for names in cut if names for axis in layouts[names[0]].axes]
        sent = self.dispatched(layouts)
        if len(used) - len(sent) != len(set(used)):
            raise LayoutError(f"an axis cuts two factors: {dict(layouts)}")
        inside = self.inside(layouts, mesh)
        for name, layout in layouts.items():
            if self.factors[name].kind not in CUTTABLE:
                raise LayoutError(f"factor {name!r} is {self.factors[name].kind} and cannot be cut")
            if layout.windows and self.factors[name].reduce:
                raise LayoutError(f"factor {name!r} is reduced: its parts cannot overlap")
            if not layout.is_complete:
                raise LayoutError(f"no part of factor {name!r} has all of {layout}")
        pending = {  # by axis, the factor over which results that lack it are sums
            axis: self.factors[name]
            for axis in mesh.names
            for name, layout in inside.items()
            if axis in layout.axes and self.factors[name].reduce
        }
        passed = tuple((a, f.reduce) for a, f in pending.items() if f.kind is FactorKind.LINEAR)
        home = {axis: factor for axis, factor in pending.items() if axis not in sent}

        def of_tensor(index: int) -> tuple[Layouts, Mapping[str, Factor]]:
            """Cuts and pending sums of an operand, or of a result behind them."""
            is_inside = self.dispatch is not None and index in self.dispatch.inside
            return (inside, pending) if is_inside else (layouts, home)

        shardings: list[Sharding] = []
        count, shapes = len(self.operands), (*self.operand_shapes, *self.result_shapes)
        for index, (dims, shape) in enumerate(
            zip((*self.operands, *self.results), shapes, strict=True)
        ):
            cuts, sums_over = of_tensor(index)
            sums = passed if index in self.linear else ()
            if index in self.addends or index >= count:
                # it is a sum over the factors that it lacks
                passes = any(f.kind is FactorKind.PASS for f in sums_over.values())
                names = names_of([dims]) if passes else {}
                sums = tuple(
                    (axis, f.reduce) for axis, f in sums_over.items() if f.name not in names
                )
            shardings.append(Sharding(self._dims(dims, shape, cuts, mesh, index), sums))
        return tuple(shardings[:count]), tuple(shardings[count:])

    def factor_layouts(
        self,
        expr: DimExpr,
        layout: DimLayout,
        mesh: DeviceMesh,
        window: Window | Parts | None = None,
    ) -> Layouts | None:
        """The cut of a factor in each term that gives a dim this layout, windows too; else None.

        It is found once.
        """
        key = expr, layout, mesh, window
        if key not in self._layouts:
            self._layouts[key] = self._factor_layouts(expr, layout, mesh, window)
        return self._layouts[key]

    def _factor_layouts(
        self, expr: DimExpr, layout: DimLayout, mesh: DeviceMesh, window: Window | Parts | None
    ) -> Layouts | None:
        if len(expr) == 1 and len(expr[0]) == 1:
            factor = self.factors[expr[0][0]]
            if window is not None and factor.kind in LOOPS:
                positions = window.positions(layout, factor.size)
                return None if positions is None else {factor.name: positions}
            fits = factor.kind in LOOPS and factor.size == layout.size
            return {factor.name: layout} if fits else None
        sizes = [math.prod(self.factors[name].size for name in term) for term in expr]
        if sum(sizes) != layout.size or any(not term for term in expr) or layout.windows:
            return None
        layouts: dict[str, DimLayout] = {}
        for term, part in zip(expr, split(layout, sizes), strict=True):
            cut = self._factor_layout(term, part, mesh)
            if cut is None or layouts.setdefault(*cut) != cut[1]:
                return None
        return layouts

    def _factor_layout(
        self, term: Term, layout: DimLayout, mesh: DeviceMesh
    ) -> tuple[str, DimLayout] | None:
        """The factor whose cut gives a compound this layout, and its own layout."""
        for index, name in enumerate(term):
            minor = math.prod(self.factors[other].size for other in term[index + 1 :])
            block = minor * self.factors[name].size
            if self.factors[name].kind not in LOOPS or not 0 < block <= layout.size:
                continue
            head = split(layout, [block, layout.size - block])[0]
            if any(part % minor for cuts in head.segments for part in cuts):
                continue
            candidate = DimLayout.cut(
                layout.axes, [tuple(part // minor for part in cuts) for cuts in head.segments]
            )
            try:
                if self._term(term, {name: candidate}, mesh) == layout:
                    return name, candidate
            except LayoutError:
                continue
        return None

    def _dims(
        self,
        dims: Dims | None,
        shape: tuple[int, ...],
        layouts: Layouts,
        mesh: DeviceMesh,
        operand: int,
    ) -> tuple[DimLayout, ...]:
        """Layouts of a tensor's dims; `operand` is its index, that of a result behind operands."""
        if dims is None:
            return tuple(DimLayout.whole(size) for size in shape)
        return tuple(
            window.layout(layouts[single(expr)])
            if (window := self.window(operand, expr)) and single(expr) in layouts
            else concat(self._term(term, layouts, mesh) for term in expr)
            if any(name in layouts for term in expr for name in term)
            else DimLayout.whole(size)
            for expr, size in zip(dims, shape, strict=True)
        )

    def _term(self, term: Term, layouts: Layouts, mesh: DeviceMesh) -> DimLayout:
        layout = DimLayout.whole(1)
        for name in reversed(term):
            factor = layouts.get(name) or DimLayout.whole(self.factors[name].size)
            layout = product(factor, layout, mesh)
        return layout

    def _check(self) -> None:
        tensors, shapes = (
            (*self.operands, *self.results),
            (*self.operand_shapes, *self.result_shapes),
        )
        for index, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if dims is not None and len(dims) != len(shape):
                raise IRError(f"rule has {len(dims)} dims for shape {shape}")
            for expr, size in zip(dims or (), shape, strict=False):
                terms = [[self.factors[name] for name in term] for term in expr]
                total = sum(math.prod(f.size for f in factors) for factors in terms)
                if total != size and self.window(index, expr) is None:
                    raise IRError(
                        f"rule dim {expr} is {total}, the tensor's dim is {size} of {shape}"
                    )


def _checked_windows(
    windows: Mapping[tuple[int, str], Window | Parts],
    operands: Sequence[Dims | None],
    shapes: Sequence[tuple[int, ...]],
) -> dict[tuple[int, str], Window | Parts]:
    """The windows of tensors that are present; each is over one dim, of the size that it says."""
    kept = {}
    for (index, name), window in windows.items():
        if index >= len(operands) or (dims := operands[index]) is None:
            continue
        sizes = [size for e, size in zip(dims, shapes[index], strict=True) if single(e) == name]
        if sizes != [window.size]:
            raise IRError(f"operand {index}: window of {name!r} over {window.size}, dims {sizes}")
        kept[index, name] = window
    return kept


@dataclass(frozen=True)
class Cut:
    """A plan's cut of one factor: the axes, and the part sizes unless the cut is even (None).

    Parts that overlap are windows instead of segments.
    Text form: ``"tp"`` (even), ``"dp*tp"`` (two axes), ``"tp:48,32"``, ``"tp:8,8|4,4"``,
    ``"tp:0..5,3..8"`` (windows).
    """

    axes: tuple[str, ...]
    segments: Segments | None = None
    windows: tuple[Interval, ...] = ()

    def layout(self, size: int, mesh: DeviceMesh) -> DimLayout:
        """The layout of a factor of `size` elements; IRError if axes or parts do not fit."""
        for axis in self.axes:
            if axis not in mesh.names:
                raise IRError(f"cut {self} names axis {axis!r}; the mesh is {mesh}")
        if self.axes != tuple(name for name in mesh.names if name in self.axes):
            raise IRError(f"cut {self} names its axes twice or not in the order of mesh {mesh}")
        parts = mesh.size(self.axes)
        if self.windows:
            if len(self.windows) != parts:
                raise IRError(f"cut {self} does not fit size {size} over {parts} parts")
            return DimLayout.windowed(size, self.axes, self.windows)
        if self.segments is None:
            return DimLayout.even(size, self.axes, mesh)
        if (
            any(len(cuts) != parts for cuts in self.segments)
            or sum(map(sum, self.segments)) != size
        ):
            raise IRError(f"cut {self} does not fit size {size} over {parts} parts")
        return DimLayout.cut(self.axes, self.segments)

    @classmethod
    def of(cls, layout: DimLayout, mesh: DeviceMesh) -> Cut:
        """The shortest form that gives this layout."""
        if layout.windows:
            return cls(layout.axes, None, layout.windows)
        even = cls(layout.axes)
        return even if even.layout(layout.size, mesh) == layout else cls(even.axes, layout.segments)

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Inverse of `str`; IRError if the text is not of the form above."""
        names, colon, parts = text.partition(":")
        axes = tuple(names.split("*"))
        if all(axes) and re.fullmatch(r"\d+\.\.\d+(,\d+\.\.\d+)*", parts, re.ASCII):
            ends = [[int(end) for end in part.split("..")] for part in parts.split(",")]
            if all(start <= end for start, end in ends):
                return cls(axes, None, tuple((start, end - start) for start, end in ends))
        try:
            segments = (
                tuple(tuple(map(int, s.split(","))) for s in parts.split("|")) if colon else None
            )
        except ValueError:
            segments = ((-1,),)
        if not all(axes) or (segments and any(part < 0 for cuts in segments for part in cuts)):
            raise IRError(
                f"cut {text!r} is not like 'tp', 'dp*tp', 'tp:48,32', 'tp:8,8|4,4' or "
                "'tp:0..5,3..8'"
            )
        return cls(axes, segments)

    def __str__(self) -> str:
        return cut_text(self.axes, self.segments, self.windows)
