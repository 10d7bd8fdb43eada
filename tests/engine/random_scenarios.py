"""Random scenarios for the properties: clusters, team trees, policies, jobs and events."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

TEAMS = ("a", "b", "c")


@dataclass(frozen=True)
class Shape:
    """How large a random scenario is."""

    pools: tuple[str, ...]
    #: GPUs per node, nodes per pool.
    size: int
    count: int

    @property
    def capacity(self) -> int:
        return self.size * self.count


@st.composite
def scenarios(draw: st.DrawFn, *, events: bool = True, policies: bool = True) -> str:
    """A scenario as text. Without ``events`` nothing but the jobs themselves happens."""
    pools = draw(st.sampled_from([("p",), ("p",), ("p", "q")]))
    shape = Shape(pools, draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 4)))
    lines = ["scenario: random"]
    if policies:
        lines.append(f"policy: {{{policy_text(draw)}}}")
    lines += ["clusters:", *cluster_lines(shape), "teams:", *team_lines(draw, shape), "jobs:"]
    lines += [f"  - {{{job_text(draw, n, shape)}}}" for n in range(draw(st.integers(1, 12)))]
    if events and draw(st.booleans()):
        lines += ["events:", *event_lines(draw, shape)]
    return "\n".join(lines)


def policy_text(draw: st.DrawFn) -> str:
    parts = [
        f"min_runtime: {draw(st.sampled_from(['5m', '0s', '20m']))}",
        f"history_weight: {draw(st.sampled_from([1, 0, 3]))}",
        f"reservation_depth: {draw(st.sampled_from([8, 1, 0]))}",
        f"fragile_borrowing: {draw(st.sampled_from(['never', 'never', '30m']))}",
        f"restart_cost: {draw(st.sampled_from(['0s', '2m']))}",
    ]
    return ", ".join(parts)


def cluster_lines(shape: Shape) -> list[str]:
    lines = []
    for pool in shape.pools:
        lines.append(f"  c{pool}: {{levels: [rack], nodes: [")
        lines += [
            f"    {{name: {pool}{n}, pool: {pool}, gpus: {shape.size}, in: {{rack: r{n % 2}}}, memory: 80GiB, share: true}},"
            for n in range(shape.count)
        ]
        lines.append("  ]}")
    return lines


def team_lines(draw: st.DrawFn, shape: Shape) -> list[str]:
    claims = {pool: quotas(draw, shape.capacity) for pool in shape.pools}
    top = ", ".join(f"{pool}: {{guaranteed: {rows['a'][0] + rows['b'][0]}}}" for pool, rows in claims.items())
    of = {team: ", ".join(f"{pool}: {quota_text(*rows[team])}" for pool, rows in claims.items()) for team in TEAMS}
    return [
        f"  top: {{quota: {{{top}}}, teams: {{a: {{quota: {{{of['a']}}}}}, b: {{quota: {{{of['b']}}}}}}}}}",
        f"  c: {{quota: {{{of['c']}}}}}",
    ]


def quotas(draw: st.DrawFn, capacity: int) -> dict[str, tuple[int, int | None]]:
    left, found = capacity, {}
    for team in TEAMS:
        guaranteed = draw(st.integers(0, left))
        left -= guaranteed
        found[team] = (guaranteed, draw(st.one_of(st.none(), st.integers(guaranteed, capacity))))
    return found


def quota_text(guaranteed: int, limit: int | None) -> str:
    return f"{{guaranteed: {guaranteed}}}" if limit is None else f"{{guaranteed: {guaranteed}, limit: {limit}}}"


def job_text(draw: st.DrawFn, number: int, shape: Shape) -> str:
    parts = [f"name: j{number}, team: {draw(st.sampled_from(TEAMS))}, at: {draw(st.integers(0, 50)) * 60}"]
    runs = draw(st.integers(1, 60)) * 60
    parts.append(f"runs: {runs}")
    if len(shape.pools) > 1:
        parts.append(f"pools: [{', '.join(draw(st.sampled_from([('p',), ('p', 'q'), ('q', 'p')])))}]")
    if draw(st.integers(0, 4)) == 0:
        parts.append(f"share: {draw(st.sampled_from(['0.25', '0.5', '0.7', '20GiB']))}")
    else:
        parts += gang_parts(draw, shape)
    if draw(st.booleans()):
        parts.append(f"interruptible: true, grace: {draw(st.sampled_from([0, 30, 90]))}")
        if draw(st.booleans()):
            parts.append("checkpoint_every: 10m")
    if draw(st.booleans()):
        parts.append(f"walltime: {runs + draw(st.integers(60, 3000))}")
    parts.append(f"priority: {draw(st.sampled_from(['low', 'normal', 'high']))}")
    return ", ".join(parts)


def gang_parts(draw: st.DrawFn, shape: Shape) -> list[str]:
    workers = draw(st.sampled_from([1, 1, 1, 2, 3]))
    parts = [f"gpus: {draw(st.integers(1, shape.size))}, workers: {workers}"]
    if workers > 1 and draw(st.booleans()):
        parts.append("min_workers: 1")
    if workers > 1 and draw(st.booleans()):
        parts.append(f"topology: {{{draw(st.sampled_from(['required', 'preferred']))}: rack}}")
    return parts


def event_lines(draw: st.DrawFn, shape: Shape) -> list[str]:
    node = f"p{draw(st.integers(0, shape.count - 1))}"
    at = draw(st.integers(0, 4000))
    until = at + draw(st.integers(1, 4000))
    lines = [
        f"  - {{at: {at}, node: {node}, is: {draw(st.sampled_from(['down', 'drained']))}}}",
        f"  - {{at: {until}, node: {node}, is: up}}",
    ]
    if draw(st.booleans()):
        begins = draw(st.integers(1000, 5000))
        lines.append(f"  - {{at: 100, maintenance: {{nodes: {node}, from: {begins}, to: {begins + 1800}}}}}")
    if draw(st.booleans()):
        lines += [f"  - {{at: {at}, cluster: cp, is: unreachable}}", f"  - {{at: {until}, cluster: cp, is: reachable}}"]
    return lines
