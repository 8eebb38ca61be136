"""The self-test finds a wrong byte, and names the ways that it could not test."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier.cpu import gpu_selftest
from kvtier.cpu.cuda.copies import CopyPath, FindGrids, Ticket
from kvtier.cpu.cuda.driver import CudaError, CudaUnavailable
from kvtier.cpu.cuda.page_kernel import KernelUnavailable, Launcher, PageKernel
from kvtier.cpu.cuda.page_table import Pages
from kvtier.cpu.gpu_selftest import _check_all, _is_exact, main
from kvtier.cpu.host_memory import NotEnoughMemory
from tests.gpu.memmove_copies import MemmoveCopies
from tests.gpu.places import CudaPlace, Place, refuse_device_call
from tests.gpu.simulated_cuda import SimulatedKernel

WAYS = [
    "as chosen by size",
    "engines",
    "engines twice",
    "kernel",
    "staged",
    "unpinned memory",
]


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes take long, and much memory."""
    monkeypatch.setattr(gpu_selftest, "PAGE_SIZES", (16 << 10, 64 << 10))
    monkeypatch.setattr(gpu_selftest, "_ODD_SIZES", (16, 4096 + 16))
    monkeypatch.setattr(gpu_selftest, "_UNALIGNED_SIZES", (17,))


# ---------------------------------------------------------------------------------------------
# A wrong byte
# ---------------------------------------------------------------------------------------------

Spoil = Callable[[Pages], int]


class SpoilingCopies(MemmoveCopies):
    """Changes one byte after each copy of a direction."""

    def __init__(self, is_store: bool, spoil: Spoil) -> None:
        super().__init__()
        self._spoiled = is_store
        self._spoil = spoil

    def start(self, find: FindGrids, num_pages: int, *, is_store: bool) -> Ticket:
        (grid,) = find()
        of_job = grid.pages(0, len(grid.blocks))
        ticket = super().start(lambda: [grid], num_pages, is_store=is_store)
        if is_store is self._spoiled:
            byte = ctypes.c_uint8.from_address(self._spoil(of_job))
            byte.value ^= 1
        return ticket


def first_in_slot(pages: Pages) -> int:
    return int(pages.host[0])


def last_in_slot(pages: Pages) -> int:
    return int(pages.host[-1] + pages.sizes[-1]) - 1


def first_on_device(pages: Pages) -> int:
    return int(pages.device[0])


def last_on_device(pages: Pages) -> int:
    return int(pages.device[-1] + pages.sizes[-1]) - 1


@pytest.mark.parametrize("page_bytes", [1, 16, 4099])
def test_right_bytes_are_said_to_be_right(page_bytes: int) -> None:
    taken: Counter[str] = Counter()
    assert _is_exact("cpu", page_bytes, MemmoveCopies().open, taken)
    assert taken.total() > 0


@pytest.mark.parametrize("page_bytes", [1, 16, 4099])
@pytest.mark.parametrize(
    ("is_store", "spoil"),
    [
        (True, first_in_slot),
        (True, last_in_slot),
        (False, first_on_device),
        (False, last_on_device),
        (False, last_in_slot),
    ],
)
def test_a_wrong_byte_is_found(page_bytes: int, is_store: bool, spoil: Spoil) -> None:
    """Also one in a slot that is only read."""
    copies = SpoilingCopies(is_store, spoil)
    assert not _is_exact("cpu", page_bytes, copies.open, Counter())


# ---------------------------------------------------------------------------------------------
# All ways
# ---------------------------------------------------------------------------------------------


