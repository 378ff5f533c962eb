"""Compare plain DDP, torch's fp16 hook and agentcomm's int8 on a small GPT: `make demo`.

First, each mode trains `char_gpt.py` over two processes of this machine, from the same seed, on the
same batches, for the same number of steps; the results are printed as a table and drawn in
demo_out/loss.png, loss against bytes sent and against time.

Then the time of a step is measured with the modes taking turns, so that a busy phase of the machine
hits all of them: once between the two processes as they are, where no network is in the way, and,
as root on Linux with iproute2, once with each process in a network namespace of its own behind a
link shaped to 1 Gbit/s.

Exit status: 0 if int8 kept its promise in this run (below), 1 if not or if a run failed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
OUT_DIR = HERE.parent / "demo_out"
NETLAB = HERE.parent / "benchmarks" / "netlab.sh"
NRANKS = 2
RUN_TIMEOUT_S = 900
NTURNS, NSTEPS_PER_TURN = 6, 4  # the first turn, and the first step of each, are not timed
MODES = {"plain": "plain DDP", "fp16": "torch's fp16 hook", "int8": "agentcomm int8"}
# What int8 promises: how much worse than plain's its validation loss may be at equal steps, and how
# many times fewer bytes it sends at least.
WORSE_FRAC_MAX = 0.005
RATIO_MIN = 3.9

Results = dict[str, dict[str, Any]]  # by mode


class DemoError(Exception):
    """A run of the demo failed."""


def run(command: list[str]) -> None:
    """Run `command`; what it prints stays visible, a failure or a timeout is a DemoError."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # The addresses in a namespace have no names, and c10d warns about each.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    process = subprocess.Popen(command, env=env)
    try:
        status = process.wait(RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"no end after {RUN_TIMEOUT_S} s: {' '.join(command)}") from None
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun and netlab.sh end their ranks at this, not at SIGKILL
            process.wait(60)
    if status != 0:
        raise DemoError(f"status {status}, see the output above: {' '.join(command)}")


def run_for_json(launcher: list[str], script: Path, out: Path, options: list[str]) -> Any:
    """Run the ranks that `launcher` starts and return what they wrote to `out`."""
    out.unlink(missing_ok=True)  # so that an old result never passes for a new one
    run([*launcher, str(script), *options, str(out)])
    return json.loads(out.read_text(encoding="utf-8"))


def interface_nbytes() -> int:
    """Return what left this process's network interface so far, TCP/IP headers included.

    A cross-check of the bytes that are counted or computed. It means something only where nothing
    else uses the interface, as in a network namespace; hence 0 for the loopback interface.
    """
    name, counters = os.environ.get("GLOO_SOCKET_IFNAME", "lo"), Path("/proc/net/dev")
    if name == "lo" or not counters.exists():
        return 0
    lines = (line.partition(":") for line in counters.read_text(encoding="ascii").splitlines())
    fields = {interface.strip(): numbers.split() for interface, _, numbers in lines}
    return int(fields[name][8]) if name in fields else 0


def time_steps(out: Path) -> None:
    """Be one rank of the step-time measurement: all modes in one process, taking turns."""
    import char_gpt
    import torch.distributed as dist

    args = char_gpt.parse_args([])
    dist.init_process_group("gloo")
    text, _ = char_gpt.load_corpus()
    built = {mode: char_gpt.build(args)[1:] for mode in MODES}
    handles = {mode: char_gpt.exchange_gradients(ddp, mode) for mode, (ddp, _) in built.items()}
    results: Results = {mode: {"step_s": [], "interface_nbytes": []} for mode in MODES}
    for turn in range(NTURNS):
        for mode, (ddp, optimizer) in built.items():
            for step in range(turn * NSTEPS_PER_TURN, (turn + 1) * NSTEPS_PER_TURN):
                batch = char_gpt.batch_at(text, args, step)
                dist.barrier()
                sent_before, start = interface_nbytes(), time.perf_counter()
                char_gpt.train_step(ddp, optimizer, *batch)
                step_s, sent_after = time.perf_counter() - start, interface_nbytes()
                if turn > 0 and step % NSTEPS_PER_TURN > 0:
                    results[mode]["step_s"].append(step_s)
                    results[mode]["interface_nbytes"].append(sent_after - sent_before)
    nsteps = NTURNS * NSTEPS_PER_TURN
    for mode, (ddp, _) in built.items():
        sent, _ = char_gpt.sent_and_dense_nbytes(ddp, mode, handles[mode], nsteps)
        results[mode]["sent_nbytes_per_step"] = sent / nsteps
        if handles[mode] is not None:
            handles[mode].close()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows under a header: the first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def ms(seconds: float) -> str:
    """Return a time in milliseconds, for a table."""
    return f"{1e3 * seconds:.1f}"


def mb(nbytes: float) -> str:
    """Return a number of bytes in MB, for a table."""
    return f"{nbytes / 1e6:.2f}"


def training_table(results: Results) -> None:
    """Print what the training runs measured."""
    plain = results["plain"]
    rows = []
    for mode, result in results.items():
        loss = result["final_val_loss"]
        against_plain = f"{100 * (loss / plain['final_val_loss'] - 1):+.2f} %"
        rows.append(
            [
                MODES[mode],
                ms(result["step_s_median"]),
                ms(result["step_s_iqr"]),
                mb(result["sent_nbytes_per_step"]),
                f"{result['ratio']:.2f}x",
                f"{loss:.4f}",
                "-" if mode == "plain" else against_plain,
            ]
        )
    print(
        f"\nTraining: {plain['nparameters'] / 1e6:.1f} M parameters, {plain['step']} steps, "
        f"{plain['nranks']} processes on {plain['cores']} cores, loopback, "
        f"torch {plain['torch']}\n"
    )
    print_table(
        ["", "ms/step", "IQR", "MB/step/rank", "fewer bytes", "val. loss", "against plain"], rows
    )


