"""What a task is, and how one is loaded: from the registry by name, or from a user's Python file.

A task is any object (a class, an instance, a function that returns one, or a module) with these attributes:

    reward            reward(completions_0, .., completions_{n-1}, *, batch_items, prompts) -> one result per
                      joint response
    formatters        formatter(item) -> prompt, or formatter(item, external_prompts=...); one for all agents, or
                      a list in actor order. Without it every agent gets item["prompt"]
    items             list of dicts, datasets.Dataset, or a function that returns one (optional: items may come
                      from a file)
    eval_items        the same, for a task with an evaluation split of its own (optional)
    transition        transition(prompt, agent_completions, num_agents, prompt_history_per_agent,
                      response_history_per_agent) -> n prompts of the next turn, in actor order (optional); it is
                      called by these names. `prompt` is the item's; the histories hold one list per agent, of every
                      turn so far. One that declares `item` is given the whole item, too. A formatter that declares
                      external_prompts is given its agent's prompt, to format it again
    eval_logger, eval_aggregator      extra metrics of the evaluation: rows of all responses, and what they come to
    metrics_callback  metrics_callback(rollouts) -> numbers, once per eval item, then averaged; a rollout has agent_idx,
                      prompt, completion and metadata (optional)
    reward_scope      "team" (default): one number per joint response; "agent": a list of n numbers
    agents            n; needed only if the reward takes `*completions` and `formatters` is not a list

The functions may be plain functions in a class body (no `self`), static methods, methods or callables.
Everything is checked once, when the task is loaded; user code that fails is reported with its own file and line.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from comlrl_stages.errors import UserError, nearest
from comlrl_stages.registry import TASKS

REWARD_FORM = (
    "reward(completions_0, .., completions_{n-1}, *, batch_items, prompts) or reward(*completions, batch_items)"
)
FORMATTER_FORM = "formatter(item) or formatter(item, external_prompts=None)"
BY_NAME = ("batch_items", "prompts")
TRANSITION_PARAMETERS = (
    "prompt",
    "agent_completions",
    "num_agents",
    "prompt_history_per_agent",
    "response_history_per_agent",
)
TRANSITION_FORM = f"transition({', '.join(TRANSITION_PARAMETERS)})"


class Exchange(NamedTuple):
    """What the agents read and wrote at one turn, in actor order."""

    prompts: Sequence[str]
    responses: Sequence[str]


@dataclass(frozen=True)
class TaskSource:
    """Where a task comes from: `name` of a built-in task, or `file` and the name of the `object` in it.

    `object=None` means the module itself is the task. `options` are the arguments of a class or function.
    """

    name: str | None = None
    file: str | None = None
    object: str | None = "Task"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.file is None:
            return f"task {self.name}"
        return self.file if self.object is None else f"{self.file}: {self.object}"


@dataclass(frozen=True)
class Reward:
    """A reward function and what its signature says: how to call it is decided here, once."""

    function: Callable[..., Any]
    agents: int | None  # None: *completions
    by_name: tuple[str, ...]  # which of batch_items and prompts it declares
    defaults: dict[str, Any]  # further parameters, which the config may override by name

    def check_parameters(self, parameters: Mapping[str, Any], where: str) -> None:
        """Raise UserError if `parameters` (the config's scoring.parameters) names one that the reward does not have."""
        for name in parameters:
            if name not in self.defaults:
                raise UserError(
                    f"scoring.parameters: the reward of {where} has no parameter {name!r} with a default"
                    f"{nearest(name, self.defaults)}. It has: {', '.join(self.defaults) or 'none'}."
                )

    def __call__(
        self,
        completions: Sequence[Sequence[str]],
        batch_items: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, Any],
    ) -> Any:
        """Call the function once: `completions[agent][i]` is answered for `batch_items[i]`. Returns what it returns."""
        named: dict[str, Any] = dict(parameters)
        if "batch_items" in self.by_name:
            named["batch_items"] = list(batch_items)
        if "prompts" in self.by_name:
            named["prompts"] = [default_formatter(item) for item in batch_items]
        return self.function(*(list(texts) for texts in completions), **named)


