"""linear_logprob beside log_softmax(logits).gather, and beside the idea of TRL's selective_log_softmax.

Run as a script: prints a table line each. Arguments choose some cases by words of their names ("small", "large";
"forward", "backward", "matrix"; "float32", "bfloat16"); all of them take most of an hour on two cores.

Every form runs in a process of its own, so that its peak of resident memory is its own. The first call of each warms up
and is the one whose memory counts; then they take turns, one at a time, and each time is the median of the rounds.
What the matrix's own gradient takes is left out of the memory, since both return it. On a machine that others use, too,
STROP_BENCH_CLOCK=cpu counts the seconds of one thread instead of those of the wall.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch

TOKENS = 2048
SHAPES = {"small": (576, 49_152), "large": (2048, 151_936)}
FORMS = {"ours": "linear_logprob", "softmax": "log_softmax.gather", "trl": "logsumexp row by row (TRL)"}
# Of the time beside, and of the memory; the matrix's gradient has no bar of time.
BARS = {"forward": (0.9, 0.1), "backward": (1.1, 0.1), "matrix": (None, 0.2)}
ROUNDS = int(os.environ.get("STROP_BENCH_ROUNDS", "5"))
CPU_CLOCK = os.environ.get("STROP_BENCH_CLOCK") == "cpu"
MIB = 2**20


def softmax(hidden, weight, targets):
    """The textbook's form, in float32."""
    return torch.log_softmax(hidden.float() @ weight.float().T, -1).gather(1, targets[:, None]).squeeze(1)


def trl(hidden, weight, targets):
    """Logits of the targets less the log-sum-exp, taken row by row: no second [T, V] in the forward pass."""
    logits = hidden.float() @ weight.float().T
    normaliser = torch.stack([row.logsumexp(0) for row in logits])
    return logits.gather(1, targets[:, None]).squeeze(1) - normaliser


def rounded(hidden, weight, targets):
    """What a bfloat16 model's own head does: the product is rounded to bfloat16 before the softmax."""
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)


def memory_mib(name: str) -> float:
    """A line of this process's status: VmRSS or VmHWM."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024 / MIB


def child(shape: str, mode: str, dtype: str, form: str) -> None:
    """Runs once, and again for each line of stdin: a line of JSON with milliseconds, the first's MiB, and norms."""
    from strop.kernels.linear_logprob import linear_logprob

    size, vocabulary = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    kind = {"dtype": getattr(torch, dtype), "generator": generator}
    hidden = torch.randn(TOKENS, size, **kind).requires_grad_(mode != "forward")
    # In place: a temporary of this size would be memory to fall back on.
    weight = torch.randn(vocabulary, size, **kind).mul_(2 * size**-0.5).requires_grad_(mode == "matrix")
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    forms = {"ours": lambda *args: linear_logprob(*args)[0], "softmax": softmax, "trl": trl, "rounded": rounded}
    leaves = [one for one in (hidden, weight) if one.requires_grad]
    # Not a plain sum: its gradient would be the same for every token.
    upstream = torch.linspace(-1, 1, TOKENS)
    clock = time.process_time if CPU_CLOCK else time.perf_counter
    if CPU_CLOCK:
        torch.set_num_threads(1)  # threads that wait for each other spend seconds, too
    extra = None
    while extra is None or sys.stdin.readline():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = memory_mib("VmRSS")
        started = clock()
        logprobs = forms[form](hidden, weight, targets)
        grads = torch.autograd.grad((logprobs * upstream).sum(), leaves) if leaves else ()
        ms = (clock() - started) * 1000
        if extra is None:
            own = weight.numel() * weight.element_size() / MIB if mode == "matrix" else 0
            extra = memory_mib("VmHWM") - before - own
        norms = [torch.linalg.vector_norm(one.detach(), dtype=torch.float64).item() for one in (logprobs, *grads)]
        print(json.dumps({"ms": ms, "mib": extra, "norms": norms}), flush=True)
        del logprobs, grads


def turns(shape: str, mode: str, dtype: str, forms: tuple[str, ...]) -> dict[str, dict]:
    """For each form the median time, the extra memory, and the norms of the last run."""
    children = {}
    for form in forms:
        command = [sys.executable, "-P", __file__, "child", shape, mode, dtype, form]
        children[form] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children[form].stdout.readline()
    found: dict[str, list[dict]] = {form: [] for form in forms}
    for _ in range(ROUNDS):
        for form, process in children.items():
            process.stdin.write("\n")
            process.stdin.flush()
            found[form].append(json.loads(process.stdout.readline()))
        print(shape, mode, dtype, {form: round(runs[-1]["ms"]) for form, runs in found.items()}, file=sys.stderr)
    for process in children.values():
        process.stdin.close()
        process.wait()
    return {form: {**runs[-1], "ms": statistics.median(one["ms"] for one in runs)} for form, runs in found.items()}


def line(*cells: str, ok: bool) -> None:
    """One line of the table."""
    print(f"| {' | '.join(cells)} | {'ok' if ok else 'MISSED'} |", flush=True)


def bench(shape: str, mode: str, dtype: str) -> None:
    """The lines of one case."""
    time_bar, memory_bar = BARS[mode]
    forms = tuple(FORMS) if dtype == "float32" else ("ours", "softmax", "rounded")
    found = turns(shape, mode, dtype, forms)
    ours = found.pop("ours")
    size, vocabulary = SHAPES[shape]
    passes = {"forward": "forward", "backward": "forward and backward", "matrix": "with the matrix's gradient"}[mode]
    what = f"linear_logprob {TOKENS:,} x {size:,} x {vocabulary:,} {dtype}, {passes}"
    for form, beside in found.items():
        apart = max(abs(one / other - 1) for one, other in zip(ours["norms"], beside["norms"], strict=True))
        speed, memory = ours["ms"] / beside["ms"], ours["mib"] / beside["mib"]
        if form == "rounded":
            print(f"{what}: a product rounded to bfloat16 takes {beside['ms']:.0f} ms and {beside['mib']:.0f} MiB")
            continue
        assert apart < (1e-4 if dtype == "float32" else 1e-2), (what, ours["norms"], beside["norms"])
        bars = [f"at most {memory_bar} of the memory"]
        if time_bar is not None:
            bars.insert(0, f"at most {time_bar} of the {'CPU time' if CPU_CLOCK else 'time'}")
        line(
            what,
            f"{ours['ms']:.0f} ms, {ours['mib']:.0f} MiB",
            f"{FORMS[form]}: {beside['ms']:.0f} ms, {beside['mib']:.0f} MiB ({speed:.2f}x, {memory:.3f}x)",
            ", ".join(bars),
            ok=memory <= memory_bar and (time_bar is None or speed <= time_bar),
        )


def main(words: list[str]) -> None:
    """Prints the table's lines of the cases that have all the words."""
    cases = [*product(SHAPES, BARS, ["float32"]), ("small", "forward", "bfloat16"), ("small", "backward", "bfloat16")]
    for case in cases:
        if set(words) <= set(case):
            bench(*case)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main(sys.argv[1:])
