"""Drive pallas_attn on this machine.

python run.py                                  check every operation here, beside the reference
python run.py --flagfile=configs/NAME.cfg      the same with flags from a file
python run.py --task=bench --op=forward --cases=grid --out=results/mine.jsonl
python run.py --task=tune --cases=h128_causal*
"""

import os
import sys

from absl import app, flags

_TASK = flags.DEFINE_enum(
    "task",
    "parity",
    ["parity", "bench", "tune"],
    "What to do. parity: run a small case of every operation beside the reference. bench: time "
    "checked kernels beside their peers (wants a GPU). tune: search the settings of a kernel.",
)
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation",
    None,
    "Which implementation to run: sm90, sm80 or reference. Default: the fastest that takes each "
    "problem on this machine.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "parity: the type of the inputs."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of all random inputs.", lower_bound=0)


def main(argv: list[str]) -> int:
    if argv[1:]:
        return _refuse(f"run.py takes flags only, got {argv[1]!r}; see python run.py --help")
    names = (None, "sm90", "sm80", "reference")
    if _IMPLEMENTATION.value not in names:
        return _refuse(
            f"--implementation: expected sm90, sm80 or reference, got {_IMPLEMENTATION.value!r}"
        )
    return {"parity": _parity}[_TASK.value]()


def _parity() -> int:
    """The table; exit status 0 where every row that can run here held, 1 where one did not."""
    import jax

    import pallas_attn
    from pallas_attn.bench import parity

    device = jax.devices()[0]
    where = f"{device.device_kind} ({len(jax.devices())} of them)" if device.platform != "cpu" else "CPU"
    _say(f"pallas_attn on jax {jax.__version__}, {where}")
    _say(f"implementation: {_IMPLEMENTATION.value or 'the fastest that takes each problem'}")
    _say(f"{'operation':<18}{'case':<40}{'error':>10}{'budget':>10}")
    failed = 0
    for row in parity.rows(_IMPLEMENTATION.value, _DTYPE.value, _SEED.value):
        if row.error is None:
            _say(f"{row.operation:<18}{row.case:<40}{'cannot run':>20}\n  {row.note}")
        else:
            verdict = "" if row.held else "   WRONG"
            _say(f"{row.operation:<18}{row.case:<40}{row.error:>10.2e}{row.budget:>10.2e}{verdict}")
        failed += not row.held
    _say("every operation is within its budget" if not failed else f"{failed} rows did not hold")
    del pallas_attn
    return int(failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse(line: str) -> int:
    sys.stderr.write(line + "\n")
    return 2


def _parse(argv: list[str]) -> list[str]:
    """Flags, or one line that says what is wrong with them."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_refuse(f"{str(error).splitlines()[0]}; see python run.py --help"))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    app.run(main, flags_parser=_parse)
