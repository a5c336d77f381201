"""Which user a client's certificate says it is.

Rule 1: the order is the reference server's: email addresses, DNS names, URIs, then the subject.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

_ALTERNATIVES = ("email", "DNS", "URI")
_SHORT = {
    "commonName": "CN",
    "serialNumber": "SERIALNUMBER",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "postalCode": "POSTALCODE",
    "domainComponent": "DC",
}
_ESCAPED = ',+"\\<>;='


def user_of(certificate: Mapping[str, Any], users: Container[str]) -> str:
    """Which of these users a certificate is of; what it calls its holder if it is none of them.

    `certificate` has the form of Python's `ssl.SSLSocket.getpeercert`.
    """
    found = [name for name in names(certificate) if name] or ["nobody"]
    return next((name for name in found if name in users), found[0])


def names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """What a certificate calls its holder, the likeliest name first."""
    alternatives = certificate.get("subjectAltName", ())
    found = [name for kind in _ALTERNATIVES for k, name in alternatives if k == kind]
    subject = subject_name(certificate.get("subject", ()))
    return (*found, subject) if subject else tuple(found)


def subject_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    """A subject as one text, its last part first (RFC 2253): `CN=ada,OU=billing`."""
    parts = []
    for relative in reversed(subject):
        parts.append(
            "+".join(f"{_SHORT.get(key, key)}={_escaped(value)}" for key, value in relative)
        )
    return ",".join(parts)


def _escaped(value: str) -> str:
    escaped = "".join("\\" + c if c in _ESCAPED else c for c in value)
    if escaped[:1] in ("#", " "):
        escaped = "\\" + escaped
    return escaped[:-1] + "\\ " if value.endswith(" ") and len(value) > 1 else escaped
