"""What a user writes: projects, experiments and models, as strict pydantic models.

These classes are the only source of defaults, of `config/schema.json` and of the tables in `config/README.md`. The
stages never see them: each stage gets its own settings (settings.py), the exact part that decides its bytes.
"""

from collections.abc import Collection as Names
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, field_validator, model_validator

from comlrl_stages.config_methods import (
    ActorCritic,
    Base,
    GroupMethod,
    Madpo,
    Method,
    MethodAsWritten,
    Optimizer,
    PolicyTraining,
    Reinforcement,
    RewardedMethod,
    methods_shorthand,
)
from comlrl_stages.config_values import Name, Seed, Share, Strict, WrongKey
from comlrl_stages.errors import nearest

#: Joint responses of one item and step that cross and trees of turns may come to.
MOST_JOINT_RESPONSES = 4096


def _exactly_one(section: Strict, *keys: str) -> None:
    given = [key for key in keys if getattr(section, key) is not None]
    if len(given) != 1:
        hint = "; set the others to null" if given else ""
        raise ValueError(f"exactly one of {', '.join(keys)} is needed, given: {', '.join(given) or 'none'}{hint}")


# --- models -------------------------------------------------------------------------------------------------------


class Model(Strict):
    """One language model: exactly one of `builtin`, `hub`, `path`, `gguf` says where it comes from."""

    builtin: Literal["tiny"] | None = Field(
        None, description="a model made on the spot: `tiny`, half a million parameters"
    )
    hub: str | None = Field(None, description="model id on the Hugging Face hub")
    path: str | None = Field(None, description="folder with a saved model, or one agent of an export")
    gguf: str | None = Field(None, description="GGUF file, or `package://module/file.gguf` inside an installed package")
    revision: str | None = Field(None, description="hub revision (branch, tag or commit)")
    trust_remote_code: bool = Field(False, description="allow code that the model's repository brings along")
    chat_template: str | None = Field(None, description="Jinja text that replaces the tokenizer's own chat template")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="type of the weights while sampling; training always keeps float32 masters"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="attention implementation")
    pretraining_steps: int = Field(
        700, ge=1, le=10**7, description="only `builtin`: optimizer steps of the pretraining"
    )
    pretraining_seed: Seed = Field(0, description="only `builtin`: seed of the pretraining")

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        _exactly_one(self, "builtin", "hub", "path", "gguf")
        if self.revision is not None and self.hub is None:
            raise ValueError("revision goes with hub only")
        for key in ("pretraining_steps", "pretraining_seed"):
            if self.builtin is None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} goes with builtin only; a model of another source is not pretrained")
        return self


# --- task, items, scoring -----------------------------------------------------------------------------------------


class Task(Strict):
    """The task: one that ships (`name`), or an object in a Python file of yours."""

    name: Name | None = Field(
        None, description="a task that ships: `length_ratio`, `length_ratio_feedback` (two turns)"
    )
    file: str | None = Field(None, description="Python file with your task")
    object: str | None = Field("Task", description="name of the object in `file`; null takes the module itself")
    options: dict[str, Any] = Field({}, description="keyword arguments for the task when it is made")

    @model_validator(mode="after")
    def _one_source(self) -> "Task":
        _exactly_one(self, "name", "file")
        return self


