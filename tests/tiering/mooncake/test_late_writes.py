"""A transfer that has failed by the library's time limit still writes when its host goes on. The
tier gives slots back after it has closed the client, which ends the transfer."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tiering.mooncake.pool import mooncake_master, segment
from tests.tiering.networks import REPO, Namespace, environment_of_tests

NEVER_FORGETS = "-client_ttl=600"


@pytest.mark.soak  # the limit is 60 s
def test_a_host_that_goes_on_after_the_limit_changes_no_slot(
    tmp_path: Path, network: Namespace
) -> None:
    with ExitStack() as stack:
        processes = {}
        for guard in ("guarded", "unguarded"):
            master = stack.enter_context(mooncake_master(tmp_path / guard, network, NEVER_FORGETS))
            lent = stack.enter_context(segment(master, 64 << 20, network))
            words = (master.address, master.metadata_url, str(lent.pid), guard)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.tiering.mooncake.late_host", *words],
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPO,
                env=environment_of_tests(),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes[guard] = process
        found = {guard: each.communicate(timeout=200)[0] for guard, each in processes.items()}
    # The second shows that the first could fail.
    assert found == {"guarded": "untouched\n", "unguarded": "touched\n"}
