"""A check that stock ONNX Runtime loads the rank files of every model that it loads whole.

A session without weights tells: types, shapes, forms of operators and kernels are all checked when
it opens, and large constants are passed as inputs, so that none is read.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, helper

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.header import DOMAIN
from partitioner.backends.onnx.sessions.segments import SessionConfig, opened, session_options

#: Largest constant that stays one, in elements: sizes, axes and scales, which inference reads.
_MAX_OPERAND = 1024


def check_loadable(folder: Path, ranks: int, whole: ModelProto) -> None:
    """Open a session of each rank file; of files that differ in nothing but their rank, one.

    Args:
        folder: Folder of `rank0.onnx`, ...
        ranks: Number of files.
        whole: The model that they are parts of. What ONNX Runtime does not load whole (a custom
            operator) is not asked of its parts.

    Raises:
        BackendError: ONNX Runtime loads the whole model and not a rank file.
    """
    known: set[bytes] = set()
    for rank in range(ranks):
        name = f"rank{rank}.onnx"
        model = onnx.load_model(folder / name, load_external_data=False)
        form = _form(model)
        if form in known:
            continue
        known.add(form)
        reason = _refusal(model)
        if reason and not _refusal(whole):
            raise BackendError(
                f"{name}: ONNX Runtime loads the whole model, but not this rank: {reason}; "
                "this is a fault of partitioner: please report it with the model"
            )
        if reason:
            return


def _form(model: ModelProto) -> bytes:
    """A digest of all that decides whether a rank file loads."""
    form = ModelProto()
    form.CopyFrom(model)
    del form.metadata_props[:]
    form.graph.name = ""
    for tensor in form.graph.initializer:
        del tensor.external_data[:]
    for node in form.graph.node:
        if node.domain == DOMAIN:
            del node.attribute[:]
    return hashlib.sha256(form.SerializeToString(deterministic=True)).digest()


def _refusal(model: ModelProto) -> str:
    """Why ONNX Runtime does not load a model, on one line; "" if it does."""
    options = session_options(SessionConfig(optimization="disable"), None)
    options.log_severity_level = 4
    try:
        opened(_without_weights(model), options)
    except BackendError as error:
        return str(error)
    return ""


def _without_weights(model: ModelProto) -> ModelProto:
    light = ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    present = {value.name for value in graph.input}
    for tensor in filter(_is_weight, model.graph.initializer):
        if tensor.name not in present:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(info)
        graph.initializer.remove(tensor)
    return light


def _is_weight(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > _MAX_OPERAND
