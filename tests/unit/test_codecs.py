"""Every codec, on every tier of this CPU, against its definition in tests/oracles.py."""

import ctypes
import itertools
import math
import re
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from codec_cases import (
    CODECS,
    LONG_LENGTHS,
    SHORT_LENGTHS,
    TEXTS,
    TORCH_DTYPES,
    VALUE_CLASSES,
    array_of,
    bits_of,
    frame_bytes,
    kept_places,
    oracle_arguments,
    owed,
    row_of,
    tensor_of,
    tile_nbytes,
    values,
    values_row_of,
    zero_stays_zero,
)

import agentcomm
from agentcomm import _core, specs

# AGC_CPU_... of agentcomm.h: AVX2 1, AVX-512 2, CRC32 4.
TIERS = {"c": 0, "c+crc32": 4, "avx2": 5, "avx512": 7}
ALL_FEATURES = 0xFFFFFFFF

DTYPES = list(TORCH_DTYPES)
SPARSE_TEXTS = (
    "topk:0.000000001", "topk:0.01", "topk:0.3", "topk:1", "topk:0.3+fp16", "topk:0.3+fp8",
    "topk:0.3+int8", "topk:0.3+int8[block=32]", "topk:0.3+int8[block=64,rounding=stochastic]",
    "topk:1+int4", "topk:0.3+sign",
    "randk:0.000000001", "randk:0.01", "randk:0.3", "randk:1", "randk:0.3+fp16",
    "randk:0.3+fp8[rounding=stochastic]", "randk:0.3+int8", "randk:0.3+int4[block=32]",
    "randk:1+sign[block=4096]",
)  # fmt: skip


def specs_of(row):
    """Return specs that reach every branch of a codec."""
    texts = [row["name"]]
    if row["sparse"]:
        return [text for text in SPARSE_TEXTS if row_of(text) is row]
    if row["block_nelems"]:
        texts += [f"{row['name']}[block={block}]" for block in (32, 64, 4096)]
    if row["stochastic"]:
        texts += [
            f"{text.rstrip(']')}{',' if '[' in text else '['}rounding=stochastic]"
            for text in texts[:2]
        ]
    return texts


SPECS = [text for row in CODECS.values() for text in specs_of(row)]
LOSSY = [text for text in TEXTS if not row_of(text)["lossless"]]


@pytest.fixture
def on_each_tier():
    """Yield a generator of the tiers that this CPU has; each is in force until the next."""
    supported = _core.cpu_info()["features"]

    def each():
        for name, mask in TIERS.items():
            if mask & ~supported:
                continue
            _core.set_cpu_mask(mask)
            assert _core.cpu_info()["features"] == mask
            yield name

    yield each
    _core.set_cpu_mask(ALL_FEATURES)


def assert_same_bits(got, expected, what):
    if not np.array_equal(got, expected):
        at = int(np.flatnonzero(got != expected)[0])
        pytest.fail(f"{what}: differs first at {at}: {got[at]:#x} instead of {expected[at]:#x}")


def check_against_oracle(text, dtype, x, residual, tiers, *, seed=0, checksum=False):
    """Compare bytes, residual and every way of decoding with the oracle."""
    codec, options = oracle_arguments(text)
    expected, expected_owed = oracles.encode_frame(
        codec, x, dtype, residual=residual, seed=seed, checksum=checksum, **options
    )
    expected_bytes = np.frombuffer(expected, np.uint8)
    work, _ = oracles.decode_frame(expected)
    decoded = bits_of(tensor_of(oracles.from_work(work, dtype), dtype))
    if CODECS[codec]["lossless"] and residual is None:
        decoded = bits_of(tensor_of(x, dtype))  # to the bit, whatever NaNs there are
    narrow = oracles.from_work(work, "float32")
    base = np.linspace(-2, 2, len(x), dtype=np.float32)
    added = bits_of(torch.from_numpy(oracles.add(base, narrow)))
    tensor = tensor_of(x, dtype)
    for tier in tiers:
        what = f"{text}, {dtype} x {len(x)}, tier {tier}"
        owed_now = None if residual is None else torch.from_numpy(residual.copy())
        frame = agentcomm.encode(tensor, text, residual=owed_now, seed=seed, checksum=checksum)
        assert frame.numel() == len(expected), what
        assert_same_bits(frame.numpy(), expected_bytes, f"{what}, frame")
        if residual is not None:
            got, wanted = bits_of(owed_now), bits_of(torch.from_numpy(expected_owed))
            assert_same_bits(got, wanted, f"{what}, residual")
        back = agentcomm.decode(frame)
        assert back.dtype == TORCH_DTYPES[dtype]
        assert_same_bits(bits_of(back), decoded, f"{what}, decoded")
        total = agentcomm.decode(frame, out=torch.from_numpy(base.copy()), add=True)
        assert_same_bits(bits_of(total), added, f"{what}, added")
    assert_same_bits(bits_of(tensor), bits_of(tensor_of(x, dtype)), f"{text}: the input")


