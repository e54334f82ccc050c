"""A checkpoint of strategy=megatron as a model folder, which FSDP goes on from, and the way back."""

import pytest
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import megatron_engine
from tests.support.tiny_run import same
from tests.workers.support import WHOLE, make_engine, ragged_batch, weights_of
from verl.model_merger.__main__ import main
from verl.testing.models import tiny_model_dir
from verl.workers.losses import sft_loss

pytest.importorskip("megatron.core")


def test_a_model_goes_from_one_back_end_to_the_other_through_a_model_folder(tmp_path, caplog):
    """Megatron, merged, FSDP, merged, Megatron: the weights of each begin where those before it ended."""
    path = tiny_model_dir(tmp_path / "start", "qwen2", tie_word_embeddings=True)
    batch = ragged_batch()
    for name, make in (("megatron", megatron_engine), ("fsdp", make_engine), ("megatron", megatron_engine)):
        engine = make(path)
        read = weights_of(engine)
        assert same(read, dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()))
        with engine.train_mode():
            engine.train_batch(batch, sft_loss, WHOLE)
        assert not same(weights_of(engine), read)
        folder, path = tmp_path / f"{name} of {len(path)}", f"{path} on"
        engine.save_checkpoint(str(folder))
        arguments = ["--local_dir", str(folder), "--backend"]
        assert main(["merge", *arguments, name, "--target_dir", path]) == 0
        assert main(["test", *arguments, name, "--test_hf_dir", path]) == 0
        other = "fsdp" if name == "megatron" else "megatron"
        assert main(["merge", *arguments, other, "--target_dir", path]) == 1
        assert f"was written by {name}: use --backend {name}" in caplog.text
        assert same(weights_of(engine), dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()))
