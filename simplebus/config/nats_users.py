"""Users of the `[nats]` table, which is deprecated in favour of `[[users]]`.

They become users as those of `[[users]]`, but of NATS clients only. The table will be removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simplebus.config.errors import ConfigError, ErrorCollector
from simplebus.config.schema import (
    SubjectPermissionsTable,
    TomlTable,
    build_located,
    build_subject_permissions,
    parse_table,
    parse_valid_part,
)
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users

if TYPE_CHECKING:
    from simplebus.core.users.passwords import PasswordVerifier

SECRETS = ("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_NATS_USER", "SIMPLEBUS_NATS_PASSWORD")
"""Environment variables with a token, or a user and password, that NATS clients must present."""

_TOKEN_USER = "nats token"
_REPLACEMENTS = {
    "users": "write each user as [[users]], with its permissions as [users.nats]",
    "user": 'write [[users]] with "name" and "password"',
    "token": 'write [[users]] with "name" and "token"',
    "no_auth_user": 'give a user of [[users]] addresses = ["0.0.0.0/0", "::/0"]',
    "default_permissions": "give each user of [[users]] its [users.nats]",
}
"""What to write instead of each deprecated key."""


class NatsUserTable(TomlTable, frozen=True):
    """User with a password, an nkey or a certificate."""

    user: str = ""
    password: str = ""
    nkey: str = ""
    """Public key."""
    permissions: SubjectPermissionsTable | None = None

    def to_user(self, path: str) -> User:
        """Return the user. Raises ConfigError if a value is invalid."""
        if not (self.user or self.nkey):
            raise ConfigError(f"{path}: expected 'user' or 'nkey'")
        permissions = build_subject_permissions(self.permissions, f"{path}.permissions")
        return build_located(
            path,
            lambda: User(
                self.user or self.nkey,
                self.password,
                nkey=self.nkey,
                subject_permissions=permissions,
            ),
        )


class NatsTable(TomlTable, frozen=True):
    """Authentication of NATS clients."""

    token: str | None = None
    user: str | None = None
    password: str | None = None
    users: tuple[NatsUserTable, ...] = ()
    no_auth_user: str = ""
    """User of clients that send no credentials."""
    default_permissions: SubjectPermissionsTable | None = None
    """Permissions of users without permissions of their own."""

    def to_users(self, users: Sequence[User], path: str) -> NatsUsers:
        """Return all users of the table; `users` are those of its list.

        Raises ConfigError if values contradict each other.
        """
        values = {"token": self.token, "user": self.user, "password": self.password}
        for key, value in values.items():
            if value == "":
                raise ConfigError(
                    f"{path}.{key}: an empty value would let everybody in; remove the key instead"
                )
        if bool(self.user) != bool(self.password):
            raise ConfigError(f"{path}: 'user' and 'password' need each other")
        default = build_subject_permissions(self.default_permissions, f"{path}.default_permissions")
        secrets = dict(zip(SECRETS, (self.token, self.user, self.password), strict=True))
        result = NatsUsers(tuple(users), self.no_auth_user, default)
        result = build_located(path, lambda: result.with_secrets(secrets))
        build_located(path, lambda: Users(result.users, anonymous=result.anonymous))
        return result


@dataclass(frozen=True, slots=True)
class NatsUsers:
    """Users of NATS clients only."""

    users: tuple[User, ...] = ()
    anonymous: str = ""
    """Name of the user of clients without credentials; empty for none."""
    default_permissions: SubjectPermissions | None = None
    """Permissions of users without permissions of their own; not of a token."""

    def with_secrets(self, environment: Mapping[str, str | None]) -> NatsUsers:
        """Return the users with the `SECRETS` of an environment, which replace equal names.

        Raises ValueError if a secret is invalid.
        """
        token, name, password = (environment.get(variable) or "" for variable in SECRETS)
        if bool(name) != bool(password):
            raise ValueError(f"{SECRETS[1]} and {SECRETS[2]} need each other")
        added = [User(_TOKEN_USER, token=token)] if token else []
        added += [User(name, password)] if name else []
        names = {user.name for user in added}
        kept = tuple(user for user in self.users if user.name not in names)
        return replace(self, users=(*kept, *added))

    def to_users(self, shared: Users | None, *, has_certificates: bool) -> Users | None:
        """Return the users of NATS clients, `shared` included; None without authentication.

        Args:
            shared: Users of all listeners.
            has_certificates: True if a user is also identified by its name in a certificate.

        Raises:
            ValueError: If a user cannot authenticate, or has the name of another one.
        """
        if not self.users:
            if self.default_permissions is not None:
                raise ConfigError("nats.default_permissions: there are no users")
            return shared
        own = [self._complete(user, has_certificates=has_certificates) for user in self.users]
        passwords: PasswordVerifier | None = None if shared is None else shared.passwords
        return Users(
            (*(() if shared is None else shared.users), *own), passwords, anonymous=self.anonymous
        )

    def _complete(self, user: User, *, has_certificates: bool) -> User:
        if has_certificates and user.name not in (user.nkey, _TOKEN_USER):
            user = replace(user, certificates=(user.name,))
        elif not (user.password or user.token or user.nkey or user.name == self.anonymous):
            raise ValueError(
                f"user {user.name} of [[nats.users]] cannot authenticate: expected a password "
                "or --nats-tls-verify-and-map to identify the user by a certificate"
            )
        if user.token:
            return user
        return replace(
            user, subject_permissions=user.subject_permissions or self.default_permissions
        )


def deprecation_warnings(keys: Mapping[str, object], path: str = "nats") -> Iterator[str]:
    """Yield a warning for each key of the table that is set."""
    for key, replacement in _REPLACEMENTS.items():
        if key in keys:
            yield (
                f"{path}.{key} is deprecated; {replacement} instead. Users of [[users]] may "
                "connect to all listeners"
            )


def secret_warnings(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of `SECRETS` that is set."""
    for variable in SECRETS:
        if environment.get(variable):
            yield f"{variable} is deprecated; write [[users]] in the configuration file instead"


def parse_nats_table(
    table_values: dict[str, Any], errors: ErrorCollector, path: str = "nats"
) -> tuple[NatsUsers, bool]:
    """Return the valid part of the `[nats]` table, and whether it contains secrets.

    Errors are added to `errors`.
    """
    own_errors, users, user_tables = ErrorCollector(), list[User](), table_values.get("users")
    if isinstance(user_tables, list) and all(
        isinstance(user_values, dict) for user_values in user_tables
    ):
        table_values = {key: value for key, value in table_values.items() if key != "users"}
    else:
        user_tables = []
    has_secrets = False
    for index, user_values in enumerate(user_tables):
        with own_errors.collect():
            user_path = f"{path}.users[{index}]"
            user = parse_table(NatsUserTable, user_values, user_path)
            has_secrets |= bool(user.password)
            users.append(user.to_user(user_path))
    table, parsed = parse_valid_part(NatsTable, table_values, path, own_errors), NatsUsers()
    if table is not None:
        has_secrets |= bool(table.token or table.password)
        if not own_errors.messages:
            parsed = table.to_users(users, path)
    errors.messages += own_errors.messages
    return parsed, has_secrets
