"""Constraints: pins are honoured, plans are kept, and what cannot be is explained."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.plans.searching import search
from helpers.plans.whole_plans import hand_plan
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, PlanError, resolve
from partitioner.ir.rule import Cut
from partitioner.ir.types import TensorType
from partitioner.search.request import Request
from partitioner.strategies.constraints import ConstraintError, Constraints

GRAPH = load_onnx(examples.build("mlp", layers=3, hidden=16, batch=4)).graph
PAIR = DeviceMesh.line(2, "tp")
NAMES = [node.name for node in GRAPH.nodes]


def written(folder: Path, text: str, name: str = "pins.toml") -> Constraints:
    (folder / name).write_text(text)
    return Constraints.read(folder / name)


def solved(
    constraints: Constraints, strategy: str = "auto", devices: int = 2, graph: Graph = GRAPH
) -> dict[str, PlacedNode]:
    request = Request(strategy=strategy, constraints=constraints, time_limit_s=5)
    plan = search(graph, resolve_cluster(None, devices), request).plan
    return {placed.node.name: placed for placed in resolve(graph, plan)}


def test_the_nodes_of_a_pattern_are_on_the_device(tmp_path: Path) -> None:
    pins = written(tmp_path, '[[pin]]\nnodes = ["layer0.*", "y"]\ndevice = 1\n')
    by_name = solved(pins, "inter")
    assert {name for name in NAMES if name.startswith("layer0.")} == {"layer0.out", "layer0.relu"}
    for name in ("layer0.out", "layer0.relu", "y"):
        assert by_name[name].mesh.devices == (1,)


def test_all_nodes_of_an_op_are_on_the_device(tmp_path: Path) -> None:
    by_name = solved(written(tmp_path, '[[pin]]\nop = "Relu"\ndevice = 0\n'), "inter")
    assert {p.mesh.devices for p in by_name.values() if p.node.op == "Relu"} == {(0,)}


@pytest.mark.parametrize(
    ("pin", "shown"),
    [
        ("dim = 0", "[x, -]"),
        ("dim = -1", "[-, x]"),
        ('dim = 1\naxis = "x"', "[-, x]"),
        ("replicate = true", "[-, -]"),
    ],
)
def test_a_tensor_is_as_pinned_where_it_is_made_and_read(
    tmp_path: Path, pin: str, shown: str
) -> None:
    pins = written(tmp_path, f'[[pin]]\ntensor = "layer1.weight"\n{pin}\n')
    placed = solved(pins, "intra")["layer1.out"]
    assert str(dict(placed.operands())["layer1.weight"].sharding) == shown
    pins = written(tmp_path, f'[[pin]]\ntensor = "layer0.relu"\n{pin}\n')
    by_name = solved(pins, "intra")
    assert str(dict(by_name["layer0.relu"].results())["layer0.relu"].sharding) == shown
    assert str(dict(by_name["layer1.out"].operands())["layer0.relu"].sharding) == shown


def test_pins_add_up(tmp_path: Path) -> None:
    on = {name: i % 2 for i, name in enumerate(NAMES)}
    text = "".join(f'[[pin]]\nnodes = ["{name}"]\ndevice = {on[name]}\n' for name in NAMES)
    by_name = solved(written(tmp_path, text))
    assert {name: by_name[name].mesh.devices for name in NAMES} == {n: (d,) for n, d in on.items()}


def whole_plan() -> Plan:
    """Unlikely: every product reduces."""
    nodes = {n.name: (PAIR, {"k": "tp"}) for n in GRAPH.nodes if n.op == "Gemm"}
    return hand_plan(GRAPH, **nodes, _=1)


def test_a_whole_plan_is_kept(tmp_path: Path) -> None:
    plan = whole_plan()
    kept = solved(written(tmp_path, plan.to_json(), "plan.json"))
    assert tuple(kept.values()) == resolve(GRAPH, plan)
    assert tuple(solved(Constraints(plan=plan), "inter").values()) == resolve(GRAPH, plan)


def test_part_of_a_plan_is_kept_and_the_rest_is_free() -> None:
    plan = whole_plan()
    part = replace(plan, nodes={"layer1.out": plan.nodes["layer1.out"]})
    by_name = solved(Constraints(plan=part), "inter")
    assert by_name["layer1.out"] == resolve(GRAPH, plan)[NAMES.index("layer1.out")]
    assert all(p.mesh.size() == 1 for name, p in by_name.items() if name != "layer1.out")


def test_what_is_free_beside_a_kept_plan_is_cut_over_its_axes() -> None:
    plan = whole_plan()  # over "tp", as searched meshes were called in earlier versions
    part = replace(plan, nodes={"layer1.out": plan.nodes["layer1.out"]})
    asked = Constraints(plan=part)
    assert asked.kept_meshes == plan.groups
    by_name = solved(asked, "intra")
    assert {p.mesh.names for p in by_name.values() if p.mesh.size() > 1} == {("tp",)}
    assert {p.mesh.names for p in solved(Constraints(), "intra").values()} == {("x",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pin = [", r"constraints .*pins.toml: Invalid value"),
        ("pin = 1", r"pin = 1; write each pin as a \[\[pin\]\] table"),
        (
            "[[pins]]\n",
            r"\[dims\], \[layout\] and \[loads\] are known, found \['pins'\]; did you mean 'pin'",
        ),
        (
            "pin = [3]",
            r"pins.toml pin 1: unknown keys 3; known are axis, cut, device, devices, dim",
        ),
        ("[[pin]]\nnode = 'a'", r"pin 1: unknown keys \['node'\]"),
        ("[[pin]]\nnodes = 'a'\ndevice = 0", r"pin 1: nodes = 'a' is not a list of names, like"),
        ("[[pin]]\nnodes = ['a']\ndevice = true", "pin 1: device = True is not a whole number"),
        ("[[pin]]\ntensor = 'x'\ndim = 0.5", "pin 1: dim = 0.5 is not a whole number"),
        ("[[pin]]\ntensor = 'x'\nreplicate = 1", "pin 1: replicate = 1 is not true"),
        ("[[pin]]\nop = 7\ndevice = 0", "pin 1: op = 7 is not a text"),
        (
            "[[pin]]\nop = 'a'",
            r"pin 1: give nodes or op with device or devices, .*; found \['op'\]",
        ),
        ("[[pin]]\ndevice = 0", "pin 1: give nodes or op with device"),
        ("[[pin]]\nop = 'a'\ndim = 0", "pin 1: give nodes or op with device"),
        ("[[pin]]\ntensor = 'a'\ndevice = 0", "pin 1: give nodes or op with device"),
        ("[[pin]]\nop = 'a'\nnodes = ['b']\ndevice = 0", "pin 1: give nodes or op with device"),
        ("[[pin]]\ntensor = 'a'\ndim = 0\nreplicate = true", "pin 1: give nodes or op"),
        ("[[pin]]\ntensor = 'a'\nreplicate = false", "pin 1: replicate = False is not true"),
        ("[[pin]]\nop = 'a'\ndevice = 0\naxis = 'tp'", "pin 1: give nodes or op"),
    ],
)
def test_a_malformed_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        written(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError, match=r"constraints .*none.toml: .*No such file"):
        Constraints.read(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff")
    with pytest.raises(ConstraintError, match=r"constraints .*b.toml: .*no text"):
        Constraints.read(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text("a = " + "[" * 2000)
    with pytest.raises(ConstraintError, match=r"constraints .*c.toml: .*recursion"):
        Constraints.read(tmp_path / "c.toml")
    with pytest.raises(PlanError, match="plan is not JSON"):
        written(tmp_path, "{", "plan.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = ['no*', 'none']\ndevice = 0", r"no node matches \['no\*', 'none'\]"),
        ("op = 'Conv'\ndevice = 0", "no node matches 'Conv'"),
        ("tensor = 'none'\ndim = 0", "the model has no tensor 'none'"),
        ("op = 'Relu'\ndevice = 2", r"device 2 is not one of 0\.\.1"),
        ("op = 'Relu'\ndevice = -1", r"device -1 is not one of 0\.\.1"),
        ("tensor = 'x'\ndim = 2", "dim 2 of 'x', which has 2 dims"),
        ("tensor = 'x'\ndim = -3", "dim -3 of 'x', which has 2 dims"),
    ],
)
def test_a_pin_about_nothing(tmp_path: Path, text: str, message: str) -> None:
    pins = written(tmp_path, f"[[pin]]\n{text}\n")
    with pytest.raises(ConstraintError, match=f"pins.toml pin 1: .*{message}"):
        pins.check(GRAPH, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph_digest": "0" * 64}, r"plan is for a graph with digest 0{12}\.\.\."),
        ({"nodes": {"none": NodePlan(0)}}, "plan has an unknown node 'none'"),
        ({"nodes": {"y": NodePlan(7)}}, "'y' is on group 7; the plan has 2"),
        ({"nodes": {"y": NodePlan(0, {"z": Cut(("tp",))})}}, "'y' .* has no factor 'z'"),
        (
            {"groups": (DeviceMesh.line(2, "tp"), DeviceMesh.single(5))},
            r"on device 5, not one of 0\.\.1",
        ),
    ],
    ids=["digest", "node", "group", "factor", "device"],
)
def test_a_plan_that_does_not_fit(changes: dict[str, object], message: str) -> None:
    plan = replace(whole_plan(), **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        solved(Constraints(plan=plan))


def test_pins_that_exclude_each_other_are_blamed(tmp_path: Path) -> None:
    text = '[[pin]]\nop = "Relu"\ndevice = 0\n[[pin]]\nnodes = ["layer1.relu"]\ndevice = 1\n'
    message = r"pin 2 leaves no strategy for 'layer1\.relu' \(Relu\)"
    with pytest.raises(ConstraintError, match=message):
        solved(written(tmp_path, text), "inter")


def test_a_pin_that_no_family_can_meet(tmp_path: Path) -> None:
    pins = written(tmp_path, '[[pin]]\ntensor = "x"\ndim = 0\n')
    with pytest.raises(ConstraintError, match=r"pin 1 leaves .* 'layer0\.out' .* inter"):
        solved(pins, "inter")


def test_an_axis_that_no_mesh_has(tmp_path: Path) -> None:
    pins = written(tmp_path, '[[pin]]\ntensor = "y"\ndim = 1\naxis = "pp"\n')
    with pytest.raises(ConstraintError, match=r"pin 1: no axis 'pp'; the axes are x$"):
        solved(pins)
    with pytest.raises(ConstraintError, match=r"pin 1: no axis 'pp'; the axes are x, y$"):
        solved(pins, "intra", devices=4)
    with pytest.raises(ConstraintError, match=r"pin 1: no axis 'pp'; no mesh has axes here$"):
        solved(pins, "inter")


def module_graph() -> Graph:
    """A graph as of a captured module: node names begin with the submodule's path."""
    array = TensorType.of("float32", (4, 4))
    paths = ["fc1/relu", "layers/1/attn/relu", "layers/10/attn/relu", "layers/1/attn/relu_backward"]
    paths.append("a[b]/relu")
    nodes = tuple(
        Node(f"/{path}", "Relu", (f"v{i}",), (f"v{i + 1}",)) for i, path in enumerate(paths)
    )
    values = {f"v{i}": array for i in range(len(nodes) + 1)}
    last = f"v{len(nodes)}"
    return Graph("module", ("v0",), (last,), nodes, values, {}, {"": 20})


