"""The live engine driven by a virtual clock.

Nothing here decides anything: jobs arrive, run, fail and end as the scenario says, and ``plan_state`` is asked after
everything that happens. The same scenario gives the same run every time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scheduling.engine.decisions import Blocker, Evict, Plan, Start
from scheduling.engine.plan import plan_state
from scheduling.engine.retry import Outcome, after_attempt
from scheduling.engine.scenario import Event, JobSpec, Scenario
from scheduling.engine.snapshot import (
    GPU,
    HOUR,
    NO_QUOTA,
    Attempt,
    AttemptState,
    Hold,
    Job,
    NodeState,
    Placement,
    Window,
    WindowKind,
)
from scheduling.engine.state import State
from scheduling.engine.work import placement_amount

#: Called now and then with the share of jobs that are finished, 0 to 1.
Progress = Callable[[float], None]

#: Plans at one instant before the simulation gives up: a rule undoes what another does.
MOST_PLANS_AT_ONCE = 1000


class Livelock(RuntimeError):
    """The engine goes on deciding at one instant without end: a defect of the engine, never of the scenario."""


@dataclass(slots=True)
class RanAttempt:
    """One attempt as it went; times in seconds from the start of the scenario."""

    number: int
    start: float
    placement: Placement
    pool: int
    workers: int
    filler: bool
    end: float | None = None
    outcome: Outcome | None = None
    cause: str = ""
    lost_gpu_seconds: float = 0.0
    reason: str = ""

    @property
    def gpus(self) -> float:
        return placement_amount(self.placement) / GPU


@dataclass(slots=True)
class SimJob:
    """A job and where it stands. ``saved`` is work that no eviction can take, in seconds of an undisturbed run."""

    spec: JobSpec
    state: str = "pending"  # pending, waiting, running, succeeded, failed, timed_out, cancelled
    attempts: list[RanAttempt] = field(default_factory=list)
    saved: float = 0.0
    user_failures: int = 0
    infrastructure_failures: int = 0
    unmet: set[str] = field(default_factory=set)
    backoff_until: float = 0.0
    avoid: frozenset[int] = frozenset()
    eligible_at: float = 0.0
    end: float | None = None
    open: Attempt | None = None
    blockers: tuple[Blocker, ...] = ()
    #: Seconds added to the remaining work by restarts (``restart_cost``).
    redo: float = 0.0

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def lost_gpu_hours(self) -> float:
        return sum(attempt.lost_gpu_seconds for attempt in self.attempts) / HOUR


@dataclass(slots=True)
class Moment:
    """What ``expect`` rows of one instant are checked against, after everything has been decided."""

    at: float
    running: dict[str, tuple[Attempt, int]]
    waiting: dict[str, tuple[Blocker, ...]]
    finished: dict[str, str]
    #: (team id, pool id) -> (share, allocated), in millionths.
    teams: dict[tuple[int, int], tuple[float, int]]


@dataclass(slots=True)
class Run:
    """A finished simulation."""

    scenario: Scenario
    jobs: dict[str, SimJob]
    end: float
    evictions: int
    moments: dict[float, Moment]
    cycle_seconds: list[float]
    #: GPU-seconds (millionths) held by (team id, pool id).
    held: dict[tuple[int, int], float]
    #: GPU-seconds that existed, by pool id.
    capacity: dict[int, float]
    last: Moment
    timeline: list[tuple[float, str, str]]


_ORDER = {"end": 0, "event": 1, "submit": 2, "wake": 3}


class Simulation:
    """One run of a scenario; ``run`` does it all."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        until: float | None = None,
        explain: bool = False,
        clock: Callable[[], float] | None = None,
        timeline: bool = False,
    ) -> None:
        """``explain`` works out blockers in every cycle, not only where ``expect`` asks. ``clock`` times cycles."""
        self.scenario = scenario
        self.until = until
        self.explain = explain
        self.clock = clock or (lambda: 0.0)
        self.state = State(
            now=0.0,
            policy=scenario.policy,
            clusters=scenario.clusters,
            pools=scenario.pools,
            nodes=scenario.nodes,
            teams=scenario.teams,
        )
        self.nodes = {node.id: node for node in scenario.nodes}
        self.jobs = {spec.name: SimJob(spec, unmet=set(spec.after)) for spec in scenario.jobs}
        self.by_id = {job.spec.id: job for job in self.jobs.values()}
        self.dependents: dict[str, list[str]] = {}
        for job in self.jobs.values():
            for name in job.spec.after:
                self.dependents.setdefault(name, []).append(job.spec.name)
        self.windows: list[Window] = []
        self.queue: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self.attempt_numbers = 0
        self.evictions = 0
        self.moments: dict[float, Moment] = {}
        self.cycle_seconds: list[float] = []
        self.held: dict[tuple[int, int], float] = {}
        self.timeline: list[tuple[float, str, str]] | None = [] if timeline else None
        self.unfinished = len(self.jobs)
        self.wakes: set[float] = set()
        for spec in scenario.jobs:
            self._at(spec.at, "submit", spec.name)
        for event in scenario.events:
            self._at(event.at, "event", event)
        self.looks = sorted({row.at for row in scenario.expect if row.at is not None})
        for at in self.looks:
            self._at(at, "wake", None)

    def _at(self, at: float, kind: str, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self.queue, (at, _ORDER[kind], self._serial, (kind, what)))

    # -- the clock ---------------------------------------------------------------------------------------------

    def run(self, progress: Progress | None = None) -> Run:
        looks = set(self.looks)
        told = 0
        while self.queue:
            now = self.queue[0][0]
            if self.until is not None and now > self.until:
                break
            if not self.unfinished and not any(at >= now for at in looks):
                break
            self.state.advance(now)
            while self.queue and self.queue[0][0] == now:
                kind, what = heapq.heappop(self.queue)[3]
                self._happen(kind, what)
            look = now in looks
            plan = self._decide(explain=look or self.explain)
            self._after(now, plan)
            if look:
                self.moments[now] = self._moment(now, plan)
                looks.discard(now)
            if progress is not None and told != self.unfinished:
                told = self.unfinished
                progress(1.0 - self.unfinished / max(1, len(self.jobs)))
        return self._result()

    def _after(self, now: float, plan: Plan) -> None:
        """Plan the next cycle besides those that events trigger."""
        self.wakes.discard(now)
        waiting = bool(self.state.queues or self.state.holds)
        if plan.wake_at is not None:
            self._wake(plan.wake_at)
        if waiting:
            tick = self.scenario.tick
            self._wake((int(now / tick + 1e-9) + 1) * tick)

    def _wake(self, at: float) -> None:
        """A cycle at ``at``, unless something happens before then anyway and asks again."""
        if at in self.wakes or (self.wakes and min(self.wakes) <= at and len(self.wakes) > 4):
            return
        if self._stuck():
            return
        self.wakes.add(at)
        self._at(at, "wake", None)

    def _stuck(self) -> bool:
        """Nothing runs, nothing will happen, and what waits never starts: ticking on would not end."""
        ahead = any(entry[3][0] != "wake" for entry in self.queue)
        if ahead or self.state.running or self.state.due or self.state.holds:
            return False
        return not any(window.ends > self.state.now for window in self.windows)

    def _decide(self, *, explain: bool) -> Plan:
        """Plan until nothing changes at this instant.

        Returns the last plan; its blockers are those of the last plan that decided something, where each job was
        judged when its turn came.
        """
        decided: Plan | None = None
        for _ in range(MOST_PLANS_AT_ONCE):
            began = self.clock()
            plan = plan_state(self.state, explain=explain)
            self.cycle_seconds.append(self.clock() - began)
            self.state.growable_since = dict(plan.growable_since)
            if not (plan.starts or plan.evictions or plan.holds or plan.released):
                return plan if decided is None else replace(plan, blocked=decided.blocked)
            decided = plan
            self._carry_out(plan)
            if not explain and not (plan.evictions or plan.holds or plan.released):
                return plan  # starts alone leave nothing that could start next: capacity has only shrunk
        raise Livelock(f"{MOST_PLANS_AT_ONCE} plans at {self.state.now:g} s without an end")

    # -- what the engine decided -------------------------------------------------------------------------------

    def _carry_out(self, plan: Plan) -> None:
        for job_id in plan.released:
            self.state.release(job_id)
        for start in plan.starts:
            self._start(start)
        for hold in plan.holds:
            self.state.hold(Hold(hold.job, hold.pool, hold.placement, hold.expires, hold.victims, hold.workers))
        for eviction in plan.evictions:
            self._evict(eviction)

    def _start(self, start: Start) -> None:
        job = self.by_id[start.job]
        now = self.state.now
        request = job.spec.request
        self.attempt_numbers += 1
        attempt = Attempt(
            id=self.attempt_numbers,
            job=self.state.jobs[start.job],
            pool=start.pool,
            placement=start.placement,
            started=now,
            filler=start.filler,
            workers=start.workers,
            regular_checkpoints=request.checkpoint_every,
        )
        if start.from_hold:
            self.state.release(start.job)
        self.state.begin(attempt)
        ran = RanAttempt(len(job.attempts) + 1, now, start.placement, start.pool, start.workers, start.filler)
        job.attempts.append(ran)
        job.state, job.open, job.blockers = "running", attempt, ()
        self._note("starts", job, f"attempt {ran.number} on {self._places(ran)}")
        self._schedule_end(job, attempt, ran)

    def _schedule_end(self, job: SimJob, attempt: Attempt, ran: RanAttempt) -> None:
        rate = attempt.workers / job.spec.request.workers
        remaining = max(0.0, job.spec.runs - job.saved + job.redo) / rate
        outcome, cause, after = Outcome.SUCCEEDED, "", remaining
        for failure in job.spec.fails:
            if failure.attempt == ran.number and failure.after <= after:
                outcome, cause, after = Outcome.FAILED, failure.cause, failure.after
        walltime = job.spec.walltime
        if walltime is not None and walltime < after:
            outcome, cause, after = Outcome.TIMED_OUT, "walltime", walltime
        self._at(attempt.started + after, "end", (attempt.id, outcome, cause))

    def _evict(self, eviction: Evict) -> None:
        attempt = self.state.running[eviction.attempt]
        job = self.by_id[attempt.job.id]
        self.evictions += 1
        self._note("evicted", job, f"{eviction.reason} for {self._name(eviction.for_job)}; {eviction.because}")
        job.attempts[-1].reason = eviction.reason
        if eviction.free_at <= self.state.now:
            self._end(job, Outcome.PREEMPTED, "preemption")
            return
        stopping = replace(attempt, state=AttemptState.STOPPING, stopping_until=eviction.free_at)
        self.state.update_attempt(stopping)
        job.open = stopping
        self._at(eviction.free_at, "end", (attempt.id, Outcome.PREEMPTED, "preemption"))

    # -- what happens ------------------------------------------------------------------------------------------

    def _happen(self, kind: str, what: Any) -> None:
        if kind == "submit":
            self._submit(self.jobs[what])
        elif kind == "end":
            number, outcome, cause = what
            attempt = self.state.running.get(number)
            if attempt is not None:
                self._end(self.by_id[attempt.job.id], outcome, cause)
        elif kind == "event":
            getattr(self, f"_event_{what.kind}")(what)

    def _submit(self, job: SimJob) -> None:
        if job.finished:
            return
        job.state = "waiting"
        job.eligible_at = max(self.state.now, job.spec.not_before)
        job.unmet = {name for name in job.unmet if self.jobs[name].state != "succeeded"}
        if any(self.jobs[name].finished for name in job.unmet):
            self._finish(job, "cancelled")
            return
        self._note("submitted", job, "")
        self.state.submit(self._row(job))

    def _row(self, job: SimJob) -> Job:
        spec = job.spec
        return Job(
            id=spec.id,
            name=spec.name,
            team=spec.team,
            request=spec.request,
            priority=spec.priority,
            submitted=spec.at,
            walltime=spec.walltime,
            unmet=tuple(sorted(job.unmet)),
            not_before=spec.not_before,
            backoff_until=job.backoff_until,
            avoid=job.avoid,
            duration=spec.runs,
        )

    def _end(self, job: SimJob, outcome: Outcome, cause: str, failed_nodes: frozenset[int] = frozenset()) -> None:
        """An attempt is over: work is saved or lost, and the job is final or goes back to the queue."""
        attempt, ran, now = job.open, job.attempts[-1], self.state.now
        if attempt is None:
            raise AssertionError(f"job {job.spec.name} has no open attempt")
        self.state.end(attempt.id)
        job.open = None
        ran.end, ran.outcome, ran.cause = now, outcome, cause
        amount = placement_amount(ran.placement)
        key = (job.spec.team, ran.pool)
        self.held[key] = self.held.get(key, 0.0) + amount * (now - ran.start)
        if outcome is not Outcome.SUCCEEDED:
            self._save(job, attempt, ran, outcome)
        self._note("ends", job, f"attempt {ran.number} {outcome}")
        policy = self.scenario.policy
        then = after_attempt(
            outcome,
            retries=job.spec.retries,
            user_failures=job.user_failures,
            infrastructure_failures=job.infrastructure_failures,
            policy=policy,
        )
        job.user_failures, job.infrastructure_failures = then.user_failures, then.infrastructure_failures
        if then.final is not None:
            self._finish(job, then.final.value)
            return
        if outcome is not Outcome.PREEMPTED:
            job.backoff_until = now + then.delay
            job.avoid = failed_nodes or frozenset(slot.node for slot in ran.placement)
        job.state, job.eligible_at = "waiting", max(now, job.backoff_until)
        self.state.submit(self._row(job))

    def _save(self, job: SimJob, attempt: Attempt, ran: RanAttempt, outcome: Outcome) -> None:
        now = self.state.now
        saved_at = attempt.checkpoint_before(now)
        rate = attempt.workers / job.spec.request.workers
        if saved_at is not None:
            job.saved = min(job.spec.runs + job.redo, job.saved + (saved_at - attempt.started) * rate)
        since = attempt.started if saved_at is None else saved_at
        cost = self.scenario.policy.restart_cost if outcome is Outcome.PREEMPTED else 0.0
        job.redo += cost * rate
        ran.lost_gpu_seconds = ran.gpus * (now - since + cost)

    def _finish(self, job: SimJob, state: str) -> None:
        job.state, job.end = state, self.state.now
        self.unfinished -= 1
        self._note("finished", job, state)
        for name in self.dependents.get(job.spec.name, ()):
            dependent = self.jobs[name]
            if dependent.finished:
                continue
            if state == "succeeded":
                dependent.unmet.discard(job.spec.name)
                if dependent.state == "waiting":
                    dependent.eligible_at = max(dependent.eligible_at, self.state.now)
                    self.state.submit(self._row(dependent))
            else:
                if dependent.state == "waiting":
                    self.state.withdraw(dependent.spec.id)
                self._finish(dependent, "cancelled")

    # -- events of the scenario --------------------------------------------------------------------------------

    def _event_node(self, event: Event) -> None:
        state = NodeState(event.data["is"])
        for number in event.data["nodes"]:
            node = replace(self.nodes[number], state=state)
            self.nodes[number] = node
            self.state.set_node(node)
            if state is NodeState.DOWN:
                lost = [
                    attempt
                    for attempt in self.state.by_pool[node.pool].values()
                    if any(slot.node == number for slot in attempt.placement)
                ]
                for attempt in sorted(lost, key=lambda attempt: attempt.id):
                    self._end(self.by_id[attempt.job.id], Outcome.NODE_FAILED, "node", frozenset({number}))
                for hold in [h for h in self.state.holds.values() if any(s.node == number for s in h.placement)]:
                    self.state.release(hold.job)

    def _event_cluster(self, event: Event) -> None:
        cluster = replace(self.state.clusters[event.data["cluster"]], reachable=event.data["reachable"])
        self.state.set_cluster(cluster)

    def _event_quota(self, event: Event) -> None:
        team, pool, changes = event.data["team"], event.data["pool"], event.data["changes"]
        position = self.state.teams.index[team]
        teams = self.state.teams
        quota = replace(
            NO_QUOTA,
            guaranteed=teams.guaranteed[pool][position],
            limit=teams.limit[pool][position],
            weight=teams.weight[pool][position],
        )
        if "guaranteed" in changes:
            quota = replace(quota, guaranteed=round(changes["guaranteed"] * GPU))
        if "limit" in changes:
            limit = changes["limit"]
            quota = replace(quota, limit=None if limit is None else round(limit * GPU))
        if "weight" in changes:
            quota = replace(quota, weight=changes["weight"])
        self.state.set_quota(team, pool, quota)

    def _event_cancel(self, event: Event) -> None:
        job = self.jobs[event.data["job"]]
        if job.finished:
            return
        if job.open is not None:
            self._end(job, Outcome.CANCELLED, "")
        else:
            if job.state == "waiting":
                self.state.withdraw(job.spec.id)
            self._finish(job, "cancelled")

    def _event_maintenance(self, event: Event) -> None:
        data = event.data
        kind = WindowKind.MAINTENANCE if data["team"] is None else WindowKind.RESERVATION
        self.windows.append(
            Window(
                len(self.windows) + 1,
                f"{kind.value} {len(self.windows) + 1}",
                kind,
                tuple(data["nodes"]),
                data["from"],
                data["to"],
                data["team"],
            )
        )
        self.state.set_windows(self.windows)

    # -- what is told ------------------------------------------------------------------------------------------

    def _name(self, job_id: int | None) -> str:
        return "-" if job_id is None else self.by_id[job_id].spec.name

    def _places(self, ran: RanAttempt) -> str:
        return ",".join(sorted({self.nodes[slot.node].name for slot in ran.placement}))

    def _note(self, what: str, job: SimJob, detail: str) -> None:
        if self.timeline is not None:
            self.timeline.append((self.state.now, what, f"{job.spec.name} {detail}".rstrip()))

    def _moment(self, now: float, plan: Plan) -> Moment:
        blockers = {row.job: row.blockers for row in plan.blocked}
        shares = {(row.team, row.pool): row.share for row in plan.shares}
        teams: dict[tuple[int, int], tuple[float, int]] = {}
        for pool, held in self.state.held.items():
            for position, team in enumerate(self.state.teams.rows):
                allocated = held.allocated[position] + held.stopping[position]
                teams[team.id, pool] = (shares.get((team.id, pool), 0.0), allocated)
        running = {}
        waiting = {}
        for name, job in self.jobs.items():
            if job.open is not None:
                running[name] = (job.open, len(job.attempts))
            elif job.state == "waiting":
                waiting[name] = job.blockers = blockers.get(job.spec.id, ())
        finished = {name: job.state for name, job in self.jobs.items() if job.finished}
        return Moment(now, running, waiting, finished, teams)

    def _result(self) -> Run:
        end = self.state.now if self.until is None else max(self.state.now, 0.0)
        held = dict(self.held)
        for job in self.jobs.values():
            if job.open is not None:
                ran = job.attempts[-1]
                key = (job.spec.team, ran.pool)
                held[key] = held.get(key, 0.0) + placement_amount(ran.placement) * (end - ran.start)
        last = self._moment(end, plan_state(self.state, explain=True))
        capacity: dict[int, float] = {pool.id: 0.0 for pool in self.scenario.pools}
        for node in self.scenario.nodes:
            capacity[node.pool] += node.gpus * end
        return Run(
            self.scenario,
            self.jobs,
            end,
            self.evictions,
            self.moments,
            self.cycle_seconds,
            held,
            capacity,
            last,
            self.timeline or [],
        )


def simulate(
    scenario: Scenario,
    *,
    until: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] | None = None,
    timeline: bool = False,
) -> Run:
    """Run a scenario to its end, or to ``until`` seconds. Raises :class:`Livelock` on a defect of the engine."""
    return Simulation(scenario, until=until, clock=clock, timeline=timeline).run(progress)
