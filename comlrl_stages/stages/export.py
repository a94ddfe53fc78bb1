"""Export a trained team: agent_0, agent_1, ... that `from_pretrained` loads, with checksums and provenance."""

import json
import shutil

from comlrl_stages.artifacts import Work, checked_directory, file_digest, write_json
from comlrl_stages.files import beside
from comlrl_stages.settings import ExportSettings


def run(settings: ExportSettings, work: Work) -> None:
    """Write the folder `export`."""
    policy = checked_directory(work.inputs["policy"])
    export = work.output("export")
    for agent in range(settings.agents):
        shutil.copytree(policy / f"agent_{agent}", export / f"agent_{agent}", dirs_exist_ok=True)
    files = sorted(path for path in export.rglob("*") if path.is_file())
    lines = [f"{file_digest(path)}  {path.relative_to(export).as_posix()}" for path in files]
    provenance = json.loads(beside(policy, "provenance").read_text(encoding="utf-8"))
    write_json(export / "provenance.json", provenance)
    (export / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    work.count("export", agents=settings.agents, files=len(files))
