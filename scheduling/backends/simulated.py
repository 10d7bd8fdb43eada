"""A cluster that runs nothing and behaves as if it did: for trying out, demonstrations and tests.

Jobs last, fail, checkpoint, and produce logs and utilisation, at a chosen speed (``speed`` = 60: an hour of work passes
in a minute). Everything follows from the settings' seed, the job's id and the clock, so nothing has to run in between:
a restarted worker finds every job where it should be. What was started and stopped is kept in one SQLite file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from scheduling.backends.base import (
    Cause,
    Description,
    LogChunk,
    NodeCondition,
    NodeInfo,
    NodeReport,
    NotFound,
    Observation,
    Rejected,
    RunReport,
    RunState,
    Sample,
    StartCommand,
    Started,
    StopCommand,
    Unreachable,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    uuid TEXT PRIMARY KEY, job INTEGER NOT NULL, number INTEGER NOT NULL, started REAL NOT NULL,
    spec TEXT NOT NULL, stop_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS runs_job ON runs (job, number);
"""

#: Every log line has this many bytes, so that any part of a log can be made without the rest.
LINE = 64
#: Seconds of work per log line.
STEP = 10.0
SAMPLE_SECONDS = 60
_RANGE = re.compile(r"^(.*)\[(\d+)-(\d+)\](.*)$")


