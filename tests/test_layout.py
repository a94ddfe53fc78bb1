"""How the package is laid out: imports run one way, heavy libraries stay where models are."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "comlrl_stages"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "peft"}
#: What each room may use beside itself and the ground floor (the modules of the package's own folder).
ROOMS = {
    "stages": {"rollouts", "learning", "preferences", "reporting", "tasks", "teams"},
    "rollouts": {"learning", "tasks", "teams"},
    "learning": set(),
    "preferences": {"tasks", "teams"},
    "reporting": {"learning"},
    "tasks": set(),
    "teams": set(),
}
#: The ground floor's ways up: the command line looks at a task to check the configuration.
WAYS_UP = {"checks": {"tasks"}}


def imports(name, *, anywhere=True):
    """Modules that a module imports, `comlrl_stages.` left out; only those on import, or those in functions too."""
    nodes = ast.walk(TREES[name]) if anywhere else top_level(TREES[name])
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            both = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= both if node.module == "comlrl_stages" else {node.module, *both}
    return {module.removeprefix("comlrl_stages.") for module in found}


def top_level(tree):
    """Nodes that run on import: all but the bodies of functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def rooms_used(name):
    return {module.split(".")[0] for module in imports(name) if module in MODULES} & set(ROOMS)


def members(room):
    return [name for name in MODULES if name.split(".")[0] == room]


def test_every_room_is_known():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    for name in members(room):
        assert rooms_used(name) <= ROOMS[room] | {room}, name


def test_the_ground_floor_imports_no_room():
    for name in MODULES:
        if name.split(".")[0] not in ROOMS:
            assert rooms_used(name) <= WAYS_UP.get(name, set()), name


def test_nothing_imports_the_stages():
    for name in MODULES:
        if not name.startswith("stages"):
            assert not [module for module in imports(name) if module.split(".")[0] == "stages"], name


def test_nothing_imports_the_command_line():
    assert not [name for name in MODULES if "cli" in imports(name)]


@pytest.mark.parametrize("name", members("tasks") + members("preferences") + members("reporting"))
def test_rooms_without_models_import_no_torch(name):
    assert not {module.split(".")[0] for module in imports(name)} & HEAVY


@pytest.mark.parametrize("name", members("learning"))
def test_the_mathematics_does_no_input_or_output(name):
    used = {module.split(".")[0] for module in imports(name)}
    assert not used & {"os", "pathlib", "io", "json", "pickle", "shutil", "subprocess", "pyarrow", "pandas", "files"}
    assert not {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)} & {"open", "print", "input"}


@pytest.mark.parametrize("name", ["cli", "errors", "files", "registry", "progress"])
def test_light_modules_import_only_what_is_light(name):
    used = {module.split(".")[0] for module in imports(name, anywhere=False)} - set(MODULES)
    assert used <= {"typer", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[0] not in ROOMS])
def test_the_ground_floor_imports_no_torch(name):
    if name != "checkpoints":
        assert not {module.split(".")[0] for module in imports(name)} & HEAVY


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    docstring = ast.get_docstring(TREES[name])
    assert docstring and docstring.partition("\n\n")[0].endswith((".", ":"))


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_a_drawer_for_everything(name):
    assert not set(name.split(".")) & {"utils", "util", "helpers", "misc", "common"}


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_unpickled_and_no_global_random_numbers_are_drawn(name):
    text = MODULES[name].read_text(encoding="utf-8")
    assert not imports(name) & {"random", "dill"}
    assert not [call for call in ("pickle.load", "torch.load(", "np.random.seed", "torch.manual_seed(") if call in text]


def test_every_stage_can_be_run_by_the_command_line():
    names = ("madpo", "group", "actor_critic", "estimators", "policy", "rollouts")
    helpers = {f"stages.optimize_{name}" for name in names}
    for name in set(members("stages")) - {"stages"} - helpers:
        functions = [node for node in TREES[name].body if isinstance(node, ast.FunctionDef) and node.name == "run"]
        assert [argument.arg for argument in functions[0].args.args] == ["settings", "work"], name


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("test_*.py")), ids=lambda path: path.stem)
def test_tests_mirror_the_package(path):
    """A test stands where its subject stands; two subjects are the whole."""
    inside = path.relative_to(Path(__file__).parent)
    rooms = inside.parent.parts
    assert not rooms or rooms[0] in {*ROOMS, "workflow"}
    if not rooms:
        assert path.stem.removeprefix("test_") in {*MODULES, "layout", "readme"}
