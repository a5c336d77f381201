"""Tests of credential checks: failure limits, fairness and caching.

`FakeVerification` replaces slow hashes and records the checks in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.passwords import PasswordVerifier, hash_token
from simplebus.core.users.users import User, Users
from simplebus.server.preauth import auth_worker as module
from simplebus.server.preauth.auth_worker import AuthWorker

SLOW = [User(f"slow{number}", password=f"$argon2id${number}") for number in range(300)]
QUICK = User("quick", password="right")
TOKEN = User("token", token=hash_token("right"))


@dataclass
class FakeVerification:
    """Replacement of the verification thread."""

    checks: list[tuple[str, str]] = field(default_factory=list)
    released: trio.Event = field(default_factory=trio.Event)

    async def __call__(self, password_hash: str, password: str) -> bool:
        self.checks.append((password_hash, password))
        await self.released.wait()
        return password == "right"


@pytest.fixture
def verification(monkeypatch: pytest.MonkeyPatch) -> FakeVerification:
    verification = FakeVerification()
    monkeypatch.setattr(module, "_verify_in_thread", verification)
    return verification


def auth_worker() -> AuthWorker:
    return AuthWorker(Users([*SLOW, QUICK, TOKEN], PasswordVerifier(b"by chance")))


async def is_checked(worker: AuthWorker, auth: Auth, address: str = "10.0.0.1") -> bool:
    """Return False if the credentials were refused without a check."""
    try:
        await worker.check(auth, address)
    except RemoteProtocolError as error:
        return error.reason is not Reason.TOO_MANY_ATTEMPTS
    return True


@pytest.mark.parametrize(
    "wrong",
    [
        Auth(user="quick", password="wrong"),
        Auth(user="slow1", password="wrong"),
        Auth(user="nobody", password="wrong"),
        Auth(user="quick", password="wrong", token="wrong"),
    ],
)
async def test_too_many_failures_are_refused_without_a_check(
    wrong: Auth, verification: FakeVerification, autojump_clock: object
) -> None:
    verification.released.set()
    worker = auth_worker()
    results = [await is_checked(worker, wrong) for _ in range(9)]
    assert results == [True] * 5 + [False] * 4
    assert not await is_checked(worker, Auth(user=wrong.user, password="right"))
    assert await is_checked(worker, Auth(user="slow2", password="right"))  # Other users.
    assert await is_checked(worker, wrong, "10.0.0.2")  # Other networks.
    await trio.sleep(2)
    assert [await is_checked(worker, wrong) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("kind", ["token", "user"])
async def test_failures_of_a_network_are_limited_across_users(
    kind: str, verification: FakeVerification, autojump_clock: object
) -> None:
    verification.released.set()
    worker = auth_worker()
    results = [
        await is_checked(
            worker, Auth(token=str(n)) if kind == "token" else Auth(user=str(n), password="x")
        )
        for n in range(60)
    ]
    assert results == [True] * 50 + [False] * 10
    assert not await is_checked(worker, Auth(token="right"))
    assert await is_checked(worker, Auth(token="right"), "10.0.0.2")


async def test_valid_credentials_are_never_limited(
    verification: FakeVerification, autojump_clock: object
) -> None:
    verification.released.set()
    worker = auth_worker()
    for auth in (
        Auth(user="quick", password="right"),
        Auth(user="slow1", password="right"),
        Auth(token="right"),
    ):
        assert all([await is_checked(worker, auth) for _ in range(200)])
    assert verification.checks == [("$argon2id$1", "right")]


@pytest.mark.parametrize("address", ["2001:db8:1:2::{:x}", "::ffff:10.0.0.1", "10.0.0.1"])
async def test_addresses_of_one_network_share_the_failure_limit(
    address: str, verification: FakeVerification, autojump_clock: object
) -> None:
    worker = auth_worker()
    wrong = Auth(user="quick", password="wrong")
    verification.released.set()
    results = [await is_checked(worker, wrong, address.format(n)) for n in range(9)]
    assert results == [True] * 5 + [False] * 4
    assert await is_checked(worker, wrong, "2001:db8:1:3::1")


async def test_equal_credentials_share_one_check(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker = auth_worker()
    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(worker.check, Auth(user="slow1", password="right"), "10.0.0.1")
        await trio.testing.wait_all_tasks_blocked()
        verification.released.set()
    assert verification.checks == [("$argon2id$1", "right")]
    assert worker.check_count == 1


async def test_waiter_of_a_cancelled_check_runs_its_own(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker = auth_worker()
    right, other_auth = Auth(user="slow1", password="right"), Auth(user="slow2", password="right")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.check, other_auth, "10.0.0.1")
        await trio.testing.wait_all_tasks_blocked()
        leaving = trio.CancelScope()
        nursery.start_soon(_cancelled, leaving, worker, right)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(worker.check, right, "10.0.0.2")
        await trio.testing.wait_all_tasks_blocked()
        leaving.cancel()
        await trio.testing.wait_all_tasks_blocked()
        verification.released.set()
    assert verification.checks == [("$argon2id$2", "right"), ("$argon2id$1", "right")]
    assert worker.users.is_authentic(right)


async def _cancelled(scope: trio.CancelScope, worker: AuthWorker, auth: Auth) -> None:
    with scope:
        await worker.check(auth, "10.0.0.1")


async def _check_and_record(
    worker: AuthWorker, auth: Auth, address: str, finished: Callable[[str], None]
) -> None:
    results = await is_checked(worker, auth, address)
    finished(f"{address} {auth.user} {results}")


async def test_networks_take_turns_and_failing_ones_come_last(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker, finished = auth_worker(), list[str]()
    verification.released.set()
    await worker.check(Auth(user="quick", password="wrong"), "10.0.0.9")
    verification.checks.clear()
    verification.released = trio.Event()
    async with trio.open_nursery() as nursery:
        for number, address in enumerate(
            ["10.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
        ):
            auth = Auth(user=f"slow{number}", password="right")
            nursery.start_soon(_check_and_record, worker, auth, address, finished.append)
            await trio.testing.wait_all_tasks_blocked()
        verification.released.set()
    numbers = [int(password_hash.rpartition("$")[2]) for password_hash, _ in verification.checks]
    assert numbers == [0, 3, 5, 4, 6, 1, 2]
    assert len(finished) == 7


async def test_full_queue_prefers_networks_without_failures(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker, finished = auth_worker(), list[str]()
    for number in range(70):
        for _ in range(2):
            await worker.check(Auth(token="wrong"), f"10.1.0.{number}")
    async with trio.open_nursery() as nursery:
        for number in range(70):
            auth = Auth(user=f"slow{number}", password="wrong")
            nursery.start_soon(_check_and_record, worker, auth, f"10.1.0.{number}", finished.append)
            await trio.testing.wait_all_tasks_blocked()
        # One is checked and 64 wait: the last five were refused.
        assert len(finished) == 5
        for number in range(3):
            auth = Auth(user=f"slow{100 + number}", password="right")
            nursery.start_soon(_check_and_record, worker, auth, f"10.2.0.{number}", finished.append)
            await trio.testing.wait_all_tasks_blocked()
        assert len(finished) == 8
        assert not any(each.startswith("10.2") for each in finished)
        verification.released.set()
    assert {f"10.2.0.{number} slow{100 + number} True" for number in range(3)} <= set(finished)
    assert sum(each.endswith("False") for each in finished) == 8
    assert [password_hash for password_hash, _ in verification.checks[1:4]] == [
        f"$argon2id${100 + n}" for n in range(3)
    ]


async def test_waiting_checks_per_network_are_bounded(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker, finished = auth_worker(), list[str]()
    async with trio.open_nursery() as nursery:
        for number in range(260):
            auth = Auth(user=f"slow{number}", password="right")
            nursery.start_soon(_check_and_record, worker, auth, "10.0.0.1", finished.append)
        await trio.testing.wait_all_tasks_blocked()
        assert len(finished) == 3
        verification.released.set()
    assert sum(each.endswith("True") for each in finished) == 257


async def test_verified_passwords_stay_cached_while_the_hash_is_unchanged(
    verification: FakeVerification, autojump_clock: object
) -> None:
    worker = auth_worker()
    verification.released.set()
    for number in (1, 2):
        await worker.check(Auth(user=f"slow{number}", password="right"), "10.0.0.1")
    changed = User("slow2", password="$argon2id$changed")
    worker.replace_users(Users([SLOW[1], changed], PasswordVerifier(b"another chance")))
    assert worker.users.is_authentic(Auth(user="slow1", password="right"))
    assert not worker.users.is_authentic(Auth(user="slow2", password="right"))
    assert worker.check_count == 2
