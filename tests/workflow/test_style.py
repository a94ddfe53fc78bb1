"""The repository passes its own checks of style: Python and Snakemake code, layout and good practice."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY


def output(tool: str, *arguments: str, folder: Path = REPOSITORY) -> str:
    """Run a tool that is installed beside Python, or on PATH, and return what it says; it must succeed."""
    found = shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra `test`")
    done = subprocess.run([found, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_python_code_has_no_lint() -> None:
    output("ruff", "check", "--no-cache")


def test_python_code_is_formatted() -> None:
    output("ruff", "format", "--check", "--no-cache")


def test_rules_are_formatted() -> None:
    output("snakefmt", "--check", "Snakefile", "workflow/rules")


def test_snakemakes_linter_has_nothing_to_say(tmp_path: Path) -> None:
    said = output("snakemake", "--lint", "-s", str(REPOSITORY / "Snakefile"), folder=tmp_path)
    assert "Congratulations, your workflow is in a good condition!" in said
