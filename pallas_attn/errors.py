"""Errors of calls that no implementation takes: each refusal, its reason and the remedy."""

import dataclasses

LONGEST_REPR = 200  # characters of a value in a message


def described(value: object) -> str:
    """A value in a message: the dtype and the shape of an array, not its numbers; the type of what
    is long otherwise.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"{value.dtype}{list(shape)}"
    text = repr(value)
    return text if len(text) <= LONGEST_REPR else f"a {type(value).__name__}"


@dataclasses.dataclass(frozen=True)
class Limit:
    """The reason why an implementation does not take a problem, and a remedy for the caller.

    Example::

        >>> pa.Limit("head dim 520", "use at most 512").remedy
        'use at most 512'
    """

    reason: str
    remedy: str


class UnsupportedError(NotImplementedError):
    """No implementation takes the problem: each candidate, its reason and a remedy.

    Wrong arguments are ValueErrors that name the argument.

    Example::

        >>> q = jax.ShapeDtypeStruct((1, 128, 2, 520), jnp.bfloat16)
        >>> try:
        ...     pa.check_for("sm90", pa.flash_attention, q, q, q)
        ... except pa.UnsupportedError as error:
        ...     print(error.limits["flash_fwd_sm90"].reason)
        head_dim is 520; it takes multiples of 8 up to 256
    """

    def __init__(self, headline: str, limits: dict[str, Limit]):
        self.limits = limits
        lines = [headline]
        for limit in dict.fromkeys(limits.values()):  # kernels with the same reason share lines
            names = ", ".join(name for name, its in limits.items() if its == limit)
            lines += [f"  {names}: {limit.reason}", f"    -> {limit.remedy}"]
        super().__init__("\n".join(lines))
        self._headline = headline

    def __reduce__(self):  # pickled; exceptions keep their message alone
        return type(self), (self._headline, self.limits)
