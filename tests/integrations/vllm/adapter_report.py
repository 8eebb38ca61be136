"""What the probes find out, one process for each. It can be named where there is no vLLM."""

from __future__ import annotations

from typing import Any


def report() -> dict[str, Any]:
    """All that `adapter_probe` finds out, by what was tried."""
    from tests.integrations.vllm import adapter_probe

    return {
        "cost": adapter_probe.lookup_cost(),
        "mapped": adapter_probe.mapped_answers(),
        "failed_store": adapter_probe.failed_store(),
        "load_that_fails_twice": adapter_probe.failed_load(2),
        "load_that_fails_for_good": adapter_probe.failed_load(100),
        "refused": adapter_probe.refused_configuration(),
        "disk_without_namespace": adapter_probe.disk_without_namespace(),
        "scheduler_without_ranks": adapter_probe.scheduler_without_ranks(),
        "files_of_replicas": adapter_probe.files_of_replicas(),
        "file_of_an_only_engine": adapter_probe.file_of_an_only_engine(),
        "version_warnings": adapter_probe.version_warnings(),
    }


def manager_report() -> dict[str, Any]:
    """All that `manager_probe` finds out."""
    from tests.integrations.vllm import manager_probe

    return manager_probe.report()


def door_report() -> dict[str, Any]:
    """All that `door_probe` finds out."""
    from tests.integrations.vllm import door_probe

    return door_probe.report()


def prefix_report() -> dict[str, Any]:
    """All that `prefix_probe` finds out."""
    from tests.integrations.vllm import prefix_probe

    return prefix_probe.report()


def jobs_report() -> dict[str, Any]:
    """All that `jobs_probe` finds out."""
    from tests.integrations.vllm import jobs_probe

    return {
        "stores": jobs_probe.stores(),
        "late_store": jobs_probe.late_store(),
        "unsettled": jobs_probe.unsettled(),
    }
