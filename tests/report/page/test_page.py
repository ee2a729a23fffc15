"""The report page in headless Chromium: its views, and that it loads and runs nothing foreign."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.pages import browser as headless
from helpers.pages import synthetic
from partitioner.report.page import page
from partitioner.report.schema import Report, Sweep

needs_chromium = pytest.mark.skipif(headless.binary() is None, reason="no chromium is installed")

HOSTILE = (
    "<script>window.hacked=1</script>",
    "\"'><img src=x onerror=window.hacked=2>",
    "bidi \u202e reversed \u2066 x",
    "new\nline\ttab\x00",
    "x" * 5000 + "MIDDLE" + "y" * 5000,
    "{a|rich} {b} ${window.hacked=4}",
    "</script><script>window.hacked=3</script><!--",
    "\ud800 alone",
    "\u05e9\u05dc\u05d5\u05dd",
    "&lt;b&gt;",
    "javascript:window.hacked=5",
)
PAINTED = """
const colours = new Set();
for (const canvas of document.querySelectorAll(`${arguments[0]} canvas`)) {
  if (!canvas.width || !canvas.height) continue;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200) colours.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
  }
}
return colours.size;
"""
#: Tiles whose text is wider than they are.
CUT_OFF = """
return [...document.querySelectorAll(".tile, .tile dd")]
  .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.textContent);
"""
Opener = Callable[..., Chrome]
NOT_PLANS = ("diff", "sweep", "many")  #: Pages without tabs.


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    driver = headless.start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    reports = {
        "plan": synthetic.report(),
        "equal": equal(),
        "training": training(),
        "long": training(layers=160, stages=8),
        "early": early(),
        "overlapping": synthetic.report(layers=2, overlapping=True),
        "hostile": synthetic.report(layers=2, names=HOSTILE),
        "large": synthetic.report(layers=357, devices=8, requests=(1, 2)),
        "one": synthetic.report(layers=0, devices=1),
        "empty": empty(),
        "flat": synthetic.report(layers=20, devices=64) | {"blocks": []},
        "uncertified": uncertified(),
        "staged": staged(),
        "measured": measured(),
        "diff": synthetic.diff(),
        "sweep": synthetic.sweep(),
        "many": many(),
    }
    for name, data in reports.items():
        (folder / f"{name}.html").write_text(page.render(data), "utf-8")
    return folder


def training(layers: int = 4, stages: int = 1) -> Report:
    """A report of half of the layers forward, and of the same backward, in stages."""
    data = synthetic.report(layers=layers, devices=4 * stages)
    data["ribbon"]["training"] = True
    for block in data["blocks"]:
        layer = int(block["label"].split("/")[0].removeprefix("layers."))
        if layer >= layers // 2:
            twin = layers - 1 - layer
            block["label"] = block["label"].replace(f"layers.{layer}", f"layers.{twin}")
            block["part"] = "backward"
    for node in data["nodes"]:
        node["group"] = min(node["group"], 2 * stages - 1 - node["group"])
    if stages > 1:
        gradient = synthetic.report(layers=0)["terminals"][1] | {"name": "gradient"}
        data["terminals"].append(
            {**gradient, "nodes": [data["blocks"][len(data["blocks"]) // 2]["last"]]}
        )
    return data


def early() -> Report:
    """A report whose last devices do a little at the beginning of the stream."""
    data = synthetic.report()
    stream = data["timelines"][1]
    for device in (2, 3):
        first = stream["device"].index(device)
        stream["start_s"][first], stream["duration_s"][first] = 0.0, 1e-9
    return data


def equal() -> Report:
    """A report of four devices of one name, in two stages of two."""
    data = synthetic.report()
    for device in data["devices"]:
        device["name"] = "h100"
    return data


def uncertified() -> Report:
    """A report of a plan without a certificate, on devices that take no time."""
    data = synthetic.report(layers=1)
    data["head"].update(
        status="", solver="", strategy="", searched="", seed=None, bound=0.0, gap=1.0
    )
    data["head"].update(step_s=0.0, step_s_one=0.0, speedup=None)
    data["head"].update(gain=None, gain_of="nothing takes time")
    return data


def staged() -> Report:
    """A report of two stages on four devices."""
    data = synthetic.report(layers=4, devices=4)
    sizes = {"nodes": 9, "forward_s": 1e-3, "backward_s": 2e-3, "weights_bytes": 3072}
    data["head"]["step"] = {
        "sentence": "2 stages, 8 micro-batches, 1f1b, bubble 20 %",
        "schedule": "1f1b",
        "micro_batches": 8,
        "bubble": 0.2,
        "stages": [
            {
                **sizes,
                "devices": [2 * stage, 2 * stage + 1],
                "in_flight": 2 - stage,
                "kept_bytes": 1024,
                "sends_to": [1 - stage],
                "sends_bytes": [512 * (1 + stage)],
            }
            for stage in range(2)
        ],
    }
    return data


def measured() -> Report:
    """A report of two devices with a measured run: 200 short kernels after a long one."""
    data = synthetic.report(layers=2, devices=2)
    events = 201
    columns = {
        "rank": [rank for rank in range(2) for _ in range(events)],
        "kind": [0] * (2 * events),
        "ref": [2, *[3] * (events - 1)] * 2,
        "name": ["long", *["short"] * (events - 1)] * 2,
        "start_s": [0.0, *[0.5 + at * 1e-4 for at in range(events - 1)]] * 2,
        "duration_s": [0.4, *[1e-4] * (events - 1)] * 2,
    }
    rank = {
        "predicted_compute_s": 0.4, "compute_s": 0.4, "predicted_comm_s": 0.0, "comm_s": 0.0,
        "waited_s": 0.0, "other_s": 0.0, "predicted_peak_bytes": 1024, "peak_bytes": None,
    }  # fmt: skip
    data["measured"] = {
        "backend": "test", "threads": 1, "steps": 2, "measured_at": "", "predicted_step_s": 1.0,
        "step_s": 1.0, "recorded_step_s": 1.0, "predicted_stream_s": None, "stream_s": None,
        "end_s": 1.0, "predicted": columns, "measured": columns, "ranks": [rank, rank], "tasks": [],
    }  # fmt: skip
    return data


def many() -> Sweep:
    """A sweep of 30 series, of which the first two are one curve."""
    data = synthetic.sweep()
    point = data["points"][0]
    data["points"] = [
        {**point, "cluster": f"c{at}", "devices": devices, "latency_s": max(at, 1) / devices}
        for at in range(30)
        for devices in (1, 2)
    ]
    return data


def empty() -> Report:
    """A report of a graph without nodes."""
    return synthetic.report(layers=0, devices=1) | {
        "nodes": [], "edges": [], "terminals": [], "comms": [], "blocks": [], "tasks": [],
        "moves": [],
        "devices": [], "groups": [], "timelines": [], "memory": [],
        "ribbon": {"lanes": [], "boxes": [], "end_s": 0.0, "training": False},
        "traffic": {"source": [], "target": [], "bytes": [], "links": []},
    }  # fmt: skip


@pytest.fixture
def opened(chromium: Chrome, pages: Path) -> Iterator[Opener]:
    """opened(name) shows a page, which must log no complaint and make no request."""
    chromium.get("about:blank")
    headless.complaints(chromium)
    headless.requests(chromium)
    headless.resize(chromium, 1280, 800)

    def open_(name: str, *, dark: bool = False, view: str = "graph") -> Chrome:
        headless.open_page(chromium, pages / f"{name}.html", dark=dark)
        if name not in NOT_PLANS:
            tab(chromium, view)
        return chromium

    yield open_
    assert headless.complaints(chromium) == []
    urls = [url for url in headless.requests(chromium) if not url.startswith(("data:", "blob:"))]
    assert [url for url in urls if not url.startswith(pages.as_uri())] == []
    assert chromium.execute_script("return window.hacked") is None


def tab(driver: Chrome, name: str) -> None:
    """Show a view, and wait until it drew itself again by the size that it has now."""
    driver.find_element(By.ID, f"tab-{name}").click()
    driver.execute_async_script(
        "const done = arguments[0]; let left = 3;"
        "const next = () => (left-- ? requestAnimationFrame(next) : done()); next();"
    )


def search(driver: Chrome, text: str) -> list[str]:
    box = driver.find_element(By.ID, "search")
    box.clear()
    box.send_keys(text)
    return [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#search-results li")]


def details(driver: Chrome) -> str:
    return driver.find_element(By.ID, "details").text


def drawn(driver: Chrome) -> list[str]:
    """Ids of what the graph draws: n5 a node, b2 a block, t0 an input or output."""
    return driver.execute_script("return page.graph.cy.nodes().map((node) => node.id())")


def click_drawn(driver: Chrome, element: str, *, twice: bool = False) -> None:
    """A click of the mouse on something in the graph's canvas."""
    x, y = driver.execute_script(
        "const {x, y} = page.graph.cy.getElementById(arguments[0]).renderedPosition();"
        "const box = document.getElementById('graph-canvas').getBoundingClientRect();"
        "return [Math.round(x + box.x), Math.round(y + box.y)]",
        element,
    )
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.move_to_location(x, y)
    (actions.double_click() if twice else actions.click()).perform()


