"""A lane: one class, copied from a near end to a far end, for as long as it takes.

Rule 1: nothing is remembered here. A lane that has lost an end begins anew, and its ends tell where
it was; so it makes no difference whether a connection broke or the process was killed.
Rule 2: a few batches are under way, and the next ones are made and announced behind them. What the
near end has beside stays there: memory is bounded, and a far end that is slow or away lets it wait.
Rule 3: nothing is skipped in silence: what stays is counted by reason, what the far end refuses
becomes a dead letter of the near end, and only then the lane goes on.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np
import trio

from simplebus.bridge.interfaces import (
    STREAM_FULL,
    TakenOverError,
    Far,
    SourceBatch,
    FatalConfigurationError,
    TargetBatch,
    Near,
    Refusal,
)
from simplebus.bridge.source.lag import Alone, Behind
from simplebus.bridge.transform import Left
from simplebus.core.errors import BusError, RefusedError

log = logging.getLogger("simplebus.bridge")

PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 5.0
ASIDE_SECONDS_MAX = 60.0
"""So long the lane leaves its ends to another one of its name: two would take them from one another
all the time. At first it is a twelfth of that."""
_DISPLACED_AGAIN_SECONDS = 10.0
"""A lane that is displaced again so soon is one of two."""
_LATER = {
    "disk_full",
    "disk_failed",
    "drop_newest",
    STREAM_FULL,
}
"""Refusals that say nothing of the message: it is sent again."""
_LATER_SECONDS = 1.0
_GOODBYE_SECONDS = 1.0
_LOOK_SECONDS = 1.0
HELD_UP_SECONDS = 10.0
"""A far end that has taken nothing of what is at hand for so long holds the lane up."""


@dataclass(frozen=True, slots=True)
class CopierStatistics:
    """A snapshot of a lane."""

    name: str
    is_up: bool
    """Whether it has both ends, and the far one does not hold it up."""
    problem: str
    """Why not; empty where that is not known."""
    copied: int
    """Messages that were confirmed by the far end."""
    batches: int
    left: dict[str, int]
    """Messages that were not to be copied, by reason."""
    refused: int
    """Messages that the far end has refused for good: they are dead letters."""
    missed: int
    """Messages that were gone from the near end before they could be copied."""
    odd: int
    """Messages of NATS that a bus cannot have quite as they are: the log says what it has."""
    lag: int | None
    """Messages of the near end that are not confirmed by the far one; None where that is not known.
    Of a lane that reads some channels, those of others count until they are looked at."""
    lag_seconds: float
    """How long ago the first of them was accepted; of NATS, came; 0 for nothing."""
    at: int
    """The sequence behind that one."""
    losses: int
    """How often an end was lost or could not be reached."""
    doubts: int
    """How often what the far bus remembers of the lane did not count, as one end is not what it
    was: messages may be there twice."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends, as they are found at the beginning."""

    near: Near
    far: Far
    at: int
    """Where to go on."""
    refusals: list[Refusal]
    """What the far end refuses of what it was sent before."""
    doubts: int = 0
    """How many records did not count."""


Begin = Callable[[Near, int], object]
"""Called as soon as the near end is there, with where the lane is as far as that knows."""
Open = Callable[[Begin], AbstractAsyncContextManager[Ends]]


@dataclass(frozen=True, slots=True)
class Way:
    """How a lane comes to its ends."""

    open: Open
    alone: Alone | None = None
    """None where the near end keeps nothing while the lane is away."""


