"""`kvtier store` on an object store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier.base import OffloadKey
from kvtier.config import ConfigError
from kvtier.seal import SealFailure
from kvtier.tiering.inspection import WHAT_TO_GIVE, InspectionRefused
from kvtier.tiering.obj.namespaces import ObjNamespaces
from kvtier.tiering.obj.objects import BLOCKS, Objects, description_name, open_objects
from kvtier.tiering.obj.options import SCHEMES, ObjOptions, endpoint_in_environment
from kvtier.tiering.obj.runs import FIRST_READ_BYTES, Run, read_header
from kvtier.tiering.remote.inspector import RemoteBlock, RemoteInspector, RemoteStorage

__all__ = ["open_object_store"]

_BLOCK = re.compile(rf"{BLOCKS}/(private/[0-9a-f]+/)?([0-9a-f]{{32}})/((?:[0-9a-f]{{2}})+)")
_OBJECTS_TRIED = 8
_ALSO = {
    "s3": "and AWS_REGION and AWS_ENDPOINT_URL in the environment",
    "gs": "and GOOGLE_APPLICATION_CREDENTIALS in the environment",
    "az": "and AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY in the environment",
    "file": "and that this user may read the directory",
}
"""What else may be wrong, by scheme."""


def open_object_store(location: str, install: str) -> RemoteInspector | None:
    """The inspector of a bucket. Endpoint and credentials come from the environment, as for other
    S3 tools. `install`: the command that installs the client."""
    scheme = location.partition("://")[0]
    if scheme not in SCHEMES or "://" not in location:
        return None
    _, endpoint = endpoint_in_environment() or ("", "")
    options = ObjOptions(url=location, allow_http=endpoint.startswith("http:"))
    try:
        options.require_fitting(0)
        objects = open_objects(options, makes_directory=False)
    except ImportError:
        raise InspectionRefused(f"{options.shown_url} needs obstore: {install}") from None
    except ConfigError as refused:
        raise InspectionRefused(str(refused)) from None
    except Exception:  # the library's own errors, which may quote a secret
        if options.directory is not None and not options.directory.is_dir():
            reason = f"there is no directory {options.directory}: {WHAT_TO_GIVE}"
        else:
            reason = f"{options.shown_url} cannot be opened: check the URL, {_ALSO[scheme]}"
        raise InspectionRefused(reason) from None
    return RemoteInspector("obj", options.shown_url, _Bucket(objects))


class _Bucket(RemoteStorage):
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def scan(self) -> Iterator[RemoteBlock]:
        with_runs: set[str] = set()
        alone: Counter[str] = Counter()
        for page in self._objects.below(BLOCKS):
            for item in page:
                found = _BLOCK.fullmatch(item["path"])
                if found is None:
                    continue
                whole = RemoteBlock(
                    item["path"],
                    found[2],
                    OffloadKey(bytes.fromhex(found[3])),
                    int(item["size"]),
                    int(item["last_modified"].timestamp() * 1e9),
                    is_private=found[1] is not None,
                )
                # All blocks of a namespace have one size. So a few objects tell whether it is
                # worth a request for each to read its header.
                space = whole.namespace
                may_be_run = space in with_runs or alone[space] < _OBJECTS_TRIED
                run = self._run_in(whole.place) if may_be_run else None
                if run is None:
                    alone[space] += 1
                    yield whole
                else:
                    with_runs.add(space)
                    yield from _blocks_in(run, whole)

    def _run_in(self, name: str) -> Run | None:
        found: Run | int | SealFailure = FIRST_READ_BYTES
        while isinstance(found, int):
            content = self._objects.read_range(name, 0, found)
            found = read_header(bytes(content or b""), found)
        return found if isinstance(found, Run) else None

    def read(self, place: str, num_bytes: int) -> bytes | memoryview | None:
        name, _, start = place.partition("@")
        content = self._objects.read_range(name, int(start or 0), num_bytes)
        return None if content is None else memoryview(content)

    def remove(self, places: Sequence[str]) -> None:
        self._objects.remove(list(dict.fromkeys(place.partition("@")[0] for place in places)))

    def description(self, namespace: str) -> bytes | None:
        return ObjNamespaces(self._objects).read_description(namespace)

    def remove_descriptions(self, namespaces: Sequence[str]) -> None:
        self._objects.remove([description_name(name) for name in namespaces])

    def facts(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self._objects.close()


def _blocks_in(run: Run, whole: RemoteBlock) -> Iterator[RemoteBlock]:
    """The blocks of an object; the place of each is the object's name and where the block
    begins."""
    for position, key in enumerate(run.keys):
        start = run.start_of(position)
        size = min(max(whole.num_bytes - start, 0), run.block_bytes)
        yield replace(whole, place=f"{whole.place}@{start}", key=key, num_bytes=size)
