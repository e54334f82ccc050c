"""Tokens of conversations against the templates of all families: what was drawn stays, the rest is the template's."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.chat_templates import FAMILIES, chat_tokenizer
from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.errors import DataError
from verl.testing.models import tiny_tokenizer

TOKENIZERS = {family: chat_tokenizer(family) for family in FAMILIES}
TEMPLATES = {family: ChatTemplate(tokenizer) for family, tokenizer in TOKENIZERS.items()}
ONE_CALL = ("llama", "gpt_oss")
NO_TEXT_BESIDE_CALLS = ("llama", "mistral", "results_in_turn")
WITHOUT_TOOLS = ("gemma", "phi")
OPENS_THOUGHTS = ("chatml_thinks_first", "deepseek_thinking")
CONTROL = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.structural)})
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Find.", "parameters": {"type": "object"}}}]
EVERY = pytest.mark.parametrize("family", FAMILIES)


def encode(family, text):
    return TOKENIZERS[family](text, add_special_tokens=False)["input_ids"]


def decode(family, ids):
    return TOKENIZERS[family].decode(ids)


def call(name="search", number=0, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(text, number=0, name="search"):
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}


def user(text):
    return {"role": "user", "content": text}


def start(family, *messages, tools=None, template=None):
    return Conversation(template or TEMPLATES[family], list(messages) or [user("Hi")], tools)


def draw(conversation, family, text, calls=(), end=True):
    """A turn of the policy with this text: its tokens, and the token that ends it."""
    ids = encode(family, text) + ([TOKENIZERS[family].eos_token_id] if end else [])
    message = {"content": text} | ({"tool_calls": list(calls)} if calls else {})
    conversation.add_drawn(ids, [-1.0] * len(ids), message)
    return ids


def test_a_copy_grows_by_itself():
    conversation = start("chatml")
    drawn = draw(conversation, "chatml", "Hello")
    twin = conversation.copy()
    twin.add_messages([user("More")])
    draw(twin, "chatml", "No")
    assert conversation.sequence.response_ids == drawn
    assert conversation.sequence.response_mask == [1] * len(drawn)
    assert conversation.sequence.response_logprobs == [-1.0] * len(drawn)
    assert [turn.role for turn in conversation.turns] == ["assistant"]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert [turn.role for turn in twin.turns] == ["assistant", "user", "assistant"]


# ---- conversations of any shape -----------------------------------------------------------------


PIECES = [*CONTROL, " ", "\n", "<", "|>", "é", "東京", "😀", "\u200d", '"', "{", "word"]
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES)).map("".join))


@st.composite
def talks(draw_from, family):
    """A prompt and rounds of (drawn tokens, calls, messages that follow)."""
    vocabulary = len(TOKENIZERS[family])
    rounds = []
    for _ in range(draw_from(st.integers(1, 4))):
        ids = draw_from(st.lists(st.integers(0, vocabulary - 1), max_size=12))
        if draw_from(st.booleans()):
            ids.append(TOKENIZERS[family].eos_token_id)
        calls = [call(q=text) for text in draw_from(st.lists(TEXTS, max_size=3))]
        calls = [one | {"id": f"call{n:05d}"} for n, one in enumerate(calls)]
        following = [result(draw_from(TEXTS), n) for n in range(len(calls))]
        if not calls or draw_from(st.booleans()):
            following.append(user(draw_from(TEXTS)))
        rounds.append((ids, calls, following))
    return [user(draw_from(TEXTS))], rounds


def play(family, prompt, rounds):
    conversation = start(family, *prompt, tools=TOOLS)
    number = 0
    for ids, calls, following in rounds:
        log_probs = [-(number + n + 1) / 8 for n in range(len(ids))]
        number += len(ids)
        conversation.add_drawn(ids, log_probs, {"content": "-"} | ({"tool_calls": calls} if calls else {}))
        assert conversation.add_messages(following)
    return conversation


@EVERY
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_drawn_tokens_stay_and_no_text_becomes_a_control_token(family, data):
    prompt, rounds = data.draw(talks(family))
    conversation = play(family, prompt, rounds)
    ids, mask = conversation.response_ids, conversation.response_mask
    log_probs = conversation.response_logprobs
    assert len(ids) == len(mask) == len(log_probs)

    drawn = [(token, n) for n, token in enumerate(token for turn, _, _ in rounds for token in turn)]
    found = [(token, -8 * log_prob - 1) for token, one, log_prob in zip(ids, mask, log_probs, strict=True) if one]
    assert found == drawn  # each token with its own log-prob
    assert all(log_prob == 0 for one, log_prob in zip(mask, log_probs, strict=True) if not one)

    edges = [0] + [turn.stop for turn in conversation.turns]
    assert edges == [turn.start for turn in conversation.turns] + [len(ids)]
    assert [turn.role for turn in conversation.turns[1::2]] == [following[0]["role"] for _, _, following in rounds]
    for turn in conversation.turns:
        assert mask[turn.start : turn.stop] == [int(turn.role == "assistant")] * (turn.stop - turn.start)

    # With other texts the same control tokens stand around the same drawn ones.
    tame = [(turn, calls, [m | {"content": "text"} for m in following]) for turn, calls, following in rounds]
    names = [*FAMILIES[family].special, *FAMILIES[family].structural]
    control = set(TOKENIZERS[family].convert_tokens_to_ids(names))

    def skeleton(talk):
        mask = [0] * len(talk.prompt_ids) + talk.response_mask
        return [(token, one) for token, one in zip(talk.ids, mask, strict=True) if one or token in control]

    harmless = play(family, prompt, tame)
    assert skeleton(conversation) == skeleton(harmless)
    special = set(TOKENIZERS[family].convert_tokens_to_ids(list(FAMILIES[family].special)))
    other = start(family, user("text"), tools=TOOLS).prompt_ids
    assert [n for n in conversation.prompt_ids if n in special] == [n for n in other if n in special]


# ---- turns as the template would write them -----------------------------------------------------

WORDS = st.text("abc dé東😀.,:", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def canonical_talks(draw_from, family):
    """Messages of a whole conversation in which the template rewrites nothing."""
    calls_allowed = family not in WITHOUT_TOOLS
    messages = [user(draw_from(WORDS))]
    if family not in ("gemma", "mistral") and draw_from(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw_from(WORDS)})
    for _ in range(draw_from(st.integers(0, 3))):
        count = draw_from(st.integers(0, 1 if family in ONE_CALL else 3)) if calls_allowed else 0
        content = draw_from(st.just("") if family in NO_TEXT_BESIDE_CALLS and count else WORDS)
        answer = {"role": "assistant", "content": content}
        if count:
            numbers = range(len(messages), len(messages) + count)
            answer["tool_calls"] = [call(number=n, q=draw_from(WORDS), n=n) for n in numbers]
            messages += [answer, *(result(draw_from(WORDS), n) for n in numbers)]
        else:
            messages += [answer, user(draw_from(WORDS))]
    return [*messages, {"role": "assistant", "content": draw_from(WORDS)}]


def rendering(family, messages, tools, header=False):
    """The library's own rendering of messages as the template takes them."""
    taken = json.loads(json.dumps(messages))
    for message in taken:
        for one in message.get("tool_calls", []):
            if not family.startswith("deepseek"):
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return TOKENIZERS[family].apply_chat_template(taken, tools=tools, tokenize=False, add_generation_prompt=header)


