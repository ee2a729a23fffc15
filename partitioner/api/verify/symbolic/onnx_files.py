"""Rank files of ONNX as programs of local nodes and communications; no session is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, helper, numpy_helper

from partitioner.api.verify.symbolic.held import Facts, Held, Types, of_one_value, reduced
from partitioner.api.verify.symbolic.nodes import LocalNode, Rank
from partitioner.api.verify.symbolic.parts import RefusedError, plain, taken
from partitioner.api.verify.symbolic.program import Program
from partitioner.backends.errors import BackendError, why_unreadable
from partitioner.backends.onnx.files.load import captured_values, check_ranks, load_rank
from partitioner.backends.onnx.files.messages import ORIGIN_KEY, node_proto
from partitioner.backends.onnx.files.steps import Cut
from partitioner.ir.graph import Node
from partitioner.ir.ops.onnx.feeding import FEED

#: Operators that reduce what their operands are terms of.
_REDUCTIONS = {"Add": "sum", "Sum": "sum", "Max": "max", "Min": "min", "Mul": "prod"}
_Contents = Callable[[str], "np.ndarray | None"]


def read_programs(source: Path | Sequence[ModelProto]) -> tuple[Program, ...]:
    """The programs of all ranks, from a folder of their files or their messages.

    Raises:
        BackendError: A file is wrong, or the ranks disagree about a communication.
    """
    folder = source if isinstance(source, Path) else None
    if isinstance(source, Path):
        first = _read(source / "rank0.onnx")
        ranks = load_rank(first).header.ranks
        protos = [first, *(_read(source / f"rank{rank}.onnx") for rank in range(1, ranks))]
    else:
        protos = list(source)
    models = [load_rank(proto) for proto in protos]
    check_ranks([(model.header, model.steps) for model in models], str(folder or "the messages"))
    programs = []
    for model in models:
        contents = partial(_content, model.constants, folder)
        steps: list[LocalNode | Cut] = []
        for step in model.steps:
            if isinstance(step, Cut):
                steps.append(step)
            else:
                own = (node for node in step.nodes if node.op_type != "Constant")
                steps.extend(_local_node(node, contents) for node in own)
        opsets = {entry.domain: entry.version for entry in model.proto.opset_import}
        header = model.header
        programs.append(
            Program(
                header.rank,
                tuple(steps),
                model.types,
                header.inputs,
                header.outputs,
                frozenset(model.constants),
                header.constants,
                contents,
                opsets,
                None if header.batch is None else header.batch.parts,
                header.copies,
                unnamed=frozenset({FEED}),
                fed=header.fed,
            )
        )
    return tuple(programs)


def _read(path: Path) -> ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except (OSError, ValueError, DecodeError) as error:
        raise BackendError(f"{path}: {why_unreadable(error)}") from error


def _content(
    constants: Mapping[str, onnx.TensorProto], folder: Path | None, name: str
) -> np.ndarray | None:
    tensor = constants.get(name)
    if tensor is None:
        return None
    try:
        return numpy_helper.to_array(tensor, base_dir=str(folder or ""))
    except (OSError, ValueError, onnx.checker.ValidationError):
        return None  # its file of weights is not here


def _local_node(node: NodeProto, contents: _Contents) -> LocalNode:
    key = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    origin = next((e.value for e in node.metadata_props if e.key == ORIGIN_KEY), node.name)
    captures = tuple(dict.fromkeys(captured_values(node)))
    return LocalNode(
        node.name,
        key,
        tuple(node.input),
        tuple(node.output),
        captures,
        origin,
        partial(_is_like, node, captures),
        partial(_moved, node, contents),
    )


def _is_like(proto: NodeProto, captures: Sequence[str], node: Node) -> bool:
    if len(captures) != len(node.captures):
        return False
    wanted = node_proto(node, dict(zip(node.captures, captures, strict=True)))
    return _attributes(proto) == _attributes(wanted)


def _attributes(node: NodeProto) -> dict[str, bytes]:
    return {a.name: a.SerializeToString(deterministic=True) for a in node.attribute}


def _moved(node: NodeProto, contents: _Contents, _: Types, rank: Rank) -> Facts:
    """Follow a move of elements of one value, or an addition of terms of a pending sum."""
    facts = [rank.facts.get(name, ()) for name in node.input]
    if node.domain or not facts:
        return ()
    if node.op_type == "Identity":
        return facts[0]
    if node.op_type == "Slice":
        return tuple(held for of in facts[0] for held in _sliced(node, contents, of))
    if node.op_type == "Concat":
        axis = next(helper.get_attribute_value(a) for a in node.attribute if a.name == "axis")
        with suppress(RefusedError):
            return tuple(held for of in facts[0] for held in _joined(of, facts[1:], axis))
    how = _REDUCTIONS.get(node.op_type, "")
    if how and all(any(held.how == how for held in of) for of in facts):
        with suppress(RefusedError):
            return of_one_value(
                dict(enumerate(facts)), lambda held: [reduced([*held.values()], how)]
            )
    return ()


def _sliced(node: NodeProto, contents: _Contents, held: Held) -> Iterator[Held]:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for index, name in enumerate(("starts", "ends", "axes", "steps"), 1):
        if index < len(node.input) and node.input[index]:
            array = contents(node.input[index])
            if array is None:
                return
            given[name] = array.reshape(-1).tolist()
    starts, ends = given["starts"], given["ends"]
    axes = given.get("axes", range(len(starts)))
    if any(step != 1 for step in given.get("steps", ())):
        return
    region = list(held.region)
    if len({len(axes), len(starts), len(ends)}) > 1 or not all(_has(held, n) for n in axes):
        return
    for axis, start, end in zip(axes, starts, ends, strict=True):
        count = sum(length for _, length in region[axis])
        first, last, _ = slice(start, end).indices(count)
        region[axis] = taken(region[axis], ((first, max(last - first, 0)),))
    yield Held(held.value, tuple(region), held.share, held.how)


def _has(held: Held, axis: int) -> bool:
    """Test whether a part has a dim of this number, which a file may give; -1 is the last."""
    return -len(held.region) <= axis < len(held.region)


def _joined(first: Held, others: Sequence[Facts], axis: int) -> Iterator[Held]:
    if not _has(first, axis):
        return
    part = list(first.region[axis])
    for facts in others:
        like = next((held for held in facts if held.value == first.value), None)
        if like is None or (like.share, like.how) != (first.share, first.how):
            return
        beside = [
            (a, b)
            for d, (a, b) in enumerate(zip(first.region, like.region, strict=True))
            if d != axis % len(first.region)
        ]
        if any(a != b for a, b in beside):
            return
        part.extend(like.region[axis])
    if any(start < 0 for start, _ in part):
        return
    region = list(first.region)
    region[axis] = plain(part)
    yield Held(first.value, tuple(region), first.share, first.how)
