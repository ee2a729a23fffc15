"""`fit` finds the smallest clusters of known cards that hold a model; no devices are named.

A cluster holds a model if a plan on it is known that the referee counts to fit. That one does not
is proven by the bytes that any plan holds when a step ends, or else not proven: then a search found
no plan in its share of the time limit. Cards of equal memory share a search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from partitioner.api.compiler import graphs_of
from partitioner.api.option_table import FitOptions
from partitioner.api.options import open_with, request_of, takes, with_launches
from partitioner.cost_model.cluster import presets
from partitioner.cost_model.cluster.resolve import preset_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import ClusterOptionError
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.least import LeastBytes
from partitioner.foundations import units
from partitioner.frontends.model import ModuleInput, OnnxInput
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError, did_you_mean
from partitioner.ir.graph import Graph
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import Plan
from partitioner.problem.memory_kinds import Holdings
from partitioner.report.findings.bottleneck import turn_of
from partitioner.report.text.tables import table
from partitioner.search.request import LEAST_CLOCK, Budget, Request, Say, StageClock, silent
from partitioner.search.spaces.one_device import OneDeviceSpace
from partitioner.search.ways.table import Table
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import now_s
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.spaces import SearchError

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.api.compiled.module_graphs import ModuleGraphs
    from partitioner.api.compiled.onnx_model import OnnxGraphs

#: Nodes, and devices of each, in the order of trial: one machine, then machines of eight.
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
#: Most cards of one machine at home, which has no others beside it.
MOST_AT_HOME = 4
#: Seconds of `fit`, if nobody gives others.
LIMIT_S = 10.0
_AMPLE = 2**60  #: Bytes of a device that holds any model.
#: What the executor takes beside values for itself, as `explain` and reports call it.
_EXECUTOR = "executor"
#: Classes of bytes, as in refusals and `explain`.
CLASSES = ("weights", "activations", "buffers of communications", _EXECUTOR)
CLASSES_IN_TRAINING = ("parameters", "optimizer's state", "gradients", *CLASSES[1:])
#: Share of a device's memory below which a faster plan is looked for that takes more.
USED = 0.7
_LATE = "not searched within the time limit"


@dataclass(frozen=True)
class NotHeld:
    """A cluster of which no plan is known."""

    cluster: str
    devices: int
    proven: bool  #: Whether no plan fits there at all.
    why: str


@dataclass(frozen=True)
class Holds:
    """The smallest cluster of a card with a plan that fits, and what the plan costs."""

    cluster: str
    devices: int
    step_s: float  #: Seconds between requests, or of a training step, as predicted.
    latency_s: float
    peak_bytes: int  #: Of the fullest device, and its memory.
    limit_bytes: int
    strategy: str  #: Kind of the plan.
    micro_batches: int | None  #: None for the whole batch at once.
    bytes: Mapping[str, int]  #: `peak_bytes` by class.


@dataclass(frozen=True)
class CardFit:
    """The smallest cluster of one card that holds a model, and those that do not."""

    card: str
    holds: Holds | None  #: None where no plan is known on any of its clusters that were tried.
    not_held: tuple[NotHeld, ...]  #: The smaller clusters, or all, in the order of trial.


@dataclass(frozen=True)
class Fitted:
    """The smallest clusters that hold a model; printed, two tables.

    Attributes:
        name: Of the model.
        turn: What a plan is run for: "request" or "step".
        bytes: Peak of one device that had memory for the whole model and batch, by class.
        end_bytes: What that device holds when the request or step ends, by class.
        cards: What was found, card by card.
    """

    name: str
    turn: str
    bytes: Mapping[str, int]
    end_bytes: Mapping[str, int]
    cards: tuple[CardFit, ...]

    @property
    def data(self) -> dict[str, Any]:
        """All figures, as `partition fit --json` prints them."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The bytes by class, the cards with what they cost, and what is not known."""
        total = sum(self.bytes.values())
        head = f"{self.name}: a whole {self.turn} on one device takes {units.size(total)}"
        rows = [("class", "at the peak", "share", "at the end")]
        for kind, peak in self.bytes.items():
            end = self.end_bytes[kind]
            rows.append(
                (kind, units.size(peak), units.share(peak / max(total, 1)), units.size(end))
            )
        lines = [head, "", *table(rows)]
        held = [card for card in self.cards if card.holds is not None]
        if held:
            first = ("smallest cluster", self.turn, "fullest device", "of", "plan", "with fewer")
            lines += ["", *table([first, *map(_row, held)])]
        lines += ["", *dict.fromkeys(self._open())]
        return "\n".join(lines).rstrip()

    def _open(self) -> Iterator[str]:
        """Sentences on what has no plan, or is not proven."""
        for card in self.cards:
            if card.holds is None:
                largest = card.not_held[-1]
                proven = "no plan fits" if largest.proven else "no plan is known"
                yield f"{card.card}: {proven} on {largest.cluster}, {largest.why}"
        if any(not one.proven for card in self.cards for one in card.not_held):
            yield (
                "not proven: a longer search may find a plan with fewer (--time-limit, or "
                "partition MODEL --cluster NAME)"
            )