@dataclass(frozen=True)
class Task:
    """A loaded and checked task of `agents` agents."""

    source: TaskSource
    agents: int
    formatters: tuple[Callable[..., str], ...]
    reward: Reward
    reward_scope: str
    items: Any = None
    eval_items: Any = None
    transition: Callable[..., Sequence[str]] | None = None
    eval_logger: Callable[..., list[dict[str, float]]] | None = None
    eval_aggregator: Callable[..., dict[str, float]] | None = None
    metrics_callback: Callable[..., dict[str, float]] | None = None

    def format(self, item: Mapping[str, Any], external_prompts: Sequence[str] | None = None) -> list[str]:
        """Return the prompts of one item, one per agent in actor order.

        `external_prompts` (one per agent) are the transition's, from the second turn on. A formatter that does not
        declare `external_prompts` leaves them as they are.
        Raises UserError, naming the item and the agent, if a formatter fails or returns no text.
        """
        return [
            self._format_for(agent, item, None if external_prompts is None else external_prompts[agent])
            for agent in range(self.agents)
        ]

    def next_prompts(self, item: Mapping[str, Any], history: Sequence[Exchange]) -> list[str]:
        """Return the prompts of the turn after `history` (every turn so far), formatted, one per agent.

        Raises UserError, naming the item and the turn, if the transition fails or returns anything but n texts.
        """
        turn = len(history) + 1
        if self.transition is None:
            raise UserError(
                f"{self.source}: has no transition, so there is no turn {turn}. Give it a function {TRANSITION_FORM}, "
                "or set episode.turns to 1."
            )
        where = f"{self.source}: the transition to turn {turn}, item {item.get('task_id', '(no task_id)')}"
        try:
            prompts = self.transition(
                prompt=item.get("prompt", ""),
                agent_completions=list(history[-1].responses),
                num_agents=self.agents,
                prompt_history_per_agent=[list(own) for own in zip(*(one.prompts for one in history), strict=True)],
                response_history_per_agent=[list(own) for own in zip(*(one.responses for one in history), strict=True)],
                **({"item": item} if _reads_item(self.transition) else {}),
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"{where} raised\n{user_traceback(error)}") from error
        return self.format(item, _read_prompts(prompts, self.agents, where))

    def _format_for(self, agent: int, item: Mapping[str, Any], external: str | None) -> str:
        formatter = self.formatters[agent]
        where = f"{self.source}: the formatter of agent_{agent}, item {item.get('task_id', '(no task_id)')}"
        try:
            if external is None:
                prompt = formatter(item)
            elif "external_prompts" in inspect.signature(formatter).parameters:
                prompt = formatter(item, external_prompts=external)
            else:
                prompt = external
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UserError(f"{where} raised\n{user_traceback(error)}") from error
        if not isinstance(prompt, str):
            raise UserError(
                f"{where} returned {type(prompt).__name__} ({prompt!r:.80}), expected str. "
                f"A formatter is {FORMATTER_FORM} -> str."
            )
        return _whole(prompt, where)


def _read_prompts(prompts: Any, agents: int, where: str) -> Sequence[str]:
    """The prompts that a transition returned, one text per agent."""
    expected = f"expected a list of {agents} texts, one per agent. A transition is {TRANSITION_FORM} -> n prompts."
    if not isinstance(prompts, list | tuple):
        raise UserError(f"{where} returned {type(prompts).__name__} ({prompts!r:.80}), {expected}")
    if len(prompts) != agents:
        raise UserError(f"{where} returned {len(prompts)} prompts, {expected}")
    for agent, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UserError(f"{where} returned {type(prompt).__name__} ({prompt!r:.80}) for agent_{agent}, {expected}")
    return [_whole(prompt, f"{where}, for agent_{agent},") for agent, prompt in enumerate(prompts)]


def _whole(prompt: str, where: str) -> str:
    """The prompt, if tokenizers can read it: half of a character written as two (a lone surrogate) is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} returned {prompt!r:.80}, whose character {error.start + 1} is a lone surrogate. Expected whole "
            "Unicode characters; decode what you read with errors='replace'."
        ) from None
    return prompt


def default_formatter(item: Mapping[str, Any]) -> str:
    """Return the item's `prompt`. Raises UserError if it has none."""
    if item.get("prompt") is None:
        raise UserError(
            f"the item has no prompt (its fields: {', '.join(item) or 'none'}). "
            "Rename a field to prompt (items.rename), or give the task formatters."
        )
    return item["prompt"]


# --- loading ------------------------------------------------------------------------------------------------------


