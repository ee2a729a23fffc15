"""ONNX Runtime sessions of a rank's segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import onnxruntime as ort
import torch
from onnx import GraphProto, ModelProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.header import DOMAIN
from partitioner.backends.onnx.layouts import with_blocked_inputs
from partitioner.backends.onnx.nodes import value_info
from partitioner.backends.onnx.steps import RankModel, Segment

_LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
CPU = torch.device("cpu")
_NUMBERS = count()  # profile files are named to the second otherwise


@dataclass(frozen=True)
class SessionConfig:
    """Options of segments' sessions.

    Attributes:
        optimization: "disable", "basic" (cutting changes no bit), "extended" or "all".
        threads: Of one operator.
        device: Where values live; "cuda" needs ONNX Runtime's CUDA provider.
        shared_arena: Whether the CPU sessions of this process share one allocator, so that their
            peaks do not add. It lives as long as the process.
        profile: Folder for one profile file a session; None for none.
        optimized: Folder for the graph of each session as ONNX Runtime runs it, with its weights;
            None writes none.
    """

    optimization: str = "all"
    threads: int = 1
    device: torch.device = CPU
    shared_arena: bool = False
    profile: Path | None = None
    optimized: Path | None = None

    def __post_init__(self) -> None:
        if self.optimization not in _LEVELS:
            raise BackendError(
                f"optimization {self.optimization!r} is not one of {', '.join(_LEVELS)}"
            )


def _segment_model(model: RankModel, segment: Segment, *, blocked: bool) -> ModelProto:
    """A segment as a model of its own; large constants still refer to the rank's weight file."""
    graph = GraphProto(name=f"rank{model.rank}")
    if blocked:
        graph.node.extend(with_blocked_inputs(segment.nodes, segment.inputs, model.types))
    else:
        graph.node.extend(segment.nodes)
    graph.input.extend(value_info(name, model.types[name]) for name in segment.inputs)
    graph.output.extend(value_info(name, model.types[name]) for name in segment.outputs)
    graph.initializer.extend(model.constants[name] for name in segment.constants)
    opsets = [entry for entry in model.proto.opset_import if entry.domain != DOMAIN]
    return ModelProto(ir_version=model.proto.ir_version, graph=graph, opset_import=opsets)


def open_session(model: RankModel, segment: Segment, config: SessionConfig) -> ort.InferenceSession:
    """A session of one segment.

    Raises:
        BackendError: ONNX Runtime does not take it, or does not run it on the wanted device.
    """
    options = session_options(config, model.folder)
    providers: list[object] = ["CPUExecutionProvider"]
    if config.device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": config.device.index or 0}))
    blocked = config.optimization == "all" and config.device.type == "cpu" and not segment.plain
    message = _segment_model(model, segment, blocked=blocked).SerializeToString()
    try:
        session = ort.InferenceSession(
            message, options, providers=providers, disabled_optimizers=optimizers_off(segment.plain)
        )
    except Exception as error:
        raise BackendError(f"rank {model.rank}: ONNX Runtime: {one_line(error)}") from error
    if config.device.type == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise BackendError(f"rank {model.rank}: ONNX Runtime has no usable CUDA provider here")
    return session


def optimizers_off(plain: bool) -> list[str]:
    """Names of the optimizers that a session does without: that of blocked layouts, if `plain`."""
    return ["NchwcTransformer"] if plain else []


def session_options(config: SessionConfig, folder: Path | None) -> ort.SessionOptions:
    """Options of a session whose external data, if any, lies in `folder`."""
    options = ort.SessionOptions()
    options.graph_optimization_level = _LEVELS[config.optimization]
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        entries[key] = str(folder.resolve())
    if config.shared_arena:
        _share_arena()
        entries["session.use_env_allocators"] = "1"
    if config.optimized is not None:
        number = next(_NUMBERS)
        options.optimized_model_filepath = str(config.optimized / f"{number}.onnx")
        prefix = "session.optimized_model_external_initializers"
        entries |= {f"{prefix}_file_name": f"{number}.weights", f"{prefix}_min_size_in_bytes": "64"}
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if config.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile / f"{next(_NUMBERS)}")
    return options


@cache
def _share_arena() -> None:
    """Register one CPU allocator for all sessions of this process, once."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)
