"""A plan of whole operators as a model repository of Triton Inference Server.

Each rank's nodes of a phase are a model of the ONNX Runtime backend, on the GPU of the rank's
number, and an ensemble passes values between the models. Sources: Triton's user guide, Model
Repository, Model Configuration and Ensemble Models; `model_config.proto` of
triton-inference-server/common.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
)
from onnx import ValueInfoProto

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.parts import Part, part_of
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.regions import is_whole
from partitioner.foundations.files import read_text
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
#: Fields of the messages that are written, by name: type, and * for a repeated one.
_MESSAGES: Mapping[str, Mapping[str, str]] = {
    "ModelConfig": {
        "name": "string",
        "platform": "string",
        "backend": "string",
        "max_batch_size": "int32",
        "input": "Tensor*",
        "output": "Tensor*",
        "instance_group": "InstanceGroup*",
        "ensemble_scheduling": "Ensemble",
    },
    "Tensor": {"name": "string", "data_type": "enum", "dims": "int64*", "reshape": "Reshape"},
    "Reshape": {"shape": "int64*"},
    "InstanceGroup": {"count": "int32", "kind": "enum", "gpus": "int32*"},
    "Ensemble": {"step": "Step*"},
    "Step": {
        "model_name": "string",
        "model_version": "int64",
        "input_map": "Entry*",
        "output_map": "Entry*",
    },
    "Entry": {"key": "string", "value": "string"},
}
_WORDS = (*_TYPES.values(), "KIND_GPU", "KIND_CPU")
#: A value by the rank that makes it and its name there.
_Made = tuple[int, str]


def write_triton(models: Sequence[RankModel], folder: Path, on_gpu: Sequence[bool]) -> None:
    """Write a repository into a folder, and check it.

    Args:
        models: The files of all ranks.
        folder: An empty folder.
        on_gpu: Whether the device of a rank is a GPU, by rank.

    Raises:
        OptionError: The plan cuts operators, or has a value that an ensemble cannot pass on.
    """
    sources = dict(_sources(models))
    parts = [
        (phase, part_of(model, phase))
        for model in models
        for phase in {step.phase for step in model.steps if isinstance(step, Segment)}
    ]
    parts.sort(key=lambda each: (each[0], each[1].model.rank))
    parts = [(phase, part) for phase, part in parts if part.proto.graph.output]
    name_of = _names(models, parts, sources)
    header, ensemble = (
        models[0].header,
        _new("ModelConfig", name=ENSEMBLE, platform=ENSEMBLE, max_batch_size=0),
    )
    for side, types in (
        (ensemble.input, header.whole_inputs),
        (ensemble.output, header.whole_outputs),
    ):
        for name, type_ in types.items():
            dims = [-1] * len(type_.shape) if name in header.bounded else type_.shape
            side.add(name=name, data_type=_type(name, type_.dtype), dims=dims or [1])
    for phase, part in parts:
        rank, graph = part.model.rank, part.proto.graph
        step = ensemble.ensemble_scheduling.step.add(model_name=f"rank{rank}_phase{phase}")
        step.model_version = -1  # the newest
        if not graph.input:
            raise OptionError(
                f"the part of rank {rank} that begins with {graph.node[0].name!r} reads no value, "
                "and Triton runs a model of an ensemble when its inputs are there"
            )
        for value in graph.input:
            made = sources.get((rank, value.name), (rank, value.name))
            if made not in name_of:
                raise OptionError(f"{value.name!r} of rank {rank} is a constant that is sent")
            step.input_map.add(key=value.name, value=name_of[made])
        for value in graph.output:
            step.output_map.add(key=value.name, value=name_of[rank, value.name])
        _write_model(folder / step.model_name, part, on_gpu[rank])
    (folder / ENSEMBLE / "1").mkdir(parents=True)
    (folder / ENSEMBLE / CONFIG).write_text(text_format.MessageToString(ensemble))
    check_triton(folder)


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


def _names(
    models: Sequence[RankModel], parts: Sequence[tuple[int, Part]], sources: Mapping[_Made, _Made]
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
    made = {(part.model.rank, v.name) for _, part in parts for v in part.proto.graph.output}
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
    """Write a composing model; with weights outside it is a folder called model.onnx."""
    config = _new("ModelConfig", name=folder.name, backend="onnxruntime", max_batch_size=0)
    graph, rank = part.proto.graph, part.model.rank
    config.input.extend(map(_tensor, graph.input))
    config.output.extend(map(_tensor, graph.output))
    kind, own = ("KIND_GPU", [rank]) if on_gpu else ("KIND_CPU", [])
    config.instance_group.add(count=1, kind=kind, gpus=own)
    place = folder / "1" / "model.onnx"
    weights = f"rank{rank}.weights"
    if any(entry.external_data for entry in graph.initializer) and part.folder is not None:
        place.mkdir(parents=True)
        shutil.copyfile(part.folder / weights, place / weights)
        place = place / "model.onnx"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(part.proto.SerializeToString())
    (folder / CONFIG).write_text(text_format.MessageToString(config))


def _tensor(value: ValueInfoProto) -> Any:
    """An input or output of a model; one without dims is of one element for clients."""
    type_ = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in type_.shape.dim]
    data_type = _type(value.name, from_onnx_dtype(type_.elem_type))
    reshape = {} if dims else {"reshape": _new("Reshape")}
    return _new("Tensor", name=value.name, data_type=data_type, dims=dims or [1], **reshape)


def _type(name: str, dtype: str) -> str:
    if dtype not in _TYPES:
        raise OptionError(f"{name!r} is {dtype}, which Triton passes to no model of ONNX Runtime")
    return _TYPES[dtype]


def check_triton(folder: Path) -> None:
    """Check a repository as Triton does when it loads one; a BackendError names what is wrong."""
    ensemble = _read(folder / ENSEMBLE)
    known = {each.name: (each.data_type, [*each.dims]) for each in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        _check_step(step, folder / step.model_name, known)
    for tensor in ensemble.output:
        if known.get(tensor.name) != (tensor.data_type, [*tensor.dims]):
            raise BackendError(f"{folder}: no model makes output {tensor.name!r} of its type")


def _check_step(step: Any, place: Path, known: dict[str, tuple[int, list[int]]]) -> None:
    """Check a model, and that its inputs are known; its outputs are then."""
    config, file = _read(place), place / "1" / "model.onnx"
    model = onnx.load(file / "model.onnx" if file.is_dir() else file, load_external_data=False)
    own = [*map(_tensor, model.graph.input)], [*map(_tensor, model.graph.output)]
    if ([*config.input], [*config.output]) != own:
        raise BackendError(f"{place}: {CONFIG} is not of its model.onnx")
    inputs = {entry.key: entry.value for entry in step.input_map}
    outputs = {entry.key: entry.value for entry in step.output_map}
    for given, side in ((inputs, config.input), (outputs, config.output)):
        if given.keys() != {each.name for each in side} or not given:
            raise BackendError(f"{place}: {ENSEMBLE} maps {sorted(given)}, not what it has")
    for tensor in config.input:
        value = inputs[tensor.name]
        if known.get(value) != (tensor.data_type, [*tensor.dims]):
            raise BackendError(f"{place}: {value!r} is not there, or is of another type")
    for tensor in config.output:
        value, type_ = outputs[tensor.name], (tensor.data_type, [*tensor.dims])
        if known.setdefault(value, type_) is not type_:
            raise BackendError(f"{place}: {value!r} is made twice")


def _read(folder: Path) -> Any:
    """The configuration of a model."""
    path = folder / CONFIG
    config = _new("ModelConfig")
    try:
        text_format.Parse(read_text(path), config)
    except (OSError, ValueError, text_format.ParseError) as error:
        raise BackendError(f"{path}: {' '.join(str(error).split())}") from None
    if config.name != folder.name:
        raise BackendError(f"{path} is of {config.name!r}, not of its folder")
    return config


def _new(message: str, **fields: Any) -> Any:
    return _classes()[f"triton.{message}"](**fields)


@cache
def _classes() -> Mapping[str, Any]:
    """Classes of the messages; text has the names of fields alone, so numbers are as they come."""
    file = descriptor_pb2.FileDescriptorProto(name="triton.proto", package="triton")
    words = file.enum_type.add(name="Word")
    for number, word in enumerate(("UNSET", *_WORDS)):
        words.value.add(name=word, number=number)
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            own = message.field.add(name=field, number=number, label=label)
            kind = kind.removesuffix("*")
            if kind in _MESSAGES or kind == "enum":
                own.type_name = f".triton.{'Word' if kind == 'enum' else kind}"
                own.type = kinds.TYPE_ENUM if kind == "enum" else kinds.TYPE_MESSAGE
            else:
                own.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)
