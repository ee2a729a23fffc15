import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import partitioner
from helpers.plans.cost_cases import INNER, OUTER, SLOW, TWO_LEVELS
from partitioner.cost_model.cluster import presets
from partitioner.cost_model.cluster.resolve import gpu_fingerprint, local_cluster, resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel, parse_bytes
from partitioner.cost_model.errors import ClusterOptionError, CostError
from partitioner.cost_model.executors import ONNX_RUNTIME
from partitioner.ir.program import CommKind

ROOT = Path(partitioner.__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "reference" / "cluster.md"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("10GB", 10**10),
        ("512MiB", 512 * 1024**2),
        ("1.5 kB", 1500),
        ("2KB", 2000),
        ("77", 77),
        (123, 123),
        (1e3, 1000),
        ("1TiB", 1024**4),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8G", "GiB", "-1GB", "0", "8 Gi B", "nan", "1e400GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(CostError, match=re.escape(f"size {text!r} is not like '8GiB'")):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("spec", "devices", "count", "name", "levels"),
    [
        ("4xh100", None, 4, "h100", [("nvlink", 4)]),
        ("4xH100", 4, 4, "h100", [("nvlink", 4)]),
        ("8xa100-80g", None, 8, "a100-80g", [("nvlink", 8)]),
        ("2x4xh200", None, 8, "h200", [("nvlink", 4), ("network", 8)]),
        ("2x1xb200", None, 2, "b200", [("network", 2)]),
        ("a100", None, 1, "a100-80g", [("nvlink", 1)]),
        ("l4", 3, 3, "l4", [("pcie4", 3)]),
        ("4xcpu", None, 4, "cpu", [("gloo", 4)]),
        ("ideal", 2, 2, "ideal", [("free", 2)]),
        (None, 4, 4, "h100", [("nvlink", 4)]),
    ],
)
def test_names(
    spec: str | None, devices: int | None, count: int, name: str, levels: list[tuple[str, int]]
) -> None:
    cluster = resolve_cluster(spec, devices)
    assert [device.name for device in cluster.devices] == [name] * count
    assert [(level.name, level.size) for level in cluster.levels] == levels


@pytest.mark.parametrize(
    ("spec", "devices", "message"),
    [
        (None, None, "neither a number of devices nor a cluster"),
        (None, 0, "0 devices were asked for"),
        ("4xh100", 2, "cluster '4xh100' has 4 devices, 2 were asked for"),
        ("2x4xh100", 4, "has 8 devices, 4 were asked for"),
        ("4xtpu", None, "no device 'tpu'; there are a100, "),
        ("h100x4x", None, "no device 'h100x4x'"),
        ("4 h100", None, "is not like '4xh100'"),
        ("0xh100", None, "has no devices"),
        ("rtx-3090+rtx-3060", 3, "has 2 devices, 3 were asked for"),
        ("rtx-3090+", None, "is not like '4xh100'"),
        ("2x1xh100+l4", None, "are joined to others by a TOML file"),
        ("h100+local", None, "are joined to others by a TOML file"),
        ("absent.toml", None, "cluster file absent.toml: .*No such file"),
    ],
)
def test_names_refused(spec: str | None, devices: int | None, message: str) -> None:
    with pytest.raises(CostError, match=message):
        resolve_cluster(spec, devices)


def test_unlike_devices_of_one_node_share_the_slowest_link() -> None:
    cluster = resolve_cluster("RTX-5090+2xrtx-4060-ti-16g", 3)
    names = ["rtx-5090", "rtx-4060-ti-16g", "rtx-4060-ti-16g"]
    assert [device.name for device in cluster.devices] == names
    assert [(level.name, level.size) for level in cluster.levels] == [("pcie4-x8", 3)]
    joined = resolve_cluster("h100 + l4")
    assert joined.name == "h100+l4"
    assert joined.levels[0].bandwidth_bytes_per_s == pytest.approx(0.78 * 31.5e9)
    assert joined.levels[0].table is None  # no measurement is of such a pair


