"""Profiles: kept in one file by several writers, refused when damaged, used to price nodes."""

from __future__ import annotations

import itertools
import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.op_rows.placements import placement
from helpers.plans.cost_cases import SLOW, chain_graph, flat, matmul_graph, placed
from helpers.plans.cost_cases import graph as graph_of
from partitioner.cost_model.cluster.resolve import cpu_fingerprint, local_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, stand_in
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.evaluate import evaluate_placed, one_device
from partitioner.cost_model.prices import compute
from partitioner.cost_model.prices.collectives import Algorithm, collective, comm_cost
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.prices.reshard import Resharder, overlap_share
from partitioner.cost_model.profiles.database import (
    Profile,
    beside,
    check_writable,
    default_profile,
    in_groups,
    over,
    read_contents,
    whole_entry,
    whole_key,
    write_entries,
)
from partitioner.cost_model.profiles.entries import Entry, LinkEntry
from partitioner.cost_model.profiles.forms import Form, chain, form_of, stores_parts
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import TensorType

DEVICE, THREADS = "a processor, 4 cores", 2
PAIR = DeviceMesh.line(2, "tp")
ONE = DeviceMesh.single(0)


def entry(form: str, seconds: float, date: str = "2026-01-01", **changes: object) -> Entry:
    known = Entry(form, "MatMul", "float32", 1e6, 1000, seconds, 0.02, 9, "onnxruntime 1", date)
    return replace(known, **changes)  # type: ignore[arg-type]


def key(graph: Graph, node: PlacedNode, device: int = 0) -> str:
    point = node.mesh.coord(device)
    return form_of(graph, node, lambda at: compute.shape_at(point, at)).key


def measured(file: Path, *entries: Entry, devices: int = 2) -> Cluster:
    write_entries(file, DEVICE, THREADS, entries)
    spec = replace(SLOW, profile=Profile.read(file, DEVICE, THREADS))
    return replace(flat(devices), devices=(spec,) * devices)


def test_entries_are_kept_and_newer_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "profile.sqlite"
    write_entries(file, DEVICE, THREADS, [entry("a", 1.0), entry("b", 2.0)])
    write_entries(file, DEVICE, THREADS, [entry("a", 3.0, "2026-02-01", backend="onnxruntime 2")])
    write_entries(file, DEVICE, THREADS, [entry("b", 4.0)])
    write_entries(file, "another", THREADS, [entry("a", 9.0)])
    write_entries(file, DEVICE, 1, [entry("a", 9.0)])
    known = Profile.read(file, DEVICE, THREADS).entries
    assert {form: one.seconds for form, one in known.items()} == {"a": 3.0, "b": 4.0}


def test_a_whole_model_is_no_form(tmp_path: Path) -> None:
    file = tmp_path / "profile.sqlite"
    write_entries(file, DEVICE, THREADS, [whole_entry("1a", 1.0, 0.1, 5, "runtime 1", "2026-01")])
    write_entries(file, DEVICE, THREADS, [whole_entry("1a", 2.0, 0.1, 5, "runtime 2", "2026-02")])
    known = Profile.read(file, DEVICE, THREADS, 2)
    assert known.wholes[whole_key("1a")].seconds == 2.0
    assert not known.known
    assert known.beside(1) is known
    assert read_contents(file) == ()


def test_no_file_is_an_empty_profile_and_is_not_made(tmp_path: Path) -> None:
    assert not Profile.read(tmp_path / "none.sqlite", DEVICE, THREADS).entries
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000 + "y"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    for refused in (Profile.read, lambda *args: write_entries(*args, [])):
        with pytest.raises(CostError, match=r"^profile .*: File name too long$"):
            refused(file, DEVICE, THREADS)


def _foreign(file: Path) -> None:
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE entries (mine TEXT)")
    database.close()


def _of_the_future(file: Path) -> None:
    write_entries(file, DEVICE, THREADS, [])
    database = sqlite3.connect(file)
    database.execute("PRAGMA user_version = 99")
    database.close()


