"""Reads from another process's memory over TCP: through a Mooncake pool, by Mooncake's transfer
engine alone, and by NIXL if the package nixl_cu12 is installed. All of it runs here, in a network
of its own.

    python -m tests.bench.mooncake_peers                   measures
    python -m tests.bench.mooncake_peers engine | nixl     lends memory until standard input ends
"""

from __future__ import annotations

import argparse
import base64
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvtier.config.sizes import as_size
from tests.bench.disk_load import processor_seconds
from tests.bench.disk_rounds import KiB, Measured, MiB, in_turns, typical
from tests.bench.report import print_table, save
from tests.tiering.mooncake.pool import mooncake_master, segment
from tests.tiering.networks import environment_of_tests, private_network
from tests.tiering.processes import free_port

REGION_BYTES = 256 * MiB
MOST_BLOCKS = 1024
CASES = ((64 * KiB, 64), (1 * MiB, 16), (4 * MiB, 8))
"""Bytes of a block, and blocks of one call."""
SECONDS = 0.7
ALONE = 30
"""Reads of one block, for its latency."""
POOL, ENGINE, NIXL = "pool", "engine", "nixl"


class Region:
    """Memory with noise in it."""

    def __init__(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, 1 * MiB, dtype=np.uint8)
        self._bytes = np.tile(noise, REGION_BYTES // noise.nbytes)
        self.address = int(self._bytes.ctypes.data)


class Reader(ABC):
    """Reads blocks of another process into the region of this one."""

    def __init__(self, region: Region) -> None:
        self._base = region.address

    @abstractmethod
    def read(self, blocks: Sequence[int], block_bytes: int) -> None:
        """Read the blocks with these numbers."""

    def _places(self, base: int, blocks: Sequence[int], block_bytes: int) -> list[int]:
        return [base + block * block_bytes for block in blocks]


class PoolReader(Reader):
    """`batch_get_into` of a client that lends nothing."""

    def __init__(self, region: Region, metadata: str, master: str) -> None:
        from kvtier.tiering.mooncake.pool import load_library

        super().__init__(region)
        self._client = load_library().MooncakeDistributedStore()
        code = self._client.setup(f"127.0.0.1:{free_port()}", metadata, 0, 0, "tcp", "", master)
        assert code == 0, code

    def _names(self, blocks: Sequence[int], block_bytes: int) -> list[str]:
        return [f"{block_bytes}-{block}" for block in blocks]

    def fill(self, num_blocks: int, block_bytes: int) -> None:
        """Put blocks into the pool."""
        self._client.remove_all(True)
        for start in range(0, num_blocks, 8):
            blocks = range(start, start + 8)
            codes = self._client.batch_put_from(
                self._names(blocks, block_bytes),
                self._places(self._base, blocks, block_bytes),
                [block_bytes] * len(blocks),
            )
            assert not any(codes), codes

    def read(self, blocks: Sequence[int], block_bytes: int) -> None:
        codes = self._client.batch_get_into(
            self._names(blocks, block_bytes),
            self._places(self._base, blocks, block_bytes),
            [block_bytes] * len(blocks),
        )
        assert set(codes) == {block_bytes}, codes


class EngineReader(Reader):
    """`batch_transfer_sync_read` of Mooncake's transfer engine."""

    def __init__(self, region: Region, said: Sequence[str]) -> None:
        super().__init__(region)
        self._peer, self._there = f"127.0.0.1:{said[0]}", int(said[1])
        self._engine = _transfer_engine(region)

    def read(self, blocks: Sequence[int], block_bytes: int) -> None:
        code = self._engine.batch_transfer_sync_read(
            self._peer,
            self._places(self._base, blocks, block_bytes),
            self._places(self._there, blocks, block_bytes),
            [block_bytes] * len(blocks),
        )
        assert code == 0, code


class NixlReader(Reader):
    """A read by NIXL's UCX backend."""

    def __init__(self, region: Region, said: Sequence[str]) -> None:
        super().__init__(region)
        self._there = int(said[1])
        self._agent = _nixl_agent("reader", region, 0)
        self._agent.add_remote_agent(base64.b64decode(said[0]))

    def read(self, blocks: Sequence[int], block_bytes: int) -> None:
        agent = self._agent
        here, there = (
            agent.get_xfer_descs(
                [(place, block_bytes, 0) for place in self._places(base, blocks, block_bytes)],
                "DRAM",
            )
            for base in (self._base, self._there)
        )
        transfer = agent.initialize_xfer("READ", here, there, "lender")
        state = agent.transfer(transfer)
        while state == "PROC":
            time.sleep(0)
            state = agent.check_xfer_state(transfer)
        assert state == "DONE", state
        agent.release_xfer_handle(transfer)


def _transfer_engine(region: Region) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(region.address, REGION_BYTES) == 0
    return engine


def _nixl_agent(name: str, region: Region, port: int) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(True, True, port, backends=["UCX"]))
    agent.register_memory([(region.address, REGION_BYTES, 0, "region")], "DRAM")
    return agent