#: Figures of an RTX 3090, but for its memory.
OF_A_CARD = "bandwidth=936GB/s, float32=35.6TFLOPS, float16=71TFLOPS, link=31.5GB/s"


def test_a_card_is_described_by_its_figures(tmp_path: Path) -> None:
    card = f"(name=mine, memory=24GB, {OF_A_CARD})"
    cluster, known = resolve_cluster(f"2x4x{card}"), resolve_cluster("2x4xrtx-3090")
    assert cluster.name == "2x4xmine"
    rates = {k: known.devices[0].flops_per_s(k) for k in ("float32", "float16", "bfloat16")}
    device = replace(known.devices[0], name="mine", peak_flops_per_s=rates)
    assert cluster.devices == (device,) * 8
    inner, outer = known.levels
    assert cluster.levels == (replace(inner, name="link"), outer)
    lab = f'[[devices]]\ncount = 8\npreset = "{card}"\n[[levels]]\nname = "link"\n'
    (tmp_path / "lab.toml").write_text(f"{lab}bandwidth_bytes_per_s = 1e9\nlatency_s = 1e-6\n")
    assert resolve_cluster(tmp_path / "lab.toml").devices == cluster.devices
    assert Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster
    assert resolve_cluster(card, 3).name == "3xmine"


def test_described_cards_stand_beside_others() -> None:
    cluster = resolve_cluster(f"rtx-3070+2x(memory=12GiB,{OF_A_CARD})")
    assert cluster.name == "rtx-3070+2xcard"
    assert [device.memory_bytes for device in cluster.devices] == [8 * 10**9, *[12 << 30] * 2]
    network = resolve_cluster(f"2x1x(memory=12GiB,{OF_A_CARD},network=2GB/s)").levels[0]
    assert network.bandwidth_bytes_per_s == pytest.approx(0.78 * 2e9)


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ("24GB", r"'24GB' is no figure; a card is like \(memory=24GB,bandwidth=936GB/s,"),
        (f"mem=24GB,{OF_A_CARD}", "'mem' is no figure; did you mean 'memory'"),
        (f"memory=24,{OF_A_CARD}", "memory is '24', not like '24GB'"),
        (f"memory=24GB/s,{OF_A_CARD}", "memory is '24GB/s', not like '24GB'"),
        (f"memory=24GB,memory=8GB,{OF_A_CARD}", "gives memory twice"),
        ("memory=24GB,link=1GB/s", "gives no bandwidth, no float32, no float16; a card"),
        (f"memory=1GB,{OF_A_CARD}".replace("936GB", "936Gb"), "bandwidth is '936Gb/s', not like"),
        (f"memory=1GB,{OF_A_CARD}".replace("936GB/s", "936GB"), "bandwidth is '936GB', not like"),
        (f"memory=1GB,{OF_A_CARD}".replace("71TFLOPS", "71"), "float16 is '71', not like '71TFL"),
        (f"memory=1GB,{OF_A_CARD}".replace("71T", "0T"), "float16 is '0TFLOPS', not like"),
        (f"memory=1GB,{OF_A_CARD},network=3TFLOPS", "network is '3TFLOPS', not like '31.5GB/s'"),
        (f"name=a b,memory=1GB,{OF_A_CARD}", "name 'a b' is not of letters"),
    ],
)
def test_figures_of_cards_have_units(figures: str, sentence: str) -> None:
    with pytest.raises(ClusterOptionError, match=sentence) as caught:
        resolve_cluster(f"4x({figures})")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_survives_json(name: str) -> None:
    cluster = resolve_cluster(f"2x2x{name}")
    text = json.dumps(cluster.to_data(), allow_nan=False)
    assert Cluster.from_data(json.loads(text)) == cluster
    assert len({cluster, Cluster.from_data(json.loads(text))}) == 1


