"""A plan of whole operators as a model repository of Triton Inference Server.

Each rank's nodes of a phase are a model of the ONNX Runtime backend, on the GPU of the rank's
number, and an ensemble passes values between the models. Sources: Triton's user guide, Model
Repository, Model Configuration and Ensemble Models; `model_config.proto` of
triton-inference-server/common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ValueInfoProto

from partitioner.backends.onnx.files.parts import Part, part_of, whole_infos
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.regions import is_whole
from partitioner.ir.errors import OptionError
from partitioner.ir.types import from_onnx_dtype

ENSEMBLE = "ensemble"  #: Name of the model that clients call.
CONFIG = "config.pbtxt"
#: Triton's element types that the ONNX Runtime backend takes, by ours.
_TYPES = {
    **{name: f"TYPE_{name.upper()}" for name in ("bool", "int8", "int16", "int32", "int64")},
    **{name: f"TYPE_{name.upper()}" for name in ("uint8", "uint16", "uint32", "uint64")},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}
#: Fields whose values are words, not texts.
_OF_WORDS = ("data_type", "kind")
#: A value by the rank that makes it and its name there.
_Made = tuple[int, str]


def write_triton(models: Sequence[RankModel], folder: Path, on_gpu: Sequence[bool]) -> None:
    """Write a repository into an empty folder.

    Args:
        models: The files of all ranks.
        folder: The folder.
        on_gpu: Whether the device of a rank is a GPU, by rank.

    Raises:
        OptionError: The plan cuts operators, or has a value that an ensemble cannot pass on.
    """
    received = dict(_sources(models))
    sources = {at: _first(made, received) for at, made in received.items()}
    phases = {
        (step.phase, model.rank): model
        for model in models
        for step in model.steps
        if isinstance(step, Segment)
    }
    parts = [(phase, part_of(model, phase)) for (phase, _), model in sorted(phases.items())]
    parts = [(phase, part) for phase, part in parts if part.proto.graph.output]
    name_of = _names(models, [part for _, part in parts], sources)
    header, steps = models[0].header, list[Mapping[str, Any]]()
    for phase, part in parts:
        rank, graph = part.model.rank, part.proto.graph
        if not graph.input:
            raise OptionError(
                f"the part of rank {rank} that begins with {graph.node[0].name!r} reads no value, "
                "and Triton runs a model of an ensemble when its inputs are there"
            )
        inputs = {v.name: sources.get((rank, v.name), (rank, v.name)) for v in graph.input}
        for name, made in inputs.items():
            if made not in name_of:
                raise OptionError(f"{name!r} of rank {rank} is a constant that is sent")
        step = {
            "model_name": f"rank{rank}_phase{phase}",
            "model_version": -1,  # the newest
            "input_map": [{"key": name, "value": name_of[at]} for name, at in inputs.items()],
            "output_map": [{"key": v.name, "value": name_of[rank, v.name]} for v in graph.output],
        }
        steps.append(step)
        _write_model(folder / f"rank{rank}_phase{phase}", part, on_gpu[rank])
    whole = {
        "name": ENSEMBLE,
        "platform": ENSEMBLE,
        "max_batch_size": 0,
        "input": [_tensor(v, inside=False) for v in whole_infos(header, header.whole_inputs)],
        "output": [_tensor(v, inside=False) for v in whole_infos(header, header.whole_outputs)],
        "ensemble_scheduling": {"step": steps},
    }
    (folder / ENSEMBLE / "1").mkdir(parents=True)
    (folder / ENSEMBLE / CONFIG).write_text(_text(whole), "utf-8")


def _sources(models: Sequence[RankModel]) -> Iterator[tuple[_Made, _Made]]:
    """The value that each received one is; an OptionError if one is a part, or a sum."""
    sides: dict[int, dict[int, Cut]] = {}
    for model in models:
        for step in model.steps:
            if isinstance(step, Cut):
                sides.setdefault(step.comm.seq, {})[model.rank] = step
    for side in (side for ends in sides.values() for side in ends.values()):
        if side.target is None:
            continue
        arriving = side.comm.arriving.get(side.rank, ())
        source = sides[side.comm.seq].get(arriving[0].source) if arriving else None
        is_sent = side.pipelined and not side.reduces and len(arriving) == 1
        if (
            source is None
            or source.source is None
            or not (
                is_sent
                and is_whole(arriving[0].read, source.source.shape)
                and is_whole(arriving[0].write, side.target.shape)
            )
        ):
            raise OptionError(
                f"the plan cuts operators: {side.comm.kind.spelled} {side.comm.seq} for "
                f"{side.comm.why!r} joins parts, which no ensemble does; plan with --strategy inter"
            )
        yield (side.rank, side.comm.target), (source.rank, source.comm.source)


def _first(made: _Made, received: Mapping[_Made, _Made]) -> _Made:
    """The value itself, where a rank sends on what it received."""
    while made in received:
        made = received[made]
    return made


def _names(
    models: Sequence[RankModel], parts: Sequence[Part], sources: Mapping[_Made, _Made]
) -> dict[_Made, str]:
    """The ensemble's name of each value: an input's, an output's, or that of its rank."""
    header, name_of = models[0].header, {}
    for model in models:
        for name, fed in model.header.inputs.items():
            if not is_whole(fed.region, header.whole_inputs[fed.whole].shape):
                raise OptionError(
                    f"the plan cuts operators: rank {model.rank} has a part of {name!r}"
                )
            name_of[model.rank, name] = fed.whole
    made = {(part.model.rank, v.name) for part in parts for v in part.proto.graph.output}
    delivered: dict[str, _Made] = {}
    for model in models:
        for output in model.header.outputs:
            value = sources.get((model.rank, output.value), (model.rank, output.value))
            delivered.setdefault(output.whole, value)
            if not is_whole(output.region, header.whole_outputs[output.whole].shape):
                raise OptionError(f"the plan cuts operators: {output.whole!r} is in parts")
    for name, value in delivered.items():
        if value not in made or value in name_of:
            raise OptionError(
                f"output {name!r} is another output, an input or a constant, and an ensemble "
                "gives what a model makes, once"
            )
        name_of[value] = name
    taken = {*header.whole_inputs, *header.whole_outputs}
    for rank, name in sorted(made - name_of.keys()):
        name_of[rank, name] = name if name not in taken else f"{name}@rank{rank}"
        taken.add(name_of[rank, name])
    return name_of


