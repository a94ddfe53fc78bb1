"""Sample joint responses of the base team: every prompt, candidate and agent, at the first turn.

Reads the training items and the agents' models. Writes the completions with token ids and the log-probabilities under
the policy that sampled them. Every finished batch is kept, so that a killed run goes on with the next.
"""

from comlrl_stages.artifacts import Work, checked_directory, read_table
from comlrl_stages.rollouts.shards import sample_in_shards, write_completions
from comlrl_stages.rollouts.single_turn import Context, joint_draws, prompt_items
from comlrl_stages.settings import SampleSettings
from comlrl_stages.tasks.protocol import TaskSource, load_task
from comlrl_stages.teams.team import load_team


def run(settings: SampleSettings, work: Work) -> None:
    """Write the table `completions`."""
    task = load_task(TaskSource(**settings.task.model_dump()))
    folders = [checked_directory(folder) for folder in work.inputs["models"]]
    team = load_team(folders, work.digest("models"), settings.team, settings.compute)
    items = read_table(work.inputs["items"]).to_pylist()
    sampling = settings.sampling
    prompted, dropped = prompt_items(team, task, items, sampling.max_new_tokens, sampling.overflow)
    draws = joint_draws(Context("policy", settings.round), prompted, settings.candidates, task.agents)
    write_completions(work, [sample_in_shards(settings, work, team, draws)], dropped)
