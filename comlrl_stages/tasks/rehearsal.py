"""Run the code that makes a task's items a first time, in another process.

That process has a hash seed of its own, so that items which depend on it, on the clock or on random numbers without a
seed come out otherwise there; and if the code ends its process, there is still one that can say so.
"""

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.tasks.sources import ROLES, Source, code_of_items, content_digest, read_source

#: How long the other process may tidy up after it has answered.
END_S = 5.0


def rehearse(settings: Any, source: TaskSource) -> dict[str, list[str]]:
    """Import the task and make its items elsewhere; returns the digest of each item, by role.

    `settings` (config.Items) say where items come from. Roles whose items no Python code of the user makes are left
    out: a file or a data set is read once. Code that fails does so again here, where it is told.
    Raises UserError if the code ends that process.
    """
    code = {role: code_of_items(settings, source, role) for role in ROLES}
    files = dict.fromkeys(file for file in (source.file, *code.values()) if file is not None)
    if not files:
        return {}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_make_items, args=(settings, source, [r for r in ROLES if code[r]], theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise UserError(
            f"{' or '.join(files)}: this code ended the process that imported it and made the items (exit code "
            f"{process.exitcode}): by os._exit, by the crash of a library, or because memory ran out. Let it raise an "
            "exception instead."
        ) from None
    finally:
        process.join(END_S)
        process.kill()
        process.join()


def check_equal(role: str, source: Source, rehearsed: list[str]) -> None:
    """Raise UserError if the items of a role differ from the rehearsed ones."""
    made = _digests(source)
    if made == rehearsed:
        return
    if sorted(made) == sorted(rehearsed):
        found = "the same items came in another order"
    elif len(made) != len(rehearsed):
        found = f"first there were {len(rehearsed)} items, then {len(made)}"
    else:
        number = next(number for number, pair in enumerate(zip(made, rehearsed, strict=True), 1) if len(set(pair)) > 1)
        found = f"item {number} had another content"
    raise UserError(
        f"{source.where}: the {role} items were made twice, and {found}. Give random numbers a seed "
        "(random.Random(0)), sort what comes from a set or a listing of files, and use no clock; or write the items to "
        "a file once and name it as items.source."
    )


def _make_items(settings: Any, source: TaskSource, roles: list[str], answer: Connection) -> None:
    """What the other process does: make the items and send their digests."""
    made: dict[str, list[str]] = {}
    with suppress(Exception):  # it comes again where the items are read
        task = load_task(source)
        for role in roles:
            found = read_source(settings, task, role)
            made |= {role: _digests(found)} if found is not None else {}
    answer.send(made)


def _digests(source: Source) -> list[str]:
    return [content_digest(item)[:16] for item in source.table.to_pylist()]
