"""Which files of a folder decide what the model computes, and one digest of all their bytes.

Every byte is read, so a change of one row of one weight gives another digest. Reading a large model
takes a while, so the digest of each file is remembered under the file's path, size, times and
inode. Called while an engine starts, on its main thread. The threads of this module end before the
call returns.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

import xxhash

from kvtier.config.sizes import as_size

__all__ = ["DigestMemory", "UnknownWeightsError", "digest_of_files", "model_files"]

logger = logging.getLogger(__name__)

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npy", ".npz", ".tensors"})
_BESIDE_WEIGHTS = frozenset({".json", ".py", ".yaml", ".yml"})
"""Files that say how weights are read: quantization, shards, image processing, the model's code."""

_NOT_COMPUTED_WITH = frozenset(
    {
        # Block hashes are made from tokens, so how text becomes tokens does not matter.
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        # How tokens are chosen.
        "generation_config.json",
        # Left over from training; vLLM ignores them, too.
        "all_results.json",
        "eval_results.json",
        "optimizer.bin",
        "optimizer.pt",
        "scaler.pt",
        "scheduler.pt",
        "train_results.json",
        "trainer_state.json",
        "training_args.bin",
    }
)
_NOT_LOADED_FROM = re.compile(
    r"\..*|__pycache__|checkpoint-\d+|global_step\d+|np|original|metal|onnx|openvino|coreml"
    r"|runs|logs|wandb"
)
"""Subfolders that vLLM does not load from: checkpoints, formats of other engines, logs."""

_SEGMENT = 64 << 20
"""Bytes of a segment, which one thread reads. Files are split into segments so that all threads
have work even if a model is a single file."""
_READ = 1 << 20
"""Bytes of one read: few enough to be still in the processor's cache when they are hashed."""
_MAX_THREADS = 16

_RACY_NS = 2_000_000_000
"""A file that was changed less than this many nanoseconds before it was read may change again with
the same time stamp, so its digest is not remembered."""


class UnknownWeightsError(Exception):
    """The weights cannot be identified. The message is one clause that gives the reason."""


def model_files(folder: Path) -> dict[str, Path]:
    """The files in `folder` that decide what the model computes, by name relative to `folder`.

    Links are followed: in a hub cache, all files are links. Raises `UnknownWeightsError` if there
    are no weights, or if the folder cannot be read.
    """
    files = {
        path.relative_to(folder).as_posix(): path
        for path in _walk(folder)
        if path.name not in _NOT_COMPUTED_WITH and path.suffix.lower() in _WEIGHTS | _BESIDE_WEIGHTS
    }
    if not any(path.suffix.lower() in _WEIGHTS for path in files.values()):
        raise UnknownWeightsError(f"{folder} has no weight files")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise UnknownWeightsError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        real = os.path.realpath(parent)
        if real in seen:  # reached again through a link, such as a link back to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _NOT_LOADED_FROM.fullmatch(name))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


@dataclass(frozen=True, slots=True)
class _State:
    """Attributes of a file of which at least one changes when the file does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path | int) -> _State:
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)

    def age_ns(self, now: float) -> int:
        """Nanoseconds from the last change to `now`; negative if the change is later."""
        return int(now * 1e9) - max(self.mtime_ns, self.ctime_ns)


class DigestMemory:
    """Digests of files, kept in a small file in the user's cache folder.

    If the file is missing, damaged or not writable, weights are read again. If two engines write at
    the same time, the entries of one may be lost.
    """

    def __init__(self, path: Path | None, max_entries: int = 4096) -> None:
        """`path`: the file that keeps the digests; None: nothing is kept."""
        self._path = path
        self._max_entries = max_entries
        self._entries = self._read()
        self._added: dict[str, str] = {}

    @classmethod
    def of_the_user(cls) -> DigestMemory:
        """The memory under `XDG_CACHE_HOME`, or `~/.cache`."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            folder = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        except RuntimeError:  # no home
            return cls(None)
        return cls(folder / "kvtier" / "weights.json")

    @property
    def path(self) -> Path | None:
        return self._path

    def recall(self, path: Path, state: _State) -> str | None:
        """The digest that was remembered for this file in the same state, if any."""
        return self._entries.get(_memory_key(path, state))

    def remember(self, path: Path, state: _State, digest: str) -> None:
        """Add a digest; `save` writes it."""
        self._added[_memory_key(path, state)] = digest

    def save(self) -> None:
        """Write the added digests, and keep those that other engines have written meanwhile. A
        failure is logged, not raised."""
        if self._path is None or not self._added:
            return
        entries = self._read() | self._added
        surplus = len(entries) - self._max_entries
        kept = dict(list(entries.items())[max(surplus, 0) :])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".weights-")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"digests": kept}, file)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            logger.info(
                "the digest of the weights could not be saved, so the next start reads the weights "
                "again: %s",
                error,
            )

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            digests = json.loads(self._path.read_bytes())["digests"]
            return {
                key: digest
                for key, digest in digests.items()
                if isinstance(digest, str) and re.fullmatch("[0-9a-f]{32}", digest)
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}


