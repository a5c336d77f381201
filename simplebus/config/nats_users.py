"""Users of the `[nats]` table, which is deprecated in favour of `[[users]]`.

They become users as those of `[[users]]`, but of NATS clients only. The table will be removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simplebus.config.environment import NATS_SECRETS
from simplebus.config.errors import ConfigError
from simplebus.config.setting import TEXT, Kind, SettingsTable
from simplebus.config.table_reader import TableReader
from simplebus.config.users import (
    NKEY,
    PASSWORD,
    SUBJECT_PERMISSIONS,
    SubjectPermissionsTable,
)
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users

if TYPE_CHECKING:
    from simplebus.core.users.passwords import PasswordVerifier

_TOKEN_USER = "nats token"


def _parse_not_empty(text: str) -> str:
    if not text:
        raise ValueError("an empty value would admit every client; remove the key instead")
    return text


_NAME = Kind("text", "NAME", _parse_not_empty)
_SECRET = replace(_NAME, is_secret=True)


@dataclass(frozen=True)
class NatsUserTable(SettingsTable):
    """User with a password, an nkey or a certificate."""

    user: str = TEXT.setting(
        "Name of the user, or the name in its certificate with `verify-and-map`.", default=""
    )
    password: str = PASSWORD.setting("Password, in plain text.", default="")
    nkey: str = NKEY.setting("Public key, instead of name and password.", default="")
    permissions: SubjectPermissionsTable | None = SUBJECT_PERMISSIONS.setting(
        "Permissions for subjects, as in `[users.nats]`."
    )

    def to_user(self) -> User:
        """Return the user. Raises ValueError without name and nkey."""
        if not (self.user or self.nkey):
            raise ValueError("expected 'user' or 'nkey'")
        permissions = None if self.permissions is None else self.permissions.to_permissions()
        return User(
            self.user or self.nkey,
            self.password,
            nkey=self.nkey,
            subject_permissions=permissions,
        )


@dataclass(frozen=True)
class NatsTable(SettingsTable):
    """Authentication of NATS clients."""

    DEPRECATED = (
        "write each user as [[users]], with its permissions as [users.nats]. Users of [[users]] "
        "may connect to all listeners"
    )

    token: str | None = _SECRET.setting("Token that every client may send.")
    user: str | None = _NAME.setting("Name of a single user.")
    password: str | None = _SECRET.setting("Password of this user, in plain text.")
    users: Any = Kind("list of tables", "", str, (), table=NatsUserTable).setting(
        "See `[[nats.users]]`.", is_list=True
    )
    no_auth_user: str = TEXT.setting("User of clients that send no credentials.", default="")
    default_permissions: SubjectPermissionsTable | None = SUBJECT_PERMISSIONS.setting(
        "Permissions of users without permissions of their own."
    )

    def to_users(self, reader: TableReader) -> NatsUsers:
        """Return all users of the table; none after an error, which `reader` collects."""
        users: list[User] = []
        for path, table, is_valid in self.users:
            with reader.errors.collect(path):
                if is_valid:
                    users.append(table.to_user())
        with reader.errors.collect("nats"):
            if bool(self.user) != bool(self.password):
                raise ValueError("'user' and 'password' need each other")
            default = self.default_permissions
            result = NatsUsers(
                tuple(users),
                self.no_auth_user,
                None if default is None else default.to_permissions(),
            ).with_secrets(
                dict(zip(NATS_SECRETS, (self.token, self.user, self.password), strict=True))
            )
            Users(result.users, anonymous=result.anonymous)
            return result
        return NatsUsers()


@dataclass(frozen=True, slots=True)
class NatsUsers:
    """Users of NATS clients."""

    users: tuple[User, ...] = ()
    anonymous: str = ""
    """Name of the user of clients without credentials; empty for none."""
    default_permissions: SubjectPermissions | None = None
    """Permissions of users without permissions of their own; not of a token."""

    def with_secrets(self, environment: Mapping[str, str | None]) -> NatsUsers:
        """Return the users with the `NATS_SECRETS` of an environment, which replace equal names.

        Raises ValueError if a secret is invalid.
        """
        token, name, password = (environment.get(variable) or "" for variable in NATS_SECRETS)
        if bool(name) != bool(password):
            raise ValueError(f"{NATS_SECRETS[1]} and {NATS_SECRETS[2]} need each other")
        added = [User(_TOKEN_USER, token=token)] if token else []
        added += [User(name, password)] if name else []
        names = {user.name for user in added}
        kept_users = tuple(user for user in self.users if user.name not in names)
        return replace(self, users=(*kept_users, *added))

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
        users = [self._complete(user, has_certificates=has_certificates) for user in self.users]
        passwords: PasswordVerifier | None = None if shared is None else shared.passwords
        return Users(
            (*(() if shared is None else shared.users), *users), passwords, anonymous=self.anonymous
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


def secret_warnings(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of `NATS_SECRETS` that is set."""
    for variable in NATS_SECRETS:
        if environment.get(variable):
            yield f"{variable} is deprecated; write [[users]] in the configuration file instead"
