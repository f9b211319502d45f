"""Errors of calls that no implementation takes: who refused, why, and the remedy."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limit:
    """The reason why an implementation does not take a problem, and a remedy for the caller."""

    reason: str
    remedy: str


class UnsupportedError(NotImplementedError):
    """No implementation takes the problem: each candidate, its reason and a remedy.

    Wrong arguments are ValueErrors that name the argument.
    """

    def __init__(self, headline: str, limits: dict[str, Limit]):
        self.limits = limits
        lines = [headline]
        for name, limit in limits.items():
            lines += [f"  {name}: {limit.reason}", f"    -> {limit.remedy}"]
        super().__init__("\n".join(lines))
        self._headline = headline

    def __reduce__(self):  # pickled; exceptions keep their message alone
        return type(self), (self._headline, self.limits)
