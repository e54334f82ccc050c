"""Chat templates for scripts, from :mod:`verl.compat.toolkit.chat`."""

from verl.compat.toolkit.chat import apply_chat_template as apply_chat_template
from verl.compat.toolkit.chat import extract_system_prompt_and_generation as extract_system_prompt_and_generation
from verl.compat.toolkit.chat import initialize_system_prompt as initialize_system_prompt
