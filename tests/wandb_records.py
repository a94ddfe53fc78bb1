"""Reads what the W&B client writes offline: a log of protocol buffers, framed as LevelDB frames its own log."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768
FULL, LAST = 1, 4


@dataclass(frozen=True)
class RunRecord:
    """One recorded run."""

    records: list[Record]

    @classmethod
    def read(cls, file: Path) -> "RunRecord":
        return cls(list(_records(file.read_bytes())))

    @classmethod
    def all_below(cls, folder: Path) -> list["RunRecord"]:
        """Every run that was recorded offline, in the order of their beginnings."""
        return [cls.read(file) for file in sorted(folder.rglob("offline-run-*/*.wandb"))]

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]

    @property
    def run(self) -> Any:
        return self.of_kind("run")[0]

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [{i.nested_key[0]: json.loads(i.value_json) for i in row.item} for row in self.of_kind("history")]

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.history]

    @property
    def axes(self) -> dict[str, str]:
        """The metric on the horizontal axis, by name or pattern of the metrics drawn over it."""
        return {m.glob_name or m.name: m.step_metric for m in self.of_kind("metric") if m.step_metric}

    def artifacts(self, *, used: bool) -> dict[str, str]:
        """The digest that each artifact's metadata gives, by name."""
        found = [one for one in self.of_kind("artifact") if one.use_after_commit == used]
        return {one.name: json.loads(one.metadata)["sha256"] for one in found}

    @property
    def exit_code(self) -> int | None:
        """None where the run was cut off."""
        return next((one.exit_code for one in self.of_kind("exit")), None)


def _records(data: bytes) -> Iterator[Record]:
    assert data[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""
