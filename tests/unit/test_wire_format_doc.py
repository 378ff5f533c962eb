"""docs/wire_format.md against the code: its tables, its rules and its worked examples."""

import re
import struct
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch

import agentcomm
from agentcomm import _core

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "wire_format.md").read_text()
WIRE = (ROOT / "csrc" / "core" / "wire.h").read_text()
DUMP_LINE = re.compile(
    r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:   *(\S.*))?$", re.MULTILINE
)


def section(title):
    """Return what stands below a heading, up to the next one of its level."""
    level, rest = re.search(
        rf"^(#+) {re.escape(title)}\n(.*)", TEXT, re.MULTILINE | re.DOTALL
    ).groups()
    return re.split(rf"^#{{2,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def table(title):
    """Return the rows of the first table of a section, without its head."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def dump(title):
    """Return the bytes of a section's example; each line must begin where the last one ended."""
    data = b""
    for offset, digits, _ in DUMP_LINE.findall(section(title)):
        assert int(offset, 16) == len(data), f"line {offset}"
        data += bytes.fromhex(digits)
    return data


def notes(title):
    return {int(offset, 16): note for offset, _, note in DUMP_LINE.findall(section(title))}


def tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---- tables -------------------------------------------------------------------------------------


def test_header_has_no_gaps():
    at = 0
    for offset, nbytes, *_ in table("2. Header"):
        assert int(offset) == at
        at += int(nbytes)
    assert at == _core.HEADER_NBYTES


def test_header_is_where_the_code_has_it():
    offsets = dict(re.findall(r"AGC_WIRE_AT_(\w+) = (\d+),", WIRE))
    documented = {name: int(offset) for offset, _, name, *_ in table("2. Header")}
    names = {"payload": "payload_nbytes", "checksum": "header_checksum"}
    assert {
        names.get(key.lower(), key.lower()): int(value) for key, value in offsets.items()
    } == documented


def test_header_is_where_the_oracle_has_it():
    """Each field by itself: only its bytes, and the checksum, differ from those of zeros."""
    keywords = {
        "codec": "codec_id",
        "dtype": "dtype_id",
        "round": "round_",
        "frac": "frac_e9",
        "tile_granules": None,
        "magic": None,
        "header_checksum": None,
    }
    base = {
        "codec_id": 0,
        "dtype_id": 0,
        "nelems": 0,
        "payload_nbytes": 0,
        "version": 0,
        "ntiles": 0,
    }
    zeros = oracles.header(**base, tile_nelems=256)
    for offset, nbytes, name, *_ in table("2. Header"):
        keyword = keywords.get(name, name)
        if keyword is None:
            continue
        ones = (1 << 8 * int(nbytes)) - 1
        changed = oracles.header(**base | {keyword: ones}, tile_nelems=256)
        where = range(int(offset), int(offset) + int(nbytes))
        assert [i for i in range(60) if zeros[i] != changed[i]] == list(where), name


def test_codecs():
    documented = {name: int(number) for number, name in table("3. Codecs")}
    assert documented == {row["name"]: row["id"] for row in _core.codec_table()}


def test_codecs_of_values():
    said = re.search(r"values must be 0, (.*?)\.\n", section("topk")).group(1)
    documented = {name: int(number) for number, name in re.findall(r"(\d+) \((\w+)\)", said)}
    assert documented == {row["name"]: row["id"] for row in _core.codec_table() if row["values"]}


def test_data_types():
    header = (ROOT / "csrc" / "include" / "agentcomm.h").read_text()
    numbers = {int(value) for value in re.findall(r"AGC_DTYPE_\w+ = (\d+),", header)}
    rows = table("4. Data types")
    assert {int(number) for number, *_ in rows} == numbers
    for number, _, nbytes in rows:
        # A raw frame of one tile, 16 elements: no padding.
        assert _core.frame_nbytes((1, 0, 0, 0, 0), int(number), 16, False) == 64 + 16 * int(nbytes)


def test_flags():
    documented = {name: int(bit) for bit, name, _ in table("5. Flags")}
    in_code = {
        name.lower(): int(bit) for name, bit in re.findall(r"AGC_FRAME_(\w+) = 1 << (\d)", WIRE)
    }
    assert documented == in_code
    unknown = 1 << len(documented)
    assert f"Bits {len(documented)} to 7 must be 0" in TEXT
    frame, _ = oracles.encode_frame("raw", np.zeros(4, np.float32), flags=unknown)
    with pytest.raises(agentcomm.FrameError) as caught:
        agentcomm.decode(tensor(frame))
    assert caught.value.status == "AGC_ERR_HEADER"


def test_status_codes_exist_and_are_frame_errors():
    listed = (ROOT / "csrc" / "include" / "agc_status.inc").read_text()
    known = dict(re.findall(r"AGC_STATUS\((\w+), -?\d+, \w+, (\w+),", listed))
    for check, status in table("8. Decoding: checks in order"):
        assert known[status.removeprefix("AGC_")] == "FrameError", check
    for name in re.findall(r"AGC_(ERR_\w+)", TEXT):
        assert name in known


def test_constants():
    assert f"# Wire format, version {_core.WIRE_VERSION}\n" in TEXT
    for codec in ("fp8", "int8", "int4", "ternary"):
        limit = re.search(r"bits are at most (0x[0-9A-F]{8})", section(codec).replace("\n", " "))
        assert int(limit.group(1), 16) == oracles.largest_scale(codec).view(np.uint32)
    assert oracles.crc32c(b"123456789") == int(
        re.search(r"`123456789` it is (0x\w{8})", TEXT).group(1), 16
    )


# ---- checks, in their order ---------------------------------------------------------------------


def test_of_two_faults_the_first_is_named():
    """Break one more rule at a time, from the last to the first: the newest is what is reported."""
    payload = dict(payload_nbytes=16)
    frame = bytearray(oracles.encode_frame("int8", np.ones(8, np.float32), checksum=True)[0])

    def status():
        with pytest.raises(agentcomm.FrameError) as caught:
            agentcomm.decode(tensor(frame))
        return caught.value.status

    def mend():
        frame[60:64] = struct.pack("<I", oracles.crc32c(bytes(frame[:60])))

    assert payload["payload_nbytes"] == struct.unpack_from("<Q", frame, 24)[0]
    frame[64:68] = struct.pack("<f", -1.0)
    frame[80:84] = struct.pack("<I", oracles.crc32c(bytes(frame[64:80])))
    assert status() == "AGC_ERR_PAYLOAD"
    frame[80] ^= 1
    assert status() == "AGC_ERR_PAYLOAD_CHECKSUM"
    del frame[83:]
    assert status() == "AGC_ERR_TRUNCATED"
    frame[24] = 32
    mend()
    assert status() == "AGC_ERR_HEADER"
    frame[5] = 9
    mend()
    assert status() == "AGC_ERR_CODEC"
    frame[6] = 9
    mend()
    assert status() == "AGC_ERR_HEADER"
    frame[60] ^= 1
    assert status() == "AGC_ERR_HEADER_CHECKSUM"
    frame[4] = 2
    assert status() == "AGC_ERR_VERSION"
    frame[3] = 0
    assert status() == "AGC_ERR_MAGIC"
    del frame[63:]
    assert status() == "AGC_ERR_TRUNCATED"


def test_int8_accepts_minus_128():
    frame = bytearray(dump("A frame"))[:-4]
    frame[8] = 0
    frame[60:64] = struct.pack("<I", oracles.crc32c(bytes(frame[:60])))
    frame[68] = 0x80
    scale = struct.unpack_from("<f", frame, 64)[0]
    assert agentcomm.decode(tensor(frame))[0].item() == np.float32(-128) * np.float32(scale)


def test_padding_is_not_looked_at():
    frame = bytearray(oracles.encode_frame("int8", np.ones(8, np.float32))[0])
    expected = agentcomm.decode(tensor(frame))
    assert frame[76:80] == bytes(4)
    frame[76:80] = b"\xff" * 4
    assert torch.equal(agentcomm.decode(tensor(frame)), expected)


# ---- examples -----------------------------------------------------------------------------------


def test_example_frame_is_what_encode_gives():
    call = re.search(
        r"`agentcomm\.encode\(torch\.tensor\(\[(.*?)\]\), (.*?)\)`: (\d+) bytes", section("A frame")
    )
    numbers = torch.tensor([float(number) for number in call.group(1).split(",")])
    assert call.group(2) == '"int8", seed=7, checksum=True'
    frame = agentcomm.encode(numbers, "int8", seed=7, checksum=True)
    assert frame.numel() == int(call.group(3))
    assert frame.numpy().tobytes() == dump("A frame")
    assert oracles.encode_frame("int8", numbers.numpy(), seed=7, checksum=True)[0] == dump(
        "A frame"
    )


def test_example_frame_decodes_to_what_the_text_says():
    decoded = agentcomm.decode(tensor(dump("A frame")))
    said = re.search(r"It decodes to ([-\d., ]+): ", section("A frame")).group(1)
    # A float32 of two decimals: within half a unit in the last place of what is printed.
    assert torch.allclose(
        decoded, torch.tensor([float(n) for n in said.split(",")]), rtol=2.0**-22, atol=0
    )


def test_example_frame_s_notes():
    data, said = dump("A frame"), notes("A frame")
    steps = [int(n) for n in said[0x44].removeprefix("q: ").split()]
    assert steps == list(struct.unpack_from("8b", data, 0x44))
    assert f"{struct.unpack_from('<f', data, 0x40)[0]:.2f}" == said[0x40].split()[1]
    assert int(said[0x10].split()[1]) == struct.unpack_from("<Q", data, 0x10)[0]
    assert int(said[0x18].split()[1]) == struct.unpack_from("<Q", data, 0x18)[0]
    by_offset = {int(offset): name for offset, _, name, *_ in table("2. Header")}
    assert all(said[offset].startswith(name) for offset, name in by_offset.items())
    assert struct.unpack_from("<I", data, 0x50)[0] == oracles.crc32c(data[0x40:0x50])


def test_example_abort_frame():
    data = dump("An abort frame")
    listed = (ROOT / "csrc" / "include" / "agc_status.inc").read_text()
    timeout = int(re.search(r"AGC_STATUS\(ERR_TIMEOUT, (-\d+),", listed).group(1))
    assert data == oracles.header(
        0,
        0,
        0,
        0,
        flags=oracles.FLAG_ABORT,
        stream=0x0123456789ABCDEF,
        round_=7,
        first_tile=1,
        seed=-timeout,
    )
    with pytest.raises(agentcomm.FrameError) as caught:
        agentcomm.decode(tensor(data))
    assert caught.value.status == "AGC_ERR_HEADER"
