"""Read task items from files, folders, packages, the hub, or the user's Python code, as Arrow tables.

`datasets` is only imported for the sources that need it: a plain file is read in a fraction of the second that takes.
"""

import gzip
import hashlib
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from comlrl_stages.errors import UserError, nearest
from comlrl_stages.hub import explanation, fetch
from comlrl_stages.tasks.protocol import Task, TaskSource, load_object, user_traceback
from comlrl_stages.tasks.values import check_item

ROLES = ("train", "eval", "validation")
HUB_PREFIX = "hub://"
SOURCE_FORMS = (
    "`task`, a .jsonl, .json, .csv or .parquet file, a folder of datasets.save_to_disk, hub://owner/name, "
    "package://module/file.jsonl or file.py:function"
)


_FUNCTION = re.compile(r"(.+\.py):(\w+)")


@dataclass(frozen=True)
class _Request:
    """What is read: the items of one role ("train", "eval", "validation") from one source."""

    role: str
    source: str
    split: str
    split_is_named: bool  # the config asks for it, so the source must have splits
    limit: int | None  # the first so many
    where: str

    def key(self, name: str) -> str:
        """The config key of this role, for messages."""
        return f"items.{name}" if self.role == "train" else f"items.{self.role}_{name}"

    def is_on_hub(self) -> bool:
        return self.source.startswith(HUB_PREFIX)

    def refuse_split(self) -> None:
        if self.split_is_named:
            raise UserError(f"{self.key('split')} is {self.split!r}, but {self.where} has no splits. Leave it out.")


@dataclass(frozen=True)
class Source:
    """Items of one role, a text that says where they come from, and the hub's commit if that is where."""

    table: pa.Table
    where: str
    commit: str | None = None


def read_source(settings: Any, task: Task, role: str) -> Source | None:
    """Read the items of one role ("train", "eval", "validation") as `settings` (config.Items) says.

    Returns None where the role has no source of its own.
    Raises UserError, naming file and line where there is one, for what cannot be read or has no items.
    """
    request = _request(settings, task, role)
    if request is None:
        return None
    table, commit = _hub_table(request, settings) if request.is_on_hub() else (_table(request, task), None)
    if table.num_rows == 0:
        raise UserError(f"{request.where}: has no items for the {role} split.")
    return Source(table if request.limit is None else table.slice(0, request.limit), request.where, commit)


def code_of_items(settings: Any, source: TaskSource, role: str) -> str | None:
    """The user's Python file that makes the items of a role; None where a file, a data set or nothing of his does."""
    named = settings.source if role == "train" else getattr(settings, f"{role}_source") or settings.source
    function = _FUNCTION.fullmatch(named)
    return function[1] if function else source.file if named == "task" else None


