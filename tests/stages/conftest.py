"""A small pipeline in this process: tiny random models of two families, a few items, every stage on real artifacts."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from comlrl_stages.artifacts import open_work, read_manifest, read_table, write_table
from comlrl_stages.settings import (
    ActorCriticSettings,
    EvaluateSettings,
    EvaluationSampleSettings,
    ExportSettings,
    GroupSettings,
    MadpoSettings,
    PairSettings,
    PrepareSettings,
    ReferSettings,
    ReplaySettings,
    SampleSettings,
    ScoreSettings,
    flatten,
)
from comlrl_stages.teams.loading import LoadedModel, save_model
from comlrl_stages.teams.reward_model import new_reward_model, save_reward_model

from ..teams.conftest import gpt2, llama

ARITHMETIC = {"device": "cpu", "compute_dtype": "float32", "torch_threads": 1}
TASK = {"name": "length_ratio"}
SAMPLING = {"max_new_tokens": 12}
PROMPTS = {
    "train": ["the owl", "hello", "a small boat on the river", "the hill"],
    "eval": ["the moon and the fox", "a story"],
}
#: The models of each team's agents. The two families have other vocabularies, positions, prompts and pads.
TEAMS = {"llama": ("llama", "llama"), "gpt2": ("gpt2", "gpt2"), "mixed": ("llama", "gpt2")}


def publish(path: Path, write: Callable[[Path], None]) -> Path:
    """Make an artifact as a stage would; `write` is told where to put it."""
    with open_work("made", {}, {}, {"made": path}) as work:
        write(work.output("made"))
    return path


def publish_table(path: Path, table: pa.Table, schema: pa.Schema | None = None) -> Path:
    return publish(path, lambda place: write_table(place, table, schema))


def run_stage(
    stage: str,
    settings: Any,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Path],
    runtime: Mapping[str, Any] | None = None,
    stop_after: int | None = None,
    stop_in: str | None = None,
) -> None:
    """Run a stage as the command line does.

    `stop_after` interrupts it when so much of its progress is made, or of the progress that has the label `stop_in`.
    """
    module = importlib.import_module(f"comlrl_stages.stages.{stage}")
    with open_work(stage, flatten(stage, settings), inputs, outputs, runtime or {}) as work:
        if stop_after is not None:
            work.progress = lambda total, label: Interrupt(stop_after if stop_in in (None, label) else total + 1)
        module.run(settings, work)


class Interrupt:
    """Progress that interrupts the stage once `left` units are done."""

    def __init__(self, left: int):
        self.left = left

    def __call__(self, n: int = 1, note: str = "", kept: bool = False) -> None:
        self.left -= n
        if self.left <= 0:
            raise KeyboardInterrupt


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_table(path).to_pylist()


def files_of(*artifacts: Path) -> list[dict[str, Any]]:
    """Digest of every file of the artifacts: equal means equal bytes."""
    return [read_manifest(artifact)["files"] for artifact in artifacts]


def counts_of(artifact: Path) -> dict[str, Any]:
    return read_manifest(artifact)["counts"]


def log_of(path: Path) -> dict[tuple[int, int, str], float]:
    """The training log of whole steps as {(step, agent, name): value}; agent -1 is the team."""
    return {(row["step"], row["agent"], row["name"]): row["value"] for row in rows_of(path) if row["turn"] == 0}


@dataclass
class Pipeline:
    """One team's artifacts, each made when a test first asks for it, and the stages with small settings."""

    folder: Path
    models: list[Path]

    # --- artifacts ---

    @cached_property
    def train(self) -> Path:
        return self.items("train")

    @cached_property
    def eval(self) -> Path:
        return self.items("eval")

    @cached_property
    def completions(self) -> Path:
        return self.sample(self.folder)

    @cached_property
    def rewards(self) -> Path:
        return self.score(self.folder)

    @cached_property
    def pairs(self) -> Path:
        return self.pair(self.folder)

    @cached_property
    def training_pairs(self) -> Path:
        path = self.folder / "training_pairs.parquet"
        run_stage("replay", ReplaySettings(), {"pairs": self.pairs}, {"training_pairs": path})
        return path

    @cached_property
    def reference_log_probs(self) -> Path:
        return self.refer(self.folder)

    @cached_property
    def reward_model(self) -> Path:
        """A random reward model; nothing is fitted."""
        return self.new_reward_model(self.folder)

    @cached_property
    def trained(self) -> dict[str, Path]:
        """A team whose weights have moved: policy and training_log."""
        return self.madpo(self.folder, learning_rate=1e-3)

    # --- what makes them ---

    def items(self, split: str) -> Path:
        rows = [
            {"task_id": f"{split}{i}", "prompt": prompt, "target_min": 2.0, "target_max": 3.0}
            for i, prompt in enumerate(PROMPTS[split])
        ]
        return publish_table(self.folder / f"{split}.parquet", pa.Table.from_pylist(rows))

    def new_reward_model(self, folder: Path, change: Callable[[Any], None] = lambda loaded: None) -> Path:
        def write(place: Path) -> None:
            generator = torch.Generator().manual_seed(0)
            loaded = new_reward_model(self.models[0], max_length=120, generator=generator)
            loaded.model.head.weight.data.mul_(10.0)
            change(loaded)
            save_reward_model(loaded, place)

        return publish(folder / "reward_model", write)

    def sample(
        self,
        folder: Path,
        *,
        models: list[Path] | None = None,
        items: Path | None = None,
        stop_after: int | None = None,
        **changes: Any,
    ) -> Path:
        settings = SampleSettings(
            **{
                "candidates": 4,
                "task": TASK,
                "sampling": SAMPLING,
                "compute": {**ARITHMETIC, "sampling_tokens": 256},
                **changes,
            }
        )
        inputs = {"models": models or self.models, "items": items or self.train}
        path = folder / "completions.parquet"
        run_stage("sample", settings, inputs, {"completions": path}, stop_after=stop_after)
        return path

    def score(self, folder: Path) -> Path:
        inputs = {"completions": self.completions, "train": self.train}
        path = folder / "rewards.parquet"
        run_stage("score", ScoreSettings(task=TASK), inputs, {"rewards": path})
        return path

    def pair(self, folder: Path, *, rewards: Path | None = None, completions: Path | None = None, **changes) -> Path:
        settings = PairSettings(**{"pairs_per_task": 3, **changes})
        inputs = {"rewards": rewards or self.rewards, "completions": completions or self.completions}
        path = folder / "pairs.parquet"
        run_stage("pair", settings, inputs, {"pairs": path})
        return path

    def refer(self, folder: Path, *, inputs: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        settings = ReferSettings(**{"compute": {**ARITHMETIC, "training_tokens": 256}, **changes})
        path = folder / "reference_log_probs.parquet"
        inputs = {**self.labelled(), "models": self.models, **(inputs or {})}
        run_stage("refer", settings, inputs, {"reference_log_probs": path})
        return path

    def labelled(self) -> dict[str, Path]:
        """Pairs and what their keys name."""
        return {"pairs": self.pairs, "completions": self.completions, "rewards": self.rewards}

    def madpo_inputs(self) -> dict[str, Any]:
        return {
            **self.labelled(),
            "models": self.models,
            "training_pairs": self.training_pairs,
            "reference_log_probs": self.reference_log_probs,
        }

    def madpo(
        self,
        folder: Path,
        *,
        inputs: Mapping[str, Any] | None = None,
        checkpoint_interval: int = 2,
        stop_after: int | None = None,
        **changes: Any,
    ) -> dict[str, Path]:
        settings = madpo_settings(**changes)
        inputs = {**self.madpo_inputs(), **(inputs or {})}
        return optimize(folder, settings, inputs, checkpoint_interval, stop_after)

    def task_inputs(self) -> dict[str, Any]:
        """What a method on the task's reward reads."""
        return {"models": self.models, "items": self.train}

    def marlhf_inputs(self) -> dict[str, Any]:
        return {**self.task_inputs(), "reward_model": self.reward_model}

    def marlhf(self, folder: Path, *, inputs: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Path]:
        return self.reinforce(folder, inputs={**self.marlhf_inputs(), **(inputs or {})}, **given)

    def reinforce(
        self,
        folder: Path,
        *,
        algorithm: str = "magrpo",
        inputs: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        checkpoint_interval: int = 2,
        stop_after: int | None = None,
        **changes: Any,
    ) -> dict[str, Path]:
        """Train by a group or actor-critic method, on the task's reward unless a reward model is among the inputs."""
        settings = reinforcement_settings(algorithm, **changes)
        inputs = {**self.task_inputs(), **(inputs or {})}
        return optimize(folder, settings, inputs, checkpoint_interval, stop_after, runtime)

    def sample_evaluation(
        self,
        folder: Path,
        *,
        policy: Path | None = None,
        inputs: Mapping[str, Any] | None = None,
        stop_in: str | None = None,
        **changes: Any,
    ) -> Path:
        settings = EvaluationSampleSettings(
            **{
                "samples_per_task": 3,
                "task": TASK,
                "sampling": SAMPLING,
                "compute": {**ARITHMETIC, "sampling_tokens": 512},
                **changes,
            }
        )
        items = {"eval": self.eval, "train": self.train}
        inputs = {"models": self.models, **items, "policy": policy, **(inputs or {})}
        path = folder / "completions.parquet"
        outputs = {"completions": path}
        run_stage("sample_evaluation", settings, inputs, outputs, stop_after=stop_in and 1, stop_in=stop_in)
        return path

    def evaluate(self, folder: Path, completions: Path, **changes: Any) -> dict[str, Path]:
        settings = EvaluateSettings(**{"task": TASK, "bootstrap_replicates": 200, **changes})
        outputs = {"evaluation": folder / "evaluation.parquet", "metrics": folder / "metrics.json"}
        inputs = {"completions": completions, "eval": self.eval, "train": self.train}
        run_stage("evaluate", settings, inputs, outputs)
        return outputs


def export_of(folder: Path, policy: Path, models: list[Path], *, lora: bool = False) -> Path:
    """The export of a trained team."""
    path = folder / "export"
    run_stage("export", ExportSettings(lora=lora), {"policy": policy, "models": models}, {"export": path})
    return path


def prepared(folder: Path, export: Path) -> list[Path]:
    """The agents of an export as models, as an experiment gets them whose team is that folder."""
    models = [folder / f"from_agent_{agent}" for agent in (0, 1)]
    for agent, model in enumerate(models):
        run_stage("prepare", PrepareSettings(path=str(export / f"agent_{agent}")), {}, {"model": model})
    return models


def madpo_settings(**changes: Any) -> MadpoSettings:
    values = {"batch_size": 4, "learning_rate": 1e-3, "warmup_fraction": 0.0, "decay": "constant"}
    compute = {**ARITHMETIC, "training_tokens": 512, **changes.pop("compute", {})}
    return MadpoSettings(**{**values, "compute": compute, **changes})


def reinforcement_settings(algorithm: str = "magrpo", **changes: Any) -> GroupSettings | ActorCriticSettings:
    values = {"generations": 3, "items_per_step": 2, "epochs": 1, "learning_rate": 1e-3, "decay": "constant"}
    compute = {**ARITHMETIC, "training_tokens": 512, "sampling_tokens": 512, **changes.pop("compute", {})}
    common = {"task": TASK, "sampling": SAMPLING, "warmup_fraction": 0.0, "algorithm": algorithm, "method": algorithm}
    kind = ActorCriticSettings if algorithm in ("iac", "maac") else GroupSettings
    return kind(**{**values, **common, "compute": compute, **changes})


def optimize(
    folder: Path,
    settings: Any,
    inputs: Mapping[str, Any],
    checkpoint_interval: int,
    stop_after: int | None,
    runtime: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    outputs = {"policy": folder / "policy", "training_log": folder / "training_log.parquet"}
    runtime = {"checkpoint_interval": checkpoint_interval, **(runtime or {})}
    run_stage("optimize", settings, inputs, outputs, runtime, stop_after)
    return outputs


def weigh_words(loaded: Any) -> None:
    """Make a reward model's score the mean over a text's tokens of a random weight per token."""
    first, *others = loaded.model.backbone.layers
    first.self_attn.q_proj.weight.data.zero_()
    for layer in (first, *others):
        layer.mlp.down_proj.weight.data.zero_()
    for layer in others:
        layer.self_attn.o_proj.weight.data.zero_()
    loaded.model.head.weight.data.mul_(10.0)


def counting_characters(folder: Path, agents: int = 2) -> dict[str, Any]:
    """A task with any number of agents, whose reward grows with what they write: random weights learn it in seconds."""
    file = folder / "characters.py"
    lines = (
        f"agents = {agents}",
        "def reward(*completions):",
        "    return [sum(map(len, joint)) / 20.0 for joint in zip(*completions)]",
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    return {"file": str(file), "object": None}


def team_settings(agents: int, **changes: Any) -> dict[str, Any]:
    """Settings of a team of any size; by default they are of two."""
    per_agent = {
        "system_prompts": None,
        "prompt_formats": "auto",
        "template_arguments": {},
        "weights_dtypes": "float32",
        "attentions": "sdpa",
        "trust_remote_code": False,
    }
    return {"agents": agents, **{key: [value] * agents for key, value in per_agent.items()}, **changes}


def often_ending(loaded: LoadedModel) -> LoadedModel:
    """Give the end ids larger logits, of either sign, so that some completions end by themselves."""
    output = loaded.model.get_output_embeddings()
    output.weight.data[list(loaded.facts.eos_ids)] *= 2.0
    return loaded


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """The pipeline of a team by its name in TEAMS, made once."""
    models = tmp_path_factory.mktemp("models")
    folders = {
        name: publish(models / name, lambda place, made=made: save_model(often_ending(made()), place))
        for name, made in (("llama", llama), ("gpt2", gpt2))
    }
    made: dict[str, Pipeline] = {}

    def pipeline(name: str) -> Pipeline:
        if name not in made:
            made[name] = Pipeline(tmp_path_factory.mktemp(name), [folders[model] for model in TEAMS[name]])
        return made[name]

    return pipeline


@pytest.fixture(scope="session")
def pipeline(pipelines: Callable[[str], Pipeline]) -> Pipeline:
    """The pipeline of two agents with one Llama-style model."""
    return pipelines("llama")


@pytest.fixture(scope="session")
def mixed(pipelines: Callable[[str], Pipeline]) -> Pipeline:
    """The pipeline of a team of two families."""
    return pipelines("mixed")


@pytest.fixture(scope="session", params=TEAMS)
def every_pipeline(request: pytest.FixtureRequest, pipelines: Callable[[str], Pipeline]) -> Pipeline:
    """The pipeline of each team in turn."""
    return pipelines(request.param)
