"""`profile` measures each form that a search could choose, once, and plans are priced by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import partitioner
from helpers import factories
from partitioner import examples
from partitioner.api.profiling import candidates as measured
from partitioner.api.profiling import links
from partitioner.api.profiling.candidates import (
    candidates,
    is_cold,
    is_made_shortly_before,
    is_read_long_after,
    local_graph,
)
from partitioner.api.profiling.measure import Timing, timed_runs
from partitioner.api.profiling.profile import profile
from partitioner.api.profiling.profiled import Profiled
from partitioner.api.profiling.rank import Item, _batches
from partitioner.cli.main import main
from partitioner.cost_model.cluster.resolve import local_cluster, one_process, resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import BORDER, whole_key, write_entries
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.foundations import units
from partitioner.frontends.model import open_model
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _small_yardsticks() -> Iterator[None]:
    """One copy and one product, which take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "MOVED_BYTES", (2**16,))
        patch.setattr(measured, "PRODUCTS", ((64, 64, 64),))
        yield


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return tmp_path / "profile.sqlite"


@pytest.fixture
def file(empty: Path) -> Path:
    """A profile in which communications are known, which takes long."""
    return with_links(empty)


def with_links(empty: Path) -> Path:
    try:
        (spec, *_) = local_cluster(2, profile=empty).devices
    except CostError:
        return empty
    assert spec.profile is not None
    known = [
        LinkEntry(kind, 2, nbytes, 1e-3, 0.01, 7, links.NAME, "2026-01-01")
        for kind, _, nbytes in links.wanted_of(links.link_groups([("", 2)]))
    ]
    write_entries(empty, spec.profile.device, spec.profile.threads, known)
    return empty


@pytest.fixture(scope="module")
def mlp() -> onnx.ModelProto:
    return examples.build("mlp", layers=2, hidden=8, batch=6)


def two_processes(file: Path) -> Cluster:
    try:
        return resolve_cluster("2xlocal", profile=file)
    except CostError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def first_run(
    mlp: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Profiled]:
    """A profile of the perceptron on two processes, measured once for all tests."""
    file = with_links(tmp_path_factory.mktemp("profiled") / "profile.sqlite")
    two_processes(file)
    return file, profile(mlp, devices=2, profile=file)


@pytest.fixture
def profiled(first_run: tuple[Path, Profiled], file: Path) -> Path:
    """A copy of it, to which a test may add."""
    shutil.copy(first_run[0], file)
    return file


def test_the_forms_of_all_strategies_are_collected(mlp: onnx.ModelProto, file: Path) -> None:
    graph, cluster = open_model(mlp).graph, two_processes(file)
    found = candidates(graph, cluster, "auto", None)
    products = {one.form.operands[0] for one in found if one.form.op in ("MatMul", "Gemm")}
    assert products >= {
        ("float32", (6, 8)),  # whole
        ("float32", (3, 8)),  # cut by rows
        ("float32", (6, 4)),  # cut along the sum
    }
    assert len({one.form.key for one in found}) == len(found)
    weights = [one.weight_s for one in found]
    assert weights == sorted(weights, reverse=True)
    three = candidates(graph, cluster, "inter", None)
    assert {one.form.key for one in three} < {one.form.key for one in found}


def test_repeated_layers_are_one_form(file: Path) -> None:
    cluster = two_processes(file)
    few, many = (
        candidates(
            open_model(examples.build("mlp", layers=layers, hidden=8, batch=6)).graph,
            cluster,
            "auto",
            None,
        )
        for layers in (4, 16)
    )
    assert {one.form.key for one in few} == {one.form.key for one in many}
    assert sum(one.weight_s for one in many) > 3 * sum(one.weight_s for one in few)


