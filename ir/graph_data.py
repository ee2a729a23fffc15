"""A graph as JSON data, and back: what a saved plan is looked at with, without its model."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from partitioner.ir.checks import count, shown, text
from partitioner.ir.errors import IRError
from partitioner.ir.graph import SMALL_CONSTANT, Attr, Constant, Graph, Node, Opaque
from partitioner.ir.types import Dim, TensorType, numpy_dtype

#: Graphs are in branches of branches to at most this depth.
_MOST_DEPTH = 64


class GraphDataError(IRError):
    """Data that describe no graph."""


def graph_data(graph: Graph) -> dict[str, Any]:
    """A graph as JSON data; of constants that steer no rule only the types are kept."""
    return {
        "name": graph.name,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "nodes": [_node_data(node) for node in graph.nodes],
        "types": {value: type_data(type_) for value, type_ in graph.types.items()},
        "constants": {value: _constant_data(one) for value, one in graph.constants.items()},
        "opsets": dict(graph.opsets),
        "backward": sorted(graph.backward),
        "optional": sorted(graph.optional),
        "twins": dict(graph.twins),
        "modules": dict(graph.modules),
        "blocks": dict(graph.blocks),
        "output_names": dict(graph.output_names),
        "bounded": sorted(graph.bounded),
    }


def graph_of(data: Any) -> Graph:
    """Inverse of `graph_data`, less contents left out; GraphDataError if the data are no graph."""
    try:
        return _graph(data, 0)
    except KeyError as error:
        raise GraphDataError(f"the graph has no {error}") from None
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise GraphDataError(f"the graph is malformed: {error}") from None


def _graph(data: Any, depth: int) -> Graph:
    if depth > _MOST_DEPTH:
        raise GraphDataError("branches are nested too deep")
    return Graph(
        text(data["name"]),
        _texts(data["inputs"]),
        _texts(data["outputs"]),
        tuple(_node(node, depth) for node in _list(data["nodes"])),
        {value: type_of(one) for value, one in data["types"].items()},
        {value: _constant(one) for value, one in data["constants"].items()},
        _table(data["opsets"], count),
        frozenset(_texts(data["backward"])),
        frozenset(_texts(data["optional"])),
        _table(data["twins"], text),
        _table(data["modules"], text),
        _table(data["blocks"], count),
        _table(data["output_names"], text),
        frozenset(_texts(data["bounded"])),
    )


def _node_data(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "inputs": node.inputs,
        "outputs": node.outputs,
    }
    if node.attrs:
        data["attrs"] = {key: _attr_data(value) for key, value in node.attrs.items()}
    if node.captures:
        data["captures"] = node.captures
    return data


def _node(data: Any, depth: int) -> Node:
    return Node(
        text(data["name"]),
        text(data["op"]),
        _texts(data["inputs"]),
        _texts(data["outputs"]),
        {key: _attr(value, depth) for key, value in data.get("attrs", {}).items()},
        _texts(data.get("captures", [])),
    )


def type_data(type_: TensorType) -> list[Any]:
    """A tensor's type as JSON data."""
    symbols = [dim.symbol for dim in type_.dims]
    sizes = [type_.dtype, list(type_.shape)]
    return [*sizes, symbols] if any(symbol is not None for symbol in symbols) else sizes


def type_of(data: Any) -> TensorType:
    """Inverse of `type_data`; IRError, TypeError or ValueError if the data describe no type."""
    dtype, sizes, *symbols = _list(data)
    shape = tuple(map(count, _list(sizes)))
    names = _list(symbols[0]) if symbols else [None] * len(shape)
    dims = (
        Dim(size, None if name is None else text(name))
        for size, name in zip(shape, names, strict=True)
    )
    return TensorType(text(dtype), tuple(dims))


def _constant_data(constant: Constant) -> dict[str, Any]:
    data: dict[str, Any] = {"type": type_data(constant.type)}
    if constant.weight:
        data["weight"] = True
    elif constant.type.numel <= SMALL_CONSTANT:
        data["elements"] = _bytes_data(_elements(constant.load()))
    return data


def _constant(data: Any) -> Constant:
    type_ = type_of(data["type"])
    if "elements" not in data:
        return Constant(type_, _not_kept, weight=data.get("weight") is True)
    array = _array(type_.dtype, type_.shape, data["elements"])
    return replace(Constant.of(array, type_.dtype), type=type_)


def _not_kept() -> np.ndarray:
    raise IRError("the contents of the model's weights are not kept with its plan")


def _elements(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _array(dtype: str, shape: tuple[int, ...], data: Any) -> np.ndarray:
    array = np.frombuffer(_bytes(data), numpy_dtype(dtype)).reshape(shape)
    array.flags.writeable = False
    return array


def _bytes_data(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(data: Any) -> bytes:
    return base64.b64decode(text(data), validate=True)


def _attr_data(value: Attr) -> Any:
    """A number, text or None as itself, a tuple as a list, all else with its kind."""
    if isinstance(value, tuple):
        return [_attr_data(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": _bytes_data(value)}
    if isinstance(value, np.ndarray):
        name = Constant.of(value).type.dtype
        return {"array": [name, list(value.shape), _bytes_data(_elements(value))]}
    if isinstance(value, Opaque):
        return {"opaque": [value.kind, _bytes_data(value.data), value.flops]}
    if isinstance(value, Graph):
        return {"graph": graph_data(value)}
    if type(value) in (type(None), bool, int, float, str):
        return value
    raise GraphDataError(f"an attribute of type {type(value).__name__} cannot be written")


def _attr(data: Any, depth: int) -> Any:
    if isinstance(data, list):
        return tuple(_attr(item, depth) for item in data)
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "bytes":
        return _bytes(value)
    if kind == "array":
        dtype, shape, elements = value
        return _array(text(dtype), tuple(map(count, shape)), elements)
    if kind == "opaque":
        name, content, flops = value
        if type(flops) not in (int, float) or not 0 <= flops < math.inf:
            raise ValueError(f"{shown(flops)} is not a number of FLOPs")
        return Opaque(text(name), _bytes(content), float(flops))
    if kind == "graph":
        return _graph(value, depth + 1)
    raise ValueError(f"an attribute of kind {kind!r}")


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"{shown(data)} is not a list")
    return data


def _texts(data: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(text, _list(data)))


def _table(data: Any, item: Callable[[Any], Any]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"{shown(data)} is not an object")
    return {key: item(value) for key, value in data.items()}
