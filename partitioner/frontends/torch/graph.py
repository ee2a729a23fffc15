"""A captured PyTorch graph as a graph of the IR.

Weights of a module that is not trained are constants. Values that are written from step to step
(running statistics) and, in training, all that a `state_dict` holds are `partitioner::state` nodes,
and what is written, gradients included, goes through `partitioner::update` nodes (see
`partitioner.ir.ops.aten.state`).

In training all nodes that the forward results need come first. A value that both passes read has
an alias at its first use in the backward pass (a stored value one in the forward pass too), so
that the plan may gather it for each pass anew, or keep what the first one gathered. Views of stored
values are made again in the backward pass from its own alias. Stored values and their aliases stand
some uses ahead, and updates right behind what makes their values: communication starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import fx

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.calls import Calls, constant_loader, flat_outputs, is_fake
from partitioner.frontends.torch.capture import Captured, Role
from partitioner.frontends.torch.nodes import dtype_name
from partitioner.frontends.torch.passes import Passes, early_updates, fetched_early, needed, reading
from partitioner.frontends.torch.recompute import Again
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.offers import chosen
from partitioner.ir.types import TensorType

#: Name of the graph input that steers random draws; it changes every step.
SEED = "seed"


@dataclass(frozen=True)
class ModuleGraph:
    """The IR of a module, and what its values stand for.

    Attributes:
        graph: The graph. Outputs: results of the module, then gradients and written buffers.
        captured: What it was made from.
        results: Value of each flat result of the module; "" for one that is no tensor.
        gradients: Value of the gradient of each trained parameter, by its first name.
        written: New value of each buffer that is written, by its first name.
        stored: Value of each stored parameter or buffer, by its first name.
        tangent: Graph input for the gradient of the loss; "" for inference.
        inputs: Graph input of each flat example input; "" for those that are no tensors.
        fixed: Value of each parameter or buffer that is a constant, by its first name.
        kept: In training, the graph in which all that the backward pass reads is kept.
        offer: In training, makes the graph that offers to compute it again.
    """

    graph: Graph
    captured: Captured
    results: tuple[str, ...]
    gradients: Mapping[str, str]
    written: Mapping[str, str]
    stored: Mapping[str, str]
    tangent: str
    inputs: tuple[str, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)
    kept: Graph | None = None
    offer: Callable[[], Graph] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def offered(self) -> Graph:
        """The graph that offers to compute again what the backward pass reads (see `ir.offers`)."""
        return self.graph if self.offer is None else self.offer()

    def of(self, names: Container[str]) -> ModuleGraph:
        """With the graph that a plan of these nodes' names is for; as it is if there is none."""
        if self.kept is None or all(node.name in names for node in self.kept.nodes):
            return self
        try:
            return replace(self, graph=chosen(self.offered, names))
        except IRError:
            return self


def module_graph(
    captured: Captured, name: str, state_bytes: int = 0, keep: frozenset[str] = frozenset()
) -> ModuleGraph:
    """The graph of a captured module.

    Args:
        captured: The module.
        name: Of the graph.
        state_bytes: Bytes an element that an optimizer keeps of each trained parameter.
        keep: First names of what is stored even if the graph only reads it.

    Raises:
        FrontendError: An operator, a type or an argument has no form in the IR.
    """
    return _Builder(
        module=captured.graph, captured=captured, name=name, state_bytes=state_bytes, keep=keep
    ).run()


