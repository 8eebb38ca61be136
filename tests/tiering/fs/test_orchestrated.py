"""The fs tier below host memory, made from a user's configuration."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvtier.base import Locality, LookupResult, Medium, ReqContext
from kvtier.testing import FaultSchedule, TierHarness
from kvtier.tiering.factory import TierStartError
from kvtier.tiering.fs import manager
from kvtier.tiering.fs.access import NoFollowTree
from kvtier.tiering.fs.manager import FsSecondaryTierManager
from kvtier.tiering.io import lookups
from kvtier.tiering.metrics import of_tier
from tests.tiering.disk.harness import bytes_for as slab_bytes_for
from tests.tiering.disk.harness import is_mapped
from tests.tiering.engine import Engine, engine_with
from tests.tiering.fs.engine import configured_engine, engine_with_faults
from tests.tiering.fs.harness import block_files, bytes_for, du, fs_harness, fs_of, silent_files
from tests.tiering.patience import wait_until

PROMPTS = [TierHarness.keys(6, start=10 * number) for number in range(12)]


def serve_all(engine: Engine) -> list[int]:
    hits = []
    for prompt in PROMPTS:
        hits.append(engine.serve(prompt))
        engine.settle()
    return hits


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_what_host_memory_has_given_up_comes_back(root: Path) -> None:
    """16 rows for 72 blocks: nearly all of them are promoted from the directory."""
    with configured_engine(root) as engine:
        assert serve_all(engine) == [0] * 12
        assert serve_all(engine) == [6] * 12
        assert serve_all(engine) == [6] * 12


def test_a_restarted_engine_is_warm(root: Path) -> None:
    with configured_engine(root) as engine:
        serve_all(engine)
    with configured_engine(root) as engine:
        assert serve_all(engine) == [6] * 12
        wait_until(lambda: engine.figures()[of_tier(manager.BLOCKS, "0:fs")] == 72, "the gauge")


def test_a_second_engine_is_warm_from_the_start(root: Path) -> None:
    with configured_engine(root) as first, configured_engine(root) as second:
        serve_all(first)
        assert serve_all(second) == [6] * 12


def test_another_model_finds_nothing_and_the_first_still_does(root: Path) -> None:
    with configured_engine(root) as engine:
        serve_all(engine)
    with configured_engine(root, namespace="other weights") as engine:
        assert engine.serve(PROMPTS[0]) == 0
        engine.settle()
    with configured_engine(root) as engine:
        assert engine.serve(PROMPTS[0]) == 6
        engine.settle()


def test_after_a_reset_nothing_is_found_but_others_still_find_it(root: Path) -> None:
    with configured_engine(root) as engine, configured_engine(root) as other:
        serve_all(engine)
        engine.manager.reset_cache()
        engine.settle()
        assert serve_all(engine) == [0] * 12
        assert serve_all(engine) == [6] * 12
        assert serve_all(other) == [6] * 12
        engine.manager.reset_cache()
        engine.settle()
        assert engine.serve(PROMPTS[0]) == 0
        engine.settle()


def test_with_too_little_room_it_is_a_smaller_cache(root: Path) -> None:
    with configured_engine(root, max_bytes=bytes_for(20)) as engine:
        for _ in range(4):
            serve_all(engine)
            assert du(root) <= bytes_for(20)
        assert engine.serve(PROMPTS[-1]) == 6


def test_events_tell_what_is_where(root: Path) -> None:
    with configured_engine(root, max_bytes=bytes_for(20)) as engine:
        there: set[bytes] = set()
        for turn in range(8):
            for number in range(12):
                engine.serve(TierHarness.keys(6, start=1000 * turn + 10 * number))
                engine.settle()
            for event in engine.manager.take_events():
                if event.medium is not Medium.STORAGE:
                    continue
                assert event.locality is Locality.REMOTE
                if event.removed:
                    assert there.issuperset(event.keys), "removed, but never stored"
                    there.difference_update(event.keys)
                else:
                    assert there.isdisjoint(event.keys), "stored twice"
                    there.update(event.keys)
        assert there, "nothing was told"
        assert there == {bytes.fromhex(path.name) for path in block_files(root)}


def test_an_engine_ends_though_its_files_do_not_answer(root: Path) -> None:
    """It abandons the tier. Memory that the kernel may still write to stays mapped."""
    threads = set(threading.enumerate())
    engine, faulty = engine_with_faults(root, FaultSchedule(), num_rows=8, shutdown_timeout_s=0.2)
    fs = faulty.tier
    assert isinstance(fs, FsSecondaryTierManager)
    for prompt in PROMPTS[:3]:
        engine.serve(prompt)
        engine.settle()
    with silent_files(fs):
        request = ReqContext("waiting")
        engine.manager.on_new_request(request)

        def is_loading() -> bool:
            engine.manager.lookup_prefix(PROMPTS[0], request)
            engine.step()
            return any(lane._num_in_flight for lane in fs._lanes)

        wait_until(is_loading, "a load is under way")
        address = fs._rows_address
        engine.manager.shutdown()
        assert is_mapped(address), "what is read goes into memory that may be someone else's"
    wait_until(lambda: set(threading.enumerate()) <= threads, "the tier has ended")
    with configured_engine(root) as after:
        assert after.serve(PROMPTS[0]) == 6


def test_an_engine_leaves_its_seat_though_the_file_server_is_slow(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses of many blocks wait to be written: these may be dropped at shutdown."""
    real = NoFollowTree.lstat

    def lstat(self: NoFollowTree, path: str | Path) -> os.stat_result:
        if threading.current_thread().name == "kvtier-fs-uses":
            time.sleep(0.005)
        return real(self, path)

    monkeypatch.setattr(NoFollowTree, "lstat", lstat)
    with configured_engine(root) as engine:
        engine.serve(PROMPTS[0])
        engine.settle()
        engine.tier.touch(TierHarness.keys(10_000, start=1000), ReqContext("long"))
    assert os.listdir(root / "engines") == []


