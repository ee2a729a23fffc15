"""The commands that run something on this machine: run, verify, profile, calibrate."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from partitioner.api.option_table import ProfileOptions
from partitioner.cli.options import (
    InputSeed,
    Json,
    Model,
    Profile,
    Quiet,
    Written,
    check_model,
    given,
    listed,
    takes,
    wrong,
)
from partitioner.cli.terminal import on_terminal, progress
from partitioner.report.text.tables import fitted

if TYPE_CHECKING:
    from partitioner.api.profiling.calibrate import Calibrated
    from partitioner.api.profiling.profiled import Profiled

InputsFile = Annotated[Path | None, listed("run", "inputs")]
Module = Annotated[str | None, listed("run", "module")]
ModelFile = Annotated[Path | None, listed("run", "model")]
OptimizationLevel = Annotated[
    Literal["disable", "basic", "extended", "all"] | None, listed("run", "optimization")
]


def run(
    folder: Written,
    inputs: InputsFile = None,
    module: Module = None,
    model: ModelFile = None,
    optimization: OptimizationLevel = None,
    seed: InputSeed = 0,
    shapes: Annotated[list[Any] | None, listed("run", "shapes")] = None,
    requests: Annotated[int, listed("run", "requests")] = 1,
    feed: Annotated[list[Any] | None, listed("run", "feed")] = None,
    until: Annotated[int | None, listed("run", "until")] = None,
    prompt: Annotated[Any, listed("run", "prompt")] = None,
    outputs: Annotated[Path | None, listed("run", "outputs")] = None,
    profile: Annotated[bool, listed("run", "profile")] = False,
    steps: Annotated[int | None, listed("run", "steps")] = None,
    calibrate: Annotated[bool, listed("run", "calibrate")] = False,
) -> int:
    """Run a plan on this machine: one process for each rank."""
    for name, value in (("steps", steps), ("calibrate", calibrate)):
        if value and not profile:
            wrong(f"--{name} is of --profile: give that too")
    in_turn = {"feed": feed, "prompt": prompt}
    of_modules = {"module": module, "profile": profile}
    others = {**of_modules, "shape": shapes, "model": model, "requests": requests > 1}
    for option in (name for name, value in of_modules.items() if value and shapes):
        wrong(f"--shape runs an ONNX model: leave --{option} out")
    for option in (name for name, value in in_turn.items() if value and until is None):
        wrong(f"--{option} is of --until: give that too")
    for option in (name for name, value in others.items() if value and until is not None):
        wrong(f"--until calls an ONNX model in turn: leave --{option} out")
    with on_terminal() as say:
        say("running one process for each rank")
        from partitioner.backends.observed import STEPS
        from partitioner.run.generate import generate_directory
        from partitioner.run.local import run_directory, run_sized

        if until is not None:
            report = generate_directory(
                folder,
                inputs,
                outputs,
                until=until,
                feed=None if feed is None else dict(feed),
                prompt=prompt or (),
                optimization=optimization,
                seed=seed,
            )
        elif shapes:
            report = run_sized(
                folder,
                inputs,
                outputs,
                dict(shapes),
                model=model,
                optimization=optimization,
                requests=requests,
                seed=seed,
            )
        else:
            report = run_directory(
                folder,
                inputs,
                outputs,
                module=module,
                model=model,
                optimization=optimization,
                requests=requests,
                seed=seed,
                steps=(steps or STEPS) if profile else 0,
            )
    print(fitted(report))
    if calibrate:
        from partitioner.api.profiling.calibrate import calibrate as add_measurements

        print(fitted(str(add_measurements(folder))))
    return 0


def verify(
    folder: Written,
    inputs: InputsFile = None,
    module: Module = None,
    model: ModelFile = None,
    optimization: OptimizationLevel = None,
    seed: InputSeed = 0,
    symbolic: Annotated[bool, listed("verify", "symbolic")] = False,
) -> int:
    """Compare the outputs of all ranks with those of the whole model."""
    for name, value in (("inputs", inputs), ("seed", seed), ("optimization", optimization)):
        if symbolic and value:
            wrong(f"--symbolic runs nothing: leave --{name} out")
    from partitioner.api.compiled.folder import load_plan, rank_files
    from partitioner.api.compiled.reload import load_named, prove_written
    from partitioner.run.local import read_inputs

    if symbolic:
        with on_terminal() as say:
            say("following the programs of all ranks")
            proof = prove_written(folder, module, model)
        print(fitted(str(proof)))
        return proof.exit_code
    with on_terminal() as say:
        say("reading the model")
        rank_files(folder).check(load_plan(folder))  # before the model, which takes longer
        result = load_named(folder, module, model)
        arrays = None if inputs is None else read_inputs(inputs, result.model.input_types)
        say("running all ranks, and the whole model")
        verification = result.verify_written(
            folder, seed=seed, inputs=arrays, optimization=optimization
        )
    print(fitted(str(verification)))
    return 0 if verification.equal else 1


def calibrate(folder: Written, profile: Profile = None, as_json: Json = False) -> int:
    """Add the record of `partition run --profile` to the measurements of this machine."""
    from partitioner.api.profiling.calibrate import calibrate as add_measurements

    return _told(add_measurements(folder, profile=profile), as_json)


def _told(measured: "Calibrated | Profiled", as_json: bool) -> int:
    data = {**dataclasses.asdict(measured), "file": str(measured.file)}
    print(json.dumps(data, indent=1) if as_json else fitted(str(measured)))
    return 0


@takes(ProfileOptions)
def profile(
    model: Model,
    devices: Annotated[int | None, listed("profile", "devices")] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    **values: Any,
) -> int:
    """Measure a model's operators on this machine, for plans with --cluster local."""
    chosen = given(model, ProfileOptions, values)
    check_model(model)
    with progress(quiet) as say:
        say("loading the compiler")
        from partitioner.api.profiling.profile import profile as measure

        chosen = {**chosen, "progress": say}
        profiled = measure(model, devices=devices, **chosen)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return 0  # rank 0 of torchrun's processes tells
    return _told(profiled, as_json)
