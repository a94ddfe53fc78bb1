"""Give task items stable ids, and split them into train, eval and (optionally) validation.

Items keep every field with its type: they are Arrow tables. `task_id` is the item's own, or a hash of its content, so
it never depends on the position. The partition is that of `datasets.Dataset.train_test_split`, and the shuffle that of
`Dataset.shuffle`, for the same seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from comlrl_stages.errors import UserError, nearest
from comlrl_stages.tasks.protocol import Task
from comlrl_stages.tasks.rehearsal import check_equal
from comlrl_stages.tasks.sources import ROLES, Source, content_digest, read_source
from comlrl_stages.tasks.values import check_item

#: Names of columns that the pipeline's own tables and functions use.
RESERVED = ("source", "round", "step", "turn", "node", "sample", "joint", "agent", "external_prompts")


@dataclass(frozen=True)
class Splits:
    """Task items by split, `task_id` first.

    `dropped` counts what was left out: split -> reason -> items. `commits` are those of the data sets on the hub.
    """

    train: pa.Table
    eval: pa.Table
    validation: pa.Table | None
    dropped: dict[str, dict[str, int]]
    commits: dict[str, str]


@dataclass(frozen=True)
class _Items:
    """A table with task ids, and the digest of each item's content (all fields but task_id)."""

    table: pa.Table
    digests: list[str]
    where: str

    def take(self, indices: Sequence[int]) -> "_Items":
        return _Items(self.table.take(pa.array(indices, pa.int64())), [self.digests[i] for i in indices], self.where)

    def ids(self) -> list[str]:
        return self.table["task_id"].to_pylist()


def load_items(settings: Any, task: Task, rehearsed: Mapping[str, list[str]] | None = None) -> Splits:
    """Read and split the items that `settings` (config.Items) names, equal to those that were `rehearsed`, if any.

    Eval items come from `eval_source`, from `eval_split` of the hub, or from the task's own `eval_items`; else
    `eval_fraction` of the items is kept apart. Validation items likewise, where they are asked for.
    Raises UserError for anything that cannot be read, an empty split, reserved names, and items that occur twice.
    """
    counts: dict[str, dict[str, int]] = {role: {} for role in ROLES}
    sources = {role: read_source(settings, task, role) for role in ROLES}
    for role, source in sources.items():
        if source is not None and rehearsed and role in rehearsed:
            check_equal(role, source, rehearsed[role])
    train, evaluation, validation = (_checked(settings, role, sources[role], counts) for role in ROLES)
    duplicates, seed = settings.duplicates, settings.split_seed
    if evaluation is None:
        _refuse_limit(settings, validation)
        train, evaluation = _split_off(train, settings.eval_fraction, seed, "items.eval_fraction")
    if settings.eval_limit is not None:
        evaluation = evaluation.take(range(min(settings.eval_limit, len(evaluation.digests))))
    if validation is not None:
        validation = _apart(validation, "validation", evaluation, "eval", duplicates, counts)
    train = _apart(train, "train", evaluation, "eval", duplicates, counts)
    if validation is not None:
        train = _apart(train, "train", validation, "validation", duplicates, counts)
    elif settings.validation_fraction > 0:
        train, validation = _split_off(train, settings.validation_fraction, seed, "items.validation_fraction")
    if settings.shuffle:
        train = train.take(np.random.default_rng(settings.shuffle_seed).permutation(len(train.digests)))
    commits = {source.where: source.commit for source in sources.values() if source and source.commit}
    return Splits(train.table, evaluation.table, None if validation is None else validation.table, counts, commits)


def _checked(settings: Any, role: str, source: Source | None, counts: dict[str, dict[str, int]]) -> _Items | None:
    """Rename, check and identify the items of one role; None where it has no source of its own."""
    if source is None:
        return None
    if role == "validation" and settings.validation_fraction > 0:
        raise UserError("items.validation_fraction: the validation items have a source of their own. Give only one.")
    table = _renamed(source.table, settings.rename, source.where)
    _check_columns(table, source.where)
    items, counts[role] = _without_repeats(_identified(table, source.where), settings.duplicates)
    return items


def _refuse_limit(settings: Any, validation: _Items | None) -> None:
    """`eval_limit` shortens sources: of eval items, and of streamed validation items."""
    if settings.eval_limit is not None and not (settings.streaming and validation is not None):
        raise UserError(
            "items.eval_limit: the eval items have no source of their own, which it could shorten. Leave it out and "
            "lower items.eval_fraction, or give items.eval_source."
        )


