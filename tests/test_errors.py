"""Faults of the machine, as the libraries really report them."""

import resource
import subprocess
import sys

import pytest

from comlrl_stages.errors import machine_fault, nearest


def test_a_full_disk_is_recognised_however_a_library_reports_it():
    assert "disk is full" in machine_fault(OSError(28, "No space left on device", "results/x.parquet"))
    assert "results/x.parquet" in machine_fault(OSError(28, "No space left on device", "results/x.parquet"))
    assert "disk is full" in machine_fault(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert "disk is full" in machine_fault(OSError("[Errno 28] Error writing bytes to file. Detail: No space left"))


def test_a_read_only_folder_says_what_to_do():
    assert "Make it writable" in machine_fault(OSError(30, "Read-only file system", "results"))


def test_other_errors_are_no_fault_of_the_machine():
    assert machine_fault(ValueError("shape mismatch")) is None
    assert machine_fault(OSError(2, "No such file or directory", "x")) is None


def test_torch_out_of_memory_is_recognised():
    limit = 3 * 2**30
    script = (
        "import resource, torch\n"
        "from comlrl_stages.errors import machine_fault\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "try:\n"
        "    torch.zeros(2**31)\n"
        "except Exception as error:\n"
        "    print(machine_fault(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "Lower compute.training_tokens" in done.stdout, done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != limit


@pytest.mark.parametrize(("name", "hint"), [("pairs_per_tsk", " (nearest: 'pairs_per_task')"), ("xyz", "")])
def test_a_misspelt_name_gets_the_nearest_known_one(name, hint):
    assert nearest(name, ["pairs_per_task", "selection"]) == hint
