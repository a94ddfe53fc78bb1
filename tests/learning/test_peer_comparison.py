"""The page of numbers beside those of the comlrl package: it shows what the code computes, and both sides as told."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "peer_comparison.md"


@pytest.fixture(scope="module")
def comparison():
    spec = importlib.util.spec_from_file_location("peer_comparison", ROOT / "benchmarks" / "peer_comparison.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def example(comparison, folder):
    return comparison.example(folder)


@pytest.fixture(scope="module")
def ours(comparison, example):
    return comparison.our_values(example)


def _column(column):
    """The numbers of one column of both tables, row by row: 1 is this project, 2 is the peer."""
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[float(number) for number in row[column].split(", ")] for row in rows if row[1] != "here"]


def test_the_page_shows_what_the_code_computes(comparison, ours):
    shown = dict(zip((*comparison.AGREE, *comparison.DIFFER), _column(1), strict=True))
    assert shown.keys() == ours.keys()
    for name, values in ours.items():
        assert values == pytest.approx(shown[name], abs=1e-3, rel=1e-4), name


def test_the_page_agrees_and_differs_where_it_says(comparison):
    names = (*comparison.AGREE, *comparison.DIFFER)
    ours, peer = (dict(zip(names, _column(column), strict=True)) for column in (1, 2))
    assert comparison.faults(ours, peer) == []


def test_a_number_that_moved_is_a_fault(comparison, ours):
    peer = dict(zip((*comparison.AGREE, *comparison.DIFFER), _column(2), strict=True))
    moved = ours | {"madpo": [0.6, 0.6], "discounted tree": peer["discounted tree"]}
    assert [fault.split(":")[0] for fault in comparison.faults(moved, peer)] == ["madpo", "discounted tree"]


@pytest.mark.skipif(importlib.util.find_spec("comlrl") is None, reason="comlrl is not installed (pip install .[peer])")
def test_the_peer_computes_what_the_page_shows(comparison, example, ours, folder):
    versions, peer = comparison.peer_values(sys.executable, example, folder)
    assert versions["comlrl"] == "1.4.3"
    assert comparison.faults(ours, peer) == []
