"""Checks of a task against its team, before any work."""

import json
from pathlib import Path

import pytest

from comlrl_stages import provenance
from comlrl_stages.checks import check_items, check_project, task_facts, warnings_of
from comlrl_stages.config import Task
from comlrl_stages.errors import UserError
from comlrl_stages.project import load_project

ROOT = Path(__file__).parents[1]
TASK = """
import sys
print("imported", file=open("imports.txt", "a"))


class Task:
    items = [{"prompt": "a"}]

    def reward(self, one, two, three, *, batch_items, strictness=1, style="x"):
        return [1.0 for _ in one]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test stands in a folder of its own, with a task for three agents."""
    monkeypatch.chdir(tmp_path)
    provenance._task_fingerprint.cache_clear()
    Path("mine.py").write_text(TASK)
    return tmp_path


def project(**values):
    experiment = {"task": {"file": "mine.py"}, "team": {"model": "tiny", "agents": 3}, "methods": ["base"], **values}
    Path("experiments").mkdir(exist_ok=True)
    Path("experiments/mine.yaml").write_text(json.dumps(experiment))
    return load_project({"experiments": "mine"}, [Path("."), ROOT / "config"])


def refusal(**values):
    with pytest.raises(UserError) as refused:
        list(check_project(project(**values)))
    return str(refused.value)


def imports():
    return len(Path("imports.txt").read_text().splitlines())


@pytest.mark.parametrize("path", sorted((ROOT / "config/experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_experiments_fit_their_tasks(path):
    (line,) = check_project(load_project({"experiments": path.stem}, [ROOT / "config"]))
    assert line.startswith(f"{path.stem}: ") and line.endswith(": fine")


def test_a_task_that_fits_is_told_with_its_size():
    assert list(check_project(project(seeds=[0, 1]))) == ["mine: 3 agents, 1 methods, 2 seeds: fine"]


def test_a_team_of_another_size_is_refused():
    text = refusal(team="tiny")
    assert text.startswith(
        "experiment mine: the team has 2 agents, but the reward and formatters of the task are for 3"
    )
    assert "Change team.agents (or team.models) or the task." in text


TRANSITION = """
    def transition(self, prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        return ["b"] * num_agents
"""
CALLBACK = """
    def metrics_callback(self, rollouts):
        return {"words": 1.0}
"""


def test_more_turns_need_a_transition():
    text = refusal(episode={"turns": 2})
    assert text.startswith("experiment mine: episode.turns is 2, but the task has no transition")
    provenance._task_fingerprint.cache_clear()
    Path("mine.py").write_text(TASK + TRANSITION)
    assert list(check_project(project(episode={"turns": 2})))


def test_a_central_critic_needs_a_reward_of_the_team():
    Path("mine.py").write_text(TASK + '\n    reward_scope = "agent"\n')
    told = "experiment mine: methods.maac.algorithm: maac has one critic for the reward that all agents share"
    assert refusal(methods=["maac"]).startswith(told)
    assert list(check_project(project(methods=["iac", "magrpo"])))
    assert list(check_project(project(methods={"marlhf": {"backend": "maac"}})))


def keeping(metric, **values):
    values = {"algorithm": "magrpo", "eval_interval": 8, "keep_best": metric, **values}
    return {"items": {"validation_fraction": 0.2}, "methods": {"it": values}}


@pytest.mark.parametrize("metric", ["eval/turn_1/reward_max", "eval/reward_mean", "eval/turn_1/task_reward_mean"])
def test_a_metric_that_nothing_measures_is_refused(metric):
    text = refusal(**keeping(metric))
    assert text.startswith(
        f"experiment mine: methods.it.keep_best: the evaluation while training measures no '{metric}'"
    )
    assert "reward_mean, expected_return and parts/" in text
    Path("mine.py").write_text(TASK + CALLBACK)
    provenance._task_fingerprint.cache_clear()
    assert list(check_project(project(**keeping(metric)))), "the callback may return it"


def test_metrics_that_are_always_measured_are_fine():
    for metric in ("eval/turn_1/reward_mean", "eval/turn_1/expected_return", "eval/turn_1/parts/ratio"):
        assert list(check_project(project(**keeping(metric))))
    assert list(check_project(project(**keeping("eval/turn_1/task_reward_mean", reward_model="default"))))


SAME = "with it magrpo, marloo, maremax and mareinforce are all the same"
OLDER = "later updates of a step train on responses of an older policy; consider importance_ratio"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"methods": {"it": {"algorithm": "magrpo", "buffer_epochs": 2}}}, f"methods.it.buffer_epochs: {OLDER}"),
        ({"methods": {"it": {"algorithm": "iac", "train_batch_size": 1}}}, f"methods.it.train_batch_size: {OLDER}"),
        *(
            (
                {"methods": {"it": {"algorithm": name, "normalise_advantages": True}}},
                f"methods.it.normalise_advantages: {SAME}",
            )
            for name in ("marloo", "maremax", "mareinforce")
        ),
    ],
)
def test_what_may_not_be_meant_is_a_warning_and_no_mistake(values, told):
    found = project(**values)
    assert [line.endswith("1 methods, 1 seeds: fine") for line in check_project(found)] == [True]
    (warning,) = warnings_of(found)
    assert warning.startswith(f"warning: mine: {told}")


