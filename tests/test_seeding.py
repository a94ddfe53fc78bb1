"""Named random streams: all different, independent of what else is drawn, and the same for ever."""

from itertools import combinations

import numpy as np
import pytest

from comlrl_stages.seeding import stream, torch_seed

#: Source, round, step, task id, turn, node, candidate, agent: two candidates, agents, rounds, steps and turns.
KEYS = [
    ("policy", round_, step, "task-0", turn, "", candidate, agent)
    for round_ in (1, 2)
    for step in (0, 1)
    for turn in (1, 2)
    for candidate in (0, 1)
    for agent in (0, 1)
]

KNOWN = [0.9041690321958114, 0.890141723044431, 0.47094249844602754]
KNOWN_ORDER = [5, 2, 3, 1, 4, 0]
KNOWN_SEED = 5854628797493661176


def draws(*names, seed=0, count=8):
    return stream(seed, *names).random(count)


def test_the_streams_of_all_roles_differ():
    assert len(KEYS) == 32
    for first, second in combinations([draws(*key) for key in KEYS], 2):
        assert not np.isin(first, second).any()


def test_seeds_differ_in_every_stream():
    assert not np.isin(np.concatenate([draws(*key, seed=0) for key in KEYS]), draws(*KEYS[0], seed=1)).any()


def test_adding_a_task_changes_no_other_draw():
    before = {task: draws("policy", task) for task in ("a", "b")}
    after = {task: draws("policy", task) for task in ("new", "a", "b")}
    assert all((before[task] == after[task]).all() for task in before)


def test_a_longer_draw_begins_like_a_shorter_one():
    assert (draws("a", count=100)[:8] == draws("a")).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [(("ab", "c"), ("a", "bc")), ((1,), ("1",)), (("a",), ("a", "")), (("a,b",), ("a", "b")), (('a","b',), ("a", "b"))],
)
def test_names_are_kept_apart(one, other):
    assert (draws(*one) != draws(*other)).all()
    assert torch_seed(0, *one) != torch_seed(0, *other)


def test_the_seed_is_no_name():
    assert (draws(2, seed=1) != draws(1, seed=2)).all()


def test_names_of_any_script_work():
    assert (draws("Ærø 🐉") == draws("Ærø 🐉")).all()


def test_streams_never_change_silently():
    """Changing these numbers changes every result: only together with the schema version."""
    assert draws("policy", 1, 0, "task-0", 1, "", 0, 0, count=3).tolist() == KNOWN
    assert stream(7, "pairs").permutation(6).tolist() == KNOWN_ORDER
    assert torch_seed(42, "reward", "head") == KNOWN_SEED


def test_torch_seeds_fit_a_signed_integer():
    assert all(0 <= torch_seed(0, *key) < 2**63 for key in KEYS)
