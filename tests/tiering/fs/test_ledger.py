"""The ledger: one copy is always whole, there is one writer at a time, and damage is detected."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.fs.ledger import (
    _COPY_BYTES,
    _HEAD,
    _MAX_ACCOUNTS,
    Account,
    Balance,
    Ledger,
    LedgerBusy,
    LedgerLost,
    LedgerVersion,
)

amounts = st.integers(0, 2**63 - 1)
ids = st.binary(min_size=16, max_size=16)
accounts = st.builds(Account, amounts, amounts, st.booleans(), st.booleans())
balances = st.builds(
    Balance,
    ids,
    amounts,
    amounts,
    amounts,
    ids,
    st.dictionaries(ids, accounts, max_size=8),
    st.integers(0, 2**63 - 2),
)
NEVER = 0.02
"""A short patience."""
VERSION_AT = 8


def at_once() -> float:
    return NEVER


def patient() -> float:
    return 30.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger")
    yield made
    made.close()


# --- one copy ----------------------------------------------------------------------------------


@given(balances)
def test_what_is_written_is_read(balance: Balance) -> None:
    assert Balance.decode(balance.encode()) == balance
    assert Balance.decode(balance.encode().ljust(_COPY_BYTES, b"\xaa")) == balance


@given(balances, st.data())
def test_every_flipped_bit_is_noticed(balance: Balance, data: st.DataObject) -> None:
    copy = bytearray(balance.encode())
    position = data.draw(st.integers(0, len(copy) - 1))
    copy[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((LedgerLost, LedgerVersion)):
        Balance.decode(bytes(copy))


def test_every_flipped_byte_is_noticed() -> None:
    copy = Balance(b"r" * 16, 5, 1, 4096, accounts={b"e" * 16: Account(7)}).encode()
    for position in range(len(copy)):
        broken = bytearray(copy)
        broken[position] ^= 0xFF
        with pytest.raises((LedgerLost, LedgerVersion)):
            Balance.decode(bytes(broken))


@given(balances, st.data())
def test_a_torn_copy_is_noticed(balance: Balance, data: st.DataObject) -> None:
    copy = balance.encode()
    with pytest.raises(LedgerLost):
        Balance.decode(copy[: data.draw(st.integers(0, len(copy) - 1))])


@given(st.binary(max_size=400))
def test_garbage_is_no_ledger(garbage: bytes) -> None:
    with pytest.raises(LedgerLost):
        Balance.decode(garbage)


def test_sums_that_cannot_be_are_not_believed() -> None:
    with pytest.raises(LedgerLost):
        Balance.decode(Balance(b"r" * 16, blocks=2**63).encode())
    with pytest.raises(LedgerLost):
        Balance.decode(Balance(b"r" * 16, accounts={b"e" * 16: Account(2**63)}).encode())


def test_as_many_engines_as_there_is_room_for() -> None:
    balance = Balance(b"r" * 16)
    balance.accounts = {n.to_bytes(16, "big"): Account(n) for n in range(_MAX_ACCOUNTS)}
    copy = balance.encode()
    assert len(copy) <= _COPY_BYTES
    assert Balance.decode(copy) == balance
    balance.accounts[b"one too many...!"] = Account()
    with pytest.raises(OSError, match=f"more than {_MAX_ACCOUNTS} engines"):
        balance.encode()


def test_the_total_is_all_that_there_can_be() -> None:
    balance = Balance(
        b"r" * 16, 100, 3, 20, accounts={b"a" * 16: Account(7), b"b" * 16: Account(5)}
    )
    assert (balance.reserved, balance.total) == (12, 132)


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(-3, 3))))
def test_counting_out_more_than_there_was_is_no_nonsense(changes: list[tuple[int, int]]) -> None:
    balance = Balance(b"r" * 16)
    for num_bytes, count in changes:
        balance.add_blocks(num_bytes, count)
        assert balance.blocks >= 0
        assert balance.num_blocks >= 0
    assert Balance.decode(balance.encode()) == balance


# --- the file ----------------------------------------------------------------------------------


def test_a_new_one_is_empty_and_private(ledger: Ledger) -> None:
    assert ledger.is_empty
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LedgerLost):
        ledger.read()


def test_copies_are_written_in_turn(ledger: Ledger) -> None:
    """One copy is whole whenever a writer is killed, but not always the newer one."""
    balance = Balance(b"r" * 16)
    for blocks in range(1, 8):
        balance.blocks = blocks
        ledger.save(balance)
        assert ledger.load() == (ledger.read(), False) == (balance, False)
        content = ledger.path.read_bytes()
        for is_newer in (True, False):
            with ledger.path.open("r+b") as file:
                file.seek((balance.revision + (not is_newer)) % 2 * _COPY_BYTES)
                file.write(b"torn" * 4)
            if blocks > 1 or not is_newer:
                found, is_doubtful = ledger.load()
                assert found == ledger.read()
                assert found.blocks == (blocks - 1 if is_newer else blocks)
                assert is_doubtful
            else:
                with pytest.raises(LedgerLost):
                    ledger.load()
            ledger.path.write_bytes(content)


def test_the_last_word_counts_after_the_ledger_was_opened_again(ledger: Ledger) -> None:
    balance = Balance(b"r" * 16)
    for blocks in (10, 20, 30):
        balance.blocks = blocks
        ledger.save(balance)
    again = Ledger(ledger.path)
    assert again.read() == balance
    assert not again.is_empty
    again.close()


def test_fewer_accounts_leave_no_trace(ledger: Ledger) -> None:
    balance = Balance(b"r" * 16)
    balance.accounts = {n.to_bytes(16, "big"): Account(n) for n in range(50)}
    for _ in range(2):
        ledger.save(balance)
    balance.accounts.clear()
    ledger.save(balance)
    assert ledger.read().accounts == {}


def test_another_version_is_not_taken_for_a_lost_ledger(ledger: Ledger) -> None:
    ledger.save(Balance(b"r" * 16))
    for offset in (0, _COPY_BYTES):
        with ledger.path.open("r+b") as file:
            file.seek(offset)
            file.write(b"KVTLEDG\x00\x02\x00".ljust(_HEAD.size, b"\x01"))
    with pytest.raises(LedgerVersion, match="version 2"):
        ledger.load()


def test_a_later_version_may_be_laid_out_otherwise(ledger: Ledger) -> None:
    """Another version keeps other data in the place of our second copy."""
    head = Balance(bytes(16)).encode()[:VERSION_AT] + b"\x02\x00"
    content = head.ljust(4 * _COPY_BYTES, b"\xaa")
    ledger.path.write_bytes(content)
    with ledger.lock(at_once), pytest.raises(LedgerVersion, match="version 2"):
        ledger.load()
    assert ledger.path.read_bytes() == content


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="regular"):
        Ledger(tmp_path / "fifo")
    (tmp_path / "elsewhere").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Ledger(tmp_path / "link")


def test_a_file_that_was_replaced_is_not_in_place(ledger: Ledger) -> None:
    assert ledger.is_in_place
    ledger.path.rename(ledger.path.with_name("old"))
    assert not ledger.is_in_place
    ledger.path.touch()
    assert not ledger.is_in_place
    ledger.path.with_name("old").replace(ledger.path)
    assert ledger.is_in_place


def test_closing_twice_changes_nothing(ledger: Ledger) -> None:
    ledger.close()
    ledger.close()


# --- the lock ----------------------------------------------------------------------------------


def test_threads_take_turns(ledger: Ledger) -> None:
    """Even threads that share the file: to the kernel they are one process."""
    other = Ledger(ledger.path)
    ledger.save(Balance(b"r" * 16))

    def count(which: Ledger) -> None:
        for _ in range(50):
            with which.lock(patient):
                balance = which.read()
                balance.blocks += 1
                which.save(balance)

    threads = [threading.Thread(target=count, args=(each,)) for each in (ledger, ledger, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert ledger.read().blocks == 150
    assert ledger.read().revision == 151


COUNT = """
import sys
from pathlib import Path
from kvtier.tiering.fs.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for _ in range(50):
    with ledger.lock(lambda: 30.0):
        balance = ledger.read()
        balance.blocks += 1
        ledger.save(balance)
