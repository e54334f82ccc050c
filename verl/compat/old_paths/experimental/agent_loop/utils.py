"""Public address of the texts of gpt-oss's format."""

from verl.compat.toolkit.harmony import add_generation_prompt_for_gpt_oss as add_generation_prompt_for_gpt_oss
from verl.compat.toolkit.harmony import format_gpt_oss_tool_response_manually as format_gpt_oss_tool_response_manually
