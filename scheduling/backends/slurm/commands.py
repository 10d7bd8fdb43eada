"""Slurm by its own commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from scheduling.backends.base import BackendError, Rejected, Unreachable
from scheduling.backends.slurm.errors import ENDED, UNKNOWN_JOB, classify
from scheduling.backends.slurm.records import SlurmJob, SlurmNode, read_job, read_node
from scheduling.backends.slurm.runner import Result, Runner
from scheduling.backends.slurm.transport import Group, Submission

_FORMAT = "%A|%T|%u|%N|%S|%l|%k"
_SUBMITTED = re.compile(rb"^(\d+)(;.*)?$", re.MULTILINE)


class CommandTransport:
    """See ``Transport``."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    # reading

    def version(self) -> str:
        return self._read(["sinfo", "--version"]).out.decode(errors="replace").strip()

    def warnings(self) -> tuple[str, ...]:
        return ()

    def check(self, nodes: Sequence[SlurmNode]) -> None:
        """sbatch can pin to any node."""

    def nodes(self) -> list[SlurmNode]:
        return [read_node(row) for row in self._json(["sinfo", "--json"], "nodes")]

    def topology(self) -> str | None:
        result = self._runner.run(["scontrol", "show", "topology"])
        if result.code and "no topology" not in result.err.lower():
            raise Unreachable(f"scontrol show topology: {result.err.strip()[:300]}")
        return result.out.decode(errors="replace").strip() or None

    def jobs(self) -> list[SlurmJob]:
        return [read_job(row) for row in self._json(["squeue", "--json"], "jobs")]

    def find(self, attempt: UUID, account: str) -> list[SlurmJob]:
        # Slurm sends only this account's jobs: cheap on a busy cluster, unlike squeue --json.
        jobs = self._list([f"--user={account}" if account else "--me"], account)
        return [job for job in jobs if job.tag is not None and job.tag.attempt == attempt]

    def lookup(self, job_id: int) -> list[SlurmJob]:
        return [job for job in self._list([f"--jobs={job_id}"], "") if job.id == job_id]

    def can_read(self) -> bool:
        return True

    def read_file(self, path: str, offset: int, limit: int) -> bytes | None:
        # The owner can swap the file for a link to another: only ever read with the owner's own rights.
        owner = self._runner.run(["stat", "--format=%U", "--", path])
        if owner.code:
            if "no such file" in owner.err.lower():
                return None
            raise Unreachable(f"{path} cannot be read: {owner.err.strip()}")
        flags = "iflag=skip_bytes,count_bytes,fullblock"
        argv = ["dd", f"if={path}", f"skip={offset}", f"count={limit}", "bs=64K", flags, "status=none"]
        result = self._runner.run(argv, account=owner.out.decode().strip())
        if result.code:
            raise Unreachable(f"{path} cannot be read: {result.err.strip()}")
        return result.out

    # changing

    def submit(self, job: Submission) -> int:
        argv = ["sbatch", "--parsable", *_options(job)]
        for number, group in enumerate(job.groups):
            if number:
                argv.append(":")
                argv += _common(job)
            argv += _resources(job, group)
        result = self._runner.run(argv, account=job.account, stdin=job.script.encode())
        match = _SUBMITTED.search(result.out)
        if result.code or match is None:
            raise _failure(result, "sbatch")
        return int(match[1])

    def update(self, job: SlurmJob, *, comment: str, time_limit: int | None) -> None:
        argv = ["scontrol", "update", f"JobId={job.id}", f"Comment={comment}"]
        if time_limit is not None:
            argv.append(f"TimeLimit={time_limit}")
        self._change(argv, job)

    def signal(self, job: SlurmJob) -> None:
        self._change(["scancel", "--signal=TERM", str(job.id)], job)

    def cancel(self, job: SlurmJob) -> None:
        # KILL ends a waiting job too; without it Slurm waits for KillWait after TERM.
        self._change(["scancel", "--signal=KILL", str(job.id)], job)
        if not job.nodes:
            self._change(["scancel", str(job.id)], job)

    # plumbing

    def _change(self, argv: list[str], job: SlurmJob) -> None:
        result = self._runner.run(argv, account=job.user)
        if any(text in result.err.lower() for text in ENDED):
            return
        # scancel says nothing of a job it does not know unless asked, and exits with 0 or 1 by version.
        if result.code or UNKNOWN_JOB in result.err.lower():
            raise _failure(result, argv[0])

    def _list(self, options: list[str], account: str) -> list[SlurmJob]:
        result = self._runner.run(["squeue", "--noheader", "--states=all", f"--format={_FORMAT}", *options])
        said = result.err.lower()
        if "invalid user" in said:
            raise Rejected(f"the cluster knows no account {account!r}")
        if UNKNOWN_JOB in said:
            return []
        if result.code:
            raise Unreachable(f"squeue: {result.err.strip()[:300]}")
        return [_read_line(line) for line in result.out.decode(errors="replace").splitlines()]

    def _read(self, argv: list[str]) -> Result:
        """Reading changes nothing, so whatever goes wrong may be tried again."""
        result = self._runner.run(argv)
        if result.code:
            raise Unreachable(f"{argv[0]}: {result.err.strip()[:300] or f'ended with code {result.code}'}")
        return result

    def _json(self, argv: list[str], key: str) -> list[dict[str, Any]]:
        result = self._read(argv)
        try:
            content = json.loads(result.out)
            rows = content[key]
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{' '.join(argv)} printed no JSON with {key!r}: {result.err.strip()[:300]}") from None
        if content.get("errors") and not rows:
            raise Unreachable(f"{' '.join(argv)}: {content['errors']}")
        return list(rows)


