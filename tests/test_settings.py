"""Settings of the stages: what each one reads, and that it survives the way over the command line."""

import json
import shlex
from pathlib import Path

import pytest

from comlrl_stages.config import Episode, TrainingCompute
from comlrl_stages.config_methods import Lora
from comlrl_stages.errors import UserError
from comlrl_stages.job_settings import instances, settings_of
from comlrl_stages.project import load_project
from comlrl_stages.registry import ALGORITHMS
from comlrl_stages.settings import (
    OPTIMIZE_SETTINGS,
    SETTINGS,
    ActorCriticSettings,
    GroupSettings,
    PairSettings,
    describe_settings,
    flatten,
    parse_settings,
)

CONFIG = Path(__file__).parents[1] / "config"
STAGES = ["optimize", *SETTINGS]
#: Values that are hard to carry: quotes, braces, newlines, equals signs, other scripts, fractions without end.
AWKWARD = """
task:
  file: 'my tasks/tâche=1.py'
  options: {template: "{question}\\nWhat's \\"this\\"?", weights: [0.1, 1e-30], deep: {k: null}}
items: 'a b/{x}.jsonl'
team: {model: tiny, system_prompt: ["You're {first} = 1", null], template_arguments: {enable_thinking: false}}
scoring: {parameters: {limit: 0.30000000000000004, name: "x=y"}}
sampling: {stop: ["\\n\\n", "{end}", "'"], temperature: 0.7}
methods:
  base: {}
  ipo: {algorithm: madpo, loss: ipo, learning_rate: [3e-5, 1e-30], lora: {target_modules: [q_proj, "v proj"]}}
  marlhf: {}
  iac: {critic: shared, value_clip: 0.30000000000000004, advantage_clip: 0.05, value_hidden: 8}
seeds: [0, 11]
"""
#: Turns, cross, adapters, critics, evaluation while training.
TURNS = """
task: {name: length_ratio}
items: {validation_fraction: 0.3}
team: {model: tiny, agents: 2, share_weights: true}
episode: {turns: 2, discount: 0.5, termination_threshold: 0.25}
methods:
  base: {}
  madpo: {}
  cross: {algorithm: magrpo, joint_mode: cross, generations: 4, importance_ratio: true, clip: 0.2, buffer_epochs: 2}
  best: {algorithm: mareinforce, eval_interval: 64, keep_best: eval/turn_2/reward_mean, patience: 2}
  kept: {algorithm: maac, critic_model: judge, keep_checkpoints: true, schedule_steps: 100}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """All shipped experiments, and one with awkward values."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "experiments").mkdir()
    (folder / "models").mkdir()
    (folder / "experiments/awkward.yaml").write_text(AWKWARD, encoding="utf-8")
    (folder / "experiments/turns.yaml").write_text(TURNS, encoding="utf-8")
    (folder / "models/judge.yaml").write_text("{builtin: tiny, trust_remote_code: true}", encoding="utf-8")
    shipped = [path.stem for path in (CONFIG / "experiments").glob("*.yaml")]
    return load_project({"experiments": [*shipped, "awkward", "turns"]}, [folder, CONFIG])


def jobs(project, stage):
    """The settings of every job of a stage."""
    found = [settings_of(project, stage, wildcards) for wildcards in instances(project, stage)]
    return [settings for settings in found if settings is not None]


