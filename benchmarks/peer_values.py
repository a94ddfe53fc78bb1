"""Values of the comlrl package (1.4.3) on given cases: JSON on the standard input, JSON on the standard output.

Run by `peer_comparison.py` with the interpreter that has comlrl; it imports nothing of this project. Trainers are real
ones with tiny models. Where a case fixes what is sampled or what a critic says, the method that samples or values is
replaced on the trainer; the method whose numbers are compared is always the package's own.
"""

import importlib.metadata
import json
import platform
import sys

import torch
from comlrl.trainers.actor_critic.iac import IACConfig, IACTrainer
from comlrl.trainers.actor_critic.maac import MAACConfig, MAACTrainer
from comlrl.trainers.preference.collaboration import joint_policy_gradient_loss, joint_sequence_log_prob
from comlrl.trainers.preference.madpo import MADPOConfig, MADPOTrainer
from comlrl.trainers.reinforce.magrpo import MAGRPOConfig, MAGRPOTrainer
from comlrl.trainers.reinforce.mareinforce import MAREINFORCEConfig, MAREINFORCETrainer
from comlrl.trainers.reinforce.maremax import MAReMaxConfig, MAReMaxTrainer
from comlrl.trainers.reinforce.marloo import MARLOOConfig, MARLOOTrainer
from comlrl.utils.reference_kl import reference_kl_for_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP_TRAINERS = {
    "magrpo": (MAGRPOTrainer, MAGRPOConfig),
    "marloo": (MARLOOTrainer, MARLOOConfig),
    "maremax": (MAReMaxTrainer, MAReMaxConfig),
    "mareinforce": (MAREINFORCETrainer, MAREINFORCEConfig),
}
PLAIN = {"advantage_normalization": False}
ALL_TURNS = {"early_termination_threshold": None}


