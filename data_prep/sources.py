"""Reads a source, whatever its format, into conversations, token rows and rejected records.

A source is a file, a folder, a `datasets` path or a built-in name. Nothing is dropped silently:
what cannot be read comes out as a :class:`Reject`.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.builtin import BUILTIN_SETS, builtin_path, check_trainable
from data_prep.config import Format
from data_prep.conversation import Record, Reject
from data_prep.json_stream import Damage, read_json_records, read_text_lines
from data_prep.records import RECORD_KEYS, parse_record

_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")


def resolve_source(source: str) -> Path | None:
    """The file or folder of ``source``; ``None`` when only `datasets` can know it.

    Raises ``ValueError`` for an evaluation set, a missing package, or a path that does not exist.
    """
    check_trainable(source)
    if source in BUILTIN_SETS:
        return builtin_path(source)
    path = Path(source).expanduser()
    if path.exists():
        for name, entry in BUILTIN_SETS.items():
            if entry.evaluation_only and path.name == Path(entry.file).name:
                _refuse_evaluation_file(path, name)
        return path
    if source.startswith((".", "/", "~")) or path.suffix in (*_FILE_SUFFIXES, ".gz"):
        raise ValueError(f"data.sources: {source!r} does not exist")
    return None


def source_files(path: Path) -> list[Path]:
    """The readable files of a file or folder, sorted; ``[]`` for a folder saved by `datasets`."""
    if path.is_file():
        return [path]
    if _is_saved_dataset(path):
        return []
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and file.name.removesuffix(".gz").endswith(_FILE_SUFFIXES)
    )
    if not files:
        raise ValueError(
            f"data.sources: folder {path} holds neither a saved dataset nor files ending in "
            f"{', '.join(_FILE_SUFFIXES)}"
        )
    return files


def read_source(source: str, *, format: Format = "auto") -> Iterator[Record]:
    """Every record of ``source``. Raises ``ValueError`` when the source cannot be opened."""
    path = resolve_source(source)
    if path is None:
        yield from _read_rows(_load_dataset(source), source=source, format=format)
    elif files := source_files(path):
        for file in files:
            name = source if len(files) == 1 else f"{source}/{file.relative_to(path)}"
            yield from _read_file(file, source=name, format=format)
    else:
        yield from _read_rows(_load_saved_dataset(path), source=source, format=format)


def _read_file(path: Path, *, source: str, format: Format) -> Iterator[Record]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".txt":
        try:
            for number, line in read_text_lines(path):
                row = {"prompt": line}
                yield parse_record(row, source=source, record_id=f"line-{number}", format=format)
        except (EOFError, gzip.BadGzipFile) as error:
            yield Reject("damaged_record", source, "end", str(error))
    elif suffix == ".parquet":
        yield from _read_rows(_parquet_rows(path), source=source, format=format)
    elif suffix in _FILE_SUFFIXES:
        for index, value in enumerate(read_json_records(path, is_record=RECORD_KEYS)):
            if isinstance(value, Damage):
                yield Reject("damaged_record", source, value.record_id, value.detail)
            else:
                yield parse_record(value, source=source, record_id=f"row-{index}", format=format)
    else:
        raise ValueError(
            f"data.sources: {path} ends in {suffix!r}; readable are {', '.join(_FILE_SUFFIXES)} "
            "(also with .gz)"
        )


def _read_rows(rows: Iterator[dict[str, Any]], *, source: str, format: Format) -> Iterator[Record]:
    for index, row in enumerate(rows):
        # A columnar store fills absent keys with nulls, also inside nested objects.
        present = _without_nulls(row)
        yield parse_record(present, source=source, record_id=f"row-{index}", format=format)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"data.sources: {path} is no readable Parquet file: {error}") from error


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _load_saved_dataset(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(path))
    parts = dataset.values() if isinstance(dataset, DatasetDict) else [dataset]
    for part in parts:
        yield from part


def _load_dataset(source: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    name, _, split = source.partition("#")
    try:
        dataset = load_dataset(name, split=split or "train")
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"data.sources: {source!r} is no file, folder or built-in name "
            f"({', '.join(sorted(BUILTIN_SETS))}), and `datasets` cannot load it: {error}"
        ) from error
    yield from dataset


def _refuse_evaluation_file(path: Path, name: str) -> None:
    """An evaluation set given by the path of its file is still an evaluation set."""
    import importlib.util

    entry = BUILTIN_SETS[name]
    spec = importlib.util.find_spec(entry.package)
    folders = (spec.submodule_search_locations or []) if spec else []
    if any(path.resolve() == (Path(folder) / entry.file).resolve() for folder in folders):
        check_trainable(name)
