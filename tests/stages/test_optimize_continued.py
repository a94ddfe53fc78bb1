"""Runs that start from the export of another: policies, critics and value heads go on where they were."""

import json
import shutil

import pytest
import torch

from comlrl_stages.artifacts import open_work
from comlrl_stages.config import Experiment
from comlrl_stages.errors import UserError
from comlrl_stages.job_settings import settings_of
from comlrl_stages.project import load_project
from comlrl_stages.rollouts.experience import trajectories_of
from comlrl_stages.stages import optimize_actor_critic
from comlrl_stages.teams.loading import load_model
from comlrl_stages.teams.team import load_team

from .conftest import export_of, files_of, log_of, prepared, publish, reinforcement_settings

JOINT = -1
KINDS = [
    pytest.param({"algorithm": "maac", "critic_type": "q", "value_hidden": 8}, id="maac"),
    pytest.param({"algorithm": "iac"}, id="iac, separate"),
    pytest.param({"algorithm": "iac", "critic": "shared", "value_hidden": 8}, id="iac, shared"),
]


@pytest.fixture(scope="module", params=KINDS)
def continued(request, mixed, tmp_path_factory):
    """A kind of critic, the policy of a first run, its export, and the models of the agents in it."""
    folder = tmp_path_factory.mktemp("first")
    made = mixed.reinforce(folder, critic_learning_rate=None, **request.param)
    export = export_of(folder, made["policy"], mixed.models)
    return request.param, made["policy"], export, prepared(folder, export)


def values_of(pipeline, models, folder, settings):
    """Values that each critic of a run gives to the responses of its first step, and the rewards of these."""
    inputs = {"models": models, "items": pipeline.train}
    found = []
    with pytest.raises(InterruptedError), open_work("optimize", {}, inputs, {"policy": folder / "policy"}) as work:
        team = load_team(models, work.digest("models"), settings.team, settings.compute, trainable=True)
        algorithm = optimize_actor_critic.build(settings, work, team)
        responses = [one for own in trajectories_of(algorithm._rollouts.sample(0)) for one in own]
        found = [one.values(responses) for one in algorithm._estimators]
        algorithm.close()
        raise InterruptedError
    return found


def critics_of(kind, export):
    return None if kind.get("critic") == "shared" else str(export / "critics")


def test_policies_go_on_bit_for_bit(continued):
    _, policy, _, models = continued
    for agent, folder in enumerate(models):
        before, after = load_model(policy / f"agent_{agent}").model, load_model(folder).model
        assert all(torch.equal(before.state_dict()[name], weight) for name, weight in after.state_dict().items())


def test_the_first_values_are_those_of_the_last_critics(mixed, continued, tmp_path):
    kind, policy, export, models = continued
    restored_settings = reinforcement_settings(**kind, critics=critics_of(kind, export))
    last_settings = reinforcement_settings(**kind, critics=critics_of(kind, policy))
    restored = values_of(mixed, models, tmp_path / "restored", restored_settings)
    last = values_of(mixed, as_models(policy, tmp_path), tmp_path / "last", last_settings)
    assert len(restored) == len(last) > 0
    for one, other in zip(restored, last, strict=True):
        assert torch.equal(one, other) and one.unique().numel() > 1


def as_models(policy, folder):
    """The agents as training wrote them, each as an artifact of its own."""
    return [
        publish(folder / name, lambda place, name=name: shutil.copytree(policy / name, place, dirs_exist_ok=True))
        for name in ("agent_0", "agent_1")
    ]


@pytest.mark.parametrize("continued", KINDS[:2], indirect=True)
def test_without_restoring_critics_are_new(mixed, continued, tmp_path):
    kind, _, export, models = continued
    restored = values_of(
        mixed, models, tmp_path / "a", reinforcement_settings(**kind, critics=critics_of(kind, export))
    )
    new = values_of(mixed, models, tmp_path / "b", reinforcement_settings(**kind))
    again = values_of(mixed, models, tmp_path / "c", reinforcement_settings(**kind))
    for one, other, same in zip(restored, new, again, strict=True):
        assert not torch.equal(one, other) and torch.equal(other, same)


def test_a_second_run_trains_from_there_and_again_to_the_same_bytes(mixed, continued, tmp_path):
    kind, _, export, models = continued
    given = {"inputs": {"models": models}, "critics": critics_of(kind, export), **kind}
    made = mixed.reinforce(tmp_path / "whole", **given)
    log = log_of(made["training_log"])
    assert log[1, JOINT, "kl"] < 1e-6, "the reference is the team that this run started from"
    with pytest.raises(KeyboardInterrupt):
        mixed.reinforce(tmp_path / "killed", stop_after=1, checkpoint_interval=1, **given)
    assert files_of(*mixed.reinforce(tmp_path / "killed", checkpoint_interval=1, **given).values()) == files_of(
        *made.values()
    )


def test_a_head_of_another_width_is_refused(mixed, continued, tmp_path):
    kind, _, export, models = continued
    width = kind.get("value_hidden")
    other = {**kind, "value_hidden": 5}
    with pytest.raises(UserError, match=f"value_hidden asks for a hidden layer of 5 units.*{width or 'null'}"):
        mixed.reinforce(tmp_path, inputs={"models": models}, critics=critics_of(kind, export), **other)


# --- what the experiment says -------------------------------------------------------------------------------------


def test_an_experiment_whose_team_is_an_export_restores_its_critics_by_default(continued, tmp_path):
    kind, _, export, _ = continued
    method = {"algorithm": kind["algorithm"], **{k: v for k, v in kind.items() if k != "algorithm"}}
    methods = {"restored": method}
    if kind.get("critic") != "shared":
        methods["new"] = {**method, "restore_critics": False}
    values = {"task": "length_ratio", "team": {"model": {"path": str(export)}}, "methods": methods}
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "second.yaml").write_text(json.dumps(values))
    project = load_project({"experiments": ["second"]}, [tmp_path])
    assert isinstance(project.experiments["second"], Experiment)
    assert [project.models[name].path for name in project.experiments["second"].team.model_names()] == [
        f"{export}/agent_0",
        f"{export}/agent_1",
    ]

    def critics(name):
        where = type("Wildcards", (), {"experiment": "second", "seed": "0", "round": "001", "method": name})
        return settings_of(project, "optimize", where).critics

    assert critics("restored") == critics_of(kind, export)
    assert "new" not in methods or critics("new") is None
