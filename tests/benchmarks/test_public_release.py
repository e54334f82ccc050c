"""What a release changes: two small wheels, made here, and what is reported of the newer one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.public_release import report

CONFIG = "verl/trainer/config/ppo_trainer.yaml"
ACTOR = "verl/trainer/config/actor/base.yaml"
MODULE = "verl/protocol.py"
OLD = {
    CONFIG: "defaults: [actor@actor_rollout_ref.actor: base, _self_]\ntrainer: {save_freq: 5}\n",
    ACTOR: "ppo_epochs: 1\n",
    MODULE: "def pad_dataproto_to_divisor(data, size_divisor): ...\n",
    "verl/inner.py": "",
}
NEW = {
    CONFIG: OLD[CONFIG].replace("5", "7, warp_speed: 9"),
    ACTOR: "ppo_epochs: 1\ngrad_clip: 1.0\n",
    MODULE: "class DataProto:\n    def fold(self, size: int, by=2) -> None: ...\n    def _inner(self): ...\n"
    "def pad_dataproto_to_divisor(data, size): ...\nfrom .utils import no_such_name\n",
    "verl/inner.py": "def ignored(): ...\n",
    "verl/models/new_model.py": "",
}
REPORT = """\
Keys of {new} that {old} lacks, or has with another default:
  ppo_trainer actor_rollout_ref.actor.grad_clip: 1.0
  ppo_trainer trainer.save_freq: 7 (was 5)
  ppo_trainer trainer.warp_speed: 9  REFUSED: there is no such key
Keys of {new} that a program under its own hydra.main cannot override (1):
  ppo_trainer trainer: 1
Names of {new} that {old} lacks, or has with another form:
  verl.models.new_model  other design
  verl.protocol.DataProto
  verl.protocol.DataProto.fold(size, by=2)  MISSING
  verl.protocol.no_such_name  MISSING
  verl.protocol.pad_dataproto_to_divisor(data, size) (was (data, size_divisor))
3 settings and names of {new} fail here without a reason
"""


def wheel(files: dict[str, str], path: Path) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return str(path)


def test_a_release_is_compared_with_an_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    new, old = wheel(NEW, tmp_path / "new.whl"), wheel(OLD, tmp_path / "old.whl")
    assert report(new, old, {"verl.protocol"}, tmp_path) == 3
    assert capsys.readouterr().out == REPORT.format(new=new, old=old)
