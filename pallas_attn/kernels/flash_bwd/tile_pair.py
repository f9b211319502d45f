"""The gradient of a tile of scores, for all kernels of the backward."""

from pallas_attn.kernels.lang.types import RegisterTile


def d_scores(
    p: RegisterTile,
    dp: RegisterTile,
    delta: RegisterTile | None,
    slope: RegisterTile | None = None,
) -> RegisterTile:
    """dS = P (dP - delta), and times the derivative of softcap or of the score function, `slope`,
    if there is one: the gradient of scores, else of logits. `delta` has the shape of dP; None: dP
    has begun with -delta.
    """
    ds = p * (dp if delta is None else dp - delta)
    return ds if slope is None else ds * slope
