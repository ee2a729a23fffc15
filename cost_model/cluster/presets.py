"""Accelerators by name: datasheet figures with their sources, and the shares that are reached.

A row gives dense peak rates (without structured sparsity) as the maker prints them. `device` and
`levels` derate them: by the measurements in `published`, where the row names a table there, and
else by the shares below. float32 is the rate without TF32: outputs are compared at float32
accuracy, and it is PyTorch's default for matmul.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.published import KERNELS
from partitioner.cost_model.cluster.topology import DeviceSpec, LinkLevel

_TERA = 1e12
_GIGA = 1e9
_MICRO_S = 1e-6

#: Share of peak FLOP/s that large matrix products reach. 780 of 989 bf16 TFLOP/s on an H100 SXM:
#: https://gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405
COMPUTE_SHARE = 0.8
#: Share of memory bandwidth that streaming kernels reach, for 100 MB and more on an A100:
#: https://github.com/calculon-ai/calculon/blob/main/systems/a100_80g.json (mem1)
MEMORY_SHARE = 0.9
#: Share of link bandwidth that ring collectives reach. NCCL caps A100's 300 GB/s at 235:
#: https://github.com/NVIDIA/nccl/blob/01afd20a77b5/src/graph/tuning.cc (compCap80)
LINK_SHARE = 0.78
#: Time between launches that one host thread sustains on a CUDA stream; 4 to 6 us measured:
#: https://susun-blog.com/blog/pegainfer-3-cuda-graph
GPU_LAUNCH_S = 4 * _MICRO_S
#: Seconds a hop of the low-latency protocol: `hwLat`, rows NVLINK, PCI, NET, column Ring LL:
#: https://github.com/NVIDIA/nccl/blob/01afd20a77b5/src/graph/tuning.cc
NVLINK_S, PCIE_S, NETWORK_S = 0.47 * _MICRO_S, 1.0 * _MICRO_S, 2.7 * _MICRO_S
#: Seconds a hop of AMD's links (hwLat, NVLINK, Ring LL):
#: https://github.com/ROCm/rccl/blob/0023b9b0814b/src/graph/tuning.cc
XGMI_S = 2.3 * _MICRO_S

#: Share of gradient and parameter communication that a GPU's compute hides (`LinkLevel.overlap`):
#: assumed, not measured here; the low end of the 60 to 90 % reported for eight H100:
#: https://factryze.ai/scale-atlas/collectives/compute-comm-overlap
GPU_OVERLAP = 0.6

#: Cores of the preset "cpu".
_CPU_CORES = 4

#: Preset of ``cluster=None``.
REFERENCE = "h100"


@dataclass(frozen=True)
class Preset:
    """An accelerator."""

    tflops: Mapping[str, float]  #: Peak 1e12 FLOP/s by element type.
    memory_gb_per_s: float  #: Peak bandwidth, 1e9 bytes/s.
    memory_gb: float  #: Capacity, 1e9 bytes.
    link: str  #: Name of the links inside a node.
    link_gb_per_s: float  #: Of one device to the others of its node, one direction, 1e9 bytes/s.
    link_s: float  #: Latency of a hop inside a node.
    network_gb_per_s: float  #: Of one device to other nodes, one direction, 1e9 bytes/s.
    source: str  #: Document that gives the figures.
    cuda_names: tuple[str, ...] = ()  #: Substrings of the device name that the driver reports.
    table: str | None = None  #: Name of its measurements in `published`.


def _rates(
    float64: float, float32: float, half: float, byte: float | None = None, *, eight: bool = False
) -> Mapping[str, float]:
    """Rates by type: `half` for float16 and bfloat16, `byte` for int8 and, if `eight`, float8."""
    rates = {"float64": float64, "float32": float32, "float16": half, "bfloat16": half}
    if byte is not None:
        rates |= {"int8": byte, "uint8": byte}
    if byte is not None and eight:
        rates |= {"float8e4m3fn": byte, "float8e5m2": byte}
    return rates


_HOPPER = _rates(67, 67, 989.4, 1978.9, eight=True)
_AMPERE = _rates(19.5, 19.5, 312, 624)
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}

PRESETS: Mapping[str, Preset] = {
    "h100": Preset(
        _HOPPER, 3350, 80, "nvlink", 450, NVLINK_S, 50,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM5); DGX H100: one 400 Gb/s port a GPU",
        ("H100 80GB HBM3",),
        "h100",
    ),
    "h200": Preset(
        _HOPPER, 4800, 141, "nvlink", 450, NVLINK_S, 50,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM); DGX H200: one 400 Gb/s port a GPU",
        ("H200",),
        "h200",
    ),
    "b200": Preset(
        _rates(40, 80, 2250, 4500, eight=True), 8000, 180, "nvlink", 900, NVLINK_S, 50,
        "NVIDIA Blackwell architecture technical brief (HGX B200, 1000 W); 400 Gb/s port a GPU",
        ("B200",),
        "b200",
    ),
    "a100-40g": Preset(
        _AMPERE, 1555, 40, "nvlink", 300, NVLINK_S, 25,
        "NVIDIA A100 Tensor Core GPU datasheet (SXM4 40GB); DGX A100: one 200 Gb/s port a GPU",
        ("A100-SXM4-40GB",),
        "a100",
    ),
    "a100-80g": Preset(
        _AMPERE, 2039, 80, "nvlink", 300, NVLINK_S, 25,
        "NVIDIA A100 Tensor Core GPU datasheet (SXM4 80GB); DGX A100: one 200 Gb/s port a GPU",
        ("A100-SXM4-80GB",),
        "a100",
    ),
    "l4": Preset(
        _rates(0.49, 30.3, 121, 242.5, eight=True), 300, 24, "pcie4", 31.5, PCIE_S, 3.125,
        "NVIDIA L4 datasheet (halves of the sparse rates); PCIe 4.0 x16; 100 Gb/s for four GPUs",
        ("NVIDIA L4",),
    ),
    "v100": Preset(
        _VOLTA, 900, 32, "nvlink", 150, NVLINK_S, 6.25,
        "NVIDIA V100 datasheet (SXM2 32GB); DGX-1: four 100 Gb/s ports for eight GPUs",
        ("V100-SXM2-32GB",),
    ),
    "v100-16g": Preset(
        _VOLTA, 900, 16, "nvlink", 150, NVLINK_S, 6.25,
        "NVIDIA V100 datasheet (SXM2 16GB); DGX-1: four 100 Gb/s ports for eight GPUs",
        ("V100-SXM2-16GB",),
    ),
    "mi300x": Preset(
        _rates(163.4, 163.4, 1307.4, 2614.9, eight=True), 5300, 192, "xgmi", 448, XGMI_S, 50,
        "AMD Instinct MI300X data sheet; seven Infinity Fabric links of 64 GB/s a direction; "
        "one 400 Gb/s port a GPU",
        ("MI300X",),
        "mi300x",
    ),
}  # fmt: skip

#: Other names of rows.
ALIASES: Mapping[str, str] = {"a100": "a100-80g", "v100-32g": "v100"}


def device(name: str) -> DeviceSpec:
    """The device of a preset, of "cpu" or of "ideal", at the rates that it reaches."""
    if name in _SPECIAL:
        return _SPECIAL[name][0]
    row = PRESETS[name]
    kernels = KERNELS[row.table] if row.table is not None else None
    shares = kernels.compute_shares if kernels is not None else {}
    memory_share = kernels.memory_share if kernels is not None else MEMORY_SHARE
    return DeviceSpec(
        name,
        {
            dtype: tflops * _TERA * shares.get(dtype, COMPUTE_SHARE)
            for dtype, tflops in row.tflops.items()
        },
        row.memory_gb_per_s * _GIGA * memory_share,
        round(row.memory_gb * _GIGA),
        GPU_LAUNCH_S,
        table=row.table,
        is_gpu=True,
    )


def levels(name: str, nodes: int, per_node: int) -> tuple[LinkLevel, ...]:
    """Links of `nodes` nodes of `per_node` devices, innermost first, at the rates they reach."""
    if name in _SPECIAL:
        inner, outer = _SPECIAL[name][1:]
    else:
        row = PRESETS[name]
        inner, outer = (
            LinkLevel(
                link, 1, rate * _GIGA * LINK_SHARE, latency_s, overlap=GPU_OVERLAP, table=table
            )
            for link, rate, latency_s, table in (
                (row.link, row.link_gb_per_s, row.link_s, row.table),
                ("network", row.network_gb_per_s, NETWORK_S, row.table and f"{row.table}-network"),
            )
        )
    inside = (replace(inner, size=per_node),) if per_node > 1 or nodes == 1 else ()
    return (*inside, replace(outer, size=nodes * per_node)) if nodes > 1 else inside


def processes(count: int, threads: int, memory_bytes: int) -> DeviceSpec:
    """A process, of `count` on a machine's cores, at the rates of "cpu" for its threads."""
    cpu, share = _SPECIAL["cpu"][0], threads / _CPU_CORES
    return replace(
        cpu,
        name=f"process ({threads} thread{'s' if threads > 1 else ''})",
        peak_flops_per_s={kind: rate * share for kind, rate in cpu.peak_flops_per_s.items()},
        memory_bytes_per_s=cpu.memory_bytes_per_s * share,
        memory_bytes=memory_bytes // count,
    )


