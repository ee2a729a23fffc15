"""The commands that measure: profile, calibrate."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from partitioner.cli import options
from partitioner.cli.options import DEVICES, SEARCH, TRAINING, option, positive, seconds
from partitioner.cli.terminal import progress
from partitioner.report.text.tables import safe


def calibrate(
    folder: options.Written, profile: options.Profile = None, as_json: options.Json = False
) -> int:
    """Add the record of `partition run --profile` to the measurements of this machine."""
    from partitioner.profiling.calibrate import calibrate as add_measurements

    calibrated = add_measurements(folder, profile=profile)
    if as_json:
        data = {**dataclasses.asdict(calibrated), "file": str(calibrated.file)}
        print(json.dumps(data, indent=1))
    else:
        print(safe(str(calibrated)))
    return 0


def profile(
    model: options.Model,
    dim: options.Dims = None,
    shape: options.Shapes = None,
    devices: Annotated[
        int | None,
        option(
            positive,
            "N",
            "Processes that share this machine (default: 1), or its GPUs (default: all).",
            panel=DEVICES,
        ),
    ] = None,
    cluster: Annotated[
        str,
        option(
            None,
            "NAME|FILE",
            "local (default), or a TOML file that names a profile.",
            panel=DEVICES,
        ),
    ] = "local",
    file: Annotated[
        Path | None,
        option(
            None,
            "FILE",
            "Measurements to add to (default: in the cache folder).",
            "--profile",
            panel=DEVICES,
        ),
    ] = None,
    strategy: options.Strategy = "auto",
    mesh: Annotated[
        dict[str, int] | None,
        option(
            options.mesh,
            "dp=2,tp=2",
            "Measure what this mesh needs alone (default: all meshes).",
            panel=SEARCH,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        option(seconds, "S", "Seconds for the measurements (default: 120).", panel=SEARCH),
    ] = 120.0,
    training: options.Training = False,
    optimizer: options.Optimizer = None,
    micro_batches: Annotated[
        int | None,
        option(
            positive,
            "M",
            "Measure the operators of one of M micro-batches, for plans in micro-batches.",
            panel=TRAINING,
        ),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Measure a model's operators on this machine, for plans with --cluster local."""
    args = SimpleNamespace(**locals())
    options.check_kind(args)
    options.check_model(model)
    with progress(quiet) as say:
        say("loading the compiler")
        from partitioner.profiling.profile import profile as measure

        profiled = measure(
            model,
            devices=devices,
            cluster=cluster,
            profile=file,
            strategy=strategy,
            mesh=mesh,
            micro_batches=micro_batches,
            time_limit_s=time_limit,
            **options.read_options(args, say),
        )
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return 0  # rank 0 of torchrun's processes tells
    if as_json:
        data = {**dataclasses.asdict(profiled), "file": str(profiled.file)}
        print(json.dumps(data, indent=1))
    else:
        print(safe(str(profiled)))
    return 0