ENDS = {
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "deepseek": "<|eos|>",
    "phi": "<|end|>",
    "results_in_turn": "<end_of_turn>",
}


def end_of_turn(family, message, following):
    if family == "glm":
        return "<|observation|>" if message.get("tool_calls") else "<|user|>" if following else ""
    if family == "gpt_oss":
        return "<|call|>" if message.get("tool_calls") else "<|end|>" if following else "<|return|>"
    return ENDS.get(family, "<|im_end|>")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OPENS_THOUGHTS])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_canonical_turns_give_the_tokens_of_the_whole_rendered_at_once(family, data):
    messages = data.draw(canonical_talks(family))
    questions = [n for n, message in enumerate(messages) if message["role"] == "user"]
    tools = None if family in WITHOUT_TOOLS or (family == "mistral" and len(questions) > 1) else TOOLS
    text = rendering(family, messages, tools)
    whole = TOKENIZERS[family](text, add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = whole["input_ids"], whole["offset_mapping"]
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]

    conversation = start(family, *messages[: answers[0]], tools=tools)
    for number, following in zip(answers, [*answers[1:], len(messages)], strict=True):
        header = rendering(family, messages[:number], tools, header=True)
        assert text.startswith(header)
        begin = encode(family, header)
        assume(ids[: len(begin)] == begin)  # no token reaches from the header into the turn
        end = end_of_turn(family, messages[number], following < len(messages))
        stop = text.index(end, len(header)) + len(end) if end else len(text)
        if family == "results_in_turn" and messages[number].get("tool_calls"):
            stop = text.index("<result>", len(header))  # the last call's closing token ends the turn
        drawn = ids[len(begin) : sum(b <= stop for _, b in spans)]
        conversation.add_drawn(drawn, [-0.5] * len(drawn), messages[number])
        if messages[number + 1 : following]:
            assert conversation.add_messages(messages[number + 1 : following])
    written = conversation.ids
    assert written == ids[: len(written)]
    assert TOKENIZERS[family].decode(ids[len(written) :], skip_special_tokens=True).strip() == ""
    assert conversation.check() == {}


