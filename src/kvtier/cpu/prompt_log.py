"""What the prompts of an engine's requests are used for: the hit curve, and a trace of them."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.base import OffloadKey, ReqContext, get_offload_group_idx
from kvtier.config import ConfigError, Problem
from kvtier.cpu.hit_curve import HOST, CurveSize, HitCurve, host_sizes
from kvtier.cpu.prompt_sources import PromptSources
from kvtier.observe.observer import ObservedManager

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.config import OffloadingConfig

__all__ = ["PromptLog", "PromptWatching", "TraceRecorder", "num_prompt_blocks"]

logger = logging.getLogger(__name__)

_WRITTEN_EVERY_S = 0.25
"""Seconds between two writes of a recording."""
_MAX_WAITING = 1 << 18
"""The most blocks and requests that wait for the thread that writes a recording."""
_HASHED_AT_ONCE = 128
"""Blocks that this thread hashes, some 0.1 ms, before it offers Python's lock to others."""
_CLOSE_S = 5.0
_SECRET_BYTES = 32
_ID_SHIFT = 11
"""Ids in a trace have 53 bits: programs that read JSON numbers as doubles keep them."""
_MAX_NAME = 200


class PromptWatching(ObservedManager):
    """A manager whose engine reports prompts. Scheduler thread only."""

    prompts: PromptLog | None = None
    """Where they go. The spec sets it; None: nowhere."""
    sources: PromptSources
    """Counts where their tokens come from."""

    def note_start(
        self,
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_device_tokens: int,
        num_loaded_tokens: int,
    ) -> None:
        tokens = num_prompt_tokens, num_device_tokens, num_loaded_tokens
        self.journal.note_start(req_context, *tokens, self.sources.note_start(*tokens))

    def note_prompt(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_output_tokens: int = 0,
    ) -> None:
        if self.prompts is not None:
            self.prompts.note(keys, req_context, num_prompt_tokens, num_output_tokens)

    def prompt_gauges(self) -> Mapping[str, float]:
        """The metrics of the hit curve and of the recording."""
        return {} if self.prompts is None else self.prompts.gauges

    def reset_cache(self) -> None:
        if self.prompts is not None:
            self.prompts.curve.reset()

    def shutdown(self) -> None:
        super().shutdown()
        if self.prompts is not None:
            self.prompts.close()


