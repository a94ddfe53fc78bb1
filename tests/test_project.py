"""From YAML files to a checked project: where files are found, overlays, and what is said of broken ones."""

from pathlib import Path

import pytest

from comlrl_stages.config import Model
from comlrl_stages.config_methods import ActorCritic, Madpo
from comlrl_stages.errors import UserError
from comlrl_stages.project import from_command_line, known_names, load_project, merge, read_yaml

ROOT = Path(__file__).parents[1]
MINIMAL = "task: length_ratio\nteam: tiny\nmethods: [base, madpo, marlhf]\n"


@pytest.fixture
def folder(tmp_path):
    """A config folder with one experiment and one model."""
    write(tmp_path / "experiments/first.yaml", MINIMAL)
    write(tmp_path / "models/tiny.yaml", "builtin: tiny\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(folder, override=None, experiments="first"):
    return load_project({"experiments": experiments, "override": override or {}}, [folder])


def refusal(function, *arguments):
    with pytest.raises(UserError) as refused:
        function(*arguments)
    return str(refused.value)


def refused_experiment(folder, text):
    write(folder / "experiments/first.yaml", text)
    return refusal(load, folder)


# --- finding files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "config/experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_experiments_are_valid(path):
    project = load_project({"experiments": [path.stem]}, [ROOT / "config"])
    assert project.experiments[path.stem].description


@pytest.mark.parametrize("path", sorted((ROOT / "config/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_models_are_valid(folder, path):
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", path.stem))
    write(folder / f"models/{path.stem}.yaml", path.read_text(encoding="utf-8"))
    assert path.stem in load(folder).models


def test_an_unknown_experiment_lists_the_known(folder):
    write(folder / "experiments/second.yaml", MINIMAL)
    text = refusal(load, folder, None, "thrid")
    assert text.startswith("config/config.yaml: no experiment 'thrid'")
    assert str(folder / "experiments/thrid.yaml") in text and text.endswith("known: first, second")


def test_an_unknown_model_says_which_file_names_it(folder):
    text = refused_experiment(folder, MINIMAL.replace("tiny", "tniy"))
    assert text.startswith(f"{folder / 'experiments/first.yaml'}: team, reward_models or methods: no model 'tniy'")
    assert text.endswith("known: tiny")


def test_the_first_folder_that_has_a_file_wins(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write(other / "experiments/first.yaml", MINIMAL + "seeds: 5\n")
    assert load_project({"experiments": "first"}, [other, folder]).experiments["first"].seeds == [5]
    assert load_project({"experiments": "first"}, [folder, other]).experiments["first"].seeds == [0]


def test_only_models_that_are_used_are_read(folder):
    write(folder / "models/broken.yaml", "nothing: valid\n")
    assert list(load(folder).models) == ["tiny"]


# --- overlays -----------------------------------------------------------------------------------------------------


def test_an_override_lies_over_the_file_key_by_key(folder):
    write(folder / "experiments/first.yaml", MINIMAL + "sampling: {temperature: 0.7, top_k: 5}\nseeds: [0, 1]\n")
    override = {"experiments": {"first": {"sampling": {"top_k": 9}, "seeds": [3]}}, "models": {"tiny": {"dtype": None}}}
    found = load(folder, override).experiments["first"]
    assert (found.sampling.temperature, found.sampling.top_k, found.seeds) == (0.7, 9, [3])


def test_an_override_can_change_one_method_of_a_list(folder):
    found = load(folder, {"experiments": {"first": {"methods": {"madpo": {"beta": 0.5}}}}}).experiments["first"]
    assert list(found.methods) == ["base", "madpo", "marlhf"] and found.methods["madpo"] == Madpo(beta=0.5)


def test_the_mistakes_of_all_experiments_are_told_at_once(folder):
    write(folder / "experiments/first.yaml", MINIMAL + "seed: 1\n")
    write(folder / "experiments/second.yaml", MINIMAL.replace("[", "[grpo, "))
    with pytest.raises(UserError) as error:
        load_project({"experiments": ["first", "second"]}, [folder])
    one, other = str(error.value).splitlines()
    assert "first.yaml: seed: unknown key" in one and "second.yaml: methods" in other


def test_an_unknown_algorithm_is_told_with_the_known_ones(folder):
    text = refused_experiment(folder, MINIMAL.split("methods")[0] + "methods: {mine: {algorithm: marlhp}}\n")
    assert "methods.mine.algorithm: 'marlhp' is none of base, madpo" in text and "(nearest: 'marlhf')" in text


def test_an_override_can_lay_keys_on_a_short_form(folder):
    override = {"team": {"agents": 3}, "task": {"options": {"target_min": 1.5}}, "items": {"limit": 3}}
    write(folder / "experiments/first.yaml", MINIMAL + "items: data.jsonl\n")
    found = load(folder, {"experiments": {"first": override}}).experiments["first"]
    assert (found.team.model, found.team.agents) == ("tiny", 3)
    assert (found.task.name, found.task.options) == ("length_ratio", {"target_min": 1.5})
    assert (found.items.source, found.items.limit) == ("data.jsonl", 3)


def test_an_override_can_replace_a_section_by_a_short_form(folder):
    write(
        folder / "experiments/first.yaml",
        "task: {name: length_ratio}\nteam: {model: tiny, agents: 3}\nmethods: [base]\n",
    )
    found = load(folder, {"experiments": {"first": {"team": ["tiny", "tiny"], "methods": ["madpo"]}}}).experiments[
        "first"
    ]
    assert found.team.agents == 2 and list(found.methods) == ["madpo"]


def test_keys_inside_free_mappings_are_no_short_forms(folder):
    write(folder / "experiments/first.yaml", MINIMAL.replace("length_ratio", "{name: x, options: {team: a}}"))
    found = load(folder, {"experiments": {"first": {"task": {"options": {"team": {"b": 1}}}}}}).experiments["first"]
    assert found.task.options == {"team": {"b": 1}}


def test_an_override_can_choose_another_backend(folder):
    found = load(folder, {"experiments": {"first": {"methods": {"marlhf": {"backend": "maac"}}}}}).experiments["first"]
    assert found.methods["marlhf"] == ActorCritic(algorithm="maac", reward_model="default")


def test_a_model_can_be_overridden(folder):
    assert load(folder, {"models": {"tiny": {"pretraining_steps": 3}}}).models["tiny"].pretraining_steps == 3


def test_mistakes_in_an_override_say_that_there_is_one(folder):
    text = refusal(load, folder, {"experiments": {"first": {"sead": 1}}})
    assert text.startswith(f"{folder / 'experiments/first.yaml'} (with override.experiments.first): sead: unknown key")


def test_an_override_of_nothing_is_refused(folder):
    text = refusal(load, folder, {"experiments": {"frist": {}}})
    assert text.startswith("config/config.yaml: override.experiments.frist: no experiment 'frist'")
    assert "override.models.x: no model 'x'" in refusal(load, folder, {"models": {"x": {}}})
    assert "override.experiments.first: Input should be a valid dictionary" in refusal(
        load, folder, {"experiments": {"first": 3}}
    )


def test_merging_leaves_what_it_merges_alone():
    under, over = {"a": {"b": 1, "c": [1]}}, {"a": {"b": 2}, "d": None}
    assert merge(under, over) == {"a": {"b": 2, "c": [1]}, "d": None}
    assert under == {"a": {"b": 1, "c": [1]}} and over == {"a": {"b": 2}, "d": None}


# --- teams of earlier runs ----------------------------------------------------------------------------------------


def saved(folder, *agents):
    for agent in agents:
        (folder / agent).mkdir(parents=True)
    return folder


def test_a_folder_with_agents_gives_each_agent_its_own_in_role_order(folder):
    run = saved(folder / "run", "agent_1", "agent_0", "critics")
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", f"{{model: {{path: '{run}'}}}}"))
    project = load(folder)
    assert project.experiments["first"].team.model_names() == ["first.agent_0", "first.agent_1"]
    assert project.models == {f"first.agent_{agent}": Model(path=f"{run}/agent_{agent}") for agent in (0, 1)}
    assert project.saved == {"first": str(run)}


def test_a_folder_of_one_model_is_for_all_agents(folder):
    run = saved(folder / "run/agent_1")
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", f"{{model: {{path: '{run}'}}, agents: 3}}"))
    project = load(folder)
    assert project.experiments["first"].team.model_names() == ["first.agent_0"] * 3
    assert project.models == {"first.agent_0": Model(path=str(run))}


def test_folders_and_names_go_together(folder):
    one, run = saved(folder / "one"), saved(folder / "run", "agent_0", "agent_1")
    team = f"[tiny, {{path: '{run}'}}]"
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", team))
    project = load(folder)
    assert project.experiments["first"].team.model_names() == ["tiny", "first.agent_1"]
    assert project.models["first.agent_1"] == Model(path=f"{run}/agent_1") and project.saved == {}
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", f"[{{path: '{one}'}}, {{path: '{run}/agent_0'}}]"))
    assert [model.path for model in load(folder).models.values()] == [str(one), f"{run}/agent_0"]


def test_a_model_file_called_like_a_teams_saved_model_is_refused(folder):
    run = saved(folder / "run", "agent_0", "agent_1")
    write(folder / "models/first.agent_1.yaml", "path: elsewhere\n")
    text = refused_experiment(folder, MINIMAL.replace("tiny", f"{{model: {{path: '{run}'}}}}"))
    assert "first.agent_1" in text and "rename" in text


@pytest.mark.parametrize("agents", [1, 3])
def test_a_team_of_another_size_is_refused_with_both_numbers(folder, agents):
    run = saved(folder / "run", "agent_0", "agent_1")
    text = refused_experiment(folder, MINIMAL.replace("tiny", f"{{model: {{path: '{run}'}}, agents: {agents}}}"))
    assert text.startswith(f"{folder / 'experiments/first.yaml'}: team.model: {run} holds a team of 2 agents")
    assert f"but this team has {agents}. Change team.agents" in text


def test_several_saved_models_share_no_weights(folder):
    run = saved(folder / "run", "agent_0", "agent_1")
    team = f"{{model: {{path: '{run}'}}, share_weights: true}}"
    assert "team.share_weights: needs one model for all agents" in refused_experiment(
        folder, MINIMAL.replace("tiny", team)
    )
    write(folder / "experiments/first.yaml", MINIMAL.replace("tiny", team.replace(str(run), f"{run}/agent_0")))
    assert load(folder).experiments["first"].team.share_weights


# --- names in messages --------------------------------------------------------------------------------------------


def test_sections_that_are_named_like_kinds_of_values_keep_their_names(folder):
    text = MINIMAL + "collections: {default: {}, list: {candidates: 0}, str: {sampling: {top_q: 1}}}\n"
    told = refused_experiment(folder, text)
    assert "collections.list.candidates: Input" in told and "collections.str.sampling.top_q: unknown key" in told


def test_a_method_that_is_named_like_an_algorithm_keeps_its_name(folder):
    told = refused_experiment(folder, MINIMAL.replace("[base, madpo, marlhf]", "{madpo: {algorithm: iac, clipp: 1}}"))
    assert "methods.madpo.clipp: unknown key (nearest: 'clip')" in told


# --- broken files -------------------------------------------------------------------------------------------------


def test_a_key_that_stands_twice_is_refused(folder):
    text = refused_experiment(folder, MINIMAL + "sampling:\n  top_k: 3\n  top_k: 4\n")
    assert "is not valid YAML: key 'top_k' stands twice" in text and "line 5" in text


def test_yaml_anchors_and_merge_keys_work(folder):
    text = MINIMAL.replace("[base, madpo, marlhf]", "\n  a: &a {algorithm: madpo, beta: 0.3}\n  b: {<<: *a, loss: ipo}")
    write(folder / "experiments/first.yaml", text)
    assert load(folder).experiments["first"].methods["b"] == Madpo(beta=0.3, loss="ipo")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: [1\n", "is not valid YAML: while parsing a flow sequence"),
        (b"a: 1\nb:\n\tc: 2\n", "(line 3, column 1); indent with spaces, not with tabs"),
        (b"a: 1\nb: 'c\n", "found unexpected end of stream (line 3, column 1)"),
        (b"a: b: c\n", "is not valid YAML: mapping values are not allowed here"),
        (b"a: !!python/object:os.system x\n", "is not valid YAML: could not determine a constructor"),
        (b"a: 2024-13-45\n", "is not valid YAML: month must be in 1..12"),
        (b"? [a]\n: b\n", "is not valid YAML"),
        (b"a: \xff\n", "is not UTF-8"),
        (b"a: \x00\n", "is not valid YAML"),
        (b"- a\n", "expected a mapping of keys to values, found list"),
        (b"just text\n", "expected a mapping of keys to values, found str"),
        (b"", "expected a mapping of keys to values, found an empty file"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_name(tmp_path, content, told):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    text = refusal(read_yaml, path)
    assert text.startswith(f"{path}: ") and told in text


def test_a_mistake_at_the_top_has_no_place_but_its_key(folder):
    text = refused_experiment(folder, MINIMAL + "seeds: [1, 1]\n")
    assert text == f"{folder / 'experiments/first.yaml'}: seeds: [1, 1] names a seed twice"


# --- the command line ---------------------------------------------------------------------------------------------


def test_values_of_the_command_line_keep_their_types():
    entries = ["experiments=[a]", "override={a: {b: false, c: '2', d: 3, e: null}}", "x=", "y='[1]'"]
    expected = {"a": {"b": False, "c": "2", "d": 3, "e": None}}
    assert from_command_line(entries) == {"experiments": ["a"], "override": expected, "x": None, "y": [1]}


def test_later_values_of_the_command_line_lie_over_earlier_ones():
    assert from_command_line(["a={b: 1, c: 2}", "a={c: 3}"]) == {"a": {"b": 1, "c": 3}}


@pytest.mark.parametrize("text", ["{experiments: {first: {seeds: [0]}", "{a: b: c}", "[1"])
def test_broken_yaml_of_the_command_line_is_told_with_its_place(text):
    told = refusal(from_command_line, [f"override={text}"])
    assert told.startswith("--config override=...: is not valid YAML: ") and "(line 1, column " in told


def test_names_that_have_a_file_are_known(folder):
    write(folder / "experiments/another.yaml", MINIMAL)
    assert known_names([folder], "experiments") == ["another", "first"]
    assert known_names([folder, ROOT / "config"], "models") == ["smollm2", "tiny"]


def test_keys_that_are_no_text_are_refused(folder):
    assert "Keys should be strings" in refused_experiment(folder, MINIMAL + "1: x\n")
    assert "methods.1" in refused_experiment(folder, MINIMAL.replace("[base, madpo, marlhf]", "{1: {algorithm: base}}"))
