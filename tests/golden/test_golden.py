"""Frames of released versions: they decode for ever, and the same input still gives the same bytes.

A difference is a change of the wire format or of a codec's numbers. If it is meant: WRITE_GOLDEN=1
rewrites the files of the current wire version, and CHANGELOG.md names the change. Files of older
versions are never rewritten.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from codec_cases import TORCH_DTYPES, bits_of, frame_bytes, tensor_of

import agentcomm
from agentcomm import _core
from agentcomm.specs import parse

FOLDER = Path(__file__).parent / f"v{_core.WIRE_VERSION}"
INDEX = FOLDER / "index.json"
WRITE = os.environ.get("WRITE_GOLDEN", "") not in ("", "0")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 65520.0, 3e38, -3.4e38, 1e-40, -1e-45, 2.0**-24, 2.0**-25]

# name: spec, data type, elements, options. Those of more than a few KB are kept as digests only.
FRAMES = {
    "empty": ("int8", "float32", 0, {}),
    "one": ("int8", "float32", 1, {}),
    "raw-float32": ("raw", "float32", 300, {"special": True}),
    "raw-float16": ("raw", "float16", 301, {"special": True}),
    "raw-bfloat16": ("raw", "bfloat16", 299, {"special": True}),
    "raw-float64": ("raw", "float64", 150, {"special": True}),
    "raw-checksum": ("raw", "float32", 17, {"checksum": True}),
    "raw-residual": ("raw", "float32", 200, {"residual": True}),
    "fp16": ("fp16", "float32", 500, {"special": True}),
    "fp16-bfloat16": ("fp16", "bfloat16", 257, {}),
    "fp16-residual": ("fp16", "float32", 300, {"residual": True}),
    "bf16": ("bf16", "float32", 500, {"special": True}),
    "bf16-float64": ("bf16", "float64", 257, {}),
    "bf16-residual-checksum": ("bf16", "float32", 300, {"residual": True, "checksum": True}),
    "int8": ("int8", "float32", 1000, {}),
    "int8-not-finite": ("int8", "float32", 1025, {"not_finite": 600}),
    "int8-special": ("int8[block=32]", "float32", 511, {"special": True}),
    "int8-block-4096": ("int8[block=4096]", "float32", 4097, {}),
    "int8-float16": ("int8", "float16", 777, {}),
    "int8-bfloat16": ("int8", "bfloat16", 777, {}),
    "int8-float64": ("int8", "float64", 777, {}),
    "int8-residual": ("int8", "float32", 1000, {"residual": True}),
    "int8-stochastic": ("int8[rounding=stochastic]", "float32", 1000, {"seed": 0x12345678}),
    "int8-stochastic-residual-checksum": (
        "int8[block=64,rounding=stochastic]",
        "float32",
        1000,
        {"seed": 0xFFFFFFFF, "residual": True, "checksum": True},
    ),
    "int4": ("int4", "float32", 1001, {"residual": True}),
    "int4-not-finite": ("int4", "float32", 1025, {"not_finite": 600}),
    "int4-special": ("int4[block=32]", "float32", 511, {"special": True}),
    "int4-bfloat16": ("int4", "bfloat16", 777, {}),
    "int4-stochastic": ("int4[rounding=stochastic]", "float32", 999, {"seed": 0x12345678}),
    "fp8": ("fp8", "float32", 1001, {"residual": True}),
    "fp8-not-finite": ("fp8", "float32", 1025, {"not_finite": 600}),
    "fp8-special": ("fp8[block=32]", "float32", 511, {"special": True}),
    "fp8-bfloat16": ("fp8", "bfloat16", 777, {}),
    "fp8-stochastic": ("fp8[rounding=stochastic]", "float32", 999, {"seed": 0x12345678}),
    "ternary": ("ternary", "float32", 1001, {"residual": True}),
    "ternary-not-finite": ("ternary", "float32", 1025, {"not_finite": 600}),
    "ternary-special": ("ternary[block=32]", "float32", 511, {"special": True}),
    "ternary-bfloat16": ("ternary", "bfloat16", 777, {}),
    "ternary-stochastic": ("ternary[rounding=stochastic]", "float32", 999, {"seed": 0x12345678}),
    "sign": ("sign", "float32", 1001, {"residual": True}),
    "sign-not-finite": ("sign", "float32", 1025, {"not_finite": 600}),
    "sign-special": ("sign[block=32]", "float32", 511, {"special": True}),
    "sign-bfloat16": ("sign", "bfloat16", 777, {}),
    "topk": ("topk:0.1", "float32", 1001, {"residual": True}),
    "topk-not-finite": ("topk:0.01", "float32", 1025, {"not_finite": 600}),
    "topk-special": ("topk:0.97", "float32", 111, {"special": True}),
    "topk-bfloat16": ("topk:0.1", "bfloat16", 777, {}),
    "topk-int8": ("topk:0.1+int8[block=32]", "float32", 999, {"residual": True}),
    "topk-fp16": ("topk:0.1+fp16", "float64", 300, {"checksum": True}),
    "topk-int4-stochastic": (
        "topk:0.3+int4[rounding=stochastic]",
        "float32",
        999,
        {"seed": 0x12345678, "residual": True},
    ),
    "randk": ("randk:0.1", "float32", 1001, {"residual": True}),
    "randk-float16": ("randk:0.3", "float16", 301, {"seed": 0xFFFFFFFF}),
    "randk-fp8-stochastic": (
        "randk:0.3+fp8[block=64,rounding=stochastic]",
        "float32",
        999,
        {"seed": 0x12345678, "residual": True},
    ),
    "randk-sign": ("randk:0.5+sign", "float32", 1001, {"residual": True}),
    "topk-sign": ("topk:0.2+sign", "float64", 500, {}),
    "randk-fp8": ("randk:0.2+fp8", "float16", 700, {"seed": 0xFFFFFFFF}),
}
DIGESTS = {
    "tiles-raw": ("raw", "float32", 65536 + 4097, {}),
    "tiles-fp16": ("fp16", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-bf16": ("bf16", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-int8": ("int8", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-fp8": ("fp8", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-ternary": ("ternary", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-sign": ("sign", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-topk": ("topk:0.01", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-topk-int8": ("topk:0.01+int8", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-randk": ("randk:0.01", "float32", 2 * 65536 + 1, {"seed": 7, "residual": True}),
    "tiles-int4": ("int4", "float32", 2 * 65536 + 1, {"residual": True}),
    "tiles-int8-stochastic": (
        "int8[rounding=stochastic]",
        "float32",
        2 * 65536 + 1,
        {"seed": 7, "residual": True},
    ),
}
ALL = FRAMES | DIGESTS


def numbers(nelems, salt, special=False, not_finite=None):
    """Return float64 numbers of many sizes, from integers alone: the same with every numpy."""
    bits = oracles.random_bits(salt, 0, 0, 0, 0, nelems)
    mantissa = (bits >> np.uint32(8)).astype(np.float64) / 2.0**23 - 1
    x = mantissa * 2.0 ** -((bits & np.uint32(7)).astype(np.float64))
    if special:
        x[: len(SPECIAL)] = SPECIAL
        x[-64:] *= 2.0**-140
    if not_finite is not None:
        x[not_finite] = np.inf
        x[-1] = np.nan
    return x


def arguments(spec, dtype, nelems, options):
    """Return tensor, spec and keywords for encode."""
    wide = numbers(nelems, 1, options.get("special", False), options.get("not_finite"))
    x = oracles.from_work(wide, dtype) if dtype != "float64" else wide
    keywords = {key: options[key] for key in ("seed", "checksum") if key in options}
    if options.get("residual"):
        keywords["residual"] = torch.from_numpy((numbers(nelems, 2) * 2.0**-8).astype(np.float32))
    return tensor_of(x, dtype), spec, keywords


def digest(tensor):
    return hashlib.blake2b(bits_of(tensor).tobytes(), digest_size=16).hexdigest()


def make(name):
    """Encode; return the bytes and what the index says of them."""
    tensor, spec, keywords = arguments(*ALL[name])
    frame = agentcomm.encode(tensor, spec, **keywords)
    facts = {
        "spec": spec,
        "dtype": ALL[name][1],
        "nelems": ALL[name][2],
        "nbytes": frame.numel(),
        "frame": hashlib.blake2b(frame_bytes(frame), digest_size=16).hexdigest(),
        "decoded": digest(agentcomm.decode(frame)),
    }
    if "residual" in keywords:
        facts["residual"] = digest(keywords["residual"])
    return frame_bytes(frame), facts


@pytest.fixture(scope="module")
def index():
    if WRITE:
        FOLDER.mkdir(exist_ok=True)
        for path in FOLDER.glob("*.bin"):
            path.unlink()
        for name in FRAMES:
            (FOLDER / f"{name}.bin").write_bytes(make(name)[0])
        facts = {name: make(name)[1] for name in ALL}
        INDEX.write_text(json.dumps(facts, indent=1) + "\n")
    return json.loads(INDEX.read_text())


def test_index_is_complete(index):
    assert set(index) == set(ALL)
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(FRAMES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 60_000


@pytest.mark.parametrize("name", FRAMES)
def test_frame_decodes(index, name):
    data = (FOLDER / f"{name}.bin").read_bytes()
    frame = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    facts = index[name]
    decoded = agentcomm.decode(frame)
    assert decoded.dtype == TORCH_DTYPES[facts["dtype"]]
    assert decoded.numel() == facts["nelems"]
    assert digest(decoded) == facts["decoded"]
    # What the digest stands for: the numbers of the definition.
    work, dtype = oracles.decode_frame(data)
    expected = tensor_of(oracles.from_work(work, dtype), dtype)
    assert torch.equal(decoded.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("name", FRAMES)
def test_input_still_gives_this_frame(index, name):
    frame, facts = make(name)
    assert frame == (FOLDER / f"{name}.bin").read_bytes()
    assert facts == index[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_input_still_gives_this_digest(index, name):
    assert make(name)[1] == index[name]


def test_every_codec_has_golden_frames():
    names = {row["name"] for row in _core.codec_table()}
    assert names == {parse(spec).name for spec, *_ in FRAMES.values()}
    assert names == {parse(spec).name for spec, *_ in DIGESTS.values()}
