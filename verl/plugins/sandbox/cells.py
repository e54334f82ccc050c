"""The program of an :class:`verl.plugins.sandbox.interpreter.Interpreter`. It runs inside the sandbox, on its own.

It reads pieces of code ("cells"), each after its length in four bytes, runs them in one namespace as a notebook does,
and writes one byte after each: ``+`` if it ended well, ``-`` if it raised. Their output goes to stdout.
"""

import ast
import io
import linecache
import os
import sys
import traceback
import types


def main(answers: int) -> None:
    """Run cells until there are no more."""
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # input() of a cell finds nothing, and no cells
    os.set_inheritable(answers, False)
    streams = sys.stdout, sys.stderr
    for stream in streams:
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="replace")  # both go to one pipe: in the order of writing
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    own_pid, cell_count = os.getpid(), 0
    os.write(answers, b".")
    while size := requests.read(4):
        code = requests.read(int.from_bytes(size, "big")).decode()
        cell_count += 1
        ended_well = run(code, f"<cell {cell_count}>", module.__dict__)
        # A cell may have put something else there.
        sys.stdout, sys.stderr = streams
        sys.stdout.flush()
        if os.getpid() != own_pid:
            os._exit(0)  # a fork that a cell has made and that came to the end of the cell
        os.write(answers, b"+" if ended_well else b"-")


def run(code: str, name: str, namespace: dict) -> bool:
    """Run a cell; write the value of its last expression, or its traceback. Return whether it ended well."""
    linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as error:
        return error.code in (None, 0)
    except (Exception, KeyboardInterrupt, GeneratorExit) as error:  # noqa: BLE001 - whatever a cell raises
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        report = "".join(traceback.format_exception(type(error), error, frames))
        os.write(2, report.encode("utf-8", "replace"))
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
