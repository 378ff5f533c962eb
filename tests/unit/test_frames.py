"""Frames that are cut short, damaged, foreign or made up: each gets its own error, and nothing is"
" written."""

import struct

import numpy as np
import oracles
import pytest
import torch
from codec_cases import (
    TEXTS,
    bits_of,
    frame_bytes,
    oracle_arguments,
    tensor_of,
    tile_nbytes,
    values,
)

import agentcomm
from agentcomm import _core
from agentcomm.specs import parse

NELEMS = 1000
X = values("random", NELEMS, "float32")


def tensor(data):
    """Return bytes in a tensor of just their length, so that a sanitizer sees reads beyond it."""
    return torch.tensor(list(data), dtype=torch.uint8)


def sound(text="int8", x=X, **options):
    codec, of_spec = oracle_arguments(text)
    return oracles.encode_frame(codec, x, **of_spec | options)[0]


def assert_refused(data, status, nelems=NELEMS):
    """Check the status, that the message says so in words, and that out is as it was."""
    frame = tensor(data)
    out = torch.full((nelems,), 7.5)
    for attempt in (
        lambda: agentcomm.decode(frame),
        lambda: agentcomm.decode(frame, out=out),
        lambda: agentcomm.decode(frame, out=out, add=True),
    ):
        with pytest.raises(agentcomm.FrameError) as caught:
            attempt()
        assert caught.value.status == status
        assert "frame" in str(caught.value)
    assert out.eq(7.5).all()
    assert frame_bytes(frame) == bytes(data)


# ---- self-describing ----------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("dtype", list(oracles.DTYPE_IDS))
@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "int4[block=32,rounding=stochastic]",
        "topk:0.012345678+fp16",
        "randk:1+sign[block=64]",
        "topk:0.000000001+fp8[block=4096,rounding=stochastic]",
    ],
)
def test_header_says_it_all(text, dtype, checksum):
    x = tensor_of(values("random", 70_000, dtype), dtype)
    frame = agentcomm.encode(x, text, seed=0xFEDCBA98, checksum=checksum)
    info = _core.frame_info(torch.utils.dlpack.to_dlpack(frame))
    nbytes = frame.numel() - 64 - 4 * checksum
    assert info == {
        "spec": parse(text).to_tuple(),
        "dtype": oracles.DTYPE_IDS[dtype],
        "nelems": 70_000,
        "payload_nbytes": nbytes,
        "flags": int(checksum) | ("stochastic" in text) * oracles.FLAG_STOCHASTIC,
        "seed": 0xFEDCBA98,
    }
    back = agentcomm.decode(frame)
    assert back.dtype == x.dtype
    assert back.shape == (70_000,)


def test_magic_can_be_read():
    assert frame_bytes(agentcomm.encode(torch.ones(3), "raw"))[:5] == b"AGCF\x01"
    assert _core.WIRE_VERSION == 1
    assert _core.HEADER_NBYTES == 64


@pytest.mark.parametrize("text", TEXTS)
def test_frame_of_nothing(text):
    frame = agentcomm.encode(torch.empty(0), text)
    assert frame.numel() == 64
    assert agentcomm.decode(frame).shape == (0,)
    agentcomm.decode(frame, out=torch.empty(3, 0), add=True)


def test_bytes_behind_the_frame_do_not_matter():
    frame = tensor(sound(checksum=True) + b"\xff" * 100)
    assert torch.equal(agentcomm.decode(frame), agentcomm.decode(frame[:-100]))


