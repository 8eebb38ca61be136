"""Finds out which blocks are in the root, without the scheduler waiting for it.

The scheduler asks, and is told what is known; what is not known is looked for by threads, and known
at a later step. Blocks come and go by other engines' doing, so what is known is known for a while.
"""

from __future__ import annotations

import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.base import LookupResult, OffloadKey
from kvtier.tiering.fs.below import Below
from kvtier.tiering.fs.names import LONGEST_KEY, block_path

__all__ = ["Lookups"]

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

_PRESENT_FOR_S = 30.0
_SURELY_FOR_S = 5.0
"""So long, a block that was there need not be stored again."""
_ABSENT_FOR_S = 2.0
_MAX_PRESENT = 262_144
_MAX_ABSENT = 65_536
_MAX_ASKED = 65_536
_AT_ONCE = 128
_NUM_THREADS = 4


class _Question:
    """Blocks in prompt order, in a namespace. What follows one that is absent is of no interest."""

    __slots__ = ("keys", "namespace", "num_present")

    def __init__(self, namespace: str, keys: list[OffloadKey]) -> None:
        self.namespace = namespace
        self.keys = keys
        self.num_present = len(keys)
        """No more than so many of the first are there. Grows smaller."""


class Lookups:
    """What is known of which blocks are there. The scheduler's thread, apart from the threads
    inside."""

    def __init__(self, below: Below, namespace: str, on_error: Callable[[OSError], None]) -> None:
        """`namespace`: the directory to look into. `on_error`: called on the threads."""
        self._below = below
        self._namespace = namespace
        self._on_error = on_error
        # Until when a block is known to be there, or not to be. The oldest knowledge comes first.
        self._present: OrderedDict[OffloadKey, float] = OrderedDict()
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        self._asked: set[OffloadKey] = set()
        self._unknown: list[list[OffloadKey]] = []
        """By prompt."""
        self._changed = threading.Condition()
        self._questions: deque[tuple[_Question, int]] = deque()
        self._answers: deque[tuple[_Question, int, int, int]] = deque()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-fs-lookup-{number}", daemon=True)
            for number in range(_NUM_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # --- the scheduler's side ------------------------------------------------------------------

    def look_into(self, namespace: str) -> None:
        """Forget everything; what is asked from now on is asked of this directory."""
        self._namespace = namespace
        self._present.clear()
        self._absent.clear()
        self._asked.clear()
        self._unknown = []

    def answer(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What is known of these blocks, up to the first that is known to be absent. What is not
        known is looked for."""
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
        """Have what is not known looked for. Questions are collected until then: waking a thread
        for each would cost more than the answer."""
        if not self._unknown:
            return
        prompts, self._unknown = self._unknown, []
        with self._changed:
            for keys in prompts:
                question = _Question(self._namespace, keys)
                self._questions += ((question, start) for start in range(0, len(keys), _AT_ONCE))
            self._changed.notify(min(_NUM_THREADS, -(-sum(map(len, prompts)) // _AT_ONCE)))

    def present_of(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Those of these blocks that were there a moment ago."""
        lately = time.monotonic() + _PRESENT_FOR_S - _SURELY_FOR_S
        present = self._present
        return [key for key in keys if key in present and present[key] > lately]

    def note_present(self, keys: Collection[OffloadKey]) -> None:
        """These blocks are there. What a thread may have seen of them before is outdated."""
        self._asked.difference_update(keys)
        self._note_present(keys)

    def note_absent(self, keys: Collection[OffloadKey]) -> None:
        """These blocks are not there, or are of no use; likewise."""
        self._asked.difference_update(keys)
        self._note_absent(keys)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """These blocks were there, and are no longer; likewise."""
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
        """Waits for the file that each thread is looking for. Without a start, changes nothing."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # --- on the threads ------------------------------------------------------------------------

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
        """Questions about a few files, in one or in several prompts."""
        some: list[tuple[_Question, int]] = []
        num_files = 0
        while self._questions and num_files < _AT_ONCE:
            question, start = self._questions.popleft()
            num_files += min(len(question.keys) - start, _AT_ONCE)
            some.append((question, start))
        return some

    def _look(self, question: _Question, start: int) -> tuple[int, int]:
        """How many of the blocks from `start` on are there, and the end of those looked for."""
        position = start
        for key in question.keys[start : start + _AT_ONCE]:
            if self._is_stopping or position >= question.num_present:
                return position - start, position  # an earlier one is absent
            if not self._is_there(question.namespace, key):
                question.num_present = min(question.num_present, position)
                return position - start, position + 1
            position += 1
        return position - start, position

    def _is_there(self, namespace: str, key: OffloadKey) -> bool:
        try:
            status = self._below.lstat(block_path(namespace, key))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._on_error(error)
            return False
        return stat.S_ISREG(status.st_mode)
