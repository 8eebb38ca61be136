"""Transactions: whichever engine is killed at whichever step, the ledger becomes correct again."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.base import OffloadKey
from kvtier.tiering.fs import layout
from kvtier.tiering.fs import presence as presence_module
from kvtier.tiering.fs import root as root_module
from kvtier.tiering.fs import transaction as transaction_module
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import (
    BlockFile,
    block_path,
    count_blocks,
    key_of,
    namespace_path,
    read_shard,
)
from kvtier.tiering.fs.ledger import Ledger, LedgerBusy, LedgerLost
from kvtier.tiering.fs.presence import EngineInfo
from kvtier.tiering.fs.root import PresenceLost, RootSession
from kvtier.tiering.fs.transaction import NAME_BYTES, Evicted, Outcome, Written
from tests.tiering.fs.hardship import failing_calls
from tests.tiering.fs.harness import block_files, du
from tests.tiering.patience import PATIENCE_S

SHARED = bytes(16)
PRIVATE = bytes([7]) * 16
PAGE = 4096
LIMIT = 900 << 10
ALL_SHARDS = layout.SHARDS
FEW_SHARDS = ALL_SHARDS[:3]
"""Making hundreds of directories would take most of the time."""
FEW_SHARDS_BYTES = (len(FEW_SHARDS) + 2) * PAGE
BLOCK_BYTES = 3 * PAGE
CHARGE = BLOCK_BYTES + PAGE + NAME_BYTES
PRESENCE_BYTES = 4 * PAGE
"""Bytes of a new presence that is not in the ledger yet."""


def key(number: int) -> OffloadKey:
    return OffloadKey(b"block %02d" % number)


def write_block(path: str, which: OffloadKey) -> int:
    with open(path, "r+b" if os.path.exists(path) else "xb") as file:
        file.write(which.ljust(BLOCK_BYTES, b"."))
    return os.stat(path).st_blocks * 512


def blocks_in(namespace: Path) -> list[BlockFile]:
    below = NoFollowTree(namespace.parents[1])
    return [block for shard in layout.SHARDS for block in read_shard(below, namespace, shard)]


def must_not_fail(error: OSError) -> None:
    raise AssertionError(error)


class Killed(BaseException):
    """The process ends here."""


DEADLY: tuple[tuple[object, str], ...] = (
    (os, "link"),
    (os, "rename"),
    (os, "unlink"),
    (os, "mkdir"),
    (os, "rmdir"),
    (os, "pwrite"),
)


@contextmanager
def killed_at(countdown: int, is_after: bool, tears: bool) -> Iterator[None]:
    """Kill the code inside at a step that others can see: before it, after it, or in the middle of
    a write. A dead process takes no further steps."""
    left = countdown

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left > 0:
                return real(*args, **kwargs)
            if left == 0 and tears and real is pwrite:
                fd, data, offset = args
                real(fd, data[: len(data) // 2], offset)
            elif left == 0 and is_after:
                real(*args, **kwargs)
            raise Killed

        return step

    pwrite = os.pwrite
    with ExitStack() as patches:
        for module, name in DEADLY:
            patches.enter_context(mock.patch.object(module, name, deadly(getattr(module, name))))
        yield


@dataclass(eq=False)
class Engine:
    """The work of publisher and mover on a session, in one thread."""

    session: RootSession
    funds: int = 0
    """Bytes that may still be written."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """Files to be overwritten, and the bytes reserved for each."""
    written: list[tuple[OffloadKey, str, int, int]] = field(default_factory=list)
    """Key, file, bytes, and reserved bytes."""

    @classmethod
    def on(cls, root: Path) -> Engine:
        return cls(RootSession(root, EngineInfo.here("engine", SHARED.hex()), 5.0))

    @property
    def shared(self) -> Path:
        return namespace_path(self.session.blocks, SHARED)

    @property
    def private(self) -> Path:
        return namespace_path(self.session.presence.blocks, PRIVATE)

    def reserve(self, count: int) -> None:
        with self.session.transaction() as txn:
            granted = txn.reserve(count, CHARGE, LIMIT)
        self.funds += granted

    def write(self, which: OffloadKey) -> bool:
        if self.files:
            path, charge = self.files.pop()
        elif self.funds >= CHARGE:
            path, charge = self.session.presence.incoming(), CHARGE
            self.funds -= CHARGE
        else:
            return False
        self.written.append((which, path, write_block(path, which), charge))
        return True

    def publish(self, namespace: Path) -> list[Outcome]:
        session, written = self.session, list(self.written)
        with session.transaction() as txn:
            if not txn.make_namespace(namespace, LIMIT):
                return []
            outcomes = txn.publish(
                [Written(p, block_path(str(namespace), k), n, c) for k, p, n, c in written],
                must_not_fail,
            )
        self.written = []
        for (_, path, _, charge), outcome in zip(written, outcomes, strict=True):
            if outcome is Outcome.PUBLISHED:
                os.unlink(path)
            else:
                self.files.append((path, charge))
        return outcomes

    def evict(
        self,
        blocks: list[BlockFile],
        is_recycling: bool = False,
        on_error: Callable[[OSError], None] = must_not_fail,
    ) -> list[Evicted]:
        with self.session.transaction() as txn:
            gone = txn.evict(blocks, on_error)
        for each in gone:
            if is_recycling and not each.is_linked:
                self.files.append((each.temporary, each.reserved))
            else:
                os.unlink(each.temporary)
                self.session.give_back(each.presence, each.reserved)
        return gone

    def start_again(self) -> None:
        """After the presence was lost."""
        self.session.rejoin()
        self.funds, self.files, self.written = 0, [], []

    def give_back(self) -> None:
        """Give back everything that is reserved and was not published."""
        files = self.files + [(path, charge) for _, path, _, charge in self.written]
        for path, _ in files:
            os.unlink(path)
        num_bytes = self.funds + sum(charge for _, charge in files)
        self.funds, self.files, self.written = 0, [], []
        self.session.give_back(self.session.presence, num_bytes)
        assert self.session.owes or not num_bytes
        with self.session.transaction() as txn:
            assert txn.account.reserved == 0
        assert not self.session.owes

    def die(self) -> None:
        self.session.abandon_presence()
        self.session.ledger.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def engines(root: Path) -> Iterator[Callable[[], Engine]]:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine.on(root))
        return made[-1]

    yield make
    for engine in made:
        with suppress(OSError, ValueError):
            engine.die()


def assert_exact(root: Path, session: RootSession) -> None:
    """While no engine is in the middle of a step: the ledger equals the files."""
    balance = session.ledger.read()
    num_bytes, count = count_blocks(NoFollowTree(root), root / "blocks")
    for presence in (root / "engines").iterdir():
        if presence.is_dir():
            more_bytes, more = count_blocks(NoFollowTree(root), presence / "blocks")
            num_bytes, count = num_bytes + more_bytes, count + more
    assert (balance.blocks, balance.num_blocks) == (num_bytes, count)
    assert du(root) <= balance.total


# --- the machine -------------------------------------------------------------------------------

numbers = st.integers(0, 2)
kills = st.none() | st.tuples(st.integers(1, 9), st.booleans())


class Machine(RuleBasedStateMachine):
    """Three engines on a root; each may be killed at any step, and another takes its place."""

    tears = False

    @initialize()
    def start(self) -> None:
        self.few_shards = ExitStack()
        for module in (layout, transaction_module):
            self.few_shards.enter_context(mock.patch.object(module, "SHARDS", FEW_SHARDS))
        self.few_shards.enter_context(
            mock.patch.object(transaction_module, "NAMESPACE_BYTES", FEW_SHARDS_BYTES)
        )
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-session-"))
        self.root = self.directory / "root"
        self.engines: dict[int, Engine] = {n: Engine.on(self.root) for n in range(3)}
        self.is_wrong = False
        """True while files were changed by hand, or the ledger was lost, and nobody has counted
        again."""

    def act(
        self, number: int, do: Callable[[Engine], object], kill: tuple[int, bool] | None
    ) -> None:
        engine = self.engines.get(number)
        try:
            with killed_at(*kill, self.tears) if kill else ExitStack():
                if engine is None:
                    self.engines[number] = engine = Engine.on(self.root)
                try:
                    do(engine)
                except PresenceLost:
                    engine.start_again()
        except Killed:
            self.engines.pop(number, None)
            if engine is not None:
                engine.die()
            self.end_the_dead()
            self.see_whether_the_ledger_is_torn()

    def see_whether_the_ledger_is_torn(self) -> None:
        ledger = Ledger(self.root / "ledger")
        try:
            ledger.read()
        except LedgerLost:
            self.is_wrong = True
        finally:
            ledger.close()

    def end_the_dead(self) -> None:
        """Release the locks of dead engines, as the kernel does."""
        living = {engine.session._presence for engine in self.engines.values()}
        for presence in list(presence_module._open_presences):
            if presence not in living and presence.contains(
                f"{self.root}/engines/{presence.engine.hex()}/"
            ):
                presence.abandon()

    # --- what happens --------------------------------------------------------------------------

    @rule(number=numbers, count=st.integers(1, 60), kill=kills)
    def reserve(self, number: int, count: int, kill: tuple[int, bool] | None) -> None:
        self.act(number, lambda engine: engine.reserve(count), kill)

    @rule(
        number=numbers,
        which=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
        is_private=st.booleans(),
        kill=kills,
    )
    def store(
        self, number: int, which: list[int], is_private: bool, kill: tuple[int, bool] | None
    ) -> None:
        def do(engine: Engine) -> None:
            if engine.funds < CHARGE * len(which):
                engine.reserve(len(which))
            for each in which:
                engine.write(key(each))
            namespace = engine.private if is_private else engine.shared
            there = {block.path for block in blocks_in(namespace)}
            written = [block_path(str(namespace), k) for k, *_ in engine.written]
            outcomes = engine.publish(namespace)
            for path, outcome in zip(written, outcomes, strict=bool(outcomes)):
                assert (outcome is Outcome.WAS_THERE) == (path in there)
                there.add(path)

        self.act(number, do, kill)

    @rule(
        number=numbers,
        first=st.integers(0, 4),
        count=st.integers(1, 4),
        is_private=st.booleans(),
        is_recycling=st.booleans(),
        kill=kills,
    )
    def evict(
        self,
        number: int,
        first: int,
        count: int,
        is_private: bool,
        is_recycling: bool,
        kill: tuple[int, bool] | None,
    ) -> None:
        def do(engine: Engine) -> None:
            namespace = engine.private if is_private else engine.shared
            blocks = blocks_in(namespace)[first : first + count]
            # The others may have been published just now, and still have their staged names.
            may_leave = [block for block in blocks if os.stat(block.path).st_nlink == 1]
            gone = engine.evict(blocks, is_recycling)
            assert [each.block for each in gone] == may_leave

        self.act(number, do, kill)

    @rule(number=numbers, kill=kills)
    def give_back(self, number: int, kill: tuple[int, bool] | None) -> None:
        self.act(number, Engine.give_back, kill)

    @precondition(lambda self: not self.is_wrong)
    @rule(number=numbers, kill=kills)
    def reclaim(self, number: int, kill: tuple[int, bool] | None) -> None:
        def do(engine: Engine) -> None:
            engine.session.reclaim()
            assert_exact(self.root, engine.session)
            presences = {path.stem for path in (self.root / "engines").iterdir()}
            assert presences == {
                e.session.presence.engine.hex() for e in self.engines.values() if has(e)
            }

        def has(engine: Engine) -> bool:
            return engine.session.has_presence

        self.act(number, do, kill)

    @rule(number=numbers, kill=kills)
    def close(self, number: int, kill: tuple[int, bool] | None) -> None:
        self.act(number, lambda engine: engine.session.close(), kill)
        engine = self.engines.pop(number, None)
        if engine is not None:
            engine.die()

    @rule(number=numbers)
    def die(self, number: int) -> None:
        if number in self.engines:
            self.engines.pop(number).die()

    # --- what always holds ---------------------------------------------------------------------

    @invariant()
    def no_more_is_there_than_the_ledger_says(self) -> None:
        if self.engines and not self.is_wrong:
            balance = next(iter(self.engines.values())).session.ledger.read()
            presences = {path.stem for path in (self.root / "engines").iterdir()}
            unknown = presences - {engine.hex() for engine in balance.accounts}
            assert du(self.root) <= balance.total + PRESENCE_BYTES * len(unknown)
            assert balance.total <= LIMIT + PRESENCE_BYTES * len(balance.accounts)

    @invariant()
    def every_block_is_what_its_name_says(self) -> None:
        for path in block_files(self.root):
            which = key_of(path.name)
            assert which is not None
            assert path.read_bytes() == which.ljust(BLOCK_BYTES, b".")

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        try:
            for engine in self.engines.values():
                engine.session.close()
            last = Engine.on(self.root)
            last.session.count_again() if self.is_wrong else last.session.reclaim()
            assert_exact(self.root, last.session)
            balance = last.session.ledger.read()
            last.session.close()
            ledger = Engine.on(self.root)
            ledger.session.close()
            assert not list((self.root / "engines").iterdir())
            assert balance.num_blocks == len(block_files(self.root))
            assert total_of(self.root) == du(self.root)
        finally:
            shutil.rmtree(self.directory)
            self.few_shards.close()


class MeddledMachine(Machine):
    """Files are removed and added by hand; writes are torn; the ledger is lost."""

    tears = True

    @rule(data=st.data())
    def meddle(self, data: st.DataObject) -> None:
        """Remove a file by hand, or add one."""
        files = block_files(self.root)
        if not files:
            return
        self.is_wrong = True
        path = data.draw(st.sampled_from(files))
        if data.draw(st.booleans()):
            path.unlink()
        else:
            which = key(data.draw(st.integers(20, 29)))
            write_block(block_path(str(path.parent.parent), which), which)

    @rule(garbage=st.sampled_from([b"", b"garbage"]))
    def lose_the_ledger(self, garbage: bytes) -> None:
        self.is_wrong = True
        (self.root / "ledger").write_bytes(garbage)

    @precondition(lambda self: self.is_wrong)
    @rule(number=numbers)
    def count_again(self, number: int) -> None:
        def do(engine: Engine) -> None:
            engine.session.count_again()
            self.is_wrong = False

        # Engines that have lost their presence over it have to be reclaimed first.
        for each in list(self.engines):
            self.act(each, lambda engine: engine.reserve(0), None)
        self.act(number, do, None)
        if not self.is_wrong:
            assert_exact(self.root, self.engines[number].session)


def total_of(root: Path) -> int:
    """The ledger's total in a root without engines."""
    ledger = Ledger(root / "ledger")
    try:
        balance = ledger.read()
        assert not balance.accounts
        return balance.total
    finally:
        ledger.close()


