"""Failure reasons: the last one per message, within limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.failure_reasons import FailureReasons


class FakePosition:
    """The attributes of a position that `FailureReasons` needs."""

    def __init__(self) -> None:
        self.window = AckWindow(floor=0)
        self.window.cursor = 100


reasons = st.tuples(
    st.integers(0, 2), st.integers(0, 30), st.integers(0, 6), st.sampled_from(["", "no", "x" * 90])
)


@given(
    steps=st.lists(st.one_of(reasons, st.integers(0, 2), st.none()), max_size=30),
    count=st.integers(1, 40),
)
def test_last_reason_is_kept_until_the_count_limit(
    steps: list[tuple[int, int, int, str] | int | None], count: int
) -> None:
    positions = [FakePosition() for _ in range(3)]
    errors = FailureReasons(count_max=count)
    model: dict[tuple[int, int], str] = {}
    for step in steps:
        match step:
            case None:
                positions[0].window.ack_range(0, positions[0].window.floor + 3)
                errors.forget_acked()
                while model and (first := next(iter(model)))[1] < positions[first[0]].window.floor:
                    del model[first]
            case int(position_index):
                errors.forget_position(positions[position_index])
                model = {key: text for key, text in model.items() if key[0] != position_index}
            case (position_index, first_one, many, text):
                errors.record(positions[position_index], first_one, first_one + many, text)
                for sequence in range(first_one, first_one + many):
                    if text:
                        model.pop((position_index, sequence), None)
                        model[position_index, sequence] = text
                model = dict(list(model.items())[-count:])
        errors.check()
        assert len(errors) == len(model)
        for (position_index, sequence), text in model.items():
            assert errors.get(positions[position_index], sequence) == text


def test_reasons_are_limited_in_bytes() -> None:
    position, errors = FakePosition(), FailureReasons(bytes_max=3000)
    for sequence in range(10):
        errors.record(position, sequence, sequence + 1, "x" * 100)
        errors.check()
    assert [s for s in range(10) if errors.get(position, s)] == [5, 6, 7, 8, 9]
    errors.record(position, 0, 1 << 40, "of all")
    errors.check()


def test_reasons_of_acked_messages_are_dropped() -> None:
    position, errors = FakePosition(), FailureReasons()
    errors.record(position, 0, 5, "no")
    position.window.ack_range(0, 3)
    errors.forget_acked()
    assert [errors.get(position, sequence) for sequence in range(5)] == ["", "", "", "no", "no"]
    assert len(errors) == 2
