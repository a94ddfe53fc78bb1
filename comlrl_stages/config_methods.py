"""The methods of an experiment: what trains a team, and every key of it.

A class whose name ends in `Training` holds what decides the weights; stages read these keys. The class of the method
itself adds what names inputs or decides no byte.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from comlrl_stages.config_values import Beta, Name, Rate, Share, Strict, WrongKey
from comlrl_stages.errors import nearest

GroupAlgorithm = Literal["magrpo", "marloo", "maremax", "mareinforce"]
ActorCriticAlgorithm = Literal["iac", "maac"]
Backend = Literal["magrpo", "marloo", "maremax", "mareinforce", "iac", "maac"]
#: What stands under `algorithm`; `marlhf` is a short form.
ALGORITHMS = ("base", "madpo", *get_args(Backend), "marlhf")


class Base(Strict):
    """The team as it is, untrained: what every method is compared with."""

    algorithm: Literal["base"] = Field("base", description="`base`")


class Optimizer(Strict):
    """AdamW and its schedule; weights and moments are float32."""

    learning_rate: Rate = Field(1e-5, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0.0, description="on weight matrices, never on norms and biases")
    adam_betas: tuple[Beta, Beta] = Field((0.9, 0.99), description="AdamW's betas")
    warmup_fraction: Share = Field(0.1, description="share of the steps that warm up linearly")
    decay: Literal["constant", "linear", "cosine"] = Field("linear", description="after the warm-up")
    max_gradient_norm: float | None = Field(1.0, gt=0.0, description="gradient clipping per agent; null is off")
    epochs: int = Field(1, ge=1, le=10**5, description="passes over the training data")


class Lora(Strict):
    """Low-rank adapters: only they are trained, and the policy is the adapters with the digest of their base."""

    rank: int = Field(8, ge=1, le=10**5, description="rank of the adapters")
    alpha: float = Field(16.0, gt=0.0, description="the adapters' product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the adapters' input while training")
    target_modules: Literal["all-linear"] | list[Annotated[str, StringConstraints(min_length=1)]] = Field(
        "all-linear", description="modules with adapters: `all-linear`, or a list of names such as `[q_proj, v_proj]`"
    )

    @model_validator(mode="after")
    def _has_targets(self) -> "Lora":
        if not self.target_modules:
            raise WrongKey("target_modules", "is an empty list, so nothing would be trained; name a module")
        return self


class PolicyTraining(Optimizer):
    """What all training of agents has in common."""

    learning_rate: Rate | list[Rate] = Field(1e-5, description="peak learning rate: one for all agents, or a list")
    lora: Lora | None = Field(None, description="train low-rank adapters alone; null trains every weight")

    def learning_rates(self, agents: int) -> list[float]:
        """The peak learning rate of each agent, in actor order."""
        rate = self.learning_rate
        return list(rate) if isinstance(rate, list) else [rate] * agents


# --- preferences --------------------------------------------------------------------------------------------------


class MadpoTraining(PolicyTraining):
    """The settings of MADPO that decide its weights."""

    loss: Literal["sigmoid", "ipo", "simpo"] = Field("sigmoid", description="loss on the joint margin")
    beta: float = Field(0.1, gt=0.0, description="inverse temperature of the preference model")
    gamma: float = Field(0.0, ge=0.0, description="only `simpo`: target margin")
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5, description="only `sigmoid`: share of labels taken as flipped")
    reference: Literal["initial", "none"] = Field("initial", description="reference policy of the margin")
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


# --- rewards ------------------------------------------------------------------------------------------------------


class Reinforcement(PolicyTraining):
    """What all reinforcement learning has in common.

    One step samples joint responses for `items_per_step` items and makes one optimizer step per minibatch of them.
    """

    generations: int = Field(8, ge=1, le=10**4, description="joint responses per item and step")
    items_per_step: int = Field(8, ge=1, le=10**6, description="items whose responses are sampled at once")
    epochs: int = Field(4, ge=1, le=10**5, description="passes over the training items")
    train_batch_size: int | None = Field(
        None, ge=1, le=10**9, description="responses of one agent per optimizer step; null takes all that were sampled"
    )
    buffer_epochs: int = Field(
        1, ge=1, le=10**5, description="passes over the sampled responses before new ones are drawn"
    )
    importance_ratio: bool = Field(
        False, description="weigh each token by the ratio of the policy to the one that sampled it"
    )
    clip: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="keep that ratio within 1 ± clip; null is off, a number needs importance_ratio",
    )
    loss_reduction: Literal["sequence_sum", "token_mean"] = Field(
        "sequence_sum", description="sum log-probs over a response, or average over the tokens of the step"
    )
    kl_coefficient: float = Field(
        0.05, ge=0.0, description="weight of the KL to the untrained team that is taken off what is maximised"
    )
    eval_interval: int = Field(
        0,
        ge=0,
        le=10**9,
        description="joint responses between two evaluations on validation items while training; 0 is off",
    )
    eval_num_samples: int = Field(4, ge=1, le=10**6, description="validation items of such an evaluation")
    eval_generations: int = Field(4, ge=1, le=10**4, description="joint responses per item of such an evaluation")
    keep_best: Annotated[str, StringConstraints(pattern=r"^eval/[^/\s]+(/[^/\s]+)*$")] | None = Field(
        None,
        description="the policy is the one with the highest value of this metric of such an evaluation, for example "
        "`eval/turn_1/expected_return`; null keeps the last",
    )
    patience: int | None = Field(
        None, ge=1, le=10**6, description="stop after so many evaluations in a row without a new best; null is off"
    )
    schedule_steps: int | None = Field(
        None, ge=1, le=10**9, description="steps that warm-up and decay span; null takes those of the run"
    )

    @model_validator(mode="after")
    def _agree(self) -> "Reinforcement":
        if self.clip is not None and not self.importance_ratio:
            raise WrongKey("clip", "bounds the importance ratio, which is off; set importance_ratio to true")
        for key in ("keep_best", "patience"):
            if getattr(self, key) is not None and not self.eval_interval:
                raise WrongKey(key, "needs evaluations while training; set eval_interval to a number of env steps")
        if self.patience is not None and self.keep_best is None:
            raise WrongKey("patience", "needs a metric to wait for; set keep_best")
        return self


class RewardedMethod(Reinforcement):
    """What names the reward, and what decides no byte."""

    reward_model: Name | None = Field(
        None, description="the fitted reward model that is maximised; null is the task's own reward"
    )
    keep_checkpoints: bool = Field(
        False, description="keep the last checkpoint of a finished run, so that more epochs go on from there"
    )

    @model_validator(mode="after")
    def _schedule_is_stated(self) -> "RewardedMethod":
        scheduled = self.decay != "constant" or self.warmup_fraction > 0.0
        if self.keep_checkpoints and scheduled and self.schedule_steps is None:
            raise WrongKey(
                "keep_checkpoints",
                "a run can be extended only if its learning rate does not depend on its length: set schedule_steps, "
                "or decay to constant and warmup_fraction to 0",
            )
        return self


class GroupTraining(Reinforcement):
    """The settings of group methods that decide their weights."""

    algorithm: GroupAlgorithm = Field(
        "magrpo",
        description="what a return is compared with: `magrpo` the mean of its group, `marloo` the mean of the others, "
        "`maremax` the best, `mareinforce` nothing",
    )
    normalise_advantages: bool = Field(False, description="divide advantages by their standard deviation per group")
    joint_mode: Literal["aligned", "cross"] = Field(
        "aligned",
        description="`aligned`: completions of the same number form a joint response; `cross`: all combinations do",
    )
    cross_reduction: Literal["mean", "sum"] | None = Field(
        None, description="only `cross`: a completion's return over its combinations; null is `mean`"
    )

    @model_validator(mode="before")
    @classmethod
    def _cross_has_a_reduction(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("joint_mode") == "cross":
            return {**values, "cross_reduction": values.get("cross_reduction") or "mean"}
        return values

    @model_validator(mode="after")
    def _groups_agree(self) -> "GroupTraining":
        if self.joint_mode != "cross" and self.cross_reduction is not None:
            raise WrongKey("cross_reduction", "belongs to joint_mode cross, the joint_mode is aligned")
        if self.generations < 2:
            _refuse_single(self)
        return self


def _refuse_single(method: GroupTraining) -> None:
    if method.algorithm != "mareinforce":
        raise WrongKey("generations", f"is 1, but {method.algorithm} compares responses of one item; give 2 or more")
    if method.normalise_advantages:
        raise WrongKey("normalise_advantages", "needs generations of 2 or more, found 1")
    if method.joint_mode == "cross":
        raise WrongKey("joint_mode", "cross needs generations of 2 or more, found 1: there is one combination")


class GroupMethod(GroupTraining, RewardedMethod):
    """Policy gradient on groups of joint responses to one item, compared with each other; no critic."""


class ActorCriticTraining(Reinforcement):
    """The settings of actor-critic methods that decide their weights."""

    algorithm: ActorCriticAlgorithm = Field(
        "iac", description="`iac`: a critic per agent, which sees what the agent sees; `maac`: one for the team"
    )
    generations: int = Field(8, ge=1, le=10**4, description="independent trajectories per item and step")
    critic: Literal["separate", "shared"] = Field(
        "separate", description="a model of its own, or, only `iac`, a value head on the agent's model"
    )
    critic_type: Literal["v", "q"] = Field(
        "v", description="`v`: the value before the response, from the prompt; `q`: after it, from prompt and response"
    )
    critic_learning_rate: Rate | None = Field(
        None, description="only `separate`: peak learning rate of critics; null takes that of the agents"
    )
    value_coefficient: float = Field(0.6, gt=0.0, description="weight of the value loss")
    value_clip: float | None = Field(
        0.2, gt=0.0, description="only `shared`: the value loss counts changes of a value beyond this; null is off"
    )
    value_hidden: int | None = Field(
        None, ge=1, le=10**5, description="hidden width of the value head; null is a linear head"
    )
    normalise_advantages: bool = Field(False, description="centre and scale the advantages of a step")
    advantage_clip: float | None = Field(None, gt=0.0, description="keep advantages within ± this; null is off")

    @model_validator(mode="before")
    @classmethod
    def _separate_critics_are_not_clipped(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or (values.get("critic") or "separate") != "separate":
            return values
        if values.get("value_clip") is not None:
            raise WrongKey("value_clip", "belongs to critic shared, the critic is separate")
        return {**values, "value_clip": None}

    @model_validator(mode="after")
    def _critics_agree(self) -> "ActorCriticTraining":
        if self.critic == "shared" and self.algorithm == "maac":
            raise WrongKey("critic", "is shared, but the central critic of maac is no agent's; set it to separate")
        if self.critic == "shared" and self.critic_learning_rate is not None:
            raise WrongKey("critic_learning_rate", "belongs to critic separate; a shared head learns with its agent")
        if self.algorithm == "maac" and isinstance(self.learning_rate, list) and self.critic_learning_rate is None:
            raise WrongKey("critic_learning_rate", "is needed where learning_rate is a list: maac has one critic")
        return self

    def critic_learning_rates(self, agents: int) -> list[float]:
        """The peak learning rate of each separate critic: one per agent, or one for `maac`."""
        rates = [self.critic_learning_rate] * agents if self.critic_learning_rate else self.learning_rates(agents)
        return rates[:1] if self.algorithm == "maac" else rates


class ActorCritic(ActorCriticTraining, RewardedMethod):
    """Actor-critic: TD(0) on trajectories, with critics that are trained beside the agents."""

    critic_model: Name | None = Field(
        None,
        description="only `separate`: model critics start from (a file of `config/models/`); null takes the agent's "
        "own, for `maac` the first agent's",
    )
    restore_critics: bool = Field(
        True,
        description="only `separate`: start from the critics saved beside the team, where `team.model` is such a "
        "folder and no critic_model is named",
    )

    @model_validator(mode="after")
    def _critic_model_is_used(self) -> "ActorCritic":
        if self.critic == "shared" and self.critic_model is not None:
            raise WrongKey("critic_model", "belongs to critic separate; a shared critic is a head on the agent's model")
        if self.critic == "shared" and not self.restore_critics:
            raise WrongKey("restore_critics", "belongs to critic separate; a shared head comes with its agent's model")
        return self


Method = Annotated[Base | Madpo | GroupMethod | ActorCritic, Field(discriminator="algorithm")]


# --- short forms --------------------------------------------------------------------------------------------------


class Marlhf(Strict):
    """Multi-agent RLHF: the algorithm `backend` on a fitted reward model. A short form, with any key of the backend."""

    algorithm: Literal["marlhf"] = Field("marlhf", description="`marlhf`")
    backend: Backend = Field("magrpo", description="algorithm that maximises the reward model's score")
    reward_model: Name = Field("default", description="the fitted reward model that is maximised")


class GroupMarlhf(GroupMethod):
    """The short form `marlhf` with a group method, for editors."""

    algorithm: Literal["marlhf"] = "marlhf"
    backend: GroupAlgorithm = "magrpo"


class ActorCriticMarlhf(ActorCritic):
    """The short form `marlhf` with an actor-critic method, for editors."""

    algorithm: Literal["marlhf"] = "marlhf"
    backend: ActorCriticAlgorithm


MethodAsWritten = Base | Madpo | GroupMethod | ActorCritic | GroupMarlhf | ActorCriticMarlhf | None


def methods_shorthand(value: Any) -> Any:
    """A list of names, or settings by name; a method named like an algorithm uses it; `marlhf` is written out."""
    value = _named(value)
    if not isinstance(value, Mapping):
        return value
    return {name: _written_out(str(name), {} if method is None else method) for name, method in value.items()}


def _named(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"a list of methods holds names, found {name!r}; give settings as `name: {{...}}`")
        if value.count(name) > 1:
            raise ValueError(f"method {name!r} stands twice")
    return {name: {} for name in value}


def _written_out(name: str, method: Any) -> Any:
    if not isinstance(method, Mapping):
        return method
    algorithm = method.get("algorithm") or name
    if "algorithm" not in method and name not in ALGORITHMS:
        raise ValueError(f"method {name!r} needs an algorithm, one of {', '.join(ALGORITHMS)}")
    if algorithm not in ALGORITHMS:
        close = nearest(str(algorithm), ALGORITHMS)
        raise WrongKey(f"{name}.algorithm", f"{algorithm!r} is none of {', '.join(ALGORITHMS)}{close}")
    if algorithm != "marlhf":
        return {**method, "algorithm": algorithm}
    backend = method.get("backend") or "magrpo"
    if backend not in get_args(Backend):
        known = ", ".join(get_args(Backend))
        raise WrongKey(f"{name}.backend", f"{backend!r} is none of {known}{nearest(str(backend), get_args(Backend))}")
    keys = {key: given for key, given in method.items() if key not in ("algorithm", "backend", "reward_model")}
    return {**keys, "algorithm": backend, "reward_model": method.get("reward_model") or "default"}


# --- what is odd, but allowed -------------------------------------------------------------------------------------


def method_warnings(method: Any) -> Iterator[str]:
    """What a method's keys say that may not be meant, as `key: text`."""
    if not isinstance(method, Reinforcement):
        return
    whole = method.items_per_step * method.generations
    is_split = method.train_batch_size is not None and method.train_batch_size < whole
    off_policy = {"buffer_epochs": method.buffer_epochs > 1, "train_batch_size": is_split}
    for key in (key for key, is_so in off_policy.items() if is_so and not method.importance_ratio):
        yield f"{key}: later updates of a step train on responses of an older policy; consider importance_ratio"
    if isinstance(method, GroupMethod) and method.normalise_advantages and method.algorithm != "magrpo":
        yield (
            "normalise_advantages: with it magrpo, marloo, maremax and mareinforce are all the same; "
            f"without it {method.algorithm} is a method of its own"
        )