TestBooks = Machine.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=25)
TestMeddledBooks = MeddledMachine.TestCase
TestMeddledBooks.settings = settings(max_examples=30, stateful_step_count=25)


# --- one thing at a time -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, transaction_module):
        monkeypatch.setattr(module, "SHARDS", FEW_SHARDS)
    monkeypatch.setattr(transaction_module, "NAMESPACE_BYTES", FEW_SHARDS_BYTES)


def stored(engine: Engine, *which: int) -> list[Outcome]:
    engine.reserve(len(which))
    for each in which:
        assert engine.write(key(each))
    return engine.publish(engine.shared)


def evicted(engine: Engine, count: int, is_recycling: bool) -> None:
    engine.evict(blocks_in(engine.shared)[:count], is_recycling)


def privately_stored(engine: Engine, *which: int) -> None:
    engine.reserve(len(which))
    for each in which:
        engine.write(key(each))
    engine.publish(engine.private)


def with_unpublished(engine: Engine) -> None:
    engine.reserve(3)
    engine.write(key(11))


def with_a_dead_one(engine: Engine) -> None:
    """Another engine has died with blocks, reservations and a staged file."""
    dead = Engine.on(engine.session.path)
    privately_stored(dead, 1, 2)
    dead.reserve(3)
    dead.write(key(9))
    dead.die()


