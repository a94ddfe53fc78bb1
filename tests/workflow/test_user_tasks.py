"""A user's own tasks, items, teams and models, from their files through every stage to the report."""

import json
import re
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from .conftest import EXPERIMENT, REPOSITORY, Workflow, make_workflow, planned_jobs

pytestmark = pytest.mark.slow
#: A module of plain functions with the signatures of the CoMLRL documentation.
LENGTHS = '''
"""Two agents answer a task at two lengths."""

import math


def brief_formatter(item):
    return f"Write a short response to this task:\\n{item['prompt']}"


def detailed_formatter(item):
    return f"Write a detailed response to this task:\\n{item['prompt']}"


formatters = [brief_formatter, detailed_formatter]


def reward_func(brief_completions, detailed_completions, *, batch_items, prompts, softness=1.0, floor=0.0):
    if prompts != [item["prompt"] for item in batch_items]:
        raise ValueError(f"not the items' own prompts: {prompts}")
    target = batch_items[0]["target"]
    results = []
    for brief, detailed in zip(brief_completions, detailed_completions):
        ratio = len(detailed) / max(len(brief), 1)
        distance = max(target["range"][0] - ratio, ratio - target["range"][1], 0.0)
        results.append((floor + math.exp(-distance / softness), {"distance": distance, "floor": floor}))
    return results


reward = reward_func


def eval_logger(*, agent_completions_turns, batch_items, prompts):
    return [
        {
            f"turn_{turn + 1}/response_chars": sum(
                len(agent[row][turn]) for agent in agent_completions_turns
            ) / len(agent_completions_turns)
            for turn in range(len(agent_completions_turns[0][row]))
        }
        for row in range(len(batch_items))
    ]


def eval_aggregator(rows, *, num_turns):
    return {
        key: sum(row[key] for row in rows) / len(rows)
        for turn in range(num_turns)
        for key in [f"turn_{turn + 1}/response_chars"]
    } if rows else {}


def metrics_callback(rollouts):
    if not rollouts:
        return {}
    return {"response_chars": sum(len(sample.completion) for sample in rollouts) / len(rollouts)}
'''

CITIES = [
    {
        "prompt": f'Describe a city {place} 🏙️ as {{name}}, {{{{x}}}} or \\n "quoted".',
        "target": {"range": [1.5, 2.0 + number], "labels": ["größe", "長さ"]},
    }
    for number, place in enumerate(
        ["in clouds", "at sea", "on Mars", "in caves", "on ice", "in trees", "in sand", "far"]
    )
]

#: A team of three: the formatters alone say how many agents `*completions` stands for.
THREE = """
def role(number):
    return lambda item: f"Agent {number}: {item['prompt']}"


class Task:
    items = [{"prompt": f"Count to {number}."} for number in range(2, 8)]
    formatters = [role(0), role(1), role(2)]

    def reward(*completions, batch_items):
        return [float(len(set(joint)) + len(joint[0]) % 5) for joint in zip(*completions)]
"""

#: A team of one, made by a function with options.
ONE = """
def make_task(count):
    class Task:
        items = [{"prompt": f"Say something about {number}."} for number in range(count)]

        def reward(answers, *, batch_items):
            return [float(len(answer)) for answer in answers]

    return Task()
"""

MADPO = {"learning_rate": 1e-4, "batch_size": 4}
WITHOUT_REFERENCE = {**MADPO, "loss": "simpo", "reference": "none"}
EXPERIMENTS = {
    "rhyme": {"task": {"file": "tasks/rhyme.py"}, "items": {}, "methods": {"madpo": WITHOUT_REFERENCE}},
    "lengths": {
        "task": {"file": "tasks/lengths.py", "object": None},
        "items": "data/cities.jsonl",
        "team": ["tiny", "gpt2"],
        "scoring": {"parameters": {"floor": 0.25}, "scale": 2.0, "shift": -1.0},
        "methods": EXPERIMENT["methods"],
    },
    "three": {
        "task": {"file": "tasks/three.py"},
        "items": {},
        "team": {"model": "tiny", "agents": 3},
        "methods": {"madpo": WITHOUT_REFERENCE},
    },
    "one": {
        "task": {"file": "tasks/one.py", "object": "make_task", "options": {"count": 6}},
        "items": {},
        "team": {"model": "tiny", "agents": 1},
        "methods": {"madpo": WITHOUT_REFERENCE},
    },
}


