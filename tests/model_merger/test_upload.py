"""Uploading a model folder to a hub: a local server that speaks its protocol gets every byte."""

import os
import subprocess
import sys

from tests.model_merger.hub import TOKEN, local_hub

# Only the upload: a merge before it would take seconds, and is tested apart.
PROGRAM = """
import sys
from verl.errors import CheckpointError
from verl.model_merger.__main__ import upload
try:
    upload(sys.argv[1], "me/trained", private=True)
except CheckpointError as error:
    sys.exit(str(error))
"""


def upload(folder, url, token=TOKEN):
    # Without xet, whose servers are others than the hub.
    hub = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, timeout=300, check=False)


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