def partition(count: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, split off) positions; equal to `Dataset.train_test_split(test_size=fraction, seed=seed)`."""
    order = np.random.default_rng(seed).permutation(count)
    cut = math.ceil(fraction * count)
    return order[cut:], order[:cut]


def _split_off(items: _Items, fraction: float, seed: int, key: str) -> tuple[_Items, _Items]:
    if not 0.0 < fraction < 1.0:
        raise UserError(f"{key} is {fraction}, expected a number between 0 and 1 (both excluded).")
    kept, split_off = partition(len(items.digests), fraction, seed)
    if len(kept) == 0:
        raise UserError(
            f"{key} is {fraction}: of {len(items.digests)} items from {items.where} none is left for training. "
            "Lower the fraction, or give more items."
        )
    return items.take(kept), items.take(split_off)


# --- repeated items -----------------------------------------------------------------------------------------------


def _without_repeats(items: _Items, duplicates: str) -> tuple[_Items, dict[str, int]]:
    """Refuse or drop items of equal content; two different items with the same task_id are always refused."""
    first: dict[str, int] = {}
    kept = []
    for row, digest in enumerate(items.digests):
        if first.setdefault(digest, row) == row:
            kept.append(row)
        elif duplicates == "error":
            raise UserError(
                f"{items.where}: items {first[digest] + 1} and {row + 1} are identical "
                f"(task_id {items.ids()[row]}). Remove one, or set items.duplicates to drop."
            )
    dropped = len(items.digests) - len(kept)
    ids = items.ids()
    rows: dict[str, int] = {}
    for row in kept:
        if rows.setdefault(ids[row], row) != row:
            raise UserError(
                f"{items.where}: items {rows[ids[row]] + 1} and {row + 1} are different, but both have the "
                f"task_id {ids[row]}. Every item needs an id of its own; without the field task_id they get one."
            )
    return items.take(kept), {"duplicate": dropped} if dropped else {}


def _apart(
    items: _Items, name: str, other: _Items, other_name: str, duplicates: str, counts: dict[str, dict[str, int]]
) -> _Items:
    """Refuse items that are in the `other` split too, or drop them from `items`."""
    taken, taken_ids = dict(zip(other.digests, other.ids(), strict=True)), set(other.ids())
    kept = []
    for row, (digest, task_id) in enumerate(zip(items.digests, items.ids(), strict=True)):
        if digest in taken and duplicates == "error":
            raise UserError(
                f"{items.where}: the item {task_id} of the {name} split is also in the {other_name} split "
                f"({other.where}, {taken[digest]}). Remove it from one, or set items.duplicates to drop, which takes "
                f"it from {name}."
            )
        if digest not in taken and task_id in taken_ids:
            raise UserError(
                f"{items.where}: the task_id {task_id} names an item of the {name} split and a different one of the "
                f"{other_name} split ({other.where}). Ids must be unique over all splits."
            )
        if digest not in taken:
            kept.append(row)
    if len(kept) < len(items.digests):
        counts[name][f"in_{other_name}"] = len(items.digests) - len(kept)
    if not kept:
        raise UserError(f"{items.where}: every item of the {name} split is also in the {other_name} split.")
    return items.take(kept)


# --- ids ----------------------------------------------------------------------------------------------------------


def _identified(table: pa.Table, where: str) -> _Items:
    """Put `task_id` first: the item's own, as text, or the first 16 hex digits of the SHA-256 of its content."""
    digests, ids = [], []
    for row, item in enumerate(table.to_pylist()):
        check_item(item, row + 1, where)
        own = item.pop("task_id", None)
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            raise UserError(
                f"{where}: item {row + 1} has a task_id of type {type(own).__name__}, expected text or int."
            )
        digests.append(content_digest(item))
        ids.append(digests[-1][:16] if own is None or own == "" else str(own))
    if "task_id" in table.column_names:
        table = table.drop_columns(["task_id"])
    return _Items(table.add_column(0, "task_id", pa.array(ids, pa.string())), digests, where)


# --- columns ---------------------------------------------------------------------------------------------------------


def _renamed(table: pa.Table, rename: Mapping[str, str], where: str) -> pa.Table:
    for name in rename:
        if name not in table.column_names:
            raise UserError(
                f"items.rename: {where} has no field {name!r}{nearest(name, table.column_names)}. "
                f"It has: {', '.join(table.column_names)}."
            )
    return table.rename_columns([rename.get(name, name) for name in table.column_names])


def _check_columns(table: pa.Table, where: str) -> None:
    names = table.column_names
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"{where}: has two fields named {', '.join(sorted(twice))}. Rename one (items.rename).")
    reserved = [name for name in names if name in RESERVED]
    if reserved:
        raise UserError(
            f"{where}: has a field named {', '.join(reserved)}, which the pipeline uses itself. Give it another name "
            f"with items.rename, for example {{{reserved[0]}: task_{reserved[0]}}}."
        )
    for field in table.schema:
        if _has_empty_struct(field.type):
            raise UserError(f"{where}: the field {field.name} holds only empty objects, which Parquet cannot store.")


def _has_empty_struct(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return True
    return any(_has_empty_struct(kind.field(i).type) for i in range(kind.num_fields))
