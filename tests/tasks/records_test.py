"""Rows of data files of every format, and what is said of a broken one."""

import datetime
import decimal
import json
import math
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from rljax.tasks import records

ROWS = [
    {"prompt": [{"role": "user", "content": "1 + é"}], "answer": "2", "level": 3},
    {"prompt": [{"role": "user", "content": "2 + 2"}], "answer": "4", "level": 4},
]

# Run by a process of its own: what TensorFlow Datasets writes and what it imports is not this process's affair.
PREPARE = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info, sequential_writer

def prepare(folder, file_format):
    text, whole, numbers = tfds.features.Text(), np.int32, tfds.features.Sequence(np.float32)
    features = {"problem": text, "level": whole, "meta": {"bounds": numbers}, "tags": tfds.features.Sequence(text)}
    identity = dataset_info.DatasetIdentity("sums", tfds.core.Version("1.0.0"), folder, "sums")
    info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    writer = sequential_writer.SequentialWriter(info, max_examples_per_shard=2, file_format=file_format)
    writer.initialize_splits(["train", "test"])
    row = {"level": 2, "meta": {"bounds": [0.5, 2]}, "tags": ["a", "é"]}
    writer.add_examples({"train": [row | {"problem": f"{i}+{i}é"} for i in range(5)]})
    writer.add_examples({"test": [{"problem": "7", "level": 0, "meta": {"bounds": []}, "tags": []}]})
    writer.close_all()

