"""One rank's part of a compiled module, as an ordinary module: under torchrun.

Parameters are DTensors with the whole model's names and sizes; each rank holds its shards. Calling
the module runs the rank's forward graph; `loss.backward()` runs its backward graph. No gradient
goes through a collective: the backward graph has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.emit import PassGraph, emit_rank
from partitioner.backends.torch.groups import check_world, register_groups, torch_meshes
from partitioner.backends.torch.shards import part_of, region_on
from partitioner.backends.torch.signature import Signature
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement as Home
from partitioner.ir.program import Programs

#: Gives the whole contents of a parameter or buffer.
Source = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the whole model.

    Attributes:
        value: Of the graph.
        names: All names that it has in the module, the first one first.
        trained: Whether it has a gradient.
        parameter: Whether it is a parameter; a buffer otherwise.
        gradient: Graph output of its gradient; "" if it has none.
        written: Graph output of its next contents; "" if it is not written.
    """

    value: str
    names: tuple[str, ...]
    trained: bool
    parameter: bool
    gradient: str = ""
    written: str = ""


@dataclass(frozen=True)
class Whole:
    """What is known of a program on every rank.

    Attributes:
        programs: Of all ranks.
        graph: Of the whole model.
        signature: How the module is called.
        stored: Parameters and buffers.
    """

    programs: Programs
    graph: Graph
    signature: Signature
    stored: tuple[Stored, ...]


