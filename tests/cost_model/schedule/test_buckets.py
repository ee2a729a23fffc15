"""Small collectives that travel together: as many as their windows allow, counted as they run."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import partitioner
from helpers.modules.small_gpt import small_gpt
from helpers.modules.staged_models import Plain, seeded
from helpers.op_rows.placements import placement
from helpers.plans.staged import staged
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.graphs.comms import COLLECTIVES
from partitioner.backends.torch.graphs.notes import COMM
from partitioner.cost_model.memory.lifetimes import exact_lifetimes
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.prices.collectives import collective, comm_cost
from partitioner.cost_model.prices.reshard import Resharder, beside_compute, most_joined
from partitioner.cost_model.schedule import buckets
from partitioner.cost_model.schedule.buckets import (
    Bucket,
    Member,
    in_buckets,
    together,
    unlike_parts,
)
from partitioner.cost_model.schedule.task_list import schedule as schedule_of
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.exchange import exchange
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import resolve
from partitioner.ir.program import BUCKET_BYTES, Comm, CommKind

WINDOWS = st.lists(
    st.tuples(st.integers(-1, 8), st.integers(1, 4), st.integers(1, 40)), max_size=7
).map(
    lambda drawn: [
        Member(at, ready, ready + length, size * BUCKET_BYTES // 100)
        for at, (ready, length, size) in enumerate(drawn)
    ]
)


def share_a_point(members: Sequence[Member]) -> bool:
    return max(member.ready for member in members) < min(member.due for member in members)


@given(WINDOWS)
def test_members_of_a_bucket_travel_at_one_time_and_fit(members: list[Member]) -> None:
    found = together(members)
    taken = [member for bucket in found for member in bucket]
    assert len(taken) == len(set(taken))
    for bucket in found:
        assert len(bucket) > 1
        assert share_a_point(bucket)
        assert sum(member.nbytes for member in bucket) <= BUCKET_BYTES


def fewest(members: Sequence[Member]) -> int:
    """The least number of groups whose members share a point, by trying all."""
    if not members:
        return 0
    first, *rest = members
    least = len(members)
    for picked in range(2 ** len(rest)):
        group = [first, *(m for i, m in enumerate(rest) if picked >> i & 1)]
        if share_a_point(group):
            least = min(least, 1 + fewest([m for m in rest if m not in group]))
    return least


@given(WINDOWS)
def test_there_are_as_few_as_can_be_where_all_fit(members: list[Member]) -> None:
    small = [Member(m.position, m.ready, m.due, 1) for m in members]
    found = together(small)
    assert len(found) + len(small) - sum(map(len, found)) == fewest(small)


@cache
def gpt(parallel: str, devices: int = 2) -> ModuleProgram:
    """The batch of 8 is cut unevenly over 3 and 5 devices; 4 are 2 x 2, and 6 are 2 x 3."""
    model, batch = small_gpt()
    program = partitioner.compile(
        *(model, batch, devices),
        training=True,
        parallel=parallel,
        mesh={"dp": 2, "tp": devices // 2} if "+" in parallel else None,
        time_limit_s=10,
    )
    assert isinstance(program, ModuleProgram)
    return program


def starts(program: ModuleProgram, rank: int, which: str) -> list[tuple[Comm, ...]]:
    """The collectives of a rank's pass as they start, those of a bucket at once."""
    nodes = program.rank(rank, which).graph.nodes
    return [node.meta[COMM] for node in nodes if node.target in COLLECTIVES and COMM in node.meta]


def assert_none_waits_for_ever(program: ModuleProgram, which: str) -> None:
    """There is one order of all collectives that every rank keeps to."""
    behind: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for rank in range(len(program.programs.ranks)):
        order = [tuple(comm.seq for comm in comms) for comms in starts(program, rank, which)]
        for one, then in itertools.pairwise(order):
            behind[then].add(one)
    assert list(TopologicalSorter(behind).static_order()) or not behind


