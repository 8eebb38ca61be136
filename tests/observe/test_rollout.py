"""What an operator switches while engines run: the reference engine over a disk tier."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.connector import OffloadingConnectorScheduler
from kvtier.engine import Engine
from kvtier.observe.client import NoAnswer, ask, find_engine
from kvtier.observe.rollout import Switches
from tests.engine.models import random_tokens
from tests.engine.test_offloading import CASES, offloading_engine

PROMPT = random_tokens(1, 96)
OTHER = random_tokens(2, 96)
DISK = "0:disk"


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", str(tmp_path / "run"))


def options(folder: Path) -> dict[str, Any]:
    tier = {"type": "disk", "path": str(folder / "kv.slab"), "max_bytes": "8MiB"}
    return {"cpu_bytes_to_use": "4MiB", "prefill_tokens_per_s": 0, "secondary_tiers": [tier]}


def figures(engine: Engine) -> dict[str, float]:
    assert engine._connector is not None
    scheduler = engine._connector.scheduler
    assert isinstance(scheduler, OffloadingConnectorScheduler)
    assert engine.drain()
    stats = scheduler.get_stats()
    assert stats is not None
    return stats.counters | {name: float(len(values)) for name, values in stats.histograms.items()}


def switched(**wanted: Any) -> dict[str, Any]:
    return ask(find_engine(), "switch", **wanted)


def loaded(engine: Engine, prompt: list[int]) -> int:
    """Tokens that a request with this prompt loads, with an empty device cache."""
    engine.drop_device_cache()
    (result,) = engine.generate([prompt], 2)
    return result.num_loaded_tokens


def test_stores_and_loads_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        switched(stores=False)
        assert loaded(engine, PROMPT) == 0
        assert "kvtier_cpu_stored_blocks" not in figures(engine)
        assert loaded(engine, PROMPT) == 0, "nothing was stored"
        switched(stores=True)
        assert loaded(engine, PROMPT) == 0
        assert loaded(engine, PROMPT) > 0
        switched(loads=False)
        assert loaded(engine, PROMPT) == 0
        switched(loads=True)
        assert loaded(engine, PROMPT) > 0
    assert caplog.text.count("Switched over the status socket") == 4


def test_one_tier(tmp_path: Path) -> None:
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        stored = f'kvtier_tier_blocks{{tier="{DISK}",direction="store"}}'
        refused = f'kvtier_tier_not_stored_blocks{{tier="{DISK}",reason="switched_off"}}'
        assert switched(tiers=[DISK], stores=False)["stores_off"] == [DISK]
        engine.generate([PROMPT], 2)
        counted = figures(engine)
        assert stored not in counted
        assert counted[refused] == counted["kvtier_cpu_stored_blocks"] > 0
        switched(tiers=[DISK], stores=True)
        engine.generate([OTHER], 2)
        assert figures(engine)[stored] > 0
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        switched(tiers=[DISK], loads=False)
        assert loaded(engine, OTHER) == 0
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        assert loaded(engine, OTHER) > 0, "it was there"


def test_both_halves_of_the_requests_are_counted(tmp_path: Path) -> None:
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        switched(share=40)
        prompts = [random_tokens(10 + n, 40) for n in range(60)]
        results = engine.generate(prompts, 1)
        served = [Switches.serves(_switches(engine), its.request_id) for its in results]
        counted = figures(engine)
        for half, number in (("with", sum(served)), ("without", 60 - sum(served))):
            assert number > 5
            assert counted[f'kvtier_requests{{half="{half}"}}'] == number
            assert counted[f'kvtier_request_prompt_tokens{{half="{half}"}}'] == 40 * number
            assert counted[f'kvtier_first_token_seconds{{half="{half}"}}'] == number
        per_prompt = 40 // 8
        assert counted["kvtier_cpu_stored_blocks"] == per_prompt * sum(served)


def test_a_request_counts_as_it_was_served_when_it_arrived(tmp_path: Path) -> None:
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        waiting = [engine.add_request(random_tokens(n, 40), 1) for n in range(3)]
        switched(share=0)
        while engine.has_requests:
            engine.step()
        assert figures(engine)['kvtier_requests{half="with"}'] == len(waiting)
        switched(share=100, stores=False, loads=False)
        engine.generate([OTHER], 1)
        assert figures(engine)['kvtier_requests{half="without"}'] == 1


def _switches(engine: Engine) -> Switches:
    assert engine._connector is not None
    scheduler = engine._connector.scheduler
    assert isinstance(scheduler, OffloadingConnectorScheduler)
    switches = scheduler.manager.switches  # type: ignore[attr-defined]
    assert isinstance(switches, Switches)
    return switches


def test_a_share_is_that_share_and_always_the_same_requests() -> None:
    switches = Switches()
    ids = [f"cmpl-{n:x}" for n in range(20_000)] + ["cmpl-\ud800"]
    before: set[str] = set()
    for share in (0, 0.5, 10, 50, 99, 100):
        switches.change({"share": share})
        served = {name for name in ids if switches.serves(name)}
        assert abs(len(served) / len(ids) - share / 100) < 0.01
        assert before <= served, "a larger share serves all that a smaller one does"
        before = served


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tiers": ["2:disk"], "loads": False}, "host, 0:disk"),
        ({"tiers": "0:disk", "loads": False}, "host, 0:disk"),
        ({"share": 101}, "0 to 100"),
        ({"share": True}, "0 to 100"),
        ({"share": float("nan")}, "0 to 100"),
        ({"loads": "off"}, "true or false"),
        ({"stores": 0}, "true or false"),
    ],
)
def test_wrong_wishes_change_nothing(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    model, engine_config = CASES["full"]
    with offloading_engine(model, engine_config, options(tmp_path)):
        before = switched()
        with pytest.raises(NoAnswer, match=says):
            switched(**wrong)
        assert switched() == before


def test_switching_all_the_time_keeps_every_answer_right(tmp_path: Path) -> None:
    model, engine_config = CASES["full"]
    prompts = [random_tokens(n % 7, 96) for n in range(40)]
    with offloading_engine(model, engine_config, {"cpu_bytes_to_use": "4MiB"}) as engine:
        expected = [its.token_ids for its in engine.generate(prompts, 4)]
    has_ended = threading.Event()

    def play() -> None:
        socket = find_engine()
        turn = 0
        while not has_ended.is_set():
            turn += 1
            tiers = [["host"], [DISK], ["host", DISK]][turn % 3]
            ask(socket, "switch", tiers=tiers, loads=turn % 2 == 0, stores=turn % 5 != 0)

    with offloading_engine(model, engine_config, options(tmp_path)) as engine:
        player = threading.Thread(target=play)
        player.start()
        try:
            answers = []
            for prompt in prompts:
                engine.drop_device_cache()
                answers += engine.generate([prompt], 4)
        finally:
            has_ended.set()
            player.join()
    assert [its.token_ids for its in answers] == expected