def _common(job: Submission) -> list[str]:
    """Options that each component of a heterogeneous job needs for itself."""
    words = [f"--comment={job.comment}", "--no-requeue"]
    for name in ("partition", "qos", "reservation"):
        if value := getattr(job, name):
            words.append(f"--{name}={value}")
    if job.charge:
        words.append(f"--account={job.charge}")
    if job.time_limit is not None:
        words.append(f"--time={job.time_limit}")
    if job.signal_before:
        words.append(f"--signal=TERM@{job.signal_before}")
    return words


def _options(job: Submission) -> list[str]:
    return [
        f"--job-name={job.name}",
        f"--output={job.output}",
        f"--chdir={job.directory}",
        "--export=ALL",
        "--open-mode=append",
        *_common(job),
    ]


def _resources(job: Submission, group: Group) -> list[str]:
    words = [
        f"--nodes={len(group.nodes)}",
        f"--nodelist={','.join(group.nodes)}",
        f"--ntasks={len(group.nodes) * group.workers_per_node}",
        f"--ntasks-per-node={group.workers_per_node}",
        f"--gres={group.gres}",
    ]
    if job.cpus_per_worker is not None:
        words.append(f"--cpus-per-task={job.cpus_per_worker}")
    if job.memory_per_worker is not None:
        words.append(f"--mem={job.memory_per_worker * group.workers_per_node}M")
    return words


def _failure(result: Result, name: str) -> BackendError:
    said = " ".join(result.err.split()) or result.out.decode(errors="replace").strip()[:300]
    return classify(said or f"{name} ended with code {result.code} and said nothing: try again")


def _read_line(line: str) -> SlurmJob:
    """One line of squeue in ``_FORMAT``; the commands run with TZ=UTC."""
    number, state, user, nodes, started, limit, comment = line.split("|", 6)
    return SlurmJob(
        id=int(number),
        states=(state,),
        user=user,
        comment=comment,
        nodes=nodes,
        started=None if state == "PENDING" or started == "N/A" else datetime.fromisoformat(f"{started}+00:00"),
        time_limit=_minutes(limit),
    )


def _minutes(text: str) -> int | None:
    """``[days-][hours:]minutes:seconds`` as minutes; None for no limit."""
    if not text[:1].isdigit():
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes = (parts[-3] if len(parts) > 2 else 0), parts[-2]
    return (int(days or 0) * 24 + hours) * 60 + minutes
