#!/usr/bin/env python3
"""Memory of a long run: the resident set of a small DDP model over thousands of rounds.

Exit status 1 if the resident set of any rank grows by more than --bound-mib in the second half of
the run. The first half does not count: torch and the allocators take some 3 MiB until they settle,
with plain DDP too (--spec plain).
"""

import argparse
import os
import sys
from pathlib import Path

import _common
import ddp_step
import torch
import torch.distributed as dist


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = _common.argument_parser(__doc__, link_default="loopback")
    parser.add_argument(
        "--spec",
        default="int8",
        help=f"agentcomm spec; {ddp_step.PLAIN} and {ddp_step.FP16_HOOK} show what torch does",
    )
    parser.add_argument("--rounds", type=_common.positive, default=2000, help="DDP rounds")
    parser.add_argument("--every", type=_common.positive, default=200, help="rounds per report")
    parser.add_argument("--bound-mib", type=float, default=2.0, help="growth that is still flat")
    parser.add_argument(
        "--chunk-nbytes", type=_common.chunk_nbytes, help="for agentcomm.attach (its own default)"
    )
    args = parser.parse_args()
    if args.rounds < 4 * args.every:
        parser.error("--rounds must be at least four times --every: growth needs reports")
    # What ddp_step builds its model from: 1 MiB of gradients, in several buckets.
    args.layers, args.width, args.batch, args.bucket_cap_mb = 4, 256, 8, 0.25
    return args


def resident_nbytes() -> int:
    """Return the resident set of this process."""
    npages = int(Path("/proc/self/statm").read_text().split()[1])
    return npages * os.sysconf("SC_PAGE_SIZE")


def rank_main(args: argparse.Namespace) -> int:
    """Run the rounds, report, and say whether memory stayed flat."""
    env = _common.environment("rss", args)
    rank = dist.get_rank()
    if rank == 0:
        print(env)
        print(f"{args.spec}, {args.rounds} rounds; resident MiB per rank", flush=True)
    mode = ddp_step.build_mode(args.spec, args, args.bucket_cap_mb)
    torch.manual_seed(1 + rank)
    batch = torch.randn(args.batch, args.width)
    weights = torch.randn(args.batch, args.width)

    rounds: list[int] = []
    resident: list[list[int]] = []  # one row per report, one column per rank
    for number in range(1, args.rounds + 1):
        ddp_step.step(mode, batch, weights)
        if number % args.every == 0:
            rounds.append(number)
            resident.append(_common.gather(resident_nbytes()))
            if rank == 0:
                row = "".join(f"{nbytes / 2**20:10.2f}" for nbytes in resident[-1])
                print(f"round {number:6d}{row}", flush=True)
    if mode.handle:
        mode.handle.close()

    half = len(rounds) // 2 - 1
    growth = [last - first for first, last in zip(resident[half], resident[-1], strict=True)]
    flat = max(growth) <= args.bound_mib * 2**20
    if rank == 0:
        per_round = max(growth) / (rounds[-1] - rounds[half])
        print(
            f"result: {'flat' if flat else 'NOT FLAT'}: {max(growth) / 2**20:+.2f} MiB from round "
            f"{rounds[half]} to {rounds[-1]} on the worst rank ({per_round:+.0f} bytes per round), "
            f"bound {args.bound_mib:g} MiB"
        )
        result = {
            "group": "rss",
            "name": args.spec,
            "rounds": rounds,
            "resident_nbytes": resident,
            "growth_nbytes": growth,
            "flat": flat,
        }
        _common.write_json(args, env, [result])
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(_common.main(parse_args(), rank_main))
