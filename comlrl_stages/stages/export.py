"""Export a trained team: agent_0, agent_1, ... that `from_pretrained` loads, with checksums and provenance.

Adapters are merged into their base models. Critics and value heads go along, so that another run can start from them.
"""

import json
import shutil
from pathlib import Path

from comlrl_stages.artifacts import Work, checked_directory, file_digest, write_json
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside
from comlrl_stages.settings import ExportSettings


def run(settings: ExportSettings, work: Work) -> None:
    """Write the folder `export`."""
    policy = checked_directory(work.inputs["policy"])
    export = work.output("export")
    names = [f"agent_{agent}" for agent in range(settings.agents)]
    if settings.lora:
        _merge(settings, work, [(policy / name, export / name) for name in names])
    copied = [*([] if settings.lora else names), *(["critics"] if (policy / "critics").is_dir() else [])]
    for name in copied:
        shutil.copytree(policy / name, export / name, dirs_exist_ok=True)
    files = sorted(path for path in export.rglob("*") if path.is_file())
    lines = [f"{file_digest(path)}  {path.relative_to(export).as_posix()}" for path in files]
    provenance = json.loads(beside(policy, "provenance").read_text(encoding="utf-8"))
    write_json(export / "provenance.json", provenance)
    (export / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    work.count("export", agents=settings.agents, files=len(files))


def _merge(settings: ExportSettings, work: Work, places: list[tuple[Path, Path]]) -> None:
    """Write each agent, its adapter merged into the base model; `places` are adapter and target of each."""
    from comlrl_stages.teams.policies import export_merged  # whole models are only copied, and need no torch

    models = work.inputs.get("models") or []
    if len(models) != len(places):
        raise UserError(
            f"{work.inputs['policy']} holds adapters, so export needs the base model of each of {len(places)} agents, "
            f"but got {len(models)}. Give --model once for each agent."
        )
    digests = work.digest("models")
    for agent, (adapter, target) in enumerate(places):
        base = checked_directory(models[agent])
        export_merged(base, digests[agent], adapter, target, trust_remote_code=settings.trust_remote_code[agent])
