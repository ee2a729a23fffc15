"""Compiled PyTorch modules: they run in this process, are measured, and train under torchrun."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from partitioner.api.compiled.base import Compiled, Model, ProfiledRun
from partitioner.api.compiled.folder import GraphFile, ModuleRequest
from partitioner.api.compiled.module_ranks import (
    ModuleRanks,
    rest_of,
    stored_of,
    submodules_of,
    weights_of,
    with_contents,
)
from partitioner.api.compiled.taken_over import taken_over
from partitioner.api.verify.module import check_contents, has_no_contents, random_arguments
from partitioner.api.verify.symbolic.micro_batches import Rows
from partitioner.backends.errors import BackendError
from partitioner.backends.observed import STEPS
from partitioner.backends.tensors import to_numpy
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.running.all_ranks import Step
from partitioner.foundations.files import ResultError
from partitioner.foundations.recent import Recent
from partitioner.frontends.inputs import input_ranges
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import TracedModule, trace_micro_batch, trace_module
from partitioner.ir.errors import OptionError, hints_keywords
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh, copies_on
from partitioner.ir.plan import NodePlan, Plan
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request
from partitioner.strategies.constraints import Constraints

if TYPE_CHECKING:
    from partitioner.backends.torch.running.rank_module import RankModule, Share
    from partitioner.backends.torch.running.submodules import Source
    from partitioner.backends.torch.state.initialise import Init
    from partitioner.backends.torch.state.whole import Stored, Whole


#: Programs for other sizes that a rank keeps: tens of MiB each for a module of some layers.
KEPT_SIZES = 16


@dataclass(frozen=True)
class ModuleModel(Model):
    """A PyTorch module."""

    module: TracedModule
    source: ModuleSource  #: The file or factory that the module came from, if any.
    delivers_all = True

    @cached_property
    def described(self) -> GraphFile:
        """See `Model.described`; every rank returns the module's results whole."""
        graph = self.module.graph
        return GraphFile(self.source.name or graph.name, graph, input_ranges(graph))

    @property
    def path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

    @property
    def rows(self) -> Rows | None:
        """See `Model.rows`."""
        micro = self.module.micro
        return None if micro is None else Rows(micro.count, micro.rows, micro.shares)

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

    def resized(self, *_: object) -> NoReturn:
        """See `Model.resized`: a module is traced with arguments, which `RankModule` has."""
        raise BackendError("compile the module for it; program.module() under torchrun takes it")

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """See `Model.input_types`: of the module's tensors."""
        signature = self.module.signature
        return {name: signature.types[name] for name in signature.inputs if name in signature.types}

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
            source.dims,
        ).write(folder, final)

    def ranks(self, programs: Programs, plan: Plan, read_from: Path | None = None) -> ModuleRanks:
        """See `Model.ranks`."""
        return ModuleRanks(self.module, programs, plan, read_from, rest_of(self.module, plan))


