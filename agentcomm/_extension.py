"""Loading of the extension that was compiled against torch."""

from types import ModuleType

import torch

REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def c10d() -> ModuleType:
    """Import ``agentcomm._c10d``.

    Raises:
        ImportError: it was compiled against another torch, or not at all; the message has the
            command that rebuilds it.
    """
    built: str | None
    try:
        from agentcomm._build_info import TORCH_VERSION as built
    except ImportError:
        built = None
    cure = f"rebuild it in agentcomm's source folder: {REBUILD}"
    if built is not None and torch.__version__ != built:
        raise ImportError(
            f"agentcomm was compiled against torch {built}, but torch {torch.__version__} is"
            f" installed; {cure}"
        )
    try:
        from agentcomm import _c10d
    except ImportError as error:
        raise ImportError(
            f"agentcomm's extension does not load beside torch {torch.__version__}; {cure}"
        ) from error
    return _c10d
