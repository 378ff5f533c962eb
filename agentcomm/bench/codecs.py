"""Time encoding and decoding of one tensor in memory, in one thread.

Every codec encodes, encodes with a residual (error feedback), decodes, and decodes with add=True,
by agentcomm.encode and agentcomm.decode into memory that is there already. Right before the four,
in the same turn, one memcpy is timed: torch's copy_ of the float32 tensor of as many elements into
another one. A multiple is the time of an operation over that of the memcpy of its turn.
"""

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

import agentcomm
from agentcomm import _core
from agentcomm.bench._shared import (
    BenchError,
    all_specs,
    environment,
    file_path,
    header,
    positive,
    progress,
    require,
    settings,
    spec_text,
    summarise,
    table,
    write_json,
)

NELEMS_DEFAULT = 1 << 24  # 64 MiB of float32: more than caches hold
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# AGC_CPU_... of agentcomm.h: AVX2 1, AVX-512 2, CRC32 4.
TIERS = {"avx512": 7, "avx2": 5, "c": 0}
ALL_FEATURES = 0xFFFFFFFF
# A sample calls as often as it takes to touch this many elements: a single call on a small tensor
# is too short for the clock.
SAMPLE_NELEMS = 1 << 20
SLOW_S = 0.5  # a codec with an operation above this ...
NTURNS_SLOW = 3  # ... takes no more turns than this
QUANTILE_NELEMS_MAX = 1 << 24  # torch.quantile takes so many and refuses one more
KEPT_FRAC = 0.01  # what torch.topk selects, and where torch.quantile cuts
BLOCK_NELEMS = 256  # agentcomm's default, for bitsandbytes too
SEED = 0


@dataclass
class Operation:
    """Something to time, and its samples so far."""

    name: str
    call: Callable[[], object]
    sample_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)  # of the same turns
    cpu_s: list[float] = field(default_factory=list)  # of all threads

    def figures(self, dense_nbytes: int) -> dict[str, Any]:
        """Return what the samples say.

        Args:
            dense_nbytes: bytes of the tensor that is encoded, or decoded to.
        """
        pairs = zip(self.sample_s, self.memcpy_s, strict=True)
        cores = [cpu / wall for cpu, wall in zip(self.cpu_s, self.sample_s, strict=True)]
        return {
            "operation": self.name,
            "seconds": asdict(summarise(self.sample_s)),
            "dense_gb_per_s": asdict(summarise([dense_nbytes / s / 1e9 for s in self.sample_s])),
            "memcpy_multiple": asdict(summarise([own / memcpy for own, memcpy in pairs])),
            "cores_used": summarise(cores).median,
            "sample_s": self.sample_s,
            "memcpy_s": self.memcpy_s,
        }


@dataclass
class Group:
    """Operations that follow one memcpy."""

    name: str
    tier: str  # "" where it is not agentcomm's code
    frame_nbytes: int | None
    reset: Callable[[], object]  # called before each turn, not timed
    operations: list[Operation]

    @property
    def is_slow(self) -> bool:
        """Whether an operation has shown that it is slow; no decode goes without its encode."""
        return any(operation.sample_s[:1] > [SLOW_S] for operation in self.operations)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``agentcomm bench codecs``."""
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write all samples to FILE")
    parser.add_argument(
        "--spec", type=spec_text, nargs="+", metavar="SPEC", help="codecs (default: all)"
    )
    parser.add_argument(
        "--nelems", type=positive, nargs="+", default=[NELEMS_DEFAULT], metavar="N",
        help=f"elements of the tensor (default: {NELEMS_DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="(default: all three)"
    )
    parser.add_argument(
        "--tier", choices=TIERS, nargs="+", help="kernels (default: all that this CPU has)"
    )
    parser.add_argument(
        "--turns", type=positive, default=7,
        help=f"samples of each operation (default: 7; at most {NTURNS_SLOW} above {SLOW_S} s)",
    )  # fmt: skip


def _tiers(wanted: list[str] | None) -> list[str]:
    features = _core.cpu_info()["features"]
    there = [name for name, mask in TIERS.items() if mask & ~features == 0]
    for name in wanted or ():
        if name not in there:
            raise BenchError(f"--tier {name}: this CPU has {', '.join(there)}")
    return list(dict.fromkeys(wanted or there))


@contextmanager
def _quiet_process() -> Iterator[None]:
    """One thread for torch and no garbage collection while the block runs."""
    nthreads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(nthreads)
        _core.set_cpu_mask(ALL_FEATURES)


class _Room:
    """The tensors of one size and data type. All memory is touched, so no page is new."""

    def __init__(self, nelems: int, dtype: torch.dtype) -> None:
        self.nelems = nelems
        generator = torch.Generator().manual_seed(SEED)
        self.float32 = torch.randn(nelems, generator=generator)
        self.x = self.float32.to(dtype)
        self.decoded = torch.ones_like(self.x)
        self.residual = torch.ones(nelems)
        self.copy = torch.ones(nelems)
        self.ncalls = max(1, SAMPLE_NELEMS // nelems)

    def sample(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return the wall and the CPU time of one call, in seconds."""
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(self.ncalls):
            call()
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        return wall_s / self.ncalls, cpu_s / self.ncalls

    def codec_group(self, spec: str, tier: str, frame: torch.Tensor) -> Group:
        """Return the four operations of a codec; ``frame`` has room for exactly its frame."""
        codec = agentcomm.specs.parse(spec)
        encode = partial(agentcomm.encode, self.x, codec, out=frame)

        def reset() -> None:
            self.residual.zero_()
            self.decoded.zero_()

        return Group(
            spec,
            tier,
            frame.numel(),
            reset,
            [
                Operation("encode", encode),
                Operation("encode with residual", partial(encode, residual=self.residual)),
                Operation("decode", partial(agentcomm.decode, frame, out=self.decoded)),
                Operation(
                    "decode, add", partial(agentcomm.decode, frame, out=self.decoded, add=True)
                ),
            ],
        )

    def take_turn(self, group: Group, turn: int) -> None:
        """Sample a memcpy, then each operation of the group, unless it is slow and has enough."""
        if turn >= NTURNS_SLOW and group.is_slow:
            return
        if group.tier:
            _core.set_cpu_mask(TIERS[group.tier])
        group.reset()
        memcpy_s, _ = self.sample(partial(self.copy.copy_, self.float32))
        for operation in group.operations:
            wall_s, cpu_s = self.sample(operation.call)
            operation.sample_s.append(wall_s)
            operation.cpu_s.append(cpu_s)
            operation.memcpy_s.append(memcpy_s)