prepare(sys.argv[1], "array_record")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder of a small data set in ArrayRecord format, three shards and one, written by TensorFlow Datasets."""
    folder = tmp_path_factory.mktemp("sums") / "1.0.0"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", PREPARE, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*train*array_record*"))) == 3
    return folder


def rows_of(path):
    return [row for _, row in records.read(str(path))]


def write(file, text):
    file.write_text(text, encoding="utf-8")
    return file


def test_every_format_gives_the_same_rows(tmp_path):
    lines = "\n".join(map(json.dumps, ROWS))
    jsonl = write(tmp_path / "a.jsonl", f"{lines}\n\n")
    as_list = write(tmp_path / "b.json", json.dumps(ROWS, ensure_ascii=False))
    as_object = write(tmp_path / "c.json", json.dumps({"version": 1, "data": ROWS}))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for file in (jsonl, as_list, as_object, tmp_path / "d.parquet"):
        assert rows_of(file) == ROWS, file
    assert [place for place, _ in records.read(str(jsonl))] == [f"{jsonl}, line 1", f"{jsonl}, line 2"]
    assert [place for place, _ in records.read(str(as_list))][1] == f"{as_list}, row 2"


def test_a_pattern_is_the_files_that_match_in_order(tmp_path):
    for name in ("train-1", "train-0", "test-0"):
        write(tmp_path / f"{name}.jsonl", json.dumps({"name": name}))
    assert rows_of(tmp_path / "train-*.jsonl") == [{"name": "train-0"}, {"name": "train-1"}]


def test_bytes_are_text_where_they_can_be(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "é".encode(), "image": b"\xff\xfe"}]), file)
    assert rows_of(file) == [{"text": "é", "image": b"\xff\xfe"}]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2\n', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", '{"a": 1}\n[2]\n', "a.jsonl, line 2 is a list; a row must be an object"),
        ("a.json", '[{"a": 1},\n{"a": }]', "a.json is not JSON: Expecting value: line 2"),
        ("a.json", '[{"a": 1}, 3]', "a.json, row 2 is a int"),
        ("a.json", '"text"', "a.json holds a str; it must hold a list"),
        ("a.json", '{"a": [], "b": [], "c": 1}', r"a.json is an object with 2 lists \(a, b\); it must hold one"),
        ("a.json", '{"a": 1}', r"a.json is an object with 0 lists"),
        ("a.parquet", "no parquet", "a.parquet cannot be read as Parquet after row 0"),
        ("a.csv", "a,b", "a.csv has an unknown suffix; known: .jsonl, .json, .parquet"),
    ],
)
def test_what_cannot_be_read_is_told_by_file_and_line(tmp_path, name, content, told):
    with pytest.raises(ValueError, match=told):
        rows_of(write(tmp_path / name, content))


def test_what_nests_too_deep_is_told_by_file_and_line(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ValueError, match="a.jsonl, line 2 nests too deep to be read as JSON"):
        rows_of(write(tmp_path / "a.jsonl", f'{{"a": 1}}\n{{"a": {deep}}}\n'))
    with pytest.raises(ValueError, match="a.json nests too deep to be read as JSON"):
        rows_of(write(tmp_path / "a.json", deep))


def test_bytes_that_are_no_text_are_told_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 2 is not JSON: .*utf-8"):
        rows_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["none.jsonl", "none-*.jsonl", "none:train"])
def test_a_missing_file_is_told(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"does not exist; check task.path and task.eval_path"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" a b ", "a b"),
        (None, ""),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (10**30, "1" + "0" * 30),
        (142.0, "142"),
        (0.1, "0.1"),
        (1e23, "1e+23"),
        (decimal.Decimal("12.50"), "12.50"),
        (decimal.Decimal("1E+3"), "1000"),
    ],
)
def test_values_as_text(value, text):
    assert records.as_text(value, "x") == text
    assert records.text({"a": [{"b": value}]}, "a.0.b", "task.answer_field", "line 1") == text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (math.nan, "line 1: the field 'a' .task.answer_field. is nan, which is no number"),
        (-math.inf, "is -inf, which is no number"),
        (decimal.Decimal("NaN"), "is NaN, which is no number"),
        ("x\ud800", "holds a lone surrogate"),
        ([1], "is a list, not text; name a part of it, such as a.0"),
        ({"b": 1}, "is a dict, not text; name a part of it, such as a.name"),
        (b"\xff", "is a bytes, not text"),
        (datetime.date(2026, 1, 1), "is a date, not text"),
    ],
)
def test_values_that_are_no_text_are_told_by_place_and_field(value, told):
    with pytest.raises(ValueError, match=told):
        records.text({"a": value}, "a", "task.answer_field", "line 1")


def test_a_name_with_dots_is_a_field_first():
    row = {"a.b": 1, "a": {"b": 2}}
    assert records.value(row, "a.b", "key", "line 1") == 1
    with pytest.raises(ValueError, match=r"line 1 has no field 'a.c' \(key\); it has a.b, a"):
        records.value(row, "a.c", "key", "line 1")


def test_decimals_of_parquet(tmp_path):
    file = tmp_path / "a.parquet"
    column = pyarrow.array([decimal.Decimal("1.50")], pyarrow.decimal128(10, 2))
    parquet.write_table(pyarrow.table({"answer": column}), file)
    (row,) = rows_of(file)
    assert records.text(row, "answer", "task.answer_field", "row 1") == "1.50"


def test_a_truncated_parquet_file_is_told(tmp_path):
    whole, cut = tmp_path / "a.parquet", tmp_path / "b.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS * 500), whole)
    content = whole.read_bytes()
    cut.write_bytes(content[:100] + bytes(200) + content[300:])  # the footer says that all is well
    with pytest.raises(ValueError, match="b.parquet cannot be read as Parquet after row 0"):
        rows_of(cut)


def test_a_prepared_data_set_is_read_without_tensorflow(prepared):
    code = (
        "import json, sys\n"
        "from rljax.tasks import records\n"
        "assert 'tensorflow_datasets' not in sys.modules\n"
        "print(json.dumps([[row for _, row in records.read(path)] for path in sys.argv[1:]]))\n"
        "assert 'tensorflow' not in sys.modules and 'tensorflow_datasets' in sys.modules\n"
    )
    paths = [f"{prepared}:{split}" for split in ("train", "test", "train[1:3]")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train, test, part = json.loads(done.stdout.splitlines()[-1])
    row = {"level": 2, "meta": {"bounds": [0.5, 2.0]}, "tags": ["a", "é"]}
    assert train == [row | {"problem": f"{i}+{i}é"} for i in range(5)]
    assert test == [{"problem": "7", "level": 0, "meta": {"bounds": []}, "tags": []}]
    assert part == train[1:3]


def test_a_prepared_data_set_without_a_split_is_told_with_those_there_are(prepared):
    with pytest.raises(ValueError, match="has the splits train, test; name one as .*:SPLIT"):
        rows_of(prepared)
    for split in ("dev", "train["):
        with pytest.raises(ValueError, match=r"no split '.*'.*; it has train, test") as caught:
            rows_of(f"{prepared}:{split}")
        assert "\n" not in str(caught.value)


def test_other_folders_and_formats_are_told(prepared, tmp_path):
    with pytest.raises(ValueError, match="has no dataset_info.json"):
        rows_of(f"{tmp_path}:train")
    for file in prepared.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    info = tmp_path / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match="only TensorFlow reads; prepare it with file_format='array_record'"):
        rows_of(f"{tmp_path}:train")
