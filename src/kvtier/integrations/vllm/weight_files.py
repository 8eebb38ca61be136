"""Which files of a model's folder decide what it computes, and one digest of all their bytes.

Every byte is read: an edit of one row of one weight gives another digest. Reading a large model
takes a while, so what a file's bytes gave is remembered, under the file's path, size, times and
inode. Called while an engine starts, on its main thread; the threads used here end with the call.
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

__all__ = ["DigestMemory", "UnknownWeightsError", "digest_of_files", "model_files"]

logger = logging.getLogger(__name__)

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npy", ".npz", ".tensors"})
_BESIDE_WEIGHTS = frozenset({".json", ".py", ".yaml", ".yml"})
"""How weights are read: quantization, shards, image processing, the model's own code."""

_NOT_COMPUTED_WITH = frozenset(
    {
        # Hashes of blocks are made from tokens, so how text becomes tokens does not matter.
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        # How tokens are chosen.
        "generation_config.json",
        # What training leaves behind; vLLM passes over it, too.
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
"""Folders within a model's folder: other checkpoints, other engines' formats, logs."""

_SEGMENT = 64 << 20
"""Bytes that one thread reads in one go. A file is cut into such, so that all threads have work
also when a model is a single file."""
_READ = 1 << 20
"""Bytes of one read: small enough to be still in the processor's cache when they are hashed."""
_MAX_THREADS = 16

_RACY_NS = 2_000_000_000
"""A file changed so shortly before it was read may change again without another time stamp."""


class UnknownWeightsError(Exception):
    """The weights cannot be told from others; the text is one clause that says why."""


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model's folder that decide what it computes, by name relative to `folder`.

    Links are followed: in a hub cache, all files are links. Raises `UnknownWeightsError` if there
    are no weights, or the folder cannot be read.
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
        if real in seen:  # a link back to a folder above
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
    """What changes when a file does."""

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
        """How long it has been like this; negative if a clock is wrong."""
        return int(now * 1e9) - max(self.mtime_ns, self.ctime_ns)


class DigestMemory:
    """What the bytes of files gave, kept in a small file of the user's.

    It only saves time. A missing, damaged or unwritable file means that weights are read again.
    Of two engines that write at once, one may lose what it has added.
    """

    def __init__(self, path: Path | None, max_entries: int = 4096) -> None:
        """`path`: of the file; None: nothing is kept."""
        self._path = path
        self._max_entries = max_entries
        self._entries = self._read()
        self._added: dict[str, str] = {}

    @classmethod
    def of_the_user(cls) -> DigestMemory:
        """Under `XDG_CACHE_HOME`, or `~/.cache`."""
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
        """The digest of the file, if it was remembered in this very state."""
        return self._entries.get(_memory_key(path, state))

    def remember(self, path: Path, state: _State, digest: str) -> None:
        """Add a digest; `save` writes it."""
        self._added[_memory_key(path, state)] = digest

    def save(self) -> None:
        """Write what was added, beside what others have written meanwhile. Never raises."""
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
            logger.info("the digest of the weights could not be remembered: %s", error)

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
    """A digest of names and bytes: 32 hexadecimal digits, the same wherever the files lie.

    `unchanged_since`: when an engine may have begun to load the files. Raises `UnknownWeightsError`
    if one has changed since, changes while it is read, or cannot be read.
    """
    try:
        states = {name: _State.of(path) for name, path in files.items()}
        if unchanged_since is not None:
            for name, state in states.items():
                if state.age_ns(unchanged_since) < 0:
                    raise UnknownWeightsError(
                        f"{files[name]} was changed after this engine had started, and nobody "
                        "knows which weights were loaded; start the engine again"
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
        "reading %s of weights once, to tell them from others; %s. Give cache_namespace to skip it",
        _in_words(size),
        "it cannot be remembered" if memory.path is None else f"remembered in {memory.path}",
    )
    started, clock = time.time(), time.perf_counter()
    digests = _read_all(files, states)
    for name, path in files.items():
        if states[name].age_ns(started) >= _RACY_NS:
            memory.remember(path, states[name], digests[name])
    memory.save()
    seconds = time.perf_counter() - clock
    logger.info("read %s of weights in %.1f s", _in_words(size), seconds)
    return digests


def _read_all(files: Mapping[str, Path], states: Mapping[str, _State]) -> dict[str, str]:
    """Read files in several threads, as they are in `states`; anything else is an error."""
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
    """The digest of some of a file's bytes, if the file is as expected before and after."""
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
            f"{path} changed while it was read; start the engine again when nobody writes to it"
        )


def _in_words(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
