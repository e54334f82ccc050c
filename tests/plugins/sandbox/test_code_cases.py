"""Cutting out programs, reading tests, comparing answers: all that happens outside the sandbox."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.plugins.sandbox.prime_code.cases import TextCase, ValueCase, extract_code, read_cases
from verl.plugins.sandbox.prime_code.compare import plain, same_text, same_value


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("Here:\n```python\nprint(1)\n```\ndone", "print(1)\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```", "b\n"),
        ("```py\na\n```\nand output\n```\n1\n```", "a\n"),  # a marked block wins over a later one without a mark
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```Python3 title=x\na\n```", "a\n"),
        ("```python\nfor x in y:\n    print(x)", "for x in y:\n    print(x)"),  # cut off
        ("```python\ns = '```'\n```", "s = '```'\n"),  # a fence stands at the start of a line
        ("``` Python title=x\n1\n```", "1\n"),
        ("```\n1\n```\n```python\n2\n```\n```c++\n3\n```", "2\n"),
        ("1. Read:\n\n   ```python\n   for x in y:\n       a\n   ```\n2. Done", "for x in y:\n    a\n"),
        ("- ```python\n  if x:\n      a\n  ```", "if x:\n    a\n"),
        ("- Code:\n  ```python\na\n  ```", "a\n"),  # only the fence is indented
        ("```python\n    a\n      b\n```", "a\n  b\n"),  # only the code is
        ("\t```python\n\tif x:\n\t\ta\n\t```", "if x:\n\ta\n"),
        ("~~~python\na\n~~~\nb", "a\n"),
        ('~~~\ns = """\n```\n"""\n~~~', 's = """\n```\n"""\n'),
        ("> So:\n> ```python\n> if x:\n>     a\n> ```\n> done", "if x:\n    a\n"),
        (">> ```python\n>> >>> a\n>> ```", ">>> a\n"),
        ("> ~~~ python\n> a\n>\n> b\n> ~~~", "a\n\nb\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("````markdown\n```python\na\n```\n````", "a\n"),
        ("```{.python .numberLines}\na\n```", "a\n"),
        ("```python3.11\na\n```\n```text\nb\n```", "a\n"),
        ("```python", None),  # cut off before the program
        ("```python\r\na\r\n```", "a\r\n"),
        ("```cpp\nint main() {}\n```", None),
        ("print(1)", "print(1)"),  # a program as a whole
        ("print(1)\n" * 3000, None),  # too long to be parsed without fences
        ("import sys\nThen I print it.", None),
        ("Yes", None),
        ("", None),
        ("```python```", None),
    ],
)
def test_the_program_of_a_response(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1 2\n3\n", "1 2\n3"),
        ("  1   2 \r\n\r\n3", "1 2\n3\n\n"),
        ("YES", "YES\n"),
        ("0.1000001", "0.1"),  # off by 1e-7
        ("1000000.5", "1000000.0"),  # 5e-7 relative
        ("2", "2.0"),
        ("2.", "2.0"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("-0.0000001", "0.0"),
        ("", "\n"),
        ("nan", "nan"),  # the same text
        ("9" * 350, "9" * 350),
        ("1000000007.0", "1000000007"),
        ("12e-1", "1.2"),
        ("2.000000", "2"),
        ("-0.0", "0"),
        ("1000000", "1000000.5"),  # the expected word has a fraction
    ],
)
def test_texts_that_are_the_same(answer, expected):
    assert same_text(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1\n2", "1 2"),  # lines count
        ("12", "1 2"),
        ("yes", "YES"),
        ("1 2 3", "1 2"),
        ("", "0"),
        ("0.100002", "0.1"),  # off by 2e-6
        ("1000002.5", "1000000.0"),  # 2.5e-6 relative
        ("1000001", "1000000"),  # integers are exact, though 1e-6 apart
        ("1000000500.0", "1000000007"),  # also if the answer is written otherwise
        ("1.0000005e9", "1000000007"),
        ("0.9999999", "1"),
        ("2.0000001", "2"),
        ("1e-9999", "0"),
        ("1e9999", "1000"),
        ("03.0", "-3"),
        ("007", "7"),
        ("1e999", "1e888"),  # beyond all floats
        ("9" * 350 + ".0", "8" * 350 + ".0"),
        ("inf", "1e999"),
        ("1_0.0", "10.0"),
        ("0x10", "16.0"),
        ("--1.0", "1.0"),
        ("١.٠", "1.0"),
    ],
)
def test_texts_that_differ(answer, expected):
    assert not same_text(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (3, 4, False),
        (10**30 + 1, 10**30, False),  # exact, where floats would not see it
        (10**400, 1.0, False),
        (1000000500.0, 1000000007, False),
        (1000000007.0, 1000000007, True),
        (1000000007, 1000000007.5, True),  # the expected value has a fraction
        ([2.0000001], [2], False),
        (0.3, 0.30000001, True),
        (0.3, 0.30001, False),
        (True, 1, False),
        (0, False, False),
        (True, True, True),
        (None, 0, False),
        (None, None, True),
        ("1", 1, False),
        ("a", "a", True),
        ([1, [2.0, "x"]], [1, [2, "x"]], True),
        ([1, 2], [2, 1], False),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1, "b": [1.0]}, {"b": [1], "a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True),
        ([], None, False),
    ],
)
def test_values(answer, expected, same):
    assert same_value(answer, expected) is same


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_every_value_is_the_same_as_itself_after_json(value):
    assert same_value(json.loads(json.dumps(value)), value)


@given(st.text(alphabet="ab1.\n \t"), st.text(alphabet="ab1.\n \t"))
def test_text_comparison_ignores_trailing_blanks(left, right):
    assert same_text(left, right) == same_text(f"\n {left}\t\n", right)
    assert same_text(left + " \n\n", left)


def test_plain_values():
    assert plain((1, [np.int64(2)], {3: {4, 0}}, np.array([[1.5]]))) == [1, [2], {"3": [0, 4]}, [[1.5]]]


def test_text_tests_of_every_form():
    expected = [TextCase("1\n2", "3"), TextCase("4", "5\n6")]
    truth = {"inputs": ["1\n2", ["4"]], "outputs": ["3", ["5", "6"]]}
    assert read_cases(truth) == expected
    assert read_cases(json.dumps(truth)) == expected
    arrays = {"inputs": np.array(["1\n2", "4"], object), "outputs": np.array(["3", "5\n6"], object), "fn_name": None}
    assert read_cases(arrays) == expected  # as a parquet file gives it
    assert read_cases({**truth, "fn_name": ""}) == expected
    assert read_cases({"inputs": [5], "outputs": [6]}) == [TextCase("5", "6")]


def test_calls_of_every_form():
    call = {"function": "f", "arguments": [[1, 2], "x"]}
    for inputs in (['[1, 2]\n"x"'], [[[1, 2], "x"]]):
        for output in ("3", 3):
            assert read_cases({"fn_name": "f", "inputs": inputs, "outputs": [output]}) == [ValueCase(call, (3,))]
    assert read_cases({"fn_name": "f", "inputs": [[1]], "outputs": ["no json"]})[0].expected == ("no json",)


def test_lists_of_one_are_read_both_ways_where_all_outputs_are():
    both = read_cases({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4]]})
    assert [case.expected for case in both] == [([3], 3), ([4], 4)]
    assert both[0].is_answered_by("3")
    assert both[0].is_answered_by("[3]")
    assert not both[0].is_answered_by("4")
    one = read_cases({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4, 5]]})
    assert [case.expected for case in one] == [([3],), ([4, 5],)]
    assert not one[0].is_answered_by("3")


def test_assertions_are_split_into_a_call_and_a_judgement():
    table = {
        "assert f(1) == (2, [3])": ("f(1)", "[2, [3]]", "[2, [4]]"),
        "assert -4 == f(2), 'message'": ("f(2)", "-4", "4"),
        "assert f(3) is None": ("f(3)", "null", "0"),
        "assert f(4)": ("not not f(4)", "true", "false"),
        "assert not f(5)": ("not not f(5)", "false", "true"),  # as for f(4): which of the two is right is not told
        "assert f(6) == 7 and not f(8)": ("(f(6), not not f(8))", "[7, false]", "[7, true]"),
        "assert f(a=[1], b={'c': -2.5}) == {1: 2}": ("f(a=[1], b={'c': -2.5})", '{"1": 2}', '{"1": 3}'),
        "assert Solution().f(1) == 'x'": ("Solution().f(1)", '"x"', '"y"'),
        "assert same(1, 1, [2 for _ in (3,)]) == 2": ("same(1, 1, [2 for _ in (3,)])", "2", "3"),
        "assert f('ab' * 3, list(range(4))) == 2": ("f('ab' * 3, list(range(4)))", "2", "3"),
        "assert sum(10, 15) == 6": ("sum(10, 15)", "6", "25"),  # a function of the program
        "assert set(f(9)) == set((4, 5))": ("list(f(9))", "[5, 4, 5]", "[4]"),
        "assert [1, 2] == sorted(f(9))": ("list(f(9))", "[2, 1]", "[1, 2, 2]"),
        "assert list(f(9)) == list((1, 2))": ("list(f(9))", "[1, 2]", "[2, 1]"),
        "assert len(f(9)) == 2": ("f(9)", '"ab"', '"abc"'),
        "assert len(set(f(9))) == 2": ("list(f(9))", '["a", "b", "a"]', '["a"]'),
        "assert round(f(9), 2) == 3.14": ("f(9)", "3.1416", "3.2"),
        "assert abs(round(f(9))) == 3": ("f(9)", "-3.1416", "2.2"),
        "assert f(9)[1]['a'] == 4": ("f(9)", '[0, {"a": 4}]', '[0, {"b": 4}]'),
        "assert f(9)[-2:] == [1, 2]": ("f(9)", "[0, 1, 2]", "5"),
        "assert f(9)[3] == 4": ("f(9)", '{"3": 4}', "[4]"),
        "assert len(f(9))": ("f(9)", "[0]", "[]"),
    }
    cases = read_cases({"assert_case": [*table]})
    assert [case.request["expression"] for case in cases] == [expression for expression, _, _ in table.values()]
    for case, (assertion, (_, right, wrong)) in zip(cases, table.items(), strict=True):
        assert (case.is_answered_by(right), case.is_answered_by(wrong)) == (True, False), assertion


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("assert f(1) == g(1)", "no side is a literal"),
        ("assert f(1) < 3", "does not compare"),
        ("assert 1 < f(1) < 3", "does not compare"),
        ("assert f(1) == 2 == 2", "does not compare"),
        ("assert f(1) in [2]", "does not compare"),
        ("assert f(1) != 3", "does not compare"),
        ("assert f(1) == 2 or f(1) == 3", "would decide"),
        ("assert f(1) == 2 and f(2) < 3", "does not compare"),
        ("assert not f(1) == 2", "denies"),
        ("assert f(1) == b'x'", "bytes is not JSON"),
        ("f(1)", "it is Expr"),
        ("assert f(", "never closed"),
        ("assert f(1) == 1; import os", "too many values"),
    ]
    + [
        (f"assert {test}", "would decide")
        for test in (
            "f(1) - 2 == 0", "not f(1) - 2", "not (f(1) ^ 2)", "-f(1) == -2", "[f(1)] == [2]", "(f(1), 0) == (2, 0)",
            "{f(1)} == {2}", "{f(1): 0} == {2: 0}", "{2: True}[f(1)]", "[False, False, True][f(1)]", "f'{f(1)}' == '2'",
            "(x := f(1)) == 2", "(lambda: f(1) == 2)() is True", "(f(1) == 2) is True", "True if f(1) == 2 else False",
            "all(f(n) == n for n in range(3))", "[f(n) == n for n in range(3)] == [True, True, True]",
            "eval('f(1) == 2')", "eval('f(1)') == 2", "exec('f(1)') is None", "operator.eq(f(1), 2)", "eq(f(1), 2)",
            "operator.eq(1, 2)", "{2}.issuperset({f(1)})", "(2).__eq__(f(1))", "f(1).__eq__(2)", "f(1).equals(2)",
            "math.isclose(f(1), 0.5)", "isclose(f(1), 0.5)", "isinstance(f(1), int)", "str(f(1)) == '2'",
            "max(f(1), 2) == 2", "sum(f(1), 2) == 2", "sorted(f(1), key=g) == [2]", "round(f(1), 99) == 2",
            "map(f, [1]) == [2]", "same(f, 1, 2)", "same(*[f(1)], 2)", "same(**{'a': f(1)})", "same([f(1)], [2])",
            "same(print(f(1)))", "same((lambda: f(1))(), 2)", "same([g(1) for g in (f,)])", "same(f.__name__)",
            "same('{0.x}'.format(1))", "f(1)(2) == 3", "f(g(1)) == 3", "f(1)[g(0)] == 2", "f == 2", "True", "1 == 1",
            "Solution().__class__(1) == 2", "Solution().f(1).equals(2)", "Same(f(1)).with_value(2)",
        )
    ],
)  # fmt: skip
def test_assertions_that_the_program_could_decide_are_refused(test, complaint):
    with pytest.raises(RewardError, match=f"1 of 2 tests .*({complaint}|only round|malformed)"):
        read_cases({"assert_case": ["assert f(1) == 2", test]})


@pytest.mark.parametrize(
    ("truth", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "list"),
        (3, "int"),
        ({}, "0 inputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (
            {"inputs": False, "outputs": ["1"]},
            "'inputs' of the ground truth .* is False; expected a list",
        ),
        ({"inputs": ["1"], "outputs": "1"}, "'outputs' .* is '1'; expected a list"),
        ({"assert_case": "assert f(1) == 1"}, "'assert_case' .* expected a list"),
        ({"assert_case": [None]}, "1 of 1 tests cannot be used, the first: None"),
        ({"assert_case": [f"assert f(1) == float(1{'0' * 400})"]}, "1 of 1 tests cannot be used"),
        ({"inputs": ["not json"], "outputs": ["1"], "fn_name": "f"}, "one JSON value per line"),
    ],
)
def test_ground_truths_that_are_no_tests(truth, complaint):
    with pytest.raises(RewardError, match=complaint):
        read_cases(truth)


def test_conversions_of_any_answer_raise_nothing():
    tests = ["set(f(1)) == {1}", "sorted(f(1)) == [1]", "sum(f(1)) == 1", "max(f(1)) == 1", "len(f(1)) == 7"]
    tests += ["int(f(1)) == 1", "float(f(1)) == 1", "round(f(1), 15) == 1", "abs(f(1)) == 1", "f(1)[0] == 1"]
    answers = ["NaN", "Infinity", "1e999", "null", "[]", "{}", '""', '[2, "a", null]', '"' + "9" * 5000 + '"']
    answers += ["[" * 900 + "]" * 900, '{"0": NaN}', "[[1], [1]]", "[NaN]", '[[], {}, "1", -1]']
    cases = read_cases({"assert_case": [f"assert {test}" for test in tests]})
    assert not any(case.is_answered_by(answer) for case in cases for answer in answers)


def test_the_expected_answer_is_not_in_what_the_program_reads():
    case = read_cases({"fn_name": "f", "inputs": [[1]], "outputs": [918273]})[0]
    assert "918273" not in case.stdin
    case = read_cases({"assert_case": ["assert f(1) == 918273"]})[0]
    assert "918273" not in case.stdin


@pytest.mark.parametrize("stdout", ["", "{", "[" * 100_000, "9" * 10_000, "\0", "1 2"])
def test_answers_made_to_break_the_parser_are_wrong(stdout):
    assert not ValueCase({}, (1,)).is_answered_by(stdout)
