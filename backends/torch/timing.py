"""A rank's program in PyTorch, ready to be run over and over: for measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
from partitioner.backends.torch.changes import count_steps
from partitioner.backends.torch.direct import direct
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.emit import UPDATE, emit_rank
from partitioner.backends.torch.host_memory import keep_freed_memory
from partitioner.backends.torch.optimizers import OPTIMIZERS
from partitioner.ir.graph import Graph, Node
from partitioner.ir.program import Programs

NAME = f"torch {torch.__version__}"
#: Parameters of one measured step, and elements of them all: a step has costs of its own.
_PARAMETERS, _ELEMENTS = 8, 2**22


def prepared(
    programs: Programs, graph: Graph, inputs: Mapping[str, np.ndarray], threads: int
) -> Prepared:
    """The program of a single rank, which runs eagerly; of an update, the optimizer's step.

    It sets the threads of the process. A parameter that is stored in parts is a DTensor, as it is
    in a rank's module, and needs a process group.

    Raises:
        BackendError: PyTorch does not take or run the program.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    try:
        (node,) = graph.nodes if len(graph.nodes) == 1 else (None,)
        if node is not None and node.op == UPDATE and "optimizer" in node.attrs:
            gradient = node.inputs[0]
            ready = _step(node, from_numpy(inputs[gradient], graph.types[gradient].dtype))
        else:
            forward = emit_rank(programs, 0, graph, torch.device("cpu")).forward
            types = programs.inputs
            arguments = [from_numpy(inputs[name], types[name].dtype) for name in forward.arguments]
            module = direct(eager(forward.module))
            ready = Prepared(
                partial(_forward, module, arguments),
                several=partial(_several, module, arguments),
            )
        ready.run()
    except Exception as error:
        raise BackendError(one_line(error)) from error
    return ready


def _forward(module: nn.Module, arguments: list[Tensor]) -> object:
    with torch.no_grad():
        return module(*arguments)


def _several(module: fx.GraphModule, arguments: list[Tensor], copies: int) -> Prepared:
    """The program with its operators so many times one after the other, over the same inputs."""
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    *body, output = module.graph.nodes
    inputs = {node: graph.node_copy(node) for node in body if node.op == "placeholder"}
    for _ in range(copies):
        values = dict(inputs)
        for node in body:
            if node not in inputs:
                values[node] = graph.node_copy(node, values.__getitem__)
    graph.node_copy(output, values.__getitem__)
    return Prepared(partial(_forward, fx.GraphModule(module, graph), arguments), copies=copies)


def _step(node: Node, local: Tensor) -> Prepared:
    """A step of an optimizer over some parameters with these local parts."""
    copies = max(1, min(_PARAMETERS, _ELEMENTS // max(1, local.numel())))
    parameters = [
        nn.Parameter(stored_part(local, is_cut=bool(node.attrs["in_parts"]))) for _ in range(copies)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[str(node.attrs["optimizer"])](parameters)
    watch_steps(optimizer, parameters)
    return Prepared(optimizer.step, copies=copies)


def watch_steps(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let an optimizer's steps run as they do over the parameters of a rank's module."""
    if any(isinstance(parameter.data, DTensor) for parameter in parameters):
        tensors = {str(index): parameter for index, parameter in enumerate(parameters)}
        count_steps(optimizer, tensors, {}, holds_all=True)


def stored_part(local: Tensor, *, is_cut: bool) -> Tensor:
    """A parameter's part as a rank's module holds it."""
    if not is_cut:
        return local.clone()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
