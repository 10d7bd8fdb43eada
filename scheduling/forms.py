"""Forms of the pages: they parse, the services decide."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

from django import forms

from scheduling.models import Pool, Priority, WorkloadClass
from scheduling.services.submit import JobSpec
from teams.actors import Actor
from teams.models import Team
from teams.permissions import Permission, visible_team_ids

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_UNITS = {"": 60, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class DurationField(forms.CharField):
    """ "90m", "2h", "1d 12h"; a bare number is minutes."""

    def clean(self, value: Any) -> timedelta | None:
        text = super().clean(value)
        if not text:
            return None
        compact = text.replace(" ", "").lower()
        parts = _DURATION.findall(compact)
        if "".join(number + unit for number, unit in parts) != compact:
            raise forms.ValidationError(f"“{text}” is not a duration; write for example 90m, 2h or 1d 12h.")
        try:
            return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
        except OverflowError:
            raise forms.ValidationError(f"“{text}” is too long.") from None


def own_leaf_teams(actor: Actor) -> list[Team]:
    """Teams for which the actor may submit."""
    ids = visible_team_ids(actor, Permission.SUBMIT_JOBS)
    rows = Team.objects.filter(archived_at=None, children=None).order_by("name")
    return list(rows if ids is None else rows.filter(pk__in=ids))


class JobForm(forms.Form):
    """A new job. Names are those of ``JobSpec``."""

    team = forms.ChoiceField(help_text="The leaf team that the GPUs count for.")
    name = forms.CharField(max_length=200)
    command = forms.CharField(widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}), required=False)
    pools = forms.MultipleChoiceField(
        required=False, widget=forms.CheckboxSelectMultiple, help_text="Acceptable pools; none ticked = any."
    )
    gpus = forms.IntegerField(label="GPUs per worker", min_value=0, max_value=62, initial=1)
    workers = forms.IntegerField(
        min_value=1, max_value=10_000, initial=1, help_text="More than one is a gang: all start or none."
    )
    walltime = DurationField(
        required=False, help_text="Longest time it may take, for example 2h. A short one starts sooner by backfill."
    )
    interruptible = forms.BooleanField(
        required=False,
        help_text="May be stopped and started again: it can then borrow idle GPUs beyond the team's guarantee.",
    )
    checkpoint_every = DurationField(required=False, label="Checkpoint every")
    share = forms.DecimalField(
        required=False, min_value=Decimal("0.01"), max_value=1, label="Share of one GPU",
        help_text="Instead of whole GPUs: a fraction such as 0.25 (then set GPUs per worker to 0).",
    )  # fmt: skip
    min_workers = forms.IntegerField(
        required=False, min_value=1, label="At least workers", help_text="Elastic: it starts with fewer when need be."
    )
    grace = DurationField(required=False, help_text="Time between the signal and the end when it is evicted.")
    priority = forms.ChoiceField(
        choices=[(p.name.lower(), p.label) for p in Priority], initial="normal", help_text="Inside the team only."
    )
    workload_class = forms.ChoiceField(choices=WorkloadClass.choices, initial="training", label="Class")
    topology_level = forms.ChoiceField(required=False, label="Keep together in one")
    topology_required = forms.BooleanField(required=False, label="… or do not start")
    retries = forms.IntegerField(required=False, min_value=0, max_value=100, initial=0)
    not_before = forms.DateTimeField(
        required=False, widget=forms.DateTimeInput(attrs={"type": "datetime-local"}), label="Not before"
    )
    after = forms.CharField(required=False, help_text="Numbers of jobs that must have succeeded, with commas.")
    count = forms.IntegerField(required=False, min_value=1, max_value=10_000, initial=1, label="Copies (array)")
    image = forms.CharField(required=False, max_length=300, label="Container image")
    environment = forms.CharField(
        required=False, widget=forms.Textarea(attrs={"rows": 2}), help_text="NAME=value, a line each."
    )
    working_directory = forms.CharField(required=False, max_length=500)

    #: What most jobs need; the rest is folded.
    FIRST = ("team", "name", "command", "gpus", "workers", "walltime", "interruptible", "checkpoint_every", "pools")

    def __init__(self, *args: Any, actor: Actor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["team"].choices = [(team.name, team.title or team.name) for team in own_leaf_teams(actor)]
        pools = list(Pool.objects.select_related("gpu_model", "cluster").order_by("name"))
        self.fields["pools"].choices = [(pool.name, f"{pool.name} ({pool.gpu_model.name})") for pool in pools]
        levels = sorted({level for pool in pools for level in pool.cluster.levels} | {"node"})
        self.fields["topology_level"].choices = [("", "(anywhere)"), *((level, level) for level in levels)]
        for name, field in self.fields.items():
            if field.help_text:
                field.widget.attrs["aria-describedby"] = f"help_{name}"

    def first_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.FIRST]

    def more_fields(self) -> list[forms.BoundField]:
        return [field for field in self if field.name not in self.FIRST]

    def more_has_errors(self) -> bool:
        return any(field.errors for field in self.more_fields())

    def clean_environment(self) -> dict[str, str]:
        found = {}
        for line in self.cleaned_data["environment"].splitlines():
            if line.strip():
                name, sign, value = line.partition("=")
                if not sign:
                    raise forms.ValidationError(f"“{line}” has no “=”; write NAME=value.")
                found[name.strip()] = value
        return found

    def clean_after(self) -> list[int]:
        parts = [part for part in re.split(r"[\s,]+", self.cleaned_data["after"]) if part]
        for part in parts:
            if not part.isdecimal() or len(part) > 18:
                raise forms.ValidationError(f"“{part}” is not the number of a job.")
        return [int(part) for part in parts]

    def spec(self) -> JobSpec:
        data = self.cleaned_data
        return JobSpec(
            name=data["name"],
            team=data["team"],
            command=data["command"].replace("\r\n", "\n"),
            pools=list(data["pools"]),
            gpus=data["gpus"],
            share=data["share"],
            workers=data["workers"],
            min_workers=data["min_workers"],
            walltime=data["walltime"],
            workload_class=data["workload_class"],
            priority=data["priority"],
            interruptible=data["interruptible"],
            checkpoint_every=data["checkpoint_every"],
            grace=data["grace"] or timedelta(0),
            topology_level=data["topology_level"],
            topology_required=data["topology_required"],
            retries=data["retries"] or 0,
            not_before=data["not_before"],
            after=data["after"],
            count=data["count"] or 1,
            image=data["image"],
            environment=data["environment"],
            working_directory=data["working_directory"],
        )

    def refuse(self, errors: dict[str, list[str]]) -> None:
        """Messages of the service at their fields."""
        for field, messages in errors.items():
            for message in messages:
                self.add_error(field if field in self.fields else None, message)


def initial_from(spec: JobSpec) -> dict[str, Any]:
    """A form's beginning from an old job."""

    def text(value: timedelta | None) -> str:
        if not value:
            return ""
        seconds = int(value.total_seconds())
        return (
            f"{seconds // 3600}h"
            if seconds % 3600 == 0
            else f"{seconds // 60}m"
            if seconds % 60 == 0
            else f"{seconds}s"
        )

    return {
        "team": spec.team,
        "name": spec.name,
        "command": spec.command,
        "pools": spec.pools,
        "gpus": spec.gpus,
        "share": spec.share,
        "workers": spec.workers,
        "min_workers": spec.min_workers if spec.min_workers != spec.workers else None,
        "walltime": text(spec.walltime),
        "workload_class": spec.workload_class,
        "priority": spec.priority,
        "interruptible": spec.interruptible,
        "checkpoint_every": text(spec.checkpoint_every),
        "grace": text(spec.grace),
        "topology_level": spec.topology_level,
        "topology_required": spec.topology_required,
        "retries": spec.retries,
        "image": spec.image,
        "environment": "\n".join(f"{name}={value}" for name, value in spec.environment.items()),
        "working_directory": spec.working_directory,
    }


class MeForm(forms.Form):
    """The viewer's own settings."""

    time_zone = forms.ChoiceField()
    color_scheme = forms.ChoiceField(
        choices=[("auto", "As the system"), ("light", "Light"), ("dark", "Dark")], label="Colours"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import zoneinfo

        super().__init__(*args, **kwargs)
        self.fields["time_zone"].choices = [(name, name) for name in sorted(zoneinfo.available_timezones())]