def test_every_way_is_tried(device_place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check_all(torch.device(device_place.device)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip().split(":")[0] for line in lines] == WAYS
    assert all("every byte right" in line for line in lines)


def unavailable(*_: object) -> None:
    raise KernelUnavailable("injected")


def test_a_way_that_is_not_to_be_had_is_not_said_to_be_right(
    device_place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kernel in (PageKernel, SimulatedKernel):
        monkeypatch.setattr(kernel, "__init__", unavailable)
    assert _check_all(torch.device(device_place.device)) == 2
    lines = dict(line.strip().split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for way in WAYS:
        if way in {"kernel", "staged"}:
            assert lines[way].startswith("NOT AVAILABLE here, engines instead")
        else:
            assert lines[way].startswith("every byte right")


def test_without_pinning_no_other_way_is_said_to_be_right(
    device_place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_device_call(monkeypatch, "register_host", CudaError("injected"))
    assert _check_all(torch.device(device_place.device)) == len(CopyPath)
    lines = dict(line.strip().split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for way in WAYS[1:-1]:
        assert lines[way].startswith("NOT AVAILABLE here, unpinned memory instead")


def check_ends_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that appears to have a device."""

    def check(_: object) -> int:
        raise error

    monkeypatch.setattr(gpu_selftest, "why_no_gpu", lambda _: None)
    monkeypatch.setattr(gpu_selftest, "_check_all", check)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")


@pytest.mark.parametrize(
    "error",
    [
        NotEnoughMemory("injected"),
        torch.OutOfMemoryError("injected: CUDA out of memory."),
        CudaError("injected: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_wrong_byte(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_ends_with(error, monkeypatch)
    assert main(["--no-bandwidth"]) == 2
    complaint = capsys.readouterr().err
    assert "The self-test cannot run: injected" in complaint
    assert "Give a smaller --mib" in complaint


def test_what_is_no_lack_of_memory_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ends_with(CudaError("injected: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), monkeypatch)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        main(["--no-bandwidth"])


def test_jobs_that_fail_are_counted_and_named(
    device_place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_device_call(monkeypatch, "copy_batch", CudaError("injected"))
    assert _check_all(torch.device(device_place.device)) > 0
    lines = dict(line.strip().split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["engines"].startswith("FAILED with pages of 16384, 65536")
    assert lines["kernel"].startswith("every byte right")
    assert "injected" in caplog.text


def test_wrong_bytes_are_counted_and_named(
    device_place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel leaves out the last block."""
    for kernel in (Launcher, SimulatedKernel):

        def shortened(
            kernel: Any, order: Any, entries: Any, *arguments: Any, launch: Any = kernel.launch
        ) -> None:
            launch(kernel, order, entries[:-8], *arguments)

        monkeypatch.setattr(kernel, "launch", shortened)
    assert _check_all(torch.device(device_place.device)) == 3
    lines = dict(line.strip().split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for way in ("as chosen by size", "kernel", "staged"):
        assert lines[way].startswith("WRONG BYTES with pages of ")
    assert lines["kernel"].endswith("pages of 16384, 65536, 16, 4112 bytes")


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def complaint_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device on this machine" in complaint_of(capsys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for number in ("2", "-1"):
        complaint = complaint_of(capsys, f"--device={number}")
        assert f"--device {number}: torch finds 2 GPUs, counted from 0" in complaint

    def no_driver() -> None:
        raise CudaUnavailable("no driver: injected")

    monkeypatch.setattr(gpu_selftest, "cuda_driver", no_driver)
    assert "no driver: injected" in complaint_of(capsys)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch is not installed" in complaint_of(capsys)


@pytest.mark.parametrize("size", ["63", "0", "-64", "1GiB", "1.5"])
def test_what_cannot_be_measured_with_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main([f"--mib={size}"])
    assert status.value.code == 2
    assert f"'{size}': give a number of MiB, 64 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_wrong", "arguments", "status", "is_measured"),
    [(0, [], 0, True), (0, ["--no-bandwidth"], 0, False), (2, [], 1, False)],
)
def test_what_is_wrong_is_the_exit_status_and_not_measured(
    num_wrong: int,
    arguments: list[str],
    status: int,
    is_measured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[str, int]] = []
    monkeypatch.setattr(gpu_selftest, "why_no_gpu", lambda _: None)
    monkeypatch.setattr(gpu_selftest, "_check_all", lambda _: num_wrong)
    monkeypatch.setattr(
        gpu_selftest, "_measure_all", lambda device, size: measured.append((str(device), size))
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    assert main([*arguments, "--device=3", "--mib=64"]) == status
    assert measured == ([("cuda:3", 64 << 20)] if is_measured else [])


def test_the_command_on_a_device(
    device_place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not isinstance(device_place, CudaPlace):
        pytest.skip("the simulated one has no bus to measure")
    assert main(["--mib", "64"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("every byte right") == len(WAYS)
    assert printed.count("100%") >= 3
    for layout in ("16 KiB", "2048 KiB", "64 KiB x 32"):
        assert layout in printed
    for kernel in (PageKernel, SimulatedKernel):
        monkeypatch.setattr(kernel, "__init__", unavailable)
    assert main(["--mib", "64"]) == 1
    assert "GB/s" not in capsys.readouterr().out