def _row(card: CardFit) -> tuple[str, ...]:
    held, fewer = card.holds, card.not_held
    assert held is not None
    if not fewer:
        with_fewer = ""
    elif fewer[-1].proven:
        with_fewer = f"none fits {fewer[-1].devices}"
    else:
        late = fewer[-1].why == _LATE
        with_fewer = (
            f"{fewer[-1].devices} not searched" if late else f"{fewer[-1].devices} not found"
        )
    return (
        held.cluster,
        units.seconds(held.step_s),
        f"{units.size(held.peak_bytes)} ({units.share(held.peak_bytes / held.limit_bytes)})",
        units.size(held.limit_bytes),
        held.strategy + (f", {held.micro_batches} micro-batches" if held.micro_batches else ""),
        with_fewer,
    )


@takes(FitOptions, cards=(), time_limit_s=LIMIT_S)
def fit(
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    **options: Unpack[FitOptions],
) -> Fitted:
    """Find the smallest clusters of known cards that hold a model, and what a plan costs there.

    Args:
        model: As of `compile`.
        example_inputs: As of `compile`.
        **options: As the fields of `FitOptions` are described.

    Raises:
        PartitionerError: The model is wrong, or a card is unknown. A card of which no plan is known
            is no error.
    """
    begun_s, say = now_s(), options.get("progress") or silent
    cards = _cards(options.get("cards", ()))
    if (batch := options.get("batch")) is not None:
        if "batch" in (dims := options.get("dims") or {}):
            raise OptionError(
                f"batch is {batch}, and dims has a batch of {dims['batch']}: give one"
            )
        options["dims"] = {**dims, "batch": batch}
    request = request_of({"time_limit_s": LIMIT_S, **options})
    opened = open_with(model, example_inputs, options)
    say("reading the model")
    graph = opened.graph  # refuses what is no model, before any search

    def made(card: str, nodes: int, per_node: int) -> Cluster:
        cluster = with_launches(preset_cluster(card, nodes, per_node), options)
        return cluster.run_by(opened.executor, training=opened.training)

    clusters = {
        card: [made(card, *shape) for shape in SHAPES if _makes_sense(card, *shape)]
        for card in cards
    }
    left_s = max(request.time_limit_s - (now_s() - begun_s), LEAST_CLOCK * request.time_limit_s)
    return _Fitting(opened, graph, request, now_s() + left_s, say).all(clusters)


def _cards(names: Sequence[str]) -> tuple[str, ...]:
    """The presets of some names, or those that are tried where none is named."""
    if is_a(names, str):
        raise OptionError(f"cards is {names!r}; give a list, as [{names!r}]")
    known, cards = presets.accelerators(), [presets.full_name(name) for name in names]
    for name in cards:
        if name not in known and not (name.startswith("(") and presets.is_known(name)):
            hint = did_you_mean(name, known)
            raise ClusterOptionError(
                f"card {name!r} is no preset of one; there are {', '.join(known)}{hint}"
            )
    return tuple(dict.fromkeys(cards or presets.usual_cards()))


