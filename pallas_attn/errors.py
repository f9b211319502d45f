"""What a call that cannot be served says: who refused, why, and what to do about it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limit:
    """Why one implementation cannot take a problem (`reason`), and what the caller can do
    (`remedy`).
    """

    reason: str
    remedy: str


class UnsupportedError(NotImplementedError):
    """No implementation takes the problem. The message names each candidate, its reason and a
    remedy.

    Wrong arguments are never reported this way: those are ValueErrors that name the argument.
    """

    def __init__(self, headline: str, limits: dict[str, Limit]):
        self.limits = limits
        lines = [headline]
        for name, limit in limits.items():
            lines += [f"  {name}: {limit.reason}", f"    -> {limit.remedy}"]
        super().__init__("\n".join(lines))
        self._headline = headline

    def __reduce__(self):  # between processes; an exception's own way is by its message alone
        return type(self), (self._headline, self.limits)