def _with_a_view(file: Path) -> None:
    """A profile whose links are computed, without end, when they are read."""
    write_entries(file, DEVICE, THREADS, [])
    database = sqlite3.connect(file)
    columns = "device, threads, kind, ranks, nbytes, seconds, spread, repeats, backend, measured_at"
    database.execute("DROP TABLE links")
    database.execute(
        f"CREATE VIEW links AS WITH RECURSIVE c(device) AS (SELECT 'x' UNION ALL SELECT 'x' FROM c)"
        f" SELECT {columns.replace('device', 'c.device', 1).replace(', ', ', 1 AS ')} FROM c"
    )
    database.close()


def _with_a_computed_column(file: Path) -> None:
    write_entries(file, DEVICE, THREADS, [])
    database = sqlite3.connect(file)
    database.execute("ALTER TABLE entries ADD COLUMN more AS (zeroblob(1000000000))")
    database.close()


def _damaged(file: Path) -> None:
    write_entries(file, DEVICE, THREADS, [entry(f"form {i}", 1.0) for i in range(2000)])
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda file: file.write_text("not a database, but a longer text"), "not a database"),
        (_foreign, "a database of another program"),
        (_of_the_future, "has version 99, this is version 2"),
        (_damaged, "malformed"),
        (_with_a_view, "it holds more than tables of numbers"),
        (_with_a_computed_column, "it holds more than tables of numbers"),
        (lambda file: file.mkdir(), "it is not a file"),
    ],
)
def test_what_is_no_profile_is_refused_and_kept(tmp_path: Path, make: object, why: str) -> None:
    file = tmp_path / "profile.sqlite"
    make(file)  # type: ignore[operator]
    before = file.read_bytes() if file.is_file() else b""
    with pytest.raises(CostError, match=why) as caught:
        Profile.read(file, DEVICE, THREADS)
    assert str(caught.value).startswith(f"profile {file}: ")
    if "malformed" not in why:
        with pytest.raises(CostError, match=why):
            write_entries(file, DEVICE, THREADS, [entry("a", 1.0)])
        assert (file.read_bytes() if file.is_file() else b"") == before


def test_an_empty_file_is_a_new_profile(tmp_path: Path) -> None:
    """`touch` and `mktemp` make one, and so does a process that is killed as it makes a profile."""
    file = tmp_path / "profile.sqlite"
    file.touch()
    check_writable(file)
    assert read_contents(file) == ()
    assert not Profile.read(file, DEVICE, THREADS).entries
    write_entries(file, DEVICE, THREADS, [entry("a", 1.0)])
    assert list(Profile.read(file, DEVICE, THREADS).entries) == ["a"]


_WRITER = """
import sys
from pathlib import Path
from partitioner.cost_model.profiles.database import Entry, write_entries
for i in range(20):
    name = f"{sys.argv[2]}-{i}"
    one = Entry(name, "Op", "float32", 1.0, 1, 1.0, 0.0, 5, "backend", "2026")
    write_entries(Path(sys.argv[1]), "device", 1, [one])
"""


def test_processes_write_at_once(tmp_path: Path) -> None:
    file = tmp_path / "profile.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(file), str(name)]) for name in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert len(Profile.read(file, "device", 1).entries) == 80


def test_entries_are_of_a_number_of_processes(tmp_path: Path) -> None:
    file = tmp_path / "p"
    write_entries(file, DEVICE, THREADS, [entry("a", 1.0), entry("a", 3.0, processes=2)])
    one, two, three = (Profile.read(file, DEVICE, THREADS, n) for n in (1, 2, 3))
    assert [p.entries["a"].seconds for p in (one, two)] == [1.0, 3.0]
    assert not three.entries
    assert two.beside(1).entries == one.entries
    assert two.beside(4) is two, "nothing was measured with four"


def test_a_device_that_is_busy_alone_is_faster(tmp_path: Path) -> None:
    graph = matmul_graph(n=10)
    whole, cut = placed(graph, "mm", ONE), placed(graph, "mm", PAIR, {"m": ("tp",)})
    file = tmp_path / "p"
    alone, busy = (entry(key(graph, whole), s, processes=n) for s, n in ((1.0, 1), (3.0, 2)))
    write_entries(file, DEVICE, THREADS, [alone, busy, entry(key(graph, cut), 0.5, processes=2)])
    spec = replace(SLOW, profile=Profile.read(file, DEVICE, THREADS, 2))
    cluster = replace(flat(2), devices=(spec,) * 2)
    assert compute.node_seconds(graph, whole, cluster) == {0: 3.0}
    assert cluster.beside((0, 1)) is cluster
    assert one_device(graph, cluster).latency_s == 1.0
    assert evaluate_placed(graph, [cut], cluster).load_s == {0: 0.5, 1: 0.5}
    assert Sources.of(graph, [whole], cluster).seconds == {"measured": 1.0}