def chance(*parts: object) -> float:
    """A number from 0 to 1 that follows from its arguments alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True)
class Settings:
    """The ``config`` of a simulated cluster, checked."""

    speed: float
    seed: int
    failure_rate: float
    levels: tuple[str, ...]
    nodes: tuple[NodeInfo, ...]
    unreachable: bool
    samples: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Raises ``Rejected`` naming the field, the value and what is allowed."""
        known = {"speed", "seed", "failure_rate", "levels", "nodes", "down", "drained", "unreachable", "samples"}
        known |= {"dispatch_parallel"}
        for key in config:
            if key not in known:
                raise Rejected(f"config.{key}: unknown; allowed are {', '.join(sorted(known))}")
        speed = config.get("speed", 1)
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed <= 100_000:
            raise Rejected(f"config.speed: {speed!r} is not a number above 0 and up to 100,000")
        rate = config.get("failure_rate", 0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise Rejected(f"config.failure_rate: {rate!r} is not a number from 0 to 1")
        levels = tuple(str(level) for level in config.get("levels", ()))
        down, drained = set(config.get("down", ())), set(config.get("drained", ()))
        nodes = tuple(node for row in config.get("nodes", ()) for node in _nodes(row, levels, down, drained))
        if not nodes:
            raise Rejected("config.nodes: a list of nodes is needed, for example [{name: a[1-4], gpus: 8}]")
        if len({node.name for node in nodes}) != len(nodes):
            raise Rejected("config.nodes: a node name is given twice")
        return cls(
            float(speed),
            int(config.get("seed", 1)),
            float(rate),
            levels,
            nodes,
            bool(config.get("unreachable", False)),
            bool(config.get("samples", True)),
        )


def _nodes(row: Mapping[str, Any], levels: tuple[str, ...], down: set[str], drained: set[str]) -> Iterator[NodeInfo]:
    for key in ("name", "gpus"):
        if key not in row:
            raise Rejected(f"config.nodes: {key!r} is missing in {row!r}")
    gpus = row["gpus"]
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= 62:
        raise Rejected(f"config.nodes: gpus: {gpus!r} is not a whole number from 1 to 62")
    domains = {str(level): str(name) for level, name in dict(row.get("domains", {})).items()}
    for level in domains:
        if level not in levels:
            raise Rejected(f"config.nodes: domains: unknown level {level!r}; there are {', '.join(levels) or 'none'}")
    for name in _expand(str(row["name"])):
        condition = NodeCondition.UP
        if name in down:
            condition = NodeCondition.DOWN
        elif name in drained:
            condition = NodeCondition.DRAINED
        yield NodeInfo(
            name=name,
            gpu_model=str(row.get("gpu_model", "Simulated GPU")),
            gpus=gpus,
            gpu_memory=int(row.get("gpu_memory", 80 << 30)),
            domains=domains,
            condition=condition,
            reason="" if condition is NodeCondition.UP else "set in the cluster's settings",
            shareable=bool(row.get("shareable", False)),
        )


def _expand(name: str) -> list[str]:
    match = _RANGE.match(name)
    if match is None:
        return [name]
    first, last = int(match[2]), int(match[3])
    if not first <= last < first + 100_000:
        raise Rejected(f"config.nodes: name: the range {name!r} runs backwards or is too long")
    width = len(match[2]) if match[2].startswith("0") else 0
    return [f"{match[1]}{number:0{width}d}{match[4]}" for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run as it is and will be; instants in POSIX seconds of the real clock."""

    uuid: UUID
    number: int
    started: float
    ends: float
    state: RunState
    exit_code: int | None
    cause: Cause
    stop_at: float | None
    spec: dict[str, Any]
    speed: float

    def end(self) -> float:
        return self.ends if self.stop_at is None else min(self.ends, self.stop_at)

    def stopped(self) -> bool:
        return self.stop_at is not None and self.stop_at < self.ends

    def checkpoint(self, now: float) -> float | None:
        """Instant of the last checkpoint up to ``now``."""
        every = self.spec.get("checkpoint_every")
        if not every:
            return None
        done = int((min(now, self.end()) - self.started) * self.speed / every + 1e-9)
        return self.started + done * every / self.speed if done > 0 else None

    def saved(self, now: float) -> float:
        """Seconds of whole-gang work that this run has made safe."""
        last = self.checkpoint(now)
        return 0.0 if last is None else (last - self.started) * self.speed * self.spec["rate"]


class SimulatedBackend:
    """See the module. ``now`` is the clock, ``store`` the SQLite file (its folder is made)."""

    def __init__(self, config: Mapping[str, Any], *, store: Path, now: Callable[[], datetime]) -> None:
        self.settings = Settings.read(config)
        self._store = store
        self._clock = now

    # -- contract ----------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        self._answer()
        return Description("simulated", self.settings.levels, self.settings.nodes)

    def start(self, command: StartCommand) -> Started:
        self._answer()
        known = {node.name: node for node in self.settings.nodes}
        for slot in command.slots:
            node = known.get(slot.node)
            if node is None:
                raise Rejected(f"there is no node {slot.node}")
            if any(index >= node.gpus for index in slot.devices):
                raise Rejected(f"node {slot.node} has {node.gpus} GPUs, asked for {slot.devices}")
        spec = self._spec(command)
        with self._open() as db:
            db.execute(
                "INSERT INTO runs (uuid, job, number, started, spec) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (str(command.attempt), command.job_id, command.number, self._now(), json.dumps(spec)),
            )
        return Started(f"sim-{command.job_id}-{command.number}")

    def stop(self, command: StopCommand) -> None:
        self._answer()
        with self._open() as db:
            changed = db.execute(
                "UPDATE runs SET stop_at = coalesce(stop_at, ?) WHERE uuid = ?",
                (self._now() + command.grace.total_seconds(), str(command.attempt)),
            ).rowcount
        if not changed:
            raise NotFound(f"no attempt {command.attempt}")

    def observe(self, since: str, attempts: Sequence[UUID]) -> Observation:
        self._answer()
        now = self._now()
        with self._open() as db:
            runs = [run for run in (self._run(db, uuid) for uuid in attempts) if run is not None]
        down = {node.name for node in self.settings.nodes if node.condition is NodeCondition.DOWN}
        nodes = tuple(NodeReport(node.name, node.condition, node.reason) for node in self.settings.nodes)
        samples = tuple(self._samples(runs, since, now)) if self.settings.samples else ()
        return Observation(
            at=datetime.fromtimestamp(now, UTC),
            runs=tuple(self._report(run, now, down) for run in runs),
            nodes=nodes,
            cursor=str(int(now // SAMPLE_SECONDS * SAMPLE_SECONDS)),
            complete=True,
            samples=samples,
        )

    def logs(self, attempt: UUID, *, offset: int = 0, limit: int = 1 << 20, backend_id: str = "") -> LogChunk:
        self._answer()
        with self._open() as db:
            run = self._run(db, attempt)
        if run is None:
            raise NotFound(f"no attempt {attempt}")
        now = self._now()
        over = now >= run.end()
        lines = int((min(now, run.end()) - run.started) * run.speed / STEP) + 1 + int(over)
        size = lines * LINE
        offset = min(max(0, offset), size)
        end = min(size, offset + limit)
        data = b"".join(
            self._line(run, number, last=over and number == lines - 1)
            for number in range(offset // LINE, -(-end // LINE))
        )
        data = data[offset % LINE :][: end - offset]
        return LogChunk(offset, data, end, over and end == size)

    # -- how a run goes ----------------------------------------------------------------------------------------

    def _answer(self) -> None:
        if self.settings.unreachable:
            raise Unreachable("the cluster is set to be unreachable")

    def _now(self) -> float:
        return self._clock().timestamp()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self._store.parent.mkdir(parents=True, exist_ok=True)
        try:
            db = sqlite3.connect(self._store, timeout=10, isolation_level="IMMEDIATE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise Unreachable(f"{self._store.name}: {error}") from error
        try:
            with db:
                yield db
        except sqlite3.Error as error:
            raise Unreachable(f"{self._store.name}: {error}") from error
        finally:
            db.close()

    def _spec(self, command: StartCommand) -> dict[str, Any]:
        given = dict(command.simulation or {})
        workers, wanted = given.get("workers", [1, 1])
        return {
            "runs": float(given.get("runs", self._usual_length(command.job_id))),
            "fails": list(given.get("fails", ())),
            "checkpoint_every": given.get("checkpoint_every"),
            "rate": workers / wanted,
            "walltime": command.walltime.total_seconds() if command.walltime else None,
            "name": command.job_name,
            "slots": [[slot.node, list(slot.devices), slot.share] for slot in command.slots],
        }

    def _usual_length(self, job: int) -> float:
        """From ten minutes to five hours, more short ones than long ones."""
        return 600.0 * 30.0 ** chance(self.settings.seed, "length", job)

    def _run(self, db: sqlite3.Connection, uuid: UUID) -> _Run | None:
        row = db.execute("SELECT job, number, started, spec, stop_at FROM runs WHERE uuid = ?", (str(uuid),)).fetchone()
        if row is None:
            return None
        job, number, started, spec, stop_at = row
        saved = 0.0
        for earlier in db.execute(
            "SELECT uuid, number, started, spec, stop_at FROM runs WHERE job = ? AND number < ? ORDER BY number",
            (job, number),
        ).fetchall():
            run = self._planned(
                UUID(earlier[0]), job, earlier[1], earlier[2], json.loads(earlier[3]), earlier[4], saved
            )
            saved += run.saved(started)
        return self._planned(uuid, job, number, started, json.loads(spec), stop_at, saved)

    def _planned(
        self,
        uuid: UUID,
        job: int,
        number: int,
        started: float,
        spec: dict[str, Any],
        stop_at: float | None,
        saved: float,
    ) -> _Run:
        speed = self.settings.speed
        length = max(1.0, (spec["runs"] - saved) / spec["rate"])
        state, code, cause = RunState.SUCCEEDED, 0, Cause.NONE
        for failure in spec["fails"]:
            if failure["attempt"] == number and failure["after"] <= length:
                state, code = RunState.FAILED, int(failure.get("exit", 1))
                length, cause = float(failure["after"]), Cause(failure.get("cause", "user"))
        if not spec["fails"] and chance(self.settings.seed, "fails", job, number) < self.settings.failure_rate:
            state, code = RunState.FAILED, 1
            cause = Cause.OUT_OF_MEMORY if chance(self.settings.seed, "oom", job, number) < 0.3 else Cause.USER
            length *= chance(self.settings.seed, "when", job, number)
        if spec["walltime"] is not None and spec["walltime"] < length:
            state, code, cause, length = RunState.TIMED_OUT, 124, Cause.WALLTIME, spec["walltime"]
        return _Run(uuid, number, started, started + length / speed, state, code, cause, stop_at, spec, speed)

    def _report(self, run: _Run, now: float, down: set[str]) -> RunReport:
        started = datetime.fromtimestamp(run.started, UTC)
        devices: dict[str, tuple[int, ...]] = {}
        for node, indices, _ in run.spec["slots"]:
            devices[node] = (*devices.get(node, ()), *indices)
        checkpoint = run.checkpoint(now)
        first = run.started + (run.ends - run.started) * 0.1
        common: dict[str, Any] = {
            "attempt": run.uuid,
            "started_at": started,
            "devices": devices,
            "last_checkpoint_at": datetime.fromtimestamp(checkpoint, UTC) if checkpoint is not None else None,
            "first_result_at": datetime.fromtimestamp(first, UTC) if first <= min(now, run.end()) else None,
        }
        if now < run.end() and down & devices.keys():
            return RunReport(
                state=RunState.NODE_FAILED,
                ended_at=datetime.fromtimestamp(now, UTC),
                cause=Cause.NODE,
                detail=f"node {min(down & devices.keys())} is down",
                **common,
            )
        if now < run.end():
            state = RunState.RUNNING if run.stop_at is None else RunState.STOPPING
            return RunReport(state=state, **common)
        ended = datetime.fromtimestamp(run.end(), UTC)
        if run.stopped():
            return RunReport(state=RunState.CANCELLED, ended_at=ended, exit_code=143, detail="stopped", **common)
        detail = {RunState.FAILED: f"exit code {run.exit_code}", RunState.TIMED_OUT: "walltime reached"}
        return RunReport(
            state=run.state,
            ended_at=ended,
            exit_code=run.exit_code,
            cause=run.cause,
            detail=detail.get(run.state, ""),
            **common,
        )

    def _line(self, run: _Run, number: int, *, last: bool) -> bytes:
        at = datetime.fromtimestamp(run.started + number * STEP / run.speed, UTC)
        if number == 0:
            text = f"starting {run.spec['name']}"
        elif last:
            text = f"finished: {run.state.value if not run.stopped() else 'stopped by signal'}"
        else:
            text = f"step {number:>7}  loss {2.5 / (1 + number / 50) + 0.05 * chance(str(run.uuid), number):.4f}"
        line = f"{at:%H:%M:%S} {text}".encode(errors="replace")[: LINE - 1]
        return line.ljust(LINE - 1) + b"\n"

    def _samples(self, runs: Sequence[_Run], since: str, now: float) -> Iterator[Sample]:
        """A sample a device and minute, as a collector would deliver it; some are missing, as in life."""
        last = int(now // SAMPLE_SECONDS)
        first = int(float(since) // SAMPLE_SECONDS) + 1 if since else last
        for minute in range(max(first, last - 15), last + 1):
            at = minute * SAMPLE_SECONDS
            for run in runs:
                if not (run.started <= at - SAMPLE_SECONDS / 2 and at <= run.end() + SAMPLE_SECONDS / 2):
                    continue
                level = 0.35 + 0.6 * chance(run.spec["name"], "level")
                for node, indices, share in run.spec["slots"]:
                    for index in indices:
                        yield self._sample(run, node, index, share, level, at)

    def _sample(self, run: _Run, node: str, index: int, share: float, level: float, at: int) -> Sample:
        luck = chance(str(run.uuid), node, index, at)
        instant = datetime.fromtimestamp(at, UTC)
        if luck < 0.02:
            return Sample(node, index, instant, SAMPLE_SECONDS, None)
        activity = 0.0 if luck < 0.06 else min(1.0, max(0.0, level * share + 0.2 * (luck - 0.5)))
        return Sample(node, index, instant, SAMPLE_SECONDS, activity, "sm_active", 90 + 310 * activity, None)
