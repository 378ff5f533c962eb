"""Frames that are cut short, damaged, foreign or made up: each gets its own error, and nothing is"
" written."""

import struct

import numpy as np
import oracles
import pytest
import torch
from codec_cases import bits_of, frame_bytes, tensor_of, values

import agentcomm
from agentcomm import _core

CODECS = {row["name"]: row for row in _core.codec_table()}
NELEMS = 1000
X = values("random", NELEMS, "float32")


def tensor(data):
    """Return bytes in a tensor of just their length, so that a sanitizer sees reads beyond it."""
    return torch.tensor(list(data), dtype=torch.uint8)


def sound(codec="int8", **options):
    return oracles.encode_frame(codec, X, **options)[0]


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
@pytest.mark.parametrize("codec", CODECS)
def test_header_says_it_all(codec, dtype, checksum):
    x = tensor_of(values("random", 70_000, dtype), dtype)
    frame = agentcomm.encode(x, codec, seed=0xFEDCBA98, checksum=checksum)
    info = _core.frame_info(torch.utils.dlpack.to_dlpack(frame))
    nbytes = frame.numel() - 64 - 4 * checksum
    assert info == {
        "spec": (CODECS[codec]["id"], CODECS[codec]["block_nelems"], 0, 0, 0),
        "dtype": oracles.DTYPE_IDS[dtype],
        "nelems": 70_000,
        "payload_nbytes": nbytes,
        "flags": int(checksum),
        "seed": 0xFEDCBA98,
    }
    back = agentcomm.decode(frame)
    assert back.dtype == x.dtype
    assert back.shape == (70_000,)


def test_magic_can_be_read():
    assert frame_bytes(agentcomm.encode(torch.ones(3), "raw"))[:5] == b"AGCF\x01"
    assert _core.WIRE_VERSION == 1
    assert _core.HEADER_NBYTES == 64


@pytest.mark.parametrize("codec", CODECS)
def test_frame_of_nothing(codec):
    frame = agentcomm.encode(torch.empty(0), codec)
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


@pytest.mark.parametrize("tile_nelems", [256, 512, 768, 65536])
@pytest.mark.parametrize("codec", CODECS)
def test_smaller_tiles(codec, tile_nelems):
    """An exchange cuts small lanes into smaller tiles; such frames are frames like any other."""
    frame = sound(codec, tile_nelems=tile_nelems, block=64)
    work, _ = oracles.decode_frame(frame)
    assert np.array_equal(
        bits_of(agentcomm.decode(tensor(frame))), bits_of(torch.from_numpy(work.copy()))
    )


# ---- refused ------------------------------------------------------------------------------------


def test_frame_error_is_a_value_error():
    with pytest.raises(ValueError, match="frame is cut short") as caught:
        agentcomm.decode(torch.empty(0, dtype=torch.uint8))
    assert isinstance(caught.value, agentcomm.FrameError)
    assert isinstance(caught.value, agentcomm.AgentCommError)
    assert caught.value.status == "AGC_ERR_TRUNCATED"


@pytest.mark.parametrize("codec", CODECS)
def test_cut_short_anywhere(codec):
    frame = oracles.encode_frame(codec, X[:33], checksum=True)[0]
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


@pytest.mark.parametrize("codec", CODECS)
def test_checksum_finds_every_flipped_bit(codec):
    frame = oracles.encode_frame(codec, X[:20], checksum=True)[0]
    for bit in range(8 * 64, 8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        assert_refused(damaged, "AGC_ERR_PAYLOAD_CHECKSUM", 20)


@pytest.mark.parametrize("codec", ["raw", "fp16", "bf16"])
def test_without_a_checksum_every_payload_is_numbers(codec):
    frame = bytearray(oracles.encode_frame(codec, X[:64])[0])
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
        codec = list(CODECS)[rng.integers(len(CODECS))]
        frame = bytearray(sound(codec))
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
