"""The configuration's models: strict keys, allowed values, values that must agree, short forms and defaults."""

import json

import pytest

from comlrl_stages.config import (
    Compute,
    Episode,
    Evaluation,
    Experiment,
    Items,
    Model,
    Preferences,
    ProjectConfig,
    RewardModel,
    Runtime,
    Sampling,
    SavedTeam,
    Scoring,
    critic_models_of,
    models_of,
    unused_sections,
    used_reward_models,
)
from comlrl_stages.config_methods import ALGORITHMS, ActorCritic, Base, GroupMethod, Lora, Madpo
from comlrl_stages.config_reference import json_schema
from comlrl_stages.errors import UserError
from comlrl_stages.project import parse
from comlrl_stages.registry import ALGORITHMS as TRAINERS

MINIMAL = {"task": "length_ratio", "team": "tiny", "methods": ["base", "madpo", "marlhf"]}


def experiment(**values):
    return parse(Experiment, {**MINIMAL, **values}, "experiments/mine.yaml")


def refusal(kind, values):
    with pytest.raises(UserError) as refused:
        parse(kind, values, "mine.yaml")
    return str(refused.value)


def experiment_refusal(**values):
    return refusal(Experiment, {**MINIMAL, **values})


# --- unknown keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "path", "near", "valid"),
    [
        ({"sead": 1}, "sead", "seeds", "methods"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature", "temperature", "top_p"),
        ({"items": {"sorce": "a.jsonl"}}, "items.sorce", "source", "eval_source"),
        ({"task": {"nane": "length_ratio"}}, "task.nane", "name", "options"),
        ({"team": {"modell": "tiny"}}, "team.modell", "model", "agents"),
        ({"scoring": {"time_limit": 3}}, "scoring.time_limit", "time_limit_s", "batch_size"),
        ({"collections": {"big": {"candidate": 4}}}, "collections.big.candidate", "candidates", "sampling"),
        (
            {"collections": {"default": {"sampling": {"top_q": 0.5}}}},
            "collections.default.sampling.top_q",
            "top_p",
            "max_new_tokens",
        ),
        ({"preferences": {"default": {"min_gab": 1}}}, "preferences.default.min_gab", "min_gap", "selection"),
        ({"reward_models": {"default": {"epoch": 1}}}, "reward_models.default.epoch", "epochs", "batch_size"),
        ({"methods": {"madpo": {"betta": 1}}}, "methods.madpo.betta", "beta", "learning_rate"),
        (
            {"methods": {"mine": {"algorithm": "marlhf", "generation": 4}}},
            "methods.mine.generation",
            "generations",
            "kl_coefficient",
        ),
        ({"evaluation": {"greedi": True}}, "evaluation.greedi", "greedy", "samples_per_task"),
        ({"compute": {"threads": 2}}, "compute.threads", "torch_threads", "device"),
        ({"runtime": {"score_worker": 2}}, "runtime.score_worker", "score_workers", "checkpoint_interval"),
    ],
)
def test_an_unknown_key_is_named_with_file_path_nearest_and_valid_keys(values, path, near, valid):
    lines = experiment_refusal(**values).splitlines()
    line = next(line for line in lines if "unknown key" in line)
    assert line.startswith(f"mine.yaml: {path}: unknown key (nearest: {near!r}). Valid here: ")
    assert valid in line.partition("Valid here: ")[2].split(", ")


def test_unknown_keys_of_models_and_projects_are_told_as_well():
    assert "buildin: unknown key (nearest: 'builtin')" in refusal(Model, {"buildin": "tiny"})
    assert "override.model: unknown key (nearest: 'models')" in refusal(
        ProjectConfig, {"experiments": "a", "override": {"model": {}}}
    )


def test_every_mistake_of_a_file_is_told_at_once():
    text = experiment_refusal(sead=1, sampling={"temperature": -1}, scoring={"batch_size": 0})
    assert [line.split(": ")[1] for line in text.splitlines()] == ["scoring.batch_size", "sampling.temperature", "sead"]


def test_a_mistake_in_sampling_is_not_told_again_for_each_collection():
    text = experiment_refusal(sampling={"temprature": 1}, collections={"a": {}, "b": {}})
    assert len(text.splitlines()) == 1


