"""A compiled model of either front end: its plan, its ranks, the folder that it is saved to."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from partitioner.api.compiled.folder import EXAMPLES, GraphFile, is_written, rank_files
from partitioner.api.lowering import lower
from partitioner.api.verify.compare import Verification, VerificationError
from partitioner.api.verify.symbolic.micro_batches import Rows
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.backends.arrays import save_named_arrays
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Origin
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.backends.observed import STEPS, RankLog
from partitioner.backends.optimization import Optimization
from partitioner.backends.runtimes import naming_runtimes
from partitioner.cost_model.cluster.resolve import device_type
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory.sessions import Held
from partitioner.cost_model.schedule.readings import passes, timeline_json
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.foundations.files import (
    check_file,
    refuse_to_replace,
    replace_directory,
    write_file,
)
from partitioner.foundations.no_gc import no_collection
from partitioner.foundations.recent import Recent
from partitioner.frontends.inputs import drawn_inputs
from partitioner.ir.checks import is_a
from partitioner.ir.errors import PartitionerError, did_you_mean, hints_keywords
from partitioner.ir.graph import Graph
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.plan import Plan
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType
from partitioner.report.measured import FILE, Comparison, Measured, PlannedT_co
from partitioner.report.planned import Planned, check_explicit
from partitioner.report.steps import Step, attributed, steps
from partitioner.report.text.tables import fitted
from partitioner.search.request import MOST_EXPLICIT

if TYPE_CHECKING:
    import networkx as nx

    from partitioner.backends.onnx.serving import Session


#: Programs for inputs of other sizes that are kept, beside the planned one; each has its weights.
KEPT_SIZES = 4


class ProfiledRun(Comparison[PlannedT_co]):
    """A plan's prediction beside a measured run of it; printed, a few tables."""

    def __str__(self) -> str:
        """The comparison as lines for people."""
        from partitioner.report.text.show import measured_text

        return measured_text(self)


class Ranks(ABC):
    """The emitted ranks of a plan; whole tensors go in and come out."""

    @abstractmethod
    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one request in this process, in lock-step over simulated communications."""

    @abstractmethod
    def session(self, feed: Feed | None = None) -> Session:
        """Start one process a rank, which stay up between requests."""

    @abstractmethod
    def verify(self, seed: int, inputs: Mapping[str, np.ndarray] | None = None) -> Verification:
        """Compare all ranks with the whole model on whole inputs, by default random valid ones."""

    @abstractmethod
    def prove(self) -> Proof:
        """Follow the programs of all ranks, beside the whole model, without running them."""

    @abstractmethod
    def at(self, optimization: Optimization | None) -> Self:
        """The ranks at a level of optimizations, None: their own; an OptionError of a module's."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the rank files into an existing folder."""

    @abstractmethod
    def close(self) -> None:
        """Free what a run left open and files of its own; the next run makes them anew."""

    @abstractmethod
    def run_written(self, folder: Path, job: LocalJob) -> LocalRun:
        """Run the files that `write` left in a folder.

        Returns:
            The results of the last request or step, and what was measured.

        Raises:
            BackendError: An input is wrong, steps are to be recorded whose last micro-batch is
                smaller, or a rank failed.
            VerificationError: The module's weights or example inputs are fake.
        """


