"""The notebooks of the documentation, run, with the outputs that they hold.

To write the outputs of all of them anew, or of those named:

    python tests/helpers/pages/notebooks.py [docs/notebooks/onnx.ipynb ...]
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

#: The kernel listens on sockets in a folder, not on ports, which all users of the machine reach.
BY_FILE = Config({"ConnectionFileMixin": {"transport": "ipc"}})


def run(path: Path) -> NotebookNode:
    """The notebook with the outputs that its cells print now; an error in a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", config=BY_FILE).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(cell.outputs)
    notebook.metadata.language_info = {"name": "python"}  # the version is the machine's
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs with a stream's text in one piece: where it is broken depends on timing."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def printed(notebook: NotebookNode) -> list[list[tuple[str, str]]]:
    """Of each code cell, what it wrote: the stream or kind of each output, and its text."""
    return [
        [
            (output.get("name", output.output_type), output.get("text") or str(output.get("data")))
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main() -> None:
    folder = Path(__file__).parents[3] / "docs" / "notebooks"
    for path in [Path(name) for name in sys.argv[1:]] or sorted(folder.glob("*.ipynb")):
        notebook = run(path)
        assert not any(name == "stderr" for cell in printed(notebook) for name, _ in cell)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
