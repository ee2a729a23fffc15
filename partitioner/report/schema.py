"""The data of a report: plain JSON, written by Python and read by the scripts of ``web/js``.

Units: seconds (`_s`), bytes (`bytes`), FLOPs. Large tables are columns of equal length. A *ref* is
a task: node i is i, communication j is -1 - j. Strings from the model are not escaped: the page
must put them into text nodes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

VERSION = 1  #: Of this format.
Unit = Literal["s", "bytes", "share", "per_s", "count", "times"]
Better = Literal["less", "more", ""]


class Head(TypedDict):
    """The plan's figures; `*_one` are one device's, null if the whole model does not fit it."""

    cluster: str
    strategy: str
    objective: str
    status: str
    solver: str
    searched: str
    seed: int | None  #: None without a certificate.
    folded: str
    cost: float  #: Seconds or, for the objective "memory", bytes; as `bound`.
    bound: float
    gap: float  #: 0 .. 1
    step_s: float  #: Load of the busiest device: time between requests of a full stream.
    step_s_one: float | None
    latency_s: float
    latency_s_one: float | None
    #: The same of a measured run of the plan, or of its trial; None if it was not measured.
    step_measured_s: float | None
    latency_measured_s: float | None
    turn: str  #: What repeats: "request" or "step".
    step: StepRow | None  #: None without stages.
    speedup: float | None  #: As `Planned.speedup`.
    gain: float | None  #: As `Verdict.gain`.
    gain_of: str  #: As `Verdict.gain_of`.
    communication: float  #: Share of all busy seconds that is communication, 0 .. 1.
    balance: float  #: Mean load over the largest, 0 .. 1.
    headroom: float  #: Least free share of a device's memory, 0 .. 1.
    devices: int
    devices_used: int
    limit: str  #: Sentence on what limits the plan.
    instead: str  #: What one could do in place of the split, each with its figure.
    delivery: str  #: Clause on what the results on every rank take more; "" for nothing.
    delivered: Delivered | None  #: None where `delivery` is "".
    #: "Predicted from published rates, nothing was run: 3.6 times as fast as one h100: 406/s
    #: against 113/s; limit: kernel launches on device 2".
    verdict: str
    spaces: list[SpaceRow]  #: The searched spaces, the best first; without a plan last.
    notes: list[str]  #: Sentences.
    trials: list[str]  #: The plans that were run before this one was kept, after a heading.


class Delivered(TypedDict):
    """Figures of a plan with what brings its results to every rank."""

    step_s: float  #: This and the next as those of `Head`.
    latency_s: float
    communication: float


class SpaceRow(TypedDict):
    """A searched space with its best plan, or the reason why it has none."""

    space: str  #: Like "intra (x=2 y=2)".
    cost: float | None  #: As `Head.cost`; None without a plan.
    devices_used: int | None
    chosen: bool
    why: str  #: What keeps it from being chosen; "" for the chosen one.
    changes: Changes | None  #: From the chosen plan to its own; None if they were not compared.
    bound: (
        float | None
    )  #: Of a space without a plan that was searched: none of its plans costs less.


class _Compared(TypedDict, total=False):
    changes: Changes  #: From the chosen plan.
    micro_batches: int  #: In which the plan runs a batch; none of the whole at once.


class Space(_Compared):
    """The best plan of a searched space, as stored; seconds are those of its busiest device."""

    space: str
    cost: float
    devices_used: int
    busiest: int
    compute_s: float
    comm_s: float
    fits: bool


class StageRow(TypedDict):
    """A stage; its index is its number. Figures are those of its busiest or fullest device."""

    devices: list[int]
    nodes: int
    forward_s: float  #: Of a micro-batch.
    backward_s: float  #: Likewise, with weight gradients.
    weights_bytes: int  #: With the optimizer's state.
    in_flight: int  #: Most micro-batches whose activations it holds at once.
    #: What one of them leaves for the backward pass, with the head-room of the planner.
    kept_bytes: int
    sends_to: list[int]  #: Stages.
    sends_bytes: list[int]  #: To each of them, of a micro-batch.


class StepRow(TypedDict):
    """The step of a plan in stages."""

    sentence: str  #: Like "4 stages, 8 micro-batches, 1f1b, bubble 23 %".
    schedule: str
    micro_batches: int
    bubble: float  #: Share of the devices' time in which they do nothing, 0 .. 1.
    stages: list[StageRow]


class DeviceRow(TypedDict):
    """A lane: a device or, of more than 64, equal devices that are shown as one.

    Figures are those of its busiest or fullest member. All other rows name lanes.
    """

    name: str
    members: list[int]  #: Numbers of its devices.
    limit_bytes: int
    compute_s: float
    comm_s: float
    peak_bytes: int
    weights_bytes: int
    sent_bytes: int


class GroupRow(TypedDict):
    """Devices that run nodes together, as a mesh; one device is a group too."""

    devices: list[int]
    mesh: str  #: Like "x=2 y=2 on 0,1,2,3".


class TensorRow(TypedDict):
    """A tensor of a node, whole and on one device."""

    name: str
    dtype: str
    shape: list[int]
    local: list[int]  #: The largest part on any device.
    sharding: str  #: One entry a dim: "x" cut over that axis, "-" whole; "+x": partial sums.
    constant: bool


class RunnerUp(TypedDict):
    """The best other strategy of a node, all other nodes keeping theirs ("why not")."""

    group: str  #: Mesh, as of `GroupRow`.
    cut: str
    step_s: float  #: Step time that the plan would have.
    step_change_s: float  #: Less the plan's; negative as `why` says, or where it does not fit.
    work_change_s: float  #: Change of all devices' busy seconds together.
    why: str  #: Why the plan does not take it although its step is shorter; "" if it is not.
    fits: bool  #: The changed plan fits in memory.


class NodeRow(TypedDict):
    """An operator."""

    name: str
    op: str
    group: int
    stage: int | None  #: None in a plan without stages.
    times: int  #: How often it runs in a request or step.
    kind: Literal["whole", "sharded", "replicated"]  #: whole: on one device.
    cut: str  #: "factor/axis" of each cut loop, "" if there is none.
    opaque: str  #: Why it cannot be cut, "" if it has a rule.
    flops: float  #: Of the whole operator.
    local_flops: float  #: Most on one device.
    bytes: float  #: Read and written by the whole operator.
    seconds: float  #: Most on one device, each time.
    inputs: list[TensorRow]
    outputs: list[TensorRow]
    options: int  #: Strategies to choose from; 0: they were not priced.
    runner_up: RunnerUp | None


class BlockMoveRow(TypedDict):
    """A plan with one whole block elsewhere, or not cut over an axis; the cheapest that fits first.

    In a plan in stages that is the boundary of two stages moved by a block.
    """

    label: str
    first: int  #: First node of the block.
    last: int
    at: str  #: Its group, as of `GroupRow`, after its stage.
    to: str
    change: float  #: Of the plan's cost, in seconds or, for the objective "memory", bytes.
    fits: bool
    reason: str


class CommRow(TypedDict):
    """A communication."""

    kind: str  #: Like "all-reduce".
    value: str
    ranks: list[int]
    times: int  #: How often it goes in a request or step.
    bytes: int  #: That cross between devices, each time.
    seconds: float  #: Most on one device, each time.
    algorithm: str
    producer: int  #: Node, -1 for a graph input.
    consumer: int  #: First node that reads it, -1 for a graph output.


class EdgeRow(TypedDict):
    """A value from node `u` to node `v`, with the communications that carry it."""

    u: int
    v: int
    value: str
    bytes: int  #: Of the whole value.
    comms: list[int]


class TerminalRow(TypedDict):
    """A graph input or output."""

    name: str
    kind: Literal["input", "output"]
    shape: list[int]
    dtype: str
    nodes: list[int]  #: That read the input, or the one that makes the output.


class BlockRow(TypedDict):
    """Nodes that the graph shows as one until it is opened.

    Two blocks are disjoint, or one is inside the other.
    """

    label: str
    first: int
    last: int
    nodes: list[int]  #: First and last of each run of them, as `ranges`.
    part: Literal["forward", "backward"]
    parent: int  #: Index of the block around it, -1 for none.
    kind: int  #: Equal for blocks of equal structure.
    index: int  #: 0 .. count - 1 among the consecutive repeats.
    count: int  #: 1: not a repeat, folded for legibility only.


class SwimLane(TypedDict):
    """A lane of the overview: devices that run the same, or one device."""

    devices: list[int]
    stages: list[int]  #: Empty in a plan without stages.
    mesh: str  #: Axes of more than one device: "x=2 y=2"; "" for one device.
    runs: str  #: What its devices run forward, in words: "wte, layers 0-2, layer 3 to attn".


class CutRow(TypedDict):
    """The kinds of cuts by an axis of a mesh in a box, that of most seconds first."""

    axis: str
    #: By what the cut loop runs over (`LoopWords`): batch; columns: output features or channels;
    #: rows: input features, summed afterwards; heads; positions: sequence, height, width; weights:
    #: what is made of weights alone; sums: partial sums that are passed on; replicated: nothing.
    words: list[str]


class BoxRow(TypedDict):
    """Nodes of one module path, set of devices and part, as one box of the overview."""

    label: str  #: Module path; "" if there is none.
    ops: str  #: Operator types, of one where `count` is more: "Conv-Relu x 3".
    parent: int  #: Index of the box that opens into this one, -1 for none.
    lanes: list[int]
    part: Literal["forward", "backward", "update"]
    count: int  #: Of boxes of equal structure for which it stands.
    nodes: list[int]  #: First and last node of each range, in turn. Nodes without seconds lack.
    start_s: float  #: Of the first request or micro-batch, as `end_s`; the update is at the end.
    end_s: float
    seconds: float  #: Busy seconds on one device.
    cuts: list[CutRow]  #: By axis, in mesh order.


class Ribbon(TypedDict):
    """The overview: which part of the model runs on which devices, when, and how it is cut."""

    lanes: list[SwimLane]
    boxes: list[BoxRow]  #: Parents before what they open into.
    end_s: float
    training: bool


class Timeline(TypedDict):
    """Events on the clock of the simulator, as columns.

    In a timeline of passes, an event of kind 0 is a whole pass of a stage, with the ref of its
    first node.
    """

    label: str  #: Like "one request".
    turn: str  #: What a request of the events is: "request" or "micro-batch".
    requests: int
    end_s: float
    device: list[int]
    kind: list[int]  #: 0 compute, 1 communication.
    ref: list[int]
    request: list[int]
    start_s: list[float]
    duration_s: list[float]
    critical: list[int]  #: Events on the critical path, in time order.
    passes: list[str] | None  #: Of each event its pass: "F2", "" for none; None: no passes.
    about: list[str] | None  #: Of each event its pass in words.


class Live(TypedDict):
    """Values that a device holds at its peak, largest first, as columns."""

    name: list[str]
    kind: list[Literal["weights", "activations", "buffers", "executor"]]
    bytes: list[int]  #: Of all times together.
    times: list[int]  #: How often it is held: for so many micro-batches of a step in stages.
    more: int  #: Entries left out.
    more_bytes: int


class Memory(TypedDict):
    """Bytes of one device over the schedule; its index is the lane.

    `activations` and `buffers` are step functions: value i holds from `seconds[i]` on the clock of
    the first timeline, when the device runs the task at `position[i]`, until the next. `weights` is
    held throughout. Buffers are what communications write. All with the head-room that the planner
    reserves.
    """

    limit_bytes: int
    weights_bytes: int
    position: list[int]
    seconds: list[float] | None  #: None where nothing takes time.
    activations: list[int]
    buffers: list[int]
    peak_bytes: int  #: As `Evaluation.needed_bytes`: the most of the curve, and `executor_bytes`.
    executor_bytes: int  #: Excess of what the executor needs at its own peak over the curve's.
    peak_position: int
    peak_s: float | None  #: None where nothing takes time.
    live: Live


class Link(TypedDict):
    """All links of one level of the cluster, one direction of one device."""

    level: str
    size: int  #: Devices that it joins; those of one number follow each other.
    bytes: int  #: Most that one device sends over this level.
    total_bytes: int  #: All devices together.
    seconds: float  #: Of the bytes of the device that sends most, at the level's bandwidth.
    bandwidth_bytes_per_s: float | None  #: Null: free.


class Traffic(TypedDict):
    """Bytes from lane to lane, one request or step; collectives as rings in rank order."""

    source: list[int]
    target: list[int]
    bytes: list[int]
    links: list[Link]


class MeasuredEvents(TypedDict):
    """Events of one step on every rank, predicted or measured, as columns.

    Measured ones are medians over the steps. Kind 2 is the waiting for other ranks, 3 a kernel that
    no node of the plan asked for.
    """

    rank: list[int]
    kind: list[int]  #: 0 compute, 1 communication, 2 waiting, 3 a kernel of the runtime's own.
    ref: list[int | None]  #: Null: a task that the report has no row of.
    name: list[str]
    start_s: list[float]
    duration_s: list[float]


class MeasuredRankRow(TypedDict):
    """Sums of one rank over a step."""

    predicted_compute_s: float
    compute_s: float
    predicted_comm_s: float
    comm_s: float
    waited_s: float  #: For other ranks.
    other_s: float  #: Kernels that no node asked for, which change layouts.
    predicted_peak_bytes: int
    peak_bytes: int | None  #: None if it was not measured.


class MeasuredTaskRow(TypedDict):
    """A task on one rank, those with the largest error first."""

    rank: int
    name: str
    ref: int | None
    predicted_s: float
    measured_s: float
    waited_s: float
    spread: float


class MeasuredRun(TypedDict):
    """A measured run of the plan beside its prediction."""

    backend: str
    threads: int
    steps: int
    measured_at: str
    predicted_step_s: float
    step_s: float  #: Without recording.
    recorded_step_s: float
    predicted_stream_s: float | None
    stream_s: float | None  #: Seconds between requests of a stream, null if none ran.
    end_s: float  #: Of the later of the two timelines.
    predicted: MeasuredEvents
    measured: MeasuredEvents
    ranks: list[MeasuredRankRow]
    tasks: list[MeasuredTaskRow]


class Report(TypedDict):
    """Everything about one plan."""

    version: int
    kind: Literal["plan"]
    title: str
    head: Head
    devices: list[DeviceRow]
    groups: list[GroupRow]
    nodes: list[NodeRow]
    edges: list[EdgeRow]
    terminals: list[TerminalRow]
    comms: list[CommRow]
    blocks: list[BlockRow]
    moves: list[BlockMoveRow]
    ribbon: Ribbon
    tasks: list[int]  #: Ref of each position of the schedule.
    timelines: list[Timeline]
    memory: list[Memory]
    traffic: Traffic
    measured: MeasuredRun | None  #: Null: the plan was not run with a record.


class Moved(TypedDict):
    """A node that two plans treat differently."""

    name: str
    op: str
    before: str
    after: str
    seconds_before: float
    seconds_after: float


class DiffTraffic(TypedDict):
    """Bytes of one kind of communication in two plans."""

    kind: str
    count_before: int
    count_after: int
    bytes_before: int
    bytes_after: int


class Figure(TypedDict):
    """A figure of two plans."""

    name: str
    unit: Unit
    #: None: a rate without limit, or no speed-up because one device does not hold the model.
    before: float | None
    after: float | None
    better: Better  #: Which change is for the better; "" for neither.


class Changes(TypedDict):
    """A `Diff` in short: from the chosen plan to one that was not chosen."""

    verdict: str
    figures: list[Figure]
    moved: list[Moved]  #: Runs of nodes, those of most seconds first; some may lack.
    moved_count: int  #: Nodes in all runs.
    same: int
    traffic: list[DiffTraffic]


class Diff(TypedDict):
    """Differences between two plans of one model, or of models that share node names."""

    version: int
    kind: Literal["diff"]
    title: str
    before: str  #: Name of the first folder.
    after: str
    verdict: str  #: "b takes 1.4 times as long as a: its busiest device communicates 1 ms more".
    verdicts: tuple[str, str]  #: As `Head.verdict`, of each, behind its name.
    figures: list[Figure]
    moved: list[Moved]
    only_before: list[str]
    only_after: list[str]
    same: int  #: Number of nodes with equal decisions.
    traffic: list[DiffTraffic]
    devices: list[tuple[DeviceRow | None, DeviceRow | None]]


class Point(TypedDict):
    """A point of a sweep."""

    devices: int
    cluster: str  #: Without its count: "h100"; points of one cluster and limit are a series.
    memory_bytes: int | None  #: The requested limit, null for the cluster's own.
    strategy: str  #: "" if there is no plan.
    latency_s: float | None
    throughput_per_s: float | None
    step_s: float | None
    peak_bytes: int | None  #: Of the fullest device.
    devices_used: int | None
    gap: float | None
    speedup: float | None  #: As `Planned.speedup`, over one device of the same cluster.
    efficiency: float | None  #: speedup / devices, if all devices are equal.
    verdict: str  #: As `Head.verdict`, without what limits the plan; "" if there is no plan.
    pareto: bool  #: No other point is as good in devices, latency, throughput and peak at once.
    why: str  #: Why there is no plan, "" if there is one.


class Sweep(TypedDict):
    """A model over device counts, clusters and memory limits."""

    version: int
    kind: Literal["sweep"]
    title: str
    objective: str
    answer: str  #: The best point and the verdict on it, in two sentences.
    points: list[Point]


def ranges(numbers: Iterable[int]) -> list[int]:
    """First and last of each run of ascending numbers: ``[3, 4, 5, 9] -> [3, 5, 9, 9]``."""
    ends: list[int] = []
    for number in numbers:
        if ends and ends[-1] == number - 1:
            ends[-1] = number
        else:
            ends += [number, number]
    return ends


def contains(ends: Sequence[int], number: int) -> bool:
    """Test whether a number is in the runs that `ranges` gave."""
    return any(first <= number <= last for first, last in zip(ends[::2], ends[1::2], strict=True))
