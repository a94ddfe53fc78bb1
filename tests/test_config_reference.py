"""The schema for editors and the reference of all keys are those of the configuration's models."""

import json
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml

from comlrl_stages.config import Experiment
from comlrl_stages.config_reference import FILES, METHODS, SHORT_FORMS, json_schema, markdown
from comlrl_stages.project import parse
from comlrl_stages.registry import ALGORITHMS

CONFIG = Path(__file__).parents[1] / "config"
README = (CONFIG / "README.md").read_text(encoding="utf-8")
SHIPPED = sorted(path.relative_to(CONFIG).as_posix() for path in CONFIG.rglob("*.yaml"))
SCHEMA = json.loads(json_schema())


def is_valid(values):
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(values)


def test_the_schema_is_up_to_date():
    """Make it with `comlrl-stages config schema > config/schema.json`."""
    assert (CONFIG / "schema.json").read_text(encoding="utf-8") == json_schema()


def test_the_readme_holds_the_reference():
    """Make it with `comlrl-stages config reference`, and put it between the two comments."""
    between = README.partition("<!-- reference: begin -->\n")[2].partition("<!-- reference: end -->")[0]
    assert between.strip() == markdown().strip()


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_fit_the_schema(name):
    assert is_valid(yaml.safe_load((CONFIG / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_name_the_schema_for_editors(name):
    first = (CONFIG / name).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (CONFIG / name).parent.joinpath(first.partition("$schema=")[2]).resolve() == CONFIG / "schema.json"


@pytest.mark.parametrize(
    "values",
    [
        {"task": "length_ratio", "team": "tiny", "methods": {"madpo": {"betta": 1}}},
        {"task": "length_ratio", "team": "tiny", "methods": ["base"], "sampling": {"top_q": 1}},
        {"task": "length_ratio", "team": "tiny", "methods": {"marlhf": {"backend": "ppo"}}},
        {"task": "length_ratio", "team": "tiny", "methods": {"marlhf": {"backend": "magrpo", "critic": "shared"}}},
        {"task": "length_ratio", "team": {"model": {"folder": "x"}}, "methods": ["base"]},
        {"task": "length_ratio", "team": "tiny"},
        {"builtin": "huge"},
    ],
)
def test_the_schema_refuses_what_the_models_refuse(values):
    assert not is_valid(values)


@pytest.mark.parametrize(
    "values",
    [
        {"task": "length_ratio", "team": ["a", "b"], "methods": {"madpo": {"beta": 1}, "base": None}, "seeds": 3},
        {
            "task": {"file": "x.py", "object": None},
            "team": {"model": "a", "agents": 3},
            "methods": ["base"],
            "items": "x",
        },
        {
            "task": "length_ratio",
            "team": ["a", {"path": "run"}],
            "methods": {
                "marlhf": {"backend": "iac", "value_hidden": 3, "lora": {}},
                "x": {"algorithm": "marlhf", "joint_mode": "cross", "learning_rate": [1e-3, 1e-4]},
            },
        },
        {"experiments": "quickstart"},
    ],
)
def test_the_schema_takes_the_short_forms(values):
    assert is_valid(values)


def keys_of(model):
    return list(model.model_fields)


def test_the_reference_has_every_key_of_every_file():
    text = markdown()
    for file, model in FILES:
        assert f"## `{file}`" in text
        assert not [key for key in keys_of(model) if f"| `{key}` |" not in text]
    for section in ("sampling", "items", "scoring", "team", "evaluation", "compute", "runtime"):
        inner = Experiment.model_fields[section].annotation
        assert not [key for key in keys_of(inner) if f"| `{section}.{key}` |" not in text]
    for method in (*METHODS, *SHORT_FORMS):
        assert not [key for key in keys_of(method) if f"| `methods.<name>.{key}` |" not in text]


def test_the_reference_has_a_meaning_for_every_key():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert not [row for row in rows if row.rstrip("| ").endswith("|") or row.split(" | ")[-1].strip(" |") == ""]


def test_the_reference_has_every_algorithm():
    algorithms = [name for method in METHODS for name in get_args(method.model_fields["algorithm"].annotation)]
    assert sorted(algorithms) == sorted(["base", *ALGORITHMS])


def yaml_examples():
    return [block.partition("```")[0] for block in README.split("```yaml\n")[1:]]


def test_the_examples_of_the_readme_are_valid():
    experiments = [yaml.safe_load(text) for text in yaml_examples() if "methods:" in text and "override:" not in text]
    assert len(experiments) >= 2
    for values in experiments:
        parse(Experiment, values, "config/README.md")
    overlays = [yaml.safe_load(text) for text in yaml_examples() if "override:" in text]
    assert overlays and all(is_valid({"experiments": ["quickstart"], **overlay}) for overlay in overlays)
