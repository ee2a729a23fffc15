"""Communications between processes: of this machine, and of two machines with a slow link."""

from pathlib import Path

import onnx
import pytest

from helpers.processes import two_machines
from helpers.processes.two_machines import ROOT, NotPermittedError, cluster_of
from partitioner import examples
from partitioner.api.profiling.links import LinkGroup, added_seconds, link_groups
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.prices.collectives import collective
from partitioner.cost_model.profiles.database import Profile
from partitioner.ir.program import CommKind

LINK_BYTES_PER_S = 25e6
PROFILE = 'profile = {{ file = "{file}", device = "core", threads = 1 }}\n'


def test_groups_are_those_that_the_runtime_forms() -> None:
    assert link_groups((("all", 1),)) == ()
    assert [group.ranks for group in link_groups((("all", 3),))] == [(0, 1), (0, 1, 2)]
    groups = link_groups((("node", 3), ("network", 9)))
    assert [group for group in groups if not group.level] == [
        LinkGroup("", 1, (0, 1)),
        LinkGroup("", 1, (0, 1, 2)),
    ]
    assert [(group.each, group.ranks) for group in groups if group.level == "network"] == [
        (1, (0, 3)),
        (2, (0, 1, 3, 4)),
        (3, (0, 1, 2, 3, 4, 5)),
        (1, (0, 3, 6)),
        (2, (0, 1, 3, 4, 6, 7)),
        (3, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    ]


def test_a_rank_that_is_slow_with_and_without_adds_nothing() -> None:
    """The first rank is slow in the first turn, the second one in the second turn."""
    group = LinkGroup("", 1, (0, 1))
    first = 0, [[9.0, 1.0], [10.0, 2.0], [9.5, 1.5]]
    second = 0, [[1.0, 5.0], [10.0, 7.0], [9.5, 4.0]]
    added = added_seconds([("all_reduce", group, 1024)], [[first], [second]])
    assert added["all_reduce", group, 1024, False] == [1.0, 2.0]
    assert added["all_reduce", group, 1024, True] == [0.5, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_machines_measure_groups_of_both_levels(tmp_path: Path) -> None:
    """Two processes on each of two machines: what crosses the slow link takes longer."""
    cluster, model, file = tmp_path / "lab.toml", tmp_path / "m.onnx", tmp_path / "p.sqlite"
    profile = PROFILE.format(file=file)
    text = cluster_of(2, LINK_BYTES_PER_S).replace("latency_s", f"{profile}latency_s")
    text = text.replace("peak_flops_per_s", f"{profile}peak_flops_per_s")
    cluster.write_text(text)
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=6), model)
    arguments = [str(model), "--cluster", str(cluster)]
    script = ROOT / "tests/jobs/processes/far_links.py"
    try:
        with two_machines.two_machines(LINK_BYTES_PER_S) as machines:
            ended = machines.run(script, arguments, 2, tmp_path, limit_s=200)
    except NotPermittedError as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr[-4000:]
    assert f"{2 * 2 * (3 * 6 - 1)} sizes and kinds measured now" in ended[0].stdout
    assert not ended[1].stdout
    near, far = Profile.read(file, "core", 1), Profile.read(file, "core", 1, level="link")
    assert {ranks for _, ranks in near.links} == {2}
    assert {ranks for kind, ranks in far.links if "of 2 a group" in kind} == {4}
    measured = resolve_cluster(cluster)
    seconds = {
        ranks: collective(CommKind.ALL_REDUCE, ranks, 2**18, measured)
        for ranks in ((0, 1), (0, 2), (0, 1, 2, 3))
    }
    assert {one.name for one in seconds.values()} == {"measured"}
    assert seconds[0, 1].seconds < seconds[0, 2].seconds
    assert seconds[0, 1].seconds < seconds[0, 1, 2, 3].seconds