class PromptLog:
    """Passes the prompts of an engine on. The methods are for the scheduler's thread."""

    def __init__(self, config: OffloadingConfig, sizes: Sequence[CurveSize] = ()) -> None:
        """`sizes`: of the hit curve, besides those of host memory. Raises `ConfigError` if the file
        of a recording cannot be made."""
        self._tokens = config.tokens_per_chunk
        self._prompt_only = config.options.offload_prompt_only
        num_host = num_prompt_blocks(config, config.num_blocks)
        self.curve = HitCurve([*host_sizes(num_host), *sizes])
        block_bytes = config.row_bytes * config.num_blocks // num_host
        self._about = {
            "engine_id": config.engine_id[:_MAX_NAME],
            "model": (config.model.served_name or config.model.name)[:_MAX_NAME],
            "block_bytes": block_bytes,
            "block_tokens": self._tokens[config.main_group],
        }
        self._recorder = _recorder_of(config, self._about)

    def note(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """A request has ended. The arguments are those of `OffloadingManager.note_prompt`."""
        if req_context.is_prefetch or not keys:
            return
        num_prompt = num_prompt_tokens // self._tokens[get_offload_group_idx(keys[0])]
        if num_prompt >= len(keys):
            num_prompt = len(keys)
        elif self._prompt_only:
            keys = keys[:num_prompt]
        self.curve.note_prompt(keys, num_prompt)
        if self._recorder is not None:
            arrived_s = req_context.created_s
            prompt = keys[:num_prompt]
            self._recorder.note(_Recorded(arrived_s, num_prompt_tokens, num_output_tokens, prompt))

    @property
    def gauges(self) -> Mapping[str, float]:
        """The metrics of the hit curve and of the recording."""
        if self._recorder is None:
            return self.curve.gauges
        return self.curve.gauges | self._recorder.gauges

    def describe_curve(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to the question `curve` of other processes. On any thread."""
        sizes = [
            {
                "place": size.place,
                "is_host": size.place == HOST,
                "factor": size.factor,
                "num_blocks": size.num_blocks,
                "hit_ratio": ratio,
            }
            for size, ratio in self.curve.points()
        ]
        return self._about | {
            "pid": os.getpid(),
            "num_blocks": self.curve.num_blocks,
            "sizes": sizes,
        }

    def close(self) -> None:
        """End the recording. Idempotent."""
        if self._recorder is not None:
            self._recorder.close()


def num_prompt_blocks(config: OffloadingConfig, num_slots: int) -> int:
    """How many blocks of the main group fit into slots beside the same tokens of all groups."""
    tokens = config.tokens_per_chunk
    main = tokens[config.main_group]
    return max(1, int(num_slots / sum(main / its for its in tokens.values())))


# --- recording ----------------------------------------------------------------------------------


class _Recorded(NamedTuple):
    """A request to record."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[OffloadKey]


class TraceRecorder:
    """Writes the requests of an engine into a file that `kvtier replay` and `kvtier plan` read.

    Of a block, the file has a keyed hash. The key is random and is never stored, so nobody can test
    whether a known text is in the trace. `note` is for the scheduler's thread: it neither waits nor
    does I/O. A thread of the recorder writes four times in a second what has ended, in whole lines.
    It ends at the first error, or when the file has its largest size.
    """

    def __init__(self, path: Path, max_bytes: int, about: Mapping[str, Any]) -> None:
        """Make the file. Raises `OSError`, in particular if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._path = path
        self._room = max_bytes
        self._begun_s = time.monotonic()
        self._secret = os.urandom(_SECRET_BYTES)
        self._waiting: deque[_Recorded] = deque()
        # Each of these is written by one thread alone.
        self._num_noted = self._num_taken = 0
        """Blocks and requests given to `note`, and those that the thread has taken."""
        self._num_recorded = self._num_left_out = 0
        """Requests."""
        self._has_ended = False
        self._closing = threading.Event()
        self._header = json.dumps({"kvtier_recording": 1, **about}, separators=(",", ":")) + "\n"
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)
        self._thread.start()

    def note(self, request: _Recorded) -> None:
        """Record a request that has ended. Leaves it out if too many wait to be written."""
        size = 1 + len(request.keys)
        if self._has_ended or self._num_noted + size - self._num_taken > _MAX_WAITING:
            self._num_left_out += 1
            return
        self._num_noted += size
        self._waiting.append(request)

    @property
    def gauges(self) -> dict[str, float]:
        """The metrics of the recording."""
        return {
            "kvtier_cpu_recorded_requests": self._num_recorded,
            "kvtier_cpu_unrecorded_requests": self._num_left_out,
        }

    def close(self) -> None:
        """Write what waits, and end the thread, in at most five seconds. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    # --- the recorder's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            os.fchmod(self._fd, 0o600)  # the umask may have removed bits
            self._write(self._header)
            is_last = False
            while not (is_last or self._has_ended):
                is_last = self._closing.wait(_WRITTEN_EVERY_S)
                while self._waiting and not self._has_ended:
                    request = self._waiting.popleft()
                    self._record(request)
                    self._num_taken += 1 + len(request.keys)
        except OSError as error:
            logger.warning(
                "The recording in %s has ended: %s. The requests until now can be replayed.",
                self._path,
                error.strerror,
            )
        finally:
            self._has_ended = True
            self._waiting.clear()
            os.close(self._fd)

    def _record(self, request: _Recorded) -> None:
        ids: list[int] = []
        for start in range(0, len(request.keys), _HASHED_AT_ONCE):
            ids += map(self._id_of, request.keys[start : start + _HASHED_AT_ONCE])
            time.sleep(0)  # lets the scheduler run
        line = {
            "timestamp": max(0, round(1000 * (request.arrived_s - self._begun_s))),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": ids,
        }
        text = json.dumps(line, separators=(",", ":")) + "\n"
        if len(text) > self._room:
            self._has_ended = True
            logger.info("The recording in %s has reached its largest size and ends.", self._path)
        else:
            self._write(text)
            self._num_recorded += 1

    def _id_of(self, key: OffloadKey) -> int:
        digest = blake2b(key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "big") >> _ID_SHIFT

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        self._room -= len(data)
        while data:
            data = data[os.write(self._fd, data) :]


def _recorder_of(config: OffloadingConfig, about: Mapping[str, Any]) -> TraceRecorder | None:
    """The recorder that the user wants. Raises `ConfigError` if its file cannot be made."""
    path = config.options.record_trace
    if path is None:
        return None
    parallel = config.parallel
    if parallel.data_parallel_size > 1 or parallel.data_parallel_index:  # all have the same path
        path = path.with_name(f"{path.stem}-dp{parallel.data_parallel_index}{path.suffix}")
    sizes = {
        "block_tokens": about["block_tokens"],
        "kv_bytes_per_token": -(-about["block_bytes"] // about["block_tokens"]),
        "host_bytes": config.num_blocks * config.row_bytes,
    }
    try:
        recorder = TraceRecorder(path, config.options.record_trace_bytes, sizes)
    except OSError as error:
        if error.errno == errno.EEXIST:
            # Engines restart with the same configuration, and must not stop for this.
            logger.warning(
                "Nothing is recorded: %s exists. Move it, or give record_trace another name.", path
            )
            return None
        raise ConfigError(
            Problem(
                "record_trace",
                f"{path}, which cannot be made ({error.strerror})",
                "the path of a new file in a directory in which the engine may write",
                "Make the directory, or give another path",
            )
        ) from None
    logger.info("Requests are recorded in %s, without their texts", path)
    return recorder
