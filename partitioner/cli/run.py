"""The commands that run a plan: run, verify."""

from pathlib import Path
from typing import Annotated, Literal

from partitioner.api.option_table import MODEL, OUTPUT
from partitioner.cli.options import InputSeed, Written, flag, option, positive, wrong
from partitioner.report.text.tables import safe

_MEASURED = "Measurements"

InputsFile = Annotated[
    Path | None,
    option(None, "in.npz", "Whole inputs by name (default: random valid inputs).", panel=MODEL),
]
Module = Annotated[
    str | None,
    option(
        None,
        "PKG.MOD:FACTORY",
        "The plan's PyTorch module, whose code is run: nothing that DIR names is imported.",
        panel=MODEL,
    ),
]
ModelFile = Annotated[
    Path | None,
    option(None, "FILE", "The plan's model (.onnx, .pt2), if it is not where it was.", panel=MODEL),
]

OptimizationLevel = Annotated[
    Literal["disable", "basic", "extended", "all"] | None,
    option(
        None,
        None,
        "Of an ONNX model: ONNX Runtime's optimizations (default: all; disable: cutting between "
        "operators changes no bit).",
        panel=MODEL,
    ),
]


def run(
    folder: Written,
    inputs: InputsFile = None,
    module: Module = None,
    model: ModelFile = None,
    optimization: OptimizationLevel = None,
    seed: InputSeed = 0,
    requests: Annotated[
        int,
        option(
            positive,
            "N",
            "Number of requests, several of them in flight (default: 1).",
            panel=MODEL,
        ),
    ] = 1,
    outputs: Annotated[
        Path | None,
        option(None, "out.npz", "Where to write the whole outputs.", panel=OUTPUT),
    ] = None,
    profile: Annotated[
        bool,
        flag(
            "Record every kernel and communication, and show them beside the prediction, also in "
            "DIR/report.html.",
            "--profile",
            panel=_MEASURED,
        ),
    ] = False,
    steps: Annotated[
        int | None,
        option(
            positive,
            "N",
            "Steps of one request each that --profile records (default: 10).",
            panel=_MEASURED,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        flag(
            "Add what --profile measures to the measurements of this machine, as `partition "
            "calibrate` does.",
            "--calibrate",
            panel=_MEASURED,
        ),
    ] = False,
) -> int:
    """Run a plan on this machine: one process for each rank."""
    for name, given in (("steps", steps), ("calibrate", calibrate)):
        if given and not profile:
            wrong(f"--{name} is of --profile: give that too")
    from partitioner.backends.observed import STEPS
    from partitioner.run.local import run_directory

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
    print(safe(report))
    if calibrate:
        from partitioner.api.profiling.calibrate import calibrate as add_measurements

        print(safe(str(add_measurements(folder))))
    return 0


def verify(
    folder: Written,
    inputs: InputsFile = None,
    module: Module = None,
    model: ModelFile = None,
    optimization: OptimizationLevel = None,
    seed: InputSeed = 0,
) -> int:
    """Compare the outputs of all ranks with those of the whole model."""
    from partitioner.api.compiled.folder import load_plan
    from partitioner.api.compiled.rank_files import rank_files
    from partitioner.api.compiled.reload import load_named
    from partitioner.run.local import read_inputs

    rank_files(folder).check(load_plan(folder))  # before the model, which takes longer
    result = load_named(folder, module, model)
    given = None if inputs is None else read_inputs(inputs, result.model.input_types)
    verification = result.verify_written(folder, seed=seed, inputs=given, optimization=optimization)
    print(safe(str(verification)))
    return 0 if verification.equal else 1
