"""Modules trained on two machines: network namespaces with a slow link between them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import two_machines
from helpers.processes.two_machines import ROOT, NotPermittedError, TwoMachines, cluster_of

SCRIPT = ROOT / "tests/jobs/processes/across_machines.py"
LINK_BYTES_PER_S = 25e6  # which makes stages the cheapest plan
#: Ranks end within these seconds; gloo waits for five.
SOON_S = 10
SCHEDULE = {"schedule": "1f1b", "micro_batches": 4}


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    try:
        with two_machines.two_machines(LINK_BYTES_PER_S) as made:
            yield made
    except NotPermittedError as error:
        pytest.skip(f"no network namespaces here: {error}")


def trained(
    machines: TwoMachines, folder: Path, processes: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What rank 0 says of a module that was trained with `processes` on each machine."""
    cluster = folder / "machines.toml"
    cluster.write_text(cluster_of(processes, LINK_BYTES_PER_S))
    arguments = [str(cluster), str(folder / "result.json"), "equals", json.dumps(options)]
    for ended in machines.run(SCRIPT, arguments, processes, folder, limit_s=200):
        assert ended.returncode == 0, ended.stderr[-4000:]
    figures: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return figures


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, SCHEDULE, marks=pytest.mark.slow),
        pytest.param(2, SCHEDULE, marks=pytest.mark.sweep),
        pytest.param(
            2,
            {**SCHEDULE, "parallel": "pp+dp", "mesh": {"pp": 2, "dp": 2}},
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_cut_of_the_pipeline_is_on_the_slow_link(
    machines: TwoMachines, tmp_path: Path, processes: int, options: dict[str, Any]
) -> None:
    figures = trained(machines, tmp_path, processes, options)
    assert figures["kind"] == "pipeline"
    homes = [{device // processes for device in group} for group in figures["groups"]]
    assert homes == sorted(homes, key=min)  # one cut is between the machines
    assert all(len(home) == 1 for home in homes)
    assert set().union(*homes) == {0, 1}
    assert figures["difference"] < 1e-5 < 1e-3 < figures["change"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.sweep)],
)
def test_each_rank_says_whom_it_waits_for_when_the_link_breaks(
    machines: TwoMachines, tmp_path: Path, processes: int
) -> None:
    cluster, file = tmp_path / "machines.toml", tmp_path / "break"
    cluster.write_text(cluster_of(processes, LINK_BYTES_PER_S))
    arguments = [str(cluster), str(file), "breaks", json.dumps(SCHEDULE)]
    ended = machines.run(SCRIPT, arguments, processes, tmp_path, limit_s=150, breaks=file)
    assert all(one.returncode for one in ended)
    for rank in range(2 * processes):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        assert re.match(rf"rank {rank}: .* (from|to|with) ranks? \d.*: .*", said["error"]), said
        assert said["seconds"] < SOON_S
