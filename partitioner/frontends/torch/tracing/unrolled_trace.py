"""Extends the trace of a program of which few layers are left by the layers that were left out.

PyTorch traces a call by its operator and the types of its operands, and its backward pass runs in
the opposite order. So each layer adds the same calls to the forward pass, and from some layer on to
the backward pass. This is not taken for granted: layers in the middle of the trace are compared,
and so are the stretches of the backward pass from the first gradient of a layer's weights to that
of the layer below. If they are not equal, or anything reads a layer in another way than its
neighbour does, the trace is not extended.

Calls have the names and numbers that they have in the trace of the whole program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from torch import fx

from partitioner.frontends.torch.tracing.repeated_layers import (
    KEPT,
    IrregularError,
    RepeatedLayers,
    form,
    type_of,
)

#: The layer whose forward pass is repeated; it and those behind it are compared with the next one.
MIDDLE = 2
#: The pass of a call (or "weight"), its layer, and its number there.
_Place = tuple[str, int, int]
#: Entries of a call's `meta` with the submodules that it is in.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def unrolled(joint: fx.Graph, layers: RepeatedLayers) -> fx.Graph | None:
    """The trace of all layers from that of those that are left; None if they are not equal.

    Nodes of the `joint` trace, of the program with `layers.graph`, have `meta["from_node"]`.
    """
    try:
        trace = _Trace(joint, layers)
        trace.check()
        return _Unrolled(trace).whole()
    except IrregularError:
        return None


@dataclass
class _Trace:
    """A trace of few layers, by the positions of its calls."""

    joint: fx.Graph
    layers: RepeatedLayers
    #: By how much the number in the names of each operator's calls grows from layer to layer of the
    #: forward pass.
    forward_steps: dict[str, int] = field(default_factory=dict)
    backward_steps: dict[str, int] = field(default_factory=dict)  #: The same of the backward pass.

    @cached_property
    def calls(self) -> Sequence[fx.Node]:
        outer = ("placeholder", "output")
        return [node for node in self.joint.nodes if node.op not in outer]

    @cached_property
    def at(self) -> Mapping[fx.Node, int]:
        return {node: index for index, node in enumerate(self.calls)}

    @cached_property
    def turn(self) -> int:
        passes = (
            index
            for index, node in enumerate(self.calls)
            if node.meta.get("partitioner_tag") == "is_backward"
        )
        return next(passes, len(self.calls))

    @cached_property
    def spans(self) -> Sequence[range]:
        """Positions of the layers in the forward pass; IrregularError if not consecutive."""
        of: list[list[int]] = [[] for _ in range(KEPT)]
        for index, node in enumerate(self.calls[: self.turn]):
            sources = node.meta.get("from_node")
            layer = self.layers.layer_of.get(sources[-1].name) if sources else None
            if layer is not None:
                of[layer].append(index)
        if not all(of):
            raise IrregularError
        spans = [range(each[0], each[-1] + 1) for each in of]
        if any(len(span) != len(each) for span, each in zip(spans, of, strict=True)):
            raise IrregularError
        if any(one.stop != other.start for one, other in pairwise(spans)):
            raise IrregularError
        return spans

    @cached_property
    def place(self) -> Mapping[fx.Node, _Place]:
        """Where calls and weights of layers are; in the backward pass, those near the repetition.

        Those are the two stretches, of layers `MIDDLE` + 1 and `MIDDLE`, and as many calls before.
        """
        one, other = self.turns
        places: dict[fx.Node, _Place] = {
            self.calls[index]: ("forward", layer, index - span.start)
            for layer, span in enumerate(self.spans)
            for index in span
        }
        before = one.start - len(one)
        for layer, start in ((MIDDLE + 2, before), (MIDDLE + 1, one.start), (MIDDLE, other.start)):
            for index in range(max(start, self.turn), start + len(one)):
                places[self.calls[index]] = "backward", layer, index - start
        for node in self.joint.find_nodes(op="placeholder"):
            name = getattr(node.meta["desc"], "target", "")
            if name in self.layers.weights.place:
                places[node] = "weight", *self.layers.weights.place[name]
        return places

    @cached_property
    def results(self) -> Sequence[tuple[fx.Node | None, str]]:
        """Pair results (None for no tensor) with the weights whose gradients they are, or ""."""
        output = self.joint.output_node()
        pairs = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        return [
            (
                node if isinstance(node, fx.Node) else None,
                getattr(getattr(desc, "grad_of", None), "target", ""),
            )
            for node, desc in pairs
        ]

    @cached_property
    def gradients(self) -> Mapping[fx.Node, Sequence[str]]:
        """Names of the layers' weights whose gradient each call gives; "" for other results."""
        names: dict[fx.Node, list[str]] = {}
        for node, name in self.results:
            if node is not None:
                own = name if name in self.layers.weights.place else ""
                names.setdefault(node, []).append(own)
        return names

    @cached_property
    def turns(self) -> tuple[range, range]:
        """Two stretches of the backward pass, of two layers' first gradients on, or empty."""
        if self.turn == len(self.calls):
            return range(self.turn, self.turn), range(self.turn, self.turn)
        first: dict[int, int] = {}
        for node, names in self.gradients.items():
            for name in filter(None, names):
                layer, _ = self.layers.weights.place[name]
                first[layer] = min(self.at.get(node, -1), first.get(layer, len(self.calls)))
        starts = [first.get(MIDDLE + by, -1) for by in (1, 0, -1)]
        if not self.turn <= starts[0] < starts[1] < starts[2]:
            raise IrregularError
        one, other = (range(*pair) for pair in pairwise(starts))
        if len(one) != len(other):
            raise IrregularError
        return one, other

    @cached_property
    def _sequence(self) -> tuple[int, int, int]:
        """Least and largest number in autograd's sequence, and that of a layer; not the first."""
        numbers = [
            [self.calls[index].meta.get("seq_nr", 0) for index in span] for span in self.spans
        ]
        least, most = min(numbers[1]), max(numbers[-1])
        return least, most, numbers[MIDDLE + 1][0] - numbers[MIDDLE][0]

    def sequence_moved(self, number: int, layers: int, left_out: int) -> int:
        """A number in autograd's sequence so many layers later; behind all layers, `left_out`."""
        least, most, step = self._sequence
        if number < least:
            return number
        return number + step * (layers if number <= most else left_out)

    def check(self) -> None:
        """Compare layers in the middle with the next ones, and stretches of the backward pass."""
        for layer in range(MIDDLE, KEPT - 1):
            one, other = self.spans[layer : layer + 2]
            if len(one) != len(other):
                raise IrregularError
            for old, new in zip(one, other, strict=True):
                self._compare(old, new, 1, self.forward_steps)
        for old, new in zip(*self.turns, strict=True):
            self._compare(old, new, -1, self.backward_steps)

    def _compare(self, old: int, new: int, by: int, steps: dict[str, int]) -> None:
        one, other = self.calls[old], self.calls[new]
        (form_one, operands), (form_other, others) = form(one), form(other)
        values = [type_of(node.meta.get("val")) for node in (one, other)]
        (base, number), (name, later) = numbered_name(one.name), numbered_name(other.name)
        pairs = zip(operands, others, strict=False)
        alike = (
            form_one == form_other
            and values[0] == values[1]
            and all(self._leads(a, b, by) for a, b in pairs)
            and name == base
            and later - number == steps.setdefault(base, later - number)
            and self._annotated(one, other, by)
            and self._gives(one, other, by)
        )
        if not alike:
            raise IrregularError

    def _leads(self, operand: fx.Node, other: fx.Node, by: int) -> bool:
        if operand not in self.place:
            return operand is other
        of, layer, number = self.place[operand]
        return self.place.get(other) == (of, layer + by, number)

    def _annotated(self, one: fx.Node, other: fx.Node, by: int) -> bool:
        same = ("partitioner_tag", "autograd_backward", "is_gradient_acc")
        if any(one.meta.get(key) != other.meta.get(key) for key in same):
            return False
        moved = self.layers.modules.moved
        for key in _STACKS:
            stacks = [list((node.meta.get(key) or {}).items()) for node in (one, other)]
            if [moved(entry, by) for entry in stacks[0]] != stacks[1]:
                return False
        if one.meta.get("is_gradient_acc"):  # has any number
            return True
        number: int | None = one.meta.get("seq_nr")
        then: int | None = other.meta.get("seq_nr")
        if number is None or then is None:
            return number is then
        return self.sequence_moved(number, by, 0) == then

    def _gives(self, one: fx.Node, other: fx.Node, by: int) -> bool:
        names = [self.gradients.get(node, ()) for node in (one, other)]
        if "" in names[0] or "" in names[1]:
            return False
        return [self.layers.weights.moved(name, by) for name in names[0]] == list(names[1])


