"""What peers say of who they are, checked before the bus is told: slow passwords, by a thread.

Rule 1: the event loop never works out a slow hash, and no more than one is worked out at a time.
Rule 2: what is wrong is counted, for who comes from one place and for whom it says to be; who has
been wrong too often is not looked at for a while. What is right costs nothing.
Rule 3: who waits for a check waits for others of the same place, and each place has its turn: those
that have been wrong last. Guessing at speed costs who guesses, and nobody else.
Rule 4: a password that was right before is known at once, and one that several say is worked out
once.
"""

from __future__ import annotations

import contextlib
import logging
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
from simplebus.server.preauth.address_limits import KeyedTokenBuckets
from simplebus.server.preauth.greeting import Greetings

log = logging.getLogger("simplebus.server")

_PLACES_MAX = 64
"""From so many places checks may wait,"""
_WAITING_MAX = 256
"""and so many from each."""
_WRONG_AT_ONCE, _WRONG_PER_SECOND = 5, 0.5
"""How often one place may be wrong about one user."""
_WRONG_OF_PLACE_AT_ONCE, _WRONG_OF_PLACE_PER_SECOND = 50, 5.0
"""And about whomever."""


@dataclass(eq=False, slots=True)
class _Check:
    """A slow password, and who waits for it."""

    place: str
    kept: str
    said: str = field(repr=False)
    turn: trio.Event = field(default_factory=trio.Event)
    """Set when it is to be worked out, or gives way to others."""
    gives_way: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    is_right: bool | None = None
    """None if nobody has worked it out."""


