"""What can be named in a configuration and is imported by name: shipped tasks and algorithms.

The modules stand here as text, so that neither adding one nor importing this touches the code fingerprint of the rest.
"""

#: Module of each task that ships; its class is `Task`.
TASKS = {
    "length_ratio": "comlrl_stages.tasks.length_ratio",
}

#: Module of each algorithm that trains; its `build` makes the updates for the optimize stage.
ALGORITHMS = {
    "madpo": "comlrl_stages.stages.optimize_madpo",
    "marlhf": "comlrl_stages.stages.optimize_policy_gradient",
}
