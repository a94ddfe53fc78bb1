"""Pushing a team to the hub: what arrives, who is asked, and that nothing is overwritten or given away."""

import json
import shutil
from pathlib import Path

import pytest

from comlrl_stages.artifacts import open_work
from comlrl_stages.settings import CardSettings, ExportSettings
from comlrl_stages.stages import card, export

from .hub import CLOSED, Hub, User, files_of

TOKEN = "hf_secretOfOwner"
METRICS = {"eval/items": 2, "eval/joint_responses": 4, "eval/turn_1/reward_mean": 0.5}


def made(folder, stage, settings, inputs, name):
    with open_work(name, {"key": "value"}, inputs, {name: folder}) as work:
        stage.run(settings, work)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """An export with its card, as the workflow leaves it."""
    root = tmp_path_factory.mktemp("method")
    with open_work("optimize", {}, {}, {"policy": root / "policy", "metrics": root / "metrics.json"}) as work:
        for agent in ("agent_0", "agent_1"):
            folder = work.output("policy") / agent
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(agent.encode() * 1000)
            (folder / "config.json").write_text(json.dumps({"agent [0]": agent}))
        work.output("metrics").write_text(json.dumps(METRICS))
    made(root / "export", export, ExportSettings(agents=2), {"policy": root / "policy"}, "export")
    settings = CardSettings(
        experiment="mine", method="madpo", task={"name": "length_ratio"}, method_settings={"algorithm": "madpo"}
    )
    made(root / "card.md", card, settings, {"export": root / "export", "metrics": root / "metrics.json"}, "card")
    (root / "export" / "notes.txt").write_text("not for others")
    return root / "export"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub"), tokens={TOKEN: "owner", "hf_stranger": "stranger"}) as hub:
        hub.add("models", "owner/taken", {"README.md": b"# Another model"})
        hub.add("models", "owner/empty", {".gitattributes": b""})
        hub.failing = {"owner/down": 500}
        yield hub


@pytest.fixture(scope="module")
def user(hub, tmp_path_factory):
    modules = ("comlrl_stages.publishing", "huggingface_hub.hf_api")
    with User(tmp_path_factory.mktemp("user"), hub.endpoint, modules) as user:
        yield user


def expected(team):
    """What of the export belongs on the hub."""
    files = files_of(team)
    return {name: content for name, content in files.items() if name != "notes.txt" and not name.endswith("/README.md")}


def arrived(hub, repo):
    return {name: content for name, content in hub.files("models", repo).items() if name != ".gitattributes"}


def copy_of(team, folder):
    shutil.copytree(team.parent, folder)
    return folder / "export"


# --- what arrives -------------------------------------------------------------------------------------------------


def test_the_team_arrives_byte_by_byte_with_card_checksums_and_provenance(hub, user, team):
    said = user.does("push", team, "--repo", "owner/team", "--yes", HF_TOKEN=TOKEN)
    assert arrived(hub, "owner/team") == expected(team)
    assert set(expected(team)) > {"README.md", "SHA256SUMS", "provenance.json", "agent_1/model.safetensors"}
    commit = hub.commit("models", "owner/team", "main")
    assert f"2 agents, 7 files, 0.0 MB to {hub.endpoint}/owner/team (private)" in said
    assert f"pushed: {hub.endpoint}/owner/team/commit/{commit}" in said and TOKEN not in said
    assert "owner/team" in hub.private


def test_public_is_said_and_meant(hub, user, team):
    said = user.does("push", team, "--repo", "owner/open", "--public", "--yes", HF_TOKEN=TOKEN)
    assert "(public: everybody can read it)" in said and "owner/open" not in hub.private


def test_a_push_can_be_repeated_and_an_interrupted_one_completed(hub, user, team):
    for _ in range(2):
        user.does("push", team, "--repo", "owner/empty", "--yes", HF_TOKEN=TOKEN)
        assert arrived(hub, "owner/empty") == expected(team)


def test_the_token_of_the_login_serves_as_well_and_is_written_nowhere(hub, team, tmp_path):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text(TOKEN)
    with User(tmp_path, hub.endpoint) as user:
        user.does("push", team, "--repo", "owner/login", "--yes")
    assert arrived(hub, "owner/login") == expected(team)
    holders = [path for root in (hub.folder, team.parent) for path in root.rglob("*") if path.is_file()]
    assert not [path for path in holders if TOKEN.encode() in path.read_bytes()]


