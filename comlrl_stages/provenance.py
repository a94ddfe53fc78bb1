"""What decides the bytes of a stage, as strings that Snakemake can compare.

Snakemake sees neither imported modules nor configuration values by itself. So every rule carries
`params: **tracked(project, "stage")`: one string per setting that the stage reads, plus a fingerprint of the code that
computes it, the versions of the libraries that decide its numbers, and the schema version. A changed setting or
function runs exactly that stage and what follows, and `snakemake -n` says which one it was.
"""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comlrl_stages.config import Task
from comlrl_stages.errors import UserError
from comlrl_stages.files import SCHEMA_VERSION, file_digest, write_json
from comlrl_stages.job_settings import instances, settings_of
from comlrl_stages.project import Project
from comlrl_stages.registry import ALGORITHMS, TASKS
from comlrl_stages.settings import flatten

PACKAGE = "comlrl_stages"
#: What is found out once and remembered lies with Snakemake's own records.
MEMORY = Path(".snakemake") / "comlrl_stages"
SMALL_FILE = 50_000_000
#: Modules that decide no byte of a result: reading the configuration, moving files, showing progress.
_READS_AND_MOVES = (
    "config config_errors config_methods config_values project settings job_settings registry cli checks provenance "
    "artifacts files checkpoint_places checkpoints progress errors hub publishing tracking"
)
_LOOKS_AFTER_RESULTS = "jobs condition upkeep status pruning"
OUTSIDE = {f"{PACKAGE}.{name}" for name in f"{_READS_AND_MOVES} {_LOOKS_AFTER_RESULTS}".split()}
_TORCH = ("torch", "transformers", "tokenizers")
#: Libraries that decide the numbers of a stage.
LIBRARIES = {
    "prepare": _TORCH,
    "split": ("datasets",),
    "sample": _TORCH,
    "refer": _TORCH,
    "reward": _TORCH,
    "optimize": _TORCH,
    "sample_evaluation": _TORCH,
    "export": _TORCH,
    "report": ("matplotlib",),
}
#: Files of the package beside its code that decide what a stage writes.
DATA_FILES = {"report": ("reporting/template.html",)}
#: The parts of a task that a stage runs: a new reward does not sample again.
TASK_PARTS = {
    "split": ("items", "eval_items"),
    "sample": ("formatters", "transition"),
    "sample_evaluation": ("formatters", "transition"),
    "score": ("reward", "reward_scope"),
    "evaluate": ("reward", "reward_scope", "eval_logger", "eval_aggregator", "metrics_callback"),
    "optimize": ("formatters", "transition", "reward", "reward_scope", "metrics_callback"),
}


def tracked(project: Project, stage: str) -> dict[str, Callable[[Any], str]]:
    """Parameters of a stage's rule: a function of the wildcards per setting, returning `stage.key=<json>`.

    The names are prefixed, for Snakemake keeps `items`, `keys` and `count` for itself. A setting that a job does not
    have is an empty string. Snakemake compares sets of values, so the empty string always is among them: else a
    method with other settings, added beside this one, would run this one again.
    """
    keys = dict.fromkeys(key for wildcards in instances(project, stage) for key in strings(project, stage, wildcards))
    known: dict[tuple[Any, ...], dict[str, str]] = {}

    def strings_of(wildcards: Any) -> dict[str, str]:
        job = tuple(sorted(dict(wildcards.items()).items()))
        if job not in known:
            known[job] = strings(project, stage, wildcards)
        return known[job]

    def parameter(key: str) -> Callable[[Any], str]:
        return lambda wildcards: strings_of(wildcards).get(key, "")

    return {f"setting_{index}": parameter(key) for index, key in enumerate([*keys, "(none)"])}


def strings(project: Project, stage: str, wildcards: Any) -> dict[str, str]:
    """All strings that identify the work of one job, by key; none where the stage has no such job."""
    settings = settings_of(project, stage, wildcards)
    if settings is None:
        return {}
    values = flatten(stage, settings) | _surroundings(stage, settings)
    return {key: f"{key}={value}" for key, value in values.items()}


def check_surroundings(stage: str, settings: Any, told: Mapping[str, str]) -> None:
    """Raise UserError where a stage would run other code, data or libraries than its workflow recorded.

    `told` are the stage's settings by key, as the workflow gave them; by hand they hold no fingerprints. Without this,
    a clone whose environment has another clone installed would pass that one's results off as its own.
    """
    for key, value in _surroundings(stage, settings).items():
        if told.get(key, value) != value:
            raise UserError(
                f"{stage}: the workflow recorded {key}={told[key]}, but here it is {value}. Either it was edited since "
                f"the workflow started (run it again), or the environment runs another clone of this project (stages "
                f"run {Path(__file__).parent}; `pip install -e .` in the folder of the Snakefile makes them one)."
            )


