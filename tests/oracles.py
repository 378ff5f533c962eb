"""What the codecs, frames and random numbers must be, in numpy: slow, obvious, and from the papers.

Nothing here knows the implementation. An array of bfloat16 numbers, which numpy does not have, is
an array of their bits (uint16); so every function that takes numbers takes the name of their data
type too. "Work type" is float64 for raw frames of float64 and float32 for everything else.

Sources:
    int8: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
        (2022): absolute maximum per block; here with a linear code of 255 values instead of their
        dynamic tree code.
    fp8: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3; one scale per block.
    ternary: Li, Zhang, Liu, "Ternary Weight Networks" (2016), equations 5 and 6; stochastic: Wen et
        al., "TernGrad" (2017), algorithm 1. sign: Seide et al., below; one scale per block.
    topk, randk: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (2018); here per tile, and
        with one element drawn in each of k equal runs.
    stochastic rounding: Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited
        Numerical Precision" (2015).
    fp16: IEEE 754-2019, binary16. bf16: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning
        Training" (2019).
    residual (error feedback): Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy
    et al., "Error
        Feedback Fixes SignSGD" (2019).
    splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014). The
        32-bit finaliser: Wellons, "hash-prospector" (2018), lowbias32.
    CRC32C: Castagnoli, Bräuer, Herrmann (1993); RFC 3720, appendix B.4.
"""

import struct

import numpy as np

MAGIC = b"AGCF"
VERSION = 1
HEADER_NBYTES = 64
TILE_NELEMS = 65536
TILE_GRANULE_NELEMS = 256
ALIGN_NBYTES = 16
BLOCK_DEFAULT = 256

CODEC_IDS = {
    "raw": 1, "fp16": 2, "bf16": 3, "fp8": 4, "int8": 5, "int4": 6, "ternary": 7, "sign": 8,
    "topk": 16, "randk": 17,
}  # fmt: skip
# Steps from zero to a block's largest magnitude, of the codecs that are scaled by it.
LEVELS = {"fp8": 448, "int8": 127, "int4": 7}
PER_BYTE = {"fp8": 1, "int8": 1, "int4": 2, "ternary": 5, "sign": 8}  # of the codecs with blocks
SPARSE = ("topk", "randk")
FRAC_UNIT = 10**9
LANE_OF_INDICES = 1 << 31  # randk draws its places as if in this lane, the lane's number added
DTYPE_IDS = {"float32": 1, "float16": 2, "bfloat16": 3, "float64": 4}
ELEM_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
STORED_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}

FLAG_CHECKSUM, FLAG_STOCHASTIC, FLAG_RESULT, FLAG_ABORT, FLAG_ABSENT = 1, 2, 4, 8, 16

F32 = np.float32
NAN_F32 = np.array([0x7FC00000], "<u4").view(F32)[0]
NAN_F64 = np.array([0x7FF8000000000000], "<u8").view(np.float64)[0]
FLT_MAX = np.finfo(F32).max
TINY_ABSMAX = F32(2.0**-100)


def quiet():
    """Let infinities and NaNs arise without a warning."""
    return np.errstate(all="ignore")


# ---- checksum, random numbers, header -----------------------------------------------------------


