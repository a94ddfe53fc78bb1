"""What is said when the hub does not give what was asked for. The hub itself is asked in the tests of its users."""

import errno

import pytest

from comlrl_stages.hub import explanation, status_of, without_token


def test_a_token_never_stands_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_se'cret")
    assert without_token("illegal header 'Bearer hf_se'cret'") == "illegal header 'Bearer ***'"
    told = explanation(RuntimeError("bad header b'Bearer hf_se'cret'"), "model", "owner/name", "wait")
    assert "cret" not in told and "RuntimeError: bad header b'Bearer ***'" in told


def test_a_full_disk_is_not_blamed_on_the_hub() -> None:
    told = explanation(OSError(errno.ENOSPC, "No space left", "blobs/x"), "model", "owner/name", "wait")
    assert told.startswith("blobs/x: the disk is full. Free some space")


def test_the_cause_is_told_and_not_that_the_cache_lacks_the_file() -> None:
    try:
        try:
            raise RuntimeError("the peer hung up")
        except RuntimeError as cause:
            raise FileNotFoundError("not in the cache") from cause
    except FileNotFoundError as error:
        told = explanation(error, "dataset", "owner/name", "give a local file")
    assert told.startswith("RuntimeError: the peer hung up. Check ") and told.endswith("or give a local file.")
    assert "/datasets/owner/name" in told


def test_an_error_without_an_answer_has_no_status() -> None:
    assert status_of(RuntimeError("x")) is None
