"""Compiled PyTorch modules: their ranks run, are verified, and train under torchrun."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalRun
from partitioner.backends.observed import STEPS, RankLog
from partitioner.backends.optimization import Optimization
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH
from partitioner.backends.torch.graphs.phases import Rest, emit_phases
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.running.all_ranks import AllRanks, Step
from partitioner.compiled.base import Compiled, Model, ProfiledRun, Ranks, origin
from partitioner.compiled.folder import ModuleRequest, load_plan
from partitioner.compiled.rank_files import ModuleFiles
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.torch.building.calls import constant_loader
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.source import ModuleSource
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.errors import OptionError, hints_keywords
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import have_equal_fixed_nodes
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType
from partitioner.lowering import lower
from partitioner.no_gc import only_new_objects_collected
from partitioner.report.measured import Measured
from partitioner.verify.compare import Verification, check_memory
from partitioner.verify.module import (
    check_contents,
    has_no_contents,
    random_arguments,
    verify_module,
)

if TYPE_CHECKING:
    from partitioner.backends.torch.local import StepFiles
    from partitioner.backends.torch.measuring.recording import Update
    from partitioner.backends.torch.running.rank_module import RankModule, Source
    from partitioner.backends.torch.state.initialise import Init
    from partitioner.backends.torch.state.whole import Stored, Submodule, Whole


@dataclass(frozen=True)
class ModuleModel(Model):
    """A PyTorch module.

    Attributes:
        module: The module and its trace.
        source: The file or factory that the module came from, if any.
    """

    module: TracedModule
    source: ModuleSource
    files = ModuleFiles
    delivers_all = True

    @property
    def graph(self) -> Graph:
        """The traced graph: the forward pass and, in training, the backward pass."""
        return self.module.graph

    @property
    def name(self) -> str:
        """The name of the module's file or factory, or its class."""
        return self.source.name or self.graph.name

    @property
    def path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

    @property
    def delivered(self) -> frozenset[str]:
        """The module's results: every rank returns them whole."""
        return frozenset(value for value in self.module.traced.results if value)

    def example_inputs(self) -> dict[str, np.ndarray]:
        """See `Model.example_inputs`; none of a plan that runs with the module's values."""
        module = self.module
        if module.options.training or module.micro is not None or has_no_contents(module):
            return {}
        signature, types = module.signature, module.graph.types
        args, kwargs = pytree.tree_unflatten(signature.example, signature.in_spec)
        return {
            name: to_numpy(tensor.detach().cpu(), types[name].dtype)
            for name, tensor in signature.feed(args, kwargs, 0).items()
        }

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """See `Model.input_types`: of the module's tensors."""
        signature = self.module.signature
        return {name: signature.types[name] for name in signature.inputs if name}

    def write_request(self, folder: Path, final: Path) -> None:
        """See `Model.write_request`."""
        source, options = self.source, self.module.options
        ModuleRequest(
            source.file,
            source.factory,
            self.graph.digest,
            self.module.signature.traced,
            options.training,
            options.optimizer,
            options.at_rest,
            options.loads,
        ).write(folder, final)

    def emit(self, programs: Programs, plan: Plan) -> ModuleRanks:
        """See `Model.emit`."""
        return ModuleRanks(self.module, programs, plan, rest=rest_of(self.module, plan))

    def read(self, programs: Programs, folder: Path) -> ModuleRanks:
        """See `Model.read`."""
        rest = rest_of(self.module, load_plan(folder))
        return ModuleRanks(self.module, programs, read_from=folder, rest=rest)


def rest_of(module: TracedModule, plan: Plan) -> Rest | None:
    """The last micro-batch of a plan's step on the ranks, if it is smaller than the others.

    Raises:
        ResultError: The plan does not fit it.
    """
    from partitioner.compiled.variants import taken_over

    if module.rest is None:
        return None
    rest = module.rest.of(plan.nodes)
    moved = taken_over(plan, module.graph, rest.graph)
    cluster = Cluster.from_data(plan.cluster)
    results = frozenset(filter(None, rest.traced.results))
    tasks = schedule(
        rest.graph,
        resolve(rest.graph, moved),
        cluster,
        everywhere=results,
        pipeline=moved.pipeline,
    )
    return Rest(
        lower(rest.graph, tasks, len(cluster), deliver_all=True),
        rest.graph,
        not have_equal_fixed_nodes(module.graph, rest.graph),
    )