def crc32c(data: bytes) -> int:
    """Divide by the Castagnoli polynomial, bits reflected, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _crc_of_one_byte(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_one_byte(byte) for byte in range(256)]


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def random_bits(seed: int, round_: int, bucket: int, lane: int, first_elem: int, nelems: int):
    """Hash the coordinates of each element of a tile: 32 bits each."""
    key = splitmix64(seed << 32 | round_)
    key = splitmix64(key ^ (bucket << 32 | lane))
    key = splitmix64(key ^ first_elem)
    key0, key1 = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    with quiet():  # everything modulo 2^32
        x = np.arange(nelems, dtype=np.uint32) * np.uint32(0x9E3779B1) + key0
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = ((x ^ (x >> np.uint32(15))) + key1) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))


def dither_of(bits):
    """Map random bits to multiples of 2^-24 in [-0.5, 0.5); exact in float32."""
    return ((bits >> np.uint32(8)) / 2.0**24 - 0.5).astype(F32)


def header(
    codec_id: int,
    dtype_id: int,
    nelems: int,
    payload_nbytes: int,
    *,
    block: int = 0,
    flags: int = 0,
    seed: int = 0,
    version: int = VERSION,
    values: int = 0,
    nforwards: int = 0,
    block_log2: int | None = None,
    tile_nelems: int = TILE_NELEMS,
    frac_e9: int = 0,
    stream: int = 0,
    round_: int = 0,
    first_tile: int = 0,
    ntiles: int | None = None,
    bucket: int = 0,
    lane: int = 0,
    chunk_log2: int = 0,
    checksum_of_header: int | None = None,
) -> bytes:
    """Return 64 bytes as docs/wire_format.md lays them out."""
    if ntiles is None:
        ntiles = -(-nelems // tile_nelems)
    if block_log2 is None:
        block_log2 = block.bit_length() - 1 if block else 0
    tile_granules = tile_nelems // TILE_GRANULE_NELEMS - 1
    packed = struct.pack(
        "<4s8B",
        MAGIC,
        version,
        codec_id,
        dtype_id,
        values,
        flags,
        nforwards,
        block_log2,
        tile_granules,
    )
    packed += struct.pack("<IQQQ", frac_e9, nelems, payload_nbytes, stream)
    packed += struct.pack("<IIIIHBB", seed, round_, first_tile, ntiles, bucket, lane, chunk_log2)
    return packed + struct.pack(
        "<I", crc32c(packed) if checksum_of_header is None else checksum_of_header
    )


# ---- numbers ------------------------------------------------------------------------------------


def f16_from_f32(v):
    """Round to binary16, nearest, ties to even; every NaN becomes 0x7e00."""
    with quiet():
        return np.where(np.isnan(v), np.uint16(0x7E00), v.astype(np.float16).view(np.uint16))


def f32_from_f16(bits):
    """Widen binary16, exactly; every NaN becomes one NaN."""
    with quiet():
        wide = bits.view(np.float16).astype(F32)
    return np.where(np.isnan(wide), NAN_F32, wide)


def bf16_from_f32(v):
    """Take the nearer of the two neighbours, of equally near ones the even; one NaN for all."""
    bits = v.view(np.uint32)
    below, above = bits & np.uint32(0xFFFF0000), (bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)

    def magnitude(
        pattern,
    ):  # of the number after the largest finite one: as if the exponent went on
        value = np.abs(pattern.view(F32).astype(np.float64))
        return np.where(np.isinf(value), 2.0**128, value)

    with quiet():
        exact = np.abs(v.astype(np.float64))
        down, up = exact - magnitude(below), magnitude(above) - exact
        even_below = (below >> np.uint32(16)) & np.uint32(1) == 0
        take_above = (up < down) | ((up == down) & ~even_below)
    nearest = np.where(take_above & np.isfinite(v), above, below) >> np.uint32(16)
    return np.where(np.isnan(v), np.uint32(0x7FC0), nearest).astype(np.uint16)


def f32_from_bf16(bits):
    """Append 16 zero bits; a signalling NaN becomes quiet, as in any arithmetic."""
    wide = bits.astype(np.uint32) << np.uint32(16)
    nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, wide | np.uint32(0x00400000), wide).astype(np.uint32).view(F32)


def to_f32(x, dtype):
    """Return numbers of any data type as float32."""
    with quiet():
        if dtype == "float16":
            return f32_from_f16(x.view(np.uint16))
        return f32_from_bf16(x) if dtype == "bfloat16" else x.astype(F32)


def from_work(work, dtype):
    """Round numbers of the work type to a data type; float64 goes to 16 bits through float32."""
    with quiet():
        if dtype == "float16":
            return f16_from_f32(work.astype(F32)).view(np.float16)
        return bf16_from_f32(work.astype(F32)) if dtype == "bfloat16" else work.astype(dtype)


def add(total, decoded):
    """Add decoded numbers to what was there; every NaN becomes one NaN."""
    with quiet():
        result = total + decoded
    return np.where(np.isnan(result), NAN_F64 if result.dtype == np.float64 else NAN_F32, result)


# ---- codecs: one tile ---------------------------------------------------------------------------
#
# encode_*(x, residual, ...) -> (payload without padding, new residual); residual is None or
# float32. decode_*(payload, nelems, ...) -> numbers of the work type


def encode_raw(x, dtype, residual=None):
    """Lay the numbers end to end; what is owed goes along, rounded to the data type."""
    if residual is None:
        return x.astype(STORED_AS[dtype], copy=False).tobytes(), None
    if dtype == "float16":
        return encode_fp16(to_f32(x, dtype), residual)
    if dtype == "bfloat16":
        return encode_bf16(to_f32(x, dtype), residual)
    with quiet():
        v = x + residual.astype(x.dtype)
    return v.tobytes(), np.where(np.isfinite(v), F32(0), residual)


def decode_raw(payload, nelems, dtype):
    stored = np.frombuffer(payload, STORED_AS[dtype], nelems)
    return stored if dtype in ("float32", "float64") else to_f32(stored, dtype)


def _owed(v, decoded, residual):
    """Return what was lost; where what was sent is not finite, what was owed before."""
    with quiet():
        return None if residual is None else np.where(np.isfinite(decoded), v - decoded, residual)


def _with_residual(x, residual):
    with quiet():
        return x if residual is None else x + residual


def encode_fp16(x, residual=None):
    v = _with_residual(x, residual)
    sent = f16_from_f32(v)
    return sent.astype("<u2").tobytes(), _owed(v, f32_from_f16(sent), residual)


def decode_fp16(payload, nelems):
    return f32_from_f16(np.frombuffer(payload, "<u2", nelems))


def encode_bf16(x, residual=None):
    v = _with_residual(x, residual)
    sent = bf16_from_f32(v)
    return sent.astype("<u2").tobytes(), _owed(v, f32_from_bf16(sent), residual)


def decode_bf16(payload, nelems):
    return f32_from_bf16(np.frombuffer(payload, "<u2", nelems))


def largest_scale(codec):
    """Return the largest float32 of which as many times as there are levels is finite."""
    levels = F32(LEVELS.get(codec, 1))
    with quiet():
        scale = FLT_MAX / levels
        while np.isfinite(np.nextafter(scale, FLT_MAX) * levels) and scale < FLT_MAX:
            scale = np.nextafter(scale, FLT_MAX)
        while not np.isfinite(scale * levels):
            scale = np.nextafter(scale, F32(0))
    return scale


def _round_steps(codec, steps, dither):
    """Round to the values that a codec has, in units of the scale."""
    levels = F32(LEVELS.get(codec, 1))
    # E4M3: numbers from 2^e up are 2^(e - 3) apart, those below 2^-6 as far as those above.
    apart = np.ones(len(steps), F32)
    if codec == "fp8":
        exponent = np.maximum(np.frexp(steps)[1] - 1, -6)
        apart = np.ldexp(F32(1), np.where(steps == 0, -6, exponent) - 3).astype(F32)
    if dither is not None:
        steps = steps + dither * apart
    return np.clip(np.rint(steps / apart) * apart, -levels, levels)


def _scaled_block(codec, v, dither):
    """Quantise one block by its largest magnitude; return its scale and its steps."""
    levels = F32(LEVELS.get(codec, 1))
    with quiet():
        absmax = np.max(np.abs(v))  # NaN if there is one
        if not np.isfinite(absmax):
            return NAN_F32, np.zeros(len(v), F32)
        scale = absmax / levels
        if absmax == 0:
            steps = v
        elif absmax < TINY_ABSMAX:  # levels / absmax would overflow, or the scale is subnormal
            if scale * levels < absmax:
                scale = np.nextafter(scale, FLT_MAX)
            steps = v / scale
        else:
            scale = min(scale, largest_scale(codec))
            steps = v * (levels / absmax)
        return scale, _round_steps(codec, steps, dither)


def ordered_sum(magnitudes):
    """Add up in the documented order: 16 partial sums, element i in number i mod 16, halved."""
    filled = np.zeros(-(-len(magnitudes) // 16) * 16, F32)
    filled[: len(magnitudes)] = magnitudes
    lanes = np.zeros(16, F32)
    with quiet():
        for row in filled.reshape(-1, 16):
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def _mean_block(codec, v):
    """Quantise one block by its mean magnitude; return its scale and its steps."""
    if not np.isfinite(v).all():
        return NAN_F32, np.ones(len(v), F32) if codec == "sign" else np.zeros(len(v), F32)
    magnitudes, factor = np.abs(v), F32(1)
    if not np.isfinite(ordered_sum(magnitudes)):  # beyond float32: everything 4096 times smaller
        factor = F32(4096)
        magnitudes = magnitudes / factor
    scale = ordered_sum(magnitudes) / F32(len(v))
    if codec == "sign":
        steps = np.where(np.signbit(v), F32(-1), F32(1))
    else:
        above = magnitudes > scale * F32(0.75)
        total = ordered_sum(np.where(above, magnitudes, F32(0)))
        scale = total / F32(above.sum()) if above.any() else F32(0)
        steps = np.where(above, np.sign(v), F32(0))
    with quiet():
        return min(scale * factor, FLT_MAX), steps


def _block(codec, v, dither):
    if codec == "sign" or (codec == "ternary" and dither is None):
        return _mean_block(codec, v)
    return _scaled_block(codec, v, dither)


def _fp8_values():
    """Return the values of the codes 0 to 127: sign excluded, 4 bits of exponent, 3 of mantissa."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(F32)