def assert_joins_as_scheduled(program: ModuleProgram) -> None:
    """Every rank joins what the schedule joins, at one place, and the numbers are right."""
    for rank, own in enumerate(program.programs.ranks):
        planned: dict[int, list[int]] = {}
        for comm in own.comms:
            if comm.bucket is not None:
                planned.setdefault(comm.bucket, []).append(comm.seq)
        assert planned
        joined = [
            [comm.seq for comm in comms]
            for which in ("forward", "backward")
            for comms in starts(program, rank, which)
            if len(comms) > 1
        ]
        assert sorted(joined) == sorted(planned.values())
    for which in ("forward", "backward"):
        assert_none_waits_for_ever(program, which)
    assert program.verify()


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "devices"), [("dp", 2), ("zero3", 2), ("dp+tp", 6)])
def test_ranks_join_what_the_schedule_joins(parallel: str, devices: int) -> None:
    assert_joins_as_scheduled(gpt(parallel, devices))


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "devices"), [("dp", 3), ("zero3", 3), ("dp", 5)])
def test_ranks_join_beside_parts_of_unequal_sizes(parallel: str, devices: int) -> None:
    program = gpt(parallel, devices)
    dims = {
        dim
        for task in program.run_schedule.tasks
        if task.comm is not None
        for _, (_, at) in task.reads
        for dim in at.sharding.dims
    }
    assert not all(dim.is_equal for dim in dims)
    assert_joins_as_scheduled(program)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "devices"), [("tp", 2), ("dp+tp", 4), ("zero3+tp", 4)])
def test_ranks_join_where_some_hold_zeros(parallel: str, devices: int) -> None:
    """In place of a bias, which the others wait for."""
    program = gpt(parallel, devices)
    assert program.run_schedule.zeros
    assert_joins_as_scheduled(program)


def moved(value: str, kind: CommKind, before: Placement, after: Placement) -> Task:
    """A communication in which each of two ranks sends the other as much."""
    transfers = () if kind is CommKind.ALL_REDUCE else exchange(before, after)
    comm = Comm(0, kind, (0, 1), value, value, "float32", transfers, "" if transfers else "sum")
    reads = tuple((rank, (value, before)) for rank in (0, 1))
    writes = tuple((rank, (value, after), 32) for rank in (0, 1))
    return Task(f"{kind} {value}", {0: 1e-3, 1: 1e-3}, reads, writes, comm=comm)


def test_what_some_ranks_wait_for_earlier_is_sent_alone() -> None:
    """A rank that has waited for an operand already would start its bucket before the others."""
    line = DeviceMesh.line(2, "tp")
    whole, cut = DimLayout.whole(8), DimLayout.even(8, ("tp",), line)
    in_parts, everywhere = placement(line, cut), placement(line, whole)
    of_one = placement(line, whole, partial=(("tp", "sum"),))
    gathers = [moved(name, CommKind.ALL_GATHER, in_parts, everywhere) for name in "abc"]
    sums = [moved(name, CommKind.ALL_REDUCE, everywhere, of_one) for name in "abc"]
    other_name = ((0, ("other", everywhere)), (0, ("a", everywhere)))
    alias = Task("alias a", {}, (other_name[1],), (), aliases=(other_name,))

    def positions(tasks: Sequence[Task]) -> list[list[int]]:
        _, joined = in_buckets(tasks, unlike_parts(tasks), frozenset())
        return [[member.position for member in bucket.members] for bucket in joined]

    assert positions([*gathers, *sums]) == [[0, 1, 2], [3, 4, 5]]
    assert positions([*gathers, alias, *sums]) == [[0, 1, 2], [5, 6]]