def test_what_another_kernel_may_compute_is_measured_behind_it(file: Path) -> None:
    graph, cluster = open_model(examples.build("tiny")).graph, two_processes(file)
    found = candidates(graph, cluster, "auto", None)
    behind = [one for one in found if one.behind]
    assert behind
    for one in behind:
        assert one.form.behind == tuple(placed.node.op for placed in one.behind)
        whole = local_graph(graph, one, cluster)
        before = local_graph(graph, one, cluster, is_before=True)
        (result,) = whole.outputs
        assert whole.producers[result].op == one.form.op
        assert before.outputs != whole.outputs
        assert {node.name for node in before.nodes} < {node.name for node in whole.nodes}
        shape = whole.types[result].shape
        assert one.form.results == ((whole.types[result].dtype, shape),)
    module, inputs = factories.build()
    alone = candidates(open_model(module, inputs).graph, cluster, "auto", None)
    assert alone
    assert not any(one.behind or one.form.behind for one in alone)


def test_weights_are_constants_of_the_local_graph(mlp: onnx.ModelProto, file: Path) -> None:
    """ONNX Runtime packs them once; an operand it would pack at each run."""
    graph, cluster = open_model(mlp).graph, two_processes(file)
    for candidate in candidates(graph, cluster, "auto", None):
        local = local_graph(graph, candidate, cluster)
        weights = [value for value in candidate.placed.node.reads if value in graph.constants]
        assert len(local.constants) >= len(weights)


def test_a_second_run_measures_only_what_is_new(
    mlp: onnx.ModelProto, first_run: tuple[Path, Profiled], profiled: Path
) -> None:
    file, first = profiled, first_run[1]
    assert first.measured == first.forms > 5
    assert not first.failed
    assert first.unknown_share == 0
    again = profile(mlp, devices=2, profile=file)
    assert (again.measured, again.known) == (0, first.forms)
    wider = profile(examples.build("mlp", layers=2, hidden=8, batch=12), devices=2, profile=file)
    assert 0 < wider.measured < wider.forms, "forms that are cut to the same sizes are known"
    assert "of the seconds are not measured" not in str(wider)


def test_what_one_device_runs_is_measured_alone_too(mlp: onnx.ModelProto, profiled: Path) -> None:
    cluster = two_processes(profiled)
    found = candidates(open_model(mlp).graph, cluster, "auto", None)
    known = cluster.devices[0].profile
    assert known is not None
    sticks = measured.yardsticks(2**30, is_module=False)
    on_every_device = {one.form.key for one in candidates(sticks, cluster, "inter", None)}
    assert len(on_every_device) == 2
    assert {*known.entries} == {one.form.key for one in found} | on_every_device
    alone = {one.form.key for one in found if one.is_whole}
    assert {*known.beside(1).entries} == alone | on_every_device
    assert 0 < len(alone) < len(found)


def test_the_whole_model_is_measured_in_one_process(
    mlp: onnx.ModelProto, first_run: tuple[Path, Profiled], profiled: Path
) -> None:
    file, done = profiled, first_run[1]
    cluster = two_processes(file)
    alone = one_process(cluster)
    assert alone is not None
    known = alone.devices[0].profile
    assert known is not None
    assert known.threads > 1
    (entry,) = known.wholes.values()
    assert entry.form == whole_key(open_model(mlp).graph.digest)
    assert entry.seconds == done.whole_s
    assert 0 < entry.seconds < 1
    assert f"{units.seconds(entry.seconds)} in one process with all cores" in str(done)
    again = profile(mlp, devices=2, profile=file)
    assert again.whole_s == entry.seconds, "what is known is not measured again"
    assert not known.entries, "it is no form of an operator"
    result = partitioner.compile(mlp, devices=2, cluster="local", profile=file)
    assert not [note for note in result.summary["notes"] if "splitting" in note]
    (process,) = [rival for rival in result.rivals if rival.name.startswith("one process with ")]
    assert process.cost == entry.seconds


