"""Numbers of this project beside those of the comlrl package (1.4.3): where they agree, where they differ, and why.

    python -m venv peer && peer/bin/pip install torch==2.13.0 comlrl==1.4.3
    python benchmarks/peer_comparison.py --peer-python peer/bin/python

Writes benchmarks/peer_comparison.md. Both sides get the same cases and the same two small untrained models. It fails
where numbers that should agree do not, and where a known difference is no longer there. comlrl may also stand in this
environment (`pip install .[peer]`); then --peer-python is not needed. `peer_values.py` computes its side.
"""

import importlib.metadata
import itertools
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from comlrl_stages.config import Episode
from comlrl_stages.learning import madpo
from comlrl_stages.learning.actor_critic import td_advantages, td_targets
from comlrl_stages.learning.advantages import advantages
from comlrl_stages.learning.kl import k3
from comlrl_stages.learning.policy_gradient import policy_gradient_loss, row_weights
from comlrl_stages.learning.returns import Node, completion_returns, env_steps, joint_returns, terminates
from comlrl_stages.seeding import stream
from comlrl_stages.teams.compute import Compute
from comlrl_stages.teams.loading import LoadedModel, facts_of, load_model, save_model
from comlrl_stages.teams.log_probs import completion_log_probs
from comlrl_stages.teams.prompts import PromptFormat, encode_prompt
from comlrl_stages.teams.sampling import Request, SamplingParameters, sample
from comlrl_stages.teams.tiny import EOS, initial_model, tiny_tokenizer

HERE = Path(__file__).parent
MODES = ("magrpo", "marloo", "maremax", "mareinforce")
TOLERANCE = 1e-4
PROMPT, COMPLETIONS = "Write one sentence about the sea.", ("The sea is calm.", "Blue", "A boat goes out at dawn.")
CASE = {
    "returns": [1.0, 2.0, 4.0, 9.0],
    "loss_returns": [1.0, -0.5, 2.0],
    "td_rewards": [0.2, 1.0],
    "td_values": [0.1, 0.5],
    "td_discount": 0.9,
    "margins": [0.3, -0.1],
    "beta": 0.1,
    "temperature": 0.6,
    "new_tokens": 4,
    "prompt_with_eos": f"one{EOS}two",
}

BY_VALUE = "the peer ends a response at the first pad by value; where pad is EOS the EOS is neither kept nor trained"
LAST_TOKEN = "the peer's decentralised loss never scores the last token of a response, which is the EOS"
ALL_EQUAL = "the peer normalises by default, which makes the four methods one; here it is off unless asked for"
THRESHOLD = (
    "the peer ends an episode whose mean reward exceeds -0.2 by default; here nothing ends early unless asked for"
)
AGREE = {
    **{f"advantages {mode}": f"{mode} advantages of returns 1, 2, 4, 9" for mode in MODES},
    "normalised advantages": "normalised advantages of the same returns",
    "aligned tree": "two turns, aligned: returns of the root and its two children",
    "aligned env_step": "env_step of that tree",
    "cross sum": "two turns, cross, `cross_reduction: sum`: root returns of agent 0 and 1",
    "cross env_step": "env_step of that tree",
    "iac targets": "IAC: TD targets of rewards 0.2, 1.0, values 0.1, 0.5, discount 0.9",
    "iac advantages": "IAC: their advantages",
    "maac targets": "MAAC: TD targets of the same",
    "maac advantages": "MAAC: their advantages",
    "k3": "k3 to another model, summed over each of three responses",
    "log-probability sums": "centralised: log-probability of each response, EOS included",
    **{f"centralised loss {mode}": f"centralised: {mode} loss of returns 1, -0.5, 2" for mode in MODES},
    "madpo": "MADPO without reference: loss of each agent, margins 0.3, -0.1, beta 0.1",
}
DIFFER = {
    **{f"trained advantages {mode}": (f"{mode} advantages in the loss, by default", ALL_EQUAL) for mode in MODES},
    "discounted tree": (
        "aligned root returns, discount 0.5",
        "the peer accepts `discount`, but its trees do not use it",
    ),
    "cross default": ("cross root returns, by default", "the peer sums over the other agents' responses; here a mean"),
    "env_step by default": ("env_step of the aligned tree, rewards 0 and up, by default", THRESHOLD),
    "iac turns by default": ("IAC: turns of a trajectory of two, by default", THRESHOLD),
    "maac turns by default": ("MAAC: turns of a trajectory of two, by default", THRESHOLD),
    "kept tokens": ("tokens scored of three responses that end with EOS, pad is EOS", BY_VALUE),
    "prompt with EOS": (
        "tokens of a response of 4 to a prompt that holds EOS, pad is EOS: counted as response, left as its text",
        "the peer looks for the first pad in the prompt, so the rest of the prompt becomes part of the response",
    ),
    "decentralised loss": ("mareinforce loss of the same three responses", LAST_TOKEN),
    "one-token gradient": ("largest gradient where each response is one token", LAST_TOKEN),
    "log-probability sums at the sampling temperature": (
        "log-probability of each response, sampled at temperature 0.6",
        "the peer scores at temperature 1 what it sampled at another",
    ),
}


