"""Drives pallas_attn on this machine: `python run.py --help` says how."""

import sys

from pallas_lm.cli import driver

if __name__ == "__main__":
    sys.exit(driver.main(sys.argv))