def content_digest(item: Mapping[str, Any]) -> str:
    """SHA-256 of an item's content. The order of its fields does not count, nor do fields that are null."""
    canonical = json.dumps(_without_nulls(item), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_nulls(value: Any) -> Any:
    """Leave out null fields: a field that only another item has must not change this item's id."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _request(settings: Any, task: Task, role: str) -> _Request | None:
    if role == "train":
        source, split, limit = settings.source, settings.split, settings.limit
        named = split != "train"  # the default, which sources without splits have as well
    else:
        source, split = getattr(settings, f"{role}_source"), getattr(settings, f"{role}_split")
        limit = settings.eval_limit if role == "eval" or settings.streaming else None
        brings_own = role == "eval" and settings.source == "task" and task.eval_items is not None
        if source is None and split is None and not brings_own:
            return None
        source, split, named = source or settings.source, split or settings.split, split is not None
    where = f"items of {task.source}" if source == "task" else source
    return _Request(role, source, split, named, limit, where)


def _table(request: _Request, task: Task) -> pa.Table:
    source = request.source
    if source == "task":
        return _task_table(request, task)
    function = _FUNCTION.fullmatch(source)
    if function:
        return _python_table(load_object(*function.groups()), request)
    if Path(source).is_dir():
        return _saved_table(request)
    request.refuse_split()
    return _file_table(_package_file(source) if source.startswith("package://") else Path(source))


# --- files --------------------------------------------------------------------------------------------------------


def _file_table(path: Path) -> pa.Table:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(Path(path.name.removesuffix(".gz")).suffix)
    if reader is None:
        raise UserError(f"items: {path} is none of the known sources. Use {SOURCE_FORMS}.")
    if not path.is_file():
        raise UserError(f"items: {path} does not exist. Paths are relative to the working directory ({Path.cwd()}).")
    return reader(path)


def _package_file(source: str) -> Path:
    module, _, inner = source.removeprefix("package://").partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{source}: there is no installed package {module!r}. Install it, or use another source.")
    return Path(next(iter(spec.submodule_search_locations))) / inner


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _read_jsonl(path: Path) -> pa.Table:
    lines = enumerate(_content(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    rows = [_parse_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    return _rows_table(rows, str(path))


def _read_json(path: Path) -> pa.Table:
    rows = _parse_json(_content(path).removeprefix(b"\xef\xbb\xbf"), str(path), list)
    return _rows_table(rows, str(path))


def _parse_json(text: bytes, where: str, expected: type = dict) -> Any:
    try:
        value = json.loads(text.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if expected is list else where
        raise UserError(f"{place}, column {error.colno}: is not valid JSON ({error.msg}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text ({error}). Convert the file to UTF-8.") from error
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise UserError(
            f"{where}: has half a surrogate pair ({bad!a}), which is no character and cannot be stored. "
            "Remove it or write the whole pair."
        ) from error
    if not isinstance(value, expected):
        shape = "a list of objects" if expected is list else "an object"
        raise UserError(f"{where}: is a JSON {type(value).__name__}, expected {shape}.")
    return value


def _read_csv(path: Path) -> pa.Table:
    try:
        return pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(newlines_in_values=True))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as CSV ({error}). It needs a header line and UTF-8 text.") from error


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path).replace_schema_metadata(None)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error}).") from error


# --- the hub ------------------------------------------------------------------------------------------------------

_OTHERWISE = "give a local file or folder as items.source"


def _hub_table(request: _Request, settings: Any) -> tuple[pa.Table, str]:
    """Items of a data set on the hub, and the commit they are from."""
    if settings.streaming and request.limit is None:
        key = "items.limit" if request.role == "train" else "items.eval_limit"
        raise UserError(f"{request.where}: streaming of the {request.role} items needs {key}.")
    repo = request.source.removeprefix(HUB_PREFIX)
    commit = _commit(repo, settings.revision)
    where = f"{request.where}, split {request.split}"
    try:
        builder = _builder(repo, settings.subset, commit, request.where)
        _check_split(request, builder)
        if settings.streaming:
            found = builder.as_streaming_dataset(split=request.split)
        else:
            builder.download_and_prepare()
            found = builder.as_dataset(split=request.split)
        return _python_table(found, replace(request, split_is_named=False, where=where)), commit
    except UserError:
        raise
    except Exception as error:
        told = explanation(_root(error), "dataset", repo, _OTHERWISE)
        raise UserError(f"{where} (commit {commit}): cannot be loaded: {told}") from error


@cache
def _commit(repo: str, revision: str | None) -> str:
    """The commit that a revision stands for: one for all splits, even if the branch moves while they are read."""
    return fetch("dataset", repo, revision, ["README.md"], _OTHERWISE).name


def _builder(repo: str, subset: str | None, commit: str, where: str) -> Any:
    """The reader of one subset at one commit. Raises UserError for an unknown subset, naming those there are."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(repo, subset, revision=commit)
    except ValueError as error:
        known = datasets.get_dataset_config_names(repo, revision=commit)
        if subset in known or (subset is None and len(known) < 2):
            raise
        given = "not set" if subset is None else f"{subset!r}{nearest(subset, known)}"
        raise UserError(f"items.subset is {given}, but {where} has: {', '.join(known)}.") from error
    if builder.hash != commit:  # it falls back to whatever its cache has of this name
        raise UserError(
            f"{where}: commit {commit} cannot be loaded, only {builder.hash} from the cache of `datasets` or a local "
            f"folder named {repo}. Check the network, or {_OTHERWISE}."
        )
    return builder


def _check_split(request: _Request, builder: Any) -> None:
    """Raises UserError for a split that the data set does not have; `train[:100]` and `train+test` are splits, too."""
    known = list(builder.info.splits or builder.config.data_files or [])
    asked = [part.partition("[")[0].strip() for part in request.split.split("+")]
    unknown = [name for name in asked if name not in [*known, "all"]]
    if known and unknown:
        raise UserError(
            f"{request.key('split')} is {request.split!r}{nearest(unknown[0], known)}, but {request.where} has: "
            f"{', '.join(known)}."
        )


def _root(error: Exception) -> Exception:
    """What went wrong first: the readers of `datasets` tell only that something did."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


# --- Python objects and datasets ----------------------------------------------------------------------------------


def _task_table(request: _Request, task: Task) -> pa.Table:
    own = task.eval_items if request.role == "eval" else None
    found = own if own is not None else task.items
    if found is None or (own is None and request.role != "train" and not request.split_is_named):
        name = "items" if request.role == "train" else f"{request.role} items of its own"
        raise UserError(f"{task.source}: has no {name}. Set {request.key('source')} to one of: {SOURCE_FORMS}.")
    return _python_table(found, request)


def _saved_table(request: _Request) -> pa.Table:
    import datasets

    try:
        found = datasets.load_from_disk(request.source)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{request.where}: is not a folder of datasets.save_to_disk ({error}).") from error
    return _python_table(found, request)


def _python_table(found: Any, request: _Request) -> pa.Table:
    """Items as a user's code gives them: a function, a data set of `datasets`, or dicts one after the other."""
    where, limit = request.where, request.limit
    if callable(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise UserError(f"{where}: the function that makes the items raised\n{user_traceback(error)}") from error
    datasets = sys.modules.get("datasets")  # an object of it cannot be there before it was imported
    if datasets is not None and isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        if request.split not in found:
            raise UserError(f"{where}: has no split {request.split!r}. It has: {', '.join(found)}.")
        found = found[request.split]
    else:
        request.refuse_split()
    if datasets is not None and isinstance(found, datasets.IterableDataset):
        if limit is None:
            raise UserError(f"{where}: is a stream of unknown length. Set items.limit (items.eval_limit for eval).")
        found = datasets.Dataset.from_list(list(itertools.islice(found, limit)), features=found.features)
    if datasets is not None and isinstance(found, datasets.Dataset):
        return found.with_format("arrow")[:].replace_schema_metadata(None)
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise UserError(
            f"{where}: items are {type(found).__name__}, expected a list of dicts, a datasets.Dataset, or a function "
            "that returns one."
        )
    return _rows_table(list(itertools.islice(found, limit)), where)


def _rows_table(rows: Sequence[Any], where: str) -> pa.Table:
    """Make a table of dicts with the same fields: where one lacks a field a prompt would say None in its place."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row) or not row:
            raise UserError(f"{where}: item {number} is {row!r:.80}, expected a dict with names as keys.")
        check_item(row, number, where)
    names = dict.fromkeys(name for row in rows for name in row)
    for number, row in enumerate(rows, start=1):
        if len(row) < len(names):
            lacking = next(name for name in names if name not in row)
            raise UserError(
                f"{where}: item {number} has no field {lacking!r}, which other items have. Give every item the same "
                "fields; null (None) says that there is nothing."
            )
    return pa.table({name: _column([row[name] for row in rows], name, where) for name in names})


def _column(values: list[Any], name: str, where: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: the field {name!r} cannot be stored as a column ({error}){_first_refused(values)}. All items "
            "need the same type in a field, and text must be whole Unicode characters. What differs from item to item "
            "can be kept as JSON text."
        ) from error


def _first_refused(values: list[Any]) -> str:
    """Say which item's value no column can hold, or which is the first that does not fit the ones before it."""
    for count in range(1, len(values) + 1):
        try:
            pa.array(values[count - 1 : count])
            if count > 1:
                pa.array([values[0], values[count - 1]])
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
            return f"; item {count} has {values[count - 1]!r:.80}"
    return ""