class Mean(nn.Module):
    """The mean square of what a net gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def passes_beside(bucket: Bucket, tasks: Sequence[Task]) -> bool:
    """Whether no node waits for it at once, as one does for the two sums of a loss."""
    return any(tasks[member.position].may_share for member in bucket.members)


def whole_s(task: Task) -> float:
    """Seconds on each device; all have as many."""
    device = min(task.devices)
    return task.devices[device] + task.hidden.get(device, 0.0)


@pytest.mark.parametrize(
    ("parallel", "devices"),
    [("dp", 2), ("zero3", 2), pytest.param("dp+tp", 6, marks=pytest.mark.slow)],
)
def test_collectives_take_what_their_bucket_takes(
    parallel: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members of a bucket share one start-up; those without one pay their own."""
    program = gpt(parallel, devices)
    cluster, placed = program.cluster, resolve(program.graph, program.plan)
    spec, joined = cluster.devices[0], schedule_of(program.graph, placed, cluster)
    beside = [b for b in joined.buckets if passes_beside(b, joined.tasks)]
    assert beside
    for bucket in beside:
        at = [m for m in bucket.members if joined.tasks[m.position].may_share]
        tasks = [joined.tasks[member.position] for member in at]
        assert len(tasks) == len(bucket.members)
        assert tasks[0].comm is not None
        ranks, gathers = tasks[0].comm.ranks, bucket.kind is CommKind.ALL_GATHER
        sent = sum(member.nbytes for member in at)
        nbytes = sent * (len(ranks) if gathers else 1)
        best = collective(bucket.kind, ranks, nbytes, cluster)
        copied = sent + (nbytes if gathers else 0)
        expected_s = best.start_s(spec) + best.seconds + 2 * copied / spec.memory_bytes_per_s
        assert sum(map(whole_s, tasks)) == pytest.approx(expected_s)
        assert sent <= most_joined(program.graph)[bucket.kind]
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    apart = schedule_of(program.graph, placed, cluster)
    assert not apart.buckets
    alone = [task for task in apart.tasks if task.may_share]
    for task in alone:
        assert task.comm is not None
        numel = max(size for *_, size in task.writes) // 4
        alone_s = comm_cost(task.comm, numel, cluster).seconds[min(task.devices)]
        assert whole_s(task) == pytest.approx(alone_s)
    together_s = sum(whole_s(task) for task in joined.tasks if task.may_share)
    assert together_s < sum(map(whole_s, alone))


