"""What a model will need and what the machine has left, said before the memory is taken; and who says it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.core.errors import Unavailable

log = logging.getLogger("strop.models")


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers; its errors reach us as exceptions."""
    from transformers.utils import logging as messages

    messages.disable_progress_bar()
    messages.set_verbosity_error()


def available_bytes() -> int | None:
    """Memory that can be had without swapping, within this process's control group; None where it is not known."""
    found = [value for value in (_machine_bytes(), _group_bytes()) if value is not None]
    return min(found, default=None)


def check_memory(needed: int, what: str) -> None:
    """Raises Unavailable where `what` needs more bytes than there are; else says the estimate in the log."""
    available = available_bytes()
    log.info("%s needs about %s%s", what, _size(needed), "" if available is None else f" of {_size(available)} free")
    if available is not None and needed > available:
        raise Unavailable(
            f"{what} needs about {_size(needed)} of memory and {_size(available)} are free; "
            "take a smaller model, --dtype bfloat16, or a machine with more"
        )


def free_memory() -> None:
    """Gives back what models that nobody holds any more took, of the GPU too."""
    import gc
    import sys

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def memory_told(doing: str) -> Iterator[None]:
    """Within it a lack of memory is Unavailable, with what was being done, and no traceback."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "out of memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise Unavailable(f"out of memory while {doing}; shorter sequences or a narrower --dtype help") from None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _group_bytes() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return None
    if limit == "max":
        return None
    # Cached file pages count as used, and give way.
    cached = int(statistics[statistics.index("inactive_file") + 1]) if "inactive_file" in statistics else 0
    return int(limit) - int(used) + cached