def select(driver: Chrome, kind: str, index: int) -> None:
    driver.execute_script("page.select({type: arguments[0], id: arguments[1]})", kind, index)


class TestRender:
    def test_no_name_ends_the_data(self) -> None:
        text = page.embedded(synthetic.report(layers=1, names=HOSTILE))
        assert not re.search("[<>&\u2028\u2029]", text)
        assert json.loads(text)["nodes"][0]["name"] == HOSTILE[0]

    def test_is_one_file_without_addresses_to_load(self) -> None:
        html = page.render(synthetic.report(layers=1))
        assert "default-src 'none'" in html
        assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=""", html)

    def test_every_script_is_listed(self) -> None:
        folder = Path(page.__file__).with_name("web") / "js"
        assert sorted(path.stem for path in folder.iterdir()) == sorted(page.SCRIPTS)

    def test_files_are_small(self) -> None:
        folder = Path(page.__file__).with_name("web")
        for path in (*folder.glob("vendor/*.js"), *folder.glob("js/*.js")):
            assert path.stat().st_size < 1_000_000
        for path in folder.glob("js/*.js"):
            assert len(path.read_text("utf-8").splitlines()) < 400

    def test_nothing_writes_markup(self) -> None:
        folder = Path(page.__file__).with_name("web") / "js"
        scripts = "".join(path.read_text("utf-8") for path in folder.iterdir())
        assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval\\(", scripts)

    def test_licences_are_shipped(self) -> None:
        html = page.render(synthetic.diff())
        for name in ("cytoscape", "@dagrejs/dagre", "echarts", "zrender"):
            assert f"\n{name} " in html

    def test_figures_must_be_finite(self) -> None:
        data = synthetic.report(layers=1)
        data["head"]["gap"] = float("nan")
        with pytest.raises(ValueError, match="not JSON compliant"):
            page.render(data)


@needs_chromium
class TestPlan:
    @pytest.mark.parametrize(
        ("name", "dark"),
        [
            *(("plan", False), ("overlapping", True), ("hostile", False)),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in (("plan", True), ("overlapping", False), ("hostile", True))
            ),
        ],
    )
    def test_every_view_draws(self, opened: Opener, name: str, dark: bool) -> None:
        driver = opened(name, dark=dark)
        assert driver.execute_script("return document.documentElement.dataset.theme") == (
            "dark" if dark else "light"
        )
        for view in ("graph", "timeline", "memory", "traffic"):
            tab(driver, view)
            headless.wait(driver, f"{PAINTED.replace('return', 'return 5 <')}", f"#panel-{view}")
        tab(driver, "nodes")
        assert "Gather" in driver.find_element(By.ID, "nodes-table").text

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["one", "empty", "flat"])
    def test_odd_plans_open(self, opened: Opener, name: str) -> None:
        driver = opened(name)
        for view in ("graph", "timeline", "memory", "traffic", "nodes"):
            tab(driver, view)
        tab(driver, "graph")
        message = driver.find_element(By.ID, "graph-message").text
        assert message == ("The graph has no nodes." if name == "empty" else "")

    @pytest.mark.slow
    def test_colours_switch(self, opened: Opener) -> None:
        driver = opened("plan")
        for view in ("graph", "timeline", "memory", "traffic"):
            tab(driver, view)
        driver.find_element(By.ID, "theme").click()  # while the timeline is not shown
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
        tab(driver, "timeline")
        headless.wait(driver, f"{PAINTED.replace('return', 'return 5 <')}", "#panel-timeline")
        headless.wait(driver, "return page.timeline.room === null")  # all lanes have room

    def test_timeline_scrolls_to_the_lane_of_a_selection(self, opened: Opener) -> None:
        driver = opened("flat")
        tab(driver, "timeline")
        select(driver, "node", 200)
        lane = driver.execute_script(
            "const {line} = page.timeline; return line.row[line.device[line.byRef.get(200)[0]]]"
        )
        first, last = driver.execute_script(
            "const zoom = page.timeline.chart.getOption().dataZoom[2];"
            "return [zoom.startValue, zoom.endValue]"
        )
        assert 0 < first <= lane <= last

    def test_head_has_the_verdict(self, opened: Opener) -> None:
        text = opened("plan", view="overview").find_element(By.TAG_NAME, "header").text
        for part in (
            "Between requests",
            "predicted; one device",
            "3.08\u00d7",
            "gap 3 %",
            "matrix products take 71 %",
            "Instead: one accelerator",
        ):
            assert part in text

    def test_stages_have_their_figures(self, opened: Opener) -> None:
        driver = opened("staged", view="overview")
        assert "20 %\npredicted; 8 micro-batches" in driver.find_element(By.ID, "tiles").text
        tab(driver, "stages")
        panel = driver.find_element(By.ID, "panel-stages").text
        assert "2 stages, 8 micro-batches, 1f1b, bubble 20 %" in panel
        first, second = driver.find_elements(By.CSS_SELECTOR, "#stages-table tbody tr")
        assert first.text.startswith("0 0-1")
        assert first.text.endswith("9 1 ms 2 ms 3 KiB 2 \u00d7 1 KiB = 2 KiB 512 B to 1")
        assert second.text.endswith("1 \u00d7 1 KiB = 1 KiB 1 KiB to 0")

    def test_plans_without_stages_have_no_tab_of_them(self, opened: Opener) -> None:
        assert not opened("plan").find_elements(By.ID, "tab-stages")

    def test_search_finds_by_name_and_type(self, opened: Opener) -> None:
        driver = opened("plan")
        assert len(search(driver, "q_proj")) == 4
        assert all(row.startswith("Softmax") for row in search(driver, "softmax"))
        driver.find_element(By.ID, "search").send_keys(Keys.ARROW_DOWN, Keys.ENTER)
        assert "/model/layers.1/attn/softmax/Softmax" in details(driver)
        assert "n20" in drawn(driver)  # its blocks are opened

    def test_search_finds_all_that_the_page_names(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        shown = [name.text for name in driver.find_elements(By.CLASS_NAME, "box-name")]
        assert "layers.1" in shown
        rows = search(driver, "layers.1")
        assert any(row.startswith("block") for row in rows)
        assert len(search(driver, "layers.1.attn")) == len(search(driver, "layers/1/attn")) > 0
        in_layer = search(driver, "layer 1")
        assert in_layer
        assert not any("layers.0" in row or "layers.2" in row for row in in_layer)
        assert in_layer[0].startswith("block")
        assert any(row.startswith("all-reduce") for row in search(driver, "all-reduce"))
        runs = driver.execute_script("return page.plan.ribbon.lanes[1].runs")
        assert [row.split()[0] for row in search(driver, runs)] == ["device", "device"]
        (device,) = search(driver, "device 2")
        assert device.startswith("device")
        (device,) = search(driver, "2: accelerator")
        assert device.startswith("device")
        driver.find_element(By.ID, "search").send_keys(Keys.ENTER)
        assert driver.execute_script("return page.selection.current") == {"type": "device", "id": 2}
        value = driver.execute_script("return page.plan.nodes[4].outputs[0].name")
        assert search(driver, value)
        held = driver.execute_script("return page.plan.nodes[2].inputs.at(-1).name")
        assert search(driver, held)

    def test_click_shows_details(self, opened: Opener) -> None:
        driver = opened("plan")
        click_drawn(driver, "n0")
        text = details(driver)
        for part in ("embed_tokens", "1 MFLOP", "replicated", "Why not otherwise?", "local shape"):
            assert part in text

    @pytest.mark.slow
    def test_why_not(self, opened: Opener) -> None:
        driver = opened("plan")
        select(driver, "node", 2)
        assert "Best of 5 other strategies" in details(driver)
        assert "m/x on x=2 on 0,1" in details(driver)

    def test_a_training_graph_has_both_passes_of_a_layer_side_by_side(self, opened: Opener) -> None:
        driver = opened("training")
        places = driver.execute_script(
            "return Object.fromEntries(page.graph.cy.nodes('.block').map((node) =>"
            " [node.data('label').split('\\n')[0], [node.position('x'), node.position('y')]]))"
        )
        assert set(places) == {
            f"+ layers.{layer}{part}" for layer in (0, 1) for part in ("", " backward")
        }
        for layer in (0, 1):
            forward, backward = places[f"+ layers.{layer}"], places[f"+ layers.{layer} backward"]
            assert forward[0] < backward[0]
            assert forward[1] == backward[1]
        assert places["+ layers.0"][1] < places["+ layers.1"][1]
        assert places["+ layers.0"][0] == places["+ layers.1"][0]
        legend = driver.find_element(By.ID, "graph-legend").text
        assert "block" in legend
        assert "whole" not in legend  # no node is

    def test_a_long_training_graph_has_a_box_for_each_stage_and_pass(self, opened: Opener) -> None:
        driver = opened("long")
        assert any("layers.3 backward" in row for row in search(driver, "layers.3 backward"))
        places = driver.execute_script(
            "return Object.fromEntries(page.graph.cy.nodes().map((node) =>"
            " [node.data('label').split('\\n').slice(0, 2).join(' '),"
            " [node.position('x'), node.position('y')]]))"
        )
        boxes = [(label, *at) for label, at in places.items() if label[0] == "+"]
        assert len(boxes) == 16
        rows = []
        for stage in range(8):
            name = f"+ layers.{10 * stage} \u2026 layers.{10 * stage + 9}"
            own = [box for box in boxes if box[0].startswith(name)]
            (_, x, y), (backward, x_backward, y_backward) = own
            assert "backward" in backward
            assert x < x_backward
            assert y == y_backward
            rows.append(y)
        assert rows == sorted(rows)
        x, y = places["output gradient"]
        assert x > x_backward
        assert y in rows
        legend = driver.find_element(By.ID, "graph-legend").text
        assert "more" not in legend

    @pytest.mark.slow
    def test_blocks_open_and_close(self, opened: Opener) -> None:
        driver = opened("plan")
        closed = drawn(driver)
        click_drawn(driver, "b0", twice=True)
        assert {"n1", "b1", "b2", "n14"} <= set(drawn(driver))
        driver.find_element(By.ID, "graph-open").click()
        assert {f"n{node}" for node in range(59)} <= set(drawn(driver))
        driver.find_element(By.ID, "graph-close").click()
        assert drawn(driver) == closed

    def test_repeats_open_together(self, opened: Opener) -> None:
        driver = opened("plan")
        select(driver, "block", 0)
        driver.find_element(By.XPATH, "//button[.='Open all 4']").click()
        assert {"n1", "n15", "n29", "n43"} <= set(drawn(driver))
        driver.find_element(By.XPATH, "//button[.='Close all 4']").click()
        assert "n1" not in drawn(driver)

    def test_communication_edges_say_what_they_carry(self, opened: Opener) -> None:
        driver = opened("plan")
        labels = driver.execute_script(
            "return page.graph.cy.edges('.comm').map((edge) => edge.data('label'))"
        )
        assert labels == ["2\u00d7 send\n32 MiB 62 µs"]
        driver.find_element(By.ID, "graph-open").click()
        labels = driver.execute_script(
            "return page.graph.cy.edges('.comm').map((edge) => edge.data('label'))"
        )
        assert "all-reduce\n16 MiB 31 µs" in labels

    def test_a_shared_communication_is_counted_once(self, opened: Opener) -> None:
        driver = opened("overlapping")
        assert "send\nshared" in driver.execute_script(
            "page.plan.edges.forEach((edge) => { if (edge.u === 0) edge.comms = [0]; });"
            "page.setOpen(page.plan.blocks.keys());"
            "return page.graph.cy.edges('.comm').map((edge) => edge.data('label'))"
        )

    @pytest.mark.slow
    def test_views_are_linked(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "nodes")
        driver.find_element(By.CSS_SELECTOR, "#nodes-table .rows .row:nth-child(9)").click()
        assert "attn/out_proj" in details(driver)
        tab(driver, "timeline")
        assert driver.execute_script("return [...page.timeline.chosen]") == [8]
        tab(driver, "memory")
        assert "Position\n9 of 69" in details(driver)
        tab(driver, "traffic")
        marked = driver.find_elements(By.CSS_SELECTOR, "#traffic-comms .row.marked")
        assert ["all-reduce" in row.text for row in marked] == [True]
        marked[0].click()
        tab(driver, "graph")
        assert driver.execute_script("return page.graph.cy.$(':selected').map((e) => e.id())") == [
            "b0"
        ]

    def test_timeline_selects_and_zooms(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "timeline")
        canvas = driver.find_element(By.ID, "timeline-canvas")
        canvas.send_keys(Keys.ARROW_RIGHT)
        assert "embed_tokens" in details(driver)
        canvas.send_keys(Keys.ARROW_RIGHT, "+")
        assert "norm_1" in details(driver)
        first, last = driver.execute_script("return page.timeline.span")
        assert last - first < driver.execute_script("return page.timeline.line.end_s")

    def test_timeline_of_many_requests(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "timeline")
        driver.find_element(By.CSS_SELECTOR, "#timeline-choice option[value='1']").click()
        assert driver.execute_script("return page.timeline.line.requests") == 4
        headless.wait(driver, f"{PAINTED.replace('return', 'return 5 <')}", "#panel-timeline")

    def test_peak_shows_the_live_set(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "memory")
        x, y = driver.execute_script(
            "const row = page.plan.memory[page.memory.device];"
            "const [x, y] = page.memory.curve.chart.convertToPixel({gridIndex: 0},"
            " [row.peak_s, row.peak_bytes]);"
            "const box = document.getElementById('memory-curve').getBoundingClientRect();"
            "return [Math.round(x + box.x), Math.round(y + box.y)]"
        )
        actions = ActionChains(driver)
        actions.w3c_actions.pointer_action.move_to_location(x, y)
        actions.click().perform()
        live = driver.find_element(By.ID, "memory-live").text
        assert "at its peak" in live
        assert "weights of the device" in live
        assert driver.switch_to.active_element.get_attribute("aria-label") == "Held at the peak"

    def test_memory_is_drawn_over_time(self, opened: Opener) -> None:
        driver = opened("plan", view="memory")
        axis = driver.execute_script("return page.memory.curve.chart.getOption().xAxis[0]")
        assert axis["name"] == "one request"
        assert axis["max"] == driver.execute_script("return page.plan.timelines[0].end_s")
        held = driver.execute_script("return page.memory.held.map(({x}) => x)")
        assert held == sorted(held)
        assert " at its peak: " in driver.find_element(By.ID, "memory-live").text
        assert "position" not in driver.find_element(By.ID, "panel-memory").text
        ref = driver.execute_script("return page.plan.timelines[0].ref.find((ref) => ref >= 0)")
        select(driver, "node", ref)
        lines = driver.execute_script(
            "const {series} = page.memory.curve.chart.getOption();"
            "return series.find(({name}) => name === 'weights').markLine.data.length"
        )
        assert lines == 2  # the limit and where the node begins

    def test_table_sorts_and_filters(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "nodes")
        driver.find_element(By.XPATH, "//button[.='Seconds']").click()
        first = driver.find_element(By.CSS_SELECTOR, "#nodes-table .rows .row")
        assert "lm_head" in first.text
        driver.find_element(By.ID, "nodes-filter").send_keys("gelu")
        headless.wait(
            driver, "return document.getElementById('nodes-count').textContent === '4 of 59'"
        )

    def test_pictures_are_saved(self, opened: Opener, tmp_path: Path) -> None:
        driver = opened("plan")
        allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
        driver.find_element(By.ID, "graph-png").click()
        tab(driver, "timeline")
        driver.find_element(By.ID, "timeline-png").click()
        driver.find_element(By.ID, "timeline-svg").click()
        wanted = {"graph.png": b"\x89PNG", "timeline.png": b"\x89PNG", "timeline.svg": b"<svg"}
        for name, start in wanted.items():
            _appears(tmp_path / name)
            assert (tmp_path / name).read_bytes().startswith(start)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["plan", "diff", "sweep"])
    def test_nothing_is_wider_than_the_window(self, opened: Opener, name: str) -> None:
        driver = opened(name)
        for width in (1280, 800, 420):
            headless.resize(driver, width, 800)
            for view in driver.find_elements(By.CSS_SELECTOR, "#tabs button"):
                view.click()
                over = driver.execute_script(
                    "const page = document.documentElement;"
                    "return page.scrollWidth - page.clientWidth"
                )
                assert over <= 0, (width, view.text)
            assert driver.execute_script(CUT_OFF) == [], width

    def test_details_are_below_the_graph_of_a_small_window(self, opened: Opener) -> None:
        driver = opened("plan")
        headless.resize(driver, 420, 800)
        select(driver, "node", 2)
        below = driver.execute_script(
            "const box = (id) => document.getElementById(id).getBoundingClientRect();"
            "return box('details').top - box('main').bottom"
        )
        assert below >= 0

    def test_positions_count_from_one(self, opened: Opener) -> None:
        driver = opened("plan")
        for at, said in ((0, "1 of 69"), (-1, "69 of 69")):
            driver.execute_script(
                "const ref = page.plan.tasks.at(arguments[0]);"
                "page.select(ref < 0 ? {type: 'comm', id: -1 - ref} : {type: 'node', id: ref})",
                at,
            )
            assert f"Position\n{said}" in details(driver)

    def test_the_seed_and_what_was_folded(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        assert driver.find_element(By.ID, "subtitle").text.endswith(" \u00b7 seed 3")
        notes = driver.find_element(By.ID, "notes-list").get_attribute("textContent")
        assert "Folded: 12 layers as one." in str(notes)

    def test_without_a_certificate(self, opened: Opener) -> None:
        header = opened("uncertified", view="overview").find_element(By.TAG_NAME, "header")
        subtitle = header.find_element(By.ID, "subtitle").text
        assert re.fullmatch(r"throughput on [^\u00b7]+ \u00b7 not certified", subtitle)
        assert "gap" not in header.text
        assert "bound" not in header.text
        assert header.text.count("not certified") == 2

    def test_no_gain_though_it_fits_one_device(self, opened: Opener) -> None:
        text = opened("uncertified", view="overview").find_element(By.ID, "tiles").text
        assert "does not fit" not in text
        assert "Gain\n\u2013\nnothing takes time" in text


def _appears(path: Path) -> None:
    end = time.monotonic() + 10
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < end, path
        time.sleep(0.05)


@needs_chromium
@pytest.mark.slow
class TestKeyboard:
    def test_tabs(self, opened: Opener) -> None:
        driver = opened("plan")
        driver.find_element(By.ID, "tab-graph").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        focused = driver.switch_to.active_element
        assert focused.get_attribute("id") == "tab-memory"
        assert focused.get_attribute("aria-selected") == "true"
        assert driver.find_element(By.ID, "panel-memory").is_displayed()

    def test_from_search_to_details_and_along_edges(self, opened: Opener) -> None:
        driver = opened("plan")
        body = driver.find_element(By.TAG_NAME, "body")
        body.send_keys("/")
        assert driver.switch_to.active_element.get_attribute("id") == "search"
        driver.switch_to.active_element.send_keys("embed", Keys.ENTER)
        canvas = driver.find_element(By.ID, "graph-canvas")
        canvas.send_keys(Keys.ARROW_DOWN)
        assert "layers.0" in details(driver)
        canvas.send_keys(Keys.ENTER)
        assert "n1" in drawn(driver)
        canvas.send_keys(Keys.ARROW_DOWN)
        assert "norm_1" in details(driver)
        canvas.send_keys(Keys.ENTER)
        assert driver.switch_to.active_element.get_attribute("id") == "details"
        canvas.send_keys(Keys.BACKSPACE)
        assert "n1" not in drawn(driver)
        closed = driver.find_element(By.ID, "live").get_attribute("textContent")
        assert closed == "Closed layers.0"

    def test_rows_of_a_table(self, opened: Opener) -> None:
        driver = opened("plan")
        tab(driver, "nodes")
        driver.find_element(By.CSS_SELECTOR, "#nodes-table .table").send_keys(Keys.END)
        assert "lm_head" in details(driver)


@needs_chromium
@pytest.mark.slow
class TestColumns:
    @pytest.mark.parametrize("name", ["large", "plan"])
    def test_a_long_graph_fills_the_canvas(self, opened: Opener, name: str) -> None:
        driver = opened(name, view="graph")
        if name == "plan":
            driver.find_element(By.ID, "graph-open").click()
        wide, high, canvas = driver.execute_script(
            "const box = page.graph.cy.elements().boundingBox();"
            "return [box.w, box.h, page.graph.cy.width() / page.graph.cy.height()];"
        )
        assert canvas / 3 < wide / high < 3 * canvas

    def test_boxes_in_columns_do_not_overlap(self, opened: Opener) -> None:
        driver = opened("large", view="graph")
        boxes = driver.execute_script(
            "return page.graph.cy.nodes().map((node) => {"
            "const {x1, x2, y1, y2} = node.boundingBox({includeLabels: false});"
            "return [x1, x2, y1, y2];});"
        )
        assert len({round((x1 + x2) / 2) for x1, x2, _, _ in boxes}) > 2
        for (a1, a2, a3, a4), (b1, b2, b3, b4) in itertools.combinations(boxes, 2):
            assert a2 <= b1 or b2 <= a1 or a4 <= b3 or b4 <= a3


@pytest.mark.slow
class TestTopology:
    def test_links_are_as_wide_as_they_are_fast(self, opened: Opener) -> None:
        driver = opened("plan", view="traffic")
        picture = driver.find_element(By.CLASS_NAME, "topology")
        units = [unit.text for unit in picture.find_elements(By.CLASS_NAME, "unit-name")]
        assert [unit[:3] for unit in units] == ["0: ", "1: ", "2: ", "3: "]
        widths = {
            kind: {
                float(line.get_attribute("stroke-width"))
                for line in picture.find_elements(By.CSS_SELECTOR, f"line.{kind}")
            }
            for kind in ("used", "link")
        }
        assert len(widths["used"]) == 1
        assert (
            picture.find_element(By.TAG_NAME, "title")
            .get_attribute("textContent")
            .startswith("NVLink joins 2 devices at 450 GB/s and carries ")
        )

    def test_many_devices_are_drawn_as_groups(self, opened: Opener) -> None:
        picture = opened("flat", view="traffic").find_element(By.CLASS_NAME, "topology")
        assert len(picture.find_elements(By.CLASS_NAME, "unit")) == 8
        assert "+ 24 more" in picture.text


def test_lanes_say_the_names_of_devices_in_all_views(opened: Opener) -> None:
    driver = opened("plan", view="timeline")
    name = driver.execute_script("return page.plan.devices[2].name")
    assert name
    for view, chart, axis in (
        ("timeline", "page.timeline.chart", "yAxis"),
        ("memory", "page.memory.bars.chart", "yAxis"),
        ("traffic", "page.traffic.loads.chart", "xAxis"),
    ):
        tab(driver, view)
        names = driver.execute_script(f"return {chart}.getOption().{axis}[0].data")
        assert any(label.startswith(f"2: {name[:2]}") for label in names), view


@pytest.mark.slow
class TestHostileNames:
    def test_names_are_text(self, opened: Opener) -> None:
        driver = opened("hostile")
        driver.find_element(By.ID, "graph-open").click()
        tab(driver, "nodes")
        text = driver.find_element(By.ID, "nodes-table").text
        assert "\\u202e" in text or "\\u2066" in text
        assert "\u202e" not in driver.find_element(By.TAG_NAME, "body").get_attribute("innerText")
        for index, name in enumerate(HOSTILE):
            select(driver, "node", index)
            shown = driver.find_element(By.CSS_SELECTOR, "#details .full").get_attribute(
                "textContent"
            )
            assert shown == page_text(name)

    @pytest.mark.slow
    def test_tooltips_and_search_are_text(self, opened: Opener) -> None:
        driver = opened("hostile")
        search(driver, "script")
        assert driver.execute_script("return document.querySelectorAll('#page img').length") == 0
        tab(driver, "timeline")
        canvas = driver.find_element(By.ID, "timeline-canvas")
        for offset in range(-290, 300, 10):
            ActionChains(driver, duration=0).move_to_element_with_offset(
                canvas, offset, -150
            ).perform()
        assert driver.execute_script("return document.querySelectorAll('#page img').length") == 0

    def test_a_long_name_is_shortened_where_it_is_not_asked_for(self, opened: Opener) -> None:
        driver = opened("hostile")
        longest = driver.execute_script(
            "return Math.max(...page.graph.cy.nodes().map((n) => n.data('label').length))"
        )
        assert longest < 120


def page_text(name: str) -> str:
    """A name as the page shows it: what cannot be seen is escaped."""
    return re.sub("[\x00-\x1f\u202e\u2066\ud800]", lambda mark: f"\\u{ord(mark[0]):04x}", name)


@needs_chromium
class TestPolicy:
    def test_foreign_scripts_and_requests_are_refused(self, chromium: Chrome, pages: Path) -> None:
        headless.open_page(chromium, pages / "plan.html")
        headless.complaints(chromium)
        chromium.execute_script(
            "const script = document.createElement('script');"
            "script.textContent = 'window.hacked = 6';"
            "document.body.append(script);"
            "fetch('https://example.com/').catch(() => (window.refused = true));"
        )
        headless.wait(chromium, "return window.refused")
        assert chromium.execute_script("return window.hacked") is None
        said = " ".join(headless.complaints(chromium))
        assert "script-src" in said
        assert "connect" in said


@needs_chromium
@pytest.mark.slow
class TestLarge:
    def test_opens_in_time(self, opened: Opener, pages: Path) -> None:
        driver = opened("large")
        assert (pages / "large.html").stat().st_size < 10 * 2**20
        assert driver.execute_script("return page.plan.nodes.length") == 5001
        tries = 3  # this machine may be busy with other tests
        assert any(headless.open_page(driver, pages / "large.html") < 3000 for _ in range(tries))

    def test_folds_levels_that_are_too_long(self, opened: Opener) -> None:
        driver = opened("large")
        assert len(drawn(driver)) < 40
        assert len(search(driver, "layers.200/attn/q_proj")) == 1
        driver.find_element(By.ID, "search").send_keys(Keys.ENTER)
        assert "/model/layers.200/attn/q_proj/MatMul" in details(driver)

    def test_refuses_to_draw_too_much(self, opened: Opener) -> None:
        driver = opened("large")
        before = drawn(driver)
        driver.find_element(By.ID, "graph-open").click()
        message = driver.find_element(By.ID, "graph-message").text
        assert "5,001 nodes would be visible, more than 1,500" in message
        assert drawn(driver) == before

    def test_tables_make_the_rows_in_sight_only(self, opened: Opener) -> None:
        driver = opened("large")
        tab(driver, "nodes")
        assert len(driver.find_elements(By.CSS_SELECTOR, "#nodes-table .rows .row")) < 60
        driver.find_element(By.CSS_SELECTOR, "#nodes-table .table").send_keys(Keys.END)
        assert "lm_head" in driver.find_element(By.ID, "nodes-table").text


@needs_chromium
@pytest.mark.slow
class TestOtherPages:
    def test_a_sweep_has_its_ideal_and_efficiency(self, opened: Opener) -> None:
        driver = opened("sweep")
        charts = driver.execute_script(
            "return page.charts.map(({chart}) => chart.getOption().series.map((line) => line.name))"
        )
        assert len(charts) == 3
        for column in (0, 2):
            assert any(name.startswith("ideal: ") for name in charts[column])
        assert not any(name.startswith("ideal: ") for name in charts[1])
        assert driver.find_element(By.ID, "verdict").text

    def test_diff_opens_with_a_verdict_and_judges_figures(self, opened: Opener) -> None:
        driver = opened("diff")
        verdict = driver.find_element(By.ID, "verdict").text
        assert verdict.startswith("new.partition is faster by 33 %")
        rows = driver.find_elements(By.CSS_SELECTOR, "#panel-figures tbody tr")
        judged = {
            row.find_element(By.TAG_NAME, "td").text: {
                mark.get_attribute("class") for mark in row.find_elements(By.TAG_NAME, "span")
            }
            for row in rows
        }
        assert judged["step time"] == judged["throughput"] == {"better"}
        assert judged["communication"] == {"worse"}
        assert judged["devices used"] == judged["speed-up"] == set()

    def test_a_searched_space_opens_its_own_plan(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        (link,) = driver.find_elements(By.CSS_SELECTOR, "#spaces button")
        link.click()
        panel = driver.find_element(By.ID, "why-changes")
        assert panel.is_displayed()
        for part in ("slower by 100 %", "attn … mlp (14 nodes)", "14 operators run otherwise"):
            assert part in panel.text
        assert panel.find_element(By.CLASS_NAME, "worse").text.startswith("+2 ms")
        assert panel.find_element(By.CLASS_NAME, "better").text.startswith("+50 %")
        button = driver.find_element(By.CSS_SELECTOR, "#why-spaces button")
        assert button.get_attribute("aria-expanded") == "true"
        button.click()
        assert not panel.is_displayed()

    @pytest.mark.parametrize("dark", [False, True])
    def test_diff(self, opened: Opener, dark: bool) -> None:
        driver = opened("diff", dark=dark)
        assert "\u221233.3 %" in driver.find_element(By.ID, "panel-figures").text
        tab(driver, "moved")
        assert "whole on 0" in driver.find_element(By.ID, "panel-moved").text
        for view in ("diff-traffic", "diff-devices"):
            tab(driver, view)
            headless.wait(driver, f"{PAINTED.replace('return', 'return 3 <')}", f"#panel-{view}")

    @pytest.mark.parametrize("dark", [False, True])
    def test_sweep(self, opened: Opener, dark: bool) -> None:
        driver = opened("sweep", dark=dark)
        assert "Worth it up to 4 devices" in driver.find_element(By.TAG_NAME, "header").text
        headless.wait(driver, f"{PAINTED.replace('return', 'return 5 <')}", "#panel-curves")
        tab(driver, "points")
        assert "★ yes" in driver.find_element(By.ID, "panel-points").text
        tab(driver, "failed")
        assert "do not fit one device of 4 GiB" in driver.find_element(By.ID, "panel-failed").text

    def test_a_throughput_without_limit_is_said(self, opened: Opener) -> None:
        text = opened("diff").find_element(By.ID, "panel-figures").text
        assert "ideal throughput 476.2/s unlimited \u2013 \u2013" in text

    def test_many_series_look_different(self, opened: Opener) -> None:
        driver = opened("many")
        lines = driver.execute_script("return page.charts[0].chart.getOption().series")
        looks = [
            (line["itemStyle"]["color"], str(line["lineStyle"]["type"]), line["symbol"])
            for line in lines
            if not line["name"].startswith("ideal: ")
        ]
        assert len(set(looks)) == len(looks) == 30
        shapes = {(colour, dash) for colour, dash, _ in looks}
        assert len(shapes) == 30  # without the symbols too

    def test_a_series_is_hidden_and_shown(self, opened: Opener) -> None:
        driver = opened("sweep")
        button = driver.find_elements(By.CSS_SELECTOR, ".series button")[1]
        selected = "return page.charts.map(({chart}) => chart.getOption().legend[0].selected)"
        for pressed in ("false", "true"):
            button.click()
            assert button.get_attribute("aria-pressed") == pressed
            for chart in driver.execute_script(selected):
                assert chart.get(button.text, True) is (pressed == "true")

    def test_charts_of_a_small_window_do_not_overlap(self, opened: Opener) -> None:
        driver = opened("sweep")
        headless.resize(driver, 420, 800)
        spans = driver.execute_script(
            "return [...document.querySelectorAll('#panel-curves .chart')]"
            ".map((chart) => chart.getBoundingClientRect()).map(({top, bottom}) => [top, bottom])"
        )
        assert len(spans) == 3
        assert all(above[1] <= below[0] for above, below in itertools.pairwise(spans))

    def test_equal_curves_are_named_and_seen(self, opened: Opener) -> None:
        driver = opened("many")
        notes = driver.find_elements(By.CSS_SELECTOR, "#panel-curves .equal")
        assert notes[1].text == "One curve: c0, own memory = c1, own memory."
        lines = driver.execute_script("return page.charts[1].chart.getOption().series")
        widths = [line["lineStyle"]["width"] for line in lines[:3]]
        assert widths == [5, 2, 2]

    @pytest.mark.parametrize(
        ("name", "view", "said"),
        [
            ("sweep", "curves", "NVLink node, own memory: 125/s on 1 devices"),
            ("diff", "diff-traffic", "all-reduce: before 0 B, after 64 MiB"),
            ("diff", "diff-devices", "device 0: compute before "),
        ],
    )
    def test_charts_are_walked_by_keys(
        self, opened: Opener, name: str, view: str, said: str
    ) -> None:
        driver = opened(name)
        tab(driver, view)
        chart = driver.find_element(By.CSS_SELECTOR, f"#panel-{view} .chart")
        assert chart.get_attribute("aria-label")
        assert chart.get_attribute("role") == "application"
        chart.send_keys(Keys.ARROW_RIGHT)
        assert driver.switch_to.active_element == chart
        live = "return document.getElementById('live').textContent"
        assert driver.execute_script(live).startswith(said)
        headless.wait(driver, "return document.querySelector('.chart .tip')?.textContent")
        first = driver.execute_script(live)
        chart.send_keys(Keys.ARROW_LEFT)
        assert driver.execute_script(live) == first
        chart.send_keys(Keys.END)
        assert driver.execute_script(live) != first


def boxes(driver: Chrome) -> list[str]:
    """Text of each box of the overview that is shown."""
    return [box.text for box in driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .box")]


@needs_chromium
class TestOverview:
    def test_it_is_the_first_view_and_has_a_lane_for_each_group(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        lanes = driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .lane-name")
        assert [lane.text.split(":")[0] for lane in lanes] == ["0-1", "2-3"]
        assert sum("layers." in text for text in boxes(driver)) == 4
        first = driver.find_element(By.CSS_SELECTOR, "#tabs [role=tab]")
        assert first.get_attribute("id") == "tab-overview"
        answer = driver.find_element(By.ID, "overview-answer").text
        assert "layers 0-9" in answer
        assert "x cuts columns and rows" in answer

    def test_lanes_and_the_sentence_say_all_that_they_run(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        titles = [row.text for row in driver.find_elements(By.CLASS_NAME, "lane-what")]
        assert titles == ["layers 0-9, part 0 of lm_head", "layers 1-9, part 1 of lm_head"]
        answer = driver.find_element(By.ID, "overview-answer").text
        assert answer.startswith(f"Devices 0-1: {titles[0]}; devices 2-3: {titles[1]}. ")

    def test_many_lanes_are_a_grid_of_devices_by_stage_and_load(self, opened: Opener) -> None:
        driver = opened("flat", view="overview")
        cards = driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .device-card")
        assert [card.text.split(":")[0] for card in cards[:2]] == ["0-1", "2-3"]
        assert "layers 1-9, part 1 of lm_head" in cards[1].text
        styles = "return [...document.querySelectorAll('.device-card')].map((card) =>"
        colours = driver.execute_script(f"{styles} card.style.getPropertyValue('--fill'))")
        assert len(colours) == 32
        assert colours[0] != colours[1]
        shades = driver.execute_script(
            f"{styles} [...card.querySelectorAll('i')].map((cell) =>"
            " parseFloat(cell.style.getPropertyValue('--load'))))"
        )
        loads = driver.execute_script(
            "return page.plan.devices.map((row) => row.compute_s + row.comm_s)"
        )
        every = [shade for card in shades for shade in card]
        assert len(every) == len(loads) == 64
        assert max(every) == 100
        assert every.index(max(every)) == loads.index(max(loads))
        assert min(every) < max(every)
        cards[1].click()
        assert driver.execute_script("return page.selection.current") == {"type": "device", "id": 2}
        button = driver.find_element(By.ID, "overview-grid")
        button.click()
        assert len(driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .lane")) == 32
        assert button.text == "Grid of devices"
        assert (
            not opened("plan", view="overview").find_element(By.ID, "overview-grid").is_displayed()
        )

    def test_boxes_say_what_is_cut_by_letter_and_colour(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        chips = driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .chip")
        assert {chip.text.replace(" ", "") for chip in chips} == {"CR"}
        legend = driver.find_element(By.ID, "overview-legend").text
        assert "mesh axis x" in legend
        assert "rows (input features, then summed)" in legend

    def test_lanes_are_joined_by_an_arrow_with_its_bytes(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        sends = driver.execute_script("return page.overview.sends")
        data = synthetic.report()
        between = [comm for comm in data["comms"] if comm["kind"] == "send"]
        assert sum(send["bytes"] for send in sends) == sum(comm["bytes"] for comm in between)
        arrows = driver.find_elements(By.CSS_SELECTOR, "#overview-canvas .arrow")
        assert len(arrows) == len(sends) > 0

    @pytest.mark.slow
    def test_boxes_of_a_lane_do_not_overlap_and_stay_in_the_canvas(self, opened: Opener) -> None:
        for name in ("plan", "overlapping", "large", "flat"):
            driver = opened(name, view="overview")
            if name == "flat":  # which is a grid at first
                driver.find_element(By.ID, "overview-grid").click()
            places = driver.execute_script(
                "return [...page.overview.places].map(([i, p]) =>"
                " [page.plan.ribbon.boxes[i].lanes, p.x, p.x + p.w])"
            )
            for lane in {lane for own, _, _ in places for lane in own}:
                here = sorted((x, end) for own, x, end in places if lane in own)
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(here)), name

    def test_enter_opens_a_box_and_backspace_closes_it(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        before = len(boxes(driver))
        box = driver.find_element(By.CSS_SELECTOR, "#overview-canvas [data-box='0']")
        box.send_keys(Keys.ENTER)
        assert len(boxes(driver)) == before + 1  # a layer gives way to its two blocks
        ActionChains(driver).send_keys(Keys.BACKSPACE).perform()
        assert len(boxes(driver)) == before

    def test_a_click_selects_the_block_in_all_views(self, opened: Opener) -> None:
        driver = opened("plan", view="overview")
        driver.find_element(By.CSS_SELECTOR, "#overview-canvas [data-box='0']").click()
        assert "layers.0" in details(driver)
        driver.find_element(By.ID, "overview-graph").click()
        assert driver.find_element(By.ID, "panel-graph").is_displayed()

    def test_names_of_the_model_are_text(self, opened: Opener) -> None:
        driver = opened("hostile", view="overview")
        assert boxes(driver)


@needs_chromium
def test_why_not_ranks_spaces_and_operators_with_reasons(opened: Opener) -> None:
    driver = opened("plan", view="why")
    spaces = [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#why-spaces .space")]
    assert spaces[0].startswith("inter")
    assert spaces[0].endswith("chosen")
    assert "device 1 communicates 1.2 ms more" in spaces[1]
    assert "intra (dp=2 tp=2)" in spaces[2]
    assert "\u2265 " in spaces[2]
    assert spaces[3].startswith("hybrid (4 x one device)")
    assert "no plan" in spaces[3]
    rows = driver.find_elements(By.CSS_SELECTOR, "#why-nodes .rows .row")
    assert "the busiest device takes" in rows[0].text
    tab(driver, "overview")
    assert "(chosen)" in driver.find_element(By.ID, "spaces").text
    assert "intra (dp=2 tp=2) (none better)" in driver.find_element(By.ID, "spaces").text


@needs_chromium
def test_the_verdict_comes_first_and_the_licences_last(opened: Opener) -> None:
    driver = opened("plan", view="overview")
    verdict = driver.find_element(By.ID, "verdict")
    assert verdict.text == "3.1 times as fast as one accelerator; limit: arithmetic on device 1"
    assert verdict.location["y"] < driver.find_element(By.ID, "tiles").location["y"]
    assert driver.find_element(By.CSS_SELECTOR, "footer #licences-open").is_displayed()


@needs_chromium
@pytest.mark.parametrize("width", [1440, 1000])
def test_the_head_is_one_line_above_all_views_but_the_first(opened: Opener, width: int) -> None:
    driver = opened("plan", view="overview")
    headless.resize(driver, width, 900)
    header = driver.find_element(By.TAG_NAME, "header")
    whole = header.size["height"]
    verdict = "3.1 times as fast as one accelerator; limit: arithmetic on device 1"
    for view in ("graph", "timeline", "memory", "traffic", "nodes", "why"):
        tab(driver, view)
        assert header.size["height"] < 60
        assert header.text.splitlines() == ["transformer of 4 layers", "Dark", verdict]
    tab(driver, "overview")
    assert header.size["height"] == whole > 150


def click_event(driver: Chrome, view: str, second: float, lane: int) -> None:
    """A click of the mouse on a moment of a lane of a Gantt chart."""
    x, y = driver.execute_script(
        "const view = page[arguments[0]]; const {chart, element} = view;"
        "const at = (row) => chart.convertToPixel({xAxisIndex: 0, yAxisIndex: 0},"
        " [arguments[1], row]);"
        "const {row, top, bottom} = view.band(arguments[2], at(1)[1] - at(0)[1]);"
        "const [x, y] = at(row);"
        "element.scrollIntoView(); const box = element.getBoundingClientRect();"
        "return [Math.round(x + box.x), Math.round(y + (top + bottom) / 2 + box.y)]",
        view,
        second,
        lane,
    )
    actions = ActionChains(driver)
    actions.w3c_actions.pointer_action.move_to_location(x, y)
    actions.click().perform()


@needs_chromium
def test_measured_and_predicted_lanes_are_zoomed_and_clicked(opened: Opener) -> None:
    driver = opened("measured", view="measured")
    lanes = driver.execute_script("return page.measured.line.lanes.map((lane) => lane.length)")
    assert lanes == [201] * 4
    pieces = driver.execute_script("return page.measured.pieces.map((p) => [p.lane, p.many])")
    assert pieces == [[lane, many] for lane in range(4) for many in (1, 200)]
    click_event(driver, "measured", 0.2, 1)
    selected = driver.execute_script("return page.selection.current")
    assert selected == {"type": "node", "id": 2}
    assert driver.execute_script("return [...page.measured.chosen]") == [2]
    click_event(driver, "measured", 0.51, 3)
    first, last = driver.execute_script("return page.measured.span")
    assert 0.45 < first < 0.5 < last < 0.55
    driver.find_element(By.ID, "theme").click()
    zoom = "const [{startValue, endValue}] = page.measured.chart.getOption().dataZoom;"
    assert driver.execute_script(f"{zoom} return [startValue, endValue]") == [first, last]
    driver.find_element(By.ID, "measured-fit").click()
    assert driver.execute_script("return page.measured.span") == [0, 1]


@needs_chromium
def test_a_click_on_the_timeline_selects_what_runs_then(opened: Opener) -> None:
    driver = opened("plan", view="timeline")
    event = driver.execute_script(
        "const {line, pieces} = page.timeline; const alone = pieces.filter(({many}) => many === 1);"
        "const [piece] = alone.sort((a, b) => b.to - b.from - a.to + a.from);"
        "return [(piece.from + piece.to) / 2, piece.lane, line.ref[piece.event]]"
    )
    click_event(driver, "timeline", event[0], event[1])
    assert driver.execute_script("return page.selection.current.id") == event[2]


#: Fill, stroke, height and text of all shapes of the timeline.
SHAPES = """
const shapes = page.timeline.chart.getZr().storage.getDisplayList(true);
return shapes.map(({style, shape}) =>
  [typeof style.fill === "string" ? style.fill : "", style.stroke, shape?.height, style.text]);
