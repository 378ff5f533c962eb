"""One process that computes what all ranks of an int8 exchange with error feedback compute.

Slow and obvious: residuals are kept by parameter name, tiles are those of the planner, and every
sum is written out in the order that docs/planner.md and docs/codecs.md give. float32 throughout, so
that results must agree to the bit.
"""

import numpy as np

from agentcomm import _core
from agentcomm.specs import Int8

BLOCK = 256
F32 = np.float32


def quantise(x):
    """Return (q, scale per element) of a tile: round(x * 127 / absmax) by blocks."""
    q, scales = np.empty_like(x), np.empty_like(x)
    for first in range(0, x.size, BLOCK):
        block = x[first : first + BLOCK]
        absmax = np.abs(block).max()
        assert absmax == 0 or 2.0**-100 <= absmax < 2.0**127, "not in the reference"
        scale, inverse = (F32(0), F32(0)) if absmax == 0 else (absmax / F32(127), F32(127) / absmax)
        q[first : first + BLOCK] = np.clip(np.rint(block * inverse), -127, 127)
        scales[first : first + BLOCK] = scale
    return q, scales


class Int8Reference:
    """The residuals of all ranks, and the exchange of one bucket at a time."""

    def __init__(self, nranks, sizes):
        self.nranks = nranks
        self.worker = [{name: np.zeros(n, F32) for name, n in sizes.items()} for _ in range(nranks)]
        self.layout = {}  # bucket: names of its parameters in order of memory
        self.owner = {}  # bucket: the owners' residuals, laid out as the lane

    def set_layout(self, layout):
        """Take DDP's new buckets: what owners owe goes to the worker of the same rank."""
        for bucket, owed in self.owner.items():
            plan = self._plan(owed.size)
            for name, where in self._pieces(bucket):
                for tile, part in self._tiles(plan, where):
                    worker = self.worker[tile % self.nranks][name]
                    begin = part.start - where.start
                    worker[begin : begin + part.stop - part.start] += F32(self.nranks) * owed[part]
        self.layout = layout
        self.owner = {}
        for bucket in layout:
            self.owner[bucket] = np.zeros(sum(self.worker[0][n].size for n in layout[bucket]), F32)

    def exchange(self, bucket, grads):
        """Return {name: mean}. grads: per rank, {name: gradient}."""
        pieces = self._pieces(bucket)
        nelems = pieces[-1][1].stop
        plan = self._plan(nelems)
        lane, residual = np.empty((self.nranks, nelems), F32), np.empty((self.nranks, nelems), F32)
        live = {}
        for rank in range(self.nranks):
            for name, where in pieces:
                lane[rank, where] = grads[rank][name]
                live[rank, name] = bool(np.any(grads[rank][name]))
                # A gradient of zeros sends zeros and keeps what is owed.
                residual[rank, where] = self.worker[rank][name] if live[rank, name] else 0
        mean = np.empty(nelems, F32)
        for first in range(0, nelems, plan["tile_nelems"]):
            tile = slice(first, min(first + plan["tile_nelems"], nelems))
            self._reduce(bucket, plan, tile, lane, residual, mean)
        for rank in range(self.nranks):
            for name, where in pieces:
                kept = 0 if live[rank, name] else self.worker[rank][name]
                self.worker[rank][name] = kept + residual[rank, where]
        return {name: mean[where] for name, where in pieces}

    def owed(self, rank, name):
        """What ``Handle.residual`` gives on a rank: the owner's part times n included."""
        owed = self.worker[rank][name].copy()
        for bucket, names in self.layout.items():
            if name not in names:
                continue
            plan = self._plan(self.owner[bucket].size)
            where = dict(self._pieces(bucket))[name]
            for tile, part in self._tiles(plan, where):
                if tile % self.nranks == rank:
                    begin = part.start - where.start
                    owed[begin : begin + part.stop - part.start] += (
                        F32(self.nranks) * self.owner[bucket][part]
                    )
        return owed

    def is_direct(self, bucket):
        """Whether a bucket is exchanged in one phase."""
        return self._plan(self.owner[bucket].size)["direct"]

    def _reduce(self, bucket, plan, tile, lane, residual, mean):
        weight = F32(1) / F32(self.nranks)
        total = None
        for rank in range(self.nranks):
            x = lane[rank, tile] + residual[rank, tile]
            q, scale = quantise(x)
            residual[rank, tile] = x - q * scale
            part = q * (scale * weight)
            total = part if total is None else total + part
        if not plan["direct"]:
            total = total + self.owner[bucket][tile]
            q, scale = quantise(total)
            self.owner[bucket][tile] = total - q * scale
            total = q * scale
        mean[tile] = total

    def _plan(self, nelems):
        return _core.plan_lane(Int8(block=BLOCK).to_tuple(), 1, nelems, self.nranks, 0, 20)

    def _pieces(self, bucket):
        pieces, at = [], 0
        for name in self.layout[bucket]:
            nelems = self.worker[0][name].size
            pieces.append((name, slice(at, at + nelems)))
            at += nelems
        return pieces

    @staticmethod
    def _tiles(plan, where):
        """Yield (tile, its part of a slice of the lane)."""
        size = plan["tile_nelems"]
        for tile in range(where.start // size, -(-where.stop // size)):
            yield tile, slice(max(where.start, tile * size), min(where.stop, (tile + 1) * size))