def test_a_measured_form_has_its_seconds(tmp_path: Path) -> None:
    graph = matmul_graph(n=10)
    cut = placed(graph, "mm", PAIR, {"n": ("tp",)})
    whole = placed(graph, "mm", ONE)
    cluster = measured(tmp_path / "p", entry(key(graph, cut), 0.25))
    assert compute.node_seconds(graph, cut, cluster) == {0: 0.25, 1: 0.25}
    estimate = compute.node_estimates(graph, cut, cluster)[0]
    assert (estimate.source, estimate.error) == ("measured", 0.02)
    assert compute.node_estimates(graph, whole, cluster)[0].source == "fitted"
    assert compute.node_seconds(graph, cut, flat(2)) != {0: 0.25, 1: 0.25}


def test_uneven_parts_are_forms_of_their_own(tmp_path: Path) -> None:
    graph = matmul_graph(n=9)
    cut = placed(graph, "mm", PAIR, {"n": ("tp",)})  # columns 5, 4
    assert key(graph, cut, 0) != key(graph, cut, 1)
    cluster = measured(
        tmp_path / "p", entry(key(graph, cut, 0), 0.5), entry(key(graph, cut, 1), 0.125)
    )
    assert compute.node_seconds(graph, cut, cluster) == {0: 0.5, 1: 0.125}


def test_forms_do_not_depend_on_the_model() -> None:
    """A part of one model is the whole of another."""
    cut = key(matmul_graph(n=10), placed(matmul_graph(n=10), "mm", PAIR, {"n": ("tp",)}))
    small = matmul_graph(n=5)
    assert cut == key(small, placed(small, "mm", ONE))
    half = matmul_graph(n=5, dtype="float16")
    assert cut != key(half, placed(half, "mm", ONE))
    json.loads(cut)


def test_stand_ins_are_priced_by_the_same_forms(tmp_path: Path) -> None:
    graph, mesh = matmul_graph(n=16), DeviceMesh.line(4, "tp")
    exact = placed(graph, "mm", mesh, {"n": ("tp",)})
    cluster = measured(tmp_path / "p", entry(key(graph, exact), 0.75), devices=4)
    model = stand_in(mesh)
    even = EvenMesh(mesh, model, cluster)
    short = placed(graph, "mm", model, {"n": ("tp",)})
    assert even.node_seconds(graph, short) == 0.75


def test_entries_without_seconds_are_no_errors(tmp_path: Path) -> None:
    graph = matmul_graph()
    whole = placed(graph, "mm", ONE)
    cluster = measured(tmp_path / "p", entry("other", 0.0))
    (estimate,) = compute.node_estimates(graph, whole, cluster).values()
    assert estimate.source == "fitted"
    assert 0 < estimate.seconds < 1e-3


def test_fits_follow_the_work_and_say_their_error(tmp_path: Path) -> None:
    graph = matmul_graph(m=64, n=256)
    whole = placed(graph, "mm", ONE)
    point = ONE.coord(0)
    flops = compute.local_flops(graph, whole, point)
    moved = compute.local_moved_bytes(graph, whole, point)
    near = [
        entry(f"form {f}", 1e-3 * f, flops=flops * f, moved_bytes=round(moved * f))
        for f in (0.5, 2.0)
    ]
    cluster = measured(tmp_path / "p", *near)
    estimate = compute.node_estimates(graph, whole, cluster)[0]
    assert estimate.source == "fitted"
    assert estimate.seconds == pytest.approx(1e-3)
    assert estimate.error == pytest.approx(0.02)
    noisy = [
        replace(one, seconds=one.seconds * scale) for one, scale in zip(near, (1, 4), strict=True)
    ]
    spread = compute.node_estimates(graph, whole, measured(tmp_path / "q", *noisy))[0]
    assert spread.error > 0.5
    assert 1e-3 < spread.seconds < 4e-3


