"""``python -m verl``: the command line of :mod:`verl.cli.main`."""

from verl.cli.main import main

main()
