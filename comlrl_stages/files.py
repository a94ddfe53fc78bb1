"""Files without weight: digests, atomic JSON, and the names of what lies beside an artifact."""

import hashlib
import json
import os
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
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def beside(artifact: Path, kind: str) -> Path:
    """Path of the `manifest`, `provenance` or `timing` file of an artifact."""
    artifact = Path(artifact)
    return artifact.with_name(f"{artifact.name}.{kind}.json")
