"""Training adapters alone, from the first step to the merged export."""

import json

import pytest
import torch
from safetensors.torch import load_file

from .conftest import counting_characters, export_of, files_of, log_of, prepared, rows_of

JOINT = -1
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.2}
#: Enough that an adapter changes what is written.
STRONG = {"lora": LORA, "learning_rate": 2e-2, "epochs": 4, "generations": 6, "items_per_step": 4}


@pytest.fixture(scope="module")
def trained(mixed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return mixed.reinforce(folder, task=counting_characters(folder), kl_coefficient=0.01, **STRONG)


def test_adapters_alone_are_trained_and_saved(mixed, trained):
    log = log_of(trained["training_log"])
    last = max(step for step, _, _ in log)
    for agent, folder in enumerate(mixed.models):
        own = trained["policy"] / f"agent_{agent}"
        assert {path.name for path in own.iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
            "base.json",
        }
        weights = sum(path.stat().st_size for path in own.iterdir())
        assert weights < (folder / "model.safetensors").stat().st_size / 3
        assert json.loads((own / "adapter_config.json").read_text())["r"] == 4
        assert log[last, agent, "changed_share"] > 0.5


def test_the_reference_is_the_model_without_the_adapter(trained):
    """A new adapter changes nothing: the KL is that of rounding at the first step, and grows as it trains."""
    log = log_of(trained["training_log"])
    last = max(step for step, _, _ in log)
    for agent in (JOINT, 0, 1):
        assert 0 <= log[1, agent, "kl"] < 1e-6
        assert log[last, agent, "kl"] > 1e-3


def test_adapters_learn(trained):
    log = log_of(trained["training_log"])
    assert log[4, JOINT, "reward_mean"] > log[1, JOINT, "reward_mean"] + log[1, JOINT, "reward_std"]


@pytest.mark.parametrize(
    "kind",
    [
        {"algorithm": "magrpo", "buffer_epochs": 2, "train_batch_size": 4, "importance_ratio": True},
        {"algorithm": "iac", "critic": "shared"},
        {"algorithm": "maac"},
    ],
    ids=str,
)
def test_a_killed_run_with_dropout_goes_on_to_the_same_bytes(mixed, tmp_path, kind):
    given = {"lora": LORA, "epochs": 2, **kind}
    whole = mixed.reinforce(tmp_path / "whole", checkpoint_interval=50, **given)
    for stop_after in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            mixed.reinforce(tmp_path / "killed", stop_after=stop_after, checkpoint_interval=1, **given)
    resumed = mixed.reinforce(tmp_path / "killed", checkpoint_interval=1, **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())


def test_dropout_acts_in_training_and_never_in_sampling(mixed, tmp_path):
    """A new adapter adds nothing whatever is dropped, so only the second step can tell."""
    found = []
    for dropout in (0.0, 0.5):
        made = mixed.reinforce(tmp_path / str(dropout), lora={**LORA, "dropout": dropout})
        found.append(log_of(made["training_log"]))
    plain, dropped = found
    same = {"reward_mean", "reward_std"}
    assert all(plain[1, JOINT, name] == dropped[1, JOINT, name] for name in same)
    assert plain[1, 0, "gradient_norm"] != dropped[1, 0, "gradient_norm"]


def test_the_best_adapters_are_kept(mixed, tmp_path):
    given = {"eval_interval": 6, "eval_num_samples": 2, "eval_generations": 2, "keep_best": "eval/turn_1/reward_mean"}
    inputs = {"validation": mixed.eval}
    task = counting_characters(tmp_path)
    made = mixed.reinforce(tmp_path, task=task, inputs=inputs, **{**STRONG, "items_per_step": 2}, **given)
    rows = [r for r in rows_of(made["training_log"]) if r["name"] == given["keep_best"]]
    values = {row["step"]: row["value"] for row in rows}
    best = max(values, key=lambda step: (values[step], -step))
    assert best > 0 and made["policy"].is_dir()


def test_evaluation_and_the_merged_export_write_the_same_greedy_texts(mixed, trained, tmp_path):
    settings = {"lora": True, "samples_per_task": 1, "kl": True}
    adapters = rows_of(mixed.sample_evaluation(tmp_path / "adapters", policy=trained["policy"], **settings))
    base = rows_of(mixed.sample_evaluation(tmp_path / "base", samples_per_task=1))
    models = prepared(tmp_path, export_of(tmp_path, trained["policy"], mixed.models, lora=True))
    exported = rows_of(mixed.sample_evaluation(tmp_path / "merged", inputs={"models": models}, samples_per_task=1))
    texts = [[row["text"] for row in rows if row["source"].endswith("greedy")] for rows in (adapters, exported, base)]
    assert len(texts[0]) == 4 and texts[0] == texts[1] != texts[2]
    assert all(row["reference_log_probs"] for row in adapters if not row["source"].endswith("greedy"))


def test_madpo_trains_adapters_from_the_loss_of_the_base(mixed, tmp_path):
    given = {"lora": LORA, "epochs": 6, "learning_rate": 2e-2}
    whole = mixed.madpo(tmp_path / "whole", checkpoint_interval=50, **given)
    log = log_of(whole["training_log"])
    last = max(step for step, _, _ in log)
    assert log[1, JOINT, "loss"] == pytest.approx(0.6931, abs=1e-4), "a new adapter is the reference"
    assert log[last, JOINT, "loss"] < 0.6 and log[last, JOINT, "accuracy"] > 0.8
    assert not (whole["policy"] / "agent_0" / "model.safetensors").exists()
    with pytest.raises(KeyboardInterrupt):
        mixed.madpo(tmp_path / "killed", stop_after=2, checkpoint_interval=1, **given)
    resumed = mixed.madpo(tmp_path / "killed", checkpoint_interval=1, **given)
    assert files_of(*resumed.values()) == files_of(*whole.values())


def test_agents_of_one_model_have_adapters_of_their_own(pipeline, tmp_path):
    made = pipeline.reinforce(tmp_path, lora=LORA)
    adapters = [load_file(made["policy"] / f"agent_{agent}" / "adapter_model.safetensors") for agent in (0, 1)]
    assert adapters[0].keys() == adapters[1].keys()
    assert not any(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
