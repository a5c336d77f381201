"""Users of the NATS listener and the check of their credentials.

Secrets are compared in constant time, also for unknown users. Passwords of NATS users are stored in
plain text: bcrypt hashes are rejected because checking one would block the whole bus. Passwords of
users of the whole server are verified before; see `core.users.passwords`.
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
from simplebus.nats.subject_permissions import SubjectPermissions

_KINDS = {
    "email": CertificateNameKind.EMAIL,
    "DNS": CertificateNameKind.DNS,
    "URI": CertificateNameKind.URI,
}


def certificate_name_index(users: Collection[str]) -> dict[str, str]:
    """Return user names by themselves and by their normalized spelling in certificates."""
    index = {user: user for user in users}
    for user in users:
        index.setdefault(_normalize_name(user) or user, user)
    return index


def find_certificate_user(certificate: Mapping[str, Any], users: Mapping[str, str]) -> str:
    """Return the user of a certificate, or the first name in it if no user matches.

    Args:
        certificate: As returned by `ssl.SSLSocket.getpeercert`.
        users: As returned by `certificate_name_index`.
    """
    names = certificate_names(certificate) or ("nobody",)
    return next((users[name] for name in names if name in users), names[0])


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in a certificate, the most specific first."""
    alternatives = certificate.get("subjectAltName", ())
    names = [
        name
        for key, kind in _KINDS.items()
        for name_kind, value in alternatives
        if name_kind == key and classify_name(value) is kind and (name := _normalize_name(value))
    ]
    subject = format_subject(reversed(certificate.get("subject", ())))
    return (*names, subject) if subject else tuple(names)