def test_pairs_of_the_first_turn_alone_are_worth_a_warning():
    Path("mine.py").write_text(TASK + TRANSITION)
    warnings = warnings_of(project(episode={"turns": 2}, methods=["base", "madpo", "magrpo", "marlhf"]))
    assert [line.removeprefix("warning: mine: methods.")[:40] for line in warnings] == [
        "madpo: learns from responses of the firs",
        "marlhf: its reward model is fitted on re",
    ]


@pytest.mark.parametrize(
    "method",
    [
        {"algorithm": "magrpo", "normalise_advantages": True},
        {"algorithm": "iac", "normalise_advantages": True},
        {"algorithm": "magrpo", "generations": 4, "items_per_step": 2, "train_batch_size": 8},
        {"algorithm": "marloo", "buffer_epochs": 2, "train_batch_size": 8, "importance_ratio": True},
    ],
)
def test_what_is_usual_is_no_warning(method):
    assert warnings_of(project(methods={"it": method})) == []


def test_a_parameter_that_the_reward_does_not_have_is_refused_with_those_it_has():
    text = refusal(scoring={"parameters": {"strictness": 2, "stile": "y"}})
    assert "scoring.parameters.stile: the reward function has no such parameter" in text
    assert text.endswith("it has: strictness, style")
    assert list(check_project(project(scoring={"parameters": {"strictness": 2}})))


def test_a_task_without_items_needs_a_source():
    Path("mine.py").write_text(TASK.replace('items = [{"prompt": "a"}]', "pass"))
    assert "the task has no items of its own; set items.source" in refusal()
    assert list(check_project(project(items="items.jsonl")))


def test_items_and_prompts_are_made_before_any_work(folder):
    items = TASK.replace('[{"prompt": "a"}]', '[{"prompt": "a"}, {"prompt": "b"}]')
    Path("mine.py").write_text(items + '\n\ndef validation():\n    return [{"prompt": "c"}]\n')
    assert list(check_items(project())) == []
    assert list(check_items(project(items={"validation_source": "mine.py:validation"}))) == []
    assert not Path("results").exists() and not list(Path(".").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ("[{'prompt': 'a'}]", "none is left for training"),
        ("[{'prompt': 'a'}, {'prompt': None}]", "the formatter of agent_0, item "),
        ("[{'prompt': 'a'}, {'text': 'b'}]", "item 1 has no field 'text'"),
        ("[{'prompt': 'a', 'x': {1}}]", "item 1, key x: is of type set"),
        ("[{'prompt': 'a'}, {'prompt': 'a'}]", "items 1 and 2 are identical"),
    ],
)
def test_a_mistake_in_the_items_is_told_with_the_experiment(items, told):
    Path("mine.py").write_text(TASK.replace('[{"prompt": "a"}]', items))
    with pytest.raises(UserError) as refused:
        list(check_items(project()))
    assert str(refused.value).startswith("experiment mine: ") and told in str(refused.value)


def test_items_of_the_hub_are_left_to_their_stage():
    assert list(check_items(project(items="hub://owner/name"))) == [
        "mine: items of the hub are read by the stage split, not here"
    ]


def test_what_no_method_uses_is_a_warning():
    assert warnings_of(project(collections={"default": {}, "wide": {}}, preferences={"p": {}})) == [
        "warning: mine: no method uses collections.wide, preferences.p"
    ]
    assert warnings_of(project()) == []


def test_a_user_file_is_imported_in_another_process_once_per_content(folder):
    task = Task(file="mine.py")
    facts = task_facts(task)
    assert facts["agents"] == 3 and task_facts(task) == facts and imports() == 1
    Path("mine.py").write_text(TASK.replace("style=", "tone="))
    provenance._task_fingerprint.cache_clear()
    assert "tone" in task_facts(task)["reward_parameters"] and imports() == 2


def test_what_a_user_file_prints_is_no_trouble():
    Path("mine.py").write_text(TASK + '\nprint("hello")\nprint("a warning", file=sys.stderr)\n')
    assert task_facts(Task(file="mine.py"))["agents"] == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("raise SystemExit(3)\n", "mine.py"),
        ("class Other:\n    pass\n", "has no object named 'Task'"),
        ("class Task:\n    pass\n", "has no reward"),
        ("def broken(:\n", "is not valid Python"),
        ("import os\nos._exit(7)\n", "mine.py: ended the process that imported it (exit code 7)"),
    ],
)
def test_a_user_file_that_cannot_be_used_is_one_message_without_our_traceback(text, told):
    Path("mine.py").write_text(text)
    message = refusal()
    assert told in message and "comlrl_stages/" not in message and not message.startswith("error:")
