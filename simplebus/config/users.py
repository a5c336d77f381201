"""Users of all listeners, from the configuration file or the users file.

[[users]]
name = "till"
password = "$argon2id$…"                as `simplebus user add` writes it
max-byte-rate = "10MiB"

[users.permissions]                     without it: everything
publish = { allow = ["orders eu.#"], deny = ["orders eu.test"] }

[users.nats]                            for subjects that are bound to no class
publish = ["metrics.>"]
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from simplebus.config.errors import ConfigError
from simplebus.config.parse import parse_seconds
from simplebus.config.setting import COUNT, FLAG, RATE, SECONDS, SIZE, Kind, SettingsTable
from simplebus.config.table_reader import TableReader
from simplebus.config.toml_document import TomlDocument, read_document
from simplebus.core.users.certificate_names import normalize_name
from simplebus.core.users.nkeys import decode_user_key
from simplebus.core.users.passwords import check_stored_secret, is_slow_hash
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.subject_permissions import (
    ResponsePermission,
    SubjectPermissions,
    check_subject_pattern,
)
from simplebus.core.users.users import User, Users, check_user_name, parse_network

_BYTES_MAX = 64 << 20
_ARGON2 = re.compile(
    r"\$argon2(id|i|d)\$v=\d+\$m=\d+,t=\d+,p=\d+\$[A-Za-z0-9+/]{8,}\$[A-Za-z0-9+/]{8,}"
)


def _parse_password(text: str) -> str:
    if text.startswith("$argon2") and not _ARGON2.fullmatch(text):
        raise ValueError("begins with $argon2 but is not a hash that `simplebus user add` writes")
    return check_stored_secret(text)


def _parse_token(text: str) -> str:
    if is_slow_hash(text):
        raise ValueError("expected sha256: and 64 digits")
    return check_stored_secret(text)


def _parse_nkey(text: str) -> str:
    if text:
        decode_user_key(text)
    return text


def _parse_certificate(text: str) -> str:
    normalize_name(text)
    return text


def _parse_address(text: str) -> str:
    parse_network(text)
    return text


def _parse_integer(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"expected a whole number, got {value!r}")
    return value


def _parse_signed_seconds(value: float | str) -> float:
    """Return seconds, which may be negative as a number."""
    seconds = parse_seconds(value) if isinstance(value, str) else float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"expected a finite number of seconds, got {value!r}")
    return seconds


USER_NAME = Kind("text", "NAME", check_user_name)
PASSWORD = Kind("text", "PASSWORD", _parse_password, is_secret=True)
TOKEN = Kind("text", "TOKEN", _parse_token, is_secret=True)
NKEY = Kind("text", "NKEY", _parse_nkey)
_CERTIFICATE = Kind("text", "NAME", _parse_certificate)
_ADDRESS = Kind("text", "NETWORK", _parse_address)
_RULE = Kind("text", "RULE", PermissionRule.parse)
_RIGHT = Kind("text", "RIGHT", Permissions.parse_right)
_SUBJECT = Kind("text", "SUBJECT", partial(check_subject_pattern, words=2))


@dataclass(frozen=True)
class RulesTable(SettingsTable):
    """Allowed and denied classes, each optionally with channels."""

    allow: tuple[PermissionRule, ...] | None = _RULE.setting(
        "Allowed rules. Left out: all.", default=None, is_list=True
    )
    deny: tuple[PermissionRule, ...] = _RULE.setting(
        "Denied rules, which override the allowed ones.", is_list=True
    )


_RULES = replace(_RULE, table=RulesTable)


@dataclass(frozen=True)
class PermissionsTable(SettingsTable):
    """Permissions of a user. A user without the table may do everything."""

    publish: Any = _RULES.setting(
        "Classes and channels to publish to: a table `{ allow, deny }`, or what is allowed. Left "
        "out: all.",
        default=None,
        is_list=True,
    )
    subscribe: Any = _RULES.setting(
        "Classes and channels to subscribe to, in the same form.", default=None, is_list=True
    )
    admin: tuple[tuple[AdminRight, str], ...] = _RIGHT.setting(
        "`inquire`, `fetch`, `purge`, `configure` and `monitor`, each optionally followed by a "
        "class.",
        is_list=True,
    )
    wildcards: bool = FLAG.setting(
        "`false` refuses subscriptions whose channels have wildcards.", default=True
    )

    def to_permissions(self) -> Permissions:
        """Return the permissions. Raises ValueError for too many rules."""
        publish, subscribe = map(_allow_and_deny, (self.publish, self.subscribe))
        return Permissions(
            PermissionRules(*publish), PermissionRules(*subscribe), self.admin, self.wildcards
        )


@dataclass(frozen=True)
class SubjectRulesTable(SettingsTable):
    """Subjects that a user may publish or subscribe to."""

    allow: tuple[str, ...] | None = _SUBJECT.setting(
        "Allowed subjects. Left out: all.", default=None, is_list=True
    )
    deny: tuple[str, ...] = _SUBJECT.setting(
        "Denied subjects, which override the allowed ones.", is_list=True
    )


_SUBJECTS = replace(_SUBJECT, table=SubjectRulesTable)


@dataclass(frozen=True)
class ResponsesTable(SettingsTable):
    """Limits of replies to subjects that a user may not publish to otherwise."""

    max: int = Kind("integer", "COUNT", _parse_integer, (int,), "replies").setting(
        "Maximum replies to one request; negative for no limit.", default=1
    )
    expires: float = replace(SECONDS, parse=_parse_signed_seconds).setting(
        "Time to reply; negative for no limit.", default=120.0
    )


@dataclass(frozen=True)
class SubjectPermissionsTable(SettingsTable):
    """Permissions for NATS subjects. A user without the table may use every subject."""

    publish: Any = _SUBJECTS.setting(
        "Subjects to publish to: a table `{ allow, deny }`, or what is allowed. Left out: all.",
        default=None,
        is_list=True,
    )
    subscribe: Any = _SUBJECTS.setting(
        "Subjects to subscribe to. A subject may be followed by a space and a queue group.",
        default=None,
        is_list=True,
    )
    allow_responses: ResponsesTable | bool = replace(
        FLAG, name="boolean or table", table=ResponsesTable
    ).setting(
        "`true`, or a table `{ max, expires }`: the user may reply to subjects that it may not "
        "publish to.",
        default=False,
    )

    def to_permissions(self) -> SubjectPermissions:
        """Return the permissions. Raises ValueError for a queue group to publish to."""
        responses = ResponsesTable() if self.allow_responses is True else self.allow_responses
        return SubjectPermissions(
            *_allow_and_deny(self.publish),
            *_allow_and_deny(self.subscribe),
            ResponsePermission(responses.max, responses.expires) if responses else None,
        )


PERMISSIONS = Kind("table", "", str, (), table=PermissionsTable)
SUBJECT_PERMISSIONS = Kind("table", "", str, (), table=SubjectPermissionsTable)


def _allow_and_deny(rules: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    """Return what a table of rules, or a list of allowed ones, allows and denies."""
    if isinstance(rules, RulesTable | SubjectRulesTable):
        return rules.allow, rules.deny
    return rules, ()


@dataclass(frozen=True)
class UserTable(SettingsTable):
    """User of all listeners."""

    name: str = USER_NAME.setting("Name of the user.", default="", is_required=True)
    password: str = PASSWORD.setting(
        "Password, or its Argon2 hash as `simplebus user add` writes it.", default=""
    )
    token: str = TOKEN.setting("`sha256:` and the hash of a token.", default="")
    nkey: str = NKEY.setting("Public key, for NATS clients.", default="")
    certificate: tuple[str, ...] = _CERTIFICATE.setting(
        "Name in a client certificate: email address, DNS name, URI or subject.", is_list=True
    )
    addresses: tuple[str, ...] = _ADDRESS.setting(
        "Networks of clients that send no credentials, such as `10.1.0.0/16`.", is_list=True
    )
    max_connections: int = replace(COUNT, unit="connections").setting(
        "Open connections on all listeners together; 0 sets no limit.", default=0
    )
    max_message_rate: float = replace(RATE, unit="messages per second").setting(
        "Published by all connections together; 0 sets no limit.", default=0.0
    )
    max_byte_rate: int = replace(SIZE, unit="bytes per second").setting(
        "The same in bytes; 0 sets no limit.", default=0
    )
    max_classes: int | None = replace(COUNT, unit="classes").setting(
        "Classes that the user may create; 0 sets no limit. Left out: a quarter of all for a user "
        "with permissions.",
    )
    max_durables: int | None = replace(COUNT, unit="durables").setting(
        "Durables and groups in all classes together. Left out: a quarter of those of one class "
        "for a user with permissions.",
    )
    permissions: PermissionsTable | None = PERMISSIONS.setting(
        "See `[users.permissions]`. Without the table, the user may do everything."
    )
    nats: SubjectPermissionsTable | None = SUBJECT_PERMISSIONS.setting(
        "See `[users.nats]`. Without the table, a user whose `permissions` restrict classes may "
        "use only `_INBOX.>` of the subjects that are not bound to a class."
    )

    def to_user(self) -> User:
        """Return the user. Raises ValueError if there are too many rules, or no credentials."""
        user = User(
            name=self.name,
            password=self.password,
            token=self.token,
            nkey=self.nkey,
            certificates=self.certificate,
            addresses=self.addresses,
            permissions=None if self.permissions is None else self.permissions.to_permissions(),
            subject_permissions=None if self.nats is None else self.nats.to_permissions(),
            connections=self.max_connections,
            rate=RateLimit(self.max_message_rate, self.max_byte_rate),
            classes_max=self.max_classes,
            durables_max=self.max_durables,
        )
        if not (user.password or user.token or user.nkey or user.certificates or user.networks):
            raise ValueError(
                f"user {self.name!r} cannot authenticate: expected a password, token, nkey, "
                "certificate or addresses"
            )
        return user


@dataclass(frozen=True, slots=True)
class ConfiguredUsers:
    """Users of the configuration files."""

    users: tuple[User, ...] = ()
    is_configured: bool = False
    """True if users are configured, even an empty list, with which no client can connect."""
    tables: tuple[Mapping[str, Any], ...] = ()
    """The tables of the users, as parsed."""

    def to_users(self, key: bytes = b"") -> Users | None:
        """Return the users of the server; None if no authentication is configured.

        Args:
            key: Random key of the password cache.

        Raises:
            ValueError: If two users have the same name or credentials.
        """
        from simplebus.core.users.passwords import PasswordVerifier

        return Users(self.users, PasswordVerifier(key)) if self.is_configured else None


_KEYS = {"token": "token", "nkey": "nkey", "certificate": "certificate", "network": "addresses"}
"""Key of a user's table by the kind of an identity."""


