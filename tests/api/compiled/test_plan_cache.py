"""The cache of plans: what a search found is not searched again, and nothing in it is trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import examples
from partitioner.api import compiler
from partitioner.api.compiled import plan_cache
from partitioner.api.compiled.plan_cache import FROM_CACHE, PlanCache, plans_folder
from partitioner.api.options import open_with
from partitioner.cli.main import main
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.profiles.database import Profile
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.ir.graph import Graph
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request, StageClock, silent
from partitioner.search.ways.table import Table

COMMON: dict[str, Any] = {"cluster": "2xcpu", "time_limit_s": 5.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTITIONER_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each search of `compile`."""
    counted: list[None] = []

    class Counting(Table):
        def best(self) -> Outcome:
            counted.append(None)
            return super().best()

    monkeypatch.setattr(compiler, "Table", Counting)
    return counted


class Net(nn.Module):
    """Two layers, which return their loss in training; with a norm over the batch if asked for."""

    def __init__(self, *, loss: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return (y**2).mean() if self.loss else y


def mlp(hidden: int = 32) -> onnx.ModelProto:
    return examples.build("mlp", layers=3, hidden=hidden, batch=8)


def of_onnx(**options: Any) -> partitioner.Compiled:
    program: partitioner.Compiled = partitioner.compile(mlp(), None, **{**COMMON, **options})
    return program


def inference(**options: Any) -> partitioner.Compiled:
    return partitioner.compile(Net(), torch.ones(8, 16), **{**COMMON, **options})


def training(**options: Any) -> partitioner.Compiled:
    module = Net(loss=True)
    return partitioner.compile(module, torch.ones(8, 16), training=True, **{**COMMON, **options})


@pytest.mark.parametrize("made", [of_onnx, inference, training])
def test_a_second_compilation_takes_the_plan_without_a_search(
    made: Callable[..., partitioner.Compiled], folder: Path, searches: list[None]
) -> None:
    first = made()
    (entry,) = folder.iterdir()
    text = entry.read_bytes()
    second = made()
    assert len(searches) == 1
    assert second.plan.to_json() == first.plan.to_json()
    assert second.plan.certificate == first.plan.certificate
    assert FROM_CACHE in second.summary["notes"]
    assert FROM_CACHE not in first.summary["notes"]
    assert second.summary["proof"] == first.summary["proof"]
    assert second.evaluation.step_s == first.evaluation.step_s
    assert second.search_s is None
    assert second.verify()
    assert [one.read_bytes() for one in folder.iterdir()] == [text]
    assert "searched" in second.summary
    assert str(second).count(FROM_CACHE) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "2xl4"},
        {"cluster": "4xcpu"},
        {"memory": "1GiB"},
        {"objective": "latency"},
        {"gap": 0.2},
        {"seed": 1},
        {"time_limit_s": 6.0},
        {"strategy": "inter"},
        {"mesh": {"dp": 2}},
        {"constraints": {"pin": [{"nodes": ["layer0.*"], "device": 0}]}},
    ],
    ids=str,
)
def test_another_request_or_cluster_is_searched(
    change: dict[str, Any], folder: Path, searches: list[None]
) -> None:
    of_onnx()
    of_onnx(**change)
    assert (len(searches), len(list(folder.iterdir()))) == (2, 2)
    of_onnx(**change)
    assert len(searches) == 2


def test_another_model_is_searched(folder: Path, searches: list[None]) -> None:
    of_onnx()
    partitioner.compile(mlp(64), None, **COMMON)
    inference()
    training()
    assert (len(searches), len(list(folder.iterdir()))) == (4, 4)


def test_what_is_no_part_of_the_digest_is_another_entry(folder: Path, searches: list[None]) -> None:
    images = torch.ones(2, 4, 8, 8)
    programs = [
        partitioner.compile(nn.Conv2d(4, 4, 3), example, **COMMON)
        for example in (images, images.to(memory_format=torch.channels_last))
    ]
    assert programs[0].graph.digest == programs[1].graph.digest
    assert (len(searches), len(list(folder.iterdir()))) == (2, 2)


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(entry: Path) -> None:
        data = json.loads(entry.read_text())
        change(data)
        entry.write_text(json.dumps(data))

    return edit


