"""The findings of the probes, each in a process of its own. Can be imported without vLLM."""

from __future__ import annotations

from typing import Any


def report() -> dict[str, Any]:
    """The findings of `adapter_probe`, by case."""
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
    """The findings of `manager_probe`."""
    from tests.integrations.vllm import manager_probe

    return manager_probe.report()


def start_report() -> dict[str, Any]:
    """The findings of `start_probe`."""
    from tests.integrations.vllm import start_probe

    return start_probe.report()


def prefix_report() -> dict[str, Any]:
    """The findings of `prefix_probe`."""
    from tests.integrations.vllm import prefix_probe

    return prefix_probe.report()


def jobs_report() -> dict[str, Any]:
    """The findings of `jobs_probe`."""
    from tests.integrations.vllm import jobs_probe

    return {
        "stores": jobs_probe.stores(),
        "late_store": jobs_probe.late_store(),
        "unsettled": jobs_probe.unsettled(),
    }
