"""The wire: commands and answers of one connection, without a copy of the blocks.

A client library connects. From then on, this module alone uses the socket: it sends seals and rows
as they lie in memory, and receives answers straight into rows. Whatever the server sends, it takes
no more memory than the rows, `_BUFFER_BYTES`, and lists of `_MOST_ITEMS` and `_MOST_BYTES`.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from kvtier.tiering.remote.errors import FailureKind, ServerFailure

__all__ = ["TIMEOUT_S", "Answer", "Refusal", "TooLong", "Wire", "command"]

Answer: TypeAlias = "int | bytes | list[Answer] | None"

TIMEOUT_S = 5.0
"""How long the server may send nothing, or take nothing."""
_LONGEST_S = 30.0
"""How long one answer may take in all."""
_BUFFER_BYTES = 4096
"""What is read ahead. Small, because blocks that get into it are copied once more."""
_LONGEST_LINE = 2048
_LONGEST_NUMBER = 20
_MOST_ITEMS = 65_536
"""Numbers, words and lists in one answer. A cluster of 500 servers needs some thousand."""
_MOST_BYTES = 4 << 20
"""All lines and words of one answer."""
_DEEPEST_LIST = 8
_MOST_PARTS = 1024
"""Buffers that one system call takes."""
_JOINED_BYTES = 16 << 10
"""With TLS, buffers up to this size are joined before they are sent."""
_TLS_BYTES = 256 << 10
"""What one call sends with TLS. Python counts its timeout for the whole of it."""
_END = b"\r\n"
_NOTHING = (b"$-1", b"*-1", b"_")


class TooLong(Exception):
    """The server's answer is longer than any block. It was not read, since it may be huge."""


class Refusal(Exception):
    """The server's answer was an error. The connection is still good."""

    @property
    def code(self) -> str:
        """The first word, such as OOM."""
        return str(self).partition(" ")[0]


