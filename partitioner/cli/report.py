"""The commands that show plans: show, explain, report, diff, sweep, fit."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partitioner.api.option_table import FitOptions, SweepOptions
from partitioner.cli import options
from partitioner.cli.options import listed, wrong
from partitioner.cli.terminal import looked_at, progress
from partitioner.foundations.files import (
    check_file,
    check_no_link,
    read_text,
    refuse_to_replace,
    write_file,
)
from partitioner.report.text.tables import fitted, safe

if TYPE_CHECKING:
    from partitioner.report.schema import Diff, Sweep


def show(
    folder: options.Written,
    everything: Annotated[bool, listed("show", "everything")] = False,
) -> int:
    """Print a plan: its devices, operators and communications."""
    (result,) = looked_at(folder)
    result.show(everything=everything)
    return 0


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Nodes of the plan that begin like what was typed, for the shell's completion."""
    try:
        text = read_text(Path(ctx.params["folder"]) / "plan.json")
        nodes = json.loads(text)["nodes"]
    except (KeyError, OSError, TypeError, ValueError):
        return []
    return [name for name in nodes if name.startswith(incomplete)]


def explain(
    folder: options.Written,
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE",
            help="A node, or a tensor that one makes (default: the whole plan).",
            autocompletion=_names,
        ),
    ] = None,
) -> int:
    """Say what limits a plan or, for a node, what its other strategies would cost."""
    (result,) = looked_at(folder)
    result.explain(node)
    return 0


def report(
    folder: options.Written,
    output: Annotated[Path | None, listed("report", "output")] = None,
) -> int:
    """Write a plan's report, one HTML file that needs no network."""
    _check(output, ())
    target = output or folder / "report.html"
    if output is None:
        check_no_link(target)
    (result,) = looked_at(folder)
    result.report(target)
    print(safe(f"written to {target}"))
    return 0


def diff(
    dir_a: options.Written,
    dir_b: options.Written,
    output: Annotated[Path | None, listed("diff", "output")] = None,
    as_json: options.Json = False,
) -> int:
    """Show the differences between two plans, and their effects."""
    _check(output, ())
    from partitioner.report.text.diff import diff as compare
    from partitioner.report.text.diff import diff_text

    before, after = looked_at(dir_a, dir_b)
    _check(output, (before.model.path, after.model.path))
    data = compare(before, after, (str(dir_a), str(dir_b)))
    print(json.dumps(data, indent=1) if as_json else fitted(diff_text(data)), flush=True)
    _write(output, data)
    return 0


@options.takes(SweepOptions)
def sweep(
    model: options.Model,
    devices: Annotated[Any, listed("sweep", "devices")] = None,
    *,
    output: Annotated[Path | None, listed("sweep", "output")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    **values: Any,
) -> int:
    """Say whether splitting pays: plan for several numbers of devices, clusters and limits."""
    chosen = options.given(model, SweepOptions, values)
    if devices is None and "clusters" not in chosen:
        wrong("give --devices, or --clusters with counts in their names, like 4xh100")
    _check(output, (options.check_model(model),))
    with progress(quiet) as say:
        say("loading the compiler")
        from partitioner.api.sweeping import sweep as search_all

        chosen = {**chosen, "progress": say}
        swept = search_all(model, devices=devices or (), **chosen)
    print(json.dumps(swept.data, indent=1) if as_json else fitted(str(swept)), flush=True)
    _write(output, swept.data)
    return 0


@options.takes(FitOptions)
def fit(
    model: options.Model,
    *,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    **values: Any,
) -> int:
    """Say which cards hold a model, how many, and what a request or step takes there."""
    chosen = options.given(model, FitOptions, values)
    options.check_model(model)
    with progress(quiet) as say:
        say("loading the compiler")
        from partitioner.api.fitting import fit as search_all

        chosen = {**chosen, "progress": say}
        found = search_all(model, **chosen)
    print(json.dumps(found.data, indent=1) if as_json else fitted(str(found)))
    return 0


def _check(path: Path | None, models: Iterable[Path | None]) -> None:
    """Refuse, before any work, a page that could not be written or would replace a model."""
    if path is None:
        return
    check_file(path)
    for model in filter(None, models):
        refuse_to_replace(model, path)


def _write(path: Path | None, data: "Diff | Sweep") -> None:
    if path is not None:
        from partitioner.report.page.page import render

        write_file(path, render(data).encode())