def end_is_pad() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer like GPT-2's, where the end of the text is the pad as well."""
    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([item["prompt"] for item in CITIES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def save_gpt2(folder: Path) -> None:
    tokenizer = end_is_pad()
    ids = {name: tokenizer.eos_token_id for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=256, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Four experiments on tasks of the user's own, run from nothing to their reports in one go."""
    workflow = make_workflow(tmp_path_factory.mktemp("user tasks"))
    example, *_ = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text("utf-8"), flags=re.DOTALL)
    for name, text in {"rhyme": example, "lengths": LENGTHS, "three": THREE, "one": ONE}.items():
        workflow.write(f"tasks/{name}.py", text)
    workflow.write("data/cities.jsonl", "".join(f"{json.dumps(item, ensure_ascii=False)}\n" for item in CITIES))
    workflow.write("config/models/gpt2.yaml", yaml.safe_dump({"path": "models/small gpt2"}))
    save_gpt2(workflow.folder / "models" / "small gpt2")
    for name, values in EXPERIMENTS.items():
        workflow.write_experiment({**EXPERIMENT, **values}, name)
    workflow.run("--config", f"experiments=[{','.join(EXPERIMENTS)}]")
    return workflow


def seed_folder(project: Workflow, experiment: str) -> Path:
    return project.folder / "results" / experiment / "seed0"


def rewards(project: Workflow, experiment: str) -> list[dict]:
    return pq.read_table(seed_folder(project, experiment) / "collections/default/rewards.parquet").to_pylist()


def completions(project: Workflow, experiment: str) -> list[dict]:
    return pq.read_table(seed_folder(project, experiment) / "collections/default/completions.parquet").to_pylist()


def texts(project: Workflow, experiment: str) -> dict[tuple[str, int], tuple[str, ...]]:
    """Texts of each joint response, in actor order."""
    rows = sorted(completions(project, experiment), key=lambda row: row["agent"])
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for row in rows:
        key = (row["task_id"], row["sample"])
        found[key] = (*found.get(key, ()), row["text"])
    return found


# --- every experiment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_method_of_a_user_task_is_in_the_summary(project: Workflow, experiment: str) -> None:
    summary = pd.read_csv(project.folder / "results" / experiment / "report" / "summary.csv")
    assert summary["method"].tolist() == list(EXPERIMENTS[experiment]["methods"])
    assert summary["eval_reward_mean"].notna().all()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_agent_of_a_team_is_trained_and_exported(project: Workflow, experiment: str) -> None:
    folder = seed_folder(project, experiment) / "methods" / "madpo"
    agents = len(texts(project, experiment)[next(iter(texts(project, experiment)))])
    for name in ("round001/policy", "export"):
        assert sorted(path.name for path in (folder / name).glob("agent_*")) == [f"agent_{i}" for i in range(agents)]
    for i in range(agents):
        assert (folder / f"export/agent_{i}/model.safetensors").read_bytes() != base_weights(project, experiment, i)


def base_weights(project: Workflow, experiment: str, agent: int) -> bytes:
    team = EXPERIMENTS[experiment].get("team", "tiny")
    name = team[agent] if isinstance(team, list) else "tiny"
    return (project.folder / "results" / "models" / name / "model.safetensors").read_bytes()


# --- formatters and items -----------------------------------------------------------------------------------------


def test_the_formatters_of_the_readmes_task_make_the_prompts(project: Workflow) -> None:
    rows = completions(project, "rhyme")
    assert {row["prompt"].partition(".")[0] for row in rows if row["agent"] == 0} == {"You write the first line"}
    assert {row["prompt"].partition(".")[0] for row in rows if row["agent"] == 1} == {"You answer with a second line"}
    assert all("Write a line that ends with" in row["prompt"] for row in rows)


def test_nested_fields_emoji_and_braces_of_items_arrive_unchanged(project: Workflow) -> None:
    split = project.folder / "results" / "lengths" / "split"
    items = [item for name in ("train", "eval") for item in pq.read_table(split / f"{name}.parquet").to_pylist()]
    without_id = [{key: value for key, value in item.items() if key != "task_id"} for item in items]
    assert sorted(without_id, key=str) == sorted(CITIES, key=str)


def test_prompts_with_emoji_and_braces_reach_the_model_as_they_are(project: Workflow) -> None:
    prompts = {item["prompt"] for item in CITIES}
    tokenizer = AutoTokenizer.from_pretrained(project.folder / "results" / "models" / "gpt2")
    for row in completions(project, "lengths"):
        assert row["prompt"].partition("task:\n")[2] in prompts
        if row["agent"] == 1:
            assert tokenizer.decode(row["prompt_ids"]) == row["prompt"]


# --- rewards and metrics ------------------------------------------------------------------------------------------


def test_another_parameter_of_the_reward_scores_again_and_samples_nothing(project: Workflow) -> None:
    override = "override={experiments: {lengths: {scoring: {parameters: {floor: 0.5}}}}}"
    said = project.run("-n", "--config", "experiments=lengths", override)
    jobs = planned_jobs(said)
    assert {"score", "pair", "reward", "optimize", "evaluate", "card", "report"} <= set(jobs)
    assert not {"prepare", "split", "sample"} & set(jobs)
    assert len(jobs["evaluate"]) == 3 and not any("method=base" in job for job in jobs["sample_evaluation"])
    assert 'score.parameters={"floor": 0.5}' in said


def test_a_reward_gets_its_parameters_from_the_configuration_and_both_values_are_kept(project: Workflow) -> None:
    rows = rewards(project, "lengths")
    assert {dict(row["parts"])["floor"] for row in rows} == {0.25}
    for row in rows:
        assert row["status"] == "ok" and 0.25 < row["raw"] <= 1.25
        assert row["reward"] == pytest.approx(2.0 * row["raw"] - 1.0)


def test_parts_of_a_reward_become_metrics(project: Workflow) -> None:
    metrics = evaluation_metrics(project, "lengths", "madpo")
    assert metrics["eval/parts/floor"] == 0.25 and metrics["eval/parts/distance"] >= 0


@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_the_tasks_own_metrics_stand_among_the_metrics(project: Workflow, method: str) -> None:
    table = pq.read_table(seed_folder(project, "lengths") / "methods" / method / "evaluation/evaluation.parquet")
    chars = [sum(map(len, row["texts"])) / 2 for row in table.to_pylist() if row["decoding"] == "sampled"]
    metrics = evaluation_metrics(project, "lengths", method)
    assert metrics["eval/turn_1/response_chars"] == pytest.approx(sum(chars) / len(chars))  # eval_logger
    assert metrics["eval/response_chars"] == pytest.approx(sum(chars) / len(chars))  # metrics_callback


def evaluation_metrics(project: Workflow, experiment: str, method: str) -> dict[str, float]:
    path = seed_folder(project, experiment) / "methods" / method / "evaluation" / "metrics.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_reward_of_any_number_of_completions_gets_those_of_all_three_agents(project: Workflow) -> None:
    said = texts(project, "three")
    assert {len(joint) for joint in said.values()} == {3}
    for row in rewards(project, "three"):
        assert len(set(row["samples"])) == 1
        joint = said[row["task_id"], row["samples"][0]]
        assert row["raw"] == len(set(joint)) + len(joint[0]) % 5


def test_a_team_of_one_is_scored_on_its_only_answers(project: Workflow) -> None:
    said = texts(project, "one")
    assert all(row["raw"] == len(said[row["task_id"], row["samples"][0]][0]) for row in rewards(project, "one"))


def test_a_reward_that_fails_stops_the_stage_and_the_terminal_shows_its_line(project: Workflow, tmp_path: Path) -> None:
    workflow = project.copy(tmp_path / "project")
    workflow.write("tasks/three.py", THREE.replace("len(set(joint))", 'batch_items[0]["target"]'))
    rewards_table = "results/three/seed0/collections/default/rewards.parquet"
    said = workflow.run(rewards_table, "--config", "experiments=three", check=False)
    assert re.search(r"error: the reward failed for \d+ of \d+ joint responses", said)
    assert 'tasks/three.py", line 11, in reward' in said and "KeyError: 'target'" in said
    assert "comlrl_stages/" not in said.partition("error: ")[2].partition("=====")[0]
    assert not (workflow.folder / rewards_table).exists()


# --- a team of unlike models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["madpo", "marlhf"])
def test_a_team_of_unlike_models_stays_unlike(project: Workflow, method: str) -> None:
    export = seed_folder(project, "lengths") / "methods" / method / "export"
    found = [json.loads((export / f"agent_{i}" / "config.json").read_text())["model_type"] for i in range(2)]
    assert found == ["llama", "gpt2"]


def test_each_agent_of_a_team_of_unlike_models_speaks_its_own_tokens(project: Workflow) -> None:
    for row in completions(project, "lengths"):
        name = ["tiny", "gpt2"][row["agent"]]
        tokenizer = AutoTokenizer.from_pretrained(project.folder / "results" / "models" / name)
        assert max(row["completion_ids"]) < len(tokenizer)
        assert tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["text"]
