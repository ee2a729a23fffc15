"""The pictures of the documentation: ResNet-50 and a 12-layer GPT-2 on 4 devices, in a browser.

    python tests/benchmarks/screenshots.py docs/img

GPT-2 has its real size (124 M parameters, 128 tokens) and random weights; exporting it takes
about half a minute, transformers and a Chromium are needed.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import browser as headless
import torch
import transformers
from selenium.webdriver.common.keys import Keys

import partitioner
from partitioner import examples

TOKENS = 128
#: Of each model the node that is selected, if any, and the views.
SHOWN = {
    "resnet50": ("n20", ("overview", "graph", "memory")),
    "gpt2": ("", ("overview", "graph", "timeline", "traffic")),
}


def gpt2(path: Path) -> None:
    """Export GPT-2 with random weights."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(n_layer=12, use_cache=False)
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    torch.manual_seed(0)
    tokens = torch.randint(0, 50_257, (1, TOKENS))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Logits().eval(), (tokens,), input_names=["input_ids"], dynamo=True, verbose=False
        )
    assert program is not None
    program.save(path, external_data=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "resnet50.onnx").write_bytes(examples.build("resnet50").SerializeToString())
        gpt2(scratch / "gpt2.onnx")
        chrome = headless.start(scratch / "profile")
        try:
            for model, (node, views) in SHOWN.items():
                result = partitioner.compile(scratch / f"{model}.onnx", devices=4)
                page = result.report(scratch / f"{model}.html")
                headless.open_page(chrome, page)
                if node:
                    chrome.find_element("id", "search").send_keys(node, Keys.ENTER)
                for view in views:
                    tab = chrome.find_element("id", f"tab-{view}")
                    tab.click()
                    time.sleep(1)  # animations
                    target = args.folder / f"{model}-{view}.png"
                    chrome.save_screenshot(str(target))
                    print(target, target.stat().st_size, "bytes")
        finally:
            chrome.quit()


if __name__ == "__main__":
    main()
