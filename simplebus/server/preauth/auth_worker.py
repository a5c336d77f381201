"""Checks credentials before the session gets them; slow password hashes run in a thread.

At most one slow hash is computed at a time, and never in the event loop. Failures are counted per
network and per user; both are refused for a while after too many. Waiting checks take turns by
network, networks with the fewest failures first, so that password guessing delays only the network
of the guesser. Valid passwords are cached, and equal checks share one computation.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.rate_limits import address_network
from simplebus.core.users.users import Users
from simplebus.logs.event_logger import EventLogger
from simplebus.server.preauth.address_limits import KeyedTokenBuckets
from simplebus.server.preauth.greeting import GreetingBuffers

log = EventLogger("simplebus.server")

_NETWORKS_MAX = 64
"""Networks from which checks may wait."""
_CHECKS_PER_NETWORK_MAX = 256
"""Waiting checks per network."""
_USER_FAILURE_BURST, _USER_FAILURES_PER_SECOND = 5, 0.5
"""Wrong passwords of one network for one user: burst and rate."""
_NETWORK_FAILURE_BURST, _NETWORK_FAILURES_PER_SECOND = 50, 5.0
"""Wrong passwords of one network for all users together: burst and rate."""


@dataclass(eq=False, slots=True)
class _PasswordCheck:
    """A slow password check, shared by all connections that wait for it."""

    network: str
    password_hash: str
    password: str = field(repr=False)
    started: trio.Event = field(default_factory=trio.Event)
    """Set when the check may run, or was evicted."""
    is_evicted: bool = False
    finished_event: trio.Event = field(default_factory=trio.Event)
    is_valid: bool | None = None
    """Result; None if the check did not run."""


class AuthWorker:
    """Checks credentials for all listeners of a server."""

    def __init__(self, users: Users) -> None:
        self.users = users
        self.greeting_buffers = GreetingBuffers()
        """First messages of connections that are not authenticated yet."""
        self.check_count = 0
        """Slow password checks so far."""
        self._failures_by_user = KeyedTokenBuckets(_USER_FAILURE_BURST, _USER_FAILURES_PER_SECOND)
        self._failures_by_network = KeyedTokenBuckets(
            _NETWORK_FAILURE_BURST, _NETWORK_FAILURES_PER_SECOND
        )
        self._waiting_checks: dict[str, deque[_PasswordCheck]] = {}
        """Waiting checks by network. The network that was served last is at the end."""
        self._active_checks: dict[tuple[str, str], _PasswordCheck] = {}
        self._is_hashing = False

    def replace_users(self, users: Users) -> None:
        """Use another user table. The cache of valid passwords is kept."""
        users.passwords.copy_remembered(
            self.users.passwords, {user.password for user in users.users}
        )
        self.users = users

    async def check(
        self, auth: Auth | None, address: str, is_valid_auth: Callable[[Auth], bool] | None = None
    ) -> None:
        """Check the credentials of a new connection, so that the session can decide without a wait.

        Args:
            auth: Credentials, if any.
            address: Address of the client.
            is_valid_auth: Checks the credentials for a listener with separate users.

        Raises:
            RemoteProtocolError: too_many_attempts.
        """
        if auth is None or not (auth.user or auth.token):
            return
        network = address_network(address)
        self._check_failure_limits(network, auth)
        users = self.users
        is_valid = (is_valid_auth or users.is_authentic)(auth)
        slow_check = None if is_valid else users.pending_slow_check(auth)
        if slow_check is not None and await self._run_slow_check(network, auth, *slow_check):
            self.users.passwords.remember_correct(*slow_check)
            is_valid = self.users.is_authentic(auth)  # An unknown user is never valid.
        if not is_valid:
            self._record_failure(network, auth)

    def recheck(self, auth: Auth, address: str, is_valid_auth: Callable[[Auth], bool]) -> None:
        """Check new credentials of an authenticated client.

        Slow hashes are not computed: an unknown password counts as wrong.

        Raises:
            RemoteProtocolError: too_many_attempts.
        """
        network = address_network(address)
        self._check_failure_limits(network, auth)
        if not is_valid_auth(auth):
            self._record_failure(network, auth)

    def _record_failure(self, network: str, auth: Auth) -> None:
        now = trio.current_time()
        self._failures_by_network.take_token(network, now)
        if auth.user:  # Also with a wrong token, because the password is checked, too.
            self._failures_by_user.take_token(_bucket_key(network, auth), now)

    def _check_failure_limits(self, network: str, auth: Auth) -> None:
        now = trio.current_time()
        can_try = self._failures_by_network.has_token(network, now)
        if can_try and (
            not auth.user or self._failures_by_user.has_token(_bucket_key(network, auth), now)
        ):
            return
        raise RemoteProtocolError(
            Reason.TOO_MANY_ATTEMPTS,
            "too many wrong passwords from this address; try again later",
        )

    async def _run_slow_check(
        self, network: str, auth: Auth, password_hash: str, password: str
    ) -> bool:
        """Wait for a turn and compare the password with the hash."""
        while (check := self._active_checks.get((password_hash, password))) is not None:
            await check.finished_event.wait()
            if check.is_valid is not None:
                return check.is_valid
        check = _PasswordCheck(network, password_hash, password)
        self._enqueue(check)
        self._active_checks[password_hash, password] = check
        try:
            self._start_next()
            await check.started.wait()
            if check.is_evicted:
                raise _queue_full_error()
            # The network may have failed too often while the check waited.
            self._check_failure_limits(network, auth)
            check.is_valid = await _verify_in_thread(password_hash, password)
            self.check_count += 1
            return check.is_valid
        finally:
            del self._active_checks[password_hash, password]
            check.finished_event.set()
            self._dequeue(check)
            self._start_next()

    def _enqueue(self, check: _PasswordCheck) -> None:
        """Queue a check. Raises RemoteProtocolError (too_many_attempts) if the queue is full."""
        waiting = self._waiting_checks.get(check.network, ())
        if len(waiting) >= _CHECKS_PER_NETWORK_MAX:
            raise _queue_full_error()
        if not waiting and len(self._waiting_checks) >= _NETWORKS_MAX:
            # Evict the network with most failures, which may be the new one.
            networks = [*self._waiting_checks, check.network]
            worst_network = max(reversed(networks), key=self._failure_count)
            if worst_network == check.network:
                raise _queue_full_error()
            for evicted_check in self._waiting_checks.pop(worst_network):
                evicted_check.is_evicted = True
                evicted_check.started.set()
        self._waiting_checks.setdefault(check.network, deque()).append(check)

    def _dequeue(self, check: _PasswordCheck) -> None:
        if check.started.is_set():
            self._is_hashing = self._is_hashing and check.is_evicted
        elif (waiting := self._waiting_checks.get(check.network)) is not None:
            waiting.remove(check)
            if not waiting:
                del self._waiting_checks[check.network]

    def _start_next(self) -> None:
        """Start the next check unless one runs."""
        if self._is_hashing or not self._waiting_checks:
            return
        network = min(self._waiting_checks, key=self._failure_count)
        waiting = self._waiting_checks.pop(network)
        check = waiting.popleft()
        if waiting:
            self._waiting_checks[network] = waiting  # At the end.
        self._is_hashing = True
        check.started.set()

    def _failure_count(self, network: str) -> int:
        """Return the recent failures of a network."""
        now = trio.current_time()
        return _NETWORK_FAILURE_BURST - int(self._failures_by_network.token_count(network, now))


def _bucket_key(network: str, auth: Auth) -> str:
    return f"{network} {auth.user[:NAME_CHARACTERS_MAX]}"


def _queue_full_error() -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.TOO_MANY_ATTEMPTS, "too many logins are waiting; try again later"
    )


async def _verify_in_thread(password_hash: str, password: str) -> bool:
    """Run `verify_password` in a thread.

    The thread has normal priority. With a lower one, other processes would take its CPU while it
    holds the interpreter lock that the event loop needs.
    """
    token, finished_event, result = trio.lowlevel.current_trio_token(), trio.Event(), [False]

    def work() -> None:
        try:
            result[0] = verify_password(password_hash, password)
        except Exception:
            log.exception("password_check.failed", "checking a password failed")
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(finished_event.set)

    threading.Thread(target=work, name="simplebus password", daemon=True).start()
    with trio.CancelScope(shield=True):  # The next check starts after this one.
        await finished_event.wait()
    return result[0]


def verify_password(password_hash: str, password: str) -> bool:
    """Return True if the password matches the Argon2 hash. Slow."""
    from argon2 import PasswordHasher
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return PasswordHasher().verify(password_hash, password.encode("utf-8", "surrogatepass"))
    except (Argon2Error, InvalidHashError):
        return False
