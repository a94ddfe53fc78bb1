"""Length ratio: the second agent shall write two to three times as much as the first.

Both agents get the same prompt and write on their own; the reward counts characters and says nothing about quality.
To write a task of your own, copy this file: items, a formatter per agent, and a reward over their completions.
"""

import math
from statistics import fmean as mean

PROMPTS = (
    "Describe a city in the clouds.",
    "Invent a new holiday.",
    "Write a bedtime story for a dragon.",
    "Explain how teleportation might work.",
    "Tell a story about dinosaurs.",
    "Describe a world without electricity.",
    "Create a superhero with a unique power.",
    "Write a scene where the moon talks.",
    "Invent a new type of fruit.",
    "Design a playground on Mars.",
    "Describe a market at the bottom of the sea.",
    "Invent a game for rainy days.",
    "Write a letter from a lighthouse to a ship.",
    "Explain why cats stare at walls.",
    "Tell a story about a lost umbrella.",
    "Describe a train that never stops.",
    "Create a robot that is afraid of the dark.",
    "Write a scene in a library at midnight.",
    "Invent a musical instrument made of ice.",
    "Design a house for a family of giants.",
)


def short_formatter(item):
    return f"Write a short response to this task:\n{item['prompt']}"


def detailed_formatter(item):
    return f"Write a detailed response to this task:\n{item['prompt']}"


class Task:
    """Two agents, twenty prompts; the wanted ratio lies between `target_min` and `target_max` (characters)."""

    formatters = (short_formatter, detailed_formatter)

    def __init__(self, target_min: float = 2.0, target_max: float = 3.0):
        self.target = {"target_min": target_min, "target_max": target_max}

    def items(self):
        """Return the task items: a prompt for the agents, the wanted ratio for the reward."""
        return [{"prompt": prompt, **self.target} for prompt in PROMPTS]

    def reward(self, short_completions, detailed_completions, *, batch_items):
        """Return (reward, parts) per joint response: 1 inside the wanted range, exp(-distance) outside."""
        pairs = zip(short_completions, detailed_completions, strict=True)
        return [length_ratio(short, detailed, batch_items[0]) for short, detailed in pairs]  # one item per call

    def eval_logger(self, *, agent_completions_turns, batch_items, prompts):
        """Return the mean response length of each item and turn; completions come as [agent][item][turn]."""
        rows = []
        for turns_of_agents in zip(*agent_completions_turns, strict=True):
            turns = enumerate(zip(*turns_of_agents, strict=True), start=1)
            rows.append({f"turn_{turn}/response_chars": mean(map(len, texts)) for turn, texts in turns})
        return rows

    def eval_aggregator(self, rows, *, num_turns):
        """Return the mean of the logged rows; one that ended early has fewer turns."""
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: mean(row[name] for row in rows if name in row) for name in names}


def length_ratio(short, detailed, item):
    """Return the reward of one pair of texts and its parts; an empty short text has no ratio and earns 0."""
    parts = {"first_chars": len(short), "second_chars": len(detailed)}
    if not short:
        return 0.0, parts
    ratio = len(detailed) / len(short)
    distance = max(item["target_min"] - ratio, ratio - item["target_max"], 0.0)
    return math.exp(-distance), {"ratio": ratio, **parts}
