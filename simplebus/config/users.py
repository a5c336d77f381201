"""Users of all listeners, from the configuration file or the users file.

[[users]]
name = "till"
password = "$argon2id$…"                as `simplebus user add` writes it
token = "sha256:…"                      instead of name and password
nkey = "U…"                             for the NATS listener
certificate = "CN=till,OU=shops"        or an email address, or a DNS name
addresses = ["10.1.0.0/16"]             networks of clients that cannot authenticate
max-connections = 100
max-message-rate = 1000                 published per second by all its connections
max-byte-rate = "10MiB"
max-classes = 100                       classes it may create
max-durables = 100                      durables and groups in all classes together

[users.permissions]                     without it: everything
publish = { allow = ["orders eu.#"], deny = ["orders eu.test"] }
subscribe = ["orders", "dead.*"]
admin = ["inquire", "purge dead.*"]
wildcards = true

[users.nats]                            for subjects that are bound to no class
publish = ["metrics.>"]
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from simplebus.config.errors import (
    ConfigError,
    ErrorCollector,
    describe_toml_error,
    limit_messages,
)
from simplebus.config.schema import (
    SubjectPermissionsTable,
    TomlTable,
    build_located,
    build_subject_permissions,
    parse_size_value,
    parse_valid_part,
)
from simplebus.config.toml_lines import add_location, locate_keys
from simplebus.core import toml
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.users import User, Users

T = TypeVar("T")
Texts = tuple[str, ...] | str

_BYTES_MAX = 64 << 20
_ARGON2 = re.compile(
    r"\$argon2(id|i|d)\$v=\d+\$m=\d+,t=\d+,p=\d+\$[A-Za-z0-9+/]{8,}\$[A-Za-z0-9+/]{8,}"
)


class RulesTable(TomlTable, frozen=True):
    """Allowed and denied classes, each optionally with channels."""

    allow: Texts | None = None
    """None allows every class."""
    deny: Texts | None = None


class PermissionsTable(TomlTable, frozen=True):
    """Permissions of a user. A user without the table may do everything."""

    publish: RulesTable | Texts | None = None
    subscribe: RulesTable | Texts | None = None
    admin: Texts = ()
    wildcards: bool = True


class UserTable(TomlTable, frozen=True):
    """User of all listeners."""

    name: str
    password: str = ""
    token: str = ""
    nkey: str = ""
    certificate: Texts = ()
    addresses: Texts = ()
    max_connections: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_message_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Messages per second that all connections of the user together may publish."""
    max_byte_rate: int | str = 0
    """Bytes per second, or a text with a unit."""
    max_classes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_durables: Annotated[int, msgspec.Meta(ge=0)] | None = None
    permissions: PermissionsTable | None = None
    nats: SubjectPermissionsTable | None = None

    def to_user(self, path: str, *, is_whole: bool = True) -> User:
        """Return the user. Raises ConfigError with all errors.

        With `is_whole` false, some keys were invalid and a missing credential is no error.
        """
        errors, permissions, subject_permissions, byte_rate = ErrorCollector(), None, None, 0
        with errors.collect():
            if self.password.startswith("$argon2") and not _ARGON2.fullmatch(self.password):
                raise ConfigError(
                    f"{path}.password: begins with $argon2 but is not a hash that `simplebus user "
                    "add` writes"
                )
        with errors.collect():
            byte_rate = parse_size_value(self.max_byte_rate, f"{path}.max-byte-rate") or 0
        with errors.collect():
            permissions = _build_permissions(self.permissions, f"{path}.permissions")
        with errors.collect():
            subject_permissions = build_subject_permissions(self.nats, f"{path}.nats")
        name = "it"  # Placeholder, so that an invalid name is reported only once.
        with errors.collect():
            name = build_located(f"{path}.name", lambda: User(self.name)).name
        with errors.collect():
            build_located(f"{path}.max-message-rate", lambda: RateLimit(self.max_message_rate))
        for key, arguments in self._single_values():
            with errors.collect():
                build_located(f"{path}.{key}", partial(User, name, **arguments))
        errors.raise_if_any()
        with errors.collect():
            user = build_located(
                path,
                lambda: User(
                    name=self.name,
                    password=self.password,
                    token=self.token,
                    nkey=self.nkey,
                    certificates=_as_tuple(self.certificate),
                    addresses=_as_tuple(self.addresses),
                    permissions=permissions,
                    subject_permissions=subject_permissions,
                    connections=self.max_connections,
                    rate=RateLimit(self.max_message_rate, byte_rate),
                    classes_max=self.max_classes,
                    durables_max=self.max_durables,
                ),
            )
            credentials = (user.password, user.token, user.nkey, user.certificates, user.networks)
            if is_whole and not any(credentials):
                raise ConfigError(
                    f"{path}: user {self.name!r} cannot authenticate: expected a password, token, "
                    "nkey, certificate or addresses"
                )
        errors.raise_if_any()
        return user

    def _single_values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each credential by key, as arguments of a user that has only this credential."""
        yield "password", {"password": self.password}
        yield "token", {"token": self.token}
        yield "nkey", {"nkey": self.nkey}
        for each in _as_tuple(self.certificate):
            yield "certificate", {"certificates": (each,)}
        for each in _as_tuple(self.addresses):
            yield "addresses", {"addresses": (each,)}


@dataclass(frozen=True, slots=True)
class ConfiguredUsers:
    """Users of the configuration files."""

    users: tuple[User, ...] = ()
    is_configured: bool = False
    """True if users are configured, even an empty list, with which nobody can connect."""

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


def parse_users(user_tables: Any, path: str = "users") -> ConfiguredUsers:
    """Return the users of a parsed file. Raises ConfigError with all errors."""
    if not isinstance(user_tables, list):
        raise ConfigError(f"{path}: expected [[{path}]], one table for each user")
    users: list[User] = []
    names: set[str] = set()
    owners: dict[tuple[str, str], str] = {}
    """Names of users by their identities."""
    errors = ErrorCollector()
    for index, table in enumerate(user_tables):
        user_path, own_errors = f"{path}[{index}]", ErrorCollector()
        with own_errors.collect():
            if not isinstance(table, dict):
                raise ConfigError(f"{user_path}: expected a table, as [[{path}]] begins one")
            if isinstance(name := table.get("name"), str):
                if name in names:
                    errors.messages.append(f"{user_path}.name: there is another user {name!r}")
                names.add(name)
            if (parsed := parse_valid_part(UserTable, table, user_path, own_errors)) is not None:
                user = parsed.to_user(user_path, is_whole=not own_errors.messages)
                users.append(user)
                own_errors.messages += [
                    f"{user_path}.{_KEYS[kind]}: user {owner!r} has the same {kind}"
                    for kind, value in user.identities()
                    if (owner := owners.setdefault((kind, value), user.name)) != user.name
                ]
        errors.messages += own_errors.messages
    errors.raise_if_any()
    return ConfiguredUsers(tuple(users), is_configured=True)


def read_users_file(path: Path) -> tuple[ConfiguredUsers, str]:
    """Return the users of a users file, and a warning or "". Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_BYTES_MAX + 1)
            text = raw.decode("utf-8-sig") if len(raw) <= _BYTES_MAX else ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not TOML: it is not UTF-8") from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"{path} is longer than {_BYTES_MAX >> 20} MiB: it is not a users file")
    configured = parse_users_file(text, path)
    warning = ""
    if not configured.users:
        warning = f"{path} has no users: no client can connect"
    elif mode & stat.S_IROTH:
        warning = f"{path} holds secrets, and every user may read it; chmod 640 it, or 600"
    return configured, warning


