"""Pictures on the command line: `partition MODEL --dot F`, `partition draw` and `check`."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partitioner.cli.options import Written, listed, output_file, wrong
from partitioner.cli.terminal import aside, looked_at, progress, warn
from partitioner.foundations.files import check_file, refuse_to_replace, write_file
from partitioner.ir.errors import PartitionerError
from partitioner.report.text.tables import safe

if TYPE_CHECKING:
    from partitioner.api.compiled.base import Compiled
    from partitioner.api.compiled.onnx_model import OnnxModel

Say = Callable[[str], None]

_IMAGES = (".svg", ".png", ".pdf")
_SUFFIXES = {
    "dot": (".dot", ".gv"),
    "graph": _IMAGES,
    "timeline": (*_IMAGES, ".json"),
    "annotate": (".onnx",),
}


def _picture(name: str) -> Any:
    return listed("plan", name, output_file(_SUFFIXES[name]))


Dot = Annotated[Path | None, _picture("dot")]
Graph = Annotated[Path | None, _picture("graph")]
Timeline = Annotated[Path | None, _picture("timeline")]
Annotate = Annotated[Path | None, _picture("annotate")]


def check_pictures(args: SimpleNamespace, model: Path | None) -> None:
    """Refuse, before any work, pictures that could not be written, or would replace the model."""
    targets = list(_targets(args))
    for _, path in targets:
        check_file(path)
    places = [path.resolve() for _, path in targets]
    for (name, path), place in zip(targets, places, strict=True):
        if places.count(place) > 1:
            wrong(f"--{name}: {path} is given twice")
    if args.annotate is not None and model is not None:
        refuse_to_replace(model, args.annotate)
    if any(path.suffix.lower() in _IMAGES for _, path in targets):
        from partitioner.report.pictures.canvas import require_matplotlib

        # matplotlib reads settings from the current folder, which may be a stranger's.
        os.environ["MATPLOTLIBRC"] = os.devnull
        require_matplotlib()


def write_pictures(result: "Compiled", args: SimpleNamespace, say: Say, warn: Say) -> None:
    """Write the pictures that options name; `say` gets a line before each, `warn` what it lacks."""
    if args.annotate is not None:
        _onnx(result)
    for name, path in _targets(args):
        say(f"writing {path}")
        for line in _write(name, result, path, args):
            warn(line)


def _targets(args: SimpleNamespace) -> Iterator[tuple[str, Path]]:
    for name in _SUFFIXES:
        path = getattr(args, name)
        if path is not None:
            yield name, path


def _write(name: str, result: "Compiled", path: Path, args: SimpleNamespace) -> Sequence[str]:
    """Write a picture: a line for each part of the plan that it leaves out."""
    requests = getattr(args, "requests", 1)
    if name == "annotate":
        from partitioner.annotations.write import annotate

        model = _onnx(result)
        if model.part is not None:
            raise PartitionerError("--annotate has no micro-batches, and the plan runs in them")
        tasks, cluster = result.schedule, result.cluster
        return tuple(annotate(model.traced, tasks, cluster, path, model_path=model.path).lines())
    if name == "dot":
        from partitioner.report.pictures.dot import dot

        write_file(path, dot(result).encode())
    elif name == "graph":
        from partitioner.report.pictures.draw import MAX_BOXES, draw_graph

        draw_graph(result, path, boxes=getattr(args, "boxes", None) or MAX_BOXES)
    elif path.suffix.lower() == ".json":
        from partitioner.cost_model.schedule.readings import passes, timeline_json
        from partitioner.cost_model.schedule.simulate import simulate

        timeline = simulate(result.schedule, requests)
        text = timeline_json(timeline, passes(result.schedule, timeline))
        write_file(path, text.encode())
    else:
        from partitioner.report.pictures.timeline import draw_timeline

        draw_timeline(result, path, requests=requests)
    return ()


def _onnx(result: "Compiled") -> "OnnxModel":
    from partitioner.api.compiled.onnx_model import OnnxModel

    if not isinstance(result.model, OnnxModel):
        raise PartitionerError("--annotate writes an ONNX model, and the plan is of a module")
    return result.model


def draw(
    folder: Written,
    dot: Dot = None,
    graph: Graph = None,
    timeline: Timeline = None,
    annotate: Annotate = None,
    requests: Annotated[int, listed("draw", "requests")] = 1,
    boxes: Annotated[int | None, listed("draw", "boxes")] = None,
) -> int:
    """Draw pictures of a plan for papers and slides."""
    args = SimpleNamespace(**locals())
    if not list(_targets(args)):
        wrong(f"nothing to draw: give {', '.join(f'--{name}' for name in _SUFFIXES)}")
    check_pictures(args, None)
    from partitioner.api.compiled.folder import OnnxRequest, load_request
    from partitioner.api.compiled.reload import load

    if annotate is not None and isinstance(load_request(folder), OnnxRequest):
        result = load(folder)
        warn(result.warnings)
    else:
        (result,) = looked_at(folder)
    with progress(quiet=False) as say:
        write_pictures(result, args, say, aside)
    return 0


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .onnx file with annotations.")],
) -> int:
    """Check a model's multi-device annotations: exit code 0 if they are valid."""
    from partitioner.annotations.report import check_annotations

    result = check_annotations(file)
    for line in str(result).splitlines():
        print(safe(line))
    return 1 if result.problems else 0