LIVES: dict[str, tuple[Callable[[Engine], object], Callable[[Engine], object]]] = {
    "reserves": (lambda e: None, lambda e: e.reserve(3)),
    "stores": (lambda e: None, lambda e: stored(e, 11, 1, 12)),
    "stores in recycled files": (lambda e: evicted(e, 2, True), lambda e: stored(e, 11, 12, 13)),
    "stores privately": (lambda e: None, lambda e: privately_stored(e, 1, 2)),
    "evicts": (lambda e: None, lambda e: evicted(e, 3, False)),
    "evicts and recycles": (lambda e: evicted(e, 1, True), lambda e: evicted(e, 2, True)),
    "evicts again": (lambda e: evicted(e, 1, False), lambda e: evicted(e, 2, False)),
    "gives back": (with_unpublished, Engine.give_back),
    "leaves": (lambda e: privately_stored(e, 1, 2), lambda e: e.session.close()),
    "reclaims": (with_a_dead_one, lambda e: e.session.reclaim()),
    "counts": (with_a_dead_one, lambda e: e.session.count_again()),
}


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("life", LIVES)
def test_whenever_an_engine_is_killed_another_makes_it_good(
    tmp_path: Path, life: str, is_after: bool
) -> None:
    """At every single step."""
    prepare, act = LIVES[life]
    for step in range(1, 100):
        root = tmp_path / str(step)
        survivor, victim = Engine.on(root), Engine.on(root)
        stored(survivor, 1, 2, 3, 4, 5, 6)
        prepare(victim)
        is_killed = False
        try:
            with killed_at(step, is_after, tears=False):
                act(victim)
        except Killed:
            is_killed = True
        victim.die()
        balance = survivor.session.ledger.read()
        assert du(root) <= balance.total, f"killed at step {step}"
        survivor.session.reclaim()
        assert_exact(root, survivor.session)
        assert survivor.session.ledger.read().accounts.keys() == {survivor.session.presence.engine}
        assert survivor.session.ledger.read().reserved == 0
        survivor.session.close()
        assert total_of(root) == du(root)
        if not is_killed:
            assert step > 1, "there was nothing to be killed at"
            return
    raise AssertionError("it never ends")


