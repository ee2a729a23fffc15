"""The pictures of the documentation: reports of five plans in a browser.

    python tests/benchmarks/screenshots.py docs/img [--only gpt2 ...]

GPT-2 has its real size (124 M parameters, 128 tokens) and random weights, GPT-3 its real size
without weights; exporting them takes minutes. transformers, Pillow and a Chromium are needed.
Pictures have a palette of 256 colours, which keeps each under 200 kB.
"""

import argparse
import io
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpt3
import torch
import transformers
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

import partitioner
from helpers.pages import browser as headless
from partitioner import examples
from partitioner.api.compiled.base import Compiled

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

TOKENS = 128
#: Seconds of each search; of a training step with that of data parallelism, to compare with.
SEARCH_S, TRAINING_S = 20.0, 90.0
UNLIKE = """\
name = "two-h100-and-two-a100"

[[devices]]
preset = "h100"
count = 2

[[devices]]
preset = "a100-80g"
count = 2

[[levels]]
name = "node"
bandwidth_bytes_per_s = 50e9
latency_s = 5e-6
"""


@dataclass(frozen=True)
class Shot:
    """A picture: a view of a report.

    Attributes:
        view: The tab.
        width: Of the window, in pixels.
        dark: Whether the page is dark.
        node: What is selected, by its name; "" for nothing.
    """

    view: str
    width: int = 1440
    dark: bool = False
    node: str = ""

    def name(self, plan: str) -> str:
        """Of the file."""
        return f"{plan}-{self.view}{'-dark' if self.dark else ''}{_narrow(self.width)}.png"


def _narrow(width: int) -> str:
    return "" if width == 1440 else f"-{width}"


#: The first screen of each plan, light and dark, wide and narrow.
FIRST = tuple(Shot("overview", width, dark) for width in (1440, 1000) for dark in (False, True))


class Logits(torch.nn.Module):
    """GPT-2 with 12 layers and random weights."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_layer=12, use_cache=False)
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


class Loss(Logits):
    """The same with its loss."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, input_ids[:, 1:].flatten())


def resnet50(folder: Path) -> Path:
    """ResNet-50 on four H100s."""
    return _report(partitioner.compile(_resnet50(folder), devices=4), folder)


def gpt2(folder: Path) -> Path:
    """GPT-2, exported, on four H100s."""
    torch.manual_seed(0)
    path, tokens = folder / "gpt2.onnx", torch.randint(0, 50_257, (1, TOKENS))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Logits().eval(), (tokens,), input_names=["input_ids"], dynamo=True, verbose=False
        )
    assert program is not None
    program.save(path, external_data=False)
    return _report(partitioner.compile(path, devices=4, time_limit_s=SEARCH_S), folder)


def gpt2_training(folder: Path) -> Path:
    """A training step of GPT-2 on four H100s, cut over a mesh of 2 x 2: 16 whole sequences."""
    tokens = torch.randint(0, 50_257, (16, 1024))
    program = partitioner.compile(
        Loss(),
        tokens,
        devices=4,
        training=True,
        parallel="dp+tp",
        mesh={"dp": 2, "tp": 2},
        time_limit_s=TRAINING_S,
    )
    return _report(program, folder)


def unlike(folder: Path) -> Path:
    """ResNet-50 on two H100s and two A100s."""
    cluster = folder / "cluster.toml"
    cluster.write_text(UNLIKE)
    return _report(partitioner.compile(_resnet50(folder), cluster=cluster), folder)


def large(folder: Path) -> Path:
    """GPT-3 175B, 32 sequences of 2,048 tokens, on 128 nodes of eight H100s."""
    path = gpt3.skeleton(folder, layers=96)
    torch.set_default_dtype(torch.float32)  # `skeleton` leaves half
    return _report(partitioner.compile(path, cluster="128x8xh100", plan_only=True), folder)


#: The plans by the names of their pictures, each with its pictures.
PLANS: dict[str, tuple[Callable[[Path], Path], Sequence[Shot]]] = {
    "resnet50": (resnet50, (*FIRST, Shot("graph", node="n20"), Shot("memory"))),
    "gpt2": (gpt2, (*FIRST, Shot("timeline"), Shot("traffic"))),
    "gpt2-training": (gpt2_training, FIRST),
    "unlike-devices": (unlike, FIRST),
    "1024-devices": (large, FIRST),
}


def _resnet50(folder: Path) -> Path:
    path = folder / "resnet50.onnx"
    path.write_bytes(examples.build("resnet50").SerializeToString())
    return path


def _report(result: Compiled, folder: Path) -> Path:
    return result.report(folder / "report.html")


def take(chrome: webdriver.Chrome, page: Path, shot: Shot, target: Path) -> None:
    """Write one picture."""
    headless.resize(chrome, shot.width, 900)
    headless.open_page(chrome, page, dark=shot.dark)
    if shot.node:
        chrome.find_element("id", "search").send_keys(shot.node, Keys.ENTER)
    chrome.find_element("id", f"tab-{shot.view}").click()
    time.sleep(1)  # animations
    picture = Image.open(io.BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    picture.quantize(256).save(target, optimize=True)
    print(target, target.stat().st_size, "bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        chrome = headless.start(Path(name) / "profile")
        try:
            for plan in args.only:
                make, shots = PLANS[plan]
                folder = Path(name) / plan
                folder.mkdir()
                page = make(folder)
                print(page, page.stat().st_size, "bytes", flush=True)
                for shot in shots:
                    take(chrome, page, shot, args.folder / shot.name(plan))
        finally:
            chrome.quit()


if __name__ == "__main__":
    main()