def names() -> tuple[str, ...]:
    """Every name that `device` takes, and the aliases, sorted."""
    return tuple(sorted((*PRESETS, *ALIASES, *_SPECIAL)))


def _cpu() -> DeviceSpec:
    """Four of the forty cores of a server CPU, with their share of its memory channels.

    Intel Xeon Platinum 8380 (ark.intel.com): 2.3 GHz, two AVX-512 units a core, which is
    2 x 16 multiply-adds = 64 float32 FLOP a cycle; eight channels of DDR4-3200, 204.8 GB/s.
    CPU kernels compute float16 and bfloat16 through float32.
    """
    all_cores, hz, flops_per_cycle = 40, 2.3e9, 64
    float32 = _CPU_CORES * hz * flops_per_cycle * COMPUTE_SHARE
    bandwidth = 204.8 * _GIGA * _CPU_CORES / all_cores * MEMORY_SHARE
    launch_s = 5 * _MICRO_S  # one ONNX Runtime call, measured on two cores of one
    return DeviceSpec(
        "cpu", {"float32": float32, "float64": float32 / 2}, bandwidth, 16 * 10**9, launch_s
    )


#: Gloo between processes of one machine, measured on two cores of a virtual machine: send 4 KB
#: 0.03 ms and 4 MB 0.40 ms; all-reduce 16 MB 8.2 ms, which moves 16 MB a rank. A reduce-scatter
#: takes as long as an all-reduce, which moves twice as much.
_GLOO = LinkLevel("gloo", 1, 4e6 / 0.37e-3, 30 * _MICRO_S, 16e6 / 8.2e-3, 8e6 / 8.2e-3)
#: 10 Gb/s Ethernet; 50 us a message over TCP is assumed.
_ETHERNET = LinkLevel("ethernet", 1, 1.25e9, 50 * _MICRO_S)

#: Free links and launches, memory without limits; 1 TFLOP/s, so that every split pays.
_IDEAL = DeviceSpec("ideal", {"float32": 1e12}, float("inf"), 10**15, 0.0)
_FREE = LinkLevel("free", 1, float("inf"), 0.0)

_SPECIAL: Mapping[str, tuple[DeviceSpec, LinkLevel, LinkLevel]] = {
    "cpu": (_cpu(), _GLOO, _ETHERNET),
    "ideal": (_IDEAL, _FREE, _FREE),
}