class Items(Strict):
    """Where the task items come from and how they are split."""

    source: str = Field(
        "task",
        description="`task` (the task's own items), a .jsonl, .json, .csv or .parquet file, a folder of "
        "`datasets.save_to_disk`, `hub://owner/name`, `package://module/file.jsonl`, or `file.py:function`",
    )
    eval_source: str | None = Field(None, description="own source of the eval items, in the same forms")
    validation_source: str | None = Field(None, description="own source of the validation items, in the same forms")
    subset: str | None = Field(None, description="hub: name of the subset (configuration)")
    split: str = Field("train", description="hub: split of the training items")
    eval_split: str | None = Field(None, description="hub: split of the eval items")
    validation_split: str | None = Field(None, description="hub: split of the validation items")
    revision: str | None = Field(None, description="hub: revision of the data set")
    streaming: bool = Field(False, description="hub: stream instead of download; needs `limit`")
    limit: int | None = Field(None, ge=1, le=10**9, description="take at most so many items")
    eval_limit: int | None = Field(
        None, ge=1, le=10**9, description="take at most so many eval items of an own eval source"
    )
    eval_fraction: float = Field(
        0.2, gt=0.0, lt=1.0, description="share of the items for eval where it has no source of its own"
    )
    validation_fraction: float = Field(
        0.0, ge=0.0, lt=1.0, description="share of the training items kept apart for validation"
    )
    split_seed: Seed = Field(42, description="seed of the partition")
    shuffle: bool = Field(False, description="shuffle the training items once")
    shuffle_seed: Seed = Field(42, description="seed of that shuffle")
    duplicates: Literal["error", "drop"] = Field("error", description="what to do with items that occur twice")
    rename: dict[str, str] = Field({}, description="fields to rename, old name to new name")

    def has_validation(self) -> bool:
        """Whether some items are kept apart for validation."""
        return self.validation_fraction > 0.0 or self.validation_source is not None or self.validation_split is not None

    @model_validator(mode="after")
    def _agree(self) -> "Items":
        if self.streaming and self.limit is None:
            raise ValueError("streaming needs a limit")
        if self.eval_source is not None and self.eval_split is not None and not self.eval_source.startswith("hub://"):
            raise ValueError("eval_split goes with a hub source, but eval_source is none")
        if self.eval_limit is not None and self.source != "task" and not self._reads_more_than_training_items():
            raise ValueError(
                "eval_limit goes with eval items of their own (eval_source or eval_split); to take fewer of the "
                "training items for eval, lower eval_fraction"
            )
        return self

    def is_on_hub(self) -> bool:
        """Whether any items come from the Hugging Face hub."""
        sources = (self.source, self.eval_source, self.validation_source)
        return any(source is not None and source.startswith("hub://") for source in sources)

    def _reads_more_than_training_items(self) -> bool:
        named = (self.eval_source, self.eval_split, self.validation_source, self.validation_split)
        return any(name is not None for name in named)


class Scoring(Strict):
    """How joint responses are scored by the task's reward."""

    parameters: dict[str, Any] = Field({}, description="values for defaulted parameters of the reward function")
    scale: float = Field(1.0, description="the processed reward is scale * raw + shift; never 0")
    shift: float = Field(0.0, description="see scale")
    time_limit_s: float = Field(
        60.0, gt=0, le=10**6, description="time limit of a call of the reward, in seconds from its start"
    )
    batch_size: int = Field(
        1, ge=1, le=10**6, description="joint responses of one item per call of the reward function"
    )
    tolerate_failures: Share = Field(
        0.0, description="share of joint responses whose reward may raise or time out before the stage fails"
    )

    @field_validator("scale")
    @classmethod
    def _scale_keeps_differences(cls, scale: float) -> float:
        if scale == 0.0:
            raise ValueError("0 makes all rewards equal, and nothing can be learned; expected another number")
        return scale


# --- team and sampling --------------------------------------------------------------------------------------------

#: What `apply_chat_template` of transformers is given by the sampler, or takes for itself.
TEMPLATE_PARAMETERS = (
    "self",
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


def _template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    taken = [key for key in value if key in TEMPLATE_PARAMETERS]
    if taken:
        raise ValueError(
            f"{taken[0]} cannot be set: it is no variable of a chat template's own, or the sampler sets it. Not "
            f"allowed are {', '.join(TEMPLATE_PARAMETERS)}"
        )
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_template_arguments)]


class SavedTeam(Strict):
    """A folder of an earlier run to start from: an export or a policy with agent_0, agent_1, ..., or one model."""

    path: str = Field(min_length=1, description="the folder; with agent_0, agent_1, ... in it, agent i takes agent_i")


