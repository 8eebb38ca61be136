"""What must always be true of the tree of the `density` policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.cpu.policies.density import DensityCachePolicy
from kvtier.cpu.policies.prompt_tree import Segment


def with_empty_parents(segments: Iterable[Segment]) -> set[Segment]:
    """Segments, and those before them whose blocks have left."""
    linked = set(segments)
    for segment in list(linked):
        parent = segment.parent
        while parent is not None and not parent.blocks:
            linked.add(parent)
            parent = parent.parent
    return linked


def check_tree(policy: DensityCachePolicy) -> None:
    """Every block is in one segment, and every count is right."""
    tree = policy._tree
    segments = list(tree)
    assert len(set(map(id, segments))) == len(segments), "a segment is in two queues"
    linked = with_empty_parents(segments)
    children = Counter(id(segment.parent) for segment in linked)
    for segment in linked:
        assert segment.num_children == children[id(segment)]
    for segment in segments:
        assert segment.blocks, "a segment without blocks is kept"
        assert segment.idle == sum(block.ref_cnt == 0 for block in segment.blocks)
        assert all(block.place is segment for block in segment.blocks)
        assert segment.is_queued == (segment in tree.queues[segment.group])
    blocks = [block for segment in segments for block in segment.blocks]
    assert sorted(map(id, blocks)) == sorted(map(id, policy.blocks.values()))
    assert tree.num_idle == sum(segment.idle for segment in segments)
