"""`vllm serve` with kvtier: started, loaded, scraped, reset, ended and started again."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import BLOCK_TOKENS
from kvtier.testing.vllm.tiny_model import LLAMA
from kvtier.tiering.disk.reader import SlabReader
from tests.e2e.vllm.lasting_tiers import PATIENT, figure_of
from tests.e2e.vllm.openai_server import Completion, Server, Stop, kvtiers_figures, random_words
from tests.e2e.vllm.process_tree import regions_below, vllms_own_removed
from tests.e2e.vllm.processes import VLLM
from tests.tiering.fs.harness import block_files

pytestmark = pytest.mark.vllm

BLOCKS_OF_PREFIX = 8
BLOCKS_OF_PROMPT = 16
SHARED = random_words(BLOCKS_OF_PREFIX * BLOCK_TOKENS, "prefix")
OWN_TOKENS = (BLOCKS_OF_PROMPT - BLOCKS_OF_PREFIX) * BLOCK_TOKENS
PROMPTS = [SHARED + random_words(OWN_TOKENS + 8, client) for client in range(8)]
"""Prompts of eight clients, with a common first half. The device has no room for all of them."""
BLOCKS = BLOCKS_OF_PREFIX + len(PROMPTS) * (BLOCKS_OF_PROMPT - BLOCKS_OF_PREFIX)
CACHED_TOKENS = BLOCKS_OF_PROMPT * BLOCK_TOKENS
OTHERS = [random_words(CACHED_TOKENS + 8, f"other {number}") for number in range(6)]
"""Blocks that host memory has room for."""
FORGET = (
    ["/reset_prefix_cache?reset_external=true"],
    ["/pause", "/resume"],
    ["/sleep?level=1", "/wake_up"],
)
"""Commands of an operator after which no earlier block is valid."""

ENDED_BY_ITSELF = {0, 1}
"""Exit codes of a server that was not ended by a signal. 1: the server noticed the end of its
engine before it expected it; stock vLLM on a busy machine does that, too."""


def options(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": len(OTHERS) * BLOCKS_OF_PROMPT * LLAMA.bytes_per_block(BLOCK_TOKENS),
        # Load also if computing would be faster than the disk of this machine.
        "prefill_tokens_per_s": 0,
        "secondary_tiers": [tier | PATIENT for tier in tiers],
    }


def disk(path: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "max_bytes": "64MiB"}


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def stop_under_load(server: Server) -> Stop:
    """Send SIGTERM while all clients wait for long answers, then disconnect them.

    vLLM does not end before it has answered its clients, or they have disconnected.
    """
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = [clients.submit(server.complete, prompt, 480) for prompt in PROMPTS]
        server.wait_until(lambda: server.metrics()["vllm:num_requests_running"] > 0)
        stop = server.stop(clients_stay=False)
    assert any(answer.exception() is not None for answer in answers)
    return stop


def assert_same(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for answer, right in zip(answers, expected, strict=True):
        assert answer.is_as(right), (answer, right)


def has_stored(slab: Path, num_blocks: int) -> bool:
    """True if the slab has this number of blocks. Not read from the metrics: an idle server does
    not report the end of a store before the next request."""
    with SlabReader(slab) as reader:
        return len(reader.snapshot().live_slots()) == num_blocks


@dataclass(slots=True)
class FirstLife:
    """Answers of a server with host memory and a disk tier, and of stock vLLM alone."""

    slab: Path
    alone: list[Completion]
    cold: list[Completion]
    together: list[Completion]
    """Answers to prompts sent at once, with all blocks in host memory."""
    figures_together: dict[str, float]
    from_disk: list[Completion]
    """Answers to prompts sent one by one, with host memory full of other blocks."""
    blocks_from_disk: float
    metrics: dict[str, float]
    regions: dict[Path, bool]
    stop: Stop
    was_killed: bool
    """True if vLLM has killed a process of its own after a timeout."""
    figures_at_start: dict[str, float]
    log: str


@pytest.fixture(scope="module")
def first_life(
    vllm: VLLM, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FirstLife]:
    slab = tmp_path_factory.mktemp("disk") / "kv.slab"
    with (
        Server(vllm, llama, options(disk(slab)), "--shutdown-timeout", "30", fresh=True) as server,
        Server(vllm, llama) as stock,
    ):
        server.wait_until_up()
        figures_at_start = server.figures()
        regions = regions_below(server.process.pid)
        cold = server.complete_together(PROMPTS)
        server.wait_until(partial(has_stored, slab, BLOCKS))
        together = server.complete_together(PROMPTS)
        figures_together = server.figures()
        on_disk = BLOCKS
        for prompt in OTHERS:
            server.complete(prompt)
            # A slot stays occupied until its block is on disk, however slow the disk is.
            on_disk += BLOCKS_OF_PROMPT
            server.wait_until(partial(has_stored, slab, on_disk))
        before = server.figure('tier_blocks{tier="0:disk",direction="load"}')
        from_disk = [server.complete(prompt) for prompt in PROMPTS]
        metrics = server.metrics()
        blocks_from_disk = server.figure('tier_blocks{tier="0:disk",direction="load"}') - before
        stop = server.stop()
        log = server.process.stdout + server.process.stderr
        was_killed = "force killing" in log
        stock.wait_until_up()
        alone = stock.complete_together(PROMPTS)
    yield FirstLife(
        slab,
        alone,
        cold,
        together,
        figures_together,
        from_disk,
        blocks_from_disk,
        metrics,
        regions,
        stop,
        was_killed,
        figures_at_start,
        log,
    )
    slab.unlink()


def test_clients_at_once_are_served_from_host_memory(first_life: FirstLife) -> None:
    assert_same(first_life.cold, first_life.alone)
    assert_same(first_life.together, first_life.alone)
    assert first_life.figures_together["cpu_loaded_blocks"] > 0
    assert first_life.figures_together.get('tier_blocks{tier="0:disk",direction="load"}', 0) == 0


def test_clients_are_served_from_disk(first_life: FirstLife) -> None:
    assert_same(first_life.from_disk, first_life.alone)
    assert [answer.cached_tokens for answer in first_life.from_disk] == [CACHED_TOKENS] * 8
    assert first_life.blocks_from_disk == BLOCKS


def test_counters_are_there_before_the_first_request(first_life: FirstLife) -> None:
    for name in ("stored", "loaded"):
        assert first_life.figures_at_start[figure_of("0:disk", f"{name}_blocks")] == 0


def test_the_log_can_be_searched(first_life: FirstLife) -> None:
    lines = [line.partition("] ")[2] for line in first_life.log.splitlines() if "[kvtier/" in line]
    assert lines
    assert all(line.startswith("kvtier: ") for line in lines), lines
    [banner] = [line for line in lines if line.startswith("kvtier: release ")]
    slots = len(OTHERS) * BLOCKS_OF_PROMPT
    assert f"host memory {slots} blocks ({slots * BLOCK_TOKENS} tokens), disk " in banner


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["cpu_loaded_blocks_total"], id="hits in host memory"),
        pytest.param(['tier_hit_blocks_total{tier="0:disk"}'], id="hits on disk"),
        pytest.param(["cpu_slots", "cpu_resident_blocks"], id="occupancy of host memory"),
        pytest.param(
            [f'disk_{what}_blocks{{tier="0:disk"}}' for what in ("capacity", "resident")],
            id="occupancy of the disk",
        ),
        pytest.param(['tier_seconds_sum{tier="0:disk",direction="load"}'], id="latency of loads"),
        pytest.param(['tier_seconds_sum{tier="0:disk",direction="store"}'], id="latency of stores"),
    ],
)
def test_what_a_tier_does_can_be_scraped(first_life: FirstLife, names: list[str]) -> None:
    for name in names:
        assert first_life.metrics[f"vllm:kvtier_{name}"] > 0


def test_the_bytes_of_a_tier_can_be_scraped(first_life: FirstLife) -> None:
    figures = kvtiers_figures(first_life.metrics)
    assert figures["block_bytes"] == LLAMA.bytes_per_block(BLOCK_TOKENS)
    for done in ("loaded", "stored"):
        blocks = figures[figure_of("0:disk", f"{done}_blocks")]
        assert figures[figure_of("0:disk", f"{done}_bytes")] == blocks * figures["block_bytes"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "total_bytes_total",
        "load_bytes_total",
        "cpu_allocation_size_sum",
        "tiering_read_bytes_total",
        "tiering_read_time_total",
        "tiering_write_bytes_total",
        "tiering_chunk_queries_total",
        "tiering_chunk_hits_total",
    ],
)
def test_dashboards_made_for_vllms_own_tiers_have_values(first_life: FirstLife, name: str) -> None:
    assert first_life.metrics[f"vllm:kv_offload_{name}"] > 0


def test_vllms_metrics_say_the_same_as_kvtiers(first_life: FirstLife) -> None:
    figures = kvtiers_figures(first_life.metrics)
    for theirs, ours in (
        ("tiering_read_bytes", "loaded_bytes"),
        ("tiering_write_bytes", "stored_bytes"),
        ("tiering_chunk_hits", "lookup_hits"),
    ):
        known = first_life.metrics[f"vllm:kv_offload_{theirs}_total"]
        assert known == figures[figure_of("0:disk", ours)]
    assert first_life.metrics["vllm:kv_offload_tiering_active_promotion_jobs"] == 0


def test_each_prompt_token_has_a_source(first_life: FirstLife) -> None:
    figures = kvtiers_figures(first_life.metrics)
    tokens = {
        source: figures[f'prompt_tokens{{source="{source}"}}']
        for source in ("device", "host", "0:disk", "computed")
    }
    assert sum(tokens.values()) == first_life.metrics["vllm:prompt_tokens_total"]
    assert tokens["computed"] > 0
    assert tokens["host"] > 0
    assert tokens["0:disk"] >= first_life.blocks_from_disk * BLOCK_TOKENS
    # A write that came back is read back; no block counts twice.
    read_back = figures['tier_read_back_blocks{tier="0:disk"}']
    assert 0 < read_back <= figures[figure_of("0:disk", "stored_blocks")]


def test_the_state_of_a_breaker_can_be_scraped(first_life: FirstLife) -> None:
    figures = kvtiers_figures(first_life.metrics)
    for name in ("breaker_state", "store_breaker_state"):
        assert figures[figure_of("0:disk", name)] == 0


def test_an_idle_server_ends_on_sigterm_and_leaves_nothing(first_life: FirstLife) -> None:
    assert first_life.stop.end.exit_code in ENDED_BY_ITSELF
    assert first_life.stop.end.orphans == []
    assert not first_life.was_killed
    assert len(first_life.regions) == 1
    assert not any(region.exists() for region in first_life.regions)
    assert not is_locked(first_life.slab)


def test_shared_memory_has_no_name_while_a_server_runs(first_life: FirstLife) -> None:
    assert first_life.regions
    assert not any(first_life.regions.values())


def test_a_server_that_is_started_again_is_warm_and_forgets_when_told(
    vllm: VLLM, llama: Path, first_life: FirstLife
) -> None:
    with Server(vllm, llama, options(disk(first_life.slab))) as server:
        server.wait_until_up()
        warm = server.complete_together(PROMPTS)
        assert server.figure('tier_blocks{tier="0:disk",direction="load"}') == BLOCKS
        assert server.figure("cpu_stored_blocks") == 0
        assert_same(warm, first_life.alone)

        for orders in FORGET:
            assert server.complete(PROMPTS[0]).cached_tokens == CACHED_TOKENS
            for order in orders:
                server.post(order)
            loaded = server.figure("cpu_loaded_blocks")
            again = server.complete(PROMPTS[0])
            assert again.cached_tokens == 0
            assert_same([again], first_life.alone[:1])
            assert server.figure("cpu_loaded_blocks") == loaded
            assert server.figure('tier_blocks{tier="0:disk",direction="load"}') == BLOCKS

        regions = regions_below(server.process.pid)
        stop = stop_under_load(server)
    assert stop.end.exit_code in ENDED_BY_ITSELF
    assert stop.end.orphans == []
    assert not any(region.exists() for region in regions)
    assert not is_locked(first_life.slab)


def test_two_servers_share_a_directory_and_killing_them_leaves_nothing(
    vllm: VLLM, llama: Path, tmp_path: Path
) -> None:
    shared = {"type": "fs", "root_dir": str(tmp_path / "shared"), "max_bytes": "64MiB"}
    slabs = [tmp_path / "first.slab", tmp_path / "second.slab"]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Server(vllm, llama, options(disk(slab), shared))) for slab in slabs
        )
        first.wait_until_up()
        computed = first.complete_together(PROMPTS)
        first.wait_until(lambda: len(block_files(tmp_path / "shared")) == BLOCKS)
        second.wait_until_up()
        found = [second.complete(prompt) for prompt in PROMPTS]
        assert_same(found, computed)
        assert [answer.cached_tokens for answer in found] == [CACHED_TOKENS] * 8
        assert second.figure('tier_blocks{tier="1:fs",direction="load"}') == BLOCKS
        assert second.figure("cpu_stored_blocks") == 0

        regions = [*regions_below(first.process.pid), *regions_below(second.process.pid)]
        assert len(regions) == 2
        with vllms_own_removed(first.process.pid, second.process.pid):
            first.kill_all()
            # vLLM's engine does not notice that its server has ended; kvtier does, and ends it.
            stop = second.stop(signal.SIGKILL)
        assert [name for name in stop.end.orphans if "EngineCore" in name] == []
        assert not any(region.exists() for region in regions)
    assert not any(map(is_locked, slabs))
