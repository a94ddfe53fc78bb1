"""Weights & Biases, where an experiment asks for it: the training log, shown while it arises.

The log of a stage is always written; this only shows it elsewhere. It decides no byte and stops no stage: what fails
here is one line on stderr, and the stage goes on. One stage is one run, whose id follows from the work. A run that is
continued after a kill adds the steps that the server lacks; a record made offline holds the run from its first step,
since `wandb sync` lets a later record of a run replace an earlier one.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from comlrl_stages.artifacts import Work, named_inputs, seal
from comlrl_stages.settings import RunTracking

#: How long a stage waits for the server when a run begins, and again when it ends, in seconds.
PATIENCE_S = 30.0
API_KEY = "WANDB_API_KEY"
AXES = ("step", "env_step", "tokens")
VALIDATION = "validation"


@contextmanager
def open_run(work: Work, settings: BaseModel) -> Iterator[None]:
    """Show what the stage in the block tracks as a W&B run; do nothing where `runtime.tracking` is off.

    The run ends when the work is complete but not yet published, so that a kill meanwhile loses nothing.
    """
    options = work.runtime.get("tracking")
    if options is None:
        yield
        return
    run = StageRun(work, settings, RunTracking.model_validate(options))
    work.tracker = run.log
    try:
        yield
    except BaseException:
        run.finish(failed=True)
        raise
    seal(work)
    run.finish()


class StageRun:
    """The W&B run of one stage, or what is left of it after a failure: nothing, without a further word."""

    def __init__(self, work: Work, settings: BaseModel, options: RunTracking) -> None:
        self._work = work
        self._options = options
        self._run: Any = None
        self._first_step = 0
        self._has_axis = False
        with self._tolerated():
            self._open(settings)

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Turn a failure of W&B into one line and the end of the run."""
        with _tolerated("given up, the stage goes on without it"):
            try:
                yield
            except Exception:
                self._run = None
                raise

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows of the training log, all rows of a step together; steps that the server has are passed over."""
        with self._tolerated():
            for step, found in groupby(rows, key=lambda row: row.get("step", 0)):
                if self._run is not None and step >= self._first_step:
                    self._log_step(step, list(found))

    def finish(self, failed: bool = False) -> None:
        """Say what was read and made, wait a while for the upload, and end W&B's own process."""
        if self._run is not None and not failed:
            with _tolerated("inputs and outputs are not shown"):
                self._log_artifacts()
        with _tolerated("not everything is uploaded") if self._run is not None else suppress(Exception):
            if self._run is not None:
                self._run.finish(exit_code=int(failed))
            _import_wandb(self._work.partial).teardown()

    # --- beginning ---

    def _open(self, settings: BaseModel) -> None:
        folder = Path(self._options.dir).resolve()
        (folder / "wandb").mkdir(parents=True, exist_ok=True)  # wandb itself would turn to the system's temporary files
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
            os.environ.setdefault(name, str(folder / "wandb" / "files"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if self._options.mode == "online" and self._init_online(folder, settings):
            self._first_step = self._run.starting_step
            _say(self._run.url)
            return
        self._run = self._init("offline", folder, settings)
        _say(f"recorded offline; to upload it: wandb sync {os.path.relpath(Path(self._run.dir).parent)}")

    def _init_online(self, folder: Path, settings: BaseModel) -> bool:
        """Whether the server could be reached; else one line says why not."""
        if not os.environ.get(API_KEY):
            _say(f"{API_KEY} is not set")
            return False
        try:
            self._run = self._init("online", folder, settings)
        except Exception as error:
            _say(f"the server cannot be used ({_reason(error)})")
        return self._run is not None

    def _init(self, mode: str, folder: Path, settings: BaseModel) -> Any:
        wandb = _import_wandb(self._work.partial)
        wandb.teardown()  # of a beginning that failed: its id counts as in use
        quiet = wandb.Settings(
            init_timeout=PATIENCE_S,
            finish_timeout=PATIENCE_S,
            finish_timeout_raises=True,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_save_requirements=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        wandb.setup(quiet)
        options, work = self._options, self._work
        return wandb.init(
            mode=mode,
            id=run_id(work),
            resume="allow" if mode == "online" else None,
            project=options.project,
            entity=options.entity,
            group=options.group,
            job_type=work.stage,
            name=options.name,
            tags=options.tags,
            dir=str(folder),
            config={**settings.model_dump(mode="json"), "work": _described(work)},
            settings=quiet,
        )

    # --- numbers ---

    def _log_step(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        axes = {name: rows[0][name] for name in AXES if name in rows[0]}
        if axes and not self._has_axis:
            reinforced = axes.get("env_step") or rows[0].get("phase") == VALIDATION  # which begins before any env step
            axis = "env_step" if reinforced else "step"
            self._run.define_metric(axis)
            self._run.define_metric("*", step_metric=axis)
            self._has_axis = True
        values = {metric_name(row): row["value"] for row in rows}
        self._run.log({**axes, **comlrl_metrics(rows), **values}, step=step)

    # --- lineage ---

    def _log_artifacts(self) -> None:
        """Name what was read and what was made by path and digest; no content leaves the machine."""
        work, digests = self._work, seal(self._work)
        folder = Path(self._options.dir).resolve() / "wandb" / "files" / "digests"
        for path, digest in {one["path"]: one["digest"] for one in named_inputs(work)}.items():
            artifact = _reference(Path(path), digest, Path(path), folder)
            # What `use_artifact` does; itself it refuses to work offline, and online it waits for the server.
            self._run._log_artifact(artifact, aliases=[], is_user_created=True, use_after_commit=True)
        for name, path in work.targets.items():
            made = work.partial / "artifacts" / name / path.name
            artifact = _reference(path, digests[name], made if made.exists() else path, folder)
            self._run.log_artifact(artifact)


def run_id(work: Work) -> str:
    """The id of the stage's run: the same for the same work at the same place, after a kill above all."""
    return hashlib.sha256(f"{work.partial.resolve()} {work.key}".encode()).hexdigest()[:16]


def metric_name(row: Mapping[str, Any]) -> str:
    """Name of a row of the training log: `loss`, `agent_0/loss`, `turn_2/reward_mean`."""
    agent, turn = row.get("agent", -1), row.get("turn", 0)
    return "".join([f"agent_{agent}/" * (agent >= 0), f"turn_{turn}/" * (turn > 0), row["name"]])


def comlrl_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What CoMLRL calls the numbers of an update in reinforcement learning, beside our names.

    Where the log tells turns apart, each has its numbers; else the numbers of the whole step are those of turn 1.
    `reference_kl_mean` is in nats per response, as the penalty that is taken off the return; means over the agents.
    """
    by_turn: dict[int, dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.get("phase") != VALIDATION:
            agents = by_turn.setdefault(row.get("turn", 0), {})
            agents.setdefault(row.get("agent", -1), {})[row["name"]] = row["value"]
    turns = {turn: agents for turn, agents in by_turn.items() if turn > 0} or {1: by_turn.get(0, {})}
    metrics = {}
    for turn, agents in turns.items():
        metrics |= {f"turn_{turn}/{name}": value for name, value in _of_one_turn(agents).items()}
    return metrics


def _of_one_turn(agents: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The same without the turn, from the numbers of the team (-1) and of each agent; only what the log tells."""
    team, own = agents.get(-1, {}), [numbers for agent, numbers in agents.items() if agent >= 0]
    if "reward_mean" not in team:
        return {}
    reward = team["reward_mean"]
    metrics = {"reward_mean": reward, "expected_return": team.get("expected_return", reward)}
    if own and all({"kl", "length_mean"} <= set(one) for one in own):
        metrics["reference_kl_mean"] = sum(one["kl"] * one["length_mean"] for one in own) / len(own)
    if own and all("kl_penalty" in one for one in own):
        metrics["reference_kl_penalty_mean"] = sum(one["kl_penalty"] for one in own) / len(own)
    return metrics


def _described(work: Work) -> dict[str, Any]:
    """Where the run's numbers come from: code, versions and inputs."""
    tracked = work.identity["tracked"]
    return {
        "output": str(next(iter(work.targets.values()))),
        "key": work.key,
        "provenance": {key: text for key, text in tracked.items() if not key.startswith(f"{work.stage}.")},
        "inputs": {one["path"]: one["digest"] for one in named_inputs(work)},
    }


def _reference(path: Path, digest: str, made: Path, folder: Path) -> Any:
    """A W&B artifact that holds the digest of ours alone, so that equal artifacts are one to the server."""
    import wandb

    name = re.sub(r"[^\w.-]+", "-", str(path).removeprefix("results/"), flags=re.ASCII).strip("-")[-128:]
    kind = "model" if made.is_dir() else "dataset"
    artifact = wandb.Artifact(name, kind, metadata={"path": str(path), "sha256": digest})
    content = folder / digest
    folder.mkdir(parents=True, exist_ok=True)
    content.write_text(digest, encoding="utf-8")
    artifact.add_file(str(content), name="sha256", policy="immutable")
    return artifact


def _import_wandb(folder: Path) -> Any:
    """The module, with its own temporary folders in `folder`: it would remove them on an exit that stages skip."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        import wandb

        return wandb
    finally:
        tempfile.tempdir = before


@contextmanager
def _tolerated(consequence: str) -> Iterator[None]:
    """Turn an exception into one line."""
    try:
        yield
    except Exception as error:
        _say(f"{consequence} ({_reason(error)})")


def _say(text: str) -> None:
    print(f"W&B: {text}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """The first line of an error, without the API key."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    key = os.environ.get(API_KEY)
    return text.replace(key, "...") if key else text
