"""Small installations for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Any

from scheduling.models import Cluster, Job, Pool
from scheduling.services.connect import discover, save_cluster
from scheduling.services.cycle import run_cycle
from scheduling.services.dispatch import dispatch
from scheduling.services.reconcile import reconcile
from scheduling.services.submit import JobSpec, submit_job
from teams.actors import Actor
from teams.models import Membership, Role, Team, User
from teams.services.quotas import QuotaSpec, set_quota

SYSTEM = Actor.system("test")


def connect(name: str = "sim", *, nodes: int = 2, gpus: int = 8, speed: float = 3600, **config: Any) -> Cluster:
    """A simulated cluster of ``nodes`` nodes; an hour of work takes a second at the default speed."""
    settings = {
        "speed": speed,
        "seed": 1,
        "nodes": [{"name": f"n[1-{nodes}]", "gpus": gpus, "gpu_model": "A100", "shareable": True}],
        **config,
    }
    found = discover(name, "simulated", settings, {})
    return save_cluster(
        actor=SYSTEM, name=name, kind="simulated", config=settings, secret={}, description=found.description
    )


def person(username: str, *, staff: str = "", password: str = "a-good-password-1") -> User:
    user = User(username=username, staff_role=staff)
    user.set_password(password)
    user.save()
    return user


@dataclass
class House:
    """A cluster, two teams with members and leads, and the steps of the loop."""

    cluster: Cluster
    pool: Pool
    teams: dict[str, Team] = field(default_factory=dict)
    users: dict[str, User] = field(default_factory=dict)

    def actor(self, username: str) -> Actor:
        return Actor.person(User.objects.get(username=username))

    def submit(self, username: str = "ann", team: str = "vision", **spec: Any) -> Job:
        values: dict[str, Any] = {"name": "train", "team": team, "command": "true", "gpus": 1, **spec}
        return submit_job(actor=self.actor(username), spec=JobSpec(**values))

    def step(self) -> None:
        """One turn of the loop: decide, send, look."""
        run_cycle()
        dispatch()
        reconcile()


def house(*, nodes: int = 2, guaranteed: dict[str, int] | None = None, **config: Any) -> House:
    cluster = connect(nodes=nodes, **config)
    made = House(cluster, cluster.pools.get())
    for name, amount in (guaranteed or {"vision": 8, "nlp": 8}).items():
        team = made.teams[name] = Team.objects.create(name=name)
        set_quota(actor=SYSTEM, team=team, pool_id=made.pool.pk, spec=QuotaSpec(Decimal(amount)))
    people = {"ann": ("vision", Role.MEMBER), "lea": ("vision", Role.LEAD), "bob": ("nlp", Role.MEMBER)}
    for username, (team_name, role) in people.items():
        made.users[username] = person(username)
        if team_name in made.teams:
            Membership.objects.create(user=made.users[username], team=made.teams[team_name], role=role)
    made.users["mara"] = person("mara", staff="manager")
    made.users["ada"] = person("ada", staff="admin")
    return made


def hours(number: float) -> timedelta:
    return timedelta(hours=number)
