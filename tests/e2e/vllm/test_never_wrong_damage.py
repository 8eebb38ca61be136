"""Blocks are damaged in a tier between two runs of an engine: none of them is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.vllm.tiny_model import random_prompts
from kvtier.tiering.disk.layout import Geometry
from kvtier.tiering.io.page import PAGE_BYTES
from tests.e2e.vllm.lasting_tiers import LASTING, figure_of, over, with_common_hashes
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.subject import Subject

pytestmark = pytest.mark.vllm

TOKENS, BLOCKS = 256, 8
PROMPTS = random_prompts(3, TOKENS, "never wrong after damage")
ENGINE = {"device_blocks": 64, "max_model_len": 512}


def flip_a_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def damage_slots(folder: Path, subject: Subject) -> int:
    """Flip one bit of the payload in every sixth slot of the slab. Returns the number of slots."""
    # Slots are filled one after the other.
    offsets = [
        Geometry(subject.slot_bytes(), BLOCKS * len(PROMPTS)).slot_offset(slot) + 3 * PAGE_BYTES
        for slot in range(3, BLOCKS * len(PROMPTS), 6)
    ]
    for offset in offsets:
        flip_a_bit(folder / "kv.slab", offset)
    return len(offsets)


def damage_files(folder: Path, subject: Subject) -> int:
    """Flip one bit of the payload in every sixth file. Returns the number of files."""
    files = sorted(path for path in (folder / "root" / "blocks").rglob("*") if path.is_file())
    blocks = [path for path in files if not path.name.startswith(".")]
    assert len(blocks) == BLOCKS * len(PROMPTS)
    for path in blocks[::6]:
        flip_a_bit(path, 3 * PAGE_BYTES)
    return len(blocks[::6])


@pytest.mark.parametrize(("tier", "damage"), [("disk", damage_slots), ("fs", damage_files)])
@pytest.mark.parametrize("subject", ["llama"], indirect=True)
def test_a_damaged_block_is_refused_and_computed(
    vllm: VLLM,
    subject: Subject,
    tmp_path: Path,
    tier: str,
    damage: Callable[[Path, Subject], int],
) -> None:
    options = over(LASTING[tier](tmp_path), subject)
    vllm = with_common_hashes(vllm)
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        engine.generate(*PROMPTS)
        assert engine.figures()[figure_of(f"0:{tier}", "stored_blocks")] == BLOCKS * len(PROMPTS)
    damaged = damage(tmp_path, subject)
    with RemoteEngine(vllm, subject.path, options, **ENGINE) as engine:
        answers = engine.generate(*PROMPTS)
        figures = engine.figures()
        engine.reset_device_cache()
        again = engine.generate(*PROMPTS)
    assert 0 < figures[figure_of(f"0:{tier}", "seal_digest")] <= damaged
    forgotten = figures[f'{tier}_forgotten_blocks{{tier="0:{tier}"}}']
    assert forgotten == figures[figure_of(f"0:{tier}", "seal_digest")]
    # Blocks before the first damaged one of a prompt are served, and none after it.
    assert 0 < figures[figure_of(f"0:{tier}", "loaded_blocks")] <= BLOCKS * len(PROMPTS) - damaged
    assert sum(answer.cached_tokens for answer in answers) > 0
    subject.alone.check(PROMPTS, answers, exact=False)
    # Refused blocks were computed and stored again.
    assert [answer.cached_tokens for answer in again] == [TOKENS] * len(PROMPTS)
    subject.alone.check(PROMPTS, again)