class Model(ABC):
    """A planned model: its graph, and the ways to emit ranks of it and to read them back."""

    delivers_all: bool  #: Whether every rank delivers all results whole.

    @property
    @abstractmethod
    def described(self) -> GraphFile:
        """The model as it is looked at without its weights."""

    @property
    @abstractmethod
    def path(self) -> Path | None:
        """The model's file, which nothing may overwrite; None for a model without one."""

    @property
    def graph(self) -> Graph:
        """The graph that is planned."""
        return self.described.graph

    @property
    def rows(self) -> Rows | None:
        """Rows of the batch in each micro-batch of a step; None where they are not compared."""
        return None

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """Types of the whole inputs of a request, by name."""
        return {name: self.graph.types[name] for name in self.graph.inputs}

    def random_inputs(self, seed: int) -> Mapping[str, np.ndarray]:
        """Valid random inputs of a request, by name."""
        return drawn_inputs(self.described.ranges, seed)

    def example_inputs(self) -> Mapping[str, np.ndarray]:
        """Whole inputs, of which random ones are the elements in another order; none without."""
        return {}

    @abstractmethod
    def resized(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> tuple[Self, Plan]:
        """The model whose inputs have these shapes, and this model's plan for it.

        Raises:
            PartitionerError: The model, or the plan, does not take inputs of such shapes.
        """

    @abstractmethod
    def write_request(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""

    @abstractmethod
    def ranks(self, programs: Programs, plan: Plan, read_from: Path | None = None) -> Ranks:
        """The ranks of a plan, or as the files of a folder hold them, which are of these programs.

        Raises:
            BackendError: A rank's program cannot be emitted, or a rank file is wrong.
        """


@hints_keywords
@dataclass(frozen=True, repr=False, kw_only=True)
class Compiled(Planned):
    """A model with its plan; programs and ranks are made on first use."""

    model: Model
    measured: Measured | None = None  #: A measured run of the plan.

    @classmethod
    def of(
        cls,
        model: Model,
        cluster: Cluster,
        plan: Plan,
        evaluation: Evaluation,
        summary: Mapping[str, Any],
        seconds: Mapping[str, float] | None = None,
        warnings: tuple[str, ...] = (),
        measured: Measured | None = None,
    ) -> Self:
        """A plan of a model; see `Planned`."""
        return cls(
            name=model.described.name,
            graph=model.graph,
            cluster=cluster,
            plan=plan,
            evaluation=evaluation,
            summary=summary,
            seconds=seconds or {},
            warnings=warnings,
            model=model,
            measured=measured,
        )

    @cached_property
    def programs(self) -> Programs:
        """The programs of the ranks.

        Raises:
            ResultError: There are more than `MOST_EXPLICIT` devices.
        """
        check_explicit(self.cluster)
        limits = {d: spec.memory_bytes for d, spec in enumerate(self.cluster.devices)}
        held = Held.of(self.graph, self.run_schedule, limits)
        return lower(
            self.graph,
            self.run_schedule,
            len(self.cluster),
            deliver_all=self.model.delivers_all,
            plain=frozenset() if held is None else held.plain,
            copies=self.evaluation.copies,
        )

    @cached_property
    def run_schedule(self) -> Schedule:
        """See `Planned.run_schedule`: a plan's cost leaves out the sends of results everywhere."""
        results = self.graph.delivered
        if not results:
            return self.schedule
        with no_collection():
            return schedule(
                self.graph,
                self.placed,
                self.cluster,
                everywhere=results,
                pipeline=self.plan.pipeline,
            )

    @cached_property
    def ranks(self) -> Ranks:
        """The programs, emitted.

        Raises:
            ResultError: As `schedule`.
            BackendError: A program cannot be emitted.
        """
        return self.model.ranks(self.programs, self.plan)

    def of_sizes(self, shapes: Mapping[str, Sequence[int]]) -> Self:
        """The program of the same plan for inputs of other sizes; no plan is searched.

        An ONNX model is read with these sizes, each node keeps its devices and the dims that are
        cut, and ranks are made anew: what runs is what a plan for these sizes would run.
        `Compiled.run` and `Compiled.verify` do it by themselves; the last few programs are kept.

        Args:
            shapes: Sizes of inputs by name; the others have the planned ones.

        Raises:
            BackendError: There is no such input, or the model or its plan does not fit the sizes.
        """
        planned = {name: type_.shape for name, type_ in self.model.input_types.items()}
        for name in shapes.keys() - planned.keys():
            hint = did_you_mean(name, planned)
            raise BackendError(f"there is no input {name!r}, only {', '.join(planned)}{hint}")
        wanted = planned | {name: tuple(sizes) for name, sizes in shapes.items()}
        if wanted == planned:
            return self
        key = tuple(sorted(wanted.items()))
        if key not in self._of_sizes:
            try:
                made = self._of_model(*self.model.resized(wanted, self.plan))
            except PartitionerError as error:
                other = (
                    f"{name!r} has shape {sizes}, not {planned[name]} as planned"
                    for name, sizes in wanted.items()
                    if sizes != planned[name]
                )
                raise BackendError(f"input {', '.join(other)}: {one_line(error)}") from error
            self._of_sizes[key] = made
        return self._of_sizes[key]

    @cached_property
    def _of_sizes(self) -> Recent[tuple[tuple[str, tuple[int, ...]], ...], Self]:
        return Recent(KEPT_SIZES)

    def _taking(self, inputs: Mapping[str, np.ndarray] | None) -> Self:
        """The program for inputs of these sizes; this one for inputs that none takes."""
        types = self.model.input_types
        if inputs is None or not is_a(inputs, Mapping) or inputs.keys() != types.keys():
            return self
        given = {name: np.shape(array) for name, array in inputs.items()}
        alike = all(len(given[name]) == type_.rank for name, type_ in types.items())
        return self.of_sizes(given) if alike else self

    def _of_model(self, model: Model, plan: Plan) -> Self:
        """The program of another form of the model with a plan on the same cluster."""
        figures = evaluate(model.graph, plan, self.cluster)
        about = self.summary, self.seconds, self.warnings
        return self.of(model, self.cluster, plan, figures, *about)

    def run(
        self, inputs: Mapping[str, np.ndarray], *, optimization: Optimization | None = None
    ) -> dict[str, np.ndarray]:
        """Run all ranks in this process, in lock-step over simulated communications.

        The ranks stay open (ONNX Runtime's sessions, a module's graphs) for the next call, until
        you call `close` or this object is freed.

        Args:
            inputs: Whole inputs by name of the graph's inputs; bfloat16 and float8 as arrays of
                ml_dtypes' types.
            optimization: Level of ONNX Runtime's optimizations of an ONNX model: "disable"
                (cutting between operators changes no bit), "basic", "extended" or, by default,
                "all".

        Returns:
            Whole outputs by name of the graph's outputs.

        Raises:
            BackendError: An input is missing, unknown, or of the wrong shape or type, or an
                input or output is of 4-bit elements.
        """
        with naming_runtimes():
            return self._taking(inputs).ranks.at(optimization).run(inputs)

    def session(
        self, feed: Feed | None = None, *, optimization: Optimization | None = None
    ) -> Session:
        """Start the ranks of an ONNX model as processes that stay up and answer requests.

        ``with result.session() as session: session.run(inputs)`` gives what `run` gives. One
        process a rank loads its file once; `Session.run_all` has several requests in flight.

        Args:
            feed: Results that are inputs of the next request and never leave their ranks, as
                ``{"present.*": "past_key_values.*"}``; a ``*`` stands for the same text in both
                names. None for those that the plan was made for (`compile(..., feed=)`), {} for
                none.
            optimization: As of `run`.

        Raises:
            OptionError: There is no such result or input.
            BackendError: A rank cannot be started, a result does not lie where the input does that
                it becomes, or the model is a PyTorch module: its ranks stay
                up under torchrun, as `ModuleProgram.module`.
        """
        with naming_runtimes():
            return self.ranks.at(optimization).session(feed)

    def close(self) -> None:
        """Free the ranks that runs have opened, and their temporary files.

        A later run opens them again. ``with partitioner.compile(...) as result:`` closes at its
        end; an object that is not closed frees them when it is gone.
        """
        if "ranks" in self.__dict__:
            self.ranks.close()
        for program in self._of_sizes.values():
            program.close()
        self._of_sizes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def verify(
        self,
        seed: int = 0,
        inputs: Mapping[str, np.ndarray] | None = None,
        *,
        optimization: Optimization | None = None,
        symbolic: Literal[False] = False,
    ) -> Verification: ...

    @overload
    def verify(self, *, symbolic: Literal[True]) -> Proof: ...

    def verify(
        self,
        seed: int = 0,
        inputs: Mapping[str, np.ndarray] | None = None,
        *,
        optimization: Optimization | None = None,
        symbolic: bool = False,
    ) -> Verification | Proof:
        """Compare all ranks with the whole model on random valid inputs, or on given ones.

        Results are compared, and of a module also written buffers and gradients. A module's inputs
        hold the example inputs' elements in another order; floats that are all equal are drawn. A
        module with dropout is compared with the same program on one device, whose masks are the
        same.

        Args:
            seed: Seed of the inputs and of dropout.
            inputs: Whole inputs by name, in place of random ones.
            optimization: As of `run`, for both sides.
            symbolic: Run nothing, and prove from the programs of the ranks that they compute the
                whole model, whatever the inputs are: of an ONNX model from its rank files, of a
                module, and on more than `MOST_EXPLICIT` devices, from the programs that files are
                made from.

        Returns:
            The differences; true if all is equal. A difference raises nothing. A symbolic
            verification returns a `Proof`, true if the ranks are proven to be right.

        Raises:
            VerificationError: It would not fit this machine's free memory, the model draws random
                numbers without a seed, the module's weights or example inputs are fake, or
                `symbolic` is given with inputs or another argument.
            BackendError: A rank fails, or inputs are not the model's.
        """
        if not symbolic:
            with naming_runtimes():
                return self._taking(inputs).ranks.at(optimization).verify(seed, inputs)
        if seed or inputs is not None or optimization is not None:
            raise VerificationError(
                "a symbolic verification runs nothing: leave seed, inputs and optimization out"
            )
        return self._prove_planned() if len(self.cluster) > MOST_EXPLICIT else self.ranks.prove()

    def verify_written(
        self,
        folder: Path,
        seed: int = 0,
        inputs: Mapping[str, np.ndarray] | None = None,
        *,
        optimization: Optimization | None = None,
    ) -> Verification:
        """Compare the rank files of a folder that the plan was saved to with the whole model.

        Raises:
            DirectoryError: There are no rank files, they are of another plan, or they hold other
                weights than the model.
            BackendError: A rank file is wrong, or a rank fails.
            VerificationError: As `verify`.
        """
        rank_files(folder).check(self.plan, self.graph)
        ranks = self.model.ranks(self.programs, self.plan, folder)
        return ranks.at(optimization).verify(seed, inputs)

    def prove_written(self, folder: Path) -> Proof:
        """Prove that the rank files of a folder compute the whole model; nothing is run.

        Of a folder with a plan only, the programs are followed that files would be made from.

        Raises:
            DirectoryError: A rank's file is missing, or the files are of another plan.
            BackendError: A rank file is wrong.
            VerificationError: As `verify`.
        """
        files = rank_files(folder)
        if files.are_none:
            return self._prove_planned()
        files.check(self.plan)
        return self.model.ranks(self.programs, self.plan, folder).prove()

    def _prove_planned(self) -> Proof:
        """Prove the programs that rank files would be made from, where there are no files."""
        from partitioner.api.verify.symbolic.ir_programs import prove_programs

        every, devices = self.model.delivers_all, len(self.cluster)
        copies = self.evaluation.copies
        lowered = lower(self.graph, self.run_schedule, devices, deliver_all=every, copies=copies)
        proof = prove_programs(self.graph, lowered, self.model.rows)
        note = "of the programs that rank files would be made from: there are none"
        return replace(proof, notes=(note, *proof.notes))

    def save(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        plan_only: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> Path:
        """Write the plan, the rank files, the timeline and the report; all of them or nothing.

        On more than `MOST_EXPLICIT` devices rank files are left out, and the summary's notes say
        so.

        Args:
            directory: Folder to make.
            force: Replace the folder if it exists; files that no compilation writes are kept.
            plan_only: Leave the rank files out.
            progress: Called with a line of text before a stage that may take long.

        Raises:
            DirectoryError: The folder exists and `force` is not set, it holds something else than a
                plan, or it cannot be written.
            BackendError: A rank's program cannot be written as a file.
        """
        target = Path(directory)

        def write(folder: Path) -> None:
            (folder / "plan.json").write_text(self.plan.to_json())
            summary = {**self.summary, "seconds": dict(self.seconds)}
            (folder / "summary.json").write_text(
                json.dumps(summary, indent=1, allow_nan=False) + "\n"
            )
            self.model.write_request(folder, target)
            self.model.described.write(folder)
            if self.measured is not None:
                (folder / FILE).write_text(self.measured.to_json(), encoding="utf-8")
            timeline = simulate(self.schedule)
            text = timeline_json(timeline, passes(self.schedule, timeline))
            (folder / "timeline.json").write_text(text)
            if progress is not None:
                progress("drawing the report")
            (folder / "report.html").write_text(self._page(), encoding="utf-8")
            if not plan_only and len(self.cluster) <= MOST_EXPLICIT:
                self.ranks.write(folder)
                if examples := self.model.example_inputs():
                    save_named_arrays(folder / EXAMPLES, examples)

        replace_directory(target, write, force=force, ours=is_written)
        return target

    def show(self, *, everything: bool = False) -> None:
        """Print the plan, its devices, operators and communications, as `partition show` does.

        A measured run of the plan is printed beside its prediction.

        Args:
            everything: A line for each node, names in full, each operator's rule, and all tensors.
        """
        from partitioner.report.text.show import show

        print(fitted(show(self, everything=everything)))
        if self.comparison is not None:
            print(fitted(f"\n{self.comparison}"))

    def explain(self, node: str | None = None) -> None:
        """Print what limits the plan, as `partition explain` does.

        Args:
            node: Name of a node, or of a tensor that one makes: the costs of its other strategies
                are printed instead.

        Raises:
            UnknownNodeError: The model has no such node, or no node makes the tensor.
        """
        from partitioner.report.text.explain import explain, explain_node

        text = explain(self, self.comparison) if node is None else explain_node(self, node)
        print(fitted(text))

    def table(self) -> list[Step]:
        """The steps of the plan in order, operators and communications, as rows for a data frame.

        ``pandas.DataFrame(result.table())`` takes them; `Step` describes the columns. A plan in
        stages has the steps of one micro-batch.
        """
        return steps(self.graph, self.schedule)

    def to_networkx(self) -> nx.DiGraph:
        """Make a `networkx.DiGraph` of the model, with the plan's figures on its nodes.

        Nodes and edges are those of `Graph.to_networkx`. A node has also its `devices` in the
        order of its mesh, its `cuts` ("n/x"; "" if none), its `stage` (0 without stages), the
        predicted `seconds` of its busiest device, its `flops`, the `device_bytes` of its results
        on the device that holds most of them, and the `sent_bytes` of its results that cross
        between devices. A plan in stages has the figures of one micro-batch.
        """
        return attributed(self.graph, self.placed, self.schedule)

    def device_of(self, node: str) -> tuple[int, ...]:
        """The devices that compute a node, in the order of its mesh.

        Args:
            node: Name of a node, or of a tensor that one makes.

        Returns:
            One device of a node that runs whole on it, several of one that is cut or replicated.

        Raises:
            UnknownNodeError: The model has no such node, or no node makes the tensor.
        """
        return self.node(node).mesh.devices

    def report(self, path: str | Path) -> Path:
        """Write the report: one HTML file that shows the plan and needs no network.

        Args:
            path: File to write; an existing one is replaced.

        Raises:
            FileError: It cannot be written, or is the model itself.
        """
        target = Path(path)
        check_file(target)
        if self.model.path is not None:
            refuse_to_replace(self.model.path, target)
        write_file(target, self._page().encode())
        return target

    def profile(
        self,
        inputs: Mapping[str, np.ndarray] | None = None,
        *,
        steps: int = STEPS,
        requests: int = 1,
        seed: int = 0,
    ) -> ProfiledRun[Self]:
        """Run the ranks on this machine, one process each, and record what they do.

        Every kernel and communication of every rank is recorded, and the most bytes that each rank
        held, of steps of one request each.

        Args:
            inputs: Whole inputs by name of the graph's inputs; None draws valid random ones.
            steps: Number of recorded steps, at least 1.
            requests: Requests in flight in a run without recording, beside the steps; 1 for none.
            seed: Seed of the random inputs.

        Returns:
            The plan's prediction beside the measurements; its `result` is this plan with the
            measurements, which `report` and `save` write.

        Raises:
            BackendError: An input is wrong, or a rank failed.
        """
        with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as name:
            folder = Path(name)
            self.ranks.write(folder)
            job = LocalJob(inputs=inputs, requests=requests, seed=seed, recorded=steps)
            run = self.ranks.run_written(folder, job)
        return self.compared(run.logs, run.seconds, requests)

    def compared(
        self, logs: Sequence[RankLog], seconds: float = 0.0, requests: int = 1
    ) -> ProfiledRun[Self]:
        """The prediction beside what ranks recorded, and so many requests in flight took."""
        stream_s = seconds / requests if requests > 1 else None
        measured = Measured.of(self.plan.digest, logs, stream_s)
        return ProfiledRun(replace(self, measured=measured), measured)

    @property
    def measuring_device(self) -> str:
        """Type of the device that a module's ranks run on when they are recorded by default.

        It is "cuda" if the plan is for GPUs of this machine, else "cpu".
        """
        profile = self.cluster.devices[0].profile
        return (None if profile is None else device_type(profile.device)) or "cpu"

    @property
    def comparison(self) -> ProfiledRun[Self] | None:
        """The plan's prediction beside the measured run of it; None if there was no run."""
        return None if self.measured is None else ProfiledRun(self, self.measured)

    def _page(self) -> str:
        from partitioner.report.page.data import report_data
        from partitioner.report.page.page import render

        return render(report_data(self, self.comparison))

    def _repr_html_(self) -> str:
        from partitioner.report.card import card

        return card(self, self.comparison)


def origin(plan: Plan, graph: Graph) -> Origin:
    """The mark of a plan's rank files, by which readers tell whether they are up to date."""
    return Origin(plan.digest, graph.weights_digest)