def load_task(source: TaskSource) -> Task:
    """Load and check a task. Raises UserError that names the file, what was found and what was expected."""
    found = _load_task_object(source)
    reward = _read_reward(_required(found, "reward", source), source)
    formatters = _attribute(found, "formatters")
    agents = _count_agents(reward, formatters, _attribute(found, "agents"), source)
    optional = ("transition", "eval_logger", "eval_aggregator", "metrics_callback")
    functions = {name: _optional_function(found, name, source) for name in optional}
    _check_transition(functions["transition"], source)
    if (functions["eval_logger"] is None) != (functions["eval_aggregator"] is None):
        raise UserError(
            f"{source}: eval_logger and eval_aggregator work together, found only one of them. Give both or neither."
        )
    return Task(
        source=source,
        agents=agents,
        formatters=_read_formatters(formatters, agents, source),
        reward=reward,
        reward_scope=_read_scope(_attribute(found, "reward_scope"), source),
        items=_attribute(found, "items"),
        eval_items=_attribute(found, "eval_items"),
        **functions,
    )


def describe_task(source: TaskSource) -> dict[str, Any]:
    """Load a task and return the facts about it that can be shown as JSON."""
    task = load_task(source)
    return {
        "task": str(source),
        "agents": task.agents,
        "formatters": [getattr(formatter, "__name__", repr(formatter)) for formatter in task.formatters],
        "reward": getattr(task.reward.function, "__name__", repr(task.reward.function)),
        "reward_scope": task.reward_scope,
        "reward_reads": list(task.reward.by_name),
        "reward_parameters": {name: repr(value) for name, value in task.reward.defaults.items()},
        "has_items": task.items is not None,
        "has_eval_items": task.eval_items is not None,
        "has_transition": task.transition is not None,
        "has_eval_logger": task.eval_logger is not None,
        "has_metrics_callback": task.metrics_callback is not None,
    }


def load_object(file: str, name: str) -> Any:
    """Import a user's Python file and return the object called `name` in it."""
    module = _import_file(Path(file))
    if hasattr(module, name):
        return getattr(module, name)
    public = [known for known in vars(module) if not known.startswith("_")]
    hint = " To use the module itself as the task, set object to null." if hasattr(module, "reward") else ""
    raise UserError(
        f"{file}: has no object named {name!r}{nearest(name, public)}. "
        f"It defines: {', '.join(public) or 'nothing'}.{hint}"
    )


