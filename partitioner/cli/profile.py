"""The commands that measure: profile, calibrate."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

from partitioner.api.option_table import DEVICES, ProfileOptions
from partitioner.cli import options
from partitioner.cli.options import option, positive
from partitioner.cli.terminal import progress
from partitioner.report.text.tables import safe

if TYPE_CHECKING:
    from partitioner.api.profiling.calibrate import Calibrated
    from partitioner.api.profiling.profiled import Profiled


def calibrate(
    folder: options.Written, profile: options.Profile = None, as_json: options.Json = False
) -> int:
    """Add the record of `partition run --profile` to the measurements of this machine."""
    from partitioner.api.profiling.calibrate import calibrate as add_measurements

    return _told(add_measurements(folder, profile=profile), as_json)


def _told(measured: "Calibrated | Profiled", as_json: bool) -> int:
    data = {**dataclasses.asdict(measured), "file": str(measured.file)}
    print(json.dumps(data, indent=1) if as_json else safe(str(measured)))
    return 0


@options.takes(ProfileOptions)
def profile(
    model: options.Model,
    devices: Annotated[
        int | None,
        option(
            positive,
            "N",
            "Processes that share this machine (default: 1), or its GPUs (default: all).",
            panel=DEVICES,
        ),
    ] = None,
    *,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    **values: Any,
) -> int:
    """Measure a model's operators on this machine, for plans with --cluster local."""
    chosen = options.given(ProfileOptions, values)
    options.check_kind(model, ProfileOptions, chosen)
    options.check_model(model)
    with progress(quiet) as say:
        say("loading the compiler")
        from partitioner.api.profiling.profile import profile as measure

        chosen = {**chosen, "progress": say}
        profiled = measure(model, devices=devices, **chosen)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return 0  # rank 0 of torchrun's processes tells
    return _told(profiled, as_json)