class Team(Strict):
    """The agents: their models and how a prompt reaches them. A list has one entry per agent, in actor order."""

    model: Name | SavedTeam | None = Field(
        None, description="one model for all agents (a file of `config/models/`), or `{path: folder}` of a trained team"
    )
    models: list[Name | SavedTeam] | None = Field(None, min_length=1, description="the same per agent")
    share_weights: bool = Field(
        False, description="all agents are one model, kept and trained once; else each trains a copy of its own"
    )
    agents: int = Field(2, ge=1, le=64, description="number of agents; with `models` it is their number")
    system_prompt: str | list[str | None] | None = Field(None, description="system prompt: one for all, or a list")
    prompt_format: Literal["auto", "chat", "plain"] | list[Literal["auto", "chat", "plain"]] = Field(
        "auto",
        description="`chat` uses the chat template, `plain` the bare text, `auto` chat where there is a template",
    )
    template_arguments: TemplateArguments | list[TemplateArguments] = Field(
        {}, description="arguments for the chat template, for example `{enable_thinking: false}`"
    )

    @model_validator(mode="before")
    @classmethod
    def _count_agents(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("models"), list) and values.get("agents") is None:
            return {**values, "agents": len(values["models"])}
        return values

    @model_validator(mode="after")
    def _agree(self) -> "Team":
        _exactly_one(self, "model", "models")
        for key in ("models", "system_prompt", "prompt_format", "template_arguments"):
            value = getattr(self, key)
            if isinstance(value, list) and len(value) != self.agents:
                raise ValueError(f"{key} has {len(value)} entries for {self.agents} agents")
        if self.share_weights and any(model != self.models[0] for model in self.models or []):
            raise WrongKey("share_weights", "needs one model for all agents, but models names several; set model")
        return self

    def model_names(self) -> list[Any]:
        """Names of the agents' models, in actor order; a saved team has names once its folder was looked at."""
        return list(self.models) if self.models else [self.model] * self.agents

    def per_agent(self, key: str) -> list[Any]:
        """The value of `key` for each agent, in actor order."""
        value = getattr(self, key)
        return list(value) if isinstance(value, list) else [value] * self.agents


class Episode(Strict):
    """How many turns the agents have on one item. After a turn the task's transition makes the next prompts."""

    turns: int = Field(1, ge=1, le=16, description="turns; more than 1 needs a task with a transition")
    discount: float = Field(1.0, gt=0.0, le=1.0, description="weight of the next turn's return in a return")
    termination_threshold: float | None = Field(
        None, description="an episode ends where the mean reward of a turn is above this; null is off"
    )

    @model_validator(mode="after")
    def _turns_are_several(self) -> "Episode":
        for key, neutral in (("discount", 1.0), ("termination_threshold", None)):
            if self.turns == 1 and getattr(self, key) != neutral:
                raise WrongKey(key, f"{getattr(self, key)} does nothing with one turn; set turns, or leave it out")
        return self


class Sampling(Strict):
    """How completions are drawn. Nothing but the EOS ids comes from the model's own generation config."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy, which trains nothing")
    top_p: float | None = Field(None, gt=0.0, le=1.0, description="nucleus sampling; null is off")
    top_k: int | None = Field(None, ge=1, le=10**7, description="top-k sampling; null is off")
    max_new_tokens: int = Field(64, ge=1, le=10**6, description="longest completion")
    min_new_tokens: int = Field(0, ge=0, le=10**6, description="no EOS before so many tokens")
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(
        [], description="texts that end a completion; they are not part of its text"
    )
    overflow: Literal["error", "drop"] = Field(
        "error", description="items whose prompt leaves no room for a completion: an error, or dropped and counted"
    )

    @model_validator(mode="after")
    def _agree(self) -> "Sampling":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        if self.temperature == 0.0 and (self.top_p is not None or self.top_k is not None):
            raise ValueError("temperature 0 is greedy, so top_p and top_k must be null")
        return self

    def greedy_key(self) -> str | None:
        """The key that makes every draw the same, or None."""
        if self.temperature == 0.0:
            return "temperature"
        return "top_k" if self.top_k == 1 else None


class Collection(Strict):
    """Joint responses of the base team on the training items: sampled once, shared by all that name it."""

    candidates: int = Field(16, ge=2, le=10**4, description="joint responses per item")
    sampling: Sampling = Field(Sampling(), description="keys that differ from the experiment's `sampling`")


# --- preferences and reward models --------------------------------------------------------------------------------


class Preferences(Strict):
    """Preference pairs made from a collection."""

    collection: Name = Field("default", description="the collection whose joint responses are compared")
    selection: Literal["reward_gap", "random", "all"] = Field(
        "reward_gap", description="`reward_gap` takes the largest gaps first, `random` any, `all` every pair"
    )
    pairs_per_task: int = Field(16, ge=1, le=10**9, description="at most so many pairs per item; `all` ignores it")
    min_gap: float = Field(0.0, ge=0.0, description="pairs with a smaller reward gap are left out")


class RewardTraining(Optimizer):
    """The settings of a reward model that decide its weights."""

    learning_rate: float = Field(1e-4, gt=0.0, description="peak learning rate")
    epochs: int = Field(2, ge=1, le=10**5, description="passes over the training pairs")
    batch_size: int = Field(16, ge=1, le=10**6, description="pairs per optimizer step")
    max_length: int = Field(1024, ge=8, le=10**7, description="longest joint text in tokens; longer: prompts are cut")
    held_out_fraction: float = Field(0.2, gt=0.0, lt=1.0, description="share of the items that measure quality")
    freeze_backbone: bool = Field(False, description="train the head alone")
    centring: float = Field(0.0, ge=0.0, description="weight of the square of the summed scores, which centres them")


class RewardModel(RewardTraining):
    """A joint reward model, fitted on preference pairs (Bradley-Terry)."""

    preferences: Name = Field("default", description="the preferences it is fitted on")
    model: Name | None = Field(None, description="backbone (a file of `config/models/`); null takes the first agent's")


# --- evaluation, compute, runtime, tracking -----------------------------------------------------------------------


class Evaluation(Strict):
    """How teams are evaluated: always by the task's own reward, on the eval items."""

    samples_per_task: int = Field(16, ge=1, le=10**4, description="sampled joint responses per eval item")
    train_samples_per_task: int = Field(0, ge=0, le=10**4, description="the same on the training items; 0 is off")
    greedy: bool = Field(True, description="also one greedy joint response per item")
    kl: bool = Field(True, description="measure the KL to the base team on the sampled responses")
    bootstrap_replicates: int = Field(5000, ge=100, le=10**6, description="replicates behind the 95 % intervals")