def test_what_was_stored_after_it_was_missed_is_not_offered_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its use is to be written before its file exists."""
    monkeypatch.setattr(lookups, "_SURELY_FOR_S", 0.0)
    request = ReqContext("late")
    with fs_harness(root) as harness:
        tier = fs_of(harness)
        late, never = harness.keys(2)
        tier.touch([late, never], request)
        wait_until(lambda: len(tier._uses.absent) == 2, "both are found to be absent")
        (report,) = harness.wait_for(harness.store([late]))
        assert report.result.success
        assert list(tier.missing([late, never], request)) == [never]


def test_what_is_being_stored_is_not_found_absent(root: Path) -> None:
    request = ReqContext("early")
    with fs_harness(root) as harness:
        tier = fs_of(harness)
        early, never = harness.keys(2)
        with silent_files(tier):
            job = harness.store([early])
            tier.touch([early, never], request)
            wait_until(lambda: never in tier._uses.absent, "the other is found to be absent")
            assert early not in tier._uses.absent
        harness.wait_for(job)


def test_after_a_reset_nothing_is_known_to_be_absent(root: Path) -> None:
    with fs_harness(root) as harness:
        tier = fs_of(harness)
        tier.touch(harness.keys(3), ReqContext("before"))
        wait_until(lambda: len(tier._uses.absent) == 3, "all are found to be absent")
        harness.begin_epoch(b"1" * 16)
        assert not tier._uses.absent


def test_a_start_that_fails_says_which_tier(tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    (tmp_path / "strange").write_bytes(b"")
    with pytest.raises(TierStartError, match=r"secondary_tiers\[0\].*holds other things"):
        configured_engine(tmp_path)
    assert os.listdir(tmp_path) == ["strange"]
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_prompt_that_was_removed_while_it_was_hot_is_stored_again(root: Path) -> None:
    """At its second use from host memory: at the first, the files are found missing."""
    prompt = PROMPTS[0]
    with configured_engine(root) as engine:
        engine.serve(prompt)
        engine.settle()
        for file in block_files(root):
            file.unlink()

        def is_back() -> bool:
            assert engine.serve(prompt) == 6
            engine.settle()
            return len(block_files(root)) == 6

        wait_until(is_back, "all six files")
        figures = engine.figures()
        assert figures['kvtier_tier_offered_again_blocks{tier="0:fs"}'] >= 6
        assert 'kvtier_tier_blocks{tier="0:fs",direction="load"}' not in figures
    with configured_engine(root) as engine:
        assert engine.serve(prompt) == 6


def test_a_prompt_of_a_peer_fills_the_disk_in_front(root: Path, tmp_path: Path) -> None:
    """It crosses the network once: the next engine with this disk does not need the root."""
    disk = {"type": "disk", "path": str(tmp_path / "kv.slab"), "max_bytes": slab_bytes_for(256)}
    fs = {"type": "fs", "root_dir": str(root), "max_bytes": bytes_for(256)}
    with configured_engine(root) as peer:
        serve_all(peer)
    with engine_with(disk, fs, num_rows=16, namespace="weights") as engine:
        request = ReqContext("looks")

        def is_on_disk() -> bool:
            assert serve_all(engine) == [6] * 12
            answers = [engine.tier.lookup_batch(prompt, request) for prompt in PROMPTS]
            return all(list(each) == [LookupResult.HIT] * 6 for each in answers)

        wait_until(is_on_disk, "all prompts on disk")
        assert engine.figures()['kvtier_tier_offered_again_blocks{tier="0:disk"}'] == 72
        for prompt in PROMPTS:
            assert engine.serve(prompt) == 6
        figures = engine.figures()
        assert figures['kvtier_tier_blocks{tier="0:disk",direction="load"}'] > 0
        assert 'kvtier_tier_blocks{tier="1:fs",direction="load"}' not in figures
    with engine_with(disk, num_rows=16, namespace="weights") as engine:
        assert serve_all(engine) == [6] * 12