def test_submodules_are_placed() -> None:
    placed = Constraints.placed({"fc1": 0, "layers.1.attn": 1, "a[b]": 1})
    placed.check(module_graph(), 2)
    by_name = solved(placed, "inter", graph=module_graph())
    assert by_name["/fc1/relu"].mesh.devices == (0,)
    for name in ("/layers/1/attn/relu", "/layers/1/attn/relu_backward", "/a[b]/relu"):
        assert by_name[name].mesh.devices == (1,)
    free = module_graph().by_name["/layers/10/attn/relu"]
    both = tuple(on(free, device) for device in (0, 1))
    assert placed.keep(free, both, "") == both


def on(node: Node, device: int) -> PlacedNode:
    plan = hand_plan(module_graph(), **{node.name: device}, _=0)
    return {p.node.name: p for p in resolve(module_graph(), plan)}[node.name]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"": 0}, "placement: '' is not the path of a submodule"),
        ({"a..b": 0}, r"placement: 'a\.\.b' is not the path"),
        ({1: 0}, "placement: 1 is not the path"),
        ({"a": -1}, "placement of 'a': -1 is not a device"),
        ({"a": True}, "placement of 'a': True is not a device"),
        ({"a": "gpu"}, "placement of 'a': 'gpu' is not a device"),
        ({"a.b.c": 0, "a": 1, "a.b": 1}, r"'a\.b\.c' is part of 'a', which is placed too"),
    ],
)
def test_placements_that_are_none(placement: dict[str, int], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        Constraints.placed(placement)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"fc2": 0}, r"placement of 'fc2': no node matches \['/fc2/\*'\]"),
        ({"layers.1.attn.relu": 0}, "no node matches"),
        ({"fc1": 2}, r"placement of 'fc1': device 2 is not one of 0\.\.1"),
    ],
)
def test_placements_that_do_not_fit(placement: dict[str, int], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        Constraints.placed(placement).check(module_graph(), 2)