def test_a_root_is_for_nobody_else(root: Path, engines: Callable[[], Engine]) -> None:
    engine = engines()
    stored(engine, 1)
    for path in (root, *root.rglob("*")):
        if not path.is_file():
            assert path.stat().st_mode & 0o777 == 0o700, path
    assert (root / "ledger").stat().st_mode & 0o777 == 0o600


def test_a_block_that_is_there_stays_as_it_is(root: Path, engines: Callable[[], Engine]) -> None:
    first, second = engines(), engines()
    assert stored(first, 1, 2) == [Outcome.PUBLISHED] * 2
    inodes = {path.stat().st_ino for path in block_files(root)}
    assert stored(second, 2, 3) == [Outcome.WAS_THERE, Outcome.PUBLISHED]
    assert inodes < {path.stat().st_ino for path in block_files(root)}
    assert len(second.files) == 1, "its file can be overwritten"
    assert_exact(root, second.session)
    assert second.session.ledger.read().num_blocks == 3


def test_a_link_that_was_made_though_the_answer_was_lost_is_ours(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may repeat the request, and find its own link."""
    engine = engines()
    real = os.link

    def ask_twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", ask_twice)
    assert stored(engine, 1) == [Outcome.PUBLISHED]
    assert_exact(root, engine.session)


def test_what_could_not_be_published_is_still_reserved_for(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    stored(engine, 1)
    engine.reserve(1)
    engine.write(key(2))
    (_, path, num_bytes, charge) = engine.written[0]
    final = block_path(str(engine.shared), key(2))
    errors: list[OSError] = []

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    reserved = engine.session.ledger.read().reserved
    with monkeypatch.context() as patched, engine.session.transaction() as txn:
        patched.setattr(os, "link", no_room)
        written = [Written(path, final, num_bytes, charge)]
        assert txn.publish(written, errors.append) == [Outcome.FAILED]
    assert [error.errno for error in errors] == [errno.ENOSPC]
    assert engine.session.ledger.read().reserved == reserved
    assert_exact(root, engine.session)


def test_a_link_that_may_have_been_made_is_settled_by_others(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engines(), engines()
    real = os.link

    def lose_the_answer(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise OSError(errno.EIO, "it may have happened")

    monkeypatch.setattr(os, "link", lose_the_answer)
    with pytest.raises(OSError, match="may have happened"):
        stored(engine, 1)
    assert not engine.session.has_presence
    assert other.session.reclaim() == 1
    assert_exact(root, other.session)
    assert other.session.ledger.read().num_blocks == 1


def test_a_block_that_was_used_meanwhile_stays(root: Path, engines: Callable[[], Engine]) -> None:
    engine = engines()
    stored(engine, 1, 2)
    seen = blocks_in(engine.shared)
    os.utime(seen[0].path, ns=(1, 1))
    assert [gone.block for gone in engine.evict(seen)] == seen[1:]
    with engine.session.transaction() as txn:
        (gone,) = txn.evict(seen, is_forced=True)
    assert (gone.block.path, gone.block.used_ns) == (seen[0].path, 1)
    assert not block_files(root)
    assert_exact(root, engine.session)


def test_a_block_that_may_be_just_being_published_stays(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other name is in its engine's staging directory, and shows that it is counted or will
    be."""
    engine, other = engines(), engines()
    stored(engine, 1, 2)
    first, second = blocks_in(engine.shared)
    os.link(first.path, engine.session.presence.incoming())
    assert [gone.block for gone in other.evict([first, second])] == [second]
    with other.session.transaction() as txn:
        assert txn.evict([first], is_forced=True) == []
    assert [str(path) for path in block_files(root)] == [first.path]
    assert_exact(root, other.session)
    # After a minute, the second name cannot be a staged one.
    monkeypatch.setattr(transaction_module, "_FIRST_NAME_S", 0.0)
    (gone,) = other.evict([first])
    assert gone.is_linked
    assert_exact(root, other.session)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.EIO, errno.EBUSY])