def _surroundings(stage: str, settings: Any) -> dict[str, str]:
    """What decides a stage's bytes beside its settings and inputs: code, data outside the results, libraries."""
    values = {"code": code_fingerprint(_roots(stage, settings))}
    if stage in TASK_PARTS and getattr(settings, "task", None) is not None:
        values["task_code"] = task_fingerprint(settings.task, TASK_PARTS[stage])
    values |= {f"data.{name}": file_digest(Path(__file__).parent / name)[:16] for name in DATA_FILES.get(stage, ())}
    values |= {f"data.{key}": _data_digest(source) for key, source in _local_sources(stage, settings).items()}
    adapters = ("peft",) if getattr(settings, "lora", None) else ()
    values |= {f"versions.{library}": _version(library) for library in (*LIBRARIES.get(stage, ()), *adapters)}
    return values | {"schema.version": str(SCHEMA_VERSION)}


def _roots(stage: str, settings: Any) -> tuple[str, ...]:
    algorithm = ALGORITHMS.get(getattr(settings, "algorithm", ""))
    return (f"{PACKAGE}.stages.{stage}", *([algorithm] if stage == "optimize" and algorithm else []))


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        raise UserError(f"the library {library} is not installed; install the project as README says") from None


# --- code ---------------------------------------------------------------------------------------------------------


@cache
def code_fingerprint(roots: tuple[str, ...]) -> str:
    """Hash the modules of this package that `roots` import, directly or not; 16 hex digits.

    The abstract syntax counts, without docstrings: comments and layout change nothing. A file that a module names,
    such as a template, counts with it.
    """
    digest = hashlib.sha256()
    for name in sorted(_closure(roots)):
        digest.update(f"{name}\n{ast.dump(_without_docstrings(_source(name)))}\n".encode())
        digest.update("".join(file_digest(path) for path in _named_files(name)).encode())
    return digest.hexdigest()[:16]


def _named_files(module: str) -> list[Path]:
    """Files beside a module whose names stand in it as a text."""
    texts = {node.value for node in ast.walk(_source(module)) if isinstance(node, ast.Constant)}
    beside = _file(module).parent.iterdir()
    return sorted(path for path in beside if path.name in texts and path.suffix != ".py" and path.is_file())


def _closure(roots: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found or name in OUTSIDE:
            continue
        found.add(name)
        waiting += [imported for imported in _imports(name) if imported not in found]
    return found


@cache
def _imports(name: str) -> tuple[str, ...]:
    """Modules of this package that a module imports, anywhere in it."""
    candidates = []
    for node in ast.walk(_source(name)):
        if isinstance(node, ast.Import):
            candidates += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            candidates += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(c for c in candidates if c.startswith(f"{PACKAGE}.") and _file(c) is not None))


@cache
def _file(module: str) -> Path | None:
    """File of a module of this package, without importing it."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def _source(module: str) -> ast.Module:
    path = _file(module)
    if path is None:
        raise UserError(f"module {module} of this package is missing; install the project again")
    return ast.parse(path.read_text(encoding="utf-8"))


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = body[1:] or [ast.Pass()]
    return tree


# --- tasks --------------------------------------------------------------------------------------------------------


@cache
def _task_fingerprint(file: Path, target: str | None, parts: tuple[str, ...], root: Path | None = None) -> str:
    """`root`: the folder below which imports are followed, that of the file where not given."""
    body = _reachable(_without_docstrings(_parse_user_file(file)), target, parts)
    imported = [_without_docstrings(_parse_user_file(path)) for path in _imported_files(file, body, root)]
    return hashlib.sha256("\n".join(ast.dump(node) for node in [*body, *imported]).encode()).hexdigest()[:16]


def task_fingerprint(task: Task, parts: tuple[str, ...]) -> str:
    """Hash the code of a task that the named parts can reach, and the files beside it that it imports."""
    if task.name is not None:
        if task.name not in TASKS:
            raise UserError(f"task.name: {task.name!r} does not ship; shipped tasks: {', '.join(TASKS)}")
        return _task_fingerprint(_file(TASKS[task.name]), "Task", parts, Path(__file__).parent.parent)
    return _task_fingerprint(Path(task.file), task.object, parts)


def _parse_user_file(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: not found (looked for it from {Path.cwd()}); task.file names a Python file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a Python file ({error.strerror})") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: is not valid Python: {error}") from None


def _imported_files(file: Path, body: Iterable[ast.AST], root: Path | None = None) -> list[Path]:
    """Modules and packages in the folder of a user's file (or below `root`) that its statements import, or those do."""
    found: set[Path] = set()
    waiting = [(file.parent, list(body))]
    while waiting:
        folder, statements = waiting.pop()
        nodes = [node for statement in statements for node in ast.walk(statement)]
        new = {path for node in nodes for path in _files_of_import(node, root or file.parent, folder)} - found - {file}
        found |= new
        waiting += [(path.parent, _parse_user_file(path).body) for path in new]
    return sorted(found)


