"""Makes outcomes independent of the vLLM in PATH where the tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_vllm_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = os.environ["PATH"].split(os.pathsep)
    kept = [folder for folder in folders if not Path(folder, "vllm").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(kept))
