"""A PyTorch module and its trace."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.micro_batches import MicroBatches, micro_batch_sizes, part
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.guards.originals import tracing
from partitioner.backends.torch.state.buffers import extent
from partitioner.backends.torch.state.initialise import without_contents
from partitioner.foundations.no_gc import no_collection
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.graph import ModuleGraph, module_graph
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.patterns.composites import keep_composites
from partitioner.frontends.torch.patterns.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.patterns.experts import replace_experts, replace_lookups
from partitioner.frontends.torch.refusing.unchanged import Snapshot, check_registered, settings_of
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.tracing.capture import (
    ASSIGNED,
    Role,
    calls_of,
    capture,
    export_module,
    materialised,
)
from partitioner.frontends.torch.with_loss import losses_needed
from partitioner.ir.errors import naming
from partitioner.ir.graph import Graph
from partitioner.ir.types import TensorType
from partitioner.rewrites.in_proportion import in_proportion
from partitioner.rewrites.same_in_parts import is_same_constant


@dataclass(frozen=True)
class TracedModule:
    """A module and its graph."""

    module: nn.Module  #: The module itself.
    #: The graph, and the parameters, buffers and results that its values stand for.
    traced: ModuleGraph
    options: ModuleOptions = field(default_factory=ModuleOptions)  #: Options of the trace.
    #: What the trace has of the module beside its tensors' contents.
    snapshot: Snapshot = field(default_factory=Snapshot)
    #: The micro-batches of a call, if the graph is that of one of them.
    micro: MicroBatches | None = None
    batch: Signature | None = None  #: The signature of a call with all of them.
    rest: TracedModule | None = None  #: The trace of the last of them, if it is smaller.
    calls: tuple[Any, ...] = field(default=(), repr=False)  #: See `calls_of`.

    @property
    def graph(self) -> Graph:
        """The forward pass and, in training, the backward pass."""
        return self.traced.graph

    def on(self, graph: Graph) -> TracedModule:
        """The module with another of its graphs: with offers, or with some of them taken."""
        rest = self.rest and self.rest.of(graph.by_name)
        return replace(self, traced=replace(self.traced, graph=graph), rest=rest)

    def of(self, names: Container[str]) -> TracedModule:
        """The module with the graph that has nodes of these names, if there is one."""
        return replace(self, traced=self.traced.of(names), rest=self.rest and self.rest.of(names))

    @property
    def signature(self) -> Signature:
        """The arguments and results of a call of the module."""
        return self.traced.signature if self.batch is None else self.batch

    def stored_values(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers of the module, by value of the graph, as they are now."""
        return {value: self.tensor(name).detach() for name, value in self.traced.stored.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter, or a buffer that the module may have replaced since, by its first name."""
        path, _, leaf = name.rpartition(".")
        buffer = self.module.get_submodule(path)._buffers.get(leaf)
        return self.traced.captured.tensors[name] if buffer is None else buffer

    def constant_versions(self) -> tuple[int, ...]:
        """PyTorch's counts of writes to the weights that are constants of the graph."""
        tensors = (self.traced.captured.tensors[name] for name in self.traced.fixed)
        return tuple(0 if one.is_inference() else one._version for one in tensors)

    def keep(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write the whole values that a call gives to the buffers, as a call of the module does."""
        with torch.no_grad():
            for name, value in self.traced.written.items():
                self.tensor(name).copy_(values[value])

    def check_unchanged(self, *, modes: bool = True) -> None:
        """Refuse a module changed in more than tensors' contents (and, if told, `modes`)."""
        self.snapshot.check(self.module, training=self.options.training, modes=modes)


@no_collection()
@tracing()
def trace_module(
    module: nn.Module,
    example: Example,
    options: ModuleOptions,
    keep: frozenset[str] = frozenset(),
) -> TracedModule:
    """Trace a module; its weights and the example's tensors may be fake, or on the meta device.

    `keep` are first names of parameters and buffers that are stored though they are only read. A
    module that cannot be traced is refused by a FrontendError.
    """
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from its second use on: it would be traced as one input.

        One on the meta device becomes one on the CPU, as weights do; its contents are not read.
        """
        if tensor.device.type == "meta":
            sizes, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
            return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
        repeated = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.detach().clone() if repeated else tensor

    given = example.args, dict(example.kwargs)
    with naming("making the example inputs", FrontendError):  # there may be no memory for them
        arguments = pytree.tree_map_only(torch.Tensor, distinct, given)
    traceable, before = materialised(module), settings_of(module)
    try:
        with losses_needed(training=options.training):
            program = export_module(traceable, *arguments, training=options.training)
    except FrontendError:
        _check_statistics(module)
        raise
    if options.training:
        plain = {n: x for n, x in program.constants.items() if isinstance(x, torch.Tensor)}
        parameters = dict(module.named_parameters())
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        check_memory_apart({**plain, **parameters, **dict(module.named_buffers())}, trained)
    calls = calls_of(program)
    replace_experts(program.graph_module, training=options.training)
    replace_lookups(program.graph_module)
    keep_composites(program.graph_module)
    captured = capture(traceable, program, DECOMPOSITIONS, training=options.training)
    if options.training:
        constants = captured.ties.keys() - dict(module.state_dict(keep_vars=True)).keys()
        held = (captured.tensors[name] for name in sorted(constants))
        check_registered(before, held, module.parameters())
    if options.at_rest == "zero3" and not options.training:
        names = {slot.target for slot in captured.inputs if slot.role is Role.PARAMETER}
        keep |= {captured.ties.get(name, name) for name in names}
    name, at_rest = type(module).__name__, options.at_rest if options.training else ""
    graph = module_graph(
        captured, name, options.optimizer, keep, at_rest=at_rest, loads=options.loads
    )
    assigned = program.graph_module.meta[ASSIGNED]
    snapshot = Snapshot.of(module, before, assigned, graph.fixed)
    return TracedModule(module, graph, options, snapshot, calls=calls)


def _check_statistics(module: nn.Module) -> None:
    """Refuse batch statistics that are means of all batches so far, whose number no trace knows."""
    for name, norm in module.named_modules():
        averages = isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats
        if averages and norm.momentum is None and norm.num_batches_tracked is not None:
            raise FrontendError(
                f"{name or 'the module'} is a {type(norm).__name__} with momentum=None, which "
                "weights a batch by how many were before it: give it a number, as momentum=0.1, or "
                "call its eval() before compile"
            )


def check_memory_apart(tensors: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse, by name, two tensors with a common element, one of which a step writes to.

    Ranks hold each tensor by itself: in the module a write to one is a write to the others, on
    ranks it is not. (What the forward pass itself writes, PyTorch's trace tells: see `capture`.)
    """
    for one, other in _meeting(tensors):
        if tensors[one] is tensors[other] or {one, other}.isdisjoint(written):
            continue
        if _overlap(tensors[one], tensors[other]):
            raise FrontendError(
                f"{other} lies in the memory of {one} and is another tensor, so that what a step "
                f"writes to {one if one in written else other} would not reach the other on ranks: "
                "give one parameter or buffer both names (a.weight = b.weight, not .data), compute "
                "one from the other in forward, or clone() one of them"
            )


def _meeting(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors in one memory, where one begins between the other's first and last byte."""
    by_memory: dict[int, list[tuple[range, int, str]]] = {}
    for order, (name, tensor) in enumerate(tensors.items()):
        if tensor.layout is torch.strided and tensor.numel():
            memory, span = _place_of(tensor)
            by_memory.setdefault(memory, []).append((span, order, name))
    for places in by_memory.values():
        places.sort(key=lambda place: place[0].start)
        for at, (span, order, name) in enumerate(places):
            for other_span, other_order, other in itertools.islice(places, at + 1, None):
                if other_span.start >= span.stop:
                    break
                yield (name, other) if order < other_order else (other, name)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Test whether tensors in one memory whose bytes meet have an element in common."""
    (_, first), (_, second) = _place_of(one), _place_of(other)
    item, start = one.element_size(), min(first.start, second.start)
    if item != other.element_size() or (first.start - second.start) % item:
        return True
    end = (max(first.stop, second.stop) - start) // item
    counts = torch.zeros(end, dtype=torch.int8)  # of the tensors that have each element
    for tensor, span in ((one, first), (other, second)):
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        sizes = [size if stride else 1 for size, stride in dims]
        marks = torch.zeros(end, dtype=torch.int8)
        marks.as_strided(sizes, tensor.stride(), (span.start - start) // item).fill_(1)
        counts += marks
    return bool((counts == 2).any())


def _place_of(tensor: Tensor) -> tuple[int, range]:
    """The memory (0, or the storage of a tensor without address) and bytes of a tensor."""
    address = 0 if without_contents(tensor) else tensor.data_ptr()
    start = address or tensor.storage_offset() * tensor.element_size()
    memory = 0 if address else tensor.untyped_storage()._cdata
    return memory, range(start, start + extent(tensor))


def trace_micro_batch(
    module: nn.Module,
    example: Example,
    options: ModuleOptions,
    count: int | None,
    keep: frozenset[str] = frozenset(),
    *,
    fewer: bool = False,
    whole: TracedModule | None = None,
) -> TracedModule:
    """Trace a module with the first of `count` micro-batches of its example inputs; None: all.

    Its signature is that of a call with the whole batch. If the last micro-batch is smaller, the
    module is traced with it, too. A batch too small for `count` micro-batches may have `fewer`;
    else it is refused. One micro-batch has the trace of the `whole` batch, if that is known.

    Raises:
        BackendError: The batch cannot be cut, or a result is of no micro-batch.
        FrontendError: The module cannot be traced.
    """
    if count is None:
        return whole or trace_module(module, example, options, keep)
    arguments = (example.args, dict(example.kwargs))
    sizes = micro_batch_sizes(arguments, count)
    batch = sum(sizes)
    if len(sizes) < count and not fewer:
        raise BackendError(
            f"micro_batches={count}: the batch of {batch} has {len(sizes)} parts of {sizes[0]} or "
            f"less: give micro_batches={len(sizes)}, or another batch"
        )

    def traced_part(rows: slice) -> TracedModule:
        args, kwargs = part(arguments, batch, rows)
        return trace_module(module, Example(args, kwargs), options, keep)

    traced = traced_part(slice(sizes[0])) if whole is None or len(sizes) > 1 else whole
    flat, known = tuple(pytree.tree_leaves(arguments)), traced.signature
    of_batch = {
        name: TensorType.of(known.types[name].dtype, tuple(value.shape))
        for name, value in zip(known.inputs, flat, strict=True)
        if name in known.types
    }
    signature = replace(known, example=flat, types={**known.types, **of_batch})
    micro = MicroBatches.of(sizes, signature, traced.graph.types)
    rest = traced_part(slice(batch - micro.rest, batch)) if micro.rest else None
    return replace(traced, batch=signature, micro=micro, rest=rest)


def guessed_micro_batch(whole: TracedModule, part: TracedModule, count: int) -> TracedModule | None:
    """The trace of one of `count` micro-batches, as it follows from those of other batches.

    None if it does not, or if a micro-batch were of one sample: tracers leave out sums over it. It
    is a guess, that a trace must confirm before it runs: see `rewrites.in_proportion`.
    """
    assert part.micro is not None
    batch, known = sum(part.micro.sizes), part.micro.count
    if part.micro.rest or known == batch or batch % count or count == batch:
        return None
    traced = whole.traced.in_proportion(part.traced, known, count)
    if traced is None:
        return None
    sizes = (batch // count,) * count
    micro = MicroBatches.of(sizes, part.signature, traced.graph.types)
    return replace(part, traced=traced, micro=micro)


def sample_graph(whole: TracedModule, part: TracedModule, sample: TracedModule) -> Graph | None:
    """The graph of one sample in the nodes of other batches, which computes what its trace does.

    None unless the module's code calls for one sample what it calls for the others.
    """
    assert part.micro is not None
    known, batch = part.micro.count, sum(part.micro.sizes)
    if in_proportion(whole.calls, part.calls, known, batch) != sample.calls:
        return None
    traced = whole.traced.in_proportion(part.traced, known, batch)
    if traced is None or not all(
        is_same_constant(traced.graph, sample.graph, name) for name in traced.graph.constants
    ):
        return None
    return traced.graph
