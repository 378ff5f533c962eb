"""The names of a module's parameters, which the patterns of ``rules`` match."""

import fnmatch
import hashlib
from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from agentcomm._tensors import as_real
from agentcomm.errors import SpecError
from agentcomm.specs import suggest


class Names:
    """Names of a module's parameters; a tied parameter has several."""

    def __init__(self, module: torch.nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        self.of: dict[int, list[str]] = {}
        described = []
        for name, param in module.named_parameters(remove_duplicate=False):
            self.of.setdefault(id(param), []).append(name)
            described.append(f"{name} {tuple(param.shape)} {param.dtype}")
        self.all = [name for names in self.of.values() for name in names]
        self.digest = hashlib.blake2b("\n".join(described).encode(), digest_size=8).hexdigest()
        self.elem_nbytes_max = max(
            (as_real(p.detach()).element_size() for p in module.parameters()), default=4
        )

    def check_patterns(self, what: str, patterns: Mapping[str, object]) -> None:
        """Raise SpecError for a pattern that matches no name."""
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.all):
                near = suggest(pattern, self.all) or f"; there are {', '.join(self.all[:8])}, ..."
                raise SpecError(f"pattern {pattern!r} in {what} matches no parameter{near}")
