"""Runs the state machine of a model against a broker that is broken on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Patch = pytest.MonkeyPatch


def assert_model_detects_defect(
    machine: type[RuleBasedStateMachine], model_file: str, *, derandomize: bool = False
) -> None:
    """Run `machine` until it fails, and check that the failure was raised in `model_file`."""
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=3000,  # The run ends with the first failing example.
                stateful_step_count=40,
                phases=[Phase.generate],
                derandomize=derandomize,
                database=None,
                report_multiple_bugs=False,
            ),
        )
    assert Path(caught.traceback[-1].path).name == model_file