# --- wrong values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"items": {"eval_fraction": 1.5}}, "items.eval_fraction: Input should be less than 1 (found 1.5)"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: Input should be greater than 0 (found 0)"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: Input should be a finite number"),
        ({"sampling": {"overflow": "cut"}}, "sampling.overflow: Input should be 'error' or 'drop' (found 'cut')"),
        ({"sampling": {"max_new_tokens": "many"}}, "sampling.max_new_tokens: Input should be a valid integer"),
        (
            {"preferences": {"default": {"selection": "best"}}},
            "preferences.default.selection: Input should be 'reward_gap', 'random' or 'all' (found 'best')",
        ),
        (
            {"methods": {"madpo": {"loss": "dpo"}}},
            "methods.madpo.loss: Input should be 'sigmoid', 'ipo' or 'simpo' (found 'dpo')",
        ),
        (
            {"methods": {"x": {"algorithm": "ppo"}}},
            "x.algorithm: 'ppo' is none of base, madpo, magrpo",
        ),
        ({"methods": {"marlhf": {"generations": 0}}}, "methods.marlhf.generations: Input should be greater than or"),
        ({"methods": {}}, "methods: Dictionary should have at least 1 item"),
        ({"methods": 3}, "methods: Input should be a valid dictionary"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"seeds": [-1]}, "seeds.0: Input should be greater than or equal to 0 (found -1)"),
        ({"sampling": "hot"}, "sampling: Input should be a valid dictionary"),
        ({"seeds": [1.0]}, "seeds.0: a seed is a whole number (found 1.0)"),
        ({"seeds": 1.0}, "seeds.0: a seed is a whole number (found 1.0)"),
        ({"seeds": [True]}, "mine.yaml: seeds: cannot be true or false (found [True])"),
        ({"collections": {"default": {"candidates": True}}}, "collections.default.candidates: cannot be true or false"),
        ({"sampling": {"temperature": True}}, "sampling.temperature: cannot be true or false (found True)"),
        ({"scoring": {"scale": 0}}, "scoring.scale: 0 makes all rewards equal"),
        ({"scoring": {"time_limit_s": 1e9}}, "scoring.time_limit_s: Input should be less than or equal to 1000000"),
        (
            {"collections": {"default": {"candidates": 10**9}}},
            "collections.default.candidates: Input should be less than or equal to 10000 (found 1000000000)",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(values, told):
    assert told in experiment_refusal(**values)


SIGNS, ENDS, LENGTH, DEVICES = "holds only letters, digits", "does not end in", "at most 100 bytes", "no device of Win"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, SIGNS) for name in ("a/b", "a\\b", "../up", "a b", "", ".hidden", "-dash", "{wild}", "a\n", "a:b")),
        *((f"a{end}", ENDS) for end in (".partial", ".manifest.json", ".provenance.json", ".timing.json", ".lock")),
        *((f"a{end}", ENDS) for end in (".log", ".benchmark.jsonl", ".training_log.parquet", ".tmp", ".")),
        ("a" * 101, LENGTH),
        ("長" * 34, LENGTH),
        *((name, DEVICES) for name in ("con", "NUL", "com1", "LPT9.x")),
    ],
)
def test_names_that_cannot_be_files_are_refused_with_the_rule(name, rule):
    told = f"{name!r} cannot be a name: a name"
    refusals = [
        experiment_refusal(collections={"default": {}, name: {}}),
        experiment_refusal(preferences={"default": {}, name: {}}),
        experiment_refusal(reward_models={"default": {}, name: {}}),
        experiment_refusal(methods={name: {"algorithm": "madpo"}}),
        experiment_refusal(methods={"magrpo": {"reward_model": name}}),
        experiment_refusal(methods={"marlhf": {"backend": "iac", "critic_model": name}}),
        experiment_refusal(team=name),
        experiment_refusal(team=[{"path": "run"}, name]),
        refusal(ProjectConfig, {"experiments": [name]}),
        refusal(ProjectConfig, {"experiments": ["a"], "override": {"models": {name: {}}}}),
    ]
    for text in refusals:
        assert told in text and rule in text


@pytest.mark.parametrize("section", ["collections", "preferences", "reward_models", "methods"])
def test_names_that_differ_in_case_alone_would_share_a_folder(section):
    given = {"default": {}, "Wide": {}, "wide": {}}
    if section == "methods":
        given = {name: {"algorithm": "madpo"} for name in ("Wide", "wide")}
    assert f"{section}: 'Wide' and 'wide' would share a folder" in experiment_refusal(**{section: given})
    assert "'A' and 'a' would share a folder" in refusal(ProjectConfig, {"experiments": ["A", "a"]})


@pytest.mark.parametrize("name", ["a", "gap-0.5_x", "länge", "7b", "a" * 100, "console", "json"])
def test_names_of_letters_digits_and_some_signs_are_fine(name):
    assert parse(ProjectConfig, {"experiments": name}, "c").experiments == [name]


@pytest.mark.parametrize("name", ["models", "Models", "README.md"])
def test_no_experiment_takes_what_the_results_hold_already(name):
    assert f"cannot be called {name!r}" in refusal(ProjectConfig, {"experiments": [name]})


def test_no_experiment_stands_twice():
    assert refusal(ProjectConfig, {"experiments": ["f", "f"]}) == "mine.yaml: experiments: 'f' stands twice"


def test_learning_rates_may_be_written_as_yaml_reads_them_as_text():
    assert experiment(methods={"madpo": {"learning_rate": "1e-5"}}).methods["madpo"].learning_rate == 1e-5


