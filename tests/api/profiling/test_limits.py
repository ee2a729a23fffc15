"""A time limit is kept: what does not fit is left out, and said."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from partitioner.api.profiling import links
from partitioner.api.profiling.links import LinkGroup, Wanted, link_groups, unknown_links, wanted_of
from partitioner.api.profiling.measure import timed_runs
from partitioner.api.profiling.profile import _in_turns, _profile_of, _Session
from partitioner.api.profiling.profiled import Profiled
from partitioner.api.profiling.rank import Work, _prepared
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.profiles.database import Profile, in_groups, write_entries
from partitioner.cost_model.profiles.entries import LinkEntry

PAIR = LinkGroup("", 1, (0, 1))
MIB = 2**20


class Clock:
    """A clock that programs set forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds

        return run


def test_programs_whose_fewest_runs_do_not_fit_are_left_out() -> None:
    """The first turn takes 6 s, and four more runs of the first two programs 12 s."""
    clock = Clock()
    programs = [clock.takes(seconds) for seconds in (1.0, 2.0, 3.0)]
    counts = [len(runs) for runs in timed_runs(programs, clock, end_s=20.0)]
    assert counts == [5, 5, 0]
    assert clock.now == pytest.approx(18.0)


def test_the_first_program_is_measured_even_if_it_is_late() -> None:
    clock = Clock()
    programs = [clock.takes(4.0), clock.takes(4.0)]
    first, second = timed_runs(programs, clock, end_s=2.0)
    assert (len(first), second) == (5, [])
    assert clock.now == pytest.approx(20.0), "the second one was not run at all"


def test_all_processes_leave_out_what_does_not_fit_one_of_them() -> None:
    clock = Clock()
    wishes: list[Sequence[bool]] = []

    def anyone(mine: Sequence[bool]) -> Sequence[bool]:
        wishes.append(mine)
        return [False, True] if len(wishes) == 1 else mine

    first, second = timed_runs([clock.takes(0.1)] * 2, clock, anyone=anyone)
    assert wishes[0] == [False, False]
    assert len(first) > 0
    assert second == []


def test_nothing_is_prepared_behind_the_end() -> None:
    work = Work("none", Path("p.sqlite"), "core", 1, [], end_s=0.0)
    item: Any = object()
    assert _prepared(work, None, [item], {}, list) == []  # type: ignore[arg-type]


class Weighted(NamedTuple):
    weight_s: float


def test_yardsticks_are_measured_behind_the_forms_of_half_of_the_seconds() -> None:
    new: list[Any] = [Weighted(seconds) for seconds in (4.0, 3.0, 2.0, 1.0, 0.5)]
    stick: Any = Weighted(0.0)
    order = [one for _, one in _in_turns(None, [stick], None, new)]  # type: ignore[arg-type]
    assert order == [new[0], stick, *new[1:]]
    assert [one for _, one in _in_turns(None, [stick], None, [])] == [stick]  # type: ignore[arg-type]


def test_each_kind_is_wanted_of_each_group_but_messages_of_several_a_group() -> None:
    groups = link_groups((("node", 2), ("network", 4)))
    wanted = wanted_of(groups)
    assert len(set(wanted)) == len(wanted) == len(links.SIZES) * (6 + 6 + 5)
    assert not [one for one in wanted if one[0] == "send" and one[1].each > 1]