@pytest.mark.parametrize("name", sorted(presets.accelerators()))
def test_every_preset_has_a_source_and_is_derated(name: str) -> None:
    row, device = presets.accelerators()[name], presets.device(name)
    assert len(row.source) > 20
    assert device.flops_per_s("float32") == pytest.approx(row.peak_tflops["float32"] * 0.8e12)
    assert device.flops_per_s("float16") >= device.flops_per_s("float32")
    kernels = device.kernels
    share = 0.8 if kernels is None else kernels.compute_shares["float16"]
    memory_share = 0.9 if kernels is None else kernels.memory_share
    rate = row.peak_tflops.get("float16", row.peak_tflops["float32"])
    assert device.flops_per_s("float16") == pytest.approx(rate * share * 1e12)
    assert device.memory_bytes_per_s == pytest.approx(row.memory_gb_per_s * memory_share * 1e9)
    assert 0.4 < share < 1
    assert 0.7 < memory_share < 1


def test_types_without_a_rate_run_as_float32() -> None:
    assert SLOW.flops_per_s("float16") == 4e9
    assert SLOW.flops_per_s("int64") == SLOW.flops_per_s("bfloat16") == 1e9


def test_level_is_the_outermost_spanned() -> None:
    assert TWO_LEVELS.level((0, 1)) == TWO_LEVELS.level((3,)) == INNER
    assert TWO_LEVELS.level((1, 2)) == TWO_LEVELS.level(range(4)) == OUTER
    with pytest.raises(CostError, match=r"devices \(0, 9\) are not all of cluster 'two' \(4\)"):
        TWO_LEVELS.level((0, 9))


def test_memory_override_and_uniformity() -> None:
    small = TWO_LEVELS.with_memory(7)
    assert [device.memory_bytes for device in small.devices] == [7] * 4
    assert small.levels == TWO_LEVELS.levels
    assert not TWO_LEVELS.is_uniform
    assert resolve_cluster("4xh100").is_uniform


def test_the_documented_file_loads(tmp_path: Path) -> None:
    match = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    file = tmp_path / "lab.toml"
    file.write_text(match[1], encoding="utf-8")
    cluster = resolve_cluster(file)
    assert resolve_cluster(str(file), 4) == cluster
    assert [device.name for device in cluster.devices] == ["a100-40g"] * 2 + ["card"] * 2
    assert cluster.devices[0].memory_bytes == 36 * 1024**3
    assert cluster.devices[0].flops_per_s("float16") == pytest.approx(257e12)
    assert cluster.devices[3].flops_per_s("float16") == 120e12
    assert cluster.level((0, 1)).name == cluster.level((2, 3)).name == "bridge"
    assert cluster.level((1, 2)) == LinkLevel("pcie", 4, 20e9, 2e-6, 10e9)
    with pytest.raises(CostError, match=r"lab.toml' has 4 devices, 2 were asked for"):
        resolve_cluster(file, 2)


