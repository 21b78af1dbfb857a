"""The flat layout of a chunk, by properties: regions contiguous, shards equal and aligned, members in one bucket."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.parallel.buffer_layout import ALIGN, BufferMember, FlatLayout, lay_out

sizes = st.one_of(st.integers(1, 300), st.sampled_from([ALIGN, 2 * ALIGN, 64 * ALIGN]))
SUMS = ((), ("tensor",), ("tensor", "expert"))  # axes over which gradients are summed first
plain = st.builds(
    BufferMember, sizes, has_decay=st.booleans(), summed_axes=st.sampled_from(SUMS), float8_gather=st.booleans()
)


@st.composite
def chunks(draw: st.DrawFn) -> list[BufferMember]:
    """A chunk's parameters, with a tied embedding in front, behind, or not at all."""
    members = draw(st.lists(plain, min_size=1, max_size=20))
    alone = draw(st.sampled_from(["none", "first", "last"]))
    tied = [BufferMember(draw(sizes), has_decay=True, summed_axes=draw(st.sampled_from(SUMS)), is_tied=True)]
    return members if alone == "none" else tied + members if alone == "first" else members + tied


cases = given(chunks(), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 2000)))


def spans(layout: FlatLayout, members: list[BufferMember]) -> list[tuple[int, int]]:
    return [(start, start + m.count) for start, m in zip(layout.starts, members, strict=True)]


@cases
def test_each_member_lies_in_its_one_bucket_and_overlaps_no_other(members, ranks, bucket):
    layout = lay_out(members, ranks, bucket)
    assert sorted(i for span in layout.buckets for i in span.members) == list(range(len(members)))
    locations = spans(layout, members)
    for span in layout.buckets:
        for i in span.members:
            assert span.start <= locations[i][0] < locations[i][1] <= span.stop
    ordered = sorted(locations)
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    assert all(start % ALIGN == 0 for start in layout.starts)


@cases
def test_members_apart_share_buckets_with_none_but_themselves(members, ranks, bucket):
    for span in lay_out(members, ranks, bucket).buckets:
        assert len({members[i].float8_gather for i in span.members}) == 1


@cases
def test_buckets_fill_the_buffer_and_ranks_own_equal_aligned_parts(members, ranks, bucket):
    layout = lay_out(members, ranks, bucket)
    at = 0
    for number, span in enumerate(layout.buckets):
        assert span.start == at
        for rank in range(ranks):
            start, stop = layout.find_shard(number, rank, ranks)
            assert start == at
            assert start % ALIGN == 0
            assert stop - start == (span.stop - span.start) // ranks
            at = stop
        assert at == span.stop
    assert at == layout.size
    # Padding stays below what alignment asks for: a line a member and a line a rank of each bucket.
    assert layout.size - sum(m.count for m in members) < ALIGN * (len(members) + ranks * len(layout.buckets))


@cases
def test_what_is_treated_alike_is_contiguous(members, ranks, bucket):
    layout = lay_out(members, ranks, bucket)
    order = sorted(range(len(members)), key=layout.starts.__getitem__)
    kinds = [(members[i].region, not members[i].has_decay) for i in order]
    assert kinds == sorted(kinds)
    for kind in set(kinds):
        inside = [i for i, k in zip(order, kinds, strict=True) if k == kind]
        assert inside == sorted(inside, reverse=True), "backward finishes the last parameters first"
    # The shared region holds the shared members, all of them, and nobody else, in buckets of its own.
    for m, (a, b) in zip(members, spans(layout, members), strict=True):
        around = [part.axes for part in layout.summed_ranges if part.start < b and a < part.stop]
        assert around == ([m.summed_axes] if m.summed_axes else [])
    for part in layout.summed_ranges:
        assert part.start in {span.start for span in layout.buckets}
        assert part.stop in {span.stop for span in layout.buckets}


@cases
def test_a_tied_embedding_has_a_bucket_of_its_own(members, ranks, bucket):
    layout = lay_out(members, ranks, bucket)
    alone = [i for i, m in enumerate(members) if m.is_tied]
    if not alone:
        assert layout.tied_bucket is None
        return
    assert layout.tied_bucket is not None
    assert layout.buckets[layout.tied_bucket].members == tuple(alone)
    # Another stage lays out the same embedding among other members: its shards must be the same ones.
    present = lay_out([BufferMember(5, False, ("tensor",)), members[alone[0]]], ranks, None)
    assert present.tied_bucket is not None
    ours, theirs = layout.buckets[layout.tied_bucket], present.buckets[present.tied_bucket]
    assert ours.stop - ours.start == theirs.stop - theirs.start


@cases
@settings(max_examples=200)
def test_buckets_are_as_large_as_asked_for(members, ranks, bucket):
    layout = lay_out(members, ranks, bucket)
    regions = len({m.region for m in members})
    if bucket is None:
        assert len(layout.buckets) == regions
        return
    for span in layout.buckets:
        assert len(span.members) == 1 or sum(members[i].count for i in span.members) <= bucket
    # A bucket was closed only because the next member would not have fitted, or because its region ended.
    for item, after in pairwise(layout.buckets):
        first = after.members[0]
        equal = members[item.members[0]].region == members[first].region
        lines = sum(-(-members[i].count // ALIGN) * ALIGN for i in item.members)
        assert not equal or lines + members[first].count > bucket
