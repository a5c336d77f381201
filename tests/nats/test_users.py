"""NATS users, tokens, nkeys and certificates."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from simplebus.core.users.certificate_names import certificate_names
from simplebus.core.users.nkeys import decode_user_key, verify_signature
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol.handshake import ConnectOptions
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.authenticate import Authenticator
from tests.nats.differential.dialogues_auth import nkey

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = nkey(KEY)


def create_authenticator(*users: User, anonymous: str = "") -> Authenticator:
    table = Users(users, anonymous=anonymous) if users else None
    return Authenticator(table, SubjectTable(), b"secret")


def connect_with_nkey(authenticator: Authenticator, key: Ed25519PrivateKey) -> ConnectOptions:
    nonce = authenticator.make_nonce(1)
    signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).decode().rstrip("=")
    return ConnectOptions(nkey=nkey(key), sig=signature)


def test_decodes_a_public_key() -> None:
    assert len(PUBLIC) == 56
    assert decode_user_key(PUBLIC) == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("", "expected a user's public key"),
        ("U", "expected base 32"),
        (PUBLIC[:-1], "expected"),
        ("A" + PUBLIC[1:], "expected a user's public key"),
        (PUBLIC[:-2] + ("AA" if PUBLIC[-2:] != "AA" else "BB"), "the checksum is wrong"),
        (PUBLIC.lower(), "expected base 32"),
        (PUBLIC + "!", "expected base 32"),
        ("ä" * 56, "expected base 32"),
    ],
)
def test_invalid_public_key_is_refused(text: str, expected_error: str) -> None:
    with pytest.raises(ValueError, match=expected_error):
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
    other_key = Ed25519PrivateKey.from_private_bytes(bytes(31) + b"\1")
    assert not verify_signature(nkey(other_key), signature, b"nonce")


@pytest.mark.parametrize(
    ("user", "expected_error"),
    [
        ({"name": "x", "nkey": "UABC"}, "user 'x': nkey 'UABC'"),
        ({"name": "x", "password": "$2a$11$abc"}, "bcrypt hashes are not supported"),
        ({"name": "x", "token": "$2b$x"}, "bcrypt hashes are not supported"),
    ],
)
def test_invalid_user_is_named_in_the_error(user: dict[str, str], expected_error: str) -> None:
    with pytest.raises(ValueError, match=expected_error):
        User(**user)  # type: ignore[arg-type]


def test_anonymous_user_must_exist() -> None:
    with pytest.raises(ValueError, match="no_auth_user b: expected the name of a user"):
        Users([User("a", "p")], anonymous="b")


def test_user_authenticates_with_name_and_password() -> None:
    users = User("a", "p"), User("b", "é"), User("c", nkey=PUBLIC)
    authenticator = create_authenticator(*users)
    for user in users[:2]:
        connect_options = ConnectOptions(user=user.name, password=user.password)
        assert authenticator.authenticate(connect_options, "") is user
    for name, password in ("a", "q"), ("", ""), ("c", ""), ("c", PUBLIC), ("\ud800", "p"):
        with pytest.raises(NatsError, match="wrong or missing credentials"):
            authenticator.authenticate(ConnectOptions(user=name, password=password), "")


def test_user_authenticates_with_token() -> None:
    user = User("a", token="t")
    authenticator = create_authenticator(user)
    assert authenticator.authenticate(ConnectOptions(auth_token="t"), "") is user
    with pytest.raises(NatsError, match="wrong or missing credentials of user 'a token'"):
        authenticator.authenticate(ConnectOptions(auth_token="T"), "")


def test_user_authenticates_with_nkey() -> None:
    user = User("a", nkey=PUBLIC)
    authenticator = create_authenticator(user)
    connect_options = connect_with_nkey(authenticator, KEY)
    assert authenticator.authenticate(connect_options, authenticator.make_nonce(1)) is user
    with pytest.raises(NatsError, match="wrong or missing credentials"):
        authenticator.authenticate(connect_options, authenticator.make_nonce(2))


def test_user_authenticates_with_certificate() -> None:
    user = User("a", certificates=("ada@example.org",))
    authenticator = create_authenticator(user, User("b", "p"))
    names = "ada@example.org", "CN=ada"
    assert authenticator.authenticate(ConnectOptions(), "", certificate_names=names) is user
    with pytest.raises(NatsError, match=r"no user matches the certificate names 'c', 'CN=c'"):
        authenticator.authenticate(ConnectOptions(), "", certificate_names=("c", "CN=c"))


def test_sent_credentials_count_more_than_a_certificate() -> None:
    certificate_user, password_user = User("a", certificates=("CN=a",)), User("b", "p")
    authenticator = create_authenticator(certificate_user, password_user)
    connect_options = ConnectOptions(user="b", password="p")
    assert (
        authenticator.authenticate(connect_options, "", certificate_names=("CN=a",))
        is password_user
    )
    with pytest.raises(NatsError, match="wrong or missing credentials") as raised:
        authenticator.authenticate(ConnectOptions(user="b"), "", certificate_names=("CN=a",))
    assert raised.value.line == b"-ERR 'Authorization Violation'\r\n"


def test_user_without_password_cannot_authenticate_by_name() -> None:
    anonymous = User("a")
    authenticator = create_authenticator(anonymous, User("b", "p"), anonymous="a")
    for connect_options in (ConnectOptions(user="a"), ConnectOptions(user="c")):
        with pytest.raises(NatsError, match="wrong or missing credentials"):
            authenticator.authenticate(connect_options, "")
    assert authenticator.authenticate(ConnectOptions(), "") is anonymous
    assert not authenticator.requires_connect


def test_seed_is_not_shown_in_errors() -> None:
    authenticator = create_authenticator(User("a", nkey=PUBLIC))
    with pytest.raises(NatsError, match=f"wrong or missing credentials of user '{PUBLIC}'"):
        authenticator.authenticate(ConnectOptions(nkey=PUBLIC), "")
    with pytest.raises(NatsError, match="wrong or missing credentials of user 'an nkey'"):
        authenticator.authenticate(ConnectOptions(nkey="SUACSSL3UAHUDXKFSNVUZRF5"), "")


def test_authentication_is_not_required_without_users() -> None:
    authenticator = create_authenticator()
    assert authenticator.authenticate(ConnectOptions(user="x", password="y"), "") is None
    assert not authenticator.requires_connect
    assert create_authenticator(User("a", token="t")).requires_connect


def test_nonces_are_unique_and_only_for_nkeys() -> None:
    assert create_authenticator(User("a", "p")).make_nonce(1) == ""
    user = User("a", nkey=PUBLIC)
    nonces = {create_authenticator(user).make_nonce(client) for client in range(100)}
    assert len(nonces) == 100
    other_key = Authenticator(Users([user]), SubjectTable(), b"other")
    assert other_key.make_nonce(1) not in nonces


def test_grants_are_shared_by_clients_of_a_user() -> None:
    user = User("a", "p", subject_permissions=SubjectPermissions(publish_deny=("a",)))
    authenticator = create_authenticator(user)
    grants = authenticator.subject_grants(user)
    assert grants is not None
    assert not grants.publish_cache.get(b"a")
    assert authenticator.subject_grants(user) is grants
    assert authenticator.subject_grants(None) is None
    assert create_authenticator(User("b", "p")).subject_grants(User("b", "p")) is None


def test_certificate_names_are_alternatives_then_the_subject() -> None:
    certificate = {
        "subject": ((("countryName", "DE"),), (("commonName", "c"),)),
        "subjectAltName": (("DNS", "a.example"), ("email", "b@example.org")),
    }
    assert certificate_names(certificate) == ("b@example.org", "a.example", "CN=c,C=DE")
