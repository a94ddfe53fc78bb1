"""What can be named in a configuration and is imported by name: shipped tasks and algorithms.

The modules stand here as text, so that neither adding one nor importing this touches the code fingerprint of the rest.
"""

#: Module of each task that ships; its class is `Task`.
TASKS = {
    "length_ratio": "comlrl_stages.tasks.length_ratio",
    "length_ratio_feedback": "comlrl_stages.tasks.length_ratio_feedback",
}

#: Module of each algorithm that trains; its `build` makes the updates for the optimize stage.
ALGORITHMS = {
    "madpo": "comlrl_stages.stages.optimize_madpo",
    "magrpo": "comlrl_stages.stages.optimize_group",
    "marloo": "comlrl_stages.stages.optimize_group",
    "maremax": "comlrl_stages.stages.optimize_group",
    "mareinforce": "comlrl_stages.stages.optimize_group",
    "iac": "comlrl_stages.stages.optimize_actor_critic",
    "maac": "comlrl_stages.stages.optimize_actor_critic",
}
