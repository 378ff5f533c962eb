"""Warnings about gradients that the hook cannot see."""

import logging
import sys
import warnings
import weakref
from collections.abc import Container, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

_NSHOWN = 8


def _warn(text: str, category: type[Warning]) -> None:
    """Warn; where warnings are errors, log: DDP's reducer does not survive a hook that raises."""
    try:
        warnings.warn(text, category, stacklevel=3)
    except Warning:
        logging.getLogger("agentcomm").warning("%s", text)


class FrozenParams:
    """The parameters that no bucket of a DDP covers: those that were frozen when it was made.

    DDP never synchronises them, not even when the script unfreezes them later.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[int, Sequence[str]],
        covered: Container[int],
    ) -> None:
        """Look through a module.

        Args:
            module: a DDP or its module.
            names: of its parameters, by identity.
            covered: identities of those that are in buckets.
        """
        ignored: set[str] = set()
        if isinstance(module, DistributedDataParallel):
            ignored = module.parameters_to_ignore
            module = module.module
        self._params = [
            (names[id(param)][0], weakref.ref(param))
            for param in module.parameters()
            if id(param) not in covered
            and id(param) in names
            and ignored.isdisjoint(names[id(param)])
        ]

    def check(self) -> None:
        """Warn, once, if any of them is being trained."""
        trained = [
            name
            for name, reference in self._params
            if (param := reference()) is not None and param.requires_grad
        ]
        if trained:
            self._params = []
            more = f" and {len(trained) - _NSHOWN} more" if len(trained) > _NSHOWN else ""
            _warn(
                f"DDP does not synchronise {', '.join(trained[:_NSHOWN])}{more}: frozen when it was"
                " wrapped, so in none of its buckets, and trained now; wrap the module in a new"
                " DistributedDataParallel and attach again",
                UserWarning,
            )


def warn_never_called(described: str) -> None:
    """Say that a hook saw no gradient in all its life; silent where the script failed."""
    if getattr(sys, "last_type", None) is None:
        _warn(
            f"no gradient reached {described}: the script ran no backward pass, or it called the"
            " inner module (ddp.module) where it should call the DDP; then its ranks trained apart",
            RuntimeWarning,
        )
