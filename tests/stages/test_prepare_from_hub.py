"""Models from the hub: the commit's own weights, the commit on record, and refusals that say what to do."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from comlrl_stages.artifacts import artifact_digest
from comlrl_stages.teams.loading import Facts, load_model, save_model

from ..hub import CLOSED, Hub, User, files_of
from ..teams.conftest import CONTEXT_LENGTH, llama

MODULES = ("comlrl_stages.stages.prepare",)
SETTINGS = ("prepare.torch_threads=1",)
CUSTOM = """
open({ran!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM


class HomeConfig(LlamaConfig):
    model_type = "homemade"


class HomeModel(LlamaForCausalLM):
    config_class = HomeConfig
"""


def prepared(user, folder, *settings):
    user.does("prepare", "--output", folder, *SETTINGS, *settings)
    return folder


def refused(user, folder, *settings):
    told = user.fails("prepare", "--output", folder, *SETTINGS, *settings)
    assert not folder.exists()
    return told


def resolved(folder):
    return json.loads(folder.with_name(f"{folder.name}.provenance.json").read_text())["resolved"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Llama-style model as a repository holds it: without this project's own facts."""
    folder = tmp_path_factory.mktemp("model")
    save_model(llama(), folder)
    (folder / "facts.json").unlink()
    return files_of(folder)


@pytest.fixture(scope="module")
def changed(files, tmp_path_factory):
    """The same model with other weights."""
    path = tmp_path_factory.mktemp("changed") / "model.safetensors"
    path.write_bytes(files["model.safetensors"])
    weights = {name: weight + 1.0 for name, weight in load_file(path).items()}
    return files | {"model.safetensors": save(weights, {"format": "pt"})}


@pytest.fixture(scope="module")
def hub(files, changed, tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        hub.add("models", "org/tiny", files, "first")
        hub.add("models", "org/tiny", changed | {"pytorch_model.bin": b"pickled"})
        for spaces, name in enumerate(("gated", "members", "private", "broken", "slow")):
            # A file of its own each: what the cache has from one repository is not fetched from another.
            hub.add("models", f"org/{name}", files | {"config.json": files["config.json"] + b" " * spaces + b"\n"})
        hub.add("models", "org/pickled", {n: b for n, b in files.items() if n != "model.safetensors"} | {"m.bin": b""})
        hub.gated, hub.private, hub.tokens = {"org/gated", "org/members"}, {"org/private"}, {"hf_right": "org"}
        hub.failing, hub.delay_s = {"org/broken": 500}, {"org/slow": 3.0}
        yield hub


@pytest.fixture(scope="module")
def user(hub, tmp_path_factory):
    with User(tmp_path_factory.mktemp("user"), hub.endpoint, MODULES) as user:
        yield user


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_main_branch_is_fetched_and_its_commit_is_on_record(hub, user, tmp_path):
    folder = prepared(user, tmp_path / "model", "prepare.hub=org/tiny")
    shifted = llama().model.state_dict()
    for name, weight in weights(folder).items():
        assert torch.equal(weight, shifted[name] + 1.0)
    assert resolved(folder)["commit"] == hub.commit("models", "org/tiny", "main")
    assert resolved(folder)["weights_dtype"] == "float32"


def test_facts_and_tokenizer_are_the_repositorys(user, tmp_path):
    folder = prepared(user, tmp_path / "model", "prepare.hub=org/tiny")
    facts = Facts.read(folder)
    assert facts.eos_ids == (1, 6) and facts.pad_id == 2 and facts.bos_id == 0
    assert facts.context_length == CONTEXT_LENGTH and facts.chat_template == llama().facts.chat_template
    assert load_model(folder).tokenizer("the owl")["input_ids"] == llama().tokenizer("the owl")["input_ids"]


def test_a_branch_and_its_commit_give_the_same_bytes_as_the_folder(hub, user, files, tmp_path):
    commit = hub.commit("models", "org/tiny", "first")
    by_branch = prepared(user, tmp_path / "a", "prepare.hub=org/tiny", "prepare.revision=first")
    by_commit = prepared(user, tmp_path / "b", "prepare.hub=org/tiny", f'prepare.revision="{commit}"')
    saved = hub.tree("models", "org/tiny", commit)
    by_path = prepared(user, tmp_path / "c", f"prepare.path={saved}")
    assert artifact_digest(by_branch) == artifact_digest(by_commit) == artifact_digest(by_path)
    assert resolved(by_branch)["commit"] == resolved(by_commit)["commit"] == commit


def test_weights_in_other_formats_are_not_even_fetched(hub, user, tmp_path):
    prepared(user, tmp_path / "model", "prepare.hub=org/tiny")
    assert not [request for request in hub.requests if request.endswith(".bin")]


def test_a_token_opens_what_is_restricted(user, tmp_path):
    for repo in ("org/members", "org/private"):
        arguments = ["prepare", "--output", tmp_path / repo, *SETTINGS, f"prepare.hub={repo}"]
        user.does(*arguments, HF_TOKEN="hf_right")
        assert load_model(tmp_path / repo).model.config.model_type == "llama"


@pytest.mark.parametrize(
    ("repo", "told"),
    [
        ("org/gated", r"access is restricted. Ask for it at \S+/org/gated, set HF_TOKEN .*, or name .*`path`"),
        ("org/private", "there is no such model at .*, or it is private. Check the id; a private one needs HF_TOKEN"),
        ("org/none", "hub model 'org/none': there is no such model at"),
        ("org/a/b", "hub model 'org/a/b': this is no id of the hub. Expected owner/name"),
        ("org/broken", r"answered with status 500. Try again later, or name a local folder with `path`"),
        ("org/slow", r"cannot be reached \(ReadTimeout: .*\). Check the network"),
        ("org/pickled", r"\(commit [0-9a-f]{40}\) has no model\*.safetensors; .* unpickling runs code"),
    ],
)
def test_what_cannot_be_fetched_says_what_to_do(user, tmp_path, repo, told):
    assert re.search(told, refused(user, tmp_path / "model", f"prepare.hub={repo}"))


def test_an_unknown_revision_is_named(user, tmp_path):
    told = refused(user, tmp_path / "model", "prepare.hub=org/tiny", "prepare.revision=v9")
    assert "'org/tiny' (revision v9): there is no such revision. Give a branch, tag or commit" in told


def test_a_token_that_nobody_has_is_refused_and_never_printed(user, tmp_path):
    code, said = user.run(
        "prepare", "--output", tmp_path / "m", *SETTINGS, "prepare.hub=org/gated", HF_TOKEN="hf_secret"
    )
    assert code == 1 and "does not accept the token. Set HF_TOKEN" in said and "hf_secret" not in said


def test_the_repositorys_own_code_runs_only_when_the_model_says_so(hub, user, files, tmp_path):
    config = json.loads(files["config.json"]) | {
        "model_type": "homemade",
        "architectures": ["HomeModel"],
        "auto_map": {"AutoConfig": "home.HomeConfig", "AutoModelForCausalLM": "home.HomeModel"},
    }
    ran = tmp_path / "ran"
    code = {"config.json": json.dumps(config).encode(), "home.py": CUSTOM.format(ran=str(ran)).encode()}
    hub.add("models", "org/homemade", files | code)
    told = refused(user, tmp_path / "model", "prepare.hub=org/homemade")
    assert "It brings its own code: read that code, then set trust_remote_code: true for this model" in told
    assert not ran.exists() and "home.py" not in " ".join(hub.requests)
    folder = prepared(user, tmp_path / "model", "prepare.hub=org/homemade", "prepare.trust_remote_code=true")
    assert ran.exists() and load_model(folder, trust_remote_code=True).model.config.model_type == "homemade"


# --- without the hub ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"HF_HUB_OFFLINE": "1"},
            r"HF_HUB_OFFLINE is set, and the local cache does not have it. Unset it, fetch it first where there is a "
            r"network \(hf download org/other\), or name a local folder with `path`",
        ),
        ({}, rf"{CLOSED} cannot be reached \(ConnectError: .*\). Check the network \(and HF_ENDPOINT, if it is set\)"),
    ],
    ids=["offline", "refused"],
)
def test_without_the_hub_its_cache_serves(hub, user, tmp_path, environment, told):
    fetched = prepared(user, tmp_path / "model", "prepare.hub=org/tiny")
    with User(user.home, CLOSED, MODULES, environment) as alone:
        again = prepared(alone, tmp_path / "again", "prepare.hub=org/tiny")
        assert artifact_digest(again) == artifact_digest(fetched)
        assert resolved(again)["commit"] == hub.commit("models", "org/tiny", "main")
        assert re.search(told, refused(alone, tmp_path / "other", "prepare.hub=org/other"))
