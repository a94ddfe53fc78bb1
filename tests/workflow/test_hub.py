"""A model and items from a hub: only `prepare` and `split` need the network, and the team can go back there."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import yaml

from comlrl_stages.teams.loading import save_model

from ..hub import CLOSED, Hub, User, files_of, hub_environment
from ..teams.conftest import llama
from .conftest import EXPERIMENT, Workflow, make_workflow

pytestmark = pytest.mark.slow

ITEMS = [{"prompt": f"the {animal}", "target_min": 1.0, "target_max": 2.0} for animal in ("owl", "fox", "hen", "cat")]
SMALL = {
    **EXPERIMENT,
    "items": {"source": "hub://org/animals", "eval_split": "test"},
    "team": "llama",
    "sampling": {"max_new_tokens": 6},
    "methods": {"madpo": EXPERIMENT["methods"]["madpo"]},
    "evaluation": {"samples_per_task": 2, "bootstrap_replicates": 100},
}
TOKEN = "hf_owner"
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for agent in ("agent_0", "agent_1"):
    AutoTokenizer.from_pretrained("owner/team", subfolder=agent)
    AutoModelForCausalLM.from_pretrained("owner/team", subfolder=agent).save_pretrained(f"{sys.argv[1]}/{agent}")
"""


@dataclass
class Project:
    """The workflow after its two halves, and the hub that the first one used."""

    workflow: Workflow
    hub: Hub
    requests: int  # those of the first half


def without_network() -> list[str]:
    """A prefix that takes all networks from a command, where this machine lets one do so."""
    for prefix in (["unshare", "-n"], ["unshare", "-rn"]):
        try:
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return prefix
        except FileNotFoundError:
            break
    return []


def run(workflow: Workflow, prefix: list[str], environment: dict[str, str], *arguments: str) -> str:
    process = workflow.process()
    process["env"] = {name: value for name, value in process["env"].items() if name != "HF_HUB_OFFLINE"} | environment
    command = [*prefix, *workflow.command("--config", "experiments=small", *arguments)]
    done = subprocess.run(command, **process, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    root = tmp_path_factory.mktemp("hub")
    save_model(llama(), root / "llama")
    lines = [f"{json.dumps(item)}\n".encode() for item in ITEMS]
    workflow = make_workflow(root / "project")
    workflow.write("config/models/llama.yaml", yaml.safe_dump({"hub": "org/tiny", "revision": "v1"}))
    workflow.write_experiment(SMALL)
    with Hub(root / "hub", tokens={TOKEN: "owner"}) as hub:
        hub.add("models", "org/tiny", files_of(root / "llama"), "v1")
        hub.add("datasets", "org/animals", {"train.jsonl": b"".join(lines[:3]), "test.jsonl": lines[3]})
        run(workflow, [], hub_environment(hub.endpoint, root / "home"), "--until", "prepare", "split")
        requests = len(hub.requests)
        offline = hub_environment(CLOSED, root / "empty home") | {"HF_HUB_OFFLINE": "1"}
        run(workflow, without_network(), offline)
        yield Project(workflow, hub, requests)


def resolved(project: Project, artifact: str) -> dict:
    path = project.workflow.folder / "results" / f"{artifact}.provenance.json"
    return json.loads(path.read_text(encoding="utf-8"))["resolved"]


def test_after_prepare_and_split_no_network_is_needed(project: Project) -> None:
    assert 0 < project.requests == len(project.hub.requests)
    report = project.workflow.folder / "results" / "small" / "report"
    assert pd.read_csv(report / "summary.csv")["method"].tolist() == ["madpo"]
    assert not project.workflow.jobs("--config", "experiments=small")


def test_the_report_names_the_commits_of_model_and_items(project: Project) -> None:
    model = project.hub.commit("models", "org/tiny", "v1")
    items = project.hub.commit("datasets", "org/animals", "main")
    assert resolved(project, "models/llama")["commit"] == model
    assert resolved(project, "small/split/train.parquet")["revision"] == [f"hub://org/animals@{items}"]
    page = (project.workflow.folder / "results" / "small" / "report" / "report.html").read_text(encoding="utf-8")
    assert model in page and f"hub://org/animals@{items}" in page


def test_a_pushed_team_loads_from_the_hub_as_its_card_says(project: Project, tmp_path: Path) -> None:
    export = project.workflow.folder / "results" / "small" / "seed0" / "methods" / "madpo" / "export"
    with User(tmp_path, project.hub.endpoint) as user:
        user.does("push", export, "--repo", "owner/team", "--public", "--yes", HF_TOKEN=TOKEN)
    assert 'subfolder=f"agent_{i}"' in project.hub.files("models", "owner/team")["README.md"].decode()
    environment = project.workflow.process()["env"] | hub_environment(project.hub.endpoint, tmp_path)
    del environment["HF_HUB_OFFLINE"]
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "loaded")], env=environment, check=True)
    for agent in ("agent_0", "agent_1"):
        loaded = (tmp_path / "loaded" / agent / "model.safetensors").read_bytes()
        assert loaded == (export / agent / "model.safetensors").read_bytes()
