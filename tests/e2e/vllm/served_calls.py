"""The process's side of a channel: calls arrive as lines of JSON, and so do the answers.

    PYTHON-WITH-VLLM -m tests.e2e.vllm.served_calls CHANNEL-FD

serves calls in a new interpreter, instead of a fork of one that has imported vLLM.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


def to_json(value: object) -> str:
    """Encode data classes as objects, and paths as strings."""

    def plain(part: object) -> object:
        if is_dataclass(part) and not isinstance(part, type):
            return asdict(part)
        if isinstance(part, Path):
            return str(part)
        raise TypeError(f"{part!r} has no form in JSON")

    return json.dumps(value, default=plain)


def serve_calls(channel: socket.socket) -> None:
    """Answer calls until the channel is closed.

    A call names a function of a module or, once a class has been called, a method of its object.
    """
    subject: object = None
    with channel, channel.makefile("rw") as stream:
        for line in stream:
            call = json.loads(line)
            try:
                target: Callable[..., object]
                if call["module"] is None:
                    target = getattr(subject, call["name"])
                else:
                    target = getattr(import_module(call["module"]), call["name"])
                result = target(*call["args"], **call["kwargs"])
                if isinstance(target, type):
                    subject, result = result, None
                answer = to_json({"result": result})
            except Exception:
                traceback.print_exc()
                answer = to_json({"error": traceback.format_exc()})
            stream.write(answer + "\n")
            stream.flush()


def call_line(module: str | None, name: str, args: Any, kwargs: Any) -> str:
    """Encode a call; used by the other side."""
    return to_json({"module": module, "name": name, "args": args, "kwargs": kwargs}) + "\n"


def main() -> None:
    """Serve the inherited channel."""
    serve_calls(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
