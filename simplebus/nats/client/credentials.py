"""Credentials of a client at a NATS server. Secrets are never shown in messages."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

_SEED_BYTES = 32
_USER_SEED = (18 << 3) | ((20 << 3) >> 5), ((20 << 3) & 31) << 3
"""First two bytes of a user's seed: the types of the text and of the key."""
_USER_KEY = 20 << 3


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password, token, or seed of a user's nkey; empty for no credentials.

    Raises:
        ValueError: Several are given, or the seed is invalid.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    seed: str = field(default="", repr=False)
    """Seed as printed by `nk`: `SU` and 56 characters of base 32."""

    def __post_init__(self) -> None:
        kinds = [bool(self.user), bool(self.token), bool(self.seed)]
        if sum(kinds) > 1 or (self.password and not self.user):
            raise ValueError("expected a user with a password, or a token, or a seed")
        if self.seed:
            _decode_seed(self.seed)

    def connect_fields(self, nonce: str) -> dict[str, str]:
        """Return the fields of CONNECT for a server with this nonce."""
        if self.user:
            return {"user": self.user, "pass": self.password}
        if self.token:
            return {"auth_token": self.token}
        if self.seed:
            return _sign_nonce(self.seed, nonce.encode())
        return {}


def _decode_seed(seed: str) -> bytes:
    """Return the private key in a seed (NATS nkeys), 32 bytes. Raises ValueError if invalid."""
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        raise ValueError("the seed is not base 32") from None
    if len(raw) != 2 + _SEED_BYTES + 2 or tuple(raw[:2]) != _USER_SEED:
        raise ValueError("expected the seed of a user: SU and 56 more characters")
    if binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise ValueError("the checksum of the seed is wrong; check that the seed is complete")
    return raw[2:-2]


def _sign_nonce(seed: str, nonce: bytes) -> dict[str, str]:
    # Imported late: few clients use nkeys.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = Ed25519PrivateKey.from_private_bytes(_decode_seed(seed))
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    checked = bytes([_USER_KEY]) + public
    checked += binascii.crc_hqx(checked, 0).to_bytes(2, "little")
    signature = base64.urlsafe_b64encode(key.sign(nonce)).rstrip(b"=")
    return {"nkey": base64.b32encode(checked).decode().rstrip("="), "sig": signature.decode()}
