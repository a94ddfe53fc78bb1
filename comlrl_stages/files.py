"""Files without weight: digests, atomic JSON, and the names of what lies beside an artifact."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Version of every table schema and manifest; results of another version are refused.
SCHEMA_VERSION = 1


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, with sorted keys, so that equal content is equal bytes."""
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there takes its place when the block ends well, and goes otherwise."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk this makes room for the message
        raise


def beside(artifact: Path, kind: str) -> Path:
    """Path of the `manifest`, `provenance` or `timing` file of an artifact."""
    artifact = Path(artifact)
    return artifact.with_name(f"{artifact.name}.{kind}.json")
