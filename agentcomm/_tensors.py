"""Tensors on their way into the core."""

import torch
from torch._C import _to_dlpack  # which torch.utils.dlpack calls to_dlpack

from agentcomm.errors import SpecError

# enum agc_dtype
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float64: 4}
DTYPE_OF_ID = {number: dtype for dtype, number in DTYPES.items()}
_SUPPORTED = "float32, float16, bfloat16, float64, complex32, complex64, complex128 are supported"


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as the real one that shares its memory, any other as it is.

    Raises:
        SpecError: the tensor is a lazy conjugate, whose memory does not hold its values.
    """
    if tensor.is_conj():
        raise SpecError(
            "the tensor is a lazy conjugate (torch.Tensor.is_conj); pass tensor.resolve_conj()"
        )
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bucket_strides(real: torch.Tensor) -> tuple[int, ...]:
    """Return the strides by which DDP lays a parameter out in a bucket.

    They are its own if it is dense (channels_last is), else those of a contiguous tensor.
    """
    if torch.empty_like(real, device="meta").stride() == real.stride():
        return real.stride()
    return torch.empty(real.shape, device="meta").stride()


def dtype_id(dtype: torch.dtype) -> int:
    """Return the core's number of a real data type.

    Raises:
        SpecError: it has none.
    """
    number = DTYPES.get(dtype)
    if number is None:
        raise SpecError(f"dtype {dtype} is not supported; {_SUPPORTED}")
    return number


def check_device(tensor: torch.Tensor, what: str) -> None:
    """Raise SpecError unless the tensor lies in main memory."""
    if tensor.device.type != "cpu":
        raise SpecError(
            f"{what} is on device {tensor.device}; this version exchanges tensors on the CPU only:"
            " move the model to the CPU, or leave this one to plain DDP"
        )


def check_tensor(tensor: object, what: str) -> None:
    """Raise SpecError unless it is a tensor in main memory."""
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(f"{what} is a {type(tensor).__name__}; it must be a torch.Tensor")
    check_device(tensor, what)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one after the other: not those of sparse or nested tensors."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.is_contiguous()


def capsule(tensor: torch.Tensor) -> object:
    """Return a DLPack capsule of a real tensor; it keeps the memory alive.

    Raises:
        SpecError: the tensor is a lazy view whose memory does not hold its values.
    """
    if tensor.is_neg():
        raise SpecError(
            "the tensor is a lazily negated view (torch.Tensor.is_neg); pass tensor.resolve_neg()"
        )
    return _to_dlpack(tensor.detach())
