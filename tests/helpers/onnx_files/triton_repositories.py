"""Repositories of Triton, read with Google's text format and checked as Triton checks them.

Messages have the fields that `model_config.proto` of triton-inference-server/common has and that
are written here. The checks of an ensemble are those of `ensemble_utils.cc` of its `core`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

TYPES = {
    **{name: f"TYPE_{name.upper()}" for name in ("BOOL", "INT8", "INT16", "INT32", "INT64")},
    **{name: f"TYPE_{name}" for name in ("UINT8", "UINT16", "UINT32", "UINT64")},
    "FLOAT16": "TYPE_FP16",
    "FLOAT": "TYPE_FP32",
    "DOUBLE": "TYPE_FP64",
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
_WORDS = (*TYPES.values(), "KIND_GPU", "KIND_CPU")


class RepositoryError(Exception):
    """A repository that Triton would refuse."""


def check_triton(folder: Path) -> None:
    """Check a repository as Triton does when it loads one."""
    ensemble = config_of(folder / "ensemble")
    known = {each.name: (each.data_type, [*each.dims]) for each in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        _check_step(step, folder / step.model_name, known)
    for tensor in ensemble.output:
        if known.get(tensor.name) != (tensor.data_type, [*tensor.dims]):
            raise RepositoryError(f"no model makes output {tensor.name!r} of its type")


def _check_step(step: Any, place: Path, known: dict[str, tuple[int, list[int]]]) -> None:
    config, graph = config_of(place), onnx.load(model_file(place), load_external_data=False).graph
    own = [*map(_tensor, graph.input)], [*map(_tensor, graph.output)]
    if ([*config.input], [*config.output]) != own:
        raise RepositoryError(f"{place.name}: its configuration is not of its model.onnx")
    inputs = {entry.key: entry.value for entry in step.input_map}
    outputs = {entry.key: entry.value for entry in step.output_map}
    for given, side in ((inputs, config.input), (outputs, config.output)):
        if given.keys() != {each.name for each in side} or not given:
            raise RepositoryError(f"{place.name}: {sorted(given)} are mapped, not what it has")
    for tensor in config.input:
        if known.get(inputs[tensor.name]) != (tensor.data_type, [*tensor.dims]):
            raise RepositoryError(f"{place.name}: {inputs[tensor.name]!r} is not there")
    for tensor in config.output:
        value, type_ = outputs[tensor.name], (tensor.data_type, [*tensor.dims])
        if known.setdefault(value, type_) is not type_:
            raise RepositoryError(f"{place.name}: {value!r} is made twice")


def model_file(place: Path) -> Path:
    """The main file of a model of several files."""
    return place / "1" / "model.onnx" / "model.onnx"


def config_of(place: Path) -> Any:
    """The configuration of a model."""
    config = _new("ModelConfig")
    text_format.Parse((place / "config.pbtxt").read_text("utf-8"), config)
    if config.name != place.name or not config.HasField("max_batch_size"):
        raise RepositoryError(f"{place.name}: the configuration is of {config.name!r}")
    return config


def _tensor(value: onnx.ValueInfoProto) -> Any:
    type_ = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in type_.shape.dim]
    data_type = TYPES[onnx.TensorProto.DataType.Name(type_.elem_type)]
    reshape = {} if dims else {"reshape": _new("Reshape")}
    return _new("Tensor", name=value.name, data_type=data_type, dims=dims or [1], **reshape)


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
