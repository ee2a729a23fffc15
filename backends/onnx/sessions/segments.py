"""ONNX Runtime sessions of a rank's segments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import onnx
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.onnx.files.messages import attribute_graphs, value_info
from partitioner.backends.onnx.files.steps import RankModel, Segment
from partitioner.backends.onnx.sessions.joined import (
    Group,
    Optimized,
    groups_of,
    with_blocked_inputs,
)

_LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_NUMBERS = count()  # profile files are named to the second otherwise


@dataclass(frozen=True)
class SessionConfig:
    """Options of segments' sessions."""

    optimization: str = "all"  #: "disable" (cutting changes no bit), "basic", "extended" or "all".
    threads: int = 1  #: Of one operator.
    gpu: int | None = None  #: Where values live, by ONNX Runtime's CUDA provider; None: the CPU.
    #: Whether the CPU sessions of this process share one allocator, so that their peaks do not add.
    #: It lives as long as the process.
    shared_arena: bool = False
    profile: Path | None = None  #: Folder for one profile file a session; None for none.
    #: Folder for the graph of each session as ONNX Runtime runs it, with its weights; None writes
    #: none.
    optimized: Path | None = None

    def __post_init__(self) -> None:
        if self.optimization not in _LEVELS:
            raise BackendError(
                f"optimization {self.optimization!r} is not one of {', '.join(_LEVELS)}"
            )


@dataclass
class Sessions:
    """The sessions of the segments that run, by the index of their step.

    Those of blocks are open in turn: while a block runs, a thread opens the session of the next
    one, which reads its constants. A block's session is closed when it has run.
    """

    model: RankModel  #: The rank.
    config: SessionConfig  #: How segments run.
    resident: Mapping[int, ort.InferenceSession]  #: Sessions that stay open.
    then: Mapping[int, int]  #: The block's step that runs after each block's.
    #: Files with the profiles of closed sessions, one of each run.
    profiles: dict[int, list[Path]] = field(default_factory=dict)
    #: The graphs of sessions as they run, where they are written.
    optimized: dict[int, Path] = field(default_factory=dict)
    _opening: dict[int, Future[ort.InferenceSession]] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, model: RankModel, config: SessionConfig, steps: Iterable[int]) -> Sessions:
        """Open the sessions that stay open.

        Raises:
            BackendError: ONNX Runtime refuses a segment.
        """
        stay: list[int] = []
        in_turn: list[int] = []
        for index in steps:
            (stay if model.segment(index).block is None else in_turn).append(index)
        joined = open_joined(model, stay, config)
        resident = {
            index: joined[index]
            if index in joined
            else open_session(model, model.segment(index), config)
            for index in stay
        }
        return cls(model, config, resident, dict(pairwise(in_turn)))

    @contextmanager
    def opened(self, index: int) -> Iterator[ort.InferenceSession]:
        """The session of a step, for one run.

        Raises:
            BackendError: ONNX Runtime refuses the segment.
        """
        if index in self.resident:
            yield self.resident[index]
            return
        waiting = self._opening.pop(index, None)
        for future in self._opening.values():  # of a run that failed
            with suppress(Exception):
                future.result()
        self._opening.clear()
        session = self._open(index) if waiting is None else waiting.result()
        if (then := self.then.get(index)) is not None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "partitioner-load")
            self._opening[then] = self._thread.submit(self._open, then)
        try:
            yield session
        finally:
            if self.config.profile is not None:
                self.profiles.setdefault(index, []).append(Path(session.end_profiling()))
            if self.config.optimized is not None:
                path = session.get_session_options().optimized_model_filepath
                self.optimized.setdefault(index, Path(path))

    def _open(self, index: int) -> ort.InferenceSession:
        return open_session(self.model, self.model.segment(index), self.config)

    def end_profiling(self) -> Mapping[int, list[Path]]:
        """The profiles of all sessions: one file each, or one for each run of a block."""
        files = {i: [Path(session.end_profiling())] for i, session in self.resident.items()}
        return {**files, **self.profiles}

    def graph_of(self, index: int) -> Path:
        """The file of a session's graph as it runs; see `SessionConfig.optimized`."""
        if index in self.optimized:
            return self.optimized[index]
        return Path(self.resident[index].get_session_options().optimized_model_filepath)


