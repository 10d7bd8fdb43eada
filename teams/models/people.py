"""People and the tree of teams they belong to."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import F, Q

slug_validator = RegexValidator(
    r"^[a-z0-9][a-z0-9._-]*$",
    "Use lower-case letters, digits, dot, dash and underscore, beginning with a letter or digit.",
)


class StaffRole(models.TextChoices):
    """Global roles; everything else comes from a membership."""

    NONE = "", "None"
    MANAGER = "manager", "Manager"
    ADMIN = "admin", "Administrator"


class User(AbstractUser):
    staff_role = models.CharField(max_length=16, choices=StaffRole, default=StaffRole.NONE, blank=True)
    time_zone = models.CharField(max_length=64, default="UTC", help_text="IANA name, for example Europe/Berlin")
    color_scheme = models.CharField(
        max_length=8, choices=[("auto", "As the system"), ("light", "Light"), ("dark", "Dark")], default="auto"
    )
    #: A one-time password was given: the person must choose an own one at the next sign-in.
    must_change_password = models.BooleanField(default=False)
    #: Account name on the clusters; empty = the user name.
    cluster_account = models.CharField(max_length=64, blank=True)

    class Meta(AbstractUser.Meta):
        constraints = [
            models.CheckConstraint(condition=Q(staff_role__in=["", "manager", "admin"]), name="user_staff_role_known"),
        ]

    @property
    def is_portal_admin(self) -> bool:
        return self.is_superuser or self.staff_role == StaffRole.ADMIN

    @property
    def is_manager(self) -> bool:
        return self.is_portal_admin or self.staff_role == StaffRole.MANAGER


class Team(models.Model):
    """A node of the team tree: departments above, teams at the leaves. Only leaves own jobs."""

    name = models.CharField(max_length=64, unique=True, validators=[slug_validator])
    title = models.CharField(max_length=200, blank=True)
    parent = models.ForeignKey("self", models.PROTECT, null=True, blank=True, related_name="children")
    created_at = models.DateTimeField(auto_now_add=True)
    archived_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(condition=~Q(parent=F("id")), name="team_not_its_own_parent"),
        ]

    def __str__(self) -> str:
        return self.name


class Role(models.TextChoices):
    """What a person may do in a team; each includes those before it."""

    VIEWER = "viewer", "Viewer"
    MEMBER = "member", "Member"
    LEAD = "lead", "Lead"


class Membership(models.Model):
    """A role in a team, valid for the teams below it too."""

    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    team = models.ForeignKey(Team, models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=8, choices=Role, default=Role.MEMBER)
    #: Given by the identity provider's groups; taken away again when the group is.
    from_groups = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "team"], name="one_membership_per_user_and_team"),
            models.CheckConstraint(condition=Q(role__in=["viewer", "member", "lead"]), name="membership_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.user} as {self.role} of {self.team}"


class Announcement(models.Model):
    """A message of the administrators on every page, for a time."""

    text = models.CharField(max_length=500)
    level = models.CharField(
        max_length=8, choices=[("info", "Information"), ("warning", "Warning"), ("error", "Trouble")], default="info"
    )
    begins_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    created_by = models.ForeignKey(User, models.SET_NULL, null=True, related_name="+")

    class Meta:
        ordering = ["-begins_at"]
        indexes = [models.Index(fields=["ends_at", "begins_at"])]
        constraints = [
            models.CheckConstraint(condition=Q(ends_at__gt=F("begins_at")), name="announcement_ends_after_it_begins"),
        ]