LEVEL = '\n[[levels]]\nname="l"\nbandwidth_bytes_per_s=1e9\nlatency_s=0\n'
DEVICE = '[[devices]]\npreset="h100"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cluster file .*bad.toml: Expected"),
        ("a = " + "[" * 2000, "cluster file .*bad.toml: .*recursion"),
        (LEVEL, r"it needs at least one \[\[devices\]\] table"),
        ("devices = 3" + LEVEL, r"it needs at least one \[\[devices\]\] table"),
        (DEVICE, r"it needs at least one \[\[levels\]\] table"),
        ('[[devices]]\npreset="h101"\n' + LEVEL, "no preset 'h101'; there are a100"),
        (
            '[[devices]]\nname="a"\n' + LEVEL,
            "device 'a' has no 'launch_s'; a device needs",
        ),
        (
            DEVICE + LEVEL + "[[levels]]\nlatency_s=0\n",
            "level 2 has no '.*'; a level needs bandwidth_bytes_per_s, latency_s, name$",
        ),
        (DEVICE + LEVEL.replace('name="l"', ""), "level 1 has no 'name'; a level needs"),
        (
            DEVICE + LEVEL.replace("bandwidth", "bandwith"),
            r"'l' has no 'bandwidth_bytes_per_s' \(it has an unknown key 'bandwith_bytes_per_s'",
        ),
        (
            DEVICE + "speed=3\n" + LEVEL,
            "device 'h100' has an unknown key 'speed'; known: border_s, count",
        ),
        (
            DEVICE + 'launches="python"\n' + LEVEL,
            "launches is 'python', not one of native, eager, autograd, graphs",
        ),
        (
            DEVICE + 'launches="eager"\nlaunch_s=0\n' + LEVEL,
            "launches = 'eager' and launch_s say the same thing: give one of them",
        ),
        (DEVICE + 'memory_bytes="8G"\n' + LEVEL, "size '8G' is not like"),
        (
            DEVICE + "launch_s=-1.0\n" + LEVEL,
            "device 'h100': launch_s is -1.0; it must be at least 0",
        ),
        (
            DEVICE + "border_s=inf\n" + LEVEL,
            "border_s is inf; it must be at least 0, and not infinite",
        ),
        (DEVICE + 'launch_s="soon"\n' + LEVEL, "launch_s of device 'h100' is 'soon', not a number"),
        (DEVICE + "count=0\n" + LEVEL, "count is 0, not a whole number of at least 1"),
        (DEVICE + 'count="2"\n' + LEVEL, "count is '2', not a whole number"),
        (DEVICE + "peak_flops_per_s=3\n" + LEVEL, "peak_flops_per_s is 3, not rates by type"),
        (DEVICE + LEVEL + "size=2\n", "outermost level 'l' has size 2, the cluster has 1 devices"),
        (DEVICE + LEVEL + 'size="x"\n', "level 'l': size is 'x', not a whole number"),
        (DEVICE + LEVEL + "width=2\n", "level 'l' has an unknown key 'width'"),
        (DEVICE + LEVEL + "overlap=1.5\n", "level 'l': overlap is 1.5, not within 0 and 1"),
        (DEVICE + LEVEL + "overlaps=0.5\n", "level 'l': overlaps is 0.5, not shares by kind"),
        (
            DEVICE + LEVEL + "overlaps={all_reduce=-1}\n",
            "level 'l': overlap is -1.0, not within 0 and 1",
        ),
        (
            DEVICE + LEVEL + "overlaps={all_to_all=0.5}\n",
            "has a kind 'all_to_all', not one of send, all_gather, reduce_scatter, all_reduce",
        ),
        (DEVICE + "count=4\n" + LEVEL + "size=3\n" + LEVEL, "is not made of groups of 3"),
    ],
)
def test_files_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CostError, match=message):
        resolve_cluster(file)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"float16": 1.0}, "gives no 'float32'"),
        ({"float32": 1.0, "half": 1.0}, "'half' is not an element type"),
        ({"float32": 0.0}, "peak_flops_per_s of float32 is 0.0"),
        ({"float32": float("nan")}, "peak_flops_per_s of float32 is nan"),
    ],
)
def test_devices_refused(rates: dict[str, float], message: str) -> None:
    with pytest.raises(CostError, match=message):
        DeviceSpec("d", rates, 1.0, 1, 0.0)


def test_a_cluster_needs_devices_and_levels() -> None:
    with pytest.raises(CostError, match="needs at least one device and one level"):
        Cluster("empty", (), (INNER,))


class Cuda:
    """Stands for torch.cuda."""

    def __init__(self, names: list[str], peers: bool = True) -> None:
        self.names, self.peers = names, peers

    def is_available(self) -> bool:
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.names[index], total_memory=79 * 10**9 + index)

    def can_device_access_peer(self, a: int, b: int) -> bool:
        return self.peers and a != b


