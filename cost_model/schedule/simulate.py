"""The timeline of a schedule, for one request or several.

Every device runs its share of the tasks in the schedule's order. Each device of a node starts when
it is free. A communication whose sources and targets are disjoint is one-way: a source starts when
it is free and does not wait for the targets; a target ends when the last source does, but at the
earliest its own seconds after it was free. Any other communication starts when its last device is
free.

With several requests in flight, round t runs for request t - p what is p moves between groups from
the inputs (`Task.hops`), in task order: the order in which the runtime interleaves them. A plan
with stages runs the phases of its step in the order of its schedule instead: a phase begins when
what other phases send for it has arrived; what it sends leaves at its end, beside what follows but
for the share that compute does not hide. A request is a micro-batch then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.errors import CostError
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.mesh import Copies, copies_on
from partitioner.ir.phases import StepOrder


@dataclass(frozen=True, slots=True)
class Event:
    """A task of a request on a device; times count from the start of all devices."""

    device: int
    kind: str  #: Lane: "compute" or "comm".
    name: str
    start_s: float
    end_s: float
    task: int  #: Position in `Schedule.tasks`.
    request: int = 0
    hidden_s: float = 0.0  #: More seconds, which pass beside the tasks that follow.


@dataclass(frozen=True)
class Timeline:
    """Events in the order of simulation: ascending in time on each device."""

    events: tuple[Event, ...]
    requests: int = 1
    turn: str = "request"  #: What a request of the events is: "request", or "micro-batch".

    @property
    def latency_s(self) -> float:
        """End of the first request."""
        return max((e.end_s for e in self.events if e.request == 0), default=0.0)

    @property
    def makespan_s(self) -> float:
        """End of the last event."""
        return max((event.end_s for event in self.events), default=0.0)


def simulate(schedule: Schedule, requests: int = 1) -> Timeline:
    """Timeline of a schedule for a number of requests, all of which are there at the start.

    Whole copies take several in turn; of one request it shows what each copy would do.

    Raises:
        CostError: `requests` is less than 1, or more than 1 of a plan with stages.
    """
    if requests < 1:
        raise CostError(f"{requests} requests were asked for; at least 1 is needed")
    order, clock = schedule.order, _Clock(events=[])
    if requests > 1 and not order.is_whole:
        raise CostError(
            f"{requests} requests were asked for; the timeline of a plan in stages is that of "
            f"one step of {order.table.micro_batches} micro-batches"
        )
    _run(schedule, requests, clock)
    turn = "request" if order.is_whole else "micro-batch"
    return Timeline(tuple(clock.events or ()), requests * order.table.micro_batches, turn)


def step_seconds(schedule: Schedule) -> float:
    """End of the last event of one request or step, to rounding, without the events."""
    clock = _Clock(events=None)
    _run(schedule, 1, clock)
    return max(clock.free.values(), default=0.0)


def _run(schedule: Schedule, requests: int, clock: _Clock) -> None:
    """Run requests of whole batches as a stream; else the one step."""
    if not schedule.order.is_whole:
        _simulate_step(schedule, schedule.order, clock)
        return
    for tasks, own in _streams(schedule, requests):
        rounds = len(own) + max((task.target_hops for _, task in tasks), default=0)
        for turn in range(rounds):
            for index, task in tasks:
                sending, receiving = turn - task.hops, turn - task.target_hops
                one_way = task.comm is not None and not task.comm.sources() & task.comm.targets()
                if 0 <= sending < len(own):
                    start = clock.send if one_way else clock.together
                    start(index, task, own[sending])
                if one_way and 0 <= receiving < len(own):
                    clock.arrive(index, task, own[receiving])


def _streams(
    schedule: Schedule, requests: int
) -> list[tuple[list[tuple[int, Task]], Sequence[int]]]:
    """The tasks of each whole copy, with their positions, and the requests that it takes."""
    tasks = list(enumerate(schedule.tasks))
    copies = copies_on(task.placed.mesh for _, task in tasks if task.placed is not None)
    if requests == 1 or not copies:
        return [(tasks, range(requests))]
    load_s: dict[int, float] = defaultdict(float)
    for _, task in tasks:
        for device, seconds in task.devices.items():
            load_s[device] += seconds
    seconds_of = tuple(max(load_s[device] for device in copy) for copy in copies)
    taken = Copies(copies, seconds_of).serving(requests)
    streams: list[tuple[list[tuple[int, Task]], Sequence[int]]] = []
    for number, copy in enumerate(copies):
        shares = ((i, t, {d: s for d, s in t.devices.items() if d in copy}) for i, t in tasks)
        own = [request for request, at in enumerate(taken) if at == number]
        streams.append(([(i, replace(t, devices=share)) for i, t, share in shares if share], own))
    return streams


def _simulate_step(schedule: Schedule, order: StepOrder, clock: _Clock) -> None:
    idle = frozenset(schedule.devices).difference(*order.lanes)
    lanes = [frozenset(lane) for lane in (*order.lanes, idle) if lane]
    waiting = [deque(order.runs(min(lane))) for lane in lanes]
    tasks: dict[int, list[tuple[int, Task]]] = defaultdict(list)
    for index, task in enumerate(schedule.tasks):
        for phase in dict.fromkeys((task.phase, task.target_phase)):  # a message is of both
            tasks[phase].append((index, task))
    together = {  # phases with a task of several lanes, which all run at once
        task.phase
        for task in schedule.tasks
        if task.phase == task.target_phase
        and not any(lane >= task.devices.keys() for lane in lanes)
    }
    phases = {
        (lane, phase): _LanePhase.of(tasks[phase], lane, phase, apart=clock.events is not None)
        for lane, runs in zip(lanes, waiting, strict=True)
        for phase in dict.fromkeys(phase for phase, _ in runs)
    }
    while any(waiting):
        moved = False
        for lane, runs in zip(lanes, waiting, strict=True):
            while runs and runs[0][0] not in together:
                if not clock.run(phases[lane, runs[0][0]], runs[0][1]):
                    break
                runs.popleft()
                moved = True
        if not moved:  # all lanes are at one phase
            phase, micro_batch = waiting[0][0]
            for index, task in tasks[phase]:
                clock.together(index, task, micro_batch)
            for runs in waiting:
                assert runs.popleft() == (phase, micro_batch)


@dataclass(frozen=True)
class _LanePhase:
    """The tasks of a phase on the devices of a lane, each with its position."""

    arriving: tuple[tuple[int, Task], ...]  #: Messages that it waits for.
    inside: tuple[tuple[int, Task], ...]
    leaving: tuple[tuple[int, Task], ...]  #: Messages that it sends.

    @classmethod
    def of(
        cls,
        phase_tasks: Sequence[tuple[int, Task]],
        lane: frozenset[int],
        phase: int,
        *,
        apart: bool,
    ) -> _LanePhase:
        """The tasks of a phase on a lane, those inside as few or apart."""
        tasks = [(index, task) for index, task in phase_tasks if lane & task.devices.keys()]
        passing = [(index, t, t.comm) for index, t in tasks if t.comm and t.phase != t.target_phase]
        inside = [(index, task) for index, task in tasks if task.phase == task.target_phase]
        return cls(
            tuple(
                (index, task)
                for index, task, comm in passing
                if task.target_phase == phase and lane & comm.targets()
            ),
            tuple(inside if apart else _in_few(inside)),
            tuple(
                (index, task)
                for index, task, comm in passing
                if task.phase == phase and lane & comm.sources()
            ),
        )


def _in_few(tasks: Sequence[tuple[int, Task]]) -> list[tuple[int, Task]]:
    """Add each task to the one before it, unless it has to wait for devices that this does not."""
    few: list[tuple[int, Task, dict[int, float]]] = []
    for index, task in tasks:
        if few and not (task.waits and len(task.devices) > 1):
            _, last, sums = few[-1]
            if not last.waits or task.devices.keys() <= sums.keys():
                for device, seconds in task.devices.items():
                    sums[device] = sums.get(device, 0.0) + seconds
                continue
        few.append((index, task, dict(task.devices)))
    return [(index, replace(task, devices=sums)) for index, task, sums in few]


@dataclass
class _Clock:
    """The second at which each device is free, and at which each communication is sent."""

    events: list[Event] | None  #: Takes the events; None if only the seconds count.
    free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self, phase: _LanePhase, micro_batch: int) -> bool:
        """Run a phase of a micro-batch on a lane, if all that it waits for was sent."""
        if any((index, micro_batch) not in self.sent for index, _ in phase.arriving):
            return False
        for index, task in phase.arriving:
            self.arrive(index, task, micro_batch)
        for index, task in phase.inside:
            self.together(index, task, micro_batch)
        for index, task in phase.leaving:
            self.leave(index, task, micro_batch)
        return True

    def together(self, index: int, task: Task, request: int) -> None:
        ready = max((self.free[device] for device in task.devices), default=0.0)
        for device, seconds in task.devices.items():
            start = ready if task.waits else self.free[device]
            self._run(index, task, request, device, start, start + seconds)

    def send(self, index: int, task: Task, request: int) -> None:
        """Run the sources' side of a one-way communication."""
        for device, seconds in task.sending.items():
            self._run(index, task, request, device, self.free[device], self.free[device] + seconds)
        self.sent[index, request] = max((self.free[device] for device in task.sending), default=0.0)

    def leave(self, index: int, task: Task, request: int) -> None:
        """Send what a phase has made, beside what its devices do next."""
        start = max(self.free[device] for device in task.sending)
        self.send(index, task, request)
        self.sent[index, request] = start + max(task.whole_s.values())

    def arrive(self, index: int, task: Task, request: int) -> None:
        arrived = self.sent[index, request]
        for device, seconds in task.receiving.items():
            end = max(arrived, self.free[device] + seconds)
            self._run(index, task, request, device, end - seconds, end)

    def _run(
        self, index: int, task: Task, request: int, device: int, start: float, end: float
    ) -> None:
        self.free[device] = end
        if self.events is not None:
            hidden = task.hidden.get(device, 0.0)
            event = Event(device, task.kind, task.name, start, end, index, request, hidden)
            self.events.append(event)
