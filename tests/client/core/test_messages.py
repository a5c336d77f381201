"""Payloads of envelopes that look alike: the short way finds what the long one does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.frame_runs import FrameRun
from simplebus.client.core.messages import uniform_envelope_bytes
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from tests.client.core.test_frame_runs import runs_of
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


def run_of(contents: list[bytes], class_id: int = 1) -> FrameRun:
    frames = [
        build_frame(ENVELOPE, class_id=class_id, message_id=number, content=content)
        for number, content in enumerate(contents)
    ]
    (run,) = runs_of([b"".join(frames)])
    return run


@given(
    st.lists(envelopes, min_size=1, max_size=3),
    st.lists(st.sampled_from([b"", b"x", b"12345678", b"<\r\n", b"ends in <"]), max_size=4),
    st.integers(1, 40),
)
def test_a_prefix_that_is_found_is_every_envelopes(
    some: list[Envelope], payloads: list[bytes], times: int
) -> None:
    """Above 50 frames the array path is engaged."""
    pairs = [(about, payload) for about in some for payload in payloads or [b""]] * times
    run = run_of([envelope_batch.encode(about, payload) for about, payload in pairs])
    prefix = uniform_envelope_bytes(run)
    if prefix is not None:
        assert run.contents(0, run.count, skip=prefix) == [payload for _, payload in pairs]
        assert not any(b"<\r\n" in content for content in run.contents(0, run.count))


@given(st.lists(st.binary(max_size=12), min_size=2, max_size=4), st.integers(1, 40))
def test_contents_that_are_no_envelopes_are_left_to_who_can_say_so(
    contents: list[bytes], times: int
) -> None:
    contents = [content.replace(b"<", b"-") for content in contents] * times
    run = run_of(contents)
    prefix = uniform_envelope_bytes(run)
    if prefix is not None:
        assert all(len(content) >= prefix for content in contents)
        assert len({content[0] for content in contents}) == 1


def test_the_usual_run_is_found_to_be_uniform() -> None:
    about = Envelope(channel="a.b", key=b"key", headers=(("n", "v"),), published=7)
    for count in (2, 100):
        for payloads in ([b"16 bytes of load"] * count, [b"x" * n for n in range(count)]):
            run = run_of([envelope_batch.encode(about, payload) for payload in payloads])
            prefix = uniform_envelope_bytes(run)
            assert prefix is not None
            assert run.contents(0, count, skip=prefix) == payloads


def test_a_header_that_looks_like_stuffing_only_costs_the_short_way() -> None:
    run = run_of([envelope_batch.encode(Envelope(channel="a"), b"payload")] * 2, class_id=0x3C0D)
    assert uniform_envelope_bytes(run) is not None
    frames = [
        build_frame(ENVELOPE, class_id=0x3C0D, message_id=0x0A000000 + number, content=b"\0load")
        for number in range(2)
    ]
    (run,) = runs_of([b"".join(frames)])
    assert uniform_envelope_bytes(run) is None
