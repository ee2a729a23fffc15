"""Pictures on the command line: `partition MODEL --dot F`, `partition draw` and `check`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.cli.options import (
    WRITTEN,
    aside,
    command,
    output_file,
    positive,
    progress,
    safe,
    warn,
)
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.compiled.base import Compiled
    from partitioner.compiled.onnx_model import OnnxModel

Say = Callable[[str], None]

_IMAGES = (".svg", ".png", ".pdf")
_SUFFIXES = {
    "dot": (".dot", ".gv"),
    "graph": _IMAGES,
    "timeline": (*_IMAGES, ".json"),
    "annotate": (".onnx",),
}
_HELP = {
    "dot": "write the partitioned graph as Graphviz source",
    "graph": "draw the partitioned graph (.svg, .png, .pdf)",
    "timeline": "draw the timeline (.svg, .png, .pdf), or Perfetto's .json",
    "annotate": "write the model with ONNX's multi-device annotations",
}


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add --dot, --graph, --timeline and --annotate."""
    for name, suffixes in _SUFFIXES.items():
        parser.add_argument(
            f"--{name}", type=output_file(suffixes), metavar="FILE", help=_HELP[name], default=None
        )


def check_pictures(
    parser: argparse.ArgumentParser, args: argparse.Namespace, model: Path | None
) -> None:
    """Refuse, before any work, pictures that could not be written after it.

    Args:
        parser: Reports wrong usage.
        args: The options of `add_pictures`, parsed.
        model: The model's file, which is never replaced; None if it is not known yet.

    Raises:
        PartitionerError: A file cannot be written, or matplotlib is not installed.
    """
    from partitioner.files import check_file, refuse_to_replace

    targets = list(_targets(args))
    for _, path in targets:
        check_file(path)
    places = [path.resolve() for _, path in targets]
    for (name, path), place in zip(targets, places, strict=True):
        if places.count(place) > 1:
            parser.error(f"argument --{name}: {path} is given twice")
    if args.annotate is not None and model is not None:
        refuse_to_replace(model, args.annotate)
    if any(path.suffix.lower() in _IMAGES for _, path in targets):
        from partitioner.report.pictures.canvas import require_matplotlib

        require_matplotlib()


def write_pictures(result: Compiled, args: argparse.Namespace, say: Say, warn: Say) -> None:
    """Write the pictures that the options name.

    Args:
        result: A compiled model.
        args: The options of `add_pictures`, parsed.
        say: Receives a line before each file.
        warn: Receives a line for each part of the plan that a file leaves out.

    Raises:
        PartitionerError: A file cannot be written.
    """
    if args.annotate is not None:
        _onnx(result)
    for name, path in _targets(args):
        say(f"writing {path}")
        for line in _WRITERS[name](result, path, args):
            warn(line)


def _targets(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for name in _SUFFIXES:
        path = getattr(args, name)
        if path is not None:
            yield name, path


def _write_dot(result: Compiled, path: Path, _args: argparse.Namespace) -> Sequence[str]:
    from partitioner.files import write_file
    from partitioner.report.pictures.dot import dot

    write_file(path, dot(result).encode())
    return ()


def _write_graph(result: Compiled, path: Path, args: argparse.Namespace) -> Sequence[str]:
    from partitioner.report.pictures.draw import MAX_BOXES, draw_graph

    draw_graph(result, path, boxes=getattr(args, "boxes", None) or MAX_BOXES)
    return ()


def _write_timeline(result: Compiled, path: Path, args: argparse.Namespace) -> Sequence[str]:
    requests = getattr(args, "requests", 1)
    if path.suffix.lower() == ".json":
        from partitioner.cost_model.passes import passes
        from partitioner.cost_model.simulate import simulate
        from partitioner.cost_model.trace_events import timeline_json
        from partitioner.files import write_file

        timeline = simulate(result.schedule, requests)
        text = timeline_json(timeline, passes(result.schedule, timeline))
        write_file(path, text.encode())
    else:
        from partitioner.report.pictures.timeline import draw_timeline

        draw_timeline(result, path, requests=requests)
    return ()


def _write_annotated(result: Compiled, path: Path, _args: argparse.Namespace) -> Sequence[str]:
    from partitioner.annotations.write import annotate

    model = _onnx(result)
    if model.part is not None:
        raise PartitionerError("--annotate has no micro-batches, and the plan runs in them")
    annotated = annotate(model.traced, result.schedule, result.cluster, path, model_path=model.path)
    return tuple(annotated.lines())


def _onnx(result: Compiled) -> OnnxModel:
    """The ONNX model of a plan.

    Raises:
        PartitionerError: The plan is of a module.
    """
    from partitioner.compiled.onnx_model import OnnxModel

    if not isinstance(result.model, OnnxModel):
        raise PartitionerError("--annotate writes an ONNX model, and the plan is of a module")
    return result.model


_WRITERS: dict[str, Callable[[Compiled, Path, argparse.Namespace], Sequence[str]]] = {
    "dot": _write_dot,
    "graph": _write_graph,
    "timeline": _write_timeline,
    "annotate": _write_annotated,
}


def draw(argv: Sequence[str]) -> int:
    """``partition draw DIR``."""
    parser = command("draw", "Draw a plan.", DIR=WRITTEN)
    add_pictures(parser)
    parser.add_argument(
        "--requests", type=positive, default=1, metavar="N", help="requests in the timeline"
    )
    parser.add_argument("--boxes", type=positive, metavar="N", help="most boxes in the graph")
    args = parser.parse_args(argv)
    if not list(_targets(args)):
        parser.error(f"nothing to draw: give {', '.join(f'--{name}' for name in _SUFFIXES)}")
    check_pictures(parser, args, None)
    from partitioner.compiled.reload import load

    result = load(args.dir)
    warn(result.warnings)
    write_pictures(result, args, progress(quiet=False), aside)
    return 0


def check(argv: Sequence[str]) -> int:
    """``partition check FILE``: 0 if the annotations are valid, 1 otherwise."""
    about = "Check a model's multi-device annotations."
    parser = command("check", about, FILE="an .onnx file with annotations")
    args = parser.parse_args(argv)
    from partitioner.annotations.report import check_annotations

    result = check_annotations(Path(args.file))
    for line in str(result).splitlines():
        print(safe(line))
    return 1 if result.problems else 0
