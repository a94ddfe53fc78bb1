"""Tables, manifests and the only place that writes result files.

An artifact is a table (one Parquet file) or a directory (a model). Beside it lie

* `<artifact>.manifest.json`: schema version, SHA-256 per file, counts. Written last: it says that the artifact is done.
* `<artifact>.provenance.json`: settings, code fingerprint, library versions, input digests, resolved facts.
* `<artifact>.timing.json`: wall time, host, memory. Never part of a digest.

A stage works inside `<first output>.partial/`, a folder that outlives a kill and belongs to one exact piece of work
(settings, code, versions and input digests). When the stage ends, the finished artifacts move from there into place.
"""

import fcntl
import hashlib
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.errors import UserError
from comlrl_stages.files import SCHEMA_VERSION, atomic_file, beside, file_digest, write_json
from comlrl_stages.progress import progress_reporter

LOCK_PATIENCE_S = 60.0
RESERVED_BYTES = 32768

# --- table schemas ------------------------------------------------------------------------------------------------

#: The key of a joint context. `step` is 0 outside RL; `node` is "" at the root of a rollout tree.
KEY = (
    ("source", pa.string()),
    ("round", pa.int16()),
    ("step", pa.int64()),
    ("task_id", pa.string()),
    ("turn", pa.int8()),
    ("node", pa.string()),
)
KEY_NAMES = tuple(name for name, _ in KEY)


def _schema(name: str, *columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(columns), metadata={b"comlrl_stages.table": f"{name}/{SCHEMA_VERSION}".encode()})


COMPLETIONS = _schema(
    "completions",
    *KEY,
    ("sample", pa.int32()),
    ("agent", pa.int8()),
    ("model_digest", pa.string()),
    ("prompt", pa.string()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("completion_ids", pa.list_(pa.int32())),
    ("ids_from", pa.string()),
    ("log_probs", pa.list_(pa.float32())),
    ("reference_log_probs", pa.list_(pa.float32())),
    ("text", pa.string()),
    ("role_texts", pa.list_(pa.string())),
    ("finish_reason", pa.string()),
    ("invalid", pa.string()),
)
REWARDS = _schema(
    "rewards",
    *KEY,
    ("joint", pa.int32()),
    ("samples", pa.list_(pa.int32())),
    ("scorer", pa.string()),
    ("raw", pa.float64()),
    ("reward", pa.float64()),
    ("agent_rewards", pa.list_(pa.float64())),
    ("parts", pa.map_(pa.string(), pa.float64())),
    ("status", pa.string()),
    ("error", pa.string()),
)
JOINT_KEY = pa.struct(
    [
        ("source", pa.string()),
        ("round", pa.int16()),
        ("step", pa.int64()),
        ("turn", pa.int8()),
        ("node", pa.string()),
        ("joint", pa.int32()),
    ]
)
PAIRS = _schema(
    "pairs",
    ("pair_id", pa.string()),
    ("task_id", pa.string()),
    ("winner", JOINT_KEY),
    ("loser", JOINT_KEY),
    ("winner_raw", pa.float64()),
    ("loser_raw", pa.float64()),
    ("winner_reward", pa.float64()),
    ("loser_reward", pa.float64()),
    ("preference", pa.float32()),
    ("label", pa.string()),
    ("annotators", pa.int32()),
    ("agreement", pa.float32()),
    ("candidate_mean", pa.float64()),
)
TRAINING_PAIRS = _schema(
    "training_pairs",
    ("draw", pa.int32()),
    ("pair_id", pa.string()),
    ("from_round", pa.int16()),
    ("age", pa.int16()),
    ("round_weight", pa.float32()),
)
REFERENCE_LOG_PROBS = _schema(
    "reference_log_probs",
    ("pair_id", pa.string()),
    ("side", pa.string()),
    ("agent", pa.int8()),
    ("log_prob_sum", pa.float64()),
    ("tokens", pa.int32()),
    ("reference_digest", pa.string()),
)
EVALUATION = _schema(
    "evaluation",
    *KEY,
    ("method", pa.string()),
    ("seed", pa.int64()),
    ("split", pa.string()),
    ("prompt", pa.string()),
    ("decoding", pa.string()),
    ("sample", pa.int32()),
    ("raw", pa.float64()),
    ("reward", pa.float64()),
    ("expected_return", pa.float64()),
    ("learned_reward", pa.float64()),
    ("texts", pa.list_(pa.string())),
    ("finish_reasons", pa.list_(pa.string())),
    ("tokens", pa.list_(pa.int32())),
    ("kl", pa.list_(pa.float64())),
    ("parts", pa.map_(pa.string(), pa.float64())),
    ("status", pa.string()),
)
TRAINING_LOG = _schema(
    "training_log",
    ("phase", pa.string()),
    ("round", pa.int16()),
    ("step", pa.int64()),
    ("env_step", pa.int64()),
    ("tokens", pa.int64()),
    ("turn", pa.int8()),
    ("agent", pa.int8()),
    ("name", pa.string()),
    ("value", pa.float64()),
)


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Build a table of `schema` from rows; columns that no row has are null."""
    return pa.table({name: [row.get(name) for row in rows] for name in schema.names}, schema=schema)


# --- reading ------------------------------------------------------------------------------------------------------


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a table artifact after its digest and schema were checked.

    With `schema=None` only the digest is checked (task items have the user's own columns).
    Raises UserError for a missing, edited or corrupt file or one of another schema version.
    """
    path = Path(path)
    _check_digest(path, read_manifest(path))
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as Parquet ({error}). Delete it and run the workflow again."
        ) from error
    if schema is None:
        return table.replace_schema_metadata(None)
    _check_schema(path, table.schema, schema)
    return table


