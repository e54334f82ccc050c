"""Chat templates in the manner of the model families, and small trained tokenizers that carry them.

    tokenizer = chat_tokenizer("llama")        # a trained BPE with the family's control tokens and template

The templates are our own. Each shows what makes its family's conversations hard to continue token by token.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Vocabulary = Literal["bytes", "metaspace", "unigram"]


@dataclass(frozen=True)
class ChatFamily:
    """A template and its tokens; the first of ``special`` ends a turn or a text."""

    template: str
    special: tuple[str, ...]
    structural: tuple[str, ...] = ()
    """Tokens that the template writes and the tokenizer does not call special."""
    vocabulary: Vocabulary = "bytes"


_CHATML_TOOLS = (
    "{% if tools %}# Tools\n<tools>{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n' }}</tools>{% endif %}"
)
_CHATML_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
# Results of one turn share one message of the user.
_CHATML_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
# The last message of the user that is no result: thoughts before it are left out.
_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_CHATML_TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THOUGHT_TAGS = ("<think>", "</think>")

CHATML = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "{% else %}<|im_start|>system\nYou are a helpful assistant.{% endif %}"
    "{{ '\n\n' if tools }}" + _CHATML_TOOLS + "<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + _CHATML_RESULT
    + "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + _CHATML_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_THINKING = (
    _LAST_QUESTION + "{% if tools %}<|im_start|>system\n" + _CHATML_TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + _CHATML_RESULT
    + "{% elif m.role == 'assistant' %}{% set parts = (m.content or '').split('</think>') %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or parts | length > 1) %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}" + _CHATML_CALLS.replace("m.content or", "parts[-1] or") + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The header of the assistant's turn opens the thought.
CHATML_THINKS_FIRST = CHATML_THINKING.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
# Texts are trimmed, one call a turn, tools stand in the first message of the user, results have the role ipython.
LLAMA = (
    "<|begin_of_text|>{% set ns = namespace(tools=tools) %}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ {'output': m.content} | tojson }}"
    "{% else %}{% if m.role == 'user' and ns.tools %}{{ ns.tools | tojson }}\n\n{% set ns.tools = none %}{% endif %}"
    "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No header of the assistant, tools before the LAST message of the user, roles must alternate, ids of nine characters.
MISTRAL = (
    _LAST_QUESTION + "{% set turn = namespace(n=0) %}<s>{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turn.n = turn.n + 1 %}{% endif %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
# Neither a system role nor tools; roles must alternate; the assistant is called model.
GEMMA = (
    "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Arguments are joined as text, results of a turn share a frame, and after it the assistant has no header.
DEEPSEEK = (
    "{% set ns = namespace(results=false) %}<|bos|>"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% if tools %}{{ '\n' + tools | tojson }}\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role != 'tool' and ns.results %}<|results_end|>{% set ns.results = false %}{% endif %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>"
    "{% elif m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}"
    "{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}"
    "<|call|>{{ call.function.name + '\n' + call.function.arguments }}<|call_end|>{% endfor %}<|calls_end|>{% endif %}"
    "<|eos|>"
    "{% elif m.role == 'tool' %}{% if not ns.results %}<|results|>{% set ns.results = true %}{% endif %}"
    "<|result|>{{ m.content }}<|result_end|>{% endif %}{% endfor %}"
    "{% if ns.results %}<|results_end|>{% endif %}"
)
# Thoughts of finished turns are left out, and the header of a turn opens one.
DEEPSEEK_THINKING = DEEPSEEK.replace(
    "<|results_end|>{% endif %}", "<|results_end|>{% elif add_generation_prompt %}<think>\n{% endif %}"
)
# No token ends a turn: the next role's token does, and the policy draws it. Arguments must be a mapping.
GLM = (
    _LAST_QUESTION + "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% set text = m.content or '' %}{{ text.split('</think>')[-1].strip() if loop.index0 < ns.last else text }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ '\n' }}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}"
    "{{ '\n' }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Channels; one call a turn; a call ends with its own token, and the last answer with another one than earlier answers.
GPT_OSS = (
    "{% set ns = namespace(name=none) %}<|start|>system<|message|>Reasoning: low<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set ns.name = call.name %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% set ns.name = none %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}"
    "{% if not ns.name %}{{ raise_exception('a result needs a call before it') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_DEEPSEEK_TOKENS = ("<|eos|>", "<|bos|>", "<|User|>", "<|Assistant|>")
_DEEPSEEK_STRUCTURE = (
    *("<|calls|>", "<|call|>", "<|call_end|>", "<|calls_end|>"),
    *("<|results|>", "<|result|>", "<|result_end|>", "<|results_end|>", *_THOUGHT_TAGS),
)

# Without a generation prompt the text ends with another token; roles that it does not know are left out.
PHI = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
# Results stand in the turn that called for them, and the turn goes on after them.
RESULTS_IN_TURN = (
    "<bos>{% if tools %}<start_of_turn>tools\n{{ tools | tojson }}<end_of_turn>\n{% endif %}"
    "{% set ns = namespace(open=false) %}{% for m in messages if m.role != 'tool' %}"
    "{% if ns.open and m.role != 'assistant' %}{% set ns.open = false %}{{ '<end_of_turn>\n' }}{% endif %}"
    "{% if not ns.open %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% set ns.open = m.tool_calls | length > 0 %}"
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% for call in m.tool_calls or [] %}{% for r in messages if r.role == 'tool' and r.tool_call_id == call.id %}"
    "<result>{{ r.content }}</result>{% endfor %}{% endfor %}"
    "{{ m.content | trim }}{% if not ns.open %}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<start_of_turn>model\n{% endif %}"
)

FAMILIES: dict[str, ChatFamily] = {
    "chatml": ChatFamily(CHATML, _CHATML_TOKENS, _TOOL_TAGS),
    "chatml_thinking": ChatFamily(CHATML_THINKING, _CHATML_TOKENS, (*_TOOL_TAGS, *_THOUGHT_TAGS)),
    "chatml_thinks_first": ChatFamily(CHATML_THINKS_FIRST, _CHATML_TOKENS, (*_TOOL_TAGS, *_THOUGHT_TAGS)),
    "llama": ChatFamily(LLAMA, ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": ChatFamily(
        MISTRAL,
        (
            *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
        vocabulary="metaspace",
    ),
    "gemma": ChatFamily(GEMMA, ("<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>"), vocabulary="unigram"),
    "deepseek": ChatFamily(DEEPSEEK, _DEEPSEEK_TOKENS, _DEEPSEEK_STRUCTURE),
    "deepseek_thinking": ChatFamily(DEEPSEEK_THINKING, _DEEPSEEK_TOKENS, _DEEPSEEK_STRUCTURE),
    "glm": ChatFamily(
        GLM,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_TOOL_TAGS, *_THOUGHT_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "phi": ChatFamily(
        PHI, ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"), vocabulary="metaspace"
    ),
    "results_in_turn": ChatFamily(
        RESULTS_IN_TURN,
        ("<end_of_turn>", "<bos>", "<start_of_turn>", "<call>", "</call>", "<result>", "</result>"),
    ),
    "gpt_oss": ChatFamily(
        GPT_OSS, ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|endoftext|>")
    ),
}


@functools.cache
def _vocabulary(kind: Vocabulary) -> str:
    """A trained core without added tokens, as JSON."""
    texts = [f"What is {i} plus {i * 7 % 100}? The answer is {i + i * 7 % 100}. " for i in range(100)]
    texts += [f'{{"name": "search", "arguments": {{"query": "the number {i}", "limit": {i}}}}}\n' for i in range(100)]
    texts += ["<html><p>Let me think about the tool.</p></html>\n\n    return x\n", "naïve café, 東京 😀 µ\n"] * 20
    trainer: trainers.Trainer
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        # A run of newlines is one piece, whatever follows it.
        words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        core.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    elif kind == "metaspace":
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fallback = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=fallback, show_progress=False)
    else:
        core = Tokenizer(models.Unigram())
        core.normalizer = normalizers.Replace(" ", "▁")
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        fallback = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.UnigramTrainer(
            vocab_size=700, special_tokens=[*fallback, "<end_of_turn>", "<bos>"], unk_token="<unk>", show_progress=False
        )
    core.train_from_iterator(texts, trainer)
    trained = json.loads(core.to_str())
    trained["added_tokens"] = []  # bytes are pieces of the vocabulary, not tokens that are found in a text
    if kind == "unigram":
        trained["model"] |= {"byte_fallback": True, "unk_id": 0}
    return json.dumps(trained)


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of ``FAMILIES``: trained on a few texts, with the control tokens and the chat template."""
    chosen = FAMILIES[family]
    core = Tokenizer.from_str(_vocabulary(chosen.vocabulary))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in chosen.special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in chosen.structural])
    end = chosen.special[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        pad_token=end,
        chat_template=chosen.template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
