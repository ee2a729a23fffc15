"""Reports of real plans in headless Chromium: models with hostile names, and a small Llama."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

import partitioner
from helpers.pages import browser as headless
from partitioner import examples
from partitioner.cli.main import main
from partitioner.report.page.data import headline

pytestmark = pytest.mark.skipif(headless.binary() is None, reason="no chromium is installed")

SCRIPT = "</script><script>window.hacked=1</script>"
QUOTES = "\"'><img src=x onerror=window.hacked=2>"
BIDI = "bidi \u202e reversed\nnext line"
LONG = "x" * 10_000
VIEWS = ("overview", "graph", "timeline", "memory", "traffic", "why", "nodes")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    driver = headless.start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


def _hostile() -> onnx.ModelProto:
    """Four MatMuls with hostile names of nodes, tensors, weights and graph."""
    names = [SCRIPT, QUOTES, BIDI, LONG]
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.random((8, 8), dtype=np.float32), f"weight {name}")
        for name in names
    ]
    values = [f"value {name}" for name in ("in", *names)]
    nodes = [
        helper.make_node("MatMul", [values[i], f"weight {name}"], [values[i + 1]], name=name)
        for i, name in enumerate(names)
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8])
        for name in (values[0], values[-1])
    ]
    graph = helper.make_graph(nodes, SCRIPT, ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def _open_all_views(driver: Chrome, page: Path) -> None:
    driver.get("about:blank")
    headless.complaints(driver)
    headless.requests(driver)
    headless.open_page(driver, page)
    for view in VIEWS:
        driver.find_element(By.ID, f"tab-{view}").click()
        panel = driver.find_element(By.ID, f"panel-{view}")
        assert panel.is_displayed()
    assert headless.complaints(driver) == []
    urls = [url for url in headless.requests(driver) if not url.startswith(("data:", "blob:"))]
    assert set(urls) <= {page.as_uri(), "about:blank"}
    assert driver.execute_script("return window.hacked") is None


@pytest.mark.slow
def test_a_measured_run_has_a_view(chromium: Chrome, tmp_path: Path) -> None:
    result = partitioner.compile(_hostile(), devices=2, strategy="intra", cluster="2xideal")
    profiled = result.profile(steps=2)
    page = profiled.result.report(tmp_path / "measured.html")
    _open_all_views(chromium, page)
    chromium.find_element(By.ID, "tab-measured").click()
    assert "One step: predicted" in chromium.find_element(By.ID, "measured-facts").text
    rows = chromium.find_elements(By.CSS_SELECTOR, "#measured-tasks .row.click")
    assert len(rows) == len(profiled.rows)
    rows[0].click()
    assert chromium.execute_script("return page.selection.current.type") in ("node", "comm")
    chromium.find_element(By.ID, "measured-fit").click()
    assert headless.complaints(chromium) == []
    assert chromium.execute_script("return window.hacked") is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["inter", "intra"])
def test_hostile_names_out_of_a_model_are_text(
    chromium: Chrome, tmp_path: Path, strategy: str
) -> None:
    result = partitioner.compile(_hostile(), devices=2, strategy=strategy, cluster="2xideal")
    page = result.report(tmp_path / f"{strategy} <b>.html")
    _open_all_views(chromium, page)
    assert SCRIPT in chromium.find_element(By.ID, "title").text
    box = chromium.find_element(By.ID, "search")
    for name, shown in ((SCRIPT, SCRIPT), (QUOTES, QUOTES), ("reversed", "\\u202e")):
        box.clear()
        box.send_keys(name)
        rows = chromium.find_elements(By.CSS_SELECTOR, "#search-results li")
        # the others are the devices that run it
        (operator,) = (row for row in rows if "device" not in row.text)
        assert shown in operator.text
    assert chromium.execute_script("return document.querySelectorAll('img').length") == 0


def test_hostile_folder_names_of_a_diff(chromium: Chrome, tmp_path: Path) -> None:
    onnx.save(_hostile(), tmp_path / "m.onnx")
    folders = [tmp_path / "<script>window.hacked=3<", tmp_path / "\"onload='x"]
    for folder, strategy in zip(folders, ("inter", "intra"), strict=True):
        options = ["--devices", "2", "--strategy", strategy, "--plan-only", "-q"]
        assert main([str(tmp_path / "m.onnx"), *options, "-o", str(folder)]) == 0
    page = tmp_path / "diff.html"
    assert main(["diff", *map(str, folders), "-o", str(page)]) == 0
    headless.complaints(chromium)
    headless.open_page(chromium, page)
    assert headless.complaints(chromium) == []
    assert "<script>window.hacked=3<" in chromium.find_element(By.TAG_NAME, "header").text
    assert chromium.execute_script("return window.hacked") is None


@pytest.mark.parametrize("cluster", ["4xh100", pytest.param("2x2xh100", marks=pytest.mark.slow)])
def test_a_real_plan(chromium: Chrome, tmp_path: Path, cluster: str) -> None:
    model = examples.build("llama", layers=3)
    result = partitioner.compile(model, cluster=cluster, strategy="auto", time_limit_s=2)
    _open_all_views(chromium, result.report(tmp_path / "report.html"))
    rows = chromium.find_element(By.ID, "nodes-count").text
    assert str(len(result.graph.nodes)) in rows
    chromium.find_element(By.ID, "tab-overview").click()
    limit = chromium.find_element(By.ID, "limit").text
    assert limit.endswith(".")


def test_a_notebook_cell_shows_a_short_card(chromium: Chrome, tmp_path: Path) -> None:
    result = partitioner.compile(examples.build("mlp", layers=2, hidden=16), devices=2)
    named = dataclasses.replace(result, name="<script>window.hacked=1</script>")
    echo = named._repr_html_()
    assert len(echo.encode()) < 20_000
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{echo}", "utf-8")
    headless.complaints(chromium)
    chromium.get(cell.as_uri())
    text = chromium.find_element(By.TAG_NAME, "body").text
    assert "<script>window.hacked=1</script>" in text
    assert headline(result)["verdict"] in text
    assert chromium.execute_script("return window.hacked") is None
    assert headless.complaints(chromium) == []