def _write_model(folder: Path, part: Part, on_gpu: bool) -> None:
    """Write a model of the ensemble."""
    graph, rank = part.proto.graph, part.model.rank
    config: dict[str, Any] = {
        "name": folder.name,
        "backend": "onnxruntime",
        "max_batch_size": 0,
        "input": [_tensor(value, inside=True) for value in graph.input],
        "output": [_tensor(value, inside=True) for value in graph.output],
        "instance_group": {"count": 1, "kind": "KIND_CPU"},
    }
    if on_gpu:
        config["instance_group"] = {"count": 1, "kind": "KIND_GPU", "gpus": [rank]}
    place = folder / "1" / "model.onnx"  # a folder, as models of several files are
    place.mkdir(parents=True)
    part.write(place / "model.onnx")
    (folder / CONFIG).write_text(_text(config), "utf-8")


def _tensor(value: ValueInfoProto, *, inside: bool) -> Mapping[str, Any]:
    """An input or output; Triton has none without dims, so it reshapes one `inside` of a model."""
    type_ = value.type.tensor_type
    dtype = from_onnx_dtype(type_.elem_type)
    if dtype not in _TYPES:
        raise OptionError(
            f"{value.name!r} is {dtype}, which Triton passes to no model of ONNX Runtime"
        )
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in type_.shape.dim]
    reshape: Mapping[str, Any] = {"reshape": {}} if inside and not dims else {}
    return {"name": value.name, "data_type": _TYPES[dtype], "dims": dims or [1], **reshape}


def _text(fields: Mapping[str, Any], indent: str = "") -> str:
    """A message in protobuf's text format."""
    lines = []
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                inner = _text(each, f"{indent}  ")
                lines.append(f"{indent}{name} {{\n{inner}{indent}}}\n")
            else:
                text = each if name in _OF_WORDS else json.dumps(each, ensure_ascii=False)
                lines.append(f"{indent}{name}: {text}\n")
    return "".join(lines)
