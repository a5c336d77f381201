"""Tests of batches with uniform envelopes: the fast path finds the same payloads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.frame_runs import FrameRun
from simplebus.client.core.messages import uniform_envelope_bytes
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from tests.client.core.test_frame_runs import split_runs
from tests.support.oracles import build_frame

ENVELOPE = ord("5")

envelopes = st.builds(
    Envelope,
    channel=st.sampled_from(["", "a", "a.b", "x.y.z"]),
    key=st.sampled_from([b"", b"k", b"longer", b"<\r\n"]),
    headers=st.sampled_from([(), (("n", "v"),), (("n", "w"), ("m", ""))]),
    published=st.sampled_from([None, 5, 0x3C0D0A3E]),
    expires_ms=st.sampled_from([None, 0, 9]),
    not_before_ms=st.sampled_from([None, 1]),
)


def create_run(contents: list[bytes], class_id: int = 1) -> FrameRun:
    frames = [
        build_frame(ENVELOPE, class_id=class_id, message_id=number, content=content)
        for number, content in enumerate(contents)
    ]
    (run,) = split_runs([b"".join(frames)])
    return run


@given(
    st.lists(envelopes, min_size=1, max_size=3),
    st.lists(st.sampled_from([b"", b"x", b"12345678", b"<\r\n", b"ends in <"]), max_size=4),
    st.integers(1, 40),
)
def test_uniform_envelope_length_applies_to_every_envelope(
    drawn_envelopes: list[Envelope], payloads: list[bytes], times: int
) -> None:
    """More than 50 frames take the numpy path."""
    pairs = [
        (envelope, payload) for envelope in drawn_envelopes for payload in payloads or [b""]
    ] * times
    run = create_run([envelope_batch.encode(envelope, payload) for envelope, payload in pairs])
    prefix = uniform_envelope_bytes(run)
    if prefix is not None:
        assert run.contents(0, run.count, skip=prefix) == [payload for _, payload in pairs]
        assert not any(b"<\r\n" in content for content in run.contents(0, run.count))


@given(st.lists(st.binary(max_size=12), min_size=2, max_size=4), st.integers(1, 40))
def test_invalid_envelopes_are_not_uniform(contents: list[bytes], times: int) -> None:
    contents = [content.replace(b"<", b"-") for content in contents] * times
    run = create_run(contents)
    prefix = uniform_envelope_bytes(run)
    if prefix is not None:
        assert all(len(content) >= prefix for content in contents)
        assert len({content[0] for content in contents}) == 1


def test_typical_run_is_uniform() -> None:
    envelope = Envelope(channel="a.b", key=b"key", headers=(("n", "v"),), published=7)
    for count in (2, 100):
        for payloads in ([b"16 bytes of load"] * count, [b"x" * n for n in range(count)]):
            run = create_run([envelope_batch.encode(envelope, payload) for payload in payloads])
            prefix = uniform_envelope_bytes(run)
            assert prefix is not None
            assert run.contents(0, count, skip=prefix) == payloads


def test_header_that_looks_like_stuffing_only_disables_the_fast_path() -> None:
    run = create_run(
        [envelope_batch.encode(Envelope(channel="a"), b"payload")] * 2, class_id=0x3C0D
    )
    assert uniform_envelope_bytes(run) is not None
    frames = [
        build_frame(ENVELOPE, class_id=0x3C0D, message_id=0x0A000000 + number, content=b"\0load")
        for number in range(2)
    ]
    (run,) = split_runs([b"".join(frames)])
    assert uniform_envelope_bytes(run) is None
