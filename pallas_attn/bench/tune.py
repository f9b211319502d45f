"""Finding configurations: of all that compile and are right, the fastest becomes a row."""

from typing import Any

from pallas_attn import _problem
from pallas_attn.masks import Mask


def problem_of(kernel: str, facts: dict[str, Any], gpu: str) -> Any:
    """The problem that a tuning row of a kernel (its module name) describes."""
    facts = dict(facts)
    facts = {name: tuple(x) if isinstance(x, list) else x for name, x in facts.items()}
    if "mask" in facts:
        facts["mask"] = Mask(**facts["mask"])
    if kernel.startswith("flash"):
        op = "flash_backward" if "bwd" in kernel else "flash_forward"
        return _problem.AttentionProblem(op=op, gpu=gpu, scale=facts["head_dim"] ** -0.5, **facts)
    capacity = facts.pop("capacity")
    copies = facts["sequences"] if facts["kind"] == "per_sequence" else 1
    facts["capacities"] = (capacity,) * copies
    if kernel.startswith("append"):
        return _problem.AppendProblem(gpu=gpu, **facts)
    return _problem.DecodeProblem(gpu=gpu, scale=facts["head_dim"] ** -0.5, **facts)