class Arithmetic(Strict):
    """Numeric settings of every stage with a model. They decide bytes, so changing one runs the stages again."""

    torch_threads: int = Field(
        1, ge=1, le=1024, description="threads of PyTorch in each stage; other counts round differently"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="`auto`: bfloat16 autocast over float32 weights where the device gains from it"
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="`auto` takes a GPU where there is one; else `cpu`, `cuda`, `cuda:1`",
    )


class SamplingCompute(Arithmetic):
    """Numeric settings of sampling."""

    sampling_tokens: int = Field(
        16384, ge=64, le=10**9, description="prompt and completion tokens of one sampling batch"
    )


class TrainingCompute(Arithmetic):
    """Numeric settings of training."""

    training_tokens: int = Field(4096, ge=64, le=10**9, description="tokens of one forward and backward pass")


class Compute(SamplingCompute, TrainingCompute):
    """Numeric settings. They decide bytes, so changing one runs the stages again."""


class Runtime(Strict):
    """What decides no byte and never makes a stage run again."""

    score_workers: int = Field(1, ge=1, le=1024, description="processes that call the reward function at once")
    checkpoint_interval: int = Field(10, ge=1, le=10**9, description="optimizer steps between two checkpoints")
    log_seconds: float = Field(
        10.0, ge=0.0, le=10**6, description="least time between two lines of progress in a stage's log"
    )


class Wandb(Strict):
    """Runs on Weights & Biases, one per training and evaluation. The API key comes from WANDB_API_KEY alone."""

    mode: Literal["online", "offline"] = Field(
        "online", description="`offline` records below `dir`, for `wandb sync` to upload"
    )
    project: Annotated[str, StringConstraints(pattern=r"^[^/\\#?%:]{1,128}$")] = Field(
        "comlrl", description="project of the runs"
    )
    entity: str | None = Field(None, description="user or team of the project; null takes the API key's default")
    name: str | None = Field(
        None,
        min_length=1,
        description="first part of each run's name, before its method and seed; null is the experiment",
    )
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=64)]] = Field(
        [], description="tags of every run"
    )
    dir: str | None = Field(
        None, description="folder in which a folder `wandb` holds what W&B writes; null is `results/<experiment>`"
    )

    @model_validator(mode="after")
    def _tags_differ(self) -> "Wandb":
        twice = [tag for tag in self.tags if self.tags.count(tag) > 1]
        if twice:
            raise ValueError(f"tag {twice[0]!r} stands twice")
        return self


