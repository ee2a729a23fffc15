"""A rank's program in PyTorch, ready to be run over and over: for measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import partitioner.backends.torch.operators  # noqa: F401 - registers them
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.prepared import Prepared
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.graphs.eager import direct, eager
from partitioner.backends.torch.graphs.phases import emit_phases
from partitioner.backends.torch.guards.changes import count_steps
from partitioner.backends.torch.running.host_memory import keep_freed_memory
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.aten.state import UPDATE
from partitioner.ir.program import Programs

#: By the names that `compile` knows. Their rate is 0: an update costs the same, and the steps that
#: are timed do not depend on the ones before.
OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.0),
    "adam": partial(torch.optim.Adam, lr=0.0),
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.0),
    "adagrad": partial(torch.optim.Adagrad, lr=0.0),
    "muon": partial(torch.optim.Muon, lr=0.0),
}


NAME = f"torch {torch.__version__}"
#: Most parameters of one measured step, and elements of them all, by type of device: a step has
#: costs of its own, of which each parameter has its share. On a GPU they are many calls.
_PARAMETERS, _ELEMENTS = {"cpu": 8, "cuda": 128}, {"cpu": 2**22, "cuda": 2**27}
#: Most bytes of the operands that are copied for several calls in a run.
_MOST_COPIED_BYTES = 2**26


def optimizers_of(name: str, parameters: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a name over parameters: Muon's are matrices, and AdamW's the rest."""
    whole = [x for x in parameters if stays_whole(name, x)]
    others = [x for x in parameters if not stays_whole(name, x)]
    rest = "adamw" if name == "muon" else name
    return [OPTIMIZERS[one](own) for one, own in ((name, whole), (rest, others)) if own]


def stays_whole(name: str, parameter: Tensor) -> bool:
    """Test whether an optimizer looks at all of a parameter, which no plan stores in parts then."""
    return name == "muon" and parameter.ndim == 2


def prepared(
    programs: Programs,
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    threads: int,
    device: str = "cpu",
) -> Prepared:
    """The program of a single rank, which runs eagerly; of an update, the optimizer's step.

    It sets the threads of the process. Tensors have the strides of the arrays in `inputs`. A
    parameter that is stored in parts is a DTensor, as it is in a rank's module, and needs a process
    group.

    Args:
        device: Type of the current device, "cpu" or "cuda".
    """
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    where = torch.device(device)
    try:
        (node,) = graph.nodes if len(graph.nodes) == 1 else (None,)
        if node is not None and node.op == UPDATE and "optimizer" in node.attrs:
            gradient = node.inputs[0]
            local = from_numpy(inputs[gradient], graph.types[gradient].dtype).to(where)
            ready = replace(_step(node, local), operands=inputs)
        else:
            forward = emit_phases(programs, 0, graph, where).passes["forward"]
            types = programs.inputs
            names = forward.arguments
            arguments = {
                name: _strided(inputs[name], types[name].dtype).to(where) for name in names
            }
            module = direct(eager(forward.module))
            ready = Prepared(
                partial(_forward, module, list(arguments.values())),
                operands={**inputs, **arguments},
                several=partial(_several, module, arguments),
            )
        ready.run()
    except Exception as error:
        raise BackendError(one_line(error)) from error
    return ready


def _strided(array: np.ndarray, dtype: str) -> Tensor:
    """A tensor on the array's memory, in its order of dims."""
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return from_numpy(array.transpose(order), dtype).permute(np.argsort(order).tolist())


def _forward(module: nn.Module, arguments: list[Tensor]) -> object:
    with torch.no_grad():
        return module(*arguments)


def _several(
    module: fx.GraphModule,
    arguments: Mapping[str, Tensor],
    copies: int,
    shared: Collection[str] | None,
    is_kept: bool,
) -> Prepared:
    """The program so many times, within `_MOST_COPIED_BYTES`; see `Prepared.several`."""
    graph = fx.Graph()
    *body, output = module.graph.nodes
    names = dict(zip((node for node in body if node.op == "placeholder"), arguments, strict=True))
    tensors: dict[str, Tensor] = {}
    if shared is not None:
        own = [one for name, one in arguments.items() if name not in shared]
        own += [_attribute(module, node.target) for node in body if node.op == "get_attr"]
        copies = max(1, min(copies, _MOST_COPIED_BYTES // max(1, sum(one.nbytes for one in own))))

    def operand(node: fx.Node, number: int) -> fx.Node:
        """Stand in for an argument or a constant in a copy of the operators."""
        tensor = arguments[names[node]] if node in names else _attribute(module, node.target)
        is_shared = shared is None or names.get(node) in shared
        name = f"{node.name}_{0 if is_shared else number}"
        if name not in tensors:
            tensors[name] = tensor if is_shared else tensor.clone()
        return graph.get_attr(name)

    results: list[Any] = []
    for number in range(copies):
        values: dict[fx.Node, fx.Node] = {}
        for node in body:
            is_read = node.op in ("placeholder", "get_attr")
            values[node] = (
                operand(node, number) if is_read else graph.node_copy(node, values.__getitem__)
            )
        results.append(fx.map_arg(output.args[0], values.__getitem__))
    graph.output(results if is_kept else results[-1])
    return Prepared(partial(_forward, fx.GraphModule(tensors, graph), []), copies=copies)


def _attribute(module: nn.Module, path: object) -> Tensor:
    value = attrgetter(str(path))(module)
    assert isinstance(value, Tensor)
    return value


def _step(node: Node, local: Tensor) -> Prepared:
    where = local.device.type
    copies = max(1, min(_PARAMETERS[where], _ELEMENTS[where] // max(1, local.numel())))
    name = str(node.attrs["optimizer"])
    is_cut = bool(node.attrs["in_parts"]) and not stays_whole(name, local)
    parameters = [nn.Parameter(stored_part(local.clone(), is_cut=is_cut)) for _ in range(copies)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    (optimizer,) = optimizers_of(name, parameters)
    watch_steps(optimizer, parameters)
    return Prepared(optimizer.step, copies=copies)


def watch_steps(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let an optimizer's steps run as they do over the parameters of a rank's module."""
    if any(isinstance(parameter.data, DTensor) for parameter in parameters):
        tensors = {str(index): parameter for index, parameter in enumerate(parameters)}
        count_steps(optimizer, tensors, {}, holds_all=True)


def stored_part(local: Tensor, *, is_cut: bool) -> Tensor:
    """A parameter's part as a rank's module holds it, in the memory of `local`."""
    if not is_cut:
        return local
    mesh = DeviceMesh(local.device.type, list(range(dist.get_world_size())))
    spec = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)._spec
    return RankTensor.of(local, spec)
