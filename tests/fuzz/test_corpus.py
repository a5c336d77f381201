"""Every fuzz target holds for its first inputs and its corpus."""

from __future__ import annotations

import pytest

from tests.fuzz.run import CORPUS
from tests.fuzz.seeds import build_seeds
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_target_holds_for_its_inputs(target: str) -> None:
    corpus = sorted((CORPUS / target).iterdir())
    assert corpus, f"the corpus of {target} is empty; run python -m tests.fuzz.run {target}"
    for data in (*build_seeds(target), *(each.read_bytes() for each in corpus)):
        TARGETS[target](data)
