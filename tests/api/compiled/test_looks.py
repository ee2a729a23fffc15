"""What a compilation says of itself in Python: text, rows, devices of a node, its speed-up."""

from pathlib import Path

import pytest
import torch

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cli.main import main
from partitioner.report.planned import UnknownNodeError
from partitioner.report.steps import Step


@pytest.fixture(scope="module")
def placed() -> Compiled:
    """Three layers on two devices: the first on device 1, the others on device 0."""
    pins = [{"nodes": ["layer0*"], "device": 1}, {"nodes": ["layer1*", "layer2*"], "device": 0}]
    model = examples.build("mlp", layers=3, hidden=8, batch=4)
    return partitioner.compile(model, devices=2, constraints={"pin": pins})


@pytest.fixture(scope="module")
def cut() -> Compiled:
    model = examples.build("mlp", layers=3, hidden=64, batch=8)
    return partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")


@pytest.mark.parametrize("arguments", [["show"], ["show", "--all"], ["explain"]])
def test_a_compilation_prints_what_the_command_prints(
    placed: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    folder = placed.save(tmp_path / "m.partition", plan_only=True)
    capsys.readouterr()
    name, *options = arguments
    assert main([name, str(folder), *options]) == 0
    printed = capsys.readouterr().out
    loaded = partitioner.load(folder)
    if name == "show":
        loaded.show(everything=bool(options))
    else:
        loaded.explain()
    assert capsys.readouterr().out == printed
    assert len(printed.splitlines()) > 8


def test_a_node_is_explained_by_its_name_or_its_tensor(
    cut: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    node = cut.graph.nodes[0]
    cut.explain(node.name)
    by_name = capsys.readouterr().out
    cut.explain(node.outputs[0])
    assert capsys.readouterr().out == by_name
    assert by_name.startswith(f"{node.name} ({node.op}) on x=2 on 0,1")


def test_devices_of_a_node_and_of_a_tensor(placed: Compiled, cut: Compiled) -> None:
    first, *_, last = placed.graph.nodes
    assert (placed.device_of(first.name), placed.device_of(last.name)) == ((1,), (0,))
    assert placed.device_of(first.outputs[0]) == (1,)
    assert cut.device_of(cut.graph.nodes[0].name) == (0, 1)


def test_names_that_no_node_has(placed: Compiled) -> None:
    first = placed.graph.nodes[0]
    (name,) = placed.graph.inputs
    weight = next(value for value in first.inputs if value in placed.graph.constants)
    with pytest.raises(UnknownNodeError, match=f"no node or tensor '{first.name}x'; did you mean"):
        placed.device_of(f"{first.name}x")
    with pytest.raises(
        UnknownNodeError, match=f"'{name}' is an input of the model: no node makes it; '.*' read it"
    ):
        placed.device_of(name)
    with pytest.raises(UnknownNodeError, match=f"'{weight}' is a constant of the model"):
        placed.explain(weight)


def test_the_table_has_all_nodes_and_communications(placed: Compiled, cut: Compiled) -> None:
    for result in (placed, cut):
        rows = result.table()
        assert all(row.keys() == Step.__annotations__.keys() for row in rows)
        assert [row["step"] for row in rows] == list(range(len(rows)))
        computed = [row for row in rows if row["kind"] == "compute"]
        assert [row["name"] for row in computed] == [n.node.name for n in result.placed]
        assert all(row["devices"] == result.device_of(row["name"]) for row in computed)
        run = {comm.seq for program in result.programs.ranks for comm in program.comms}
        assert len(rows) - len(computed) == len(run) > 0
    (send,) = (row for row in placed.table() if row["kind"] == "send")
    assert (send["devices"], send["sent_bytes"], send["op"]) == ((0, 1), 4 * 8 * 4, "")
    gemm = cut.table()[0]
    assert (gemm["op"], gemm["flops"]) == ("Gemm", 2 * 8 * 64 * 64)
    assert "/x" in gemm["cuts"]
    busy = sum(row["seconds"] for row in placed.table() if 0 in row["devices"])
    assert busy == pytest.approx(placed.evaluation.load_s[0])


def test_the_graph_in_networkx_has_the_figures_of_the_plan(placed: Compiled, cut: Compiled) -> None:
    for result in (placed, cut):
        network = result.to_networkx()
        assert list(network) == [node.name for node in result.graph.nodes]
        assert dict(network.edges) == dict(result.graph.to_networkx().edges)
        for name, figures in network.nodes(data=True):
            assert figures["devices"] == result.device_of(name)
            assert figures["stage"] == 0
        rows = result.table()
        assert sum(s for _, s in network.nodes(data="seconds")) == pytest.approx(
            sum(row["seconds"] for row in rows if row["kind"] == "compute")
        )
    network = placed.to_networkx()
    crossing = [
        (source, target)
        for source, target in network.edges
        if network.nodes[source]["devices"] != network.nodes[target]["devices"]
    ]
    assert len(crossing) == 1
    assert {n: size for n, size in network.nodes(data="sent_bytes") if size} == {
        crossing[0][0]: network.edges[crossing[0]]["bytes"]
    }
    first = cut.to_networkx().nodes[cut.graph.nodes[0].name]
    assert "/x" in first["cuts"]
    assert (first["flops"], first["device_bytes"]) == (2 * 8 * 64 * 64, first["bytes"] // 2)


def test_rows_of_stages_name_their_pass() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    program = partitioner.compile(
        module, torch.zeros(8, 32), devices=2, parallel="pp", micro_batches=2
    )
    passes = {row["passes"] for row in program.table()}
    assert {"F0", "F1", "F0 -> F1"} <= passes
    by_name = {row["name"]: row["passes"] for row in program.table() if row["kind"] == "compute"}
    stages = {placed.node.name: placed.stage for placed in program.placed}
    assert all(by_name[name] in (f"F{stage}", "setup") for name, stage in stages.items())
    assert dict(program.to_networkx().nodes(data="stage")) == stages


def test_a_node_that_constraints_bind_names_them(
    placed: Compiled, cut: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed.explain("layer1.relu")
    text = capsys.readouterr().out
    assert "\n  constrained by constraints pin 2\n  searched: " in text
    partitioner.load(placed.save(tmp_path / "m.partition", plan_only=True)).explain("layer1.relu")
    assert capsys.readouterr().out == text
    cut.explain("layer1.relu")
    assert "constrained by" not in capsys.readouterr().out


def test_a_node_of_a_layout_and_of_a_kind_of_parallelism_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {"dims": {"hidden": "layer0.weight.1"}, "layout": {"hidden": "mine"}}
    result = partitioner.compile(
        examples.build("mlp", layers=2, hidden=64, batch=8),
        devices=4,
        mesh={"dp": 2, "mine": 2},
        parallel="dp",
        constraints=named,
    )
    result.explain("layer0.out")
    text = capsys.readouterr().out
    assert "constrained by parallel dp; constraints: layout hidden = 'mine' (dim 1 of" in text
