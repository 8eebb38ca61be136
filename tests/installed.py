"""Installs throw-away packages into a folder, as an author outside would ship them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def write_module(folder: Path, module: str, source: str) -> None:
    """A module that can be imported once `folder` is on `sys.path`."""
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))


def install(folder: Path, distribution: str, group: str, entry_points: dict[str, str]) -> None:
    """What an installer leaves of a package with these entry points, next to its modules."""
    # The folder's name ends at the first hyphen, as far as `importlib.metadata` is concerned.
    metadata = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
