"""``partition profile``: measure a model's operators on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from partitioner.cli.options import (
    MODEL,
    WRITTEN,
    check_kind,
    check_model,
    command,
    mesh,
    positive,
    profile_option,
    progress,
    read_options,
    safe,
    shape_options,
    strategy_option,
    time_limit,
    training_options,
)


def calibrate_command(argv: Sequence[str]) -> int:
    """``partition calibrate DIR``."""
    about = "Add the record of `partition run --profile` to the measurements of this machine."
    parser = command("calibrate", about, DIR=WRITTEN)
    profile_option(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)
    from partitioner.profiling.calibrate import calibrate

    calibrated = calibrate(args.dir, profile=args.profile)
    if args.json:
        data = {**dataclasses.asdict(calibrated), "file": str(calibrated.file)}
        print(json.dumps(data, indent=1))
    else:
        print(safe(str(calibrated)))
    return 0


def profile_command(argv: Sequence[str]) -> int:
    """``partition profile MODEL --devices N``."""
    about = "Measure the operators that a search could choose, for plans on --cluster local."
    parser = command("profile", about, MODEL=MODEL)
    add = parser.add_argument
    add("--devices", type=positive, metavar="N", help="processes that share this machine")
    cluster = "local (default), or a TOML file that names a profile"
    add("--cluster", default="local", metavar="NAME|FILE", help=cluster)
    profile_option(parser)
    strategy_option(parser)
    add("--mesh", type=mesh, metavar="dp=2,tp=2", help="mesh of intra plans (default: all)")
    shape_options(parser)
    training_options(parser)
    parts = "measure one of so many micro-batches of the batch, for plans in micro-batches"
    add("--micro-batches", type=positive, metavar="M", help=parts)
    time_limit(parser, 120.0, "for the measurements")
    add("--json", action="store_true", help="print it as JSON")
    add("-q", "--quiet", action="store_true", help="no progress")
    args = parser.parse_args(argv)
    check_kind(parser, args)
    check_model(args.model)
    say = progress(args.quiet)
    say("loading the compiler")
    from partitioner.profiling.profile import profile

    profiled = profile(
        args.model,
        devices=args.devices,
        cluster=args.cluster,
        profile=args.profile,
        strategy=args.strategy,
        mesh=args.mesh,
        micro_batches=args.micro_batches,
        time_limit_s=args.time_limit,
        **read_options(args, say),
    )
    if args.json:
        data = {**dataclasses.asdict(profiled), "file": str(profiled.file)}
        print(json.dumps(data, indent=1))
    else:
        print(safe(str(profiled)))
    return 0
