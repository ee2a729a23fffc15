"""The request of a search, its budget, and the clock of the stages of a compilation."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from partitioner.cost_model.executors import MOST_RANKS
from partitioner.ir.checks import is_number, is_whole
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import COPIES
from partitioner.ir.pipeline.generate import SCHEDULES
from partitioner.ir.plan import OBJECTIVES
from partitioner.solver.milp.engines import HIGHS, Engine, find
from partitioner.solver.referee import Objective
from partitioner.solver.work import COMPILATION, STEPS_PER_S, Work, now_s
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.kinds.parallel import (
    PIPELINE,
    axes_text,
    inside_stages,
    kinds,
    meshes,
    parallel_constraints,
    parallel_mesh,
    wants_stages,
)
from partitioner.strategies.named_dims import bound, check_named
from partitioner.strategies.spaces import SearchError, check_mesh, check_strategy

#: Cost of a known plan that is compared with no other: it says only that there is one.
SOME_PLAN_S = sys.float_info.max
#: Whether the backward pass may compute values of the forward pass again.
Recompute = bool | Literal["auto"]
#: Number of micro-batches of a step.
MicroBatchCount = int | Literal["auto"] | None
#: The steps of a search take about this share of its time limit: a machine that is half as fast as
#: the usual one, or busy with as much again, does them all. Within a short limit, which the clock
#: may end, they take all of it: up to as many as within `SHORT_S`.
PART, SHORT_S = 0.4, 20.0
#: The least share of the time limit that a search has, however long reading and tracing take.
LEAST_CLOCK = 0.5
#: Most devices with a column each in the joint problem, where levels could be searched instead.
EXPLICIT = 16
#: Most nodes times devices of such a problem.
EXPLICIT_NODES = 10_000
#: Most devices with a column each where a request needs that, and with programs and timelines.
MOST_EXPLICIT = MOST_RANKS
#: Receives a line of text at each stage of a compilation.
Say = Callable[[str], None]


def silent(_text: str) -> None:
    """Drop the line."""


def _without_mesh(text: str, devices: int) -> str:
    return (
        f"parallel {text!r} wants a mesh of axes {axes_text(text)}, of at least two devices each: "
        f"{devices} devices have none"
    )


@dataclass(frozen=True)
class Request:
    """The options of a search, as `partitioner.compile` describes them.

    Attributes that are options of that name are described in `partitioner.api.option_table`.

    Attributes:
        constraints: Pins, or a plan whose decisions are kept, as they were read.
        recompute: "auto" counts where no plan that keeps all values fits or, by levels, memory
            forbids a cheaper one.
        time_limit_s: Of the whole search.
        micro_batches: None searches their number in a pipeline. "auto" searches it in other plans
            too, if no plan of the whole batch fits: results may then be those of the samples of a
            micro-batch (see `rewrites.same_in_parts`).
        schedule: A name, or the rows of its table; None searches it.
        tune: Number of plans, of different spaces, that are to be run, so that the search keeps
            them; None for the best alone.
        lanes: Groups of devices, this one included, that share the model in stages.

    Raises:
        OptionError: A value is none of these.
        EngineError: The solver is not known, or not installed.
    """

    objective: Objective = "throughput"
    strategy: str = "auto"
    mesh: Mapping[str, int] | None = None
    constraints: Constraints = field(default_factory=Constraints)
    parallel: str | None = None
    recompute: Recompute = "auto"
    time_limit_s: float = 30.0
    gap: float = 0.01
    solver: str = HIGHS.name
    seed: int = 0
    tune: int | None = None
    schedule: str | tuple[str, ...] | None = None
    micro_batches: MicroBatchCount = None
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SearchError(f"objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        check_strategy(self.strategy)
        check_mesh(self.mesh)
        if not (isinstance(self.recompute, bool) or self.recompute == "auto"):
            raise OptionError(f"recompute {self.recompute!r} is not one of 'auto', True, False")
        if not (is_number(self.time_limit_s) and 0 < self.time_limit_s < math.inf):
            raise SearchError(
                f"time_limit_s is {self.time_limit_s!r}, not a number of seconds above 0"
            )
        if not (is_number(self.gap) and 0 <= self.gap < 1):
            raise SearchError(f"gap is {self.gap!r}, not a number of at least 0 and below 1")
        if not is_whole(self.seed) or self.seed < 0:
            raise SearchError(f"seed is {self.seed!r}, not a whole number of at least 0")
        if self.tune is not None and not (is_whole(self.tune) and self.tune >= 1):
            raise SearchError(f"tune is {self.tune!r}, not a number of plans of at least 1")
        if self.tune is not None and self.objective == "memory":
            raise SearchError("tune measures seconds: leave it out with the objective memory")
        kinds(self.parallel)  # refuses unknown words
        self._check_pipeline()
        if self.strategy == "copies" or self.keeps_copies:
            self._check_copies()
        find(self.solver)

    def _check_copies(self) -> None:
        """Refuse options that decide on a partition where whole copies are asked for."""
        constraints = self.constraints
        asked: dict[str, bool] = {
            "the plan in constraints": not self.keeps_copies and constraints.plan is not None,
            f"strategy {self.strategy!r}": self.strategy not in ("auto", "copies"),
            f"objective {self.objective!r}": self.objective != "throughput",
            f"mesh {self.mesh}": self.mesh is not None,
            f"parallel {self.parallel!r}": self.parallel is not None,
            f"schedule {self.schedule!r}": self.schedule is not None,
            f"micro_batches {self.micro_batches!r}": self.micro_batches is not None,
            "a layout in constraints": constraints.named is not None,
            **{pin.text: True for pin in constraints.pins},
        }
        if names := [name for name, is_asked in asked.items() if is_asked]:
            raise SearchError(
                f"{names[0]}: whole copies serve a stream of requests, and are no partition; leave "
                "it out with strategy 'copies'"
            )

    @property
    def keeps_copies(self) -> bool:
        """Tell whether a plan of whole copies is kept."""
        kept = self.constraints.plan
        return kept is not None and any(COPIES in group.names for group in kept.groups)

    def _check_pipeline(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise SearchError(
                f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}, nor a file"
            )
        count = self.micro_batches
        if count not in (None, "auto") and not (is_whole(count) and int(count) >= 1):
            raise SearchError(
                f"micro_batches is {count!r}, not 'auto' or a whole number of at least 1"
            )

    @property
    def is_pipelined(self) -> bool:
        """Tell whether all plans run in micro-batches."""
        asked = self.schedule is not None or self.micro_batch_count is not None
        return asked or wants_stages(self.parallel) or PIPELINE in (self.mesh or {})

    @property
    def micro_batch_count(self) -> int | None:
        """The number of micro-batches that is asked for."""
        return None if isinstance(self.micro_batches, str) else self.micro_batches

    @property
    def may_run_in_parts(self) -> bool:
        """Tell whether a batch that fits no plan may be planned in micro-batches."""
        if self.constraints.plan is not None or self.is_pipelined:
            return False
        is_placed = self.constraints.names_devices or self.strategy in ("inter", "copies")
        plain = self.objective != "memory" and self.tune is None and not is_placed
        return plain or self.micro_batches == "auto"

    def sizes_in_parts(self, devices: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of devices of a stage to try, in turn, for a batch that fits no plan as a whole.

        One mesh of all first; then, if the request leaves it open, stages of fewer devices.
        """
        if self.strategy == "inter":
            return ((1,),)
        is_open = self.strategy == "auto" and self.parallel is None and self.mesh is None
        least = 2 if self._cuts_tensors else 1
        smaller = tuple(size for size in range(least, devices) if devices % size == 0)
        return ((devices,), smaller) if is_open and smaller else ((devices,),)

    def stage_sizes(self, devices: int) -> tuple[int, ...]:
        """Numbers of devices of one stage to try, of so many in all.

        Raises:
            SearchError: The mesh has no axis "pp", or a stage cannot have the other kinds.
            ConstraintError: A layout of named dims would cut nothing in stages of one device.
        """
        sizes = self._stage_sizes(devices)
        if devices == 1 or not self._cuts_tensors:
            return sizes
        self._check_cuts(max(sizes))
        return tuple(size for size in sizes if size > 1)

    @property
    def _cuts_tensors(self) -> bool:
        """Tell whether constraints cut a tensor over devices, as in stages of several alone."""
        return bool(self._layout_axes) or self.constraints.cutting_pin is not None

    def _check_cuts(self, size: int) -> None:
        """Refuse a layout of named dims, and pins that cut, in stages of one device."""
        pin = self.constraints.cutting_pin
        if size == 1 and self.constraints.named is not None and self._layout_axes:
            over = " and ".join(self._layout_axes)
            raise ConstraintError(
                f"{self.constraints.named.source}: a layout over {over} cuts nothing in stages of "
                f"one device: give a mesh with {PIPELINE} and {over}, and more devices"
            )
        if size == 1 and pin is not None:
            raise ConstraintError(
                f"{pin.text}: {pin.tensor!r} cannot be cut in stages of one device: give a mesh "
                f"with {PIPELINE} and another axis, and more devices"
            )

    def _stage_sizes(self, devices: int) -> tuple[int, ...]:
        """The sizes that the mesh, `parallel` and the strategy leave."""
        sizes = self._sizes_of_meshes(devices)
        if self.strategy == "auto" or devices == 1:
            return sizes
        is_open = self.parallel is None and self.mesh is None
        if self.strategy == "inter":
            self._check_whole_operators()
            if 1 not in sizes:
                raise SearchError(
                    f"strategy 'inter' places whole operators, and mesh {dict(self.mesh or {})} "
                    f"has stages of {max(sizes)} devices that share them"
                )
            return (1,)
        if max(sizes) == 1:
            asked = f"parallel {self.parallel!r}" if self.parallel else "the mesh"
            raise SearchError(
                f"strategy 'intra' cuts operators over devices, and {asked} gives each stage one "
                "device"
            )
        return (devices,) if is_open else sizes

    def _check_whole_operators(self) -> None:
        if inside_stages(self.parallel) is not None and self.strategy == "inter":
            raise SearchError("parallel shards operators; leave it out with strategy 'inter'")

    def _sizes_of_meshes(self, devices: int) -> tuple[int, ...]:
        text = self.parallel
        if text is None and PIPELINE in (self.mesh or {}):
            text = PIPELINE
        divisors = tuple(size for size in range(1, devices + 1) if devices % size == 0)
        if text is not None and PIPELINE in (self.mesh or {}) and not wants_stages(text):
            raise SearchError(
                f"parallel {text!r} has no stages, and the mesh has an axis pp: give parallel "
                f"'pp+{text}'"
            )
        if text is None or not wants_stages(text):
            return divisors if self.parallel is None and self.mesh is None else (devices,)
        inside = inside_stages(text)
        if self.mesh is None and inside is not None:
            sizes = tuple(size for size in divisors[:-1] if meshes(inside, size))
            if not sizes:
                raise SearchError(_without_mesh(text, devices))
            return sizes
        if self.mesh is None:  # on many devices, stages of any size: few models have so many
            return (1,) if devices <= MOST_EXPLICIT else divisors[:-1]
        if PIPELINE not in self.mesh:
            raise SearchError(f"parallel {text!r} wants a mesh with an axis pp")
        return (devices // self.mesh[PIPELINE],)

    def inside_stages(self, size: int, micro_batches: int, lanes: int = 1) -> Request:
        """The request for the plan of one micro-batch on a stage of so many devices.

        Raises:
            ConstraintError: A layout of named dims would cut nothing there.
        """
        if lanes > 1:
            self._check_cuts(size)
        mesh = {axis: n for axis, n in (self.mesh or {}).items() if axis != PIPELINE}
        return replace(
            self,
            strategy="auto" if size == 1 else "intra",
            constraints=self.constraints.inside_stages(size),
            parallel=inside_stages(self.parallel) if size > 1 else None,
            mesh=(mesh or None) if size > 1 else None,
            schedule=None,
            micro_batches=micro_batches,
            lanes=lanes,
            tune=None,
        )

    def over(self, devices: int) -> Request:
        """The request with the mesh that `parallel` and named dims ask for.

        Several kinds without a mesh are left without one: all meshes that they may have are
        weighed, see `on_meshes`.
        """
        self._check_whole_operators()
        if devices == 1:
            return self
        mesh = self._mesh_of_layout(devices)
        if self.parallel is None:
            return replace(self, mesh=mesh)
        if self._leaves_mesh_open:
            if not meshes(self.parallel, devices):
                raise SearchError(_without_mesh(self.parallel, devices))
            return self
        if not self._layout_axes:
            return replace(self, mesh=parallel_mesh(self.parallel, devices, mesh))
        parallel_mesh(self.parallel, devices, self._rest(mesh or {}))  # refuses other axes
        return replace(self, mesh=mesh)

    @property
    def _leaves_mesh_open(self) -> bool:
        """Tell whether several kinds are joined that may have any mesh of as many axes."""
        several = len(kinds(self.parallel)) > 1 and not wants_stages(self.parallel)
        return several and self.mesh is None and not self._layout_axes

    def on_meshes(self, devices: int) -> tuple[Request, ...]:
        """The request on each mesh that it leaves open to kinds; itself if that is none."""
        if devices == 1 or not self._leaves_mesh_open:
            return (self,)
        assert self.parallel is not None
        return tuple(replace(self, mesh=mesh) for mesh in meshes(self.parallel, devices))

    @property
    def _layout_axes(self) -> tuple[str, ...]:
        return self.constraints.named.axes if self.constraints.named else ()

    def _rest(self, mesh: Mapping[str, int]) -> Mapping[str, int]:
        """The axes of a mesh that kinds of parallelism have: those that no named dim lies over.

        A layout over the axis of a kind itself, as of the batch over "dp", shares it.
        """
        named = set(self._layout_axes) - self._shared_axes
        return {axis: size for axis, size in mesh.items() if axis not in named}

    @property
    def _shared_axes(self) -> frozenset[str]:
        """The axes of kinds of parallelism that a layout names, too."""
        axes = {axis for kind in kinds(self.parallel) for axis in kind.axes}
        return frozenset(axes.intersection(self._layout_axes))

    def _mesh_of_layout(self, devices: int) -> Mapping[str, int] | None:
        """The mesh that named dims lie over: the one given, or all devices on their only axis."""
        axes = self._layout_axes
        if not axes:
            return self.mesh
        source = self.constraints.named.source if self.constraints.named else ""
        if self.strategy == "inter":
            raise SearchError(
                f"{source}: a layout shards operators; leave it out with strategy 'inter'"
            )
        own = self.parallel is not None and not self._shared_axes
        if self.mesh is None and len(axes) == 1 and not own:
            return {axes[0]: devices}
        if self.mesh is None:
            raise SearchError(
                f"{source}: a layout over {' and '.join(axes)} wants a mesh with them"
            )
        for axis in axes:
            if axis not in self.mesh:
                known = ", ".join(self.mesh)
                raise SearchError(f"{source}: a layout over {axis!r}; the mesh has {known}")
        return self.mesh

    def on(self, graph: Graph) -> Request:
        """The request with `parallel` and named dims as constraints on a graph, after `over`.

        Raises:
            ConstraintError: A kind of parallelism or a named dim cannot be had on this graph.
        """
        constraints = self.constraints
        if constraints.named is not None:
            check_named(constraints.named, graph)
        if self.mesh is None:
            return self
        if constraints.named is not None:
            constraints = replace(constraints, along=bound(constraints.named, graph, self.mesh))
        if self.parallel is not None:
            mesh = self._rest(self.mesh)
            constraints = constraints.joined(parallel_constraints(self.parallel, graph, mesh))
        return replace(self, constraints=constraints)


@dataclass(frozen=True)
class StageClock:
    """Announces the stages of a compilation and keeps their seconds."""

    say: Say  #: Receives the name of each stage as it begins.
    #: Seconds of each finished stage, without those of stages inside of it.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Second of the solver's clock at which the first began.
    begun_s: float = field(default_factory=now_s)
    _inside: list[float] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block as a stage, or as one more part of it."""
        self.say(stage)
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            with COMPILATION.told_to(self.say):
                yield
        finally:
            spent = time.perf_counter() - start
            own = spent - self._inside.pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + own
            if self._inside:
                self._inside[-1] += spent


@dataclass(frozen=True)
class Budget:
    """The work and settings of a search, and the cost that it must beat."""

    work: Work  #: Steps that the search may do, and the clock that stops it.
    gap: float  #: As of `Request`.
    seed: int  #: As of `Request`.
    engine: Engine  #: MILP solver.
    say: Say  #: Receives a line of text before each part of the search.
    #: Cost of a known plan, which is to be beaten; infinite if there is none.
    best_s: float = math.inf
    #: Whether to stop where memory forbids the cheapest plan, because a graph that offers to
    #: compute values again is planned then.
    defers_memory: bool = False

    @classmethod
    def of(cls, request: Request, say: Say = silent, begun_s: float | None = None) -> Budget:
        """The budget of a request whose search begins now.

        Since the time limit began, at the second `begun_s`, reading and tracing have taken part of
        it: the search has `LEAST_CLOCK` of it at least.
        """
        limit_s = request.time_limit_s
        spent_s = 0.0 if begun_s is None else now_s() - begun_s
        steps = STEPS_PER_S * max(PART * limit_s, min(limit_s, PART * SHORT_S))
        work = Work.within(max(limit_s - spent_s, LEAST_CLOCK * limit_s), steps)
        return cls(work, request.gap, request.seed, find(request.solver), say)

    def of_clock(self, parts: float) -> Budget:
        """A budget with all steps of this one, in one of so many equal shares of its seconds."""
        return replace(self, work=replace(self.work.of_the_clock(parts), steps=self.work.steps))

    def anew(self, seconds: float) -> Budget:
        """A budget of so many seconds from now, with the steps that are usual for as many."""
        return replace(self, work=Work.within(seconds, seconds * PART * STEPS_PER_S))

    def with_steps(self, least: float) -> Budget:
        """A budget with so many steps at least, however few are left."""
        return replace(self, work=self.work.beyond(max(self.work.left, least)))

    def share(self, parts: float, clock: float = 1) -> Budget:
        """A budget with one of so many equal shares of the steps, and of the seconds, left."""
        return replace(self, work=self.work.share(parts).of_the_clock(clock))
