"""Which kind of table an argument of the command line got: every table of a stage carries its kind."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.errors import UserError

TASK_ITEMS = "task items"
_LABEL = b"comlrl_stages.table"


def check_kind(option: str, path: Path, expected: str) -> None:
    """Raise UserError, naming the `option`, for a table of another kind; what is no table is told where it is read.

    `expected` is TASK_ITEMS, or a kind such as "rewards".
    """
    try:
        label = (pq.read_schema(path).metadata or {}).get(_LABEL)
    except (pa.ArrowException, OSError):
        return
    found = TASK_ITEMS if label is None else label.decode().partition("/")[0].replace("_", " ")
    if found != expected:
        raise UserError(
            f"{option}: {path} is a table of {found}, expected a table of {expected}. Look whether two arguments "
            "changed places."
        )
