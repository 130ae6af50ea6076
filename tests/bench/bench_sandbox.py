"""Sandboxes: how long an episode waits for a container, and for each command in it.

Run as a script: prints a table line each. Medians of interleaved turns: ours, and Docker's own command line by hand.
It needs an engine (DOCKER_HOST, or bash .pkg/docker.sh start) and an image (STROP_TEST_IMAGE, or strop-test:minbase).
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import subprocess
import threading
import time

from strop.core.errors import StropError
from strop.core.sandbox.docker import DockerSandboxes
from strop.core.sandbox.process import ProcessSandboxes
from strop.core.sandbox.protocol import Sandbox, SandboxSpec

IMAGE = os.environ.get("STROP_TEST_IMAGE", "strop-test:minbase")
TURNS = 9
EXECS = 5
START_BAR_S = 0.7
SIDE_BY_SIDE = 8
SLEEP_S = 10.0


def by_hand(*words: str) -> float:
    """Wall time in seconds of one `docker` command."""
    started = time.perf_counter()
    subprocess.run(["docker", *words], check=True, capture_output=True)
    return time.perf_counter() - started


def exec_s(sandbox: Sandbox) -> float:
    """Wall time in seconds of one command that does nothing."""
    started = time.perf_counter()
    assert sandbox.exec(["true"]).exit_code == 0
    return time.perf_counter() - started


def episodes_s(driver: DockerSandboxes) -> float:
    """Wall time in seconds of several episodes side by side, each a container and a command that sleeps."""

    def episode() -> None:
        with driver.start(SandboxSpec(image=IMAGE)) as sandbox:
            sandbox.exec(f"sleep {SLEEP_S}")

    threads = [threading.Thread(target=episode) for _ in range(SIDE_BY_SIDE)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def main() -> None:
    """Prints the lines."""
    logging.getLogger("strop.sandbox").setLevel(logging.ERROR)
    times: dict[str, list[float]] = {}

    def took(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    with ProcessSandboxes() as processes, processes.start(SandboxSpec()) as plain:
        for _ in range(TURNS * EXECS):
            took("process exec", exec_s(plain))
    try:
        driver = DockerSandboxes()
    except StropError as error:
        print(f"not measured: {error}")
        return
    has_client = shutil.which("docker") is not None
    with driver:
        for turn in range(TURNS + 1):
            started = time.perf_counter()
            with driver.start(SandboxSpec(image=IMAGE)) as sandbox:
                start_s = time.perf_counter() - started
                execs = [exec_s(sandbox) for _ in range(EXECS)]
                hand_execs = [by_hand("exec", sandbox.name, "true") for _ in range(EXECS)] if has_client else []
            if turn:
                took("start", start_s)
                times.setdefault("exec", []).extend(execs)
                times.setdefault("exec by hand", []).extend(hand_execs)
            if has_client:
                name = f"strop-bench-{os.getpid()}"
                try:
                    seconds = by_hand("run", "-d", "--init", "--network=none", "--name", name, IMAGE, "sleep", "60")
                finally:
                    subprocess.run(["docker", "rm", "-f", name], capture_output=True)
                if turn:
                    took("start by hand", seconds)
        together_s = episodes_s(driver)
    ms = {name: statistics.median(values) * 1000 for name, values in times.items() if values}
    beside = {name: f"docker {words} by hand {ms[f'{name} by hand']:.0f} ms" if f"{name} by hand" in ms else ""
              for name, words in (("start", "run -d"), ("exec", "exec"))}  # fmt: skip
    verdict = "ok" if ms["start"] <= START_BAR_S * 1000 else "MISSED"
    print(f"| a container, from start() to ready | {ms['start']:.0f} ms | {beside['start']} "
          f"| at most {START_BAR_S * 1000:.0f} ms | {verdict} |")  # fmt: skip
    print(f"| a command in a container | {ms['exec']:.0f} ms | {beside['exec']} | | |")
    print(f"| a command in the driver process | {ms['process exec']:.0f} ms | | | |")
    bar_s = 1.3 * SLEEP_S
    verdict = "ok" if together_s <= bar_s else "MISSED"
    what = f"{SIDE_BY_SIDE} containers side by side that sleep {SLEEP_S:g} s, made and removed"
    print(f"| {what} | {together_s:.1f} s | the sleep {SLEEP_S:g} s | at most {bar_s:.1f} s | {verdict} |")


if __name__ == "__main__":
    main()