# --- values that must agree ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"team": {"models": ["a", "b"], "agents": 3}}, "team: models has 2 entries for 3 agents"),
        (
            {"team": {"model": "a", "models": ["a", "b"]}},
            "exactly one of model, models is needed, given: model, models",
        ),
        ({"team": {}}, "exactly one of model, models is needed, given: none"),
        ({"team": {"model": "a", "system_prompt": ["x"]}}, "system_prompt has 1 entries for 2 agents"),
        ({"team": {"model": "a", "prompt_format": ["chat"] * 3}}, "prompt_format has 3 entries for 2 agents"),
        ({"task": {"name": "a", "file": "b.py"}}, "exactly one of name, file is needed, given: name, file; set the"),
        ({"task": {}}, "exactly one of name, file is needed, given: none"),
        ({"items": {"source": "hub://a/b", "streaming": True}}, "items: streaming needs a limit"),
        (
            {"items": {"source": "a.jsonl", "eval_limit": 3}},
            "items: eval_limit goes with eval items of their own (eval_source or eval_split)",
        ),
        ({"sampling": {"min_new_tokens": 9, "max_new_tokens": 8}}, "min_new_tokens 9 is above max_new_tokens 8"),
        ({"sampling": {"temperature": 0, "top_p": 0.9}}, "temperature 0 is greedy, so top_p and top_k must be null"),
        ({"sampling": {"temperature": 0, "top_k": 5}}, "temperature 0 is greedy, so top_p and top_k must be null"),
        ({"methods": {"madpo": {"loss": "simpo"}}}, "the loss simpo has no reference: set reference to none"),
        ({"methods": {"madpo": {"gamma": 0.5}}}, "gamma belongs to the loss simpo, the loss is sigmoid"),
        (
            {"methods": {"madpo": {"loss": "ipo", "label_smoothing": 0.1}}},
            "label_smoothing belongs to the loss sigmoid",
        ),
        ({"methods": {"mine": {}}}, "method 'mine' needs an algorithm, one of base, madpo, magrpo, marloo,"),
        ({"methods": ["base", "mine"]}, "method 'mine' needs an algorithm"),
        ({"methods": ["base", "base"]}, "method 'base' stands twice"),
        ({"methods": ["base", {"madpo": {}}]}, "a list of methods holds names, found {'madpo': {}}"),
        ({"seeds": [1, 2, 1]}, "seeds: [1, 2, 1] names a seed twice"),
        (
            {"collections": {"wide": {}}, "preferences": {"default": {"collection": "wyde"}}},
            "preferences.default.collection: 'wyde' is not defined; defined: wide (nearest: 'wide')",
        ),
        (
            {"reward_models": {"default": {"preferences": "x"}}},
            "reward_models.default.preferences: 'x' is not defined; defined: default",
        ),
        ({"methods": {"madpo": {"preferences": "x"}}}, "methods.madpo.preferences: 'x' is not defined"),
        ({"methods": {"marlhf": {"reward_model": "x"}}}, "methods.marlhf.reward_model: 'x' is not defined"),
    ],
)
def test_values_that_contradict_are_refused(values, told):
    assert told in experiment_refusal(**values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "exactly one of builtin, hub, path, gguf is needed, given: none"),
        ({"hub": "a/b", "path": "c"}, "exactly one of builtin, hub, path, gguf is needed, given: hub, path"),
        ({"builtin": "tiny", "revision": "main"}, "revision goes with hub only"),
        ({"hub": "a/b", "pretraining_steps": 3}, "pretraining_steps goes with builtin only"),
        ({"path": "a", "pretraining_seed": 3}, "pretraining_seed goes with builtin only"),
    ],
)
def test_a_model_has_one_source(values, told):
    assert told in refusal(Model, values)


def test_two_mistakes_of_greedy_sampling_can_come_from_two_places():
    text = experiment_refusal(sampling={"temperature": 0}, collections={"a": {"sampling": {"top_p": 0.5}}})
    assert text.startswith("mine.yaml: collections.a.sampling: temperature 0 is greedy")


@pytest.mark.parametrize(("greedy", "key"), [({"temperature": 0}, "temperature"), ({"top_k": 1}, "top_k")])
def test_greedy_decoding_trains_nothing_and_is_refused_where_something_is_trained(greedy, key):
    for methods in (["madpo"], ["marlhf"]):
        told = f"mine.yaml: collections.default.sampling.{key}: makes all candidates of an item equal"
        assert experiment_refusal(sampling=greedy, methods=methods).startswith(told)
    explored = {"default": {"sampling": {"temperature": 1.0, "top_k": None}}}
    told = f"mine.yaml: sampling.{key}: makes all generations of methods.rl equal"
    methods = {"rl": {"algorithm": "marlhf"}}
    assert experiment_refusal(sampling=greedy, collections=explored, methods=methods).startswith(told)
    assert experiment(sampling=greedy, collections=explored, methods=["base", "madpo"]).sampling.greedy_key() == key
    assert experiment(sampling=greedy, methods=["base"]).sampling.greedy_key() == key


@pytest.mark.parametrize("key", ["messages", "tools", "tokenize", "add_generation_prompt"])
@pytest.mark.parametrize("each", [False, True])
def test_template_arguments_that_the_sampler_sets_are_refused_by_name(key, each):
    given = {"enable_thinking": False, key: 1}
    told = experiment_refusal(team={"model": "tiny", "template_arguments": [{}, given] if each else given})
    assert f"{key} cannot be set: it is no variable of a chat template's own" in told
    assert experiment(team={"model": "tiny", "template_arguments": {"enable_thinking": False}})


def test_every_whole_number_has_an_upper_limit():
    def without_limit(part, path=""):
        if isinstance(part, list):
            return [found for inner in part for found in without_limit(inner, path)]
        if not isinstance(part, dict):
            return []
        here = part.get("type") == "integer" and not {"maximum", "exclusiveMaximum"} & set(part)
        return [path] * here + [found for key, inner in part.items() for found in without_limit(inner, f"{path}.{key}")]

    found = without_limit(json.loads(json_schema()))
    assert found == []
    assert without_limit({"a": {"type": "integer"}}) == [".a"]


# --- short forms and defaults -------------------------------------------------------------------------------------