def test_a_whole_model_that_cannot_run_in_time_is_not_measured(
    mlp: onnx.ModelProto, file: Path
) -> None:
    two_processes(file)
    done = profile(mlp, devices=2, profile=file, time_limit_s=1e-9)
    assert done.whole_s is None
    assert done.lacks_whole
    assert "the whole model in one process is not measured, for lack of time" in str(done)
    one = profile(mlp, devices=1, profile=file, time_limit_s=1e-9)
    assert not one.lacks_whole, "no plan of one process is compared with it"


def test_a_border_between_sessions_is_measured_and_each_communication_pays_it(
    mlp: onnx.ModelProto, first_run: tuple[Path, Profiled], profiled: Path
) -> None:
    known = two_processes(profiled).devices[0].profile
    assert known is not None
    assert known.border is not None
    border_s = known.border.seconds
    assert border_s == first_run[1].border_s
    assert 0 <= border_s < 0.1  # 0 where the machine is too busy to tell
    assert f"{units.seconds(border_s)} more for each communication" in str(first_run[1])
    assert not [kind for kind, _ in known.links if kind == BORDER], "it is no communication"
    again = profile(mlp, devices=2, profile=profiled)
    assert again.border_s == border_s, "what is known is not measured again"
    result = partitioner.compile(mlp, devices=2, cluster="local", profile=profiled)
    assert [spec.border_s for spec in result.cluster.devices] == [border_s] * 2
    read = Plan.from_json(result.plan.to_json())
    assert Cluster.from_data(read.cluster).devices[0].border_s == border_s
    assert not [note for note in result.summary["notes"] if "end of a session" in note]
    module = partitioner.compile(
        nn.Linear(8, 8), torch.ones(4, 8), devices=2, cluster="local", profile=profiled
    )
    assert {spec.border_s for spec in module.cluster.devices} == {None}, "PyTorch has no sessions"


def test_a_border_of_a_cluster_file_is_paid_by_onnx_models_alone(mlp: onnx.ModelProto) -> None:
    ideal = resolve_cluster("2xideal")
    lab = replace(ideal, devices=tuple(replace(one, border_s=1e-3) for one in ideal.devices))
    onnx_model = partitioner.compile(mlp, cluster=lab)
    module = partitioner.compile(nn.Linear(8, 8), torch.ones(4, 8), cluster=lab)
    assert {one.border_s for one in onnx_model.cluster.devices} == {1e-3}
    assert {one.border_s for one in module.cluster.devices} == {None}


def test_a_profile_without_a_border_is_said(mlp: onnx.ModelProto, file: Path) -> None:
    known = two_processes(file).devices[0].profile
    assert known is not None
    link = LinkEntry("all_reduce", 2, 1024, 1e-4, 0.01, 7, "gloo", "2026-01-01")
    write_entries(file, known.device, known.threads, [link])
    result = partitioner.compile(mlp, devices=2, cluster="local", profile=file)
    (note,) = [note for note in result.summary["notes"] if "end of a session" in note]
    assert "partition profile MODEL --devices 2" in note


def test_plans_are_priced_by_the_measurements(
    mlp: onnx.ModelProto, file: Path, first_run: tuple[Path, Profiled]
) -> None:
    two_processes(file)
    before = partitioner.compile(mlp, devices=2, cluster="local", profile=file)
    assert before.summary["cost_sources"] == {"datasheet": 1.0}
    shutil.copy(first_run[0], file)
    result = partitioner.compile(mlp, devices=2, cluster="local", profile=file)
    assert result.summary["cost_sources"] == {"measured": pytest.approx(1.0)}
    assert result.one_device.latency_s != before.one_device.latency_s


