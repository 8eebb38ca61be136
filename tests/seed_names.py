"""Which names the five reports mention: the rule, and a command that applies it.

    python -m tests.seed_names ../shared/seeds > tests/data/seed_names.txt

A report is prose with pieces of source in it. Import lines of foreign modules and addresses are
skipped; what remains is read token by token. A name is

- a path that ends in `.py`, or a folder that ends in `/`;
- a dotted module of vLLM, taken whole;
- an identifier with an underscore, or in CamelCase;
- any other word, where a report uses it as one of the above: after `def`, after a dot, as an
  attribute or parameter with a type or a value, in a listing next to a name;
- a member together with its class, where the class is before the dot; the member alone counts too.
  A report writes `init` for `__init__`.

`IGNORED` holds what this takes for a name of the reports' subject and is none.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

IGNORED = {
    "Python's own": (
        "_ NewType OrderedDict TYPE_CHECKING ValueError __name__ append from_bytes release to_bytes"
    ),
    "vLLM's own, and nothing to do with offloading": (
        "init_logger vLLM vllm.config vllm.logger vllm.v1.kv_cache_interface"
    ),
    "a local variable of a snippet": (
        "blocks_to_store hit_count new_offload_keys num_evict offload_keys policy_cls req_status "
        "scheduler_mmap src_spec start_block_idx store_output tier_cls"
    ),
    "a word of the report itself, or of a change it only refers to": (
        "FileCopyrightText VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY kv_connector kv_offload"
    ),
}

_ADDRESS = re.compile(r"<?https?://\S+")
_FOREIGN_IMPORT = re.compile(r"(?m)^\s*(from (?!vllm)\S+ )?import .*$")
_PATH = re.compile(r"(?<![\w/.])(?:\w+/)*\w+\.py\b|(?<![\w/])(?:\w+/)+(?![\w<])", re.ASCII)
_VLLM_MODULE = re.compile(r"\bvllm(?:\.\w+)+", re.ASCII)
_CHAIN = re.compile(r"(?<![A-Za-z0-9_.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_LISTING = re.compile(r"[\w.]+(?:\s*[、,/]\s*[\w.]+)+(?:\s*和\s*[\w.]+)?", re.ASCII)
_WORD_IN_CODE = re.compile(
    r"(?m)\bdef ([a-z]+)\b|(?<=[\w\])]\.)([a-z]+)\b|^ +([a-z]+): |^ +([a-z]+)=", re.ASCII
)


def _is_class(word: str) -> bool:
    """CamelCase: more than one capital, and not only capitals."""
    word = word.removeprefix("_")
    return sum(map(str.isupper, word)) > 1 and any(map(str.islower, word)) and "_" not in word


def _is_name(word: str) -> bool:
    return _is_class(word) or "_" in word


def _names_in(report: str) -> Iterator[str]:
    text = _ADDRESS.sub(" ", report.replace(r"\_", "_"))
    text = _FOREIGN_IMPORT.sub("", text)
    for pattern in (_PATH, _VLLM_MODULE):
        yield from pattern.findall(text)
        text = pattern.sub(" ", text)
    for chain in _CHAIN.findall(text):
        head, *members = chain.split(".")
        yield from filter(_is_name, (head, *members))
        if _is_class(head) and members:
            yield f"{head}.{_spelt_out(members[0])}"
    pieces = text.split("```")
    for prose in pieces[0::2]:
        for listing in _LISTING.findall(prose):
            words = re.findall(r"[\w.]+", listing, re.ASCII)
            if any(map(_is_name, words)):
                yield from (word for word in words if re.fullmatch(r"[a-z]+", word))
    for code in pieces[1::2]:
        for match in _WORD_IN_CODE.finditer(code):
            yield from filter(None, match.groups())


def _spelt_out(member: str) -> str:
    return f"__{member}__" if member in ("init", "repr") else member


def extract(reports: Path) -> dict[str, tuple[int, ...]]:
    """Every name in the reports of a folder, with the numbers of the changes reported on."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(reports.glob("*.txt")):
        text = path.read_text()
        number = re.search(r"PR #(\d+)", text)
        if number is None:
            raise ValueError(f"{path} does not say which change it reports on")
        for name in _names_in(text):
            found[_spelt_out(name)].add(int(number[1]))
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def without_ignored(names: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The names that the map has to explain."""
    ignored = {name for group in IGNORED.values() for name in group.split()}
    return {name: of for name, of in names.items() if name not in ignored}


def write(names: Mapping[str, tuple[int, ...]]) -> str:
    """One name a line, followed by the numbers."""
    return "".join(f"{name} {' '.join(map(str, of))}\n" for name, of in names.items())


def read(path: Path) -> dict[str, tuple[int, ...]]:
    """What `write` wrote."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: tuple(map(int, of)) for name, *of in lines}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.seed_names", description=__doc__)
    parser.add_argument("reports", type=Path, help="the folder that they are in")
    folder: Path = parser.parse_args().reports
    if not list(folder.glob("*.txt")):
        parser.error(f"{folder} has no reports (*.txt)")
    sys.stdout.write(write(without_ignored(extract(folder))))


if __name__ == "__main__":
    main()