def _codec_groups(
    room: _Room, specs: list[str], tiers: list[str], skipped: list[str]
) -> list[Group]:
    """Return a group per spec and tier. They share the memory of the largest frame."""
    nbytes = {}
    for spec in specs:
        try:
            nbytes[spec] = agentcomm.encode(room.x, spec).numel()
        except agentcomm.SpecError as error:
            skipped.append(f"{spec}, {room.x.dtype}, {room.nelems} elements: {error}")
    memory = torch.ones(max(nbytes.values(), default=0), dtype=torch.uint8)
    return [
        room.codec_group(spec, tier, memory[: nbytes[spec]]) for spec in nbytes for tier in tiers
    ]


def _others(room: _Room, skipped: list[str]) -> list[Group]:
    """Return what the codecs are compared with, all on float32, each a group of its own."""
    x, magnitudes = room.float32, room.float32.abs()
    groups = []

    def add(name: str, call: Callable[[], object]) -> None:
        groups.append(Group(name, "", None, lambda: None, [Operation("call", call)]))

    for dtype in (torch.float16, torch.bfloat16):
        cast = torch.ones(room.nelems, dtype=dtype)
        add(f"torch cast to {str(dtype).removeprefix('torch.')}", partial(cast.copy_, x))
    nkept = max(1, int(KEPT_FRAC * room.nelems))
    kept = (torch.ones(nkept), torch.ones(nkept, dtype=torch.int64))
    add(
        f"torch.topk, {KEPT_FRAC:.0%} of |x|",
        partial(torch.topk, magnitudes, nkept, sorted=False, out=kept),
    )
    if room.nelems <= QUANTILE_NELEMS_MAX:
        cut = torch.ones(())
        add("torch.quantile of |x|", partial(torch.quantile, magnitudes, 1 - KEPT_FRAC, out=cut))
    else:
        skipped.append(
            f"torch.quantile, {room.nelems} elements: it takes at most {QUANTILE_NELEMS_MAX}"
        )
    for module, add_operations in (("bitsandbytes.functional", _bnb), ("piquant", _piquant)):
        try:
            add_operations(importlib.import_module(module), room, add)
        except ImportError as error:
            skipped.append(f"{module.partition('.')[0]}: not installed ({error})")
    return groups


_Add = Callable[[str, Callable[[], object]], None]


def _bnb(bnb: Any, room: _Room, add: _Add) -> None:
    """Add bitsandbytes, which allocates what it returns and has threads of its own."""
    quantize = partial(bnb.quantize_blockwise, room.float32, blocksize=BLOCK_NELEMS)
    quantised, state = quantize()
    add("bitsandbytes quantize_blockwise", quantize)
    add("bitsandbytes dequantize_blockwise", partial(bnb.dequantize_blockwise, quantised, state))


def _piquant(piquant: Any, room: _Room, add: _Add) -> None:
    """Add piquant (pypiquant): uint8 with one scale for the whole tensor, which it must find."""
    context = piquant.Context(num_threads=1)
    float32, uint8 = piquant.DataType.F32, piquant.DataType.UINT8
    x, decoded = room.float32, torch.ones(room.nelems)
    quantised = torch.ones(room.nelems, dtype=torch.uint8)

    def quantize() -> tuple[float, int]:
        params: tuple[float, int] = context.compute_quant_params_ptr_float32(
            x.data_ptr(), uint8, room.nelems
        )
        context.quantize_ptr(
            x.data_ptr(), float32, quantised.data_ptr(), uint8, room.nelems, *params,
            piquant.RoundMode.NEAREST,
        )  # fmt: skip
        return params

    params = quantize()

    def dequantize(reduce_op: Any) -> None:
        context.dequantize_ptr(
            quantised.data_ptr(), uint8, decoded.data_ptr(), float32, room.nelems, *params,
            reduce_op,
        )  # fmt: skip

    add("piquant quantize to uint8", quantize)
    add("piquant dequantize", partial(dequantize, piquant.ReduceOp.SET))
    add("piquant dequantize, add", partial(dequantize, piquant.ReduceOp.ADD))


