"""The planner against docs/planner.md: each tile has one owner, bytes are as the formulas say."""

import oracles
import pytest
from codec_cases import TEXTS, tile_nbytes

import agentcomm
from agentcomm import _core, specs

T = 65536
GRANULE = 256
HEADER = 64
PHASE_NBYTES = 16384
RANKS = range(1, 10)
LENGTHS = (
    1,
    2,
    255,
    256,
    257,
    1000,
    4096,
    12345,
    65535,
    65536,
    65537,
    300_001,
    9 * 65536,
    9 * 65536 + 1,
    5_000_003,
)
CHUNKS = (12, 16, 18, 20, 22, 26)
DTYPES = {"float32": 1, "float16": 2, "float64": 4}
SPECS = [*TEXTS, "int8[block=32]", "int8[block=4096]", "sign[block=4096]"]


def plan(text, dtype, nelems, nranks, rank=0, chunk_log2=20):
    return _core.plan_lane(
        specs.parse(text).to_tuple(), DTYPES[dtype], nelems, nranks, rank, chunk_log2
    )


def tiles_of(nelems, tile_nelems):
    return [min(tile_nelems, nelems - first) for first in range(0, nelems, tile_nelems)]


def encoded(text, dtype, tiles):
    """Return the bytes of tiles on the wire, padding included."""
    return sum(tile_nbytes(text, n, dtype) for n in tiles)


