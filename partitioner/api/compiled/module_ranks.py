"""The ranks of a compiled PyTorch module: run, verified, written; the module's state for them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from partitioner.api.compiled.base import Ranks, origin
from partitioner.api.compiled.folder import ModuleFiles
from partitioner.api.compiled.taken_over import LAST, taken_over
from partitioner.api.lowering import lower
from partitioner.api.verify.compare import Verification, check_memory
from partitioner.api.verify.module import check_contents, random_arguments, verify_module
from partitioner.api.verify.symbolic.proof import IN_BLOCKS, Proof
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.backends.optimization import Optimization
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH
from partitioner.backends.torch.graphs.phases import Rest, emit_phases
from partitioner.backends.torch.running.all_ranks import AllRanks, Step
from partitioner.backends.torch.state.initialise import Init, Initialiser, without_contents
from partitioner.backends.torch.state.whole import OwnState, Stored, Submodule
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.foundations.no_gc import only_new_objects_collected
from partitioner.frontends.torch.building.calls import constant_loader
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.phases import have_equal_fixed_nodes
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.program import Programs

if TYPE_CHECKING:
    from partitioner.backends.onnx.serving import Session
    from partitioner.backends.torch.local import StepFiles
    from partitioner.backends.torch.measuring.recording import Update
    from partitioner.backends.torch.running.submodules import Source

#: Types of plain values.
_PLAIN = int, float, complex, str, tuple, torch.dtype, type(None)


def rest_plan(module: TracedModule, plan: Plan) -> tuple[Graph, Plan] | None:
    """The graph and the plan of the last, smaller micro-batch of a plan's step, if any.

    Raises:
        ResultError: The plan does not fit it.
    """
    if module.rest is None:
        return None
    graph = module.rest.of(plan.nodes).graph
    return graph, taken_over(plan, module.graph, graph, LAST)


def rest_of(module: TracedModule, plan: Plan) -> Rest | None:
    """The last, smaller micro-batch of a plan's step, if any; a ResultError if it does not fit."""
    planned = rest_plan(module, plan)
    if planned is None:
        return None
    graph, moved = planned
    cluster = Cluster.from_data(plan.cluster)
    tasks = schedule(
        graph,
        resolve(graph, moved),
        cluster,
        everywhere=graph.delivered,
        pipeline=moved.pipeline,
    )
    return Rest(
        lower(graph, tasks, len(cluster), deliver_all=True),
        graph,
        not have_equal_fixed_nodes(module.graph, graph),
    )


