"""The obj tier: sealed blocks in an object store (S3, Google, Azure, or a directory) that several
engines share.

`kvtier.tiering.remote.manager` is the scheduler's side; `server`, `mover` and `objects` move the
bytes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from kvtier.base import MetricDefinition, OffloadingStats
from kvtier.config import ConfigError, Problem
from kvtier.config.errors import describe
from kvtier.seal import SEAL_BYTES
from kvtier.tiering.base import TierRefused, TierUsage
from kvtier.tiering.io.metrics import definitions
from kvtier.tiering.obj.janitor import ENGINES, JanitorTimes
from kvtier.tiering.obj.objects import Objects, open_objects
from kvtier.tiering.obj.options import SCHEMES, ObjOptions
from kvtier.tiering.obj.runs import blocks_per_run
from kvtier.tiering.obj.server import ObjServer
from kvtier.tiering.remote.errors import NotAllowed, ServerErrors, trying_at_start
from kvtier.tiering.remote.manager import RemoteTierManager, namespace_of

if TYPE_CHECKING:
    from kvtier.base import OffloadingSpec
    from kvtier.tiering.remote.inspector import RemoteInspector
    from kvtier.tiering.trial import TrialBlocks

__all__ = ["INSTALL", "ObjSecondaryTierManager"]

logger = logging.getLogger(__name__)

_USED_BYTES = "kvtier_obj_used_bytes"
_LIMIT_BYTES = "kvtier_obj_limit_bytes"
_EVICTED = "kvtier_obj_evicted_blocks"
_GAUGES = {
    _USED_BYTES: "Bytes of all engines' blocks below the URL. Only the engine that keeps the limit "
    "knows it.",
    _LIMIT_BYTES: "Bytes that may be there, by this engine's configuration.",
}
_COUNTERS = {_EVICTED: "Blocks that this engine has removed to keep the limit."}
INSTALL = "pip install 'kvtier[obj]'"


class ObjSecondaryTierManager(RemoteTierManager):
    """A tier that keeps each block as an object."""

    metric_prefix: ClassVar[str] = "kvtier_obj"
    schemes: ClassVar[Sequence[str]] = SCHEMES
    options_cls = ObjOptions
    janitor_times: ClassVar[JanitorTimes] = JanitorTimes()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        **keys: Any,
    ) -> None:
        """`keys`: those of `ObjOptions`."""
        options = ObjOptions.parse(keys)
        assert primary_kv_view.shape is not None
        row_bytes = primary_kv_view.shape[1]
        options.require_fitting(SEAL_BYTES + row_bytes)
        config = offloading_spec.config
        config.require_weights_identity()
        objects = _open(options)
        engine = uuid4().hex
        errors = ServerErrors(options.shown_url)
        _probe(objects, errors, engine)
        shared = namespace_of(config.fingerprint())
        num_blocks = blocks_per_run(config, row_bytes)
        server = ObjServer(
            objects,
            errors,
            row_bytes,
            shared,
            engine,
            options.max_bytes,
            self.janitor_times,
            num_blocks,
        )
        lanes = {"load": options.concurrency, "store": -(-options.concurrency // 2)}
        super().__init__(offloading_spec, primary_kv_view, tier_type, server, lanes, num_blocks)
        self._janitor = server.janitor
        self._limit = options.max_bytes
        self._num_removed_reported = 0
        if self._janitor is not None:
            self._janitor.start()

    def usage(self) -> TierUsage | None:
        if self._limit is None:
            return None
        return TierUsage(None if self._janitor is None else self._janitor.num_bytes, self._limit)

    def get_stats(self) -> OffloadingStats:
        stats = super().get_stats()
        janitor = self._janitor
        if janitor is not None and self._limit is not None:
            num_removed = janitor.num_removed
            stats.counters[_EVICTED] = num_removed - self._num_removed_reported
            self._num_removed_reported = num_removed
            stats.gauges[_LIMIT_BYTES] = self._limit
            if janitor.num_bytes is not None:
                stats.gauges[_USED_BYTES] = janitor.num_bytes
        return stats

    @classmethod
    def open_inspector(cls, location: str) -> RemoteInspector | None:
        from kvtier.tiering.obj.inspector import open_object_store

        return open_object_store(location, INSTALL)

    @classmethod
    def prepare_trial(
        cls, keys: Mapping[str, Any], blocks: TrialBlocks
    ) -> AbstractContextManager[Mapping[str, Any]]:
        return _trial_keys(keys)

    @classmethod
    def build_metric_definitions(
        cls, tier_options: Mapping[str, Any]
    ) -> dict[str, MetricDefinition]:
        return super().build_metric_definitions(tier_options) | definitions(_GAUGES, _COUNTERS)


@contextmanager
def _trial_keys(keys: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The keys for a trial. Without a limit of its own, the tier removes nothing of others; it
    removes its private namespace when it ends. A directory keeps empty directories, so a trial gets
    one of its own there."""
    options = ObjOptions.parse(keys)
    unlimited = {name: value for name, value in keys.items() if name != "max_bytes"}
    if options.scheme != "file":
        yield unlimited
        return
    name = f".kvtier-trial-{os.getpid()}"
    directory = options.directory
    assert directory is not None
    was_there = directory.is_dir()
    try:
        yield {**unlimited, "url": f"{options.url.rstrip('/')}/{name}"}
    finally:
        shutil.rmtree(directory / name, ignore_errors=True)
        if not was_there:
            with suppress(OSError):
                directory.rmdir()


def _open(options: ObjOptions) -> Objects:
    try:
        return open_objects(options, makes_directory=True)
    except ConfigError:
        raise
    except ImportError:
        raise TierRefused(
            f"the obj tier needs the Python package obstore, which is not installed: {INSTALL}"
        ) from None
    except OSError as error:
        if options.scheme == "file":
            raise ConfigError(
                Problem(
                    "url",
                    describe(options.shown_url),
                    "a directory that exists, or that this user can make",
                    "Give another path, or make the directory",
                )
            ) from None
        raise ConfigError(
            Problem(
                "ca_bundle",
                describe(str(options.ca_bundle)),
                "a file of certificates",
                f"It cannot be used ({error.strerror}): give another path",
            )
        ) from None
    except Exception:  # the library's own errors, which may quote a secret
        raise ConfigError(
            Problem(
                "url",
                describe(options.shown_url),
                "a place that the object store library can open",
                options.what_to_check,
            )
        ) from None


def _probe(objects: Objects, errors: ServerErrors, engine: str) -> None:
    """Write, read, list and remove a small object."""
    name = f"{ENGINES}/{engine}"
    step = "write to"
    with trying_at_start(errors.where):
        try:
            objects.create(name, [b"kvtier"])
            step = "read from"
            if objects.read(name, len(b"kvtier")) is None:
                logger.warning(
                    "%s: an object that was just written is not found. The service is not "
                    "consistent; many blocks will be missed",
                    errors.where,
                )
            step = "list what is in"
            next(objects.below(name), None)
            step = "remove from"
            objects.remove([name])
        except NotAllowed as refusal:
            raise NotAllowed(f"may not {step} it: {refusal}", refusal.remedy) from None
        logger.info("%s: writable", errors.where)
