"""Lowering: the ranks of hand-made and random plans compute what the whole graph computes."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models
from helpers.plans.cost_cases import far_apart
from helpers.plans.whole_plans import (
    assert_equal_to_whole,
    build,
    candidates,
    hand_plan,
    lowered,
    random_plan,
    rule,
    weight,
)
from partitioner import examples
from partitioner.api.lowering import lower
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Constant, Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.program import Comm, CommKind, ProgramError, Programs
from partitioner.ir.rule import Cut
from partitioner.ir.types import TensorType

PAIR = DeviceMesh.line(2, "tp")
TRIO = DeviceMesh.line(3, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})


def kinds(programs: Programs) -> list[str]:
    """Kinds of all communications in the global order."""
    by_seq = {comm.seq: str(comm.kind) for rank in programs.ranks for comm in rank.comms}
    return [by_seq[seq] for seq in sorted(by_seq)]


def matmul(m: int = 7, k: int = 7, n: int = 7) -> Graph:
    node = Node("mm", "MatMul", ("x", "w"), ("y",))
    return build([node], {"x": (m, k), "y": (m, n)}, ["x"], ["y"], {"w": weight(k, n)})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(8, ["send", "send", "all_gather"]), (5, ["send", "send"])],
)
def test_a_far_group_gets_each_element_once(rows: int, expected: list[str]) -> None:
    """Both of its devices are to hold the value: they gather it, if its rows divide."""
    nodes = [Node("there", "Neg", ("x",), ("h",)), Node("back", "Exp", ("h",), ("y",))]
    graph = build(nodes, dict.fromkeys(("x", "h", "y"), (rows, 3)), ["x"], ["y"])
    plan = hand_plan(graph, there=PAIR, back=replace(PAIR, devices=(2, 3)))
    cluster = far_apart(nodes=2, devices=2)
    programs = assert_equal_to_whole(graph, plan, 4, tolerance=1e-6, cluster=cluster)
    assert kinds(programs) == expected


@pytest.mark.parametrize("mesh", [PAIR, TRIO], ids=str)
@pytest.mark.parametrize("cut", ["m", "k", "n"])
def test_uneven_sizes(mesh: DeviceMesh, cut: str) -> None:
    graph = matmul()
    programs = assert_equal_to_whole(graph, hand_plan(graph, mm=(mesh, {cut: "tp"})), mesh.size())
    assert kinds(programs) == (["all_reduce"] if cut == "k" else [])


def test_sizes_of_the_users_choice() -> None:
    graph = matmul()
    assert_equal_to_whole(graph, hand_plan(graph, mm=(TRIO, {"n": "tp:1,5,1"})), 3)
    assert_equal_to_whole(graph, hand_plan(graph, mm=(PAIR, {"m": "tp:2,1|1,3"})), 2)


def test_a_value_without_elements_crosses() -> None:
    nodes = [
        Node("cut", "Slice", ("x", "zero", "zero"), ("h",)),
        Node("act", "Relu", ("h",), ("e",)),
        Node("join", "Concat", ("e", "x"), ("y",), {"axis": 0}),
    ]
    graph = build(
        nodes,
        {"x": (3, 4), "h": (0, 4), "e": (0, 4), "y": (3, 4)},
        ["x"],
        ["y"],
        {"zero": np.zeros(1, np.int64)},
    )
    assert_equal_to_whole(graph, hand_plan(graph, cut=0, act=1, join=0), 2)


def test_a_plan_may_leave_ranks_idle() -> None:
    graph = matmul()
    programs = assert_equal_to_whole(graph, hand_plan(graph, mm=2), 4)
    assert [len(rank.steps) for rank in programs.ranks] == [0, 0, 1, 0]


@pytest.mark.parametrize("mesh", [PAIR, TRIO], ids=str)
def test_concat_of_shards(mesh: DeviceMesh) -> None:
    """Channel shards of two branches, one after the other: two segments, no reshard."""
    nodes = [
        Node("a", "MatMul", ("x", "wa"), ("ha",)),
        Node("b", "MatMul", ("x", "wb"), ("hb",)),
        Node("join", "Concat", ("ha", "hb"), ("h",), {"axis": -1}),
        Node("act", "Relu", ("h",), ("r",)),
        Node("out", "MatMul", ("r", "wo"), ("y",)),
    ]
    shapes = {"x": (2, 3), "ha": (2, 5), "hb": (2, 7), "h": (2, 12), "r": (2, 12), "y": (2, 4)}
    weights = {"wa": weight(3, 5), "wb": weight(3, 7), "wo": weight(12, 4)}
    graph = build(nodes, shapes, ["x"], ["y"], weights)
    join = dict.fromkeys(next(c for c in rule(graph, "join").links if len(c) == 2), "tp")
    both = "tp:3,2|4,3" if mesh is PAIR else "tp:2,2,1|3,2,2"
    act = rule(graph, "act")
    channels = next(name for name, factor in act.factors.items() if factor.size == 12)
    plan = hand_plan(
        graph,
        a=(mesh, {"n": "tp"}),
        b=(mesh, {"n": "tp"}),
        join=(mesh, join),
        act=(mesh, {channels: both}),
        out=(mesh, {"k": both}),
    )
    assert kinds(assert_equal_to_whole(graph, plan, mesh.size())) == ["all_reduce"]


def test_two_consumers_share_a_reshard() -> None:
    nodes = [
        Node("mm", "MatMul", ("x", "w"), ("h",)),
        Node("a", "Relu", ("h",), ("ya",)),
        Node("b", "Neg", ("h",), ("yb",)),
    ]
    shapes = {"x": (4, 4), "h": (4, 4), "ya": (4, 4), "yb": (4, 4)}
    graph = build(nodes, shapes, ["x"], ["ya", "yb"], {"w": weight(4, 4)})
    plan = hand_plan(graph, mm=(PAIR, {"n": "tp"}), _=PAIR)
    assert kinds(assert_equal_to_whole(graph, plan, 2)) == ["all_gather"]


def test_a_node_reads_one_value_in_two_placements() -> None:
    """x @ x: rows of the left operand, all of the right one."""
    nodes = [Node("act", "Relu", ("x",), ("h",)), Node("mm", "MatMul", ("h", "h"), ("y",))]
    graph = build(nodes, {"x": (5, 5), "h": (5, 5), "y": (5, 5)}, ["x"], ["y"])
    rows = next(iter(rule(graph, "act").factors))
    for act in ((PAIR, {rows: "tp"}), PAIR, 1):
        for cut in ("m", "k", "n"):
            assert_equal_to_whole(graph, hand_plan(graph, act=act, mm=(PAIR, {cut: "tp"})), 2)


@pytest.mark.parametrize("cut", ["m", "k", "n"])
def test_a_graph_input_and_a_weight_in_two_layouts(cut: str) -> None:
    """The tied weight is read by rows, by columns and whole; so is the input."""
    nodes = [
        Node("a", "MatMul", ("x", "w"), ("h",)),
        Node("b", "MatMul", ("x", "h"), ("i",)),
        Node("c", "MatMul", ("i", "w"), ("y",)),
    ]
    shapes = dict.fromkeys(("x", "h", "i", "y"), (5, 5))
    graph = build(nodes, shapes, ["x"], ["y"], {"w": weight(5, 5)})
    plan = hand_plan(graph, a=(PAIR, {cut: "tp"}), b=PAIR, c=(PAIR, {"k": "tp"}))
    programs = assert_equal_to_whole(graph, plan, 2)
    for rank in programs.ranks:
        assert {part.whole for part in rank.constants.values()} == {"w"}
        assert len(rank.inputs) == (1 if cut == "n" else 2)


def test_the_bias_counts_once() -> None:
    node = Node("fc", "Gemm", ("x", "w", "c"), ("y",), {"beta": 2.0})
    shapes = {"x": (3, 8), "y": (3, 5)}
    graph = build([node], shapes, ["x"], ["y"], {"w": weight(8, 5), "c": weight(5)})
    reduced = next(n for n, f in rule(graph, "fc").factors.items() if f.size == 8)
    programs = assert_equal_to_whole(graph, hand_plan(graph, fc=(TRIO, {reduced: "tp"})), 3)
    zeros = [[p.zero for p in rank.constants.values() if p.whole == "c"] for rank in programs.ranks]
    assert zeros == [[False], [True], [True]]


@pytest.mark.parametrize("origin", ["input", "made", "made partial", "elsewhere"])
def test_a_bias_that_is_no_constant_counts_once(origin: str) -> None:
    fed = origin == "input"
    nodes = [Node("bias", "MatMul", ("b", "v"), ("c",))] if not fed else []
    nodes.append(Node("fc", "Gemm", ("x", "w", "c"), ("y",)))
    shapes = {"x": (3, 8), "y": (3, 5), "c": (3, 5), **({} if fed else {"b": (3, 2)})}
    weights = {"w": weight(8, 5), **({} if fed else {"v": weight(2, 5)})}
    graph = build(nodes, shapes, ["x", "c" if fed else "b"], ["y"], weights)
    reduced = next(n for n, f in rule(graph, "fc").factors.items() if f.size == 8)
    bias = {"made partial": (PAIR, {"k": "tp"}), "elsewhere": 2}.get(origin, PAIR)
    assert_equal_to_whole(graph, hand_plan(graph, fc=(PAIR, {reduced: "tp"}), bias=bias), 3)


def test_outputs_that_are_partial_cut_or_replicated() -> None:
    """Each part of an output is delivered by one rank; pending sums are reduced first."""
    nodes = [
        Node("p", "MatMul", ("x", "w"), ("yp",)),
        Node("r", "Relu", ("yp",), ("yr",)),
        Node("s", "MatMul", ("yp", "w"), ("ys",)),
    ]
    shapes = dict.fromkeys(("x", "yp", "yr", "ys"), (4, 4))
    graph = build(nodes, shapes, ["x"], ["yp", "yr", "ys"], {"w": weight(4, 4)})
    plan = hand_plan(graph, p=(PAIR, {"k": "tp"}), r=PAIR, s=(PAIR, {"n": "tp"}))
    programs = assert_equal_to_whole(graph, plan, 2)
    assert kinds(programs) == ["all_reduce"]
    delivered = [(o.whole, rank.rank) for rank in programs.ranks for o in rank.outputs]
    assert sorted(delivered) == [("yp", 0), ("yr", 0), ("ys", 0), ("ys", 1)]


def _with_if() -> Graph:
    def branch(op: str, name: str) -> object:
        out = helper.make_tensor_value_info(name, 1, [4, 4])
        return helper.make_graph([helper.make_node(op, ["h", "w"], [name])], name, [], [out])

    nodes = [
        helper.make_node("Relu", ["x"], ["h"], name="act"),
        helper.make_node("ReduceSum", ["h"], ["t"], name="total", keepdims=0),
        helper.make_node("Greater", ["t", "limit"], ["cond"], name="test"),
        helper.make_node(
            "If",
            ["cond"],
            ["i"],
            name="if",
            then_branch=branch("Add", "a"),
            else_branch=branch("Mul", "b"),
        ),
        helper.make_node("Neg", ["i"], ["y"], name="neg"),
    ]
    proto = onnx_models.model(
        nodes,
        {"x": ("float32", [4, 4])},
        {"y": ("float32", [4, 4])},
        {"w": weight(4, 4), "limit": np.float32(8)},
    )
    return load_onnx(proto).graph


@pytest.mark.parametrize("home", [0, 1])
def test_if_with_captures_on_one_device(home: int) -> None:
    graph = _with_if()
    assert set(graph.by_name["if"].captures) == {"h", "w"}
    rows = next(iter(rule(graph, "act").factors))
    neg = next(iter(rule(graph, "neg").factors))
    plan = hand_plan(
        graph, act=(PAIR, {rows: "tp"}), neg=(PAIR, {neg: "tp"}), **{"if": home}, _=PAIR
    )
    for seed in (0, 1, 2):
        programs = assert_equal_to_whole(graph, plan, 2, seed=seed)
    assert kinds(programs) == ["all_gather", "gather", "scatter"]


def test_there_and_back_again() -> None:
    """0 -> 1 -> 0: phases rise, a value of phase 0 is read in phase 2."""
    nodes = [
        Node("a", "Relu", ("x",), ("h",)),
        Node("b", "Neg", ("h",), ("i",)),
        Node("c", "Add", ("i", "h"), ("y",)),
    ]
    graph = build(nodes, dict.fromkeys(("x", "h", "i", "y"), (3,)), ["x"], ["y"])
    programs = assert_equal_to_whole(graph, hand_plan(graph, a=0, b=1, c=0), 2)
    phases = [
        (step.phase, step.target_phase) if isinstance(step, Comm) else step.phase
        for step in programs.ranks[0].steps
    ]
    assert phases == [0, (0, 1), (1, 2), 2]


def test_two_groups_of_two() -> None:
    late = DeviceMesh.of({"tp": 2}, (2, 3))
    nodes = [Node(f"m{i}", "MatMul", (f"v{i}", f"w{i}"), (f"v{i + 1}",)) for i in range(4)]
    shapes = {f"v{i}": (6, 5) for i in range(5)}
    graph = build(nodes, shapes, ["v0"], ["v4"], {f"w{i}": weight(5, 5, seed=i) for i in range(4)})
    plan = hand_plan(
        graph,
        m0=(PAIR, {"n": "tp"}),
        m1=(PAIR, {"k": "tp"}),
        m2=(late, {"m": "tp"}),
        m3=(late, {"n": "tp"}),
    )
    assert_equal_to_whole(graph, plan, 4)


def test_a_grid_cuts_one_dim_over_both_axes() -> None:
    graph = matmul(9, 9, 9)
    assert_equal_to_whole(graph, hand_plan(graph, mm=(GRID, {"k": "dp*tp"})), 4)
    assert_equal_to_whole(graph, hand_plan(graph, mm=(GRID, {"k": "dp", "n": "tp"})), 4)
    assert_equal_to_whole(graph, hand_plan(graph, mm=(GRID, {"m": "dp", "k": "tp"})), 4)


def _model(name: str) -> Graph:
    sizes = {
        "tiny": {"size": 6, "channels": 5, "classes": 7},
        "mlp": {"layers": 3, "hidden": 10, "batch": 3},
        "llama": {
            "layers": 1,
            "hidden": 24,
            "heads": 6,
            "kv_heads": 3,
            "intermediate": 20,
            "vocab": 11,
            "seq": 5,
        },
    }
    return load_onnx(examples.build(name, **sizes[name])).graph


GROUPS = {
    "pair": (PAIR,),
    "trio": (TRIO,),
    "grid": (GRID,),
    "apart": tuple(DeviceMesh.single(d) for d in range(3)),
    "hybrid": (PAIR, DeviceMesh.of({"tp": 2}, (2, 3))),
    "mixed": (PAIR, DeviceMesh.single(0), DeviceMesh.of({"tp": 3}, (2, 1, 3))),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["tiny", "mlp", "llama"])
def test_random_plans(name: str, groups: str) -> None:
    graph = _model(name)
    offered = candidates(graph, GROUPS[groups])
    for seed in range(2):
        plan, _ = random_plan(graph, offered, np.random.default_rng(seed))
        programs = assert_equal_to_whole(graph, plan, 4, tolerance=1e-4, seed=seed)
        assert any(c.kind is not CommKind.SLICE for r in programs.ranks for c in r.comms)


def test_names_of_the_model_are_not_taken() -> None:
    """Lowering would call a temporary `n.share` and a resharded copy `h@1`."""
    mean = Node("n", "ReduceMean", ("x",), ("h",), {"axes": (1,), "keepdims": 1})
    add = Node("m", "Mul", ("h", "n.share"), ("h@1",))
    last = Node("l", "Add", ("h", "h@1"), ("y",))
    kinds = {"x": (4, 6), "h": (4, 1), "n.share": (4, 1), "h@1": (4, 1), "y": (4, 1)}
    types = {name: TensorType.of("float32", shape) for name, shape in kinds.items()}
    weights = {"n.share": Constant.of(np.arange(4, dtype=np.float32).reshape(4, 1))}
    owner = Graph("names", ("x",), ("y",), (mean, add, last), types, weights, {"": 13})
    line = DeviceMesh.line(2, "tp")
    nodes = {
        "n": NodePlan(0, {"d1": Cut(("tp",))}),
        "m": NodePlan(0, {"b0": Cut(("tp",))}),
        "l": NodePlan(0),
    }
    cluster = resolve_cluster("2xideal")
    plan = Plan(owner.digest, cluster.to_data(), (line,), nodes)
    programs = lower(owner, schedule(owner, resolve(owner, plan), cluster), 2)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    (y,) = run_lockstep(emit_models(programs, owner), {"x": x}).values()
    h = x.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(y, h + h * weights["n.share"].load(), rtol=1e-6)


def _mean_graph(op: str, opset: int) -> Graph:
    types = {"x": TensorType.of("float16", (2, 3, 7, 4))}
    types["y"] = types["x"].with_shape((2, 3, 1, 1))
    axes = {"axes": np.array([2, 3])} if op == "ReduceMean" and opset >= 18 else {}
    weights = {name: Constant.of(array) for name, array in axes.items()}
    types.update({name: weight.type for name, weight in weights.items()})
    attrs = {"axes": (2, 3)} if op == "ReduceMean" and not axes else {}
    node = Node("n", op, ("x", *axes), ("y",), attrs)
    return Graph("mean", ("x",), ("y",), (node,), types, weights, {"": opset})


@pytest.mark.parametrize(("op", "dim"), [("ReduceMean", "d2"), ("GlobalAveragePool", "s0")])
@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("parts", [None, (1, 6)], ids=["even", "uneven"])
def test_half_precision_means_of_large_values_do_not_overflow(
    op: str, dim: str, opset: int, parts: tuple[int, ...] | None
) -> None:
    graph = _mean_graph(op, opset)
    cut = Cut(("tp",)) if parts is None else Cut(("tp",), (parts,))
    cluster = resolve_cluster("2xideal")
    nodes = {"n": NodePlan(0, {dim: cut})}
    plan = Plan(graph.digest, cluster.to_data(), (DeviceMesh.line(2, "tp"),), nodes)
    programs = lower(graph, schedule(graph, resolve(graph, plan), cluster), 2)
    assert any(c.kind is CommKind.ALL_REDUCE for c in programs.ranks[0].comms)
    x = np.random.default_rng(1).uniform(55_000, 62_000, (2, 3, 7, 4)).astype(np.float16)
    (y,) = run_lockstep(emit_models(programs, graph), {"x": x}).values()
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, x.astype(np.float64).mean(axis=(2, 3), keepdims=True), 2e-3)


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        (
            "partitioner.ir.nodes.local_node.row_of",
            ProgramError,
            r"^model 'hand': node 'mm' \(MatMul\) on one device: Index",
        ),
        (
            "partitioner.backends.onnx.files.emit.node_proto",
            BackendError,
            r"^rank 0: node 'mm' \(MatMul\): IndexError",
        ),
    ],
)
def test_a_fault_names_the_node(
    part: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row or a writer raises is one line."""

    def fail(*_: object) -> None:
        raise IndexError("list index out of range")

    graph, pair = matmul(), DeviceMesh.of({"tp": 2})
    if kind is ProgramError:
        row = replace(row_of(graph.nodes[0]), localize=fail)
        monkeypatch.setattr(part, lambda _: row)
    else:
        monkeypatch.setattr(part, fail)
    with pytest.raises(kind, match=message):
        emit_models(lowered(graph, hand_plan(graph, mm=(pair, {"m": "tp"})), 2), graph)
