"""Every fault that a tier can have, with the mooncake tier behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadingSpec
from kvtier.testing import FaultSchedule, FaultyTier
from kvtier.tiering.mooncake.manager import MooncakeSecondaryTierManager
from tests.tiering.all_faults import AllFaults
from tests.tiering.engine import Engine, engine_over, engine_with
from tests.tiering.mooncake.harness import SEGMENT_BYTES, MooncakeBacking, plain_client
from tests.tiering.mooncake.pool import mooncake_master, segment
from tests.tiering.networks import Namespace


class _Engines:
    """Engines over one pool."""

    def __init__(self, keys: dict[str, Any], client: Any) -> None:
        self._keys = keys
        self._client = client

    def configured_engine(self, place: Path) -> Engine:
        entry = {"type": "mooncake", **self._keys}
        return engine_with(entry, num_rows=16, namespace="weights")

    def engine_with_faults(
        self,
        place: Path,
        schedule: FaultSchedule,
        *,
        num_rows: int = 64,
        shutdown_timeout_s: float = 10.0,
    ) -> tuple[Engine, FaultyTier]:
        def make_tier(spec: OffloadingSpec, view: memoryview) -> FaultyTier:
            tier = MooncakeSecondaryTierManager(spec, view, "mooncake", **self._keys)
            return FaultyTier(tier, schedule, backing=MooncakeBacking(self._client))

        engine = engine_over(
            make_tier,
            lookup_timeout_s=0.1,
            num_rows=num_rows,
            shutdown_timeout_s=shutdown_timeout_s,
        )
        assert isinstance(engine.tier, FaultyTier)
        return engine, engine.tier


class _OverAPool:
    @pytest.fixture(scope="class")
    @classmethod
    def over_one_pool(
        cls, tmp_path_factory: pytest.TempPathFactory, network: Namespace
    ) -> Iterator[Any]:
        with (
            mooncake_master(tmp_path_factory.mktemp("master"), network) as master,
            segment(master, SEGMENT_BYTES, network),
            network.entered(),
            plain_client(master) as client,
            pytest.MonkeyPatch.context() as patch,
        ):
            keys = {"master": master.address, "metadata": master.metadata_url}
            engines = _Engines(keys, client)
            patch.setattr(cls, "configured_engine", staticmethod(engines.configured_engine))
            patch.setattr(cls, "engine_with_faults", staticmethod(engines.engine_with_faults))
            yield client

    @pytest.fixture(autouse=True)
    def _empty_pool(self, over_one_pool: Any) -> None:
        over_one_pool.remove_all(True)

    configured_engine: Any = None
    engine_with_faults: Any = None


class TestMooncake(_OverAPool):
    test_all_faults_together = AllFaults.test_all_faults_together


@pytest.mark.soak
class TestEachFault(_OverAPool, AllFaults):
    pass
