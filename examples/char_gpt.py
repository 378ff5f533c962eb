"""Train a small byte-level GPT with DDP on the source text of the Python standard library.

Run it over two processes, with any way to exchange the gradients:

    torchrun --nproc-per-node 2 examples/char_gpt.py --mode plain
    torchrun --nproc-per-node 2 examples/char_gpt.py --mode fp16     # torch's own hook
    torchrun --nproc-per-node 2 examples/char_gpt.py --mode int8     # any agentcomm spec

Only `exchange_gradients` differs between the modes: data, seed, number of steps and optimizer
are the same, so losses at equal steps can be compared. `--out FILE` writes what was measured
as JSON, `--checkpoint FILE` saves, `--resume` goes on from there.

Clock: training steps alone; validation, logging and checkpoints stop it, in every mode.
Bytes: what rank 0 sends for its gradients. agentcomm counts them; dense gradients are a ring
allreduce, 2 (n - 1) / n times the gradient's bytes; torch's fp16 hook sends half of that.

Determinism: the batch is a function of (seed, step, rank) and there is no dropout, so the step
number is all the random state that a checkpoint needs.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

VOCAB_NTOKENS = 256  # a token is a byte
HEAD_NELEMS = 64
CORPUS_CAP_NBYTES = 4_000_000
LOG_NSTEPS = 10
UNTIMED_NSTEPS = 5  # DDP rebuilds its buckets after the first step; caches and buffers settle
EXCLUDED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` with its halves turned into each other by the angle of each position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block without biases: nearly all parameters are large matrices."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attn_out = nn.Linear(d_model, d_model, bias=False)
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.mlp_in = nn.Linear(d_model, 4 * d_model, bias=False)
        self.mlp_out = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend, then transform; `cos` and `sin` are (ntokens, HEAD_NELEMS / 2)."""
        batch, ntokens, d_model = x.shape
        heads = self.qkv(self.norm_attn(x)).view(batch, ntokens, 3, -1, HEAD_NELEMS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, ntokens, d_model))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return x


