"""Hand-made rank programs: small, with known results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.program import (
    Comm,
    CommKind,
    Compute,
    Output,
    Part,
    Programs,
    RankProgram,
)
from partitioner.ir.types import TensorType, numpy_dtype

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Programs, the graph of their constants, inputs, and what must come out."""

    programs: Programs
    graph: Graph
    inputs: Arrays
    expected: Arrays
    rtol: float = 1e-5


def region(*dims: tuple[int, int] | Sequence[tuple[int, int]]) -> Region:
    """region((0, 3), [(0, 1), (4, 2)]): an interval or several a dim."""
    return tuple((dim,) if isinstance(dim[0], int) else tuple(dim) for dim in dims)  # type: ignore[misc]


def rows(start: int, length: int, columns: int) -> Region:
    return region((start, length), (0, columns))


def graph(
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    extra: Mapping[str, int] | None = None,
) -> Graph:
    """A graph that only holds constants (emission reads nothing else of it)."""
    stored = {name: Constant.of(array) for name, array in (constants or {}).items()}
    types = {name: constant.type for name, constant in stored.items()}
    return Graph("hand", (), (), (), types, stored, {"": opset, **(extra or {})})


def rank(
    number: int,
    steps: Iterable[Compute | Comm],
    types: Mapping[str, TensorType],
    inputs: Mapping[str, Part] | None = None,
    constants: Mapping[str, Part] | None = None,
    literals: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[Output] = (),
) -> RankProgram:
    return RankProgram(
        number,
        dict(inputs or {}),
        dict(constants or {}),
        dict(literals or {}),
        dict(types),
        tuple(steps),
        tuple(outputs),
    )


def op(name: str, inputs: str, outputs: str, phase: int = 0, **attrs: object) -> Compute:
    """op("MatMul", "x w", "y"): names are separated by spaces."""
    node_name = f"{name}_{outputs.replace(' ', '_')}"
    node = Node(node_name, name, tuple(inputs.split()), tuple(outputs.split()), attrs)  # type: ignore[arg-type]
    return Compute(node, f"whole_{name}", phase)


def f32(*shape: int) -> TensorType:
    return TensorType.of("float32", shape)


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * 4
    return (values > 0) if dtype == "bool" else values.astype(numpy_dtype(dtype))


def whole_to(source: int, target: int, shape: tuple[int, ...]) -> Transfer:
    everything: Region = tuple(((0, size),) for size in shape)
    return Transfer(source, target, everything, everything)


def tensor_parallel(reduce: str = "sum") -> Case:
    """Column then row: Relu(x @ a) @ b on two ranks with 5 and 3 hidden columns, one all-reduce."""
    x, a, b = random(4, 6), random(6, 8, seed=1), random(8, 2, seed=2)
    cuts = ((0, 5), (5, 3))
    comm = Comm(0, CommKind.ALL_REDUCE, (0, 1), "part", "y", "float32", reduce=reduce, why="mm")
    ranks = [
        rank(
            number,
            [op("MatMul", "x a", "h"), op("Relu", "h", "r"), op("MatMul", "r b", "part"), comm],
            {
                "x": f32(4, 6),
                "a": f32(6, cut[1]),
                "b": f32(cut[1], 2),
                "h": f32(4, cut[1]),
                "r": f32(4, cut[1]),
                "part": f32(4, 2),
                "y": f32(4, 2),
            },
            inputs={"x": Part("x", None)},
            constants={
                "a": Part("A", region((0, 6), cut)),
                "b": Part("B", region(cut, (0, 2))),
            },
            outputs=[Output("y", "y", rows(2 * number, 2, 2))] if reduce else [],
        )
        for number, cut in enumerate(cuts)
    ]
    # each rank delivers two of the four rows: give each its own output value
    ranks = [_with_slice(program, number) for number, program in enumerate(ranks)]
    partial = [np.maximum(x @ a[:, s : s + n], 0) @ b[s : s + n] for s, n in cuts]
    joined = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[reduce]
    programs = Programs(tuple(ranks), {"x": f32(4, 6)}, {"y": f32(4, 2)})
    return Case(programs, graph({"A": a, "B": b}), {"x": x}, {"y": joined(*partial)})


def _with_slice(program: RankProgram, number: int) -> RankProgram:
    """Keep rows 2n and 2n + 1 of "y" by a local SLICE communication."""
    comm = Comm(
        1 + number,
        CommKind.SLICE,
        (number,),
        "y",
        "own",
        "float32",
        (Transfer(number, number, rows(2 * number, 2, 2), rows(0, 2, 2)),),
    )
    return rank(
        number,
        [*program.steps, comm],
        {**program.types, "own": f32(2, 2)},
        program.inputs,
        program.constants,
        outputs=[Output("own", "y", rows(2 * number, 2, 2))],
    )


