"""What those who try the device's paths say of jobs that did not end well."""

from __future__ import annotations

__all__ = ["JobsFailed"]


class JobsFailed(RuntimeError):
    """Jobs of a worker failed; the log has the reasons."""
