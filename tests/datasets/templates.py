"""Chat templates in the manner of model families, and byte-level tokenizers that carry them."""

from verl.testing.models import tiny_tokenizer

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts: an empty one is written into the answers after the last question, and no other.
QWEN_THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\nTools: {{ tools }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# A system prompt of the template's own where the conversation has none.
QWEN_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + QWEN
)
# Thoughts of finished turns are left out once another question has come.
QWEN_REASONING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts are a field of their own, left out of turns before the last question; the last turn has one, if empty.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip() }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A turn ends with the token of the next message; the tags of calls and thoughts are tokens, too.
GLM45 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ (m.reasoning_content or '').strip() if loop.index0 > ns.last }}</think>"
    "{% if m.content %}{{ '\n' + m.content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ '\n' + key }}: {{ value }}{% endfor %}"
    "{{ '\n' }}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# No header of the assistant: it answers after the closing bracket.
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"
)
SPECIALS = {
    QWEN: ["<|im_start|>", "<|im_end|>"],
    QWEN_THINKING: ["<|im_start|>", "<|im_end|>"],
    LLAMA: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    GEMMA: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    QWEN_DEFAULT: ["<|im_start|>", "<|im_end|>"],
    QWEN_REASONING: ["<|im_start|>", "<|im_end|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    GLM45: [
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ],
    MISTRAL: ["<s>", "</s>", "[INST]", "[/INST]"],
}


def tokenizer_with(template):
    """A byte-level tokenizer with a template and its special tokens."""
    tokenizer = tiny_tokenizer("bpe")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[template]})
    tokenizer.chat_template = template
    return tokenizer
