"""One process that has the whole machine, with which a plan for its processes is compared."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import partitioner
from helpers.plans.profiled import write_profile
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.cluster.resolve import local_cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import Profile, whole_entry, write_entries
from partitioner.frontends.model import open_model
from partitioner.frontends.onnx.load import load_onnx
from partitioner.report.verdict import Rival

MODEL = examples.build("mlp", layers=4, hidden=8, batch=4)
OPERATOR_S = 1e-2


def local_profiles(file: Path) -> tuple[Profile, Profile]:
    """The profiles of two processes of this machine, and of one."""
    try:
        known = [local_cluster(count, profile=file).devices[0].profile for count in (2, 1)]
    except CostError as error:
        pytest.skip(str(error))
    two, one = known
    if two is None or one is None:
        pytest.skip("this machine has GPUs")
    return two, one


def compared(file: Path, model: object, *example: object) -> tuple[Compiled, Rival | None, str]:
    """A plan, the one process that it is compared with, and the note where that is not known."""
    result = partitioner.compile(
        model,  # type: ignore[arg-type]
        *example,
        cluster="2xlocal",
        profile=file,
        strategy="inter",
        time_limit_s=5,
    )
    notes = [note for note in result.summary["notes"] if "splitting" in note]
    rivals = [rival for rival in result.rivals if rival.name.startswith("one process with ")]
    known = [rival for rival in rivals if rival.is_known]
    assert len(notes) + len(known) == len(rivals) == 1
    unknown = "; not compared with one process with all cores, which was not measured well enough"
    assert result.verdict().sentence.endswith(unknown) == bool(notes)
    return result, *((known[0], "") if known else (None, notes[0]))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (
            0.5,
            r"Do not split for rate: one process with \d+ threads would serve .*/s, this plan .*/s",
        ),
        (0.95, r"No better than one process with \d+ threads: .*/s against .*/s"),
        (1.05, r"No better than one process with \d+ threads: .*/s against .*/s"),  # within 10 %
        (2.0, r"2 times as fast as one process with \d+ threads: .*/s against .*/s"),
    ],
)
def test_a_plan_of_an_onnx_model_is_compared_with_the_whole_model(
    tmp_path: Path, share: float, expected: str
) -> None:
    """Not with the seconds of its operators one by one, which one session's kernels undercut."""
    file, graph = tmp_path / "profile", load_onnx(MODEL).graph
    for known, processes in zip(local_profiles(file), (2, 1), strict=True):
        of_machine = {"device": known.device, "threads": known.threads}
        write_profile(file, graph, OPERATOR_S, **of_machine, processes=processes)  # type: ignore[arg-type]
    result, _, note = compared(file, MODEL)
    assert re.search(r"not known: `partition profile MODEL --devices 2` measures one process", note)
    whole_s = share / result.summary["throughput_per_s"]
    alone = local_profiles(file)[1]
    entry = whole_entry(graph.digest, whole_s, 0.01, 9, "backend", "2026")
    write_entries(file, alone.device, alone.threads, [entry])
    result, process, _ = compared(file, MODEL)
    assert process is not None
    assert process.cost == whole_s
    assert re.match(expected, replace(result.verdict(), rivals=(process,)).sentence)


@pytest.mark.parametrize("alone_s", [1e-4, 1.0, None])
def test_a_plan_of_a_module_is_compared_with_its_operators_added_up(
    tmp_path: Path, alone_s: float | None
) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    example = (torch.ones(4, 8),)
    file, graph = tmp_path / "profile", open_model(module, example).graph
    for known, seconds, processes in zip(
        local_profiles(file), (OPERATOR_S, alone_s), (2, 1), strict=True
    ):
        if seconds is not None:
            of_machine = {"device": known.device, "threads": known.threads}
            write_profile(file, graph, seconds, **of_machine, processes=processes)  # type: ignore[arg-type]
    _, process, note = compared(file, module, example)
    if alone_s is None:
        assert re.search(r"not known: `partition profile MODEL --devices 1` measures one", note)
    else:
        assert process is not None
        assert process.cost >= 3 * alone_s


def test_a_plan_by_a_datasheet_is_not_compared(tmp_path: Path) -> None:
    """A run that ended early knows the whole model, and no operator."""
    file, alone = tmp_path / "profile", local_profiles(tmp_path / "profile")[1]
    entry = whole_entry(load_onnx(MODEL).graph.digest, 1.0, 0.01, 9, "backend", "2026")
    write_entries(file, alone.device, alone.threads, [entry])
    _, _, note = compared(file, MODEL)
    assert note == (
        "whether splitting pays on this machine is not known: "
        "`partition profile MODEL --devices 2` measures what this plan's 2 processes take"
    )


def test_measurements_of_a_busy_machine_say_nothing(tmp_path: Path) -> None:
    file, graph = tmp_path / "profile", load_onnx(MODEL).graph
    for known, processes in zip(local_profiles(file), (2, 1), strict=True):
        of_machine = {"device": known.device, "threads": known.threads}
        write_profile(file, graph, OPERATOR_S, **of_machine, processes=processes, spread=2.47)  # type: ignore[arg-type]
    _, process, note = compared(file, MODEL)
    assert process is None
    assert "not known: its measurements have an error of ± 247 %; measure again" in note


def test_other_clusters_say_nothing() -> None:
    result = partitioner.compile(MODEL, devices=2, cluster="2xideal", time_limit_s=5)
    assert not [note for note in result.summary["notes"] if "splitting" in note]
    assert not [rival for rival in result.rivals if "process" in rival.name]
