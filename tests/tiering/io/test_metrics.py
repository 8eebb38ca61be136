"""I/O errors are all counted, and each kind is logged once. Unexpected errors are logged once a
minute."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from kvtier.tiering.io.metrics import ErrorLog, UnexpectedErrors, error_counter, error_counters


def remedy_for(error: int) -> str:
    return f"do something about {error}"


def test_errors_are_counted_until_they_are_taken() -> None:
    log = ErrorLog(Path("/a/path"), remedy_for)
    log.note(errno.EIO, is_write=True)
    log.note(errno.EIO, is_write=False)
    log.note(errno.ENOSPC, is_write=True)
    log.note(9999, is_write=True)
    assert log.take() == {"EIO": 2, "ENOSPC": 1, "9999": 1}
    assert log.take() == {}
    log.note(errno.EIO, is_write=True)
    assert log.take() == {"EIO": 1}


def test_each_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = ErrorLog(Path("/a/path"), remedy_for)
    for _ in range(3):
        log.note(errno.EROFS, is_write=True)
        log.note(errno.EIO, is_write=False)
        log.take()
    first, second = caplog.messages
    assert first.startswith(
        f"/a/path: a write has failed: Read-only file system (EROFS): {remedy_for(errno.EROFS)}. "
    )
    assert second.startswith(
        f"/a/path: a read has failed: Input/output error (EIO): {remedy_for(errno.EIO)}. "
    )


def test_the_file_is_named_where_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    log = ErrorLog(Path("/a/path"), remedy_for)
    log.note(errno.EACCES, is_write=False, path="/a/path/with a\nforged line\x1b[2J")
    [message] = caplog.messages
    assert message.startswith("/a/path/with a\\nforged line\\x1b[2J: a read has failed: ")


def test_no_error_is_lost_between_threads() -> None:
    log = ErrorLog("somewhere", remedy_for)

    def note_many() -> None:
        for _ in range(500):
            log.note(errno.EIO, is_write=True)

    threads = [threading.Thread(target=note_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    total = 0
    while any(thread.is_alive() for thread in threads):
        total += log.take()["EIO"]
    for thread in threads:
        thread.join()
    assert total + log.take()["EIO"] == 2000


def test_an_unexpected_error_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = UnexpectedErrors("/a/path\n", "nothing is stored")

    def fail_with(error: Exception) -> None:
        try:
            raise error
        except Exception as raised:
            log.log(raised)

    for number in range(100):  # the same error, though it names another block each time
        fail_with(KeyError(number))
    (message,) = caplog.messages
    assert message.startswith("/a/path\\n: unexpected error: nothing is stored. Logged at most ")
    assert "KeyError: 0" in caplog.text
    fail_with(ValueError("another one"))
    assert len(caplog.messages) == 2
    try:
        _ = 1 / 0
    except ZeroDivisionError as raised:
        log.log(raised)
    assert len(caplog.messages) == 3
    now += 59.0
    fail_with(KeyError("again"))
    assert len(caplog.messages) == 3
    now += 1.0
    fail_with(KeyError("a minute later"))
    assert len(caplog.messages) == 4


@pytest.mark.parametrize(
    "kind",
    [
        "EIO",
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EMFILE",
        "EACCES",
        "ENODATA",
        "ENOENT",
        "ESTALE",
        "ETIMEDOUT",
    ],
)
def test_a_named_error_has_a_counter_of_its_own(kind: str) -> None:
    name = error_counter("kvtier_fs", kind)
    assert name == f"kvtier_fs_errors_{kind.lower()}"
    assert error_counters("kvtier_fs")[name] == (
        f"Reads and writes of the fs tier that failed with {kind}."
    )


@pytest.mark.parametrize("kind", ["EDOM", "9999", ""])
def test_the_others_have_one_together(kind: str) -> None:
    name = error_counter("kvtier_disk", kind)
    assert name == "kvtier_disk_errors_other"
    assert name in error_counters("kvtier_disk")
