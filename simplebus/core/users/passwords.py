"""Secrets of users, and their verification.

Secrets are compared in constant time. Slow hashes are not computed here, because they would block
the event loop: the server computes them in a worker and calls `remember_correct`. Remembered
passwords are keyed digests, which are useless outside this process.

    plain text          compared directly
    sha256:<64 digits>  for tokens, which are long and random
    $argon2…            for passwords
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Container

_SLOW_PREFIXES = ("$argon2",)
_BCRYPT_PREFIXES = ("$2a$", "$2b$", "$2x$", "$2y$")
_SHA256_PREFIX = "sha256:"
_SHA256_FORM = re.compile(r"sha256:[0-9a-f]{64}")


def check_stored_secret(stored: str) -> str:
    """Return a stored secret if its form is supported. Raises ValueError if not."""
    if stored.startswith(_BCRYPT_PREFIXES):
        raise ValueError("bcrypt hashes are not supported, expected $argon2id$…")
    if stored.startswith(_SHA256_PREFIX) and not _SHA256_FORM.fullmatch(stored):
        raise ValueError("expected 64 hexadecimal digits after sha256:")
    return stored


def is_slow_hash(stored: str) -> bool:
    """Return True if verifying the stored secret takes long."""
    return stored.startswith(_SLOW_PREFIXES)


def hash_token(secret: str) -> str:
    """Return the stored form of a token."""
    return _SHA256_PREFIX + hashlib.sha256(_bytes(secret)).hexdigest()


class PasswordVerifier:
    """Verifies passwords and caches the passwords that passed a slow check."""

    def __init__(self, key: bytes = b"") -> None:
        """Create a verifier. `key` is random and private to this process."""
        self._key = key[:64]
        self._correct_digests: dict[str, bytes] = {}
        """Digest of the correct password by stored secret."""

    def is_correct(self, stored: str, password: str) -> bool:
        """Return True if the password is correct. For slow hashes it must have been remembered."""
        if is_slow_hash(stored):
            digest = self._correct_digests.get(stored, b"")
            return hmac.compare_digest(digest, self._digest(password)) and bool(digest)
        if stored.startswith(_SHA256_PREFIX):
            return hmac.compare_digest(stored, hash_token(password))
        return hmac.compare_digest(_bytes(stored), _bytes(password))

    def remember_correct(self, stored: str, password: str) -> None:
        """Remember a password that passed the slow check."""
        self._correct_digests[stored] = self._digest(password)

    def copy_remembered(self, other: PasswordVerifier, stored: Container[str]) -> None:
        """Copy key and remembered passwords of another verifier, for these stored secrets only."""
        self._key = other._key
        self._correct_digests = {
            each: digest for each, digest in other._correct_digests.items() if each in stored
        }

    def _digest(self, password: str) -> bytes:
        return hashlib.blake2b(_bytes(password), key=self._key, digest_size=32).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