class Peer:
    """Builds trainers over one model folder and asks them for their values."""

    def __init__(self, case: dict) -> None:
        self.case = case
        self.tokenizer = AutoTokenizer.from_pretrained(case["model"])
        self.prompt, self.completions = torch.tensor(case["prompt_ids"]), [*map(torch.tensor, case["completion_ids"])]

    def model(self, folder: str = "model"):
        return AutoModelForCausalLM.from_pretrained(self.case[folder])

    def group_trainer(self, mode: str, reward=lambda *texts: [0.0], transition=None, **settings):
        trainer, config = GROUP_TRAINERS[mode]
        settings = {"num_turns": 1, **settings}
        return trainer(
            agents=[self.model(), self.model()],
            num_agents=2,
            tokenizer=self.tokenizer,
            reward_func=reward,
            external_transition=transition,
            args=config(**settings),
        )

    # --- advantages and losses of one node ---

    def advantages(self, mode: str) -> list[float]:
        returns = torch.tensor(self.case["returns"])
        return self.group_trainer(mode, **PLAIN)._compute_advantages(returns).tolist()

    def trained_advantages(self, mode: str, **settings) -> list[float]:
        """What each response's log-probability is multiplied by in the loss, from the gradient of that loss."""
        log_probs = torch.zeros(len(self.case["returns"]), requires_grad=True)
        loss = joint_policy_gradient_loss(
            self.group_trainer(mode, **settings),
            self.model(),
            {"prompt_input_ids": [None], "completion_input_ids": [list(log_probs)]},
            self.case["returns"],
            sequence_log_prob=lambda prompt, log_prob: log_prob,
        )
        return (-len(log_probs) * torch.autograd.grad(loss, log_probs)[0]).tolist()

    def centralised_loss(self, mode: str) -> list[float]:
        data = {"prompt_input_ids": [self.prompt], "completion_input_ids": [self.completions]}
        trainer = self.group_trainer(mode, **PLAIN)
        return [joint_policy_gradient_loss(trainer, self.model(), data, self.case["loss_returns"]).item()]

    def decentralised(self) -> tuple[list[float], list[float]]:
        """Loss of the completions, and the largest gradient where each is cut to its first token."""
        trainer, model = self.group_trainer("mareinforce", **PLAIN), self.model()
        data = {"prompt_input_ids": self.prompt[None], "completion_input_ids": [self.completions]}
        loss = trainer._compute_loss_with_gradients(model, data, self.case["loss_returns"])
        data["completion_input_ids"] = [[completion[:1] for completion in self.completions]]
        trainer._compute_loss_with_gradients(model, data, self.case["loss_returns"]).backward()
        gradients = [
            parameter.grad.abs().max().item() for parameter in model.parameters() if parameter.grad is not None
        ]
        return [loss.item()], [max(gradients, default=0.0)]

    def log_probs(self) -> list[float]:
        model = self.model()
        return [
            joint_sequence_log_prob(model, self.tokenizer, self.prompt, completion).item()
            for completion in self.completions
        ]

    def k3(self) -> list[float]:
        policy, reference = self.model(), self.model("reference")
        found = []
        for completion in self.completions:
            ids = torch.cat([self.prompt, completion])[None]
            sizes = len(self.prompt), len(completion)
            found.append(reference_kl_for_sequence(policy, reference, ids, torch.ones_like(ids), *sizes).item())
        return found

    def madpo_loss(self) -> list[float]:
        trainer = MADPOTrainer(
            agents=[self.model(), self.model()],
            num_agents=2,
            tokenizer=self.tokenizer,
            reward_func=lambda *texts: [0.0],
            args=MADPOConfig(dpo_beta=self.case["beta"]),
        )
        trainer._agent_logprob_delta = lambda agent, pair: torch.tensor(self.case["margins"][agent])
        pairs = [None]
        deltas = trainer._detached_agent_deltas(pairs)
        return [trainer._agent_preference_loss(agent, pairs, deltas).item() for agent in range(2)]

    # --- trees and trajectories ---

    def tree(self, **settings) -> dict[str, list[float]]:
        """Returns by node and agent, and env_step, of two turns of two agents with two samples each.

        A completion's text is "node:sample", and the reward 10 * node + a0 + 2 * a1.
        """

        def reward(first: list[str], second: list[str]) -> list[float]:
            (node, a0), (_, a1) = (text[0].split(":") for text in (first, second))
            return [10.0 * int(node) + int(a0) + 2 * int(a1)]

        children = iter(range(1, 100))  # a parent's joint responses are continued in order

        def generate(agent, items, *, num_return_sequences: int, external_prompts=None, **ignored) -> dict:
            node = external_prompts or "0"
            return {
                "prompts": [node],
                "completions": [[f"{node}:{sample}" for sample in range(num_return_sequences)]],
                "prompt_input_ids": torch.tensor([[int(node)]]),
                "completion_input_ids": [[torch.tensor([0])] * num_return_sequences],
            }

        trainer = self.group_trainer(
            "magrpo",
            reward,
            lambda **history: [str(next(children))] * 2,
            num_turns=2,
            num_generations=2,
            rollout_buffer_size=100,
            **settings,
        )
        trainer._generate_completions_with_external_prompts = generate
        trainer._train_step_returns({"prompt": ""})
        found = {"env_step": [float(trainer.env_step)]}
        for agent, buffer in enumerate(trainer.rollout_buffers):
            for sample in buffer:
                found[f"node{sample.completions_data['prompt_input_ids'].item()} agent{agent}"] = sample.returns
        return found

    def trajectory(self, algorithm: str, **settings) -> dict[str, list[float]]:
        """Targets, advantages and number of turns of the first agent's trajectory of two turns."""
        rewards = iter(self.case["td_rewards"])
        trainer_class, config = (IACTrainer, IACConfig) if algorithm == "iac" else (MAACTrainer, MAACConfig)
        trainer = trainer_class(
            agents=[self.model(), self.model()],
            critics=[self.model() for _ in range(2 if algorithm == "iac" else 1)],
            tokenizer=self.tokenizer,
            reward_func=lambda first, second: [next(rewards)],
            external_transition=lambda **history: ["next"] * 2,
            args=config(num_turns=2, discount=self.case["td_discount"], max_new_tokens=2, **PLAIN, **settings),
        )
        self._fix_values(trainer)
        rollouts = trainer._collect_rollouts_multi_turn({"prompt": "begin"}, 2)
        trainer._prepare_advantages(rollouts)
        own = [sample for sample in rollouts if sample.agent_idx == 0]
        return {
            "targets": [sample.metadata["value_target"].item() for sample in own],
            "advantages": [sample.normalized_advantage.item() for sample in own],
            "turns": [float(len(own))],
        }

    def _fix_values(self, trainer) -> None:
        """Let the critics say the case's values, turn by turn."""
        by_agent = [iter(self.case["td_values"]) for _ in range(2)]
        if isinstance(trainer, IACTrainer):
            rollout = trainer._generate_rollout
            trainer._generate_rollout = lambda model, prompt, agent, num_ret: (
                rollout(model, prompt, agent, num_ret) | {"values": torch.tensor([next(by_agent[agent])])}
            )
        else:
            value = trainer._critic_value_from_text
            trainer._critic_value_from_text = lambda text: value(text) | {"value": torch.tensor([next(by_agent[0])])}

    # --- where a response begins and ends ---

    def kept_tokens(self) -> list[float]:
        """Tokens kept of each completion, where the pad token is the EOS token."""
        eos = self.tokenizer.eos_token_id
        return [float(len(MADPOTrainer._trim_completion_tokens(one, eos))) for one in self.completions]

    def prompt_with_eos(self) -> list[float]:
        """Tokens that count as completion, and tokens of its text, for a prompt that holds EOS; pad is EOS."""
        self.tokenizer.pad_token = self.tokenizer.eos_token
        new = self.case["new_tokens"]
        trainer = self.group_trainer("magrpo", max_new_tokens=new, num_generations=2)
        torch.manual_seed(0)
        item = {"prompt": self.case["prompt_with_eos"]}
        found = trainer._generate_completions(trainer.agents[0], [item], max_new_tokens=new, min_new_tokens=new)
        return [float(len(found["completion_input_ids"][0][0])), float(found["response_lens"][0])]