def strings(stage, **values):
    return [f"{stage}.{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]


def refusal(stage, *given):
    with pytest.raises(UserError) as refused:
        parse_settings(stage, given)
    return str(refused.value)


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_settings_of_every_job_survive_the_command_line(project, stage):
    assert jobs(project, stage)
    for settings in jobs(project, stage):
        given = [f"{key}={value}" for key, value in flatten(stage, settings).items()]
        quoted = shlex.split(" ".join(shlex.quote(text) for text in given))
        parsed, runtime, tracked = parse_settings(stage, quoted)
        assert parsed == settings and type(parsed) is type(settings)
        assert runtime == {} and tracked == flatten(stage, settings)


@pytest.mark.parametrize("stage", STAGES)
def test_a_setting_is_one_line_of_json_under_the_name_of_its_stage(project, stage):
    for settings in jobs(project, stage):
        for key, value in flatten(stage, settings).items():
            assert key.startswith(f"{stage}.") and "\n" not in value
            json.loads(value)


def test_every_method_and_seed_is_a_job(project):
    of_awkward = [w for w in instances(project, "optimize") if w.experiment == "awkward"]
    assert [(w.seed, w.method) for w in of_awkward] == [(s, m) for s in (0, 11) for m in ("ipo", "marlhf", "iac")]
    evaluated = [w for w in instances(project, "evaluate") if w.experiment == "awkward"]
    assert [(w.seed, w.method) for w in evaluated] == [
        (s, m) for s in (0, 11) for m in ("base", "ipo", "marlhf", "iac")
    ]


def test_the_untrained_team_is_not_optimized(project):
    wildcards = next(iter(instances(project, "evaluate")))
    wildcards.round = "001"
    assert wildcards.method == "base" and settings_of(project, "optimize", wildcards) is None


def test_json_does_not_depend_on_the_order_of_keys_in_a_mapping():
    here = parse_settings("score", strings("score", task__name="x", parameters={"a": 1, "b": 2}))[0]
    there = parse_settings("score", strings("score", parameters={"b": 2, "a": 1}, task__name="x"))[0]
    assert flatten("score", here) == flatten("score", there)


# --- a stage has what it reads, and nothing else ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "reads", "reads_not"),
    [
        ("prepare", "builtin dtype torch_threads", "seed compute"),
        ("split", "source task.name agents validation_fraction", "compute seed sampling team episode"),
        (
            "sample",
            "seed candidates sampling.top_p compute.sampling_tokens",
            "compute.training_tokens parameters scale episode",
        ),
        ("score", "scale parameters task.name", "seed compute sampling candidates"),
        ("pair", "seed selection min_gap", "collection task compute"),
        ("replay", "round", "seed task compute"),
        ("refer", "temperature compute.training_tokens team.agents", "seed compute.sampling_tokens task sampling"),
        ("reward", "seed batch_size compute.training_tokens", "preferences model compute.sampling_tokens task"),
        (
            "sample_evaluation",
            "samples_per_task greedy kl lora episode.turns",
            "bootstrap_replicates scale compute.training_tokens",
        ),
        ("evaluate", "bootstrap_replicates scale episode.discount", "samples_per_task compute sampling"),
        ("export", "agents lora", "seed task"),
        ("report", "methods seeds", "compute task scale"),
    ],
)
def test_a_stage_gets_what_it_reads_and_nothing_else(project, stage, reads, reads_not):
    for settings in jobs(project, stage):
        keys = [key.removeprefix(f"{stage}.") for key in flatten(stage, settings)]
        assert set(reads.split()) <= set(keys)
        for name in reads_not.split():
            assert not [key for key in keys if key == name or key.startswith(f"{name}.")]


def optimize(project, experiment, method, seed=0):
    """The settings of one method."""
    wanted = {"experiment": experiment, "method": method, "seed": seed}
    (found,) = [w for w in instances(project, "optimize") if wanted.items() <= vars(w).items()]
    return settings_of(project, "optimize", found)


def keys_of(project, algorithm):
    return {key for s in jobs(project, "optimize") if s.algorithm == algorithm for key in flatten("optimize", s)}


def test_madpo_reads_neither_the_task_nor_its_reward(project):
    madpo, magrpo = keys_of(project, "madpo"), keys_of(project, "magrpo")
    assert "optimize.beta" in madpo - magrpo
    rewarded = {"task.name", "scoring.scale", "sampling.top_p", "episode.turns", "kl_coefficient"}
    assert {f"optimize.{key}" for key in rewarded} <= magrpo - madpo


#: What names inputs, whose digests count, and what decides no byte.
NO_SETTINGS = (".preferences", ".reward_model", ".critic_model", ".keep_checkpoints", ".restore_critics", ".backend")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_told_neither_names_of_inputs_nor_what_decides_no_byte(project, algorithm):
    keys = keys_of(project, algorithm)
    assert keys and not {key for key in keys if key.endswith(NO_SETTINGS)}