def test_a_minimal_experiment_gets_every_default():
    found = experiment()
    assert found.task.name == "length_ratio" and found.task.object == "Task" and found.task.options == {}
    assert found.team.model_names() == ["tiny", "tiny"]
    assert found.items == Items() and found.scoring == Scoring() and found.sampling == Sampling()
    assert list(found.collections) == list(found.preferences) == list(found.reward_models) == ["default"]
    assert found.preferences["default"] == Preferences() and found.reward_models["default"] == RewardModel()
    assert found.methods == {"base": Base(), "madpo": Madpo(), "marlhf": GroupMethod(reward_model="default")}
    assert found.seeds == [0]
    assert (found.evaluation, found.compute, found.runtime) == (Evaluation(), Compute(), Runtime())
    assert found.episode == Episode(turns=1, discount=1.0, termination_threshold=None)


def test_short_forms_stand_for_sections():
    found = experiment(team=["a", "b", "c"], items="data.jsonl", seeds=7, methods={"madpo": None})
    assert found.team.agents == 3 and found.team.model_names() == ["a", "b", "c"]
    assert found.items == Items(source="data.jsonl")
    assert found.seeds == [7]
    assert found.methods == {"madpo": Madpo()}
    assert parse(ProjectConfig, {"experiments": "one"}, "c").experiments == ["one"]


def test_a_method_named_otherwise_says_its_algorithm():
    methods = {"madpo": {"beta": 0.2}, "ipo": {"algorithm": "madpo", "loss": "ipo"}, "base": {}}
    found = experiment(methods=methods).methods
    assert found["madpo"] == Madpo(beta=0.2) and found["ipo"] == Madpo(loss="ipo") and found["base"] == Base()


def test_a_method_named_like_an_algorithm_may_use_another():
    assert experiment(methods={"madpo": {"algorithm": "maac"}}).methods["madpo"] == ActorCritic(algorithm="maac")


@pytest.mark.parametrize("methods", [{"madpo": {"algorithm": "base"}}, {"base": {"algorithm": "madpo"}}])
def test_the_untrained_team_alone_is_called_base(methods):
    assert "the untrained team, and nothing else, is called base" in experiment_refusal(methods=methods)


def test_collections_inherit_sampling_key_by_key():
    found = experiment(
        sampling={"temperature": 0.5, "max_new_tokens": 9},
        collections={"same": None, "hot": {"sampling": {"temperature": 2}}, "wide": {"candidates": 3}},
        preferences={"default": {"collection": "hot"}},
    ).collections
    assert found["same"].sampling == Sampling(temperature=0.5, max_new_tokens=9)
    assert found["hot"].sampling == Sampling(temperature=2, max_new_tokens=9)
    assert found["wide"].sampling == Sampling(temperature=0.5, max_new_tokens=9)


def test_the_default_collection_inherits_sampling_too():
    assert experiment(sampling={"top_k": 5}).collections["default"].sampling.top_k == 5


def test_a_collection_can_take_back_what_it_inherits():
    found = experiment(sampling={"top_k": 5}, collections={"default": {"sampling": {"top_k": None}}})
    assert found.collections["default"].sampling.top_k is None


@pytest.mark.parametrize("key", sorted(set(Experiment.model_fields) - {"task", "team", "methods"}))
def test_a_section_left_empty_takes_its_defaults(key):
    assert experiment(**{key: None}) == experiment()


def test_a_key_left_empty_takes_its_default_unless_null_means_something():
    found = experiment(
        sampling={"temperature": None},
        methods={"madpo": {"beta": None, "max_gradient_norm": None}},
        items={"limit": None},
    )
    assert found.sampling.temperature == 1.0 and found.methods["madpo"].beta == 0.1
    assert found.methods["madpo"].max_gradient_norm is None


@pytest.mark.parametrize("section", ["collections", "preferences", "reward_models"])
def test_a_named_section_left_empty_is_all_defaults(section):
    assert experiment(**{section: {"default": None}}) == experiment()


@pytest.mark.parametrize("key", ["task", "team", "methods"])
def test_needed_keys_have_no_default(key):
    assert f"{key}: is missing and has no default" in experiment_refusal(**{key: None})
    values = {name: value for name, value in MINIMAL.items() if name != key}
    assert f"{key}: is missing and has no default" in refusal(Experiment, values)


def test_settings_cannot_be_changed_after_reading():
    with pytest.raises(ValueError, match="frozen"):
        experiment().sampling.temperature = 2


# --- what an experiment uses, and what not -------------------------------------------------------------------------


def test_models_of_an_experiment_are_those_of_agents_and_used_reward_models():
    reward_models = {"default": {"model": "judge"}, "unused": {"model": "other"}}
    assert models_of(experiment(team=["a", "b"], reward_models=reward_models)) == ["a", "b", "judge"]
    assert models_of(experiment(team=["a", "a"], reward_models=reward_models, methods=["base"])) == ["a"]


def test_models_of_critics_count_where_critics_are_separate():
    methods = {"iac": {"critic_model": "judge"}, "maac": {}, "shared": {"algorithm": "iac", "critic": "shared"}}
    found = experiment(team=["a", "b"], methods=methods)
    assert models_of(found) == ["a", "b", "judge"]
    by_method = {name: critic_models_of(method, found.team) for name, method in found.methods.items()}
    assert by_method == {"iac": ["judge", "judge"], "maac": ["a"], "shared": []}
    assert critic_models_of(ActorCritic(algorithm="maac", critic_model="judge"), found.team) == ["judge"]
    assert critic_models_of(ActorCritic(), found.team) == ["a", "b"] and critic_models_of(Madpo(), found.team) == []


def test_the_task_reward_needs_no_reward_model():
    assert used_reward_models(experiment(methods=["base", "madpo", "magrpo", "iac"])) == {}


