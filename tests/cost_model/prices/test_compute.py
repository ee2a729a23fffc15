from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans.cost_cases import SLOW, chain_graph, flat, graph, matmul_graph, placed
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices import compute
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.table import OpRow
from partitioner.ir.types import TensorType

LINE = DeviceMesh.line(4, "tp")


def test_roofline_by_hand() -> None:
    whole = matmul_graph()
    # 2 * 64 * 128 * 256 FLOPs at 1e9; bytes (64*128 + 128*256 + 64*256) * 4 are fewer.
    seconds = compute.node_seconds(whole, placed(whole, "mm", DeviceMesh.single(1)), flat(2))
    assert seconds == {1: pytest.approx(4194304e-9)}
    wide = matmul_graph(m=1)  # bytes bind: (128 + 128*256 + 256) * 4
    seconds = compute.node_seconds(wide, placed(wide, "mm", DeviceMesh.single(0)), flat(1))
    assert seconds == {0: pytest.approx(132608e-9)}


def test_the_first_floating_operand_gives_the_peak() -> None:
    half = matmul_graph(dtype="float16", m=256)  # 16.8 MFLOPs at 4e9, a quarter MB
    seconds = compute.node_seconds(half, placed(half, "mm", DeviceMesh.single(0)), flat(1))
    assert seconds == {0: pytest.approx(2 * 256 * 128 * 256 / 4e9)}


def test_launch_is_a_floor_not_an_addend() -> None:
    assert compute.kernel_seconds(10, 10, "float32", SLOW) == 1e-6
    assert compute.kernel_seconds(0, 0, "float32", SLOW) == 1e-6
    assert compute.kernel_seconds(5000, 10, "float32", SLOW) == pytest.approx(5e-6)


def test_parts_of_a_cut() -> None:
    whole = matmul_graph(n=10)
    cut = placed(whole, "mm", LINE, {"n": ("tp",)})  # columns 3, 3, 2, 2
    seconds = compute.node_seconds(whole, cut, flat(4))
    # Three columns are bound by FLOPs, 2*64*128*3; two by bytes, (64*128 + 128*2 + 64*2) * 4.
    assert [seconds[d] * 1e9 for d in range(4)] == pytest.approx([49152, 49152, 34304, 34304])


def test_different_devices_take_different_times() -> None:
    whole = matmul_graph()
    fast = replace(SLOW, peak_flops_per_s={"float32": 2e9})
    cluster = Cluster("mixed", (SLOW, fast), flat(2).levels)
    cut = placed(whole, "mm", DeviceMesh.line(2, "tp"), {"m": ("tp",)})
    seconds = compute.node_seconds(whole, cut, cluster)
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_an_op_without_a_row_costs_its_bytes() -> None:
    types = {"x": TensorType.of("float32", (1000,)), "y": TensorType.of("float32", (500,))}
    opaque = graph([Node("odd", "my::Odd", ("x",), ("y",))], types, ("x",), ("y",))
    node = placed(opaque, "odd", DeviceMesh.single(0))
    assert compute.node_seconds(opaque, node, flat(1)) == {0: pytest.approx(6000e-9)}
    assert compute.local_flops(opaque, node, {}) == 1500  # one an element


def test_absent_operands_cost_nothing() -> None:
    types = {"x": TensorType.of("float32", (1000,)), "y": TensorType.of("float32", (500,))}
    opaque = graph([Node("odd", "my::Odd", ("", "x", ""), ("", "y"))], types, ("x",), ("y",))
    node = placed(opaque, "odd", DeviceMesh.single(0))
    assert compute.local_moved_bytes(opaque, node, {}) == 6000


def test_nothing_to_do_still_launches() -> None:
    empty = chain_graph(1, 0)
    node = placed(empty, "relu0", DeviceMesh.single(0))
    assert compute.node_seconds(empty, node, flat(1)) == {0: 1e-6}


