"""Lookups in a storage that several engines share, for the scheduler's thread, which never waits.

`LookupCache` answers from memory which blocks are there. Its threads look for unknown blocks, so
that a later step gets an answer. Other engines store and remove blocks too, so an answer is kept
only for seconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from kvtier.base import LookupResult, OffloadKey

__all__ = ["AbsentBlocks", "Look", "LookupCache"]

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
_MAX_KNOWN_ABSENT = 16_384
"""Largest number of blocks in `AbsentBlocks`."""

Look: TypeAlias = Callable[[str, Sequence[OffloadKey]], Iterable[bool]]
"""Tells for each of some blocks of a namespace if it is there. May wait, and may be lazy: answers
after the first False are not taken."""


class _Question:
    """Blocks of one namespace, in prompt order. Blocks after the first absent one need no
    answer."""

    __slots__ = ("keys", "namespace", "num_present")

    def __init__(self, namespace: str, keys: list[OffloadKey]) -> None:
        self.namespace = namespace
        self.keys = keys
        self.num_present = len(keys)
        """Upper bound for the number of leading blocks that are there. The lookup threads lower
        it."""


class LookupCache:
    """Remembers which blocks are there and which are not. The scheduler's thread asks, and never
    waits: threads of this object look for the blocks."""

    def __init__(
        self,
        looks: Sequence[Look],
        namespace: str,
        *,
        name: str,
        longest_key: int,
        at_once: int = _AT_ONCE,
    ) -> None:
        """`looks`: for each thread, the function that it calls. It does not raise. `namespace`:
        where to look. `name`: prefix of the threads' names. `longest_key`: blocks with longer keys
        are absent. `at_once`: blocks that one thread looks up before it takes the next questions.
        """
        self._at_once = at_once
        self._namespace = namespace
        self._longest_key = longest_key
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
            threading.Thread(target=self._run, args=(look,), name=f"{name}-{number}", daemon=True)
            for number, look in enumerate(looks)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # --- the scheduler's thread ----------------------------------------------------------------

    def look_into(self, namespace: str) -> None:
        """Forget everything, and look into this namespace from now on."""
        self._namespace = namespace
        self._present.clear()
        self._absent.clear()
        self._asked.clear()
        self._unknown = []

    def answer(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return answers for these blocks, up to the first that is known to be absent. RETRY means
        unknown: a thread looks for the block."""
        if self._answers:
            self._learn()
        now = time.monotonic()
        answers: list[LookupResult] = []
        unknown: list[OffloadKey] = []
        present, absent = self._present.get, self._absent.get
        for key in keys:
            if present(key, 0.0) > now:
                answers.append(_HIT)
            elif absent(key, 0.0) > now or len(key) > self._longest_key:
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
            if len(new) >= self._at_once:
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
                self._questions += (
                    (question, start) for start in range(0, len(keys), self._at_once)
                )
            self._changed.notify(
                min(len(self._threads), -(-sum(map(len, prompts)) // self._at_once))
            )

    def present_of(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that were found or stored within the last 5 s
        (`_SURELY_FOR_S`)."""
        lately = time.monotonic() + _PRESENT_FOR_S - _SURELY_FOR_S
        present = self._present
        return [key for key in keys if key in present and present[key] > lately]

    def note_present(self, keys: Collection[OffloadKey]) -> None:
        """Record that these blocks are there. Later answers to questions already asked about
        them are ignored."""
        if self._asked:
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
            asked.difference_update(keys[start : start + self._at_once])

    def stop(self) -> None:
        """End the threads. Waits for the blocks that each is looking up. Does nothing before
        `start`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # --- the threads ---------------------------------------------------------------------------

    def _run(self, look: Look) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._questions)
                if self._is_stopping:
                    return
                some = self._take_some()
            for question, start in some:
                self._answers.append((question, start, *self._look(look, question, start)))

    def _take_some(self) -> list[tuple[_Question, int]]:
        """Take questions, of one prompt or several, until they ask for `at_once` blocks or more,
        or none is left."""
        some: list[tuple[_Question, int]] = []
        num_blocks = 0
        while self._questions and num_blocks < self._at_once:
            question, start = self._questions.popleft()
            num_blocks += min(len(question.keys) - start, self._at_once)
            some.append((question, start))
        return some

    def _look(self, look: Look, question: _Question, start: int) -> tuple[int, int]:
        """Return how many blocks from `start` on are there without a gap, and the position after
        the last one that was looked up."""
        position = start
        if position >= question.num_present:
            return 0, position  # an earlier block is absent
        for is_there in look(question.namespace, question.keys[start : start + self._at_once]):
            if not is_there:
                question.num_present = min(question.num_present, position)
                return position - start, position + 1
            position += 1
            if self._is_stopping or position >= question.num_present:
                break
        return position - start, position


class AbsentBlocks:
    """Blocks that were not there when a thread wanted to record their use. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces: OrderedDict[OffloadKey, str] = OrderedDict()
        """By block, where it was looked for. The latest is last."""

    def add(self, namespace: str, keys: Iterable[OffloadKey]) -> None:
        """Record that these blocks were not there."""
        absent = self._namespaces
        with self._lock:
            for key in keys:
                absent[key] = namespace
                absent.move_to_end(key)
            while len(absent) > _MAX_KNOWN_ABSENT:
                absent.popitem(last=False)

    def __len__(self) -> int:
        return len(self._namespaces)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._namespaces

    def take(self, namespace: str, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys` that were not there. A block is returned once: when it is used
        again, it is looked for again."""
        absent = self._namespaces
        if not absent:
            return []
        with self._lock:
            found = [key for key in keys if key in absent]
            return [key for key in found if absent.pop(key) == namespace]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Record that these blocks are there now."""
        absent = self._namespaces
        if absent:
            with self._lock:
                for key in keys:
                    absent.pop(key, None)

    def clear(self) -> None:
        """Forget all, because another namespace is read from now on."""
        with self._lock:
            self._namespaces.clear()
