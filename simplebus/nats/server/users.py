"""Who may come through the NATS door: users by password, token or key, and how it is checked.

Rule 1: a secret is compared in constant time, and in full even when the user is not known.
Rule 2: passwords of this door's own users are kept as they are written. Hashes made to be slow to
check (bcrypt) are refused: one check would hold up everybody on the bus. Users of all doors have
theirs checked before it is asked here; see `core.passwords`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.certificate_names import (
    CertificateNameKind,
    classify_name,
    format_subject,
    normalize_name,
)
from simplebus.core.users.users import User as SharedUser
from simplebus.core.users.users import Users
from simplebus.nats.server.permissions import SubjectPermissions

_KINDS = {
    "email": CertificateNameKind.EMAIL,
    "DNS": CertificateNameKind.DNS,
    "URI": CertificateNameKind.URI,
}


def certificate_name_index(users: Collection[str]) -> dict[str, str]:
    """Names of users, by themselves and by how they are spelled in certificates."""
    found = {user: user for user in users}
    for user in users:
        found.setdefault(_normalize_name(user) or user, user)
    return found


def find_certificate_user(certificate: Mapping[str, Any], users: Mapping[str, str]) -> str:
    """Which of these users, see `by_spelling`, a certificate is of; what it calls its holder if it
    is none of them.

    `certificate` has the form of Python's `ssl.SSLSocket.getpeercert`.
    """
    found = certificate_names(certificate) or ("nobody",)
    return next((users[name] for name in found if name in users), found[0])


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """What a certificate calls its holder, the likeliest name first."""
    alternatives = certificate.get("subjectAltName", ())
    found = [
        name
        for key, kind in _KINDS.items()
        for k, written in alternatives
        if k == key and classify_name(written) is kind and (name := _normalize_name(written))
    ]
    own = format_subject(reversed(certificate.get("format_subject", ())))
    return (*found, own) if own else tuple(found)


def _normalize_name(name: str) -> str:
    """In the one spelling; empty for what is no name."""
    try:
        return normalize_name(name)
    except ValueError:
        return ""


_KEY_BYTES = 32
_USER_KEY_PREFIX = 20 << 3
_PLAIN_ALPHABET = bytes.maketrans(b"-_", b"+/")
_BCRYPT = ("$2a$", "$2b$", "$2x$", "$2y$")


@dataclass(frozen=True, slots=True)
class NatsUser:
    """One who may connect: by name and password, or by an nkey's public half.

    Raises ValueError, naming the user, when it has neither or both, or the key is no user's.
    """

    name: str = ""
    """Empty for a user who has a key."""
    password: str = field(default="", repr=False)
    """Empty for one whom nothing that is said shows: by a certificate, or as `no_auth_user`."""
    nkey: str = ""
    """Public key as `nk` prints it: `U` and 55 more letters and digits of base 32."""
    permissions: SubjectPermissions | None = None
    """What it may do; None for everything."""
    shared_user: SharedUser | None = None
    """Who it is at all doors; None for a user of this one alone."""

    def __post_init__(self) -> None:
        if bool(self.name) == bool(self.nkey):
            raise ValueError(f"user {self.name or self.nkey!r}: expected a name or an nkey")
        if self.nkey:
            if self.password:
                raise ValueError(f"user {self.nkey}: has an nkey, expected no password beside it")
            decode_user_key(self.nkey)
        elif self.password.startswith(_BCRYPT):
            raise ValueError(
                f"user {self.name}: the password is a bcrypt hash, which is not supported: "
                "expected the password itself"
            )


_UNKNOWN_USER = NatsUser("nobody", "a password that is compared where there is no such user")


@dataclass(frozen=True, slots=True)
class NatsAuth:
    """Who may connect. With neither token nor users, everybody may, and may do everything.

    Raises ValueError when what it says contradicts itself.
    """

    users: tuple[NatsUser, ...] = ()
    token: str = field(default="", repr=False)
    """What anybody may say instead of being a user; empty for none."""
    no_auth_user: str = ""
    """Name of the user that those are who say nothing of who they are; empty for none."""
    default_permissions: SubjectPermissions | None = None
    """Of users that have none of their own."""
    shared_users: Users | None = None
    """Users of all doors; None for none."""
    shared_permissions: Mapping[str, SubjectPermissions] = field(default_factory=dict)
    """By name, what they may do with subjects that are bound to no class."""
    _known: dict[str, NatsUser] = field(init=False, repr=False, compare=False, default_factory=dict)
    """By name or nkey."""
    _known_shared: dict[str, NatsUser] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """By name."""

    def __post_init__(self) -> None:
        for user in self.users:
            key = user.name or user.nkey
            if key in self._known:
                raise ValueError(f"user {key} is there twice")
            self._known[key] = user
        if self.token and self.users:
            raise ValueError("there are a token and users, expected either")
        if self.token.startswith(_BCRYPT):
            raise ValueError("the token is a bcrypt hash, which is not supported")
        if self.no_auth_user and self.no_auth_user not in self._known:
            raise ValueError(f"no_auth_user {self.no_auth_user} is none of the users")
        for other in self.shared_users.users if self.shared_users is not None else ():
            for key in {other.name, other.nkey} & self._known.keys():
                # The bus would take them for one.
                raise ValueError(f"{key} is a user of [[nats.users]] and of [[users]]")

    def check_credentials(self) -> None:
        """Raise ValueError where a user can show by nothing who it is, if no certificate does."""
        for user in self.users:
            if not (user.nkey or user.password or user.name == self.no_auth_user):
                raise ValueError(
                    f"user {user.name} of [[nats.users]] cannot come in: expected a password, or "
                    "--nats-tls-verify-and-map for its certificate to say who it is"
                )

    @property
    def is_required(self) -> bool:
        """Whether one has to say who one is."""
        return bool(self.users or self.token or self.shared_users)

    @property
    def has_nkeys(self) -> bool:
        """Whether INFO has a nonce to be signed."""
        if self.shared_users is not None and any(user.nkey for user in self.shared_users.users):
            return True
        return any(user.nkey for user in self.users)

    def find_shared_user(
        self, auth: Auth | None, nkey: str, *, certified: Sequence[str], address: str
    ) -> NatsUser | None:
        """Who of the users of all doors says this, has signed with this key, shows a certificate
        with these names, or comes from this address; None for nobody."""
        shared = self.shared_users
        if shared is None:
            return None
        if nkey:
            found = shared.find_by_nkey(nkey)
        else:
            try:
                found = shared.authenticate(auth, certified=certified, address=address, version=1)
            except RemoteProtocolError:
                found = None
        return None if found is None else self._to_nats_user(found)

    def shared_user_named(self, name: str) -> NatsUser | None:
        """Who of the users of all doors has this name; None for nobody."""
        found = self.shared_users.find_by_name(name) if self.shared_users is not None else None
        return None if found is None else self._to_nats_user(found)

    def _to_nats_user(self, found: SharedUser) -> NatsUser:
        """A user of all doors at this one."""
        made = self._known_shared.get(found.name)
        if made is None:
            permissions = self.shared_permissions.get(found.name)
            made = NatsUser(found.name, permissions=permissions, shared_user=found)
            self._known_shared[found.name] = made
        return made

    def permissions_of(self, user: NatsUser) -> SubjectPermissions | None:
        """What this user may do; None for everything."""
        if user.shared_user is not None:
            return user.permissions
        return user.permissions or self.default_permissions

    def verify_auth(self, auth: Auth) -> bool:
        """Whether this shows who one is, here or at all doors, as far as it can be told at once."""
        if self.shared_users is not None and self.shared_users.is_authentic(auth):
            return True
        if self.token:
            return self.verify_token(auth.token)
        return self.verify_password(auth.user, auth.password) is not None

    def verify_password(self, name: str, password: str) -> NatsUser | None:
        """Who has this name and password; None for nobody."""
        user = self._known.get(name, _UNKNOWN_USER)
        if not user.password:  # By words it is nobody: it has a key, or comes by a certificate.
            user = _UNKNOWN_USER
        is_right = _equal_constant_time(user.password, password)
        return user if is_right and user is not _UNKNOWN_USER else None

    def verify_token(self, token: str) -> bool:
        """Whether this is the token."""
        return bool(self.token) and _equal_constant_time(self.token, token)

    def verify_nkey(self, nkey: str, signature: str, nonce: bytes) -> NatsUser | None:
        """Whose key this is, if it signed the nonce; None for nobody.

        The signature is in base 64: for URLs without `=`, or plain with it.
        """
        user = self._known.get(nkey)
        if user is None or not user.nkey or not verify_signature(nkey, signature, nonce):
            return None
        return user

    def anonymous_user(self) -> NatsUser | None:
        """Who those are who say nothing of who they are; None if they have to."""
        return self._known[self.no_auth_user] if self.no_auth_user else None

    def user_named(self, name: str) -> NatsUser | None:
        """Who has this name, whatever proves it; None for nobody."""
        user = self._known.get(name)
        return user if user is not None and user.name else None


def decode_user_key(nkey: str) -> bytes:
    """The 32 bytes of a user's public key: base 32 of its kind, the key and a checksum.

    Raises ValueError when it is none (nkeys of NATS).
    """
    if nkey.startswith("S"):
        raise ValueError(
            "nkey: a seed begins with S, and is its user's secret; expected the public key, U and "
            "55 more characters"
        )
    try:
        raw = base64.b32decode(nkey + "=" * (-len(nkey) % 8))
    except (binascii.Error, ValueError):
        raise ValueError(f"nkey {nkey!r}: expected base 32") from None
    if len(raw) != 1 + _KEY_BYTES + 2 or raw[0] != _USER_KEY_PREFIX:
        raise ValueError(f"nkey {nkey!r}: expected a user's public key, U and 55 more characters")
    # The checksum that modems knew as XMODEM's, which binascii has; the lower byte first.
    if binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise ValueError(f"nkey {nkey!r}: its checksum is wrong, was it cut or mistyped?")
    return raw[1:-2]


def verify_signature(nkey: str, signature: str, nonce: bytes) -> bool:
    """Whether the holder of a user's key signed the nonce (Ed25519)."""
    # Loaded when the first one comes: few servers know users by keys.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        signed = _decode_signature(signature.encode())
        Ed25519PublicKey.from_public_bytes(decode_user_key(nkey)).verify(signed, nonce)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decode_signature(text: bytes) -> bytes:
    """From base 64: of the alphabet for URLs without padding, or of the plain one with it."""
    if len(text) % 4:
        text = text.translate(_PLAIN_ALPHABET) + b"=" * (-len(text) % 4)
    return base64.b64decode(text, validate=True)


def _equal_constant_time(ours: str, theirs: str) -> bool:
    return hmac.compare_digest(
        ours.encode("utf-8", "surrogatepass"), theirs.encode("utf-8", "surrogatepass")
    )