def test_a_block_that_cannot_be_moved_keeps_no_other_from_leaving(
    root: Path, engines: Callable[[], Engine], error: int
) -> None:
    engine = engines()
    stored(engine, 1, 2, 3)
    bad, *others = blocks_in(engine.shared)
    presence = engine.session.presence
    errors: list[OSError] = []
    with failing_calls(error, lambda path: path == bad.path, "rename"):
        gone = engine.evict([bad, *others], on_error=errors.append)
    assert [each.block for each in gone] == others
    assert [each.errno for each in errors] == [error]
    assert engine.session.presence is presence
    assert [str(path) for path in block_files(root)] == [bad.path]
    assert_exact(root, engine.session)
    assert [gone.block for gone in engine.evict([bad])] == [bad], "it was not its last chance"
    assert_exact(root, engine.session)


def test_a_block_that_cannot_be_looked_at_keeps_no_other_from_leaving(
    root: Path, engines: Callable[[], Engine]
) -> None:
    engine = engines()
    stored(engine, 1, 2, 3)
    bad, *others = blocks_in(engine.shared)
    presence = engine.session.presence
    errors: list[OSError] = []
    with failing_calls(errno.EIO, lambda path: path == bad.path, "lstat", "stat"):
        gone = engine.evict([bad, *others], on_error=errors.append)
    assert [each.block for each in gone] == others
    assert [each.errno for each in errors] == [errno.EIO]
    assert engine.session.presence is presence
    assert_exact(root, engine.session)


