"""Graphviz source: its clusters, nodes and edges, and names that try to break it."""

import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from helpers.drawn import drawn_plans
from helpers.pages.dot_grammar import read
from partitioner.api.compiled.base import Compiled
from partitioner.report.pictures.canvas import COMM, shown
from partitioner.report.pictures.dot import dot

HOSTILE = [
    'say "hi"',
    "back\\slash\\",
    "two\nlines\r\x00\x1b[31m",
    "\u202eright to left\u2066",
    "<b>&amp;</b> & <script>",
    '"];evil [label="',
    "$x^2$ \\N \\G %s {0}",
    "n" * 10_000,
]


def test_clusters_are_the_groups_and_hold_their_nodes() -> None:
    first, second = read(dot(drawn_plans.hybrid())).clusters
    assert first.nodes["graph"]["label"] == "group 0: tp=2 on 0,1"
    assert first.nodes["n0"]["label"] == "layer0.out\nGemm\nn/tp"
    assert first.nodes["n1"]["label"] == "layer0.relu\nRelu\nb1/tp"
    assert [*first.nodes, *second.nodes] == ["graph", "n0", "n1", "graph", "n2"]
    assert first.nodes["n0"]["fillcolor"] != second.nodes["n2"]["fillcolor"]


def test_communication_edges_tell_kind_bytes_and_seconds() -> None:
    result = drawn_plans.inter()
    (task,) = [t for t in result.schedule.tasks if t.comm is not None]
    edges = read(dot(result)).edges
    assert set(edges) == {("i0", "n0"), ("n0", "n1"), ("n1", "n2"), ("n2", "o0")}
    label = edges["n1", "n2"]["label"]
    assert label.startswith("send 128 B ")  # 4 x 8 float32
    assert label.endswith(f"{task.longest_s * 1e6:.3g} µs")
    assert edges["n1", "n2"]["color"] == COMM
    assert "label" not in edges["n0", "n1"]


def test_a_communication_is_told_once() -> None:
    """x + relu: the second reader shares the first one's send."""
    result = drawn_plans.compiled(
        drawn_plans.examples.build("tiny"),
        2,
        _=1,
        **dict.fromkeys(("stem.conv", "stem.norm", "stem.relu", "stem.pool"), 0),
    )
    lines = [line for line in dot(result).splitlines() if COMM in line]
    assert sum("send" in line for line in lines) == 1
    assert sum("(the same)" in line and "dotted" in line for line in lines) == 1


def test_local_slices_are_no_communication() -> None:
    result = drawn_plans.compiled(
        drawn_plans.mlp(),
        2,
        **{
            "layer0.out": drawn_plans.TP2,
            "layer0.relu": (drawn_plans.TP2, {"b0": "tp"}),
            "y": (drawn_plans.TP2, {"m": "tp"}),
        },
    )
    assert any(t.comm and str(t.comm.kind) == "slice" for t in result.schedule.tasks)
    assert "slice" not in dot(result)


def test_replicated_nodes_are_dashed() -> None:
    result = drawn_plans.compiled(drawn_plans.mlp(), 2, _=drawn_plans.TP2)
    assert dot(result).count("replicated") == dot(result).count("dashed") == 3


def hostile(name: str) -> Compiled:
    model = drawn_plans.renamed(drawn_plans.mlp(), {"layer0.out": name})
    return drawn_plans.compiled(model, 2, _=0, y=1)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_stay_text(name: str) -> None:
    text = dot(hostile(name))
    assert all(line.isprintable() for line in text.splitlines())
    assert read(text).clusters[0].nodes["n0"]["label"] == f"{shown(name)}\nGemm"
    assert len(shown(name)) <= 60


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_graphviz_draws_hostile_names_as_text(name: str) -> None:
    done = subprocess.run(
        ["dot", "-Tsvg"], input=dot(hostile(name)).encode(), capture_output=True, check=True
    )
    assert done.stderr == b""
    drawn = {node.text for node in ET.fromstring(done.stdout).iter() if node.text}
    assert shown(name).replace(" ", "\xa0") in {text.replace(" ", "\xa0") for text in drawn}


def test_the_text_is_the_same_each_time() -> None:
    assert dot(drawn_plans.hybrid()) == dot(drawn_plans.hybrid())
