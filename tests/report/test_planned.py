"""Equal devices of a large cluster are shown as one, in texts and in the page."""

import re

import pytest

import partitioner
from partitioner import examples
from partitioner.report.page.data import report_data
from partitioner.report.planned import Lanes, lanes
from partitioner.report.text.diff import diff
from partitioner.report.text.explain import explain
from partitioner.report.text.show import show
from partitioner.search.request import MOST_EXPLICIT

DEVICES = 96


@pytest.fixture(scope="module")
def program() -> partitioner.Compiled:
    """Layers that pay to be cut: large, on devices of a fast network."""
    model = examples.build("mlp", layers=6, hidden=1024, batch=4096)
    return partitioner.compile(model, devices=DEVICES)


@pytest.fixture(scope="module")
def joined(program: partitioner.Compiled) -> Lanes:
    return lanes(program)


def test_each_device_has_one_lane_with_its_equals(
    program: partitioner.Compiled, joined: Lanes
) -> None:
    assert sorted(device for lane in joined.members for device in lane) == list(range(DEVICES))
    assert len(joined.members) <= MOST_EXPLICIT
    figures = program.evaluation
    for members, busiest, fullest in zip(
        joined.members, joined.busiest, joined.fullest, strict=True
    ):
        assert {busiest, fullest} <= set(members)
        assert figures.load_s[busiest] == max(figures.load_s[device] for device in members)
        assert figures.held_bytes[fullest] == max(figures.held_bytes[d] for d in members)


def test_a_small_cluster_has_a_lane_for_each_device() -> None:
    program = partitioner.compile(examples.build("mlp", layers=2, hidden=64, batch=8), devices=4)
    assert lanes(program).members == ((0,), (1,), (2,), (3,))


def test_texts_say_what_a_large_plan_does(program: partitioner.Compiled, joined: Lanes) -> None:
    text = show(program)
    assert f"{DEVICES} devices" in text
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 2 + len(joined.members)
    assert "limit " in explain(program)


def test_the_page_names_lanes_and_their_devices(
    program: partitioner.Compiled, joined: Lanes
) -> None:
    data = report_data(program)
    assert [tuple(row["members"]) for row in data["devices"]] == list(joined.members)
    count = len(joined.members)
    assert len(data["memory"]) == count
    for line in data["timelines"]:
        assert set(line["device"]) <= set(range(count))
        assert len(line["ref"]) == len(line["start_s"]) == len(line["device"])
    for row in (*data["groups"], *data["comms"]):
        listed = row.get("devices", row.get("ranks"))
        assert isinstance(listed, list)
        assert set(listed) <= set(range(count))
    sent = sum(program.evaluation.sent_bytes.values())
    assert sum(data["traffic"]["bytes"]) == pytest.approx(sent, rel=1e-6)


def test_a_difference_pairs_devices_that_are_equal_in_both(program: partitioner.Compiled) -> None:
    changes = diff(program, program, ("one", "two"))
    assert not changes["moved"]
    for before, after in changes["devices"]:
        assert before is not None
        assert before == after


def test_programs_of_a_large_plan_are_refused_in_one_line(program: partitioner.Compiled) -> None:
    with pytest.raises(partitioner.PartitionerError, match=re.escape(f"for {DEVICES} devices")):
        program.programs  # noqa: B018