def test_a_move_that_was_made_though_it_failed_is_counted(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost on the network. The evicting engine finds out, or the one that settles
    it."""
    engine, other = engines(), engines()
    stored(engine, 1, 2)
    seen = blocks_in(engine.shared)
    errors: list[OSError] = []
    real = os.rename

    def lose_the_answer(source: str, target: str, **options: Any) -> None:
        real(source, target, **options)
        raise OSError(errno.EIO, "it may have happened")

    with monkeypatch.context() as patched, suppress(OSError):
        patched.setattr(os, "rename", lose_the_answer)
        engine.evict(seen, on_error=errors.append)
    other.session.reclaim()
    assert_exact(root, other.session)


def test_what_is_no_file_is_not_evicted(root: Path, engines: Callable[[], Engine]) -> None:
    engine = engines()
    stored(engine, 1)
    strange = Path(blocks_in(engine.shared)[0].path)
    strange.unlink()
    strange.symlink_to("/etc/passwd")
    (strange.parent / "00").mkdir()
    with engine.session.transaction() as txn:
        assert txn.evict(blocks_in(engine.shared), is_forced=True) == []
    assert strange.is_symlink()
    assert (strange.parent / "00").is_dir()


def test_who_evicts_what_another_has_evicted_gets_nothing(engines: Callable[[], Engine]) -> None:
    first, second = engines(), engines()
    stored(first, 1, 2)
    seen = blocks_in(first.shared)
    assert len(first.evict(seen)) == 2
    assert second.evict(seen) == []


def test_no_more_is_granted_than_there_is_room_for(
    root: Path, engines: Callable[[], Engine]
) -> None:
    first, second = engines(), engines()
    first.reserve(10**6)
    second.reserve(10**6)
    assert first.funds > 0
    assert second.funds == 0
    assert first.session.ledger.read().total <= LIMIT
    first.give_back()
    second.reserve(1)
    assert second.funds == CHARGE


def test_no_seat_is_left_by_those_who_could_not_take_one(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger cannot be written for a while; joining is tried again and again."""
    engine = engines()
    engine.session.abandon_presence()
    engines().session.reclaim()
    there = sorted((root / "engines").iterdir())
    num_bytes = du(root)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "save", fail)
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                engine.session.rejoin()
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                Engine.on(root)
    assert sorted((root / "engines").iterdir()) == there
    assert du(root) == num_bytes
    engine.start_again()
    assert stored(engine, 1) == [Outcome.PUBLISHED]
    assert_exact(root, engine.session)


def test_directories_need_room_too(root: Path, engines: Callable[[], Engine]) -> None:
    engine = engines()
    with engine.session.transaction() as txn:
        assert not txn.make_namespace(engine.shared, txn.balance.total + 4096)
        assert not engine.shared.exists()
        assert txn.make_namespace(engine.shared, 2 << 20)
        assert du(root) <= txn.balance.total
        txn.measure()
        assert du(root) == txn.balance.total


