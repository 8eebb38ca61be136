"""The demo, as a user runs it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

from kvtier.integrations.vllm import demo


def as_a_user_runs_it(*options: str) -> dict[str, Any]:
    """The demo's own JSON and exit code."""
    output = io.StringIO()
    with redirect_stdout(output):
        exit_code = demo.main(["--json", *options])
    (line,) = output.getvalue().splitlines()
    result: dict[str, Any] = json.loads(line)
    return result | {"exit_code": exit_code}
