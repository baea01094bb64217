"""What PREP, SCAN and their models agree on about slots, segments and images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scan_reference import decay_positions, pack, positions, unpack

from candidates._delta_rule.kernel.image import (
    ImageLayout,
    chunks_of,
    entry_base,
    segment_entries,
    segment_turns,
    segments_of,
    slot_base,
    slots,
)

LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=12)


@pytest.mark.parametrize("bt", [16, 32, 64])
def test_parts_of_an_image_are_disjoint_and_inside(bt: int) -> None:
    layout = ImageLayout(bt)
    decay = 2 * decay_positions(bt)
    places = [p.flatten() for p in positions(bt).values()] + [decay, decay + 1]
    every = torch.cat(places)
    assert every.unique().numel() == every.numel() == 4 * bt * 128 + bt * bt + 256
    assert int(every.max()) < layout.elements
    assert layout.image % 1024 == layout.common % 1024 == 0
    rows = positions(bt)["qhat"]
    assert int(rows[:, :64].min()) * 2 == layout.off_q
    assert int(rows[:, 64:].min()) * 2 == layout.off_q + layout.block_q


def test_pack_and_unpack_are_inverse() -> None:
    bt = 32
    parts = {
        name: torch.randn(2, *at.shape).bfloat16().float() for name, at in positions(bt).items()
    }
    parts["decay"] = torch.rand(2, 128)
    read = unpack(bt, pack(bt, parts))
    assert all(torch.equal(read[name], parts[name]) for name in parts)


def test_image_refuses_other_chunk_lengths() -> None:
    with pytest.raises(ValueError, match="bt=48"):
        ImageLayout(48)


@given(LENGTHS, st.integers(0, 300), st.integers(0, 300), st.sampled_from([16, 32, 64]),
       st.sampled_from([1, 2, 4]))  # fmt: skip
def test_slots_of_sequences_never_overlap(
    lengths: list[int], before: int, after: int, bt: int, unroll: int
) -> None:
    start, free = before, 0
    T, N = before + sum(lengths) + after, len(lengths)
    for n, length in enumerate(lengths):
        base = slot_base(start, n, bt, unroll)
        assert base >= free
        free = base + chunks_of(length, bt, unroll)
        start += length
        # One slot at the base exists even for an empty sequence: the scan fetches it.
        assert max(free, base + 1) <= slots(T, N, bt, unroll)


@given(st.integers(0, 400), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_segments_cover_all_chunks_in_whole_turns(turns: int, segments: int, unroll: int) -> None:
    chunks = turns * unroll
    parts = segments_of(chunks, segments, unroll)
    pieces = [segment_turns(chunks, s, parts, unroll) for s in range(parts)]
    assert [lo for lo, _ in pieces] == [0, *(hi for _, hi in pieces[:-1])]
    assert pieces[-1][1] == chunks
    assert all(lo % unroll == 0 for lo, _ in pieces)
    if parts > 1:
        assert min(hi - lo for lo, hi in pieces) >= 2 * unroll
    if parts < segments:
        assert chunks < 2 * 2 * parts * unroll


@given(LENGTHS, st.integers(0, 300), st.sampled_from([16, 32]), st.sampled_from([1, 4]),
       st.sampled_from([2, 4, 8]))  # fmt: skip
def test_entries_of_segment_boundaries_never_overlap(
    lengths: list[int], before: int, bt: int, unroll: int, segments: int
) -> None:
    T, N = before + sum(lengths), len(lengths)
    start, free = before, 0
    for n, length in enumerate(lengths):
        inner = segments_of(chunks_of(length, bt, unroll), segments, unroll) - 1
        if inner:
            base = entry_base(start, n, T, N, bt, unroll, segments)
            assert base >= free
            free = base + inner
        start += length
    assert free <= segment_entries(T, N, bt, unroll, segments)