@dataclass(frozen=True, eq=False)
class ModuleRanks(Ranks):
    """The ranks of a module: a graph each for every phase.

    Attributes:
        module: The module and its trace.
        programs: The programs of the ranks.
        plan: The plan of the programs; None if the ranks were read from files.
        read_from: Folder of the files that were read; None if the ranks were emitted.
        rest: The last micro-batch of a step, if it is smaller.
    """

    module: TracedModule
    programs: Programs
    plan: Plan | None = None
    read_from: Path | None = None
    rest: Rest | None = None
    _made: dict[tuple[int, ...], AllRanks] = field(default_factory=dict, repr=False)

    @property
    def all_ranks(self) -> AllRanks:
        """The ranks' graphs, which run in this process.

        They hold constant weights as they are: made again where one was written to.
        """
        versions = self.module.constant_versions()
        if versions not in self._made:
            self._made.clear()
            self._made[versions] = self._all_ranks()
        return self._made[versions]

    def _all_ranks(self) -> AllRanks:
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
        return emitted if self.read_from is None else emitted.with_files(self.read_from)

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
        """The step of one call of the module on all ranks, in training with its backward pass.

        Raises:
            BackendError: The arguments are not like the example inputs, or a rank's module has
                trained copies of the weights.
        """
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
        """The arguments of the module from arrays by the names of the graph's inputs.

        Raises:
            BackendError: One is missing or unknown.
        """
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
        return verify_module(self.module, self.all_ranks, seed, given)

    def at(self, optimization: Optimization) -> NoReturn:
        """See `Ranks.at`."""
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

        assert self.plan is not None
        if not self.module.options.training:  # else no weights are written
            check_weights(self.module.module, "save()")
        graph, cpu = self.module.graph, torch.device("cpu")
        mark = origin(self.plan, graph)
        with only_new_objects_collected():
            for rank in range(len(self.programs.ranks)):
                phases = emit_phases(self.programs, rank, graph, cpu)
                write_phases(folder, self.programs, phases, mark)
                del phases
                if self.rest is not None:
                    last = emit_phases(self.rest.programs, rank, self.rest.graph, cpu)
                    write_phases(folder, self.rest.programs, last, mark, last=True)
                    del last
                gc.collect()  # graphs refer to themselves

    def run_seconds(self, folder: Path, count: int) -> float:
        """See `Ranks.run_seconds`; a step is a forward and a backward pass and the optimizer's."""
        return self.run_written(folder, None, count).seconds

    def run_written(
        self,
        folder: Path,
        inputs: Mapping[str, np.ndarray] | None,
        requests: int = 1,
        *,
        seed: int = 0,
        recorded: int = 0,
        device: str = "cpu",
    ) -> LocalRun:
        """Run the files that `write` left in a folder, one process of this machine a rank.

        Args:
            folder: The folder.
            inputs: Whole arguments of the module by name; None draws valid random ones.
            requests: Number of requests or, in training, of steps; one more goes before them.
            seed: Seed of the drawn inputs and of dropout.
            recorded: Steps that are recorded before; 0 for none.
            device: Type of the device that each rank runs on, "cpu" or "cuda".

        Returns:
            The module's results in the last step, and what was measured.

        Raises:
            BackendError: An input is wrong, steps are to be recorded whose last micro-batch is
                smaller, or a rank failed.
            VerificationError: The module's weights or example inputs are fake.
        """
        from partitioner.backends.torch.local import run_module_files, run_steps

        if recorded:
            self.check_even()
        check_contents(self.module)
        if requests < 1:
            raise BackendError(f"requests is {requests}; it must be at least 1")
        if inputs is None:
            args, kwargs = random_arguments(self.module, seed)
        else:
            args, kwargs = self._call(inputs)
        fed = self.module.signature.feed(args, kwargs, seed)
        if not ModuleFiles(folder).needs_model:
            types = self.module.graph.types
            arrays = {name: to_numpy(tensor, types[name].dtype) for name, tensor in fed.items()}
            return run_module_files(folder, arrays, requests, steps=recorded, device=device)
        files = replace(self.step_files(folder, fed), device=device)
        run = run_steps(files, requests, recorded=recorded)
        results = self.all_ranks.micro.whole(run.results)
        types = self.programs.outputs
        arrays = {name: to_numpy(value, types[name].dtype) for name, value in results.items()}
        return LocalRun(arrays, run.seconds, run.logs)

    def record(
        self, folder: Path, inputs: Mapping[str, torch.Tensor], steps: int, device: str
    ) -> tuple[RankLog, ...]:
        """Record steps of the ranks from their files, in training with the optimizer's.

        Args:
            device: Type of the device that each rank runs on, "cpu" or "cuda".

        Raises:
            BackendError: A rank failed.
        """
        from partitioner.backends.torch.local import run_steps

        files = replace(self.step_files(folder, inputs), device=device)
        return run_steps(files, 0, recorded=steps).logs

    def step_files(self, folder: Path, inputs: Mapping[str, torch.Tensor]) -> StepFiles:
        """The files in a folder with what they need for a step with these whole inputs."""
        from partitioner.backends.torch.agreeing.groups import group_ranks
        from partitioner.backends.torch.local import StepFiles
        from partitioner.backends.torch.measuring.recorder import described
        from partitioner.backends.torch.running.phase_steps import links_of

        options, all_ranks = self.module.options, self.all_ranks
        stored = self.module.stored_values()
        shown = set(filter(None, self.module.signature.results))
        outputs = self.programs.ranks[0].outputs
        programs = [self.programs, *([] if self.rest is None else [self.rest.programs])]
        return StepFiles(
            folder,
            all_ranks.start(inputs, stored),
            {output.whole: output.value for output in outputs if output.whole in shown},
            [described(of, all_ranks.runs(of.rank)) for of in all_ranks.ranks],
            [described(of, (), last=True) for of in all_ranks.last_ranks],
            sorted({link for one in programs for link in links_of(one)}),
            sorted({ranks for one in programs for ranks in group_ranks(one)}),
            *((options.optimizer, self.updates) if options.training else ()),
        )

    def check_even(self) -> None:
        """Refuse a last micro-batch that is smaller, of which no record is made.

        A record compares each task with its prediction, that of a whole micro-batch.

        Raises:
            BackendError: There is one.
        """
        if self.rest is not None:
            raise BackendError(
                "steps whose last micro-batch is smaller are not recorded, as tasks are compared "
                "with those of whole ones: give micro_batches that divide the batch"
            )

    @property
    def updates(self) -> list[list[Update]]:
        """The parameters that each rank's optimizer writes to; none for inference."""
        return [self._updates(rank) for rank in range(len(self.programs.ranks))]

    @cached_property
    def _stores_parts(self) -> bool:
        """Tell whether some rank has only a part of a trained parameter: all are DTensors then."""
        homes, traced = self.programs.homes, self.module.traced
        return any(homes[traced.stored[n]].placement.sharding.axes for n in traced.gradients)

    def _updates(self, rank: int) -> list[Update]:
        from partitioner.backends.torch.measuring.recording import Update
        from partitioner.backends.torch.state.shards import region_within

        traced, is_cut = self.module.traced, self._stores_parts
        homes, graph = self.programs.homes, self.module.graph
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


