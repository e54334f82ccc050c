"""Texts of gpt-oss's format, for agent loops that write the tokens of a conversation themselves."""

from __future__ import annotations


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Return the message with which a tool answers.

    Args:
        tool_response: text of the answer; control tokens in it would become tokens, so take them out before.
        tool_call_name: name of the tool.
    """
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """Return messages with the header of the assistant's next turn."""
    return f"{message_content}<|start|>assistant"
