"""What holds for every input: bounds, identities, determinism; and the stochastic rounding.

The examples are the same in every run (derandomize), and the seeds of the statistical tests are
fixed: nothing here can fail by chance.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from codec_cases import CODECS, TORCH_DTYPES, bits_of, kept_places, tensor_of, values
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import LEVELS

import agentcomm
from agentcomm import _core, specs

settings.register_profile(
    "agentcomm", max_examples=60, deadline=None, derandomize=True, database=None
)
settings.load_profile("agentcomm")

DENSE = [name for name, row in CODECS.items() if not row["sparse"]]
STOCHASTIC = [f"{name}[rounding=stochastic]" for name, row in CODECS.items() if row["stochastic"]]
BLOCKED = [name for name, row in CODECS.items() if row["block_nelems"]]
ALL_FEATURES = 0xFFFFFFFF

dense_spec = st.sampled_from(DENSE) | st.builds(
    lambda name, log2, rounding: (
        f"{name}[block={1 << log2}"
        + (f",rounding={rounding}]" if CODECS[name]["stochastic"] else "]")
    ),
    st.sampled_from(BLOCKED),
    st.integers(5, 12),
    st.sampled_from(specs.ROUNDINGS),
)
sparse_spec = st.builds(
    "{}:{}{}".format,
    st.sampled_from([name for name in CODECS if name not in DENSE]),
    st.sampled_from(["0.000000001", "0.01", "0.1", "0.5", "1"]),
    st.sampled_from(["", "+fp16", "+fp8", "+int8", "+int4[rounding=stochastic]", "+sign"])
    | st.builds("+{}[block={}]".format, st.sampled_from(["fp8", "int4", "sign"]), st.just(32)),
)
any_spec = dense_spec | sparse_spec
any_values = dense_spec.filter(
    lambda spec: spec == "raw" or CODECS[specs.parse(spec).name]["values"]
)
any_float = st.floats(width=32)
finite_float = st.floats(width=32, allow_nan=False, allow_infinity=False)


def vectors(elements, nelems_max=700):
    """Arrays of float32: most have few distinct numbers and are longer than a block."""
    return hnp.arrays(np.float32, st.integers(0, nelems_max), elements=elements, fill=elements)


def pairs(elements=any_float):
    """Two arrays of one length; the second one is finite."""
    return st.integers(0, 400).flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, n, elements=elements, fill=elements),
            hnp.arrays(np.float32, n, elements=finite_float, fill=finite_float),
        )
    )


def of(array):
    return torch.from_numpy(array.copy())


def round_trip(x, spec, **keywords):
    return agentcomm.decode(agentcomm.encode(of(x), spec, **keywords))


def blocks_of(x, block):
    """Return x cut into blocks, the last one filled up with zeros: which change no maximum."""
    filled = np.zeros(-(-len(x) // block) * block, x.dtype)
    filled[: len(x)] = x
    return filled.reshape(-1, block)


def error_bound(spec, x):
    """Return the largest errors that docs/codecs.md allows; infinite where it promises nothing."""
    codec, wide = specs.parse(spec), np.abs(x.astype(np.float64))
    if codec.name == "raw":
        return np.zeros(len(x))
    if codec.name == "fp16":
        return np.where(wide < 65520, np.maximum(wide * 2.0**-11, 2.0**-25), np.inf)
    if codec.name == "bf16":
        largest = (2 - 2.0**-8) * 2.0**127
        return np.where(wide < largest, np.maximum(wide * 2.0**-8, 2.0**-134), np.inf)
    absmax = np.abs(blocks_of(x, codec.block).astype(np.float64)).max(axis=1, initial=0)
    absmax = np.repeat(absmax, codec.block)[: len(x)]
    if codec.name not in LEVELS:  # sign, ternary: nothing beyond the block's largest
        return absmax * (1 + 2.0**-11) + 2.0**-149
    # Half the distance of two steps, or a whole one if stochastic. Five roundings to float32 lie on
    # the way there and back, each of up to 127 scales times 2^-24 (fp8: of 2^-24 of the element),
    # and the scale itself may be two units in the last place off where 127 times it would not be
    # finite: 127 (5 + 4) 2^-24 < 2^-13 scales. In subnormals a rounding is 2^-150.
    scale = absmax / LEVELS[codec.name] + 2.0**-149
    half = 0.5 if codec.rounding == "nearest" else 1
    if codec.name == "fp8":
        return (
            half * np.maximum(wide / 8, 2.0**-9 * scale) * (1 + 2.0**-11)
            + wide * 2.0**-20
            + 2.0**-149
        )
    return scale * (half + 2.0**-13) + 2.0**-149


@given(vectors(finite_float), dense_spec)
def test_error_is_within_the_bound(x, spec):
    back = round_trip(x, spec).numpy().astype(np.float64)
    bound = error_bound(spec, x)
    promised = np.isfinite(bound)
    assert (np.abs(back - x)[promised] <= bound[promised]).all()
    # Beyond the range of a 16-bit format: the infinity of the same sign.
    assert (back[~promised] == np.copysign(np.inf, x[~promised])).all()


@given(vectors(any_float), dense_spec)
def test_not_finite_blocks_and_no_others(x, spec):
    back = round_trip(x, spec).numpy()
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(x)
    assert not np.isfinite(back[bad]).any()
    block = getattr(specs.parse(spec), "block", None)
    if block:
        reached = np.repeat(blocks_of(bad, block).any(axis=1), block)[: len(x)]
        assert np.array_equal(np.isnan(back), reached)
    elif spec in ("fp16", "bf16"):
        assert np.array_equal(np.isnan(back), np.isnan(x))
        assert np.array_equal(np.signbit(back[~np.isnan(x)]), np.signbit(x[~np.isnan(x)]))


def values_codec(spec):
    """Return the codec of a sparse spec's values, with the options that are its own."""
    codec = specs.parse(spec)
    cls = specs.CODECS[codec.values]
    return cls(**{field.name: getattr(codec, field.name) for field in dataclasses.fields(cls)})


