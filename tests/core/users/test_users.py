"""Authentication of users, and secrets that stay hidden."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth, ConnectRequest
from simplebus.core.users.passwords import PasswordVerifier, check_stored_secret, hash_token
from simplebus.core.users.users import User, Users

SLOW = "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaA"
ADA = User("ada", password=SLOW, certificates=("CN=ada", "ada@example.com"))
BOB = User("bob", password="plain", token=hash_token("token"))
WIDE_NETWORK_USER = User("near", addresses=("10.0.0.0/8", "fd00::/8"))
NKEY = "UA5WUJ54Z23KILLCUOUNAKTPBVZWKMQVO4O6EQ5GHLAERIMLLHNCTYM5"
NARROW_NETWORK_USER = User("nearer", addresses=("10.1.0.0/16",))


def test_users_authenticate_in_every_way() -> None:
    users = Users([ADA, BOB, WIDE_NETWORK_USER, NARROW_NETWORK_USER], PasswordVerifier(b"key"))
    assert users.authenticate(Auth(user="bob", password="plain"), version=2) is BOB
    assert users.authenticate(Auth(token="token"), version=2) is BOB
    both_credentials = Auth(user="bob", password="plain", token="wrong")
    assert users.authenticate(both_credentials, version=2) is BOB
    for name in ADA.certificates:
        assert users.authenticate(None, certified=("x", name), version=1) is ADA
    assert users.authenticate(None, address="10.2.3.4", version=1) is WIDE_NETWORK_USER
    assert users.authenticate(None, address="10.1.3.4", version=2) is NARROW_NETWORK_USER
    assert users.authenticate(None, address="fd00::1%eth0", version=1) is WIDE_NETWORK_USER


@pytest.mark.parametrize(
    "auth",
    [
        Auth(user="bob", password="wrong"),
        Auth(user="bob"),
        Auth(user="nobody", password="plain"),
        Auth(user="near"),
        Auth(user="ada", password=SLOW),
        Auth(token="wrong"),
        Auth(token=hash_token("token")),
    ],
)
def test_wrong_credentials_always_get_the_same_message(auth: Auth) -> None:
    users = Users([ADA, BOB, WIDE_NETWORK_USER])
    with pytest.raises(RemoteProtocolError) as caught:
        users.authenticate(auth, address="10.0.0.1", certified=("CN=ada",), version=2)
    assert caught.value.reason is Reason.UNAUTHORIZED
    assert caught.value.sentence.startswith("wrong user, password or token")


def test_client_without_credentials_is_the_anonymous_user() -> None:
    users = Users([ADA, WIDE_NETWORK_USER, guest := User("guest")], anonymous="guest")
    assert users.authenticate(None, version=1) is guest
    assert users.authenticate(None, address="10.2.3.4", version=1) is WIDE_NETWORK_USER
    assert users != Users(users.users)
    with pytest.raises(RemoteProtocolError):
        users.authenticate(Auth(user="guest"), version=2)


@pytest.mark.parametrize("address", ["", "nonsense", "11.0.0.1", "::1"])
def test_missing_credentials_get_a_hint(address: str) -> None:
    users = Users([ADA, WIDE_NETWORK_USER])
    with pytest.raises(RemoteProtocolError, match="expected user and password"):
        users.authenticate(None, address=address, version=2)
    with pytest.raises(RemoteProtocolError, match="which version 1 cannot send"):
        users.authenticate(Auth(), address=address, version=1)


def test_slow_password_is_checked_once() -> None:
    users = Users([ADA, BOB], PasswordVerifier(b"key"))
    right, wrong = Auth(user="ada", password="right"), Auth(user="ada", password="wrong")
    assert users.pending_slow_check(right) == (SLOW, "right")
    # Unknown names and plain passwords need the same work, so the time reveals neither.
    assert users.pending_slow_check(Auth(user="nobody", password="x")) == (SLOW, "x")
    assert users.pending_slow_check(Auth(user="bob", password="x")) == (SLOW, "x")
    for quick in (None, Auth(), Auth(token="x"), Auth(user="bob", password="plain")):
        assert users.pending_slow_check(quick) is None
    users.passwords.remember_correct(SLOW, "right")
    assert users.pending_slow_check(right) is None
    assert users.pending_slow_check(wrong) == (SLOW, "wrong")
    assert users.authenticate(right, version=2) is ADA
    with pytest.raises(RemoteProtocolError):
        users.authenticate(wrong, version=2)


def test_repr_hides_secrets() -> None:
    for shown in (
        repr(ADA),
        repr(BOB),
        repr(Auth(user="x", password="hidden", token="hidden")),
        repr(ConnectRequest(auth=Auth(user="x", password="hidden"))),
        repr(PasswordVerifier(b"hidden")),
    ):
        assert "hidden" not in shown
        assert "plain" not in shown
        assert "argon2" not in shown
        assert "sha256" not in shown


def test_unknown_certificate_is_refused_with_its_names() -> None:
    users = Users([User("a", certificates=("cn=a, ou=b",)), ADA])
    assert users.authenticate(None, certified=("x", "CN=a,OU=b"), version=2).name == "a"
    with pytest.raises(RemoteProtocolError, match="no user has the certificate name 'x', 'CN=b'"):
        users.authenticate(None, certified=("x", "CN=b"), version=2)


@pytest.mark.parametrize(
    ("users", "sentence"),
    [
        ([User("a"), User("a")], "users 'a' and 'a' have the same name"),
        ([User("a", token="t"), User("b", token=hash_token("t"))], "have the same token"),
        ([User("a", certificates=("x",)), User("b", certificates=("x",))], "the same certificate"),
        (
            [User("a", certificates=("CN=x, ou=y",)), User("b", certificates=("cn=x,OU=y",))],
            "the same certificate",
        ),
        ([User("a", nkey=NKEY), User("b", nkey=NKEY)], "'a' and 'b' have the same nkey"),
        (
            [User("a", addresses=("10.1.0.0/16",)), User("b", addresses=("::ffff:10.1.2.3/112",))],
            "'a' and 'b' have the same network",
        ),
    ],
)
def test_users_with_equal_credentials_are_refused(users: list[User], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Users(users)


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"name": ""}, "a user name has 1 to 200 printable characters"),
        ({"name": "a\nb"}, "printable characters"),
        ({"name": "a", "password": "$2b$12$x"}, "bcrypt hashes are not supported"),
        ({"name": "a", "token": SLOW}, "expected sha256: and 64 digits"),
        ({"name": "a", "token": "sha256:12"}, "expected 64 hexadecimal digits"),
        ({"name": "a", "addresses": ("10.0.0.0/99",)}, "user 'a': '10.0.0.0/99'"),
        ({"name": "a", "certificates": ("",)}, "user 'a': '' is not a name of a certificate"),
        ({"name": "a", "certificates": ("CN=x,,OU",)}, "user 'a': 'CN=x,,OU' is not a subject"),
        ({"name": "a", "connections": -1}, "connections must be 0 or more, got -1"),
        ({"name": "a", "classes_max": -1}, "classes must be 0 or more, got -1"),
        ({"name": "a", "durables_max": -2}, "durables must be 0 or more, got -2"),
    ],
)
def test_invalid_users_are_refused(about: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        User(**about)  # type: ignore[arg-type]


def test_stored_secret_forms() -> None:
    passwords = PasswordVerifier(b"key")
    assert passwords.is_correct(check_stored_secret("plain"), "plain")
    assert passwords.is_correct(hash_token("x"), "x")
    assert not passwords.is_correct(hash_token("x"), hash_token("x"))
    assert not passwords.is_correct(SLOW, "")
    passwords.remember_correct(SLOW, "")
    assert passwords.is_correct(SLOW, "")
    assert passwords.is_correct("\ud800", "\ud800")
