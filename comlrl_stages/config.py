"""What a user writes: projects, experiments and models, as strict pydantic models.

These classes are the only source of defaults, of `config/schema.json` and of the tables in `config/README.md`. The
stages never see them: each stage gets its own settings (settings.py), the exact part that decides its bytes.
"""

import re
from collections.abc import Collection as Names
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from comlrl_stages.errors import nearest

#: A file name has at most 255 bytes, and the longest ending that a name gets has some sixty.
LONGEST_NAME = 100
#: Endings of what lies beside an artifact: a model `a.log` would be the log of the model `a`. Windows drops a last dot.
TAKEN_ENDINGS = (".", ".partial", ".lock", ".tmp", ".log", ".json", ".jsonl", ".parquet")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}


def _file_name(text: str) -> str:
    """Names of experiments, models, methods and so on become files and folders, on any system."""
    stem = text.partition(".")[0].lower()
    rules = (
        (
            "holds only letters, digits, `_`, `.` and `-`, and begins with a letter, a digit or `_`",
            re.fullmatch(r"\w[\w.\-]*", text),
        ),
        (f"has at most {LONGEST_NAME} bytes", len(text.encode("utf-8", "replace")) <= LONGEST_NAME),
        (f"does not end in {', '.join(TAKEN_ENDINGS)}", not text.endswith(TAKEN_ENDINGS)),
        ("is no device of Windows (con, nul, com1, ...)", stem not in _DEVICES),
    )
    for rule, holds in rules:
        if not holds:
            raise ValueError(f"{text!r:.120} cannot be a name: a name {rule}")
    return text


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError(f"a seed is a whole number (found {value})")
    return value


Name = Annotated[
    str,
    AfterValidator(_file_name),
    WithJsonSchema({"type": "string", "pattern": r"^\w[\w.\-]*$", "maxLength": LONGEST_NAME}),
]
Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_whole)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Strict(BaseModel):
    """A section of the configuration: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: Any) -> Any:
        """A key that is left empty (null in YAML) takes its default, where null is no value of its own."""
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None or key not in fields or type(None) in get_args(fields[key].annotation)
        }

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        """Only switches are true or false; pydantic would read true as 1."""
        for key, field in cls.model_fields.items() if isinstance(values, Mapping) else ():
            given = values.get(key)
            is_switch = bool in (field.annotation, *get_args(field.annotation))
            if not is_switch and any(isinstance(one, bool) for one in _as_list(given)):
                raise ValueError(f"{key} cannot be true or false (found {given})")
        return values


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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

    name: Name | None = Field(None, description="a task that ships: `length_ratio`")
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


class Team(Strict):
    """The agents: their models and how a prompt reaches them. A list has one entry per agent, in actor order."""

    model: Name | None = Field(None, description="one model for all agents (a file of `config/models/`)")
    models: list[Name] | None = Field(None, min_length=1, description="one model per agent")
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
        return self

    def model_names(self) -> list[str]:
        """Names of the agents' models, in actor order."""
        return list(self.models) if self.models else [self.model] * self.agents

    def per_agent(self, key: str) -> list[Any]:
        """The value of `key` for each agent, in actor order."""
        value = getattr(self, key)
        return list(value) if isinstance(value, list) else [value] * self.agents


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


class Optimizer(Strict):
    """AdamW and its schedule; weights and moments are float32."""

    learning_rate: float = Field(1e-5, gt=0.0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0.0, description="on weight matrices, never on norms and biases")
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.99), description="AdamW's betas")
    warmup_fraction: Share = Field(0.1, description="share of the steps that warm up linearly")
    decay: Literal["constant", "linear", "cosine"] = Field("linear", description="after the warm-up")
    max_gradient_norm: float | None = Field(1.0, gt=0.0, description="gradient clipping per agent; null is off")
    epochs: int = Field(1, ge=1, le=10**5, description="passes over the training data")


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


# --- methods ------------------------------------------------------------------------------------------------------


class Base(Strict):
    """The team as it is, untrained: what every method is compared with."""

    algorithm: Literal["base"] = Field("base", description="`base`")


class MadpoTraining(Optimizer):
    """The settings of MADPO that decide its weights."""

    loss: Literal["sigmoid", "ipo", "simpo"] = Field("sigmoid", description="loss on the joint margin")
    beta: float = Field(0.1, gt=0.0, description="inverse temperature of the preference model")
    gamma: float = Field(0.0, ge=0.0, description="only `simpo`: target margin")
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5, description="only `sigmoid`: share of labels taken as flipped")
    reference: Literal["initial", "none"] = Field("initial", description="reference policy of the margin")
    learning_rate: float = Field(1e-5, gt=0.0, description="peak learning rate")
    epochs: int = Field(1, ge=1, le=10**5, description="passes over the training pairs")
    batch_size: int = Field(16, ge=1, le=10**6, description="pairs per optimizer step")

    @model_validator(mode="after")
    def _agree(self) -> "MadpoTraining":
        if self.loss != "simpo" and self.gamma:
            raise ValueError(f"gamma belongs to the loss simpo, the loss is {self.loss}")
        if self.loss != "sigmoid" and self.label_smoothing:
            raise ValueError(f"label_smoothing belongs to the loss sigmoid, the loss is {self.loss}")
        if self.loss == "simpo" and self.reference != "none":
            raise ValueError("the loss simpo has no reference: set reference to none")
        return self