@pytest.mark.parametrize(
    "fields",
    [
        {"nforwards": 255},
        {"stream": 2**64 - 1},
        {"seed": 2**32 - 1},
        {"round_": 2**32 - 1},
        {"first_tile": 2**32 - 1},
        {"bucket": 65535},
        {"lane": 255},
        {"chunk_log2": 62},
        {"flags": oracles.FLAG_RESULT},
        {"flags": oracles.FLAG_ABSENT},
        {"flags": oracles.FLAG_STOCHASTIC},
    ],
    ids=str,
)
def test_fields_that_do_not_change_what_is_decoded(fields):
    assert torch.equal(agentcomm.decode(tensor(sound(**fields))), agentcomm.decode(tensor(sound())))


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**32 - 1},
        {"round_": 1},
        {"bucket": 1},
        {"lane": 255},
        {"first_tile": 3, "nforwards": 255, "stream": 2**64 - 1, "chunk_log2": 62},
    ],
    ids=str,
)
def test_fields_that_say_where_randk_draws(fields):
    data = sound("randk:0.25", **fields)
    work, _ = oracles.decode_frame(data)
    assert np.array_equal(bits_of(agentcomm.decode(tensor(data))), work.view(np.int32))
    same = np.array_equal(work, oracles.decode_frame(sound("randk:0.25"))[0])
    assert same == ("first_tile" in fields)  # a single frame's tiles count from its start


@pytest.mark.parametrize("tile_nelems", [256, 512, 768, 65536])
@pytest.mark.parametrize("text", [*TEXTS, "topk:0.3+int8"])
def test_smaller_tiles(text, tile_nelems):
    """An exchange cuts small lanes into smaller tiles; such frames are frames like any other."""
    frame = sound(text, tile_nelems=tile_nelems, block=64)
    work, _ = oracles.decode_frame(frame)
    assert np.array_equal(
        bits_of(agentcomm.decode(tensor(frame))), bits_of(torch.from_numpy(work.copy()))
    )


# ---- sparse codecs -------------------------------------------------------------------------------


def topk_frame(**fields):
    """Return a frame of 1000 elements that keeps ten: indices from byte 64, values from 96."""
    return bytearray(sound("topk:0.01", **fields))


@pytest.mark.parametrize(
    "indices",
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 1000],  # beyond the tile
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 65535],
        [1, 0, 2, 3, 4, 5, 6, 7, 8, 9],  # do not ascend
        [0, 0, 2, 3, 4, 5, 6, 7, 8, 9],  # twice
        [990, 991, 992, 993, 994, 995, 996, 997, 999, 998],
    ],
)
def test_indices_that_point_outside_or_back(indices):
    frame = topk_frame()
    frame[64:84] = struct.pack("<10H", *indices)
    assert_refused(frame, "AGC_ERR_PAYLOAD")


def test_indices_at_the_edges():
    frame = topk_frame()
    frame[64:84] = struct.pack("<10H", 0, *range(991, 1000))
    assert agentcomm.decode(tensor(frame)).nonzero().reshape(-1).tolist() == [0, *range(991, 1000)]


def test_indices_of_a_later_tile():
    """Everything before it must be left unwritten too."""
    x = np.arange(65536 + 300, 0, -1).astype(np.float32)
    frame = bytearray(sound("topk:0.1", x))
    at = 64 + tile_nbytes("topk:0.1", 65536, "float32")
    assert struct.unpack_from("<30H", frame, at) == tuple(range(30))
    struct.pack_into("<30H", frame, at, *range(270, 300))
    assert agentcomm.decode(tensor(frame))[65536:].nonzero().flatten().tolist() == [
        *range(270, 300)
    ]
    for number, index in ((29, 300), (29, 65535), (1, 270), (0, 299)):
        damaged = frame.copy()
        struct.pack_into("<H", damaged, at + 2 * number, index)
        assert_refused(damaged, "AGC_ERR_PAYLOAD", len(x))


def test_padding_between_indices_and_values_is_not_looked_at():
    frame = topk_frame()
    expected = agentcomm.decode(tensor(frame))
    assert frame[84:96] == bytes(12)
    frame[84:96] = b"\xff" * 12
    assert torch.equal(agentcomm.decode(tensor(frame)), expected)


@pytest.mark.parametrize("text", ["topk:0.01+int8", "randk:0.01+int8"])
def test_scales_of_kept_values_are_checked(text):
    frame = bytearray(sound(text))
    at = len(frame) - oracles.tile_nbytes("int8", 10, "float32")
    for scale in (-1.0, np.inf):
        frame[at : at + 4] = struct.pack("<f", scale)
        assert_refused(frame, "AGC_ERR_PAYLOAD")


