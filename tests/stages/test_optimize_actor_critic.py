"""Actor-critic training: what critics and policies learn from, what is logged and saved, and kills."""

import math

import pytest

from .conftest import files_of, log_of

JOINT = -1
LONG = """
formatters = [lambda item: "word " * 24 if item["task_id"] == "train0" else "hi"] * 2


def reward(first, second):
    return [float(len(a) - len(b)) for a, b in zip(first, second)]
"""
KINDS = [
    pytest.param({"algorithm": "iac"}, id="iac, separate"),
    pytest.param({"algorithm": "iac", "critic": "shared"}, id="iac, shared"),
    pytest.param({"algorithm": "iac", "critic_type": "q"}, id="iac, separate, q"),
    pytest.param({"algorithm": "iac", "critic": "shared", "critic_type": "q", "value_hidden": 8}, id="iac, shared, q"),
    pytest.param({"algorithm": "maac"}, id="maac"),
    pytest.param({"algorithm": "maac", "critic_type": "q", "value_hidden": 8}, id="maac, q"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_is_saved(mixed, tmp_path, kind):
    made = mixed.reinforce(tmp_path, **kind)
    log = log_of(made["training_log"])
    assert all(math.isfinite(value) for value in log.values())
    assert all(log[2, agent, "changed_share"] > 0.5 for agent in (0, 1))
    central = kind["algorithm"] == "maac"
    assert log[1, JOINT if central else 0, "value_loss"] > 0
    folders = sorted(path.name for path in (made["policy"] / "critics").glob("*"))
    if kind.get("critic") == "shared":
        assert folders == [] and (made["policy"] / "agent_0" / "value_head.safetensors").is_file()
    else:
        assert folders == (["critic"] if central else ["critic_0", "critic_1"])


@pytest.mark.parametrize(("kind", "reader"), [("maac", JOINT), ("iac", 0)])
def test_what_a_critic_could_not_read_to_the_end_is_counted(mixed, tmp_path, kind, reader):
    """A context holds 128 tokens: the joint text of the first item has more, the texts of each agent do not."""
    task = {"file": str(tmp_path / "long.py"), "object": None}
    (tmp_path / "long.py").write_text(LONG, encoding="utf-8")
    log = log_of(mixed.reinforce(tmp_path, algorithm=kind, task=task, items_per_step=4)["training_log"])
    assert log[1, reader, "critic_cut_share"] == (0.25 if kind == "maac" else 0.0)


# --- kills --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4]])
def test_a_killed_run_goes_on_to_the_same_bytes(mixed, tmp_path, kind):
    given = {**kind, "epochs": 2, "train_batch_size": 3, "buffer_epochs": 2, "importance_ratio": True, "clip": 0.2}
    whole = mixed.reinforce(tmp_path / "whole", checkpoint_interval=50, **given)
    with pytest.raises(KeyboardInterrupt):
        mixed.reinforce(tmp_path / "killed", stop_after=3, checkpoint_interval=2, **given)
    assert not (tmp_path / "killed" / "policy").exists()
    resumed = mixed.reinforce(tmp_path / "killed", checkpoint_interval=2, **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())