def equal(a, b):
    return np.array_equal(a.numpy(), b.numpy(), equal_nan=True)


@given(vectors(any_float), sparse_spec, st.integers(0, 2**32 - 1))
def test_sparse_codec_sends_what_its_values_codec_makes_of_what_it_keeps(x, spec, seed):
    """So bounds, rounding and what is not finite are those of the dense codec."""
    frame = agentcomm.encode(of(x), spec, seed=seed)
    back = agentcomm.decode(frame)
    if len(x) == 0:
        return
    kept = kept_places(frame, spec)
    assert (kept.diff() > 0).all()
    assert equal(back[kept], round_trip(x[kept.numpy()], values_codec(spec), seed=seed))
    back[kept] = 0
    assert not back.any()
    if spec.startswith("topk"):
        size = np.nan_to_num(np.abs(x.astype(np.float64)), nan=np.inf, posinf=1e300)
        assert size[kept.numpy()].min() >= np.delete(size, kept.numpy()).max(initial=0)


@given(vectors(any_float), st.sampled_from(["topk", "randk"]), any_values, st.integers(0, 99))
def test_a_fraction_of_one_is_the_values_codec(x, name, values_spec, seed):
    spec = f"{name}:1+{values_spec}"
    assert equal(round_trip(x, spec, seed=seed), round_trip(x, values_spec, seed=seed))
    if name == "randk" and values_spec != "raw":  # whose NaNs may be any
        payload = agentcomm.encode(of(x), spec, seed=seed)[64:]
        assert torch.equal(payload, agentcomm.encode(of(x), values_spec, seed=seed)[64:])


@given(
    st.sampled_from(list(TORCH_DTYPES)),
    st.integers(0, 2000),
    any_spec,
    st.booleans(),
    st.integers(0, 99),
)
def test_length_is_a_function_of_spec_dtype_and_nelems(dtype, nelems, spec, checksum, seed):
    number = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4}[dtype]
    expected = _core.frame_nbytes(specs.parse(spec).to_tuple(), number, nelems, checksum)
    for value_class in ("random", "zeros", "random bits"):
        x = tensor_of(values(value_class, nelems, dtype, seed=seed), dtype)
        assert agentcomm.encode(x, spec, checksum=checksum).numel() == expected
    assert (expected - 64 - 4 * checksum) % 16 == 0


@given(pairs(), any_spec)
def test_decode_add_is_decode_and_add(pair, spec):
    x, base = pair
    frame = agentcomm.encode(of(x), spec)
    with np.errstate(all="ignore"):
        expected = base + agentcomm.decode(frame).numpy()
    expected = np.where(np.isnan(expected), np.float32(np.nan), expected)
    total = agentcomm.decode(frame, out=of(base), add=True)
    assert np.array_equal(bits_of(total), expected.view(np.int32))


