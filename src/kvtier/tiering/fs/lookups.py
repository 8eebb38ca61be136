"""Lookups and times of use, for the scheduler's thread, which never waits for a file.

`LookupCache` answers from memory which blocks are in the root. Its threads look for the files of
unknown blocks, so that a later step gets an answer. Other engines store and evict blocks too, so an
answer is kept only for seconds. `UseStamps` writes the times of uses into the files' mtimes, where
every engine sees them.
"""

from __future__ import annotations

import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf

from kvtier.base import LookupResult, OffloadKey
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.layout import LONGEST_KEY, block_path

__all__ = ["LookupCache", "UseStamps"]

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

_PRESENT_FOR_S = 30.0
"""How long a block that was found counts as a hit."""
_SURELY_FOR_S = 5.0
"""How long a block that was found is not stored again."""
_ABSENT_FOR_S = 2.0
"""How long a block that was not found counts as a miss."""
_MAX_PRESENT = 262_144
_MAX_ABSENT = 65_536
_MAX_ASKED = 65_536
_AT_ONCE = 128
"""Files that one thread looks up before it takes the next questions."""
_NUM_THREADS = 4

_WRITE_EVERY_S = 0.5
_SAME_USE_NS = 10 * 10**9
"""A time stamp younger than this is not written again."""
_MAX_WAITING = 65_536
"""Blocks whose uses wait to be written; beyond that, the oldest uses are dropped."""
_MAX_KNOWN = 16_384
"""Largest number of blocks with a remembered time stamp, and of blocks remembered as absent."""
_LONGEST_END_S = 0.5
"""How long uses are still written at shutdown, in seconds."""


# --- which blocks are there --------------------------------------------------------------------


class _Question:
    """Blocks of one namespace, in prompt order. Blocks after the first absent one need no
    answer."""

    __slots__ = ("keys", "namespace", "num_present")

    def __init__(self, namespace: str, keys: list[OffloadKey]) -> None:
        self.namespace = namespace
        self.keys = keys
        self.num_present = len(keys)
        """Upper bound for the number of leading blocks that are in the root. The lookup threads
        lower it."""


