"""Sample a team's joint responses for evaluation: on the eval items, and on training items where asked.

Reads the items, the base models and, for a trained team, its policy. With several turns every joint response is
continued by one per turn, with the prompts of the task's transition. The completions of a trained team also carry the
log-probabilities of the base team, so that its distance from where it started can be measured.
"""

from collections.abc import Sequence

import pyarrow as pa

from comlrl_stages.artifacts import Work, checked_directory, read_table
from comlrl_stages.rollouts.shards import sample_in_shards, write_completions
from comlrl_stages.rollouts.single_turn import Context, prompt_items
from comlrl_stages.rollouts.trajectories import Trajectory
from comlrl_stages.settings import EvaluationSampleSettings
from comlrl_stages.tasks.protocol import Task, TaskSource, load_task
from comlrl_stages.teams.policies import load_policy
from comlrl_stages.teams.team import Team, load_team

SAMPLED, GREEDY = "evaluation", "evaluation/greedy"


def run(settings: EvaluationSampleSettings, work: Work) -> None:
    """Write the table `completions`; its `source` says which rows are sampled and which are greedy."""
    task = load_task(TaskSource(**settings.task.model_dump()))
    base_folders = [checked_directory(folder) for folder in work.inputs["models"]]
    base = (base_folders, work.digest("models"))
    if "policy" in work.inputs:
        team = load_policy(checked_directory(work.inputs["policy"]), *base, settings.team, settings.compute)
        reference = load_team(*base, settings.team, settings.compute) if settings.kl else None
    else:
        team, reference = load_team(*base, settings.team, settings.compute), None
    trajectories, dropped = _trajectories(settings, work, team, task)
    tables: list[pa.Table] = []
    for turn in range(settings.episode.turns):
        if turn:
            before = len(trajectories)
            trajectories = _continued(settings, team, task, trajectories, tables[-1])
            if len(trajectories) < before:
                dropped[f"turn_{turn + 1}_prompt_too_long"] = before - len(trajectories)
        if trajectories:
            draws = [draw for one in trajectories for draw in one.draws()]
            tables.append(sample_in_shards(settings, work, team, draws, reference=reference))
    write_completions(work, tables, dropped)


def _trajectories(
    settings: EvaluationSampleSettings, work: Work, team: Team, task: Task
) -> tuple[list[Trajectory], dict[str, int]]:
    """All trajectories before their first turn, and how many items were dropped, by split and reason."""
    begun: list[Trajectory] = []
    dropped: dict[str, int] = {}
    sampled, greedy = (Context(source, settings.round) for source in (SAMPLED, GREEDY))
    for split, samples in (("eval", settings.samples_per_task), ("train", settings.train_samples_per_task)):
        if not samples:
            continue
        items = read_table(work.inputs[split]).to_pylist()
        sampling = settings.sampling
        prompted, out = prompt_items(team, task, items, sampling.max_new_tokens, sampling.overflow)
        dropped |= {f"{split}_{reason}": count for reason, count in out.items()}
        begun += [Trajectory(sampled, one, sample) for one in prompted for sample in range(samples)]
        if settings.greedy:
            begun += [Trajectory(greedy, one, 0, greedy=True) for one in prompted]
    return begun, dropped


def _continued(
    settings: EvaluationSampleSettings, team: Team, task: Task, trajectories: Sequence[Trajectory], last: pa.Table
) -> list[Trajectory]:
    """The trajectories at their next turn, without those whose prompts leave no room for it."""
    texts = iter(last["text"].to_pylist())
    found = [
        one.after(team, task, [next(texts) for _ in range(task.agents)], settings.sampling) for one in trajectories
    ]
    return [one for one in found if one is not None]