# --- who is asked -------------------------------------------------------------------------------------------------


def test_it_asks_first_and_no_is_no(hub, user, team):
    before = len(hub.requests)
    code, said = user.run("push", team, "--repo", "owner/asked", typed="n\n", HF_TOKEN=TOKEN)
    assert code == 1 and "Upload? [y/N]" in said and "Aborted" in said and len(hub.requests) == before
    code, said = user.run("push", team, "--repo", "owner/asked", HF_TOKEN=TOKEN)  # nobody is there to answer
    assert code == 1 and len(hub.requests) == before
    user.does("push", team, "--repo", "owner/asked", typed="y\n", HF_TOKEN=TOKEN)
    assert arrived(hub, "owner/asked") == expected(team)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "token", "told"),
    [
        ("owner/x", "hf_nobodys", "the hub does not accept the token. Set HF_TOKEN to a valid one, or log in again"),
        ("owner/x", "hf_stranger", "the token may not write below owner. Set HF_TOKEN to one with write access to"),
        ("owner/taken", TOKEN, "/owner/taken exists already and holds something else than this team. Choose another"),
        ("owner/down", TOKEN, "answered with status 500. Try again later, or push another time: the export stays"),
    ],
)
def test_what_the_hub_refuses_is_told_without_the_token(hub, user, team, repo, token, told):
    before = hub.files("models", "owner/taken")
    said = user.fails("push", team, "--repo", repo, "--yes", HF_TOKEN=token)
    assert told in said and token not in said
    assert hub.files("models", "owner/taken") == before and ("models", "owner/x") not in hub.branches


def test_a_hub_that_nobody_reaches_is_named(team, tmp_path):
    with User(tmp_path, CLOSED) as user:
        said = user.fails("push", team, "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert f"{CLOSED} cannot be reached (ConnectError" in said and TOKEN not in said


def test_a_token_that_no_request_can_carry_is_not_shown(user, team):
    code, said = user.run("push", team, "--repo", "owner/x", "--yes", HF_TOKEN="hf_se\x01cret")
    assert code == 1 and "error: push to owner/x" in said and "cret" not in said


def test_offline_nothing_is_pushed(hub, team, tmp_path):
    with User(tmp_path, hub.endpoint, environment={"HF_HUB_OFFLINE": "1"}) as user:
        told = user.fails("push", team, "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert "HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it" in told


def test_without_a_token_it_says_where_to_put_one(hub, user, team):
    told = user.fails("push", team, "--repo", "owner/x", "--yes")
    assert (
        f"no token for {hub.endpoint}. Set HF_TOKEN to one that may write, or log in once with: hf auth login" in told
    )


@pytest.mark.parametrize("repo", ["team", "a/b/c", "owner/", "/team", "owner/te am"])
def test_a_name_that_is_none_is_refused(user, team, repo):
    told = user.fails("push", team, "--repo", repo, "--yes", HF_TOKEN=TOKEN)
    assert f"--repo {repo!r} is no name of a repository. Expected owner/name" in told


def test_an_export_that_was_edited_is_not_pushed(hub, user, team, tmp_path):
    edited = copy_of(team, tmp_path / "method")
    (edited / "agent_1" / "config.json").write_text("{}")
    before = len(hub.requests)
    told = user.fails("push", edited, "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert "agent_1/config.json: has changed since it was written" in told and len(hub.requests) == before


def test_an_export_without_its_card_is_not_pushed(user, team, tmp_path):
    bare = copy_of(team, tmp_path / "method")
    (bare / "README.md").unlink()
    told = user.fails("push", bare, "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert "has no model card yet (README.md). Run the workflow to its end" in told


def test_a_folder_that_is_no_export_is_not_pushed(user, team):
    told = user.fails("push", team.parent / "policy", "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert "policy: is no exported team (it has no SHA256SUMS). Give the folder export of a method." in told
    told = user.fails("push", Path("nowhere/export"), "--repo", "owner/x", "--yes", HF_TOKEN=TOKEN)
    assert "nowhere/export is not a finished artifact" in told