@hints_keywords
@dataclass(frozen=True, repr=False, kw_only=True)
class ModuleProgram(Compiled):
    """A PyTorch module with its plan; programs and ranks are made on first use."""

    model: ModuleModel

    @cached_property
    def ranks(self) -> ModuleRanks:
        """The programs, emitted; see `Compiled.ranks`."""
        return self.model.ranks(self.programs, self.plan)

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
        from partitioner.backends.torch.local import check_gpus, run_steps

        where = self.measuring_device if device is None else device
        if where not in ("cpu", "cuda"):
            raise OptionError(f"device is {where!r}; it must be 'cpu' or 'cuda'")
        check_gpus(where, len(self.cluster))
        self.ranks.check_even()
        check_contents(self.model.module)
        if not args and not kwargs:
            args, kwargs = random_arguments(self.model.module, seed)
        inputs = self.signature.feed(args, kwargs, seed)
        with tempfile.TemporaryDirectory(prefix="partitioner-profile-") as name:
            self.ranks.write(Path(name))
            files = replace(self.ranks.step_files(Path(name), inputs), device=where)
            return self.compared(run_steps(files, 0, recorded=steps).logs)

    def module(
        self,
        device: torch.device | str | None = None,
        *,
        inputs: str = "global",
        seed: int = 0,
        init_seed: int | None = None,
        init: Init | None = None,
        check_inputs: int | None = 3,
        kept_sizes: int = KEPT_SIZES,
    ) -> RankModule:
        """Make this rank's part an ordinary module, under torchrun.

        ``loss = module(*batch); loss.backward()`` and optimizers over `module.parameters()` work
        as on one process: parameters are DTensors that hold this rank's shards.

        Args:
            device: The device that the rank computes on; default: its GPU under NCCL, else the CPU.
            inputs: "global": every rank is called with the whole batch and takes its part;
                "local": each is called with its own part, as under DistributedDataParallel;
                "rows": each is called with as many of the batch's rows, which all ranks exchange,
                whatever the plan cuts. Of whole copies, the ranks of each are called with its own
                requests, when it has one.
            seed: Seed of dropout.
            init_seed: Initialise all weights from this seed, one submodule at a time, instead of
                taking the module's: needed if those are fake.
            init: Initialises a submodule's own parameters and buffers; default: its
                `reset_parameters()`, then `_init_weights` of the model that contains it.
            check_inputs: Calls of each kind (training, evaluation) in which the ranks compare
                checksums of their inputs, from the first one on; None compares in all calls.
            kept_sizes: Programs for other batches, lengths and evaluation that are kept, at least
                1; the one called least recently is freed, and made anew when it is called again.

        Raises:
            BackendError: torch.distributed is not up, or has another number of processes than the
                program has ranks; the weights are fake, or cannot be initialised; the ranks have
                other options, weights or constants.
        """
        from partitioner.backends.torch.agreeing.agreement import Agreement
        from partitioner.backends.torch.agreeing.groups import check_world
        from partitioner.backends.torch.guards.originals import check_weights, watch
        from partitioner.backends.torch.running.libraries import module_class

        check_world(len(self.cluster))
        agreement = Agreement(len(self.cluster))
        with agreement.together("module()"):
            self.model.module.check_unchanged(modes=False)
            source = weights_of(self.model.module, self.stored, init_seed, init)
            if init_seed is None and init is None:
                check_weights(self.whole, "module()", self.traced.captured)
        module, plan = self.model.module, self.plan
        text = agreement.first(plan.to_json, "module()")
        if text != plan.to_json():  # plans of searches that a time limit ended may differ
            plan = Plan.from_json(text)
            module = module.of(plan.nodes)
        with agreement.together("module()"):
            check_same_graph(agreement.rank, module.graph.digest, plan.graph_digest)
        program = self if plan is self.plan else self.over(module, plan)
        known = Recent[tuple[bool, int], ModuleProgram](kept_sizes)  # one of each set of nodes

        def variant_of(
            training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any], share: Share
        ) -> Whole:
            """A variant as a rank needs it; later ones take over its plan."""
            like = tuple(known.values())
            made = variant(program, args, kwargs, training=training, share=share, like=like)
            known[training, hash(tuple(made.graph.by_name))] = made
            return made.on_ranks(source)

        whole = program.on_ranks(source)
        if device is not None:
            own = torch.device(device)
        elif torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            own = torch.device("cuda", torch.cuda.current_device())
        else:
            own = torch.device("cpu")
        rank_module = module_class(whole.submodules[""].kind)(
            whole, source, own, inputs, seed, check_inputs, kept_sizes, variant_of, agreement
        )
        tensors = self.traced.captured.tensors
        parameters = {name: x for name, x in tensors.items() if isinstance(x, nn.Parameter)}
        trained = self.traced.gradients
        watch(rank_module, self.traced.captured, self.whole, parameters, trained)
        return rank_module

    def on_ranks(self, source: Source) -> Whole:
        """The program as every rank needs it; contents of fake constants come from the source."""
        from partitioner.backends.torch.state.whole import Whole

        rest, traced = self.ranks.rest, self.traced
        return Whole(
            self.programs,
            with_contents(self.graph, traced, source),
            self.signature,
            self.stored,
            self.training,
            self.spare,
            submodules_of(self.model.module),
            self.model.module.micro or WHOLE_BATCH,
            rest and replace(rest, graph=with_contents(rest.graph, traced, source)),
        )

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

    def over(self, module: TracedModule, plan: Plan) -> ModuleProgram:
        """The program of another trace of the module with a plan on the same cluster, for ranks.

        Its figures stay those of this program: ranks read none, and they take long to make.
        """
        model = replace(self.model, module=module)
        return replace(self, model=model, graph=module.graph, plan=plan)

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The parameters and buffers that the ranks hold, by the first of their names."""
        return stored_of(self.model.module)


def check_same_graph(rank: int, digest: str, expected: str) -> None:
    """Refuse, as a BackendError, another graph on a rank than on rank 0."""
    if digest != expected:
        raise BackendError(f"rank {rank} traced another graph than rank 0: compile the same model")


def variant(
    program: ModuleProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    share: Share,
    like: Sequence[ModuleProgram] = (),
) -> ModuleProgram:
    """The program of another call of a compiled module: of evaluation, or of another batch size.

    It is traced anew. If its graph has the same nodes as an earlier program's, one of `like`, it
    takes over that program's plan; else a plan is searched, on one rank for all (`share`), in which
    all stored values stay where they are. So it is with steps of training whose sizes make another
    graph: PyTorch traces a sequence of one step with other views, and a recurrent layer once for
    each step. Not so in micro-batches: stages share them.

    Without `training`, the module is in evaluation mode or, if the program is not for training, in
    the mode that it was compiled in. A PartitionerError refuses a call that has no trace or plan.
    """
    compiled = program.model.module
    compiled.check_unchanged(modes=False)
    compiled.signature.check_floats(args, kwargs)
    options = replace(compiled.options, training=training)
    evaluation = program.training and not training
    keep = frozenset(entry.names[0] for entry in program.stored)
    micro = None if evaluation else compiled.micro
    example = Example(args, kwargs)
    with compiled.traced.captured.autocast.region(), _mode(compiled, evaluation=evaluation):
        traced = (
            trace_module(compiled.module, example, options, keep)
            if micro is None
            else trace_micro_batch(compiled.module, example, options, micro.count, keep, fewer=True)
        )
    module = replace(traced, snapshot=compiled.snapshot)
    known = compiled.traced.stored
    for name in [name for name in module.traced.stored if name in known]:
        new = module.graph.types[module.traced.stored[name]]
        if new != (old := program.graph.types[known[name]]):
            raise ResultError(f"{name} is {new} with these arguments, {old} in the program")

    def searched() -> Plan:
        return Plan.from_json(share(lambda: _searched(program, module).to_json()))

    if training or micro is not None:
        earlier = (program, *(one for one in like if one.training == training))
        forms = ((one, module.of(one.plan.nodes)) for one in earlier)
        alike = next(
            (
                (one, form)
                for one, form in forms
                if one.graph.by_name.keys() == form.graph.by_name.keys()
            ),
            None,
        )
        if alike is None and micro is None:
            plan = searched()
        else:
            of, module = alike or (program, module.of(program.plan.nodes))
            plan = of.plan
            if micro is not None:
                count = traced.micro.count if traced.micro else 1
                assert plan.pipeline
                plan = replace(plan, pipeline=replace(plan.pipeline, micro_batches=count))
            plan = taken_over(plan, of.graph, module.graph)
    else:
        plain = tuple(one for one in like if not one.training)
        earlier = plain if program.training else (program, *plain)
        plan = _first_that_fits(earlier, module.graph) or searched()
    return program.over(module, plan)


def _first_that_fits(programs: Iterable[ModuleProgram], graph: Graph) -> Plan | None:
    for program in programs:
        try:
            return taken_over(program.plan, program.graph, graph)
        except ResultError:
            continue
    return None


def _searched(program: ModuleProgram, module: TracedModule) -> Plan:
    """The best plan that keeps the stored values where the program has them."""
    graph, base = module.graph, program.plan
    groups = tuple(dict.fromkeys(base.groups))  # stages on the same devices are one group
    nodes = {
        name: replace(node, group=groups.index(base.groups[node.group]))
        for name, node in base.nodes.items()
    }
    base = replace(base, groups=groups, nodes=nodes, pipeline=None, stages=())
    stored, pinned = program.model.module.traced.stored, {}
    for name, value in module.traced.stored.items():
        node = graph.producers[value].name
        if name in stored:
            producer = program.graph.producers[stored[name]]
            pinned[node] = base.nodes[producer.name]
        elif program.spare in base.groups:
            pinned[node] = NodePlan(base.groups.index(program.spare), {})
        else:
            raise ResultError(
                f"this call reads {name}, which a step of the program does not, and which lies on "
                "all devices; the plan computes nothing there: use it in training or compile for it"
            )
    rests = program.model.module.traced.rests
    for name, value in module.traced.rests.items():
        if name in rests:
            producer = program.graph.producers[rests[name]]
            pinned[graph.producers[value].name] = base.nodes[producer.name]
    kept = Plan(graph.digest, base.cluster, base.groups, pinned)
    if base.kind == "copies":
        request = Request(strategy="copies")
        plan = find_plan(graph, program.cluster, request, Budget.of(request)).plan
        if copies_on(plan.groups) == copies_on(base.groups):
            return plan
        raise ResultError(
            "a call of these sizes would be on whole copies of other devices: compile it for them"
        )
    most = max(base.groups, key=DeviceMesh.size)  # the space has the plan's device groups
    strategy, mesh = "inter" if most.size() == 1 else "auto", dict[str, int]()
    if len(program.cluster) in (1, most.size()):
        strategy, mesh = "intra", dict(most.axes)
    request = Request(strategy=strategy, mesh=mesh or None, constraints=Constraints(plan=kept))
    return find_plan(graph, program.cluster, request, Budget.of(request)).plan


@contextmanager
def _mode(compiled: TracedModule, *, evaluation: bool) -> Iterator[None]:
    """Put the module in evaluation mode, or in the mode it was compiled in; and back at the end."""
    modules = dict(compiled.module.named_modules())
    before = {name: module.training for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.training = compiled.snapshot.modes.get(name, True) and not evaluation
        yield
    finally:
        for name, module in modules.items():
            module.training = before[name]
