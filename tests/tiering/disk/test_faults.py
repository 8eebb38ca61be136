"""Every fault that a tier can have, with the disk tier behind it."""

from __future__ import annotations

from tests.tiering.all_faults import AllFaults
from tests.tiering.disk.engine import configured_engine, engine_with_faults


class TestDisk(AllFaults):
    configured_engine = staticmethod(configured_engine)
    engine_with_faults = staticmethod(engine_with_faults)
