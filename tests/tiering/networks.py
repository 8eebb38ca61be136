"""Network namespaces for tests: private ones, and several "hosts" on one network whose links have
latency, limited bandwidth and loss.

A namespace has no name and belongs to the processes in it: nothing is left when they end, however
they end. Needs root, and `ip` (Debian: iproute2) for hosts.

    python -m tests.tiering.networks FD ADDRESS [FD ADDRESS ...]    what forwards between the hosts
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pytest

__all__ = [
    "Host",
    "Lan",
    "Link",
    "Namespace",
    "environment_of_tests",
    "lan",
    "network_of_process",
    "private_network",
]

REPO = Path(__file__).resolve().parents[2]
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _TUNSETIFF = 0x8914, 0x400454CA
_IFF_UP_AND_RUNNING, _IFF_TUN_WITHOUT_HEADER = 0x41, 0x1001
_TUN = "/dev/net/tun"


def environment_of_tests() -> dict[str, str]:
    """Variables with which a process finds this source and its tests."""
    path = f"{REPO / 'src'}:{REPO}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return os.environ | {"PYTHONPATH": path}


def _called(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


class Namespace:
    """A network of its own, with loopback up. The machine's addresses are not in it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        made: list[int | OSError] = []

        def make() -> None:
            """In a thread, whose own network it becomes and which then ends."""
            try:
                _called(self._libc.unshare(_CLONE_NEWNET), "unshare")
                with socket.socket() as control:
                    up = struct.pack("16sH14x", b"lo", _IFF_UP_AND_RUNNING)
                    fcntl.ioctl(control, _SIOCSIFFLAGS, up)
                made.append(_own_network())
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        (outcome,) = made
        if isinstance(outcome, OSError):
            pytest.skip(f"cannot make network namespaces here: {outcome.strerror}")
        self._fd = outcome

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread into this network, and back at the end. Threads and processes
        that it starts meanwhile are in it, and stay."""
        before = _own_network()
        try:
            _called(self._libc.setns(self._fd, _CLONE_NEWNET), "setns")
            yield
        finally:
            _called(self._libc.setns(before, _CLONE_NEWNET), "setns")
            os.close(before)

    def close(self) -> None:
        """The namespace ends with the last process in it, and cannot be entered any more."""
        os.close(self._fd)
        self._fd = -1


def _own_network() -> int:
    """A descriptor of the calling thread's network."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


@contextmanager
def private_network() -> Iterator[Namespace]:
    """A network that has nothing but loopback; the calling thread is in it until the end."""
    namespace = Namespace()
    try:
        with namespace.entered():
            yield namespace
    finally:
        namespace.close()


@cache
def network_of_process() -> Namespace:
    """The one private network of this process, for libraries that keep threads in the network
    where they were loaded. It stays until the process ends."""
    return Namespace()


@dataclass(frozen=True)
class Link:
    """What a packet meets between a host and the network, in each of the two directions."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as fast as it goes, which is about 0.8 GB/s on two cores."""
    loss: float = 0.0
    """Share of the packets that are lost; with 1, the host is cut off."""


