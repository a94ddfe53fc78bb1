"""The Hugging Face hub: fetch the files of one commit, and say what to do when the hub refuses or does not answer.

`huggingface_hub` is imported when it is needed. The hub is the one that HF_ENDPOINT names; its token comes from
HF_TOKEN or from the login's own file, and no message holds it.
"""

from collections.abc import Sequence
from pathlib import Path

from comlrl_stages.errors import UserError, machine_fault


def fetch(kind: str, repo: str, revision: str | None, patterns: Sequence[str], otherwise: str) -> Path:
    """Bring the files of a revision that match `patterns` into the hub's local cache.

    A hub that does not answer, or that HF_HUB_OFFLINE forbids to ask, is replaced by the cache where that has them.

    Args:
        kind: "model" or "dataset".
        revision: branch, tag or commit; None is the main branch.
        otherwise: what a user can do who has no access to the hub, for the message.

    Returns:
        the folder with the files; its name is the commit that `revision` stood for.

    Raises:
        UserError: unknown id or revision, no access, or a hub that cannot be reached and no copy in the cache.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    files = {"repo_type": kind, "revision": revision, "allow_patterns": list(patterns)}
    try:
        # Asked first, because the download would wait for ever for a hub that is silent.
        HfApi().repo_info(repo, repo_type=kind, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(snapshot_download(repo, **files))
    except Exception as error:
        copy = _cached_copy(repo, files) if _is_silence(_cause(error)) else None
        if copy is None:
            raise UserError(
                f"hub {kind} {_named(repo, revision)}: {explanation(error, kind, repo, otherwise)}"
            ) from error
        return copy


def _cached_copy(repo: str, files: dict) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, **files, local_files_only=True))
    except FileNotFoundError:
        return None


def _named(repo: str, revision: str | None) -> str:
    return repr(repo) if revision is None else f"{repo!r} (revision {revision})"


def is_offline() -> bool:
    """Whether the environment forbids to ask the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def explanation(error: Exception, kind: str, repo: str, otherwise: str) -> str:
    """Say what an error of `huggingface_hub` means and what to do, without its token."""
    from huggingface_hub import constants, errors

    error = _cause(error)
    status = status_of(error)
    fault = machine_fault(error)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    download = f"hf download {repo}{' --repo-type dataset' if kind == 'dataset' else ''}"
    if fault is not None:
        return fault
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE is set, and the local cache does not have it. Unset it, fetch it first where there is a "
            f"network ({download}), or {otherwise}."
        )
    if isinstance(error, errors.HFValidationError):
        return "this is no id of the hub. Expected owner/name."
    if isinstance(error, errors.GatedRepoError):
        return f"access is restricted. Ask for it at {page}, set HF_TOKEN to a token of that account, or {otherwise}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"there is no such revision. Give a branch, tag or commit of {page}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such {kind} at {page}, or it is private. Check the id; a private one needs HF_TOKEN."
    if status == 401:
        return "the hub does not accept the token. Set HF_TOKEN to a valid one, or unset it."
    if status == 403:
        return "the token gives no access. Set HF_TOKEN to one with the rights for it."
    if status == 429 or (status or 0) >= 500:
        return f"{constants.ENDPOINT} answered with status {status}. Try again later, or {otherwise}."
    if _is_silence(error):
        return (
            f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}). Check the network (and HF_ENDPOINT, if it "
            f"is set), or {otherwise}."
        )
    return f"{_first_line(error)} Check {page}, or {otherwise}."


def status_of(error: Exception) -> int | None:
    """HTTP status of the answer behind an error."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _cause(error: Exception) -> Exception:
    """The error of the request, where the library says only that its cache does not have the file either."""
    while isinstance(error, FileNotFoundError | ConnectionError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _is_silence(error: Exception) -> bool:
    """Whether the hub did not answer, or only that it is in trouble. The HTTP library's name is no part of its API."""
    from huggingface_hub import errors

    status = status_of(error) or 0
    names = {base.__name__ for base in type(error).__mro__}
    return "TransportError" in names or status == 429 or status >= 500 or isinstance(error, errors.OfflineModeIsEnabled)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.: ')}." if lines else f"{type(error).__name__}."
    return without_token(text)


def without_token(text: str) -> str:
    """The text with the hub's token, should it hold it, replaced."""
    from huggingface_hub import get_token

    token = get_token()
    for form in {token, repr(token)[1:-1]} if token else ():
        text = text.replace(form, "***")
    return text