def messages_of(text, dtype, nelems, nranks, rank, chunk_log2):
    """Return the tiles of every message that a rank sends, as the planner's document has it."""
    lane = plan(text, dtype, nelems, nranks)
    tiles = tiles_of(nelems, lane["tile_nelems"])
    dense_nbytes = lane["tile_nelems"] * oracles.ELEM_NBYTES[dtype]
    # topk with a large fraction is longer than what it encodes.
    tile_nbytes_max = max(dense_nbytes, tile_nbytes(text, lane["tile_nelems"], dtype))
    stripe_nbytes = tile_nbytes_max * nranks
    ntiles = max(1, (1 << chunk_log2) // stripe_nbytes) * nranks
    messages = []
    for first in range(0, len(tiles), ntiles):
        chunk = tiles[first : first + ntiles]
        for peer in set(range(nranks)) - {rank}:
            if lane["direct"]:
                messages.append(chunk)
            else:
                messages.append(chunk[peer::nranks])  # the contribution to what the peer owns
                messages.append(chunk[rank::nranks])  # the mean of what this rank owns
    return [tiles for tiles in messages if tiles]


@pytest.mark.parametrize("nranks", RANKS)
def test_tiles_cover_the_lane(nranks):
    for nelems in LENGTHS:
        lane = plan("raw", "float32", nelems, nranks)
        nstripes = -(-nelems // (T * nranks))
        even = -(-nelems // (nstripes * nranks))
        tile = -(-even // GRANULE) * GRANULE
        assert lane["tile_nelems"] == tile
        assert tile <= T
        tiles = tiles_of(nelems, tile)
        assert lane["ntiles"] == len(tiles)
        assert sum(tiles) == nelems
        assert min(tiles) > 0
        assert len(tiles) <= nstripes * nranks


@pytest.mark.parametrize("nranks", RANKS)
def test_owners_have_even_shares(nranks):
    """Shares differ by at most one tile, and a tile has at most 255 elements more than is even."""
    for nelems in LENGTHS:
        tile = plan("raw", "float32", nelems, nranks)["tile_nelems"]
        tiles = tiles_of(nelems, tile)
        shares = [sum(tiles[rank::nranks]) for rank in range(nranks)]
        assert sum(shares) == nelems
        assert max(shares) - min(shares) <= tile
        nstripes = -(-nelems // (T * nranks))
        assert max(shares) <= nelems / nranks + GRANULE * nstripes


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("text", SPECS)
def test_tiles_depend_on_length_and_ranks_alone(text, nranks):
    for nelems in LENGTHS:
        seen = {
            (lane["tile_nelems"], lane["ntiles"])
            for dtype in DTYPES
            for rank in {0, nranks - 1}
            for chunk_log2 in CHUNKS
            for lane in [plan(text, dtype, nelems, nranks, rank, chunk_log2)]
        }
        assert len(seen) == 1


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("text", SPECS)
def test_direct_where_a_second_step_costs_more(text, nranks):
    for dtype in DTYPES:
        for nelems in (0, *LENGTHS):
            lane = plan(text, dtype, nelems, nranks)
            nbytes = encoded(text, dtype, tiles_of(nelems, lane["tile_nelems"]))
            worth_it = (nranks - 1) * (nranks - 2) * nbytes <= PHASE_NBYTES * nranks
            bounded = nbytes <= PHASE_NBYTES * nranks
            assert lane["direct"] == (nranks <= 2 or (worth_it and bounded))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("text", [*SPECS, "topk:1"])
def test_wire_bytes_are_those_of_the_messages(text, nranks, dtype):
    for nelems in (1, 257, 65537, 300_001):
        for rank in {0, nranks // 2, nranks - 1}:
            for chunk_log2 in CHUNKS:
                messages = messages_of(text, dtype, nelems, nranks, rank, chunk_log2)
                expected = sum(HEADER + encoded(text, dtype, tiles) for tiles in messages)
                got = plan(text, dtype, nelems, nranks, rank, chunk_log2)["wire_nbytes"]
                assert got == expected, (nelems, rank, chunk_log2)


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("text", SPECS)
def test_traffic_is_that_of_the_table(text, nranks):
    """Without headers: (n-1) E from each rank if direct; 2 (n-1) E from all together if sharded.

    A rank sends E - own + (n-1) own of the sharded form, own being what it owns of E: that exceeds
    the average by n - 2 times as much as its share does, which is at most one tile.
    """
    for nelems in LENGTHS:
        lane = plan(text, "float32", nelems, nranks)
        tiles = tiles_of(nelems, lane["tile_nelems"])
        nbytes = encoded(text, "float32", tiles)
        sent = []
        for rank in range(nranks):
            headers = HEADER * len(messages_of(text, "float32", nelems, nranks, rank, 20))
            sent.append(plan(text, "float32", nelems, nranks, rank)["wire_nbytes"] - headers)
        if nranks == 1:
            assert sent == [0]
        elif lane["direct"]:
            assert sent == [(nranks - 1) * nbytes] * nranks
        else:
            assert sum(sent) == 2 * (nranks - 1) * nbytes
            slack = (nranks - 2) * encoded(text, "float32", tiles[:1])
            assert all(abs(mine - 2 * (nranks - 1) / nranks * nbytes) <= slack for mine in sent)


@pytest.mark.parametrize("nranks", [3, 4, 7, 9])
def test_a_large_lane_costs_what_the_ring_costs_divided_by_the_ratio(nranks):
    """Padding and headers: less than 0.2 % at 5 million elements in chunks of 4 MiB."""
    dense = 2 * (nranks - 1) / nranks * 4 * 5_000_003
    for text, ratio in (("raw", 1), ("fp16", 2), ("int8", 32 / 8.125)):
        total = sum(
            plan(text, "float32", 5_000_003, nranks, rank, 22)["wire_nbytes"]
            for rank in range(nranks)
        )
        assert 0 <= total / nranks / (dense / ratio) - 1 < 0.002


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("text", SPECS)
def test_chunks_cost_nothing_but_headers(text, nranks):
    for nelems in (257, 65537, 300_001, 2_000_003):
        bare = set()
        for chunk_log2 in CHUNKS:
            nmessages = len(messages_of(text, "float32", nelems, nranks, 0, chunk_log2))
            lane = plan(text, "float32", nelems, nranks, 0, chunk_log2)
            bare.add(lane["wire_nbytes"] - HEADER * nmessages)
        assert len(bare) == 1


@pytest.mark.parametrize("nranks", RANKS)
def test_lane_of_nothing(nranks):
    lane = plan("int8", "float32", 0, nranks)
    assert (lane["ntiles"], lane["wire_nbytes"]) == (0, 0)


@pytest.mark.parametrize("nelems", [2**31 - 1, 2**31, 2**32 + 5, 2**36 + 1])
def test_more_elements_than_fit_32_bits(nelems):
    for nranks in (2, 3, 8):
        lane = plan("int8", "float32", nelems, nranks, 0, 26)
        tile = lane["tile_nelems"]
        assert (lane["ntiles"] - 1) * tile < nelems <= lane["ntiles"] * tile
        last = nelems - (lane["ntiles"] - 1) * tile
        nbytes = (lane["ntiles"] - 1) * encoded("int8", "float32", [tile]) + encoded(
            "int8", "float32", [last]
        )
        expected = nbytes if nranks == 2 else 2 * (nranks - 1) / nranks * nbytes
        # Headers: 64 bytes for every message of 64 MiB / n dense, so less than 1e-4; one tile more
        # or less.
        assert abs(lane["wire_nbytes"] - expected) <= 1e-4 * expected + nranks * encoded(
            "int8", "float32", [tile]
        )


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (((5, 48, 0, 0, 0), 1, 100, 2, 0, 20), "AGC_ERR_SPEC"),
        (((9, 0, 0, 0, 0), 1, 100, 2, 0, 20), "AGC_ERR_CODEC"),
        (((5, 0, 0, 0, 0), 0, 100, 2, 0, 20), "AGC_ERR_DTYPE"),
        (((5, 0, 0, 0, 0), 1, 100, 0, 0, 20), "AGC_ERR_SPEC"),
        (((5, 0, 0, 0, 0), 1, 100, 2, 2, 20), "AGC_ERR_SPEC"),
        (((5, 0, 0, 0, 0), 1, 100, 2, 0, 27), "AGC_ERR_SPEC"),
    ],
)
def test_what_the_planner_refuses(arguments, status):
    with pytest.raises(agentcomm.AgentCommError) as caught:
        _core.plan_lane(*arguments)
    assert caught.value.status == status
