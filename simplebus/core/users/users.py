"""Who may come in, through whichever door, and how it shows who it is.

Rule 1: whoever is not let in hears one sentence, whatever was wrong.
Rule 2: version 1 has no word for who one is: it comes in by a certificate or an address, where a
user says so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.certificate_names import spelled
from simplebus.core.users.passwords import Passwords, check_secret, is_slow, quick_hash
from simplebus.core.users.permissions import Called, Grants, Permissions, called_so
from simplebus.core.users.rate_limit import UNLIMITED, Rate

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class User:
    """One who may connect. Raises ValueError, naming the user, for what makes no sense."""

    name: str
    password: str = field(default="", repr=False)
    """As it is kept, see `passwords`; empty for none."""
    token: str = field(default="", repr=False)
    """The same of what may be said instead of name and password."""
    nkey: str = ""
    """Of the NATS door: the public half of a key."""
    certificates: tuple[str, ...] = ()
    """Names in a client's certificate: an email address, a DNS name, an URI or the whole subject;
    see `certificate_names`."""
    addresses: tuple[str, ...] = ()
    """Networks from where who says nothing of who it is is this user."""
    permissions: Permissions | None = None
    """None for everything."""
    connections: int = 0
    """How many there may be at once; 0 for any number."""
    rate: Rate = UNLIMITED
    """How fast all of them together may publish."""
    classes_max: int | None = None
    """How many classes it may make; 0 for any number. None for a part of all, where it has
    permissions; see `shares`."""
    durables_max: int | None = None
    """How many durables and groups it may have, in all classes together. 0 and None as above."""
    networks: tuple[Network, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= NAME_CHARACTERS_MAX or not self.name.isprintable():
            raise ValueError(
                f"a user's name is 1 to {NAME_CHARACTERS_MAX} characters that can be printed, got "
                f"{self.name[:40]!r}"
            )
        for what, secret in (("password", self.password), ("token", self.token)):
            try:
                check_secret(secret)
            except ValueError as error:
                raise ValueError(f"the {what} of user {self.name!r}: {error}") from None
        if is_slow(self.token):
            raise ValueError(f"the token of user {self.name!r}: expected sha256: and 64 digits")
        for what, count in (
            ("connections", self.connections),
            ("classes", self.classes_max),
            ("durables", self.durables_max),
        ):
            if count is not None and count < 0:
                raise ValueError(f"user {self.name!r}: {what} is 0 or more, got {count}")
        try:
            networks = tuple(map(_network, self.addresses))
        except ValueError as error:
            raise ValueError(f"user {self.name!r}: {error}") from None
        object.__setattr__(self, "networks", networks)
        for name in self.certificates:
            try:
                spelled(name)
            except ValueError as error:
                raise ValueError(f"user {self.name!r}: {error}") from None

    def without_limits(self) -> User:
        """Who it is and what it may do, but for how much of it."""
        return replace(self, connections=0, rate=UNLIMITED, classes_max=None, durables_max=None)


def _network(text: str) -> Network:
    """What a text stands for; version 4 also as version 6 writes it. Raises ValueError."""
    found = ipaddress.ip_network(text, strict=False)
    if isinstance(found, ipaddress.IPv6Network) and found.prefixlen >= _MAPPED_BITS:
        mapped = found.network_address.ipv4_mapped
        if mapped is not None:
            return ipaddress.ip_network((mapped, found.prefixlen - _MAPPED_BITS))
    return found


_MAPPED_BITS = 96
_SHOWN_CHARACTERS = 400
_NOT_LET_IN = "the user and the password, or the token, are not those of anybody here"
_DECOY = "a password that is compared where there is no such user"


class Users:
    """Those of one bus. Raises ValueError when two cannot be told apart."""

    def __init__(self, users: Sequence[User], passwords: Passwords | None = None) -> None:
        self.users = tuple(users)
        self.passwords = passwords or Passwords()
        self._named: dict[str, User] = {}
        self._tokens: dict[str, User] = {}
        """By the hash of the token."""
        self._certified: dict[str, User] = {}
        self._keys: dict[str, User] = {}
        by_network: dict[str, User] = {}
        self._networks: list[tuple[Network, User]] = []
        self._grants: dict[str, Grants] = {}
        self.called: Callable[[str], Sequence[Called]] = called_so
        """Which classes are called so: by what their dead letters are judged, too."""
        self._decoy = next((u.password for u in users if is_slow(u.password)), _DECOY)
        for user in users:
            token = user.token
            if token and not token.startswith("sha256:"):
                token = quick_hash(token)
            for what, table, keys in (
                ("name", self._named, (user.name,)),
                ("token", self._tokens, (token,) if token else ()),
                ("nkey", self._keys, (user.nkey,) if user.nkey else ()),
                ("certificate", self._certified, tuple(map(spelled, user.certificates))),
                ("network", by_network, tuple(map(str, user.networks))),
            ):
                for key in keys:
                    other = table.setdefault(key, user)
                    if other is not user:
                        raise ValueError(
                            f"users {other.name!r} and {user.name!r} have the same {what}"
                        )
            self._networks += [(network, user) for network in user.networks]
        # The narrowest network that an address is in says who it is.
        self._networks.sort(key=lambda pair: -pair[0].prefixlen)

    def named(self, name: str) -> User | None:
        """Who has this name; None for nobody."""
        return self._named.get(name)

    def of_key(self, nkey: str) -> User | None:
        """Who has this nkey; None for nobody."""
        return self._keys.get(nkey)

    def still_has(self, user: User) -> bool:
        """Whether there is such a user, who may do the same, however much of it."""
        found = self._named.get(user.name)
        return found is not None and found.without_limits() == user.without_limits()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Users) and other.users == self.users

    def __hash__(self) -> int:
        return hash(self.users)

    def knows(self, auth: Auth) -> bool:
        """Whether this shows who one is, as far as it can be told at once."""
        return self._by_words(auth) is not None

    def slow_check(self, auth: Auth | None) -> tuple[str, str] | None:
        """What must be worked out before this is judged: what the password is kept as, and what
        was said; None for nothing. Of a user that is not there, or whose password is compared at
        once, the same work is done when it is wrong."""
        if auth is None or auth.token or not auth.user:
            return None
        user = self._named.get(auth.user)
        kept = user.password if user is not None and user.password else self._decoy
        if self.passwords.is_right(kept, auth.password):
            return None
        kept = kept if is_slow(kept) else self._decoy
        return (kept, auth.password) if is_slow(kept) else None

    def admit(
        self, auth: Auth | None, *, certified: Sequence[str] = (), address: str = "", version: int
    ) -> User:
        """Who says this, or shows a certificate with these names, in their one spelling, or comes
        from this address.

        Raises RemoteProtocolError (unauthorized) for nobody that is known.
        """
        if auth is not None and (auth.user or auth.token):
            user = self._by_words(auth)
            if user is None:
                raise RemoteProtocolError(Reason.UNAUTHORIZED, _NOT_LET_IN)
            return user
        for name in certified:
            if name in self._certified:
                return self._certified[name]
        found = self._by_address(address)
        if found is None and certified:
            shown = ", ".join(map(repr, certified))[:_SHOWN_CHARACTERS]
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED, f"its certificate calls it {shown}, which is nobody here"
            )
        if found is None:
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED,
                "this bus asks who one is; expected a user and a password, or a token, in the "
                "Connect"
                if version > 1
                else "this bus asks who one is, and version 1 has no word for it: a user has to be "
                "bound to the peer's address or certificate",
            )
        return found

    def _by_words(self, auth: Auth) -> User | None:
        if auth.token:
            return self._tokens.get(quick_hash(auth.token))
        user = self._named.get(auth.user)
        kept = user.password if user is not None and user.password else self._decoy
        is_right = self.passwords.is_right(kept, auth.password)
        return user if is_right and user is not None and user.password else None

    def _by_address(self, address: str) -> User | None:
        if not self._networks or not address:
            return None
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return next((user for network, user in self._networks if found in network), None)

    def grants(self, user: User) -> Grants | None:
        """What a user may do; None for everything."""
        if user.permissions is None:
            return None
        found = self._grants.get(user.name)
        if found is None:
            found = self._grants[user.name] = Grants(user.permissions, self.called)
        return found
