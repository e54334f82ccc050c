"""Uploading a model folder to a hub, after a merge and by itself: a local server of its protocol gets every byte."""

import os
import subprocess
import sys

import torch
from safetensors.torch import load

from tests.model_merger.hub import TOKEN, local_hub
from tests.workers.support import make_engine, weights_of
from verl.testing.models import tiny_model_dir

# Only the upload, without the seconds of a merge.
PROGRAM = """
import sys
from verl.errors import CheckpointError
from verl.model_merger.__main__ import upload
try:
    upload(sys.argv[1], "me/trained", private=True)
except CheckpointError as error:
    sys.exit(str(error))
"""


def run(url, arguments, token=TOKEN):
    # Without xet, whose servers are others than the hub.
    hub = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, timeout=300, check=False)


def upload(folder, url, token=TOKEN):
    return run(url, ["-c", PROGRAM, folder], token)


def test_the_merger_uploads_what_it_has_merged(tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path / "model"))
    engine.save_checkpoint(str(tmp_path / "actor"))
    command = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", tmp_path / "actor"]
    command += ["--target_dir", tmp_path / "out", "--hf_upload_path", "me/trained"]
    with local_hub() as hub:
        done = run(hub.url, command)
        assert done.returncode == 0, done.stderr
        files = hub.files["me/trained"]
        assert hub.private == {"me/trained": False}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    weights = load(files["model.safetensors"])
    assert weights.keys() == weights_of(engine).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in weights_of(engine).items())


def test_every_file_arrives_and_a_refusal_is_told(tmp_path):
    written = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100, "tokenizer.json": b"[1]"}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    with local_hub() as hub:
        first = upload(tmp_path, hub.url)
        assert first.returncode == 0, first.stderr
        assert hub.files == {"me/trained": written}
        assert hub.private == {"me/trained": True}
        (tmp_path / "config.json").write_bytes(b'{"changed": 1}')
        assert upload(tmp_path, hub.url).returncode == 0  # into the repository that exists
        assert hub.files["me/trained"]["config.json"] == b'{"changed": 1}'
        refused = upload(tmp_path, hub.url, token="hf_wrong")
    assert refused.returncode == 1
    assert f"{tmp_path} is written, but was not uploaded to me/trained: Client error '401" in refused.stderr
    assert "Invalid credentials" in refused.stderr
    assert "Traceback" not in refused.stderr