class Tracking(Strict):
    """Where numbers are shown beside the training log, which is always written. Decides no byte, like `runtime`."""

    wandb: Wandb | None = Field(None, description="Weights & Biases; null is off, `{}` is on with every default")


# --- experiment ---------------------------------------------------------------------------------------------------


def task_shorthand(value: Any) -> Any:
    """A bare name is a task that ships."""
    return {"name": value} if isinstance(value, str) else value


def items_shorthand(value: Any) -> Any:
    """A bare text is the items' source."""
    return {"source": value} if isinstance(value, str) else value


def team_shorthand(value: Any) -> Any:
    """A bare name is one model for all agents, a list has one model per agent."""
    if isinstance(value, str):
        return {"model": value}
    return {"models": value} if isinstance(value, list) else value


def _seeds_shorthand(value: Any) -> Any:
    return [value] if isinstance(value, int | float | str) else value


class Experiment(Strict):
    """One experiment: a task, a team, seeds, and the methods to compare on them. The unit of a report."""

    description: str = Field("", description="a sentence or two for the report")
    task: Annotated[Task, BeforeValidator(task_shorthand, json_schema_input_type=str | Task)] = Field(
        description="the task; a bare name is a task that ships"
    )
    items: Annotated[Items, BeforeValidator(items_shorthand, json_schema_input_type=str | Items)] = Field(
        Items(), description="task items and their split; a bare text is `items.source`"
    )
    scoring: Scoring = Field(Scoring(), description="the task reward")
    team: Annotated[
        Team, BeforeValidator(team_shorthand, json_schema_input_type=str | list[str | SavedTeam] | Team)
    ] = Field(description="the agents; a bare name is one model for all, a list one model per agent")
    episode: Episode = Field(Episode(), description="turns of the agents on one item")
    sampling: Sampling = Field(Sampling(), description="how completions are drawn, everywhere")
    collections: dict[Name, Collection] = Field(
        {"default": Collection()}, description="joint responses of the base team, by name"
    )
    preferences: dict[Name, Preferences] = Field({"default": Preferences()}, description="preference pairs, by name")
    reward_models: dict[Name, RewardModel] = Field(
        {"default": RewardModel()}, description="joint reward models, by name"
    )
    methods: Annotated[
        dict[Name, Method],
        BeforeValidator(methods_shorthand, json_schema_input_type=list[str] | dict[str, MethodAsWritten]),
    ] = Field(min_length=1, description="the rows of the report, by name; a list of names takes every default")
    seeds: Annotated[list[Seed], BeforeValidator(_seeds_shorthand, json_schema_input_type=Seed | list[Seed])] = Field(
        [0], min_length=1, description="seeds; every method runs once per seed"
    )
    evaluation: Evaluation = Field(Evaluation(), description="evaluation")
    compute: Compute = Field(Compute(), description="numeric settings")
    runtime: Runtime = Field(Runtime(), description="settings that decide no byte")
    tracking: Tracking = Field(Tracking(), description="where numbers are shown while stages run")

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, values: Any) -> Any:
        """Collections inherit the experiment's sampling, key by key; a section left empty is all defaults."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for section in ("collections", "preferences", "reward_models"):
            if isinstance(values.get(section), Mapping):
                values[section] = {name: {} if given is None else given for name, given in values[section].items()}
        common = values.get("sampling") or {}
        collections = values.get("collections") or {"default": {}}
        if isinstance(common, Mapping) and isinstance(collections, Mapping):
            values["collections"] = {name: _with_sampling(given, common) for name, given in collections.items()}
        return values

    @model_validator(mode="after")
    def _references_exist(self) -> "Experiment":
        for name, preferences in self.preferences.items():
            if not _is_idle_default(self, "preferences", name):
                _known(f"preferences.{name}.collection", preferences.collection, self.collections)
        for name, reward_model in self.reward_models.items():
            if not _is_idle_default(self, "reward_models", name):
                _known(f"reward_models.{name}.preferences", reward_model.preferences, self.preferences)
        for name, method in self.methods.items():
            if isinstance(method, Base) != (name == "base"):
                raise WrongKey(f"methods.{name}", "the untrained team, and nothing else, is called base")
            if isinstance(method, Madpo):
                _known(f"methods.{name}.preferences", method.preferences, self.preferences)
            if isinstance(method, RewardedMethod) and method.reward_model is not None:
                _known(f"methods.{name}.reward_model", method.reward_model, self.reward_models)
        if len(set(self.seeds)) != len(self.seeds):
            raise WrongKey("seeds", f"{self.seeds} names a seed twice")
        for section in ("collections", "preferences", "reward_models", "methods"):
            _no_name_twice(section, getattr(self, section))
        return self

    @model_validator(mode="after")
    def _training_explores(self) -> "Experiment":
        """Training compares different answers to an item, and greedy decoding gives the same one each time."""
        for name in dict.fromkeys(preferences.collection for preferences in used_preferences(self).values()):
            fixed = self.collections[name].sampling.greedy_key()
            if fixed is not None:
                raise WrongKey(
                    f"collections.{name}.sampling.{fixed}",
                    "makes all candidates of an item equal, which gives no pair. Set it for this collection alone, for "
                    "example {temperature: 1.0, top_k: null}",
                )
        fixed = self.sampling.greedy_key()
        for name, method in self.methods.items():
            if isinstance(method, Reinforcement) and fixed is not None:
                raise WrongKey(
                    f"sampling.{fixed}",
                    f"makes all generations of methods.{name} equal, so that it learns nothing. Raise it; "
                    "evaluation.greedy measures greedy answers beside sampled ones",
                )
        return self

    @model_validator(mode="after")
    def _methods_fit(self) -> "Experiment":
        for name, method in self.methods.items():
            if isinstance(method, PolicyTraining):
                _fits_team(f"methods.{name}", method, self.team)
            if isinstance(method, Reinforcement):
                _fits_evaluation(f"methods.{name}", method, self)
            if isinstance(method, GroupMethod):
                _is_feasible(f"methods.{name}", method, self.team.agents, self.episode.turns)
        return self


def _fits_team(path: str, method: PolicyTraining, team: Team) -> None:
    """Learning rates and adapters per agent go with the agents and with weights of their own."""
    rates = method.learning_rate
    if isinstance(rates, list) and len(rates) != team.agents:
        raise WrongKey(f"{path}.learning_rate", f"has {len(rates)} entries for {team.agents} agents")
    if team.share_weights and isinstance(rates, list):
        raise WrongKey(f"{path}.learning_rate", "is a list, but with team.share_weights all agents are one model")
    if team.share_weights and method.lora is not None:
        raise WrongKey(f"{path}.lora", "gives each agent an adapter, but with team.share_weights all are one model")


def _fits_evaluation(path: str, method: Reinforcement, experiment: Experiment) -> None:
    """Evaluation while training needs validation items, and a metric that is waited for a turn of the episode."""
    if method.eval_interval and not experiment.items.has_validation():
        raise WrongKey(
            f"{path}.eval_interval",
            "reads validation items, and there are none: set items.validation_fraction (or validation_source)",
        )
    _, turn, metric = (method.keep_best or "").partition("eval/turn_")
    number, _, name = metric.partition("/")
    turns = experiment.episode.turns
    if turn and (not number.isdecimal() or not 1 <= int(number) <= turns or not name):
        raise WrongKey(f"{path}.keep_best", f"{method.keep_best!r} names no turn; turns are 1 to {turns}")


def _is_feasible(path: str, method: GroupMethod, agents: int, turns: int) -> None:
    """Trees of joint responses grow with agents and turns."""
    if method.joint_mode == "cross" and agents == 1:
        raise WrongKey(f"{path}.joint_mode", "cross combines the responses of several agents, but the team has 1")
    combined = agents if method.joint_mode == "cross" else 1
    count = method.generations ** (combined * turns)
    if count > MOST_JOINT_RESPONSES:
        how = f"generations {method.generations}, {method.joint_mode}, {agents} agents, {turns} turns"
        raise WrongKey(
            f"{path}.generations",
            f"gives {count} joint responses per item ({how}), more than {MOST_JOINT_RESPONSES}; lower generations",
        )


def _with_sampling(collection: Any, common: Mapping[str, Any]) -> Any:
    if not isinstance(collection, Mapping):
        return collection
    own = collection.get("sampling") or {}
    return {**collection, "sampling": {**common, **own}} if isinstance(own, Mapping) else collection


def _no_name_twice(section: str, names: Names[str]) -> None:
    """Names that differ in case alone are one folder on some systems."""
    first: dict[str, str] = {}
    for name in names:
        if name.casefold() in first:
            raise WrongKey(section, f"{first[name.casefold()]!r} and {name!r} would share a folder; rename one")
        first[name.casefold()] = name


def _known(path: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise WrongKey(path, f"{name!r} is not defined; defined: {', '.join(known)}{nearest(name, known)}")


# --- project ------------------------------------------------------------------------------------------------------


class Overrides(Strict):
    """Values laid over the files of experiments and models, by name: what `--config` and overlays change."""

    experiments: dict[Name, dict[str, Any]] = Field({}, description="by experiment: keys laid over its file")
    models: dict[Name, dict[str, Any]] = Field({}, description="by model: keys laid over its file")


class ProjectConfig(Strict):
    """`config/config.yaml`: which experiments to run."""

    experiments: Annotated[
        list[Name],
        BeforeValidator(lambda v: [v] if isinstance(v, str) else v, json_schema_input_type=str | list[str]),
    ] = Field(min_length=1, description="names of files in `config/experiments/`")
    override: Overrides = Field(Overrides(), description="values laid over those files")

    @model_validator(mode="after")
    def _names_are_free(self) -> "ProjectConfig":
        for name in self.experiments:
            if name.casefold() in ("models", "readme.md"):
                raise WrongKey(
                    "experiments",
                    f"an experiment cannot be called {name!r}: results/{name} holds something else; rename it",
                )
            if self.experiments.count(name) > 1:
                raise WrongKey("experiments", f"{name!r} stands twice")
        _no_name_twice("experiments", self.experiments)
        return self


def models_of(experiment: Experiment) -> list[str]:
    """Names of all models that an experiment uses."""
    backbones = [r.model for r in used_reward_models(experiment).values() if r.model]
    critics = [m.critic_model for m in experiment.methods.values() if isinstance(m, ActorCritic) and m.critic_model]
    return list(dict.fromkeys([*experiment.team.model_names(), *backbones, *critics]))


def reward_model_of(method: Any) -> str | None:
    """The reward model that a method maximises, or None where it has none."""
    return method.reward_model if isinstance(method, RewardedMethod) else None


def used_reward_models(experiment: Experiment) -> dict[str, RewardModel]:
    """The reward models that some method names."""
    named = [reward_model_of(method) for method in experiment.methods.values()]
    return {name: model for name, model in experiment.reward_models.items() if name in named}


def critic_models_of(method: Any, team: Team) -> list[str]:
    """Models that the separate critics of a method start from: one per agent, or one for the team."""
    if not isinstance(method, ActorCritic) or method.critic == "shared":
        return []
    names = [method.critic_model] * team.agents if method.critic_model else team.model_names()
    return names[:1] if method.algorithm == "maac" else names


def used_preferences(experiment: Experiment) -> dict[str, Preferences]:
    """The preferences that some method, or the reward model of one, is trained on."""
    named = {m.preferences for m in experiment.methods.values() if isinstance(m, Madpo)}
    named |= {model.preferences for model in used_reward_models(experiment).values()}
    return {name: given for name, given in experiment.preferences.items() if name in named}


def unused_sections(experiment: Experiment) -> list[str]:
    """What was written and no method uses, as `collections.wide`."""
    return [
        f"{section}.{name}"
        for section, used in _used(experiment).items()
        for name in getattr(experiment, section)
        if name not in used and not _is_idle_default(experiment, section, name)
    ]


def _used(experiment: Experiment) -> dict[str, set[str]]:
    preferences = used_preferences(experiment)
    return {
        "collections": {given.collection for given in preferences.values()},
        "preferences": set(preferences),
        "reward_models": set(used_reward_models(experiment)),
    }


def _is_idle_default(experiment: Experiment, section: str, name: str) -> bool:
    """Whether an entry is the one that stands there if nobody writes any, and no method uses it."""
    defaults = {
        "collections": Collection(sampling=experiment.sampling),
        "preferences": Preferences(),
        "reward_models": RewardModel(),
    }
    is_default = name == "default" and getattr(experiment, section)[name] == defaults[section]
    return is_default and name not in _used(experiment)[section]
