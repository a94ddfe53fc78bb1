"""The stage that fits the joint reward model."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from comlrl_stages.artifacts import COMPLETIONS, PAIRS, REWARDS, open_work, read_manifest, table_of, write_table
from comlrl_stages.config import Compute as ComputeSettings
from comlrl_stages.errors import UserError
from comlrl_stages.learning import optimization
from comlrl_stages.preferences.selection import select_pairs
from comlrl_stages.seeding import stream
from comlrl_stages.settings import RewardSettings
from comlrl_stages.stages import reward
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import LoadedModel, facts_of, save_model
from comlrl_stages.teams.reward_model import JointInput, load_reward_model, new_reward_model, score_joint
from comlrl_stages.teams.tiny import tiny_tokenizer

TASKS, CANDIDATES = 10, 6
KEY = {"source": "policy", "round": 1, "step": 0, "turn": 0, "node": ""}
WORDS = ("rain", "sun", "sea", "town", "tree", "bird")
CPU = Compute("cpu", "float32")


def _settings(**changes):
    values = {"learning_rate": 1e-3, "epochs": 10, "batch_size": 8, "max_length": 96, "held_out_fraction": 0.3}
    numeric = {"device": "cpu", "compute_dtype": "float32", "training_tokens": changes.pop("training_tokens", 2048)}
    return RewardSettings(**{**values, **changes}, compute=ComputeSettings(**numeric))


def _publish(folder, **tables):
    """Write tables as finished artifacts; one that is None is the model folder."""
    outputs = {name: folder / (name if table is None else f"{name}.parquet") for name, table in tables.items()}
    with open_work("made", {}, {}, outputs) as work:
        for name, table in tables.items():
            if table is None:
                _save_backbone(work.output(name))
            else:
                write_table(work.output(name), table)
    return outputs


def _save_backbone(folder):
    tokenizer = tiny_tokenizer(0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids, max_position_embeddings=128)
    model = LlamaForCausalLM(config)
    save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), folder)


def _tables(tasks):
    """Two agents; the reward is the number of responses that name the rain."""
    completions, rewards, pairs = [], [], []
    for task_id in tasks:
        rng = stream(0, task_id)
        context = {**KEY, "task_id": task_id}
        texts = [[" ".join(rng.choice(WORDS, size=3)) for _ in range(2)] for _ in range(CANDIDATES)]
        values = [float(sum("rain" in text for text in joint)) for joint in texts]
        for sample, joint in enumerate(texts):
            completions += [
                {**context, "sample": sample, "agent": agent, "prompt": f"{task_id}, part {agent}", "text": text}
                for agent, text in enumerate(joint)
            ]
            rewards.append({**context, "joint": sample, "samples": [sample, sample], "reward": values[sample]})
        chosen = select_pairs(values, list(map(tuple, texts)), selection="all", limit=None, generator=rng).pairs
        pairs += [
            {
                "pair_id": f"{task_id}/{winner}/{loser}",
                "task_id": task_id,
                "winner": {**KEY, "joint": winner},
                "loser": {**KEY, "joint": loser},
                "winner_reward": values[winner],
                "loser_reward": values[loser],
                "preference": 1.0,
            }
            for winner, loser in chosen
        ]
    return completions, rewards, pairs


def _inputs(folder, tasks, extra_pairs=()):
    completions, rewards, pairs = _tables(tasks)
    return _publish(
        folder,
        model=None,
        completions=table_of(completions, COMPLETIONS),
        rewards=table_of(rewards, REWARDS),
        pairs=table_of([*pairs, *extra_pairs], PAIRS),
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Pairs of ten tasks, and one pair of a candidate with itself."""
    same = {**KEY, "joint": 0}
    extra = {"pair_id": "same", "task_id": "task 0", "winner": same, "loser": same, "preference": 1.0}
    return _inputs(tmp_path_factory.mktemp("inputs"), [f"task {i}" for i in range(TASKS)], [extra])


def _run(folder, inputs, settings, stop_after=None):
    """Run the stage; `stop_after` interrupts it when so many updates are done."""
    outputs = {"reward_model": folder / "reward_model", "training_log": folder / "training_log.parquet"}
    with open_work("reward", {}, inputs, outputs, {"checkpoint_interval": 4}) as work:
        if stop_after is not None:
            work.progress = lambda total, label: _Interrupt(stop_after)
        reward.run(settings, work)
    return outputs


class _Interrupt:
    def __init__(self, steps):
        self.left = steps

    def __call__(self, n=1, note="", kept=False):
        self.left -= n
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def fitted(inputs, tmp_path_factory):
    return _run(tmp_path_factory.mktemp("fitted"), inputs, _settings())


def _quality(outputs):
    return json.loads((outputs["reward_model"] / "quality.json").read_text())


def _digests(outputs):
    return [read_manifest(path)["files"] for path in outputs.values()]


def test_learns_what_the_task_rewards_on_tasks_it_never_saw(fitted):
    quality = _quality(fitted)
    assert quality["before"]["held_out_accuracy"] < 0.8
    assert quality["after"]["held_out_accuracy"] > 0.9
    assert quality["after"]["held_out_spearman"] > 0.6
    for name in ("held_out_loss", "held_out_brier", "training_loss"):
        assert quality["after"][name] < quality["before"][name]
    assert quality["changed_share"] > 0.1
    assert quality["tasks"] == {"training": 7, "held_out": 3}


