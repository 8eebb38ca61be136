"""The wire: commands and answers of one connection, without a copy of the blocks.

A client library connects and logs in. From then on, this module alone uses the socket: it sends
seals and rows as they lie in memory, and receives answers straight into rows.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from kvtier.tiering.remote.errors import FailureKind, ServerFailure

__all__ = ["TIMEOUT_S", "Refusal", "TooLong", "Wire", "command"]

TIMEOUT_S = 5.0
"""How long the server may send nothing, or take nothing."""
_LONGEST_S = 30.0
"""How long one answer may take in all."""
_BUFFER_BYTES = 4096
"""What is read ahead. Small, because blocks that get into it are copied once more."""
_LONGEST_LINE = 2048
_MOST_WORDS = 64
_MOST_PARTS = 1024
"""Buffers that one system call takes."""
_JOINED_BYTES = 16 << 10
"""With TLS, buffers up to this size are joined before they are sent."""
_END = b"\r\n"


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
        """`connected`: logged in, without answers that wait."""
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        # The kernel keeps the time. A timeout of Python's would need one more system call each.
        connected.settimeout(None)
        limit = struct.pack("ll", int(TIMEOUT_S), int(TIMEOUT_S % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._deadline = 0.0

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
            count = self._socket.sendmsg(parts[:_MOST_PARTS])
            position = 0
            while position < len(parts) and count >= len(parts[position]):
                count -= len(parts[position])
                position += 1
            del parts[:position]
            if count:
                parts[0] = parts[0][count:]

    def _send_joined(self, parts: Sequence[bytes | memoryview]) -> None:
        joined = bytearray()
        for part in parts:
            if len(joined) + len(part) <= _JOINED_BYTES:
                joined += part
                continue
            self._check_time()
            self._socket.sendall(joined)
            joined = bytearray()
            if len(part) <= _JOINED_BYTES:
                joined += part
            else:
                self._socket.sendall(part)
        self._socket.sendall(joined)

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
        if line in (b"$-1", b"*-1", b"_"):
            return None
        if kind == b"-":
            raise Refusal(rest.decode("utf-8", "replace"))
        raise _garbage()

    def read_pairs(self) -> dict[bytes, bytes]:
        """Return the next answer, a list of names and values. Raises `Refusal` if it is an
        error."""
        line = self._read_line()
        if line[:1] == b"-":
            raise Refusal(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"*" or not 0 <= _number(line[1:]) <= _MOST_WORDS:
            raise _garbage()
        words = [self._read_word() for _ in range(_number(line[1:]))]
        return dict(zip(words[::2], words[1::2], strict=False))

    def _read_word(self) -> bytes:
        line = self._read_line()
        if line[:1] != b"$" or not 0 <= _number(line[1:]) <= _LONGEST_LINE:
            raise _garbage()
        word = self._read_line()
        if len(word) != _number(line[1:]):
            raise _garbage()
        return word

    def read_into(self, *parts: memoryview) -> int | None:
        """Read the next answer, a string of bytes, into these buffers. Returns its length, or None
        if it is nil. Raises `Refusal` if it is an error, and `TooLong` if it does not fit: then the
        connection is of no more use."""
        line = self._read_line()
        if line in (b"$-1", b"_"):
            return None
        if line[:1] == b"-":
            raise Refusal(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise _garbage()
        length = left = _number(line[1:])
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
            count = self._receive_some(parts)
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = parts[0][count:]

    def _receive_some(self, parts: list[memoryview]) -> int:
        self._check_time()
        try:
            if self._is_tls:
                count = self._socket.recv_into(parts[0])
            else:
                # All of it at once: each return to Python may wait for the interpreter's lock.
                count = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise _failure_of(error) from None
        if not count:
            raise ServerFailure(FailureKind.UNREACHABLE, "the server closed the connection")
        return count

    def _read_line(self) -> bytes:
        """The next line without its end."""
        while True:
            buffered = bytes(self._buffer[self._start : self._end])
            at = buffered.find(_END)
            if at >= 0:
                self._start += at + len(_END)
                return buffered[:at]
            if len(buffered) > _LONGEST_LINE:
                raise _garbage()
            self._buffer[: len(buffered)] = buffered
            self._start, self._end = 0, len(buffered)
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
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise _garbage() from None


def _garbage() -> ServerFailure:
    return ServerFailure(FailureKind.GARBAGE, "the server's answer is none")


def _failure_of(error: OSError) -> ServerFailure:
    if isinstance(error, (BlockingIOError, TimeoutError, ssl.SSLWantReadError)):
        return ServerFailure(FailureKind.SILENT, f"the server sent nothing for {TIMEOUT_S:.0f} s")
    return ServerFailure(
        FailureKind.UNREACHABLE, f"the connection broke ({error.strerror or type(error).__name__})"
    )
