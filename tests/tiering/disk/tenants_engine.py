"""An engine whose tenants share host memory and a disk, without end, until it is killed.

python -m tests.tiering.disk.tenants_engine PATH
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

from kvtier.base import OffloadKey
from kvtier.config.tenants import TenantRule
from kvtier.testing import TierHarness
from tests.tiering.disk.engine import configured_engine
from tests.tiering.engine import Engine

NUM_ROWS, NUM_BLOCKS = 16, 64
FLOOR, CAP = 16, 24
RULES: dict[str, Any] = {"acme": {"disk": {"floor": "25%", "cap": "37.5%"}}, "batch": {}}
DEFAULT, ACME, BATCH = (TenantRule(name, n) for n, name in enumerate(("default", "acme", "batch")))


def shared_engine(path: Path, rules: dict[str, Any] | None = None) -> Engine:
    tenants = RULES if rules is None else rules
    return configured_engine(path, num_rows=NUM_ROWS, num_blocks=NUM_BLOCKS, tenants=tenants)


def prompt(tenant: TenantRule, number: int, num_blocks: int = 4) -> list[OffloadKey]:
    return TierHarness.keys(num_blocks, start=1_000_000 * (tenant.index + 1) + 100 * number)


def main() -> None:
    with shared_engine(Path(sys.argv[1])) as engine:
        for number in count():
            engine.serve(prompt(ACME, number), tenant=ACME)
            for part in range(3):
                engine.serve(prompt(BATCH, 3 * number + part), tenant=BATCH)
            engine.settle()
            print("served", flush=True)


if __name__ == "__main__":
    main()