def test_what_a_profile_has_from_this_backend_is_not_wanted_again(tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    wanted = wanted_of([PAIR])
    ours, others, *_ = wanted
    for (kind, group, nbytes), backend in ((ours, links.NAME), (others, "gloo, torch 1.0")):
        entry = LinkEntry(in_groups(kind, group.each), 2, nbytes, 1e-3, 0.0, 7, backend, "2026")
        write_entries(file, "core", 1, [entry])
    known = Profile.read(file, "core", 1)
    assert unknown_links([known], [PAIR]) == tuple(one for one in wanted if one != ours)
    far = LinkGroup("network", 1, (0, 1))
    assert len(unknown_links([known], [far])) == len(wanted), "it is of another level"


class Passing:
    """A communication that sets a clock forward when it has its turn."""

    def __init__(self, clock: Clock, turn_s: float) -> None:
        self.clock, self.turn_s, self.turns = clock, turn_s, 0

    def turn(self) -> None:
        self.clock.now += self.turn_s
        self.turns += 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], dict[int, int]]:
    """Turns of all communications of a pair by their bytes, up to an end.

    A communication takes a second a MiB, and no time to begin.
    """
    clock = Clock()
    monkeypatch.setattr(links.time, "perf_counter", clock)
    monkeypatch.setattr(links, "_Products", lambda: None)
    monkeypatch.setattr(links, "_KINDS", ("all_reduce",))
    monkeypatch.setattr(links, "_start_of", lambda *_: None)
    monkeypatch.setattr(links, "_agreed", lambda seconds, *_: seconds)
    monkeypatch.setattr(torch.distributed, "new_group", lambda _: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    begun = lambda _, nbytes, *__: Passing(clock, nbytes / MIB)  # noqa: E731
    monkeypatch.setattr(links._Communication, "begun", begun)

    def measure(end_s: float) -> dict[int, int]:
        monkeypatch.setattr(clock, "now", 0.0)
        stages = links._in_stages(wanted_of([PAIR]))
        wanted: list[Wanted] = [one for stage in stages for one in stage]
        done = {wanted[number][2]: turns for number, turns in links._measured(0, stages, end_s)}
        assert clock.now <= end_s
        return done  # type: ignore[return-value]

    return measure


def test_a_few_sizes_of_communications_come_first(
    measured: Callable[[float], dict[int, int]],
) -> None:
    kib, rough = 1024, {1024, 64 * 1024, 4 * MIB}
    assert measured(0.0) == {}
    assert measured(10.0) == {}, "three turns take 12 s"
    assert measured(20.0) == dict.fromkeys(rough, 4)
    assert measured(28.1) == dict.fromkeys(rough, 6), "the largest would take 48 s more"
    assert measured(70.0).keys() == {*rough, 16 * MIB, MIB, 256 * kib, 16 * kib, 4 * kib}
    assert set(measured(1e3).values()) == {7}


def told(**changes: Any) -> str:
    facts = {"forms": 9, "measured": 4, "seconds": 20.0, "reading_s": 3.0, "limit_s": 20.0}
    where = {"file": Path("p.sqlite"), "device": "core", "machine": "core", "threads": 1}
    return str(Profiled(**{**where, "links": 0, "unknown_links": 0, **facts, **changes}))


def test_one_form_is_no_forms() -> None:
    assert told(forms=1).startswith("1 form of operators: 4 measured now in 20 s, 0 known before")


def test_what_stays_unknown_is_said() -> None:
    assert "note" not in told()
    assert "60 sizes and kinds of communications are not measured; the next run" in told(
        links=36, unknown_links=60
    )
    assert "the whole model in one process is not measured, for lack of time" in told(
        lacks_whole=True
    )
    assert (
        "what the end of a session of ONNX Runtime adds to a communication is not measured"
        in told(lacks_border=True)
    )
    assert "forms with 30 % of the seconds are not measured; the next run" in told(
        unknown_share=0.3, lacks_forms=True
    )


def test_seconds_of_another_machine_are_said() -> None:
    """A cluster file copied from another machine would get the seconds of this one."""
    note = "note: this machine is shore; its seconds now count for core, which the cluster file"
    assert note in told(machine="shore")


def test_a_run_that_measured_nothing_asks_for_more_time() -> None:
    """The next run with the same limit would measure nothing either."""
    lacks = {"lacks_whole": True, "lacks_border": True, "lacks_forms": True, "unknown_share": 1.0}
    lines = told(measured=0, unknown_links=60, **lacks).splitlines()
    notes = [line for line in lines if "note" in line]
    assert len(notes) == 4
    assert all(
        note.endswith("; give a longer --time-limit: this one is too short") for note in notes
    )


def test_forms_that_cannot_be_measured_are_not_promised() -> None:
    lines = told(unknown_share=0.3, failed={"Gizmo": "unknown operator"}).splitlines()
    assert lines[-2:] == [
        "  note: forms with 30 % of the seconds are not measured",
        "  note: Gizmo cannot be measured: unknown operator",
    ]


def test_a_time_limit_that_reading_the_model_uses_up_is_said() -> None:
    assert "was read" not in told(lacks_forms=True), "3 of 20 s leave enough"
    assert "was read" not in told(reading_s=31.5), "nothing is missing"
    for missing in ({"lacks_forms": True}, {"unknown_links": 3}, {"lacks_border": True}):
        note = "the model was read for 31.5 s of the time limit of 20 s: with --time-limit 52 the"
        assert note in " ".join(told(reading_s=31.5, **missing).split())


def test_the_limit_goes_to_the_measurements_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("partitioner.api.profiling.profile")
    ends: list[float] = []

    def together(_: Cluster, end_s: float, __: object) -> tuple[int, int]:
        ends.append(end_s)
        return 12, 4

    monkeypatch.setattr(module, "measure_together", together)
    known = Profile(Path("p.sqlite"), "core", 1, 1, {})
    monkeypatch.setattr(module, "_profile_of", lambda _: known)
    done = module._profiled_links(None, 100.0, 20.0, print)  # type: ignore[arg-type]
    assert ends == [120.0]
    assert (done.links, done.unknown_links) == (12, 4)


def test_links_of_a_level_without_a_profile_are_not_measured(tmp_path: Path) -> None:
    """Plans would not be priced by them."""
    cluster = two_with_a_profile(tmp_path, level="")
    session = _Session(cluster, _profile_of(cluster), "torch", "cpu", lambda _: None)
    assert session.unknown_links() == ()
    assert "names no profile" in session.failed["communication"]
    far = tmp_path / "links.sqlite"
    profile = f'profile = {{ file = "{far}", device = "core", threads = 1 }}'
    cluster = two_with_a_profile(tmp_path, level=profile)
    session = _Session(cluster, _profile_of(cluster), "torch", "cpu", lambda _: None)
    wanted = session.unknown_links()
    assert len(wanted) == len(wanted_of([PAIR]))
    assert not session.failed
    assert session.measure_links(wanted, end_s=0.0) == 0, "no process is started too late"


def two_with_a_profile(folder: Path, level: str) -> Cluster:
    file = folder / "lab.toml"
    file.write_text(
        f"""
[[devices]]
preset = "cpu"
count = 2
profile = {{ file = "{folder / "p.sqlite"}", device = "core", threads = 1 }}
[[levels]]
name = "node"
bandwidth_bytes_per_s = 1e9
latency_s = 1e-6
{level}
"""
    )
    return resolve_cluster(file)


def test_forms_are_measured_before_all_are_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Preparing 20 forms takes as long as there is time: the first quarter of it is for some."""
    module = importlib.import_module("partitioner.api.profiling.profile")
    clock, batches = Clock(), []
    cluster = two_with_a_profile(tmp_path, level="")
    session = _Session(cluster, _profile_of(cluster), "torch", "cpu", lambda _: None)

    def item(_: _Session, __: None, candidate: int) -> int | None:
        clock.now += 5.0
        return candidate or None

    def run(_: _Session, items: Sequence[int], end_s: float) -> None:
        assert clock.now < end_s
        clock.now += 10.0
        batches.append(items)

    monkeypatch.setattr(module.time, "perf_counter", clock)
    monkeypatch.setattr(_Session, "_item", item)
    monkeypatch.setattr(_Session, "_run", run)
    wanted: list[Any] = [(None, number) for number in range(20)]
    session.measure(wanted, end_s=100.0 + module._START_S)
    assert batches == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [11]]
    clock.now = 0.0
    batches.clear()
    session.measure(wanted[:3], end_s=100.0)
    assert batches == [[1, 2]]
    session.measure(wanted[:3], end_s=clock.now)
    assert len(batches) == 1, "no time is left"