@dataclass(frozen=True)
class Example:
    """The model and the reference, and a prompt and responses in their ids."""

    model: LoadedModel
    reference: LoadedModel
    prompt_ids: list[int]
    completion_ids: list[list[int]]

    def log_probs(self, loaded: LoadedModel, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the responses' tokens and the mask, (responses, tokens)."""
        prompts = [self.prompt_ids] * len(self.completion_ids)
        scores = completion_log_probs(loaded.model, loaded.facts, prompts, self.completion_ids, temperature=temperature)
        return scores.log_probs, scores.mask

    def sums(self, temperature: float = 1.0) -> list[float]:
        log_probs, mask = self.log_probs(self.model, temperature)
        return log_probs.where(mask, 0.0).sum(1).tolist()

    def scored_tokens_where_pad_is_eos(self) -> list[float]:
        facts = self.model.facts
        loaded = replace(self.model, facts=replace(facts, pad_id=facts.eos_ids[0]))
        return self.log_probs(loaded)[1].sum(1).double().tolist()

    def loss(self, mode: str, longest: int | None = None) -> torch.Tensor:
        """Loss of the responses, or of their first `longest` tokens."""
        log_probs, mask = (part[:, :longest] for part in self.log_probs(self.model))
        group = advantages(torch.tensor([CASE["loss_returns"]]), mode)
        weights = row_weights(group.group_sizes.expand(len(mask)), mask.sum(1), "sequence_sum")
        return policy_gradient_loss(log_probs, mask, group.values[0], weights).loss


def example(folder: Path) -> Example:
    """Write two untrained models into `folder` and load them."""
    tokenizer = tiny_tokenizer(0)
    for seed, name in enumerate(("model", "reference")):
        model = initial_model(tokenizer, seed)
        save_model(LoadedModel(model, tokenizer, facts_of(model, tokenizer)), folder / name)
    loaded = load_model(folder / "model")
    completions = [loaded.tokenizer(text + EOS, add_special_tokens=False)["input_ids"] for text in COMPLETIONS]
    prompt = encode_prompt(loaded.tokenizer, loaded.facts, PROMPT, PromptFormat(kind="plain"))
    return Example(loaded, load_model(folder / "reference"), prompt, completions)


def our_values(found: Example) -> dict[str, list[float]]:
    """Every value of ours by name."""
    returns = torch.tensor([CASE["returns"]])
    by_mode = {mode: advantages(returns, mode).values[0].tolist() for mode in MODES}
    (own, mask), (reference, _) = found.log_probs(found.model), found.log_probs(found.reference)
    values = {f"advantages {mode}": by_mode[mode] for mode in MODES}
    values |= {f"trained advantages {mode}": by_mode[mode] for mode in MODES}
    values |= {f"centralised loss {mode}": [found.loss(mode).item()] for mode in MODES}
    values |= _tree_values() | _actor_critic_values()
    values |= {
        "normalised advantages": advantages(returns, "magrpo", normalise=True).values[0].tolist(),
        "log-probability sums": found.sums(),
        "log-probability sums at the sampling temperature": found.sums(CASE["temperature"]),
        "k3": k3(own, reference, mask).values.sum(1).tolist(),
        "madpo": madpo.losses(torch.tensor(CASE["margins"])[:, None], beta=CASE["beta"])[:, 0].tolist(),
        "kept tokens": found.scored_tokens_where_pad_is_eos(),
        "prompt with EOS": _answer_to_a_prompt_with_eos(found.model),
        "decentralised loss": [found.loss("mareinforce").item()],
        "one-token gradient": [_one_token_gradient(found)],
    }
    return values


def _tree(pairing: str) -> Node:
    """Two turns of two agents with two samples; the reward is 10 * node + a0 + 2 * a1."""
    joints = list(itertools.product(range(2), repeat=2)) if pairing == "cross" else [(0, 0), (1, 1)]

    def rewards(node: int) -> list[float]:
        return [10.0 * node + a0 + 2 * a1 for a0, a1 in joints]

    children = (
        []
        if terminates(rewards(0), Episode().termination_threshold)
        else [Node(rewards(1 + child)) for child in range(len(joints))]
    )
    return Node(rewards(0), children)


def _tree_values() -> dict[str, list[float]]:
    aligned, cross = _tree("aligned"), _tree("cross")
    root = joint_returns(cross)[0]
    return {
        "aligned tree": [value for node in joint_returns(aligned) for value in node.tolist()],
        "aligned env_step": [float(env_steps(aligned))],
        "env_step by default": [float(env_steps(aligned))],
        "cross env_step": [float(env_steps(cross))],
        "cross sum": completion_returns(root, 2, "cross", "sum").flatten().tolist(),
        "cross default": completion_returns(root, 2, "cross").flatten().tolist(),
        "discounted tree": joint_returns(aligned, 0.5)[0].tolist(),
    }


def _actor_critic_values() -> dict[str, list[float]]:
    rewards, values = (torch.tensor([CASE[name]]) for name in ("td_rewards", "td_values"))
    lengths = torch.tensor([rewards.shape[1]])
    targets = td_targets(rewards, values, lengths, CASE["td_discount"])
    found = {}
    for algorithm in ("iac", "maac"):
        found[f"{algorithm} targets"] = targets.values[0].tolist()
        found[f"{algorithm} advantages"] = td_advantages(targets, values)[0].tolist()
        found[f"{algorithm} turns by default"] = [float(lengths)]
    return found


def _answer_to_a_prompt_with_eos(loaded: LoadedModel) -> list[float]:
    prompt = loaded.tokenizer(CASE["prompt_with_eos"])["input_ids"]
    parameters = SamplingParameters(max_new_tokens=CASE["new_tokens"], min_new_tokens=CASE["new_tokens"])
    (found,) = sample(loaded, [Request(prompt, stream(0, "peer"))], parameters, Compute("cpu", "float32"), 10**6)
    return [float(len(found.completion_ids))] * 2


def _one_token_gradient(found: Example) -> float:
    found.loss("mareinforce", longest=1).backward()
    return max(parameter.grad.abs().max().item() for parameter in found.model.model.parameters())


def peer_values(python: str, found: Example, folder: Path) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Versions and values of the peer, computed by its interpreter."""
    ids = {"prompt_ids": found.prompt_ids, "completion_ids": found.completion_ids}
    case = CASE | ids | {"model": str(folder / "model"), "reference": str(folder / "reference")}
    done = subprocess.run(
        [python, str(HERE / "peer_values.py")], input=json.dumps(case), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise typer.Exit(_fail(f"{python} could not compute the peer's values:\n{done.stderr}"))
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["versions"], answer["values"]


def faults(ours: dict[str, list[float]], peer: dict[str, list[float]]) -> list[str]:
    """What is not as the tables say: numbers that should agree and do not, differences that are not there."""
    apart = {name: _distance(ours[name], peer[name]) for name in (*AGREE, *DIFFER)}
    wrong = [f"{name}: differs by {apart[name]:.2g}" for name in AGREE if not apart[name] <= TOLERANCE]
    return wrong + [f"{name}: no longer differs" for name in DIFFER if apart[name] <= TOLERANCE]


def table(ours: dict[str, list[float]], peer: dict[str, list[float]], versions: dict[str, str]) -> str:
    """The page, in Markdown."""
    own = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    lines = [
        "# Numbers beside those of comlrl",
        "",
        "Written by `python benchmarks/peer_comparison.py`: the same cases and the same two small untrained models for "
        "both.",
        "",
        f"- here: {_versions({'python': platform.python_version(), **own})}",
        f"- peer: {_versions(versions)}",
        "",
        f"## The same (to {TOLERANCE:g})",
        "",
        "| value | here | comlrl | largest difference |",
        "|---|---|---|---|",
    ]
    for name, label in AGREE.items():
        apart = _distance(ours[name], peer[name])
        lines.append(f"| {label} | {_numbers(ours[name])} | {_numbers(peer[name])} | {apart:.1g} |")
    lines += ["", "## Different, and why", "", "| value | here | comlrl | reason |", "|---|---|---|---|"]
    for name, (label, reason) in DIFFER.items():
        lines.append(f"| {label} | {_numbers(ours[name])} | {_numbers(peer[name])} | {reason} |")
    return "\n".join(lines) + "\n"


def _distance(one: list[float], other: list[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{round(value, 6) + 0.0:.6g}" for value in values)


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def main(
    peer_python: Annotated[Path, typer.Option(help="the interpreter that has comlrl 1.4.3")] = Path(sys.executable),
    output: Annotated[Path, typer.Option(help="the page to write")] = HERE / "peer_comparison.md",
) -> None:
    """Compare, write the page, and fail where something is not as expected."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = example(folder)
        ours = our_values(found)
        versions, peer = peer_values(str(peer_python), found, folder)
    output.write_text(table(ours, peer, versions), encoding="utf-8")
    wrong = faults(ours, peer)
    print(f"{len(AGREE)} values agree, {len(DIFFER)} known differences: {output}" if not wrong else "\n".join(wrong))
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
