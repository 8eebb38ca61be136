"""What Mooncake's library writes to standard error of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiering.mooncake.harness import SEGMENT_BYTES, mooncake_harness
from tests.tiering.mooncake.pool import mooncake_master, segment
from tests.tiering.networks import Namespace


def test_blocks_that_cannot_be_loaded_are_not_logged_one_by_one(
    tmp_path: Path, network: Namespace, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        mooncake_master(tmp_path, network) as master,
        segment(master, SEGMENT_BYTES, network) as lent,
        mooncake_harness(master, segment_bytes=0) as engine,
    ):
        keys = engine.keys(16)
        engine.wait_for(engine.store(keys))
        capfd.readouterr()
        lent.kill()
        (report,) = engine.wait_for(engine.load(keys))
        assert not report.result.success
        assert capfd.readouterr().err == ""