@pytest.mark.parametrize("fields", [{"frac_e9": 9_500_001}, {"nelems": 999}, {"nelems": 901}])
def test_sparse_frame_that_may_be_read_otherwise(fields):
    """Ten are kept all the same, so it is a frame: of what the header says."""
    data = sound("topk:0.01", np.where(np.arange(NELEMS) < 900, X, np.float32(0)), **fields)
    work, _ = oracles.decode_frame(data)
    assert np.array_equal(bits_of(agentcomm.decode(tensor(data))), work.view(np.int32))


def test_few_bytes_may_stand_for_many_elements():
    """16 bytes for a tile of 65,536, but no memory before they are all there."""
    data = sound("randk:0.000000001", np.zeros(3 * 65536, np.float32))
    assert len(data) == 64 + 3 * 16
    assert agentcomm.decode(tensor(data)).shape == (3 * 65536,)
    claim = sound("randk:0.000000001", nelems=2**44, ntiles=2**28, payload_nbytes=2**32)
    with pytest.raises(agentcomm.FrameError) as caught:
        agentcomm.decode(tensor(claim))
    assert caught.value.status == "AGC_ERR_TRUNCATED"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("topk:1", {"frac_e9": 10**9 + 1}),
        ("randk:1", {"frac_e9": 10**9 + 1}),
        ("randk:0.01", {"frac_e9": 0}),
        ("randk:0.01", {"codec_id": 16}),
        ("topk:0.01", {"codec_id": 17}),
        ("topk:0.01", {"codec_id": 1}),
        ("topk:0.01", {"nelems": 1601}),  # keeps 17
        ("topk:0.01+fp16", {"values": 3}),  # bf16 is as long
        ("topk:0.01+int8", {"block_log2": 0}),
        ("topk:0.01+int8", {"block_log2": 4}),
        ("topk:0.01+int8", {"block_log2": 13}),
        ("topk:0.01+fp16", {"flags": oracles.FLAG_STOCHASTIC}),
        ("randk:0.01+sign", {"flags": oracles.FLAG_STOCHASTIC}),
        ("topk:0.01", {"nelems": 2**64 - 1, "ntiles": 0}),
    ],
    ids=str,
)
def test_more_sparse_headers_that_contradict_themselves(text, fields):
    assert_refused(sound(text, **fields), "AGC_ERR_HEADER")


@pytest.mark.parametrize(
    "fields",
    [
        {"frac_e9": 0},
        {"frac_e9": 10**9 + 1},
        {"frac_e9": 2**32 - 1},
        {"frac_e9": 2 * 10**7},  # keeps twenty: the payload is too short
        {"values": 1},
        {"values": 3},
        {"values": 7},
        {"values": 16},
        {"values": 255},
        {"values": 5},  # wants blocks
        {"block_log2": 8},
        {"flags": oracles.FLAG_STOCHASTIC},
        {"payload_nbytes": 96},
    ],
)
def test_sparse_headers_that_contradict_themselves(fields):
    assert_refused(topk_frame(**fields), "AGC_ERR_HEADER")


def test_dense_codecs_have_no_fraction_and_no_values():
    assert_refused(sound("int8", frac_e9=10**7), "AGC_ERR_HEADER")
    assert_refused(sound("int8", values=5), "AGC_ERR_HEADER")


# ---- refused ------------------------------------------------------------------------------------


def test_frame_error_is_a_value_error():
    with pytest.raises(ValueError, match="frame is cut short") as caught:
        agentcomm.decode(torch.empty(0, dtype=torch.uint8))
    assert isinstance(caught.value, agentcomm.FrameError)
    assert isinstance(caught.value, agentcomm.AgentCommError)
    assert caught.value.status == "AGC_ERR_TRUNCATED"


@pytest.mark.parametrize("text", TEXTS)
def test_cut_short_anywhere(text):
    frame = sound(text, X[:33], checksum=True)
    for nbytes in range(len(frame)):
        assert_refused(frame[:nbytes], "AGC_ERR_TRUNCATED", 33)


def test_every_bit_of_the_header_counts():
    frame = sound()
    for bit in range(8 * 64):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        status = (
            "AGC_ERR_MAGIC"
            if bit < 32
            else "AGC_ERR_VERSION"
            if bit < 40
            else "AGC_ERR_HEADER_CHECKSUM"
        )
        assert_refused(damaged, status)


