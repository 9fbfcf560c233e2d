"""Uploads a model to the Hub in one commit, which appears whole or not at all, with retries."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import _http, validate_repo_id

from vanilla_transformer.errors import UserError

from .bundle import Bundle, check_private


Result = TypeVar("Result")

# Statuses worth another attempt: timeouts, rate limits, concurrent commits, server errors.
_PASSING = (408, 409, 412, 425, 429, 500, 502, 503, 504)
ATTEMPTS = 5
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 60.0
# Largest wait in seconds that is accepted from a Retry-After header.
_LONGEST_ASKED = 600.0
# Seconds without data after which the Hub counts as unreachable; huggingface_hub's own client waits for ever.
_SILENCE = 60.0
_REFERENCE = re.compile(r"(?!.*(?:\.\.|//|@\{))[\w][\w./+-]*(?<![./])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a model is published.

    Args:
        repo: Name of the repository, `user/name` or `organisation/name`.
        private: Whether it must be private. An existing repository is not changed, but refused if it is public.
        revision: Branch, made if it does not exist; `None` for the main branch.
        tag: Tag to give to the commit; must not exist.

    Raises:
        UserError: The Hub does not accept one of the names.
    """

    repo: str
    private: bool = False
    revision: str | None = None
    tag: str | None = None

    def __post_init__(self):
        try:
            validate_repo_id(self.repo)
            is_valid = self.repo.count("/") == 1
        except HFValidationError:
            is_valid = False
        if not is_valid:
            raise UserError(f"{self.repo} is not the name of a repository; give one such as user/name.")
        for what, name in (("revision", self.revision), ("tag", self.tag)):
            if name is not None and not _REFERENCE.fullmatch(name):
                raise UserError(f"`{what}` is {name}; it must be a name that git takes, such as v1.0.")


class UploadError(UserError):
    """The Hub could not be reached or did not take the model."""


