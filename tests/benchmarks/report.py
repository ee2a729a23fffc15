"""Size and open time of a report page in headless Chromium.

    python tests/benchmarks/report.py [FILE.html] [--layers 357] [--repeats 3]

Without a file a synthetic plan is shown: 14 nodes a layer, two timelines. A view's time is from the
click on its tab to the next frame after it has drawn.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.pages import browser as headless
from helpers.pages import synthetic
from partitioner.report.page.page import render

VIEW_MS = """
const [tab, done] = arguments;
const start = performance.now();
document.getElementById(`tab-${tab}`).click();
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=357)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "report.html"
        if args.file is None:
            data = synthetic.report(layers=args.layers, devices=8, requests=(1, 2))
            path.write_text(render(data), "utf-8")
            events = sum(len(line["ref"]) for line in data["timelines"])
            print(f"{len(data['nodes'])} nodes, {events} events")
        measure(path.resolve(), args.repeats, Path(folder) / "profile")


def measure(path: Path, repeats: int, profile: Path) -> None:
    print(f"{path.stat().st_size / 2**20:.2f} MiB")
    chromium = headless.start(profile)
    try:
        for _ in range(repeats):
            print(f"ready after {headless.open_page(chromium, path):.0f} ms")
        for tab in ("timeline", "memory", "traffic", "nodes"):
            if chromium.execute_script("return document.body.dataset.kind") == "plan":
                print(f"{tab}: {chromium.execute_async_script(VIEW_MS, tab):.0f} ms")
    finally:
        chromium.quit()


if __name__ == "__main__":
    main()
