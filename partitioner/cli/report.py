"""The commands that show a plan: explain, report, diff, sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.cli.options import (
    MODEL,
    WRITTEN,
    check_kind,
    check_model,
    command,
    memory,
    mesh,
    model_options,
    module_options,
    output_file,
    positive,
    progress,
    read_options,
    safe,
    search_options,
    several,
    warn,
)

if TYPE_CHECKING:
    from partitioner.report.page.schema import Diff, Sweep

_PAGE = output_file((".html", ".htm"))


def explain(argv: Sequence[str]) -> int:
    """``partition explain DIR [NODE]``."""
    about = "Show the limits of a plan or, for a node, the costs of its other strategies."
    parser = command("explain", about, DIR=WRITTEN)
    parser.add_argument("node", metavar="NODE", nargs="?", help="name of a node, or of a tensor")
    args = parser.parse_args(argv)
    from partitioner.compiled.reload import load
    from partitioner.report.text.explain import explain as explained
    from partitioner.report.text.explain import explain_node

    result = load(args.dir)
    warn(result.warnings)
    text = explained(result) if args.node is None else explain_node(result, args.node)
    print(safe(text))
    return 0


def report(argv: Sequence[str]) -> int:
    """``partition report DIR [-o FILE]``."""
    about = "Write a plan's report, one HTML file that needs no network."
    parser = command("report", about, DIR=WRITTEN)
    parser.add_argument(
        "-o",
        "--output",
        type=_PAGE,
        metavar="FILE",
        help="file to write, .html (default: DIR/report.html)",
    )
    args = parser.parse_args(argv)
    _check(args.output, ())
    from partitioner.compiled.reload import load

    folder = Path(args.dir)
    target = args.output or folder / "report.html"
    result = load(folder)
    warn(result.warnings)
    result.report(target)
    print(safe(f"written to {target}"))
    return 0


def diff(argv: Sequence[str]) -> int:
    """``partition diff DIR_A DIR_B``."""
    about = "Show the differences between two plans, and their effects."
    parser = command("diff", about, DIR_A=WRITTEN, DIR_B=WRITTEN)
    parser.add_argument(
        "-o", "--output", type=_PAGE, metavar="FILE", help="write it as an HTML page too"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)
    _check(args.output, ())
    from partitioner.compiled.reload import load
    from partitioner.report.text.diff import diff as compare
    from partitioner.report.text.diff import diff_text

    before, after = load(args.dir_a), load(args.dir_b)
    warn(dict.fromkeys((*before.warnings, *after.warnings)))  # DIR_A may be DIR_B
    _check(args.output, (before.model.path, after.model.path))
    data = compare(before, after, (args.dir_a, args.dir_b))
    print(json.dumps(data, indent=1) if args.json else safe(diff_text(data)), flush=True)
    _write(args.output, data)
    return 0


def sweep(argv: Sequence[str]) -> int:
    """``partition sweep MODEL --devices 1,2,4,8``."""
    about = "Plan a model for several numbers of devices, clusters and memory limits."
    parser = command("sweep", about, MODEL=MODEL)
    add = parser.add_argument
    add("--devices", type=several(positive), metavar="N,N", help="numbers of devices, like 1,2,4,8")
    add("--clusters", type=several(str), metavar="NAME,NAME", help="presets or TOML files")
    add("--memory", type=several(memory), metavar="SIZE,SIZE", help="limits of each device")
    add(
        "--mesh",
        type=mesh,
        action="append",
        default=[],
        metavar="dp=2,tp=2",
        help="mesh of intra plans where there are as many devices; one for each number of devices",
    )
    model_options(parser)
    module_options(parser)
    page = "write it as an HTML page with a plot too"
    add("-o", "--output", type=_PAGE, metavar="FILE", help=page)
    add("--json", action="store_true", help="print it as JSON")
    add("-q", "--quiet", action="store_true", help="no progress")
    args = parser.parse_args(argv)
    if args.devices is None and args.clusters is None:
        parser.error("give --devices, or --clusters with counts in their names, like 4xh100")
    check_kind(parser, args)
    _check(args.output, (check_model(args.model),))
    say = progress(args.quiet)
    say("loading the compiler")
    from partitioner.sweeping import sweep as search_all

    swept = search_all(
        args.model,
        devices=args.devices or (),
        clusters=args.clusters or (None,),
        memory=args.memory or (None,),
        meshes=args.mesh,
        **read_options(args, say),
        **search_options(args),
    )
    print(json.dumps(swept.data, indent=1) if args.json else safe(str(swept)), flush=True)
    _write(args.output, swept.data)
    return 0


def _check(path: Path | None, models: Iterable[Path | None]) -> None:
    """Refuse, before any work, a page that could not be written or would replace a model."""
    if path is None:
        return
    from partitioner.files import check_file, refuse_to_replace

    check_file(path)
    for model in models:
        if model is not None:
            refuse_to_replace(model, path)


def _write(path: Path | None, data: Diff | Sweep) -> None:
    if path is None:
        return
    from partitioner.files import write_file
    from partitioner.report.page.page import render

    write_file(path, render(data).encode())