def command(*words: bytes) -> bytes:
    """A whole command, or its beginning if the last word ends with a length alone."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Wire:
    """One connection. One thread uses it; `interrupt` is for another."""

    def __init__(self, connected: socket.socket) -> None:
        """`connected`: without answers that wait."""
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        if self._is_tls:
            # Python's TLS calls the kernel again after a timeout of the kernel's.
            connected.settimeout(TIMEOUT_S)
        else:
            # The kernel keeps the time. Python's timeout would need one more system call each.
            connected.settimeout(None)
            limit = struct.pack("ll", int(TIMEOUT_S), int(TIMEOUT_S % 1 * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._deadline = 0.0
        self._num_items = self._num_bytes = 0

    # --- send ----------------------------------------------------------------------------------

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send these buffers, one after the other."""
        self._deadline = time.monotonic() + _LONGEST_S
        try:
            if self._is_tls:
                self._send_joined(parts)
            else:
                self._send_gathered([memoryview(part) for part in parts])
        except OSError as error:
            raise _failure_of(error) from None

    def _send_gathered(self, parts: list[memoryview]) -> None:
        while parts:
            self._check_time()
            parts = _after(parts, self._socket.sendmsg(parts[:_MOST_PARTS]))

    def _send_joined(self, parts: Sequence[bytes | memoryview]) -> None:
        joined = bytearray()
        for part in parts:
            if len(joined) + len(part) > _JOINED_BYTES:
                self._send_all(joined)
                joined = bytearray()
            if len(part) <= _JOINED_BYTES:
                joined += part
            else:
                self._send_all(part)
        self._send_all(joined)

    def _send_all(self, part: bytes | bytearray | memoryview) -> None:
        with memoryview(part) as view:
            for start in range(0, len(view), _TLS_BYTES):
                self._check_time()
                self._socket.sendall(view[start : start + _TLS_BYTES])

    # --- receive -------------------------------------------------------------------------------

    def expect_answers(self) -> None:
        """Begin to count the time for the next answers."""
        self._deadline = time.monotonic() + _LONGEST_S

    def read(self) -> int | bytes | None:
        """Return the next answer: a number, a word such as OK, or None for nil. Raises `Refusal` if
        it is an error. Strings of bytes are for `read_into`."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if line in _NOTHING:
            return None
        if kind == b"-":
            raise Refusal(rest.decode("utf-8", "replace"))
        raise _garbage()

    def read_list(self) -> list[Answer]:
        """Return the next answer, a list of numbers, words and lists; an empty one for nil. Raises
        `Refusal` if it is an error."""
        self._num_items = self._num_bytes = 0
        answer = self._read_item(0)
        if answer is None:
            return []
        if not isinstance(answer, list):
            raise _garbage()
        return answer

    def _read_item(self, depth: int) -> Answer:
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        self._num_items += 1
        self._num_bytes += len(line)
        if self._num_items > _MOST_ITEMS or self._num_bytes > _MOST_BYTES or depth > _DEEPEST_LIST:
            raise _garbage()
        if line in _NOTHING:
            return None
        if kind == b"*":
            if not 0 <= _number(rest) <= _MOST_ITEMS:
                raise _garbage()
            return [self._read_item(depth + 1) for _ in range(_number(rest))]
        if kind == b"$":
            return self._read_word(_number(rest))
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if kind == b"-" and not depth:
            raise Refusal(rest.decode("utf-8", "replace"))
        raise _garbage()

    def _read_word(self, length: int) -> bytes:
        if not 0 <= length <= _LONGEST_LINE:
            raise _garbage()
        word = memoryview(bytearray(length))  # may have ends of lines in it
        if rest := self._take_buffered(word):
            self._fill([rest])
        if self._read_line():
            raise _garbage()
        self._num_bytes += length
        return bytes(word)

    def read_into(self, *parts: memoryview) -> int | None:
        """Read the next answer, a string of bytes, into these buffers. Returns its length, or None
        if it is nil. Raises `Refusal` if it is an error, and `TooLong` if it does not fit: then the
        connection is of no more use."""
        line = self._read_line()
        if line in _NOTHING:
            return None
        if line[:1] == b"-":
            raise Refusal(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise _garbage()
        length = left = _number(line[1:])
        if left < 0:
            raise _garbage()
        if left > sum(map(len, parts)):
            raise TooLong
        rest = []
        for part in parts:
            wanted, left = part[:left], max(left - len(part), 0)
            if remaining := self._take_buffered(wanted):
                rest.append(remaining)
        self._fill(rest)
        if self._read_line():
            raise _garbage()
        return length

    def read_expected(self, answers: Sequence[tuple[memoryview, memoryview]]) -> int:
        """Read the next answers, as long as each is a string that fills its two buffers exactly.
        Returns how many were. All buffers may be written; the answer after those that were counted
        is still to be read.

        Receives many answers with one call of the system, which pays for short ones.
        """
        if self._is_tls or self._start < self._end:
            return 0
        self._begin_buffer(b"")
        line = b"$%d\r\n" % sum(map(len, answers[0]))
        frames = memoryview(bytearray(len(answers) * (len(line) + len(_END))))
        parts: list[memoryview] = []
        at = 0
        for header, payload in answers:
            parts += [
                frames[at : at + len(line)],
                header,
                payload,
                frames[at + len(line) : at + len(line) + len(_END)],
            ]
            at += len(line) + len(_END)
        size = sum(map(len, parts[:4]))
        num_bytes = num_good = 0
        left = parts
        while num_good < len(answers):
            count = self._receive_some(left, waits=False)
            left = _after(left, count)
            num_bytes += count
            # An answer that is another one may end the stream, so look at what has come so far.
            while num_good < len(answers) and num_bytes > num_good * size:
                mine = parts[4 * num_good : 4 * num_good + 4]
                come = min(num_bytes - num_good * size, size)
                if mine[0][:come] != line[:come] or (come == size and mine[3] != _END):
                    self._push_back(parts[4 * num_good :], num_bytes - num_good * size)
                    return num_good
                if come < size:
                    break
                num_good += 1
        return num_good

    def _push_back(self, parts: Sequence[memoryview], count: int) -> None:
        """Let the first `count` bytes of these buffers be read again. Nothing is buffered now."""
        content = bytearray()
        for part in parts:
            if len(content) >= count:
                break
            content += part[: count - len(content)]
        self._buffer = memoryview(content + bytes(_BUFFER_BYTES))
        self._start, self._end = 0, count

    def _begin_buffer(self, content: bytes) -> None:
        """Let the buffer begin with this, and have its size again, which `_push_back` exceeds."""
        if len(self._buffer) > _BUFFER_BYTES:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._buffer[: len(content)] = content
        self._start, self._end = 0, len(content)

    def _take_buffered(self, part: memoryview) -> memoryview:
        """Copy what was read ahead. Returns the rest of the part."""
        count = min(self._end - self._start, len(part))
        if count:
            part[:count] = self._buffer[self._start : self._start + count]
            self._start += count
        return part[count:]

    def _fill(self, parts: list[memoryview]) -> None:
        """Receive into these buffers. Nothing is buffered at this time."""
        while parts:
            parts = _after(parts, self._receive_some(parts))

    def _receive_some(self, parts: list[memoryview], *, waits: bool = True) -> int:
        """`waits`: until all of it has come."""
        self._check_time()
        try:
            if self._is_tls:
                count = self._socket.recv_into(parts[0])
            else:
                # All of it at once: each return to Python may wait for the interpreter's lock.
                flags = socket.MSG_WAITALL if waits else 0
                count = self._socket.recvmsg_into(parts[:_MOST_PARTS], 0, flags)[0]
        except OSError as error:
            raise _failure_of(error) from None
        if not count:
            raise ServerFailure(FailureKind.UNREACHABLE, "the server closed the connection")
        return count

    def _read_line(self) -> bytes:
        """The next line without its end."""
        while True:
            end = min(self._end, self._start + _LONGEST_LINE + len(_END))
            buffered = bytes(self._buffer[self._start : end])
            at = buffered.find(_END)
            if at >= 0:
                self._start += at + len(_END)
                return buffered[:at]
            if len(buffered) > _LONGEST_LINE:
                raise _garbage()
            self._begin_buffer(buffered)
            self._check_time()
            try:
                count = self._socket.recv_into(self._buffer[self._end :])
            except OSError as error:
                raise _failure_of(error) from None
            if not count:
                raise ServerFailure(FailureKind.UNREACHABLE, "the server closed the connection")
            self._end += count

    # --- end -----------------------------------------------------------------------------------

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise ServerFailure(FailureKind.SILENT, "the server is too slow")

    def interrupt(self) -> None:
        """Let a call that waits fail now. Any thread."""
        with suppress(OSError):  # not connected any more
            # Not the method of an SSLSocket: it ends the encryption first, under the other thread.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _number(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > _LONGEST_NUMBER:
        raise _garbage()
    return int(text)


def _garbage() -> ServerFailure:
    return ServerFailure(FailureKind.GARBAGE, "the answer is not that of a Valkey or Redis server")


def _failure_of(error: OSError) -> ServerFailure:
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return ServerFailure(FailureKind.SILENT, f"the server sent nothing for {TIMEOUT_S:.0f} s")
    return ServerFailure(
        FailureKind.UNREACHABLE, f"the connection broke ({error.strerror or type(error).__name__})"
    )


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of these buffers behind the first `count` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []
