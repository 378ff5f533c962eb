"""Encoding and decoding of single tensors, without any communication."""

import itertools
from typing import Any

import torch
from torch.autograd.graph import increment_version

from agentcomm import _core
from agentcomm._tensors import DTYPE_OF_ID, as_real, capsule, check_tensor, dtype_id, is_dense
from agentcomm.errors import SpecError
from agentcomm.specs import (
    FRAC_UNIT,
    Codec,
    check_whole,
    check_without_rounds,
    codec_table,
    parse,
)


def codecs() -> list[dict[str, Any]]:
    """Return a table of the codecs of this build.

    Returns:
        One dict per codec: name, id, block_nelems (default number of elements that share a scale,
        0 for none), bits_per_element (for float32; of a sparse codec, per element kept), lossless,
        feedback (whether ``"auto"`` keeps a residual), stochastic (whether it offers stochastic
        rounding), zero_stays_zero, sparse (whether it keeps a fraction), values (whether sparse
        codecs may send their values in it), cuda.

    Example:
        >>> [row["name"] for row in codecs()]
        ['raw', 'fp16', 'bf16', 'fp8', 'int8', 'int4', 'ternary', 'sign', 'topk', 'randk']
    """
    nelems = 1 << 24
    table = []
    for row in codec_table().values():
        frac_e9 = FRAC_UNIT if row["sparse"] else 0
        nbytes = _core.frame_nbytes((row["id"], 0, 0, frac_e9, 0), 1, nelems, False)
        nbytes -= _core.HEADER_NBYTES
        table.append(row | {"bits_per_element": 8 * nbytes / nelems, "cuda": False})
    return table


def _check_input(tensor: torch.Tensor, what: str) -> None:
    check_tensor(tensor, what)
    if not is_dense(tensor):
        raise SpecError(
            f"{what} is not dense and contiguous; pass {what}.contiguous() or .to_dense()"
        )


def _check_output(tensor: torch.Tensor, what: str) -> None:
    """Check a tensor that is written to."""
    check_tensor(tensor, what)
    if not is_dense(tensor):
        raise SpecError(
            f"{what} is not dense and contiguous; pass a tensor that is, and copy it back"
        )
    if tensor.requires_grad:
        raise SpecError(
            f"{what} requires a gradient, and is written to in place; pass {what}.detach()"
        )


def _check_apart(**tensors: torch.Tensor | None) -> None:
    """Raise SpecError if two tensors share memory: one would be written while the other is read."""
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.nbytes
    ]
    for (begin, end, name), (other_begin, other_end, other) in itertools.combinations(spans, 2):
        if begin < other_end and other_begin < end:
            raise SpecError(f"{name} and {other} share memory; pass a clone() of one of them")


def _check_nthreads(nthreads: object) -> None:
    check_whole("nthreads", nthreads, 1, (1 << 16) - 1)