def _makes_sense(card: str, nodes: int, per_node: int) -> bool:
    known = presets.accelerators().get(card)
    return known is None or not known.home or nodes * per_node <= MOST_AT_HOME


@dataclass(frozen=True)
class _Known:
    """A plan with its graph, and what its fullest device takes."""

    graph: Graph
    plan: Plan
    devices: int  #: Those of a cluster on which it runs: the first ones.
    needed: int  #: Bytes of the fullest device.
    parts: Mapping[str, int]  #: These by class.

    @classmethod
    def of(cls, graph: Graph, plan: Plan, cluster: Cluster, figures: Evaluation) -> _Known:
        """The plan with its bytes on a cluster by its evaluation there."""
        needed = figures.needed_bytes
        device = max(needed, key=needed.__getitem__)
        is_exact = device in figures.over_bytes
        holdings = Holdings.of(graph, plan, cluster)
        parts = holdings.at_peak(device, exact=is_exact, headroom=True)
        beside = needed[device] - sum(parts.values())
        count = 1 + max(device for mesh in plan.groups for device in mesh.devices)
        return cls(
            graph, plan, count, needed[device], _classes(graph, {**parts, _EXECUTOR: beside})
        )


def _classes(graph: Graph, parts: Mapping[str, int]) -> Mapping[str, int]:
    """Bytes by class, in one order; classes that no plan of the graph has are left out."""
    shown = CLASSES_IN_TRAINING if graph.backward else CLASSES
    return {kind: max(parts.get(kind, 0), 0) for kind in shown}