class Gatekeeper:
    """Of one bus, for all its doors."""

    def __init__(self, users: Users) -> None:
        self.users = users
        self.greetings = Greetings()
        """What is heard of those who have not said who they are."""
        self.checks = 0
        """Slow passwords that were looked at."""
        self._wrong = KeyedTokenBuckets(_WRONG_AT_ONCE, _WRONG_PER_SECOND)
        self._wrong_of_place = KeyedTokenBuckets(_WRONG_OF_PLACE_AT_ONCE, _WRONG_OF_PLACE_PER_SECOND)
        self._line: dict[str, deque[_Check]] = {}
        """By place: who has had its turn last is last."""
        self._asked: dict[tuple[str, str], _Check] = {}
        self._is_at_work = False

    def adopt(self, users: Users) -> None:
        """These are the users from now on. What was learned of their passwords stays known."""
        users.passwords.adopt(self.users.passwords, {user.password for user in users.users})
        self.users = users

    async def hear(
        self, auth: Auth | None, address: str, knows: Callable[[Auth], bool] | None = None
    ) -> None:
        """A peer from this address says who it is: work out what the bus is to know before it
        judges. `knows` says of a door that lets others in as well whether this is one of them.

        Raises RemoteProtocolError (too_many_attempts).
        """
        if auth is None or not (auth.verify_password or auth.token):
            return
        place = address_network(address)
        self._check_may_try(place, auth)
        users = self.users
        is_right = (knows or users.knows)(auth)
        slow = None if is_right else users.slow_check(auth)
        if slow is not None and await self._look(place, auth, *slow):
            self.users.passwords.learn(*slow)
            is_right = self.users.knows(auth)  # Who is nobody is wrong whatever it says.
        if not is_right:
            self._note_wrong(place, auth)

    def hear_again(self, auth: Auth, address: str, knows: Callable[[Auth], bool]) -> None:
        """The same of a peer that is inside and says to be somebody else. Slow passwords are not
        worked out for that: they are wrong unless they are known.

        Raises RemoteProtocolError (too_many_attempts).
        """
        place = address_network(address)
        self._check_may_try(place, auth)
        if not knows(auth):
            self._note_wrong(place, auth)

    def _note_wrong(self, place: str, auth: Auth) -> None:
        now = trio.current_time()
        self._wrong_of_place.take_token(place, now)
        if not auth.token:
            self._wrong.take_token(_key(place, auth), now)

    def _check_may_try(self, place: str, auth: Auth) -> None:
        now = trio.current_time()
        may_try = self._wrong_of_place.has_token(place, now)
        if may_try and (auth.token or self._wrong.has_token(_key(place, auth), now)):
            return
        raise RemoteProtocolError(
            Reason.TOO_MANY_ATTEMPTS,
            "too many wrong passwords came from this address; wait a little",
        )

    async def _look(self, place: str, auth: Auth, kept: str, said: str) -> bool:
        """Whether this is what is kept as that hash."""
        while (check := self._asked.get((kept, said))) is not None:
            await check.done.wait()
            if check.is_right is not None:
                return check.is_right
        check = _Check(place, kept, said)
        self._stand_in_line(check)
        self._asked[kept, said] = check
        try:
            self._go_on()
            await check.turn.wait()
            if check.gives_way:
                raise _too_many_wait()
            self._check_may_try(place, auth)  # Others of the place may have been wrong meanwhile.
            check.is_right = await _worked_out(kept, said)
            self.checks += 1
            return check.is_right
        finally:
            del self._asked[kept, said]
            check.done.set()
            self._leave_line(check)
            self._go_on()

    def _stand_in_line(self, check: _Check) -> None:
        """Raises RemoteProtocolError (too_many_attempts) where there is no room."""
        waiting = self._line.get(check.place, ())
        if len(waiting) >= _WAITING_MAX:
            raise _too_many_wait()
        if not waiting and len(self._line) >= _PLACES_MAX:
            # The last one of those that have been wrong most: it may be the newcomer.
            places = [*self._line, check.place]
            last = max(reversed(places), key=self._wrongs)
            if last == check.place:
                raise _too_many_wait()
            for other in self._line.pop(last):
                other.gives_way = True
                other.turn.set()
        self._line.setdefault(check.place, deque()).append(check)

    def _leave_line(self, check: _Check) -> None:
        if check.turn.is_set():
            self._is_at_work = self._is_at_work and check.gives_way
        elif (waiting := self._line.get(check.place)) is not None:
            waiting.remove(check)
            if not waiting:
                del self._line[check.place]

    def _go_on(self) -> None:
        """The next one, if nobody is at work."""
        if self._is_at_work or not self._line:
            return
        place = min(self._line, key=self._wrongs)
        waiting = self._line.pop(place)
        check = waiting.popleft()
        if waiting:
            self._line[place] = waiting  # Behind the others.
        self._is_at_work = True
        check.turn.set()

    def _wrongs(self, place: str) -> int:
        """How often it has been wrong of late."""
        now = trio.current_time()
        return _WRONG_OF_PLACE_AT_ONCE - int(self._wrong_of_place.token_count(place, now))


def _key(place: str, auth: Auth) -> str:
    return f"{place} {auth.user[:NAME_CHARACTERS_MAX]}"


def _too_many_wait() -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.TOO_MANY_ATTEMPTS, "too many others wait to be let in; try again in a little"
    )


async def _worked_out(kept: str, said: str) -> bool:
    """The same as `is_password`, in a thread of its own. It has no lower priority: others would
    keep it from its processor while it keeps the event loop from the interpreter."""
    token, done, found = trio.lowlevel.current_trio_token(), trio.Event(), [False]

    def work() -> None:
        try:
            found[0] = is_password(kept, said)
        except Exception:
            log.exception("a password could not be checked")
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    threading.Thread(target=work, name="simplebus password", daemon=True).start()
    with trio.CancelScope(shield=True):  # The next check is to begin behind this one.
        await done.wait()
    return found[0]


def is_password(kept: str, said: str) -> bool:
    """Whether a password is the one that is kept as this slow hash. Takes long."""
    from argon2 import PasswordHasher
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return PasswordHasher().verify(kept, said.encode("utf-8", "surrogatepass"))
    except (Argon2Error, InvalidHashError):
        return False
