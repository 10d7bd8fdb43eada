"""The scenario format: hardware, teams, policy, jobs, events and what must come of them.

``read_scenario`` turns one YAML document into a :class:`Scenario`, or raises :class:`ScenarioError` naming file, line
and key. Nothing is run here. The format is described in docs/reference/scenario-format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from scheduling.engine.decisions import Code
from scheduling.engine.scenario_yaml import ScenarioError, Value, load
from scheduling.engine.snapshot import (
    GPU,
    Cluster,
    Discipline,
    Node,
    Policy,
    Pool,
    Priority,
    Quota,
    Request,
    Team,
    WorkloadClass,
)

__all__ = ["Event", "Expectation", "Failure", "JobSpec", "Scenario", "ScenarioError", "read_scenario"]

#: Opens a file named in a scenario (traces, node tables): name -> text.
Opener = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Failure:
    """A scripted failure of one attempt."""

    attempt: int
    after: float
    exit: int = 1
    cause: str = "user"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as the scenario gives it; ``request.pools`` are pool ids."""

    id: int
    name: str
    team: int
    request: Request
    runs: float
    at: float = 0.0
    user: str = ""
    walltime: float | None = None
    priority: Priority = Priority.NORMAL
    retries: int = 0
    after: tuple[str, ...] = ()
    not_before: float = 0.0
    fails: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at an instant; ``kind`` is node, cluster, quota, cancel or maintenance."""

    at: float
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expectation:
    """One row of ``expect``, with its place for messages."""

    path: str
    line: int
    row: Mapping[str, Any]

    @property
    def at(self) -> float | None:
        at = self.row.get("at")
        return None if at is None else float(at)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    file: str
    start: datetime
    tick: float
    policy: Policy
    clusters: tuple[Cluster, ...]
    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    teams: tuple[Team, ...]
    jobs: tuple[JobSpec, ...]
    events: tuple[Event, ...] = ()
    expect: tuple[Expectation, ...] = ()
    source: str = ""

    def leaf_teams(self) -> list[Team]:
        inner = {team.parent for team in self.teams}
        return [team for team in self.teams if team.id not in inner]


def read_scenario(text: str, file: str = "scenario.yaml", open_file: Opener | None = None) -> Scenario:
    """Raises :class:`ScenarioError`. ``open_file`` reads the files that traces name; without it they are refused."""
    return _Reader(load(text, file), file, open_file).read()


@dataclass(slots=True)
class _Reader:
    root: Value
    file: str
    open_file: Opener | None
    clusters: list[Cluster] = field(default_factory=list)
    pools: dict[str, Pool] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    node_ids: dict[str, int] = field(default_factory=dict)
    teams: dict[str, Team] = field(default_factory=dict)
    jobs: list[JobSpec] = field(default_factory=list)
    job_names: dict[str, Value] = field(default_factory=dict)
    requests: dict[Request, Request] = field(default_factory=dict)
    #: Guaranteed GPUs by team from a node table, for teams that the file does not list itself.
    owners: dict[str, dict[str, int]] = field(default_factory=dict)

    def read(self) -> Scenario:
        top = self.root.fields(
            "scenario", "source", "start", "tick", "policy", "clusters", "teams", "jobs", "events", "expect"
        )
        for key in ("scenario", "clusters", "jobs"):
            if key not in top:
                raise self.root.error(f"the key {key!r} is missing")
        policy = self._policy(top["policy"]) if "policy" in top else Policy()
        self._clusters(top["clusters"])
        if "teams" in top:
            self._teams(top["teams"], None)
        elif not self.owners:
            raise self.root.error("the key 'teams' is missing")
        self._teams_from_owners()
        self._jobs(top["jobs"])
        start = top["start"].instant() if "start" in top else datetime(2026, 1, 5, tzinfo=UTC)
        events = top["events"].each(self._event) if "events" in top else []
        expect = top["expect"].each(self._expectation) if "expect" in top else []
        scenario = Scenario(
            name=top["scenario"].text(),
            source=top["source"].text() if "source" in top else "",
            file=self.file,
            start=start,
            tick=top["tick"].duration(1) if "tick" in top else 30.0,
            policy=policy,
            clusters=tuple(self.clusters),
            pools=tuple(self.pools.values()),
            nodes=tuple(self.nodes),
            teams=tuple(self.teams.values()),
            jobs=tuple(self.jobs),
            events=tuple(sorted(events, key=lambda event: event.at)),
            expect=tuple(expect),
        )
        return _private(scenario) if policy.discipline is Discipline.PRIVATE else scenario

    # -- policy ------------------------------------------------------------------------------------------------

    def _policy(self, value: Value) -> Policy:
        names = [f.name for f in fields(Policy)]
        settings: dict[str, Any] = {}
        for key, entry in value.fields(*names).items():
            if key == "fragile_borrowing":
                settings[key] = None if entry.raw == "never" else entry.duration()
            elif key == "discipline":
                settings[key] = entry.choice(Discipline)
            elif key in ("reservation_depth", "infrastructure_retries"):
                settings[key] = entry.integer(0, 10_000)
            elif key in ("history_weight", "consolidation_budget"):
                settings[key] = entry.number()
            else:
                settings[key] = entry.duration(1 if key in ("half_life", "default_walltime") else 0)
        return Policy(**settings)

    # -- hardware ----------------------------------------------------------------------------------------------

    def _clusters(self, value: Value) -> None:
        for name, entry in value.items():
            parts = entry.fields("levels", "nodes", "nodes_from")
            levels = tuple(parts["levels"].each(Value.text)) if "levels" in parts else ()
            cluster = Cluster(len(self.clusters) + 1, name, levels)
            self.clusters.append(cluster)
            if "nodes" not in parts and "nodes_from" not in parts:
                raise entry.error("a cluster needs 'nodes' or 'nodes_from'")
            for row in parts["nodes"].elements() if "nodes" in parts else ():
                self._node_row(row, cluster)
            if "nodes_from" in parts:
                self._nodes_from(parts["nodes_from"], cluster)
        if not self.nodes:
            raise value.error("there are no nodes")

    def _node_row(self, row: Value, cluster: Cluster) -> None:
        parts = row.fields("name", "pool", "gpus", "in", "memory", "share")
        for key in ("name", "pool", "gpus"):
            if key not in parts:
                raise row.error(f"the key {key!r} is missing")
        domains = {}
        if "in" in parts:
            for level, entry in parts["in"].items():
                if level not in cluster.levels:
                    known = ", ".join(cluster.levels) or "none"
                    raise entry.error(f"unknown level; the levels of cluster {cluster.name} are: {known}")
                domains[level] = entry.text()
        memory = parts["memory"].size() if "memory" in parts else 0
        pool = self._pool(parts["pool"], cluster, memory)
        for name in parts["name"].names():
            if name in self.node_ids:
                raise parts["name"].error(f"node {name!r} is there already")
            self.add_node(
                name,
                pool,
                parts["gpus"].integer(1, 62),
                tuple(domains.get(level, "") for level in cluster.levels),
                shareable=parts["share"].boolean() if "share" in parts else False,
            )

    def add_node(
        self, name: str, pool: Pool, gpus: int, domains: tuple[str, ...] = (), *, shareable: bool = False
    ) -> None:
        number = len(self.nodes) + 1
        self.node_ids[name] = number
        self.nodes.append(Node(number, name, pool.id, gpus, domains, shareable=shareable))

    def _pool(self, value: Value, cluster: Cluster, memory: int) -> Pool:
        name = value.text()
        pool = self.pools.get(name)
        if pool is None:
            pool = self.pools[name] = Pool(len(self.pools) + 1, name, cluster.id, memory)
        elif pool.cluster != cluster.id:
            raise value.error(f"pool {name!r} belongs to another cluster; a pool is part of one cluster")
        elif memory and pool.memory and memory != pool.memory:
            raise value.error(f"pool {name!r} has devices of {pool.memory} bytes already; a pool has one GPU model")
        elif memory and not pool.memory:
            pool = self.pools[name] = replace(pool, memory=memory)
        return pool

    def _nodes_from(self, value: Value, cluster: Cluster) -> None:
        from scheduling.engine.traces import read_nodes

        parts = value.fields("file", "scale", "pool", "share", "format")
        if "file" not in parts:
            raise value.error("the key 'file' is missing")
        text = self._open(parts["file"])
        rows = read_nodes(
            text,
            parts["file"],
            scale=parts["scale"].number(0.0001, 1000) if "scale" in parts else 1.0,
            pool=parts["pool"].text() if "pool" in parts else None,
        )
        share = parts["share"].boolean() if "share" in parts else rows.shareable
        for row in rows.nodes:
            pool = self.pools.get(row.pool)
            if pool is None:
                pool = self.pools[row.pool] = Pool(len(self.pools) + 1, row.pool, cluster.id)
            self.add_node(row.name, pool, row.gpus, ("",) * len(cluster.levels), shareable=share)
            if row.owner:
                owned = self.owners.setdefault(row.owner, {})
                owned[row.pool] = owned.get(row.pool, 0) + row.gpus

    def _open(self, value: Value) -> str:
        if self.open_file is None:
            raise value.error("files cannot be read here; put the jobs into the scenario itself")
        try:
            return self.open_file(value.text())
        except OSError as error:
            raise value.error(f"cannot read {value.text()!r}: {error.strerror or error}") from None

    # -- teams -------------------------------------------------------------------------------------------------

    def _teams(self, value: Value, parent: Team | None) -> None:
        for name, entry in value.items():
            if name in self.teams:
                raise entry.error(f"team {name!r} is there already")
            parts = entry.fields("quota", "teams", "used")
            quotas = {}
            for pool, quota in parts["quota"].items() if "quota" in parts else ():
                quotas[self._known_pool(pool, quota).id] = self._quota(quota)
            used = {}
            for pool, hours in parts["used"].items() if "used" in parts else ():
                used[self._known_pool(pool, hours).id] = hours.number()
            team = Team(
                len(self.teams) + 1,
                name,
                parent.id if parent else None,
                MappingProxyType(quotas),
                MappingProxyType(used),
            )
            self.teams[name] = team
            if "teams" in parts:
                if used:
                    raise parts["used"].error("only leaf teams use GPUs")
                self._teams(parts["teams"], team)
        self._check_sums(value, parent)

    def _check_sums(self, value: Value, parent: Team | None) -> None:
        """Children's guarantees add up to no more than the parent's, the roots' to no more than the pool's."""
        children = [team for team in self.teams.values() if team.parent == (parent.id if parent else None)]
        for pool in self.pools.values():
            total = sum(team.quotas[pool.id].guaranteed for team in children if pool.id in team.quotas)
            if parent is not None:
                bound = parent.quotas[pool.id].guaranteed if pool.id in parent.quotas else 0
                owner = f"the guarantee of {parent.name}"
            else:
                bound = sum(node.gpus for node in self.nodes if node.pool == pool.id) * GPU
                owner = f"the capacity of pool {pool.name}"
            if total > bound:
                raise value.error(
                    f"guarantees in pool {pool.name} add up to {total / GPU:g}, more than {owner}, {bound / GPU:g}"
                )

    def _known_pool(self, name: str, value: Value) -> Pool:
        pool = self.pools.get(name)
        if pool is None:
            raise value.error(f"unknown pool; there are {', '.join(self.pools)}")
        return pool

    def _quota(self, value: Value, base: Quota | None = None) -> Quota:
        parts = value.fields("guaranteed", "limit", "weight")
        return self._quota_of(value, parts, base or Quota())

    def _quota_of(self, value: Value, parts: Mapping[str, Value], base: Quota) -> Quota:
        guaranteed, limit, weight = base.guaranteed, base.limit, base.weight
        if "guaranteed" in parts:
            guaranteed = round(parts["guaranteed"].number() * GPU)
        if "limit" in parts:
            limit = None if parts["limit"].raw is None else round(parts["limit"].number() * GPU)
        if "weight" in parts:
            weight = parts["weight"].number()
        if limit is not None and limit < guaranteed:
            raise value.error(f"limit {limit / GPU:g} is below the guaranteed {guaranteed / GPU:g}")
        return Quota(guaranteed, limit, weight)

    def _teams_from_owners(self) -> None:
        """Owners of a node table become teams with their nodes as guarantee, unless the file lists them."""
        for name, owned in self.owners.items():
            if name not in self.teams:
                quotas = {self.pools[pool].id: Quota(gpus * GPU) for pool, gpus in owned.items()}
                self.teams[name] = Team(len(self.teams) + 1, name, None, MappingProxyType(quotas))

    def leaf(self, value: Value) -> Team:
        name = value.text()
        team = self.teams.get(name)
        if team is None:
            raise value.error(f"unknown team {name!r}")
        if any(other.parent == team.id for other in self.teams.values()):
            raise value.error(f"team {name!r} has teams below it; only leaf teams own jobs")
        return team

    # -- jobs --------------------------------------------------------------------------------------------------

    def _jobs(self, value: Value) -> None:
        if value.is_mapping():
            parts = value.fields("trace")
            if "trace" not in parts:
                raise value.error("a list of jobs or 'trace:' is expected")
            self._trace(parts["trace"])
        else:
            for row in value.elements():
                if row.is_mapping() and any(key == "trace" for key, _ in row.items()):
                    self._trace(row.fields("trace")["trace"])
                else:
                    self._job(row)
        if not self.jobs:
            raise value.error("there are no jobs")
        for job in self.jobs:
            for name in job.after:
                if name not in self.job_names:
                    raise self.job_names[job.name].error(f"job {job.name!r} comes after an unknown job {name!r}")

    def _trace(self, value: Value) -> None:
        from scheduling.engine.traces import read_jobs

        parts = value.fields(*_TRACE_KEYS)
        for key in ("file", "format"):
            if key not in parts:
                raise value.error(f"the key {key!r} is missing")
        text = self._open(parts["file"])
        for row in read_jobs(text, value, parts, {name: t.id for name, t in self.teams.items()}, self.pools):
            name = row.name if row.name not in self.job_names else f"{row.name}-{len(self.jobs) + 1}"
            self.job_names[name] = value
            request = self.requests.setdefault(row.request, row.request)
            self.jobs.append(replace(row, id=len(self.jobs) + 1, name=name, request=request))

    def _job(self, row: Value) -> None:
        parts = row.fields(*_JOB_KEYS)
        for key in ("name", "team", "runs"):
            if key not in parts:
                raise row.error(f"the key {key!r} is missing")
        request = self._request(row, parts)
        team = self.leaf(parts["team"])
        spec = JobSpec(
            id=0,
            name=parts["name"].text(),
            team=team.id,
            user=parts["user"].text() if "user" in parts else "",
            at=parts["at"].duration() if "at" in parts else 0.0,
            request=self.requests.setdefault(request, request),
            runs=parts["runs"].duration(),
            walltime=parts["walltime"].duration(1) if "walltime" in parts else None,
            priority=self._priority(parts["priority"]) if "priority" in parts else Priority.NORMAL,
            retries=parts["retries"].integer(0, 100) if "retries" in parts else 0,
            after=tuple(parts["after"].names()) if "after" in parts else (),
            not_before=parts["not_before"].duration() if "not_before" in parts else 0.0,
            fails=tuple(parts["fails"].each(_failure)) if "fails" in parts else (),
        )
        count = parts["count"].integer(1, 1_000_000) if "count" in parts else None
        names = [spec.name] if count is None else [f"{spec.name}-{n}" for n in range(1, count + 1)]
        for name in names:
            if name in self.job_names:
                raise parts["name"].error(f"job {name!r} is there already")
            self.job_names[name] = row
            self.jobs.append(replace(spec, id=len(self.jobs) + 1, name=name))

    def _priority(self, value: Value) -> Priority:
        names = {priority.name.lower(): priority for priority in Priority}
        if value.text() not in names:
            raise value.error(f"{value.text()!r} is not one of {', '.join(names)}")
        return names[value.text()]

    def _request(self, row: Value, parts: Mapping[str, Value]) -> Request:
        if ("gpus" in parts) == ("share" in parts):
            raise row.error("give either 'gpus' (whole GPUs per worker) or 'share' (a part of one GPU)")
        pools = tuple(pool.id for pool in self.pools.values())
        if "pools" in parts:
            pools = tuple(self._known_pool(entry.text(), entry).id for entry in parts["pools"].elements())
            if not pools:
                raise parts["pools"].error("at least one pool is needed")
        workers = parts["workers"].integer(1, 100_000) if "workers" in parts else 1
        share = share_memory = 0
        if "share" in parts:
            entry = parts["share"]
            if isinstance(entry.raw, int | float) and not isinstance(entry.raw, bool):
                share = round(entry.number(1 / GPU, 1) * GPU)
            else:
                share_memory = entry.size()
            if workers != 1:
                raise parts["workers"].error("a job with a share of a GPU has one worker")
        level, required = self._topology(parts["topology"]) if "topology" in parts else (None, False)
        least = parts["min_workers"].integer(1, workers) if "min_workers" in parts else workers
        return Request(
            pools=pools,
            gpus=parts["gpus"].integer(1, 10_000) if "gpus" in parts else 0,
            share=share,
            share_memory=share_memory,
            workers=workers,
            min_workers=least,
            interruptible=parts["interruptible"].boolean() if "interruptible" in parts else False,
            checkpoint_every=parts["checkpoint_every"].duration(1) if "checkpoint_every" in parts else None,
            grace=parts["grace"].duration() if "grace" in parts else 0.0,
            level=level,
            required=required,
            workload=parts["class"].choice(WorkloadClass) if "class" in parts else WorkloadClass.TRAINING,
        )

    def _topology(self, value: Value) -> tuple[str, bool]:
        parts = value.fields("required", "preferred")
        if len(parts) != 1:
            raise value.error("give either 'required' or 'preferred'")
        ((kind, entry),) = parts.items()
        level = entry.text()
        known = {name for cluster in self.clusters for name in cluster.levels} | {"node"}
        if level not in known:
            raise entry.error(f"unknown level {level!r}; there are {', '.join(sorted(known))}")
        return level, kind == "required"

    # -- events ------------------------------------------------------------------------------------------------

    def _event(self, row: Value) -> Event:
        parts = row.fields("at", "node", "is", "cluster", "quota", "cancel", "maintenance")
        if "at" not in parts:
            raise row.error("the key 'at' is missing")
        at = parts["at"].duration()
        kinds = [key for key in ("node", "cluster", "quota", "cancel", "maintenance") if key in parts]
        if len(kinds) != 1:
            raise row.error("an event has exactly one of node, cluster, quota, cancel, maintenance")
        kind = kinds[0]
        if ("is" in parts) != (kind in ("node", "cluster")):
            raise row.error("'is' goes with node (down, drained, up) and cluster (unreachable, reachable)")
        return Event(at, kind, getattr(self, f"_event_{kind}")(parts))

    def _event_node(self, parts: dict[str, Value]) -> dict[str, Any]:
        states = ("down", "drained", "up")
        if parts["is"].text() not in states:
            raise parts["is"].error(f"{parts['is'].text()!r} is not one of {', '.join(states)}")
        return {"nodes": self._nodes_named(parts["node"]), "is": parts["is"].text()}

    def _event_cluster(self, parts: dict[str, Value]) -> dict[str, Any]:
        states = ("unreachable", "reachable")
        names = {cluster.name: cluster.id for cluster in self.clusters}
        if parts["is"].text() not in states:
            raise parts["is"].error(f"{parts['is'].text()!r} is not one of {', '.join(states)}")
        if parts["cluster"].text() not in names:
            raise parts["cluster"].error(f"unknown cluster; there are {', '.join(names)}")
        return {"cluster": names[parts["cluster"].text()], "reachable": parts["is"].text() == "reachable"}

    def _event_quota(self, parts: dict[str, Value]) -> dict[str, Any]:
        inner = parts["quota"].fields("team", "pool", "guaranteed", "limit", "weight")
        for key in ("team", "pool"):
            if key not in inner:
                raise parts["quota"].error(f"the key {key!r} is missing")
        if inner["team"].text() not in self.teams:
            raise inner["team"].error(f"unknown team {inner['team'].text()!r}")
        pool = self._known_pool(inner["pool"].text(), inner["pool"])
        changes = {}
        for key in ("guaranteed", "limit", "weight"):
            if key in inner:
                raw = inner[key].raw
                changes[key] = None if raw is None and key == "limit" else inner[key].number()
        return {"team": self.teams[inner["team"].text()].id, "pool": pool.id, "changes": changes}

    def _event_cancel(self, parts: dict[str, Value]) -> dict[str, Any]:
        if parts["cancel"].text() not in self.job_names:
            raise parts["cancel"].error(f"unknown job {parts['cancel'].text()!r}")
        return {"job": parts["cancel"].text()}

    def _event_maintenance(self, parts: dict[str, Value]) -> dict[str, Any]:
        inner = parts["maintenance"].fields("nodes", "from", "to", "team")
        for key in ("nodes", "from", "to"):
            if key not in inner:
                raise parts["maintenance"].error(f"the key {key!r} is missing")
        begins, ends = inner["from"].duration(), inner["to"].duration()
        if ends <= begins:
            raise inner["to"].error("the window ends before it begins")
        team = None
        if "team" in inner:
            if inner["team"].text() not in self.teams:
                raise inner["team"].error(f"unknown team {inner['team'].text()!r}")
            team = self.teams[inner["team"].text()].id
        return {"nodes": self._nodes_named(inner["nodes"]), "from": begins, "to": ends, "team": team}

    def _nodes_named(self, value: Value) -> list[int]:
        found = []
        for name in value.names():
            if name not in self.node_ids:
                raise value.error(f"unknown node {name!r}")
            found.append(self.node_ids[name])
        return found

    # -- expectations ------------------------------------------------------------------------------------------

    def _expectation(self, row: Value) -> Expectation:
        parts = row.fields(
            "at", "running", "waiting", "finished", "job", "starts", "ends", "attempts", "lost_gpu_hours", "state",
            "team", "pool", "share", "allocated", "evictions", "never",
        )  # fmt: skip
        read: dict[str, Any] = {}
        for key, value in parts.items():
            if key in ("at", "starts", "ends"):
                read[key] = None if value.raw is None else value.duration()
            elif key == "running":
                read[key] = self._running(value)
            elif key == "waiting":
                read[key] = self._waiting(value)
            elif key == "finished":
                read[key] = {self._known_job(name, v): v.text() for name, v in value.items()}
            elif key == "never":
                inner = value.fields("running")
                read[key] = {"running": [self._known_job(e.text(), e) for e in inner["running"].elements()]}
            elif key in ("attempts", "evictions"):
                read[key] = value.integer()
            elif key in ("lost_gpu_hours", "share", "allocated"):
                read[key] = value.number()
            elif key == "job":
                read[key] = self._known_job(value.text(), value)
            elif key == "team":
                if value.text() not in self.teams:
                    raise value.error(f"unknown team {value.text()!r}")
                read[key] = value.text()
            elif key == "pool":
                read[key] = self._known_pool(value.text(), value).name
            else:
                read[key] = value.text()
        if not {"at", "job", "evictions", "never"} & read.keys():
            raise row.error("a row needs 'at', 'job', 'evictions' or 'never'")
        if "team" in read and not {"pool", "at"} <= read.keys():
            raise row.error("a row about a team needs 'pool' and 'at'")
        return Expectation(row.path, row.line, MappingProxyType(read))

    def _running(self, value: Value) -> dict[str, dict[str, Any]]:
        if value.is_list():
            return {self._known_job(entry.text(), entry): {} for entry in value.elements()}
        rows: dict[str, dict[str, Any]] = {}
        for name, entry in value.items():
            parts = entry.fields("nodes", "gpus", "pool", "attempt", "filler", "workers")
            wanted: dict[str, Any] = {}
            for key, part in parts.items():
                if key == "nodes":
                    wanted[key] = sorted(part.names())
                elif key == "filler":
                    wanted[key] = part.boolean()
                elif key == "pool":
                    wanted[key] = part.text()
                else:
                    wanted[key] = part.number()
            rows[self._known_job(name, entry)] = wanted
        return rows

    def _waiting(self, value: Value) -> dict[str, list[str]]:
        if value.is_list():
            return {self._known_job(entry.text(), entry): [] for entry in value.elements()}
        rows = {}
        for name, entry in value.items():
            codes = []
            for code in entry.elements():
                codes.append(code.choice(Code).value)
            rows[self._known_job(name, entry)] = codes
        return rows

    def _known_job(self, name: str, value: Value) -> str:
        if name not in self.job_names:
            raise value.error(f"unknown job {name!r}")
        return name


_JOB_KEYS = (
    "name", "team", "user", "at", "gpus", "share", "workers", "min_workers", "pools", "runs", "walltime", "class",
    "priority", "interruptible", "checkpoint_every", "grace", "topology", "retries", "after", "not_before", "fails",
    "count",
)  # fmt: skip

_TRACE_KEYS = (
    "file", "format", "from", "to", "interruptible", "checkpoint_every", "grace", "pools", "team", "seed", "runs",
    "demand",
)  # fmt: skip


def _failure(value: Value) -> Failure:
    parts = value.fields("attempt", "after", "exit", "cause")
    for key in ("attempt", "after"):
        if key not in parts:
            raise value.error(f"the key {key!r} is missing")
    return Failure(
        parts["attempt"].integer(1, 10_000),
        parts["after"].duration(),
        parts["exit"].integer(0, 255) if "exit" in parts else 1,
        parts["cause"].text() if "cause" in parts else "user",
    )


def _private(scenario: Scenario) -> Scenario:
    """``discipline: private``: each leaf team alone on as many nodes as its guarantee is worth, first come first
    served. Nodes are dealt in their order; what belongs to nobody is left out."""
    pools: list[Pool] = []
    owner: dict[int, int] = {}
    own_pools: dict[tuple[int, int], int] = {}
    left = {pool.id: [node for node in scenario.nodes if node.pool == pool.id] for pool in scenario.pools}
    for team in scenario.leaf_teams():
        for pool in scenario.pools:
            quota = team.quotas.get(pool.id)
            missing = quota.guaranteed // GPU if quota else 0
            if missing <= 0:
                continue
            mine = replace(pool, id=len(pools) + 1, name=f"{pool.name}@{team.name}")
            pools.append(mine)
            own_pools[team.id, pool.id] = mine.id
            while missing > 0 and left[pool.id]:
                node = left[pool.id].pop(0)
                owner[node.id] = mine.id
                missing -= node.gpus
    jobs = []
    for job in scenario.jobs:
        mapped = tuple(own_pools[job.team, pool] for pool in job.request.pools if (job.team, pool) in own_pools)
        if mapped:
            jobs.append(replace(job, request=replace(job.request, pools=mapped)))
    shared: dict[Request, Request] = {}
    interned = [replace(job, request=shared.setdefault(job.request, job.request)) for job in jobs]
    return replace(
        scenario,
        policy=replace(scenario.policy, discipline=Discipline.FIFO),
        pools=tuple(pools),
        nodes=tuple(replace(node, pool=owner[node.id]) for node in scenario.nodes if node.id in owner),
        teams=tuple(replace(team, quotas=MappingProxyType({}), used=MappingProxyType({})) for team in scenario.teams),
        jobs=tuple(interned),
    )
