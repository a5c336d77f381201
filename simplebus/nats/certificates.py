"""Which user a client's certificate says it is.

Rule 1: the order is the reference server's: email addresses, DNS names, URIs, then the subject.
Rule 2: what is signed as one kind of name and looks like another is no name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from simplebus.core.certificate_names import Kind, kind_of, spelled, subject

_KINDS = {"email": Kind.EMAIL, "DNS": Kind.DNS, "URI": Kind.URI}


def by_spelling(users: Collection[str]) -> dict[str, str]:
    """Names of users, by themselves and by how they are spelled in certificates."""
    found = {user: user for user in users}
    for user in users:
        found.setdefault(_spelled(user) or user, user)
    return found


def user_of(certificate: Mapping[str, Any], users: Mapping[str, str]) -> str:
    """Which of these users, see `by_spelling`, a certificate is of; what it calls its holder if it
    is none of them.

    `certificate` has the form of Python's `ssl.SSLSocket.getpeercert`.
    """
    found = names(certificate) or ("nobody",)
    return next((users[name] for name in found if name in users), found[0])


def names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """What a certificate calls its holder, the likeliest name first."""
    alternatives = certificate.get("subjectAltName", ())
    found = [
        name
        for key, kind in _KINDS.items()
        for k, written in alternatives
        if k == key and kind_of(written) is kind and (name := _spelled(written))
    ]
    own = subject(reversed(certificate.get("subject", ())))
    return (*found, own) if own else tuple(found)


def _spelled(name: str) -> str:
    """In the one spelling; empty for what is no name."""
    try:
        return spelled(name)
    except ValueError:
        return ""
