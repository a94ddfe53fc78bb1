"""Sample a team's joint responses for evaluation: on the eval items, and on training items where asked.

Reads the items, the base models and, for a trained team, its policy. The completions of a trained team also carry the
log-probabilities of the base team, so that its distance from where it started can be measured.
"""

from pathlib import Path

from comlrl_stages.artifacts import Work, checked_directory, digest_of_part, read_table
from comlrl_stages.rollouts.shards import sample_in_shards
from comlrl_stages.rollouts.single_turn import Context, Draw, joint_draws, prompt_items
from comlrl_stages.settings import EvaluationSampleSettings
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task
from comlrl_stages.teams.team import Team, load_team

SAMPLED, GREEDY = "evaluation", "evaluation/greedy"


def run(settings: EvaluationSampleSettings, work: Work) -> None:
    """Write the table `completions`; its `source` says which rows are sampled and which are greedy."""
    task = load_task(TaskSource(**settings.task.model_dump()))
    base_folders = [checked_directory(folder) for folder in work.inputs["models"]]
    base = (base_folders, work.digest("models"))
    policy = _policy(work, task.agents) if "policy" in work.inputs else None
    team = load_team(*(policy or base), settings.team, settings.compute)
    reference = load_team(*base, settings.team, settings.compute) if policy and settings.kl else None
    draws, dropped = _draws(settings, work, team, task)
    sample_in_shards(settings, work, team, draws, dropped=dropped, reference=reference)


def _policy(work: Work, agents: int) -> tuple[list[Path], list[str]]:
    folder = checked_directory(work.inputs["policy"])
    names = [f"agent_{agent}" for agent in range(agents)]
    return [folder / name for name in names], [digest_of_part(folder, name) for name in names]


def _draws(settings: EvaluationSampleSettings, work: Work, team: Team, task: Task) -> tuple[list[Draw], dict[str, int]]:
    draws: list[Draw] = []
    dropped: dict[str, int] = {}
    for split, samples in (("eval", settings.samples_per_task), ("train", settings.train_samples_per_task)):
        if not samples:
            continue
        items = read_table(work.inputs[split]).to_pylist()
        sampling = settings.sampling
        prompted, out = prompt_items(team, task, items, sampling.max_new_tokens, sampling.overflow)
        dropped |= {f"{split}_{reason}": count for reason, count in out.items()}
        draws += joint_draws(Context(SAMPLED, settings.round), prompted, samples, task.agents)
        if settings.greedy:
            draws += joint_draws(Context(GREEDY, settings.round), prompted, 1, task.agents, greedy=True)
    return draws, dropped
