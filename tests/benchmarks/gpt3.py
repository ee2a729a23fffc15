"""Planning time of a GPT-3-175B-shaped graph, by layers and by devices.

    python tests/benchmarks/gpt3.py FOLDER [--layers 12,24,48,96,192] [--devices 8,64,1024,4096]
        [--at-layers 96] [--at-devices 1024] [--gap 0.01] [--time-limit 30] [--also 192x4096]

The graphs are exported by torch.onnx from transformers' GPT-2 with GPT-3's sizes (d = 12,288, 96
heads, vocabulary 50,257; 32 sequences of 2,048 tokens, float16) on the meta device: no weights.
They are kept in FOLDER beside an empty (sparse) weight file. Seconds are CPU seconds of this
process from the traced graph to the plan, reading the file not included, and of one evaluation of
that plan (`referee`). Clusters are nodes of 8
H100. `step` is the time between requests of a full stream.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.request import Budget, Request

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 32, 2048, 12_288, 96, 50_257

HEADER = (
    f"{'layers':>6} {'nodes':>6} {'devices':>7} {'CPU s':>6} {'wall s':>6} {'referee':>7} "
    f"{'step ms':>8} {'bound ms':>8} {'gap':>7}  stages"
)


def config(layers: int, **options: Any) -> Any:
    """GPT-3's sizes as a configuration of transformers' GPT-2."""
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=layers,
        n_positions=TOKENS,
        vocab_size=VOCABULARY,
        use_cache=False,
        **options,
    )


def skeleton(folder: Path, layers: int) -> Path:
    """The model file, made if it is not there."""
    path = folder / f"gpt3-{layers}.onnx"
    if path.is_file():
        return path
    import onnx_ir as ir
    import torch
    from transformers import GPT2LMHeadModel

    class Logits(torch.nn.Module):
        """The logits alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(config(layers)).eval()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, return_dict=False)[0]

    torch.set_default_dtype(torch.float16)
    with torch.device("meta"):
        model, ids = Logits(), torch.zeros((BATCH, TOKENS), dtype=torch.int64)
    program = torch.onnx.export(model, (ids,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    offset = 0
    for name, value in program.model.graph.initializers.items():
        held = value.const_value
        value.const_value = ir.ExternalTensor(
            "weights.bin",
            offset,
            held.nbytes,
            held.dtype,
            shape=held.shape,
            name=name,
            base_dir=folder,
        )
        offset += held.nbytes
    with (folder / "weights.bin").open("ab") as weights:
        weights.truncate(max(offset, weights.tell()))
    ir.save(program.model, path)
    return path


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    layers: int
    devices: int


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """By layers, then by devices, then the pairs asked for."""
    for layers in _numbers(options.layers):
        yield Case(layers, options.at_devices)
    for devices in _numbers(options.devices):
        if devices != options.at_devices:
            yield Case(options.at_layers, devices)
    for pair in filter(None, options.also.split(",")):
        layers, devices = pair.split("x")
        yield Case(int(layers), int(devices))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def cluster_of(devices: int) -> Cluster:
    """Nodes of 8."""
    return resolve_cluster(f"{devices // 8}x8xh100" if devices > 8 else f"{devices}xh100")


def row(graph: Graph, case: Case, request: Request) -> str:
    cluster = cluster_of(case.devices)
    cpu, wall = time.process_time(), time.perf_counter()
    budget = Budget.of(request)
    outcome = find_plan(graph, cluster, request, budget)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    referee = time.process_time()
    evaluate(graph, outcome.plan, cluster)
    referee = time.process_time() - referee
    certificate = outcome.plan.certificate
    assert certificate is not None
    shapes: dict[str, int] = {}
    for group in outcome.plan.groups:
        shape = " ".join(f"{axis}={size}" for axis, size in group.axes) or "one device"
        shapes[shape] = shapes.get(shape, 0) + 1
    stages = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
    return (
        f"{case.layers:6} {len(graph.nodes):6} {case.devices:7} {cpu:6.2f} {wall:6.2f} "
        f"{referee:7.2f} {certificate.cost * 1e3:8.2f} {certificate.bound * 1e3:8.2f} "
        f"{certificate.gap:7.2%}  {stages}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", default="12,24,48,96,192")
    parser.add_argument("--devices", default="8,16,32,64,128,256,512,1024,2048,4096")
    parser.add_argument("--at-layers", type=int, default=96)
    parser.add_argument("--at-devices", type=int, default=1024)
    parser.add_argument("--also", default="192x4096", help="pairs LAYERSxDEVICES")
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--time-limit", type=float, default=30.0)
    options = parser.parse_args()
    request = Request(gap=options.gap, time_limit_s=options.time_limit)
    graphs: dict[int, Graph] = {}
    print(HEADER)
    for case in cases(options):
        if case.layers not in graphs:
            graphs[case.layers] = load_onnx(skeleton(options.folder, case.layers), {}, {}).graph
        print(row(graphs[case.layers], case, request), flush=True)


if __name__ == "__main__":
    main()
