"""Buffers that a forward pass assigns anew, as in ``self.count = self.count + 1``.

torch.export loses such assignments of submodules, and for those of the outermost module, of which a
hook tells it, writes a graph that it refuses where the buffer's new contents are another buffer. So
the forward pass of a trace runs without that hook, and ends with writing what was assigned into the
buffers themselves.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.exporting import replaced, writing

Tensors = Mapping[tuple[nn.Module, str], Tensor | None]


@contextmanager
def writing_assigned_buffers(module: nn.Module) -> Iterator[set[str]]:
    """Within, an export of the module writes assigned buffers at the end of the forward pass.

    Yields:
        Full names of the buffers that the forward pass assigned.

    Raises:
        FrontendError: The forward pass assigns a parameter, makes or deletes a buffer, gives a
            buffer another size or element type, or makes two names of one tensor.
    """
    paths = {part: f"{path}." if path else "" for path, part in module.named_modules()}
    forward, own_forward = module.forward, vars(module).get("forward")
    assigned: set[str] = set()

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        buffers, parameters = _tensors(module, "_buffers"), _tensors(module, "_parameters")
        with replaced({(nn.modules.module, "_global_buffer_registration_hooks"): {}}):
            result = forward(*args, **kwargs)
        if writing() is not None:
            for part, name in _changed(parameters, _tensors(module, "_parameters")):
                raise FrontendError(
                    f"forward assigns its parameter {paths.get(part, '')}{name}: write to it "
                    "outside of forward, in place under torch.no_grad()"
                )
            assigned.update(_write(buffers, _tensors(module, "_buffers"), parameters, paths))
        return result

    vars(module)["forward"] = run
    try:
        yield assigned
    finally:
        if own_forward is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own_forward


def written_early(program: ExportedProgram, buffers: set[str], *, training: bool) -> None:
    """Write assigned buffers as soon as their contents are made, in an exported graph.

    In training what reads a buffer reads a copy: the backward pass may keep it.
    """
    names, graph = program.graph_signature.inputs_to_buffers, program.graph_module.graph
    for buffer in graph.find_nodes(op="placeholder"):
        if names.get(buffer.name) not in buffers:
            continue
        write = max(user for user in buffer.users if user.target is torch.ops.aten.copy_.default)
        readers = [user for user in buffer.users if user is not write]
        if readers and training:
            with graph.inserting_before(min(readers)):
                copied = graph.call_function(torch.ops.aten.clone.default, (buffer,))
            copied.meta.update(min(readers).meta, val=buffer.meta["val"])
            for reader in readers:
                reader.replace_input_with(buffer, copied)
            readers = [copied]
        chain = _chain(write)
        source = chain[0].all_input_nodes[-1]
        after = max(source, *readers) if readers else source
        if after.op == "placeholder":
            continue
        for node in reversed(chain):
            after.append(node)
            where = ("nn_module_stack", "stack_trace")
            node.meta.update({key: after.meta[key] for key in where if key in after.meta})
    program.graph_module.recompile()


def _chain(write: fx.Node) -> list[fx.Node]:
    """A write, after the nodes that only copy what it writes."""
    chain, copies = [write], (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
    while (node := chain[0].all_input_nodes[-1]).target in copies and len(node.users) == 1:
        chain.insert(0, node)
    return chain


def _tensors(module: nn.Module, kind: str) -> Tensors:
    return {
        (part, name): tensor
        for part in module.modules()
        for name, tensor in getattr(part, kind).items()
    }


def _changed(before: Tensors, after: Tensors) -> list[tuple[nn.Module, str]]:
    keys = dict.fromkeys((*before, *after))
    return [k for k in keys if k not in before or before[k] is not after.get(k)]


def _write(
    before: Tensors, after: Tensors, parameters: Tensors, paths: Mapping[nn.Module, str]
) -> Iterator[str]:
    """Write what was assigned into the buffers, which the modules have again; their full names."""
    memory = Counter(_memory(tensor) for tensor in (*after.values(), *parameters.values()))
    contents = {}
    for key in _changed(before, after):
        part, name = key
        old, new, full = before.get(key), after.get(key), f"{paths.get(part, '')}{name}"
        if old is None or new is None:
            raise FrontendError(
                f"forward {'makes' if old is None else 'deletes'} its buffer {full}: in a graph "
                "it is there from the start, and stays"
            )
        if [one is old for one in before.values()].count(True) > 1:
            raise FrontendError(
                f"forward assigns its buffer {full}, which has another name: write to it in place"
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise FrontendError(
                f"forward assigns its buffer {full}, {_type(old)}, a tensor of {_type(new)}: a "
                "buffer's size and element type stay"
            )
        if memory[_memory(new)] > 1:
            raise FrontendError(
                f"forward assigns its buffer {full} a tensor that is another buffer or parameter, "
                "too: assign a clone() of it"
            )
        views = map(_memory, before.values())
        contents[full] = part, name, old, new.clone() if _memory(new) in views else new
    for part, name, old, new in contents.values():
        old.copy_(new.detach())
        part._buffers[name] = old
    yield from contents


def _memory(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage()._cdata


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