def test_a_time_limit_ends_between_measurements(mlp: onnx.ModelProto, file: Path) -> None:
    two_processes(file)
    ended = profile(mlp, devices=2, profile=file, time_limit_s=1e-9)
    assert ended.measured == 0
    assert ended.unknown_share == 1
    assert "give a longer --time-limit" in str(ended)


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modules_are_measured_in_pytorch(file: Path, training: bool) -> None:
    two_processes(file)
    module: nn.Module = factories.classifier(training=training)
    batch = factories.batch(labels=training)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done = profile(module, batch, devices=2, training=training, profile=file)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert done.backend.startswith("torch ")
    assert done.measured == done.forms
    assert not done.failed
    program = partitioner.compile(
        module, batch, devices=2, cluster="local", training=training, profile=file
    )
    assert program.summary["cost_sources"] == {"measured": pytest.approx(1.0)}


@pytest.mark.slow
def test_micro_batches_are_measured_for_plans_in_stages(file: Path) -> None:
    two_processes(file)
    module, batch = factories.classifier(training=True), factories.batch(labels=True)
    options = {"devices": 2, "training": True, "profile": file}
    done = profile(module, batch, strategy="inter", micro_batches=2, **options)
    assert done.measured == done.forms
    staged = {"parallel": "pp", "schedule": "1f1b", "micro_batches": 2}
    program = partitioner.compile(module, batch, cluster="local", **options, **staged)
    assert program.summary["cost_sources"] == {"measured": pytest.approx(1.0)}
    with pytest.raises(OptionError, match="micro_batches is 0, not a number of at least 1"):
        profile(module, batch, micro_batches=0, **options)


@pytest.mark.slow
def test_micro_batches_of_an_onnx_model_are_measured(file: Path, mlp: onnx.ModelProto) -> None:
    two_processes(file)
    done = profile(mlp, devices=2, profile=file, strategy="inter", micro_batches=2)
    assert done.measured == done.forms
    options = {"devices": 2, "cluster": "local", "profile": file, "objective": "latency"}
    result = partitioner.compile(mlp, **options, mesh={"pp": 2}, micro_batches=2)
    assert result.summary["cost_sources"] == {"measured": pytest.approx(1.0)}
    with pytest.raises(OptionError, match=r"micro_batches=7: the batch of \d+ \(dim 0 of 'x'\)"):
        profile(mlp, devices=2, profile=file, micro_batches=7)


def test_a_bias_that_is_a_pending_sum_is_zeros_on_the_second_device(file: Path) -> None:
    """In training a convolution's bias is stored, and uneven parts of the channels are summed."""
    cluster = two_processes(file)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 36, 2))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().sum()

    graph = open_model(Loss(), (torch.randn(2, 3, 8, 8),), training=True).graph
    zeros = 0
    for one in candidates(graph, cluster, "auto", None):
        local = local_graph(graph, one, cluster)
        zeros += sum(
            not constant.weight and constant.type.numel > 1 and not constant.load().any()
            for constant in local.constants.values()
        )
    assert zeros


def test_a_cluster_without_a_profile_is_refused(mlp: onnx.ModelProto, empty: Path) -> None:
    with pytest.raises(CostError, match="has devices without one common profile"):
        profile(mlp, devices=2, cluster="2xh100")
    with pytest.raises(CostError, match="a profile is of cluster 'local'"):
        profile(mlp, devices=2, cluster="2xh100", profile=empty)
    assert not empty.exists()


