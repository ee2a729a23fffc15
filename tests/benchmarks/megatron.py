"""A step of a GPT as Megatron-DeepSpeed runs it, as a forced plan of this package, and its price.

The module is the one that Megatron-LM describes: a fused projection of queries, keys and values,
unfused attention whose one kernel scales, masks and normalizes, GELU in one kernel, dropout, tied
embeddings, and a loss in float32. It is traced on the meta device. The optimizer's state is of
float32. A plan is `tp` over heads, hidden dims and words, `dp` over sequences, and as many layers
in each stage; each layer is computed again in the backward pass. Nothing is searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from partitioner.api.options import open_with
from partitioner.cost_model.cluster.resolve import preset_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.executors import executor_of
from partitioner.frontends.model import ModuleInput
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.loops.factors import PENDING
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import NodePlan, Pipeline, Plan, place
from partitioner.ir.rule import Cut, Rule
from partitioner.rewrites.graph_writer import GraphWriter, reading
from partitioner.rewrites.staging import changing_nodes, stages_of_all
from partitioner.strategies.constraints import NamedDims
from partitioner.strategies.named_dims import bound


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT."""

    hidden: int
    heads: int
    layers: int
    length: int
    words: int = 51_200


class Layer(nn.Module):
    """A layer of the transformer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, self.heads = sizes.hidden, sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        each = hidden // self.heads
        mixed = self.qkv(self.norm_1(x)).view(batch, length, self.heads, 3 * each)
        query, key, value = (part.transpose(1, 2) for part in mixed.split(each, -1))
        weights = nn.functional.dropout(torch.softmax(query @ key.transpose(2, 3), -1), 0.1)
        context = (weights @ value).transpose(1, 2).reshape(batch, length, hidden)
        x = x + nn.functional.dropout(self.out(context), 0.1)
        return x + nn.functional.dropout(
            self.down(nn.functional.gelu(self.up(self.norm_2(x)))), 0.1
        )


class Loss(nn.Module):
    """The loss of a GPT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.hidden)
        self.places = nn.Embedding(sizes.length, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = nn.functional.dropout(self.words(ids) + self.places.weight, 0.1)
        for layer in self.layers:
            x = layer(x)
        logits = nn.functional.linear(self.norm(x), self.words.weight).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


DIMS = {
    "batch": "ids.0",
    "heads": "layers.*.qkv.weight.0",
    "inner": "layers.*.up.weight.0",
    "words": "words.weight.0",
}


#: Bytes that mixed precision keeps of a parameter beside its float16 value.
STATE_BYTES = 12
AXES = {"batch": "dp", "heads": "tp", "inner": "tp", "words": "tp"}


@lru_cache(maxsize=2)
def traced(sizes: Sizes, sequences: int, *, keeps: bool = False) -> Graph:
    """The graph of a micro-batch of so many sequences: computes layers again, or `keeps` all."""
    torch.set_default_dtype(torch.float16)
    with torch.device("meta"):
        module = Loss(sizes)
    torch.set_default_dtype(torch.float32)
    ids = torch.zeros((2 * sequences, sizes.length), dtype=torch.int64)
    opened = open_with(module, {"ids": ids, "labels": ids}, {"training": True, "optimizer": "adam"})
    assert isinstance(opened, ModuleInput)
    graph = with_float32_state(without_copies(opened.in_micro_batches(2).graph, sizes.heads))
    return graph if keeps else with_layers_again(graph)


def without_copies(graph: Graph, heads: int) -> Graph:
    """The graph whose products of attention read views.

    Megatron's first dim is the length, so that sequences and heads are one dim without a copy. Our
    trace has to begin with the batch, which is cut, and copies what a product reads of several.
    """
    writer, names = GraphWriter(source=graph), dict[str, str]()
    for node in graph.nodes:
        shape = graph.types[node.outputs[0]].shape
        if node.op == "aten::clone" and shape[1:2] == (heads,):
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
            writer.backward.discard(node.name)
        else:
            writer.nodes.append(reading(node, names))
    return writer.graph()


def with_float32_state(graph: Graph) -> Graph:
    """The graph whose optimizer keeps a float32 copy of each parameter, and moments of float32."""
    writer = GraphWriter(source=graph)
    for node in graph.nodes:
        trained = node.attrs.get("state_bytes", 0)
        attrs = {**node.attrs, "state_bytes": STATE_BYTES} if trained else node.attrs
        writer.nodes.append(replace(node, attrs=attrs))
    return writer.graph()


def with_layers_again(graph: Graph) -> Graph:
    """The graph whose backward pass computes each layer again, whole, from what the layer read.

    The last products are computed too, though nothing reads them: so does Megatron's checkpointing.
    """
    writer = GraphWriter(source=graph)
    layers: dict[int, list[Node]] = {}
    of: dict[str, int] = {}
    for node in graph.nodes:
        layer = _layer(node.name, -1)
        if layer >= 0 and node.name not in graph.backward and node.reads:
            layers.setdefault(layer, []).append(node)
            of.update(dict.fromkeys(node.writes, layer))
    for own in layers.values():  # what it returns is what the next one keeps
        for value in own[-1].writes:
            of.pop(value)
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in graph.backward:
            for layer in sorted({of[value] for value in node.reads if value in of}, reverse=True):
                for one in layers.pop(layer, ()):
                    copy = writer.again(one, names)
                    writer.nodes.append(copy)
                    writer.backward.add(copy.name)
        writer.nodes.append(reading(node, names) if node.name in graph.backward else node)
    return writer.graph()


@dataclass(frozen=True)
class Split:
    """Sizes of the axes of a plan, and the micro-batches of a step."""

    tp: int
    dp: int
    pp: int
    micro_batches: int
    stages: int = 1  #: On each device; of several, the schedule is interleaved.


def step_s(sizes: Sizes, sequences: int, split: Split, preset: str) -> float:
    """Seconds of a step whose micro-batches have so many sequences on each replica."""
    return evaluated(sizes, sequences, split, preset).step_s


def evaluated(
    sizes: Sizes, sequences: int, split: Split, preset: str, *, keeps: bool = False
) -> Evaluation:
    """The cost of a step, see `step_s` and `traced`: autograd submits the kernels."""
    graph = traced(sizes, sequences * split.dp, keeps=keeps)
    count = split.tp * split.dp * split.pp
    plain = preset_cluster(preset, max(1, count // 8), min(count, 8))
    cluster = plain.with_launches("autograd").run_by(executor_of(graph))
    return evaluate(graph, forced_plan(graph, cluster, split), cluster, delivers=False)


def forced_plan(graph: Graph, cluster: Cluster, split: Split) -> Plan:
    """The plan of equally many layers in each stage."""
    sizes, count = (("dp", split.dp), ("tp", split.tp)), split.pp * split.stages
    axes = tuple((name, size) for name, size in sizes if size > 1)
    each = split.dp * split.tp
    firsts = [each * (stage % split.pp) for stage in range(count)]
    meshes = [DeviceMesh(axes, tuple(range(first, first + each))) for first in firsts]
    forward = [node.name for node in changing_nodes(graph)]
    layers = 1 + max(_layer(name, -1) for name in forward)
    stages = stages_of_all(graph, _filled(forward, lambda layer: layer * count // layers))
    cuts = _cuts(graph, axes)
    return Plan(
        graph.digest,
        cluster.to_data(),
        tuple(meshes),
        {node.name: NodePlan(stages[node.name], cuts[node.name]) for node in graph.nodes},
        pipeline=Pipeline("1f1b" if split.stages == 1 else "interleaved", split.micro_batches),
        stages=tuple(range(count)),
    )


def _layer(name: str, otherwise: int) -> int:
    return int(name.split("/")[2]) if name.startswith("/layers/") else otherwise


def _filled(names: Sequence[str], stage_of: Callable[[int], int]) -> dict[str, int]:
    """The stage of each node: of its layer or, outside of layers, of the node before it."""
    stages, stage = {}, 0
    for name in names:
        layer = _layer(name, -1)
        stage = stage_of(layer) if layer >= 0 else stage
        stages[name] = stage
    return stages


@lru_cache(maxsize=4)
def _cuts(graph: Graph, axes: tuple[tuple[str, int], ...]) -> Mapping[str, Mapping[str, Cut]]:
    """The cuts of each node: over the axes of its named dims, as its operands lie."""
    sizes = dict(axes)
    demands = [  # one by one: batch and heads are one dim of the products of attention
        demand
        for name, axis in AXES.items()
        if axis in sizes
        for demand in bound(NamedDims({name: (DIMS[name],)}, {name: (axis,)}), graph, sizes)
    ]
    mesh = DeviceMesh(axes, tuple(range(math.prod(sizes.values()))))
    cuts: dict[str, Mapping[str, Cut]] = {}
    lies: dict[str, Placement] = {}
    for node in graph.nodes:
        rule = rule_of(graph, node)
        assert isinstance(rule, Rule)
        own = [demand for demand in demands if demand.factors.get(node.name)]
        over: dict[str, set[str]] = {}
        for demand in own:
            for factor in demand.factors[node.name]:
                over.setdefault(factor, set()).update(demand.axes)
        layouts = {
            factor: DimLayout.even(rule.factors[factor].size, tuple(sorted(names)), mesh)
            for factor, names in over.items()
        }
        layouts.update(_as_it_lies(node, rule, lies, layouts))
        layouts.update(_still_to_add(node, rule, lies, mesh))
        placed = place(graph, node, mesh, layouts, rule)
        assert all(demand.honoured(node, placed) for demand in own), node
        lies.update(placed.results())
        cuts[node.name] = {name: Cut.of(cut, mesh) for name, cut in layouts.items()}
    return cuts


def _as_it_lies(
    node: Node, rule: Rule, lies: Mapping[str, Placement], factors: Container[str]
) -> Iterator[tuple[str, DimLayout]]:
    """The cuts of those factors that are a dim of an operand: heads of each sequence, in one."""
    for value, dims in zip(node.inputs, rule.operands, strict=True):
        at = lies.get(value)
        if at is None or dims is None:
            continue
        for dim, layout in zip(dims, at.sharding.dims, strict=True):
            if len(dim) == len(dim[0]) == 1 and layout.axes and dim[0][0] in factors:
                yield dim[0][0], layout


def _still_to_add(
    node: Node, rule: Rule, lies: Mapping[str, Placement], mesh: DeviceMesh
) -> Iterator[tuple[str, DimLayout]]:
    """The axis over which a node passes on what is to be added: gradients, once a step."""
    axis = AXES["batch"]
    operands = [lies[node.inputs[slot]] for slot in rule.linear if node.inputs[slot] in lies]
    if operands and all((axis, "sum") in at.sharding.partial for at in operands):
        yield PENDING, DimLayout.even(rule.factors[PENDING].size, (axis,), mesh)
