"""Length ratio in two turns: both agents are told how long the first answers were, and answer once more.

Set `episode.turns: 2`. Each turn is scored on its own, as in length_ratio. Where items want different ratios
(`targets`), only the second prompt tells which: then first answers cannot be as good as second ones. To give a task of
your own a second turn, add a transition like this one. A formatter that declares `external_prompts` puts its role's
instruction before the new prompt; without it the agents read what the transition returns.
"""

from itertools import cycle

from comlrl_stages.tasks import length_ratio


def short_formatter(item, external_prompts=None):
    return length_ratio.short_formatter({"prompt": external_prompts or item["prompt"]})


def detailed_formatter(item, external_prompts=None):
    return length_ratio.detailed_formatter({"prompt": external_prompts or item["prompt"]})


class Task(length_ratio.Task):
    """Items, reward and metrics of length_ratio, and what both agents are told between the turns."""

    formatters = (short_formatter, detailed_formatter)

    def __init__(self, targets=((2.0, 3.0),)):
        """`targets`: wanted ranges of the ratio, lowest and highest; the items take them in turn."""
        self.targets = [(float(low), float(high)) for low, high in targets]

    def items(self):
        """Return the task items: a prompt for the agents, the wanted ratio for the reward."""
        wanted = zip(length_ratio.PROMPTS, cycle(self.targets), strict=False)
        return [{"prompt": prompt, "target_min": low, "target_max": high} for prompt, (low, high) in wanted]

    def transition(
        self, prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent, item
    ):
        """Return the next prompt of each agent: the item's, then the last lengths, their ratio, and the wanted one.

        The feedback stands last: so the tiny model, which never saw the like, still writes about the item.
        """
        short, detailed = (len(text) for text in agent_completions)
        ratio = f"{detailed / short:.2f}" if short else "none"
        wanted = f"{item['target_min']:g} to {item['target_max']:g}"
        feedback = f"The answers had {short} and {detailed} characters, ratio {ratio}. Wanted is {wanted}."
        return [f"{prompt}\n{feedback}"] * num_agents
