"""The Slurm back end: the contract of ``backends.base`` over either transport.

How an attempt is found again: its UUID stands in the job's comment (``records.Tag``), so a job submitted just before
a crash is found by the next ``start``. How it runs once even so: see ``script``.

How it is stopped: the instant of its end goes into the comment, the signal to its steps, and Slurm's own time limit
is lowered to just after that instant. ``observe`` ends what is past its instant. So a stop survives a crash of the
portal, and if the portal does not come back Slurm ends the job by itself.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from scheduling.backends.base import (
    BackendError,
    Description,
    LogChunk,
    NodeReport,
    NotFound,
    Observation,
    Rejected,
    RunReport,
    RunState,
    StartCommand,
    Started,
    StopCommand,
    Unreachable,
)
from scheduling.backends.slurm.config import SlurmConfig, check_account
from scheduling.backends.slurm.hostlist import expand
from scheduling.backends.slurm.inventory import describe_nodes, gpu_nodes, shards_per_gpu
from scheduling.backends.slurm.records import SlurmJob, SlurmNode, Tag, merge_components, read_devices
from scheduling.backends.slurm.reports import forgotten_report, run_report
from scheduling.backends.slurm.script import STARTED_TWICE, batch_script, output_path, record_path
from scheduling.backends.slurm.states import job_state, node_condition
from scheduling.backends.slurm.submission import build_submission
from scheduling.backends.slurm.transport import BadCredentials, Transport

logger = logging.getLogger(__name__)


#: Attempts whose scripts are known to have begun: asked once for each and process.
_launched: set[UUID] = set()


def _utc_now() -> datetime:
    return datetime.now(UTC)


class SlurmBackend:
    """See ``backends.base.Backend``."""

    def __init__(self, config: SlurmConfig, transport: Transport, *, now: Callable[[], datetime] = _utc_now) -> None:
        self._config = config
        self._transport = transport
        self._now = now
        #: Shards per GPU by node, for starting shares; filled when first needed.
        self._nodes: dict[str, SlurmNode] = {}

    def describe(self) -> Description:
        try:
            version = self._transport.version()
            everything = self._transport.nodes()
            nodes, warnings = gpu_nodes(self._config, everything)
            self._transport.check(nodes)
            levels, infos = describe_nodes(self._config, nodes, self._transport.topology())
            foreign = self._foreign_jobs({node.name for node in nodes})
        except BadCredentials as error:
            raise Rejected(str(error)) from error
        if not nodes:
            where = f"partition {self._config.partition!r}" if self._config.partition else "this cluster"
            warnings.append(f"no usable GPU node in {where} ({len(everything)} nodes in all)")
        if foreign:
            warnings.append(
                f"{foreign} running jobs on these nodes are not the portal's; it cannot see their GPUs as taken, "
                "and its own jobs may wait for them in Slurm"
            )
        return Description(version, levels, tuple(infos), (*warnings, *self._transport.warnings()))

    def start(self, command: StartCommand) -> Started:
        if self._config.personal and (problem := check_account(command.account)):
            raise Rejected(problem)
        submission = build_submission(self._config, command, self._shards)
        submission = replace(submission, script=batch_script(self._config, command, submission.groups))
        with _passing():
            found = self._transport.find(command.attempt, submission.account)
            known = _leaders([job for job in found if not _never_accepted(job)])
            if known:
                return Started(str(min(job.id for job in known)))
            return Started(str(self._transport.submit(submission)))

    def stop(self, command: StopCommand) -> None:
        with _passing():
            found: list[SlurmJob] = []
            if command.backend_id.isdigit():
                found = [
                    job for job in self._transport.lookup(int(command.backend_id)) if self._is(job, command.attempt)
                ]
            if not found:
                found = [job for job in self._transport.jobs() if self._is(job, command.attempt)]
            if not found:
                if self._ended_record(command.attempt) is not None:
                    return
                raise NotFound(f"Slurm knows no job of attempt {command.attempt}")
            for job in _by_job(found):
                self._stop_one(job, command)

    def observe(self, since: str, attempts: Sequence[UUID]) -> Observation:
        with _passing():
            at = self._now()
            nodes, _ = gpu_nodes(self._config, self._transport.nodes())
            found: dict[UUID, list[SlurmJob]] = defaultdict(list)
            for job in _by_job(self._transport.jobs()):
                tag = job.tag
                if tag is not None and tag.instance == self._config.instance:
                    found[tag.attempt].append(job)
            wanted = set(attempts)
            runs = []
            for attempt, jobs in found.items():
                # Beyond those asked for, what still runs is told too: the ledger may have given it up.
                if attempt in wanted or not all(_final(job) for job in jobs):
                    runs.append(self._with_devices(self._settle(attempt, jobs, at)))
            for attempt in wanted - found.keys():
                record = self._ended_record(attempt)
                if record is not None:
                    runs.append(forgotten_report(attempt, record))
        reports = tuple(self._node_report(node) for node in nodes)
        return Observation(at, tuple(runs), reports, cursor=str(int(at.timestamp())), complete=True)

    def logs(self, attempt: UUID, *, offset: int = 0, limit: int = 1 << 20, backend_id: str = "") -> LogChunk:
        if offset < 0 or limit < 1:
            raise ValueError(f"offset {offset} must be at least 0 and limit {limit} at least 1")
        with _passing():
            # Asked before reading: what is written until the end is then surely in the file.
            ended = self._ended_record(attempt) is not None
            data = self._transport.read_file(output_path(self._config, attempt), offset, limit)
        if data is None:
            raise NotFound(f"there is no output of attempt {attempt} (yet)")
        return LogChunk(offset, data, offset + len(data), finished=ended and len(data) < limit)

    # details

    def _is(self, job: SlurmJob, attempt: UUID) -> bool:
        tag = job.tag
        return tag is not None and tag.attempt == attempt and tag.instance == self._config.instance

    def _shards(self, node: str) -> int:
        if node not in self._nodes:
            with _passing():
                self._nodes = {one.name: one for one in self._transport.nodes()}
        if node not in self._nodes:
            raise Rejected(f"Slurm knows no node {node!r}")
        return shards_per_gpu(self._nodes[node])

    def _foreign_jobs(self, nodes: set[str]) -> int:
        count = 0
        for job in self._transport.jobs():
            tag = job.tag
            ours = tag is not None and tag.instance == self._config.instance
            if not ours and "RUNNING" in job.states and nodes.intersection(expand(job.nodes)):
                count += 1
        return count

    def _node_report(self, node: SlurmNode) -> NodeReport:
        condition = node_condition(node.states, own_reservation=bool(self._config.reservation))
        return NodeReport(node.name, condition, node.reason)

    def _settle(self, attempt: UUID, jobs: list[SlurmJob], at: datetime) -> RunReport:
        """Report on an attempt; end what must not run: twins, requeued jobs, jobs past their grace."""
        starter = self._started_record(attempt) if len(jobs) > 1 else None
        chosen = choose(jobs, starter)
        for job in jobs:
            # Without a record any of them may come to be the one, also one that waited when the list was made.
            if job is not chosen and starter == chosen.id and not _final(job):
                logger.warning("Slurm job %s is a second one of attempt %s: cancelled", job.id, attempt)
                self._cancel(job)
        if chosen.exit_status == STARTED_TWICE and _final(chosen):
            # Slurm lost the job that ran; what that one left behind counts.
            record = self._ended_record(attempt)
            if record is not None:
                return forgotten_report(attempt, record)
        report = run_report(attempt, chosen)
        tag = chosen.tag
        if report.state is RunState.REQUEUED and not _final(chosen, ignore_restarts=True):
            logger.warning("Slurm has requeued job %s of attempt %s: cancelled", chosen.id, attempt)
            self._cancel(chosen)
        elif tag is not None and not tag.lost and self._never_launched(attempt, chosen, report, at):
            logger.warning("Slurm has job %s of attempt %s as running, but never launched it", chosen.id, attempt)
            marked = replace(chosen, comment=replace(tag, lost=True).text())
            self._mark(chosen, replace(tag, lost=True))
            self._cancel(chosen)
            return run_report(attempt, marked)
        elif tag is not None and tag.stop_by is not None and not report.state.final and at.timestamp() >= tag.stop_by:
            self._cancel(chosen)
        return report

    def _never_launched(self, attempt: UUID, job: SlurmJob, report: RunReport, at: datetime) -> bool:
        """After a crash slurmctld may believe in jobs that it never got to launch, and finds out very late."""
        if report.state is not RunState.RUNNING or job.started is None or attempt in _launched:
            return False
        if at - job.started < timedelta(seconds=self._config.launch_patience) or not self._transport.can_read():
            return False
        if self._started_record(attempt) is None:
            return True
        _launched.add(attempt)
        return False

    def _with_devices(self, report: RunReport) -> RunReport:
        """Slurm tells the devices only while a job runs; afterwards its own note does."""
        if not report.state.final or report.devices is not None or not self._transport.can_read():
            return report
        data = self._transport.read_file(f"{record_path(self._config, report.attempt)}.devices", 0, 1 << 16)
        return replace(report, devices=read_devices(data.decode(errors="replace"))) if data else report

    def _cancel(self, job: SlurmJob) -> None:
        try:
            self._transport.cancel(job)
        except NotFound:
            logger.info("Slurm job %s was gone before it could be cancelled", job.id)

    def _stop_one(self, job: SlurmJob, command: StopCommand) -> None:
        tag = job.tag
        if tag is None or _final(job, ignore_restarts=True):
            return
        now = self._now()
        running = job.started is not None and job.started <= now and "RUNNING" in job.states
        if not running or command.grace <= timedelta(0):
            self._mark(job, replace(tag, stop_by=int(now.timestamp())))
            self._cancel(job)
            return
        stop_by = now + command.grace
        if tag.stop_by is not None:
            # Told before: the first instant stands, unless this one is sooner.
            if now.timestamp() >= tag.stop_by:
                self._cancel(job)
                return
            stop_by = min(stop_by, datetime.fromtimestamp(tag.stop_by, UTC))
        marked = replace(tag, stop_by=math.ceil(stop_by.timestamp()))
        if marked != tag:
            self._mark(job, marked, self._backstop(job, stop_by))
        if not tag.told:
            # Noted only afterwards: should the portal fall over in between, the next try signals once more.
            self._signal(job)
            self._mark(job, replace(marked, told=True))

    def _backstop(self, job: SlurmJob, stop_by: datetime) -> int | None:
        """A time limit for Slurm to end the job by if the portal does not: whole minutes, one to spare."""
        if job.started is None:
            return None
        minutes = math.ceil((stop_by - job.started).total_seconds() / 60) + 1
        return minutes if job.time_limit is None or minutes < job.time_limit else None

    def _mark(self, job: SlurmJob, tag: Tag, time_limit: int | None = None) -> None:
        try:
            self._transport.update(job, comment=tag.text(), time_limit=time_limit)
        except NotFound:
            logger.info("Slurm job %s was gone before it could be stopped", job.id)

    def _signal(self, job: SlurmJob) -> None:
        try:
            self._transport.signal(job)
        except NotFound:
            logger.info("Slurm job %s was gone before it could be signalled", job.id)

    def _started_record(self, attempt: UUID) -> int | None:
        """The Slurm job that has started the attempt; None when none has, or the folder cannot be read."""
        data = self._transport.read_file(f"{record_path(self._config, attempt)}.started", 0, 100)
        words = (data or b"").split()
        return int(words[0]) if words else None

    def _ended_record(self, attempt: UUID) -> tuple[int, datetime, str] | None:
        """Exit code, instant and job id that the batch script left behind; None when it has not ended so."""
        data = self._transport.read_file(f"{record_path(self._config, attempt)}.ended", 0, 100)
        words = (data or b"").split()
        if len(words) < 3:
            return None
        return int(words[0]), datetime.fromtimestamp(int(words[1]), UTC), words[2].decode()


class _passing:
    """Turns an error of credentials into ``Unreachable``: jobs keep their state while somebody mends the key."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadCredentials):
            raise Unreachable(str(error)) from error
        if isinstance(error, ValueError) and not isinstance(error, BackendError):
            raise Unreachable(f"Slurm answered something that cannot be read: {error}") from error