def values(peer: Peer) -> dict[str, list[float]]:
    """Every value by the name that the comparison knows it by."""
    aligned, discounted = peer.tree(**ALL_TURNS), peer.tree(discount=0.5, **ALL_TURNS)
    cross, by_default = peer.tree(joint_mode="cross", **ALL_TURNS), peer.tree()
    loss, gradient = peer.decentralised()
    found = {f"advantages {mode}": peer.advantages(mode) for mode in GROUP_TRAINERS}
    found |= {f"trained advantages {mode}": peer.trained_advantages(mode) for mode in GROUP_TRAINERS}
    found |= {f"centralised loss {mode}": peer.centralised_loss(mode) for mode in GROUP_TRAINERS}
    found |= {
        "normalised advantages": peer.trained_advantages("magrpo", advantage_normalization=True),
        "log-probability sums": peer.log_probs(),
        "k3": peer.k3(),
        "madpo": peer.madpo_loss(),
        "aligned tree": [*aligned["node0 agent0"], *aligned["node1 agent0"], *aligned["node2 agent0"]],
        "aligned env_step": aligned["env_step"],
        "cross env_step": cross["env_step"],
        "cross sum": [*cross["node0 agent0"], *cross["node0 agent1"]],
        "cross default": [*cross["node0 agent0"], *cross["node0 agent1"]],
        "discounted tree": discounted["node0 agent0"],
        "env_step by default": by_default["env_step"],
        "decentralised loss": loss,
        "one-token gradient": gradient,
        "log-probability sums at the sampling temperature": peer.log_probs(),
        "kept tokens": peer.kept_tokens(),
        "prompt with EOS": peer.prompt_with_eos(),
    }
    for algorithm in ("iac", "maac"):
        trajectory = peer.trajectory(algorithm, **ALL_TURNS)
        found |= {f"{algorithm} {name}": trajectory[name] for name in ("targets", "advantages")}
        found[f"{algorithm} turns by default"] = peer.trajectory(algorithm)["turns"]
    return found


def main() -> None:
    packages = ("comlrl", "torch", "transformers", "tokenizers")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    case = json.load(sys.stdin)
    print(json.dumps({"versions": versions, "values": values(Peer(case))}))


if __name__ == "__main__":
    main()
