"""How allauth fits in: no open registration; groups of the identity provider become memberships."""

from __future__ import annotations

import json
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from django.conf import settings
from django.http import HttpRequest

from teams.models import User
from teams.services.groups import apply_groups


class AccountAdapter(DefaultAccountAdapter):
    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Accounts are made by administrators or come from the identity provider."""
        return False

    def set_password(self, user: User, password: str) -> None:
        """An own password replaces the one-time one."""
        user.must_change_password = False
        super().set_password(user, password)


class SocialAccountAdapter(DefaultSocialAccountAdapter):
    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        return True

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        user: User = super().save_user(request, sociallogin, form)
        apply_groups(user, _groups(sociallogin), json.loads(settings.GPUPORTAL_OIDC_GROUPS))
        return user

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """At every sign-in: a group that is gone takes its role away."""
        if sociallogin.is_existing:
            apply_groups(sociallogin.user, _groups(sociallogin), json.loads(settings.GPUPORTAL_OIDC_GROUPS))


def _groups(login: SocialLogin) -> list[str]:
    data = login.account.extra_data or {}
    for source in (data, data.get("userinfo") or {}, data.get("id_token") or {}):
        groups = source.get(settings.GPUPORTAL_OIDC_GROUPS_CLAIM)
        if isinstance(groups, list):
            return [str(group) for group in groups]
    return []
