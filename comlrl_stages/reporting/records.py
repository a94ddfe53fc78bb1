"""What lies beside the artifacts: counts, provenance, timing, and the pipeline that they spell out.

The provenance of an artifact names its inputs, so that the whole chain behind a result is found by walking upstream.
The pipeline that is drawn in the report is therefore the one that ran, not the one that was planned.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from comlrl_stages.artifacts import artifact_digest
from comlrl_stages.files import beside

_SEED, _ROUND = re.compile(r"seed(\d+)"), re.compile(r"round(\d+)")
_VERSIONS, _LOG = "versions.", ".training_log.parquet"
_KINDS = {
    "collections": "collection",
    "preferences": "preferences",
    "reward_models": "reward model",
    "methods": "method",
    "models": "model",
}


@dataclass(frozen=True)
class Owner:
    """Whose an artifact is, read off its path: `.../seed1/methods/madpo/round002/policy` is madpo's."""

    kind: str
    name: str
    seed: int | None
    round: int | None

    def __str__(self) -> str:
        return self.name if self.kind == "method" else f"{self.kind} {self.name}".strip()


@dataclass(frozen=True)
class Record:
    """One artifact and the facts that lie beside it; wall time and memory are NaN where no timing lies there.

    steps: optimizer steps of a training. best_step: the one whose weights it kept, None where it kept the last.
    """

    path: Path
    owner: Owner
    stage: str
    digest: str
    settings_digest: str
    code: str
    versions: Mapping[str, str]
    resolved: Mapping[str, Any]
    rows: int | None
    tokens: int
    dropped: Mapping[str, int]
    steps: int
    best_step: int | None
    wall_s: float
    memory_mb: float
    host: str
    work: str
    inputs: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Return the path from the results folder on; it holds nothing of the machine."""
        return shown(self.path)


@dataclass(frozen=True)
class Node:
    """One box of the pipeline: a stage of one owner, over all seeds and rounds."""

    key: str
    stage: str
    lane: str
    runs: int


@dataclass
class Pipeline:
    """Nodes by key, and edges between keys; rounds are folded into one box, so there is no cycle."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: set[tuple[str, str]] = field(default_factory=set)


def owner_of(path: Path) -> Owner:
    """Read owner, seed and round off a path below the results folder."""
    parts = shown(path).split("/")
    seed = next((int(m[1]) for part in parts if (m := _SEED.fullmatch(part))), None)
    round_ = next((int(m[1]) for part in parts if (m := _ROUND.fullmatch(part))), None)
    for folder, name in pairwise(parts):
        if folder in _KINDS:
            return Owner(_KINDS[folder], name.removesuffix(_LOG), seed, round_)
    return Owner("data", "", seed, round_)


def shown(path: Path) -> str:
    """Return a path from its last `results` folder on, or its last four parts."""
    parts = Path(path).parts
    if "results" in parts:
        last = len(parts) - 1 - parts[::-1].index("results")
        return "/".join(parts[last + 1 :])
    return "/".join(part for part in parts[-4:] if part != "/")


def collect(paths: Iterable[Path]) -> list[Record]:
    """Return the records of the given artifacts and of everything upstream of them, sorted by path."""
    found: dict[str, Record] = {}
    waiting = [Path(path) for path in paths]
    while waiting:
        path = waiting.pop()
        key = os.path.abspath(path)
        if key not in found and beside(path, "provenance").exists():
            found[key] = _record(path)
            waiting += found[key].inputs
    return sorted(found.values(), key=lambda record: record.name)


def runs(records: Iterable[Record]) -> list[Record]:
    """Return one record per run of a stage: a stage that writes three artifacts spent its time once."""
    return list({record.work: record for record in records}.values())


def dropped(records: Iterable[Record]) -> list[tuple[str, str, str, int]]:
    """Return (stage, owner, reason, count), summed over seeds and rounds; zero counts are left out."""
    total: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        for reason, count in record.dropped.items():
            total[record.stage, str(record.owner), reason] += count
    return [(*key, count) for key, count in sorted(total.items()) if count]


def pipeline(records: Iterable[Record]) -> Pipeline:
    """Fold the records into boxes and arrows; what a later round takes from an earlier one is no arrow."""
    records = list(records)
    by_path = {os.path.abspath(record.path): record for record in records}
    runs_of: Counter[str] = Counter(_node_key(record) for record in runs(records))
    graph = Pipeline()
    for record in records:
        key = _node_key(record)
        lane = "data" if record.owner.kind == "model" else str(record.owner)
        graph.nodes[key] = Node(key, record.stage, lane, runs_of[key])
        for source in (by_path.get(os.path.abspath(path)) for path in record.inputs):
            if source and _node_key(source) != key and not _earlier_round(source, record):
                graph.edges.add((_node_key(source), key))
    return graph


def _earlier_round(source: Record, record: Record) -> bool:
    return None not in (source.owner.round, record.owner.round) and source.owner.round < record.owner.round


def _node_key(record: Record) -> str:
    lane = "data" if record.owner.kind == "model" else f"{record.owner.kind}/{record.owner.name}"
    return f"{lane}/{record.stage}"


def _record(path: Path) -> Record:
    provenance, manifest, timing = (_read(beside(path, kind)) for kind in ("provenance", "manifest", "timing"))
    tracked = dict(provenance.get("tracked", {}))
    counts = manifest.get("counts", {})
    versions = {key.removeprefix(_VERSIONS): str(v) for key, v in tracked.items() if key.startswith(_VERSIONS)}
    settings = {k: v for k, v in tracked.items() if k != "code" and not k.startswith((_VERSIONS, "schema."))}
    return Record(
        path=path,
        owner=owner_of(path),
        stage=provenance.get("stage", "unknown"),
        digest=artifact_digest(path)[:12] if manifest else "",
        settings_digest=_digest(settings)[:12],
        code=str(tracked.get("code", ""))[:16],
        versions=versions,
        resolved=provenance.get("resolved", {}),
        rows=counts.get("rows"),
        tokens=int(counts.get("tokens") or 0),
        dropped=counts.get("dropped") or {},
        steps=int(counts.get("steps") or 0),
        best_step=counts.get("best_step"),
        wall_s=float(timing.get("wall_s", "nan")),
        memory_mb=float(timing.get("peak_memory_mb", "nan")),
        host=str(timing.get("host", "")),
        work=_digest([os.path.dirname(os.path.abspath(path)), provenance]),
        inputs=tuple(Path(given["path"]) for given in provenance.get("inputs", [])),
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