def test_another_operator_or_type_is_no_family(tmp_path: Path) -> None:
    graph = matmul_graph()
    whole = placed(graph, "mm", ONE)
    others = entry("a", 1.0, op="Conv"), entry("b", 1.0, dtype="float16")
    cluster = measured(tmp_path / "p", *others)
    estimate = compute.node_estimates(graph, whole, cluster)[0]
    assert estimate.source == "datasheet"
    assert estimate.seconds == compute.node_seconds(graph, whole, flat(1))[0]


def test_sources_are_shares_of_the_seconds(tmp_path: Path) -> None:
    graph = matmul_graph(n=10)
    cut = placed(graph, "mm", PAIR, {"n": ("tp",)})
    cluster = measured(tmp_path / "p", entry(key(graph, cut), 0.25))
    known = Sources.of(graph, [cut], cluster)
    assert known.shares() == {"measured": 1.0}
    assert known.error == pytest.approx(0.02)
    assert Sources.of(graph, [cut], flat(2)).shares() == {"datasheet": 1.0}
    assert Sources({}, 0.0).shares() == {"datasheet": 1.0}


def test_a_cluster_names_its_profile(tmp_path: Path) -> None:
    cluster = measured(tmp_path / "p", entry("a", 1.0))
    again = Cluster.from_data(json.loads(json.dumps(cluster.to_data())))
    assert again == cluster
    assert again.devices[0].profile == cluster.devices[0].profile
    write_entries(tmp_path / "p", DEVICE, THREADS, [entry("b", 1.0)])
    assert Cluster.from_data(cluster.to_data()) != cluster, "prices may have changed"
    data = cluster.to_data()
    data["devices"][0]["profile"]["threads"] = 0
    with pytest.raises(CostError, match="profile: threads is 0"):
        Cluster.from_data(data)


class _NoGpus:
    def is_available(self) -> bool:
        return False


def test_processes_share_a_machine_without_gpus(tmp_path: Path) -> None:
    one = local_cluster(None, _NoGpus(), tmp_path / "p")
    (spec,) = one.devices
    assert spec.profile is not None
    assert spec.profile.device == cpu_fingerprint()
    cores = spec.profile.threads
    every = local_cluster(cores, _NoGpus(), tmp_path / "p")
    assert len(every) == cores
    assert every.devices[0].profile == Profile(tmp_path / "p", cpu_fingerprint(), 1, cores, {})
    assert every.devices[0].memory_bytes == spec.memory_bytes // cores
    with pytest.raises(CostError, match=f"needs {cores + 1} cores, one for each process"):
        local_cluster(cores + 1, _NoGpus(), tmp_path / "p")


def link(kind: str, nbytes: int, seconds: float, ranks: int = 2) -> LinkEntry:
    return LinkEntry(kind, ranks, nbytes, seconds, 0.01, 7, "gloo", "2026-01-01")


def linked(file: Path, *entries: LinkEntry, devices: int = 2) -> Cluster:
    write_entries(file, DEVICE, THREADS, entries)
    cluster = flat(devices)
    profile = Profile.read(file, DEVICE, THREADS)
    return replace(cluster, levels=tuple(replace(one, profile=profile) for one in cluster.levels))


def test_links_are_interpolated_and_never_fall(tmp_path: Path) -> None:
    sizes = (1000, 10_000, 100_000, 1_000_000)
    seconds = (2e-4, 1e-4, 1e-3, 1e-2)  # the first one is noise: more bytes took less
    cluster = linked(
        tmp_path / "p", *(link("all_reduce", n, s) for n, s in zip(sizes, seconds, strict=True))
    )
    profile = cluster.levels[0].profile
    assert profile is not None

    def of(nbytes: float) -> float:
        known = profile.link_seconds("all_reduce", 2, nbytes)
        assert known is not None
        return known

    assert [of(1), of(1000), of(10_000)] == pytest.approx([1e-4] * 3)
    assert of(1e5) == pytest.approx(1e-3)
    assert of(10**5.5) == pytest.approx(10**-2.5)
    assert of(5e6) == pytest.approx(5e-2)
    drawn = [of(10 ** (k / 10)) for k in range(80)]
    assert drawn == sorted(drawn)
    assert profile.link_seconds("all_reduce", 3, 1000) is None
    assert profile.link_seconds("broadcast", 2, 1000) is None