@dataclass(frozen=True)
class _Fitting:
    """The search for clusters that hold a model."""

    opened: OnnxInput | ModuleInput
    graph: Graph  #: Of the whole batch.
    request: Request
    deadline_s: float  #: By the solver's clock.
    say: Say
    #: The plans that are known, the whole batch at once on one device first.
    known: list[_Known] = field(default_factory=list)
    #: What was searched, by bytes of a device and number of devices, with the refusal if any.
    searched: dict[tuple[int, int], NotHeld | None] = field(default_factory=dict)
    #: The graphs of the model, with what was traced for searches before; one, or none yet.
    graphs: list[OnnxGraphs | ModuleGraphs] = field(default_factory=list)

    def all(self, clusters: Mapping[str, Sequence[Cluster]]) -> Fitted:
        """Fit the model to cards, each with its clusters in the order of their devices."""
        whole, end = self._whole(next(iter(clusters.values()))[0])
        by_memory = sorted(clusters, key=lambda card: _memory(clusters[card][0]))
        smallest: dict[str, int] = {}
        for card in by_memory:  # a plan that fits little memory fits more
            counts = [len(one) * _memory(one) for one in clusters[card]]
            likely = next((i for i, n in enumerate(counts) if n >= whole.needed), len(counts) - 1)
            for index in range(likely, len(counts)):
                if self._is_held(clusters[card][index]):
                    smallest[card] = index
                    break
        for card in filter(smallest.__contains__, reversed(by_memory)):
            while smallest[card] and self._is_held(clusters[card][smallest[card] - 1]):
                smallest[card] -= 1
        self._look_for_faster([clusters[card][index] for card, index in smallest.items()])
        self.say("pricing the plans")
        cards = []
        for card, own in clusters.items():
            held = self._held(own[smallest[card]]) if card in smallest else None
            smaller = own if held is None else own[: smallest[card]]
            cards.append(CardFit(card, held, tuple(map(self._refusal, smaller))))
        turn = turn_of(self.graph)
        return Fitted(self.opened.name, turn, whole.parts, _classes(self.graph, end), tuple(cards))

    def _whole(self, cluster: Cluster) -> tuple[_Known, Mapping[str, int]]:
        """The plan of the whole batch at once on one device, and its bytes when it ends."""
        ample = cluster.with_memory(_AMPLE)
        space = OneDeviceSpace(self.graph, ample, self.request)
        (found,) = space.search(Budget.of(self.request), ()).plans
        whole = _Known.of(found.graph, found.plan, ample, found.evaluation)
        self.known.append(whole)
        return whole, Holdings.of(found.graph, found.plan, ample).at_end(0)

    def _is_held(self, cluster: Cluster) -> bool:
        """Tell whether a plan is known that fits a cluster; it is searched if none is."""
        if self._fitting(cluster):
            return True
        if not self._too_small(cluster):
            self._search(cluster)
        return bool(self._fitting(cluster))

    def _refusal(self, cluster: Cluster) -> NotHeld:
        """Say why no plan is known on a cluster."""
        known = self.searched.get((_memory(cluster), len(cluster)))
        if known is not None:
            return replace(known, cluster=cluster.name)
        why = self._too_small(cluster)
        return NotHeld(cluster.name, len(cluster), proven=bool(why), why=why or _LATE)

    def _too_small(self, cluster: Cluster) -> str:
        """The proof that no plan fits, in words; "" if there is none."""
        least = LeastBytes.of(self.graph, cluster).bytes
        memory = len(cluster) * _memory(cluster)
        if least <= memory:
            return ""
        return f"any plan holds {units.size(least)} at least, of {units.size(memory)}"

    def _fitting(self, cluster: Cluster) -> Sequence[_Known]:
        """The known plans whose bytes a cluster has, those that take most first."""
        devices, memory = len(cluster), _memory(cluster)
        plans = [one for one in self.known if one.devices <= devices and one.needed <= memory]
        return sorted(plans, key=lambda one: -one.needed)

    def _search(self, cluster: Cluster) -> None:
        """Search a plan that fits a cluster in half of the time that is left, once a size."""
        left_s, size = self.deadline_s - now_s(), (_memory(cluster), len(cluster))
        if left_s <= 0 or size in self.searched:
            return
        self.searched[size] = None
        self.say(f"searching a plan on {cluster.name}")
        request = replace(self.request, time_limit_s=left_s / 2)
        if not self.graphs:
            self.graphs.append(graphs_of(self.opened, cluster, request, StageClock(silent)))
        clock = StageClock(silent)
        graphs = replace(self.graphs[0], cluster=cluster, request=request, clock=clock)
        try:
            best = Table(graphs, cluster, request, clock).best()
        except Infeasible as error:
            why = str(error).partition(";")[0]
            self.searched[size] = NotHeld(cluster.name, len(cluster), proven=error.proven, why=why)
        except (ConstraintError, PipelineScheduleError, SearchError) as error:
            self.searched[size] = NotHeld(cluster.name, len(cluster), proven=True, why=str(error))
        else:
            self.known.append(_Known.of(best.graph, best.plan, cluster, best.evaluation))

    def _look_for_faster(self, clusters: Iterable[Cluster]) -> None:
        """Search plans for clusters with much more memory than any plan takes that is known there.

        The largest go first, as long as the time limit leaves as much as a search took.
        """
        took_s = 0.0
        for cluster in sorted(clusters, key=lambda one: (len(one), -_memory(one))):
            whole = self.known[0]
            best = self._fitting(cluster)[0]
            left_s = self.deadline_s - now_s()
            if best is whole or best.needed > USED * _memory(cluster) or left_s <= 2 * took_s:
                continue
            begun_s = now_s()
            self._search(cluster)
            took_s = max(took_s, now_s() - begun_s)

    def _held(self, cluster: Cluster) -> Holds | None:
        """The cost of the fastest known plan that fits a cluster."""
        held = []
        for one in self._fitting(cluster):
            alone = len(cluster) == 1  # nothing is brought to other devices
            figures = evaluate(one.graph, one.plan, cluster, delivers=not alone)
            if figures.fits_exactly:
                holds = Holds(
                    cluster.name,
                    len(cluster),
                    figures.step_s,
                    figures.latency_s,
                    max(figures.needed_bytes.values()),
                    _memory(cluster),
                    one.plan.kind,
                    one.plan.micro_batches,
                    one.parts,
                )
                held.append(holds)
        return min(held, key=lambda holds: holds.step_s, default=None)


def _memory(cluster: Cluster) -> int:
    return cluster.devices[0].memory_bytes
