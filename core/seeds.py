"""Seeds derived by hash, never by position or by Python's own hash(), so that they are the same on every machine."""

from hashlib import blake2b

# JSON numbers above 2**53 are read differently by different readers, so a seed stays below.
SEED_BITS = 53


def derive_seed(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2**53) for one purpose under `seed`, e.g. `derive_seed(seed, task_id, sample)`.

    Parts are length-prefixed before hashing, so ("ab", "c") and ("a", "bc") differ.

    >>> derive_seed(1, "task", 0) == derive_seed(1, "task", 0) != derive_seed(1, "task", 1)
    True
    """
    digest = blake2b(digest_size=8)
    for part in (seed, *parts):
        data = f"{type(part).__name__}:{part}".encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)
