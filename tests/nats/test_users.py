"""NATS users, tokens, nkeys and certificates."""

from __future__ import annotations

import base64
import re

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from simplebus.core.users.users import User as SharedUser
from simplebus.core.users.users import Users
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol.handshake import ConnectOptions
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.authenticate import Authenticator
from simplebus.nats.subject_permissions import SubjectPermissions
from simplebus.nats.users import (
    NatsAuth,
    NatsUser,
    certificate_names,
    decode_user_key,
    verify_signature,
)
from tests.nats.differential.dialogues_auth import nkey

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = nkey(KEY)


def gate(auth: NatsAuth) -> Authenticator:
    return Authenticator(auth, SubjectTable(), b"secret")


def test_decodes_a_public_key() -> None:
    assert len(PUBLIC) == 56
    assert decode_user_key(PUBLIC) == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a user's public key"),
        ("U", "expected base 32"),
        (PUBLIC[:-1], "expected"),
        ("A" + PUBLIC[1:], "expected a user's public key"),
        (PUBLIC[:-2] + ("AA" if PUBLIC[-2:] != "AA" else "BB"), "its checksum is wrong"),
        (PUBLIC.lower(), "expected base 32"),
        (PUBLIC + "!", "expected base 32"),
        ("ä" * 56, "expected base 32"),
    ],
)
def test_invalid_public_key_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode_user_key(text)


