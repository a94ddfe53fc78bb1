"""The same experiment in another folder, on another number of cores: equal manifests, so equal bytes."""

from pathlib import Path

import pytest

from .conftest import EXPERIMENT, Workflow

pytestmark = pytest.mark.slow


def test_two_folders_and_other_cores_give_equal_manifests(finished: Workflow, tmp_path: Path) -> None:
    other = Workflow(tmp_path / "elsewhere", finished.code)
    other.write_experiment(EXPERIMENT)
    other.write("config/models/tiny.yaml", (finished.folder / "config/models/tiny.yaml").read_text(encoding="utf-8"))
    other.run("--config", "experiments=small", cores=1)
    made, expected = other.manifests(), finished.manifests()
    assert "results/small/report.manifest.json" in expected
    assert made == expected
