"""Push an exported team to the Hugging Face hub, as one repository. An act of its own, never a part of the workflow.

What goes there is what the export's manifest lists, after its digests were checked, and the model card: agent_0,
agent_1, ..., SHA256SUMS, provenance.json, README.md. Nothing else that may lie in the folder goes along, and a
repository that holds anything else is never written to.
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl_stages.artifacts import checked_directory, read_manifest
from comlrl_stages.errors import UserError
from comlrl_stages.hub import explanation, is_offline, status_of

CARD, CHECKSUMS = "README.md", "SHA256SUMS"
_OTHERWISE = "push another time: the export stays as it is"


@dataclass(frozen=True)
class Push:
    """What would be uploaded, and where to."""

    export: Path
    repo: str
    private: bool
    files: list[str]  # relative to the export
    size: int  # bytes

    def summary(self) -> str:
        """One line for the user to agree to."""
        agents = len({name.partition("/")[0] for name in self.files if name.startswith("agent_")})
        visibility = "private" if self.private else "public: everybody can read it"
        return (
            f"{self.export}: {agents} agents, {len(self.files)} files, {self.size / 1e6:.1f} MB to {_page(self.repo)} "
            f"({visibility}). The model card and provenance.json tell the experiment's settings."
        )


def plan(export: Path, repo: str, private: bool) -> Push:
    """Check everything that can be checked without the hub.

    Raises UserError: no finished or an edited export, no model card, a malformed name, no token, HF_HUB_OFFLINE.
    """
    listed = read_manifest(export)["files"]
    if CHECKSUMS not in listed:
        raise UserError(f"{export}: is no exported team (it has no {CHECKSUMS}). Give the folder export of a method.")
    checked_directory(export)
    if not (export / CARD).is_file():
        raise UserError(f"{export}: has no model card yet ({CARD}). Run the workflow to its end, then push.")
    _check_name(repo)
    if is_offline():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it for this command.")
    from huggingface_hub import constants, get_token

    if get_token() is None:
        raise UserError(
            f"no token for {constants.ENDPOINT}. Set HF_TOKEN to one that may write, or log in once with: hf auth login"
        )
    files = sorted([*listed, CARD])
    return Push(export, repo, private, files, sum((export / name).stat().st_size for name in files))


def upload(push: Push) -> str:
    """Make the repository and upload the files; return the address of the commit.

    An existing repository is used only if it is empty or holds this very team, so an interrupted push can be repeated.
    Raises UserError for everything the hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        _make_repository(api, push)
        commit = api.upload_folder(
            repo_id=push.repo,
            folder_path=push.export,
            allow_patterns=[glob.escape(name) for name in push.files],
            commit_message="Team of agents, exported by comlrl_stages",
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"push to {push.repo}: {_told(error, push.repo)}") from error
    return str(commit.commit_url)


def _make_repository(api: Any, push: Push) -> None:
    try:
        api.create_repo(push.repo, private=push.private)
    except Exception as error:
        if status_of(error) != 409:
            raise
        if not _is_ours(api, push):
            raise UserError(
                f"push to {push.repo}: {_page(push.repo)} exists already and holds something else than this team. "
                "Choose another name with --repo, or delete that repository first."
            ) from error


def _is_ours(api: Any, push: Push) -> bool:
    names = set(api.list_repo_files(push.repo)) - {".gitattributes"}
    if CHECKSUMS not in names:
        return not names
    there = Path(api.hf_hub_download(push.repo, CHECKSUMS, force_download=True))
    return there.read_bytes() == (push.export / CHECKSUMS).read_bytes()


def _told(error: Exception, repo: str) -> str:
    if status_of(error) == 401:
        return "the hub does not accept the token. Set HF_TOKEN to a valid one, or log in again with: hf auth login"
    if status_of(error) == 403:
        owner = repo.partition("/")[0]
        return f"the token may not write below {owner}. Set HF_TOKEN to one with write access to {owner}."
    if status_of(error) == 404:
        return (
            f"the name is taken by a repository that the token cannot see ({_page(repo)}). Choose another with --repo."
        )
    return explanation(error, "model", repo, _OTHERWISE)


def _check_name(repo: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
        owner, _, name = repo.partition("/")
    except HFValidationError:
        owner = name = ""
    if not (owner and name):
        raise UserError(
            f"--repo {repo!r} is no name of a repository. Expected owner/name, of letters, digits, - _ and ."
        )


def _page(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"