@given(pairs(), any_spec, st.integers(0, 2**32 - 1))
def test_residual_is_added_first_and_holds_the_loss(pair, spec, seed):
    """The frame is that of the sum; the residual is the sum less what is decoded: to the bit."""
    x, before = pair
    with np.errstate(all="ignore"):
        total = x + before
    after = of(before)
    frame = agentcomm.encode(of(x), spec, residual=after, seed=seed)
    assume(not np.isnan(x).any() or spec != "raw")  # which NaN a sum is depends on the CPU
    assert torch.equal(frame, agentcomm.encode(of(total), spec, seed=seed))
    sent = agentcomm.decode(frame).numpy()
    with np.errstate(all="ignore"):
        owed = np.isfinite(sent) & np.isfinite(total)  # topk may have larger ones to send
        expected = np.where(owed, total - sent, before)
    assert np.array_equal(after.numpy(), expected)
    assert np.isfinite(after.numpy()).all()


@given(vectors(any_float), any_spec, st.integers(0, 2**32 - 1), st.integers(0, 16))
def test_same_input_same_bytes(x, spec, seed, offset):
    """Whatever the address, and whatever was in the memory of the frame before."""
    frame = agentcomm.encode(of(x), spec, seed=seed, checksum=True)
    room = torch.full((len(x) + offset,), 3.0)
    room[offset:] = of(x)
    out = torch.full((frame.numel() + offset,), 0xFF, dtype=torch.uint8)
    again = agentcomm.encode(room[offset:], spec, seed=seed, checksum=True, out=out[offset:])
    assert torch.equal(frame, again)
    assert np.array_equal(bits_of(agentcomm.decode(frame)), bits_of(agentcomm.decode(again)))


@given(pairs(), any_spec, st.integers(0, 2**32 - 1))
def test_every_tier_gives_the_same(pair, spec, seed):
    x, residual = pair
    results = []
    supported = _core.cpu_info()["features"]
    try:
        for mask in (0, 4, 5, 7):
            if mask & ~supported == 0:
                _core.set_cpu_mask(mask)
                owed, total = of(residual), of(residual)
                frame = agentcomm.encode(of(x), spec, residual=owed, seed=seed, checksum=True)
                agentcomm.decode(frame, out=total, add=True)
                tensors = (frame, owed, agentcomm.decode(frame), total)
                results.append([tensor.numpy().tobytes() for tensor in tensors])
    finally:
        _core.set_cpu_mask(ALL_FEATURES)
    assert all(result == results[0] for result in results)


@given(vectors(finite_float), any_spec)
def test_rounding_to_nearest_is_symmetric(x, spec):
    assume("stochastic" not in spec)
    assert torch.equal(round_trip(-x, spec), -round_trip(x, spec))


@given(vectors(any_float), st.sampled_from(["raw", "fp16", "bf16"]))
def test_decoded_numbers_stay_what_they_are(x, spec):
    once = agentcomm.encode(of(x), spec)
    decoded = agentcomm.decode(once)
    assert np.array_equal(
        bits_of(agentcomm.decode(agentcomm.encode(decoded, spec))), bits_of(decoded)
    )


@given(
    vectors(st.floats(-(2.0**40), 2.0**40, width=32), 600),
    st.sampled_from(BLOCKED),
    st.integers(-30, 30),
)
def test_blocks_scale_with_powers_of_two(x, name, exponent):
    """Every operation is exact in the exponent, as long as nothing is subnormal or huge."""
    absmax = np.abs(blocks_of(x, CODECS[name]["block_nelems"])).max(axis=1, initial=0)
    assume(((absmax == 0) | (absmax > 2.0**-50)).all())
    factor = 2.0**exponent
    assert torch.equal(round_trip(x * np.float32(factor), name), round_trip(x, name) * factor)


@pytest.mark.parametrize(
    "spec", ["raw", "fp16", "bf16", "int8[block=4096]", *BLOCKED, "topk:0.03", "topk:0.03+int8"]
)
def test_tiles_do_not_know_of_each_other(spec):
    """A frame's payload is that of its tiles' frames, end to end: what an exchange relies on."""
    x = of(values("patchwork", 2 * 65536 + 300, "float32"))
    whole = agentcomm.encode(x, spec)[64:]
    parts = [agentcomm.encode(part, spec)[64:] for part in x.split(65536)]
    assert torch.equal(whole, torch.cat(parts))


