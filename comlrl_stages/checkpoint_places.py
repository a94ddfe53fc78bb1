"""Where the checkpoints of a training lie: with its unfinished work, or kept beside its policy."""

import hashlib
import json
from pathlib import Path

from comlrl_stages.artifacts import Work

#: Ending of the folder beside a policy that holds kept checkpoints.
KEPT = ".checkpoints"
#: Settings of which a longer training is the continuation of a shorter one.
LENGTHS = ("optimize.epochs",)


def checkpoint_folder(work: Work) -> Path:
    """Return where a training has its checkpoints, by `runtime.keep_checkpoints`.

    Those that are kept outlive the run.
    """
    return kept_folder(work) if work.runtime.get("keep_checkpoints", False) else work.partial / "checkpoints"


def kept_folder(work: Work) -> Path:
    """Return where a training keeps checkpoints beyond its end.

    They belong to everything that decides the run's bytes but its length, so that a run with more epochs goes on where
    this one ended.
    """
    tracked = {key: value for key, value in work.identity["tracked"].items() if key not in LENGTHS}
    identity = json.dumps({**work.identity, "tracked": tracked}, sort_keys=True)
    target = next(iter(work.targets.values()))
    return target.with_name(f"{target.name}{KEPT}") / hashlib.sha256(identity.encode()).hexdigest()[:16]