def turns_s(result: dict[str, Any]) -> list[float]:
    """Return the seconds of each turn's timed steps."""
    times, per_turn = result["step_s"], NSTEPS_PER_TURN - 1
    return [sum(times[i : i + per_turn]) for i in range(0, len(times), per_turn)]


def step_table(link: str, results: Results) -> None:
    """Print what the modes measured in turns over `link`."""
    plain_turns_s = turns_s(results["plain"])
    rows = []
    for mode, result in results.items():
        low, median_s, high = statistics.quantiles(result["step_s"], n=4)
        # Of neighbouring turns, so that slow phases of the machine cancel out.
        speeds = [plain / own for plain, own in zip(plain_turns_s, turns_s(result), strict=True)]
        on_wire = statistics.median(result["interface_nbytes"])
        rows.append(
            [
                MODES[mode],
                ms(median_s),
                ms(high - low),
                f"{statistics.median(speeds):.2f}x",
                mb(result["sent_nbytes_per_step"]),
                mb(on_wire) if on_wire else "-",
            ]
        )
    nsteps = len(results["plain"]["step_s"])
    print(f"\nStep time over {link}: the modes taking turns, {nsteps} timed steps each\n")
    print_table(["", "ms/step", "IQR", "speed", "MB/step/rank", "MB/step at interface"], rows)


def plot(results: Results, path: Path) -> None:
    """Draw training loss (thin) and validation loss (dots) against bytes and against time."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    xs = [("sent_nbytes", 1e6, "MB sent per rank"), ("train_s", 1.0, "seconds of training")]
    for axis, (key, unit, label) in zip(axes, xs, strict=True):
        for colour, (mode, result) in zip(("C7", "C0", "C3"), results.items(), strict=True):
            train = result["train_losses"]
            # Nothing is sent before the first step, and a logarithmic axis has no place for 0.
            held_out = [point for point in result["validations"] if point["step"] > 0]
            axis.plot(
                [point[key] / unit for point in train], [point["loss"] for point in train],
                color=colour, linewidth=0.8, alpha=0.5,
            )  # fmt: skip
            axis.plot(
                [point[key] / unit for point in held_out], [point["loss"] for point in held_out],
                color=colour, marker="o", markersize=4, label=MODES[mode],
            )  # fmt: skip
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_xscale("log")
    axes[0].set_ylabel("loss (nats per byte)")
    axes[0].legend(loc="lower left", title="validation; thin: training")
    plain = results["plain"]
    figure.suptitle(
        f"GPT of {plain['nparameters'] / 1e6:.1f} M parameters, {plain['nranks']} processes, "
        f"{plain['step']} steps each"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def network_obstacle(rate: str) -> str | None:
    """Return why links cannot be shaped here, or None if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "not root on Linux"
    for tool in ("bash", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"no command {tool}"
    # Being root is not enough in many containers: only trying it tells.
    probe = subprocess.run(
        ["bash", str(NETLAB), str(NRANKS), rate, "true"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if probe.returncode != 0:
        return (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
    return None


def kept_promise(plain: dict[str, Any], int8: dict[str, Any]) -> bool:
    """Say and return whether int8 kept its promise against `plain`."""
    ratio: float = int8["ratio"]
    worse_frac: float = int8["final_val_loss"] / plain["final_val_loss"] - 1
    kept = {True: "kept", False: "NOT KEPT"}
    print(
        f"\nint8 against plain, at equal steps: validation loss {100 * worse_frac:+.2f} % "
        f"(promise: at most {100 * WORSE_FRAC_MAX:+.1f} %, {kept[worse_frac <= WORSE_FRAC_MAX]}); "
        f"{ratio:.2f}x fewer bytes (promise: {RATIO_MIN}x, {kept[ratio >= RATIO_MIN]})"
    )
    return worse_frac <= WORSE_FRAC_MAX and ratio >= RATIO_MIN


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nsteps", type=int, default=400, help="of training, in each mode")
    parser.add_argument("--rate", default="1gbit", help="of the shaped links, in tc's words")
    parser.add_argument("--time-steps", type=Path, help=argparse.SUPPRESS)  # see time_steps()
    args = parser.parse_args(argv)
    if args.time_steps:
        time_steps(args.time_steps)
        return 0
    start = time.monotonic()
    OUT_DIR.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(NRANKS)]
    netlab = ["bash", str(NETLAB), str(NRANKS), args.rate, sys.executable]
    try:
        results = {
            mode: run_for_json(
                torchrun, HERE / "char_gpt.py", OUT_DIR / f"{mode}.json",
                ["--mode", mode, "--nsteps", str(args.nsteps), "--out"],
            )
            for mode in MODES
        }  # fmt: skip
        training_table(results)
        kept = kept_promise(results["plain"], results["int8"])
        plot(results, OUT_DIR / "loss.png")
        print(f"The curves are in {OUT_DIR / 'loss.png'}.")
        links = [("loopback", torchrun)]
        obstacle = network_obstacle(args.rate)
        if obstacle is None:
            links.append((f"links of {args.rate}", netlab))
        for link, launcher in links:
            out = OUT_DIR / f"steps_{link.split()[-1]}.json"
            step_table(link, run_for_json(launcher, Path(__file__), out, ["--time-steps"]))
        if obstacle is not None:
            print(
                f"\nStep times over links of {args.rate} are left out ({obstacle}): for them, run "
                "this as root on Linux with iproute2, where network namespaces are allowed."
            )
    except DemoError as error:
        print(f"demo: a run failed: {error}", file=sys.stderr)
        return 1
    print(f"\nThe demo took {time.monotonic() - start:.0f} s.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