@pytest.mark.parametrize("value_class", VALUE_CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", SPECS)
def test_short_tensors(text, dtype, value_class, on_each_tier):
    for nelems in SHORT_LENGTHS:
        x = values(value_class, nelems, dtype)
        check_against_oracle(text, dtype, x, None, on_each_tier(), seed=nelems)
        check_against_oracle(
            text, dtype, x, owed(x, oracles.to_f32, dtype), on_each_tier(), seed=nelems
        )


@pytest.mark.parametrize("nelems", LONG_LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_tiles(text, dtype, nelems, on_each_tier):
    x = values("patchwork", nelems, dtype)
    check_against_oracle(text, dtype, x, owed(x, oracles.to_f32, dtype), on_each_tier())


@pytest.mark.parametrize("text", [text for text in SPECS if text not in TEXTS])
def test_tiles_with_options(text, on_each_tier):
    x = values("patchwork", 65536 + 4097, "float32")
    residual = owed(x, oracles.to_f32, "float32")
    check_against_oracle(text, "float32", x, residual, on_each_tier(), seed=0xFFFFFFFF)


@pytest.mark.parametrize("text", SPECS)
def test_checksum(text, on_each_tier):
    x = values("random", 1001, "float32")
    check_against_oracle(text, "float32", x, None, on_each_tier(), checksum=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_result_in_every_dtype(text, dtype, on_each_tier):
    """A frame decodes into any data type, rounded once; adding happens in the wider of the two."""
    codec, options = oracle_arguments(text)
    for value_class in ("patchwork", "one inf", "random"):
        x = values(value_class, 4096 + 77, dtype)
        frame, _ = oracles.encode_frame(codec, x, dtype, **options)
        work, _ = oracles.decode_frame(frame)
        frame = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        for out_dtype in DTYPES:
            if row_of(text)["lossless"] and dtype == out_dtype:
                continue  # to the bit: test_short_tensors
            base = values("random", len(x), out_dtype, seed=3)
            if out_dtype == "float64":
                total = oracles.add(base, work.astype(np.float64))
            else:
                total = oracles.add(
                    oracles.to_f32(base, out_dtype), oracles.from_work(work, "float32")
                )
            expected = bits_of(tensor_of(oracles.from_work(work, out_dtype), out_dtype))
            expected_sum = bits_of(tensor_of(oracles.from_work(total, out_dtype), out_dtype))
            for tier in on_each_tier():
                what = f"{text}, {dtype} to {out_dtype}, tier {tier}"
                out = torch.empty(len(x), dtype=TORCH_DTYPES[out_dtype])
                assert agentcomm.decode(frame, out=out) is out
                assert_same_bits(bits_of(out), expected, what)
                out = tensor_of(base, out_dtype)
                agentcomm.decode(frame, out=out, add=True)
                assert_same_bits(bits_of(out), expected_sum, f"{what}, added")


@pytest.mark.parametrize("text", ["int8", "topk:0.5", "randk:0.5"])
def test_sum_in_float64_keeps_what_was_there(text):
    """A lossy frame holds float32 numbers; the tensor that they are added to keeps its 53 bits."""
    out = torch.full((300,), 1 + 2.0**-50, dtype=torch.float64)
    agentcomm.decode(agentcomm.encode(torch.zeros(300), text), out=out, add=True)
    assert out.eq(1 + 2.0**-50).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_complex_is_two_reals(text, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(17, 5, dtype=dtype, generator=generator)
    real = torch.view_as_real(x).contiguous()
    residual = torch.full((170,), 1e-4)
    residual_of_real = residual.clone()
    frame = agentcomm.encode(x, text, residual=residual)
    assert torch.equal(frame, agentcomm.encode(real, text, residual=residual_of_real))
    assert torch.equal(residual, residual_of_real)
    out = agentcomm.decode(frame, out=torch.empty(17, 5, dtype=dtype))
    assert torch.equal(torch.view_as_real(out).view(-1), agentcomm.decode(frame))


# ---- contracts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_stays_zero(text, dtype):
    x = tensor_of(values("zeros", 1000, dtype), dtype)
    assert bits_of(agentcomm.decode(agentcomm.encode(x, text))).any() == np.False_
    if zero_stays_zero(text):
        x[::2] = 3.25
        frame = agentcomm.encode(x, text)
        back = agentcomm.decode(frame)
        assert not back[1::2].any()
        sent = kept_places(frame, text) if row_of(text)["sparse"] else slice(None)
        assert back[sent][x[sent] != 0].all()


@pytest.mark.parametrize("text", [text for text in SPECS if zero_stays_zero(text)])
def test_zero_stays_zero_in_a_block_of_tiny_numbers(text):
    x = torch.zeros(1000)
    x[::2] = 1e-44
    assert not agentcomm.decode(agentcomm.encode(x, text))[1::2].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("text", SPECS)
def test_not_finite_in_not_finite_out(text, bad):
    """The element's block is not finite then, others are; the residual there stays as it was.

    A sparse codec's blocks are those of what it keeps: topk keeps what is not finite before
    anything else, randk what it draws.
    """
    x = torch.linspace(-1, 1, 10_000)
    x[5000] = bad
    residual = torch.linspace(1e-3, 2e-3, 10_000)
    before = residual.clone()
    frame = agentcomm.encode(x, text, residual=residual)
    back = agentcomm.decode(frame)
    sent = kept_places(frame, text) if row_of(text)["sparse"] else torch.arange(10_000)
    block = specs.parse(text).block if values_row_of(text)["block_nelems"] else 1
    reached = torch.zeros(10_000, dtype=torch.bool)
    for number in (sent == 5000).nonzero().flatten().tolist():
        first = number // block * block
        reached[sent[first : first + block]] = True
    assert not back[5000].isfinite() or text.startswith("randk")
    assert reached[5000] == ~back[5000].isfinite()
    assert back[~reached].isfinite().all()
    assert residual.isfinite().all()
    assert torch.equal(residual[~back.isfinite()], before[~back.isfinite()])
    assert residual[5000] == before[5000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", SPECS)
def test_what_is_sent_and_what_is_owed_is_all_there_was(text, dtype):
    """Conservation: x + residual = decoded + new residual, for every finite element.

    Two float32 roundings stand between the sides: that of x + residual, at most 2^-24 of it (and at
        least 2^-150, half
    the smallest subnormal), and that of the loss, 2^-24 of the loss. A float64 tensor is rounded to
    float32 first, which is a third one; a raw one is summed in float64. What is decoded to 16 bits
    is decoded into float32 here.
    """
    for value_class in (
        "random",
        "subnormal",
        "1e-40",
        "huge range",
        "3e38",
        "constant",
        "ties",
        "one nan",
    ):
        x = values(value_class, 3000, dtype)
        before = owed(x, oracles.to_f32, dtype)
        after = torch.from_numpy(before.copy())
        frame = agentcomm.encode(tensor_of(x, dtype), text, residual=after)
        sent = agentcomm.decode(frame, out=torch.empty(3000, dtype=torch.float64)).numpy()
        owed_now = after.numpy().astype(np.float64)
        wide = (
            x.astype(np.float64)
            if dtype == "float64"
            else oracles.to_f32(x, dtype).astype(np.float64)
        )
        narrow = oracles.to_f32(x, dtype)
        finite = np.isfinite(sent) & np.isfinite(narrow)
        if row_of(text)["sparse"]:  # a sum that is not finite need not be sent
            with np.errstate(over="ignore"):
                finite &= np.isfinite(narrow + before)
        there_was = wide[finite] + before[finite]
        error = np.abs(there_was - sent[finite] - owed_now[finite])
        roundings = np.abs(wide[finite]) + np.abs(there_was) + np.abs(owed_now[finite])
        assert (error <= 2.0**-24 * roundings + 3 * 2.0**-150).all(), value_class
        assert np.array_equal(after.numpy()[~finite], before[~finite]), value_class


@pytest.mark.parametrize("text", LOSSY)
def test_feedback_delivers_the_mean_in_the_long_run(text):
    """k frames deliver k gradients less the residual, which stays bounded."""
    # What a codec takes from as a whole: a sparse one may take nothing from a block.
    unit = 5120 if row_of(text)["sparse"] else 256

    def norms(x):
        return x.view(-1, unit).norm(dim=1)

    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(5120, generator=generator) * 1e-3
    residual = torch.zeros(5120)
    delivered = torch.zeros(5120, dtype=torch.float64)
    kept_frac_max = torch.zeros(5120 // unit)
    total_max = 0.0
    for seed in range(50):
        total = gradient + residual
        total_max = max(total_max, total.abs().max().item())
        frame = agentcomm.encode(gradient, text, residual=residual, seed=seed)
        agentcomm.decode(frame, out=delivered, add=True)
        kept_frac_max = torch.maximum(kept_frac_max, norms(residual) / norms(total))
    largest = gradient.abs().max().item()
    # int8, int4: half a step of a block whose numbers are at most one step larger; fp16, bf16:
    # 2^-11, 2^-8 of the number; fp8: a sixteenth of at most twice the number.
    bound = {
        "int8": largest * 128 / 127 / 254,
        "int4": largest * 8 / 7 / 14,
        "fp8": largest / 8,
        "fp16": largest * 2.0**-10,
        "bf16": largest * 2.0**-7,
    }.get(text, math.inf)
    assert residual.abs().max() <= bound
    # Every codec keeps back less than there was, a fraction q of it (Karimireddy et al. 2019,
    # assumption A): then what is owed stays below q / (1 - q) gradients.
    assert (kept_frac_max < 1).all()
    assert (norms(residual) <= kept_frac_max / (1 - kept_frac_max) * norms(gradient) * 1.001).all()
    error = (delivered + residual.double() - 50 * gradient.double()).abs().max().item()
    # Two roundings a frame, as above, of what was to be sent.
    assert error <= 50 * 2 * 2.0**-24 * total_max


@pytest.mark.parametrize("text", [text for text in SPECS if "stochastic" in text])
def test_stochastic_rounding_depends_on_the_seed_and_the_place(text):
    x = torch.full((70_000,), 0.3)
    x[::32] = 1.0
    frames = [agentcomm.encode(x, text, seed=seed)[64:] for seed in (0, 1, 0xFFFFFFFF, 0)]
    assert torch.equal(frames[0], frames[3])
    assert not torch.equal(frames[0], frames[1])
    assert not torch.equal(frames[1], frames[2])
    back = agentcomm.decode(agentcomm.encode(x, text))
    near = back[1:32]
    if text.startswith("randk"):  # does not send them all
        near = back[x != 1][:4000]
        near = near[near != 0]
    assert near.unique().numel() == 2  # 0.3 lies between two steps
    assert not torch.equal(back[1:4000], back[65537 : 65537 + 3999])  # another tile, other numbers


@pytest.mark.parametrize("name", oracles.PER_BYTE)
def test_largest_scale_is_the_oracles(name):
    frame = agentcomm.encode(torch.full((4,), torch.finfo(torch.float32).max), name)
    scale = frame[64:68].view(torch.float32).item()
    assert scale == oracles.largest_scale(name)
    back = agentcomm.decode(frame)
    assert back.isfinite().all()
    assert back[0] >= torch.finfo(torch.float32).max * (1 - 2.0**-23)


def test_small_blocks_are_divided_from_the_documented_size_on(on_each_tier):
    """Dividing by the scale and multiplying by the reciprocal differ in one element in 10^5."""
    nelems = 6 * 65536
    x = np.random.default_rng(6).uniform(-1, 1, nelems).astype(np.float32)
    for absmax in (0.99 * 2.0**-100, 1.01 * 2.0**-100):
        scaled = x * np.float32(absmax)
        scaled[::256] = absmax
        expected = np.frombuffer(oracles.encode_frame("int8", scaled)[0], np.uint8)
        scale = np.float32(absmax) / np.float32(127)
        inverse = np.float32(127) / np.float32(absmax)
        differ = np.rint(scaled / scale) != np.rint(scaled * inverse)
        assert differ.any(), "the input cannot tell"
        for tier in on_each_tier():
            assert_same_bits(
                agentcomm.encode(tensor_of(scaled, "float32"), "int8").numpy(), expected, tier
            )


ERROR_TABLE = re.findall(
    r"^\| (\S+) \| ([\d.]+) \| (\d+\.\d+) \|$",
    (Path(__file__).parents[2] / "docs" / "codecs.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("text", "bits", "percent"), ERROR_TABLE)
def test_table_of_errors_in_the_docs(text, bits, percent):
    """Of 2^20 normal numbers; another generator's would differ by 1 / sqrt(2^21) = 0.07 %."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    frame = agentcomm.encode(x, text)
    assert 8 * (frame.numel() - 64) / x.numel() == float(bits)
    error = agentcomm.decode(frame) - x
    rms_percent = 100 * (error.square().mean() / x.square().mean()).sqrt().item()
    assert rms_percent == pytest.approx(float(percent), rel=0.003, abs=0.0005)


def test_table_of_errors_has_every_codec():
    lossy = {row["name"] for row in CODECS.values() if not row["lossless"]}
    assert {specs.parse(text).name for text, *_ in ERROR_TABLE} == lossy


# ---- topk and randk -----------------------------------------------------------------------------


def spread(nelems, period):
    """Return numbers of which every period-th is one and the others a tenth."""
    return np.where(np.arange(nelems) % period == 0, 1, 0.1).astype(np.float32)


def signed(x):
    return x * np.where(np.arange(len(x)) % 3 == 0, -1, 1).astype(np.float32)


SELECTIONS = {
    "all equal": np.full(65536 + 300, 0.7, np.float32),
    "all equal but for the sign": signed(np.full(30_000, 0.7, np.float32)),
    "all zero": np.zeros(65536, np.float32),
    "zeros of both signs": signed(np.zeros(3000, np.float32)),
    "fewer than k are not zero": np.eye(1, 60_000, 47_000, dtype=np.float32)[0],
    "k are larger": spread(60_000, 100),
    "more than k are larger": signed(spread(60_000, 37)),
    "few sizes": np.random.default_rng(1).integers(-3, 4, 65536).astype(np.float32),
    "two neighbours in size": np.random.default_rng(2).choice(
        np.array([1, np.nextafter(np.float32(1), np.float32(2))], np.float32), 65536
    ),
    "all infinite": signed(np.full(5000, np.inf, np.float32)),
    "all NaN": np.full(5000, np.nan, np.float32),
    "more not finite than k": np.where(
        np.arange(50_000) % 7 == 0, np.float32(np.inf), spread(50_000, 100)
    ),
    "infinities before NaNs": np.repeat(
        np.array([np.inf, 3e38, np.nan, 1], np.float32), (2000, 9000, 100, 9000)
    ),
    "NaNs of all kinds": np.where(
        np.arange(40_000) % 2,
        np.random.default_rng(3).integers(0x7F800000, 2**31, 40_000).astype(np.uint32),
        np.random.default_rng(4).integers(0xFF800000, 2**32, 40_000).astype(np.uint32),
    ).view(np.float32),
    "the largest ones last": np.linspace(0, 1, 65536, dtype=np.float32),
    "the largest ones first": np.linspace(-1, 0, 65536, dtype=np.float32),
    "one signalling NaN": np.where(
        np.arange(256) == 100, np.uint32(0x7F800001), np.arange(256, dtype=np.uint32)
    ).view(np.float32),
    "subnormal": np.arange(-20_000, 20_000, dtype=np.float32) * np.float32(2.0**-149),
    "where a sample looks": np.where(np.arange(65536) % 512 < 16, 1e-3, 1).astype(np.float32),
    "where no sample looks": np.where(np.arange(65536) % 512 < 16, 1, 1e-3).astype(np.float32),
}


@pytest.mark.parametrize("frac", ["0.000000001", "0.01", "0.1", "0.77"])
@pytest.mark.parametrize("what", SELECTIONS)
def test_topk_keeps_exactly_the_largest(what, frac, on_each_tier):
    x = SELECTIONS[what]
    check_against_oracle(f"topk:{frac}", "float32", x, None, on_each_tier())
    residual = np.roll(np.nan_to_num(x[::-1], nan=1, posinf=2, neginf=-2), 11)
    check_against_oracle(f"topk:{frac}+int8", "float32", x, residual, on_each_tier())
    for tile in torch.from_numpy(x).split(65536):
        frame = agentcomm.encode(tile, f"topk:{frac}")
        kept = kept_places(frame, f"topk:{frac}")
        assert len(kept) == max(1, math.ceil(len(tile) * float(frac)))
        # None that is left is larger, and of equal ones those that are left come last. A NaN is
        # larger than an infinity, and that larger than any number.
        size = tile.abs().double()
        size = torch.where(size.isinf(), 1e300, size).nan_to_num(nan=math.inf)
        is_left = torch.ones(len(tile), dtype=torch.bool)
        is_left[kept] = False
        smallest = size[kept].min()
        assert (size[is_left] <= smallest).all()
        ties_left = is_left[size == smallest]
        assert torch.equal(ties_left, ties_left.sort().values)


@pytest.mark.parametrize("text", ["topk:0.001", "topk:0.001+int8", "topk:0.001+fp16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_pc_035_only_large_values_beyond_65536(text, dtype):
    x = torch.zeros(100_000, dtype=TORCH_DTYPES[dtype])
    large = torch.tensor([65_536, 65_537, 70_000, 98_303, 98_304, 99_998, 99_999])
    x[large] = torch.tensor([1, -2, 3, 4, -5, 6, 7], dtype=x.dtype)
    frame = agentcomm.encode(x, text)
    back = agentcomm.decode(frame)
    assert torch.equal(back.nonzero().flatten(), large)
    assert torch.allclose(back[large].double(), x[large].double(), atol=7 / 254 + 7 * 2.0**-8)
    # In the second tile an index counts from its start, in 16 bits without a sign.
    assert set((large - 65_536).tolist()) < set(kept_places(frame, text, tile=1).tolist())


def test_indices_beyond_32767():
    x = torch.zeros(65536)
    x[torch.tensor([0, 32767, 32768, 65535])] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    frame = agentcomm.encode(x, "topk:0.00006")
    assert kept_places(frame, "topk:0.00006").tolist() == [0, 32767, 32768, 65535]
    assert torch.equal(agentcomm.decode(frame), x)


@pytest.mark.parametrize("text", ["topk:0.25", "randk:0.25+int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_adds_zeros_where_nothing_was_sent(text, dtype, on_each_tier):
    """To the bit: a negative zero becomes a positive one, a NaN the one NaN."""
    frame = agentcomm.encode(tensor_of(values("random", 70_000, dtype), dtype), text, seed=3)
    for _ in on_each_tier():
        decoded = bits_of(agentcomm.decode(frame))
        total = torch.full((70_000,), -0.0, dtype=TORCH_DTYPES[dtype])
        assert_same_bits(bits_of(agentcomm.decode(frame, out=total, add=True)), decoded, text)
        total = tensor_of(values("all nan", 70_000, dtype), dtype)
        one_nan = bits_of(torch.full((1,), math.nan, dtype=TORCH_DTYPES[dtype]))
        assert (bits_of(agentcomm.decode(frame, out=total, add=True)) == one_nan).all()


def test_randk_draws_the_same_places_whatever_the_data():
    """All ranks meet there: data, data type, residual and values do not count, seed and tile do."""
    nelems = 2 * 65536 + 1000
    first = kept_by_randk(torch.ones(nelems), "randk:0.03", 7)
    assert [len(places) for places in first] == [1967, 1967, 30]
    for dtype in TORCH_DTYPES.values():
        for text in ("randk:0.03", "randk:0.03+int8", "randk:0.03+sign[block=32]"):
            x = torch.full((nelems,), 3.0, dtype=dtype)
            assert all(map(torch.equal, kept_by_randk(x, text, 7), first))
    again = kept_by_randk(torch.ones(nelems), "randk:0.03", 8)
    assert not any(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], kept_by_randk(torch.ones(65536), "randk:0.03", 7)[0])
    for places in first + again:
        assert (places.diff() > 0).all()


def kept_by_randk(x, text, seed):
    """Return the places of each tile, seen in what is decoded."""
    back = agentcomm.decode(agentcomm.encode(x, text, seed=seed, residual=torch.ones(len(x))))
    return [tile.nonzero().flatten() for tile in back.split(65536)]


@pytest.mark.parametrize(("nelems", "frac"), [(1000, 0.037), (777, 0.5), (300, 0.9)])
def test_randk_draws_every_element_alike(nelems, frac):
    """k / n each, to within the lengths of the runs, which differ by one; draws are independent."""
    nseeds, k = 4000, math.ceil(nelems * frac)
    drawn = torch.stack(
        [
            agentcomm.decode(agentcomm.encode(torch.ones(nelems), f"randk:{frac}", seed=seed))
            for seed in range(nseeds)
        ]
    ).double()
    assert drawn.sum(1).eq(k).all()
    run = torch.arange(nelems)
    ends = [j * nelems // k for j in range(k + 1)]
    for begin, end in itertools.pairwise(ends):
        run[begin:end] = end - begin
        assert drawn[:, begin:end].sum(1).eq(1).all()
    p = 1 / run.double()
    assert ((p - k / nelems).abs() <= 1 / (run.double() * (run - 1).clamp(min=1))).all()
    z = (drawn.sum(0) - nseeds * p) / (nseeds * p * (1 - p)).sqrt().clamp(min=1e-9)
    assert z.abs().max() < 5  # of a thousand, by chance one in 2,000 times; the seeds are fixed
    # Neighbouring seeds, and neighbouring runs by their places: no correlation.
    uncertain = p < 1
    centred = (drawn - p)[:, uncertain] / (p * (1 - p))[uncertain].sqrt()
    over_seeds = (centred[1:] * centred[:-1]).mean(1).mean()
    assert abs(over_seeds) * math.sqrt(nseeds * k) < 5


# ---- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", SPECS)
def test_frame_length_is_the_formula(text, dtype):
    """Also where nothing could be allocated: beyond 2^31 and 2^32 elements."""
    number = oracles.DTYPE_IDS[dtype]
    full = tile_nbytes(text, 65536, dtype)
    for nelems in (
        *SHORT_LENGTHS,
        *LONG_LENGTHS,
        2**31 - 1,
        2**31,
        2**32 + 1,
        10**12 + 7,
        2**48 - 65536,
    ):
        rest = tile_nbytes(text, nelems % 65536, dtype)
        expected = 64 + nelems // 65536 * full + rest
        assert _core.frame_nbytes(specs.parse(text).to_tuple(), number, nelems, False) == expected
        assert (
            _core.frame_nbytes(specs.parse(text).to_tuple(), number, nelems, True) == expected + 4
        )


def test_more_tiles_than_a_header_counts():
    with pytest.raises(agentcomm.SpecError, match="number of elements") as caught:
        _core.frame_nbytes((1, 0, 0, 0, 0), 1, 2**48, False)
    assert caught.value.status == "AGC_ERR_NELEMS"


def test_table_of_codecs():
    rows = agentcomm.codecs()
    assert [row["name"] for row in rows] == list(oracles.CODEC_IDS)
    assert {row["name"]: row["id"] for row in rows} == oracles.CODEC_IDS
    # Bits of float32 elements, of sparse codecs of those kept; a tile of 65,536 needs no padding.
    bits = {row["name"]: row["bits_per_element"] for row in rows}
    assert bits == {
        "raw": 32, "fp16": 16, "bf16": 16, "fp8": 8 + 32 / 256, "int8": 8 + 32 / 256,
        "int4": 4 + 32 / 256, "ternary": 52 * 8 / 256 + 32 / 256, "sign": 1 + 32 / 256,
        "topk": 16 + 32, "randk": 32,
    }  # fmt: skip
    assert [row["name"] for row in rows if row["lossless"]] == ["raw"]
    assert [row["name"] for row in rows if row["feedback"]] == [
        "fp8", "int8", "int4", "ternary", "sign", "topk", "randk"
    ]  # fmt: skip
    assert [row["name"] for row in rows if not row["zero_stays_zero"]] == ["sign"]
    assert [row["name"] for row in rows if row["sparse"]] == ["topk", "randk"]
    assert [row["name"] for row in rows if row["values"]] == ["fp16", "fp8", "int8", "int4", "sign"]


# ---- memory -------------------------------------------------------------------------------------


def shifted(array, nbytes):
    """Return a copy of an array at an address that is nbytes above a multiple of 64."""
    room = bytearray(array.nbytes + 128)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % 64 + nbytes
    view = np.frombuffer(room, array.dtype, array.size, start)
    view[:] = array
    return view


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", TEXTS)
def test_any_address_will_do(text, dtype, nbytes, on_each_tier):
    """Tensors and frames may begin at any byte, as torch.frombuffer makes them."""
    x = values("random", 2077, dtype)
    codec, options = oracle_arguments(text)
    expected, _ = oracles.encode_frame(codec, x, dtype, **options)
    work, _ = oracles.decode_frame(expected)
    decoded = oracles.from_work(work, dtype)
    base = values("random", 2077, dtype, seed=1)
    aligned_sum = agentcomm.decode(
        torch.frombuffer(bytearray(expected), dtype=torch.uint8),
        out=tensor_of(base, dtype),
        add=True,
    )
    number = {"bfloat16": torch.bfloat16}.get(dtype)

    def as_tensor(array):
        return torch.from_numpy(array.view(np.int16) if number else array).view(
            number or array_dtype(array)
        )

    def array_dtype(array):
        return torch.from_numpy(array).dtype

    for _ in on_each_tier():
        source = as_tensor(shifted(x, nbytes))
        assert source.data_ptr() % 64 == nbytes
        out = torch.from_numpy(shifted(np.zeros(len(expected) + 3, np.uint8), nbytes))
        frame = agentcomm.encode(source, text, out=out)
        assert frame_bytes(frame) == expected
        target = as_tensor(shifted(np.zeros_like(x), nbytes))
        agentcomm.decode(frame, out=target)
        assert np.array_equal(bits_of(target.clone()), bits_of(tensor_of(decoded, dtype)))
        total = as_tensor(shifted(base, nbytes))
        agentcomm.decode(frame, out=total, add=True)
        assert np.array_equal(bits_of(total.clone()), bits_of(aligned_sum))


@pytest.mark.parametrize("text", TEXTS)
def test_residual_must_lie_at_a_multiple_of_four(text):
    residual = torch.from_numpy(shifted(np.zeros(10, np.float32), 2))
    with pytest.raises(
        agentcomm.SpecError,
        match=re.escape("residual is not aligned to 4 bytes; pass residual.clone()"),
    ):
        agentcomm.encode(torch.ones(10), text, residual=residual)


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_outside_is_touched(text):
    """Views into larger tensors: what lies in front and behind stays."""
    x = values("random", 1013, "float32")
    codec, options = oracle_arguments(text)
    expected, expected_owed = oracles.encode_frame(
        codec, x, residual=np.full(1013, 1e-3, np.float32), **options
    )
    room = torch.full((len(expected) + 40,), 0xA5, dtype=torch.uint8)
    owed_room = torch.full((1013 + 40,), 1e-3)
    frame = agentcomm.encode(
        tensor_of(x, "float32"), text, residual=owed_room[20:-20], out=room[20:-10]
    )
    assert frame.data_ptr() == room.data_ptr() + 20
    assert frame_bytes(room[20:-20]) == expected
    assert room[:20].eq(0xA5).all()
    assert room[-20:].eq(0xA5).all()
    assert np.array_equal(owed_room[20:-20].numpy(), expected_owed)
    assert owed_room[:20].eq(1e-3).all()
    assert owed_room[-20:].eq(1e-3).all()
    out = torch.full((1013 + 40,), 7.0)
    agentcomm.decode(room[20:], out=out[20:-20])
    assert out[:20].eq(7).all()
    assert out[-20:].eq(7).all()


def test_shapes_do_not_matter():
    x = torch.arange(24.0).view(2, 3, 4)
    out = torch.empty(64 + 32, 2, dtype=torch.uint8)
    frame = agentcomm.encode(x, "int8", out=out, residual=torch.zeros(4, 6))
    assert frame.dim() == 1
    assert torch.equal(frame, agentcomm.encode(x.view(-1), "int8"))
    assert agentcomm.decode(frame).shape == (24,)
    assert agentcomm.decode(frame, out=torch.empty(3, 8)).shape == (3, 8)


def test_tensors_that_require_gradients():
    x = torch.ones(5, requires_grad=True)
    assert torch.equal(agentcomm.decode(agentcomm.encode(x, "raw")), torch.ones(5))


@pytest.mark.parametrize("text", TEXTS)
def test_threads_may_encode_at_once(text):
    from concurrent.futures import ThreadPoolExecutor

    xs = [tensor_of(values("patchwork", 70_001, "float32", seed=s), "float32") for s in range(8)]
    alone = [agentcomm.encode(x, text) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: agentcomm.encode(x, text), xs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# ---- errors: what was wrong, and what would be right --------------------------------------------

F = torch.ones(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (F.to(torch.int32), "raw"),
            "dtype torch.int32 is not supported; float32, float16, bfloat16, float64,",
        ),
        ((F.bool(), "int8"), "dtype torch.bool is not supported"),
        (
            (torch.ones(4, 4).t(), "raw"),
            "tensor is not dense and contiguous; pass tensor.contiguous()",
        ),
        ((torch.ones(9)[::2], "raw"), "tensor is not dense and contiguous"),
        (
            (torch.eye(3).to_sparse(), "raw"),
            "tensor is not dense and contiguous; pass tensor.contiguous() or .to_dense()",
        ),
        (
            (F.to("meta"), "raw"),
            "tensor is on device meta; this version exchanges tensors on the CPU only",
        ),
        (
            (F, "int9"),
            "'int9' in spec 'int9' is no codec; there are raw, fp16, bf16, fp8, int8, int4,"
            " ternary, sign, topk, randk (did you mean 'int8' or",
        ),
        ((F, 8), "a spec is a text such as 'int8' or a codec object, not int 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_encode_refuses(arguments, message):
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        agentcomm.encode(*arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"nthreads": 0}, "nthreads=0"),
        ({"seed": -1}, "seed=-1 is out of range; it must be a whole number in 0..4294967295"),
        ({"seed": 1 << 32}, "seed=4294967296 is out of range; it must be a whole number"),
        (
            {"residual": torch.zeros(99)},
            "residual is 99 x torch.float32; it must be 100 x torch.float32",
        ),
        (
            {"residual": torch.zeros(100).double()},
            "residual is 100 x torch.float64; it must be 100 x torch.float32",
        ),
        ({"residual": torch.zeros(200)[::2]}, "residual is not dense and contiguous"),
        (
            {"out": torch.zeros(179, dtype=torch.uint8)},
            "out is 179 x torch.uint8; the frame needs 180 x torch.uint8",
        ),
        (
            {"out": torch.zeros(500)},
            "out is 500 x torch.float32; the frame needs 180 x torch.uint8",
        ),
        ({"out": torch.zeros(600, dtype=torch.uint8)[::2]}, "out is not dense and contiguous"),
        ({"nthreads": "2"}, "nthreads='2' is a str; it must be a whole number in 1..65535"),
        ({"seed": True}, "seed=True is a bool; it must be a whole number in 0..4294967295"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_encode_refuses_keywords(keywords, message):
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        agentcomm.encode(F, "int8", checksum=True, **keywords)


def test_encode_leaves_everything_as_it_was_when_it_refuses():
    residual, out = torch.full((100,), 0.5), torch.full((175,), 9, dtype=torch.uint8)
    with pytest.raises(agentcomm.SpecError):
        agentcomm.encode(F, "int8", residual=residual, out=out)
    assert residual.eq(0.5).all()
    assert out.eq(9).all()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"add": True}, "add=True needs out=, the tensor to add to"),
        ({"out": torch.zeros(99)}, "out has 99 elements; the frame holds 100"),
        (
            {"out": torch.zeros(50, dtype=torch.complex128)[:49]},
            "out has 98 elements; the frame holds 100",
        ),
        ({"out": torch.zeros(200)[::2]}, "out is not dense and contiguous"),
        ({"out": torch.zeros(100, dtype=torch.int64)}, "dtype torch.int64 is not supported"),
        ({"out": torch.zeros(100, device="meta")}, "out is on device meta"),
    ],
)
def test_decode_refuses(keywords, message):
    frame = agentcomm.encode(F, "int8")
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        agentcomm.decode(frame, **keywords)


def shared_memory():
    """Calls whose tensors share memory, and the names of two that do."""
    x, y = torch.randn(1000), torch.empty(4096)
    frame = agentcomm.encode(x, "int8")
    buffer = torch.empty(5000)
    buffer.view(torch.uint8)[: len(frame)] = frame
    yield lambda: agentcomm.encode(x, "int8", out=x.view(torch.uint8)), "tensor and out"
    yield lambda: agentcomm.encode(x, "int8", residual=x), "tensor and residual"
    yield lambda: agentcomm.encode(y[1:1001], "int8", residual=y[:1000]), "tensor and residual"
    residual, out = y[:1000], y[999:].view(torch.uint8)
    yield lambda: agentcomm.encode(x, "int8", residual=residual, out=out), "residual and out"
    yield lambda: agentcomm.decode(buffer.view(torch.uint8), out=buffer[:1000]), "frame and out"
    yield lambda: agentcomm.decode(buffer.view(torch.uint8), out=buffer[4000:]), "frame and out"


@pytest.mark.parametrize("number", range(6))
def test_shared_memory_is_refused(number):
    call, names = list(shared_memory())[number]
    with pytest.raises(agentcomm.SpecError, match=f"{names} share memory; pass a clone"):
        call()


def test_neighbours_share_no_memory():
    memory = torch.randn(3000)
    tensor, residual, out = memory[:1000], memory[1000:2000].zero_(), memory[2000:]
    frame = agentcomm.encode(tensor, "int8", residual=residual, out=out.view(torch.uint8))
    assert torch.equal(frame, agentcomm.encode(tensor, "int8"))


def test_autograd_sees_what_is_written():
    weight, factor = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * factor).sum()
    agentcomm.decode(agentcomm.encode(torch.full((3,), 9.0), "raw"), out=factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    residual = torch.zeros(3)
    before = residual._version
    agentcomm.encode(torch.ones(3), "int8", residual=residual)
    assert residual._version > before


def test_leaves_are_not_written_to():
    leaf = torch.zeros(3, requires_grad=True)
    frame = agentcomm.encode(torch.ones(3), "raw")
    with pytest.raises(agentcomm.SpecError, match=r"out requires a gradient.*pass out\.detach\(\)"):
        agentcomm.decode(frame, out=leaf)
    with pytest.raises(agentcomm.SpecError, match="residual requires a gradient"):
        agentcomm.encode(torch.ones(3), "int8", residual=leaf)


def test_outputs_with_gaps_are_to_be_copied_back():
    gaps = torch.zeros(2000)[::2]
    for keywords in ({"residual": gaps}, {"out": gaps}):
        with pytest.raises(agentcomm.SpecError, match="pass a tensor that is, and copy it back"):
            agentcomm.encode(torch.ones(1000), "int8", **keywords)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(agentcomm.SpecError, match="tensor is not dense"):
        agentcomm.encode(nested, "int8")


def test_decode_wants_bytes():
    with pytest.raises(
        agentcomm.SpecError,
        match=re.escape("frame is torch.float32; a frame is a tensor of torch.uint8"),
    ):
        agentcomm.decode(F)
    with pytest.raises(agentcomm.SpecError, match="frame is not dense and contiguous"):
        agentcomm.decode(torch.zeros(400, dtype=torch.uint8)[::2])


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ((99, 0, 0, 0, 0), "AGC_ERR_CODEC"),
        ((1, 256, 0, 0, 0), "AGC_ERR_SPEC"),  # raw has no blocks
        ((5, 48, 0, 0, 0), "AGC_ERR_SPEC"),
        ((5, 16, 0, 0, 0), "AGC_ERR_SPEC"),
        ((5, 8192, 0, 0, 0), "AGC_ERR_SPEC"),
        ((5, 0, 2, 0, 0), "AGC_ERR_SPEC"),
        ((2, 0, 1, 0, 0), "AGC_ERR_SPEC"),  # fp16 does not round stochastically
        ((5, 0, 0, 1, 0), "AGC_ERR_SPEC"),
        ((5, 0, 0, 0, 5), "AGC_ERR_SPEC"),
        ((16, 0, 0, 0, 0), "AGC_ERR_SPEC"),  # keeps nothing
        ((16, 0, 0, 10**9 + 1, 0), "AGC_ERR_SPEC"),
        ((17, 0, 0, 2**32 - 1, 5), "AGC_ERR_SPEC"),
        ((16, 0, 0, 10**7, 1), "AGC_ERR_SPEC"),  # raw values are 0
        ((16, 0, 0, 10**7, 3), "AGC_ERR_SPEC"),  # bf16 is not for values
        ((17, 0, 0, 10**7, 7), "AGC_ERR_SPEC"),
        ((17, 0, 0, 10**7, 16), "AGC_ERR_SPEC"),
        ((16, 0, 0, 10**7, 99), "AGC_ERR_SPEC"),
        ((16, 256, 0, 10**7, 0), "AGC_ERR_SPEC"),  # raw values have no blocks
        ((16, 256, 0, 10**7, 2), "AGC_ERR_SPEC"),
        ((16, 48, 0, 10**7, 5), "AGC_ERR_SPEC"),
        ((17, 0, 1, 10**7, 0), "AGC_ERR_SPEC"),
        ((17, 0, 1, 10**7, 8), "AGC_ERR_SPEC"),
    ],
)
def test_core_checks_specs_itself(spec, status):
    with pytest.raises(ValueError, match=r"^(frame names a codec|codec parameters)") as caught:
        _core.frame_nbytes(spec, 1, 100, False)
    assert caught.value.status == status


def test_core_checks_dtypes_itself():
    for number in (0, 5, 255):
        with pytest.raises(agentcomm.SpecError) as caught:
            _core.frame_nbytes((1, 0, 0, 0, 0), number, 100, False)
        assert caught.value.status == "AGC_ERR_DTYPE"


def test_array_helpers_agree():
    """The tests' own bridge keeps bits."""
    for dtype in DTYPES:
        x = values("random bits", 100, dtype)
        assert np.array_equal(array_of(tensor_of(x, dtype)).view(np.uint8), x.view(np.uint8))
