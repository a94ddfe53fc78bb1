"""Following the keys from a pair to its completions."""

import pytest

from comlrl_stages.artifacts import COMPLETIONS, REWARDS, table_of
from comlrl_stages.errors import UserError
from comlrl_stages.preferences.joint_responses import JointResponses

CONTEXT = {"source": "policy", "round": 1, "step": 0, "task_id": "t", "turn": 0, "node": ""}
SIDE = {name: value for name, value in CONTEXT.items() if name != "task_id"}


def _completion(sample, agent, **content):
    return {**CONTEXT, "sample": sample, "agent": agent, "text": f"text {sample} of {agent}", **content}


def _responses(completions, rewards):
    return JointResponses(table_of(completions, COMPLETIONS), table_of(rewards, REWARDS), ("text", "role_texts"))


def test_every_agent_has_its_own_sample():
    completions = [_completion(sample, agent) for sample in range(2) for agent in range(2)]
    responses = _responses(completions, [{**CONTEXT, "joint": 2, "samples": [1, 0]}])
    texts = [completion["text"] for completion in responses.agents("t", {**SIDE, "joint": 2})]
    assert texts == ["text 1 of 0", "text 0 of 1"]


def test_one_model_for_all_roles_gives_one_completion():
    completions = [_completion(0, -1, role_texts=["a", "b"])]
    responses = _responses(completions, [{**CONTEXT, "joint": 0, "samples": [0, 0]}])
    (only,) = responses.agents("t", {**SIDE, "joint": 0})
    assert only["role_texts"] == ["a", "b"]


@pytest.mark.parametrize(
    ("joint", "message"), [(9, "joint response 9 of source='policy'.*rewards"), (0, "agent 1 0 of .*completions")]
)
def test_a_key_that_names_nothing_is_an_error_that_shows_it(joint, message):
    responses = _responses([_completion(0, 0)], [{**CONTEXT, "joint": 0, "samples": [0, 0]}])
    with pytest.raises(UserError, match=message):
        responses.agents("t", {**SIDE, "joint": joint})