@pytest.mark.parametrize("text", TEXTS)
def test_checksum_finds_every_flipped_bit(text):
    frame = sound(text, X[:20], checksum=True)
    for bit in range(8 * 64, 8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        assert_refused(damaged, "AGC_ERR_PAYLOAD_CHECKSUM", 20)


@pytest.mark.parametrize("text", ["raw", "fp16", "bf16", "randk:0.5", "randk:0.5+fp16"])
def test_without_a_checksum_every_payload_is_numbers(text):
    frame = bytearray(sound(text, X[:64]))
    frame[64:] = np.random.default_rng(5).bytes(len(frame) - 64)
    work, _ = oracles.decode_frame(bytes(frame))
    assert np.array_equal(bits_of(agentcomm.decode(tensor(frame))), work.view(np.int32))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_named_before_anything_else(version):
    """Its header may be laid out otherwise, checksum included."""
    assert_refused(sound(version=version), "AGC_ERR_VERSION")
    assert_refused(sound(version=version, checksum_of_header=0), "AGC_ERR_VERSION")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"codec_id": 0}, "AGC_ERR_CODEC"),
        ({"codec_id": 9}, "AGC_ERR_CODEC"),
        ({"codec_id": 255}, "AGC_ERR_CODEC"),
        ({"codec_id": 1}, "AGC_ERR_HEADER"),  # raw with blocks
        ({"codec_id": 2, "block_log2": 0}, "AGC_ERR_HEADER"),  # fp16 with the length of int8
        ({"dtype_id": 0}, "AGC_ERR_HEADER"),
        ({"dtype_id": 5}, "AGC_ERR_HEADER"),
        ({"values": 5}, "AGC_ERR_HEADER"),
        ({"frac_e9": 1}, "AGC_ERR_HEADER"),
        ({"block_log2": 0}, "AGC_ERR_HEADER"),
        ({"block_log2": 4}, "AGC_ERR_HEADER"),
        ({"block_log2": 7}, "AGC_ERR_HEADER"),  # a block that is allowed, but not with this length
        ({"block_log2": 13}, "AGC_ERR_HEADER"),
        ({"block_log2": 32 + 8}, "AGC_ERR_HEADER"),
        ({"block_log2": 255}, "AGC_ERR_HEADER"),
        ({"flags": 32}, "AGC_ERR_HEADER"),
        ({"flags": 128}, "AGC_ERR_HEADER"),
        ({"flags": oracles.FLAG_ABORT}, "AGC_ERR_HEADER"),
        ({"flags": oracles.FLAG_ABORT, "nelems": 0, "payload_nbytes": 0}, "AGC_ERR_HEADER"),
        ({"nelems": 1009}, "AGC_ERR_HEADER"),
        ({"nelems": 984}, "AGC_ERR_HEADER"),
        ({"nelems": 0}, "AGC_ERR_HEADER"),
        ({"nelems": 2**64 - 1, "ntiles": 1}, "AGC_ERR_HEADER"),
        ({"nelems": 2**64 - 1, "ntiles": 0}, "AGC_ERR_HEADER"),
        ({"nelems": 2**63, "ntiles": 0}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 0}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 1008}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 1016}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 1040}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 2**64 - 1}, "AGC_ERR_HEADER"),
        ({"payload_nbytes": 2**64 - 64}, "AGC_ERR_HEADER"),
        ({"ntiles": 0}, "AGC_ERR_HEADER"),
        ({"ntiles": 2}, "AGC_ERR_HEADER"),
        ({"ntiles": 2**32 - 1}, "AGC_ERR_HEADER"),
        ({"chunk_log2": 63}, "AGC_ERR_HEADER"),
        ({"chunk_log2": 255}, "AGC_ERR_HEADER"),
        ({"flags": oracles.FLAG_CHECKSUM}, "AGC_ERR_TRUNCATED"),
    ],
    ids=str,
)
def test_header_that_contradicts_itself(fields, status):
    """Its checksum is right: it was written by another program, or by an attacker."""
    if fields.get("codec_id") == 1:
        fields = fields | {"payload_nbytes": 4000}
    assert_refused(sound(**fields), status)