def encode(
    tensor: torch.Tensor,
    spec: str | Codec,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    nthreads: int = 1,
    *,
    seed: int = 0,
    checksum: bool = False,
) -> torch.Tensor:
    """Encode a tensor into one self-describing frame.

    Shapes:
        tensor: any shape, contiguous, CPU; float32, float16, bfloat16, float64 or complex.
        residual: as many elements as tensor (twice as many if complex), float32, contiguous.
        out: (nbytes,) uint8 with room for the frame.
        returns: (frame_nbytes,) uint8.

    Args:
        tensor: what to encode.
        spec: the codec.
        residual: is added to the tensor before encoding and holds the loss afterwards (error
            feedback); where tensor plus residual is not finite it stays as it was.
        out: memory for the frame; a new tensor without it. It shares no memory with tensor or
            residual, nor do these.
        nthreads: threads to use at most, each for at least two tiles of 65,536 elements; they
            change the time and never the bytes.
        seed: of the random numbers of stochastic rounding.
        checksum: add a CRC32C of the payload, which ``decode`` then checks.

    Returns:
        The frame; a view of ``out`` if that was given.

    Raises:
        SpecError: a spec, shape, device or data type that does not fit, ``out`` being too small,
            tensors that share memory.

    Determinism:
        The same arguments give the same bytes on every machine. (The one exception: where ``raw``
        adds a residual that is not finite itself to a float32, the bits of a NaN are the CPU's.)

    Example:
        >>> frame = encode(torch.ones(1000), "int8")
        >>> frame.numel()
        1088
    """
    codec = parse(spec)
    check_without_rounds(codec)
    _check_nthreads(nthreads)
    check_whole("seed", seed, 0, (1 << 32) - 1)
    if not isinstance(checksum, bool):
        raise SpecError(f"checksum={checksum!r} is unknown; it must be True or False")
    _check_input(tensor, "tensor")
    real = as_real(tensor)
    nbytes = _core.frame_nbytes(codec.to_tuple(), dtype_id(real.dtype), real.numel(), checksum)
    if residual is not None:
        _check_output(residual, "residual")
        if residual.dtype != torch.float32 or residual.numel() != real.numel():
            raise SpecError(
                f"residual is {residual.numel()} x {residual.dtype}; it must be {real.numel()} x"
                " torch.float32"
            )
        if residual.data_ptr() % residual.element_size():
            raise SpecError(
                "residual is not aligned to 4 bytes; pass residual.clone() and copy it back"
            )
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8)
    else:
        _check_output(out, "out")
        if out.dtype != torch.uint8 or out.numel() < nbytes:
            raise SpecError(
                f"out is {out.numel()} x {out.dtype}; the frame needs {nbytes} x torch.uint8"
            )
    _check_apart(tensor=real, residual=residual, out=out)
    _core.encode(
        codec.to_tuple(),
        capsule(real),
        None if residual is None else capsule(residual),
        seed,
        checksum,
        capsule(out.view(-1)),
        nthreads,
    )
    for written in (residual, out):
        if written is not None:
            increment_version(written)
    return out.view(-1)[:nbytes]


def decode(
    frame: torch.Tensor,
    out: torch.Tensor | None = None,
    add: bool = False,
    nthreads: int = 1,
) -> torch.Tensor:
    """Decode a frame.

    Shapes:
        frame: (nbytes,) uint8, contiguous, CPU; may be longer than the frame.
        out: any shape with as many elements as were encoded, contiguous, CPU.
        returns: out, or (nelems,) of the frame's data type.

    Args:
        frame: what ``encode`` returned; need not be trusted. But a short frame may hold many
            elements (``randk`` up to 16,384 per byte): pass ``out`` to limit what is allocated.
        out: where to decode to; may have another data type than the frame, and shares no memory
            with it.
        add: add to what out holds.
        nthreads: as in ``encode``.

    Raises:
        FrameError: the frame is cut short, damaged or of another version. ``out`` is as it was.
        SpecError: ``out`` does not fit, or ``add`` without ``out``.
        RuntimeError: torch's, if there is no memory for so many elements.

    Determinism:
        The same frame gives the same bits on every machine.

    Example:
        >>> decode(encode(torch.tensor([1.0, -2.0, 0.0]), "int8"))
        tensor([ 1.0079, -2.0000,  0.0000])
    """
    _check_nthreads(nthreads)
    _check_input(frame, "frame")
    if frame.dtype != torch.uint8:
        raise SpecError(f"frame is {frame.dtype}; a frame is a tensor of torch.uint8")
    packed = capsule(frame.view(-1))
    info = _core.frame_info(packed)
    if out is None:
        if add:
            raise SpecError("add=True needs out=, the tensor to add to")
        out = torch.empty(info["nelems"], dtype=DTYPE_OF_ID[info["dtype"]])
    _check_output(out, "out")
    real = as_real(out)
    dtype_id(real.dtype)
    if real.numel() != info["nelems"]:
        raise SpecError(f"out has {real.numel()} elements; the frame holds {info['nelems']}")
    _check_apart(frame=frame, out=real)
    _core.decode(packed, capsule(real), add, nthreads)
    increment_version(out)
    return out