def read_json(path: Path) -> Any:
    """Read a JSON artifact after its digest was checked."""
    path = Path(path)
    _check_digest(path, read_manifest(path))
    return json.loads(path.read_text(encoding="utf-8"))


def checked_directory(folder: Path) -> Path:
    """Return `folder` after every file that its manifest lists was checked."""
    folder = Path(folder)
    _check_digest(folder, read_manifest(folder))
    return folder


def read_manifest(artifact: Path) -> dict[str, Any]:
    """Read the manifest beside `artifact`."""
    path = beside(artifact, "manifest")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: not found, so {artifact} is not a finished artifact. Run the stage that makes it "
            f"(for example: snakemake --cores all {path})."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid JSON ({error}). Delete it and run the workflow again.") from error
    version = manifest.get("schema") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: written with schema version {version}, this version reads {SCHEMA_VERSION}. "
            "Move the old results away and run the workflow again."
        )
    return manifest


def artifact_digest(artifact: Path) -> str:
    """SHA-256 that stands for the whole content of a finished artifact (or of a plain file without a manifest)."""
    artifact = Path(artifact)
    if beside(artifact, "manifest").exists() or not artifact.is_file():
        return hashlib.sha256(_canonical(read_manifest(artifact)["files"])).hexdigest()
    return file_digest(artifact)


def digest_of_part(artifact: Path, part: str) -> str:
    """SHA-256 that stands for one folder of a finished directory artifact, such as one agent of a policy."""
    files = read_manifest(artifact)["files"]
    return hashlib.sha256(_canonical({n: f for n, f in files.items() if n.startswith(f"{part}/")})).hexdigest()