def _memory_key(path: Path, state: _State) -> str:
    return (
        f"{state.size} {state.mtime_ns} {state.ctime_ns} {state.inode} {state.device} "
        f"{os.path.realpath(path)}"
    )


def digest_of_files(
    files: Mapping[str, Path], memory: DigestMemory, *, unchanged_since: float | None = None
) -> str:
    """A digest of the names and bytes of files: 32 hexadecimal digits, independent of the folder.

    `unchanged_since`: the earliest time at which an engine may have loaded the files, in seconds
    since the epoch; None: not known. Raises `UnknownWeightsError` if a file has changed since then,
    changes while it is read, or cannot be read.
    """
    try:
        states = {name: _State.of(path) for name, path in files.items()}
        if unchanged_since is not None:
            for name, state in states.items():
                if state.age_ns(unchanged_since) < 0:
                    raise UnknownWeightsError(
                        f"{files[name]} was changed after this engine had started, so it is not "
                        "known which weights were loaded; start the engine again"
                    )
        digests = {
            name: digest
            for name, path in files.items()
            if (digest := memory.recall(path, states[name])) is not None
        }
        unknown = {name: path for name, path in files.items() if name not in digests}
        if unknown:
            digests |= _read_and_remember(unknown, states, memory)
    except OSError as error:
        raise UnknownWeightsError(f"{error.filename} cannot be read: {error.strerror}") from error
    whole = blake2b(digest_size=16)
    for name in sorted(files):
        whole.update(b"%d " % states[name].size)
        whole.update(bytes.fromhex(digests[name]))
        whole.update(os.fsencode(name) + b"\0")
    return whole.hexdigest()


def _read_and_remember(
    files: Mapping[str, Path], states: Mapping[str, _State], memory: DigestMemory
) -> dict[str, str]:
    size = sum(states[name].size for name in files)
    logger.info(
        "reading %s of weights once, to identify them; %s. Set cache_namespace to skip this",
        as_size(size),
        "the digest cannot be saved"
        if memory.path is None
        else f"the digest is saved in {memory.path}",
    )
    started, clock = time.time(), time.perf_counter()
    digests = _read_all(files, states)
    for name, path in files.items():
        if states[name].age_ns(started) >= _RACY_NS:
            memory.remember(path, states[name], digests[name])
    memory.save()
    seconds = time.perf_counter() - clock
    logger.info("read %s of weights in %.1f s", as_size(size), seconds)
    return digests


def _read_all(files: Mapping[str, Path], states: Mapping[str, _State]) -> dict[str, str]:
    """Digest files in several threads. Raises `UnknownWeightsError` if a file is not in the state
    given in `states`."""
    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(_READ)))

    def read_segment(name: str, start: int) -> bytes:
        buffer = buffers.get()
        try:
            return _read_segment(files[name], start, states[name], buffer)
        finally:
            buffers.put(buffer)

    executor = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-weights")
    try:
        segments = {
            name: [
                executor.submit(read_segment, name, start)
                for start in range(0, states[name].size, _SEGMENT)
            ]
            for name in files
        }
        return {
            name: blake2b(b"".join(part.result() for part in parts), digest_size=16).hexdigest()
            for name, parts in segments.items()
        }
    finally:
        executor.shutdown(cancel_futures=True)


def _read_segment(path: Path, start: int, expected: _State, buffer: memoryview) -> bytes:
    """The digest of one segment. Raises `UnknownWeightsError` if the file is not in the expected
    state before or after the read."""
    digest = xxhash.xxh3_128()
    end = min(start + _SEGMENT, expected.size)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check_unchanged(path, file, expected)
        while start < end:
            count = os.preadv(file, [buffer[: min(_READ, end - start)]], start)
            if count == 0:
                raise UnknownWeightsError(f"{path} became shorter while it was read")
            digest.update(buffer[:count])
            start += count
        _check_unchanged(path, file, expected)
    finally:
        os.close(file)
    return digest.digest()


def _check_unchanged(path: Path, file: int, expected: _State) -> None:
    if _State.of(file) != expected:
        raise UnknownWeightsError(
            f"{path} changed while it was read; start the engine again when it is no longer "
            "written to"
        )