def test_collectives_are_priced_by_measurements(tmp_path: Path) -> None:
    cluster = linked(tmp_path / "p", link("all_reduce", 1000, 0.5), devices=4)
    kind = CommKind.ALL_REDUCE
    assert collective(kind, (0, 1), 1000, cluster) == Algorithm("measured", 0.5)
    assert collective(kind, (2, 3), 2000, cluster) == Algorithm("measured", 1.0)
    by_rates = collective(kind, (0, 1, 2), 1000, flat(4))
    assert collective(kind, (0, 1, 2), 1000, cluster) == by_rates, "three ranks were not measured"


def test_groups_of_two_levels_have_entries_of_their_own(tmp_path: Path) -> None:
    """Ranks of one machine each, and several of each, over the outer level's name."""
    file = tmp_path / "p"
    grouped = in_groups("all_reduce", 2)
    entries = {
        ("", "all_reduce", 2): 0.25,
        ("link", "all_reduce", 2): 0.5,
        ("link", grouped, 4): 2.0,
        ("link", beside(grouped), 4): 0.5,
        ("link", "send", 2): 0.125,
    }
    known = [link(over(kind, level), 1000, s, n) for (level, kind, n), s in entries.items()]
    write_entries(file, DEVICE, THREADS, known)
    profile = {"file": str(file), "device": DEVICE, "threads": THREADS}
    rates = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6}
    levels = [
        {"name": "machine", "size": 2, **rates, "profile": profile},
        {"name": "link", "size": 4, **rates, "profile": profile},
    ]
    cluster = Cluster.from_data({**flat(4).to_data(), "levels": levels})
    assert Cluster.from_data(cluster.to_data()) == cluster
    kind = CommKind.ALL_REDUCE
    assert collective(kind, (2, 3), 1000, cluster) == Algorithm("measured", 0.25)
    assert collective(kind, (0, 2), 1000, cluster) == Algorithm("measured", 0.5)
    assert collective(kind, (1, 3), 1000, cluster) == Algorithm("measured", 0.5)
    assert collective(kind, (0, 1, 2, 3), 1000, cluster) == Algorithm("measured", 2.0)
    assert cluster.levels[1].hidden_share(kind, 4) == pytest.approx(0.75)
    assert cluster.levels[1].message_s == 0.125
    assert cluster.levels[0].message_s == cluster.levels[0].latency_s
    three = collective(kind, (0, 1, 2), 1000, cluster)  # two of one machine, one of the other
    assert three.name != "measured"


def test_messages_are_priced_by_measurements(tmp_path: Path) -> None:
    (level,) = linked(tmp_path / "p", link("send", 1000, 1e-3), link("send", 8000, 4e-3)).levels
    assert level.message_s == 1e-3
    assert level.message_s + level.transfer_s(8000) == pytest.approx(4e-3)
    (plain,) = flat(2).levels
    assert plain.message_s == plain.latency_s
    assert plain.transfer_s(8000) == 8000 / plain.bandwidth_bytes_per_s


def test_measured_seconds_contain_the_start(tmp_path: Path) -> None:
    reduced = Comm(0, CommKind.ALL_REDUCE, (0, 1), "x", "y", "float32", (), "sum")
    cluster = linked(tmp_path / "p", link("all_reduce", 1000, 0.5))
    assert comm_cost(reduced, 250, cluster).seconds == {0: 0.5, 1: 0.5}
    plain = collective(CommKind.ALL_REDUCE, (0, 1), 1000, flat(2)).seconds
    assert comm_cost(reduced, 250, flat(2)).seconds[0] == plain + SLOW.launch_s