def read_users(reader: TableReader, tables: Any) -> ConfiguredUsers:
    """Return the valid users of the value of the key `users`."""
    users: list[User] = []
    owners: dict[tuple[str, str], str] = {}
    """Names of users by their identities."""
    for path, table, is_valid in reader.read_tables(UserTable, tables, "users"):
        user = None
        with reader.errors.collect(path):
            user = table.to_user() if is_valid else None
        if user is None:
            continue
        conflicts = [
            f"{path}.{_KEYS[kind]}: user {owner!r} has the same {kind}"
            for kind, value in user.identities()
            if (owner := owners.setdefault((kind, value), user.name)) != user.name
        ]
        reader.errors.messages += conflicts
        users += [] if conflicts else [user]
    if reader.errors.messages:
        return ConfiguredUsers(tuple(users), is_configured=True)
    return ConfiguredUsers(tuple(users), True, tuple(tables))


def read_users_file(path: Path) -> tuple[ConfiguredUsers, str]:
    """Return the users of a users file, and a warning or "". Raises ConfigError."""
    document = read_document(path, _BYTES_MAX)
    configured = parse_users(document)
    warning = ""
    if not configured.users:
        warning = f"{path} has no users: no client can connect"
    elif document.mode & stat.S_IROTH:
        warning = f"{path} holds secrets, and every user may read it; chmod 640 it, or 600"
    return configured, warning


def parse_users(document: TomlDocument) -> ConfiguredUsers:
    """Return the users of a users file. Raises ConfigError with files and lines."""
    reader = TableReader(document.path.parent)
    reader.errors.messages += [
        f"{name!r} is unknown; expected [[users]] only"
        for name in document.tables
        if name != "users"
    ]
    configured = read_users(reader, document.tables.get("users", []))
    if reader.errors.messages:
        raise ConfigError(*document.locate(reader.errors.messages))
    return configured


def merge_users(groups: Sequence[ConfiguredUsers]) -> ConfiguredUsers:
    """Return the users of several files. Raises ValueError for duplicates."""
    users = tuple(user for group in groups for user in group.users)
    tables = tuple(table for group in groups for table in group.tables)
    merged = ConfiguredUsers(users, any(group.is_configured for group in groups), tables)
    merged.to_users()
    return merged
