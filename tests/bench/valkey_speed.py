"""Speed of the valkey tier, beside a raw socket and other clients. The server runs here, too."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.disk_rounds import KVTIER, MiB
from tests.bench.disk_subjects import GLIDE, RAW_RESP, VALKEY, VALKEY_PY
from tests.bench.report import run_alone
from tests.bench.server_speed import Comparison, compare
from tests.bench.server_subjects import VALKEY_CONNECTIONS
from tests.tiering.valkey.server import valkey_server


def run() -> None:
    subjects = {
        KVTIER: VALKEY,
        "raw socket": RAW_RESP,
        "valkey-py": VALKEY_PY,
        "glide": GLIDE,
    }
    with TemporaryDirectory() as directory:
        limits = ("--maxmemory", "4gb")
        with valkey_server(Path(directory), *limits) as server:
            compare(
                Comparison(
                    "valkey_speed",
                    subjects,
                    limit="raw socket",
                    least=0.85,
                    tier_bytes=128 * MiB,
                    stores_are_judged=True,
                    about=f"Valkey over TCP on this machine; {VALKEY_CONNECTIONS} connections that "
                    f"load, {VALKEY_CONNECTIONS} that store.",
                ),
                {"url": server.url, "connections": VALKEY_CONNECTIONS},
            )


if __name__ == "__main__":
    run_alone(run, __doc__)