@pytest.mark.parametrize("size", [12, 11])
def test_even_exchanges_are_priced_by_measurements(tmp_path: Path, size: int) -> None:
    """Uneven ones have no measured equal."""
    one, mesh = link("all_to_all", 100, 0.5, ranks=3), DeviceMesh.line(3, "tp")
    cluster = linked(tmp_path / "p", one, link("send", 1000, 1e-3), devices=3)
    whole, cut = DimLayout.whole(size), DimLayout.even(size, ("tp",), mesh)
    rows, columns = placement(mesh, cut, whole), placement(mesh, whole, cut)
    (hop,) = Resharder(cluster).hops("float32", rows, columns)
    (priced,) = hop.comms
    assert priced.comm.kind is CommKind.ALL_TO_ALL
    parts = 12 * 4 * 4  # bytes of each device
    expected_s = 0.5 * parts / 100
    assert (priced.seconds == pytest.approx(dict.fromkeys(range(3), expected_s))) == (size == 12)


def test_the_hidden_share_is_measured(tmp_path: Path) -> None:
    cluster = linked(
        tmp_path / "p",
        *(link("all_reduce", n, s) for n, s in ((1000, 1.0), (2000, 3.0))),
        *(link(beside("all_reduce"), n, s) for n, s in ((1000, 0.5), (2000, 0.5))),
        link("send", 4000, 9.0),  # never measured beside compute
    )
    (level,) = cluster.levels
    assert level.hidden_share(CommKind.ALL_REDUCE, 2) == pytest.approx(0.75)
    assert level.hidden_share(CommKind.ALL_REDUCE, 3) == level.overlap
    reduced = Comm(0, CommKind.ALL_REDUCE, (0, 1), "x", "y", "float32", (), "sum")
    assert overlap_share(reduced, cluster) == pytest.approx(0.75)
    assert overlap_share(replace(reduced, kind=CommKind.SLICE), cluster) == 0


def test_the_hidden_share_is_that_of_the_kind(tmp_path: Path) -> None:
    """Messages and exchanges have one; what was not measured has that of all kinds."""
    cluster = linked(
        tmp_path / "p",
        *(link(kind, 1000, 1.0) for kind in ("all_reduce", "send", "all_to_all")),
        *(link(beside(kind), 1000, s) for kind, s in (("all_reduce", 0.5), ("send", 0.2))),
        link(beside("all_to_all"), 1000, 0.4),
    )
    (level,) = cluster.levels
    shares = {kind: level.hidden_share(kind, 2) for kind in CommKind}
    assert shares[CommKind.ALL_REDUCE] == pytest.approx(0.5)
    assert shares[CommKind.SEND] == shares[CommKind.GATHER] == pytest.approx(0.7)
    assert shares[CommKind.ALL_TO_ALL] == shares[CommKind.BROADCAST] == pytest.approx(0.7)
    assert shares[CommKind.ALL_GATHER] == pytest.approx(1.9 / 3)


def _relus(*ops: str) -> Graph:
    """A product, then these pointwise operators, the second of which also has another reader."""
    names = ["y", *(f"v{index}" for index in range(len(ops)))]
    types = dict.fromkeys(["x", "w", *names, "z"], TensorType.of("float32", (4, 4)))
    nodes = [Node("mm", "MatMul", ("x", "w"), ("y",))]
    for index, op in enumerate(ops):
        nodes.append(Node(f"n{index}", op, (names[index],), (names[index + 1],)))
    nodes.append(Node("other", "Relu", ("v1",), ("z",)))
    return graph_of(nodes, types, ("x",), (names[-1], "z"), ("w",))


def test_a_form_stands_behind_what_it_alone_reads() -> None:
    graph = _relus("Relu", "Tanh", "Relu")
    behind = {node.name: tuple(one.name for one in chain(graph, node.name)) for node in graph.nodes}
    assert behind == {"mm": (), "n0": ("mm",), "n1": ("mm", "n0"), "n2": (), "other": ()}
    first, second = (
        form_of(graph, placed(graph, name, ONE), partial(compute.shape_at, {}))
        for name in ("n0", "n2")
    )
    assert first.family == "Relu behind MatMul"
    assert (second.family, second) == ("Relu", first.alone)
    assert first.key != second.key == first.alone.key