class LookupCache:
    """Remembers which blocks are in the root and which are not. The scheduler's thread asks, and
    never waits for a file: four threads of this object look for the files."""

    def __init__(
        self, tree: NoFollowTree, namespace: str, on_error: Callable[[OSError], None]
    ) -> None:
        """`namespace`: the directory to look into. `on_error`: called on the lookup threads."""
        self._tree = tree
        self._namespace = namespace
        self._on_error = on_error
        # By key, until when the block counts as present or absent. The oldest entries come first.
        self._present: OrderedDict[OffloadKey, float] = OrderedDict()
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        self._asked: set[OffloadKey] = set()
        self._unknown: list[list[OffloadKey]] = []
        """For each prompt, the keys that were not passed to the threads yet."""
        self._changed = threading.Condition()
        self._questions: deque[tuple[_Question, int]] = deque()
        """Each with the position of the first key to look up."""
        self._answers: deque[tuple[_Question, int, int, int]] = deque()
        """Question; position of the first key looked up; number of leading blocks found from there;
        position after the last key looked up."""
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-fs-lookup-{number}", daemon=True)
            for number in range(_NUM_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # --- the scheduler's thread ----------------------------------------------------------------

    def look_into(self, namespace: str) -> None:
        """Forget everything, and look into this directory from now on."""
        self._namespace = namespace
        self._present.clear()
        self._absent.clear()
        self._asked.clear()
        self._unknown = []

    def answer(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return answers for these blocks, up to the first that is known to be absent. RETRY means
        unknown: a thread looks for the file."""
        if self._answers:
            self._learn()
        now = time.monotonic()
        answers: list[LookupResult] = []
        unknown: list[OffloadKey] = []
        present, absent = self._present.get, self._absent.get
        for key in keys:
            if present(key, 0.0) > now:
                answers.append(_HIT)
            elif absent(key, 0.0) > now or len(key) > LONGEST_KEY:
                answers.append(_MISS)
                break
            else:
                answers.append(_RETRY)
                unknown.append(key)
        if unknown:
            self._note_unknown(unknown)
        return answers

    def _note_unknown(self, keys: list[OffloadKey]) -> None:
        asked = self._asked
        new = [key for key in keys if key not in asked] if asked else keys
        if new and len(asked) <= _MAX_ASKED:
            asked.update(new)
            self._unknown.append(new)
            if len(new) >= _AT_ONCE:
                self.ask()

    def ask(self) -> None:
        """Pass the unknown blocks to the threads. Called in each step, and earlier for a long
        prompt: waking a thread for each block would cost more than looking it up."""
        if not self._unknown:
            return
        prompts, self._unknown = self._unknown, []
        with self._changed:
            for keys in prompts:
                question = _Question(self._namespace, keys)
                self._questions += ((question, start) for start in range(0, len(keys), _AT_ONCE))
            self._changed.notify(min(_NUM_THREADS, -(-sum(map(len, prompts)) // _AT_ONCE)))

    def present_of(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that were found or stored within the last 5 s
        (`_SURELY_FOR_S`)."""
        lately = time.monotonic() + _PRESENT_FOR_S - _SURELY_FOR_S
        present = self._present
        return [key for key in keys if key in present and present[key] > lately]

    def note_present(self, keys: Collection[OffloadKey]) -> None:
        """Record that these blocks are in the root. Later answers to questions already asked about
        them are ignored."""
        self._asked.difference_update(keys)
        self._note_present(keys)

    def note_absent(self, keys: Collection[OffloadKey]) -> None:
        """Record that these blocks are absent or damaged. Later answers to questions already asked
        about them are ignored."""
        self._asked.difference_update(keys)
        self._note_absent(keys)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Forget blocks that were evicted. Later answers to questions already asked about them are
        ignored."""
        self._asked.difference_update(keys)
        present = self._present
        for key in keys:
            if key in present:
                del present[key]

    def _note_present(self, keys: Iterable[OffloadKey]) -> None:
        until = time.monotonic() + _PRESENT_FOR_S
        self._note(keys, until, self._present, self._absent, _MAX_PRESENT)

    def _note_absent(self, keys: Iterable[OffloadKey]) -> None:
        until = time.monotonic() + _ABSENT_FOR_S
        self._note(keys, until, self._absent, self._present, _MAX_ABSENT)

    def _note(
        self,
        keys: Iterable[OffloadKey],
        until: float,
        known: OrderedDict[OffloadKey, float],
        other: OrderedDict[OffloadKey, float],
        most: int,
    ) -> None:
        for key in keys:
            if key in other:
                del other[key]
            known[key] = until
            known.move_to_end(key)
        while len(known) > most:
            known.popitem(last=False)

    def _learn(self) -> None:
        while self._answers:
            question, start, num_present, end = self._answers.popleft()
            if question.namespace is not self._namespace:
                continue
            keys, asked = question.keys, self._asked
            self._note_present(filter(asked.__contains__, keys[start : start + num_present]))
            self._note_absent(filter(asked.__contains__, keys[start + num_present : end]))
            asked.difference_update(keys[start : start + _AT_ONCE])

    def stop(self) -> None:
        """End the threads. Waits for the file that each is looking up. Does nothing before
        `start`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # --- the threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._questions)
                if self._is_stopping:
                    return
                some = self._take_some()
            for question, start in some:
                self._answers.append((question, start, *self._look(question, start)))

    def _take_some(self) -> list[tuple[_Question, int]]:
        """Take questions, of one prompt or several, until they ask for `_AT_ONCE` files or more, or
        none is left."""
        some: list[tuple[_Question, int]] = []
        num_files = 0
        while self._questions and num_files < _AT_ONCE:
            question, start = self._questions.popleft()
            num_files += min(len(question.keys) - start, _AT_ONCE)
            some.append((question, start))
        return some

    def _look(self, question: _Question, start: int) -> tuple[int, int]:
        """Return how many blocks from `start` on are in the root without a gap, and the position
        after the last one that was looked up."""
        position = start
        for key in question.keys[start : start + _AT_ONCE]:
            if self._is_stopping or position >= question.num_present:
                return position - start, position  # stopping, or an earlier block is absent
            if not self._is_there(question.namespace, key):
                question.num_present = min(question.num_present, position)
                return position - start, position + 1
            position += 1
        return position - start, position

    def _is_there(self, namespace: str, key: OffloadKey) -> bool:
        try:
            status = self._tree.lstat(block_path(namespace, key))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._on_error(error)
            return False
        return stat.S_ISREG(status.st_mode)


# --- when blocks were used ---------------------------------------------------------------------


class UseStamps:
    """A thread that writes the times of uses into the files' mtimes. If uses come faster than it
    can write, the oldest are dropped. The blocks then seem to have been unused for longer than they
    really were."""

    def __init__(
        self,
        tree: NoFollowTree,
        on_error: Callable[[OSError], None],
        is_coming: Callable[[OffloadKey], bool],
    ) -> None:
        """`on_error` and `is_coming` are called on the thread. `is_coming`: returns True while this
        engine writes the block, which then has no file yet."""
        self._tree = tree
        self._on_error = on_error
        self._is_coming = is_coming
        self._lock = threading.Lock()
        """Protects `_waiting` and `_absent`. Never held during I/O."""
        self._waiting: deque[tuple[str, Sequence[OffloadKey], int]] = deque()
        self._num_waiting = 0
        """Number of blocks in `_waiting`."""
        self._absent: OrderedDict[OffloadKey, str] = OrderedDict()
        """Used blocks that had no file, with the namespace that was looked into. The latest is
        last."""
        self._stamps: dict[tuple[str, OffloadKey], int] = {}
        """Time stamps that the thread has seen or set. They save an `lstat` for blocks that are
        used often. Only the thread uses them."""
        self._stopped = threading.Event()
        self._deadline = inf
        """When the thread stops writing, in seconds on the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-uses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- the scheduler's thread: only `stop` waits for a file ----------------------------------

    def note(self, namespace: str, keys: Sequence[OffloadKey]) -> None:
        """Record that a request uses these blocks, in prompt order."""
        keys = keys[:_MAX_WAITING]
        with self._lock:
            self._waiting.append((namespace, keys, time.time_ns()))
            self._num_waiting += len(keys)
            while self._num_waiting > _MAX_WAITING:
                self._num_waiting -= len(self._waiting.popleft()[1])

    def take_absent(self, namespace: str, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that had no file when the thread wanted to record an earlier use.
        A block is returned once. When it is used again, the thread looks for its file again."""
        absent = self._absent
        if not absent:
            return []
        with self._lock:
            found = [key for key in keys if key in absent]
            return [key for key in found if absent.pop(key) == namespace]

    def note_present(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these blocks have files now."""
        absent = self._absent
        if absent:
            with self._lock:
                for key in keys:
                    absent.pop(key, None)

    def forget_absent(self) -> None:
        """Forget absent blocks, because another namespace is read from now on."""
        with self._lock:
            self._absent.clear()

    def stop(self) -> None:
        """Write uses for 0.5 s at most, drop the rest, and end the thread. May wait longer for one
        file that the thread is writing. Does nothing before `start`."""
        self._deadline = time.monotonic() + _LONGEST_END_S
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(_WRITE_EVERY_S)
            while self._waiting and time.monotonic() <= self._deadline:
                self._write(*self._take())

    def _take(self) -> tuple[str, Sequence[OffloadKey], int]:
        with self._lock:
            batch = self._waiting.popleft()
            self._num_waiting -= len(batch[1])
        return batch

    def _write(self, namespace: str, keys: Sequence[OffloadKey], when_ns: int) -> None:
        for position, key in enumerate(keys):
            if len(key) > LONGEST_KEY or self._is_coming(key):
                continue
            # Later blocks of a prompt count as older, so that its head is evicted last.
            stamp = when_ns - position
            known = self._stamps.get((namespace, key))
            if known is not None and stamp - known <= _SAME_USE_NS:
                continue
            if time.monotonic() > self._deadline:
                return
            path = block_path(namespace, key)
            try:
                known = self._tree.lstat(path).st_mtime_ns
                if stamp - known > _SAME_USE_NS:
                    self._tree.utime(path, stamp)
                    known = stamp
            except FileNotFoundError:
                self._note_absent(namespace, key)
                continue
            except OSError as error:
                self._on_error(error)
                return
            if len(self._stamps) >= _MAX_KNOWN:
                self._stamps.clear()
            self._stamps[namespace, key] = known

    def _note_absent(self, namespace: str, key: OffloadKey) -> None:
        with self._lock:
            self._absent[key] = namespace
            self._absent.move_to_end(key)
            if len(self._absent) > _MAX_KNOWN:
                self._absent.popitem(last=False)
