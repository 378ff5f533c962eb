"""Inputs aimed at the branches of codecs, and the bridge from torch's tensors to the oracles."""

import struct

import numpy as np
import oracles
import torch

from agentcomm import _core, specs

CODECS = {row["name"]: row for row in _core.codec_table()}

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16, "float64": np.uint64}
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# The last tile, block and vector are full, one short, or one over.
SHORT_LENGTHS = (0, 1, 2, 31, 32, 33, 255, 256, 257)
LONG_LENGTHS = (65535, 65536, 65537, 200001)

VALUE_CLASSES = (
    "zeros",
    "negative zeros",
    "one hot",
    "all negative",
    "subnormal",
    "1e-40",
    "3e38",
    "largest",
    "one inf",
    "one -inf",
    "one nan",
    "all nan",
    "huge range",
    "constant",
    "ties",
    "random",
    "random bits",
    "patchwork",
)

# Largest error of one element, in units of the largest magnitude of its block: half a step where
# there are steps.
STEP_ERROR = {
    "raw": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 0.5 / 14,  # 448 is 14 times 32, the distance of the largest numbers
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    "ternary": 1.0,
    "sign": 1.0,
    "topk": 1.0,
    "randk": 1.0,
}


def spec_of(name):
    """Return the spec text of a codec: a sparse one does not go without a fraction."""
    return {"topk": "topk:0.03", "randk": "randk:0.25"}.get(name, name)


TEXTS = [spec_of(name) for name in CODECS]


def row_of(text):
    """Return what the table of codecs says of a spec's codec."""
    return CODECS[specs.parse(text).name]


def values_row_of(text):
    """Return what the table says of the codec that encodes the numbers: a sparse one has two."""
    codec = specs.parse(text)
    return CODECS[getattr(codec, "values", codec.name)]


def step_error(text):
    return STEP_ERROR[specs.parse(text).name]


def zero_stays_zero(text):
    """Whether zeros stay zero beside others, of a sparse codec also of those that it keeps."""
    return row_of(text)["zero_stays_zero"] and values_row_of(text)["zero_stays_zero"]


def oracle_arguments(text):
    """Return what tests/oracles.py needs to know of a spec: a codec's name and keywords."""
    codec = specs.parse(text)
    sparse = isinstance(codec, specs.SparseCodec)
    return codec.name, {
        "block": getattr(codec, "block", oracles.BLOCK_DEFAULT),
        "stochastic": getattr(codec, "rounding", "nearest") == "stochastic",
        "kept": (codec.to_tuple()[3], codec.values) if sparse else None,
    }


def tile_nbytes(text, nelems, dtype):
    """Return the length of a tile's payload, as the oracle has it."""
    codec, options = oracle_arguments(text)
    return oracles.tile_nbytes(codec, nelems, dtype, options["block"], options["kept"])


def kept_places(frame, text, tile=0):
    """Return where the elements are that a sparse frame of ``encode`` keeps of a tile."""
    data, full = frame_bytes(frame), oracles.TILE_NELEMS
    (seed,) = struct.unpack_from("<I", data, 40)
    codec, options = oracle_arguments(text)
    nelems = min(full, struct.unpack_from("<Q", data, 16)[0] - tile * full)
    k = oracles.nkept(nelems, options["kept"][0])
    if codec == "randk":
        return torch.from_numpy(oracles.randk_places(nelems, k, (seed, 0, 0, 0, tile * full)))
    at = oracles.HEADER_NBYTES + tile * tile_nbytes(text, full, _dtype_of(data))
    return torch.from_numpy(np.frombuffer(data, "<u2", k, at).astype(np.int64))


def _dtype_of(data):
    return next(name for name, number in oracles.DTYPE_IDS.items() if number == data[6])


def torch_dtype_name(dtype):
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def tensor_of(array, dtype):
    """Return an array of an oracle as a tensor with the same bits."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array_of(tensor):
    """Return a real tensor as an array of the oracles: bfloat16 as bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def bits_of(tensor):
    """Return the bits of a real tensor, which compare where NaNs and signed zeros do not."""
    return tensor.detach().contiguous().view(_INTS[tensor.element_size()]).numpy()