@pytest.mark.parametrize("is_cut", [False, True])
def test_updates_are_priced_by_whether_the_plan_stores_any_parameter_in_parts(
    is_cut: bool, tmp_path: Path
) -> None:
    """The whole one of two parameters is as dear as the plan makes it; a search counts the less."""
    square = TensorType.of("float32", (4, 4))
    nodes, types = [], {}
    for name in ("v", "w"):
        nodes.append(Node(name, "partitioner::state", (), (name,)))
        attrs = {"role": "gradient"}
        update = Node(f"{name}.n", "partitioner::update", (f"{name}.g", name), (f"{name}.u",))
        nodes.append(replace(update, attrs=attrs))
        types |= dict.fromkeys((name, f"{name}.g", f"{name}.u"), square)
    graph = graph_of(nodes, types, ("v.g", "w.g"), ("v.u", "w.u"))
    cuts = {"v": {"d0": ("tp",)} if is_cut else {}, "w": {}}
    plan = [placed(graph, node.name, PAIR, cuts[node.name[0]]) for node in nodes]
    whole = plan[-1]
    at = partial(compute.shape_at, PAIR.coord(0))
    apart, together = (form_of(graph, whole, at, in_parts=known).key for known in (False, True))
    assert apart != together
    part = key(graph, plan[1])
    entries = [entry(form, s, op=whole.node.op) for form, s in ((apart, 1.0), (together, 5.0))]
    if is_cut:
        entries.append(entry(part, 3.0, op=whole.node.op))
    cluster = measured(tmp_path / "p", *entries)
    evaluation = evaluate_placed(graph, plan, cluster)
    assert evaluation.compute_s[0] == (3.0 + 5.0 if is_cut else 1.0 + 1.0)
    assert Sources.of(graph, plan, cluster).seconds["measured"] == 2 * evaluation.compute_s[0]
    alone_s = sum(compute.node_seconds(graph, node, cluster)[0] for node in plan)
    assert alone_s == (3.0 + 1.0 if is_cut else 1.0 + 1.0), "a bound"
    assert one_device(graph, cluster).compute_s[0] == 2.0
    stages = [placed(graph, n.name, DeviceMesh.single("vw".index(n.name[0]))) for n in nodes]
    assert not stores_parts(stages), "a device has a parameter whole, or nothing of it"


def _views(*ops: str) -> Graph:
    """Views of a matrix by operators that keep its shape."""
    names = ["x", *(f"v{index}" for index in range(len(ops)))]
    types = dict.fromkeys(names, TensorType.of("float32", (4, 4)))
    nodes = [
        Node(f"n{index}", op, (names[index],), (names[index + 1],), _VIEWS.get(op, {}))
        for index, op in enumerate(ops)
    ]
    return graph_of(nodes, types, ("x",), (names[-1],))


_VIEWS = {"aten::permute": {"dims": (1, 0)}, "aten::view": {"size": (4, 4)}}


def test_views_take_the_seconds_of_a_call_where_pytorch_calls_them(tmp_path: Path) -> None:
    """Of any shape; one that was not measured takes the median of the others."""
    graph = _views("aten::permute", "aten::view", "aten::detach", "partitioner::alias")
    plan = [placed(graph, node.name, PAIR) for node in graph.nodes]
    cut = placed(graph, "n0", PAIR, {"d0": ("tp",)})
    assert key(graph, plan[0]) == key(graph, cut) != key(graph, plan[1])
    no_work = {"flops": 0.0, "moved_bytes": 0}
    calls = (
        entry(key(graph, plan[index]), seconds, op=graph.nodes[index].op, **no_work)
        for index, seconds in ((0, 4.0), (1, 6.0))
    )
    product = entry("a product", 100.0)
    cluster = measured(tmp_path / "p", product, *calls)
    seconds = [compute.node_seconds(graph, node, cluster) for node in (*plan, cut)]
    assert seconds == [dict.fromkeys((0, 1), s) for s in (4.0, 6.0, 5.0, 0.0, 4.0)]
    assert evaluate_placed(graph, plan, cluster).compute_s[0] == 15.0
    shares = Sources.of(graph, plan, cluster).shares()
    assert shares == {"measured": pytest.approx(2 / 3), "fitted": pytest.approx(1 / 3)}
    even = EvenMesh(PAIR, stand_in(PAIR), cluster)
    assert [even.node_seconds(graph, node) for node in plan] == [4.0, 6.0, 5.0, 0.0]
    for other in (measured(tmp_path / "q", product), flat(2)):
        assert compute.node_seconds(graph, plan[0], other) == {0: 0.0, 1: 0.0}