# ---- stochastic rounding ------------------------------------------------------------------------
#
# Each test draws N independent numbers whose sum has a known mean and variance, and wants |z| < 5:
# by chance less than one seed in a million would fail, and the seeds are fixed.

FRACTIONS = [0.001, 0.1, 0.25, 0.5, 0.77, 0.999]
# Steps to start from, one apart from the next; fp8's are one apart between 8 and 16.
STEPS = {"fp8": [8, 15, -9, -16], "int8": [0, 1, -1, 5, -126], "int4": [0, 1, -1, 5, -6]}
STEPS["ternary"] = [0, -1]


def largest_of(spec):
    """Return the largest number of a block whose scale is 1."""
    return LEVELS.get(specs.parse(spec).name, 1)


@pytest.mark.parametrize(
    ("spec", "step"),
    [(spec, step) for spec in STOCHASTIC for step in STEPS[specs.parse(spec).name]],
)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_stochastic_rounding_is_unbiased_over_elements(spec, step, fraction):
    """A number goes up with the probability of its distance from the lower step."""
    nelems = 60_000
    x = torch.full((nelems,), step + fraction)
    x[::256] = largest_of(spec)
    frame = agentcomm.encode(x, spec, seed=12)
    back = agentcomm.decode(frame)
    others = torch.arange(nelems) % 256 != 0
    ups = (back[others] == step + 1).double()
    assert ((back[others] == step) | (back[others] == step + 1)).all()
    n, p = int(others.sum()), (x[1].item() - step)
    z = (ups.sum().item() - n * p) / math.sqrt(n * p * (1 - p))
    assert abs(z) < 5
    # Neighbours are independent: the lag-1 autocorrelation of n draws has a standard deviation of 1
    # / sqrt(n).
    centred = ups - p
    lag = (centred[1:] * centred[:-1]).sum().item() / (n * p * (1 - p))
    assert abs(lag) * math.sqrt(n) < 5


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_stochastic_rounding_is_unbiased_over_seeds(spec):
    """At one and the same element, too; for every element of a block of ordinary numbers."""
    nseeds, nelems = 2000, 256
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(nelems, generator=generator)
    x[7] = 4.0  # the largest, which is exact
    total = torch.zeros(nelems, dtype=torch.float64)
    for seed in range(nseeds):
        agentcomm.decode(agentcomm.encode(x, spec, seed=seed), out=total, add=True)
    scale = 4.0 / largest_of(spec)
    steps = x.double() / scale
    apart = torch.ones(nelems, dtype=torch.float64)
    if specs.parse(spec).name == "fp8":
        apart = 2.0 ** (torch.log2(steps.abs()).floor().clamp(min=-6) - 3)
    p = torch.frac(steps / apart).abs()
    deviation = scale * apart * (p * (1 - p) * nseeds).sqrt()
    # 127 roundings of 2^-24 each may shift a mean by 2^-17 scales: small against the deviation, but
    # not zero.
    error = (total - nseeds * x.double()).abs() - nseeds * scale * apart * 2.0**-17
    assert (error < 5 * deviation + 1e-3 * scale).all()
    # The sum over all elements of the block: their draws are independent of each other within one
    # seed.
    z = (total.sum() - nseeds * x.double().sum()) / (deviation**2).sum().sqrt()
    assert abs(z.item()) < 5


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_draws_of_different_seeds_are_independent(spec):
    half_way = STEPS[specs.parse(spec).name][0] + 0.5
    x = torch.full((60_000,), half_way)
    x[::256] = largest_of(spec)
    others = torch.arange(60_000) % 256 != 0
    seeds = [0, 1, 2, 3, 0x80000000, 0xFFFFFFFF]
    ups = [
        agentcomm.decode(agentcomm.encode(x, spec, seed=seed))[others].double() - half_way
        for seed in seeds
    ]
    n = int(others.sum())
    for i, first in enumerate(ups):
        for second in ups[i + 1 :]:
            correlation = (first * second).sum().item() / (n * 0.25)
            assert abs(correlation) * math.sqrt(n) < 5