def test_only_reward_models_that_a_method_names_are_used():
    found = experiment(reward_models={"a": {}, "b": {}}, methods={"marlhf": {"reward_model": "b"}})
    assert list(used_reward_models(found)) == ["b"]


def test_sections_that_no_method_uses_are_found():
    found = experiment(
        methods={"madpo": {"preferences": "many"}},
        collections={"default": {}, "wide": {"candidates": 32}, "hot": {"sampling": {"temperature": 2.0}}},
        preferences={"many": {"collection": "wide"}, "few": {}},
        reward_models={"default": {"preferences": "many"}},
    )
    assert unused_sections(found) == ["collections.hot", "preferences.few", "reward_models.default"]


def test_a_default_that_nobody_wrote_refers_to_nothing():
    found = experiment(
        methods={"madpo": {"preferences": "mine"}},
        collections={"wide": {}},
        preferences={"mine": {"collection": "wide"}},
    )
    assert unused_sections(found) == []
    assert "preferences.default.collection: 'default' is not defined" in experiment_refusal(collections={"wide": {}})


def test_a_default_that_nobody_wrote_is_no_finding():
    assert unused_sections(experiment(methods=["base"], sampling={"temperature": 0.5})) == []
    assert unused_sections(experiment(methods=["base"], preferences={"default": {"min_gap": 1}})) == [
        "preferences.default"
    ]


def test_every_algorithm_but_base_has_a_trainer():
    assert set(ALGORITHMS) == {"base", "marlhf", *TRAINERS}


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
        ({"methods": {"madpo": {"adam_betas": [1.5, 0.9]}}}, "methods.madpo.adam_betas"),
        ({"compute": {"torch_threads": 10**6}}, "compute.torch_threads"),
        ({"compute": {"device": "gpu"}}, "compute.device"),
    ],
)
def test_values_that_would_fail_inside_a_stage_are_refused_when_the_config_is_read(section, key):
    values = {"task": "length_ratio", "team": "tiny", "methods": ["base"], **section}
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        parse(Experiment, values, "mine.yaml")


# --- methods that learn from rewards ------------------------------------------------------------------------------

GROUP = ["magrpo", "marloo", "maremax", "mareinforce"]
BACKENDS = [*GROUP, "iac", "maac"]


def method(name="it", **values):
    """An experiment of one method that is called `it`."""
    return experiment(methods={name: values}).methods[name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_marlhf_is_short_for_its_backend_on_a_reward_model(backend):
    short = method(algorithm="marlhf", backend=backend, learning_rate=3e-4, generations=4)
    assert short == method(algorithm=backend, reward_model="default", learning_rate=3e-4, generations=4)
    assert method(algorithm=backend).reward_model is None


def test_marlhf_takes_magrpo_and_the_default_reward_model():
    assert method("marlhf") == method("marlhf", backend=None, reward_model=None) == GroupMethod(reward_model="default")


def test_marlhf_can_be_overlaid_with_another_backend_by_name():
    found = experiment(
        reward_models={"default": {}, "b": {}}, methods={"marlhf": {"backend": "iac", "reward_model": "b"}}
    )
    assert found.methods["marlhf"] == ActorCritic(algorithm="iac", reward_model="b")


def test_a_learning_rate_is_for_all_agents_or_one_for_each():
    assert method(algorithm="magrpo", learning_rate=1e-3).learning_rates(3) == [1e-3] * 3
    assert method(algorithm="madpo", learning_rate=[1e-3, "1e-4"]).learning_rates(2) == [1e-3, 1e-4]


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({"algorithm": "iac", "learning_rate": [1e-3, 1e-4]}, [1e-3, 1e-4]),
        ({"algorithm": "iac", "learning_rate": 1e-3, "critic_learning_rate": 2e-3}, [2e-3, 2e-3]),
        ({"algorithm": "maac", "learning_rate": 1e-3}, [1e-3]),
        ({"algorithm": "maac", "learning_rate": [1e-3, 1e-4], "critic_learning_rate": 2e-3}, [2e-3]),
    ],
)
def test_critics_learn_at_their_own_rate_or_that_of_their_agents(values, rates):
    assert method(**values).critic_learning_rates(2) == rates


def test_what_goes_with_one_choice_only_is_null_with_the_other():
    assert (method(algorithm="iac").value_clip, method(algorithm="iac", critic="shared").value_clip) == (None, 0.2)
    assert method(algorithm="iac", critic="shared", value_clip=None).value_clip is None
    reductions = [method(algorithm="magrpo", joint_mode=mode).cross_reduction for mode in ("aligned", "cross")]
    assert reductions == [None, "mean"]
    assert method(algorithm="magrpo", joint_mode="cross", cross_reduction="sum").cross_reduction == "sum"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_method_that_was_written_out_in_full_reads_the_same_again(name):
    found = method(algorithm=name)
    assert method(**found.model_dump(mode="json")) == found


def test_adapters_can_be_asked_for_with_every_default():
    assert method(algorithm="maac", lora={}).lora == Lora(rank=8, alpha=16.0, dropout=0.0, target_modules="all-linear")
    assert method(algorithm="madpo", lora={"target_modules": ["q_proj"]}).lora.target_modules == ["q_proj"]


def test_team_members_can_be_folders_of_earlier_runs():
    assert experiment(team={"model": {"path": "run"}}).team.model == SavedTeam(path="run")
    assert experiment(team=["tiny", {"path": "run"}]).team.models == ["tiny", SavedTeam(path="run")]