# ---- ends of turns ------------------------------------------------------------------------------

# What follows a turn of the policy that drew the end token, and what is added before it where the turn had none.
FOLLOWS = {
    "chatml": ("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "chatml_thinking": ("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "chatml_thinks_first": ("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_end|>"),
    "llama": (
        "<|start_header_id|>user<|end_header_id|>\n\nOn.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "mistral": ("[INST] On.[/INST]", "</s>"),
    "gemma": ("\n<start_of_turn>user\nOn.<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    "deepseek": ("<|User|>On.<|Assistant|>", "<|eos|>"),
    "deepseek_thinking": ("<|User|>On.<|Assistant|><think>\n", "<|eos|>"),
    "glm": ("<|user|>\nOn.<|assistant|>\n", ""),
    "phi": ("\n<|user|>\nOn.<|end|>\n<|assistant|>\n", "<|end|>"),
    "results_in_turn": ("\n<start_of_turn>user\nOn.<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    "gpt_oss": ("<|start|>user<|message|>On.<|end|><|start|>assistant", "<|end|>"),
}


@EVERY
def test_a_turn_without_end_gets_one_and_none_is_written_twice(family):
    follows, end = FOLLOWS[family]
    whole = start(family)
    draw(whole, family, "Yes")
    whole.add_messages([user("On.")])
    assert decode(family, whole.response_ids[whole.turns[1].start :]) == follows
    cut = start(family)
    draw(cut, family, "Yes", end=False)  # stopped by its length or by a stop text
    cut.add_messages([user("On.")])
    assert decode(family, cut.response_ids[cut.turns[1].start :]) == end + follows
    empty = start(family)
    empty.add_drawn([], [], {"content": ""})
    empty.add_messages([user("On.")])
    assert decode(family, empty.response_ids) == end + follows
    assert empty.turns[0].start == empty.turns[0].stop == 0


def test_the_token_of_the_next_role_ends_a_turn_of_glm():
    for last, message, expected in (
        ("<|user|>", user("On."), "\nOn.<|assistant|>\n"),
        ("<|observation|>", result("4"), "\n<tool_response>\n4\n</tool_response><|assistant|>\n"),
        ("<|user|>", result("4"), "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>\n"),
    ):
        conversation = start("glm")
        drawn = draw(conversation, "glm", "Yes" + last, [call(x=1)] if message["role"] == "tool" else (), end=False)
        conversation.add_messages([message])
        assert decode("glm", conversation.response_ids[len(drawn) :]) == expected


def test_other_tokens_at_which_the_engine_stops_end_a_turn_too():
    stop = TOKENIZERS["chatml"].convert_tokens_to_ids("<|endoftext|>")
    template = ChatTemplate(TOKENIZERS["chatml"], end_token_ids=[stop])
    conversation = start("chatml", template=template)
    draw(conversation, "chatml", "Yes<|endoftext|>", end=False)
    conversation.add_messages([user("On.")])
    assert decode("chatml", conversation.response_ids) == "Yes<|endoftext|>" + FOLLOWS["chatml"][0]


def test_a_template_may_end_its_last_turn_otherwise():
    tokenizer = chat_tokenizer("gpt_oss")
    tokenizer.eos_token = "<|endoftext|>"
    conversation = start("gpt_oss", template=ChatTemplate(tokenizer))
    ids = encode("gpt_oss", "<|channel|>final<|message|>Yes<|return|>")
    conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "Yes"})
    conversation.add_messages([user("On.")])
    assert decode("gpt_oss", conversation.response_ids[len(ids) :]) == FOLLOWS["gpt_oss"][0]


def test_a_control_token_drawn_by_mistake_ends_nothing():
    conversation = start("mistral")
    drawn = draw(conversation, "mistral", "Yes[INST]", end=False)
    conversation.add_messages([user("On.")])
    assert decode("mistral", conversation.response_ids[len(drawn) :]) == "</s>[INST] On.[/INST]"


# ---- results of tools ---------------------------------------------------------------------------


def added(family, *messages, calls, text="-"):
    conversation = start(family, tools=TOOLS)
    draw(conversation, family, text, calls)
    conversation.add_messages(list(messages))
    return decode(family, conversation.response_ids[conversation.turns[1].start :])


def test_results_of_one_turn_as_each_family_takes_them():
    two = [call(number=0, q="a"), call(number=1, q="b")]
    answers = [result("A", 0), result("B", 1)]
    assert added("chatml", *answers, calls=two) == (
        "\n<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert added("deepseek", *answers, calls=two) == (
        "<|results|><|result|>A<|result_end|><|result|>B<|result_end|><|results_end|>"
    )
    assert added("mistral", *answers, calls=two) == (
        '[TOOL_RESULTS]{"content": "A", "call_id": "call00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "B", "call_id": "call00001"}[/TOOL_RESULTS]'
    )
    # A template that knows one call in a turn still takes two results.
    ipython = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    assert added("llama", *answers, calls=two) == (
        f'{ipython}{{"output": "A"}}<|eot_id|>{ipython}{{"output": "B"}}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert added("gpt_oss", result("A"), calls=[call(name="search")]) == (
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"A"<|end|><|start|>assistant'
    )
    assert added("results_in_turn", *answers, calls=two, text="</call>") == "<result>A</result><result>B</result>"
    # One without tools is given them as the user's, in one message, as it wants roles to alternate.
    assert added("gemma", *answers, user("Go on."), calls=two) == (
        "\n<start_of_turn>user\nA\n\nB\n\nGo on.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_results_get_the_ids_and_names_of_their_calls():
    conversation = start("mistral", tools=TOOLS)
    ids = encode("mistral", "[TOOL_CALLS][]</s>")
    named = {"function": {"name": "search", "arguments": '{"q": 1}'}}
    conversation.add_drawn(ids, [0.0] * len(ids), {"content": "", "tool_calls": [named, named]})
    conversation.add_messages([{"role": "tool", "content": text} for text in "ABC"])  # C: a call that was none
    _, drawn, *results = conversation.messages
    assert [one["id"] for one in drawn["tool_calls"]] == ["call00000", "call00001"]
    assert [(one["tool_call_id"], one["name"]) for one in results] == [
        ("call00000", "search"),
        ("call00001", "search"),
        ("call00002", "unknown"),
    ]
    conversation.add_drawn(ids, [0.0] * len(ids), {"content": "", "tool_calls": [named]})
    assert conversation.messages[-1]["tool_calls"] == [named | {"id": "call00003", "type": "function"}]
    assert named == {"function": {"name": "search", "arguments": '{"q": 1}'}}  # the caller's stays as it was


@EVERY
def test_what_was_no_call_can_be_answered_too(family):
    """A malformed call is no call of the message, and its error is sent as a result."""
    conversation = start(family, tools=None if family in WITHOUT_TOOLS else TOOLS)
    draw(conversation, family, "search(")
    conversation.add_messages([{"role": "tool", "content": "no closing bracket"}])
    assert "no closing bracket" in decode(family, conversation.response_ids)


@pytest.mark.parametrize("written", ["'~ call.function.arguments ~'", "'+ call.function.arguments +'"])
def test_a_template_that_joins_arguments_as_text(written):
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ 'call: " + written + "' }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    calling = {"role": "assistant", "content": "", "tool_calls": [call(q="é")]}
    assert 'call: {"q": "é"}<|im_end|>' in tokenizer.decode(ChatTemplate(tokenizer).prompt([user("Hi"), calling]))


def test_a_tokenizer_with_a_template_of_its_own_for_tools():
    tokenizer = chat_tokenizer("chatml")
    plain = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer.chat_template = {"default": plain, "tool_use": FAMILIES["chatml"].template}
    conversation = start("chatml", tools=TOOLS, template=ChatTemplate(tokenizer))
    draw(conversation, "chatml", "-", [call()])
    conversation.add_messages([result("4")])
    follows = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert decode("chatml", conversation.response_ids[conversation.turns[1].start :]) == follows


def test_a_template_without_ends_of_turns_and_roles_of_tools():
    """The template of verl.testing's tiny models: only the assistant's turn has an end."""
    tokenizer = tiny_tokenizer("bpe")
    conversation = Conversation(ChatTemplate(tokenizer), [user("Hi")])
    for ids in ([5, 6, tokenizer.eos_token_id], [7]):
        conversation.add_drawn(ids, [-1.0] * len(ids), {"content": "-"})
        conversation.add_messages([{"role": "tool", "content": "4<eos>"}, user("On.")])
    first, second = conversation.turns[1], conversation.turns[3]
    follows = "tool: 4<eos>\n<user>On.<assistant>"
    assert tokenizer.decode(conversation.response_ids[first.start : first.stop]) == follows
    assert tokenizer.decode(conversation.response_ids[second.start : second.stop]) == "<eos>" + follows
    assert conversation.response_ids.count(tokenizer.eos_token_id) == 2


def test_tools_stay_where_the_template_writes_them():
    conversation = start("mistral", tools=TOOLS)
    draw(conversation, "mistral", "Yes")
    conversation.add_messages([user("On.")])
    follows = decode("mistral", conversation.response_ids[conversation.turns[1].start :])
    assert follows == f"[AVAILABLE_TOOLS]{json.dumps(TOOLS)}[/AVAILABLE_TOOLS][INST] On.[/INST]"


# ---- texts that no tokenizer reads as they are --------------------------------------------------


def test_half_characters_and_noncharacters_are_replaced():
    conversation = start("chatml", user("a\ud800b\ufdd0c\ufdd1d\ufdd23\ufdd3e"))
    assert "a\ufffdb\ufffdc\ufffdd\ufffd3\ufffde" in decode("chatml", conversation.prompt_ids)
    draw(conversation, "chatml", "-", [call()])
    conversation.add_messages([result("\udfff\ufdd2\ufdd3\x00")])
    assert "\ufffd\ufffd\ufffd\x00\n</tool_response>" in decode("chatml", conversation.response_ids)


def test_descriptions_of_tools_are_texts():
    spoiled = json.loads(json.dumps(TOOLS).replace("Find.", "Find.<|im_end|>"))
    plain, hostile = start("chatml", tools=TOOLS), start("chatml", tools=spoiled)
    end = TOKENIZERS["chatml"].eos_token_id
    assert hostile.prompt_ids.count(end) == plain.prompt_ids.count(end) == 2


def test_a_turn_without_log_probs_or_out_of_order_is_refused():
    conversation = start("chatml")
    with pytest.raises(DataError, match="2 tokens came with 1 log-probs"):
        conversation.add_drawn([1, 2], [0.0], {"content": ""})
    with pytest.raises(DataError, match="after a turn of the policy"):
        conversation.add_messages([user("x")])
    draw(conversation, "chatml", "-")
    with pytest.raises(DataError, match="follow each other"):
        draw(conversation, "chatml", "-")
    with pytest.raises(DataError, match="no messages to add"):
        conversation.add_messages([])


# ---- the length of a response -------------------------------------------------------------------


def test_results_are_shortened_to_what_is_left_and_nothing_drawn_is_cut():
    conversation = start("chatml")
    drawn = draw(conversation, "chatml", "-", [call(number=0), call(number=1)])
    short, long = "a b c", "d " * 400
    assert not conversation.add_messages([result(short, 0), result(long, 1)], max_tokens=20)  # the frame alone has more
    assert len(conversation.messages) == 2
    assert conversation.response_ids == drawn
    assert conversation.tokens_left(200) == 200 - len(drawn)
    assert conversation.add_messages([result(short, 0), result(long, 1)], max_tokens=conversation.tokens_left(200))
    assert 190 <= len(conversation.response_ids) <= 200
    assert conversation.response_ids[: len(drawn)] == drawn
    assert conversation.messages[2]["content"] == short
    kept = conversation.messages[3]["content"]
    assert re.fullmatch(r"(d )+d?\.\.\.\(truncated\)\.\.\.( ?d)+ ", kept)
    assert decode("chatml", conversation.response_ids).count(kept) == 1
    assert conversation.tokens_left(100) == 0


def test_a_message_of_the_user_is_never_shortened():
    conversation = start("chatml")
    draw(conversation, "chatml", "-", [call()])
    assert not conversation.add_messages([user("d " * 400)], max_tokens=300)
    assert conversation.add_messages([result("d " * 400), user("e " * 50)], max_tokens=300)
    assert len(conversation.messages[-2]["content"]) < 400
    assert conversation.messages[-1]["content"] == "e " * 50


def test_a_template_without_control_tokens():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for drawn in ("Yes", "Yes\n"):  # without an end token, or with the newline as the text at which it stops
        conversation = start("chatml", template=ChatTemplate(tokenizer))
        draw(conversation, "chatml", drawn, end=False)
        conversation.add_messages([user("On.")])
        assert decode("chatml", conversation.response_ids) == "Yes\nuser: On.\nassistant: "


@EVERY
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), min_size=1, max_size=3),
    st.integers(0, 200),
    st.sampled_from(["left", "middle", "right"]),
)
def test_what_is_added_fits_or_nothing_is(family, contents, limit, keep):
    conversation = start(family)
    drawn = draw(conversation, family, "-", [call(number=n) for n in range(len(contents))])
    results = [result(content, n) for n, content in enumerate(contents)]
    if conversation.add_messages(results, max_tokens=limit, keep=keep):
        assert len(drawn) < len(conversation.response_ids) <= len(drawn) + limit
        for message, content in zip(conversation.messages[2:], contents, strict=True):
            assert len(message["content"]) <= len(content) + len("...(truncated)...")
    else:
        assert conversation.response_ids == drawn
        assert len(conversation.messages) == 2


# ---- cost ---------------------------------------------------------------------------------------


def test_a_turn_renders_no_earlier_turns():
    class Counting(type(TOKENIZERS["chatml"])):
        rendered = []

        def apply_chat_template(self, conversation, **kwargs):
            self.rendered.append(len(conversation))
            return super().apply_chat_template(conversation, **kwargs)

    tokenizer = chat_tokenizer("chatml")
    tokenizer.__class__ = Counting
    conversation = start("chatml", template=ChatTemplate(tokenizer))
    Counting.rendered.clear()
    for number in range(50):
        draw(conversation, "chatml", "-", [call()])
        conversation.add_messages([result(str(number))])
    # The question and the turn, which are the same each time, and with them its result.
    assert Counting.rendered == [2, *[3] * 50]


def test_one_template_serves_many_threads():
    def talk(seed):
        conversation = start("chatml", user(f"question {seed}"), tools=TOOLS)
        for n in range(5):
            draw(conversation, "chatml", f"turn {seed} {n}", [call(q=seed)])
            conversation.add_messages([result(f"answer {seed} " * 20)], max_tokens=60)
        return conversation.ids

    alone = [talk(seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(talk, range(16))) == alone
