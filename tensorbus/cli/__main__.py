"""``python -m tensorbus.cli``."""

from tensorbus.cli import main

main()
