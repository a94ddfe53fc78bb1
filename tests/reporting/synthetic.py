"""A made-up experiment on disk: tables, reward models, provenance, as the stages would leave them.

Three trained methods and base, three seeds, four eval items with sixteen samples each. The numbers are drawn, the
layout and the formats are the real ones.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from comlrl_stages.artifacts import EVALUATION, TRAINING_LOG, open_work, table_of, write_table
from comlrl_stages.files import beside, write_json
from comlrl_stages.seeding import stream
from comlrl_stages.settings import ReportSettings

METHODS = ("base", "madpo", "marlhf", "marlhf_reinforce")
LEVELS = {"base": 0.52, "madpo": 0.66, "marlhf": 0.82, "marlhf_reinforce": 0.79}
SEEDS = (0, 1, 2)
ITEMS = ("lighthouse", "harbour", "orchard", "observatory")
SAMPLES = 16
WORDS = ("keeper", "walked", "the", "wet", "stairs", "and", "counted", "lamps", "while", "sea", "said", "nothing")
HOSTILE = (
    "<script>console.error('ran')</script><img src=x onerror=\"console.error('ran')\">"
    " 👩‍🚀🌊 a\u2028b\u2029c\u202ed \x00\x1b[31m &amp; </details></p> " + "long " * 120
)


def make_experiment(
    results: Path, *, methods: Sequence[str] = METHODS, seeds: Sequence[int] = SEEDS
) -> tuple[ReportSettings, dict[str, list[Path]]]:
    """Write the experiment `results/demo` and return the settings and inputs of its report."""
    root = results / "demo"
    model = _artifact("prepare", results / "models" / "tiny", {}, _write_file, {"rows": None})
    train = _artifact(
        "split", root / "split" / "train.parquet", {}, _write_file, {"rows": 8, "dropped": {"too_long": 2}}
    )
    inputs: dict[str, list[Path]] = {"evaluations": [], "training_logs": [], "reward_models": [], "artifacts": []}
    for seed in seeds:
        shared = _shared(root / f"seed{seed}", model, train, inputs, seed)
        for method in methods:
            _method(root / f"seed{seed}" / "methods" / method, method, seed, model, shared, inputs)
    inputs["artifacts"] += [model, train]
    description = "Two agents write one short story together; the second should write about three times as much."
    settings = ReportSettings(
        experiment="demo", description=description, methods=list(methods), seeds=list(seeds), bootstrap_replicates=2000
    )
    return settings, inputs


def evaluation_rows(method: str, seed: int, level: float = 0.6, hostile: bool = False) -> list[dict[str, Any]]:
    """Return sampled and greedy rows of one method and seed on all items."""
    draw = stream(seed, "synthetic", method)
    shift = draw.normal(0, 0.02)
    rows = []
    for index, item in enumerate(ITEMS):
        for decoding, split, samples in (("sampled", "eval", SAMPLES), ("greedy", "eval", 1), ("sampled", "train", 4)):
            for sample in range(samples):
                reward = float(np.clip(level + shift + 0.05 * (index - 1.5) + draw.normal(0, 0.12), 0, 1))
                rows.append(
                    _evaluation_row(method, seed, item, split, decoding, sample, reward, draw, hostile and index == 0)
                )
    return rows


def _evaluation_row(
    method: str,
    seed: int,
    item: str,
    split: str,
    decoding: str,
    sample: int,
    reward: float,
    draw: np.random.Generator,
    hostile: bool,
) -> dict[str, Any]:
    tokens = [int(draw.integers(4, 24)), int(draw.integers(12, 65))]
    failed = method == "madpo" and sample == 15 and item == "orchard" and split == "eval"
    texts = [" ".join(draw.choice(WORDS, size=max(1, count // 2))) for count in tokens]
    return {
        "source": "policy",
        "round": 1,
        "step": 0,
        "task_id": item,
        "turn": 0,
        "node": "",
        "method": method,
        "seed": seed,
        "split": split,
        "decoding": decoding,
        "sample": sample,
        "raw": reward,
        "reward": float("nan") if failed else reward,
        "expected_return": float("nan") if failed else reward,
        "learned_reward": None,
        "texts": [HOSTILE, texts[1]] if hostile else texts,
        "finish_reasons": ["stop", "length" if tokens[1] == 64 else "stop"],
        "tokens": tokens,
        "kl": [0.0, 0.0] if method == "base" else [float(x) for x in draw.uniform(0.05, 0.4, 2)],
        "parts": [("ratio", reward), ("format", 1.0)],
        "status": "nan" if failed else "ok",
    }


def _shared(folder: Path, model: Path, train: Path, inputs: dict[str, list[Path]], seed: int) -> dict[str, Path]:
    collection = folder / "collections" / "default"
    counts = {"rows": 256, "tokens": 6400, "dropped": {"invalid": 1}}
    completions = _artifact(
        "sample", collection / "completions.parquet", {"models": [model], "items": train}, _write_file, counts
    )
    rewards = _artifact(
        "score",
        collection / "rewards.parquet",
        {"completions": completions},
        _write_file,
        {"rows": 128, "dropped": {"nan": 3}},
    )
    pairs = _artifact(
        "pair",
        folder / "preferences" / "default" / "pairs.parquet",
        {"completions": completions, "rewards": rewards},
        _write_file,
        {"rows": 120, "dropped": {"equal_reward": 14, "equal_text": 2}},
    )
    for name, sharpness in (("default", 1.6), ("wide", 0.9), ("blind", 0.05)):
        model_folder = folder / "reward_models" / name
        log = folder / "reward_models" / f"{name}.training_log.parquet"
        given = {"pairs": pairs, "completions": completions, "model": model}
        with _stage("reward", {"reward_model": model_folder, "training_log": log}, given) as work:
            _write_reward_model(work.output("reward_model"), sharpness, seed)
            write_table(work.output("training_log"), table_of(_reward_log(name, seed), TRAINING_LOG), TRAINING_LOG)
            work.resolved(compute_dtype="float32", device="cpu")
        for path in (model_folder, log):
            write_json(beside(path, "timing"), {"wall_s": 22.0})
        inputs["reward_models"].append(model_folder)
        inputs["training_logs"].append(log)
    return {"completions": completions, "pairs": pairs, "reward_model": folder / "reward_models" / "default"}


def _method(
    folder: Path, method: str, seed: int, model: Path, shared: dict[str, Path], inputs: dict[str, list[Path]]
) -> None:
    policy, rounds = model, {"base": 0, "madpo": 2}.get(method, 1)
    for number in range(1, rounds + 1):
        place = folder / f"round{number:03d}"
        given: dict[str, Any] = {"policy": [policy], "model": model}
        if method == "madpo":
            replayed = _artifact(
                "replay", place / "training_pairs.parquet", {"pairs": shared["pairs"]}, _write_file, {"rows": 120}
            )
            given["training_pairs"] = replayed
            given["reference_log_probs"] = _artifact(
                "refer",
                place / "reference_log_probs.parquet",
                {"training_pairs": replayed, "completions": shared["completions"], "models": [model]},
                _write_file,
                {"rows": 480, "tokens": 12000},
            )
        else:
            given["reward_model"] = shared["reward_model"]
        rows = _madpo_log(seed, number) if method == "madpo" else _rl_log(method, seed)
        with _stage(
            "optimize", {"policy": place / "policy", "training_log": place / "training_log.parquet"}, given
        ) as work:
            _write_file(work.output("policy"))
            write_table(work.output("training_log"), table_of(rows, TRAINING_LOG), TRAINING_LOG)
            work.resolved(compute_dtype="float32", device="cpu")
            work.count("policy", tokens=20480)
        for name in ("policy", "training_log.parquet"):
            write_json(beside(place / name, "timing"), {"wall_s": 95.0})
        policy = place / "policy"
        inputs["training_logs"].append(place / "training_log.parquet")
    evaluation = folder / "evaluation" / "evaluation.parquet"
    sampled = _artifact(
        "sample_evaluation",
        folder / "evaluation" / "completions.parquet",
        {"policy": [policy]},
        _write_file,
        {"rows": 168, "tokens": 5200},
    )
    hostile = method == "marlhf"
    rows = evaluation_rows(method, seed, LEVELS.get(method, 0.6), hostile)
    _artifact(
        "evaluate",
        evaluation,
        {"completions": sampled},
        lambda out: write_table(out, table_of(rows, EVALUATION), EVALUATION),
        {"rows": len(rows)},
    )
    inputs["evaluations"].append(evaluation)
    if rounds:
        inputs["artifacts"].append(_artifact("export", folder / "export", {"policy": policy}, _write_file, {}))


def _madpo_log(seed: int, round_: int) -> list[dict[str, Any]]:
    draw = stream(seed, "log", "madpo", round_)
    rows = []
    for step in range(1, 31):
        progress = (step + 30 * (round_ - 1)) / 60
        values = {
            "loss": 0.693 * np.exp(-1.2 * progress) + draw.normal(0, 0.02),
            "margin": 1.5 * progress + draw.normal(0, 0.05),
            "accuracy": min(1.0, 0.5 + 0.45 * progress + draw.normal(0, 0.03)),
            "something_new": 1.0,
        }
        rows += _log_rows("madpo", round_, step, 0, 640 * step, values)
    return rows


def _rl_log(method: str, seed: int) -> list[dict[str, Any]]:
    draw = stream(seed, "log", method)
    rows = []
    for step in range(0, 41):
        progress = 1 - np.exp(-step / 12)
        values = {
            "reward_mean": -0.4 + 1.9 * progress + draw.normal(0, 0.08),
            "task_reward_mean": 0.52 + 0.3 * progress + draw.normal(0, 0.02),
            "kl": 0.25 * progress + draw.normal(0, 0.01),
            "entropy": 2.0 - progress,
            "zero_variance_share": 0.86 if method == "marlhf_reinforce" else 0.1,
        }
        rows += _log_rows("rl", 1, step, 64 * step, 512 * step, values)
    return rows


def _reward_log(name: str, seed: int) -> list[dict[str, Any]]:
    draw = stream(seed, "log", "reward", name)
    rows = _log_rows("reward", 1, 0, 0, 0, {"held_out_accuracy": 0.5})
    for step in range(1, 21):
        values = {"loss": 0.7 * np.exp(-step / 15) + draw.normal(0, 0.02), "accuracy": 0.5 + step / 50}
        rows += _log_rows("reward", 1, step, 0, 900 * step, values)
    return rows


def _log_rows(
    phase: str, round_: int, step: int, env_step: int, tokens: int, values: dict[str, float]
) -> list[dict[str, Any]]:
    place = {
        "phase": phase,
        "round": round_,
        "step": step,
        "env_step": env_step,
        "tokens": tokens,
        "turn": 0,
        "agent": -1,
    }
    return [{**place, "name": name, "value": float(value)} for name, value in values.items()]


def _write_reward_model(folder: Path, sharpness: float, seed: int) -> None:
    folder.mkdir(parents=True)
    draw = stream(seed, "reward model", str(sharpness))
    rewards = np.sort(draw.uniform(0, 1, (60, 2)), axis=1)[:, ::-1]
    scores = 3 * sharpness * rewards + draw.normal(0, 1, rewards.shape)
    columns = {"pair_id": [f"p{i}" for i in range(60)], "task_id": ["orchard"] * 60}
    for side, index in (("winner", 0), ("loser", 1)):
        columns[f"{side}_reward"], columns[f"{side}_score"] = rewards[:, index], scores[:, index]
    pq.write_table(pa.table(columns), folder / "held_out.parquet")
    accuracy = float((scores[:, 0] > scores[:, 1]).mean())
    after = {"held_out_accuracy": accuracy, "held_out_ties": 0.0, "held_out_loss": 0.4, "held_out_spearman": None}
    (folder / "quality.json").write_text(json.dumps({"before": {"held_out_accuracy": 0.48}, "after": after}))


def _write_file(path: Path) -> None:
    path.write_bytes(path.as_posix().encode()[-20:])


def _stage(stage: str, outputs: dict[str, Path], inputs: dict[str, Any]) -> Any:
    tracked = {f"{stage}.seed": "0", f"{stage}.for": str(next(iter(outputs.values()))), "code": "0123456789abcdef"}
    return open_work(stage, {**tracked, "versions.torch": "2.13.0", "schema.version": "1"}, inputs, outputs)


def _artifact(
    stage: str,
    path: Path,
    inputs: dict[str, Any],
    write: Callable[[Path], None],
    counts: dict[str, Any],
    resolved: dict[str, Any] | None = None,
) -> Path:
    """Run a stage that writes one artifact, and give it a running time that does not depend on this machine."""
    with _stage(stage, {"made": path}, inputs) as work:
        write(work.output("made"))
        work.count("made", **counts)
        work.resolved(**(resolved or {}))
    seconds = {"sample": 31.5, "sample_evaluation": 12.0, "score": 3.2}.get(stage, 0.4)
    write_json(beside(path, "timing"), {"wall_s": seconds, "host": "somewhere", "peak_memory_mb": 900})
    return path
