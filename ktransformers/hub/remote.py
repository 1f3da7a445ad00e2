"""The hub over HTTP: reads what a repository holds, with errors in one line. Downloads no weights.

The token is the one of HF_TOKEN or `hf auth login`, the address that of HF_ENDPOINT; both are huggingface_hub's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.hub.names import ModelName

__all__ = ["HubError", "HubRefusal", "RemoteFile", "Repository", "hub_errors", "list_repository"]


class HubError(KTransformersError):
    """The hub cannot be reached, or does not send what it should; it may later. The message is one line."""


class HubRefusal(HubError, ConfigError):
    """The hub has not got the model, or does not give it, however often it is asked."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a repository. sha256: of its bytes where the hub knows it; else git_sha1, of git's blob, is set."""

    path: str
    url: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True)
class Repository:
    """A remote repository at one commit. revision: the branch or tag that was asked for."""

    name: ModelName
    commit: str
    revision: str
    files: Mapping[str, RemoteFile]


@contextmanager
def hub_errors(name: ModelName) -> Iterator[None]:
    """Turn whatever goes wrong on the way to the hub into a HubError."""
    login = "log in with `hf auth login` or set HF_TOKEN"
    page = f"{constants.ENDPOINT}/{name.repo_id}"
    try:
        yield
    except GatedRepoError as error:
        raise HubRefusal(f"{name.repo_id} is gated: accept its terms at {page}, then {login}") from error
    except RepositoryNotFoundError as error:
        raise HubRefusal(f"there is no model {page}, or it is private: check the spelling, or {login}") from error
    except HFValidationError as error:
        raise HubRefusal(f"{name.repo_id} cannot be the name of a repository: {error}") from error
    except RevisionNotFoundError as error:
        raise HubRefusal(f"{name.repo_id} has no branch, tag or commit {name.revision}") from error
    except EntryNotFoundError as error:
        raise HubError(f"{name.repo_id} lost a file while it was read; try again") from error
    except OfflineModeIsEnabled as error:
        raise HubRefusal("HF_HUB_OFFLINE is set, so nothing can be downloaded; unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = f"{constants.ENDPOINT} answers {status} for {name.repo_id}"
        if status in (401, 403):
            raise HubRefusal(f"{said}; the token is not accepted: {login}") from error
        raise HubError(f"{said}; try again later") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached ({reason}); check the network, proxy or HF_ENDPOINT"
        ) from error


def list_repository(name: ModelName) -> Repository:
    """Return what the repository holds at the revision asked for. Raises HubError."""
    with hub_errors(name):
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name.repo_id, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )
    files = {}
    for sibling in info.siblings or ():
        path = sibling.rfilename
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise HubRefusal(f"{name.repo_id} lists {path!a}, which is no path inside of it; nothing was taken")
        files[path] = RemoteFile(
            path,
            hf_hub_url(name.repo_id, path, revision=info.sha),
            int(sibling.size or 0),
            None if sibling.lfs is None else sibling.lfs.sha256,
            sibling.blob_id if sibling.lfs is None else None,
        )
    if info.sha is None:
        raise HubError(f"{constants.ENDPOINT} names no commit for {name.repo_id}; it does not speak the hub's protocol")
    return Repository(name, info.sha, name.revision or constants.DEFAULT_REVISION, files)
