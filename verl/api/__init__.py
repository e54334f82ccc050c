"""Training, sampling and scoring by one call of Python; ``verl.train`` and its relatives are defined here.

A call writes its rows and functions into the run's folder, composes the configuration that the command line would
compose, and calls what the command calls: no second trainer.
"""