def parse_users_file(text: str, path: Path) -> ConfiguredUsers:
    """Return the users of the text of a users file. Raises ConfigError with files and lines."""
    try:
        document = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(describe_toml_error(path, str(error))) from None
    errors, configured = ErrorCollector(), ConfiguredUsers()
    errors.messages += [
        f"{name!r} is unknown; expected [[users]] only" for name in document if name != "users"
    ]
    with errors.collect():
        configured = parse_users(document.get("users", []))
    if errors.messages:
        lines = locate_keys(text)
        raise ConfigError(
            *limit_messages([add_location(each, path, lines) for each in errors.messages])
        )
    return configured


def merge_users(groups: Sequence[ConfiguredUsers]) -> ConfiguredUsers:
    """Return the users of several files. Raises ValueError for duplicates."""
    users = tuple(user for group in groups for user in group.users)
    merged = ConfiguredUsers(users, any(group.is_configured for group in groups))
    merged.to_users()
    return merged


def _build_permissions(table: PermissionsTable | None, path: str) -> Permissions | None:
    if table is None:
        return None
    errors, publish, subscribe = ErrorCollector(), PermissionRules(), PermissionRules()
    with errors.collect():
        publish = _build_rules(table.publish, f"{path}.publish")
    with errors.collect():
        subscribe = _build_rules(table.subscribe, f"{path}.subscribe")
    admin = _parse_each(Permissions.parse_right, table.admin, f"{path}.admin", errors)
    errors.raise_if_any()
    return Permissions(publish, subscribe, admin, table.wildcards)


def _build_rules(value: RulesTable | Texts | None, path: str) -> PermissionRules:
    errors, is_short = ErrorCollector(), not isinstance(value, RulesTable)
    rules = value if isinstance(value, RulesTable) else RulesTable(allow=value)
    allow = None
    if rules.allow is not None:
        allow = _parse_each(
            PermissionRule.parse, rules.allow, path if is_short else f"{path}.allow", errors
        )
    deny = _parse_each(PermissionRule.parse, rules.deny or (), f"{path}.deny", errors)
    errors.raise_if_any()
    return build_located(path, lambda: PermissionRules(allow, deny))


def _parse_each(
    parse: Callable[[str], T], texts: Texts, path: str, errors: ErrorCollector
) -> tuple[T, ...]:
    """Return the parsed texts. Errors are added to `errors`."""
    parsed = []
    for index, text in enumerate(_as_tuple(texts)):
        with errors.collect():
            item_path = path if isinstance(texts, str) else f"{path}[{index}]"
            parsed.append(build_located(item_path, partial(parse, text)))
    return tuple(parsed)


def _as_tuple(value: Texts) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
