"""How the processes of one test run share its tests."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

_WITH_VLLM = ("tests/e2e/vllm/", "tests/integrations/vllm/")


def is_with_vllm(nodeid: str) -> bool:
    """Whether the test is to run in the process that has imported stock vLLM."""
    return nodeid.startswith(_WITH_VLLM)


class Shares(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Whole files go to whichever process is free, so that all tests of a file run in the order
    that they have alone; those with stock vLLM go to one process, which imports it once."""

    def _split_scope(self, nodeid: str) -> str:
        if is_with_vllm(nodeid):
            return "stock vLLM"
        scope: str = super()._split_scope(nodeid)
        return scope