def _as_folder(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def _as_fifo(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def _as_device(entry: Path) -> None:
    entry.unlink()
    entry.symlink_to("/dev/zero")


def _first_node(data: dict[str, Any]) -> dict[str, Any]:
    nodes = data["plan"]["nodes"]
    return nodes[next(iter(nodes))]  # type: ignore[no-any-return]


FAULTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda entry: entry.write_text(""),
    "no text": lambda entry: entry.write_bytes(b"\xff\xfe\x00"),
    "half": lambda entry: entry.write_bytes(entry.read_bytes()[:-200]),
    "a list": lambda entry: entry.write_text("[]"),
    "nothing": lambda entry: entry.write_text("{}"),
    "deep": lambda entry: entry.write_text("[" * 200_000),
    "a folder": _as_folder,
    "a FIFO": _as_fifo,
    "a device": _as_device,
    "no plan": _edited(lambda data: data.update(plan=None)),
    "no summary": _edited(lambda data: data.update(summary=[])),
    "a summary without notes": _edited(lambda data: data["summary"].pop("notes")),
    "no certificate": _edited(lambda data: data["plan"].update(certificate=None)),
    "another cost": _edited(lambda data: data["plan"]["certificate"].update(cost=1e-9)),
    "another objective": _edited(
        lambda data: data["plan"]["certificate"].update(objective="memory")
    ),
    "another graph": _edited(lambda data: data["plan"].update(graph_digest="0" * 64)),
    "another cluster": _edited(lambda data: data["plan"]["cluster"].update(name="mine")),
    "fewer nodes": _edited(lambda data: data["plan"]["nodes"].popitem()),
    "a group that is none": _edited(lambda data: _first_node(data).update(group=9)),
    "a cut that is none": _edited(lambda data: _first_node(data).update(cuts={"q": "x"})),
    "a device that is none": _edited(
        lambda data: (
            data["plan"]["groups"].append({"axes": {}, "devices": [7]})
            or _first_node(data).update(group=len(data["plan"]["groups"]) - 1)
        )
    ),
    "micro-batches": _edited(
        lambda data: data["plan"].update(pipeline={"schedule": "forward", "micro_batches": 3})
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_entry_that_is_wrong_ends_in_a_search(
    fault: Callable[[Path], object], folder: Path, searches: list[None]
) -> None:
    first = of_onnx()
    (entry,) = folder.iterdir()
    fault(entry)
    said: list[str] = []
    second = of_onnx(progress=said.append)
    assert len(searches) == 2
    assert second.plan == first.plan
    (told,) = (line for line in said if line.startswith("searching anew: "))
    assert "\n" not in told
    if entry.is_file():  # it was replaced; what is no file stays where it is
        of_onnx()
        assert len(searches) == 2


def test_micro_batches_that_are_not_proven_are_not_taken(
    folder: Path, searches: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a batch have means of their own, which nobody asked for."""
    module, x = Net(loss=True, norm=True), torch.randn(8, 16)

    def made(**options: Any) -> partitioner.Compiled:
        return partitioner.compile(module, x, training=True, **{**COMMON, **options})

    whole = made()
    (entry,) = folder.iterdir()
    monkeypatch.setenv("PARTITIONER_CACHE", str(tmp_path / "parts"))
    in_parts = made(micro_batches=2)
    assert in_parts.plan.micro_batches == 2
    (parts,) = (tmp_path / "parts").iterdir()
    entry.write_bytes(parts.read_bytes())
    monkeypatch.setenv("PARTITIONER_CACHE", str(folder))
    assert made().plan.micro_batches == whole.plan.micro_batches != 2
    assert len(searches) == 3


def test_nothing_is_kept_where_nobody_wants_it(
    folder: Path, searches: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_onnx(cache=False)
    monkeypatch.setenv("PARTITIONER_CACHE", "off")
    assert plans_folder() is None
    of_onnx()
    assert len(searches) == 2
    assert not folder.exists()


def test_plans_lie_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTITIONER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plans_folder() == tmp_path / "partitioner" / "plans"


def test_a_link_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    of_onnx()
    (entry,) = folder.iterdir()
    other = tmp_path / "other.json"
    other.write_text("mine")
    entry.unlink()
    entry.symlink_to(other)
    of_onnx()
    assert other.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told(folder: Path) -> None:
    folder.write_text("a file")
    said: list[str] = []
    assert of_onnx(progress=said.append).verify()
    assert any(line.startswith("the plan is not kept in the cache: ") for line in said)
    assert folder.read_text() == "a file"


def test_the_plan_of_runs_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "check_tunable", lambda *_args, **_more: None)
    monkeypatch.setattr(compiler, "tuned", lambda outcome, *_: outcome)
    of_onnx(tune=2)
    assert not folder.exists()


def _entry(folder: Path, cluster: partitioner.Cluster) -> PlanCache:
    clock, request = StageClock(silent), Request()
    opened = open_with(mlp(), None, {})
    return PlanCache(
        compiler.graphs_of(opened, cluster, request, clock), cluster, request, clock, folder
    )


def test_other_measurements_are_another_entry(tmp_path: Path) -> None:
    plain = resolve_cluster("2xcpu")
    link = LinkEntry("send", 2, 1024, 1e-3, 0.0, 3, "gloo", "2026-11-30T00:00:00+00:00")

    def measured(*links: LinkEntry) -> Path:
        profile = Profile(tmp_path / "p", "a", 1, 2, {}, {("send", 2): links})
        spec = replace(plain.devices[0], profile=profile)
        return _entry(tmp_path, replace(plain, devices=(spec,) * 2)).file

    files = [measured(), measured(link), measured(replace(link, seconds=2e-3))]
    assert len({*files, _entry(tmp_path, plain).file}) == 4
    assert measured(link) == files[1]


def test_an_entry_of_another_source_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _entry(tmp_path, resolve_cluster("2xcpu"))
    file = cache.file
    monkeypatch.setattr(plan_cache, "_source", lambda: "another version")
    assert cache.file != file


def test_processes_write_and_read_at_once(folder: Path) -> None:
    first = of_onnx()
    (entry,) = folder.iterdir()
    caches = [_entry(folder, first.cluster) for _ in range(4)]
    summary = {key: value for key, value in first.summary.items() if key != "proof"}

    def turn(cache: PlanCache) -> Graph | None:
        cache.write(first.plan, summary)
        known = cache.read()
        return None if known is None else known[0].graph

    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(turn, caches * 5))
    assert all(graph is not None and graph.digest == first.graph.digest for graph in graphs)
    assert {path.suffix for path in folder.iterdir()} == {".json"}  # no draft is left
    assert entry.exists()


def test_what_was_not_used_for_longest_goes(
    folder: Path, searches: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_onnx(seed=1)
    (entry,) = folder.iterdir()
    of_onnx(seed=2)
    for number, path in enumerate(sorted(folder.iterdir(), key=entry.__eq__)):
        os.utime(path, (number, number))
    monkeypatch.setattr(plan_cache, "MOST_BYTES", int(2.5 * entry.stat().st_size))
    of_onnx(seed=1)  # now the other one was not used for longest
    of_onnx(seed=3)
    assert len(list(folder.iterdir())) == 2
    of_onnx(seed=1)
    assert len(searches) == 3
    monkeypatch.setattr(plan_cache, "MOST_ENTRY", 10)
    of_onnx(seed=4)
    assert len(list(folder.iterdir())) == 2


def test_files_of_others_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the environment names may be any."""
    folder.mkdir()
    others = [folder / "data.json", folder / "notes"]
    for other in others:
        other.write_text("of the user")
        os.utime(other, (0, 0))
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 10)
    of_onnx()
    assert sorted(folder.iterdir()) == others


def test_the_command_takes_the_plan_of_another_process(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(mlp(), model)
    pins = tmp_path / "pins.toml"
    pins.write_text('[[pin]]\nnodes = ["layer0.*", "y"]\ndevices = [0, 1]\n')
    args = ["plan", str(model), "--cluster", "2xcpu", "--constraints", str(pins)]
    output = ["-o", str(tmp_path / "p"), "--force", "--time-limit", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "partitioner", *args, *output],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert FROM_CACHE not in done.stdout
    (entry,) = folder.iterdir()
    assert main([*args, *output]) == 0
    assert FROM_CACHE in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "p")]) == 0
    assert main([*args, *output, "--no-cache"]) == 0
    assert FROM_CACHE not in capsys.readouterr().out
    assert list(folder.iterdir()) == [entry]