def _measure(room: _Room, groups: list[Group], nturns: int, bar: Any) -> None:
    """Let the groups take turns, after one that warms up and is not kept."""
    for group in groups:
        if group.tier:
            _core.set_cpu_mask(TIERS[group.tier])
        for operation in group.operations:
            operation.call()
    for turn in range(nturns):
        for group in groups:
            bar.set_description(f"{group.name} {group.tier}")
            room.take_turn(group, turn)
            bar.update()


def _results(room: _Room, dtype: str, groups: list[Group]) -> list[dict[str, Any]]:
    results = []
    for group in groups:
        is_codec = bool(group.tier)
        dense, of_dtype = (room.x, dtype) if is_codec else (room.float32, "float32")
        for operation in group.operations:
            results.append(
                {
                    "group": " ".join([of_dtype, str(room.nelems), group.tier]).rstrip(),
                    "name": f"{group.name} {operation.name}" if is_codec else group.name,
                    "kind": "codec" if is_codec else "other",
                    "spec": group.name if is_codec else None,
                    "tier": group.tier or None,
                    "dtype": of_dtype,
                    "nelems": room.nelems,
                    "dense_nbytes": dense.nbytes,
                    "frame_nbytes": group.frame_nbytes,
                }
                | operation.figures(dense.nbytes)
            )
    return results


def _cells(result: dict[str, Any]) -> str:
    multiple = result["memcpy_multiple"]
    return (
        f"{result['dense_gb_per_s']['median']:.2f} | {multiple['median']:.2f} "
        f"({multiple['q1']:.2f}-{multiple['q3']:.2f})"
    )


def _tables(results: list[dict[str, Any]]) -> str:
    """Return the results of one size and data type as text."""
    parts = []
    codecs = [result for result in results if result["kind"] == "codec"]
    if codecs:
        first = codecs[0]
        operations = list(dict.fromkeys(result["operation"] for result in codecs))
        rows = [
            [
                result["spec"],
                result["tier"],
                f"{result['frame_nbytes'] / result['dense_nbytes']:.4f}",
            ]
            + [_cells(other) for other in codecs[at : at + len(operations)]]
            for at, result in enumerate(codecs)
            if result["operation"] == operations[0]
        ]
        mib = first["dense_nbytes"] / 2**20
        parts.append(
            f"{first['dtype']}, {first['nelems']} elements, {mib:.4g} MiB\n"
            + table(["spec", "tier", "frame/dense", *operations], rows, nleft=2)
        )
    others = [result for result in results if result["kind"] == "other"]
    if others:
        first = others[0]
        rows = [
            [result["name"], _cells(result), f"{result['cores_used']:.1f}",
             str(result["seconds"]["nsamples"])]
            for result in others
        ]  # fmt: skip
        parts.append(
            f"Others, float32, {first['nelems']} elements\n"
            + table(["", "call", "cores used", "turns"], rows)
        )
    return "\n\n".join(parts)


def run(args: argparse.Namespace) -> int:
    """Run ``agentcomm bench codecs``.

    Raises:
        BenchError: tqdm is missing, or the CPU lacks a tier.
    """
    require("tqdm")
    tiers = _tiers(args.tier)
    specs = list(dict.fromkeys(args.spec or all_specs(lossless=True)))
    env = environment("codecs", link="none, one process", nranks=1)
    print(header(env))
    print(
        f"One thread, {args.turns} turns. Cells: GB/s of the dense tensor | its time in memcpys of "
        "as many float32, median (quartiles)\n"
    )
    results: list[dict[str, Any]] = []
    skipped: list[str] = []
    with _quiet_process():
        for nelems in dict.fromkeys(args.nelems):
            # The others take their turns among those of the first data type.
            for number, dtype in enumerate(dict.fromkeys(args.dtype)):
                room = _Room(nelems, DTYPES[dtype])
                groups = _codec_groups(room, specs, tiers, skipped)
                groups += _others(room, skipped) if number == 0 else []
                with progress(len(groups) * args.turns, "group") as bar:
                    _measure(room, groups, args.turns, bar)
                measured = _results(room, dtype, groups)
                results += measured
                print(_tables(measured) + "\n", flush=True)
    for line in dict.fromkeys(skipped):
        print(f"left out: {line}")
    if args.json:
        document = {"schema": 1, "environment": env, "settings": settings(args)}
        write_json(args.json, document | {"results": results, "left_out": skipped})
        print(f"wrote {args.json}")
    return 0
