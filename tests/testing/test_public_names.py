"""The public names of `kvtier.testing`, and the cost of importing them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvtier.testing


@pytest.mark.parametrize("name", kvtier.testing.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(kvtier.testing, name).__name__ == name
    assert name in dir(kvtier.testing)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'TierConformity'"):
        getattr(kvtier.testing, "TierConformity")  # noqa: B009


WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
import kvtier.testing.faults
from kvtier.testing import ExampleBacking, FaultyTier, TierHarness, inflict
try:
    from kvtier.testing import TierConformance
except ImportError as error:
    print(error)
"""


def test_faults_and_the_harness_need_no_pytest() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST], check=True, capture_output=True, text=True
    )
    assert ran.stdout == "TierConformance needs pytest: pip install 'kvtier[testing]'\n"
