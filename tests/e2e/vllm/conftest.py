"""Models for stock vLLM, written once, and its answers without kvtier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.testing.vllm.tiny_model import GEMMA3_HYBRID, LLAMA
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.subject import Subject


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def llama(models: Path) -> Path:
    """A small model of one KV-cache group."""
    return LLAMA.write(models / "llama")


@pytest.fixture(scope="session")
def hybrid(models: Path) -> Path:
    """A small model of three KV-cache groups, two of them with a sliding window."""
    return GEMMA3_HYBRID.write(models / "hybrid")


@pytest.fixture(scope="session")
def llama_alone(vllm: VLLM, llama: Path) -> Iterator[Reference]:
    """The answers of vLLM without kvtier."""
    with closing(Reference(vllm, llama)) as reference:
        yield reference


@pytest.fixture(scope="session")
def hybrid_alone(vllm: VLLM, hybrid: Path) -> Iterator[Reference]:
    """The answers of vLLM without kvtier, with the hybrid model."""
    with closing(Reference(vllm, hybrid)) as reference:
        yield reference


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """`llama` or `hybrid`, named by the test's parameter."""
    return Subject(
        {"llama": LLAMA, "hybrid": GEMMA3_HYBRID}[request.param],
        request.getfixturevalue(request.param),
        request.getfixturevalue(f"{request.param}_alone"),
    )
