"""Builds the graph of the IR of a captured PyTorch module.

Weights of a module that is not trained are constants. Values that are written from step to step
(running statistics) and, in training, all that a `state_dict` holds are `partitioner::state` nodes.
What is written, gradients included, goes through `partitioner::update` nodes (see
`partitioner.ir.ops.aten.state`).

In training all nodes that the forward results need come first. A value that both passes read has
an alias at its first use in the backward pass (a stored value one in the forward pass too), so
that the plan may gather it for each pass anew, or keep what the first one gathered. Views of stored
values are made again in the backward pass from its own alias. Stored values and their aliases stand
some uses ahead, and updates right behind what makes their values: communication starts there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.state.initialise import without_contents
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.calls import (
    Calls,
    OpCall,
    constant_loader,
    flat_outputs,
)
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.frontends.torch.options import OF_MATRICES, OPTIMIZERS
from partitioner.frontends.torch.tracing.capture import Captured, Role, Slot
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node, needed
from partitioner.ir.nodes.loads import Loads, with_loads
from partitioner.ir.ops.aten.state import ALIAS, KEEP, REST, STATE, UPDATE
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import chosen
from partitioner.rewrites.in_proportion import in_proportion
from partitioner.rewrites.keys import keys_in_parts
from partitioner.rewrites.passes import (
    backward_apart,
    early_updates,
    fetched_early,
    forward_aliases,
    path_of,
    plain_access,
    with_offers,
)
from partitioner.rewrites.ring import ring_of

#: Name of the graph input that steers random draws; it changes every step.
SEED = "seed"


@dataclass(frozen=True)
class ModuleGraph:
    """The graph of a module, and what its values stand for."""

    graph: Graph  #: The graph. Outputs: results of the module, then gradients and written buffers.
    captured: Captured  #: The trace that it was built from.
    call: Signature  #: A call, in the values of the graph.
    #: Value of the gradient of each trained parameter, by its first name.
    gradients: Mapping[str, str]
    written: Mapping[str, str]  #: New value of each buffer that is written, by its first name.
    stored: Mapping[str, str]  #: Value of each stored parameter or buffer, by its first name.
    #: Value of each parameter or buffer that is a constant, by its first name.
    fixed: Mapping[str, str] = field(default_factory=dict)
    #: Value of each parameter as it lies at rest, by its first name, where that is not where its
    #: optimizer's state lies.
    rests: Mapping[str, str] = field(default_factory=dict)
    #: In training, the graph in which all that the backward pass reads is kept.
    kept: Graph | None = None
    #: The graph before its passes are set apart.
    plain: Graph | None = field(default=None, repr=False, compare=False)
    loads: Loads = ()  #: As of `ModuleOptions`.

    @cached_property
    def signature(self) -> Signature:
        """The arguments and results of a call of the module."""
        inputs = self.graph.inputs
        return replace(
            self.call,
            types={name: self.graph.types[name] for name in inputs},
            seed=self.call.seed if self.call.seed in inputs else "",
            tangent=self.call.tangent if self.call.tangent in inputs else "",
        )

    @cached_property
    def offered(self) -> Graph:
        """In training, the graph that offers to compute again what the backward pass reads."""
        if self.kept is None or self.plain is None:
            return self.graph
        return _finished(with_offers(self.plain), self.loads)

    def in_proportion(self, part: ModuleGraph, count: int, wanted: int) -> ModuleGraph | None:
        """The graph of one of `wanted` micro-batches, see `rewrites.in_proportion`.

        `part` has that of one of `count`, and this one that of the whole batch.
        """
        assert self.plain is not None
        assert part.plain is not None
        plain = in_proportion(self.plain, part.plain, count, wanted)
        if plain is None:
            return None
        graph = _finished(backward_apart(plain, plain_access(plain)), part.loads)
        kept = None if part.kept is None else graph
        return replace(part, graph=graph, plain=plain, kept=kept)

    @property
    def uncut(self) -> Graph:
        """The graph of which stretches may run in blocks: in training it keeps all values."""
        return self.graph if self.kept is None else self.kept

    @property
    def forms(self) -> tuple[Graph, ...]:
        """The graph, and with the same results in nodes that can be cut along more dims."""
        divided = keys_in_parts(self.graph)
        return (self.graph,) if divided is self.graph else (self.graph, divided)

    def of(self, names: Container[str]) -> ModuleGraph:
        """Keep the graph that has nodes of these names alone; as it is if there is none."""
        for form in self.forms[1:]:
            if any(n.name in names for n in form.nodes if n.name not in self.graph.by_name):
                return replace(self, graph=form)
        rounds = ring_of(self.uncut, names)
        if rounds is not self.uncut:
            return replace(self, graph=rounds)
        if self.kept is None or all(node.name in names for node in self.kept.nodes):
            return self
        try:
            return replace(self, graph=chosen(self.offered, names))
        except IRError:
            return self


def module_graph(
    captured: Captured,
    name: str,
    optimizer: str = "adamw",
    keep: frozenset[str] = frozenset(),
    *,
    at_rest: str = "",
    loads: Loads = (),
) -> ModuleGraph:
    """The graph of a captured module.

    The `optimizer`, one of `OPTIMIZERS`, keeps its state with each trained parameter. Parameters
    and buffers whose first names are in `keep` are stored even if they are only read. `at_rest`
    and `loads` are as of `ModuleOptions`. What has no form in the IR, an operator, a type or an
    argument, is refused by a FrontendError.
    """
    calls = _ModuleCalls(
        module=captured.graph, captured=captured, optimizer=optimizer, keep=keep, at_rest=at_rest
    )
    example_inputs = calls.add_placeholders()
    calls.add_calls()
    written = calls.add_updates(Role.BUFFER)
    gradients = calls.add_updates(Role.GRADIENT)
    training = captured.training
    if training and not gradients:
        raise FrontendError(f"{name}: no parameter that requires a gradient gets one")
    results = calls.add_results()
    given = tuple(filter(None, results))
    outputs = (*given, *gradients.values(), *written.values())
    plain = _plain_graph(calls, name, outputs, (*given, *written.values()))
    last = frozenset(calls.channels_last)
    plain = replace(plain, delivered=frozenset(given), channels_last=last)
    graph = _finished(backward_apart(plain, plain_access(plain)), loads)
    return ModuleGraph(
        graph,
        captured,
        replace(
            captured.call,
            inputs=example_inputs,
            results=results,
            seed=calls.seed,
            tangent=calls.tangent,
        ),
        gradients,
        written,
        {first: value for first, value in calls.stored.items() if value in graph.types},
        {first: value for first, value in calls.fixed.items() if value in graph.constants},
        {first: value for first, value in calls.rests.items() if value in graph.types},
        graph if training else None,
        plain,
        loads,
    )


def _finished(graph: Graph, loads: Loads) -> Graph:
    return with_loads(fetched_early(forward_aliases(graph)), loads)


@dataclass(kw_only=True)
class _ModuleCalls(Calls):
    """The calls of a module, its inputs, what it stores, and its results."""

    captured: Captured
    optimizer: str
    keep: frozenset[str]
    at_rest: str
    inputs: list[str] = field(default_factory=list)  #: Graph inputs.
    tangent: str = ""  #: See `Signature`, as for the seed.
    seed: str = ""
    stored: dict[str, str] = field(default_factory=dict)  #: See `ModuleGraph`, as for the next two.
    fixed: dict[str, str] = field(default_factory=dict)
    rests: dict[str, str] = field(default_factory=dict)
    channels_last: set[str] = field(default_factory=set)  #: See `Graph`.
    draws: int = 0  #: How many random draws there are.
    #: Names of the nodes that only stand for the steps of the optimizer.
    steps: set[str] = field(default_factory=set)

    def add_placeholders(self) -> tuple[str, ...]:
        """Declare weights and inputs; returns the graph input of each flat example input."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        written = {slot.target for slot in self.captured.outputs if slot.role is Role.BUFFER}
        names = iter(self.captured.call.inputs)
        example_inputs = []
        for node, slot in zip(placeholders, self.captured.inputs, strict=True):
            if slot.role in (Role.PARAMETER, Role.BUFFER):
                self._add_weight(node, slot, written=slot.target in written)
            elif slot.role is Role.TANGENT:
                self.tangent = self.add_value(node, "tangent")
                self.inputs.append(self.tangent)
            elif slot.role is not Role.UNUSED:
                value = next(names)
                if isinstance(example := node.meta.get("val"), torch.Tensor):
                    value = self.add_value(node, value)
                    if _is_channels_last(example):
                        self.channels_last.add(value)
                    self.inputs.append(value)
                    example_inputs.append(value)
                else:
                    example_inputs.append("")
        return tuple(example_inputs)

    def _add_weight(self, node: fx.Node, slot: Slot, *, written: bool) -> None:
        """Declare a weight, tied ones once: stored if written or trained with, else a constant."""
        captured = self.captured
        first = captured.ties.get(slot.target, slot.target)
        if first in self.types:
            self.values[node.name] = self.rests.get(first, first)
            return
        tensor = captured.tensors[first]
        parameter = slot.role is Role.PARAMETER
        trained_with = captured.training and slot.target in captured.persistent
        value = self.add_value(node, first)
        if written or trained_with or first in self.keep:
            trained = parameter and captured.training and tensor.requires_grad
            kept = OPTIMIZERS[self.optimizer] if trained else 0
            if trained and tensor.ndim == 2 and self.optimizer in OF_MATRICES:
                kept, _ = OF_MATRICES[self.optimizer]
            attrs = {"state_bytes": kept * tensor.element_size()}
            if trained and self.at_rest:
                attrs["apart"] = 1
            self.add(path_of(first), STATE, (), made=(value,), attrs=attrs)
            self.stored[first] = value
            if trained and self.at_rest:
                parts = self._alias(value, f"{path_of(first)}/parts", "parts")
                rest = self.values[node.name] = self.rests[first] = self.copied(value, "rest")
                self.add(f"{path_of(first)}/rest", REST, (parts,), made=(rest,))
        else:
            steers = not (parameter or tensor.is_floating_point() or without_contents(tensor))
            load = constant_loader(tensor, first)
            self.constants[value] = Constant(self.types[value], load, weight=not steers)
            self.fixed[first] = value

    def seeded(self, node: fx.Node, inputs: tuple[str, ...], attrs: dict[str, Attr]) -> OpCall:
        """Dropout (with an operand) or uniform numbers, drawn from a seed that all ranks share."""
        if not self.seed:
            self.seed = self.value(SEED, TensorType.of("int64", ()))
            self.inputs.append(self.seed)
        self.draws += 1
        if inputs:
            attrs = {"p": attrs["p"], "index": self.draws}
            return "partitioner::dropout", (inputs[0], self.seed), attrs
        drawn = node.meta["val"]
        attrs = {"size": tuple(drawn.shape), "dtype": dtype_name(drawn.dtype), "index": self.draws}
        return "partitioner::uniform", (self.seed,), attrs

    def add_updates(self, role: Role) -> dict[str, str]:
        word = "gradient" if role is Role.GRADIENT else "next"
        updates: dict[str, str] = {}
        for slot, node in self._outputs(role):
            first = self.captured.ties.get(slot.target, slot.target)
            if node is None or first not in self.stored:
                continue
            if first in updates:
                raise FrontendError(f"{slot.target}: tied to {first}, and both have a gradient")
            updates[first] = self.copied(first, word)
            inputs, outputs = (self.values[node.name], self.stored[first]), (updates[first],)
            attrs: dict[str, Attr] = {"role": word}
            if role is Role.GRADIENT:
                attrs.update(steps := self._steps(first))
            name = f"{path_of(first)}/{word}"
            if role is Role.GRADIENT and self.at_rest == "zero1" and first in self.rests:
                kept = (self.values[node.name], self.rests[first])
                self.add(name, KEEP, kept, made=outputs, attrs={"role": word})
                parts = self._alias(updates[first], f"{name}/parts", "parts")
                name, attrs = f"{path_of(first)}/step", steps
                inputs, outputs = (parts, self.stored[first]), (self.copied(first, "step"),)
            self.add(name, UPDATE, inputs, made=outputs, attrs=attrs)
            if outputs[0] != updates[first]:
                self.steps.add(self.nodes[-1].name)
        return updates

    def _steps(self, first: str) -> dict[str, Attr]:
        """Attributes of the node that takes a parameter's gradient to the optimizer."""
        if self.optimizer in OF_MATRICES and self.captured.tensors[first].ndim == 2:
            return {"optimizer": self.optimizer, "whole": OF_MATRICES[self.optimizer][1]}
        return {"optimizer": self.optimizer}

    def _alias(self, value: str, name: str, suffix: str) -> str:
        """An alias of a value, so that copies of it last as long as the readers of the alias."""
        alias = self.copied(value, suffix)
        self.add(name, ALIAS, (value,), made=(alias,))
        return alias

    def add_results(self) -> tuple[str, ...]:
        """Values of the module's flat results, repeated ones as aliases; "" for no tensor."""
        made = {value for node in self.nodes for value in node.writes}
        results: list[str] = []
        for _, node in self._outputs(Role.OUTPUT):
            value = "" if node is None else self.values[node.name]
            if value and (value not in made or value in results):
                source, value = value, self.copied(value, "result")
                self.add("/result", ALIAS, (source,), made=(value,))
            results.append(value)
        return tuple(results)

    def _outputs(self, role: Role) -> list[tuple[Slot, fx.Node | None]]:
        outputs = zip(self.captured.outputs, flat_outputs(self.module.graph), strict=True)
        return [(slot, node) for slot, node in outputs if slot.role is role]


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.is_contiguous() or tensor.dim() not in formats:
        return False
    return tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _plain_graph(
    calls: _ModuleCalls, name: str, outputs: tuple[str, ...], forward_outputs: tuple[str, ...]
) -> Graph:
    nodes, inputs = [*early_updates(needed(calls.nodes, outputs, calls.steps))], calls.inputs
    if calls.captured.training:
        forward = needed(nodes, forward_outputs)
        first = {node.name for node in forward}
        backward = [node for node in nodes if node.name not in first]
        nodes = [*forward, *backward]
        calls.backward.update(node.name for node in backward)
        calls.twins.update(_twins(calls.sequence, forward, backward))
        read = {value for node in nodes for value in node.reads}
        inputs = [value for value in inputs if value in read]
    calls.nodes = nodes
    return calls.graph(calls.steps, name=name, inputs=tuple(inputs), outputs=outputs)


def _twins(
    sequence: Mapping[str, int], forward: Sequence[Node], backward: Sequence[Node]
) -> dict[str, str]:
    """The last forward node of the number in autograd's sequence of each backward node.

    Nodes without gradients have the number of the one before them: those that no trained value
    reaches, and those that only make the next contents of buffers, as of running statistics.
    """
    read: dict[bool, set[str]] = {True: set(), False: set()}
    for node in forward:
        read[node.attrs.get("role") == "next"].update(node.reads)
    buffers = read[True] - read[False]
    reached = {node.inputs[1] for node in backward if node.attrs.get("role") == "gradient"}
    last: dict[int, str] = {}
    for node in forward:
        if reached.isdisjoint(node.reads):
            continue
        reached.update(node.writes)
        if node.name in sequence and not buffers.issuperset(node.writes):
            last[sequence[node.name]] = node.name
    numbers = ((node.name, sequence.get(node.name)) for node in backward)
    return {name: last[number] for name, number in numbers if number in last}