class Hub:
    """The Hub, used with the token of this machine.

    Args:
        sleep: Waits so many seconds between attempts.

    Raises:
        UserError: There is no token, or this machine is told to stay offline.
    """

    def __init__(self, sleep: Callable[[float], object] = time.sleep):
        self._sleep = sleep
        self._token = get_token()
        if self._token is None:
            raise UserError("There is no token of the Hub; run `hf auth login`, or set HF_TOKEN.")
        set_client_factory(_client)
        self._api = HfApi(token=self._token)

    def prepare(self, destination: Destination, attempts: int = ATTEMPTS) -> None:
        """Make the repository and its branch, and refuse what could not be published there.

        Args:
            destination: Repository, branch and tag.
            attempts: How often to try.

        Raises:
            UserError: The token may not write there, the repository is public, or the tag exists.
            UploadError: The Hub cannot be reached.
        """
        repo = destination.repo

        def prepare() -> None:
            self._api.create_repo(repo, private=destination.private or None, exist_ok=True)
            # `create_repo` accepts an existing repository even if the token may only read it.
            self._api.auth_check(repo, write=True)
            if destination.private and not self._api.repo_info(repo).private:
                raise UserError(f"{repo} exists and is public; name another repository, or leave it public.")
            if destination.tag is not None:
                tags = [tag.name for tag in self._api.list_repo_refs(repo).tags]
                if destination.tag in tags:
                    raise UserError(f"{repo} has a tag {destination.tag} already; name another `tag`.")
            if destination.revision is not None:
                self._api.create_branch(repo, branch=destination.revision, exist_ok=True)

        self._attempt(prepare, repo, attempts)

    def upload(self, bundle: Bundle, destination: Destination, message: str, attempts: int = ATTEMPTS) -> str:
        """Publish the files as one commit.

        Large files are uploaded first and belong to no revision until the commit names them, so a failed upload leaves
        the repository unchanged. Another attempt sends only what has not arrived. The commit also deletes files of an
        earlier model that this one lacks.

        Args:
            bundle: The files.
            destination: Repository, branch and tag; `prepare` has made them.
            message: First line of the commit's message.
            attempts: How often to try.

        Returns:
            Address of the commit.

        Raises:
            UserError: A text holds the token or a path of this machine, or the Hub refuses the commit.
            UploadError: The Hub cannot be reached.
        """
        check_private(bundle, secrets(self._token, bundle.folder))

        def commit() -> object:
            # Operations cannot be reused in another attempt.
            operations = [
                CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
                for name, content in bundle.files.items()
            ]
            present = self._api.list_repo_files(destination.repo, revision=destination.revision)
            operations += [CommitOperationDelete(name, is_folder=False) for name in bundle.replaced(present)]
            return self._api.create_commit(
                destination.repo, operations, commit_message=message, revision=destination.revision
            )

        info = self._attempt(commit, destination.repo, attempts)
        if destination.tag is not None:
            try:
                self._attempt(
                    lambda: self._api.create_tag(
                        destination.repo, tag=destination.tag, revision=info.oid, exist_ok=True
                    ),
                    destination.repo,
                    attempts,
                )
            except UserError as error:
                raise type(error)(
                    f"The model was published as {info.commit_url}, but without the tag {destination.tag}: {error} "
                    "Publishing again sets it."
                ) from error
        return info.commit_url

    def _attempt(self, action: Callable[[], Result], repo: str, attempts: int) -> Result:
        wait = _FIRST_WAIT
        for left in reversed(range(attempts)):
            try:
                return action()
            except UserError:
                raise
            except OfflineModeIsEnabled as error:
                raise UserError("HF_HUB_OFFLINE is set; unset it to publish.") from error
            except (HTTPError, RuntimeError, OSError, ValueError) as error:
                cause = _cause(error)
                if cause is None:
                    raise
                response = getattr(cause, "response", None) if isinstance(cause, HfHubHTTPError) else None
                if response is not None and response.status_code not in _PASSING:
                    raise UserError(self._refusal(cause, repo)) from None
                if left == 0:
                    raise UploadError(
                        f"{repo} was not reached in {attempts} attempts ({_told(cause)}); try again later."
                    ) from None
                self._sleep(max(wait, _retry_after(response)))
                wait = min(2 * wait, _LONGEST_WAIT)
        raise ValueError("`attempts` must be at least 1.")

    def _refusal(self, error: HfHubHTTPError, repo: str) -> str:
        status = error.response.status_code
        # The Hub reports a repository that the token may not see as missing.
        if status == 401 and not isinstance(error, RepositoryNotFoundError):
            return f"The Hub does not know the token ({_told(error)}); run `hf auth login`, or correct HF_TOKEN."
        if status in (401, 403, 404):
            return (
                f"The token may not write to {repo} ({_told(error)}); use one with write access, or name a repository "
                "of yours or of an organisation that you are a member of."
            )
        said = " ".join((error.server_message or "").split()).replace(self._token, "***")
        return f"The Hub refused to publish to {repo} ({_told(error)}{': ' if said else ''}{said})."


def secrets(token: str | None, model: Path) -> dict[str, str]:
    """Strings that no published text may contain.

    Args:
        token: Token of the Hub.
        model: Folder of the model.

    Returns:
        The token, and folders of this user, this process and the model, each with a description.
    """
    model = model.absolute()
    places = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), model, model.parent, model.resolve().parent)
    folders = {str(place) for place in places} - {os.sep}
    words = {folder + os.sep: f"a path of this machine ({folder})" for folder in folders}
    return words | ({} if token is None else {token: "the token of the Hub"})


def _client() -> Any:
    client = _http.default_client_factory()
    client.timeout = _SILENCE
    return client


def _cause(error: BaseException) -> Exception | None:
    """The error of the connection to the Hub, or `None` for another error."""
    while error is not None:
        # JSONDecodeError: a proxy or a server answers with HTML instead of JSON.
        if isinstance(error, HTTPError | json.JSONDecodeError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _told(error: Exception) -> str:
    """An error in words, without URLs, which may be signed."""
    response = getattr(error, "response", None) if isinstance(error, HfHubHTTPError) else None
    if response is not None:
        return f"status {response.status_code}"
    return type(error).__name__


def _retry_after(response: object) -> float:
    """Seconds that an answer asks to wait, at most `_LONGEST_ASKED`."""
    value = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(value), _LONGEST_ASKED) if value.isdecimal() else 0.0