class Host:
    """A namespace with an address on a network."""

    def __init__(self, lan: Lan, address: str, namespace: Namespace) -> None:
        self._lan = lan
        self.address = address
        self.namespace = namespace

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work on this host: see `Namespace.entered`."""
        with self.namespace.entered():
            yield

    def link(self, link: Link) -> None:
        """Change the host's link. Packets under way arrive as they would have."""
        self._lan.link(self.address, link)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Every packet is lost, to the host and from it. Then the link is perfect."""
        self.link(Link(loss=1.0))
        try:
            yield
        finally:
            self.link(Link())


class Lan:
    """Hosts on one network. One process forwards their packets, each through the links of both."""

    def __init__(self, num_hosts: int, mtu: int, first: Namespace | None) -> None:
        if shutil.which("ip") is None:
            pytest.skip("needs the command ip (Debian: iproute2)")
        self._kept = ExitStack()
        self.hosts: list[Host] = []
        try:
            for number in range(1, num_hosts + 1):
                self._add_host(f"10.77.0.{number}", None if self.hosts else first)
            devices = [self._plug(host, mtu) for host in self.hosts]
            self._switch = self._kept.enter_context(self._forwarding(devices))
        except BaseException:
            self._kept.close()
            raise

    def _add_host(self, address: str, namespace: Namespace | None) -> None:
        if namespace is None:
            namespace = Namespace()
            self._kept.callback(namespace.close)
        self.hosts.append(Host(self, address, namespace))

    def _plug(self, host: Host, mtu: int) -> int:
        with host.entered():
            try:
                device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            except OSError as error:
                pytest.skip(f"needs {_TUN}: {error.strerror}")
            self._kept.callback(os.close, device)
            fcntl.ioctl(
                device, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _IFF_TUN_WITHOUT_HEADER)
            )
            for words in (
                f"address add {host.address}/24 dev eth0",
                f"link set eth0 up mtu {mtu} txqueuelen 2000",
            ):
                subprocess.run(["ip", *words.split()], check=True, timeout=30)
        return device

    @contextmanager
    def _forwarding(self, devices: list[int]) -> Iterator[subprocess.Popen[str]]:
        words = [
            word
            for device, host in zip(devices, self.hosts, strict=True)
            for word in (str(device), host.address)
        ]
        command = [sys.executable, "-m", "tests.tiering.networks", *words]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=environment_of_tests(),
            pass_fds=devices,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def link(self, address: str, link: Link) -> None:
        """Change the link of a host. Returns when it is changed."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        print(json.dumps({"address": address, **asdict(link)}), file=self._switch.stdin, flush=True)
        assert self._switch.stdout.readline(), "what forwards packets has ended"

    def close(self) -> None:
        self._kept.close()


@contextmanager
def lan(num_hosts: int, mtu: int = 9000, first: Namespace | None = None) -> Iterator[Lan]:
    """A network of hosts that ends with the context. All links are perfect at first. `mtu`: the
    size of a packet, and so of what is lost at once. `first`: a namespace that becomes the first
    host, such as the one that the test is in."""
    network = Lan(num_hosts, mtu, first)
    try:
        yield network
    finally:
        network.close()


class _Switch:
    """Forwards packets between the hosts' devices; all in one thread."""

    _QUEUED_S = 0.2
    """A limited link holds the packets of this time; further ones are lost."""

    def __init__(self, devices: dict[bytes, int]) -> None:
        """`devices`: by IPv4 address."""
        self._devices = devices
        self._links = dict.fromkeys(devices, Link())
        self._free_at: dict[tuple[bytes, bool], float] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._num_taken = 0
        self._random = random.Random(0)

    def run(self) -> None:
        """Until standard input ends."""
        commands = sys.stdin.fileno()
        addresses = {device: address for address, device in self._devices.items()}
        while True:
            pause = None
            if self._under_way:
                pause = max(0.0, self._under_way[0][0] - time.monotonic())
            ready, _, _ = select.select([commands, *addresses], [], [], pause)
            for device in ready:
                if device == commands:
                    if not self._obey():
                        return
                else:
                    self._take(addresses[device], device)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._under_way)
                _deliver(device, packet)

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        command = json.loads(line)
        address = socket.inet_aton(command.pop("address"))
        self._links[address] = Link(**command)
        print("done", flush=True)
        return True

    def _take(self, source: bytes, device: int) -> None:
        """A number of packets at most, so that one busy host does not keep others waiting."""
        for _ in range(64):
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                return
            target = packet[16:20]
            if packet[0] >> 4 == 4 and target in self._devices:
                self._forward(source, target, packet)

    def _forward(self, source: bytes, target: bytes, packet: bytes) -> None:
        at = now = time.monotonic()
        for end, is_outbound in ((source, True), (target, False)):
            link = self._links[end]
            if link.loss and self._random.random() < link.loss:
                return
            if link.bytes_per_s:
                free_at = max(self._free_at.get((end, is_outbound), 0.0), at)
                if free_at - at > self._QUEUED_S:
                    return
                at = free_at + len(packet) / link.bytes_per_s
                self._free_at[end, is_outbound] = at
            at += link.delay_s
        if at == now:
            _deliver(self._devices[target], packet)
        else:
            self._num_taken += 1
            heapq.heappush(self._under_way, (at, self._num_taken, self._devices[target], packet))


def _deliver(device: int, packet: bytes) -> None:
    with suppress(OSError):  # the host has no more room for packets
        os.write(device, packet)


if __name__ == "__main__":
    _Switch(
        {
            socket.inet_aton(address): int(device)
            for device, address in zip(sys.argv[1::2], sys.argv[2::2], strict=True)
        }
    ).run()
