"""Programs that try to pass tests without knowing the answer: all that a program controls in its own process."""

from __future__ import annotations

LYING = """
def lie(self, *arguments): return True
lying = dict.fromkeys(
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __contains__ __instancecheck__ __subclasscheck__".split(), lie
) | {"__hash__": lambda self: 0, "__index__": lambda self: 0}
for name in "add sub mul mod pow and or xor neg pos abs invert floordiv truediv round".split():
    lying[f"__{name}__"] = lying[f"__r{name}__"] = lambda self, *arguments: self
"""
FRAMES = """
import gc, inspect, sys
def everything():
    frame, texts = sys._getframe(), []
    while frame:
        texts += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    return texts + gc.get_objects()
"""
CHEATING_PROGRAMS = {
    **{
        f"{kind} with lying operators": f"{LYING}\nLying = type('Lying', ({kind},), lying)\ndef f(*a): return Lying()"
        for kind in ("object", "int", "float", "str", "list", "dict", "set", "tuple", "Exception")
    },
    "bool that is everything": f"{LYING}\nlying.pop('__bool__')\ndef f(*a): return type('B', (int,), lying)(1)",
    "list of everything": f"{LYING}\nL = type('L', (list,), lying)\ndef f(*a): return L([L([1]), 2])",
    "list that ends as the reader wants": "class L(list):\n    def __len__(self): return 1\ndef f(*a): return L()",
    "mapping of every key": "import collections\ndef f(*a): return collections.defaultdict(lambda: True)",
    "int that is written otherwise": "class I(int): __repr__ = __str__ = lambda s: 'true'\ndef f(*a): return I(0)",
    "text with quotes": "class S(str):\n    def __repr__(self): return '*'\ndef f(*a): return S('\", \"')",
    "nan": "def f(*a): return float('nan')",
    "infinity": "def f(*a): return float('inf')",
    "list of nan": "def f(*a): return [float('nan')] * 3",
    "true": "def f(*a): return True",
    "large integer": "def f(*a): return 10 ** 4000",
    "deep list": "def f(*a):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "json that lies": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(*a): return 0",
    "json encoder": "import json\njson.JSONEncoder.default = lambda s, o: True\ndef f(*a): return object()",
    "json constants": "import json.encoder as e\ne.INFINITY = 0\ne.c_make_encoder = None\ndef f(*a): return 0",
    "plain of the harness": "import sys\nsys.modules['__main__'].plain = lambda v: True\ndef f(*a): return 0",
    "namespace of the harness": "import sys\nsys.modules['__main__'].namespace = {}\ndef f(*a): return 0",
    "request of the harness": "import sys\nmain = sys.modules['__main__']\nmain.request = {'expression': 'True'}",
    "judge imported inside": "import verl.plugins.sandbox.prime_code.compare as c\nc.same_value = lambda *a: True",
    "eval": "import builtins\nbuiltins.eval = lambda *a: True\ndef f(*a): return 0",
    "isinstance": "import builtins\nbuiltins.isinstance = lambda *a: True\ndef f(*a): return 0",
    "sorted and list": "sorted = list = set = tuple = lambda *a, **k: True\ndef f(*a): return 0",
    "open": "import builtins, os\nos.fdopen = builtins.open = lambda *a: None\ndef f(*a): return 0",
    "answer written to every descriptor": (
        "import os\nfor number in range(1, 30):\n    try: os.write(number, b'true')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "several answers": (
        "import os\nfor number in range(1, 30):\n    try: os.write(number, b'[true]\\ntrue\\n1\\n2\\n')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "doubled keys": "import os\nos.write(3, b'{\"a\": 1, \"a\": true}')\nos._exit(0)",
    "answer object": "import sys\nsys.modules['__main__'].answer.write('true')\nimport os\ndef f(*a): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(lambda: os.write(3, b'true'))\ndef f(*a): raise SystemExit(0)",
    "thread": (
        "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), os.write(3, b'true'))).start()\n"
        "def f(*a): time.sleep(0.3); os._exit(0)"
    ),
    "child": (
        "import os\ndef f(*a):\n    if os.fork() == 0: os.write(3, b'true'); os._exit(0)\n    os.wait(); os._exit(0)"
    ),
    "signal": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: (os.write(3, b'true'), os._exit(0)))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ndef f(*a):\n    while True: pass"
    ),
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: True)\ndef f(*a): return 0",
    "frames": f"{FRAMES}\ndef f(*a): return next((t for t in everything() if isinstance(t, int) and t > 918272), 0)",
    "source of the caller": "import sys\ndef f(*a): return open(sys.argv[0]).read()",
    "text of the request": "import sys\ndef f(*a): return sys._getframe(1).f_code.co_filename",
    "stdin again": "import os\ndef f(*a):\n    os.lseek(0, 0, 0)\n    return os.read(0, 1 << 20).decode()",
    "memory": (
        "import re\ndef f(*a):\n    data = b''\n    for line in open('/proc/self/maps'):\n"
        "        if '[heap]' in line:\n            a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "            data = open('/proc/self/mem', 'rb'); data.seek(a); data = data.read(b - a)\n"
        "    return [int(x) for x in re.findall(rb'9182\\d\\d', data)][:1]"
    ),
    "class in place of the function": f"{LYING}\nclass f(metaclass=type('M', (type,), lying)): pass",
    "module in place of json": "import sys, types\nsys.modules['json'] = types.ModuleType('json')\ndef f(*a): return 0",
    "exception with an answer": "def f(*a): raise SystemExit('true')",
    "exit code": "import sys\ndef f(*a): sys.exit(0)",
    "generator without end": "def f(*a):\n    while True: yield 1",
}  # fmt: skip