def block_nbytes(codec, nelems):
    """Return the bytes of the steps of a block."""
    return -(-nelems // PER_BYTE[codec])


def _pack(codec, steps):
    """Return the bytes of one block's steps."""
    if codec == "fp8":
        codes = np.searchsorted(_fp8_values(), np.abs(steps)) | (steps < 0) << 7
        return codes.astype(np.uint8).tobytes()
    if codec == "sign":
        return np.packbits(steps < 0, bitorder="little").tobytes()
    steps = steps.astype(int)
    if codec == "int8":
        return steps.astype(np.int8).tobytes()
    # Several to a byte: runs of the block, one below the other.
    base = {"int4": 16, "ternary": 3}[codec]
    filled = np.zeros((PER_BYTE[codec], block_nbytes(codec, len(steps))), int)
    filled.reshape(-1)[: len(steps)] = steps
    digits = filled % 16 if codec == "int4" else filled + 1
    return (base ** np.arange(PER_BYTE[codec]) @ digits).astype(np.uint8).tobytes()


def _unpack(codec, data, nelems):
    """Return one block's steps."""
    packed = np.frombuffer(data, np.uint8, block_nbytes(codec, nelems))
    if codec == "fp8":
        values = _fp8_values()[packed & 127]
        return np.where(packed & 128, -values, values)
    if codec == "sign":
        return np.where(np.unpackbits(packed, count=nelems, bitorder="little"), F32(-1), F32(1))
    if codec == "int8":
        return packed.view(np.int8)
    base = {"int4": 16, "ternary": 3}[codec]
    digits = packed.astype(int) // base ** np.arange(PER_BYTE[codec])[:, None] % base
    steps = (digits + 8) % 16 - 8 if codec == "int4" else digits - 1
    return steps.reshape(-1)[:nelems]


def encode_blocks(codec, x, residual=None, block=BLOCK_DEFAULT, dither=None):
    v = _with_residual(x, residual)
    scales, packed, owed = [], b"", []
    for first in range(0, len(v), block):
        part = slice(first, first + block)
        scale, steps = _block(codec, v[part], None if dither is None else dither[part])
        scales.append(scale)
        packed += _pack(codec, steps)
        if residual is not None:
            with quiet():
                lost = v[part] - steps * scale
            owed.append(lost if np.isfinite(scale) else residual[part])
    payload = np.array(scales, "<f4").tobytes() + packed
    return payload, None if residual is None else np.concatenate(owed)


def decode_blocks(codec, payload, nelems, block=BLOCK_DEFAULT):
    nblocks = -(-nelems // block)
    scales = np.frombuffer(payload, "<f4", nblocks)
    at, parts = 4 * nblocks, []
    for first in range(0, nelems, block):
        n = min(block, nelems - first)
        nbytes = block_nbytes(codec, n)
        parts.append(_unpack(codec, payload[at : at + nbytes], n))
        at += nbytes
    with quiet():
        return np.concatenate(parts).astype(F32) * np.repeat(scales, block)[:nelems]


# ---- codecs that send some elements of a tile ---------------------------------------------------


def round16(nbytes):
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def nkept(nelems, frac_e9):
    return max(1, -(-nelems * frac_e9 // FRAC_UNIT))


def topk_places(v, k):
    """Return where the k largest magnitudes are: NaNs first, and of equal ones the first ones."""
    nan, magnitude = np.isnan(v), np.nan_to_num(np.abs(v), nan=0, posinf=np.inf)
    return np.sort(np.lexsort((np.arange(len(v)), -magnitude, ~nan))[:k])


def randk_places(nelems, k, key):
    """Draw one element in each of k runs. key: seed, round, bucket, lane, first element."""
    seed, round_, bucket, lane, first = key
    ends = np.arange(k + 1) * nelems // k
    draws = random_bits(seed, round_, bucket, lane + LANE_OF_INDICES, first, k).astype(np.int64)
    return ends[:-1] + (draws * np.diff(ends) >> 32)


def values_dtype(values, dtype):
    """Return what the kept values are when their codec gets them."""
    return dtype if values == "raw" and dtype != "float64" else "float32"


def encode_sparse(codec, x, dtype, residual, kept, block, dither, key):
    """Send some elements; all others are owed. kept: fraction by 10^9, and codec of the values."""
    frac_e9, values = kept
    wide, k = to_f32(x, dtype), nkept(len(x), frac_e9)
    v = _with_residual(wide, residual)
    places = topk_places(v, k) if codec == "topk" else randk_places(len(x), k, key)
    dtype = values_dtype(values, dtype)
    chosen = from_work(np.where(np.isnan(v), NAN_F32, v)[places], dtype)
    sent, _ = encode_tile(
        values, chosen, dtype, None, block, None if dither is None else dither[:k]
    )
    owed = None
    if residual is not None:
        decoded = decode_tile(values, sent, k, dtype, block)
        with quiet():
            owed = np.where(np.isfinite(v), v, residual)
            lost = v[places] - decoded
        owed[places] = np.where(np.isfinite(decoded), lost, residual[places])
    if codec == "topk":
        index = places.astype("<u2").tobytes()
        sent = index + bytes(round16(len(index)) - len(index)) + sent
    return sent, owed


def decode_sparse(codec, payload, nelems, dtype, kept, block, key):
    frac_e9, values = kept
    k, at = nkept(nelems, frac_e9), 0
    if codec == "topk":
        places, at = np.frombuffer(payload, "<u2", k), round16(2 * k)
    else:
        places = randk_places(nelems, k, key)
    out = np.zeros(nelems, F32)
    out[places] = add(
        F32(0), decode_tile(values, payload[at:], k, values_dtype(values, dtype), block)
    )
    return out


# ---- codecs: whole frames -----------------------------------------------------------------------


def encode_tile(codec, x, dtype, residual, block, dither, kept=None, key=None):
    if codec in SPARSE:
        return encode_sparse(codec, x, dtype, residual, kept, block, dither, key)
    if codec == "raw":
        return encode_raw(x, dtype, residual)
    if codec in PER_BYTE:
        return encode_blocks(codec, to_f32(x, dtype), residual, block, dither)
    return {"fp16": encode_fp16, "bf16": encode_bf16}[codec](to_f32(x, dtype), residual)


def decode_tile(codec, payload, nelems, dtype, block, kept=None, key=None):
    if codec in SPARSE:
        return decode_sparse(codec, payload, nelems, dtype, kept, block, key)
    if codec == "raw":
        return decode_raw(payload, nelems, dtype)
    if codec in PER_BYTE:
        return decode_blocks(codec, payload, nelems, block)
    return {"fp16": decode_fp16, "bf16": decode_bf16}[codec](payload, nelems)


def tile_nbytes(codec, nelems, dtype, block=BLOCK_DEFAULT, kept=None):
    """Return the length of a tile's payload, padding included."""
    if codec in SPARSE:
        k = nkept(nelems, kept[0]) if nelems else 0
        index_nbytes = round16(2 * k) if codec == "topk" else 0
        return index_nbytes + tile_nbytes(kept[1], k, values_dtype(kept[1], dtype), block)
    if codec == "raw":
        nbytes = nelems * ELEM_NBYTES[dtype]
    elif codec in PER_BYTE:
        nblocks, rest = divmod(nelems, block)
        nbytes = nblocks * (4 + block_nbytes(codec, block))
        nbytes += 4 + block_nbytes(codec, rest) if rest else 0
    else:
        nbytes = 2 * nelems
    return round16(nbytes)


def encode_frame(
    codec,
    x,
    dtype="float32",
    *,
    block=BLOCK_DEFAULT,
    stochastic=False,
    kept=None,
    residual=None,
    seed=0,
    checksum=False,
    tile_nelems=TILE_NELEMS,
    **fields,
):
    """Return the bytes of a frame, and the new residual.

    kept: of sparse codecs, (fraction in parts of 10^9, codec of the values).
    fields: of the header, instead of what it would hold.
    """
    payload, owed = b"", []
    for first in range(0, len(x), tile_nelems):
        part = slice(first, first + tile_nelems)
        nelems, key = len(x[part]), (seed, 0, 0, 0, first)
        dither = dither_of(random_bits(*key, nelems)) if stochastic else None
        before = None if residual is None else residual[part]
        tile, lost = encode_tile(codec, x[part], dtype, before, block, dither, kept, key)
        payload += tile + bytes(tile_nbytes(codec, nelems, dtype, block, kept) - len(tile))
        owed.append(lost)
    frac_e9, values = kept or (0, codec)
    facts = {
        "codec_id": CODEC_IDS[codec],
        "dtype_id": DTYPE_IDS[dtype],
        "nelems": len(x),
        "payload_nbytes": len(payload),
        "block": block if values in PER_BYTE else 0,
        "flags": FLAG_CHECKSUM * checksum | FLAG_STOCHASTIC * stochastic,
        "seed": seed,
        "tile_nelems": tile_nelems,
        "frac_e9": frac_e9,
        "values": CODEC_IDS[values] if kept and values != "raw" else 0,
    }
    front = header(**facts | fields)
    back = struct.pack("<I", crc32c(payload)) if checksum else b""
    return front + payload + back, residual if residual is None or not owed else np.concatenate(
        owed
    )


def decode_frame(frame):
    """Return the numbers of a sound frame in the work type, and the name of their data type."""
    names = {number: name for name, number in CODEC_IDS.items()}
    codec, values, block = names[frame[5]], names.get(frame[7], "raw"), 1 << frame[10]
    dtype = next(name for name, number in DTYPE_IDS.items() if number == frame[6])
    tile_nelems = (frame[11] + 1) * TILE_GRANULE_NELEMS
    frac_e9, total = struct.unpack_from("<IQ", frame, 12)
    seed, round_ = struct.unpack_from("<II", frame, 40)
    bucket, lane = struct.unpack_from("<HB", frame, 56)
    kept = (frac_e9, values) if codec in SPARSE else None
    at, parts = (
        HEADER_NBYTES,
        [np.empty(0, np.float64 if (codec, dtype) == ("raw", "float64") else F32)],
    )
    for first in range(0, total, tile_nelems):
        nelems, key = min(tile_nelems, total - first), (seed, round_, bucket, lane, first)
        nbytes = tile_nbytes(codec, nelems, dtype, block, kept)
        payload = frame[at : at + nbytes]
        parts.append(decode_tile(codec, payload, nelems, dtype, block, kept, key))
        at += nbytes
    return np.concatenate(parts), dtype
