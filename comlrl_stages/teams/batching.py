"""Batches planned by length: little padding, a bound on memory, and the same plan for the same rows."""

from collections.abc import Sequence


def plan_batches(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Return batches of indices, shortest first, each with rows * largest cost <= budget.

    A row that alone exceeds the budget is a batch of its own. Equal costs keep their order.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        if batches and (len(batches[-1]) + 1) * costs[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
