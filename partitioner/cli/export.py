"""The commands that write plans in the forms of others: join, export."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from partitioner.cli.options import Written, listed, wrong
from partitioner.cli.terminal import looked_at, on_terminal
from partitioner.foundations.files import (
    check_file,
    check_target,
    refuse_to_replace,
    replace_directory,
    write_file,
)
from partitioner.ir.errors import OptionError
from partitioner.report.text.tables import safe

if TYPE_CHECKING:
    from partitioner.backends.onnx.files.steps import RankModel


def join(
    folder: Written,
    parts: Annotated[Path | None, listed("join", "parts")] = None,
    output: Annotated[Any, listed("join", "output")] = None,
) -> int:
    """Join the rank files of an ONNX model to one model."""
    from partitioner.api.compiled.folder import load_request
    from partitioner.backends.onnx.files.join import join as join_parts
    from partitioner.backends.onnx.files.parts import part_of, read_part

    target: Path = output or _beside(folder, ".joined.onnx")
    check_file(target)
    with on_terminal() as say:
        say("reading the rank files")
        models = _ranks(folder, "join")
        refuse_to_replace(getattr(load_request(folder), "model", target), target)
        own = [part_of(model) for model in models]
        if parts is not None:
            own = [
                read_part(part.model, parts / f"rank{part.model.rank}.onnx")
                if part.proto.graph.node
                else part
                for part in own
            ]
        say(f"writing {target}")
        joined = join_parts(own)
        weights = joined.write(target)
    beside = "" if weights is None else f", with its weights in {weights.name}"
    nodes = len(joined.proto.graph.node)
    print(safe(f"{nodes} nodes of {len(models)} ranks are in {target}{beside}"))
    return 0


def export(
    folder: Written,
    to: Annotated[Literal["parts", "triton", "schedule"], listed("export", "to")],
    output: Annotated[Path | None, listed("export", "output")] = None,
) -> int:
    """Write a plan in the form of another tool."""
    if to == "schedule":
        return _export_schedule(folder, output or _beside(folder, ".csv"))
    from partitioner.api.compiled.folder import load_plan
    from partitioner.backends.export.triton import write_triton
    from partitioner.backends.onnx.files.parts import write_parts
    from partitioner.cost_model.cluster.topology import Cluster

    target = output or _beside(folder, f".{to}")
    if os.path.lexists(target):
        wrong(f"{target} is there already: name another folder with --output")
    check_target(target, force=False)
    with on_terminal() as say:
        say("reading the rank files")
        models, devices = _ranks(folder, f"--to {to}"), Cluster.from_data(load_plan(folder).cluster)
        on_gpu = [device.is_gpu for device in devices.devices]
        triton = partial(write_triton, models, on_gpu=on_gpu)
        write = triton if to == "triton" else partial(write_parts, models)
        say(f"writing {target}")
        replace_directory(target, write, force=False)
    print(safe(f"written to {target}"))
    return 0


def _export_schedule(folder: Path, target: Path) -> int:
    """Write the order in which a plan's stages take micro-batches, a row for each lane."""
    from partitioner.ir.mesh import numbers
    from partitioner.ir.pipeline.text import to_csv

    check_file(target)
    (result,) = looked_at(folder)
    if result.plan.pipeline is None:
        raise OptionError(f"{folder}: its plan runs in no micro-batches, so it has no schedule")
    order = result.schedule.order
    if not order.table.trains:
        raise OptionError(f"{folder}: its plan does not train, and PyTorch reads no such schedule")
    write_file(target, to_csv(order.table).encode())
    print(safe(f"written to {target}, with a row for each of"))
    for lane, devices in enumerate(order.lanes):
        print(safe(f"lane {lane}: devices {numbers(devices)}"))
    return 0


def _beside(folder: Path, suffix: str) -> Path:
    """The default place of what is made of a folder: beside it, under its name."""
    whole = Path(os.path.abspath(folder))  # noqa: PTH100 - links stay
    parent = whole.parent if folder.name in ("", "..") else folder.parent
    return parent / f"{whole.name.removesuffix('.partition')}{suffix}"


def _ranks(folder: Path, what: str) -> "tuple[RankModel, ...]":
    """The rank files of a plan of an ONNX model, for a command that is of no other."""
    from partitioner.api.compiled.folder import OnnxFiles, OnnxRequest, load_plan, load_request
    from partitioner.backends.onnx.files.parts import read_ranks

    if not isinstance(load_request(folder), OnnxRequest):
        raise OptionError(f"{what} is of ONNX models, and {folder} is of a PyTorch module")
    OnnxFiles(folder).check(load_plan(folder))
    return read_ranks(folder)