def frame_tensor(data):
    """Return bytes as a tensor; exactly as long, so that sanitizers see reads beyond."""
    return (
        torch.tensor(list(data), dtype=torch.uint8)
        if len(data) < 64
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )


def frame_bytes(tensor):
    return tensor.numpy().tobytes()


def _round_to(values, dtype):
    """Round float64 numbers to a data type; numpy has no bfloat16, so that one is cut off."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.astype(dtype)


def _values(value_class, nelems, rng):
    """Return float64 numbers."""
    smooth = rng.standard_normal(nelems)
    middle = nelems // 2
    match value_class:
        case "zeros":
            return np.zeros(nelems)
        case "negative zeros":
            return np.where(rng.random(nelems) < 0.7, -0.0, 0.0)
        case "one hot":
            smooth[:] = 0
            smooth[middle : middle + 1] = 1.7
        case "all negative":
            return -np.abs(smooth) - 0.001
        case "subnormal":  # of float32, and of float16
            return smooth * np.where(rng.random(nelems) < 0.5, 2.0**-135, 2.0**-21)
        case "1e-40":
            return smooth * 1e-40
        case "3e38":
            return np.clip(smooth, -1.1, 1.1) * 3e38
        case "largest":
            return np.sign(smooth) * float(np.finfo(np.float32).max)
        case "one inf":
            smooth[middle : middle + 1] = np.inf
        case "one -inf":
            smooth[middle : middle + 1] = -np.inf
        case "one nan":
            smooth[middle : middle + 1] = np.nan
        case "all nan":
            smooth[:] = -np.nan
        case "huge range":
            return smooth * 10.0 ** rng.integers(-42, 38, nelems)
        case "constant":
            smooth[:] = 0.1
        case "ties":  # half-way between neighbours, of int8 with scale 1 and of the 16-bit formats
            steps = rng.integers(-127, 127, nelems) + 0.5
            steps[::32] = 127
            half = 1 + (2 * rng.integers(0, 1 << 10, nelems) + 1) * 2.0**-11
            brain = 1 + (2 * rng.integers(0, 1 << 7, nelems) + 1) * 2.0**-8
            edges = rng.choice(
                [65504, 65519.996, 65520, -65520, 127, 2.0**-25, 3 * 2.0**-25], nelems
            )
            picked = np.choose(rng.integers(0, 4, nelems), [steps, half, brain, edges])
            return np.where(np.arange(nelems) < middle, steps, picked)
        case "random":
            return smooth * 1e-3
        case _:
            raise ValueError(value_class)
    return smooth


def values(value_class, nelems, dtype, seed=0):
    """Return numbers of a class as an array of the oracles.

    "patchwork" has another class in every 32 elements, so that blocks meet all of them, and each
    other.
    """
    rng = np.random.default_rng([seed, nelems, VALUE_CLASSES.index(value_class)])
    if value_class == "random bits":
        return rng.integers(0, 1 << 8 * BITS[dtype]().itemsize, nelems, BITS[dtype], False).view(
            "uint16" if dtype == "bfloat16" else dtype
        )
    if value_class != "patchwork":
        return _round_to(_values(value_class, nelems, rng), dtype)
    calm = [name for name in VALUE_CLASSES[:-2] if "nan" not in name and "inf" not in name]
    wild = list(VALUE_CLASSES[:-2])
    patches = np.zeros(nelems)
    for number, first in enumerate(range(0, nelems, 32)):
        # Whole runs of blocks stay finite; in others anything may turn up.
        names = wild if number // 64 % 4 == 3 else calm
        patch = patches[first : first + 32]
        patch[:] = _values(names[rng.integers(len(names))], len(patch), rng)
    return _round_to(patches, dtype)


def owed(x, to_f32, dtype):
    """Return a residual that suits numbers: of their size, so that some sums overflow; finite."""
    wide = to_f32(x, dtype)
    with np.errstate(all="ignore"):
        residual = np.roll(wide, 7) * np.float32(0.3) + np.float32(1e-5)
    return np.where(np.isfinite(residual), residual, np.float32(0.25))