@dataclass
class _Unrolled:
    """Writes the trace of all layers."""

    trace: _Trace
    graph: fx.Graph = field(default_factory=fx.Graph)
    #: The new node of each node that is copied once.
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: The new calls and weights of layers, by their places.
    placed: dict[_Place, fx.Node] = field(default_factory=dict)
    #: The new gradients of the layers' weights, by their names.
    gradients: dict[str, fx.Node] = field(default_factory=dict)

    def whole(self) -> fx.Graph:
        """The trace of all layers; IrregularError if one is read that is not next to it."""
        trace, left_out = self.trace, self.trace.layers.left_out
        for node in trace.joint.find_nodes(op="placeholder"):
            self._keep(node, self.graph.node_copy(node), 0)
        middle, (one, other) = trace.spans[MIDDLE], trace.turns
        self._write(range(middle.stop), 0, 0, 0)
        for repetition in range(1, left_out + 1):
            self._write(middle, repetition, repetition, 0)
        self._write(range(middle.stop, trace.turn), left_out, left_out, 0)
        self._write(range(trace.turn, one.stop), left_out, left_out, 0)
        for repetition in range(1, left_out + 1):
            self._write(one, left_out - repetition, left_out, repetition)
        self._write(range(other.start, len(trace.calls)), 0, left_out, left_out)
        place = trace.layers.weights.place
        numbers = {place[name][1] for name in self.gradients}
        if len(self.gradients) != len(numbers) * (KEPT + left_out):
            raise IrregularError
        results = [
            self.gradients.get(name) if name in place else node and self.copies[node]
            for node, name in trace.results
        ]
        self.graph.output(tuple(results)).meta = dict(trace.joint.output_node().meta)
        return self.graph

    def _keep(self, node: fx.Node, copied: fx.Node, layers: int) -> None:
        if node in self.trace.place:
            of, layer, number = self.trace.place[node]
            self.placed[of, layer + layers, number] = copied
        self.copies.setdefault(node, copied)

    def _write(self, positions: range, layers: int, forward: int, backward: int) -> None:
        """Write calls so many layers later; passes are repeated `forward` and `backward` times."""
        trace, moved = self.trace, self.trace.layers.modules.moved
        for index in positions:
            node = trace.calls[index]
            base, number = numbered_name(node.name)
            number += forward * trace.forward_steps.get(base, 0)
            number += backward * trace.backward_steps.get(base, 0)
            name = f"{base}_{number}" if number else base
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), partial(self._operand, index=index, layers=layers)
            )
            copied = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            if copied.name != name:
                raise IrregularError
            meta = copied.meta = dict(node.meta)
            for key in _STACKS:
                if meta.get(key):
                    entries: Any = (moved(entry, layers) for entry in meta[key].items())
                    meta[key] = dict(entries)
            if "seq_nr" in meta:
                number = meta["seq_nr"]
                meta["seq_nr"] = trace.sequence_moved(number, layers, trace.layers.left_out)
            self._keep(node, copied, layers)
            for weight in filter(None, trace.gradients.get(node, ())):
                self.gradients[str(trace.layers.weights.moved(weight, layers))] = copied

    def _operand(self, read: fx.Node, index: int, layers: int) -> fx.Node:
        """Find what takes the place of an operand of a call that is written.

        Calls may read a layer next to their own: what is written behind the repeated layers is
        moved with them, what runs behind the repeated part of the backward pass is not moved.
        """
        if read not in self.trace.place:
            return self.copies[read]
        of, layer, number = self.trace.place[read]
        below = self.trace.turns[1]
        is_far = index >= self.trace.spans[MIDDLE].stop and layers > 0 and layer < MIDDLE
        is_far |= index >= below.start and layer > MIDDLE + (index < below.stop)
        if is_far or (of, layer + layers, number) not in self.placed:
            raise IrregularError
        return self.placed[of, layer + layers, number]


def numbered_name(name: str) -> tuple[str, int]:
    """The name of an operator in that of a call, and the call's number: 0 for the first one."""
    match = re.fullmatch(r"(.*)_(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)