def lend(what: str) -> None:
    """Say where the memory is, and keep it until standard input ends."""
    region = Region()
    if what == ENGINE:
        engine = _transfer_engine(region)
        where = engine.get_rpc_port()
    else:
        agent = _nixl_agent("lender", region, free_port())
        where = base64.b64encode(agent.get_agent_metadata()).decode()
    print("lent", where, region.address, flush=True)
    sys.stdin.read()
    os._exit(0)  # the libraries' threads would keep the process


@contextmanager
def _lender(what: str) -> Iterator[list[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.mooncake_peers", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_tests(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("lent "):
                yield line.split()[1:]
                break
        process.kill()


def _measured(reader: Reader, block_bytes: int, at_once: int) -> dict[str, float]:
    num_blocks = min(REGION_BYTES // block_bytes, MOST_BLOCKS)
    order = np.random.default_rng(1).permutation(num_blocks).tolist()
    cpu, began, num_moved = processor_seconds(), time.perf_counter(), 0
    while time.perf_counter() < began + SECONDS:
        start = num_moved % (num_blocks - at_once)
        reader.read(order[start : start + at_once], block_bytes)
        num_moved += at_once
    took = time.perf_counter() - began
    num_bytes = num_moved * block_bytes
    alone = []
    for block in order[:ALONE]:
        began = time.perf_counter()
        reader.read([block], block_bytes)
        alone.append(time.perf_counter() - began)
    return {
        "bytes_per_s": num_bytes / took,
        "cpu_s_per_gb": (processor_seconds() - cpu) / num_bytes * 1e9,
        "alone_s": median(alone),
    }


def run() -> None:
    os.environ |= {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    with private_network() as network, TemporaryDirectory() as directory, ExitStack() as stack:
        master = stack.enter_context(mooncake_master(Path(directory), network))
        stack.enter_context(segment(master, 2 * REGION_BYTES, network))
        region = Region()
        pool = PoolReader(region, master.metadata_url, master.address)
        readers: dict[str, Reader] = {POOL: pool}
        readers[ENGINE] = EngineReader(region, stack.enter_context(_lender(ENGINE)))
        if find_spec("nixl_cu12") is not None:
            readers[NIXL] = NixlReader(region, stack.enter_context(_lender(NIXL)))
        figures: dict[str, Measured] = {}
        for block_bytes, at_once in CASES:
            pool.fill(min(REGION_BYTES // block_bytes, MOST_BLOCKS), block_bytes)
            subjects: dict[str, Callable[[], dict[str, float]]] = {
                name: partial(_measured, reader, block_bytes, at_once)
                for name, reader in readers.items()
            }
            figures[f"{as_size(block_bytes)}, {at_once} at once"] = in_turns(subjects)
    rows = [
        [
            f"{case}, {name}",
            f"{typical(measured, name) / 1e9:.2f}",
            f"{typical(measured, name, 'cpu_s_per_gb'):.2f}",
            f"{1e6 * typical(measured, name, 'alone_s'):,.0f}",
        ]
        for case, measured in figures.items()
        for name in readers
    ]
    header = ["", "GB/s", "reader's CPU s/GB", "one block, microseconds"]
    print_table("Reads from another process over TCP: medians of rounds in turns", header, rows)
    save("mooncake_peers", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lends", nargs="?", choices=(ENGINE, NIXL))
    lends = parser.parse_args().lends
    if lends is None:
        run()
        sys.stdout.flush()
        os._exit(0)  # the libraries' threads would keep the process
    lend(lends)
