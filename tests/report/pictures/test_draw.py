"""Pictures of graph and timeline: equal bytes, plain names, folding, a bar for each event."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import onnx
import pytest
from onnx import helper

from helpers.drawn import drawn_plans
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.foundations.files import FileError
from partitioner.ir.pieces.folding import blocks
from partitioner.ir.plan import PlacedNode
from partitioner.report.pictures.canvas import PictureError
from partitioner.report.pictures.draw import draw_graph, draw_timeline
from partitioner.report.pictures.fold import fold
from partitioner.report.pictures.layers import arrange
from partitioner.report.pictures.timeline import bars
from partitioner.report.steps import Terminal, edges, placed_nodes

SVG = "{http://www.w3.org/2000/svg}"
MAGIC = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}


def texts(path: Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def tiny() -> Compiled:
    """A CNN on two devices, changing between them twice."""
    first = dict.fromkeys(("stem.conv", "stem.norm", "logits"), 0)
    return drawn_plans.compiled(examples.build("tiny"), 2, _=1, **first)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", MAGIC)
def test_every_format_has_the_same_bytes_each_time(
    tiny: Compiled, tmp_path: Path, suffix: str
) -> None:
    for name, draw in (("graph", draw_graph), ("time", draw_timeline)):
        paths = [tmp_path / f"{name}{turn}{suffix}" for turn in range(2)]
        for path in paths:
            draw(tiny, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert paths[0].read_bytes().startswith(MAGIC[suffix])
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("$x^2$", "$x^2$"),
        ("a--b -->", "a--b -->"),
        ("<b>&amp;</b>", "<b>&amp;</b>"),
        ("two\nlines\x00", "two\\nlines\\x00"),
        ("\u202eback", "\\u202eback"),
        ("\u6f22", "\\u6f22"),  # the font has no glyph for it
        ("\u00fc\u00df", "\u00fc\u00df"),
        ("n" * 10_000, "n" * 11 + "\u2026" + "n" * 24),
    ],
)
def test_names_are_plain_text(name: str, expected: str, tmp_path: Path) -> None:
    model = drawn_plans.renamed(drawn_plans.mlp(), {"layer0.out": name})
    model.graph.name = name
    result = drawn_plans.compiled(model, 2, _=0, y=1)
    draw_graph(result, tmp_path / "g.svg")
    draw_timeline(result, tmp_path / "t.svg")
    assert expected in texts(tmp_path / "g.svg")
    assert any(text.startswith(expected[:4]) for text in texts(tmp_path / "t.svg"))


def test_a_graph_tells_ops_cuts_groups_and_communication(tmp_path: Path) -> None:
    draw_graph(drawn_plans.hybrid(), tmp_path / "g.svg")
    drawn = texts(tmp_path / "g.svg")
    assert {"Gemm n/tp", "Relu b1/tp", "Gemm m/tp", "x", "float32[4,8]"} <= {*drawn}
    assert {"tp=2 on 0,1", "tp=2 on 2,3", "cut", "communication"} <= {*drawn}
    assert [text for text in drawn if text.startswith("all_to_all 128 B ")]


def test_a_small_graph_is_not_folded(tiny: Compiled) -> None:
    assert [len(box.nodes) for box in fold(tiny, 15).boxes] == [1] * 15


@pytest.mark.parametrize("limit", [4, 7, 14])
def test_a_large_graph_is_folded_by_group(tiny: Compiled, limit: int) -> None:
    diagram = fold(tiny, limit)
    assert len(diagram.boxes) <= limit
    for box in diagram.boxes:
        assert {placed.mesh for placed in box.nodes} == {box.mesh}
    assert [p for box in diagram.boxes for p in box.nodes] == list(placed_nodes(tiny.schedule))


@pytest.mark.parametrize("limit", [12, 30, 50])
def test_boxes_end_where_modules_do(limit: int) -> None:
    result = drawn_plans.compiled(examples.build("llama", layers=4, hidden=64), 1, _=0)
    layer = {node.name: re.findall(r"layers[./](\d+)", node.name) for node in result.graph.nodes}
    diagram = fold(result, limit)
    assert limit / 2 < len(diagram.boxes) <= limit
    assert all(len({str(layer[p.node.name]) for p in box.nodes}) == 1 for box in diagram.boxes)


def test_boxes_end_where_repeats_do_that_have_no_names() -> None:
    result = drawn_plans.compiled(examples.build("resnet50"), 1, _=0)
    groups = [0] * len(result.graph.nodes)
    ends = {block.last for block in blocks(result.graph, groups) if block.count > 1}
    assert len(ends) > 5
    boxes = fold(result, 60).boxes
    assert len(boxes) > 30
    assert ends <= {result.graph.order[box.nodes[-1].node.name] for box in boxes}


def test_nodes_that_are_cut_differently_are_folded_last() -> None:
    result = drawn_plans.grid()
    assert {box.cut for box in fold(result, 2).boxes} == {"mixed cuts", "m/dp*tp"}
    assert [box.cut for box in fold(result, 3).boxes] == ["m/dp n/tp", "b0/dp b1/tp", "m/dp*tp"]


def test_a_plan_that_always_changes_its_device_is_folded_too(tmp_path: Path) -> None:
    """Runs are of one node, so boxes become stretches, which feed each other both ways."""
    model = examples.build("tiny")
    names = [node.name for node in drawn_plans.load_onnx(model).graph.nodes]
    result = drawn_plans.compiled(model, 2, **{name: i % 2 for i, name in enumerate(names)})
    diagram = fold(result, 4)
    assert len(diagram.boxes) <= 4
    both = {(arc.source, arc.target) for arc in diagram.arcs}
    assert any((target, source) in both for source, target in both)
    draw_graph(result, tmp_path / "g.svg", boxes=4)
    assert any("nodes)" in text for text in texts(tmp_path / "g.svg"))


def test_folding_keeps_every_edge_and_communication(tiny: Compiled) -> None:
    drawn = tuple(edges(tiny.graph, tiny.schedule))
    for limit in (15, 3):
        diagram = fold(tiny, limit)
        home: dict[Terminal, int] = {
            ("node", p.node.name): i for i, b in enumerate(diagram.boxes) for p in b.nodes
        }
        ends = {(home.get(e.source, e.source), home.get(e.target, e.target)) for e in drawn}
        assert {(a.source, a.target) for a in diagram.arcs} == {(u, v) for u, v in ends if u != v}
        kept = [task.comm.seq for arc in diagram.arcs for task in arc.comms if task.comm]
        assert sorted(kept) == [t.comm.seq for t in tiny.schedule.tasks if t.comm]


def test_boxes_never_overlap_and_routes_join_their_ends() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(60))
    graph.add_edges_from((i, i + 1) for i in range(59))
    graph.add_edges_from((i, i + 7) for i in range(0, 50, 5))
    graph.add_edges_from((0, i) for i in range(10, 20))
    layout = arrange(graph, 3.0)
    spots = sorted(layout.at.values())
    for (x, y), (other, row) in ((a, b) for a in spots for b in spots if a < b):
        assert abs(x - other) >= 1.0 or y != row
    for (source, target), route in layout.routes.items():
        assert (route[0], route[-1]) == (layout.at[source], layout.at[target])
    assert all(0.5 <= x <= layout.width - 0.5 + 1e-9 for x, _ in spots)
    assert max(y for _, y in spots) < layout.rows < 60  # in columns


@pytest.mark.parametrize("requests", [1, 3])
def test_bars_are_the_events(tiny: Compiled, requests: int) -> None:
    timeline = simulate(tiny.schedule, requests)
    all_bars = bars(timeline)
    events = [event for event in timeline.events if event.end_s > event.start_s]
    assert sum(len(bar.names) for bar in all_bars) == len(events)
    for device in (0, 1):
        for kind in ("compute", "comm"):
            lane = [e for e in events if (e.device, e.kind) == (device, kind)]
            drawn = [bar for bar in all_bars if (bar.device, bar.kind) == (device, kind)]
            assert [n for bar in drawn for n in bar.names] == [e.name for e in lane]
            assert {bar.start_s for bar in drawn} <= {e.start_s for e in lane}
            assert {bar.end_s for bar in drawn} <= {e.end_s for e in lane}
            busy = sum(e.end_s - e.start_s for e in lane)
            assert sum(bar.end_s - bar.start_s for bar in drawn) == pytest.approx(busy, rel=1e-9)


def test_long_bars_are_not_joined() -> None:
    timeline = simulate(drawn_plans.inter().schedule)
    assert [bar.names for bar in bars(timeline) if bar.kind == "compute"] == [
        ("layer0.out",),
        ("layer0.relu",),
        ("y",),
    ]


def test_a_timeline_has_a_bar_an_event_in_the_file(tmp_path: Path) -> None:
    result = drawn_plans.inter()
    draw_timeline(result, tmp_path / "t.svg")
    tree = ET.parse(tmp_path / "t.svg")
    ids = [group.get("id") or "" for group in tree.iter(f"{SVG}g")]
    assert sorted(i for i in ids if i.startswith(("comm-", "compute-"))) == [
        "comm-0-0",
        "comm-1-0",
        "compute-0-0",
        "compute-0-0",
        "compute-1-0",
    ]
    assert {"time (µs)", "dev 0", "dev 1", "compute", "communication", "idle"} <= {
        *texts(tmp_path / "t.svg")
    }


def test_requests_have_a_legend(tmp_path: Path) -> None:
    draw_timeline(drawn_plans.inter(), tmp_path / "t.svg", requests=3)
    assert {"request 0", "request 1", "request 2"} <= {*texts(tmp_path / "t.svg")}


def test_other_formats_are_refused(tiny: Compiled, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"pictures are \.svg, \.png, \.pdf, not '\.jpg'"):
        draw_graph(tiny, tmp_path / "g.jpg")
    with pytest.raises(FileError, match="there is no folder"):
        draw_graph(tiny, tmp_path / "none" / "g.svg")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_one_line_says_what_to_install(
    tiny: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PictureError, match=r"pip install matplotlib"):
        draw_graph(tiny, tmp_path / "g.svg")


def test_placed_nodes_are_all_nodes(tiny: Compiled) -> None:
    nodes: tuple[PlacedNode, ...] = placed_nodes(tiny.schedule)
    assert [placed.node.name for placed in nodes] == [node.name for node in tiny.graph.nodes]


def many_inputs(count: int, *, apart: bool) -> Compiled:
    """Sums of pairs of inputs in a chain, or Relus that have nothing to do with each other."""
    names = [f"x{i}" for i in range(count)]
    if apart:
        nodes = [helper.make_node("Relu", [n], [f"r{n}"], name=f"r{n}") for n in names]
        outs = [f"r{n}" for n in names]
    else:
        nodes = [helper.make_node("Sum", names, ["y"], name="sum")]
        outs = ["y"]
    value = {
        n: helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (2,)) for n in names + outs
    }
    graph = helper.make_graph(nodes, "g", [value[n] for n in names], [value[n] for n in outs])
    opset = [helper.make_opsetid("", 17)]
    return drawn_plans.compiled(helper.make_model(graph, ir_version=8, opset_imports=opset), 1, _=0)


@pytest.mark.parametrize(("count", "drawn"), [(12, 12), (13, 1)])
def test_many_inputs_of_one_box_are_drawn_as_one(count: int, drawn: int) -> None:
    diagram = fold(many_inputs(count, apart=False), 60)
    kinds = [kind for kind, _ in diagram.terminals]
    assert (kinds.count("input"), kinds.count("output")) == (drawn, 1)


@pytest.mark.parametrize(("count", "drawn"), [(60, 60), (61, 1)])
def test_too_many_inputs_are_drawn_as_one(count: int, drawn: int, tmp_path: Path) -> None:
    result = many_inputs(count, apart=True)
    diagram = fold(result, 100)
    kinds = [kind for kind, _ in diagram.terminals]
    assert (kinds.count("input"), kinds.count("output")) == (drawn, drawn)
    draw_graph(result, tmp_path / "g.svg", boxes=100)
    assert (f"{count} inputs" in texts(tmp_path / "g.svg")) == (drawn == 1)


def test_boxes_name_their_group_where_colours_repeat(tmp_path: Path) -> None:
    model = examples.build("tiny")
    names = [node.name for node in drawn_plans.load_onnx(model).graph.nodes]
    result = drawn_plans.compiled(model, 7, **{n: min(i, 6) for i, n in enumerate(names)})
    draw_graph(result, tmp_path / "g.svg")
    drawn = texts(tmp_path / "g.svg")
    assert {"group 0: stem.conv", "group 6: logits", "6: device 6"} <= {*drawn}


def test_a_graph_without_anything_to_do(tmp_path: Path) -> None:
    """One Identity: no seconds of communication, one box."""
    value = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (2,)) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g", *[[v] for v in value]
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    result = drawn_plans.compiled(model, 1, _=0)
    draw_graph(result, tmp_path / "g.svg")
    draw_timeline(result, tmp_path / "t.svg")
    assert "Identity" in texts(tmp_path / "g.svg")