VALIDATION = {"items": {"validation_fraction": 0.2}}
EXPLORED = {"collections": {"default": {"sampling": {"temperature": 1.0}}}}
#: What is refused when the configuration is read: experiment, the key that is named, what is said.
CONSTRAINTS = {
    "clip without a ratio": (
        {"methods": {"it": {"algorithm": "magrpo", "clip": 0.2}}},
        "methods.it.clip: bounds the importance ratio, which is off",
    ),
    "clip of nothing": (
        {"methods": {"it": {"algorithm": "iac", "clip": 0, "importance_ratio": True}}},
        "methods.it.clip: Input should be greater than 0 (found 0)",
    ),
    "cross of one agent": (
        {"team": {"model": "tiny", "agents": 1}, "methods": {"it": {"algorithm": "marloo", "joint_mode": "cross"}}},
        "methods.it.joint_mode: cross combines the responses of several agents, but the team has 1",
    ),
    "cross beyond reason": (
        {
            "team": {"model": "tiny", "agents": 3},
            "methods": {"it": {"algorithm": "magrpo", "joint_mode": "cross", "generations": 17}},
        },
        "methods.it.generations: gives 4913 joint responses per item (generations 17, cross, 3 agents, 1 turns)",
    ),
    "cross trees beyond reason": (
        {
            "episode": {"turns": 2},
            "methods": {"it": {"algorithm": "magrpo", "joint_mode": "cross", "generations": 9}},
        },
        "methods.it.generations: gives 6561 joint responses per item (generations 9, cross, 2 agents, 2 turns)",
    ),
    "trees beyond reason": (
        {"episode": {"turns": 5}, "methods": {"it": {"algorithm": "marlhf"}}},
        "methods.it.generations: gives 32768 joint responses per item (generations 8, aligned, 2 agents, 5 turns)",
    ),
    "cross of one response": (
        {"methods": {"it": {"algorithm": "mareinforce", "joint_mode": "cross", "generations": 1}}},
        "methods.it.joint_mode: cross needs generations of 2 or more, found 1",
    ),
    "reduction without cross": (
        {"methods": {"it": {"algorithm": "magrpo", "cross_reduction": "mean"}}},
        "methods.it.cross_reduction: belongs to joint_mode cross, the joint_mode is aligned",
    ),
    "unknown joint mode": (
        {"methods": {"it": {"algorithm": "magrpo", "joint_mode": "all"}}},
        "methods.it.joint_mode: Input should be 'aligned' or 'cross' (found 'all')",
    ),
    **{
        f"one response for {name}": (
            {"methods": {"it": {"algorithm": name, "generations": 1}}},
            f"methods.it.generations: is 1, but {name} compares responses of one item",
        )
        for name in ("magrpo", "marloo", "maremax")
    },
    "one normalised response": (
        {"methods": {"it": {"algorithm": "mareinforce", "generations": 1, "normalise_advantages": True}}},
        "methods.it.normalise_advantages: needs generations of 2 or more, found 1",
    ),
    "maac with a shared critic": (
        {"methods": {"it": {"algorithm": "maac", "critic": "shared"}}},
        "methods.it.critic: is shared, but the central critic of maac is no agent's",
    ),
    "value clip of separate critics": (
        {"methods": {"it": {"algorithm": "iac", "value_clip": 0.2}}},
        "methods.it.value_clip: belongs to critic shared, the critic is separate",
    ),
    "value clip of a central critic": (
        {"methods": {"it": {"algorithm": "maac", "value_clip": 0.2}}},
        "methods.it.value_clip: belongs to critic shared",
    ),
    "model of a shared critic": (
        {"methods": {"it": {"algorithm": "iac", "critic": "shared", "critic_model": "tiny"}}},
        "methods.it.critic_model: belongs to critic separate",
    ),
    "fresh heads of shared critics": (
        {"methods": {"it": {"algorithm": "iac", "critic": "shared", "restore_critics": False}}},
        "methods.it.restore_critics: belongs to critic separate",
    ),
    "learning rate of a shared critic": (
        {"methods": {"it": {"algorithm": "iac", "critic": "shared", "critic_learning_rate": 1e-3}}},
        "methods.it.critic_learning_rate: belongs to critic separate",
    ),
    "learning rate of a central critic": (
        {"methods": {"it": {"algorithm": "maac", "learning_rate": [1e-3, 1e-4]}}},
        "methods.it.critic_learning_rate: is needed where learning_rate is a list: maac has one critic",
    ),
    "unknown critic type": (
        {"methods": {"it": {"algorithm": "iac", "critic_type": "a"}}},
        "methods.it.critic_type: Input should be 'v' or 'q' (found 'a')",
    ),
    "no hidden width": (
        {"methods": {"it": {"algorithm": "iac", "value_hidden": 0}}},
        "methods.it.value_hidden: Input should be greater than or equal to 1 (found 0)",
    ),
    **{
        f"advantage clip of {number}": (
            {"methods": {"it": {"algorithm": "iac", "advantage_clip": number}}},
            f"methods.it.advantage_clip: Input should be greater than 0 (found {number})",
        )
        for number in (0, -0.05)
    },
    **{
        f"discount of {number}": (
            {"episode": {"turns": 2, "discount": number}},
            f"episode.discount: Input should {text}",
        )
        for number, text in ((0, "be greater than 0"), (-1, "be greater than 0"), (1.5, "be less than or equal to 1"))
    },
    "no turn": ({"episode": {"turns": 0}}, "episode.turns: Input should be greater than or equal to 1 (found 0)"),
    "too many turns": (
        {"episode": {"turns": 17}},
        "episode.turns: Input should be less than or equal to 16 (found 17)",
    ),
    "discount of one turn": (
        {"episode": {"discount": 0.9}},
        "episode.discount: 0.9 does nothing with one turn; set turns",
    ),
    "end of one turn": (
        {"episode": {"termination_threshold": -0.2}},
        "episode.termination_threshold: -0.2 does nothing with one turn",
    ),
    "evaluation without validation items": (
        {"methods": {"it": {"algorithm": "maac", "eval_interval": 64}}},
        "methods.it.eval_interval: reads validation items, and there are none: set items.validation_fraction",
    ),
    "best without evaluation": (
        {**VALIDATION, "methods": {"it": {"algorithm": "maac", "keep_best": "eval/turn_1/reward_mean"}}},
        "methods.it.keep_best: needs evaluations while training; set eval_interval",
    ),
    "patience without evaluation": (
        {**VALIDATION, "methods": {"it": {"algorithm": "magrpo", "patience": 2}}},
        "methods.it.patience: needs evaluations while training; set eval_interval",
    ),
    "patience without a metric": (
        {**VALIDATION, "methods": {"it": {"algorithm": "magrpo", "patience": 2, "eval_interval": 64}}},
        "methods.it.patience: needs a metric to wait for; set keep_best",
    ),
    **{
        f"best by {metric or 'nothing'}": (
            {**VALIDATION, "methods": {"it": {"algorithm": "magrpo", "eval_interval": 64, "keep_best": metric}}},
            "methods.it.keep_best: String should match pattern",
        )
        for metric in ("reward_mean", "turn_1/reward_mean", "eval/", "eval/turn_1/", "eval//x", "eval/a b", "")
    },
    **{
        f"best by {metric}": (
            {**VALIDATION, "methods": {"it": {"algorithm": "magrpo", "eval_interval": 64, "keep_best": metric}}},
            f"methods.it.keep_best: '{metric}' names no turn; turns are 1 to 1",
        )
        for metric in ("eval/turn_2/reward_mean", "eval/turn_0/reward_mean", "eval/turn_x/reward_mean", "eval/turn_1")
    },
    "negative evaluation interval": (
        {**VALIDATION, "methods": {"it": {"algorithm": "magrpo", "eval_interval": -1}}},
        "methods.it.eval_interval: Input should be greater than or equal to 0 (found -1)",
    ),
    "kept checkpoints under a decay": (
        {"methods": {"it": {"algorithm": "magrpo", "keep_checkpoints": True, "warmup_fraction": 0}}},
        "methods.it.keep_checkpoints: a run can be extended only if its learning rate does not depend on its length",
    ),
    "kept checkpoints under a warm-up": (
        {"methods": {"it": {"algorithm": "iac", "keep_checkpoints": True, "decay": "constant"}}},
        "methods.it.keep_checkpoints: a run can be extended only if",
    ),
    "too few learning rates": (
        {"methods": {"it": {"algorithm": "magrpo", "learning_rate": [1e-3]}}},
        "methods.it.learning_rate: has 1 entries for 2 agents",
    ),
    "too many learning rates of madpo": (
        {"methods": {"it": {"algorithm": "madpo", "learning_rate": [1e-3] * 3}}},
        "methods.it.learning_rate: has 3 entries for 2 agents",
    ),
    "learning rate that climbs": (
        {"methods": {"it": {"algorithm": "magrpo", "learning_rate": -1e-3}}},
        "methods.it.learning_rate: Input should be greater than 0 (found -0.001)",
    ),
    "learning rate of one agent that climbs": (
        {"methods": {"it": {"algorithm": "magrpo", "learning_rate": [1e-3, 0]}}},
        "methods.it.learning_rate.1: Input should be greater than 0 (found 0)",
    ),
    "learning rate in words": (
        {"methods": {"it": {"algorithm": "magrpo", "learning_rate": "fast"}}},
        "methods.it.learning_rate: Input should be a valid number",
    ),
    "shared weights of several models": (
        {"team": {"models": ["a", "b"], "share_weights": True}},
        "team.share_weights: needs one model for all agents, but models names several",
    ),
    "shared weights at several rates": (
        {
            "team": {"model": "tiny", "share_weights": True},
            "methods": {"it": {"algorithm": "magrpo", "learning_rate": [1e-3, 1e-4]}},
        },
        "methods.it.learning_rate: is a list, but with team.share_weights all agents are one model",
    ),
    "shared weights with adapters": (
        {"team": {"model": "tiny", "share_weights": True}, "methods": {"it": {"algorithm": "madpo", "lora": {}}}},
        "methods.it.lora: gives each agent an adapter, but with team.share_weights all are one model",
    ),
    **{
        f"greedy sampling of {name}": (
            {"sampling": {"temperature": 0}, **EXPLORED, "methods": {"it": {"algorithm": name}}},
            "sampling.temperature: makes all generations of methods.it equal, so that it learns nothing",
        )
        for name in [*BACKENDS, "marlhf"]
    },
    "adapters of no rank": (
        {"methods": {"it": {"algorithm": "madpo", "lora": {"rank": 0}}}},
        "methods.it.lora.rank: Input should be greater than or equal to 1 (found 0)",
    ),
    "adapters of everything": (
        {"methods": {"it": {"algorithm": "madpo", "lora": {"target_modules": "all"}}}},
        "methods.it.lora.target_modules: Input should be 'all-linear' (found 'all')",
    ),
    "adapters of nothing": (
        {"methods": {"it": {"algorithm": "madpo", "lora": {"target_modules": []}}}},
        "methods.it.lora.target_modules: is an empty list",
    ),
    "adapters with all dropped": (
        {"methods": {"it": {"algorithm": "madpo", "lora": {"dropout": 1}}}},
        "methods.it.lora.dropout: Input should be less than 1 (found 1)",
    ),
    "adapters by a misspelt key": (
        {"methods": {"it": {"algorithm": "iac", "lora": {"ranc": 3}}}},
        "methods.it.lora.ranc: unknown key (nearest: 'rank'). Valid here: rank, alpha, dropout, target_modules",
    ),
    "reward model that is not there": (
        {"methods": {"it": {"algorithm": "maac", "reward_model": "big"}}},
        "methods.it.reward_model: 'big' is not defined; defined: default",
    ),
    "reward model of marlhf that is not there": (
        {"methods": {"marlhf": {"backend": "iac", "reward_model": "big"}}},
        "methods.marlhf.reward_model: 'big' is not defined; defined: default",
    ),
    "unknown backend": (
        {"methods": {"marlhf": {"backend": "magrop"}}},
        "methods.marlhf.backend: 'magrop' is none of magrpo, marloo, maremax, mareinforce, iac, maac (nearest: 'magrp",
    ),
    "backend that is no word": (
        {"methods": {"marlhf": {"backend": ["iac", "maac"]}}},
        "methods.marlhf.backend: ['iac', 'maac'] is none of magrpo",
    ),
    "backend of what has none": (
        {"methods": {"it": {"algorithm": "magrpo", "backend": "iac"}}},
        "methods.it.backend: belongs to marlhf, the algorithm here is magrpo. Valid here: ",
    ),
    "critic of a group backend": (
        {"methods": {"mine": {"algorithm": "marlhf", "backend": "marloo", "critic_type": "q"}}},
        "methods.mine.critic_type: belongs to iac, maac, the algorithm here is marloo. Valid here: ",
    ),
    "cross of an actor-critic backend": (
        {"methods": {"marlhf": {"backend": "maac", "joint_mode": "cross"}}},
        "methods.marlhf.joint_mode: belongs to magrpo, marloo, maremax, mareinforce, the algorithm here is maac.",
    ),
    "pairs of a group method": (
        {"methods": {"magrpo": {"preferences": "default"}}},
        "methods.magrpo.preferences: belongs to madpo, the algorithm here is magrpo.",
    ),
    "reward model of madpo": (
        {"methods": {"madpo": {"reward_model": "default"}}},
        "methods.madpo.reward_model: belongs to magrpo, marloo, maremax, mareinforce, iac, maac, marlhf, the algorithm",
    ),
    "misspelt key of a backend": (
        {"methods": {"marlhf": {"backend": "iac", "valu_clip": 1}}},
        "methods.marlhf.valu_clip: unknown key (nearest: 'value_clip')",
    ),
    "folder without its key": (
        {"team": {"model": {"folder": "run"}}},
        "team.model.folder: unknown key. Valid here: path",
    ),
    "folder of one agent without its key": (
        {"team": ["tiny", {"pth": "run"}]},
        "team.models.1.pth: unknown key (nearest: 'path'). Valid here: path",
    ),
}


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_what_does_not_go_together_is_refused_by_the_name_of_its_key(case):
    values, told = CONSTRAINTS[case]
    lines = experiment_refusal(**values).splitlines()
    assert [line for line in lines if line.startswith(f"mine.yaml: {told}")], lines


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_a_mistake_is_told_once_and_without_names_of_kinds(case):
    lines = experiment_refusal(**CONSTRAINTS[case][0]).splitlines()
    paths = [line.split(": ")[1] for line in lines]
    assert len(set(paths)) == len(paths) and not [path for path in paths if "constrained" in path or "[" in path]


