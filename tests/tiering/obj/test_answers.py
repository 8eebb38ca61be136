"""What an object store may answer: errors, garbage, somebody else's objects, ten gigabytes. The
engine's answers stay right, memory stays bounded, and the tier is used again afterwards."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import obstore
import pytest

from kvtier.seal import SEAL_BYTES
from kvtier.tiering.metrics import of_tier
from kvtier.tiering.obj.janitor import JanitorTimes
from kvtier.tiering.obj.manager import ObjSecondaryTierManager
from tests.tiering.obj.front import Answer, Asked, Front, error
from tests.tiering.obj.server import SeaweedProcess
from tests.tiering.patience import wait_until
from tests.tiering.reference import (
    BLOCK_BYTES,
    BLOCKS_PER_PROMPT,
    Prompt,
    ReferenceEngine,
    prompts,
)

PROMPTS = prompts(2)
NUM_BLOCKS = len(PROMPTS) * BLOCKS_PER_PROMPT
DEADLINES = {"lookup_timeout_ms": 500, "load_timeout_ms": 1000}
HELD_S = 10.0
"""A request that waits for so long was not released by its deadlines."""
TEN_GB = 10 * 10**9
pytestmark = pytest.mark.usefixtures("layout")


@pytest.fixture(autouse=True)
def _busy_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the answers, too."""
    monkeypatch.setattr(
        ObjSecondaryTierManager, "janitor_times", JanitorTimes(sweep_s=0.2, early_s=0.05)
    )


@pytest.fixture
def engine(server: SeaweedProcess, front: Front) -> Iterator[ReferenceEngine]:
    """An engine that has stored the prompts, and loads them."""
    with engine_over(server, front) as engine:
        engine.serve(PROMPTS)
        engine.settle()
        wait_for_recovery(engine)
        yield engine


def engine_over(server: SeaweedProcess, front: Front) -> ReferenceEngine:
    keys = {**server.keys, "endpoint": front.endpoint, "max_bytes": 10**9}
    return ReferenceEngine({"type": "obj", **keys, **DEADLINES})


def block_names(server: SeaweedProcess) -> list[str]:
    return [name for name in server.names() if re.search("/[0-9a-f]{32}/", name)]


def serve_in_trouble(engine: ReferenceEngine, some: Sequence[Prompt] = PROMPTS) -> None:
    engine.slowest_s = 0.0
    engine.serve_from_tiers(some)
    engine.settle()
    assert engine.slowest_s < HELD_S


def wait_for_recovery(engine: ReferenceEngine) -> None:
    """All prompts come from the tier again."""

    def is_used_again() -> bool:
        loaded = engine.serve_from_tiers(PROMPTS)
        engine.settle()
        return loaded == 16 * NUM_BLOCKS

    wait_until(is_used_again, "all prompts are loaded again", 60)


# --- somebody else's objects -----------------------------------------------------------------


@pytest.mark.parametrize("who", ["the engine that stored", "a new engine"])
def test_foreign_objects_leave_and_their_blocks_are_stored_again(
    server: SeaweedProcess, front: Front, engine: ReferenceEngine, who: str
) -> None:
    """Each object of blocks is replaced by one of six foreign ones."""
    store, names = server.store(), block_names(server)
    contents = [bytes(obstore.get(store, name).bytes()) for name in names]
    for number, name in enumerate(names):
        foreign = [
            b"",
            b"somebody else's",
            bytes(len(contents[number])),
            bytes(len(contents[number]) + 1),
            contents[number][:-1],
            contents[number - 1],  # sealed for another key
        ]
        # Blocks that share objects have fewer objects than there are foreign ones.
        shift = 2 if who == "a new engine" else 0
        obstore.put(store, name, foreign[(number + shift) % len(foreign)])
    if who == "a new engine":
        with engine_over(server, front) as newcomer:
            check_foreign(newcomer, len(names))
    else:
        check_foreign(engine, len(names))
    assert server.num_blocks() == NUM_BLOCKS


def check_foreign(engine: ReferenceEngine, num_objects: int) -> None:
    serve_in_trouble(engine)
    wait_for_recovery(engine)
    figures = engine.figures()
    assert (
        sum(n for name, n in figures.items() if "kvtier_tier_seal_failures" in name) >= num_objects
    )


