"""Public keys of NATS users (nkeys), and the signatures made with them."""

from __future__ import annotations

import base64
import binascii

_KEY_BYTES = 32
_USER_KEY_PREFIX = 20 << 3
_PLAIN_ALPHABET = bytes.maketrans(b"-_", b"+/")


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
        raise ValueError(f"nkey {nkey!r}: the checksum is wrong; check that the key is complete")
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