"""


@needs_chromium
def test_the_timeline_has_one_row_for_equal_devices(opened: Opener) -> None:
    driver = opened("equal", view="timeline")
    assert driver.execute_script("return page.timeline.line.rows") == [[0, 1], [2, 3]]
    names = driver.execute_script("return page.timeline.names")
    assert [name.split(":")[0] for name in names] == ["0-1", "2-3"]
    # A task of a device that has no row of its own is marked on the row of its equals.
    event = driver.execute_script(
        "const {timelines} = page.plan; const line = timelines[1];"
        "return line.ref.find((ref, at) => ref >= 0 && line.device[at] === 3)"
    )
    select(driver, "node", event)
    marked = "return page.timeline.pieces.filter((p) => page.timeline.chosen.has(page.timeline"
    assert driver.execute_script(f"{marked}.line.ref[p.event])).map((p) => p.lane >> 1)") == [1] * 4


@needs_chromium
def test_unlike_devices_have_a_row_each(opened: Opener) -> None:
    driver = opened("overlapping", view="timeline")
    rows = driver.execute_script("return page.timeline.line.rows")
    assert rows == [[0], [1], [2], [3]]


@needs_chromium
def test_bars_of_the_timeline_have_names_and_communication_is_thin(opened: Opener) -> None:
    driver = opened("plan", view="timeline")
    shapes = driver.execute_script(SHAPES)
    texts = {text for *_, text in shapes if text}
    assert {"layers.0", "layers.1"} <= {text for text in texts if text.startswith("layers.")}
    communication = driver.execute_script(
        "return getComputedStyle(document.documentElement).getPropertyValue('--comm').trim()"
    )
    heights = {fill == communication: set[int]() for fill, *_ in shapes}
    for fill, _, height, _ in shapes:
        heights[fill == communication].add(height or 0)
    assert 0 < max(heights[True]) <= 12
    assert max(heights[False]) > 60


@needs_chromium
def test_the_critical_path_is_one_outline_around_what_follows_each_other(opened: Opener) -> None:
    driver = opened("plan", view="timeline")
    warn = driver.execute_script(
        "return getComputedStyle(document.documentElement).getPropertyValue('--warn').trim()"
    )
    frames = [height for _, stroke, height, _ in driver.execute_script(SHAPES) if stroke == warn]
    critical = driver.execute_script("return page.timeline.line.critical.length")
    assert 0 < len([height for height in frames if height]) < critical / 3


@needs_chromium
def test_the_legend_of_the_timeline_names_what_is_there(opened: Opener) -> None:
    driver = opened("staged", view="timeline")
    legend = driver.find_element(By.ID, "timeline-legend")
    assert "F: forward pass" not in legend.text  # it has no passes
    driver = opened("one", view="timeline")
    assert driver.find_element(By.ID, "timeline-legend").text.splitlines() == [
        "compute, in the colour of its devices",
        "critical path",
    ]


@needs_chromium
def test_the_timeline_of_a_throughput_plan_opens_on_the_stream(opened: Opener) -> None:
    driver = opened("plan", view="timeline")
    assert driver.execute_script("return page.timeline.line.requests") == 4
    assert driver.find_element(By.ID, "timeline-choice").get_attribute("value") == "1"
    lanes = driver.execute_script("return page.timeline.chart.getOption().yAxis[0].data")
    assert lanes[0] == "0: accelerator 0"
    named = driver.execute_script(
        "return page.timeline.chart.getOption().series.find((s) => s.id === 'phases').data"
    )
    assert len(named) == 3  # fill, steady state, drain
    filled = named[0][2]
    assert [named[0][0], named[2][2]] == [
        0,
        driver.execute_script("return page.timeline.line.end_s"),
    ]
    driver = opened("early", view="timeline")
    named = driver.execute_script(
        "return page.timeline.chart.getOption().series.find((s) => s.id === 'phases').data"
    )
    assert named[0][2] > 0.9 * filled  # a little does not fill it