def test_only_actor_critics_read_of_critics(project):
    values = {"optimize.critic", "optimize.value_clip", "optimize.critics", "optimize.critic_trust_remote_code"}
    assert values <= keys_of(project, "maac") & keys_of(project, "iac") and not values & keys_of(project, "magrpo")
    assert {"optimize.joint_mode", "optimize.cross_reduction"} <= keys_of(project, "marloo") - keys_of(project, "iac")


def test_settings_of_a_group_method(project):
    cross = optimize(project, "turns", "cross")
    assert type(cross) is GroupSettings and (cross.method, cross.algorithm, cross.seed) == ("cross", "magrpo", 0)
    assert (cross.joint_mode, cross.cross_reduction, cross.clip, cross.buffer_epochs) == ("cross", "mean", 0.2, 2)
    assert cross.episode == Episode(turns=2, discount=0.5, termination_threshold=0.25)
    best = optimize(project, "turns", "best")
    assert (best.eval_interval, best.keep_best, best.patience) == (64, "eval/turn_2/reward_mean", 2)


def test_settings_of_actor_critics(project):
    kept = optimize(project, "turns", "kept")
    assert type(kept) is ActorCriticSettings and (kept.critic, kept.value_clip, kept.critics) == (
        "separate",
        None,
        None,
    )
    assert kept.critic_trust_remote_code == [True] and kept.schedule_steps == 100
    shared = optimize(project, "awkward", "iac")
    assert (shared.critic, shared.value_clip, shared.value_hidden) == ("shared", 0.30000000000000004, 8)
    assert shared.critic_trust_remote_code == []


def test_adapters_and_learning_rates_per_agent_reach_the_training(project):
    ipo = optimize(project, "awkward", "ipo")
    assert ipo.learning_rate == [3e-5, 1e-30] and ipo.lora == Lora(target_modules=["q_proj", "v proj"])
    assert "optimize.lora.rank" in flatten("optimize", ipo)
    assert flatten("optimize", optimize(project, "awkward", "iac"))["optimize.lora"] == "null"


def of_method(project, stage, method):
    return next(
        s
        for w in instances(project, stage)
        if w.experiment == "turns" and w.method == method
        for s in [settings_of(project, stage, w)]
    )


def test_what_is_sampled_for_evaluation_does_not_depend_on_when_episodes_end(project):
    assert of_method(project, "sample_evaluation", "best").episode == Episode(turns=2)
    assert of_method(project, "evaluate", "best").episode == Episode(turns=2, discount=0.5, termination_threshold=0.25)


def test_only_trained_teams_share_weights(project):
    shared = {name: of_method(project, "sample_evaluation", name).team.share_weights for name in ("base", "best")}
    assert shared == {"base": False, "best": True}
    assert optimize(project, "turns", "kept").team.share_weights
    collected = [w for w in instances(project, "sample") if w.experiment == "turns"]
    assert not settings_of(project, "sample", collected[0]).team.share_weights


def test_kept_checkpoints_run_nothing_again(project):
    overlay = {"experiments": {"turns": {"methods": {"kept": {"keep_checkpoints": False}}}}}
    other = load_project({"experiments": ["turns"], "override": overlay}, [*project.folders])
    assert optimize(other, "turns", "kept") == optimize(project, "turns", "kept")


def test_critics_saved_beside_a_team_are_where_training_starts(project, tmp_path):
    for name in ("run/agent_0", "run/agent_1", "run/critics/critic", "run/critics/critic_0"):
        (tmp_path / name).mkdir(parents=True)
    methods = {
        "maac": {},
        "iac": {},
        "fresh": {"algorithm": "maac", "restore_critics": False},
        "named": {"algorithm": "maac", "critic_model": "tiny"},
        "shared": {"algorithm": "iac", "critic": "shared"},
    }
    values = {"task": "length_ratio", "team": {"model": {"path": f"{tmp_path}/run"}}, "methods": methods}
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/on.yaml").write_text(json.dumps(values))
    again = load_project({"experiments": ["on"]}, [tmp_path, CONFIG])
    saved = f"{tmp_path}/run/critics"
    found = {name: optimize(again, "on", name).critics for name in methods}
    assert found == {"maac": saved, "iac": saved, "fresh": None, "named": None, "shared": None}


