"""`compile` plans a model and lowers the plan to programs; `dump_problem` writes its problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from typing_extensions import Unpack

from partitioner.compiled.base import Compiled
from partitioner.compiled.onnx_graphs import OnnxGraphs
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.files import check_file, refuse_to_replace
from partitioner.frontends.model import ModuleInput, OnnxInput
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.ir.errors import OptionError
from partitioner.options import (
    CompileOptions,
    DumpOptions,
    open_with,
    processes,
    request_of,
    takes,
    target_cluster,
)
from partitioner.problem.dump import Dump, write_problem
from partitioner.report.summarise import summarise
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request, silent
from partitioner.search.spaces.explicit import first_problem
from partitioner.search.ways.stage_clock import StageClock
from partitioner.search.ways.table import Table
from partitioner.strategies.spaces import SearchError, check_space, families
from partitioner.tuning import check_tunable, tuned, tuning_notes

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.compiled.module import ModuleProgram
    from partitioner.compiled.module_graphs import ModuleGraphs


@overload
def compile(  # noqa: A001 - the public name
    model: nn.Module,
    example_inputs: Any,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> ModuleProgram: ...


@overload
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto,
    example_inputs: None = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled: ...


@takes(CompileOptions)
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled | ModuleProgram:
    """Plan a model over devices and lower the plan to one program a rank.

    Args:
        model: Path of an ONNX file, the ONNX model itself, or a PyTorch module. A module's weights
            may be fake, or on the meta device: it is planned without them. Also a module's
            exported program ("model.pt2"), or "package.module:factory": a function, which is
            called, and returns the module and its example inputs.
        example_inputs: For a module itself: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments.
        devices: Number of devices (default: the cluster's; without one the number of processes of
            torch.distributed or torchrun, or 1).
        **options: As the signature lists them:

            training: For a module: plan its forward and backward passes. The module must return
            its loss first, a floating scalar.

            optimizer: For training: the optimizer whose state is counted with each parameter,
            "adamw" (default), "adam", "sgd", "momentum" (SGD with momentum), "rmsprop" or
            "adagrad".

            parallel: A kind of parallelism; default: the cheapest plan of any kind. "dp" (data),
            "tp" (tensor), "cp" (context: sequences are cut), "ep" (experts), "spatial" (mesh axes
            "h", "w" and "d" cut height, width and depth of images), "pp" (a pipeline of stages, of
            one device each or, joined with another kind, of as many as the mesh leaves); for a
            module also "ring", "dispatch" and "zero3", in training also "zero1" and "zero2". Join
            several by "+" and give their `mesh`. The batch is the dim of the inputs that can be
            followed furthest through the model; a note says where it is not dim 0 of all inputs.

            schedule: Run in micro-batches, through stages in the order of this schedule, "gpipe",
            "1f1b", "interleaved", "zb1", "zbv", "dualpipev" or, for inference, "forward", or the
            path of a file with its table (see `partition schedule`); default: the best.

            micro_batches: Run each batch in so many equal micro-batches, through stages or all on
            the same devices; gradients are added up. With `schedule` or "pp" alone several numbers
            are tried, of a module those that are proven to compute what the whole batch does, but
            for other random numbers; a note names what stands against the others, and what is not
            proven of a number that is given. For a module, the default is the whole batch or, if
            no plan of that fits, the fewest micro-batches that fit, provided that they are proven
            to compute the same (no batch norms, no dropout); "auto" takes them without that proof
            and, in training on several nodes of more than 16 devices, stages if they are faster.
            For an ONNX model, the default is the whole batch; "auto" takes the whole batch or
            several numbers of micro-batches, whichever costs least. Its batch is dim 0 of the first
            input and of all inputs as long as that; a model whose outputs are not proven to be the
            same is refused.

            recompute: For training: whether the plan may recompute values of the forward pass in
            the backward pass instead of keeping them (activation checkpointing). "auto" allows it
            if no plan that keeps all of them fits the devices' memory or, above 16 devices, if
            memory forbids a cheaper one.

            cluster: Preset name, TOML file or Cluster; default: `devices` reference accelerators.

            memory: Memory limit of each device, in bytes or as text ("8GiB").

            profile: File with measurements of this machine, for ``cluster="local"``; default:
            `profile.sqlite` in the user's cache folder (see `profile`).

            objective: "throughput" (default: least load of the busiest device), "latency" or
            "memory".

            strategy: "intra" (shard operators), "inter" (place whole operators), or "auto", the
            default.

            mesh: Axis sizes of the mesh for intra plans, as {"dp": 2, "tp": 2}; None searches.

            dims: Sizes of an ONNX model's symbolic dims by symbol.

            shapes: Shapes of an ONNX model's inputs by name, and of tensors inside whose shapes
                nothing tells; a bound where the size depends on data.

            constraints: `Constraints`; a mapping with named dims, a layout, pins and loads of
            experts, as in a file; a plan whose decisions are kept; or the path of such a file.

            plan_only: For an ONNX model: files of its weights may be missing. Their sizes are
            planned; what needs their values raises a FrontendError.

            time_limit_s: Limit of the search, in seconds (default 30); above 0.

            gap: Relative gap between cost and lower bound at which the search may stop (default
            0.01); below 1.

            solver: MILP solver, any that PuLP finds: "highs" (default), "cbc", "gurobi", "cplex",
            ...

            seed: Seed of all random choices (default 0); at least 0.

            tune: With ``cluster="local"``: the number of plans, the best of the search and of
            different spaces, to run for a few steps on this machine; the one measured fastest is
            kept. The certificate lists the runs as `trials`.

            progress: Called with a line of text at each stage.

    Returns:
        The compiled model. A module gives a `ModuleProgram`, which is called like the module, and
        whose `.module()` is each rank's part under torchrun. A path or an ONNX model gives a
        `Compiled`, which for a ".pt2" file or a factory is a `ModuleProgram` as well. Once
        torch.distributed is initialised with as many processes as the plan has devices, all
        processes compile a module together: each traces it, process 0 searches.

    Raises:
        PartitionerError: The model or the constraints are wrong; `OptionError` for an option that
            has no meaning or contradicts another, `Infeasible` if no plan fits the devices' memory.
            Processes that compile together all raise.

    >>> import partitioner
    >>> result = partitioner.compile("resnet50.onnx", devices=4)  # doctest: +SKIP
    >>> result.show()  # doctest: +SKIP
    >>> result.save("resnet50.partition")  # doctest: +SKIP
    """
    clock = StageClock(options.get("progress") or silent)
    cluster, request = check_options(devices, options)
    opened = open_with(model, example_inputs, options)
    if request.tune is not None:
        if options.get("plan_only"):
            raise OptionError("tune runs the plans, which needs the weights: leave plan_only out")
        check_tunable(cluster, is_module=isinstance(opened, ModuleInput))
    cluster = cluster.for_backend(in_sessions=isinstance(opened, OnnxInput))
    graphs = _graphs_of(opened, cluster, request, clock)

    def search() -> tuple[Outcome, Mapping[str, Any]]:
        outcome = Table(graphs, cluster, request, clock).best()
        run_notes: tuple[str, ...] = ()
        if request.tune is not None:
            with clock("running the best plans"):
                outcome = tuned(outcome, graphs.compiled, request, cluster, clock.say)
            run_notes = tuning_notes(outcome, request)
        notes = (*graphs.notes, *run_notes)
        return outcome, summarise(outcome, cluster, request, notes, fuses=graphs.fuses)

    result = graphs.planned(search)
    if len(cluster) <= MOST_EXPLICIT:  # now rather than on first use
        with clock("lowering"):
            result.programs  # noqa: B018 - computed on first use
    return result


def _graphs_of(
    opened: OnnxInput | ModuleInput, cluster: Cluster, request: Request, clock: StageClock
) -> OnnxGraphs | ModuleGraphs:
    """The graphs of a model by the way that it runs; PyTorch is loaded for modules only."""
    if isinstance(opened, OnnxInput):
        return OnnxGraphs(opened, cluster, request, clock)
    from partitioner.compiled.module_graphs import ModuleGraphs

    return ModuleGraphs(opened, cluster, request, clock)


def check_options(devices: int | None, options: Mapping[str, Any]) -> tuple[Cluster, Request]:
    """The devices and the request of the options of `compile`; no model is read.

    Raises:
        PartitionerError: As `compile`, of options that have no meaning with any model.
    """
    cluster = target_cluster(options, devices, processes())
    request = request_of(options)
    _check_pipeline(request, options)
    _check_kept(request)
    check_space(request.strategy, len(cluster), request.mesh)
    ModuleOptions(options.get("training", False), options.get("optimizer", "adamw"))
    if request.tune is not None:
        check_tunable(cluster, is_module=False)
    return cluster, request


def _check_kept(request: Request) -> None:
    """Refuse to keep a plan in blocks, whose nodes are not the model's, or one in stages.

    Raises:
        OptionError: It is asked for.
    """
    plan = request.constraints.plan
    if plan is not None and plan.blocks:
        raise OptionError(
            "constraints: a plan in blocks cannot be kept: leave it out, blocks are found anew"
        )
    if plan is not None and plan.pipeline is not None:
        raise OptionError(
            "constraints: a plan in stages cannot be kept: pin groups of nodes to devices instead"
        )


def _check_pipeline(request: Request, options: Mapping[str, Any]) -> None:
    """Refuse options that a plan in stages does not take.

    Raises:
        OptionError: There is one.
    """
    if not request.is_pipelined:
        return
    if request.strategy != "auto":
        raise OptionError(f"strategy {request.strategy!r} is not for pipelines: leave it out")
    if options.get("recompute") is True and not options.get("training"):
        raise OptionError("recompute is for training: inference keeps nothing")


@takes(DumpOptions)
def dump_problem(
    model: str | Path | onnx.ModelProto | nn.Module,
    path: str | Path,
    devices: int | None = None,
    **options: Unpack[DumpOptions],
) -> Dump:
    """Write the problem that `compile` would solve, for other solvers.

    Args:
        model: As of `compile`.
        path: File to write, gzipped if its name ends in `.gz`; an existing one is replaced.
        devices: Number of devices (default: the cluster's, or 1).
        **options: As of `compile`, but: strategy is "intra" for the sharding problem in the format
            of google/iopddl, or "inter" for the placement problem in that of
            msr-fiddle/dnn-partitioning; without a mesh, "intra" takes the one of a single axis.

    Raises:
        PartitionerError: The model or the constraints are wrong, the file cannot be written, or
            the strategy is neither of the two.
    """
    strategy = options["strategy"]
    if strategy == "auto":
        raise SearchError("a problem file holds one problem: give strategy intra or inter")
    say = options.get("progress") or silent
    target = Path(path)
    check_file(target)
    cluster = target_cluster(options, devices)
    request = request_of(options)
    families(strategy, len(cluster), request.mesh)  # refuses before anything is read
    opened = open_with(model, options.get("example_inputs"), options)
    if opened.path is not None:
        refuse_to_replace(opened.path, target)
    spaces = request.over(len(cluster))
    say("reading the model")
    graph = opened.graph
    say("building the problem")
    cluster = cluster.for_backend(in_sessions=isinstance(opened, OnnxInput))
    family, built = first_problem(graph, cluster, spaces.on(graph))
    say(f"writing {target}")
    dumped = write_problem(built.problem, target, str(family), placement=strategy == "inter")
    if strategy == "inter" or spaces.mesh is not None or len(cluster) == 1:
        return dumped
    one_axis = "no mesh was given: this is the one of a single axis"
    return replace(dumped, notes=(dumped.notes[0], one_axis, *dumped.notes[1:]))