"""
HOLD = """
import sys
from pathlib import Path
from kvtier.tiering.fs.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
with ledger.lock(lambda: 30.0):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_processes_take_turns(ledger: Ledger) -> None:
    ledger.save(Balance(b"r" * 16))
    command = [sys.executable, "-c", COUNT, str(ledger.path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert ledger.read().blocks == 100


def test_who_is_killed_has_no_lock(ledger: Ledger) -> None:
    command = [sys.executable, "-c", HOLD, str(ledger.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(LedgerBusy), ledger.lock(at_once):
            pass
        holder.kill()
        with ledger.lock(patient):
            pass


def test_patience_may_end_while_one_waits(ledger: Ledger) -> None:
    other = Ledger(ledger.path)
    patience = iter((1e6, 1e6, 1e6))
    with other.lock(at_once), pytest.raises(LedgerBusy), ledger.lock(lambda: next(patience, 0.0)):
        pass
    other.close()


def test_threads_of_one_ledger_do_not_wait_for_ever_either(ledger: Ledger) -> None:
    busy: list[LedgerBusy] = []

    def wait() -> None:
        try:
            with ledger.lock(at_once):
                pass
        except LedgerBusy as error:
            busy.append(error)

    with ledger.lock(at_once):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert len(busy) == 1
    with ledger.lock(at_once):
        pass


def test_the_lock_is_free_after_an_error(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError), ledger.lock(at_once):
        raise RuntimeError
    other = Ledger(ledger.path)
    with other.lock(at_once):
        pass
    other.close()


def test_a_forked_child_does_not_keep_the_lock(ledger: Ledger, tmp_path: Path) -> None:
    """The lock must end with the engine, not with its last forked child."""
    ready, end = os.pipe(), os.pipe()
    with ledger.lock(at_once):
        pid = os.fork()
        if pid == 0:
            os.close(end[1])
            os.write(ready[1], b"!")
            os.read(end[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        ledger.close()  # as if this process had been killed
        other = Ledger(ledger.path)
        try:
            with other.lock(at_once):
                is_free = True
        except LedgerBusy:
            is_free = False
        finally:
            other.close()
            for fd in (*ready, *end):
                os.close(fd)
            os.waitpid(pid, 0)
            ledger._fd = os.open(ledger.path, os.O_RDWR)  # something to unlock
    assert is_free
