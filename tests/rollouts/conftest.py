"""The tiny models of the teams' tests, teams of them, and a task of several turns."""

from types import SimpleNamespace

import pytest

from comlrl_stages.settings import TeamSettings
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.teams.team import load_team

from ..teams.conftest import gpt2_folder, llama_folder

__all__ = ["gpt2_folder", "llama_folder"]

ARITHMETIC = SimpleNamespace(torch_threads=1, compute_dtype="float32", device="cpu")
#: The second agent's formatter formats what the transition returns; the first agent reads it as it is.
TURNS = """\
SEEN = []

formatters = [
    lambda item: "say " + item["prompt"],
    lambda item, external_prompts=None: "tell " + (external_prompts or item["prompt"]),
]

def reward(first, second):
    return [0.0] * len(first)

def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    SEEN.append((prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent))
    return [f"{prompt} {len(text)}" for text in agent_completions]
"""


@pytest.fixture(scope="session")
def same(llama_folder):
    """Two agents with one model."""
    return load_team([llama_folder] * 2, ["llama"] * 2, TeamSettings(), ARITHMETIC)


@pytest.fixture(scope="session")
def mixed(llama_folder, gpt2_folder):
    """A Llama-style agent and a GPT-2 style one."""
    return load_team([llama_folder, gpt2_folder], ["llama", "gpt2"], TeamSettings(), ARITHMETIC)


@pytest.fixture
def turns(tmp_path):
    """Load a task of several turns from its code."""

    def load(code=TURNS):
        file = tmp_path / "task.py"
        file.write_text(code)
        return load_task(TaskSource(file=str(file), object=None))

    return load