@pytest.mark.parametrize("step", [2, 4, 100, 250])
def test_directories_are_paid_for_before_they_are_made(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """With all 256 shards: together they take a mebibyte."""
    for module in (layout, transaction_module):
        monkeypatch.setattr(module, "SHARDS", ALL_SHARDS)
    monkeypatch.setattr(transaction_module, "NAMESPACE_BYTES", (len(ALL_SHARDS) + 2) * PAGE)
    engine, other = engines(), engines()

    def make() -> None:
        with engine.session.transaction() as txn:
            txn.make_namespace(engine.shared, 8 << 20)

    with pytest.raises(Killed), killed_at(step, is_after=True, tears=False):
        make()
    assert du(root) <= other.session.ledger.read().total
    other.session.reclaim()
    with other.session.transaction() as txn:
        assert txn.make_namespace(other.shared, 8 << 20), "another goes on with it"
    assert all((other.shared / shard).is_dir() for shard in ALL_SHARDS)
    assert_exact(root, other.session)


def test_private_blocks_end_with_their_engine(root: Path, engines: Callable[[], Engine]) -> None:
    first, second, third = engines(), engines(), engines()
    for engine in (first, second):
        engine.reserve(2)
        for number in (1, 2):
            engine.write(key(number))
        assert engine.publish(engine.private) == [Outcome.PUBLISHED] * 2
    assert third.session.ledger.read().num_blocks == 4
    first.session.close()
    assert third.session.ledger.read().num_blocks == 2
    second.die()
    assert third.session.reclaim() == 1
    assert third.session.ledger.read().num_blocks == 0
    assert_exact(root, third.session)
    third.session.close()
    assert total_of(root) == du(root)


def test_nobody_waits_while_private_blocks_are_removed(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be many private blocks."""
    engine, other = engines(), engines()
    privately_stored(engine, 1, 2)
    real = os.unlink
    was_free: list[bool] = []

    def look_and_unlink(path: Any, **options: Any) -> None:
        if os.path.basename(path) in {key(1).hex(), key(2).hex()}:
            try:
                with other.session.ledger.lock(lambda: 0.01):
                    was_free.append(True)
            except LedgerBusy:
                was_free.append(False)
        real(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", look_and_unlink)
        engine.session.close()
    assert was_free == [True, True]
    other.session.reclaim()
    assert_exact(root, other.session)
    assert other.session.ledger.read().accounts.keys() == {other.session.presence.engine}


def test_reclaiming_leaves_the_living_alone(root: Path, engines: Callable[[], Engine]) -> None:
    first, second, dead = engines(), engines(), engines()
    for engine in (first, dead):
        engine.reserve(2)
        engine.write(key(1))
    dead.die()
    reserved = first.session.ledger.read().accounts[first.session.presence.engine].reserved
    assert second.session.reclaim() == 1
    assert second.session.reclaim() == 0
    balance = second.session.ledger.read()
    assert balance.accounts.keys() == {
        first.session.presence.engine,
        second.session.presence.engine,
    }
    assert balance.reserved == reserved
    assert first.publish(first.shared) == [Outcome.PUBLISHED]


def test_an_account_without_a_seat_is_taken_back(root: Path, engines: Callable[[], Engine]) -> None:
    first, second = engines(), engines()
    first.reserve(5)
    presence = first.session.presence
    first.die()
    shutil.rmtree(root / "engines" / presence.engine.hex())
    (root / "engines" / f"{presence.engine.hex()}.alive").unlink()
    assert second.session.reclaim() == 1
    assert second.session.ledger.read().reserved == 0


def test_what_was_reserved_in_another_seat_is_not_given_back(
    engines: Callable[[], Engine],
) -> None:
    engine = engines()
    engine.reserve(3)
    presence, funds = engine.session.presence, engine.funds
    engine.start_again()
    engine.reserve(3)
    engine.session.give_back(presence, funds)
    with engine.session.transaction() as txn:
        assert txn.account.reserved == 3 * CHARGE


def test_who_was_taken_for_dead_learns_of_it(root: Path, engines: Callable[[], Engine]) -> None:
    engine, other = engines(), engines()
    engine.reserve(1)
    with other.session.transaction() as txn:
        del txn.balance.accounts[engine.session.presence.engine]
    with pytest.raises(PresenceLost):
        engine.reserve(1)
    assert not engine.session.has_presence
    with pytest.raises(PresenceLost):
        _ = engine.session.presence
    engine.start_again()
    engine.reserve(1)
    other.session.reclaim()
    assert_exact(root, other.session)


def test_private_blocks_of_an_engine_whose_sign_of_life_was_deleted_are_counted_out(
    root: Path, engines: Callable[[], Engine]
) -> None:
    """Even if the engine notices it before any other."""
    engine, other = engines(), engines()
    privately_stored(engine, 1, 2)
    engine.reserve(1)
    engine.write(key(3))
    (root / "engines" / f"{engine.session.presence.engine.hex()}.alive").unlink()
    with pytest.raises(PresenceLost):
        engine.reserve(1)
    assert du(root) <= other.session.ledger.read().total
    assert other.session.reclaim() == 1
    assert other.session.ledger.read().num_blocks == 0
    assert_exact(root, other.session)
    other.session.close()
    assert total_of(root) == du(root)


def test_who_has_to_wait_too_long_keeps_its_seat(root: Path, engines: Callable[[], Engine]) -> None:
    other = engines()
    impatient = RootSession(root, EngineInfo.here("impatient", ""), 0.01)
    with other.session.transaction(), pytest.raises(LedgerBusy), impatient.transaction():
        pass
    with impatient.transaction() as txn:
        assert txn.account.reserved == 0
    impatient.close()


@pytest.mark.parametrize("content", [b"", b"garbage" * 9000])
def test_a_lost_ledger_is_made_anew_by_counting(
    root: Path, engines: Callable[[], Engine], content: bytes
) -> None:
    engine = engines()
    stored(engine, 1, 2, 3)
    (root / "ledger").write_bytes(content)
    with pytest.raises(PresenceLost):
        engine.reserve(1)
    engine.start_again()
    engine.session.reclaim()
    assert_exact(root, engine.session)
    assert engine.session.ledger.read().num_blocks == 3


def test_counting_again_mends_a_lost_ledger(root: Path, engines: Callable[[], Engine]) -> None:
    """The publisher does so when it finds the ledger lost."""
    engine = engines()
    stored(engine, 1, 2, 3)
    (root / "ledger").write_bytes(b"")
    with suppress(PresenceLost):
        engine.session.count_again()
    engine.start_again()
    engine.session.count_again()
    assert_exact(root, engine.session)


def test_a_root_that_was_taken_away_is_not_made_anew(
    root: Path, engines: Callable[[], Engine]
) -> None:
    """The directory may be an empty mount point."""
    engine = engines()
    stored(engine, 1)
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()
    with pytest.raises(FileNotFoundError):
        engine.start_again()
    assert not list(root.iterdir())
    root.rmdir()
    away.rename(root)
    engine.start_again()
    assert engine.session.ledger.read().num_blocks == 1


def test_after_a_restart_of_the_machine_everything_is_counted(
    root: Path, engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    stored(engine, 1, 2)
    with engine.session.transaction() as txn:
        txn.balance.add_blocks(10**6, 10)  # a wrong balance that nobody noticed
    engine.session.close()
    monkeypatch.setattr(root_module, "_boot_id", lambda: b"another start..!")
    assert engines().session.ledger.read().num_blocks == 2


def test_another_machine_has_not_restarted_this_one(
    engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other engines live, counting is not needed."""
    engine = engines()
    with engine.session.transaction() as txn:
        txn.balance.add_blocks(0, 10)
    monkeypatch.setattr(root_module, "_boot_id", lambda: b"another host...!")
    assert engines().session.ledger.read().num_blocks == 10


def test_a_command_on_another_machine_has_not_restarted_this_one(
    engines: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command wrote the ledger last, and this engine has lived all the time."""
    engine = engines()
    with engine.session.transaction() as txn:
        txn.balance.add_blocks(0, 10)
    with monkeypatch.context() as patched:
        patched.setattr(root_module, "_boot_id", lambda: b"another host...!")
        engines().session.close()
        assert engine.session.ledger.read().boot_id == b"another host...!"
    engine.reserve(1)
    assert engine.session.ledger.read().num_blocks == 10


def test_another_root_in_its_place_is_not_given_the_balance_of_the_old_one(
    root: Path, engines: Callable[[], Engine]
) -> None:
    """The publisher finds it while the sweeper is in the middle of a transaction."""
    engine = engines()
    stored(engine, 1, 2)
    away, elsewhere = root.with_name("away"), root.with_name("elsewhere")
    other = Engine.on(elsewhere)
    is_inside, may_end = threading.Event(), threading.Event()

    def sweep() -> None:
        with suppress(OSError, PresenceLost), engine.session.transaction() as txn:
            txn.balance.add_blocks(10**6, 1)
            is_inside.set()
            may_end.wait()

    def start_again() -> None:
        with suppress(OSError, PresenceLost):
            engine.start_again()

    threads = [threading.Thread(target=each) for each in (sweep, start_again)]
    threads[0].start()
    try:
        assert is_inside.wait(PATIENCE_S)
        root.rename(away)
        elsewhere.rename(root)
        threads[1].start()
        threads[1].join(0.2)  # or it waits for the other
    finally:
        may_end.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    if not engine.session.has_presence:
        engine.start_again()
    balance = other.session.ledger.read()
    assert (balance.blocks, balance.num_blocks) == (0, 0)
    assert balance.accounts.keys() == {
        engine.session.presence.engine,
        other.session.presence.engine,
    }
    other.die()
