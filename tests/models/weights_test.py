"""Safetensors files: any damage to a header ends in an error of ours, and what is written is read by the library."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from rljax.models import weights

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, ml_dtypes.bfloat16)}
SHAPES = {name: t.shape for name, t in TENSORS.items()}
WHOLE = save(TENSORS)
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")


def read_all(folder):
    with weights.Reader(folder) as tensors:
        tensors.check(SHAPES)
        return {name: tensors.read(name, (slice(None),) * len(shape)) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def told_or_read(folder: pathlib.Path, content: bytes):
    """Reads the file's tensors, or checks that the error is a ValueError that names the file."""
    (folder / "model.safetensors").write_bytes(content)
    try:
        got = read_all(folder)
    except ValueError as e:
        assert "model.safetensors" in str(e)
        return None
    return got


def test_the_undamaged_file(folder):
    got = told_or_read(folder, WHOLE)
    assert {n: (t.dtype, t.tobytes()) for n, t in got.items()} == {
        n: (t.dtype, t.tobytes()) for n, t in TENSORS.items()
    }


@settings(max_examples=150, deadline=None)
@given(damage=st.dictionaries(st.integers(0, HEADER - 1), st.integers(0, 255), min_size=1, max_size=8))
def test_random_bytes_in_the_header(folder, damage):
    content = bytearray(WHOLE)
    for place, byte in damage.items():
        content[place] = byte
    told_or_read(folder, bytes(content))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere(folder, size):
    assert told_or_read(folder, WHOLE[:size]) is None


@settings(max_examples=50, deadline=None)
@given(length=st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
def test_a_wrong_length_of_the_header(folder, length):
    if length != HEADER - 8:
        assert told_or_read(folder, length.to_bytes(8, "little") + WHOLE[8:]) is None


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2**62, 4]},
        {"shape": [2**40, 2**40]},
        {"shape": [-2, -3]},
        {"shape": [3, 3]},
        {"shape": "big"},
        {"data_offsets": [0, 2**50]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0]},
        {"dtype": "F99"},
        {"dtype": None},
    ],
)
def test_a_header_that_lies(folder, changes):
    b = {"b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}
    for entry, readable in ((ENTRY, True), (ENTRY | changes, False)):
        text = json.dumps({"a": entry} | b).encode()
        got = told_or_read(folder, len(text).to_bytes(8, "little") + text + bytes(32))
        assert (got is not None) == readable


def test_what_is_written_is_read_by_the_library(tmp_path):
    # The wider dtype comes first, so that each tensor begins at a multiple of its item size.
    tensors = {"odd": np.ones(3, np.float16), "b": TENSORS["b"], "a": TENSORS["a"]}
    sources = {n: weights.Source(t.dtype, t.shape, lambda t=t: [t[:1], t[1:]]) for n, t in tensors.items()}
    weights.write(tmp_path, sources)
    assert {n: (t.dtype, t.tobytes()) for n, t in load_file(tmp_path / "model.safetensors").items()} == {
        n: (t.dtype, t.tobytes()) for n, t in tensors.items()
    }
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["a"]["data_offsets"] == [0, 24] and header["__metadata__"] == {"format": "pt"}