# --- ten gigabytes -----------------------------------------------------------------------------


def zeros() -> Iterator[bytes]:
    for _ in range(TEN_GB // (1 << 20)):
        yield bytes(1 << 20)


def huge(*methods: str, headers: Mapping[str, str]) -> Callable[[Asked], Answer | None]:
    """Answers these requests for blocks."""
    return lambda asked: (
        Answer(body=zeros(), headers={"ETag": "x", **headers})
        if asked.method in methods and re.search("/[0-9a-f]{32}/", asked.path)
        else None
    )


HUGE = {
    "GET": huge("GET", headers={"Content-Length": str(TEN_GB)}),
    "GET and HEAD": huge("GET", "HEAD", headers={"Content-Length": str(TEN_GB)}),
    "GET, of unknown length": huge("GET", headers={}),
}


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("answered", HUGE)
def test_ten_gigabytes_are_not_read(front: Front, engine: ReferenceEngine, answered: str) -> None:
    forget_peak()
    before = peak_bytes()
    front.answer = HUGE[answered]
    serve_in_trouble(engine)
    time.sleep(1)  # what is still being read would grow
    assert peak_bytes() - before < 200 << 20
    front.answer = lambda asked: None
    wait_for_recovery(engine)


# --- errors and garbage ------------------------------------------------------------------------

METADATA = {"ETag": "x", "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
ANSWERS: dict[str, tuple[Answer, str]] = {
    "SlowDown": (error(503, "SlowDown"), "refused"),
    "an expired token": (error(403, "ExpiredToken"), "refused"),
    "an expired token, as Amazon says it": (error(400, "ExpiredToken"), "refused"),
    "no bucket": (error(404, "NoSuchBucket"), "refused"),
    "another region": (Answer(301), "refused"),
    "no room": (error(507, "InsufficientStorage"), "full"),
    "bytes that are not HTTP": (Answer(raw=bytes(range(256))), "garbage"),
    "a page of HTML": (Answer(200, b"<html>Log in!</html>", METADATA), "garbage"),
    "an answer about another object": (
        Answer(
            200,
            b"<DeleteResult><Error><Key>key</Key><Code>AccessDenied</Code><Message>no</Message>"
            b"</Error></DeleteResult>",
            METADATA,
        ),
        "garbage",
    ),
    "nothing": (Answer(raw=b""), "unreachable"),
    "half an answer": (
        Answer(200, b"half", {**METADATA, "Content-Length": str(SEAL_BYTES + BLOCK_BYTES)}),
        "garbage",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer(
    front: Front, engine: ReferenceEngine, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, kind = ANSWERS[what]
    front.answer = lambda asked: answer
    serve_in_trouble(engine, PROMPTS[:1])
    failures = of_tier(f"kvtier_obj_failures_{kind}", "0:obj")
    wait_until(lambda: engine.figures()[failures] > 0, f"a failure is {kind}")
    front.answer = lambda asked: None
    wait_for_recovery(engine)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("seed", range(2))
def test_any_answers_in_any_order(
    front: Front, engine: ReferenceEngine, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Every thread of the tier survives them."""
    random = Random(seed)
    statuses = [200, 204, 206, 301, 304, 400, 403, 404, 409, 412, 416, 429, 500, 503, 507]

    def answer(asked: Asked) -> Answer | None:
        if random.random() < 0.2:
            return None
        if random.random() < 0.3:
            return random.choice(list(ANSWERS.values()))[0]
        return Answer(random.choice(statuses), random.randbytes(random.randrange(99)), METADATA)

    front.answer = answer
    for _ in range(5):
        serve_in_trouble(engine)
    front.answer = lambda asked: None
    wait_for_recovery(engine)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- a bucket that somebody changes --------------------------------------------------------------


def test_a_bucket_that_somebody_has_emptied(
    server: SeaweedProcess, engine: ReferenceEngine
) -> None:
    server.empty()
    serve_in_trouble(engine)
    assert engine.figures()['kvtier_obj_vanished_blocks{tier="0:obj"}'] >= len(PROMPTS)
    wait_for_recovery(engine)
    assert server.num_blocks() == NUM_BLOCKS