def test_the_saved_model_gives_the_scores_of_the_held_out_table(fitted, inputs):
    loaded = load_reward_model(fitted["reward_model"])
    texts = {}
    for row in pq.read_table(inputs["completions"]).to_pylist():
        texts.setdefault((row["task_id"], row["sample"]), []).append((row["prompt"], row["text"]))
    for row in pq.read_table(fitted["reward_model"] / "held_out.parquet").to_pylist()[:5]:
        winner = int(row["pair_id"].split("/")[1])
        encoded = loaded.encode(*zip(*texts[row["task_id"], winner], strict=True))
        assert score_joint(loaded, [encoded], CPU, 2048) == pytest.approx([row["winner_score"]], abs=1e-5)


def test_log_holds_the_quality_before_every_update_and_the_quality_after(fitted):
    log = pq.read_table(fitted["training_log"]).to_pylist()
    quality = _quality(fitted)
    updates = -(-quality["pairs"]["training"] // 8) * _settings().epochs
    value = {(row["step"], row["name"]): row["value"] for row in log}
    assert value[0, "held_out_accuracy"] == quality["before"]["held_out_accuracy"]
    assert value[updates, "held_out_accuracy"] == quality["after"]["held_out_accuracy"]
    assert [step for step, name in value if name == "gradient_norm"] == list(range(1, updates + 1))
    assert {(row["phase"], row["agent"], row["env_step"]) for row in log} == {("reward", -1, 0)}


def test_a_pair_of_equal_texts_is_dropped_and_counted(fitted):
    assert read_manifest(fitted["reward_model"])["counts"]["dropped"] == {"equal_text": 1}


def test_pairs_that_cutting_makes_equal_are_dropped_and_counted(inputs, tmp_path):
    # so little room that one token of each response is left: many pairs become equal
    outputs = _run(tmp_path, inputs, _settings(max_length=36, epochs=1))
    counts = read_manifest(outputs["reward_model"])["counts"]
    assert counts["cut"] > 0
    assert counts["dropped"]["equal_text"] > 1


def test_the_same_settings_give_the_same_bytes_and_a_kill_changes_none(fitted, inputs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, inputs, _settings(), stop_after=10)
    assert not (tmp_path / "reward_model").exists()
    assert _digests(_run(tmp_path, inputs, _settings())) == _digests(fitted)


def test_another_seed_gives_another_head_and_split(fitted, inputs, tmp_path):
    other = _run(tmp_path, inputs, _settings(seed=1, epochs=1))
    held_out = [
        set(pq.read_table(o["reward_model"] / "held_out.parquet")["task_id"].to_pylist()) for o in (fitted, other)
    ]
    assert held_out[0] != held_out[1]


def test_a_frozen_backbone_keeps_its_bits(inputs, tmp_path):
    outputs = _run(tmp_path, inputs, _settings(freeze_backbone=True, learning_rate=0.1, epochs=1))
    before = new_reward_model(inputs["model"], max_length=96, generator=torch.Generator()).model.backbone
    after = load_reward_model(outputs["reward_model"]).model.backbone
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert _quality(outputs)["changed_share"] == 1.0


def test_held_out_tasks_hardly_move_when_a_task_is_added():
    def held_out(tasks):
        pairs = [reward.EncodedPair({"task_id": task}, None, None) for task in tasks]
        training, kept = reward.split_by_task(pairs, 0.2, seed=0)
        assert not {p.row["task_id"] for p in training} & {p.row["task_id"] for p in kept}
        return {p.row["task_id"] for p in kept}

    tasks = [f"task {i}" for i in range(50)]
    assert len(held_out(tasks)) == 10
    assert len(held_out(tasks) & held_out([*tasks, "one more"])) >= 9


def test_a_token_budget_changes_nothing_but_rounding(inputs):
    rng = stream(0, "pairs")
    sides = [JointInput(tuple(rng.integers(3, 1000, size=length).tolist()), False) for length in range(4, 20)]
    pairs = [reward.EncodedPair({"preference": 1.0}, *sides[i : i + 2]) for i in range(0, 16, 2)]
    results = []
    for tokens in (64, 4096):
        settings = _settings(training_tokens=tokens)
        loaded = new_reward_model(inputs["model"], max_length=96, generator=torch.Generator().manual_seed(0))
        named = loaded.model.named_parameters()
        optimizer = optimization.adamw(named, learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.99))
        numbers = reward.update(settings, loaded, CPU, optimizer, pairs)
        results.append((numbers, [parameter.grad for parameter in loaded.model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for first, second in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(first, second, atol=1e-7, rtol=1e-4)


def test_pairs_of_a_single_task_are_an_error(tmp_path):
    inputs = _inputs(tmp_path, ["only"])
    with pytest.raises(UserError, match="from 1 tasks"):
        _run(tmp_path, inputs, _settings())


def test_a_rate_that_moves_no_weight_is_an_error(inputs, tmp_path):
    with pytest.raises(UserError, match="no weight"):
        _run(tmp_path, inputs, _settings(learning_rate=1e-20, epochs=1))


def test_one_model_for_all_roles_is_shown_with_the_agents_own_prompts():
    team = [{"prompt": f"for {a}", "text": f"by {a}", "role_texts": None} for a in range(2)]
    joint = [{"prompt": "for all", "text": "<agent_0>..", "role_texts": ["x", "y"]}]
    assert reward.joint_texts(joint, team) == (("for 0", "for 1"), ("x", "y"))
    assert reward.joint_texts(team, joint) == (("for 0", "for 1"), ("by 0", "by 1"))
    assert reward.joint_texts(joint, joint) == (("for all", ""), ("x", "y"))
