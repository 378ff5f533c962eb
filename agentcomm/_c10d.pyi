"""The transport over torch.distributed's process groups: csrc/python/c10d_module.c."""

from typing import Final

TORCH_VERSION: Final[str]

def open(group_name: str, /) -> object: ...