@pytest.mark.parametrize("block_log2", [5, 8, 12, 31, 32, 40, 64, 255])
@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16"])
def test_blocks_in_a_codec_that_has_none(codec, block_log2):
    assert_refused(sound(codec, block_log2=block_log2), "AGC_ERR_HEADER")


def test_stochastic_flag_on_a_codec_that_has_none():
    assert_refused(sound("bf16", flags=oracles.FLAG_STOCHASTIC), "AGC_ERR_HEADER")


def test_huge_claims_are_refused_before_memory_is_taken():
    nelems = 2**45
    payload_nbytes = nelems // 65536 * oracles.tile_nbytes("int8", 65536, "float32")
    frame = sound(nelems=nelems, payload_nbytes=payload_nbytes)
    with pytest.raises(agentcomm.FrameError) as caught:
        agentcomm.decode(tensor(frame))
    assert caught.value.status == "AGC_ERR_TRUNCATED"


LARGEST_SCALE = np.float32(oracles.largest_scale("int8")).view(np.uint32)


@pytest.mark.parametrize(
    "bits",
    [
        0x80000000,  # minus zero
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00001,  # a NaN, but not the one
        0xFFC00000,
        0x7F800001,
        int(LARGEST_SCALE) + 1,
    ],
    ids=hex,
)
def test_scales_that_int8_never_writes(bits):
    """In the last block, so that everything before it must be left unwritten too."""
    x = values("random", 65536 + 300, "float32")
    frame = bytearray(oracles.encode_frame("int8", x)[0])
    at = 64 + oracles.tile_nbytes("int8", 65536, "float32") + 4
    struct.pack_into("<I", frame, at, bits)
    assert_refused(frame, "AGC_ERR_PAYLOAD", len(x))


def test_scales_at_the_limits():
    frame = bytearray(sound())
    for bits in (0, 1, int(LARGEST_SCALE), 0x7FC00000):
        struct.pack_into("<I", frame, 64, bits)
        work, _ = oracles.decode_frame(bytes(frame))
        assert np.array_equal(bits_of(agentcomm.decode(tensor(frame))), work.view(np.int32))
        finite = np.isfinite(work[:256])
        assert finite.all() if bits != 0x7FC00000 else not finite.any()


def test_garbage():
    """Random bytes: all of them, behind a magic number, in a header whose checksum is right."""
    rng = np.random.default_rng(11)
    for _ in range(300):
        nbytes = int(rng.integers(0, 400))
        noise = bytearray(rng.bytes(nbytes))
        if rng.random() < 0.7 and nbytes >= 64:
            noise[:5] = b"AGCF\x01"
            if rng.random() < 0.7:
                noise[60:64] = struct.pack("<I", oracles.crc32c(bytes(noise[:60])))
        out = torch.full((100,), 1.25)
        for keywords in ({}, {"out": out}, {"out": out, "add": True}):
            with pytest.raises(agentcomm.FrameError) as caught:
                agentcomm.decode(tensor(noise), **keywords)
            assert caught.value.status.startswith("AGC_ERR_")
        assert out.eq(1.25).all()


def test_small_changes_to_sound_headers():
    """A byte or two changed and the checksum mended: refused, or decoded as the header now says."""
    rng = np.random.default_rng(12)
    refused = 0
    for _ in range(400):
        texts = [*TEXTS, "topk:0.1+int8", "randk:1+sign"]
        frame = bytearray(sound(texts[rng.integers(len(texts))]))
        for at in rng.integers(4, 60, rng.integers(1, 3)):
            frame[at] = rng.integers(256)
        frame[60:64] = struct.pack("<I", oracles.crc32c(bytes(frame[:60])))
        try:
            got = agentcomm.decode(tensor(frame))
        except agentcomm.FrameError:
            refused += 1
            continue
        work, dtype = oracles.decode_frame(bytes(frame))
        assert len(got) == struct.unpack_from("<Q", frame, 16)[0]
        assert np.array_equal(
            bits_of(got), bits_of(tensor_of(oracles.from_work(work, dtype), dtype))
        )
    assert 100 < refused < 400
