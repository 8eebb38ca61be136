"""The kernel compiles for every device it may meet, and it is said when it cannot be."""

from __future__ import annotations

import sys

import pytest

from kvtier.cpu.cuda.page_kernel import KernelUnavailable, _machine_code

NO_COMPILER = "no CUDA compiler: install the extra `cuda`"


def require_compiler() -> None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        pytest.skip(NO_COMPILER)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_kernel_compiles(capability: tuple[int, int]) -> None:
    require_compiler()
    code = _machine_code(capability, 64, 4000)
    assert code.startswith(b"\x7fELF")
    for name in (b"copy_few_blocks", b"copy_many_blocks"):
        assert name in code


def test_a_device_that_the_compiler_does_not_know_is_named() -> None:
    require_compiler()
    with pytest.raises(KernelUnavailable, match="NVRTC"):
        _machine_code((1, 0), 64, 4000)


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelUnavailable, match="extra `cuda`"):
        _machine_code((1, 1), 64, 4000)
