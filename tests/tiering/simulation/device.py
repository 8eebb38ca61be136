"""Copies between the device and the slots, which take time and end in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.base import OffloadKey
from tests.tiering.simulation.memory import Use
from tests.tiering.simulation.piecework import Piecework
from tests.tiering.simulation.request import Request
from tests.tiering.simulation.world import World, name


@dataclass(slots=True, eq=False)
class DeviceTransfer:
    """One transfer of blocks to or from slots that the manager has handed out."""

    request: Request
    keys: list[OffloadKey]
    slots: list[int]
    is_store: bool
    version: int
    """The version of the weights that is written, or that must be found."""
    use: Use
    succeeds: bool = True
    delay: int = 0
    """Polls until its end is reported."""
    work: Piecework | None = None


class Device:
    """Carries out transfers in virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.under_way: list[DeviceTransfer] = []
        self.bygone: list[DeviceTransfer] = []
        """From before a reset: they go on, but their end is not reported."""

    def accept(
        self, request: Request, keys: list[OffloadKey], slots: list[int], is_store: bool
    ) -> None:
        """Accept a transfer; `start_all` starts it."""
        what = "store" if is_store else "load"
        use = Use(f"device {what} of {request.context.req_id}", slots, is_store)
        self._world.uses.begin(use)
        transfer = DeviceTransfer(request, keys, slots, is_store, request.version, use)
        transfer.succeeds = not (is_store and self._world.happens(0.05))
        transfer.delay = self._world.rng.choice((0, 0, 0, 1, 1, 2, 5))
        request.num_transfers += 1
        self.under_way.append(transfer)
        if is_store:
            self._world.being_stored.update(keys)

    def start_all(self, longest: float) -> None:
        """End the transfers from before a reset, then start the accepted ones."""
        for transfer in self.bygone:
            if transfer.work is not None:
                transfer.work.finish_now()
            self._world.uses.end(transfer.use)
        self.bygone.clear()
        for transfer in self.under_way:
            if transfer.work is None:
                transfer.work = self._start(transfer, longest * self._world.rng.random())

    def flush(self, request: Request) -> None:
        """End the transfers of a request: its device blocks are needed."""
        for transfer in self.under_way:
            if transfer.request is request and transfer.work is not None:
                transfer.work.finish_now()

    def stop(self) -> None:
        """End all transfers: the engine shuts down."""
        for transfer in [*self.under_way, *self.bygone]:
            if transfer.work is not None:
                transfer.work.finish_now()

    def take_ended(self) -> list[DeviceTransfer]:
        """Transfers whose end is reported now, in any order."""
        ended = []
        for transfer in self.under_way:
            if transfer.work is not None and transfer.work.is_done:
                transfer.delay -= 1
                if transfer.delay < 0:
                    ended.append(transfer)
        self._world.rng.shuffle(ended)
        for transfer in ended:
            self.under_way.remove(transfer)
            transfer.request.num_transfers -= 1
            self._world.uses.end(transfer.use)
            if transfer.is_store:
                self._world.being_stored.subtract(transfer.keys)
        return ended

    def reset(self) -> None:
        """The cache was reset: transfers under way are from before."""
        for transfer in self.under_way:
            transfer.request.num_transfers -= 1
        self.bygone += self.under_way
        self.under_way = []
        self._world.being_stored.clear()

    def _start(self, transfer: DeviceTransfer, duration: float) -> Piecework:
        move = self._writes if transfer.is_store else self._reads
        actions = [
            action
            for key, slot in zip(transfer.keys, transfer.slots, strict=True)
            for action in move(transfer, key, slot)
        ]
        rng = self._world.rng
        return Piecework(self._world.time, rng, actions, duration, lambda: None)

    def _writes(
        self, transfer: DeviceTransfer, key: OffloadKey, slot: int
    ) -> list[Callable[[], None]]:
        memory = self._world.memory
        payload = self._world.truth.payload(key, transfer.version)
        if not transfer.succeeds:
            payload = bytes(memory.row_bytes)
        return [
            lambda: memory.write_half(slot, payload, second=False),
            lambda: memory.write_half(slot, payload, second=True),
        ]

    def _reads(
        self, transfer: DeviceTransfer, key: OffloadKey, slot: int
    ) -> list[Callable[[], None]]:
        world = self._world
        expected = world.truth.payload(key, transfer.version)

        def read() -> None:
            if world.memory.row(slot) != expected:
                who = transfer.request.context.req_id
                raise world.witness.saw(f"{who} has read wrong bytes for {name(key)}, slot {slot}")

        return [read]