class Madpo(MadpoTraining):
    """Multi-agent direct preference optimization on stored pairs."""

    algorithm: Literal["madpo"] = Field("madpo", description="`madpo`")
    preferences: Name = Field("default", description="the preferences it trains on")


class PolicyGradient(Optimizer):
    """The settings of policy-gradient training that decide its weights."""

    generations: int = Field(8, ge=2, le=10**4, description="joint responses per item and step")
    items_per_step: int = Field(8, ge=1, le=10**6, description="items per optimizer step")
    learning_rate: float = Field(1e-5, gt=0.0, description="peak learning rate")
    epochs: int = Field(4, ge=1, le=10**5, description="passes over the training items")
    normalise_advantages: bool = Field(False, description="divide advantages by their standard deviation per item")
    loss_reduction: Literal["sequence_sum", "token_mean"] = Field(
        "sequence_sum", description="sum log-probs over a response, or average over the tokens of the step"
    )
    kl_coefficient: float = Field(0.05, ge=0.0, description="weight of the reference KL that is taken off the return")


class Marlhf(PolicyGradient):
    """Multi-agent RLHF: reinforcement learning on a fitted joint reward model."""

    algorithm: Literal["marlhf"] = Field("marlhf", description="`marlhf`")
    backend: Literal["magrpo"] = Field("magrpo", description="algorithm that optimizes the reward model's score")
    reward_model: Name = Field("default", description="the reward model it maximises")


Method = Annotated[Base | Madpo | Marlhf, Field(discriminator="algorithm")]
ALGORITHMS = ("base", "madpo", "marlhf")


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


def _methods_shorthand(value: Any) -> Any:
    """A list of names, or settings by name; a method named like an algorithm uses it."""
    if isinstance(value, list):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"a list of methods holds names, found {name!r}; give settings as `name: {{...}}`")
            if value.count(name) > 1:
                raise ValueError(f"method {name!r} stands twice")
        value = {name: {} for name in value}
    if not isinstance(value, Mapping):
        return value
    complete = {}
    for name, method in value.items():
        method = {} if method is None else method
        if isinstance(method, Mapping) and "algorithm" not in method:
            if name not in ALGORITHMS:
                raise ValueError(f"method {name!r} needs an algorithm, one of {', '.join(ALGORITHMS)}")
            method = {"algorithm": name, **method}
        complete[name] = method
    return complete


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
    team: Annotated[Team, BeforeValidator(team_shorthand, json_schema_input_type=str | list[str] | Team)] = Field(
        description="the agents; a bare name is one model for all, a list one model per agent"
    )
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
        BeforeValidator(_methods_shorthand, json_schema_input_type=list[str] | dict[str, Base | Madpo | Marlhf | None]),
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
                raise ValueError(f"methods.{name}: the untrained team, and nothing else, is called base")
            if isinstance(method, Madpo):
                _known(f"methods.{name}.preferences", method.preferences, self.preferences)
            if isinstance(method, Marlhf):
                _known(f"methods.{name}.reward_model", method.reward_model, self.reward_models)
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} names a seed twice")
        for section in ("collections", "preferences", "reward_models", "methods"):
            _no_name_twice(section, getattr(self, section))
        return self

    @model_validator(mode="after")
    def _training_explores(self) -> "Experiment":
        """Training compares different answers to an item, and greedy decoding gives the same one each time."""
        for name in dict.fromkeys(preferences.collection for preferences in used_preferences(self).values()):
            key = self.collections[name].sampling.greedy_key()
            if key is not None:
                raise ValueError(
                    f"collections.{name}.sampling.{key}: makes all candidates of an item equal, which gives no pair. "
                    "Set it for this collection alone, for example {temperature: 1.0, top_k: null}"
                )
        for name, method in self.methods.items():
            if isinstance(method, Marlhf) and self.sampling.greedy_key() is not None:
                raise ValueError(
                    f"sampling.{self.sampling.greedy_key()}: makes all generations of methods.{name} equal, so that it "
                    "learns nothing. Raise it; evaluation.greedy measures greedy answers beside sampled ones"
                )
        return self


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
            raise ValueError(f"{section}: {first[name.casefold()]!r} and {name!r} would share a folder; rename one")
        first[name.casefold()] = name


def _known(path: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{path}: {name!r} is not defined; defined: {', '.join(known)}{nearest(name, known)}")


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
                raise ValueError(
                    f"an experiment cannot be called {name!r}: results/{name} holds something else; rename it"
                )
            if self.experiments.count(name) > 1:
                raise ValueError(f"experiments: {name!r} stands twice")
        _no_name_twice("experiments", self.experiments)
        return self


def models_of(experiment: Experiment) -> list[str]:
    """Names of all models that an experiment uses."""
    backbones = [r.model for r in used_reward_models(experiment).values() if r.model]
    return list(dict.fromkeys([*experiment.team.model_names(), *backbones]))


def used_reward_models(experiment: Experiment) -> dict[str, RewardModel]:
    """The reward models that some method names."""
    named = [m.reward_model for m in experiment.methods.values() if isinstance(m, Marlhf)]
    return {name: model for name, model in experiment.reward_models.items() if name in named}


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