def choose(jobs: Sequence[SlurmJob], starter: int | None = None) -> SlurmJob:
    """Which of an attempt's Slurm jobs is the attempt: more than one come from a lost answer and a second submit.

    The ``starter``: the one whose batch script came first, which lets no other do anything. Where that is not known,
    the one that ran first; without any that ran, the oldest one alive.
    """
    for job in jobs:
        if job.id == starter:
            return job

    def rank(job: SlurmJob) -> tuple[bool, bool, float, int]:
        blocked = job.exit_status == STARTED_TWICE and _final(job)
        return blocked, job.started is None, job.started.timestamp() if job.started else float(_final(job)), job.id

    return min(jobs, key=rank)


def _final(job: SlurmJob, *, ignore_restarts: bool = False) -> bool:
    state, _ = job_state(job.states, restarts=0 if ignore_restarts else job.restarts)
    return state.final and not (ignore_restarts and state is RunState.REQUEUED)


def _never_accepted(job: SlurmJob) -> bool:
    """slurmctld keeps a record of some submits it has refused: failed, without nodes."""
    return "FAILED" in job.states and not job.nodes


def _leaders(jobs: Iterable[SlurmJob]) -> list[SlurmJob]:
    return [job for job in jobs if not job.het_offset]


def _by_job(jobs: Iterable[SlurmJob]) -> list[SlurmJob]:
    """One record per job: the components of each heterogeneous job are put together."""
    whole: dict[int, list[SlurmJob]] = defaultdict(list)
    for job in jobs:
        whole[job.het_leader or job.id].append(job)
    return [merge_components(parts) for parts in whole.values()]
