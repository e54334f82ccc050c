"""Spans of text that a policy's and a teacher's tokens share: by hand, and their log-probs against float64."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from verl.config import DistillationConfig, DistillationTeacherModelConfig, HFModelConfig, TeacherInferenceConfig
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.teacher.alignment import TextAlignment, shared_spans, spans_of_tokens, texts_of_tokens
from verl.workers.teacher.tokenizers import check_teacher_tokenizers

EOS = 1


@pytest.mark.parametrize(
    ("policy", "teacher", "of_policy", "of_teacher"),
    [
        (["The", " answer", " is"], ["Th", "e", " an", "swer is"], [0, 1, 1], [0, 0, 1, 1]),
        (["a", "b", "c"], ["a", "b", "c"], [0, 1, 2], [0, 1, 2]),
        (["ab", "cd"], ["abc", "d"], [0, 0], [0, 0]),
        ([], [], [], []),
        # Two bytes of a character are two tokens of the policy; the third comes with the letter after it.
        (["a", "", "", "é", "b"], ["aé", "b"], [0, 0, 0, 0, 1], [0, 1]),
        # Bytes at the end of a response that was cut complete no character.
        (["a", "", ""], ["a"], [0, -1, -1], [0]),
        # A special token interrupts the span "ab", but not the text between two others.
        (["a", None, "b", "c"], ["ab", "c"], [-1, -1, -1, 1], [-1, 1]),
        (["a", None, "b"], ["a", "b"], [0, -1, 1], [0, 1]),
        # Bytes that are no character make the character U+FFFD in the text, which the policy did not write.
        (["a", "", "\ufffdb", "c"], ["a", "\ufffd", "b", "c"], [0, -1, -1, 2], [0, -1, -1, 2]),
        # The teacher's tokenizer writes the second character in another way.
        (["a", "ﬁ", "b"], ["a", "fi", "b"], [0, -1, -1], [0, -1, -1]),
    ],
)
def test_spans_by_hand(policy, teacher, of_policy, of_teacher):
    assert shared_spans(policy, teacher) == (of_policy, of_teacher)


def test_a_response_in_characters_and_in_pairs_of_bytes():
    characters, pairs = tiny_tokenizer("char"), tiny_tokenizer("bpe")
    text = "The answer is 12."
    ids = characters(text, add_special_tokens=False)["input_ids"]
    aligned = TextAlignment(characters, pairs, [EOS]).response([*ids, EOS])
    assert texts_of_tokens(aligned.teacher_ids[:-1], pairs, ()) == ["Th", "e", " answer", " is", " 12", "."]
    assert aligned.teacher_spans == [0, 1, 2, 3, 4, 5, 6]
    assert aligned.policy_spans == [0, 0, 1, *[2] * 7, *[3] * 3, *[4] * 3, 5, 6]
    assert aligned.teacher_ids[-1] == EOS
    # The other way round, and without an end: a response that was cut at the limit of its length.
    back = TextAlignment(pairs, characters, [EOS]).response(aligned.teacher_ids[:-1])
    assert (back.teacher_ids, back.teacher_spans, back.policy_spans) == (ids, aligned.policy_spans[:-1], [*range(6)])
    # The name of a special token is text to the teacher if the policy spelled it.
    spelled = pairs("<eos>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert EOS not in spelled
    assert TextAlignment(pairs, pairs, [EOS]).response(spelled).teacher_ids == spelled


def words_and_bytes() -> PreTrainedTokenizerFast:
    """Words that begin with their space, and bytes of what is no word, as tokenizers of SentencePiece have them."""
    words = ["▁", "T", "h", "e", "▁T", "▁Th", "▁The"]
    vocab = {token: n for n, token in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence(list(steps))
    template = "{% for m in messages %}[{{ m['content'] }}]</s>{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template=template)


def test_a_tokenizer_that_puts_a_space_in_front():
    pairs, words = tiny_tokenizer("bpe"), words_and_bytes()
    ids = pairs("The é The", add_special_tokens=False)["input_ids"]
    assert texts_of_tokens(ids, pairs, ()) == ["Th", "e", " ", "", "é", " The"]
    aligned = TextAlignment(pairs, words, [EOS]).response([*ids, EOS])
    tokens = ["▁The", "▁", "<0xC3>", "<0xA9>", "▁The", "</s>"]
    assert words.convert_ids_to_tokens(aligned.teacher_ids) == tokens
    assert (aligned.policy_spans, aligned.teacher_spans) == ([0, 0, 1, 2, 2, 3, 4], [0, 1, 2, 2, 3, 4])
    back = TextAlignment(words, pairs, [words.eos_token_id]).response(aligned.teacher_ids)
    assert (back.policy_spans, back.teacher_spans) == (aligned.teacher_spans, aligned.policy_spans)


def test_a_teacher_that_composes_characters():
    pairs, composing = tiny_tokenizer("bpe"), tiny_tokenizer("bpe")
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    alignment = TextAlignment(pairs, composing, [EOS])
    ohms = alignment.response(
        pairs("2 \u2126.", add_special_tokens=False)["input_ids"]
    )  # three bytes, for the teacher two
    assert (ohms.policy_spans, ohms.teacher_spans) == ([0, 1, 2, 2, 2, 3], [0, 1, 2, 2, 3])
    # An accent in a token of its own changes the letter before it; what follows has no counterpart.
    accents = alignment.response(pairs("ae\u0301.", add_special_tokens=False)["input_ids"])
    assert (accents.policy_spans, accents.teacher_spans) == ([0, -1, -1, -1, -1], [0, -1, -1, -1])


def test_the_end_of_a_turn_is_that_of_the_teachers_template():
    teacher = tiny_tokenizer("bpe")
    teacher.chat_template = "{% for m in messages %}{{ m['content'] }}<user>{% endfor %}"
    user = teacher.convert_tokens_to_ids("<user>")
    assert TextAlignment(tiny_tokenizer(), teacher, [EOS]).response([EOS]).teacher_ids == [user]
    teacher.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert TextAlignment(tiny_tokenizer(), teacher, [EOS]).response([EOS]).teacher_ids == [EOS]
    teacher.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        TextAlignment(tiny_tokenizer(), teacher, [EOS])


def rows(tokenizer: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, *responses: list[int]) -> DataProto:
    """Rows of the policy, the first responses of equal prompts, with the prompt of the teacher."""
    width = max(map(len, responses)) + 1
    prompts = teacher(["say", "it"], add_special_tokens=False, padding=True, return_tensors="pt")
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in responses])
    return DataProto.from_dict(
        tensors={
            "teacher_prompts": prompts["input_ids"],
            "teacher_prompts_mask": prompts["attention_mask"],
            "responses": torch.tensor([ids + [0] * (width - len(ids)) for ids in responses]),
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(mask), 3, dtype=torch.long), mask], dim=1),
        }
    )


def test_rows_by_hand():
    characters, pairs = tiny_tokenizer("char"), tiny_tokenizer("bpe")
    ids = characters("The", add_special_tokens=False)["input_ids"]
    batch = rows(characters, pairs, [*ids, EOS], [])
    aligned = TextAlignment(characters, pairs, [EOS]).rows(batch)
    th, e = pairs("The", add_special_tokens=False)["input_ids"]
    prompts = batch.batch["teacher_prompts"]
    assert aligned.span_ends.tolist() == [[1, 1, 2, 3, -1], [-1] * 5]
    assert aligned.places.tolist() == [[1, 2, 3], [-1] * 3]
    assert aligned.rows.batch["input_ids"].tolist() == [
        [*prompts[0].tolist(), th, e, EOS],
        [*prompts[1].tolist(), 0, 0, 0],
    ]
    assert aligned.rows.batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert aligned.rows.batch["attention_mask"].sum().item() == batch.batch["teacher_prompts_mask"].sum().item() + 3
    scores = torch.tensor([[-1.0, -2.0, -4.0], [0.0, 0.0, 0.0]])
    made = aligned.columns(DataProto.from_dict(tensors={"teacher_logprobs": scores, "teacher_entropys": -scores})).batch
    assert made["teacher_logprobs"].tolist() == [[0, -1, -2, -4, 0], [0] * 5]
    assert made["teacher_entropys"].tolist() == [[1, 1, 2, 4, 0], [0] * 5]
    assert made["distillation_mask"].tolist() == [[1, 1, 1, 1, 0], [0] * 5]
    # A span of two tokens of the teacher has the sum of their log-probs, and the mean of their entropies.
    batch = rows(pairs, characters, [th, e], [th])
    scores = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -2.0, 0.0]])
    back = TextAlignment(pairs, characters, [EOS]).rows(batch)
    made = back.columns(DataProto.from_dict(tensors={"teacher_logprobs": scores, "teacher_entropys": -scores})).batch
    assert made["teacher_logprobs"].tolist() == [[-3, -4, 0], [-10, 0, 0]]
    assert made["teacher_entropys"].tolist() == [[1.5, 4, 0], [5, 0, 0]]


def test_equal_tokenizers_have_spans_of_one_token():
    pairs = tiny_tokenizer("bpe")
    batch = rows(pairs, pairs, [*pairs("The answer is é", add_special_tokens=False)["input_ids"][:-2], EOS], [EOS])
    aligned = TextAlignment(pairs, pairs, [EOS]).rows(batch)
    scores = torch.randn(aligned.places.shape)
    assert aligned.rows.batch["responses"].tolist() == batch.batch["responses"][:, :-1].tolist()
    made = aligned.columns(DataProto.from_dict(tensors={"teacher_logprobs": scores}))
    by_token = spans_of_tokens(batch.batch["response_mask"])
    for name in ("span_ends", "distillation_mask"):
        assert_close(made.batch[name], by_token.batch[name])
    assert_close(made.batch["teacher_logprobs"][:, :-1], scores * batch.batch["response_mask"][:, :-1])


def test_conversations_are_refused_by_row():
    characters, pairs = tiny_tokenizer("char"), tiny_tokenizer("bpe")
    batch = rows(characters, pairs, [EOS], [5, 6, 7])
    batch.batch["response_mask"][1, 1] = 0
    with pytest.raises(DataError, match="in row 1 the policy did not choose every token of the response"):
        TextAlignment(characters, pairs, [EOS]).rows(batch)


def test_what_is_checked_before_a_model_loads(tmp_path: Path):
    student, teacher = tiny_model_dir(tmp_path / "student"), tiny_model_dir(tmp_path / "teacher", tokenizer="bpe")
    small = tiny_model_dir(tmp_path / "small", tokenizer="bpe", vocab=300)

    def check(model: str, alignment: str) -> None:
        big = DistillationTeacherModelConfig(model_path=model, inference=TeacherInferenceConfig(name="hf"))
        config = DistillationConfig(enabled=True, teacher_models={"big": big}, alignment=alignment)  # type: ignore[arg-type]
        check_teacher_tokenizers(config, HFModelConfig(path=student))

    check(teacher, "text")
    with pytest.raises(ConfigError, match=re.escape("or set distillation.alignment=text")):
        check(teacher, "token")
    with pytest.raises(ConfigError, match="383"):
        check(small, "text")
