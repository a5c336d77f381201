"""Secrets, and whether somebody knows them.

Rule 1: a secret is compared in constant time. A hash that is made to be slow is not worked out
here: it would hold up everybody. Who drives the bus has that done elsewhere, before it says what
the peer has said, and tells `learn`.
Rule 2: what was learned is kept as a digest that is worth nothing outside this process.

    plain text          compared as it is
    sha256:<64 digits>  for tokens, which are long and by chance
    $argon2…            for passwords
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Container

_SLOW = ("$argon2",)
_REFUSED = ("$2a$", "$2b$", "$2x$", "$2y$")
_QUICK = "sha256:"
_QUICK_FORM = re.compile(r"sha256:[0-9a-f]{64}")


def check_secret(kept: str) -> str:
    """What a secret is kept as, as it is. Raises ValueError for a form that is not known."""
    if kept.startswith(_REFUSED):
        raise ValueError("it is a bcrypt hash, which is not supported: expected $argon2id$…")
    if kept.startswith(_QUICK) and not _QUICK_FORM.fullmatch(kept):
        raise ValueError("it begins with sha256:, and 64 hexadecimal digits are expected behind it")
    return kept


def is_slow(kept: str) -> bool:
    """Whether it takes long to check."""
    return kept.startswith(_SLOW)


def quick_hash(secret: str) -> str:
    """What a token is kept as."""
    return _QUICK + hashlib.sha256(_bytes(secret)).hexdigest()


class Passwords:
    """What is known of them in this process."""

    def __init__(self, key: bytes = b"") -> None:
        """`key` is by chance, and nobody else's."""
        self._key = key[:64]
        self._known: dict[str, bytes] = {}
        """By what a password is kept as, a digest of it. Right ones only: one each."""

    def is_right(self, kept: str, said: str) -> bool:
        """Whether this is the secret. A slow one is right when it was learned to be."""
        if is_slow(kept):
            known = self._known.get(kept, b"")
            return hmac.compare_digest(known, self._digest(said)) and bool(known)
        if kept.startswith(_QUICK):
            return hmac.compare_digest(kept, quick_hash(said))
        return hmac.compare_digest(_bytes(kept), _bytes(said))

    def learn(self, kept: str, said: str) -> None:
        """A slow check has shown that this is the secret."""
        self._known[kept] = self._digest(said)

    def adopt(self, other: Passwords, kept: Container[str]) -> None:
        """Know what another one has learned of what is kept as these."""
        self._key = other._key
        self._known = {each: digest for each, digest in other._known.items() if each in kept}

    def _digest(self, said: str) -> bytes:
        return hashlib.blake2b(_bytes(said), key=self._key, digest_size=32).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
