"""The configuration's models: strict keys, allowed values, values that must agree, short forms and defaults."""

import json

import pytest

from comlrl_stages.config import (
    ALGORITHMS,
    Base,
    Compute,
    Evaluation,
    Experiment,
    Items,
    Madpo,
    Marlhf,
    Model,
    Preferences,
    ProjectConfig,
    RewardModel,
    Runtime,
    Sampling,
    Scoring,
    models_of,
    unused_sections,
    used_reward_models,
)
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
        ({"methods": {"x": {"algorithm": "ppo"}}}, "'base', 'madpo', 'marlhf'"),
        ({"methods": {"marlhf": {"generations": 1}}}, "methods.marlhf.generations: Input should be greater than or"),
        ({"methods": {}}, "methods: Dictionary should have at least 1 item"),
        ({"methods": 3}, "methods: Input should be a valid dictionary"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"seeds": [-1]}, "seeds.0: Input should be greater than or equal to 0 (found -1)"),
        ({"sampling": "hot"}, "sampling: Input should be a valid dictionary"),
        ({"seeds": [1.0]}, "seeds.0: a seed is a whole number (found 1.0)"),
        ({"seeds": 1.0}, "seeds.0: a seed is a whole number (found 1.0)"),
        ({"seeds": [True]}, "mine.yaml: seeds cannot be true or false (found [True])"),
        ({"collections": {"default": {"candidates": True}}}, "collections.default: candidates cannot be true or false"),
        ({"sampling": {"temperature": True}}, "sampling: temperature cannot be true or false (found True)"),
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
        experiment_refusal(team=name),
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
        ({"methods": {"mine": {}}}, "method 'mine' needs an algorithm, one of base, madpo, marlhf"),
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
    assert found.methods == {"base": Base(), "madpo": Madpo(), "marlhf": Marlhf()}
    assert found.seeds == [0]
    assert (found.evaluation, found.compute, found.runtime) == (Evaluation(), Compute(), Runtime())


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
    assert experiment(methods={"madpo": {"algorithm": "marlhf"}}).methods["madpo"] == Marlhf()


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
    assert set(ALGORITHMS) == {"base", *TRAINERS}


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
