"""The one tolerance, of tests and benchmarks.

A result may be off by twice what the same mathematics loses when it is done naively in the same
dtype, and by the rounding of the result itself:

    |got - oracle| <= 2 max|naive - oracle| + rounding

The maximum is over a band of positions (0, 1, 2-3, 4-7, ...): under a causal mask the first rows
have the largest errors by far, and would excuse any in the rest.
"""

import numpy as np

FEW = 128  # rows of numbers, each with one rounding in common, that prove little together
# Terms that cancel to 0 have been added up in float32 by every implementation.
NOISE = 16 * float(np.finfo(np.float32).eps)


def allowed[Errors: (float, np.ndarray)](naive_error: Errors, rounding: Errors) -> Errors:
    """The largest error that passes."""
    return 2 * naive_error + rounding


def bands(live: np.ndarray) -> np.ndarray:
    """The band of each position: 0, 1, 2-3, 4-7, ..., merged where they hold few of the live rows
    that are counted for each position, since all errors of few rows may happen to be near 0.
    """
    doubling = np.frexp(np.arange(len(live)))[1]
    counts = np.bincount(doubling, live)
    group, held, groups = 0, 0.0, []
    for count in counts:
        if held >= FEW:
            group, held = group + 1, 0.0
        groups.append(group)
        held += count
    if held < FEW and group:  # the rest at the end
        groups = [min(each, group - 1) for each in groups]
    return np.array(groups)[doubling]


def worst_of_band(errors: np.ndarray, band: np.ndarray) -> np.ndarray:
    """For each position the largest of the errors in its band."""
    worst = np.zeros(band.max() + 1)
    np.maximum.at(worst, band, errors)
    return worst[band]
