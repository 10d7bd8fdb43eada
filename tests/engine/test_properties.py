"""What holds whatever comes: random clusters, trees, jobs and events."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings

from scheduling.engine.decisions import EvictionReason, Plan
from scheduling.engine.plan import plan, plan_state
from scheduling.engine.reclaim import branches
from scheduling.engine.scenario import Scenario, read_scenario
from scheduling.engine.simulation import Run, Simulation
from scheduling.engine.snapshot import GPU, Quota, Snapshot, Team
from scheduling.engine.work import placement_amount
from tests.engine.random_scenarios import scenarios


class Watched(Simulation):
    """Looks at the state after every plan."""

    def __init__(self, scenario: Scenario, **more: Any) -> None:
        super().__init__(scenario, until=60 * 86_400.0, **more)
        self.dice = random.Random(1)

    def _carry_out(self, plan: Plan) -> None:
        self.look_at(plan)
        super()._carry_out(plan)
        self.look_at_devices()

    def look_at(self, decided: Plan) -> None:
        held = {hold.job for hold in decided.holds}
        state = self.state
        allocated = {pool: rows.allocated.copy() for pool, rows in state.held.items()}
        for eviction in decided.evictions:
            attempt = state.running[eviction.attempt]
            assert attempt.job.request.interruptible
            assert eviction.for_job is None or eviction.for_job in held, "an eviction without its placement"
            if eviction.reason is EvictionReason.RECLAIM:
                taker = state.leaf(self.state.jobs[eviction.for_job])
                sides = branches_of(state, taker, state.leaf(attempt.job))
                above = allocated[attempt.pool][sides[1]]
                assert above > state.teams.guaranteed[attempt.pool][sides[1]], "evicted at or below its guarantee"
            for team in state.teams.path[state.leaf(attempt.job)]:
                allocated[attempt.pool][team] -= placement_amount(attempt.placement)

    def look_at_devices(self) -> None:
        for number in self.state.pools:
            self.look_at_pool(number)

    def look_at_pool(self, pool: int) -> None:
        taken: dict[tuple[int, int], int] = {}
        fragile: dict[int, int] = {}
        held: dict[int, int] = {}
        for attempt in self.state.by_pool[pool].values():
            for slot in attempt.placement:
                for device in range(slot.devices.bit_length()):
                    if slot.devices >> device & 1:
                        key = (slot.node, device)
                        taken[key] = taken.get(key, 0) + slot.share
            amount = placement_amount(attempt.placement)
            for team in self.state.teams.path[self.state.leaf(attempt.job)]:
                held[team] = held.get(team, 0) + amount
                if not attempt.job.request.interruptible:
                    fragile[team] = fragile.get(team, 0) + amount
        assert all(amount <= GPU for amount in taken.values()), "a device held more than once"
        if self.state.policy.fragile_borrowing is None:
            for team, amount in fragile.items():
                assert amount <= self.state.teams.guaranteed[pool][team], "fragile work above the guarantee"
        for team, amount in held.items():
            limit = self.state.teams.limit[pool][team]
            assert limit is None or amount <= limit, "a limit exceeded"

    def snapshot(self, *, shuffled: bool = False) -> Snapshot:
        """The state as a snapshot, in any order of rows."""
        state = self.state
        teams = []
        for position, team in enumerate(state.teams.rows):
            claims = {
                pool: Quota(
                    state.teams.guaranteed[pool][position],
                    state.teams.limit[pool][position],
                    state.teams.weight[pool][position],
                )
                for pool in state.pools
            }
            used = {pool: state.used[pool][position] for pool in state.pools}
            teams.append(Team(team.id, team.name, team.parent, claims, used))
        rows: list[list[Any]] = [
            list(state.clusters.values()),
            [row.pool for row in state.pools.values()],
            [node for row in state.pools.values() for node in row.nodes],
            teams,
            list(state.jobs.values()),
            list(state.running.values()),
            list(state.holds.values()),
            list(state.windows),
        ]
        if shuffled:
            for row in rows:
                self.dice.shuffle(row)
        lists = [tuple(row) for row in rows]
        return Snapshot(state.now, state.policy, *lists, growable_since=dict(state.growable_since))


def branches_of(state: Any, ours: int, theirs: int) -> tuple[int, int]:
    class Fake:
        pass

    fake = Fake()
    fake.state = state  # type: ignore[attr-defined]
    found = branches(fake, ours, theirs)  # type: ignore[arg-type]
    assert found is not None
    return found


def decisions(decided: Plan) -> tuple[Any, ...]:
    return (decided.starts, decided.evictions, decided.holds, decided.released)


class Compared(Watched):
    """Every plan of the state that was kept is that of one built from scratch, in whatever order."""

    def look_at(self, decided: Plan) -> None:
        super().look_at(decided)
        again = plan_state(self.state, explain=True)
        scratch = plan(self.snapshot())
        shuffled = plan(self.snapshot(shuffled=True))
        assert decisions(again) == decisions(scratch) == decisions(shuffled)
        assert again.blocked == scratch.blocked == shuffled.blocked
        assert {row.job for row in again.blocked} | {row.job for row in again.starts} == set(self.state.jobs)
        assert all(row.blockers for row in again.blocked), "a waiting job without a reason"


several = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@given(scenarios())
@several
def test_nothing_is_held_twice_and_no_claim_is_broken(text: str) -> None:
    Watched(read_scenario(text)).run()


@given(scenarios())
@settings(several, max_examples=60)
def test_a_plan_depends_on_the_state_alone(text: str) -> None:
    Compared(read_scenario(text)).run()


@given(scenarios())
@several
def test_without_new_arrivals_everything_that_can_run_ends(text: str) -> None:
    run: Run = Watched(read_scenario(text)).run()
    for job in run.jobs.values():
        codes = {blocker.code.value for blocker in job.blockers}
        if not job.finished:
            assert codes & {"unsatisfiable", "limit", "guarantee"}, (job.spec.name, job.state, codes)
        assert sum(1 for ran in job.attempts if ran.outcome == "preempted") <= 40
