"""Descriptions of configuration values that differ between two readings, without secrets.

A description is written as in the file: `classes.orders.keep-seconds = 1800, was 3600`.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from simplebus.config.nats_users import NatsUsers
from simplebus.config.parse import format_size
from simplebus.config.server_schema import ClassTable
from simplebus.config.users import ConfiguredUsers
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.permissions import PermissionRules, Permissions
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User

T = TypeVar("T")

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS = 500


class _Secret(str):
    """Value that is compared, but never shown."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Key of the file whose value differs."""

    key: str
    description: str
    value: str = ""
    """The new value, as in the file; empty if it is not set, or not shown."""
    previous: str = ""


def describe_changes(key: str, old: Any, new: Any) -> list[ValueChange]:
    """Return one description for each key of the file whose value differs.

    Args:
        key: Option, or table, as in the file.
        old: The previous value; None if it was not set.
        new: The new value; None if it is not set.
    """
    if key == "bridges":
        return _describe_named(
            key, *({bridge.name: bridge for bridge in bridges or ()} for bridges in (old, new))
        )
    match new if old is None else old:
        case ClassTable():
            changes = _describe_tables(
                key, *({} if each is None else each.values_by_key() for each in (old, new))
            )
            return changes or [_describe_presence(key, is_new=old is None)]
        case ConfiguredUsers():
            old, new = old or ConfiguredUsers(), new or ConfiguredUsers()
            return _describe_named(
                key,
                {user.name: user for user in old.users},
                {user.name: user for user in new.users},
                values=_user_values,
            )
        case NatsUsers():
            old, new = old or NatsUsers(), new or NatsUsers()
            return [
                *_describe_tables(key.rpartition(".")[0], _nats_values(old), _nats_values(new)),
                *_describe_named(
                    key,
                    {user.name: user for user in old.users},
                    {user.name: user for user in new.users},
                    values=_nats_user_values,
                ),
            ]
    return [_describe_value(key, old, new)]


def _describe_named(
    key: str,
    old: Mapping[str, T],
    new: Mapping[str, T],
    *,
    values: Callable[[T], dict[str, Any]] | None = None,
) -> list[ValueChange]:
    """Describe the changes of tables that have a name each.

    Args:
        key: Key of the tables.
        old: Previous tables by name.
        new: New tables by name.
        values: Returns the values of a table; None if values are not shown.
    """
    lines = []
    for name in dict.fromkeys((*old, *new)):
        place = quote_key(key, name)
        if name not in new:
            lines.append(_describe_presence(place, is_new=False))
        elif name not in old:
            lines.append(_describe_presence(place, is_new=True))
        elif values is not None:
            lines += _describe_tables(place, values(old[name]), values(new[name]))
        elif old[name] != new[name]:
            lines.append(ValueChange(place, f"{place} has changed"))
    return lines


def _describe_presence(key: str, *, is_new: bool) -> ValueChange:
    return ValueChange(key, f"{key} was {'added' if is_new else 'removed'}")


def _describe_tables(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[ValueChange]:
    """Describe the differing values of two tables. None stands for a key that is not set."""
    return [
        _describe_value(f"{key}.{name}", old.get(name), new.get(name))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _describe_value(key: str, old: Any, new: Any) -> ValueChange:
    previous, value = _format_value(old), _format_value(new)
    was = f", was {previous}" if previous else ""
    if new is None:
        description = f"{key} is not set{was}"
    elif value:
        description = f"{key} = {value}{was}"
    else:
        description = f"{key} has changed"
    return ValueChange(key, description, value, previous)


def quote_key(table: str, name: str) -> str:
    """Return the key of `name` in a table, with quotes where TOML requires them."""
    shown = name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return f"{table}.{shown}"


def _format_value(value: Any) -> str:
    """Return a value as in TOML; empty if it is a secret or has no text."""
    text = ""
    match value:
        case None | _Secret():
            pass
        case bool():
            text = str(value).lower()
        case enum.Enum():
            text = _format_value(value.value)
        case int():
            text = str(value)
        case float():
            text = str(int(value)) if value.is_integer() else str(value)
        case str() | Path():
            text = json.dumps(str(value), ensure_ascii=False)
        case NamedClass():
            name = str(value.id if value.name is None else value.name)
            text = json.dumps("=".join((*value.subjects, name)), ensure_ascii=False)
        case list() | tuple():
            parts = [_format_value(part) for part in value]
            text = f"[{', '.join(parts)}]" if all(parts) else ""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _user_values(user: User) -> dict[str, Any]:
    """Return the values of a `[[users]]` table by key; None for keys that are not set."""
    return {
        "password": _Secret(user.password) or None,
        "token": _Secret(user.token) or None,
        "nkey": user.nkey or None,
        "certificate": user.certificates or None,
        "addresses": user.addresses or None,
        "max-connections": user.connections,
        "max-message-rate": user.rate.messages,
        "max-byte-rate": format_size(int(user.rate.bytes)),
        "max-classes": user.classes_max,
        "max-durables": user.durables_max,
        **_permission_values(user.permissions),
        **_subject_permission_values("nats.", user.subject_permissions),
    }


def _permission_values(permissions: Permissions | None) -> dict[str, Any]:
    if permissions is None:
        return {}
    values: dict[str, Any] = {}
    for name, rules in (("publish", permissions.publish), ("subscribe", permissions.subscribe)):
        values |= _rule_values(f"permissions.{name}", rules)
    return values | {
        "permissions.admin": tuple(
            right.value if class_ == "*" else f"{right.value} {class_}"
            for right, class_ in permissions.admin
        ),
        "permissions.wildcards": permissions.wildcards,
    }


def _rule_values(key: str, rules: PermissionRules) -> dict[str, Any]:
    allow = None if rules.allow is None else tuple(map(str, rules.allow))
    return {f"{key}.allow": allow, f"{key}.deny": tuple(map(str, rules.deny)) or None}


def _subject_permission_values(
    prefix: str, permissions: SubjectPermissions | None
) -> dict[str, Any]:
    if permissions is None:
        return {}
    responses = permissions.responses
    return {
        f"{prefix}publish.allow": permissions.publish_allow,
        f"{prefix}publish.deny": permissions.publish_deny or None,
        f"{prefix}subscribe.allow": permissions.subscribe_allow,
        f"{prefix}subscribe.deny": permissions.subscribe_deny or None,
        f"{prefix}allow_responses.max": responses and responses.max_responses,
        f"{prefix}allow_responses.expires": responses and responses.expires_seconds,
    }


def _nats_values(users: NatsUsers) -> dict[str, Any]:
    """Return the values of the `[nats]` table that no option sets."""
    return {
        "no_auth_user": users.anonymous or None,
        **_subject_permission_values("default_permissions.", users.default_permissions),
    }


def _nats_user_values(user: User) -> dict[str, Any]:
    return {
        "password": _Secret(user.password) or None,
        "token": _Secret(user.token) or None,
        "nkey": user.nkey or None,
        **_subject_permission_values("permissions.", user.subject_permissions),
    }