@dataclass(kw_only=True)
class _Builder(Calls):
    captured: Captured
    name: str
    state_bytes: int
    keep: frozenset[str]
    inputs: list[str] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    draws: int = 0
    tangent: str = ""

    def run(self) -> ModuleGraph:
        captured = self.captured
        nodes = list(captured.graph.graph.nodes)
        fed = self._placeholders([node for node in nodes if node.op == "placeholder"])
        self.add_calls(nodes)
        (last,) = (node for node in nodes if node.op == "output")
        flat = flat_outputs(last)
        results, forward = [], []
        for slot, found in zip(captured.outputs, flat, strict=True):
            if slot.role is Role.OUTPUT:
                results.append(self.values[found.name] if found is not None else "")
        forward += [value for value in results if value]
        written = self._updates(flat, Role.BUFFER)
        gradients = self._updates(flat, Role.GRADIENT)
        if self.tangent and not gradients:
            raise FrontendError(f"{self.name}: no parameter that requires a gradient gets one")
        shown = self._shown(results)
        outputs = (*dict.fromkeys(v for v in shown if v), *gradients.values(), *written.values())
        first = (*(v for v in shown if v), *written.values())
        graph = self._graph(outputs, first)
        fixed = {name: value for name, value in self.fixed.items() if value in graph.constants}
        stored = {k: v for k, v in self.stored.items() if v in graph.types}
        offer = partial(self._graph, outputs, first, again=True)
        return ModuleGraph(
            graph,
            captured,
            tuple(shown),
            gradients,
            written,
            stored,
            self.tangent,
            fed,
            fixed,
            graph if self._training else None,
            offer if self._training else None,
        )

    # Values ----------------------------------------------------------------------------------

    def _placeholders(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        mutated = {s.target for s in self.captured.outputs if s.role is Role.BUFFER}
        fed = []
        names = iter(self.captured.names)
        for node, slot in zip(nodes, self.captured.inputs, strict=True):
            tensor = node.meta.get("val")
            if slot.role is Role.UNUSED:
                continue
            if slot.role in (Role.PARAMETER, Role.BUFFER):
                self._held(node, slot.role, slot.target, slot.target in mutated)
            elif isinstance(tensor, torch.Tensor):
                value = "tangent" if slot.role is Role.TANGENT else next(names)
                self.inputs.append(self._value(node, value))
                if slot.role is Role.TANGENT:
                    self.tangent = self.inputs[-1]
                else:
                    fed.append(self.inputs[-1])
            else:
                next(names)
                fed.append("")
        return tuple(fed)

    def _held(self, node: fx.Node, role: Role, target: str, mutated: bool) -> None:
        """A parameter or buffer: stored if it is written or trained with, else a constant.

        Tied ones are one.
        """
        first = self.captured.ties.get(target, target)
        tensor = self.captured.tensors[first]
        trained = role is Role.PARAMETER and self._training and tensor.requires_grad
        kept = first in self.keep or (self._training and target in self.captured.persistent)
        if first in self.types:
            self.values[node.name] = first
            return
        value = self._value(node, first)
        if kept or mutated:
            attrs = {"state_bytes": self.state_bytes} if trained else {"state_bytes": 0}
            path = "/" + first.replace(".", "/")
            self._add(Node(self._free(path), "partitioner::state", (), (value,), attrs))
            self.stored[first] = value
        else:
            steers = role is Role.BUFFER and not (tensor.is_floating_point() or is_fake(tensor))
            load = constant_loader(tensor, first)
            self.constants[value] = Constant(self.types[value], load, weight=not steers)
            self.fixed[first] = value

    @cached_property
    def _training(self) -> bool:
        return any(slot.role is Role.TANGENT for slot in self.captured.inputs)

    def _seeded(
        self, node: fx.Node, inputs: tuple[str, ...], attrs: Mapping[str, Attr]
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        """Dropout (with an operand) and uniform numbers draw from a seed that all ranks share."""
        if SEED not in self.inputs:
            self.types[SEED] = TensorType.of("int64", ())
            self.inputs.append(SEED)
        self.draws += 1
        found: dict[str, Attr] = {"index": self.draws}
        if inputs:
            return "partitioner::dropout", (inputs[0], SEED), {"p": attrs["p"], **found}
        made = node.meta["val"]
        found |= {"size": tuple(made.shape), "dtype": dtype_name(made.dtype)}
        return "partitioner::uniform", (SEED,), found

    # Outputs ---------------------------------------------------------------------------------

    def _updates(self, flat: list[fx.Node | None], role: Role) -> dict[str, str]:
        """Update nodes of gradients or buffers; a tied parameter has one gradient."""
        found: dict[str, str] = {}
        for slot, node in zip(self.captured.outputs, flat, strict=True):
            if slot.role is not role or node is None:
                continue
            first = self.captured.ties.get(slot.target, slot.target)
            if first not in self.stored:
                continue
            if first in found:
                raise FrontendError(f"{slot.target}: tied to {first}, and both have a gradient")
            stored = self.stored[first]
            word = "gradient" if role is Role.GRADIENT else "next"
            value = f"{first}.{word}"
            self.types[value] = self.types[stored]
            name = self._free("/" + first.replace(".", "/") + "/" + word)
            made = self.values[node.name]
            self._add(Node(name, "partitioner::update", (made, stored), (value,), {"role": word}))
            found[first] = value
        return found

    def _shown(self, results: list[str]) -> list[str]:
        """Results that are a graph's outputs: made by a node, each once."""
        made = {value for node in self.nodes for value in node.writes}
        shown: list[str] = []
        for value in results:
            if value and (value not in made or value in shown):
                new = f"{value}.result"
                while new in self.types:
                    new += "'"
                self.types[new] = self.types[value]
                name = self._free("/result")
                self._add(Node(name, "partitioner::alias", (value,), (new,)))
                value = new
            shown.append(value)
        return shown

    # Order -----------------------------------------------------------------------------------

    def _graph(
        self, outputs: tuple[str, ...], forward_results: tuple[str, ...], *, again: bool = False
    ) -> Graph:
        """The graph of the calls, which may be asked for several times."""
        return replace(self, types=dict(self.types), names=set(self.names))._ordered(
            outputs, forward_results, again=again
        )

    def _ordered(
        self, outputs: tuple[str, ...], forward_results: tuple[str, ...], *, again: bool
    ) -> Graph:
        nodes = list(early_updates(needed(self.nodes, outputs)))
        forward = needed(nodes, forward_results)
        first = {node.name for node in forward}
        backward = [node for node in nodes if node.name not in first]
        optional: frozenset[str] = frozenset()
        if self._training:
            given = self.types, self._free, forward, backward
            passes = Again(*given, frozenset(outputs)) if again else Passes(*given)
            backward, optional = passes.run()
            forward = list(fetched_early(self._pass_aliases(forward, backward)))
            backward = list(fetched_early(backward, self.stored.values()))
        else:
            forward = list(fetched_early([*forward, *backward]))
            backward = []
        ordered = [*forward, *backward]
        read = {value for node in ordered for value in node.reads}
        made = {value for node in ordered for value in node.writes}
        kept = [value for value in self.inputs if value in read or not self._training]
        constants = {k: v for k, v in self.constants.items() if k in read}
        known = {*kept, *constants, *made}
        return Graph(
            self.name,
            tuple(kept),
            outputs,
            tuple(ordered),
            {value: kind for value, kind in self.types.items() if value in known},
            constants,
            {"aten": 1},
            frozenset(node.name for node in backward),
            optional,
        )

    def _pass_aliases(self, forward: list[Node], backward: list[Node]) -> list[Node]:
        """Stored values that both passes read have an alias in the forward pass too."""
        later = {value for node in backward for value in node.reads}
        both = later.intersection(self.stored.values())
        names: dict[str, str] = {}
        found: list[Node] = []
        for node in forward:
            if node.op == "partitioner::update":
                found.append(node)
                continue
            for value in node.reads:
                if value in both and value not in names:
                    names[value] = f"{value}.forward"
                    self.types[names[value]] = self.types[value]
                    path = self._free("/" + value.replace(".", "/") + "/forward")
                    found.append(Node(path, "partitioner::alias", (value,), (names[value],)))
            found.append(reading(node, names))
        return found
