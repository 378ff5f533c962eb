"""The C core: csrc/python/core_module.c. Tensors cross as DLPack capsules."""

from collections.abc import Callable
from typing import Any, Final, Self, final

# struct agc_spec: codec id, block, rounding, kept fraction in 10^-9, codec id of the values.
_Spec = tuple[int, int, int, int, int]
_Capsule = object

CHUNK_LOG2_MIN: Final[int]
CHUNK_LOG2_MAX: Final[int]
WIRE_VERSION: Final[int]
HEADER_NBYTES: Final[int]

def codec_table() -> list[dict[str, Any]]: ...
def frame_nbytes(spec: _Spec, dtype: int, nelems: int, checksum: bool, /) -> int: ...
def encode(
    spec: _Spec,
    tensor: _Capsule,
    residual: _Capsule | None,
    seed: int,
    checksum: bool,
    out: _Capsule,
    nthreads: int,
    /,
) -> int: ...
def frame_info(frame: _Capsule, /) -> dict[str, Any]: ...
def decode(frame: _Capsule, out: _Capsule, add: bool, nthreads: int, /) -> None: ...
def cpu_info() -> dict[str, Any]: ...
def set_cpu_mask(mask: int, /) -> None: ...
def plan_lane(
    spec: _Spec, dtype: int, nelems: int, nranks: int, rank: int, chunk_log2: int, /
) -> dict[str, Any]: ...

@final
class Engine:
    def __new__(
        cls,
        transport: _Capsule,
        stream: int,
        seed: int,
        chunk_log2: int,
        elem_nbytes_max: int,
        timeout_s: float,
        late_s: float,
        rank_names: list[int],
        on_done: Callable[..., None],
        on_late: Callable[[int, int, int, float], None],
    ) -> Self: ...
    def add_param(self, nelems: int, /) -> int: ...
    def define_bucket(
        self,
        index: int,
        dtype: int,
        params: list[int],
        lane_of: list[int],
        lanes: list[tuple[_Spec, bool, bool, bool, float]],
        sum: bool,
        /,
    ) -> None: ...
    def reset_buckets(self) -> None: ...
    def submit(
        self,
        index: int,
        round: int,
        nforwards: int,
        absent: bool,
        tensor: _Capsule,
        token: object,
        /,
    ) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def bucket_stats(self, index: int, /) -> dict[str, Any] | None: ...
    def residual_norm(self) -> float: ...
    def residual(self, param: int, owner: bool, out: _Capsule, /) -> None: ...
    def clear_residuals(self) -> None: ...
    def close(self) -> None: ...
