"""A rank's part of a result is its part of the input that the result becomes, or is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

import partitioner
from helpers.onnx_files import gpt
from partitioner.backends.errors import BackendError
from partitioner.backends.feeding import local_feeds
from partitioner.backends.header import Header, parse_header
from partitioner.backends.onnx.files.load import check_ranks, read_directory


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, ...]:
    folder = tmp_path_factory.mktemp("feeding") / "gpt.partition"
    options = {"feed": gpt.FEED, "dims": {"past": 16}}
    partitioner.compile(gpt.gpt("grown"), devices=2, parallel="tp", **options).save(folder)
    return read_directory(Path(folder))


def test_a_rank_feeds_its_own_heads(headers: tuple[Header, ...]) -> None:
    for header in headers:
        feeds = local_feeds(header, header.fed)
        assert feeds.keys() == {name for name in header.inputs if name.startswith("past")}
        assert {feed.dim for feed in feeds.values()} == {2}
    assert local_feeds(headers[0], {}) == {}


def test_files_whose_parts_lie_apart_are_refused(headers: tuple[Header, ...]) -> None:
    swapped = replace(headers[0], inputs=headers[1].inputs)
    with pytest.raises(BackendError, match=r"files: feed present\.0\.key=.*: rank 0 needs a part"):
        check_ranks([(swapped, ()), (headers[1], ())], "files")
    # of a result that grows, all of the dim is needed
    short = {
        name: replace(part, region=(*part.region[:2], ((0, 15),), part.region[3]))
        for name, part in headers[0].inputs.items()
        if part.region is not None and len(part.region) == 4
    }
    with pytest.raises(BackendError, match="needs a part of the input that is not its own part"):
        local_feeds(replace(headers[0], inputs=short), headers[0].fed)


def test_pairs_of_unknown_names_are_malformed() -> None:
    types = {"x": ("float32", [2])}
    data = {"ranks": 1, "whole_inputs": types, "whole_outputs": {"y": types["x"]}}
    with pytest.raises(ValueError, match="are not pairs of an output and an input"):
        parse_header({**data, "fed": {"y": "z"}})