def _normalize_name(name: str) -> str:
    """Return the normalized spelling; empty if the text is not a certificate name."""
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
    """User with a name and password, or with the public key of an nkey.

    Raises:
        ValueError: Neither or both are given, or the key is not a user key.
    """

    name: str = ""
    """Empty for a user with an nkey."""
    password: str = field(default="", repr=False)
    """Empty for a user that is identified by a certificate or as `no_auth_user`."""
    nkey: str = ""
    """Public key as printed by `nk`: `U` and 55 characters of base 32."""
    permissions: SubjectPermissions | None = None
    """Subject permissions; None for all."""
    shared_user: SharedUser | None = None
    """The user of the whole server; None for a user of the NATS listener only."""

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
    """Users of a NATS listener. Without a token and users, every client may do everything.

    Raises:
        ValueError: The settings contradict each other.
    """

    users: tuple[NatsUser, ...] = ()
    token: str = field(default="", repr=False)
    """Token accepted instead of a user; empty for none."""
    no_auth_user: str = ""
    """Name of the user of clients without credentials; empty for none."""
    default_permissions: SubjectPermissions | None = None
    """Permissions of users without their own."""
    shared_users: Users | None = None
    """Users of the whole server; None for none."""
    shared_permissions: Mapping[str, SubjectPermissions] = field(default_factory=dict)
    """Permissions of shared users for subjects without a class, by name."""
    _known: dict[str, NatsUser] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Users by name or nkey."""
    _known_shared: dict[str, NatsUser] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Shared users by name."""

    def __post_init__(self) -> None:
        for user in self.users:
            key = user.name or user.nkey
            if key in self._known:
                raise ValueError(f"duplicate user {key}")
            self._known[key] = user
        if self.token and self.users:
            raise ValueError("a token and users are set, expected only one of them")
        if self.token.startswith(_BCRYPT):
            raise ValueError("the token is a bcrypt hash, which is not supported")
        if self.no_auth_user and self.no_auth_user not in self._known:
            raise ValueError(f"no_auth_user {self.no_auth_user}: expected the name of a user")
        for other in self.shared_users.users if self.shared_users is not None else ():
            for key in {other.name, other.nkey} & self._known.keys():
                # The bus identifies users by name.
                raise ValueError(f"duplicate user {key}: in [[nats.users]] and in [[users]]")

    def check_credentials(self) -> None:
        """Raise ValueError if a user could only be identified by a certificate."""
        for user in self.users:
            if not (user.nkey or user.password or user.name == self.no_auth_user):
                raise ValueError(
                    f"user {user.name} of [[nats.users]] cannot authenticate: expected a password "
                    "or --nats-tls-verify-and-map to identify the user by a certificate"
                )

    @property
    def is_required(self) -> bool:
        """True if clients must authenticate."""
        return bool(self.users or self.token or self.shared_users)

    @property
    def has_nkeys(self) -> bool:
        """True if INFO must contain a nonce."""
        if self.shared_users is not None and any(user.nkey for user in self.shared_users.users):
            return True
        return any(user.nkey for user in self.users)

    def find_shared_user(
        self, auth: Auth | None, nkey: str, *, certified: Sequence[str], address: str
    ) -> NatsUser | None:
        """Return the shared user with these credentials, verified nkey, certificate names or
        address; None if there is none.
        """
        shared = self.shared_users
        if shared is None:
            return None
        if nkey:
            user = shared.find_by_nkey(nkey)
        else:
            try:
                user = shared.authenticate(auth, certified=certified, address=address, version=1)
            except RemoteProtocolError:
                user = None
        return None if user is None else self._to_nats_user(user)

    def shared_user_named(self, name: str) -> NatsUser | None:
        """Return the shared user with this name; None if there is none."""
        user = self.shared_users.find_by_name(name) if self.shared_users is not None else None
        return None if user is None else self._to_nats_user(user)

    def _to_nats_user(self, user: SharedUser) -> NatsUser:
        """Return the NATS user of a shared user."""
        nats_user = self._known_shared.get(user.name)
        if nats_user is None:
            permissions = self.shared_permissions.get(user.name)
            nats_user = NatsUser(user.name, permissions=permissions, shared_user=user)
            self._known_shared[user.name] = nats_user
        return nats_user

    def permissions_of(self, user: NatsUser) -> SubjectPermissions | None:
        """Return the subject permissions of a user; None for all."""
        if user.shared_user is not None:
            return user.permissions
        return user.permissions or self.default_permissions

    def verify_auth(self, auth: Auth) -> bool:
        """Return True if the credentials belong to a user, as far as can be checked without
        blocking.
        """
        if self.shared_users is not None and self.shared_users.is_authentic(auth):
            return True
        if self.token:
            return self.verify_token(auth.token)
        return self.verify_password(auth.user, auth.password) is not None

    def verify_password(self, name: str, password: str) -> NatsUser | None:
        """Return the user with this name and password; None if there is none."""
        user = self._known.get(name, _UNKNOWN_USER)
        if not user.password:  # Identified by nkey or certificate only.
            user = _UNKNOWN_USER
        is_right = _equal_constant_time(user.password, password)
        return user if is_right and user is not _UNKNOWN_USER else None

    def verify_token(self, token: str) -> bool:
        """Return True if the token is correct."""
        return bool(self.token) and _equal_constant_time(self.token, token)

    def verify_nkey(self, nkey: str, signature: str, nonce: bytes) -> NatsUser | None:
        """Return the user of an nkey if the signature of the nonce is valid; None otherwise.

        The signature is base 64: URL-safe without padding, or standard with padding.
        """
        user = self._known.get(nkey)
        if user is None or not user.nkey or not verify_signature(nkey, signature, nonce):
            return None
        return user

    def anonymous_user(self) -> NatsUser | None:
        """Return the user of clients without credentials; None if credentials are required."""
        return self._known[self.no_auth_user] if self.no_auth_user else None

    def user_named(self, name: str) -> NatsUser | None:
        """Return the user with this name without checking credentials; None if there is none."""
        user = self._known.get(name)
        return user if user is not None and user.name else None


def decode_user_key(nkey: str) -> bytes:
    """Return the 32 bytes of a public user key.

    The text is base 32 of a type byte, the key and a CRC-16 (NATS nkeys). Raises ValueError if
    invalid.
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
    # CRC-16/XMODEM, little-endian.
    if binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise ValueError(f"nkey {nkey!r}: its checksum is wrong, was it cut or mistyped?")
    return raw[1:-2]


def verify_signature(nkey: str, signature: str, nonce: bytes) -> bool:
    """Return True if the signature of the nonce is valid for the public key (Ed25519)."""
    # Imported late: few servers have users with nkeys.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        signed = _decode_signature(signature.encode())
        Ed25519PublicKey.from_public_bytes(decode_user_key(nkey)).verify(signed, nonce)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decode_signature(text: bytes) -> bytes:
    """Decode URL-safe base 64 without padding, or standard base 64 with padding."""
    if len(text) % 4:
        text = text.translate(_PLAIN_ALPHABET) + b"=" * (-len(text) % 4)
    return base64.b64decode(text, validate=True)


def _equal_constant_time(expected: str, received: str) -> bool:
    return hmac.compare_digest(
        expected.encode("utf-8", "surrogatepass"), received.encode("utf-8", "surrogatepass")
    )