def _files_of_import(node: ast.AST, root: Path, folder: Path) -> Iterator[Path]:
    """Files below `root` that one import statement runs; a relative one starts at the importing file's `folder`."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
        root = folder.joinpath(*[".."] * (node.level - 1)) if node.level else root
    else:
        return
    for module in modules:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:end])
            yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


#: Parts of a task that serve one purpose each; what only they reach is left out of the other stages' fingerprints.
_SEPARABLE = {
    "items",
    "eval_items",
    "formatters",
    "transition",
    "reward",
    "reward_scope",
    "eval_logger",
    "eval_aggregator",
    "metrics_callback",
}


def _reachable(tree: ast.Module, target: str | None, parts: tuple[str, ...]) -> list[ast.AST]:
    """Statements of a task's file that `parts` of the task may run.

    Left out are the members for other purposes that these parts do not use, and the definitions that nothing else
    names. Statements that define no name always count.
    """
    unwanted = _SEPARABLE - set(parts)
    kept = (
        _drop_members(tree.body, unwanted, _read_names)
        if target is None
        else [
            _without_members(node, unwanted) if _defines(node) == {target} and isinstance(node, ast.ClassDef) else node
            for node in tree.body
        ]
    )
    roots = [node for node in kept if not _defines(node) or _defines(node) & ({target} | set(parts))]
    wanted = {name for node in roots for name in _names(node)}
    while True:
        more = [node for node in kept if node not in roots and _defines(node) & wanted]
        if not more:
            return [node for node in kept if node in roots]
        roots += more
        wanted |= {name for node in more for name in _names(node)}


def _without_members(node: ast.ClassDef, unwanted: set[str]) -> ast.ClassDef:
    body = _drop_members(node.body, unwanted, lambda member: _read_members(member, node.name))
    return ast.ClassDef(node.name, node.bases, node.keywords, body or [ast.Pass()], node.decorator_list)


def _drop_members(body: list[ast.stmt], unwanted: set[str], reads: Callable[[ast.stmt], set[str]]) -> list[ast.stmt]:
    """Statements without the `unwanted` members, save those that a kept statement `reads`."""
    kept = [node for node in body if not (_defines(node) and _defines(node) <= unwanted)]
    while True:
        read = {name for node in kept for name in reads(node)}
        more = [node for node in body if node not in kept and _defines(node) & read]
        if not more:
            return [node for node in body if node in kept]
        kept += more


def _read_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _read_members(node: ast.AST, owner: str) -> set[str]:
    """Members of the class `owner` that a statement of it reads: by bare name only outside functions."""
    attributes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    own = {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id in ("self", "cls", owner)}
    return own if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else own | _read_names(node)


def _defines(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return set()


def _names(node: ast.AST) -> set[str]:
    """Names that a statement mentions, `self.name` included."""
    mentioned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return mentioned | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


# --- data ---------------------------------------------------------------------------------------------------------


def _local_sources(stage: str, settings: Any) -> dict[str, str]:
    """Files and folders outside the results that a stage reads. An edited one runs it again, a touched one does not."""
    keys = {
        "split": ("source", "eval_source", "validation_source"),
        "prepare": ("path", "gguf"),
        "optimize": ("critics",),
    }.get(stage, ())
    sources = {key: getattr(settings, key, None) for key in keys}
    return {key: s for key, s in sources.items() if s and s != "task" and not s.startswith("hub://")}


@cache
def _data_digest(source: str) -> str:
    if ".py:" in source:
        file, _, function = source.rpartition(":")
        return _task_fingerprint(Path(file), function, ())
    path = _data_path(source)
    if path.is_file():
        return _remembered_digest(path)[:16]
    files = sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise UserError(f"{source}: not found (looked for {path} from {Path.cwd()})")
    listed = "\n".join(f"{file.relative_to(path).as_posix()} {_remembered_digest(file)}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _remembered_digest(file: Path) -> str:
    """Digest of a file's content; large files are read once, then known by path, size and modification time."""
    facts = file.stat()
    if facts.st_size < SMALL_FILE:
        return file_digest(file)
    name = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    memory = MEMORY / f"digest_{name}.json"
    if memory.is_file():
        return json.loads(memory.read_text(encoding="utf-8"))
    digest = file_digest(file)
    write_json(memory, digest)
    return digest


def _data_path(source: str) -> Path:
    if source.startswith("package://"):
        module, _, inside = source.removeprefix("package://").partition("/")
        spec = importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise UserError(f"{source}: the Python package {module!r} is not installed; pip install it first")
        return Path(spec.origin).parent / inside
    return Path(source)
