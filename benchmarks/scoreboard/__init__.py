"""The same training run by verl and by other frameworks: does it compute the same, how long does it take?

``python -m benchmarks.scoreboard --help`` lists the choices; docs/scoreboard.md has the results.
"""