@dataclass(frozen=True, eq=False)
class ModuleRanks(Ranks):
    """The ranks of a module: a graph each for every phase."""

    module: TracedModule
    programs: Programs
    plan: Plan  #: The plan of the programs.
    read_from: Path | None = None  #: Folder of files that are there; None if they are emitted.
    rest: Rest | None = None  #: The last micro-batch of a step, if it is smaller.
    _made: dict[tuple[int, ...], AllRanks] = field(default_factory=dict, repr=False)

    @property
    def all_ranks(self) -> AllRanks:
        """The ranks' graphs in this process; made again where a constant weight was written to."""
        versions = self.module.constant_versions()
        if versions in self._made:
            return self._made[versions]
        self._made.clear()
        traced, signature = self.module.traced, self.module.signature
        written = {value: traced.stored[name] for name, value in traced.written.items()}
        emitted = AllRanks(
            self.programs,
            self.module.graph,
            self.module.micro or WHOLE_BATCH,
            signature.tangent,
            signature.seed,
            written,
            rest=self.rest,
        )
        if self.read_from is not None:
            emitted = emitted.with_files(self.read_from)
        self._made[versions] = emitted
        return emitted

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
        """The step of one call of the module on all ranks, in training with its backward pass."""
        from partitioner.backends.torch.guards.originals import check_weights

        check_weights(self.module.module, "the program")
        inputs = self.module.signature.feed(args, kwargs, seed)
        return self.all_ranks.step(inputs, self.module.stored_values())

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Ranks.run`; inputs and outputs have the names of the graph's values."""
        results = self.step(*self._call(inputs), seed=0).results
        types = self.programs.outputs
        return {name: to_numpy(value, types[name].dtype) for name, value in results.items()}

    def _call(self, inputs: Mapping[str, np.ndarray]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments by names of the graph's inputs; a BackendError for others."""
        signature = self.module.signature
        tensors = {
            name: from_numpy(array, signature.types[name].dtype)
            for name, array in inputs.items()
            if name in signature.types
        }
        names = {name for name in signature.inputs if name}
        if tensors.keys() != names or len(tensors) < len(inputs):
            raise BackendError(
                f"inputs are {', '.join(sorted(inputs)) or 'none'}; the module's are "
                f"{', '.join(sorted(names)) or 'none'}"
            )
        return signature.call(tensors)

    def verify(self, seed: int, inputs: Mapping[str, np.ndarray] | None = None) -> Verification:
        """See `Ranks.verify`; inputs have the names of the graph's values."""
        check_contents(self.module)
        check_memory(self.module.graph)
        given = None if inputs is None else self._call(inputs)
        with self.module.traced.captured.autocast.region():
            return verify_module(self.module, self.all_ranks, seed, given)

    def prove(self) -> Proof:
        """See `Ranks.prove`: of files, or of the programs that graphs are emitted from."""
        from partitioner.api.verify.symbolic.ir_programs import prove_programs
        from partitioner.api.verify.symbolic.micro_batches import Rows

        in_blocks = (IN_BLOCKS,) if self.plan.blocks else ()
        if self.read_from is not None:
            from partitioner.api.verify.symbolic.module_files import prove_files

            last = None if self.rest is None else self.rest.graph
            proof = prove_files(self.read_from, self.module.graph, last)
            return replace(proof, notes=(*proof.notes, *in_blocks))
        micro = self.module.micro or WHOLE_BATCH
        rows = Rows(micro.count, micro.rows, micro.shares)
        proofs = [prove_programs(self.module.graph, self.programs, rows)]
        if self.rest is not None:
            own = (micro.count - 1,)
            proofs.append(prove_programs(self.rest.graph, self.rest.programs, rows, own))
        proof = next((p for p in proofs if not p), proofs[0])
        note = "of the programs that the graphs of ranks are made from"
        return replace(proof, notes=(note, *proof.notes, *in_blocks))

    def at(self, optimization: Optimization | None) -> Self:
        """See `Ranks.at`."""
        if optimization is None:
            return self
        raise OptionError(
            f"optimization is {optimization!r}: that is of ONNX Runtime, the plan is of a module"
        )

    def close(self) -> None:
        """See `Ranks.close`."""
        self._made.clear()

    def write(self, folder: Path) -> None:
        """See `Ranks.write`; ranks are made one at a time, as each has its part of the weights."""
        from partitioner.backends.torch.files.rank_files import write_phases
        from partitioner.backends.torch.guards.originals import check_weights

        if not self.module.options.training:  # else no weights are written
            check_weights(self.module.module, "save()")
        graph, cpu = self.module.graph, torch.device("cpu")
        micro = self.module.micro or WHOLE_BATCH
        mark = origin(self.plan, graph)
        with only_new_objects_collected():
            for rank in range(len(self.programs.ranks)):
                phases = emit_phases(self.programs, rank, graph, cpu)
                write_phases(folder, self.programs, phases, mark, micro)
                del phases
                if self.rest is not None:
                    last = emit_phases(self.rest.programs, rank, self.rest.graph, cpu)
                    write_phases(folder, self.rest.programs, last, mark, micro, last=True)
                    del last
                gc.collect()  # graphs refer to themselves

    def session(self, feed: Feed | None = None) -> Session:  # noqa: ARG002 - see below
        """See `Ranks.session`: a BackendError, as `module()` is what stays up."""
        raise BackendError(
            "a session is of an ONNX model: a module's ranks stay up under torchrun, as "
            "program.module(), which each process calls with the same inputs"
        )

    def run_written(self, folder: Path, job: LocalJob) -> LocalRun:
        """See `Ranks.run_written`; a step has both passes, and the optimizer's with a rate of 0."""
        from partitioner.backends.torch.local import run_module_files, run_steps

        if job.recorded:
            self.check_even()
        check_contents(self.module)
        if job.requests < 1:
            raise BackendError(f"requests is {job.requests}; it must be at least 1")
        if job.inputs is None:
            args, kwargs = random_arguments(self.module, job.seed)
        else:
            args, kwargs = self._call(job.inputs)
        fed = self.module.signature.feed(args, kwargs, job.seed)
        if not ModuleFiles(folder).needs_model:
            types = self.module.graph.types
            arrays = {name: to_numpy(tensor, types[name].dtype) for name, tensor in fed.items()}
            recorded, device = job.recorded, job.device
            return run_module_files(folder, arrays, job.requests, steps=recorded, device=device)
        files = replace(self.step_files(folder, fed), device=job.device)
        run = run_steps(files, job.requests, recorded=job.recorded)
        results = self.all_ranks.micro.whole(run.results[self._first])
        types = self.programs.outputs
        arrays = {name: to_numpy(value, types[name].dtype) for name, value in results.items()}
        return LocalRun(arrays, run.seconds, run.logs)

    def step_files(self, folder: Path, inputs: Mapping[str, torch.Tensor]) -> StepFiles:
        """The files in a folder with what they need for a step with these whole inputs."""
        from partitioner.backends.torch.agreeing.groups import group_ranks
        from partitioner.backends.torch.graphs.phases import links_of
        from partitioner.backends.torch.local import RankSteps, StepFiles

        all_ranks, optimizer = self.all_ranks, self.module.options.optimizer
        starts = all_ranks.start(inputs, self.module.stored_values())
        shown = set(filter(None, self.module.signature.results))
        outputs = self.programs.ranks[self._first].outputs  # that has them whole
        programs = [self.programs, *([] if self.rest is None else [self.rest.programs])]
        ranks = [
            RankSteps(
                phases,
                all_ranks.runs(rank),
                starts[rank],
                {o.whole: o.value for o in outputs if o.whole in shown and rank == self._first},
                self._updates(rank),
            )
            for rank, phases in enumerate(all_ranks.phases)
        ]
        return StepFiles(
            folder.resolve(),
            ranks,
            sorted({link for one in programs for link in links_of(one)}),
            sorted({group for one in programs for group in group_ranks(one)}),
            optimizer if self.module.options.training else "",
            copies=self.programs.copies,
        )

    @property
    def _first(self) -> int:
        """The first rank that has results: rank 0, or that of the first whole copy."""
        return 0 if self.programs.copies is None else self.programs.copies.devices[0][0]

    def check_even(self) -> None:
        """Refuse, as a BackendError, a smaller last micro-batch, of which no record is made."""
        if self.rest is not None:
            raise BackendError(
                "steps whose last micro-batch is smaller are not recorded, as tasks are compared "
                "with those of whole ones: give micro_batches that divide the batch"
            )

    def _updates(self, rank: int) -> list[Update]:
        from partitioner.backends.torch.measuring.recording import Update
        from partitioner.backends.torch.state.shards import region_within

        traced, homes, graph = self.module.traced, self.programs.homes, self.module.graph
        own = [homes[traced.stored[name]].placement.sharding for name in traced.gradients]
        is_cut = any(sharding.axes for sharding in own)  # all are DTensors then
        results = {output.whole: output.value for output in self.programs.ranks[rank].outputs}
        updates = []
        for name, gradient in traced.gradients.items():
            home = homes[traced.stored[name]]
            if rank in home.placement.mesh.devices:
                steps = (n for n in graph.consumers[gradient] if "optimizer" in n.attrs)
                node = next(steps, graph.producers[gradient]).name
                whole = homes[gradient].placement
                part = None
                if whole.sharding != home.placement.sharding:
                    part = region_within(home.placement, whole, rank)
                updates.append(Update(node, home.name, results[gradient], is_cut, part))
        return updates


def stored_of(module: TracedModule) -> tuple[Stored, ...]:
    """List the parameters and buffers that the ranks hold, by the first of their names."""
    captured, traced, training = module.traced.captured, module.traced, module.options.training
    names: dict[str, list[str]] = {}
    for name, first in captured.ties.items():
        names.setdefault(first, []).append(name)
    return tuple(
        Stored(
            traced.stored.get(of, ""),
            tuple(names[of]),
            trained=of in traced.gradients,
            frozen=not captured.tensors[of].requires_grad,
            parameter=isinstance(captured.tensors[of], nn.Parameter),
            shape=tuple(captured.tensors[of].shape),
            dtype=captured.tensors[of].dtype,
            gradient=traced.gradients.get(of, ""),
            written=traced.written.get(of, ""),
            hidden=frozenset(names[of]) - captured.persistent,
            rest=traced.rests.get(of, ""),
        )
        for of in names
        if of in traced.stored or (training and of in captured.persistent)
    )


def weights_of(
    module: TracedModule, stored: Sequence[Stored], init_seed: int | None, init: Init | None
) -> Source:
    """The source of the ranks' weights; a BackendError if they are fake and nothing makes them."""
    if init_seed is not None or init is not None:
        return Initialiser(module.module, init_seed or 0, init)
    tensors = module.traced.captured.tensors
    fake = [e.names[0] for e in stored if without_contents(tensors[e.names[0]])]
    fake += [name for name in module.traced.fixed if without_contents(tensors[name])]
    if fake:
        raise BackendError(
            f"{fake[0]} and {len(fake) - 1} more have no contents, the module's weights are "
            "fake: give init_seed=, or compile the module with its weights"
        )
    return tensors.__getitem__


def with_contents(graph: Graph, traced: ModuleGraph, source: Source) -> Graph:
    """Return a graph whose fake constants have their contents from a source."""
    tensors = traced.captured.tensors
    fake = {v: name for name, v in traced.fixed.items() if without_contents(tensors[name])}
    if not fake:
        return graph

    def contents(name: str) -> np.ndarray:
        return constant_loader(source(name), name)()

    constants = {
        value: replace(constant, load=partial(contents, fake[value])) if value in fake else constant
        for value, constant in graph.constants.items()
    }
    return replace(graph, constants=constants)


def submodules_of(module: TracedModule) -> Mapping[str, Submodule]:
    """The submodules of the module by path, in its order, and the module itself."""
    snapshot = module.snapshot
    settings, modes = snapshot.settings, snapshot.modes
    constants = {path: {n for n in one if n.isidentifier()} for path, one in settings.items()}
    for name in module.traced.fixed:
        path, _, leaf = name.rpartition(".")
        constants.setdefault(path, set()).add(leaf)
    submodules: dict[str, Submodule] = {}
    first: dict[int, str] = {}
    for path, part in module.module.named_modules(remove_duplicate=False):
        if first.setdefault(id(part), path) != path:
            submodules[path] = Submodule(first=first[id(part)])
            continue
        tensors = {**vars(part)["_parameters"], **vars(part)["_buffers"]}
        absent = frozenset(name for name, tensor in tensors.items() if tensor is None)
        names, mode = frozenset(constants.get(path, ())), modes.get(path, True)
        values = _plain_values(part, settings.get(path, {}))
        if not path:  # attributes that are no tensors and no plain values, as a config
            values |= {
                name: value
                for name, value in vars(part).items()
                if not name.startswith("_") and not isinstance(value, (*_PLAIN, torch.Tensor))
            }
        state = OwnState.of(part) if module.options.training else OwnState()
        submodules[path] = Submodule(type(part), names, absent, mode, values=values, state=state)
    return submodules


def _plain_values(part: nn.Module, settings: Mapping[str, object]) -> dict[str, object]:
    """Plain attributes of a submodule that the trace left: `settings`, by attribute and place."""
    values = {name: value for name, value in settings.items() if name.isidentifier()}
    for name in {path.partition("[")[0] for path in settings} - values.keys():
        value = vars(part).get(name)
        if isinstance(value, tuple) and all(isinstance(one, int | float | str) for one in value):
            values[name] = value
    return {name: value for name, value in values.items() if isinstance(value, _PLAIN)}
