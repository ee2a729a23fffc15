"""Symbolic sizes of an exported program as the numbers that they had when it was exported.

A file holds an expression and its value for the example inputs. The expression is text that PyTorch
evaluates, so only the value is taken; what computes sizes is left out. What has no value, as a size
that depends on data, stays and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Results and operands that are sizes.
_SIZE, _SIZES = "as_sym_int", "as_sym_ints"


def with_sizes(data: Any) -> Any:
    """The description of a program (as in ``model.json``) without symbols.

    Args:
        data: Nested lists and dicts.

    Returns:
        The same with numbers; a program without symbols is unchanged.
    """
    found = _replaced(data, {})
    if isinstance(found, dict) and "range_constraints" in found:
        found["range_constraints"] = {}
    return found


def _replaced(data: Any, known: Mapping[str, int]) -> Any:
    """Numbers for sizes; `known` are the named ones of the graph around."""
    if isinstance(data, list):
        return [_replaced(item, known) for item in data]
    if not isinstance(data, dict):
        return data
    if "as_expr" in data:
        value = _value(data)
        return data if value is None else {"as_int": value}
    if "sym_int_values" in data:
        known = _named(data["sym_int_values"])
        data = {**data, "sym_int_values": {}, "nodes": _without_sizes(data["nodes"], known)}
    if set(data) == {_SIZE}:
        return _number(data[_SIZE], known) or data
    if set(data) == {_SIZES}:
        numbers = [_number(item, known) for item in data[_SIZES]]
        return {"as_ints": [n["as_int"] for n in numbers]} if all(numbers) else data
    return {key: _replaced(value, known) for key, value in data.items()}


def _value(size: Mapping[str, Any]) -> int | None:
    """What a size was for the example inputs."""
    if type(size.get("as_int")) is int:
        return int(size["as_int"])
    hint = (size.get("as_expr") or {}).get("hint") or {}
    return hint["as_int"] if type(hint.get("as_int")) is int else None


def _named(sizes: Mapping[str, Any]) -> dict[str, int]:
    values = {name: _value(size) for name, size in sizes.items()}
    return {name: value for name, value in values.items() if value is not None}


def _number(size: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    """``{"as_int": 4}`` for a size that is a number or a known name, else nothing."""
    value = known.get(str(size.get("as_name")), size.get("as_int"))
    return {"as_int": value} if type(value) is int else {}


def _without_sizes(nodes: list[Any], known: Mapping[str, int]) -> list[Any]:
    """The nodes without those that compute known sizes."""
    return [node for node in nodes if not (node["outputs"] and _computes(node, known))]


def _computes(node: Mapping[str, Any], known: Mapping[str, int]) -> bool:
    return all(set(out) == {_SIZE} and _number(out[_SIZE], known) for out in node["outputs"])
