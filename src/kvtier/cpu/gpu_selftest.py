"""Tests the copies between the GPU and host memory on this machine.

Every way to copy is checked bit for bit, with pages of many sizes. Then the bandwidth is measured
for each page size and compared with a plain copy of pinned memory. Exits with 1 if a byte was
wrong, a copy failed or a way is not available on this machine, and with 2 if there is no usable GPU
or too little memory.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtier.cpu.cuda.driver import CudaUnavailable, cuda_driver
from kvtier.cpu.host_memory import NotEnoughMemory

if TYPE_CHECKING:
    from kvtier.cpu.cuda.copies import Copies, CopyPath
    from kvtier.cpu.cuda.trial import Bandwidth
    from kvtier.cpu.shared_offload_region import SharedOffloadRegion

__all__ = ["BriefCheck", "check_briefly", "main", "why_no_gpu"]

MIB = 1 << 20
PAGE_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
_LAYOUTS = (*((size, 1) for size in PAGE_SIZES), (16 << 10, 32), (64 << 10, 32))
"""Pairs of a page size and a number of tensors. A block has one page in each tensor."""
_BRIEF_SIZES, _BRIEF_LAYOUT = (16 << 10, 1 << 20), (64 << 10, 32)
_ODD_SIZES = (16, 48, 4096 - 16, 4096 + 16, 20_000, 100_000 + 16)
_FLOPS_PER_CLOCK = {
    **dict.fromkeys(((7, 0), (7, 5), (8, 6), (8, 9), (12, 0)), 1024),
    (8, 0): 2048,
    (9, 0): 4096,
    (10, 0): 8192,
}
"""Dense 16-bit operations per clock of one multiprocessor, by compute capability. From NVIDIA's
figures for V100, T4, A40, L40S, RTX 5090, A100, H100 and B200."""
_UNALIGNED_SIZES = (1, 17, 4099)
_SMALL_PAGE_BYTES = 64
_UNPINNED = "unpinned memory"
_CHECKED_MIB, _CHECKED_MIB_OF_GPU = 144, 280
"""MiB of host memory and of GPU memory that the check of the largest pages takes."""
_LEAST_MIB = 64
_NUM_TENSORS = 3
_FEW_BLOCKS, _MANY_BLOCKS = 24, 8_400
"""Number of blocks in a check with large pages, and with small pages. A job copies half of them.
Half of `_MANY_BLOCKS` is more than one launch of the kernel can copy."""


def main(arguments: list[str] | None = None) -> int:
    """Run the self-test with these command-line arguments. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.cpu.gpu_selftest", description=__doc__)
    parser.add_argument("--device", type=_number, default=0, help="number of the GPU (default 0)")
    parser.add_argument(
        "--mib",
        type=_mebibytes,
        default=1024,
        help="MiB to measure the bandwidth with (default 1024). Takes 3 times as much host memory, "
        "a third of it in /dev/shm, and a little over 2 times as much GPU memory",
    )
    parser.add_argument("--no-bandwidth", action="store_true", help="only check the bytes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if (reason := why_no_gpu(options.device)) is not None:
        print(f"The self-test cannot run: {reason}", file=sys.stderr)
        return 2
    import torch

    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    try:
        with _messages_once():
            wrong = _check_all(device)
        if wrong == 0 and not options.no_bandwidth:
            _measure_all(device, options.mib * MIB)
    except RuntimeError as error:
        if not isinstance(error, NotEnoughMemory) and "out of memory" not in str(error).lower():
            raise
        print(
            f"The self-test cannot run: {error}\nThe checks need {_CHECKED_MIB} MiB in /dev/shm "
            f"and {_CHECKED_MIB_OF_GPU} MiB of GPU memory; measuring the bandwidth needs more. "
            "Give a smaller --mib, or --no-bandwidth. Another process may hold the GPU's memory",
            file=sys.stderr,
        )
        return 2
    return 1 if wrong else 0


def _number(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give the GPU's number alone, such as 0")
    return int(text)


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) < _LEAST_MIB:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number of MiB, {_LEAST_MIB} or more, such as 1024"
        )
    return int(text)


