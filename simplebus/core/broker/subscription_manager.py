"""Subscription manager: handles Connect, Subscribe and Unsubscribe requests, and ends positions.

A request that cannot be granted raises RemoteProtocolError and changes nothing; the protocol
version decides whether the error ends the session. A Subscribe that names an existing durable or
group resumes it, and is refused if its group, channels or ordering differ.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from simplebus.core.authorization import visibility
from simplebus.core.authorization.durable_owners import DurableOwners
from simplebus.core.authorization.session_permissions import (
    check_class_references,
    check_private_channels,
    visible_scope,
)
from simplebus.core.broker import subscribe_options
from simplebus.core.broker.inquire_positions import describe_session
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import AnyGroup, Group, GroupMember
from simplebus.core.group.key_ordered_group import KeyOrderedGroup
from simplebus.core.limits import (
    DECLARATION_CHECKS_MAX,
    DECLARED_CLASSES_ENDED_PER_TURN,
    PERMISSION_CHECKS_PER_TURN,
    RETURNED_PER_TURN,
    RULES_PER_PERMISSION_CHECK,
    SUBSCRIPTIONS_ENDED_PER_TURN,
)
from simplebus.core.message_class.class_registry import ClassRegistry, Declaration
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import apply_purges
from simplebus.core.message_class.remote_storage import CatchUpBarrier, RemoteStorage
from simplebus.core.producer_state import NameClaim, ProducerState, ProducerStates
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import (
    ConnectRequested,
    SubscribeRequested,
    UnsubscribeRequested,
)
from simplebus.core.protocol.requests import (
    ConnectReply,
    ConnectRequest,
    NamedClass,
    SubscribeReply,
    SubscribeRequest,
)
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings
from simplebus.core.snapshot import PositionSnapshot
from simplebus.core.steps import run_to_end
from simplebus.core.store.publisher_confirms import PublisherConfirms
from simplebus.core.store.quotas import Quotas
from simplebus.core.store.store import Store
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.core.users.permissions import ClassPermissions, reply_channel_prefix


def check_first_number(request: ConnectRequest, class_registry: ClassRegistry) -> None:
    """Raise RemoteProtocolError (bad_connect) if a Connect must not set its first message number.

    Only stateless servers deduplicate by such numbers, and only for named publishers.
    """
    if request.first is None:
        return
    if not class_registry.is_remote:
        detail = "only stateless servers (--engine) accept a first number"
    elif request.name is None:
        detail = "a first number requires a publisher name"
    else:
        return
    raise RemoteProtocolError(Reason.BAD_CONNECT, f"first is {request.first}; {detail}")


def resume_producer(
    producer_states: ProducerStates,
    claim: NameClaim,
    request: ConnectRequest,
    class_registry: ClassRegistry,
    now: float,
    identity: str,
) -> tuple[int, bool]:
    """Set the number at which a publisher continues.

    Returns:
        The number of confirmed messages that are lost, and True if the journal must record the new
        state.
    """
    producer = claim.producer
    before = producer.next_number, producer.is_uncertain
    is_other_bus = bool(request.bus) and request.bus != identity
    lost = producer_states.resume(claim, request.unconfirmed, is_other_bus=is_other_bus)
    if class_registry.choose_first_number is not None and (
        request.unconfirmed is None or is_other_bus
    ):
        producer_states.restart_at(producer, class_registry.choose_first_number(now))
    is_new_here = claim.is_other_instance or not claim.is_known
    has_position = request.unconfirmed is not None and not is_other_bus
    if class_registry.is_remote and is_new_here and has_position:
        # Another server stores the producer state, so the producer continues with its own numbers.
        producer_states.restart_at(producer, request.unconfirmed or 0)
    if request.first is not None:
        producer_states.restart_at(producer, request.first)
    return lost, is_new_here or before != (producer.next_number, producer.is_uncertain)


class CheckedConnect(NamedTuple):
    """Result of the checks of a version 2 Connect."""

    claim: NameClaim | None
    """Claim of the publisher name; None without a name, and for a later Connect."""
    declaration: Declaration
    """Classes that the Connect declares. They are reserved."""


class SubscriptionManager:
    """Creates, resumes and ends the positions of one broker, and answers Connect requests."""

    def __init__(
        self,
        store: Store,
        *,
        identity: str,
        run_id: str,
        delayed_wakeups: DelayedWakeups,
        producer_states: ProducerStates,
        durable_owners: DurableOwners,
        quotas: Quotas,
        publisher_confirms: PublisherConfirms,
    ) -> None:
        self.identity = identity
        self.run_id = run_id
        self.producer_states = producer_states
        self._store = store
        store.class_registry.on_class_created = self._start_early_subscribers
        store.class_registry.on_renamed = durable_owners.reapply_permissions
        self._delayed_wakeups = delayed_wakeups
        self._publisher_confirms = publisher_confirms
        self.durable_owners = durable_owners
        self.quotas = quotas
        self._early_subscribers: dict[int, dict[Session, None]] = {}
        """Version 1 sessions that subscribed before the class exists, by class id."""
        self._idle_since: dict[Position, float] = {}
        """Time since which each durable that can expire has had no connected subscription."""
        self._delayed_subscriptions: dict[Position, BrokerSubscription] = {}
        """Version 1 subscriptions that start when an inherited delay has passed."""

    @property
    def _settings(self) -> Settings:
        return self._store.settings

    # Connect -------------------------------------------------------------------------------------

    def connect_v1(self, session: Session, class_ids: tuple[int, ...]) -> Iterator[None]:
        """Handle a version 1 Connect in parts: declare classes and send the session id."""
        declaration = yield from self._check_declaration(session, class_ids)
        if session.is_closed:
            return
        self._reserve_classes(session, declaration, describe_session(session))
        yield from self._create_in_parts(session, declaration)
        if not session.is_closed:
            content = session.session_id.to_bytes(4, "little")
            self._send_reply(session, frames.encode(frames.CONNECT, content=content))

    def _check_declaration(
        self, session: Session, references: Sequence[int | str | NamedClass]
    ) -> Generator[None, None, Declaration]:
        """Check in parts that a session may declare classes. Changes nothing.

        The result is valid until the next change of the classes. If other requests change them
        during the check, it is repeated. The last attempt is not divided, so that it succeeds.

        Raises:
            RemoteProtocolError: As `ClassRegistry.check_declaration`, `check_class_references` and
                `Quotas.check_new_classes`.
        """
        registry = self._store.class_registry
        for _ in range(DECLARATION_CHECKS_MAX - 1):
            revision, grants = registry.revision, session.grants
            try:
                declaration = yield from self._check_declaration_once(session, references)
            except RemoteProtocolError:
                if (revision, grants) == (registry.revision, session.grants):
                    raise
            else:
                if (revision, grants) == (registry.revision, session.grants):
                    return declaration
            yield
        return run_to_end(self._check_declaration_once(session, references))

    def _check_declaration_once(
        self, session: Session, references: Sequence[int | str | NamedClass]
    ) -> Generator[None, None, Declaration]:
        """Check a declaration in parts, see `ClassRegistry.check_in_parts`."""
        registry = self._store.class_registry
        classes = registry.deduplicate(references)
        address = self.quotas.anonymous_address(session)
        declaration = yield from registry.check_in_parts(classes, address)
        if session.grants is not None:
            divisor = 1 + session.grants.rule_count // RULES_PER_PERMISSION_CHECK
            count = max(1, PERMISSION_CHECKS_PER_TURN // divisor)
            for first in range(0, len(classes), count):
                if len(classes) > count:
                    yield
                check_class_references(session, classes[first : first + count], registry)
        self.quotas.check_new_classes(session, declaration.ids_and_names, declaration.new_ids)
        return declaration

    def declare_classes(
        self, session: Session, references: Sequence[int | str | NamedClass], description: str
    ) -> list[tuple[int, str]]:
        """Declare classes for a session, after `Quotas.check_new_classes`.

        Args:
            session: Session that keeps the classes from being removed.
            references: Classes by id, by name, or as `NamedClass`.
            description: Description of the client.

        Returns:
            (id, name) of each class.

        Raises:
            RemoteProtocolError: As `ClassRegistry.declare_classes`.
        """
        declaration = self._store.class_registry.check_declaration(
            references, self.quotas.anonymous_address(session)
        )
        self._reserve_classes(session, declaration, description)
        for _ in self._create_in_parts(session, declaration):
            pass
        return declaration.ids_and_names

    def _reserve_classes(
        self, session: Session, declaration: Declaration, description: str
    ) -> None:
        """Reserve the classes of a checked declaration; `_create_in_parts` must follow."""
        self._store.class_registry.reserve(
            declaration,
            creator=session.user,
            creator_address=self.quotas.anonymous_address(session),
            created_by=description,
        )

    def _create_in_parts(self, session: Session, declaration: Declaration) -> Iterator[None]:
        """Create the reserved classes of a declaration, even if the session ends meanwhile."""
        registry, is_long = self._store.class_registry, declaration.has_many_steps
        if is_long:
            yield
        for class_id in declaration.last_value_ids:
            cls = registry.classes.get(class_id)
            if cls is not None and cls.spill is None and not cls.has_last_values:
                yield from cls.last_values.scan_in_parts()
                cls.last_values.scan_if_many()
        count_before = registry.created_count
        for class_ids in registry.apply_in_parts(declaration):
            session.count_created_classes(registry.created_count - count_before)
            for class_id in class_ids if not session.is_closed else ():
                if session.add_declared_class(class_id):
                    self._store.classes[class_id].add_session()
            if is_long:
                yield
            count_before = registry.created_count

    def _start_early_subscribers(self, class_id: int) -> None:
        """Subscribe the version 1 sessions that subscribed before this class existed."""
        for early in self._early_subscribers.pop(class_id, {}):
            early.early_class_ids.discard(class_id)
            try:
                self.subscribe_v1(early, class_id)
            except RemoteProtocolError:  # The new class is not permitted; v1 has no error reply.
                self._store.classes[class_id].dropped_counts[Reason.UNAUTHORIZED] += 1

    def check_connect(
        self, session: Session, greeting: ConnectRequested
    ) -> Generator[None, None, CheckedConnect | None]:
        """Check a version 2 Connect in parts, then claim the publisher name of the first one and
        reserve the classes.

        Returns None if the session was closed between the parts. Nothing has changed then. The
        caller ends the former session of the claim, which settles which of its messages are
        stored, and then calls `connect_v2`.
        """
        decoder, request = session.version2, greeting.body
        assert decoder is not None
        check_first_number(request, self._store.class_registry)
        declaration = yield from self._check_declaration(session, request.classes)
        if session.is_closed:
            return None
        claim = None
        if not decoder.is_greeted and request.name is not None:
            claim = self.producer_states.claim_name(
                request.name,
                request.instance or "",
                session.session_id,
                user=session.user,
                address=self.quotas.anonymous_address(session),
            )
        if not decoder.is_greeted:
            session.set_client(request.client)
        name = claim.producer.name if claim is not None else ""
        self._reserve_classes(session, declaration, describe_session(session, name))
        return CheckedConnect(claim, declaration)

    def connect_v2(
        self, session: Session, greeting: ConnectRequested, checked: CheckedConnect
    ) -> Iterator[None]:
        """Handle a version 2 Connect in parts: declare classes, resume the producer, and reply.

        Args:
            session: Session of the peer.
            greeting: The Connect.
            checked: Result of `check_connect`.
        """
        yield from self._create_in_parts(session, checked.declaration)
        if session.is_closed:
            return
        ids_and_names = checked.declaration.ids_and_names
        decoder, request, claim = session.version2, greeting.body, checked.claim
        assert decoder is not None
        store = self._store
        lost, is_first = 0, not decoder.is_greeted
        if is_first:
            producer = decoder.producer
            if claim is not None:
                producer = claim.producer
                lost, must_log = resume_producer(
                    self.producer_states,
                    claim,
                    request,
                    store.class_registry,
                    store.clock.now,
                    self.identity,
                )
                if must_log:
                    self._log_producer(producer)
                if store.commit_log is not None and producer.stored_ahead is not None:
                    # The publisher sends the numbers stored ahead again. They may not be durable
                    # yet, so their confirms wait for the journal.
                    session.record_log_position(store.commit_log.log_position)
            session.start_producer(
                producer,
                can_skip_numbers=request.first is not None,
                heartbeat_seconds=self._negotiate_heartbeat(request.heartbeat),
            )
        settings = self._settings
        reply = ConnectReply(
            session=session.session_id,
            server="simplebus",
            bus=self.identity,
            run=self.run_id,
            classes={name: class_id for class_id, name in ids_and_names if name},
            next=decoder.next_number,
            credit=settings.limits.granted_credit_bytes,
            heartbeat=session.heartbeat_seconds,
            frame_bytes=settings.limits.frame_bytes,
            ack_seconds=settings.ack_timeout * settings.tick_seconds,
            level=store.commit_log.durability if store.commit_log is not None else 0,
            lost=0
            if store.class_registry.is_remote
            else lost,  # Another stateless server may have stored them.
            duplicates=store.class_registry.dedup_window_seconds,
            replies=reply_channel_prefix(None if session.grants is None else session.user),
        )
        frame = frames.encode(
            frames.CONNECT, message_id=greeting.request_number, content=reply.encode()
        )
        if store.class_registry.is_remote and not (is_first or request.classes):
            self._reply_when_caught_up(session, frame)
        else:
            self._send_reply(session, frame)

    def _reply_when_caught_up(self, session: Session, frame: bytes) -> None:
        """Send the reply to a Connect without classes after all messages that the remote storage
        has for the session.
        """
        list_positions = partial(self._remote_positions, session)
        barrier = CatchUpBarrier(session, list_positions, frame)
        session.outbox.defer_reply(barrier.try_reply)

    def _remote_positions(self, session: Session) -> list[tuple[RemoteStorage, Position]]:
        """Return the session's positions in classes with remote storage."""
        found: list[tuple[RemoteStorage, Position]] = []
        for subscription in session.subscriptions.values():
            storage = self._store.classes[subscription.class_id].remote_storage
            if storage is not None:
                found.append((storage, subscription.position))
        return found

    def _log_producer(self, producer: ProducerState) -> None:
        """Record a publisher's instance and next number in the commit log.

        Nothing is recorded if the publisher has numbers stored ahead: they may not be durable, and
        the records of their messages contain them anyway.
        """
        commit_log = self._store.commit_log
        if commit_log is not None and producer.stored_ahead is None:
            commit_log.append_producer_start(producer.key, producer.next_number, producer.instance)

    def _negotiate_heartbeat(self, requested_seconds: float) -> float:
        """Return the shorter of both sides' heartbeat intervals, at least one tick; 0 for none."""
        seconds = min(
            (s for s in (requested_seconds, self._settings.heartbeat_seconds) if s), default=0.0
        )
        return max(seconds, self._settings.tick_seconds) if seconds else 0.0

    # Subscribe -----------------------------------------------------------------------------------

    def subscribe_v1(self, session: Session, class_id: int) -> None:
        """Handle a version 1 Subscribe. It is remembered if the class does not exist yet."""
        if class_id in session.subscriptions:
            return
        cls = self._store.classes.get(class_id)
        if cls is None:
            limit = self._settings.limits.classes
            session.early_class_ids.add(class_id)
            if len(session.early_class_ids) > limit:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_CLASSES,
                    f"the peer subscribed to {len(session.early_class_ids)} classes that do not "
                    f"exist; at most {limit} classes are allowed",
                )
            self._early_subscribers.setdefault(class_id, {})[session] = None
            return
        channel_filter = visibility.create_effective_filter(
            cls, (), visible_scope(session, cls, ())
        )
        window, state = cls.create_window("waiting", channel_filter, self._store.clock.now)
        handover = state.build_handover() if isinstance(state, Position) else state
        policy = subscribe_options.build_delivery_policy(None, cls, self._settings)
        position = Position(
            ring=cls.ring_for_new_position(),
            window=window,
            delivery_policy=policy,
            timer_index_modulus=self._settings.ack_timeout,
            clock=self._store.clock,
            channel_filter=channel_filter,
            changes=self._store.position_changes,
            delayed_wakeups=self._delayed_wakeups,
            failure_reasons=self._store.failure_reasons,
            redeliveries=handover.passed_spans(window),
            class_deliveries=cls.deliveries,
        )
        cls.add_position(position)
        subscription = BrokerSubscription(position, session.outbox, class_id)
        session.subscriptions[class_id] = subscription
        position.delay_redeliveries(handover.requested_delays())
        if cls.purged_sequences:
            apply_purges(cls, position)
        delays = handover.unacked_delays(window, self._store.clock.tick, policy)
        position.attach_later(session.session_id, class_id, delays)
        self._delayed_subscriptions[position] = subscription
        self._start_if_due(position)

    def _start_if_due(self, position: Position) -> None:
        """Start a version 1 subscription when all inherited delays have passed.

        Version 1 cannot mark redeliveries and delivers in order, so all messages wait for the
        longest delay. In version 2 each message has a separate delay.
        """
        if all(due <= self._store.clock.tick for _, _, due in position.inherited_delays):
            subscription = self._delayed_subscriptions.pop(position)
            position.attach(position.session_id, subscription.subscription_number)
            self._store.classes[position.class_id].subscriptions[position] = subscription
            self.notify_position(position)

    def subscribe_v2(self, session: Session, event: SubscribeRequested) -> None:
        """Handle a version 2 Subscribe: resume the named durable or group, or create a position."""
        cls = self._store.require_class(event.class_id)
        number, request = event.subscription_number, event.body
        limit = self._settings.limits.subscriptions
        if number in session.subscriptions:
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_IN_USE, f"subscription {number} already exists in this session"
            )
        if len(session.subscriptions) >= limit:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS, f"a session may have at most {limit} subscriptions"
            )
        subscribe_options.check_subscribe_request(request)
        cls.check_subscribe_request(request)
        scope = visible_scope(session, cls, request.channels)
        check_private_channels(session, cls, request.channels)
        position = self._find_named_position(session, cls, request)
        is_resumed = position is not None
        if position is None:
            position = self._open_position(cls, request, scope)
        elif request.seek:
            self.durable_owners.check_can_change(session, cls, position)
            position = self._replace_position(cls, position, request, scope)
        else:
            self.durable_owners.check_can_resume(session, cls, position, scope)
            visibility.apply_scope(cls, position, scope)
        address = "" if is_resumed else self.quotas.anonymous_address(session)
        self.quotas.assign_owner(position, session.user, address)
        if self.durable_owners.can_change(session, cls, position):
            if is_resumed and not position.has_consumer:
                self._set_delivery_policy(
                    cls,
                    position,
                    subscribe_options.build_delivery_policy(request, cls, self._settings),
                )
            if request.idle_seconds is not None:
                position.set_idle_seconds(request.idle_seconds)
        self._idle_since.pop(position, None)
        if (group := cls.groups.get(position)) is not None:
            session.subscriptions[number] = group.add_member(
                session.outbox,
                number,
                event.request_number,
                request.max_in_flight,
                session.producer_key,
            )
        else:
            position.attach(session.session_id, number)
            subscription = BrokerSubscription(
                position, session.outbox, number, event.request_number
            )
            session.subscriptions[number] = cls.subscriptions[position] = subscription
        send_reply = partial(self._reply_subscribed, session, event, cls, position, is_resumed)
        if cls.is_remote:
            session.outbox.defer_reply(send_reply)
        else:
            send_reply()
        self.notify_position(position)

    def _reply_subscribed(
        self,
        session: Session,
        event: SubscribeRequested,
        cls: MessageClass,
        position: Position,
        is_resumed: bool,
    ) -> bool:
        """Send the Subscribe reply. Returns False while remote storage has not answered yet."""
        existed_remotely = cls.has_remote_position(position)
        if existed_remotely is None:
            return position not in cls.positions  # An ended position was refused already.
        window, request = position.window, event.body
        subscription = session.subscriptions[event.subscription_number]
        is_new = request.seek or not is_resumed
        reply = SubscribeReply(
            cursor=window.floor if is_new and request.start == "last_values" else window.cursor,
            floor=window.floor,
            resumed=is_resumed or existed_remotely,
        )
        frame = frames.encode(
            frames.SUBSCRIBE,
            class_id=cls.class_id,
            message_id=event.request_number,
            timer_index=event.subscription_number,  # See `frames.HEADER`.
            content=reply.encode(),
        )
        self._publisher_confirms.reply_when_durable(
            session, frame, position.log_position, subscription
        )
        return True

    def find_replaced_position(self, request: SubscribeRequested) -> Position | None:
        """Return the position that a Subscribe with `seek` replaces. None without `seek`, or if
        there is no such position.
        """
        cls, body = self._store.classes.get(request.class_id), request.body
        if cls is None or not body.seek:
            return None
        return cls.named_positions.get(cls.position_key(body.durable or "", body.group or ""))

    def _find_named_position(
        self, session: Session, cls: MessageClass, request: SubscribeRequest
    ) -> Position | None:
        """Return the requested durable or group, or None if it does not exist."""
        durable, group = request.durable or "", request.group or ""
        if not (durable or group):
            return None
        position = cls.named_positions.get(cls.position_key(durable, group))
        if position is None:
            self.quotas.check_position_quota(session, cls, is_durable=bool(durable))
            return None
        if position.group != group:
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"the durable {durable!r} exists with the group {position.group!r}, but the "
                f"request has the group {group!r}",
            )
        patterns = position.channel_filter.patterns if position.channel_filter else ()
        if set(patterns) != set(request.channels):
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"{durable or group!r} exists for the channels {list(patterns)}, but the request "
                f"has {list(request.channels)}",
            )
        if position.is_key_ordered != request.by_key:
            is_by_key = {True: "with by_key", False: "without by_key"}
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"the group {group!r} exists {is_by_key[position.is_key_ordered]}, but the "
                f"request is {is_by_key[request.by_key]}",
            )
        if position.session_id >= 0:
            raise RemoteProtocolError(
                Reason.DURABLE_IN_USE,
                f"the durable {durable!r} is held by session {position.session_id}",
            )
        return position

    def _open_position(
        self, cls: MessageClass, request: SubscribeRequest, scope: ClassPermissions | None
    ) -> Position:
        """Create a position for a request."""
        store = self._store
        channel_filter = visibility.create_effective_filter(cls, request.channels, scope)
        try:
            window, state = cls.create_window(request.start, channel_filter, store.clock.now)
        except ValueError as error:
            if channel_filter is not None:
                cls.channels.remove_filter(channel_filter)
            raise RemoteProtocolError(Reason.BAD_REQUEST, str(error)) from None
        names = (request.durable or "", request.group or "")
        policy = subscribe_options.build_delivery_policy(request, cls, self._settings)
        is_key_ordered = bool(request.group and request.by_key)
        if isinstance(state, Position) and (
            is_key_ordered or not state.can_be_taken_over(window, is_shared=bool(request.group))
        ):
            state = state.build_handover()
        position = self._create_position(
            cls,
            names,
            channel_filter,
            policy,
            window,
            [] if isinstance(state, Position) else state.passed_spans(window),
            is_key_ordered=is_key_ordered,
        )
        if isinstance(state, Position):
            position.take_over(state)
        else:
            cls.group_or_position(position).apply_handover(state, self._settings.tick_seconds)
        if cls.purged_sequences:
            apply_purges(cls, position)
        return position

    def restore_position(
        self,
        cls: MessageClass,
        snapshot: PositionSnapshot,
        delivery_policy: DeliveryPolicy,
        window: AckWindow,
        spans: list[Span],
    ) -> Position | None:
        """Create a durable from a snapshot. Returns None if there is no memory for its patterns."""
        channel_filter = cls.channels.add_filter(snapshot.patterns) if snapshot.patterns else None
        if snapshot.patterns and channel_filter is None:
            return None
        names = (snapshot.durable, snapshot.group)
        position = self._create_position(
            cls,
            names,
            channel_filter,
            delivery_policy,
            window,
            spans,
            is_key_ordered=bool(snapshot.group and snapshot.is_key_ordered),
        )
        position.set_idle_seconds(snapshot.idle_seconds)
        self.quotas.assign_owner(position, snapshot.owner, snapshot.owner_address)
        # The clock may have been set back; delays must not grow because of that.
        taken_at = min(snapshot.taken_at, self._store.clock.now)
        cls.group_or_position(position).delay_redeliveries(
            (first, last, taken_at + delay) for first, last, delay in snapshot.delays
        )
        if snapshot.pending_dead_letters:
            position.restore_pending_dead_letters(snapshot.pending_dead_letters)
            self._store.defer_dead_letters(cls, position)
        self._mark_if_unattended(position)
        return position

    def _create_position(
        self,
        cls: MessageClass,
        durable_and_group: tuple[str, str],
        channel_filter: ChannelFilter | None,
        delivery_policy: DeliveryPolicy,
        window: AckWindow,
        spans: list[Span],
        *,
        is_key_ordered: bool,
    ) -> Position:
        """Create a position, and the group that shares it, and add both to `cls`."""
        store, (durable, group_name) = self._store, durable_and_group
        position = Position(
            ring=cls.ring_for_new_position(),
            window=window,
            delivery_policy=delivery_policy,
            timer_index_modulus=self._settings.ack_timeout,
            clock=store.clock,
            channel_filter=channel_filter,
            durable=durable,
            group=group_name,
            is_key_ordered=is_key_ordered,
            changes=store.position_changes,
            delayed_wakeups=self._delayed_wakeups,
            failure_reasons=store.failure_reasons,
            redeliveries=spans,
            class_deliveries=cls.deliveries,
        )
        group: AnyGroup | None = None
        if is_key_ordered:
            group = KeyOrderedGroup(position, store.clock, self._delayed_wakeups)
        elif group_name:
            group = Group(position, store.clock, self._delayed_wakeups)
        self.quotas.add_position(position)
        cls.add_position(position, group)
        self._set_delivery_policy(cls, position, delivery_policy)
        self._log_position_change(position)
        return position

    def _log_position_change(self, position: Position) -> None:
        """Record in the commit log that a durable was created or is being removed."""
        if position.durable and self._store.commit_log is not None:
            log_position = self._store.commit_log.append_durable_change(
                position.class_id, position.durable, position.group
            )
            position.mark_logged(log_position)

    def _replace_position(
        self,
        cls: MessageClass,
        previous: Position,
        request: SubscribeRequest,
        scope: ClassPermissions | None,
    ) -> Position:
        """Create a new position for a durable, then end its previous position, so that no message
        is released between.
        """
        position = self._open_position(cls, request, scope)
        position.set_idle_seconds(previous.idle_seconds)
        self.quotas.assign_owner(position, previous.owner, previous.owner_address)
        self.end_position(previous)
        return position

    def _set_delivery_policy(
        self, cls: MessageClass, position: Position, delivery_policy: DeliveryPolicy
    ) -> None:
        position.set_delivery_policy(delivery_policy)
        cls.limited_positions.pop(position, None)
        if delivery_policy.pending_max is not None:
            cls.limited_positions[position] = None

    # Ending --------------------------------------------------------------------------------------

    def close_session(self, session: Session) -> None:
        """End or detach the positions of a session that has ended."""
        for class_id in session.declared_class_ids:
            self._store.classes[class_id].remove_session()
        for class_id in session.early_class_ids:
            waiting = self._early_subscribers.get(class_id, {})
            waiting.pop(session, None)
            if not waiting:
                self._early_subscribers.pop(class_id, None)
        self._end_subscriptions(session.subscriptions.values())
        session.subscriptions.clear()

    def end_some_subscriptions(self, session: Session) -> bool:
        """End some subscriptions of a session whose peer is gone, and its use of some classes.

        Returns:
            True if the session has more of them.
        """
        session.outbox.stop_sources()
        for _ in range(min(DECLARED_CLASSES_ENDED_PER_TURN, len(session.declared_class_ids))):
            self._store.classes[session.declared_class_ids.pop()].remove_session()
        ended: dict[int, BrokerSubscription | GroupMember] = {}
        message_count = 0
        for number, subscription in session.subscriptions.items():
            if len(ended) >= SUBSCRIPTIONS_ENDED_PER_TURN or message_count > RETURNED_PER_TURN:
                break
            if not subscription.has_other_members and self._store.append_dead_letters_of(
                subscription.position
            ):
                return True
            if isinstance(subscription, GroupMember):
                message_count += subscription.assigned_count
            ended[number] = subscription
        for number in ended:
            del session.subscriptions[number]
        self._end_subscriptions(ended.values())
        return bool(session.subscriptions or session.declared_class_ids)

    def _end_subscriptions(
        self, subscriptions: Collection[BrokerSubscription | GroupMember]
    ) -> None:
        """End or detach subscriptions of a session that has ended, in order.

        The messages of a group are assigned again after its last member of the session has left.
        """
        for subscription in subscriptions:
            if isinstance(subscription, GroupMember):
                subscription.group.announce_leaving(subscription.outbox)
        for subscription in subscriptions:
            if not isinstance(subscription, GroupMember):
                self._detach_subscription(subscription, forget=False)
                continue
            group = subscription.group
            group.remove_member(subscription)
            if not group.has_leaving_members:
                self._update_group_after_leave(group, forget=False)

    def drop_subscription(self, session: Session, number: int) -> None:
        """Remove a subscription from its session; its position is about to end."""
        subscription = session.subscriptions.pop(number)
        subscription.outbox.remove(subscription)
        self._store.classes[subscription.class_id].subscriptions.pop(subscription.position, None)

    def unsubscribe(self, session: Session, event: UnsubscribeRequested) -> None:
        subscription = session.subscriptions.get(event.subscription_number)
        if subscription is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_SUBSCRIPTION,
                f"this session has no subscription {event.subscription_number}",
            )
        forget = event.body.forget
        position = subscription.position
        if forget:
            self.durable_owners.check_can_change(
                session, self._store.classes[subscription.class_id], position
            )
        del session.subscriptions[event.subscription_number]
        if isinstance(subscription, GroupMember):
            subscription.group.remove_member(subscription)
            self._update_group_after_leave(subscription.group, forget=forget)
        else:
            self._detach_subscription(subscription, forget=forget)
        reply = frames.encode(
            frames.UNSUBSCRIBE, class_id=event.subscription_number, message_id=event.request_number
        )
        log_position = position.log_position if forget else 0
        self._publisher_confirms.reply_when_durable(session, reply, log_position, None)

    def _update_group_after_leave(self, group: AnyGroup, *, forget: bool) -> None:
        """End a group without members if it has no durable name or must be forgotten, else continue
        it.
        """
        position, cls = group.position, self._store.classes[group.class_id]
        if not group.members and (forget or not position.durable or cls.is_remote):
            if forget:
                cls.forget_position(position)
            self.end_position(position)
        else:
            self._mark_if_unattended(position)
            group.distribute_messages()

    def _detach_subscription(self, subscription: BrokerSubscription, *, forget: bool) -> None:
        """Remove a subscription. Its position ends, unless it is a durable that stays."""
        position, cls = subscription.position, self._store.classes[subscription.class_id]
        self._store.append_last_dead_letters(position)  # They name the session.
        subscription.outbox.remove(subscription)
        cls.subscriptions.pop(position, None)  # A version 1 subscription may not have started.
        if position.durable and not (forget or cls.is_remote):
            position.detach()
            self._mark_if_unattended(position)
        else:
            if forget:
                cls.forget_position(position)
            self.end_position(position)

    def _mark_if_unattended(self, position: Position) -> None:
        """Record since when a durable has no connected subscription."""
        if not position.has_consumer:
            position.mark_unattended(self._store.clock.now)
            if position.idle_seconds is not None:
                self._idle_since[position] = position.unattended_since

    def tick(self) -> None:
        """Remove expired producer states and idle durables, and start delayed positions."""
        for position in list(self._delayed_subscriptions):
            self._start_if_due(position)
        now = self._store.clock.now
        self.producer_states.expire(now)
        has_appended = False
        for position, since in list(self._idle_since.items()):
            if position.idle_seconds is None or now - since < position.idle_seconds:
                continue
            if self._store.has_dead_letters_to_append(position):
                if has_appended:
                    continue  # Appending some for one position takes long enough.
                has_appended = True
                if self._store.append_dead_letters_of(position):
                    continue  # There are more, and space for them.
            position.drop_all(Reason.IDLE_DURABLE)
            self.end_position(position)

    def end_slow_consumer(self, position: Position) -> None:
        """End a position that exceeds its pending limit.

        Its backlog is dropped, unless it is the last position of the class: then the backlog waits
        for the next subscription.
        """
        if len(self._store.classes[position.class_id].positions) > 1:
            position.count_undelivered(Reason.SLOW_CONSUMER, position.count_pending())
        self.end_position(position)

    def end_position(self, position: Position) -> None:
        """Remove a position for good."""
        cls = self._store.classes[position.class_id]
        self._store.append_last_dead_letters(position)
        self._idle_since.pop(position, None)
        self._delayed_subscriptions.pop(position, None)
        self._log_position_change(position)
        self.quotas.remove_position(position)
        position.mark_removed()
        cls.remove_position(position)
        if cls.backlog_state is not position:
            self._store.ended_spans += position.unacked.pop_unordered_delayed_spans()
        self._store.trim_class(cls)

    def notify_position(self, position: Position) -> None:
        """Mark a position as possibly having something to send."""
        self._store.classes[position.class_id].enqueue_position(position)

    def _send_reply(self, session: Session, frame: bytes) -> None:
        session.outbox.queue_reply(frame)