def test_signature_is_bound_to_key_and_nonce() -> None:
    signature = base64.b64encode(KEY.sign(b"nonce")).decode()
    assert verify_signature(PUBLIC, signature, b"nonce")
    assert verify_signature(
        PUBLIC, signature.replace("+", "-").replace("/", "_").rstrip("="), b"nonce"
    )
    assert not verify_signature(PUBLIC, signature, b"other")
    assert not verify_signature(PUBLIC, "", b"nonce")
    assert not verify_signature(PUBLIC, "ä", b"nonce")
    assert not verify_signature(PUBLIC, signature[:-8], b"nonce")
    other = Ed25519PrivateKey.from_private_bytes(bytes(31) + b"\1")
    assert not verify_signature(nkey(other), signature, b"nonce")


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({}, "expected a name or an nkey"),
        ({"name": "x", "nkey": PUBLIC}, "expected a name or an nkey"),
        ({"nkey": PUBLIC, "password": "p"}, "expected no password beside it"),
        ({"nkey": "UABC"}, "nkey 'UABC'"),
        ({"name": "x", "password": "$2a$11$abc"}, "user x: the password is a bcrypt hash"),
    ],
)
def test_invalid_user_is_named_in_the_error(user: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("$", r"\$")):
        NatsUser(**user)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ({"users": (NatsUser("a"), NatsUser("a", "p"))}, "duplicate user a"),
        ({"users": (NatsUser("a"),), "token": "t"}, "a token and users are set"),
        (
            {"users": (NatsUser("a"),), "no_auth_user": "b"},
            "no_auth_user b: expected the name of a user",
        ),
        ({"token": "$2b$x"}, "the token is a bcrypt hash"),
        (
            {
                "users": (NatsUser("a", "p"),),
                "shared_users": Users([SharedUser("a", password="p")]),
            },
            r"duplicate user a: in [[nats.users]] and in [[users]]",
        ),
        (
            {
                "users": (NatsUser(nkey=PUBLIC),),
                "shared_users": Users([SharedUser("a", nkey=PUBLIC)]),
            },
            f"duplicate user {PUBLIC}: in [[nats.users]] and in [[users]]",
        ),
    ],
)
def test_contradicting_settings_are_named_in_the_error(auth: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        NatsAuth(**auth)  # type: ignore[arg-type]


def test_user_authenticates_with_name_and_password() -> None:
    auth = NatsAuth(users=(NatsUser("a", "p"), NatsUser("b", "é"), NatsUser(nkey=PUBLIC)))
    assert auth.verify_password("a", "p") == auth.users[0]
    assert auth.verify_password("b", "é") == auth.users[1]
    assert auth.verify_password("a", "q") is None
    assert auth.verify_password("", "") is None
    assert auth.verify_password(PUBLIC, "") is None
    assert auth.verify_password("\ud800", "p") is None


def test_user_without_password_cannot_authenticate_by_name() -> None:
    auth = NatsAuth(users=(NatsUser("a"), NatsUser("b", "p")), no_auth_user="a")
    assert auth.verify_password("a", "") is None
    for said in (ConnectOptions(user="a"), ConnectOptions(user="c")):
        with pytest.raises(NatsError, match="wrong or missing credentials"):
            gate(auth).authenticate(said, "")
    assert gate(auth).authenticate(ConnectOptions(), "") == auth.users[0]
    assert gate(auth).authenticate(ConnectOptions(), "", certificate_user="a") == auth.users[0]
    auth.check_credentials()
    with pytest.raises(
        ValueError, match=r"user a of \[\[nats.users\]\] cannot authenticate: expected"
    ):
        NatsAuth(users=auth.users).check_credentials()


def test_seed_is_not_shown_in_errors() -> None:
    auth = NatsAuth(users=(NatsUser(nkey=PUBLIC),))
    with pytest.raises(NatsError, match=f"wrong or missing credentials of user '{PUBLIC}'"):
        gate(auth).authenticate(ConnectOptions(nkey=PUBLIC), "")
    with pytest.raises(NatsError, match="wrong or missing credentials of user 'an nkey'"):
        gate(auth).authenticate(ConnectOptions(nkey="SUACSSL3UAHUDXKFSNVUZRF5"), "")


def test_authentication_is_not_required_without_users() -> None:
    assert gate(NatsAuth()).authenticate(ConnectOptions(user="x", password="y"), "") is None
    assert not NatsAuth().is_required
    assert NatsAuth(token="t").is_required


def test_nonces_are_unique_and_only_for_nkeys() -> None:
    assert gate(NatsAuth(users=(NatsUser("a"),))).make_nonce(1) == ""
    keyed = NatsAuth(users=(NatsUser(nkey=PUBLIC),))
    nonces = {gate(keyed).make_nonce(client) for client in range(100)}
    assert len(nonces) == 100
    assert Authenticator(keyed, SubjectTable(), b"other").make_nonce(1) not in nonces


def test_mapped_certificate_overrides_credentials() -> None:
    auth = NatsAuth(users=(NatsUser("a", "p"), NatsUser("b", "p")))
    admitted = gate(auth).authenticate(
        ConnectOptions(user="b", password="p"), "", certificate_user="a"
    )
    assert admitted == auth.users[0]
    with pytest.raises(NatsError, match="wrong or missing credentials") as raised:
        gate(auth).authenticate(ConnectOptions(user="b"), "", certificate_user="c")
    assert raised.value.line == b"-ERR 'Authorization Violation'\r\n"
    with pytest.raises(NatsError, match=r"no user matches the certificate names 'c', 'CN=c'"):
        gate(auth).authenticate(ConnectOptions(), "", certificate_names=("c", "CN=c"))


def test_users_without_permissions_get_the_defaults() -> None:
    mine, all_ = SubjectPermissions(publish_deny=("a",)), SubjectPermissions(publish_deny=("b",))
    auth = NatsAuth(
        users=(NatsUser("a", permissions=mine), NatsUser("b")), default_permissions=all_
    )
    a, b = (gate(auth).subject_grants(user) for user in auth.users)
    assert a is not None
    assert b is not None
    assert not a.publish_cache.get(b"a")
    assert not b.publish_cache.get(b"b")
    assert gate(auth).subject_grants(None) is None
    assert gate(NatsAuth(users=(NatsUser("a"),))).subject_grants(NatsUser("a")) is None


def test_grants_are_shared_by_clients_of_a_user() -> None:
    auth = NatsAuth(users=(NatsUser("a", permissions=SubjectPermissions(publish_deny=("a",))),))
    it = gate(auth)
    assert it.subject_grants(auth.users[0]) is it.subject_grants(auth.users[0])


def test_certificate_names_are_alternatives_then_the_subject() -> None:
    certificate = {
        "subject": ((("countryName", "DE"),), (("commonName", "c"),)),
        "subjectAltName": (("DNS", "a.example"), ("email", "b@example.org")),
    }
    assert certificate_names(certificate) == ("b@example.org", "a.example", "CN=c,C=DE")