@pytest.mark.slow
def test_the_command(
    mlp: onnx.ModelProto,
    empty: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_processes(empty)
    monkeypatch.setattr(links, "SIZES", (1024, 2**16))
    onnx.save(mlp, tmp_path / "m.onnx")
    command = [str(tmp_path / "m.onnx"), "--devices", "2", "--profile", str(empty)]
    assert main(["profile", *command, "-q", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"] == told["forms"]
    target = str(tmp_path / "m.partition")
    assert main([*command, "--cluster", "local", "-o", target]) == 0
    assert "costs       of operators 100 % measured (± " in capsys.readouterr().out
    assert main(["explain", target, "layer0.matmul"]) in (0, 1)
    empty.write_text("something else, which is kept")
    assert main(["profile", *command, "-q"]) == 1
    assert "is not a database" in capsys.readouterr().err
    assert empty.read_text() == "something else, which is kept"
    missing = tmp_path / "missing" / "profile.sqlite"
    assert main(["profile", str(tmp_path / "m.onnx"), "--profile", str(missing), "-q"]) == 1
    assert f"profile {missing}: there is no folder {missing.parent}\n" in capsys.readouterr().err
    assert not missing.parent.exists()


class _Clock:
    """A clock that programs set forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def program(self, *seconds: float) -> object:
        """A program that takes these seconds at its runs, the last for ever."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_a_median_ignores_outliers() -> None:
    clock = _Clock()
    steady, jumpy = clock.program(0.01), clock.program(0.01, 5.0, 0.01)
    first, second = timed_runs([steady, jumpy], clock)  # type: ignore[list-item]
    assert Timing.of(first) == Timing(pytest.approx(0.01), pytest.approx(0.0, abs=1e-9), 10)
    assert Timing.of(second).seconds == pytest.approx(0.01)


def test_long_programs_are_run_less_often_than_noisy_ones() -> None:
    clock = _Clock()
    long = clock.program(10.0)
    noisy = clock.program(*[1e-6, 3e-6] * 60)
    first, second = timed_runs([long, noisy], clock)  # type: ignore[list-item]
    assert len(first) == 5
    assert len(second) == 50
    assert Timing.of(second).spread > 0.3


def test_a_clock_that_is_late_ends_after_the_fewest_runs() -> None:
    clock = _Clock()
    (runs,) = timed_runs([clock.program(1e-6, 9e-6, 1e-6)], clock, end_s=0.0)  # type: ignore[list-item]
    assert len(runs) == 5


def test_what_comes_before_runs_and_turns_counts_for_when_to_end() -> None:
    """Of two programs that take next to nothing one has 15 ms before each run, and both 20 ms."""
    clock = _Clock()
    quick, prepared = (clock.program(*[1e-6, 3e-6] * 60) for _ in range(2))
    first, second = timed_runs(
        [quick, prepared],  # type: ignore[list-item]
        clock,
        before_turn=clock.program(0.0, 0.02),  # type: ignore[arg-type]
        before_runs=[clock.program(0.0), clock.program(0.015)],  # type: ignore[list-item]
    )
    assert (len(first), len(second)) == (8, 5), "10 ms a turn with the other, 20 ms alone"


def test_a_turn_and_each_run_are_prepared_untimed() -> None:
    clock = _Clock()
    calls: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        def call() -> None:
            clock.now += 100.0
            calls.append(name)

        return call

    runs = timed_runs(
        [clock.program(1.0), clock.program(2.0)],  # type: ignore[list-item]
        clock,
        before_turn=noted("turn"),
        before_runs=[noted("first"), noted("second")],
    )
    assert [set(some) for some in runs] == [{1.0}, {2.0}]
    assert calls[:6] == ["turn", "first", "second"] * 2


def test_operands_that_were_made_long_before_are_told_from_others(file: Path) -> None:
    """Weights, inputs and what the forward pass keeps are in memory, other operands in caches."""
    cluster = two_processes(file)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()).square().mean()

    graph = open_model(Loss(), (torch.randn(64, 8),), training=True).graph
    recent = {
        node.name: [is_made_shortly_before(graph, node, value) for value in node.inputs]
        for node in graph.nodes
        if node.op in ("aten::addmm", "aten::mm", "aten::relu")
    }
    first, second = (one for name, one in recent.items() if name.endswith("addmm"))
    assert first == [False, False, False]
    assert second == [False, True, False]
    (relu,) = (one for name, one in recent.items() if name.endswith("relu"))
    assert relu == [True]
    products = [
        recent[node.name] for node in graph.nodes if node.op == "aten::mm" if node.name in recent
    ]
    assert all(sorted(one) == [False, True] for one in products), "a gradient and what was kept"
    by_op = {
        one.form.op: is_cold(graph, one)
        for one in candidates(graph, cluster, "inter", None)
        if one.form.op in ("aten::relu", "aten::threshold_backward", "partitioner::update")
    }
    assert by_op == {
        "aten::relu": True,
        "aten::threshold_backward": True,
        "partitioner::update": True,
    }
    kept = [
        node.name.rpartition("/")[2]
        for node in graph.nodes
        if any(is_read_long_after(graph, node, value) for value in node.writes)
        and node.op in ("aten::addmm", "aten::mm", "aten::relu", "aten::sum.dim_IntList")
    ]
    assert kept == ["relu", "addmm", "mm_1", "sum", "mm", "sum"], "and neither input's gradient"


def test_cold_forms_take_turns_with_cold_ones_only() -> None:
    items = [Item(None, None, None, True, False, (), n % 3 == 0, False, {}) for n in range(30)]  # type: ignore[arg-type]
    batches = list(_batches(items))
    assert sorted(map(len, batches)) == [2, 4, 8, 8, 8]
    assert all(len({item.is_cold for item in batch}) == 1 for batch in batches)


def test_copies_and_products_of_all_sizes_fit_the_device() -> None:
    large, small = (
        measured.yardsticks(memory, is_module=module)
        for memory, module in ((2**34, True), (2**20, False))
    )
    assert len(small.nodes) == len(large.nodes) == 2
    assert not measured.yardsticks(0.0, is_module=True).nodes[1:]
    assert {node.op for node in small.nodes} == {"Relu", "MatMul"}
    assert {node.op for node in large.nodes} == {"aten::clone", "aten::mm"}


LAB = """
[[devices]]
preset = "cpu"
count = 4
profile = {{ file = "{file}", device = "core", threads = 1{more} }}
[[levels]]
name = "machine"
size = 2
bandwidth_bytes_per_s = 1e9
latency_s = 1e-6
{level}
[[levels]]
name = "network"
bandwidth_bytes_per_s = 1e9
latency_s = 1e-5
"""


@pytest.mark.slow
def test_a_cluster_file_is_measured_with_as_many_processes_as_a_machine_has(
    mlp: onnx.ModelProto, file: Path, tmp_path: Path
) -> None:
    """Entries of other numbers of processes would price no plan, and be new for ever."""
    lab = tmp_path / "lab.toml"
    lab.write_text(LAB.format(file=file, more="", level=""))
    two_processes(file)
    done = profile(mlp, cluster=lab)
    assert done.measured == done.forms > 0
    again = profile(mlp, cluster=lab)
    assert (again.measured, again.known) == (0, done.forms)
    known = resolve_cluster(lab).devices[0].profile
    assert known is not None
    assert (known.processes, set(known.known)) == (2, {1, 2})
    assert len(known.entries) >= done.forms
    program = partitioner.compile(mlp, cluster=lab)
    assert program.summary["cost_sources"] == {"measured": pytest.approx(1.0)}


def test_a_level_between_machines_of_one_process_is_not_measured_here(
    mlp: onnx.ModelProto, file: Path, tmp_path: Path
) -> None:
    lab = tmp_path / "lab.toml"
    profiled = f'profile = {{ file = "{file}", device = "core", threads = 1 }}'
    lab.write_text(LAB.format(file=file, more=", processes = 1", level=profiled))
    done = profile(mlp, cluster=lab, time_limit_s=1e-9)
    assert (done.links, done.unknown_links) == (0, 0)
    assert done.far_levels == ("machine", "network")
    lab.write_text(LAB.format(file=file, more="", level=profiled))
    done = profile(mlp, cluster=lab, time_limit_s=1e-9)
    assert done.unknown_links > 0
    assert done.far_levels == ("network",)
