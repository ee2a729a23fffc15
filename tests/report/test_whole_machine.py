"""The note that says whether splitting pays on this machine."""

import re
from pathlib import Path

import pytest
from profiled import write_profile

import partitioner
from partitioner import examples
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.resolve import local_cluster
from partitioner.frontends.onnx.load import load_onnx

MODEL = examples.build("mlp", layers=4, hidden=8, batch=4)


@pytest.mark.parametrize(
    ("alone_s", "expected"),
    [
        (1e-4, r"one process with \d+ threads takes .* for what .*: splitting does not pay on"),
        (1.0, r"one process with \d+ threads takes .* for what .*: splitting pays on this"),
        (None, r"not known: `partition profile MODEL --devices 1` measures one process with"),
    ],
)
def test_a_plan_says_whether_splitting_pays(
    tmp_path: Path, alone_s: float | None, expected: str
) -> None:
    file, graph = tmp_path / "profile", load_onnx(MODEL).graph
    try:
        clusters = [local_cluster(count, profile=file) for count in (2, 1)]
    except CostError as error:
        pytest.skip(str(error))
    for cluster, seconds in zip(clusters, (1e-2, alone_s), strict=True):
        known = cluster.devices[0].profile
        if known is None:
            pytest.skip("this machine has GPUs")
        if seconds is not None:
            processes = len(cluster)
            of_machine = {"device": known.device, "threads": known.threads}
            write_profile(file, graph, seconds, **of_machine, processes=processes)  # type: ignore[arg-type]
    result = partitioner.compile(
        MODEL, cluster="2xlocal", profile=file, strategy="inter", time_limit_s=5
    )
    (note,) = [note for note in result.summary["notes"] if "splitting" in note]
    assert re.search(expected, note)


def test_other_clusters_say_nothing() -> None:
    result = partitioner.compile(MODEL, devices=2, cluster="2xideal", time_limit_s=5)
    assert not [note for note in result.summary["notes"] if "splitting" in note]