def test_local_reads_the_gpus() -> None:
    cluster = local_cluster(2, Cuda(["NVIDIA H100 80GB HBM3"] * 3))
    assert len(cluster) == 2
    assert cluster.devices[1].memory_bytes == 79 * 10**9 + 1
    (known,) = {spec.profile for spec in cluster.devices}
    assert known is not None
    assert known.device == gpu_fingerprint("NVIDIA H100 80GB HBM3")
    assert known.processes == 2
    assert cluster.devices[0].flops_per_s("float32") == presets.device("h100").flops_per_s(
        "float32"
    )
    assert cluster.levels[0].name == "nvlink"
    assert len(local_cluster(None, Cuda(["NVIDIA H200"] * 3))) == 3


def test_local_without_peer_access_is_pcie() -> None:
    assert local_cluster(2, Cuda(["NVIDIA L4"] * 2, peers=False)).levels[0].name == "pcie"
    assert local_cluster(2, Cuda(["NVIDIA L4", "NVIDIA H200"])).levels[0].name == "pcie"


@pytest.mark.parametrize("spec", [None, "2xh100", "lab.toml"])
def test_a_profile_is_of_this_machine_alone(spec: str | None, tmp_path: Path) -> None:
    with pytest.raises(CostError, match="a profile is of cluster 'local', the cluster is"):
        resolve_cluster(spec, 2, profile=tmp_path / "profile.sqlite")


def test_local_refuses() -> None:
    with pytest.raises(CostError, match="needs 4 GPUs, this machine has 1"):
        local_cluster(4, Cuda(["NVIDIA H200"]))
    with pytest.raises(CostError, match="no figures are known for GPU 'GeForce 256'"):
        local_cluster(None, Cuda(["GeForce 256"]))
    for other in ("NVIDIA L40", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 3060 Laptop GPU"):
        with pytest.raises(CostError, match=f"no figures are known for GPU '{other}'"):
            local_cluster(None, Cuda([other]))


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("NVIDIA GeForce RTX 5070", "rtx-5070"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
    ],
)
def test_a_gpu_is_the_preset_of_its_whole_name(title: str, name: str) -> None:
    (found,) = local_cluster(1, Cuda([title])).devices
    assert found.name == name
    assert found.peak_flops_per_s == presets.device(name).peak_flops_per_s


CARDS = """
[[devices]]
count = 2
{device}
[[levels]]
name = "node"
size = 2
bandwidth_bytes_per_s = 1e9
latency_s = 1e-6
[[levels]]
name = "network"
bandwidth_bytes_per_s = 1e9
latency_s = 1e-5
[[devices]]
count = 2
preset = "cpu"
"""
FIGURES = """
name = "card"
memory_bytes = "24GB"
memory_bytes_per_s = 1e12
launch_s = 4e-6
peak_flops_per_s = { float32 = 1e12 }
"""


@pytest.mark.parametrize(
    ("device", "launch_us"),
    [
        ('preset = "l4"', 4),
        ('preset = "l4"\nlaunches = "native"', 4),
        ('preset = "l4"\nlaunches = "eager"', 18),
        ('preset = "l4"\nlaunches = "autograd"', 103.9 / 3),
        ('preset = "l4"\nlaunches = "graphs"', 1.3),
        (FIGURES.replace("launch_s = 4e-6", 'launches = "graphs"'), 1.3),
        ('preset = "l4"\nlaunch_s = 7e-6', 7),
    ],
)
def test_a_file_says_what_submits_kernels(tmp_path: Path, device: str, launch_us: float) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CARDS.format(device=device))
    cluster = resolve_cluster(path)
    assert cluster.devices[0].launch_s == pytest.approx(launch_us * 1e-6)
    assert Cluster.from_data(cluster.to_data()) == cluster