def user_traceback(error: BaseException) -> str:
    """Format an exception of user code with the lines of the user's files, without those of this package."""
    own = (f"{Path(__file__).resolve().parent.parent}/", "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return "".join(traceback.format_list(frames) + traceback.format_exception_only(error)).rstrip()


def _load_task_object(source: TaskSource) -> Any:
    if source.file is None:
        if source.name not in TASKS:
            raise UserError(
                f"task.name: there is no built-in task {source.name!r}{nearest(str(source.name), TASKS)}. "
                f"Built in: {', '.join(TASKS)}. For a task of your own give its file."
            )
        return _instance(importlib.import_module(TASKS[source.name]).Task, source)
    if source.object is None:
        return _instance(_import_file(Path(source.file)), source)
    return _instance(load_object(source.file, source.object), source)


def _instance(found: Any, source: TaskSource) -> Any:
    """Call a class or function with the options; take anything else as the task itself."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        if source.options:
            raise UserError(
                f"{source}: takes no options, found {', '.join(source.options)}. Make it a class or function."
            )
        return found
    try:
        inspect.signature(found).bind(**source.options)
    except TypeError as error:
        known = list(inspect.signature(found).parameters)
        raise UserError(
            f"{source}: cannot be made with options {source.options} ({error}). It takes: {', '.join(known) or 'none'}."
        ) from error
    try:
        return found(**source.options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{source}: could not be made from its options:\n{user_traceback(error)}") from error


def _import_file(file: Path) -> ModuleType:
    """Import a file under a name of its own; its folder is first on the path meanwhile, and last from then on."""
    path = file.resolve()
    if not path.is_file():
        raise UserError(f"{file}: no such file. Give the path of a Python file, relative to the working directory.")
    name = f"user_{path.stem}_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{file}: is not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{file}{_failing_line(error, path)}: cannot be imported:\n{user_traceback(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    if str(path.parent) not in sys.path:  # for imports inside functions
        sys.path.append(str(path.parent))
    return module


def _failing_line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


# --- reading the parts --------------------------------------------------------------------------------------------


def _attribute(found: Any, name: str) -> Any:
    """Return an attribute, or None. A plain function in a class body is a function unless it takes `self`."""
    static = inspect.getattr_static(found, name, None)
    if isinstance(static, FunctionType) and next(iter(inspect.signature(static).parameters), None) != "self":
        return static
    return getattr(found, name, None)


def _required(found: Any, name: str, source: TaskSource) -> Callable[..., Any]:
    function = _optional_function(found, name, source)
    if function is None:
        raise UserError(f"{source}: has no {name}. Give it a function {REWARD_FORM}.")
    return function


def _optional_function(found: Any, name: str, source: TaskSource) -> Callable[..., Any] | None:
    function = _attribute(found, name)
    if function is not None and not callable(function):
        raise UserError(f"{source}: {name} is {type(function).__name__}, expected a function.")
    return function


def _check_transition(function: Callable[..., Any] | None, source: TaskSource) -> None:
    """A transition is called by names, so that it may declare them in any order, and further ones with defaults."""
    if function is None:
        return
    try:
        given = [*TRANSITION_PARAMETERS, "item"] if _reads_item(function) else TRANSITION_PARAMETERS
        inspect.signature(function).bind(**dict.fromkeys(given))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{source}: the transition cannot be called as {TRANSITION_FORM}: {error}. Give it these parameters."
        ) from error


def _reads_item(transition: Callable[..., Any]) -> bool:
    """Whether a transition declares `item`; it is given the whole item only then."""
    return "item" in inspect.signature(transition).parameters


def _read_reward(function: Callable[..., Any], source: TaskSource) -> Reward:
    """Read how a reward is called from its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{source}: the reward's signature cannot be read ({error}). Expected {REWARD_FORM}."
        ) from error
    lists, star, by_name, defaults = [], False, [], {}
    for parameter in parameters:
        has_default = parameter.default is not parameter.empty
        if parameter.name in BY_NAME and (has_default or parameter.kind is parameter.KEYWORD_ONLY):
            by_name.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif has_default:
            defaults[parameter.name] = parameter.default
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            lists.append(parameter.name)
        else:
            _refuse_reward(function, str(parameter), "has no default", source)
    if set(lists) & set(BY_NAME):
        _refuse_reward(function, (set(lists) & set(BY_NAME)).pop(), "is passed by name only", source)
    if star == bool(lists):
        _refuse_reward(function, ", ".join(lists) or "nothing", "is not one list of completions per agent", source)
    return Reward(function, None if star else len(lists), tuple(by_name), defaults)


def _refuse_reward(function: Callable[..., Any], what: str, why: str, source: TaskSource) -> None:
    raise UserError(
        f"{source}: the reward has the signature {inspect.signature(function)}, in which {what} {why}. "
        f"Expected {REWARD_FORM}: one parameter without default per agent, batch_items and prompts after `*` if it "
        "needs them, and a default for every other parameter."
    )


def _count_agents(reward: Reward, formatters: Any, declared: Any, source: TaskSource) -> int:
    """The number of agents, on which reward, `formatters` and `agents` must agree."""
    if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int) or declared < 1):
        raise UserError(f"{source}: agents is {declared!r}, expected the number of agents, 1 or more.")
    listed = len(formatters) if isinstance(formatters, list | tuple) else None
    found = {"the reward's parameters": reward.agents, "formatters": listed, "agents": declared}
    found = {name: count for name, count in found.items() if count is not None}
    if not found:
        raise UserError(f"{source}: the reward takes *completions, so the number of agents is unknown. Set `agents`.")
    if len(set(found.values())) > 1:
        numbers = ", ".join(f"{count} by {name}" for name, count in found.items())
        raise UserError(f"{source}: the number of agents is not clear: {numbers}. They must be equal.")
    return next(iter(found.values()))


def _read_formatters(formatters: Any, agents: int, source: TaskSource) -> tuple[Callable[..., str], ...]:
    if formatters is None:
        formatters = default_formatter
    listed = list(formatters) if isinstance(formatters, list | tuple) else [formatters] * agents
    for agent, formatter in enumerate(listed):
        if not callable(formatter):
            raise UserError(
                f"{source}: formatters has {type(formatter).__name__} for agent_{agent}, expected {FORMATTER_FORM}."
            )
    return tuple(listed)


def _read_scope(scope: Any, source: TaskSource) -> str:
    if scope in (None, "team"):
        return "team"
    if scope != "agent":
        raise UserError(f'{source}: reward_scope is {scope!r}, expected "team" or "agent".')
    return "agent"
