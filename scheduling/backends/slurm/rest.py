"""Slurm by slurmrestd."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import httpx
import jwt

from scheduling.backends.base import BackendError, NotFound, Rejected, Unreachable
from scheduling.backends.slurm.config import SlurmConfig
from scheduling.backends.slurm.errors import ENDED, classify
from scheduling.backends.slurm.records import SlurmJob, SlurmNode, read_job, read_node
from scheduling.backends.slurm.rest_dialects import Dialect, choose_dialect
from scheduling.backends.slurm.transport import BadCredentials, Submission


class NoReason(Unreachable):
    """slurmrestd has an error but cannot say which."""


_TOKEN_SECONDS = 300
_KNOWN_AGE = 2.0
_DIALECT_AGE = 600.0
_dialects: dict[str, tuple[float, Dialect]] = {}
#: slurm_errno.h: ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE.
_INVALID_JOB_ID, _ALREADY_DONE = 2017, 2021


class RestTransport:
    """See ``Transport``. Jobs are submitted, signalled and cancelled as their owner, everything is read as
    ``config.reader``; tokens are minted from the cluster's key for five minutes each."""

    def __init__(
        self,
        config: SlurmConfig,
        *,
        client: httpx.Client | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._client = client or _client(config)
        self._clock = clock
        self._monotonic = monotonic
        self._dialect: Dialect | None = None
        self._recent: tuple[float, list[SlurmJob]] | None = None
        #: Accounts of which it has been seen that their jobs run as them.
        self._accounts: set[str] = set()

    # reading

    def version(self) -> str:
        try:
            content = self._get("/ping")
        except NoReason as error:
            raise BadCredentials(
                f"slurmctld gave slurmrestd no answer to the portal's token: wrong key, or slurmctld is down ({error})"
            ) from error
        meta = content.get("meta") or {}
        slurm = meta.get("Slurm") or meta.get("slurm") or {}
        return f"slurm {slurm.get('release', '')} (slurmrestd {self._api().version})".replace("  ", " ")

    def warnings(self) -> tuple[str, ...]:
        found = list(self._api().warnings)
        if not self.can_read():
            found.append(
                f"the output folder {self._config.output_directory} is not mounted where the portal runs: "
                "slurmrestd cannot read files, so there will be no logs, and jobs that Slurm has forgotten are lost"
            )
        if not self._config.levels:
            found.append("slurmrestd does not tell the topology; name it by node features (Topology from features)")
        return tuple(found)

    def check(self, nodes: Sequence[SlurmNode]) -> None:
        self._api().check(nodes, self.nodes())

    def nodes(self) -> list[SlurmNode]:
        return [read_node(row) for row in self._rows("/nodes", "nodes")]

    def topology(self) -> str | None:
        return None

    def jobs(self) -> list[SlurmJob]:
        jobs = [read_job(row) for row in self._rows("/jobs", "jobs")]
        self._recent = (self._monotonic(), jobs)
        return jobs

    def find(self, attempt: UUID, account: str) -> list[SlurmJob]:
        # slurmrestd has no filter: one list serves all starts of two seconds, but never one from before a failure.
        recent = self._recent
        fresh = recent is not None and self._monotonic() - recent[0] < _KNOWN_AGE
        jobs = recent[1] if recent is not None and fresh else self.jobs()
        return [job for job in jobs if job.tag is not None and job.tag.attempt == attempt]

    def lookup(self, job_id: int) -> list[SlurmJob]:
        try:
            content = self._get(f"/job/{job_id}")
        except NotFound:
            return []
        return [read_job(row) for row in content.get("jobs", [])]

    def can_read(self) -> bool:
        return os.path.isdir(self._config.output_directory)

    def read_file(self, path: str, offset: int, limit: int) -> bytes | None:
        """Only plain files that are no link of any kind: the owner could point one at somebody else's file."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unreachable(f"{path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise Unreachable(f"{path} is not a plain file of its own; it is not read")
            return os.pread(handle, limit, offset)
        finally:
            os.close(handle)

    # changing

    def submit(self, job: Submission) -> int:
        body = self._api().submission(job, self._nodes_for(job))
        # An answer that does not come leaves it open what became of it: the next search must look again.
        recent, self._recent = self._recent, None
        content = self._request("POST", self._path("/job/submit"), job.account, body)
        number = content.get("job_id") or (content.get("result") or {}).get("job_id")
        if not number:
            raise Unreachable(f"slurmrestd answered a submit without a job id: {str(content)[:300]}")
        self._check_owner(int(number), job.account)
        if recent is not None:
            accepted = SlurmJob(int(number), ("PENDING",), job.account, comment=job.comment)
            self._recent = (recent[0], [*recent[1], accepted])
        return int(number)

    def _check_owner(self, job_id: int, account: str) -> None:
        """slurmrestd takes jobs of accounts that its host does not know, and runs them as nobody."""
        if account in self._accounts:
            return
        for job in self.lookup(job_id):
            if job.user == account:
                self._accounts.add(account)
            else:
                self._delete(SlurmJob(job_id, job.states, self._config.reader), "KILL")
                raise Rejected(
                    f"the cluster knows no account {account!r}: the job would have run as {job.user or 'nobody'}"
                )

    def update(self, job: SlurmJob, *, comment: str, time_limit: int | None) -> None:
        body = self._api().update(comment, time_limit)
        self._request("POST", self._path(f"/job/{job.id}"), job.user, body)

    def signal(self, job: SlurmJob) -> None:
        self._delete(job, "USR1")

    def cancel(self, job: SlurmJob) -> None:
        self._delete(job, "KILL")

    # plumbing

    def _api(self) -> Dialect:
        if self._dialect is None:
            # The description is large and changes with the daemon only: one reading serves a process for a while.
            known = _dialects.get(self._config.url)
            if known is None or self._monotonic() - known[0] > _DIALECT_AGE:
                content = self._request("GET", "/openapi/v3", self._config.reader)
                known = _dialects[self._config.url] = (self._monotonic(), choose_dialect(content))
            self._dialect = known[1]
        return self._dialect

    def _path(self, rest: str) -> str:
        return f"/slurm/{self._api().version}{rest}"

    def _nodes_for(self, job: Submission) -> list[SlurmNode]:
        return self.nodes() if self._api().needs_nodes else []

    def _delete(self, job: SlurmJob, signal: str) -> None:
        try:
            self._request("DELETE", self._path(f"/job/{job.id}?signal={signal}"), job.user)
        except Rejected as error:
            if not any(text in str(error).lower() for text in ENDED):
                raise

    def _get(self, rest: str) -> Mapping[str, Any]:
        try:
            return self._request("GET", self._path(rest), self._config.reader)
        except Rejected as error:
            # Reading changes nothing, so it may be tried again.
            raise Unreachable(str(error)) from error

    def _rows(self, rest: str, key: str) -> list[Mapping[str, Any]]:
        content = self._get(rest)
        if not isinstance(content.get(key), list):
            raise Unreachable(f"slurmrestd answered {rest} without {key!r}: {str(content)[:300]}")
        return list(content[key])

    def _request(self, method: str, path: str, account: str, body: object = None) -> Mapping[str, Any]:
        headers = {
            "X-SLURM-USER-NAME": account,
            "X-SLURM-USER-TOKEN": self._token(account),
            "Accept": "application/json",
        }
        try:
            response = self._client.request(method, path, headers=headers, json=body)
        except httpx.TimeoutException as error:
            raise Unreachable(f"slurmrestd did not answer {method} {path} within {self._config.timeout} s") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"slurmrestd cannot be reached: {error}") from error
        return _answer(response, method, path)

    def _token(self, account: str) -> str:
        now = int(self._clock())
        # A minute back, for clocks that differ.
        claims = {"iat": now - 60, "exp": now + _TOKEN_SECONDS, "sun": account}
        return jwt.encode(claims, self._config.jwt_key, algorithm="HS256")


_clients: dict[tuple[object, ...], httpx.Client] = {}


def _client(config: SlurmConfig) -> httpx.Client:
    """One for each process and daemon: back ends come and go with every pass of the loop, connections stay."""
    key = (os.getpid(), config.url, config.ca_file, config.timeout)
    if key not in _clients:
        _clients[key] = _new_client(config)
    return _clients[key]


def _new_client(config: SlurmConfig) -> httpx.Client:
    timeout = httpx.Timeout(config.timeout)
    if config.url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=config.url.removeprefix("unix:"))
        return httpx.Client(transport=transport, base_url="http://slurmrestd", timeout=timeout, trust_env=False)
    if config.ca_file:
        import ssl

        context = ssl.create_default_context(cafile=config.ca_file)
        return httpx.Client(base_url=config.url, timeout=timeout, verify=context, trust_env=False)
    return httpx.Client(base_url=config.url, timeout=timeout, trust_env=False)


def _answer(response: httpx.Response, method: str, path: str) -> Mapping[str, Any]:
    """The content, or the error it means. slurmrestd answers most refusals with 500 and a list of errors."""
    if response.status_code in (401, 403) or "authentication failure" in response.text[:500].lower():
        raise BadCredentials(
            f"slurmrestd refused the portal's token: {response.text[:200].strip() or response.status_code}"
        )
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        if response.status_code == 404:
            raise Rejected(f"slurmrestd knows no {path.partition('?')[0]}: is the URL right?")
        raise Unreachable(f"slurmrestd answered {method} {path} with {response.status_code} and no JSON")
    errors = [error for error in content.get("errors") or [] if error]
    if errors and response.status_code == 200 and content.get("job_id"):
        # Accepted, with a remark: it cannot start yet (a node is down, a limit reached).
        return content
    if errors:
        raise _refusal(errors)
    if response.status_code >= 400:
        raise Unreachable(f"slurmrestd answered {method} {path} with {response.status_code}")
    return content


_NO_REASON = {-1, 5005}


def _refusal(errors: Sequence[Any]) -> BackendError:
    words, numbers = [], set()
    for error in errors:
        if not isinstance(error, dict):
            words.append(str(error))
            continue
        numbers.add(error.get("error_number", error.get("error_code")))
        parts = [str(error[key]) for key in ("error", "description") if error.get(key)]
        words.append(": ".join(dict.fromkeys(parts)))
    said = "; ".join(words)
    if numbers and numbers <= _NO_REASON:
        # What slurmrestd 22.05 says when slurmctld refuses its token, and when slurmctld does not answer.
        return NoReason(said)
    if _INVALID_JOB_ID in numbers:
        return NotFound(said)
    if _ALREADY_DONE in numbers:
        return Rejected(f"already finished: {said}")
    return classify(said)
