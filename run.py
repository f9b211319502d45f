"""Drive pallas_attn on this machine.

python run.py                               every operation here, beside the reference
python run.py --flagfile=configs/NAME.cfg   the same with flags from a file
python run.py --task=bench --op=forward --cases=grid --out=results/mine.jsonl --plot=mine.png
python run.py --task=tune --kernel=flash_fwd_sm90 --cases=h128*

Exit status: 0 all is well, 1 something did not hold, 2 the flags are wrong.
"""

import os
import sys

from absl import app, flags, logging

OPS = ("forward", "backward", "backward_alone", "decode", "append")

_TASK = flags.DEFINE_enum(
    "task",
    "parity",
    ["parity", "bench", "tune"],
    "What to do. parity: run a small case of every operation beside the reference. bench: time "
    "checked kernels beside their peers. tune: search the settings of a kernel. The last two want "
    "a GPU.",
)
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation",
    None,
    ["sm90", "sm80", "reference"],
    "Which implementation to run. Default: the fastest that takes each problem on this machine.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Of all random inputs.", lower_bound=0)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float16", "float32"], "parity: the type of the inputs."
)
_OP = flags.DEFINE_enum("op", "forward", OPS, "bench: which operation.")
_CASES = flags.DEFINE_string(
    "cases",
    "grid",
    "bench, tune: which cases, by tags and globs over names, with commas. grid+causal wants both "
    "tags; -h256 takes away.",
)
_PEERS = flags.DEFINE_string(
    "peers", "all", "bench: whom to time beside: all, none, or names with commas."
)
_TURNS = flags.DEFINE_integer("turns", 5, "bench: how often everybody has a turn.", lower_bound=1)
_COLD = flags.DEFINE_bool("cold", False, "bench: empty the L2 cache before each timed call.")
_OUT = flags.DEFINE_string("out", None, "bench: a .jsonl file to add rows to.")
_PLOT = flags.DEFINE_string("plot", None, "bench: a .png file to draw (needs matplotlib).")
_COMMIT = flags.DEFINE_string("commit", None, "bench, tune: the commit, where git cannot say.")
_KERNEL = flags.DEFINE_string("kernel", "flash_fwd_sm90", "tune: which kernel module.")


def main(argv: list[str]) -> int:
    if argv[1:]:
        return _refuse(f"run.py takes flags only, got {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax reports each platform that it does not find
    # Peers and kernels share the GPU's memory: nobody may take it all at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return {"parity": _parity, "bench": _bench, "tune": _tune}[_TASK.value]()
    except ValueError as error:
        return _refuse(str(error))


def _parity() -> int:
    """The table: 0 where every row held, 1 where one did not, or could not run."""
    import jax

    from pallas_attn.bench import parity

    devices = jax.devices()
    _say(f"jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}")
    _say(f"implementation: {_IMPLEMENTATION.value or 'the fastest that takes each problem'}")
    _say(f"{'operation':<18}{'case':<40}{'runs on':<12}{'error':>9}{'budget':>9}")
    failed = 0
    for row in parity.rows(_IMPLEMENTATION.value, _DTYPE.value, _SEED.value):
        failed += not row.held
        start = f"{row.operation:<18}{row.case:<40}{row.implementation:<12}"
        if row.error is None:
            _say(f"{start}{'cannot run':>18}")
        else:
            verdict = "" if row.held else "  WRONG"
            _say(f"{start}{row.error:>9.1e}{row.budget:>9.1e}{verdict}")
        for line in row.note.splitlines():
            _say(f"  {line}")
    _say("every operation is within its budget" if not failed else f"{failed} rows did not hold")
    return int(failed > 0)


def _bench() -> int:
    from pallas_attn import bench

    options = bench.Options(
        implementation=_IMPLEMENTATION.value,
        peers=_PEERS.value,
        seed=_SEED.value,
        turns=_TURNS.value,
        cold=_COLD.value,
        commit=_COMMIT.value,
        out=_OUT.value,
        plot=_PLOT.value,
    )
    return bench.run_bench(_OP.value, _CASES.value, options)


def _tune() -> int:
    from pallas_attn import bench

    return bench.run_tune(_KERNEL.value, _CASES.value, commit=_COMMIT.value)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse(line: str) -> int:
    sys.stderr.write(f"{line}; see python run.py --help\n")
    return 2


def _parse(argv: list[str]) -> list[str]:
    """Flags, or one line that says what is wrong with them."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_refuse(str(error).splitlines()[0]))


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