@pytest.fixture
def changed_relu(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """Relu as a view, Add as an op that moves its results only."""
    rule = ROWS["Relu"].rule
    rows = {
        **ROWS,
        "Relu": OpRow(rule, view=True),
        "Add": OpRow(ROWS["Add"].rule, moved=lambda ins, outs: len(ins) + outs[0]),
    }
    monkeypatch.setattr("partitioner.ir.ops.ROWS", rows)
    types = {value: TensorType.of("float32", (2000,)) for value in "xyz"}
    nodes = [Node("relu", "Relu", ("x",), ("y",)), Node("add", "Add", ("x", "y"), ("z",))]
    return graph(nodes, types, ("x",), ("z",))


def test_views_are_free_and_rows_say_what_moves(changed_relu: Graph) -> None:
    view = placed(changed_relu, "relu", LINE, {"b0": ("tp",)})
    assert compute.node_seconds(changed_relu, view, flat(4)) == dict.fromkeys(range(4), 0.0)
    add = placed(changed_relu, "add", LINE, {"b0": ("tp",)})
    assert compute.local_moved_bytes(changed_relu, add, {"tp": 0}) == 2 + 2000


@pytest.mark.parametrize(
    ("state_bytes", "moved"),
    [
        (0, 3 * 4000),  # plain gradient descent reads two tensors and writes one
        (4, 5 * 4000),  # momentum
        (8, 7 * 4000),  # two moments
        (12, 9 * 4000),  # and another copy of the value
    ],
)
def test_an_update_reads_and_writes_the_optimizers_state(state_bytes: int, moved: int) -> None:
    stored = Node("w", "partitioner::state", (), ("w:0",), {"state_bytes": state_bytes})
    update = Node("step", "partitioner::update", ("g", "w:0"), ("next",), {"role": "gradient"})
    types = dict.fromkeys(("g", "w:0", "next"), TensorType.of("float32", (1000,)))
    owner = graph([stored, update], types, ("g",), ("next",))
    step = placed(owner, "step", LINE)
    assert compute.local_moved_bytes(owner, step, {"tp": 0}) == moved
    cut = placed(owner, "step", LINE, {"d0": ("tp",)})
    assert compute.local_moved_bytes(owner, cut, {"tp": 0}) == moved // 4


def test_four_bit_elements_are_packed() -> None:
    types = {"x": TensorType.of("int4", (5,)), "y": TensorType.of("int4", (4,))}
    packed = graph([Node("odd", "my::Odd", ("x",), ("y",))], types, ("x",), ("y",))
    node = placed(packed, "odd", DeviceMesh.single(0))
    assert compute.local_moved_bytes(packed, node, {}) == 3 + 2


@given(
    m=st.integers(1, 64),
    k=st.integers(1, 64),
    n=st.integers(1, 64),
    factor=st.sampled_from(["m", "k", "n"]),
    cluster=st.sampled_from(["4xh100", "4xcpu", "4xl4", "4xideal"]),
)
def test_a_part_never_takes_longer_than_the_whole(
    m: int, k: int, n: int, factor: str, cluster: str
) -> None:
    whole = matmul_graph(64 * m, 64 * k, 64 * n)
    devices = resolve_cluster(cluster)
    alone = compute.node_seconds(whole, placed(whole, "mm", DeviceMesh.single(0)), devices)[0]
    cut = placed(whole, "mm", LINE, {factor: ("tp",)})
    parts = compute.node_seconds(whole, cut, devices)
    assert max(parts.values()) <= alone
    flops = [compute.local_flops(whole, cut, {"tp": index}) for index in range(4)]
    assert sum(flops) == 2 * 64**3 * m * k * n
    if cluster == "4xideal":
        assert parts[0] == pytest.approx(alone / 4)


@given(factor=st.floats(1, 100), dim=st.integers(1, 500))
def test_more_work_and_slower_devices_take_longer(factor: float, dim: int) -> None:
    def seconds(size: int, cluster: Cluster) -> float:
        owner = matmul_graph(size)
        return compute.node_seconds(owner, placed(owner, "mm", DeviceMesh.single(0)), cluster)[0]

    fast = replace(
        SLOW, peak_flops_per_s={"float32": 1e9 * factor}, memory_bytes_per_s=1e9 * factor
    )
    faster = Cluster("fast", (fast,), flat(1).levels)
    assert seconds(dim, flat(1)) <= seconds(dim + 1, flat(1))
    assert seconds(dim, faster) <= seconds(dim, flat(1))


def two_matmuls() -> Graph:
    types = {
        "x": TensorType.of("float32", (8, 8)),
        "w": TensorType.of("float32", (8, 8)),
        "y": TensorType.of("float32", (8, 8)),
        "v": TensorType.of("float32", (8, 24)),
        "z": TensorType.of("float32", (8, 24)),
    }
    nodes = [Node("a", "MatMul", ("x", "w"), ("y",)), Node("b", "MatMul", ("y", "v"), ("z",))]
    return graph(nodes, types, ("x",), ("z",), ("w", "v"))


def test_sharded_share_counts_flops() -> None:
    owner = two_matmuls()  # b has three times the FLOPs of a
    cut = placed(owner, "b", LINE, {"n": ("tp",)})
    assert compute.sharded_flops_share(owner, [placed(owner, "a", LINE), cut]) == pytest.approx(
        0.75
    )
    both = [placed(owner, "a", LINE, {"m": ("tp",)}), cut]
    assert compute.sharded_flops_share(owner, both) == 1
    assert (
        compute.sharded_flops_share(owner, [placed(owner, "a", LINE), placed(owner, "b", LINE)])
        == 0
    )
    single = DeviceMesh.single(0)
    assert compute.sharded_flops_share(owner, [placed(owner, n, single) for n in ("a", "b")]) == 0
    assert compute.sharded_flops_share(owner, []) == 0


def test_sharded_share_on_two_axes_and_groups() -> None:
    owner = two_matmuls()
    square = DeviceMesh.of({"dp": 2, "tp": 2})
    half = placed(owner, "a", square, {"m": ("dp",)})
    full = placed(owner, "b", square, {"m": ("dp",), "n": ("tp",)})
    assert compute.sharded_flops_share(owner, [half, full]) == pytest.approx(0.75)
    pair = DeviceMesh.of({"tp": 2}, (2, 3))
    hybrid = [placed(owner, "a", pair, {"m": ("tp",)}), placed(owner, "b", square)]
    assert compute.sharded_flops_share(owner, hybrid) == pytest.approx(0.25)


def test_what_no_axis_can_cut_is_not_counted() -> None:
    types = {
        "x": TensorType.of("float32", (2, 2)),
        "w": TensorType.of("float32", (2, 2)),
        "y": TensorType.of("float32", (2, 2)),
    }
    small = graph([Node("a", "MatMul", ("x", "w"), ("y",))], types, ("x",), ("y",), ("w",))
    large = matmul_graph()
    cut = placed(large, "mm", LINE, {"n": ("tp",)})
    assert compute.sharded_flops_share(small, [placed(small, "a", LINE), cut]) == 1
    # On 2 x 2, m and n can take an axis each.
    square = DeviceMesh.of({"dp": 2, "tp": 2})
    assert compute.sharded_flops_share(small, [placed(small, "a", square)]) == 0
    both = placed(small, "a", square, {"m": ("dp",), "n": ("tp",)})
    assert compute.sharded_flops_share(small, [both]) == 1


def test_work_without_a_rule_counts_as_not_cut() -> None:
    """Its FLOPs are estimated: those of a product by its weights, others by their elements."""
    types = {
        "x": TensorType.of("float32", (8, 8)),
        "w": TensorType.of("float32", (8, 8)),
        "y": TensorType.of("float32", (8, 8)),
        "z": TensorType.of("float32", (8, 8)),
    }
    nodes = [Node("a", "MatMul", ("x", "w"), ("y",)), Node("b", "my::MatMulX", ("y", "w"), ("z",))]
    owner = graph(nodes, types, ("x",), ("z",), ("w",))
    cut = placed(owner, "a", DeviceMesh.line(2, "tp"), {"n": ("tp",)})
    alone = placed(owner, "b", DeviceMesh.single(0))
    assert compute.local_flops(owner, alone, {}) == 2 * 8 * 8 * 8
    assert compute.sharded_flops_share(owner, [cut, alone]) == pytest.approx(0.5)
