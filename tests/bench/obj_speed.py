"""Speed of the obj tier, beside plain calls of its client library and raw HTTP, with a server on
this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.disk_rounds import KVTIER, MiB
from tests.bench.disk_subjects import OBJ, OBSTORE, RAW_HTTP
from tests.bench.report import run_alone
from tests.bench.server_speed import Comparison, compare
from tests.bench.server_subjects import OBJ_LOADS
from tests.tiering.obj.server import seaweed


def run() -> None:
    with TemporaryDirectory() as directory, seaweed(Path(directory), num_volumes=200) as server:
        compare(
            Comparison(
                "obj_speed",
                {KVTIER: OBJ, "obstore": OBSTORE, "HTTP": RAW_HTTP},
                limit="obstore",
                least=0.9,
                tier_bytes=64 * MiB,
                stores_are_judged=False,  # the server's own processor time bounds them
                about=f"SeaweedFS (S3) on this machine; {OBJ_LOADS} loads at a time.",
            ),
            server.keys | {"concurrency": OBJ_LOADS},
        )


if __name__ == "__main__":
    run_alone(run, __doc__)