@cache
def normed() -> ModuleProgram:
    """Layers with norms, which wait for sums over the batch."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32)))
    )
    program = partitioner.compile(
        Mean(net), torch.randn(4, 32, 12, 12), devices=2, training=True, parallel="dp"
    )
    assert isinstance(program, ModuleProgram)
    return program


def test_gradients_do_not_travel_with_sums_that_a_norm_waits_for() -> None:
    """It would wait for their bytes, and they would leave in many small messages."""
    program = normed()
    tasks, most = program.schedule.tasks, 0
    for bucket in program.schedule.buckets:
        assert len({member.due < bucket.end for member in bucket.members}) == 1
        most = max(most, sum(tasks[member.position].may_share for member in bucket.members))
    assert most == 16, "weight and bias of 8 layers"
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.cost <= certificate.bound * 1.002


def test_members_that_are_waited_for_pay_for_themselves() -> None:
    """A loss waits for its sums: others that travel with them add bytes, and no start-up."""
    program = normed()
    cluster, tasks = program.cluster, program.schedule.tasks
    spec, mixed = cluster.devices[0], 0
    for bucket in program.schedule.buckets:
        members = [tasks[member.position] for member in bucket.members]
        paying = [task for task in members if not task.may_share]
        sharing = [task for task in members if task.may_share]
        if not paying or not sharing:
            continue
        mixed += 1
        assert sharing[0].comm is not None
        best = collective(bucket.kind, sharing[0].comm.ranks, bucket.nbytes, cluster)
        shared = sum(m.nbytes for m in bucket.members if tasks[m.position].may_share)
        message_s = best.start_s(spec) + best.seconds + 2 * shared / spec.memory_bytes_per_s
        assert sum(map(whole_s, members)) >= message_s * (1 - 1e-9)
        assert sum(map(whole_s, sharing)) < message_s
        assert not any(task.hidden for task in members)
    assert mixed


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_no_plan_costs_less_than_its_search_thinks(parallel: str) -> None:
    """A search prices a collective by the cheapest bucket that there may be."""
    program = gpt(parallel)
    placed = resolve(program.graph, program.plan)
    most = most_joined(program.graph)
    assert most[CommKind.ALL_REDUCE] < most[CommKind.ALL_GATHER] <= BUCKET_BYTES
    beside, resharder = beside_compute(program.graph), Resharder(program.cluster, most)
    homes = {value: at for one in placed for value, at in one.results()}
    least_s = sum(
        priced.whole_seconds(beside=True)[0]
        for one in placed
        for value, at in one.operands()
        if value in beside and value in homes
        for hop in resharder.hops(program.graph.types[value].dtype, homes[value], at)
        for priced in hop.comms
    )
    really_s = sum(
        whole_s(task)
        for task in program.schedule.tasks
        if task.comm is not None and task.reads[0][1][0] in beside
    )
    assert 0 < least_s <= really_s * (1 + 1e-9)
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.bound <= certificate.cost


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_the_tensors_of_a_bucket_are_held_together(
    parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums take the place of their operands; gathered parts are copied where they are read."""
    schedule = gpt(parallel).schedule
    lives = [life for life in exact_lifetimes(schedule) if life.device == 0 and life.buffer]
    kinds = {b.kind for b in schedule.buckets if passes_beside(b, schedule.tasks)}
    split = {CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER}
    assert kinds == ({CommKind.ALL_REDUCE} if parallel == "dp" else split)
    for bucket in schedule.buckets:
        results = sum(
            size
            for member in bucket.members
            for device, _, size in schedule.tasks[member.position].writes
            if device == 0
        )
        begun = [life for life in lives if life.first == bucket.begins]
        assert [life for life in begun if life.nbytes == results]
        (whole,) = (life for life in begun if life.nbytes == results)
        assert whole.last >= min(bucket.arrives, len(schedule.tasks) - 1)
        if bucket.kind is not CommKind.ALL_REDUCE:
            assert [life for life in begun if life.nbytes == bucket.nbytes]
        if bucket.kind is CommKind.ALL_GATHER:
            dues = [member.due for member in bucket.members]
            assert whole.last == max(dues)
            assert sum(life.first in dues for life in lives) >= len(dues)
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    assert not gpt.__wrapped__(parallel).schedule.buckets


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_in_micro_batches_a_bucket_is_held_in_its_phase_and_sums_throughout(parallel: str) -> None:
    schedule = staged(seeded(Plain), Plain.batch(0), [(0, 1)], parallel=parallel).schedule
    assert schedule.buckets
    phases = [task.phase for task in schedule.tasks]
    exact = [life for life in exact_lifetimes(schedule) if life.device == 0]
    for bucket in schedule.buckets:
        assert phases[bucket.begins] == phases[bucket.end - 1]
        results = sum(
            size
            for member in bucket.members
            for device, _, size in schedule.tasks[member.position].writes
            if device == 0
        )
        begun = [life for life in exact if life.buffer and life.first == bucket.begins]
        assert [life for life in begun if life.nbytes == results]
        if bucket.kind is not CommKind.ALL_REDUCE:
            (sent,) = (life for life in begun if life.nbytes == bucket.nbytes)
            assert sent.last < bucket.end
    lives = StepLives.of(schedule, exact)
    nodes = [task.placed for task in schedule.tasks if task.placed is not None]
    gradients = [placed for placed in nodes if placed.node.attrs.get("role") == "gradient"]
    operands = [placed.operands()[0] for placed in gradients]
    sums = int(lives.nbytes[lives.always].sum())
    assert sums >= sum(at.local_bytes("float32")[0] for _, at in operands) > 0
