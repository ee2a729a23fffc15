"""Presets' prices: near published measurements, monotone, and called by where they come from."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans.cost_cases import matmul_graph, placed
from partitioner.cost_model.cluster.published import kernels, link_names, links
from partitioner.cost_model.cluster.resolve import preset_cluster, resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, stand_in
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.prices import compute
from partitioner.cost_model.prices.collectives import collective, comm_cost, tabled
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.profiles.entries import LinkTable
from partitioner.ir.exchange import Transfer
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Comm, CommKind

ONE = DeviceMesh.single(0)
TABLED = ("a100-40g", "a100-80g", "h100", "h200", "b200", "mi300x")
GIVEN = (CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER)


def product_s(preset: str, m: int, n: int, k: int, dtype: str = "bfloat16") -> float:
    graph = matmul_graph(m, k, n, dtype)
    return compute.node_seconds(graph, placed(graph, "mm", ONE), preset_cluster(preset, 1, 1))[0]


@pytest.mark.parametrize(
    ("preset", "m", "n", "k", "tflops", "within"),
    [
        # None of these is fitted: stas00/ml-engineering, compute/accelerator/README.md.
        ("a100-80g", 1024, 10240, 5120, 271.2, 0.16),
        ("h100", 2048, 2048, 13312, 794.5, 0.06),
        ("h200", 2048, 2048, 13312, 794.5, 0.06),
        ("b200", 1792, 16128, 3072, 1745.0, 0.16),
        ("mi300x", 10240, 15360, 8192, 668.4, 0.14),
    ],
)
def test_large_products(preset: str, m: int, n: int, k: int, tflops: float, within: float) -> None:
    published_s = 2 * m * n * k / (tflops * 1e12)
    assert product_s(preset, m, n, k) == pytest.approx(published_s, rel=within)


@pytest.mark.parametrize("preset", TABLED)
def test_a_skinny_product_is_slower_than_a_square_one(preset: str) -> None:
    square, skinny = product_s(preset, 2048, 2048, 2048), product_s(preset, 8, 2048, 524288)
    assert skinny > 1.5 * square, "as many FLOPs"
    assert product_s(preset, 16, 16, 16) > 5e-6, "filling the device takes time"


@given(
    preset=st.sampled_from(TABLED),
    dims=st.tuples(*[st.sampled_from([1, 16, 100, 128, 1000, 4096, 20000])] * 3),
    grown=st.integers(0, 2),
)
def test_products_grow_with_each_dim(preset: str, dims: tuple[int, int, int], grown: int) -> None:
    larger = tuple(size + 64 * (index == grown) for index, size in enumerate(dims))
    assert product_s(preset, *dims) < product_s(preset, *larger)


@pytest.mark.parametrize(
    ("preset", "kind", "ranks", "nbytes", "published_s", "within"),
    [
        # H100: meta-pytorch/autoparallel, nccl-tests of 1 GB; the all-reduce of 8 is not fitted.
        ("h100", CommKind.ALL_REDUCE, 8, 10**9, 31e-6 + 1e9 / 267e9, 0.05),
        ("h100", CommKind.ALL_REDUCE, 4, 10**9, 15e-6 + 1e9 / 236e9, 0.01),
        ("h100", CommKind.ALL_GATHER, 2, 10**9, 8e-6 + 1e9 / 537e9, 0.01),
        # H200, NCCL 2.27.7, 8 and 16 GiB: stas00/ml-engineering, network/README.md.
        ("h200", CommKind.ALL_REDUCE, 6, 2**33, 2**33 * 10 / 6 / 435.6e9, 0.05),
        ("h200", CommKind.ALL_GATHER, 8, 2**34, 2**34 * 7 / 8 / 361.4e9, 0.06),
        ("h200", CommKind.REDUCE_SCATTER, 8, 2**34, 2**34 * 7 / 8 / 362.9e9, 0.06),
        # A100 and MI300X: other runs than those that are fitted (Azure/AI-benchmarking-guide).
        ("a100-80g", CommKind.ALL_REDUCE, 8, 2**30, 2**30 * 7 / 4 / 228.1e9, 0.03),
        ("mi300x", CommKind.ALL_REDUCE, 8, 2**30, 2**30 * 7 / 4 / 313.92e9, 0.03),
        ("b200", CommKind.ALL_REDUCE, 7, 2**33, 2**33 * 12 / 7 / 811.2e9, 0.03),
    ],
)
def test_collectives_in_a_node(
    preset: str, kind: CommKind, ranks: int, nbytes: int, published_s: float, within: float
) -> None:
    cluster = preset_cluster(preset, 1, 8)
    best = collective(kind, tuple(range(ranks)), nbytes, cluster)
    assert best.name == "published"
    assert best.seconds == pytest.approx(published_s, rel=within)
    assert best.start_s(cluster.devices[0]) == 0, "measurements include the start-up"


def test_collectives_over_whole_nodes_are_not_the_sum_of_their_levels() -> None:
    """4 nodes of B200, 16 GiB: 381.8 GB/s a device, stas00/ml-engineering."""
    cluster = preset_cluster("b200", 4, 8)
    best = collective(CommKind.ALL_REDUCE, tuple(range(32)), 2.0**34, cluster)
    assert best.seconds == pytest.approx(2**34 * 2 * 31 / 32 / 381.8e9, rel=0.2)


@given(
    preset=st.sampled_from(("h100", "a100-80g", "mi300x")),
    kind=st.sampled_from(GIVEN),
    nodes=st.sampled_from((1, 2, 4)),
    each=st.sampled_from((1, 2, 3, 4, 8)),
    power=st.floats(0, 34),
)
def test_more_bytes_take_no_less(
    preset: str, kind: CommKind, nodes: int, each: int, power: float
) -> None:
    cluster = preset_cluster(preset, nodes, 8)
    ranks = tuple(node * 8 + rank for node in range(nodes) for rank in range(each))
    seconds = [collective(kind, ranks, 2**p, cluster).seconds for p in (power, power + 0.5)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3, 4), (0, 1, 8), (0, 8), tuple(range(16))])
def test_nodes_are_never_faster_than_one(ranks: tuple[int, ...]) -> None:
    far = preset_cluster("h100", 2, 8)
    inside = tuple(range(min(len(ranks), 8)))
    for kind, power in itertools.product(GIVEN, range(0, 34, 3)):
        across = collective(kind, ranks, 2.0**power, far).seconds
        assert collective(kind, inside, 2.0**power, far).seconds <= across * (1 + 1e-9)


@pytest.mark.parametrize(("launch_us", "at_least_us"), [(4, 10), (34, 34), (1000, 1000)])
def test_a_published_collective_takes_a_launch_at_least(launch_us: int, at_least_us: int) -> None:
    plain = preset_cluster("a100-80g", 1, 2)
    devices = tuple(replace(device, launch_s=launch_us * 1e-6) for device in plain.devices)
    small = Comm(0, CommKind.ALL_REDUCE, (0, 1), "a", "b", "float16", ())
    seconds = comm_cost(small, 512, replace(plain, devices=devices)).seconds
    assert seconds == {0: pytest.approx(at_least_us * 1e-6, rel=0.01), 1: seconds[0]}


def test_all_to_all_of_all_ranks_is_priced_as_one() -> None:
    cluster = preset_cluster("h100", 1, 8)
    nbytes = 2.0**30
    found = tabled(CommKind.ALL_TO_ALL, tuple(range(8)), nbytes, cluster)
    assert found is not None
    assert found.seconds == pytest.approx(50e-6 + nbytes / 380e9, rel=0.01)
    part = ((0, 2**25),)
    pairs = itertools.product(range(8), repeat=2)
    parts = tuple(Transfer(a, b, (part,), (part,)) for a, b in pairs)
    comm = Comm(0, CommKind.ALL_TO_ALL, tuple(range(8)), "a", "b", "float32", parts)
    assert set(comm_cost(comm, 0, cluster).seconds.values()) == {found.seconds}
    some = replace(comm, transfers=parts[:20])
    assert set(comm_cost(some, 0, cluster).seconds.values()) != {found.seconds}, (
        "not everybody sends"
    )


def test_between_numbers_of_ranks() -> None:
    table = LinkTable({("k", 2): ((8.0, 1.0), (64.0, 8.0)), ("k", 8): ((8.0, 4.0), (64.0, 32.0))})
    assert table.seconds("k", 4, 8) == pytest.approx(2.0)
    assert table.seconds("k", 4, 64) == pytest.approx(16.0)
    assert table.seconds("k", 16, 8) is None
    assert table.seconds("k", 1, 8) is None
    assert table.seconds("other", 2, 8) is None


def test_what_takes_nothing_by_a_measured_difference_has_a_price() -> None:
    table = LinkTable({("k", 2): ((8.0, 0.0), (64.0, 1.0)), ("k", 8): ((8.0, 0.0), (64.0, 0.0))})
    for ranks in (2, 4, 8):
        for nbytes in (0, 8, 20, 64, 1000):
            seconds = table.seconds("k", ranks, nbytes)
            assert seconds is not None
            assert 0 < seconds <= 1000 / 64


def test_estimates_say_that_they_are_published() -> None:
    graph = matmul_graph(512, 512, 512, "float16")
    node = placed(graph, "mm", ONE)
    for preset, source in (("h100", "published"), ("l4", "datasheet"), ("cpu", "datasheet")):
        cluster = preset_cluster(preset, 1, 1)
        estimate = compute.node_estimates(graph, node, cluster)[0]
        assert (estimate.source, estimate.error) == (source, 0.0)
        assert Sources.of(graph, [node], cluster).shares() == {source: 1.0}
        assert Sources.of(graph, [node], cluster).error == 0.0
    whole = matmul_graph(512, 512, 512, "float32")
    alone = compute.node_estimates(whole, placed(whole, "mm", ONE), preset_cluster("h100", 1, 1))
    assert alone[0].source == "datasheet", "no products without TF32 are published"


def test_stand_ins_are_priced_by_the_same_tables() -> None:
    graph, mesh = matmul_graph(4096, 4096, 4096, "bfloat16"), DeviceMesh.line(4, "tp")
    cluster, model = preset_cluster("h100", 1, 4), stand_in(mesh)
    short = EvenMesh(mesh, model, cluster).node_seconds(
        graph, placed(graph, "mm", model, {"n": ("tp",)})
    )
    exact = compute.node_seconds(graph, placed(graph, "mm", mesh, {"n": ("tp",)}), cluster)
    assert short == pytest.approx(exact[0])


def test_a_cluster_names_its_tables() -> None:
    cluster = resolve_cluster("2x4xh100")
    data = json.loads(json.dumps(cluster.to_data()))
    assert [level["table"] for level in data["levels"]] == ["h100", "h100-network"]
    assert data["devices"][0]["table"] == "h100"
    again = Cluster.from_data(data)
    assert again == cluster
    assert again.devices[0].kernels is kernels("h100")
    for title in ("devices", "levels"):
        wrong = json.loads(json.dumps(data))
        wrong[title][0]["table"] = "h101"
        with pytest.raises(CostError, match="no table 'h101'; there are a100"):
            Cluster.from_data(wrong)


def test_every_table_has_the_same_kinds_and_ranks() -> None:
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for name in link_names():
        tables = links(name)
        for each, table in tables.items():
            known = {(kind, ranks) for kind, ranks in table.points if kind != "send"}
            numbers = {ranks for _, ranks in known}
            assert known == set(itertools.product(kinds, numbers)), (name, each)
            assert ("send", 2) in table.points