class Copier:
    """Enter `run` in a nursery; cancelling ends it, and nothing is lost."""

    def __init__(self, name: str, way: Way, *, chance: Callable[[], float] = random.random) -> None:
        self.name = name
        self._way = way
        self._chance = chance
        self._is_up = False
        self._problem = ""
        self._said = ""
        """The problem that was told last, since things went well."""
        self._held_up = ""
        """How the far end holds the lane up; empty if it does not."""
        self._why_later = ""
        """Why what is at hand is to be sent again; empty if it is not."""
        self._copied = self._batches = self._refused = self._missed = self._losses = 0
        self._doubts = self._odd = 0
        self._left: Counter[Left] = Counter()
        self._at = self._head = 0
        self._memory = ""
        """The near end's, of which these are sequences."""
        self._cursor = 0
        """What is looked at next: from `at` to here it is under way."""
        self._behind = Behind(way.alone)
        self._aside = 0.0
        """How long it leaves its ends to another one of its name;"""
        self._displaced_at = -math.inf
        """since then."""

    def statistics(self) -> CopierStatistics:
        return CopierStatistics(
            name=self.name,
            is_up=self._is_up and not self._held_up,
            problem=self._problem or self._held_up,
            copied=self._copied,
            batches=self._batches,
            left={reason.value: count for reason, count in self._left.items()},
            refused=self._refused,
            missed=self._missed,
            odd=self._odd,
            lag=self._behind.count,
            lag_seconds=self._behind.seconds,
            at=self._at,
            losses=self._losses,
            doubts=self._doubts,
        )

    async def run(self) -> None:
        """Copy until cancelled; or return where that can never work, and have said why."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._behind.watch)
            nursery.start_soon(self._watch)
            await self._run()
            nursery.cancel_scope.cancel()

    async def _run(self) -> None:
        # From then on the near end keeps what comes, whether the far one is there yet or not.
        await self._behind.look(self._memory, self._at)
        turns = 0
        while True:
            before, aside = self._batches, 0.0
            try:
                async with self._way.open(self._behind.begin) as ends:
                    self._begin(ends)
                    await self._pump(ends)
            except FatalConfigurationError as error:
                self._losses += 1
                self._problem = str(error)
                log.error("%s: %s", self.name, self._problem)
                self._behind.forget()
                return
            except TakenOverError as error:
                self._stand_aside(error)
                aside = self._aside
            except (BusError, OSError) as error:
                self._lose(error)
            except (
                Exception
            ) as error:  # A fault of one lane is none of its server's, nor of others.
                log.exception("%s: a fault of the bridge's own", self.name)
                self._lose(error)
            finally:
                self._is_up, self._why_later = False, ""
                self._behind.end()
            turns = 0 if self._batches > before else turns + 1
            pause = min(PAUSE_SECONDS_MIN * 2.0 ** min(turns, 16), PAUSE_SECONDS_MAX)
            again = trio.current_time() + max(pause, aside) * (1 - self._chance() / 2)
            if turns > 1:
                await self._behind.look(self._memory, self._at)
            await trio.sleep_until(again)

    def _stand_aside(self, error: TakenOverError) -> None:
        """Another one has come. That is told once, though both come again, ever more slowly. It may
        have been this one, of which a bus that stood still hears late; but not twice in a row."""
        now = trio.current_time()
        # Two that wait for one another displace each other that seldom.
        may_be_one = 3 * ASIDE_SECONDS_MAX if self._aside else _DISPLACED_AGAIN_SECONDS
        is_again, self._displaced_at = now - self._displaced_at <= may_be_one, now
        if not is_again:
            self._aside = 0.0
            self._lose(error)
            return
        self._losses += 1
        self._problem = (
            f"another bridge has come under this name, and this one stands aside for a while: "
            f"where two run that are set up alike, end one, or name them apart ({error})"
        )
        if not self._aside:
            log.error("%s: %s", self.name, self._problem)
        self._aside = min(2 * self._aside or ASIDE_SECONDS_MAX / 12, ASIDE_SECONDS_MAX)

    def _begin(self, ends: Ends) -> None:
        refused = [each.sequence for each in ends.refusals]
        self._is_up, self._at = True, min([ends.at, *refused])
        self._memory = ends.near.storage_id
        self._doubts += ends.doubts
        self._head = max(self._head, ends.at)
        self._problem = ""
        log.info("%s: goes on at %d", self.name, ends.at)

    def _is_well(self) -> None:
        """The ends are there, and do what they should."""
        if self._said:
            log.warning("%s: is there again", self.name)
        self._said = ""

    def _lose(self, error: Exception) -> None:
        self._losses += 1
        self._problem = str(error) or type(error).__name__
        if self._said != self._problem:
            self._said = self._problem
            log.warning("%s: %s; trying again", self.name, self._problem)

    async def _watch(self) -> None:
        """See whether the far end takes what it is sent: one that is full may say nothing."""
        before, looks = self._through_with, 0
        while True:
            await trio.sleep(_LOOK_SECONDS)
            now = self._through_with
            may_be = self._is_up and self._behind.at_hand > 0 and now == before
            before, looks = now, looks + 1 if may_be else 0
            was, self._held_up = self._held_up, ""
            if looks * _LOOK_SECONDS >= HELD_UP_SECONDS:
                self._held_up = f"the far end has taken nothing for {HELD_UP_SECONDS:g} s"
                self._held_up += f": {self._why_later}" if self._why_later else ""
            if self._held_up and not was:
                log.warning("%s: %s", self.name, self._held_up)
            elif was and not self._held_up and self._is_up:
                log.warning("%s: the far end takes messages again", self.name)

    @property
    def _through_with(self) -> tuple[int, ...]:
        """How much the lane is through with: as long as nothing is, it is the same."""
        far = self._behind.far
        confirmed = 0 if far is None or self._why_later else far.confirmed
        return self._copied, self._refused, self._left.total(), confirmed

    # Copying -------------------------------------------------------------------------------------

    async def _pump(self, ends: Ends) -> None:
        near, far, behind = ends.near, ends.far, self._behind
        behind.begin(near, ends.at)
        behind.far = far
        # First this: what the near end is told to be through with, it may forget.
        if later := await self._sort_out(near, ends.refusals):
            behind.at_hand = len(later)
            await self._try_later(near, far, later, await self._found_again(near, later, ends.at))
        self._at = self._cursor = ends.at
        try:
            await near.commit_position(self._at, now=True)
            await self._flow(near, far)
        except trio.Cancelled:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
                await near.commit_position(self._at, now=True)
            raise
        finally:
            if gone := near.left(self._at):
                self._miss(gone, self._at)

    async def _flow(self, near: Near, far: Far) -> None:
        """Copy from the cursor on."""
        under_way, planned = deque[TargetBatch](), deque[TargetBatch]()
        while True:
            first = next(iter(under_way or planned), None)
            self._behind.since = None if first is None else first.oldest_accepted_at
            if not (planned or under_way):
                planned.append(await self._next(near, far))
            # What is ahead is made while what is next must wait; and one in any case, to be told.
            while far.has_room(planned) and (under_way or self._cursor < self._head):
                made = await self._next_there(near, far)
                if made is None:
                    break
                planned.append(made)
                if not far.must_wait:
                    break
            if planned:
                await self._announced(near, far, planned, under_way)
                far.send(planned[0])
                under_way.append(planned.popleft())
            elif under_way:
                await self._settle(near, far, under_way)
            if under_way and not far.has_room(planned):
                await self._settle(near, far, under_way)

    async def _settle(self, near: Near, far: Far, under_way: deque[TargetBatch]) -> None:
        """Wait for the first batch under way; for all of them, where that is not taken whole."""
        made = under_way.popleft()
        later = await self._through(near, made, await far.settle())
        self._is_well()
        if later:
            assert made.source_batch is not None
            found = made.source_batch
            while under_way:
                made = under_way.popleft()
                later += await self._through(near, made, await far.settle())
                assert made.source_batch is not None
                found = found.concat(made.source_batch)
            await self._try_later(near, far, later, found)
        self._at = made.next_sequence
        await near.commit_position(self._at, now=False)

    async def _next(self, near: Near, far: Far) -> TargetBatch:
        """The next batch, as soon as there is one. Nothing is under way."""
        while True:
            made = await self._next_there(near, far)
            if made is not None:
                return made
            self._at = self._cursor
            self._is_well()
            self._behind.waits = True
            self._cursor = max(self._cursor, await near.wait_for_message(self._cursor))
            self._behind.waits = False

    async def _next_there(self, near: Near, far: Far) -> TargetBatch | None:
        """The next batch, if the near end has it now."""
        while True:
            found = await near.read(self._cursor)
            self._note(found)
            made = far.make(found)
            self._cursor = made.next_sequence
            self._behind.found(made.next_sequence, self._head)
            if made.count:
                self._behind.at_hand += made.count
                made.source_batch = found if made.next_sequence == found.next_sequence else found.below(made.next_sequence)
                made.oldest_accepted_at = time.monotonic() - found.oldest_age_seconds
                if self._behind.since is None:
                    self._behind.since = made.oldest_accepted_at
                return made
            self._left.update(made.skipped_counts)
            await self._sort_out(near, _too_long(made))
            if made.next_sequence >= found.head or found.next_sequence == found.first_sequence:
                return None

    def _note(self, found: SourceBatch) -> None:
        self._head = max(found.head, found.next_sequence)
        if found.missed_count:
            self._miss(found.missed_count, found.first_sequence)
        if found.altered_count and not self._odd:
            log.warning("%s: %s; so it is counted, and told once", self.name, found.alteration)
        self._odd += found.altered_count

    def _miss(self, count: int, first: int) -> None:
        self._missed += count
        log.warning(
            "%s: %d messages from %d on were gone before they could be copied",
            self.name,
            count,
            first,
        )

    async def _announced(
        self, near: Near, far: Far, planned: Sequence[TargetBatch], under_way: deque[TargetBatch]
    ) -> None:
        """Announce batches, again until it is safe to send the first one. While that cannot be said
        the near end is told how far the lane is: what the far bus remembers is too old."""
        why_later = self._why_later
        while True:
            far.announce(planned)
            refusals = await far.announced()
            if not refusals:
                self._why_later = why_later
                return
            self._check_later(refusals)
            self._why_later = refusals[0].sentence
            while under_way:
                await self._settle(near, far, under_way)
            await near.commit_position(self._at, now=True)
            await trio.sleep(_LATER_SECONDS)

    async def _through(self, near: Near, made: TargetBatch, refusals: list[Refusal]) -> list[Refusal]:
        """A batch is settled. Returns what is to be sent again."""
        mine = [each for each in refusals if each.sequence >= 0]
        self._behind.at_hand -= made.count - sum(each.code in _LATER for each in mine)
        self._check_later([each for each in refusals if each.sequence < 0])
        self._left.update(made.skipped_counts)
        self._copied += made.count - len(mine) - made.skipped_counts.get(Left.KNOWN, 0)
        self._batches += 1
        return await self._sort_out(near, mine + _too_long(made))

    async def _sort_out(self, near: Near, refusals: list[Refusal]) -> list[Refusal]:
        """Have dead letters made of what is refused for good. Returns the rest."""
        final = [each for each in refusals if each.code not in _LATER and each.sequence >= 0]
        if final:
            log.warning(
                "%s: %d messages are refused and become dead letters, message %d as %s: %s",
                self.name,
                len(final),
                final[0].sequence,
                final[0].code,
                final[0].sentence,
            )
            gone = await near.give_up(final)
            self._refused += len(final) - gone
            if gone:
                self._miss(gone, final[0].sequence)
        return [each for each in refusals if each.code in _LATER and each.sequence >= 0]

    async def _found_again(self, near: Near, refusals: list[Refusal], next: int) -> SourceBatch:
        """What the near end still has of what is to be sent again."""
        wanted = np.sort(np.array([each.sequence for each in refusals], np.int64))
        again, at = SourceBatch([], int(wanted[0]), next, next), 0
        while at < wanted.size:
            first = int(wanted[at])
            found = await near.read(first)
            again.runs += found.select(wanted)
            at = int(np.searchsorted(wanted, max(found.next_sequence, first + 1)))
        if gone := wanted.size - sum(piece.count for piece in again.runs):
            self._miss(gone, again.first_sequence)
        return again

    async def _try_later(self, near: Near, far: Far, refusals: list[Refusal], found: SourceBatch) -> None:
        """Send these of what was found again, until they are taken. What is announced is all of
        them: a bridge that is killed meanwhile goes on behind them."""
        log.warning(
            "%s: %d messages are to be sent again, until they are taken: %s",
            self.name,
            len(refusals),
            refusals[0].sentence,
        )
        again = refusals
        while refusals:
            self._why_later = refusals[0].sentence
            if again:  # Else the far end takes them, some at a time.
                await trio.sleep(_LATER_SECONDS)
            wanted = np.array([each.sequence for each in refusals], np.int64)
            made = far.make(replace(found, pieces=found.select(wanted)))
            left = [each for each in refusals if each.sequence >= made.next_sequence]
            self._behind.at_hand += made.count + len(left) - len(refusals)
            if made.count:
                await self._announced(near, far, [made], deque())
                far.send(made)
                again = await self._through(near, made, await far.settle())
            else:
                again = await self._through(near, made, [])
            refusals = again + left
        self._why_later = ""

    def _check_later(self, refusals: list[Refusal]) -> None:
        """Raise RefusedError for announcements that will never be taken."""
        for refusal in refusals:
            if refusal.code not in _LATER:
                raise RefusedError(refusal.code, f"the far bus takes no record: {refusal.sentence}")


def _too_long(made: TargetBatch) -> list[Refusal]:
    return [Refusal(sequence, "unfit", why) for sequence, why in made.rejected]
