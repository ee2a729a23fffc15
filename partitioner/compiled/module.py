"""A compiled PyTorch module: look at it, run it, verify it, save it, train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.signature import Signature
from partitioner.compiled.base import Planned, check_explicit
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.frontends.torch.calls import constant_loader
from partitioner.frontends.torch.graph import SEED, ModuleGraph
from partitioner.frontends.torch.source import ModuleSource
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.program import Programs
from partitioner.lowering import lower
from partitioner.no_gc import no_collection
from partitioner.verify.compare import Verification

if TYPE_CHECKING:
    import numpy as np

    from partitioner.backends.torch.all_ranks import AllRanks, Step
    from partitioner.backends.torch.initialise import Init
    from partitioner.backends.torch.rank_module import RankModule, Source
    from partitioner.backends.torch.rank_passes import Stored, Whole


@dataclass(frozen=True, repr=False, kw_only=True)
class ModuleProgram(Planned):
    """A PyTorch module with its plan and everything made from it.

    Attributes:
        traced: Its graph.
        whole: The module itself.
        training: Whether the program has a backward pass.
        optimizer: Whose memory was counted, for training.
        source: Where the module came from.
        modes: Which submodules were in training mode when the module was traced, by name.
    """

    traced: ModuleGraph
    whole: nn.Module
    training: bool
    optimizer: str
    source: ModuleSource
    modes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The traced graph: the forward pass and, in training, the backward pass."""
        return self.traced.graph

    @property
    def name(self) -> str:
        """The name of the module's file or factory, or its class."""
        return self.source.name or self.graph.name

    @property
    def model_path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

    @cached_property
    def delivered(self) -> Schedule:
        """The schedule with what brings the module's results to every rank."""
        check_explicit(self.cluster)
        shown = frozenset(value for value in self.traced.results if value)
        with no_collection():
            placed = resolve(self.graph, self.plan)
            return schedule(self.graph, placed, self.cluster, everywhere=shown)

    @cached_property
    def programs(self) -> Programs:
        """One program a rank; every rank delivers the results whole, and the state that it holds.

        Raises:
            ResultError: The plan is for more devices than programs are made for.
        """
        return lower(self.graph, self.delivered, len(self.cluster), deliver_all=True)

    @cached_property
    def signature(self) -> Signature:
        """How the module is called."""
        traced = self.traced
        return Signature(
            traced.captured.in_spec,
            traced.captured.out_spec,
            traced.inputs,
            traced.captured.arguments,
            {name: self.graph.types[name] for name in self.graph.inputs},
            traced.results,
            traced.captured.others,
            SEED if SEED in self.graph.inputs else "",
            traced.tangent if traced.tangent in self.graph.inputs else "",
            traced.captured.autocast.dtype,
        )

    @cached_property
    def all_ranks(self) -> AllRanks:
        """All ranks, ready to run in this process."""
        from partitioner.backends.torch.all_ranks import AllRanks

        return AllRanks(self.programs, self.graph)

    def rank(self, rank: int, which: str = "forward") -> fx.GraphModule:
        """A rank's graph: ``program.rank(0).print_readable()``.

        Args:
            rank: The rank.
            which: "forward" or "backward".

        Raises:
            BackendError: There is no such rank or pass.
        """
        if not 0 <= rank < len(self.cluster):
            raise BackendError(f"rank {rank} is not one of 0..{len(self.cluster) - 1}")
        graphs = self.all_ranks.ranks[rank]
        found = {"forward": graphs.forward, "backward": graphs.backward}.get(which)
        if found is None:
            raise BackendError(f"rank {rank} has no {which!r} pass")
        return found.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of all ranks in this process, in lock-step.

        Args:
            args: As of the module; tensors of the example inputs' sizes and types.
            kwargs: Likewise.

        Returns:
            What the module returns.

        Raises:
            BackendError: The inputs are not like the example inputs.
        """
        return self._structured(self._step(args, kwargs, seed=0))

    def gradients(
        self, *args: Any, seed: int = 0, **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Run forward and backward passes of all ranks in this process, in lock-step.

        Args:
            args: As of the module.
            seed: Of dropout.
            kwargs: As of the module.

        Returns:
            What the module returns, and the whole gradient of each trained parameter by name.

        Raises:
            BackendError: The program was not compiled for training, or the inputs are not like
                the example inputs.
        """
        if not self.training:
            raise BackendError("no gradients: compile with training=True")
        step = self._step(args, kwargs, seed=seed)
        found = {name: step.gradients[value] for name, value in self.traced.gradients.items()}
        return self._structured(step), found

    def module(
        self,
        device: torch.device | str | None = None,
        *,
        inputs: str = "global",
        seed: int = 0,
        init_seed: int | None = None,
        init: Init | None = None,
    ) -> RankModule:
        """This rank's part as an ordinary module, under torchrun.

        ``loss = module(*batch); loss.backward()`` and optimizers over `module.parameters()` work
        as on one process: parameters are DTensors that hold this rank's shards.

        Args:
            device: Where the rank computes; default: its GPU under NCCL, the CPU otherwise.
            inputs: "global": every rank is called with the whole batch and takes its part;
                "local": each is called with its own part, as under DistributedDataParallel.
            seed: Of dropout.
            init_seed: Initialise all weights from this seed, one submodule at a time, instead of
                taking the module's: needed where those are fake.
            init: Initialises a submodule's own parameters and buffers; default: its
                `reset_parameters()`, then `_init_weights` of the model that it is in.

        Raises:
            BackendError: torch.distributed is not up, or has another number of processes than the
                program has ranks; the weights are fake, or cannot be initialised.
        """
        from partitioner.backends.torch.rank_module import RankModule
        from partitioner.compiled.variants import Variants

        agreed = self._agreed()
        source = self._source(init_seed, init)
        make = Variants(agreed, source)
        at = _device(device)
        return RankModule(agreed.on_ranks(source), source, at, inputs, seed, make)

    def on_ranks(self, source: Source) -> Whole:
        """What every rank knows of the program.

        Args:
            source: Whole contents of parameters and buffers; fake constants take theirs from it.
        """
        from partitioner.backends.torch.initialise import without_contents
        from partitioner.backends.torch.rank_passes import Whole

        held = self.traced.captured.tensors
        fake = {v: name for name, v in self.traced.fixed.items() if without_contents(held[name])}

        def contents(name: str) -> np.ndarray:
            return constant_loader(source(name), name)()

        constants = {
            value: replace(one, load=partial(contents, fake[value])) if value in fake else one
            for value, one in self.graph.constants.items()
        }
        graph = replace(self.graph, constants=constants) if fake else self.graph
        return Whole(self.programs, graph, self.signature, self.stored, self.training, self.spare)

    @cached_property
    def spare(self) -> DeviceMesh:
        """Where stored values lie, whole, that nothing computes with: on all devices.

        On a mesh of the others, if one has all: PyTorch adds up no norms that lie on two meshes.
        """
        homes, ranks = self.programs.homes, len(self.cluster)
        used = (homes[entry.value].placement.mesh for entry in self.stored if entry.value in homes)
        found = (mesh for mesh in used if mesh.size() == ranks)
        return next(found, DeviceMesh.of({"ranks": ranks}))

    def _source(self, init_seed: int | None, init: Init | None) -> Source:
        """Where the ranks' weights come from.

        Raises:
            BackendError: They are fake, and nothing says how to make them.
        """
        from partitioner.backends.torch.initialise import Initialiser, without_contents

        if init_seed is not None or init is not None:
            return Initialiser(self.whole, init_seed or 0, init)
        held = self.traced.captured.tensors
        fake = [e.names[0] for e in self.stored if without_contents(held[e.names[0]])]
        fake += [name for name in self.traced.fixed if without_contents(held[name])]
        if fake:
            raise BackendError(
                f"{fake[0]} and {len(fake) - 1} more have no contents, the module's weights are "
                "fake: give init_seed=, or compile the module with its weights"
            )
        return held.__getitem__

    def _agreed(self) -> ModuleProgram:
        """The program with the plan of rank 0: searches that stop by time may differ.

        Raises:
            BackendError: The ranks traced different graphs, or there is no process group.
        """
        from partitioner.backends.torch.groups import check_world, first_ranks

        check_world(len(self.cluster))
        text = first_ranks(self.plan.to_json())
        if text == self.plan.to_json():
            return self
        plan = Plan.from_json(text)
        traced = self.traced.of(plan.nodes)
        if traced.graph.digest != plan.graph_digest:
            raise BackendError("this rank traced another graph than rank 0: compile the same model")
        figures = evaluate(traced.graph, plan, self.cluster)
        return replace(self, traced=traced, plan=plan, evaluation=figures)

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """Parameters and buffers that the ranks hold."""
        from partitioner.backends.torch.rank_passes import Stored

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
            )
            for of in names
            if of in traced.stored or (self.training and of in captured.persistent)
        )

    def stored_values(self) -> dict[str, torch.Tensor]:
        """Whole stored values of the module, by value of the graph."""
        held = self.traced.captured.tensors
        return {value: held[name].detach() for name, value in self.traced.stored.items()}

    def fed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Graph inputs of a call.

        Raises:
            BackendError: The arguments are not like the example inputs.
        """
        signature = self.signature
        inputs = signature.flatten(args, kwargs)
        signature.check(inputs, signature.types)
        if signature.seed:
            inputs[signature.seed] = torch.tensor(seed)
        if signature.tangent:
            kind = self.graph.types[signature.tangent]
            inputs[signature.tangent] = torch.ones(kind.shape, dtype=torch_dtype(kind.dtype))
        return inputs

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
        return self.all_ranks.step(self.fed(args, kwargs, seed), self.stored_values())

    def verify(self, seed: int = 0) -> Verification:
        """Compare all ranks with the module: results, written buffers and gradients.

        The inputs are the example inputs' values in another order; floats that are all equal are
        drawn. A module with dropout is compared with the same program on one device, whose masks
        are the same.

        Args:
            seed: Of the inputs and of dropout.

        Returns:
            What was found, true where all is equal. A difference is no exception.

        Raises:
            VerificationError: It would not fit this machine's free memory, or the module's weights
                are fake.
            BackendError: A rank fails.
        """
        from partitioner.verify.module import verify_module

        return verify_module(self, seed)

    def verify_written(self, folder: Path, seed: int = 0) -> Verification:
        """Compare the rank files of a folder that this was saved to with the module.

        Raises:
            DirectoryError: There are no rank files, they are of another plan, or they hold other
                weights than the module.
            BackendError: A rank file is wrong, or a rank fails.
            VerificationError: As `verify`.
        """
        from partitioner.backends.torch.all_ranks import AllRanks
        from partitioner.backends.torch.rank_files import with_written
        from partitioner.compiled.rank_files import ModuleFiles
        from partitioner.verify.module import verify_module

        ModuleFiles(folder).check(self.plan, self.graph)
        ranks = with_written(folder, self.all_ranks.ranks)
        return verify_module(self, seed, AllRanks(self.programs, self.graph, ranks))

    def _write_source(self, folder: Path, final: Path) -> None:
        self.source.write(folder, final, self.graph.digest, self.training, self.optimizer)

    def _write_ranks(self, folder: Path) -> None:
        from partitioner.backends.header import Origin
        from partitioner.backends.torch.rank_files import write_ranks

        origin = Origin(self.plan.digest, self.graph.weights_digest)
        write_ranks(folder, self.programs, self.all_ranks.ranks, origin)

    def _structured(self, step: Step) -> Any:
        return self.signature.unflatten(step.results)


def _device(wanted: torch.device | str | None) -> torch.device:
    """The rank's device."""
    if wanted is not None:
        return torch.device(wanted)
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
