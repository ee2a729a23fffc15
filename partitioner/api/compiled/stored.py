"""A saved compilation's model of which only the graph is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from partitioner.api.compiled.base import Model
from partitioner.api.compiled.folder import ModuleRequest, OnnxRequest
from partitioner.api.compiled.graph_file import GraphFile
from partitioner.api.compiled.rank_files import ModuleFiles, OnnxFiles, RankFiles
from partitioner.foundations.files import ResultError
from partitioner.ir.plan import Plan
from partitioner.ir.program import Programs


@dataclass(frozen=True)
class StoredModel(Model):
    """A model of which the graph alone is there: its plan can be shown, and not emitted."""

    folder: Path  #: Folder of the saved compilation.
    request: OnnxRequest | ModuleRequest
    stored: GraphFile
    files: type[RankFiles]
    delivers_all: bool

    @classmethod
    def of(cls, folder: Path, request: OnnxRequest | ModuleRequest) -> StoredModel:
        """The model of a saved compilation.

        Raises:
            ResultError: `graph.json` is missing or wrong.
        """
        stored = GraphFile.read(folder, request.graph_digest)
        is_module = isinstance(request, ModuleRequest)
        return cls(folder, request, stored, ModuleFiles if is_module else OnnxFiles, is_module)

    @property
    def described(self) -> GraphFile:
        """See `Model.described`."""
        return self.stored

    @property
    def path(self) -> Path | None:
        """See `Model.path`; the file may be gone."""
        request = self.request
        return request.file if isinstance(request, ModuleRequest) else request.model

    def write_request(self, folder: Path, final: Path) -> None:
        """See `Model.write_request`."""
        self.request.write(folder, final)

    def emit(self, programs: Programs, plan: Plan) -> NoReturn:  # noqa: ARG002 - of `Model`
        """Refuse: weights are not kept."""
        self._refuse()

    def read(self, programs: Programs, folder: Path) -> NoReturn:  # noqa: ARG002 - of `Model`
        """Refuse: weights are not kept."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ResultError(
            f"{self.folder}: its plan was read without its model: partitioner.load reads both"
        )