def open_joined(
    model: RankModel,
    steps: Sequence[int],
    config: SessionConfig,
    plain: frozenset[str] = frozenset(),
) -> dict[int, ort.InferenceSession]:
    """Sessions of the segments that hand images to each other, by the index of their step.

    They are optimized together (see `joined`), where ONNX Runtime has blocked layouts: on the CPU,
    with all optimizations. Values in `plain` do not cross borders blocked.

    Raises:
        BackendError: ONNX Runtime does not take a segment.
    """
    sessions: dict[int, ort.InferenceSession] = {}
    for group in groups_of(model, steps, plain) if _has_blocked_layouts(config) else ():
        sessions |= _open_group(group, config, plain)
    return sessions


def _open_group(
    group: Group, config: SessionConfig, plain: frozenset[str]
) -> dict[int, ort.InferenceSession]:
    """Sessions of a group, or of smaller ones without the images that turn out to be plain.

    There are none, with a warning, if the optimized graph cannot be made, as where the temporary
    folder is full. Its weights lie in a file that is deleted when the sessions have mapped it. They
    are not in memory twice: the session that writes them is closed before others open.
    """
    with ExitStack() as stack:
        try:
            folder = TemporaryDirectory(prefix="partitioner-", ignore_cleanup_errors=True)
            name = stack.enter_context(folder)
            written = replace(config, optimized=Path(name), shared_arena=False, profile=None)
            options = session_options(written, group.model.folder)
            options.add_session_config_entry("session.disable_prepacking", "1")  # it does not run
            _opened(group.model, group.joined(), options, written)
            proto = onnx.load(options.optimized_model_filepath, load_external_data=False)
            optimized = Optimized(group, proto)
        except (BackendError, OSError) as error:
            warnings.warn(
                f"rank {group.model.rank}: {len(group.segments)} segments open one by one and run "
                "slower, because ONNX Runtime could not optimize them together in the temporary "
                f"folder {gettempdir()!r}: {one_line(error)}",
                stacklevel=1,
            )
            return {}
        if not optimized.plain:
            as_it_is = replace(config, optimization="disable")
            sessions = {}
            for index, piece in optimized.pieces().items():
                options = session_options(as_it_is, Path(name))
                sessions[index] = _opened(group.model, piece, options, as_it_is)
            return sessions
    return open_joined(group.model, tuple(group.segments), config, plain | optimized.plain)


def open_session(model: RankModel, segment: Segment, config: SessionConfig) -> ort.InferenceSession:
    """A session of one segment.

    Raises:
        BackendError: ONNX Runtime does not take it, or does not run it on the wanted device.
    """
    graph = GraphProto(name=f"rank{model.rank}")
    if _has_blocked_layouts(config) and not segment.plain:
        graph.node.extend(with_blocked_inputs(segment.nodes, segment.reads, model.types))
    else:
        graph.node.extend(segment.nodes)
    graph.input.extend(value_info(name, model.types[name]) for name in segment.reads)
    graph.output.extend(map(model.output_info, segment.writes))
    graph.initializer.extend(model.constants[name] for name in segment.constants)
    options = session_options(config, model.folder)
    return _opened(model, model.around(graph), options, config, plain=segment.plain)


def _has_blocked_layouts(config: SessionConfig) -> bool:
    return config.optimization == "all" and config.gpu is None


def _opened(
    model: RankModel,
    proto: ModelProto,
    options: ort.SessionOptions,
    config: SessionConfig,
    *,
    plain: bool = False,
) -> ort.InferenceSession:
    providers: list[object] = ["CPUExecutionProvider"]
    if config.gpu is not None:
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": config.gpu}))
    try:
        session = opened(proto, options, providers, plain=plain)
    except BackendError as error:
        raise BackendError(f"rank {model.rank}: ONNX Runtime: {error}") from error
    if config.gpu is not None and "CUDAExecutionProvider" not in session.get_providers():
        raise BackendError(f"rank {model.rank}: ONNX Runtime has no usable CUDA provider here")
    return session


def opened(
    model: ModelProto,
    options: ort.SessionOptions,
    providers: Sequence[object] = ("CPUExecutionProvider",),
    *,
    plain: bool = False,
) -> ort.InferenceSession:
    """A session of a model, without blocked layouts if `plain`.

    `EliminateDropout` drops a Dropout in training mode as well, where its probability is constant.
    """
    nodes, without = _nodes(model.graph), ["NchwcTransformer"] if plain else []
    if any(node.op_type == "Dropout" and len(node.input) > 2 for node in nodes):
        without.append("EliminateDropout")
    try:
        return ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=[*providers],
            disabled_optimizers=without,
        )
    except Exception as error:
        raise BackendError(one_line(error)) from error


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in attribute_graphs(attribute):
                yield from _nodes(body)


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
