"""Normal form of names in certificates."""

from __future__ import annotations

import contextlib

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.users.certificate_names import (
    CertificateNameKind,
    classify_name,
    format_subject,
    normalize_name,
)

# Longer ones, in bytes, are warned of.
VALUES = st.text(
    st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=12
)
TYPES = {
    "commonName": NameOID.COMMON_NAME,
    "organizationalUnitName": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "organizationName": NameOID.ORGANIZATION_NAME,
    "userId": NameOID.USER_ID,
    "emailAddress": NameOID.EMAIL_ADDRESS,
    "1.2.3.4": x509.ObjectIdentifier("1.2.3.4"),
}
LEVELS = st.lists(
    st.dictionaries(st.sampled_from(sorted(TYPES)), VALUES, min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


@given(LEVELS)
def test_subject_from_tools_equals_subject_from_socket(
    levels: list[dict[str, str]],
) -> None:
    printed = x509.Name(
        x509.RelativeDistinguishedName(
            [x509.NameAttribute(TYPES[key], value, _validate=False) for key, value in level.items()]
        )
        for level in levels
    ).rfc4514_string()
    expected = format_subject(tuple(level.items()) for level in reversed(levels))
    assert normalize_name(printed) == expected
    assert normalize_name(expected) == expected


@pytest.mark.parametrize(
    ("written", "normalized"),
    [
        ("CN=ada,OU=shops", "CN=ada,OU=shops"),
        ("cn = ada , ou = shops ; O=x", "CN=ada,OU=shops,O=x"),
        (r"CN=ada\,OU=shops", r"CN=ada\,OU=shops"),
        (r"CN=ada\2COU\=shops", r"CN=ada\,OU=shops"),
        (r"CN=z\C3\A9", "CN=zé"),
        ("OU=x+CN=m", "CN=m+OU=x"),
        ("CN=m+OU=x", "CN=m+OU=x"),
        ("UID=77,CN=u", "UID=77,CN=u"),
        ("0.9.2342.19200300.100.1.1=77,2.5.4.3=u", "UID=77,CN=u"),
        ("emailAddress=e@X.y,CN=e", "EMAILADDRESS=e@X.y,CN=e"),
        (r"CN=a\;b\"c\\d\<e\>\+f=g", r"CN=a\;b\"c\\d\<e\>\+f=g"),
        (r"CN=\#lead\ ", r"CN=\#lead\ "),
        (r"CN=\ sp \ ", r"CN=\ sp \ "),
        ("1.2.3.4=#0C0376616C,CN=o", "1.2.3.4=val,CN=o"),
        ("1.2.3.4=#0203010203", r"1.2.3.4=\#0203010203"),
        ("CN=", "CN="),
        ("Till.EXAMPLE", "till.example"),
        ("Ada@Shops.EXAMPLE", "Ada@shops.example"),
        ("spiffe://Shops/ada?a=b", "spiffe://Shops/ada?a=b"),
    ],
)
def test_names_are_normalized(written: str, normalized: str) -> None:
    assert normalize_name(written) == normalize_name(normalized) == normalized


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "'' is not a name of a certificate"),
        ("ada\n", r"'ada\\n' is not a name of a certificate"),
        ("CN=x,,OU=y", "'CN=x,,OU=y' is not a subject: expected type=value, got ''"),
        ("CN=x,OU", "expected type=value, got 'OU'"),
        ("CN=x,", "expected type=value, got ''"),
        (r"CN=\FF", "is not UTF-8"),
    ],
)
def test_malformed_names_are_refused(written: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalize_name(written)


@given(st.text(max_size=20))
def test_any_text_is_a_name_or_refused(written: str) -> None:
    with contextlib.suppress(ValueError):
        name = normalize_name(written)
        assert normalize_name(name) == name
        assert classify_name(name) is classify_name(written)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CN=ada", CertificateNameKind.SUBJECT),
        ("2.5.4.3 = ada", CertificateNameKind.SUBJECT),
        ("ada@x", CertificateNameKind.EMAIL),
        ("urn:ada=b", CertificateNameKind.URI),
        ("ada.example", CertificateNameKind.DNS),
    ],
)
def test_names_are_classified(name: str, kind: CertificateNameKind) -> None:
    assert classify_name(name) is kind
