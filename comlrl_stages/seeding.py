"""Named random streams.

Every draw in the project comes from a stream that is a function of the experiment's seed and of names (source, round,
step, task id, turn, node, sample, agent, ...). There is no global generator: adding a task, an agent or a method
changes no other draw, and the same names give the same numbers in any process, shard or order.
"""

import hashlib
import json

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the generator that belongs to `seed` and `names`.

    The key is the first 128 bits of the SHA-256 of the canonical JSON of all names, so `("ab", "c")` and `("a", "bc")`
    or `1` and `"1"` are different streams.
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, names)))


def torch_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for a `torch.Generator` that belongs to `seed` and `names`."""
    return _key(seed, names) >> 65


def _key(seed: int, names: tuple[str | int, ...]) -> int:
    canonical = json.dumps([seed, *names], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:16], "big")