@pytest.mark.parametrize(
    "values",
    [
        {"methods": {"it": {"algorithm": "magrpo", "clip": 0.2, "importance_ratio": True}}},
        {"methods": {"it": {"algorithm": "mareinforce", "generations": 1}}},
        {"methods": {"it": {"algorithm": "iac", "generations": 1}}},
        {"methods": {"it": {"algorithm": "magrpo", "joint_mode": "cross", "generations": 64}}},
        {
            "methods": {"it": {"algorithm": "maac"}},
            "episode": {"turns": 16, "discount": 0.9, "termination_threshold": 0},
        },
        {"methods": {"it": {"algorithm": "magrpo", "keep_checkpoints": True, "schedule_steps": 100}}},
        {"methods": {"it": {"algorithm": "iac", "keep_checkpoints": True, "decay": "constant", "warmup_fraction": 0}}},
        {"team": {"models": ["tiny", "tiny"], "share_weights": True}, "methods": {"it": {"algorithm": "iac"}}},
        {"sampling": {"temperature": 0}, **EXPLORED, "methods": ["base", "madpo"]},
        {
            "items": {"validation_source": "v.jsonl"},
            "methods": {
                "it": {
                    "algorithm": "maac",
                    "eval_interval": 64,
                    "keep_best": "eval/turn_1/parts/ratio",
                    "patience": 3,
                }
            },
        },
    ],
)
def test_what_goes_together_is_fine(values):
    assert experiment(**values)
