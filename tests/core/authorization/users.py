"""Users for tests of authorization."""

from __future__ import annotations

from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User


def create_user(name: str, *subscribe: str, admin: tuple[tuple[AdminRight, str], ...] = ()) -> User:
    """Return a user whose token is the name and who may publish to every class."""
    rules = PermissionRules(tuple(map(PermissionRule.parse, subscribe)) or None)
    return User(
        name, token=hash_token(name), permissions=Permissions(PermissionRules(), rules, admin)
    )
