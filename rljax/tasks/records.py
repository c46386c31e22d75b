"""Rows of a data file: JSONL, JSON, Parquet, or what TensorFlow Datasets prepared (read without TensorFlow)."""

from __future__ import annotations

import decimal
import glob
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

Rows = Iterator[tuple[str, dict]]


def read(path: str) -> Rows:
    """Rows of a data file as dicts of plain data, each after its place for messages ("train.jsonl, line 3").

    path: a file, by its suffix: .jsonl (an object a line), .json (a list of objects, or an object that holds one
    such list), .parquet; a pattern of such files ("train-*.parquet"), which are read in the order of their names;
    or "FOLDER:SPLIT" of a data set that TensorFlow Datasets prepared as ArrayRecord, whose FOLDER holds
    dataset_info.json and whose SPLIT may be a slice ("train[:100]"). Bytes become text where they are UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown suffix or split, or what cannot be read, with file and line.
    """
    files = [path] if pathlib.Path(path).exists() else sorted(glob.glob(path))
    if not files:
        yield from _prepared(*_folder_and_split(path))
        return
    for name in files:
        file = pathlib.Path(name)
        if file.is_dir():
            yield from _prepared(file, "")
        elif file.suffix in FORMATS:
            yield from FORMATS[file.suffix](file)
        else:
            raise ValueError(
                f"data file {file} has an unknown suffix; known: {', '.join(FORMATS)}, "
                "or FOLDER:SPLIT of a TensorFlow Datasets folder"
            )


def _jsonl(file: pathlib.Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}, line {number}"
            if line.strip():
                yield place, _checked(_json_value(line, place), place)


def _json(file: pathlib.Path) -> Rows:
    content = _json_value(file.read_bytes(), str(file))
    if isinstance(content, dict):
        lists = [name for name, value in content.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise ValueError(f"{file} is an object with {len(lists)} lists ({', '.join(lists)}); it must hold one")
        content = content[lists[0]]
    if not isinstance(content, list):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must hold a list of objects")
    for number, row in enumerate(content, 1):
        place = f"{file}, row {number}"
        yield place, _checked(row, place)


def _json_value(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{place} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{place} nests too deep to be read as JSON: {error}") from error


def _checked(row: Any, place: str) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}; a row must be an object with named fields")
    return row


def _parquet(file: pathlib.Path) -> Rows:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", _plain(row)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a damaged page
        raise ValueError(f"{file} cannot be read as Parquet after row {number}: {error}") from error


FORMATS: dict[str, Callable[[pathlib.Path], Rows]] = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


def _folder_and_split(path: str) -> tuple[pathlib.Path, str]:
    """The parts of "FOLDER:SPLIT"; a split may hold colons ("train[:100]")."""
    for at, char in enumerate(path):
        if char == ":" and pathlib.Path(path[:at]).is_dir():
            return pathlib.Path(path[:at]), path[at + 1 :]
    raise FileNotFoundError(f"data file {path} does not exist; check task.path and task.eval_path")


def _prepared(folder: pathlib.Path, split: str) -> Rows:
    """Rows of a split of a prepared TFDS data set."""
    if not (folder / "dataset_info.json").is_file():
        raise ValueError(
            f"{folder} has no dataset_info.json: it is no prepared TensorFlow Datasets folder; "
            "name the folder of one version, or a data file"
        )
    # Seconds to import; and here only, so that neither the command line nor a grading process pays.
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(str(folder))
    splits = ", ".join(builder.info.splits)
    if not split:
        raise ValueError(f"{folder} has the splits {splits}; name one as {folder}:SPLIT")
    try:
        source = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"{folder} holds {builder.info.file_format}, which only TensorFlow reads; "
            "prepare it with file_format='array_record'"
        ) from error
    except (KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder}: no split {split!r} ({reason}); it has {splits}") from error
    for number in range(len(source)):
        yield f"{folder}:{split}, row {number + 1}", _plain(source[number])


def value(row: dict, field: str, key: str, place: str) -> Any:
    """What a row holds at a field; a dot goes into an object or, with a number, into a list: "prompt.0.content".

    key: the config key that names the field; place: of the row; both for messages. Raises ValueError if there is none.
    """
    found: Any = row
    if field in row:
        return row[field]
    for part in field.split("."):
        try:
            found = found[int(part) if isinstance(found, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{place} has no field {field!r} ({key}); it has {', '.join(row)}") from None
    return found


def text(row: dict, field: str, key: str, place: str) -> str:
    """:func:`value` as :func:`as_text`; the error names a part of it where it is no text."""
    found = value(row, field, key, place)
    where = f"{place}: the field {field!r} ({key})"
    if isinstance(found, list | dict):
        raise ValueError(
            f"{where} is a {type(found).__name__}, not text; "
            f"name a part of it, such as {field}.{'0' if isinstance(found, list) else 'name'}"
        )
    return as_text(found, where)


def as_text(value: Any, where: str) -> str:
    """A text without outer spaces; of null "", of true and false those words, of a number its digits.

    A whole float below 2**53 is written as a whole number (142.0 is "142"), another as shortly as it is told apart
    (1e23 is "1e+23"), a decimal in full.

    Raises:
        ValueError: NaN, infinity, a lone surrogate, or no text at all. where: the place and the field.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | decimal.Decimal) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is no number; mend it")
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where} is a {type(value).__name__}, not text; name another field, or write it as text")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{where} holds a lone surrogate, which is no text; mend it")
    return value.strip()


def _plain(value: Any) -> Any:
    """Plain Python data: arrays as lists, numpy's scalars as numbers, UTF-8 bytes as text (others stay bytes)."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    return value