def mismatches(artifact: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Say what differs between an artifact and its manifest, file by file; empty when all is well."""
    artifact = Path(artifact)
    is_file = set(manifest["files"]) == {artifact.name} and not artifact.is_dir()
    root = artifact.parent if is_file else artifact
    problems = []
    for name, facts in manifest["files"].items():
        path = root / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif file_digest(path) != facts["sha256"]:
            problems.append(f"{path}: has changed since it was written (its SHA-256 is not the manifest's)")
    return problems


def _check_digest(artifact: Path, manifest: Mapping[str, Any]) -> None:
    problems = mismatches(artifact, manifest)
    if problems:
        raise UserError("\n".join(problems) + f"\nDelete {beside(artifact, 'manifest')} and run the workflow again.")


def _check_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    label = b"comlrl_stages.table"
    if (found.metadata or {}).get(label) != expected.metadata[label]:
        raise UserError(
            f"{path}: is a table of kind {(found.metadata or {}).get(label, b'unknown').decode()}, "
            f"expected {expected.metadata[label].decode()}. Move the old results away and run the workflow again."
        )
    if not found.equals(expected):
        raise UserError(f"{path}: has columns {found.names}, expected {expected.names} with the documented types.")


# --- writing ------------------------------------------------------------------------------------------------------


def write_table(path: Path, table: pa.Table, schema: pa.Schema | None = None) -> None:
    """Write Parquet atomically; with a schema, columns and types must match it."""
    table = table if schema is None else table.select(schema.names).cast(schema)
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@dataclass
class Work:
    """What a stage's `run(settings, work)` gets: inputs, a place to work in, and where to put what it makes."""

    stage: str
    inputs: Mapping[str, Any]
    targets: Mapping[str, Path]
    partial: Path
    runtime: Mapping[str, Any]
    identity: Mapping[str, Any]
    finished: bool = False  # everything was computed, and the stage was killed while it published
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    tracker: Callable[[Sequence[Mapping[str, Any]]], None] | None = None

    @property
    def key(self) -> str:
        """Digest of what is done: stage, settings, code, versions and inputs."""
        return hashlib.sha256(_canonical(self.identity)).hexdigest()

    def output(self, name: str) -> Path:
        """Where to write the artifact `name`; it moves into place when the stage has ended well."""
        path = self.partial / "artifacts" / name / self.targets[name].name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def count(self, name: str, **numbers: Any) -> None:
        """Record numbers for the manifest of artifact `name`: rows, tokens, dropped={reason: n}, ..."""
        self.counts.setdefault(name, {}).update(_plain(numbers))

    def resolved(self, **facts: Any) -> None:
        """Record what `auto` became, for the provenance."""
        self.facts.update(_plain(facts))

    def progress(self, total: int, label: str) -> Callable[..., None]:
        """Return `advance(n=1, note="", kept=False)`: a bar on a terminal, sparse lines in a log."""
        seconds = float(self.runtime.get("log_seconds", 10.0))
        return progress_reporter(total, f"{self.stage}: {label}", seconds)

    def track(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows of the training log while they arise, in the order of their steps, where the user asked for it.

        A run that was killed shows the rows of its checkpoint again: what is known already is passed over.
        """
        if self.tracker is not None:
            self.tracker(rows)

    def digest(self, name: str) -> Any:
        """Digest of the input `name` (a list of digests for a list of inputs)."""
        return self.identity["inputs"][name]


@contextmanager
def open_work(
    stage: str,
    tracked: Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Path],
    runtime: Mapping[str, Any] | None = None,
) -> Iterator[Work]:
    """Lock and open the partial folder of a piece of work; publish its artifacts when the block ends well.

    A folder left by a killed run of the same work is continued, one of other work is emptied. On an error inside the
    block the folder stays for the next try and nothing is published.
    """
    started = time.monotonic()
    inputs = {name: value for name, value in inputs.items() if value is not None}
    first = next(iter(outputs.values()))
    partial = first.with_name(f"{first.name}.partial")
    identity = {"stage": stage, "tracked": dict(tracked), "inputs": {n: _digests(v) for n, v in inputs.items()}}
    with _locked(partial):
        work = Work(stage, inputs, outputs, partial, runtime or {}, identity)
        _keep_or_empty(partial, work.key)
        work.finished = _is_finished(partial, outputs)
        with _room_for_a_message(partial):
            yield work
            seal(work)
            _publish(partial, outputs, started)
        _no_dates_from_the_future(inputs)
        _remove(partial)


@contextmanager
def _room_for_a_message(partial: Path) -> Iterator[None]:
    """Hold a little space that is given back on an error: on a full disk the log could not say why otherwise."""
    reserve = partial / "reserve"
    reserve.write_bytes(os.urandom(RESERVED_BYTES))
    try:
        yield
    finally:
        reserve.unlink(missing_ok=True)


def _no_dates_from_the_future(inputs: Mapping[str, Any]) -> None:
    """Date inputs from the future to now: where the clock was set back Snakemake refuses outputs older than inputs.

    Nothing runs again for it: what changed is told by digests.
    """
    paths = [path for value in inputs.values() for path in (value if isinstance(value, list | tuple) else [value])]
    for path in [*paths, *(beside(path, "manifest") for path in paths)]:
        with suppress(OSError):
            if path.stat().st_mtime > time.time():
                os.utime(path)


def _is_finished(partial: Path, outputs: Mapping[str, Path]) -> bool:
    """Whether everything was made, and still is there: what a killed run published may have been deleted since."""
    if not (partial / "complete.json").exists():
        return False
    sealed = json.loads((partial / "complete.json").read_text(encoding="utf-8"))
    for name, target in outputs.items():
        made = partial / "artifacts" / name / target.name
        if name not in sealed or mismatches(made if made.exists() else target, sealed[name]["manifest"]):
            (partial / "complete.json").unlink()
            shutil.rmtree(partial / "artifacts", ignore_errors=True)
            return False
    return True


def _remove(partial: Path) -> None:
    """Delete the folder, its lock last. A process that waits for the lock may have made the folder anew."""
    _empty(partial)
    (partial / ".lock").unlink()
    with suppress(OSError):
        partial.rmdir()


def _digests(value: Any) -> Any:
    return [artifact_digest(path) for path in value] if isinstance(value, list | tuple) else artifact_digest(value)


def _keep_or_empty(partial: Path, key: str) -> None:
    """Keep what a killed run of the same work left; empty the folder of any other work (its lock file stays)."""
    key_file = partial / "key"
    if key_file.exists() and key_file.read_text() == key:
        return
    _empty(partial)
    key_file.write_text(key)


def _empty(partial: Path) -> None:
    (partial / "key").unlink(missing_ok=True)  # first: a folder that is half empty belongs to no work
    for path in partial.iterdir():
        if path.name == ".lock":
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the folder's lock; wait for a dying writer, give up on a living one."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        lock = partial / ".lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its owner has just deleted the folder
            continue
        with os.fdopen(descriptor, "r+") as stream:
            if _try_lock(stream) and _is_still(lock, stream):
                stream.truncate(0)
                stream.write(f"{socket.gethostname()} {os.getpid()}")
                stream.flush()
                yield
                return
            owner = stream.read() or "unknown"
        if time.monotonic() > deadline:
            raise UserError(
                f"{partial}: another process works here (host and pid: {owner}) and did not end within "
                f"{LOCK_PATIENCE_S:.0f} s. Wait for it or stop it, then run again."
            )
        time.sleep(0.2)


def _try_lock(stream: Any) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_still(lock: Path, stream: Any) -> bool:
    """Whether the open file is the one that the path names, and not one that was deleted meanwhile."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), lock.stat())
    except FileNotFoundError:
        return False


def seal(work: Work) -> dict[str, str]:
    """Write the manifest and provenance of every artifact into the partial folder, which marks the work complete.

    From then on a killed stage only publishes, and sealed work stays as it is. Returns each artifact's digest, by name.
    """
    path = work.partial / "complete.json"
    if not path.exists():
        write_json(path, {name: _sealed(work, name) for name in work.targets})
    sealed = json.loads(path.read_text(encoding="utf-8"))
    return {name: hashlib.sha256(_canonical(one["manifest"]["files"])).hexdigest() for name, one in sealed.items()}


def _sealed(work: Work, name: str) -> dict[str, Any]:
    path = work.output(name)
    if not path.exists():
        raise RuntimeError(f"stage {work.stage} did not write its output {name} ({work.targets[name]})")
    return {
        "manifest": {"schema": SCHEMA_VERSION, "files": _files(path), "counts": work.counts.get(name, {})},
        "provenance": {
            "stage": work.stage,
            "tracked": dict(work.identity["tracked"]),
            "inputs": named_inputs(work),
            "resolved": work.facts,
        },
    }


def named_inputs(work: Work) -> list[dict[str, str]]:
    """Name, path and digest of every input, one by one where a name has several."""
    named = []
    for name, value in work.inputs.items():
        paths, digests = (
            (value, work.digest(name)) if isinstance(value, list | tuple) else ([value], [work.digest(name)])
        )
        named += [{"name": name, "path": str(p), "digest": d} for p, d in zip(paths, digests, strict=True)]
    return named


def _publish(partial: Path, outputs: Mapping[str, Path], started: float) -> None:
    """Move the artifacts into place, the manifests last. May be cut off anywhere and done again."""
    sealed = json.loads((partial / "complete.json").read_text(encoding="utf-8"))
    for name, target in outputs.items():
        beside(target, "manifest").unlink(missing_ok=True)
        made = partial / "artifacts" / name / target.name
        if made.exists():
            _replace(made, target)
    timing = {
        "wall_s": round(time.monotonic() - started, 2),
        "host": socket.gethostname(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    for name, target in outputs.items():
        _publish_json(partial, beside(target, "timing"), timing)
        _publish_json(partial, beside(target, "provenance"), sealed[name]["provenance"])
    for name, target in outputs.items():
        _publish_json(partial, beside(target, "manifest"), sealed[name]["manifest"])


def _publish_json(partial: Path, target: Path, content: Any) -> None:
    """Write inside the partial folder, where a kill leaves no litter, and move it into place."""
    write_json(partial / target.name, content)
    os.replace(partial / target.name, target)


def _replace(made: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif made.is_dir():
        target.unlink(missing_ok=True)
    os.replace(made, target)


def _files(path: Path) -> dict[str, dict[str, Any]]:
    """Digest and size of each file of an artifact, by its name relative to the artifact (or its own name)."""
    if path.is_file():
        return {path.name: {"sha256": file_digest(path), "bytes": path.stat().st_size}}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {f.relative_to(path).as_posix(): {"sha256": file_digest(f), "bytes": f.stat().st_size} for f in files}


def _plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as JSON has them; scalars of numpy and torch become Python's. Raises TypeError for anything else."""

    def scalar(value: Any) -> Any:
        if hasattr(value, "item"):
            return value.item()
        raise TypeError(f"{value!r} ({type(value).__name__}) cannot stand in a manifest; give numbers and texts")

    return json.loads(json.dumps(numbers, default=scalar))


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