@contextmanager
def _messages_once() -> Iterator[None]:
    """Log each message once, although the checks open many workers that log the same."""
    seen: set[object] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_new = record.msg not in seen
        seen.add(record.msg)
        return is_new

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)


def why_no_gpu(device: int) -> str | None:
    """The reason why GPU number `device` cannot be used, with the remedy; None if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed. Install the build of it that fits your CUDA driver"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device on this machine. Is it a CPU build of "
            "torch? Otherwise look at nvidia-smi; in Docker give --gpus all; CUDA_VISIBLE_DEVICES "
            "may hide it"
        )
    if not 0 <= device < torch.cuda.device_count():
        return (
            f"--device {device}: torch finds {torch.cuda.device_count()} GPUs, counted from 0. "
            "CUDA_VISIBLE_DEVICES may hide others"
        )
    try:
        cuda_driver()
    except CudaUnavailable as error:
        return str(error)
    return None


class BriefCheck(NamedTuple):
    """What `check_briefly` has found."""

    device: str
    """The name of the GPU."""
    is_exact: bool
    loaded: Bandwidth
    """Of scattered pages."""
    plain: Bandwidth
    """Of a plain copy of pinned memory."""
    peak_flops: float | None
    """Operations per second with 16-bit numbers at the highest clock. None: not known."""


def check_briefly(num_bytes: int) -> BriefCheck:
    """Check and measure the copies of the first GPU in the ways that a worker chooses, for a few
    seconds. `num_bytes`: bytes to measure with. Raises `RuntimeError`."""
    import torch

    from kvtier.cpu.cuda.trial import measure, measure_plain_copy

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    sizes = (*_BRIEF_SIZES, *_ODD_SIZES)
    is_exact = all(_is_exact(device, size, None, Counter()) for size in sizes)
    return BriefCheck(
        torch.cuda.get_device_name(device),
        is_exact,
        measure(device, *_BRIEF_LAYOUT, num_bytes),
        measure_plain_copy(device, num_bytes),
        _peak_flops(torch.cuda.get_device_properties(device)),
    )


def _peak_flops(properties: Any) -> float | None:
    per_clock = _FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    clock_khz = getattr(properties, "clock_rate", None)  # not in every release of torch
    if per_clock is None or not clock_khz:
        return None
    return float(properties.multi_processor_count * clock_khz * 1e3 * per_clock)


def _check_all(device: Any) -> int:
    """Check every way to copy. Returns the number of problems."""
    from kvtier.cpu.cuda.trial import JobsFailed

    wrong = 0
    for name, sizes, open_copies in _ways():
        began = time.perf_counter()
        taken: Counter[str] = Counter()
        bad, failed = [], []
        for size in sizes:
            try:
                if not _is_exact(device, size, open_copies, taken):
                    bad.append(size)
            except JobsFailed:
                failed.append(size)
        took = time.perf_counter() - began
        if failed:
            wrong += 1
            print(f"  {name}: FAILED with pages of {', '.join(map(str, failed))} bytes: see above")
        if bad:
            wrong += 1
            print(f"  {name}: WRONG BYTES with pages of {', '.join(map(str, bad))} bytes")
        elif open_copies is not None and not failed and set(taken) != {name}:
            wrong += 1
            print(f"  {name}: NOT AVAILABLE here, {', '.join(taken)} instead: see the warnings")
        elif not failed:
            print(f"  {name}: every byte right, {len(sizes)} page sizes ({took:.1f} s)", flush=True)
    return wrong


def _ways() -> Iterator[tuple[str, tuple[int, ...], Callable[..., Copies] | None]]:
    from kvtier.cpu.cuda.copies import CopyPath
    from kvtier.cpu.gpu_worker import open_unpinned

    yield "as chosen by size", (*PAGE_SIZES, *_ODD_SIZES, *_UNALIGNED_SIZES), None
    for path in CopyPath:
        name = path.words
        unaligned = _UNALIGNED_SIZES if path in {CopyPath.ENGINES, CopyPath.ENGINES_TWICE} else ()
        yield name, (*PAGE_SIZES, *_ODD_SIZES, *unaligned), _always(path)
    yield _UNPINNED, (*PAGE_SIZES, *_ODD_SIZES, *_UNALIGNED_SIZES), open_unpinned


def _always(path: CopyPath) -> Callable[[Any, SharedOffloadRegion, ExitStack], Copies]:
    from kvtier.cpu.gpu_worker import open_pinned

    return lambda device, region, undo: open_pinned(device, region, undo, lambda _: path)


def _is_exact(
    device: Any,
    page_bytes: int,
    open_copies: Callable[..., Copies] | None,
    taken: Counter[str],
) -> bool:
    """True if scattered blocks are stored and loaded correctly, and no other byte changes.

    Adds to `taken` the copy paths that the jobs used.
    """
    from kvtier.cpu.cuda.streams import StreamCopies
    from kvtier.cpu.cuda.trial import open_trial

    order = np.random.default_rng(page_bytes)
    num_blocks = _MANY_BLOCKS if page_bytes <= _SMALL_PAGE_BYTES else _FEW_BLOCKS
    with open_trial(device, page_bytes, _NUM_TENSORS, num_blocks, open_copies) as trial:
        half = num_blocks // 2
        trial.rows[:] = 0xEE
        expected = np.array(trial.rows)
        before = [tensor.cpu().numpy().copy() for tensor in trial.tensors]
        blocks = order.permutation(num_blocks)[:half]
        slots = order.permutation(num_blocks)[:half]
        trial.finish([trial.submit(True, blocks, slots)])
        for index, array in enumerate(before):
            start = index * page_bytes
            expected[slots, start : start + page_bytes] = array[blocks]
        if not np.array_equal(trial.rows, expected):
            return False
        targets = order.permutation(num_blocks)[:half]
        trial.finish([trial.submit(False, targets, slots)])
        copies = trial.worker.copies
        if isinstance(copies, StreamCopies):
            taken.update({path.words: count for path, count in copies.taken.items()})
        else:
            taken[_UNPINNED] += 1
        for tensor, array in zip(trial.tensors, before, strict=True):
            array[targets] = array[blocks]
            if not np.array_equal(tensor.cpu().numpy(), array):
                return False
        if not np.array_equal(trial.rows, expected):  # a load must not change the slots
            return False
    return True


def _measure_all(device: Any, num_bytes: int) -> None:
    from kvtier.cpu.cuda.copies import choose_path
    from kvtier.cpu.cuda.trial import measure, measure_plain_copy

    plain = measure_plain_copy(device, num_bytes)
    print(f"\nGB/s with {num_bytes // MIB} MiB of scattered pages, and the share of a plain copy")
    print("          page      to the GPU    from the GPU    both at once  copied by")
    print(
        f"  {'plain':>12}  {plain.load:8.1f}  100%  {plain.store:8.1f}  100%  "
        f"{plain.both:8.1f}  100%"
    )
    for page_bytes, num_tensors in _LAYOUTS:
        got = measure(device, page_bytes, num_tensors, num_bytes)
        run_bytes = page_bytes * num_tensors
        path = choose_path(page_bytes, num_bytes // page_bytes, run_bytes)
        name = f"{page_bytes >> 10} KiB" + (f" x {num_tensors}" if num_tensors > 1 else "")
        print(
            f"  {name:>12}  {got.load:8.1f} {got.load / plain.load:5.0%}  "
            f"{got.store:8.1f} {got.store / plain.store:5.0%}  "
            f"{got.both:8.1f} {got.both / plain.both:5.0%}  {path.words}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