@hints_keywords
@dataclass(frozen=True, repr=False, kw_only=True)
class ModuleProgram(Compiled):
    """A PyTorch module with its plan; programs and ranks are made on first use."""

    model: ModuleModel

    @cached_property
    def ranks(self) -> ModuleRanks:
        """The programs, emitted; see `Compiled.ranks`."""
        return self.model.emit(self.programs, self.plan)

    @property
    def training(self) -> bool:
        """Tell whether the program has a backward pass."""
        return self.model.module.options.training

    @property
    def whole(self) -> nn.Module:
        """The module itself."""
        return self.model.module.module

    @property
    def traced(self) -> ModuleGraph:
        """The module's graph, and the tensors of the module that its values stand for."""
        return self.model.module.traced

    @property
    def signature(self) -> Signature:
        """The arguments that the module takes and the results that it returns."""
        return self.model.module.signature

    def rank(self, rank: int, which: str = "forward") -> fx.GraphModule:
        """A rank's graph, forward or backward: ``program.rank(0).print_readable()``.

        Args:
            rank: The rank, from 0.
            which: "forward" or "backward"; of a plan in stages, also with the stage's number:
                "forward 2".

        Raises:
            BackendError: There is no such rank or pass.
        """
        if not 0 <= rank < len(self.cluster):
            raise BackendError(f"rank {rank} is not one of 0..{len(self.cluster) - 1}")
        passes = self.ranks.all_ranks.ranks[rank].passes
        if which not in passes:
            raise BackendError(f"rank {rank} has no {which!r} pass")
        return passes[which].module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of all ranks in this process, in lock-step.

        The module's buffers are written as by a call of the module itself.

        Args:
            args: Positional arguments of the module, with the example inputs' shapes and types.
            kwargs: Keyword arguments of the module, with the same.

        Returns:
            The module's own results, in their structure.

        Raises:
            BackendError: The inputs are not like the example inputs.
            FrontendError: The module has changed since it was compiled.
        """
        return self.signature.unflatten(self._step(args, kwargs, seed=0).results)

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
        """A call of the module on all ranks, which writes its buffers."""
        module = self.model.module
        module.check_unchanged()
        step = self.ranks.step(args, kwargs, seed)
        module.keep(step.results)
        return step

    def gradients(
        self, *args: Any, seed: int = 0, **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Run forward and backward passes of all ranks in this process, in lock-step.

        Args:
            args: Positional arguments of the module.
            seed: Seed of dropout.
            kwargs: Keyword arguments of the module.

        Returns:
            The module's results, and the whole gradient of each trained parameter by name.

        Raises:
            BackendError: The program was not compiled for training, or the inputs are not like
                the example inputs.
            FrontendError: The module has changed since it was compiled.
        """
        if not self.training:
            raise BackendError("no gradients: compile with training=True")
        step = self._step(args, kwargs, seed)
        by_name = {name: step.gradients[value] for name, value in self.traced.gradients.items()}
        return self.signature.unflatten(step.results), by_name

    def profile(
        self,
        *args: Any,
        steps: int = STEPS,
        seed: int = 0,
        device: str | None = None,
        **kwargs: Any,
    ) -> ProfiledRun[ModuleProgram]:
        """Run the ranks on this machine, one process each, and record what they do.

        Every operator and communication of every rank is recorded, and the most bytes that each
        rank held. A step is a forward pass and, in training, a backward pass and a step of the
        optimizer that the program was compiled for, on copies of the weights; of a plan in stages
        it is all micro-batches, and figures are those of all of them together. The passes run
        eagerly. On GPUs each rank has one, and events in its stream give the times.

        Args:
            args: Positional arguments of the module, with the example inputs' shapes and types;
                without any, and without keyword arguments, random ones are drawn as by `verify`.
            steps: Number of recorded steps, at least 1.
            seed: Seed of drawn arguments and of dropout.
            device: "cpu" or "cuda"; default: "cuda" if the plan is for GPUs of this machine
                (`--cluster local`), else "cpu".
            kwargs: Keyword arguments of the module.

        Returns:
            The plan's prediction beside the measurements; its `result` is this program with the
            measurements, which `report` and `save` write.

        Raises:
            BackendError: The inputs are not like the example inputs, the last micro-batch is
                smaller than the others, the machine has fewer GPUs than ranks, or a rank failed.
            OptionError: The device is neither "cpu" nor "cuda".
            VerificationError: The module's weights are fake, or the example inputs from which
                arguments are drawn.
        """
        where = self.measuring_device if device is None else device
        _check_device(where, len(self.cluster))
        self.ranks.check_even()
        check_contents(self.model.module)
        if not args and not kwargs:
            args, kwargs = random_arguments(self.model.module, seed)
        inputs = self.signature.feed(args, kwargs, seed)
        with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as name:
            self.ranks.write(Path(name))
            logs = self.ranks.record(Path(name), inputs, steps, where)
        measured = Measured.of(self.plan.digest, logs)
        return ProfiledRun(replace(self, measured=measured), measured)

    def module(
        self,
        device: torch.device | str | None = None,
        *,
        inputs: str = "global",
        seed: int = 0,
        init_seed: int | None = None,
        init: Init | None = None,
        check_inputs: int | None = 3,
    ) -> RankModule:
        """Make this rank's part an ordinary module, under torchrun.

        ``loss = module(*batch); loss.backward()`` and optimizers over `module.parameters()` work
        as on one process: parameters are DTensors that hold this rank's shards.

        Args:
            device: The device that the rank computes on; default: its GPU under NCCL, else the CPU.
            inputs: "global": every rank is called with the whole batch and takes its part;
                "local": each is called with its own part, as under DistributedDataParallel.
            seed: Seed of dropout.
            init_seed: Initialise all weights from this seed, one submodule at a time, instead of
                taking the module's: needed if those are fake.
            init: Initialises a submodule's own parameters and buffers; default: its
                `reset_parameters()`, then `_init_weights` of the model that contains it.
            check_inputs: Calls of each kind (training, evaluation) in which the ranks compare
                checksums of their inputs, from the first one on; None compares in all calls.

        Raises:
            BackendError: torch.distributed is not up, or has another number of processes than the
                program has ranks; the weights are fake, or cannot be initialised; the ranks have
                other options, weights or constants.
        """
        from partitioner.backends.torch.agreeing.agreement import Agreement
        from partitioner.backends.torch.agreeing.groups import check_world
        from partitioner.backends.torch.guards.originals import check_weights, watch
        from partitioner.backends.torch.running.rank_module import RankModule
        from partitioner.compiled.ranks import adopted
        from partitioner.compiled.variants import Variants

        check_world(len(self.cluster))
        agreement = Agreement(len(self.cluster))
        with agreement.together("module()"):
            self.model.module.check_unchanged(modes=False)
            source = self._source(init_seed, init)
            if init_seed is None and init is None:
                check_weights(self.whole, "module()", self.traced.captured)
        module, plan = adopted(agreement, self.model.module, self.plan)
        program = self if plan is self.plan else self.over(module, plan)
        variants = Variants(program, source)
        whole = program.on_ranks(source)
        rank_module = RankModule(
            whole, source, _device(device), inputs, seed, check_inputs, variants, agreement
        )
        tensors = self.traced.captured.tensors
        parameters = {name: x for name, x in tensors.items() if isinstance(x, nn.Parameter)}
        trained = self.traced.gradients
        watch(rank_module, self.traced.captured, self.whole, parameters, trained)
        return rank_module

    def on_ranks(self, source: Source) -> Whole:
        """The program as every rank needs it.

        Args:
            source: Whole contents of parameters and buffers; those of fake constants come from it.
        """
        from partitioner.backends.torch.state.initialise import without_contents
        from partitioner.backends.torch.state.whole import Whole

        tensors = self.traced.captured.tensors
        fake = {v: name for name, v in self.traced.fixed.items() if without_contents(tensors[name])}

        def contents(name: str) -> np.ndarray:
            return constant_loader(source(name), name)()

        def loaded(graph: Graph) -> Graph:
            constants = {
                value: replace(constant, load=partial(contents, fake[value]))
                if value in fake
                else constant
                for value, constant in graph.constants.items()
            }
            return replace(graph, constants=constants) if fake else graph

        rest = self.ranks.rest
        return Whole(
            self.programs,
            loaded(self.graph),
            self.signature,
            self.stored,
            self.training,
            self.spare,
            self._submodules,
            self.model.module.micro or WHOLE_BATCH,
            rest and replace(rest, graph=loaded(rest.graph)),
        )

    @property
    def _submodules(self) -> Mapping[str, Submodule]:
        """The submodules of the module by path, in its order, and the module itself."""
        from partitioner.backends.torch.state.own_state import OwnState
        from partitioner.backends.torch.state.whole import Submodule

        snapshot = self.model.module.snapshot
        settings, modes = snapshot.settings, snapshot.modes
        constants = {path: {n for n in one if n.isidentifier()} for path, one in settings.items()}
        for name in self.traced.fixed:
            path, _, leaf = name.rpartition(".")
            constants.setdefault(path, set()).add(leaf)
        submodules: dict[str, Submodule] = {}
        first: dict[int, str] = {}
        for path, part in self.model.module.module.named_modules(remove_duplicate=False):
            if first.setdefault(id(part), path) != path:
                submodules[path] = Submodule(first=first[id(part)])
                continue
            tensors = {**vars(part)["_parameters"], **vars(part)["_buffers"]}
            absent = frozenset(name for name, tensor in tensors.items() if tensor is None)
            names, mode = frozenset(constants.get(path, ())), modes.get(path, True)
            values = _plain_values(part, settings.get(path, {}))
            state = OwnState.of(part) if self.training else OwnState()
            submodules[path] = Submodule(
                type(part), names, absent, mode, values=values, state=state
            )
        return submodules

    @cached_property
    def spare(self) -> DeviceMesh:
        """The mesh of stored values that no node reads: all devices, each with the whole value.

        It is a mesh of the other values if one has all devices, because PyTorch cannot add up
        norms that lie on two meshes.
        """
        homes, ranks = self.programs.homes, len(self.cluster)
        used = (homes[entry.value].placement.mesh for entry in self.stored if entry.value in homes)
        whole = (mesh for mesh in used if mesh.size() == ranks)
        return next(whole, DeviceMesh.of({"ranks": ranks}))

    def _source(self, init_seed: int | None, init: Init | None) -> Source:
        """The source of the ranks' weights.

        Raises:
            BackendError: They are fake, and neither `init_seed` nor `init` says how to make them.
        """
        from partitioner.backends.torch.state.initialise import Initialiser, without_contents

        if init_seed is not None or init is not None:
            return Initialiser(self.whole, init_seed or 0, init)
        tensors = self.traced.captured.tensors
        fake = [e.names[0] for e in self.stored if without_contents(tensors[e.names[0]])]
        fake += [name for name in self.traced.fixed if without_contents(tensors[name])]
        if fake:
            raise BackendError(
                f"{fake[0]} and {len(fake) - 1} more have no contents, the module's weights are "
                "fake: give init_seed=, or compile the module with its weights"
            )
        return tensors.__getitem__

    def over(self, module: TracedModule, plan: Plan) -> ModuleProgram:
        """The program of another trace of the module with a plan on the same cluster."""
        model = replace(self.model, module=module)
        figures = evaluate(module.graph, plan, self.cluster)
        return ModuleProgram.of(
            model, self.cluster, plan, figures, self.summary, self.seconds, self.warnings
        )

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The parameters and buffers that the ranks hold, by the first of their names."""
        from partitioner.backends.torch.state.whole import Stored

        captured, traced = self.traced.captured, self.traced
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
            if of in traced.stored or (self.training and of in captured.persistent)
        )


def _plain_values(part: nn.Module, settings: Mapping[str, object]) -> dict[str, object]:
    """Numbers, texts and tuples of them that attributes of a submodule hold.

    Args:
        settings: Those that the trace left as they were, by attribute and place in it.
    """
    from partitioner.backends.torch.state.parts_reset import PLAIN

    values = {name: value for name, value in settings.items() if name.isidentifier()}
    for name in {path.partition("[")[0] for path in settings} - values.keys():
        value = vars(part).get(name)
        if isinstance(value, tuple) and all(isinstance(one, int | float | str) for one in value):
            values[name] = value
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def _check_device(device: str, ranks: int) -> None:
    from partitioner.backends.torch.local import check_gpus

    if device not in ("cpu", "cuda"):
        raise OptionError(f"device is {device!r}; it must be 'cpu' or 'cuda'")
    check_gpus(device, ranks)


def _device(device: torch.device | str | None) -> torch.device:
    """The rank's device; by default its GPU under NCCL, else the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
