"""Write the model card of an exported team, and put it into the export's folders.

The card is an artifact of its own: a new metric rewrites the card and copies no weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from comlrl_stages.artifacts import Work, checked_directory, read_json
from comlrl_stages.settings import CardSettings

TEMPLATE = """\
---
library_name: transformers
tags: [multi-agent, cooperative, {{ settings.method_settings.algorithm }}]
---
# {{ settings.experiment }}: {{ settings.method }}, seed {{ settings.seed }}

{% if settings.description %}{{ settings.description }}

{% endif -%}
A team of {{ agents }} agents, trained together by **{{ settings.method_settings.algorithm }}** on the task
**{{ task }}**, {{ learned_from }}.
Each agent is a folder of its own, in actor order, and answers its own prompt.
{% for remark in remarks %}{{ remark }}
{% endfor %}
## Scores

Task reward on the eval items{% if turns > 1 %}, at the last of up to {{ turns }} turns{% endif %}
({{ items }} items, {{ responses }} sampled joint responses; 95 % bootstrap interval
over items and samples).

| team | reward | interval |
|---|---|---|
{% for name, row in scores.items() -%}
| {{ name }} | {{ row.mean }} | {{ row.low }} to {{ row.high }} |
{% endfor %}
{% if kl is not none %}Distance from the base team: {{ kl }} nats per token.

{% endif -%}
## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

agents = [AutoModelForCausalLM.from_pretrained(f"export/agent_{i}") for i in range({{ agents }})]
tokenizers = [AutoTokenizer.from_pretrained(f"export/agent_{i}") for i in range({{ agents }})]
```

From the hub: `from_pretrained("<this repository>", subfolder=f"agent_{i}")`.

Prompts go through the task's formatter of each agent{% if chat %} and the tokenizer's chat template{% endif %};
sampling as in training: temperature {{ settings.sampling.temperature }}, at most
{{ settings.sampling.max_new_tokens }} new tokens.

## How it was made

Base models: {{ settings.models | join("; ") }}.

```yaml
{{ method_yaml }}```

`provenance.json` beside the agents holds every setting, the code fingerprint, library versions and input digests;
`SHA256SUMS` the checksums (`sha256sum -c SHA256SUMS`).
"""


def run(settings: CardSettings, work: Work) -> None:
    """Write the file `card`, and README.md into the export and each agent's folder."""
    export = checked_directory(work.inputs["export"])
    agents = sorted(path for path in export.glob("agent_*") if path.is_dir())
    text = render(settings, agents, read_json(work.inputs["metrics"]), _base(work))
    work.output("card").write_text(text, encoding="utf-8")
    for folder in (export, *agents):
        (folder / "README.md").write_text(text, encoding="utf-8")


def render(
    settings: CardSettings, agents: list[Path], metrics: Mapping[str, Any], base: Mapping[str, Any] | None
) -> str:
    """The card as Markdown with a YAML header."""
    scores = {settings.method: _scores(metrics)} | ({"base (untrained)": _scores(base)} if base else {})
    kl = metrics.get("eval/kl_per_token")
    turns = sum(name.startswith("eval/turn_") and name.endswith("/reward_mean") for name in metrics)
    environment = Environment(trim_blocks=False, keep_trailing_newline=True, autoescape=False)  # Markdown, not HTML
    return environment.from_string(TEMPLATE).render(
        settings=settings,
        agents=len(agents),
        task=settings.task.name or settings.task.file,
        items=metrics.get("eval/items"),
        responses=metrics.get("eval/joint_responses"),
        learned_from=_learned_from(settings.method_settings),
        remarks=list(_remarks(settings.method_settings, turns)),
        turns=turns,
        scores=scores,
        kl=None if kl is None else f"{kl:.3f}",
        chat=any((folder / "chat_template.jinja").is_file() for folder in agents),
        method_yaml=yaml.safe_dump(settings.method_settings, sort_keys=True, allow_unicode=True),
    )


def _learned_from(method: Mapping[str, Any]) -> str:
    """What was learned from: pairs, a learned reward, or the task's own."""
    if "preferences" in method:
        return f"from the preference pairs `{method['preferences']}`"
    if method.get("reward_model") is not None:
        return f"to maximise the joint reward model `{method['reward_model']}`"
    return "to maximise the task's own reward"


def _remarks(method: Mapping[str, Any], turns: int) -> Iterator[str]:
    if turns > 1:
        yield f"An episode has up to {turns} turns; after each, the task makes the next prompts of what was answered."
    if (lora := method.get("lora")) is not None:
        adapters = f"adapters of rank {lora['rank']} (LoRA, alpha {lora['alpha']:g})"
        yield f"Trained were {adapters}, which are merged into these weights."


def _scores(metrics: Mapping[str, Any]) -> dict[str, str]:
    where = "eval" if "eval/reward_mean" in metrics else "eval/turn_1"  # several turns: that of the last is reported
    values = {name: metrics.get(f"{where}/reward_{name}") for name in ("mean", "low", "high")}
    return {name: "n/a" if value is None else f"{value:.3f}" for name, value in values.items()}


def _base(work: Work) -> dict[str, Any] | None:
    return read_json(work.inputs["base_metrics"]) if "base_metrics" in work.inputs else None
