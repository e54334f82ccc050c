"""The table of faults that tests must find (``python -m benchmarks.mutants``) fits the code as it is."""

from benchmarks import mutants


def test_every_mutant_has_its_line_and_its_tests():
    unfit = [
        f"{mutant.file}: {mutant.old!r}: {mutant.tests}"
        for mutant in mutants.MUTANTS
        if mutants.find_file(mutants.ROOT, mutant) is None or mutants.test_files(mutants.ROOT, mutant) is None
    ]
    assert not unfit, "\n".join(unfit)