def exchange_case(
    kind: CommKind,
    dtype: str,
    transfers: Sequence[Transfer],
    sources: Mapping[int, tuple[Region, tuple[int, ...]]],
    targets: Mapping[int, tuple[Region, tuple[int, ...]]],
    ranks: int = 2,
    shape: tuple[int, ...] = (5, 4),
    reduce: str = "",
    phases: tuple[int, int] = (0, 0),
) -> Case:
    """Feed parts of x, communicate once, deliver parts of y; Identity before and after.

    Args:
        sources: Part of x that ranks are fed with, and its shape.
        targets: Part of y that ranks deliver, and its shape (of the communication's target).
    """
    x = random(*shape, dtype=dtype)
    taking = tuple(sorted(set(sources) | set(targets)))
    comm = Comm(7, kind, taking, "s", "t", dtype, tuple(transfers), reduce, *phases, why="test")
    programs = []
    for number in range(ranks):
        types, steps, inputs, outputs = {}, [], {}, []
        if number in sources:
            part, local = sources[number]
            types.update(x=TensorType.of(dtype, local), s=TensorType.of(dtype, local))
            inputs["x"] = Part("x", part)
            steps.append(op("Identity", "x", "s", phases[0]))
        if number in taking:
            steps.append(comm)
        if number in targets:
            part, local = targets[number]
            types.update(t=TensorType.of(dtype, local), o=TensorType.of(dtype, local))
            steps.append(op("Identity", "t", "o", phases[1]))
            outputs.append(Output("o", "y", part))
        programs.append(rank(number, steps, types, inputs, outputs=outputs))
    type_ = TensorType.of(dtype, shape)
    both = Programs(tuple(programs), {"x": type_}, {"y": type_})
    return Case(both, graph(), {"x": x}, {"y": x})


def all_gather(dtype: str = "float32", sizes: Sequence[int] = (3, 2)) -> Case:
    """Every rank gets all rows; rank r delivers output y of its own copy's rows (tiled)."""
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    total, ranks = sum(sizes), len(sizes)
    transfers = [
        Transfer(s, t, rows(0, sizes[s], 4), rows(starts[s], sizes[s], 4))
        for t in range(ranks)
        for s in range(ranks)
    ]
    case = exchange_case(
        CommKind.ALL_GATHER,
        dtype,
        transfers,
        {r: (rows(starts[r], sizes[r], 4), (sizes[r], 4)) for r in range(ranks)},
        {r: (rows(0, total, 4), (total, 4)) for r in range(ranks)},
        ranks,
        (total, 4),
    )
    return _named_outputs(case)


def _named_outputs(case: Case) -> Case:
    """Every rank delivers a whole output of its own: y0, y1, ..."""
    programs = case.programs
    ranks = tuple(
        rank(
            p.rank,
            p.steps,
            p.types,
            p.inputs,
            p.constants,
            p.literals,
            [Output(o.value, f"y{p.rank}", None) for o in p.outputs],
        )
        for p in programs.ranks
    )
    outputs = {f"y{p.rank}": programs.outputs["y"] for p in programs.ranks if p.outputs}
    renamed = Programs(ranks, programs.inputs, outputs)
    return Case(renamed, case.graph, case.inputs, dict.fromkeys(outputs, case.expected["y"]))


def broadcast(dtype: str = "float32", ranks: int = 3) -> Case:
    everything = rows(0, 5, 4)
    transfers = [Transfer(1, t, everything, everything) for t in range(ranks)]
    targets = dict.fromkeys(range(ranks), (everything, (5, 4)))
    sources = {1: (everything, (5, 4))}
    return _named_outputs(
        exchange_case(CommKind.BROADCAST, dtype, transfers, sources, targets, ranks)
    )


def scatter(dtype: str = "float32") -> Case:
    """Rank 0 keeps rows 0 and 4 (two intervals), rank 1 gets rows 1 to 3."""
    outer = region([(0, 1), (4, 1)], (0, 4))
    transfers = [
        Transfer(0, 0, outer, rows(0, 2, 4)),
        Transfer(0, 1, rows(1, 3, 4), rows(0, 3, 4)),
    ]
    sources = {0: (rows(0, 5, 4), (5, 4))}
    targets = {0: (outer, (2, 4)), 1: (rows(1, 3, 4), (3, 4))}
    return exchange_case(CommKind.SCATTER, dtype, transfers, sources, targets)


