"""What the site has beside its pages, made when it is built: a live report, screenshots, notebooks.

- `live/report.html`: the report of ResNet-50 on four devices, which the home page embeds.
- `img/*.png`: the screenshots of the report, taken anew in place of those in the repository, if
  Chromium, selenium, Pillow and transformers are there. `DOCS_SCREENSHOTS=0` keeps those in the
  repository; `mkdocs serve` keeps them too.
- `notebooks/NAME.md`: a page for each notebook, with the outputs that it holds.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import partitioner
from partitioner import examples

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("mkdocs.hooks.site")
#: Files of the site by their path in it.
MADE: dict[str, bytes] = {}


def on_startup(command: str, **_: object) -> None:
    """Make what takes seconds, once for all builds of a `serve`."""
    LOG.info("Planning a Llama for the live report")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = examples.build("llama", hidden=512, seq=2048)
        result = partitioner.compile(model, devices=4, objective="latency")
        page = result.report(folder / "report.html")
        MADE["live/report.html"] = Path(page).read_bytes()
        if command == "build" and os.environ.get("DOCS_SCREENSHOTS") != "0":
            _screenshots(folder / "img")


def _screenshots(folder: Path) -> None:
    missing = [name for name in ("selenium", "transformers", "PIL") if find_spec(name) is None]
    if not shutil.which("chromium"):
        missing.append("chromium")
    if missing:
        LOG.info("Keeping the screenshots of the repository: no %s here", ", ".join(missing))
        return
    LOG.info("Taking screenshots")
    script = ROOT / "tests" / "benchmarks" / "screenshots.py"
    subprocess.run([sys.executable, script, folder], check=True, cwd=ROOT, stdout=sys.stderr)
    for path in folder.glob("*.png"):
        MADE[f"img/{path.name}"] = path.read_bytes()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Without the repository's address (`REPO_URL`) there are no links to edit a page."""
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put what was made beside the files of the repository, and a page for each notebook."""
    for uri, content in MADE.items():
        old = files.get_file_from_path(uri)
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, uri, content=content))
    for path in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, uri, content=page_of(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Break the long lines of errors, which are sentences; tables of outputs keep theirs."""
    return re.sub(
        r'^```text title="Output"\n(?=partition[ :])',
        '```{ .text .wrapped title="Output" }\n',
        markdown,
        flags=re.MULTILINE,
    )


def page_of(path: Path) -> str:
    """A notebook as the text of a page: its texts, its code, and the outputs that it holds."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(_text_of(output) for output in cell["outputs"])
        if printed:
            parts.append(f'```text title="Output"\n{printed.rstrip()}\n```')
    download = f"[Download this notebook]({path.name}){{ .md-button download }}"
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n{download}\n{rest}\n"


def _text_of(output: dict) -> str:
    if output["output_type"] == "stream":
        return re.sub(r"\x1b\[[\d;]*m", "", "".join(output["text"]))
    return "".join(output["data"].get("text/plain", "")) + "\n"