def test_views_of_a_session_take_nothing(tmp_path: Path) -> None:
    graph = _views("Identity")
    cluster = measured(tmp_path / "p", entry("a call", 1.0, flops=0.0, moved_bytes=0))
    assert compute.node_seconds(graph, placed(graph, "n0", ONE), cluster) == {0: 0.0}


def test_what_is_known_behind_another_goes_before_what_is_known_alone(tmp_path: Path) -> None:
    graph = _relus("Relu", "Tanh", "Relu")
    relu, other = placed(graph, "n0", ONE), placed(graph, "n2", ONE)
    form = form_of(graph, relu, partial(compute.shape_at, {}))
    alone = entry(form.alone.key, 0.5, op="Relu")
    cluster = measured(tmp_path / "p", alone)
    assert compute.node_seconds(graph, relu, cluster) == {0: 0.5}
    near = entry("another shape", 0.125, op=form.family, flops=16.0, moved_bytes=128)
    cluster = measured(tmp_path / "p", near)
    assert compute.node_seconds(graph, relu, cluster) == {0: 0.5}, "exact, though alone"
    cluster = measured(tmp_path / "p", entry(form.key, 0.25, op=form.family))
    assert compute.node_seconds(graph, relu, cluster) == {0: 0.25}
    assert compute.node_seconds(graph, other, cluster) == {0: 0.5}
    cluster = measured(tmp_path / "q", near, entry("a third", 0.5, op="Relu"))
    estimate = compute.node_estimates(graph, relu, cluster)[0]
    assert (estimate.source, estimate.seconds) == ("fitted", pytest.approx(0.125))


def test_what_is_known_alone_of_dense_operands_serves_a_chain_of_transposed_ones() -> None:
    """Nearer forms go before it: the same chain, or the same order in memory."""
    product = ("float32", (4, 6)), ("float32", (6, 4), (1, 0))
    form = Form("aten::add", (), product, (("float32", (4, 4)),), ("aten::mm",))
    others = (form.alone.dense, form.dense, form.alone, form)
    assert len({other.key for other in others}) == 4
    known = {}
    for seconds, other in enumerate(others, 1):
        known[other.key] = entry(other.key, float(seconds), op=other.family)
        profile = Profile(Path(), DEVICE, THREADS, 1, {1: known})
        estimate = profile.estimate(form, "float32", 1.0, 1)
        assert estimate is not None
        assert (estimate.source, estimate.seconds) == ("measured", seconds)


def test_long_rows_of_pointwise_operators_are_no_chains() -> None:
    """A chain is looked for no farther than it may be long."""
    graph = chain_graph(length=3000)
    assert not any(chain(graph, node.name) for node in graph.nodes)
    ops = ("Relu", "Tanh", "Relu", "Tanh", "Relu")
    names = ["y", *(f"v{index}" for index in range(len(ops)))]
    types = dict.fromkeys(["x", "w", *names], TensorType.of("float32", (4, 4)))
    pairs = itertools.pairwise(names)
    nodes = [Node(f"n{i}", ops[i], (a,), (b,)) for i, (a, b) in enumerate(pairs)]
    product = Node("mm", "MatMul", ("x", "w"), ("y",))
    row = graph_of([product, *nodes], types, ("x",), (names[-1],), ("w",))
    assert [len(chain(row, node.name)) for node in row.nodes] == [0, 1, 2, 3, 4, 0]


def test_a_missing_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "deeper" / "profile.sqlite"
    for add in (check_writable, lambda file: write_entries(file, DEVICE, THREADS, [])):
        with pytest.raises(CostError, match=f"profile {file}: there is no folder {file.parent}"):
            add(file)
    assert not list(tmp_path.iterdir())


def test_the_folder_of_the_default_profile_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_entries(default_profile(), DEVICE, THREADS, [entry("a", 1.0)])
    assert list(Profile.read(default_profile(), DEVICE, THREADS).entries) == ["a"]


def test_a_file_that_is_no_profile_cannot_take_measurements(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but a longer text")
    with pytest.raises(CostError, match="not a database"):
        check_writable(file)
