"""Libraries that take long to load do not hold up the samples that are scored side by side."""

import pickle
import subprocess
import sys

from verl.scorers.remote import RemoteScorer

UNPICKLE = """
import pickle, sys
import verl.scorers.remote
print([name for name in ("httpx2", "tenacity") if name in sys.modules])
pickle.loads(bytes.fromhex(sys.argv[1]))
print([name for name in ("httpx2", "tenacity") if name in sys.modules])
"""

SLOW_LIBRARY = """
import pathlib, time
end = time.monotonic() + 20
while not pathlib.Path(__file__).with_name("beat").exists():
    if time.monotonic() > end:
        raise RuntimeError("the other sample is held up")
    time.sleep(0.01)
raise ModuleNotFoundError("loaded")
"""

SIDE_BY_SIDE = """
import asyncio, pathlib, sys
from verl.errors import ConfigError
from verl.scorers.llm_judge import compute_score
sys.path.insert(0, sys.argv[1])

async def beat():
    await asyncio.sleep(0.1)
    (pathlib.Path(sys.argv[1]) / "beat").touch()

async def main():
    judged = compute_score("4", "4", {"question": "2+2"}, base_url="http://127.0.0.1:9/v1", model="m")
    return await asyncio.gather(judged, beat(), return_exceptions=True)

error = asyncio.run(main())[0]
print(type(error).__name__, error.__cause__)
"""


def said_by(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()


def test_the_remote_scorer_loads_its_client_when_it_arrives():
    """That is when a worker starts, before it has samples."""
    assert said_by(UNPICKLE, pickle.dumps(RemoteScorer("http://127.0.0.1:9/")).hex()) == [
        "[]",
        "['httpx2', 'tenacity']",
    ]


def test_the_judge_loads_its_client_beside_the_other_samples(tmp_path):
    """The library is loaded only when another coroutine has made a step."""
    (tmp_path / "openai.py").write_text(SLOW_LIBRARY)
    assert said_by(SIDE_BY_SIDE, str(tmp_path)) == ["ConfigError loaded"]