# --- by hand ------------------------------------------------------------------------------------------------------


def test_what_is_left_out_takes_its_default():
    assert parse_settings("pair", [])[0] == PairSettings()


def test_text_needs_no_quotes_by_hand():
    settings, _, tracked = parse_settings("pair", ["pair.selection=random", "pair.min_gap=0.5"])
    assert (settings.selection, settings.min_gap) == ("random", 0.5)
    assert tracked == {"pair.selection": "random", "pair.min_gap": "0.5"}


def test_a_value_may_hold_equals_signs():
    assert parse_settings("score", ["score.task.file=a=b.py"])[0].task.file == "a=b.py"


def test_a_section_can_be_given_whole_or_key_by_key():
    whole = parse_settings("refer", ['refer.compute={"training_tokens": 512}'])[0]
    assert whole == parse_settings("refer", ["refer.compute.training_tokens=512"])[0]
    assert whole.compute == TrainingCompute(training_tokens=512)


def test_runtime_is_apart_and_never_tracked():
    settings, runtime, tracked = parse_settings("pair", ["runtime.score_workers=3", "pair.seed=1", "code=abc"])
    assert runtime == {"score_workers": 3}
    assert tracked == {"pair.seed": "1", "code": "abc"} and settings.seed == 1


def test_versions_code_and_data_are_tracked_but_no_settings():
    given = ["code=ab", "task_code=cd", "versions.torch=2", "schema.version=1", "data.source=ef"]
    settings, _, tracked = parse_settings("pair", given)
    assert settings == PairSettings() and tracked == dict(text.split("=") for text in given)


@pytest.mark.parametrize(
    ("stage", "given", "told"),
    [
        ("pair", "pair.sead=1", "settings of pair: sead: unknown key (nearest: 'seed'). Valid here: seed, selection"),
        ("refer", "refer.compute.traning_tokens=1", "compute.traning_tokens: unknown key (nearest: 'training_tokens')"),
        ("pair", "score.seed=1", "setting 'score.seed': stage pair reads keys that begin with pair. or runtime."),
        ("pair", "seed=1", "setting 'seed': stage pair reads keys that begin with pair."),
        ("pair", "seed", "setting 'seed': expected key=value, for example pair.seed=0"),
        ("pair", "pair=1", "settings of pair: (top level): unknown key. Valid here: seed, selection"),
        ("pair", "pair.seed=one", "settings of pair: seed: Input should be a valid integer"),
        ("pair", "runtime.score_worker=1", "runtime settings of pair: score_worker: unknown key (nearest: 'score_work"),
        ("pair", "runtime.score_workers=0", "runtime settings of pair: score_workers: Input should be greater than"),
        ("optimize", "optimize.algorithm=ppo", "optimize.algorithm: 'ppo' is none of madpo, magrpo, marloo"),
        ("optimize", "optimize.seed=1", "optimize.algorithm: '' is none of madpo, magrpo, marloo"),
    ],
)
def test_a_wrong_setting_is_named(stage, given, told):
    assert told in refusal(stage, given)


def test_a_key_cannot_lie_inside_a_value():
    assert "setting score.task.name: task has a value" in refusal("score", "score.task=x", "score.task.name=y")


@pytest.mark.parametrize("stage", STAGES)
def test_all_settings_of_a_stage_can_be_listed(project, stage):
    listed = {line.split("  ")[0] for line in describe_settings(stage).splitlines()}
    assert listed >= {key for settings in jobs(project, stage) for key in flatten(stage, settings)}


def test_listing_tells_defaults_and_what_is_needed():
    text = describe_settings("pair")
    assert 'pair.selection  (default "reward_gap")' in text and "pair.seed  (default 0)" in text
    with pytest.raises(UserError, match="no stage 'pare'; stages: optimize, prepare, split"):
        describe_settings("pare")


def test_every_trained_algorithm_has_settings():
    assert set(OPTIMIZE_SETTINGS) == set(ALGORITHMS)
