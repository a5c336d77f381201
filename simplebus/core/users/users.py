"""User table of a bus, and authentication.

A rejected client always gets the same message, whatever was wrong. Version 1 has no credentials, so
its clients are identified by certificate or address, if a user lists them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.certificate_names import normalize_name
from simplebus.core.users.nkeys import decode_user_key
from simplebus.core.users.passwords import (
    PasswordVerifier,
    check_stored_secret,
    hash_token,
    is_slow_hash,
)
from simplebus.core.users.permissions import ClassIdentity, Grants, Permissions, unresolved_class
from simplebus.core.users.rate_limit import UNLIMITED, RateLimit
from simplebus.core.users.subject_permissions import SubjectPermissions

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class User:
    """One user. Raises ValueError, with the user's name, for invalid settings."""

    name: str
    password: str = field(default="", repr=False)
    """Stored password, see `passwords`; empty for none."""
    token: str = field(default="", repr=False)
    """Stored token, which replaces name and password; empty for none."""
    nkey: str = ""
    """Public key for NATS clients."""
    certificates: tuple[str, ...] = ()
    """Names in a client certificate: email address, DNS name, URI or whole subject; see
    `certificate_names`.
    """
    addresses: tuple[str, ...] = ()
    """Networks whose clients are this user if they send no credentials."""
    permissions: Permissions | None = None
    """Permissions for classes; None for unrestricted access."""
    subject_permissions: SubjectPermissions | None = None
    """Permissions for NATS subjects. They decide about subjects that are bound to no class, and
    about all subjects if `permissions` is None.
    """
    connections: int = 0
    """Most connections at a time; 0 for unlimited."""
    rate: RateLimit = UNLIMITED
    """Publish rate of all connections of the user together."""
    classes_max: int | None = None
    """Most classes that the user may create; 0 for unlimited. None for the default quota of users
    with permissions; see `store.quotas`.
    """
    durables_max: int | None = None
    """Most durables and groups of the user in all classes; 0 and None as for `classes_max`."""
    networks: tuple[Network, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        check_user_name(self.name)
        for setting, secret in (("password", self.password), ("token", self.token)):
            try:
                check_stored_secret(secret)
            except ValueError as error:
                raise ValueError(f"the {setting} of user {self.name!r}: {error}") from None
        if self.nkey:
            try:
                decode_user_key(self.nkey)
            except ValueError as error:
                raise ValueError(f"user {self.name!r}: {error}") from None
        if is_slow_hash(self.token):
            raise ValueError(f"the token of user {self.name!r}: expected sha256: and 64 digits")
        for setting, count in (
            ("connections", self.connections),
            ("classes", self.classes_max),
            ("durables", self.durables_max),
        ):
            if count is not None and count < 0:
                raise ValueError(f"user {self.name!r}: {setting} must be 0 or more, got {count}")
        try:
            networks = tuple(map(parse_network, self.addresses))
        except ValueError as error:
            raise ValueError(f"user {self.name!r}: {error}") from None
        object.__setattr__(self, "networks", networks)
        for name in self.certificates:
            try:
                normalize_name(name)
            except ValueError as error:
                raise ValueError(f"user {self.name!r}: {error}") from None

    def identities(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the value of each name or credential that no other user may have."""
        yield "name", self.name
        if self.token:
            is_hashed = self.token.startswith("sha256:")
            yield "token", self.token if is_hashed else hash_token(self.token)
        if self.nkey:
            yield "nkey", self.nkey
        for name in self.certificates:
            yield "certificate", normalize_name(name)
        for network in self.networks:
            yield "network", str(network)

    def without_limits(self) -> User:
        """Return a copy without connection, rate and quota limits."""
        return replace(self, connections=0, rate=UNLIMITED, classes_max=None, durables_max=None)


def check_user_name(name: str) -> str:
    """Return a valid name of a user. Raises ValueError."""
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise ValueError(
            f"a user name has 1 to {NAME_CHARACTERS_MAX} printable characters, got {name[:40]!r}"
        )
    return name


def parse_network(text: str) -> Network:
    """Parse a network. IPv4-mapped IPv6 networks become IPv4. Raises ValueError."""
    network = ipaddress.ip_network(text, strict=False)
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= _MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return ipaddress.ip_network((mapped, network.prefixlen - _MAPPED_BITS))
    return network


_MAPPED_BITS = 96
_SHOWN_CHARACTERS = 400
_UNKNOWN_CREDENTIALS = "wrong user, password or token"
_DECOY_PASSWORD = "password that is compared for unknown users"


class Users:
    """Users of one bus, or of one of its listeners."""

    def __init__(
        self,
        users: Sequence[User],
        passwords: PasswordVerifier | None = None,
        *,
        anonymous: str = "",
    ) -> None:
        """Create a user table.

        Args:
            users: The users.
            passwords: Verifier of their passwords.
            anonymous: Name of the user of clients without credentials; empty for none.

        Raises:
            ValueError: If two users have the same name or credentials, or `anonymous` is unknown.
        """
        self.users = tuple(users)
        self.passwords = passwords or PasswordVerifier()
        self._users_by_name: dict[str, User] = {}
        self._users_by_token: dict[str, User] = {}
        """Users by the hash of their token."""
        self._users_by_certificate: dict[str, User] = {}
        self._users_by_nkey: dict[str, User] = {}
        tables: dict[str, dict[str, User]] = {
            "name": self._users_by_name,
            "token": self._users_by_token,
            "certificate": self._users_by_certificate,
            "nkey": self._users_by_nkey,
            "network": {},
        }
        self._networks: list[tuple[Network, User]] = []
        self._grants: dict[str, Grants] = {}
        self.resolve_class_name: Callable[[str], Sequence[ClassIdentity]] = unresolved_class
        """Returns the classes that a name may stand for, to apply permissions to dead letters."""
        self._decoy_hash = next(
            (u.password for u in users if is_slow_hash(u.password)), _DECOY_PASSWORD
        )
        for user in users:
            for kind, value in user.identities():
                first_user = tables[kind].setdefault(value, user)
                if first_user is not user:
                    raise ValueError(
                        f"users {first_user.name!r} and {user.name!r} have the same {kind}"
                    )
            self._networks += [(network, user) for network in user.networks]
        # The narrowest network that contains an address wins.
        self._networks.sort(key=lambda pair: -pair[0].prefixlen)
        self.anonymous_user = self._users_by_name.get(anonymous)
        """User of clients without credentials; None if credentials are required."""
        if anonymous and self.anonymous_user is None:
            raise ValueError(f"no_auth_user {anonymous}: expected the name of a user")

    def find_by_name(self, name: str) -> User | None:
        return self._users_by_name.get(name)

    def find_by_nkey(self, nkey: str) -> User | None:
        return self._users_by_nkey.get(nkey)

    def has_unchanged(self, user: User) -> bool:
        """Return True if the user still exists with the same credentials and permissions, ignoring
        limits.
        """
        current = self._users_by_name.get(user.name)
        return current is not None and current.without_limits() == user.without_limits()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Users)
            and other.users == self.users
            and other.anonymous_user == self.anonymous_user
        )

    def __hash__(self) -> int:
        return hash(self.users)

    def is_authentic(self, auth: Auth) -> bool:
        """Return True if the credentials are correct. False if a slow check would be needed."""
        return self._find_by_credentials(auth) is not None

    def pending_slow_check(self, auth: Auth | None) -> tuple[str, str] | None:
        """Return the stored hash and the password to verify before `authenticate`; None if no slow
        check is needed.

        Unknown users and wrong passwords with a fast hash cause the same work as a slow check, so
        that the duration reveals nothing.
        """
        if auth is None or not auth.user:
            return None
        user = self._users_by_name.get(auth.user)
        stored = user.password if user is not None and user.password else self._decoy_hash
        if self.passwords.is_correct(stored, auth.password):
            return None
        stored = stored if is_slow_hash(stored) else self._decoy_hash
        return (stored, auth.password) if is_slow_hash(stored) else None

    def authenticate(
        self, auth: Auth | None, *, certified: Sequence[str] = (), address: str = "", version: int
    ) -> User:
        """Return the user of a client.

        Args:
            auth: Credentials, if the client sent any.
            certified: Normalized names in the client's certificate.
            address: IP address of the client.
            version: Protocol version of the client, for the error message.

        Raises:
            RemoteProtocolError: unauthorized if no user matches.
        """
        if auth is not None and (auth.user or auth.token):
            user = self._find_by_credentials(auth)
            if user is None:
                raise RemoteProtocolError(Reason.UNAUTHORIZED, _UNKNOWN_CREDENTIALS)
            return user
        for name in certified:
            if name in self._users_by_certificate:
                return self._users_by_certificate[name]
        found = self._find_by_address(address) or self.anonymous_user
        if found is None and certified:
            shown = ", ".join(map(repr, certified))[:_SHOWN_CHARACTERS]
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED, f"no user has the certificate name {shown}"
            )
        if found is None:
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED,
                "this bus requires authentication; expected user and password, or a token, in the "
                "Connect"
                if version > 1
                else "this bus requires authentication, which version 1 cannot send; expected a "
                "user for the peer's address or certificate",
            )
        return found

    def _find_by_credentials(self, auth: Auth) -> User | None:
        if auth.token:
            user = self._users_by_token.get(hash_token(auth.token))
            if user is not None or not auth.user:
                return user
        user = self._users_by_name.get(auth.user)
        stored = user.password if user is not None and user.password else self._decoy_hash
        is_right = self.passwords.is_correct(stored, auth.password)
        return user if is_right and user is not None and user.password else None

    def _find_by_address(self, address: str) -> User | None:
        if not self._networks or not address:
            return None
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return next((user for network, user in self._networks if parsed in network), None)

    def get_grants(self, user: User) -> Grants | None:
        """Return the grants of a user; None for unrestricted access."""
        if user.permissions is None:
            return None
        grants = self._grants.get(user.name)
        if grants is None:
            grants = self._grants[user.name] = Grants(user.permissions, self.resolve_class_name)
        return grants
