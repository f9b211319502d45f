"""Data that expose mistakes of a softmax. Each batch row, or sequence, has its kind of logits."""

import numpy as np

STEP = 12 * np.log(2)  # nats between each 64 keys and the next: more than a row max may lag by
ROOT = 8.0  # q in the column that adds to logits

# Nats that are added to the logits of n keys. In some kinds the row max rises or falls by a factor
# of 2**12 from tile to tile. Where each key has more than the one before, one key too many shows in
# the result. Logits far from 0 on one side expose a row max that starts at 0.
KINDS = {
    "rising": lambda n: np.arange(n) * (STEP / 64),
    "falling": lambda n: np.arange(n) * (-STEP / 64),
    "negative": lambda n: np.full(n, -200.0),
    "positive": lambda n: np.full(n, 200.0),
    "equal": lambda n: np.zeros(n),  # and all keys are the same
}
NUMBER = len(KINDS)


def sinks_without_end(sinks: np.ndarray) -> np.ndarray:
    """Sinks of which the first is inf and the last, where there are more than two, -inf."""
    sinks = np.array(sinks)
    sinks[-1:] = -np.inf if len(sinks) > 2 else sinks[-1:]
    sinks[:1] = np.inf
    return sinks


def hardened(q: np.ndarray, k: np.ndarray, scale: float, keys: int) -> tuple[np.ndarray, ...]:
    """q and k [M, .., H] with logits of these kinds, in turns over M. `keys`: the axis of k along
    which its rows lie.
    """
    q, k = q.copy(), k.copy()
    q[..., -1] = ROOT
    for m, kind in zip(range(len(k)), list(KINDS) * len(k), strict=False):
        rows = np.moveaxis(k[m], keys - 1, 0)  # a view
        added = KINDS[kind](len(rows)) / (ROOT * scale)
        rows[..., -1] = added.reshape(-1, *[1] * (rows.ndim - 2)).astype(k.dtype)
        if kind == "equal":
            unknown = np.isnan(rows.astype(np.float32))
            rows[:] = np.where(unknown, rows, rows[:1])
    return q, k