class RankModule(nn.Module):
    """A rank's module.

    Args:
        whole: The program.
        source: Contents of the parameters and buffers.
        device: Where the rank computes.
        inputs: "global": every rank is called with the whole batch and takes its part; "local":
            each is called with its own part.
        seed: Of dropout; the step's number is added.

    Raises:
        BackendError: torch.distributed is not up or has another number of processes, or `inputs`
            is neither.
    """

    def __init__(
        self, whole: Whole, source: Source, device: torch.device, inputs: str, seed: int
    ) -> None:
        super().__init__()
        if inputs not in ("global", "local"):
            raise BackendError(f"inputs is {inputs!r}, not 'global' or 'local'")
        ranks = len(whole.programs.ranks)
        self.rank = check_world(ranks)
        self._whole = whole
        self._local_inputs = inputs == "local"
        self._seed = seed
        self._steps = 0
        self._groups = register_groups(whole.programs)
        self._evaluate: Callable[..., Any] | None = None
        graphs = emit_rank(whole.programs, self.rank, whole.graph, device)
        self._graphs = graphs
        self._device = device
        self._runs: dict[str, Callable[..., Sequence[torch.Tensor]]] = {}
        for key, one in (("forward", graphs.forward), ("backward", graphs.backward)):
            if one is not None:
                self._runs[key] = one.module.to(device)
        self._homes = {
            entry.value: whole.programs.homes[entry.value]
            for entry in whole.stored
            if entry.value in whole.programs.homes
        }
        meshes = torch_meshes([home.placement.mesh for home in self._homes.values()], device)
        self._tensors: dict[str, torch.Tensor] = {}
        for entry in whole.stored:
            self._hold(entry, source, meshes)
        self.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]

    # Parameters ------------------------------------------------------------------------------

    def _hold(self, entry: Stored, source: Source, meshes: Mapping[Any, Any]) -> None:
        """Register a parameter or buffer under its names, if this rank has a part of it."""
        at = self._homes[entry.value].placement
        if self.rank not in at.mesh.devices:
            return
        whole = source(entry.names[0])
        part = part_of(whole.detach(), region_on(at, self.rank)).to(self._device)
        if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            part = part.clone()
        tensor: torch.Tensor = DTensor.from_local(
            part,
            meshes[at.mesh],
            _placements(at),
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )
        if entry.parameter:
            tensor = nn.Parameter(tensor, requires_grad=entry.trained)
        self._tensors[entry.value] = tensor
        for name in entry.names:
            *path, leaf = name.split(".")
            owner = _submodule(self, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state on every rank, under its names; all ranks must call it.

        Parameters that lie on some ranks only (a placement without sharding) are on those alone.
        """
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.state_dict().items()
        }

    # Calls -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rank's forward graph; the arguments are the module's own."""
        if not self.training and self._evaluate is not None:
            return self._evaluate(*args, **kwargs)
        values = self._inputs(args, kwargs)
        for entry in self._whole.stored:
            if entry.value in self._tensors:
                values[self._homes[entry.value].name] = _local(self._tensors[entry.value])
        trained = [t for t in self._tensors.values() if t.requires_grad]
        if "backward" in self._runs and torch.is_grad_enabled() and trained:
            results = _Step.apply(self, values, *trained)  # type: ignore[no-untyped-call]
        else:
            results = self._forward(values)[0]
        shown = dict(zip(self._shown, results, strict=True))
        return self._whole.signature.unflatten(shown)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        signature, graphs = self._whole.signature, self._graphs
        try:
            given = signature.flatten(args, kwargs)
            if not self._local_inputs:
                signature.check(given, signature.types)
        except BackendError as error:
            raise BackendError(f"rank {self.rank}: {error}") from None
        if signature.seed:
            given[signature.seed] = torch.tensor((self._seed << 32) + self._steps)
            self._steps += 1
        values = {}
        for name, part in graphs.inputs.items():
            if part.whole == signature.tangent:
                continue
            tensor = given[part.whole]
            if not self._local_inputs or part.whole == signature.seed:
                tensor = part_of(tensor, part.region)
            else:
                kind = graphs.types[name]
                if tuple(tensor.shape) != kind.shape or tensor.dtype != torch_dtype(kind.dtype):
                    raise BackendError(
                        f"rank {self.rank}: its part of input {part.whole!r} is "
                        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, "
                        f"the plan gives it {kind}"
                    )
            values[name] = tensor.to(self._device)
        return values

    @property
    def _shown(self) -> tuple[str, ...]:
        return tuple(value for value in dict.fromkeys(self._whole.signature.results) if value)

    def _forward(
        self, values: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Results that are shown, and the values that the backward pass reads."""
        one = self._graphs.forward
        with torch.no_grad():
            made = self._run("forward", one, values)
            values.update(made)
            self._write(values)
        by_output = {o.whole: values[o.value] for o in self._graphs.outputs if o.value in values}
        return tuple(by_output[value] for value in self._shown), values

    def _run(
        self, key: str, one: PassGraph, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        results = self._runs[key](*(values[name] for name in one.arguments))
        return dict(zip(one.results, results, strict=True))

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Buffers take their next contents."""
        outputs = {o.whole: o.value for o in self._graphs.outputs}
        for entry in self._whole.stored:
            if entry.written in outputs and outputs[entry.written] in values:
                _local(self._tensors[entry.value]).copy_(values[outputs[entry.written]])

    def _backward(
        self, values: dict[str, torch.Tensor], tangent: torch.Tensor
    ) -> Iterator[torch.Tensor | None]:
        """Gradients of the trained parameters, in order."""
        one = self._graphs.backward
        assert one is not None
        name = self._whole.signature.tangent
        for local, part in self._graphs.inputs.items():
            if part.whole == name:
                values[local] = tangent
        with torch.no_grad():
            made = self._run("backward", one, values)
        outputs = {o.whole: o.value for o in self._graphs.outputs}
        for entry in self._whole.stored:
            held = self._tensors.get(entry.value)
            if held is None or not held.requires_grad:
                continue
            found = made.get(outputs.get(entry.gradient, ""))
            assert isinstance(held, DTensor)
            yield (
                None
                if found is None
                else DTensor.from_local(
                    found,
                    held.device_mesh,
                    held.placements,
                    run_check=False,
                    shape=held.shape,
                    stride=held.stride(),
                )
            )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the rank's graphs in place with `torch.compile`, with its arguments."""
        for key, run in self._runs.items():
            self._runs[key] = torch.compile(run, *args, **kwargs)


class _Step(torch.autograd.Function):
    """The forward graph, and in backward the backward graph."""

    @staticmethod
    def forward(
        ctx: Any, module: RankModule, values: dict[str, torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run it; every result but the loss is cut off from differentiation."""
        results, kept = module._forward(values)
        ctx.module, ctx.kept = module, kept
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run it once: what was saved is freed."""
        if ctx.kept is None:
            raise BackendError("backward() was called a second time on one step: it is freed")
        kept, ctx.kept = ctx.kept, None
        return None, None, *ctx.module._backward(kept, grads[0])


def _placements(at: Home) -> list[Placement]:
    """DTensor's placement on each axis."""
    found: list[Placement] = []
    for axis in at.mesh.names or ("one",):
        cut = [dim for dim, layout in enumerate(at.sharding.dims) if axis in layout.axes]
        found.append(Shard(cut[0]) if cut else Replicate())
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach()
    return held._local_tensor if isinstance(held, DTensor) else held


def _submodule(root: nn.Module, path: Sequence[str]) -> nn.Module:
    for name in path:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Whole tensors in a state that is loaded become this rank's shards."""
    own = dict(module.named_parameters(remove_duplicate=False))
    held: dict[str, torch.Tensor] = {**own, **dict(module.named_buffers(remove_duplicate=False))}
    for name, tensor in held.items():
        given = state.get(prefix + name)
        if isinstance(tensor, DTensor) and given is not None and not isinstance(given, DTensor):
            if given.shape != tensor.shape:
                continue  # PyTorch's own message names both sizes
            entry = next(e for e in module._whole.stored if name in e.names)  # type: ignore[union-attr]
            at = module._homes[entry.value].placement  # type: ignore[union-attr,index]
            part = part_of(given.detach(), region_on(at, module.rank))  # type: ignore[arg-type]
            state[prefix + name] = DTensor.from_local(
                part.to(tensor.device),
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