class GPT(nn.Module):
    """Decoder over bytes: rotary positions, the output layer shares the embedding's weight."""

    def __init__(self, nlayers: int, d_model: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_NTOKENS, d_model)
        self.blocks = nn.ModuleList(Block(d_model) for _ in range(nlayers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, VOCAB_NTOKENS, bias=False)
        self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # Each block adds to the residual stream twice; this keeps the sum's variance.
                into_residual = name.endswith(("attn_out.weight", "mlp_out.weight"))
                nn.init.normal_(param, std=0.02 / (math.sqrt(2 * nlayers) if into_residual else 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        frequencies = 10_000.0 ** (-torch.arange(HEAD_NELEMS // 2) / (HEAD_NELEMS // 2))
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB_NTOKENS), targets.reshape(-1))


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the training and the held-out text, one uint8 tensor each.

    The hash of a file's name decides its place and its side, so that the text is mixed, the
    same on all ranks, and no file is on both sides.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if EXCLUDED_DIRS.isdisjoint(relative.parts):
            paths.append((hashlib.sha256(relative.as_posix().encode()).digest(), path))
    train, held_out = bytearray(), bytearray()
    for digest, path in sorted(paths):
        if len(train) >= CORPUS_CAP_NBYTES:
            break
        (held_out if digest[-1] < 16 else train).extend(path.read_bytes())  # 1 file in 16
    if not train or not held_out:
        raise SystemExit(f"char_gpt: no standard library source found under {root}")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows_at(data: Tensor, starts: Tensor, ntokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (the inputs, one byte later), each (starts, ntokens) int64."""
    text = data[starts[:, None] + torch.arange(ntokens + 1)].long()
    return text[:, :-1], text[:, 1:]


def batch_at(data: Tensor, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's batch: every epoch is a permutation, dealt out to the ranks."""
    rank, nranks = dist.get_rank(), dist.get_world_size()
    nwindows, per_step = (len(data) - 1) // args.ntokens, args.batch * nranks
    epoch, place = divmod(step, nwindows // per_step)
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    dealt = torch.randperm(nwindows, generator=generator)[place * per_step :][:per_step]
    return windows_at(data, dealt[rank::nranks] * args.ntokens, args.ntokens)


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, args: argparse.Namespace) -> float:
    """Return the loss over windows spread evenly over the held-out text, the same every time."""
    rank, nranks = dist.get_rank(), dist.get_world_size()
    last = len(data) - args.ntokens - 1
    starts = torch.linspace(0, last, args.val_nwindows, dtype=torch.float64).long()
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of windows
    for part in torch.split(starts[rank::nranks], 32):
        loss = model(*windows_at(data, part, args.ntokens)).item()
        total += torch.tensor([loss * len(part), len(part)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < args.warmup_nsteps:
        return float(args.lr * (step + 1) / args.warmup_nsteps)
    done_frac = (step - args.warmup_nsteps) / max(1, args.nsteps - args.warmup_nsteps)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * done_frac)))


def build(args: argparse.Namespace) -> tuple[GPT, DDP, torch.optim.Optimizer]:
    """Return the model, the same on every rank and in every mode, its DDP and its optimizer."""
    torch.manual_seed(args.seed)
    model = GPT(args.nlayers, args.d_model)
    # With DDP's default of 25 MB this small model would be one bucket: nothing could overlap.
    ddp = DDP(model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
    return model, ddp, torch.optim.AdamW(ddp.parameters(), args.lr, (0.9, 0.95), fused=True)


def exchange_gradients(ddp: DDP, mode: str) -> Any:
    """Choose how `ddp` exchanges its gradients; return agentcomm's handle, or None."""
    if mode == "plain":
        return None
    if mode == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return None
    import agentcomm  # here, so that the other modes run without it

    return agentcomm.attach(ddp, mode)


def sent_and_dense_nbytes(ddp: DDP, mode: str, handle: Any, nsteps: int) -> tuple[int, int]:
    """Return what this rank sent in `nsteps` steps, and what dense gradients would have been."""
    if handle is not None:
        stats = handle.stats()
        return stats.wire_nbytes, stats.dense_nbytes
    nranks = dist.get_world_size()
    grad_nbytes = sum(p.nbytes for p in ddp.parameters() if p.requires_grad)
    dense_nbytes = nsteps * 2 * (nranks - 1) * grad_nbytes // nranks
    return dense_nbytes // (2 if mode == "fp16" else 1), dense_nbytes


def train_step(
    ddp: DDP, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> float:
    """Do one step of training and return its loss on this rank."""
    optimizer.zero_grad()
    loss = ddp(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file and rename it: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temporary)
    os.replace(temporary, path)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that follow from the record of a run."""
    times, sent_nbytes = record["step_s"], record["sent_nbytes"]
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [math.nan] * 3
    return {
        "step_s_median": quartiles[1],
        "step_s_iqr": quartiles[2] - quartiles[0],
        "sent_nbytes_per_step": sent_nbytes / max(1, record["step"]),
        "ratio": record["dense_nbytes"] / sent_nbytes if sent_nbytes else 1.0,
        "final_val_loss": record["validations"][-1]["loss"] if record["validations"] else None,
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as `args` say and return what was measured; call it on every rank."""
    rank, nranks = dist.get_rank(), dist.get_world_size()
    train_text, held_out_text = load_corpus()
    model, ddp, optimizer = build(args)
    handle = exchange_gradients(ddp, args.mode)
    record: dict[str, Any] = dict.fromkeys(("step", "train_s", "sent_nbytes", "dense_nbytes"), 0)
    record |= {key: [] for key in ("train_losses", "validations", "step_s")}
    if args.resume and args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["handle"] is not None and hasattr(handle, "load_state_dict"):
            handle.load_state_dict(checkpoint["handle"])
        record = checkpoint["record"]
    first_step, before = record["step"], (record["sent_nbytes"], record["dense_nbytes"])

    def count_traffic() -> None:
        sent, dense = sent_and_dense_nbytes(ddp, args.mode, handle, record["step"] - first_step)
        record.update(sent_nbytes=before[0] + sent, dense_nbytes=before[1] + dense)

    def add_point(curve: str, loss: float) -> None:
        count_traffic()
        point = {key: record[key] for key in ("step", "train_s", "sent_nbytes")}
        record[curve].append(point | {"loss": loss})

    def save_checkpoint() -> None:
        count_traffic()
        # A collective of the handle, hence on every rank although only one of them writes.
        handle_state = handle.state_dict() if hasattr(handle, "state_dict") else None
        state: dict[str, Any] = {"model": model.state_dict(), "handle": handle_state}
        state |= {"optimizer": optimizer.state_dict(), "record": record}
        if rank == 0:
            write_atomically(args.checkpoint, lambda path: torch.save(state, path))

    def is_due(every_nsteps: int) -> bool:
        step = record["step"]
        return every_nsteps > 0 and (step % every_nsteps == 0 or step == args.nsteps)

    if args.val_every and first_step == 0:
        add_point("validations", validate(model, held_out_text, args))
    losses: list[float] = []
    progress = tqdm(range(first_step, args.nsteps), desc=args.mode, disable=rank > 0 or None)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = batch_at(train_text, args, step)
        start = time.perf_counter()
        losses.append(train_step(ddp, optimizer, tokens, targets))
        step_s = time.perf_counter() - start
        record.update(step=step + 1, train_s=record["train_s"] + step_s)
        if step - first_step >= UNTIMED_NSTEPS:
            record["step_s"].append(step_s)
        if is_due(LOG_NSTEPS):
            mean_loss = torch.tensor(losses, dtype=torch.float64).mean() / nranks
            dist.all_reduce(mean_loss)
            losses.clear()
            add_point("train_losses", mean_loss.item())
            progress.set_postfix(loss=f"{mean_loss.item():.3f}")
        if is_due(args.val_every):
            add_point("validations", validate(model, held_out_text, args))
        if args.checkpoint and is_due(args.checkpoint_every):
            save_checkpoint()
    if handle is not None:
        handle.close()
    nparameters = sum(p.numel() for p in model.parameters())
    result = {"mode": args.mode, "nranks": nranks, "torch": torch.__version__}
    result |= {"cores": os.cpu_count(), "nparameters": nparameters, "config": vars(args)}
    return result | summary(record) | record


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="plain", help="plain, fp16 or an agentcomm spec")
    parser.add_argument("--nsteps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--ntokens", type=int, default=64, help="bytes per window")
    parser.add_argument("--nlayers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--warmup-nsteps", type=int, default=20)
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--val-every", type=int, default=50, help="in steps; 0: never")
    parser.add_argument("--val-nwindows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file with the measurements")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="in steps")
    parser.add_argument("--resume", action="store_true", help="from --checkpoint, if it exists")
    args = parser.parse_args(argv)
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run one rank; torchrun, or whoever sets RANK and its companions, starts all of them."""
    args = parse_args(argv)
    dist.init_process_group("gloo")
    result = train(args)
    if dist.get_rank() == 0:
        if args.out:
            text = json.dumps(result, indent=1, default=str)
            write_atomically(args.out, lambda path: path.write_text(text, encoding="utf-8"))
        step_ms, loss = 1e3 * result["step_s_median"], result["final_val_loss"]
        print(f"{args.mode}: {step_ms:.0f} ms per step, validation loss {loss}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
