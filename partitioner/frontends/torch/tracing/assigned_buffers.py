"""Buffers that a forward pass assigns anew, as in ``self.count = self.count + 1``.

torch.export loses such assignments of submodules, and for those of the outermost module, of which a
hook tells it, writes a graph that it refuses where the buffer's new contents are another buffer. So
the forward pass of a trace runs without that hook, and ends with writing what was assigned into the
buffers themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.exporting import is_writing, replaced

Tensors = Mapping[tuple[nn.Module, str], Tensor | None]


@contextmanager
def writing_assigned_buffers(module: nn.Module) -> Iterator[set[str]]:
    """Write assigned buffers at the end of the forward pass in an export inside of the block.

    Yields:
        Full names of the buffers that the forward pass assigned.
    """
    paths = {part: f"{path}." if path else "" for path, part in module.named_modules()}
    forward, own_forward = module.forward, vars(module).get("forward")
    assigned: set[str] = set()

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        buffers, parameters = _tensors(module, "_buffers"), _tensors(module, "_parameters")
        with replaced({(nn.modules.module, "_global_buffer_registration_hooks"): {}}):
            result = forward(*args, **kwargs)
        if is_writing():
            for part, name in _changed(parameters, _tensors(module, "_parameters")):
                raise FrontendError(
                    f"forward assigns its parameter {paths.get(part, '')}{name}: write to it "
                    "outside of forward, in place under torch.no_grad()"
                )
            after = _tensors(module, "_buffers")
            result = _apart(result, [buffers.get(key) for key in _changed(buffers, after)])
            assigned.update(_write(buffers, after, parameters, paths))
        return result

    # a method's function may say its signature, which begins with `self`
    run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    vars(module)["forward"] = run
    try:
        yield assigned
    finally:
        if own_forward is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own_forward


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)


def written_early(program: ExportedProgram, buffers: set[str], *, training: bool) -> None:
    """Write assigned buffers once made; readers in training read copies, which may be kept."""
    names, graph = program.graph_signature.inputs_to_buffers, program.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    writes = {
        buffer: max(user for user in buffer.users if user.target is torch.ops.aten.copy_.default)
        for buffer in placeholders
        if names.get(buffer.name) in buffers
    }
    last = frozenset(writes.values())
    for buffer, write in writes.items():
        readers = [user for user in buffer.users if user is not write]
        if readers and training:
            with graph.inserting_before(min(readers)):
                copied = graph.call_function(torch.ops.aten.clone.default, (buffer,))
            copied.meta.update(min(readers).meta, val=buffer.meta["val"])
            for reader in readers:
                reader.replace_input_with(buffer, copied)
        chain = [write]  # after the nodes that only copy what it writes
        while (node := chain[0].all_input_nodes[-1]).target in _COPIES and len(node.users) == 1:
            chain.insert(0, node)
        source = chain[0].all_input_nodes[-1]
        # results are no views of the buffer: see `_apart`
        users = {user for node in _sharing(buffer, last) for user in node.users} - last
        users = {user for user in users if user.op != "output"}
        sharing = _sharing(source, last)
        others = {user for node in sharing for user in node.users} - last
        # those that write in place to what is assigned, but for those that end the pass
        writers = (one for one in others if not sharing.isdisjoint(_operands(one, writes=True)))
        after = max([source, *users, *writers])
        if after.op == "placeholder":
            continue
        for node in reversed(chain):
            after.append(node)
            where = ("nn_module_stack", "stack_trace")
            node.meta.update({key: after.meta[key] for key in where if key in after.meta})
    program.graph_module.recompile()


def _sharing(node: fx.Node, last: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose results may lie in the memory of a node's result."""
    found, left = {node}, [node]
    while left:
        one = left.pop()
        views = (user for user in one.users if user not in last and one in _operands(user))
        near = {*_operands(one), *views} - found
        found |= near
        left += near
    return found


def _operands(node: fx.Node, *, writes: bool = False) -> list[fx.Node]:
    """The operands that a node's result may be a view of, or those that it may write to."""
    operator, nodes = node.target, node.all_input_nodes
    if node.op != "call_function":
        return []
    if not isinstance(operator, torch._ops.OpOverload):
        return [] if writes and operator is getitem else nodes  # a region, or one of its results
    schema = operator._schema
    is_view = any(one.alias_info is not None for one in schema.returns)
    if not writes and not is_view:
        # an operator that calls others may hide a view
        composed = torch._C.DispatchKey.CompositeImplicitAutograd
        return nodes if operator.has_kernel_for_dispatch_key(composed) else []
    aliases = {one.name: one.alias_info for one in schema.arguments}
    actuals = {**dict(zip(aliases, node.args, strict=False)), **node.kwargs}
    return [
        leaf
        for name, actual in actuals.items()
        if (alias := aliases.get(name)) is not None and (alias.is_write or not writes)
        for leaf in pytree.tree_leaves(actual)
        if isinstance(leaf, fx.Node)
    ]


def _tensors(module: nn.Module, kind: str) -> Tensors:
    return {
        (part, name): tensor
        for part in module.modules()
        for name, tensor in getattr(part, kind).items()
    }


def _changed(before: Tensors, after: Tensors) -> list[tuple[nn.Module, str]]:
    keys = dict.fromkeys((*before, *after))
    return [k for k in keys if k not in before or before[k] is not after.get(k)]


def _apart(result: Any, written: Collection[Tensor | None]) -> Any:
    """The results, of which those that lie in buffers to be written are copies."""
    places = {_memory(tensor) for tensor in written if tensor is not None}

    def apart(tensor: Tensor) -> Tensor:
        return tensor.clone() if _memory(tensor) in places else tensor

    return pytree.tree_map_only(Tensor, apart, result) if places else result


def _write(
    before: Tensors, after: Tensors, parameters: Tensors, paths: Mapping[nn.Module, str]
) -> Iterator[str]:
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