@pytest.mark.parametrize(
    ("device", "launches"),
    [
        ('preset = "l4"', "native"),
        ('preset = "l4"\nlaunches = "eager"', "eager"),
        ('preset = "l4"\nlaunches = "graphs"', "graphs"),
        ('preset = "l4"\nlaunch_s = 7e-6', None),
    ],
)
def test_what_a_file_says_of_launches_goes_before_the_executor(
    tmp_path: Path, device: str, launches: str | None
) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CARDS.format(device=device))
    given = resolve_cluster(path)
    spec = given.run_by(ONNX_RUNTIME).devices[0]
    assert spec.launches == launches
    assert spec.launch_s == given.devices[0].launch_s


def test_a_level_tells_kinds_apart_that_pass_beside_compute(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    shares = "overlap = 0.5\noverlaps = { all_gather = 0.8, send = 0.9 }\n"
    cards = CARDS.format(device='preset = "l4"')
    path.write_text(cards.replace('name = "node"\n', f'name = "node"\n{shares}'))
    cluster = resolve_cluster(path)
    assert Cluster.from_data(cluster.to_data()) == cluster
    inner, outer = cluster.levels
    hidden = {kind: inner.hidden_share(kind, 2) for kind in CommKind}
    assert hidden[CommKind.ALL_GATHER] == 0.8
    assert hidden[CommKind.SEND] == hidden[CommKind.ALL_TO_ALL] == 0.9
    assert hidden[CommKind.ALL_REDUCE] == hidden[CommKind.REDUCE_SCATTER] == 0.5
    assert {outer.hidden_share(kind, 2) for kind in CommKind} == {0.0}
    assert "overlaps" not in cluster.to_data()["levels"][1]


def test_launches_are_asked_for_over_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CARDS.format(device='preset = "l4"\nlaunches = "eager"'))
    cluster = resolve_cluster(path)
    with pytest.raises(CostError, match="launches 'graphs' is of GPUs, and device 'cpu' is none"):
        cluster.with_launches("graphs")
    gpus = cluster.first(2).with_launches("graphs")
    assert [(spec.launches, spec.launch_s) for spec in gpus.devices] == [("graphs", 1.3e-6)] * 2
    with pytest.raises(CostError, match="launches is 'python', not one of native"):
        gpus.with_launches("python")


@pytest.mark.parametrize(
    ("device", "is_gpu"),
    [
        ('preset = "l4"', True),
        ('preset = "l4"\nname = "mine"\nis_gpu = false', False),
        (FIGURES, False),
        (f"{FIGURES}is_gpu = true", True),
    ],
)
def test_a_file_says_which_devices_are_gpus(tmp_path: Path, device: str, is_gpu: bool) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CARDS.format(device=device))
    cluster = resolve_cluster(path)
    assert [one.is_gpu for one in cluster.devices] == [is_gpu, is_gpu, False, False]
    assert Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster


def test_whether_a_device_is_a_gpu_is_true_or_false(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CARDS.format(device=f"{FIGURES}is_gpu = 1"))
    with pytest.raises(CostError, match="device 'card': is_gpu is 1, not true or false"):
        resolve_cluster(path)


def test_presets_of_graphics_cards_are_gpus() -> None:
    assert all(presets.device(name).is_gpu for name in presets.accelerators())
    assert not any(presets.device(name).is_gpu for name in ("cpu", "ideal"))


@pytest.mark.parametrize(("more", "processes"), [("", 2), (", processes = 1", 1)])
def test_a_profile_is_of_the_processes_of_a_machine(
    tmp_path: Path, more: str, processes: int
) -> None:
    """Those of the innermost level, if a file does not say it."""
    path = tmp_path / "lab.toml"
    profile = f'profile = {{ file = "p.sqlite", device = "core", threads = 1{more} }}'
    path.write_text(CARDS.format(device=f'preset = "cpu"\n{profile}'))
    cluster = resolve_cluster(path)
    first, *_ = cluster.devices
    assert first.profile is not None
    assert first.profile.processes == processes
    assert Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster
