"""Compiled PyTorch modules: they run in this process, are measured, and train under torchrun."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from partitioner.api.compiled.base import Compiled, Model, ProfiledRun
from partitioner.api.compiled.folder import ModuleRequest, load_plan
from partitioner.api.compiled.graph_file import GraphFile
from partitioner.api.compiled.module_ranks import ModuleRanks, rest_of
from partitioner.api.compiled.rank_files import ModuleFiles
from partitioner.api.verify.module import check_contents, has_no_contents, random_arguments
from partitioner.backends.errors import BackendError
from partitioner.backends.observed import STEPS
from partitioner.backends.tensors import to_numpy
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.running.all_ranks import Step
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.inputs import input_ranges
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.source import ModuleSource
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.errors import OptionError, hints_keywords
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType

if TYPE_CHECKING:
    from partitioner.backends.torch.running.filling import Source
    from partitioner.backends.torch.running.rank_module import RankModule
    from partitioner.backends.torch.state.initialise import Init
    from partitioner.backends.torch.state.whole import Stored, Whole


@dataclass(frozen=True)
class ModuleModel(Model):
    """A PyTorch module."""

    module: TracedModule
    source: ModuleSource  #: The file or factory that the module came from, if any.
    files = ModuleFiles
    delivers_all = True

    @cached_property
    def described(self) -> GraphFile:
        """See `Model.described`; every rank returns the module's results whole."""
        graph = self.module.graph
        results = frozenset(value for value in self.module.traced.call.results if value)
        return GraphFile(self.source.name or graph.name, graph, results, input_ranges(graph))

    @property
    def path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

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
        from partitioner.api.compiled.module_state import weights_of
        from partitioner.api.compiled.ranks import adopted
        from partitioner.api.compiled.variants import Variants
        from partitioner.backends.torch.agreeing.agreement import Agreement
        from partitioner.backends.torch.agreeing.groups import check_world
        from partitioner.backends.torch.guards.originals import check_weights, watch
        from partitioner.backends.torch.running.rank_module import RankModule

        check_world(len(self.cluster))
        agreement = Agreement(len(self.cluster))
        with agreement.together("module()"):
            self.model.module.check_unchanged(modes=False)
            source = weights_of(self.model.module, self.stored, init_seed, init)
            if init_seed is None and init is None:
                check_weights(self.whole, "module()", self.traced.captured)
        module, plan = adopted(agreement, self.model.module, self.plan)
        program = self if plan is self.plan else self.over(module, plan)
        variants = Variants(program, source)
        whole = program.on_ranks(source)
        if device is not None:
            own = torch.device(device)
        elif torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            own = torch.device("cuda", torch.cuda.current_device())
        else:
            own = torch.device("cpu")
        rank_module = RankModule(
            whole, source, own, inputs, seed, check_inputs, variants, agreement
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
        from partitioner.api.compiled.module_state import submodules_of, with_contents
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
        """The program of another trace of the module with a plan on the same cluster."""
        model = replace(self.model, module=module)
        figures = evaluate(module.graph, plan, self.cluster)
        return ModuleProgram.of(
            model, self.cluster, plan, figures, self.summary, self.seconds, self.warnings
        )

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The parameters and buffers that the ranks hold, by the first of their names."""
        from partitioner.api.compiled.module_state import stored_of

        return stored_of(self.model.module)