def gather(dtype: str = "float32", ranks: int = 2) -> Case:
    transfers = [
        Transfer(0, 1, rows(0, 2, 4), rows(0, 2, 4)),
        Transfer(1, 1, rows(0, 3, 4), rows(2, 3, 4)),
    ]
    sources = {0: (rows(0, 2, 4), (2, 4)), 1: (rows(2, 3, 4), (3, 4))}
    targets = {1: (rows(0, 5, 4), (5, 4))}
    return exchange_case(CommKind.GATHER, dtype, transfers, sources, targets, ranks)


def all_to_all(dtype: str = "float32") -> Case:
    """Rows (3 and 2) to columns (1 and 3)."""
    cuts, columns = ((0, 3), (3, 2)), ((0, 1), (1, 3))
    transfers = [
        Transfer(s, t, region((0, cuts[s][1]), columns[t]), region(cuts[s], (0, columns[t][1])))
        for t in range(2)
        for s in range(2)
    ]
    sources = {r: (region(cuts[r], (0, 4)), (cuts[r][1], 4)) for r in range(2)}
    targets = {r: (region((0, 5), columns[r]), (5, columns[r][1])) for r in range(2)}
    return exchange_case(CommKind.ALL_TO_ALL, dtype, transfers, sources, targets)


def reduce_scatter(dtype: str = "float32", reduce: str = "sum", ranks: int = 2) -> Case:
    """Every rank has all of x; uneven rows of the reduction stay on each rank."""
    sizes = {2: (3, 2), 3: (2, 1, 2)}[ranks]
    starts = [sum(sizes[:r]) for r in range(ranks)]
    transfers = [
        Transfer(s, t, rows(starts[t], sizes[t], 4), rows(0, sizes[t], 4))
        for t in range(ranks)
        for s in range(ranks)
    ]
    sources = {r: (rows(0, 5, 4), (5, 4)) for r in range(ranks)}
    targets = {r: (rows(starts[r], sizes[r], 4), (sizes[r], 4)) for r in range(ranks)}
    kind = CommKind.REDUCE_SCATTER
    case = exchange_case(kind, dtype, transfers, sources, targets, ranks, reduce=reduce)
    x = case.inputs["x"]
    result = {"sum": x * ranks, "prod": x**ranks, "max": x, "min": x}[reduce].astype(x.dtype)
    return Case(case.programs, case.graph, case.inputs, {"y": result}, 1e-2)


def all_reduce(dtype: str = "int16", reduce: str = "sum", ranks: int = 2) -> Case:
    """Every rank has all of x, and gets the reduction over ranks."""
    everything = {r: (rows(0, 5, 4), (5, 4)) for r in range(ranks)}
    kind = CommKind.ALL_REDUCE
    case = exchange_case(kind, dtype, (), everything, everything, ranks, reduce=reduce)
    named = _named_outputs(case)
    x = case.inputs["x"]
    result = {"sum": x * ranks, "prod": x**ranks, "max": x, "min": x}[reduce].astype(x.dtype)
    expected = dict.fromkeys(named.expected, result)
    return Case(named.programs, named.graph, named.inputs, expected, 1e-2)


def empty_share() -> Case:
    """Rank 1 has no rows at all: sizes 5 and 0."""
    return all_gather(sizes=(5, 0))


def pipeline(dtype: str = "float32") -> Case:
    """0 -> 1 -> 0, and a value that skips rank 1: y = relu(-x) + x, phases 0, 1, 2.

    The skipping value (rank 0 to 2, phases 0 to 2) is sent before, and received after, younger
    requests' values of the same two ranks.
    """
    type_, shape = TensorType.of(dtype, (3, 4)), (3, 4)

    def send(seq: int, a: int, b: int, source: str, target: str, *phases: int) -> Comm:
        moved = (whole_to(a, b, shape),)
        return Comm(
            seq, CommKind.SEND, tuple(sorted((a, b))), source, target, dtype, moved, "", *phases
        )

    there = send(0, 0, 1, "n", "n1", 0, 1)
    skip = send(1, 0, 1, "x", "x2", 0, 3)
    back = send(2, 1, 0, "r", "r0", 1, 2)
    last = send(3, 0, 1, "d", "d1", 2, 3)
    first = rank(
        0,
        [op("Neg", "x", "n"), there, skip, back, op("Add", "r0 r0", "d", 2), last],
        dict.fromkeys(("x", "n", "r0", "d"), type_),
        {"x": Part("x", None)},
    )
    second = rank(
        1,
        [there, skip, op("Relu", "n1", "r", 1), back, last, op("Add", "d1 x2", "y", 3)],
        dict.fromkeys(("n1", "x2", "r", "d1", "y"), type_),
        outputs=[Output("y", "y", None)],
    )
    x = random(*shape, dtype=dtype)
    programs = Programs((first, second), {"x": type_}, {"y": type_})
    return Case(programs, graph(), {"x": x}, {"y": 2 * np.maximum(-x, 0) + x})
