"""A user who says whether the answer to a problem of GSM8K is right, until it is."""

from __future__ import annotations

import threading

from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.scorers import gsm8k

CORRECT_REPLY = "Yes, that is right."
INCORRECT_REPLY = "That is not right. Look for the mistake, and give your answer again."
METHODS = ("strict", "flexible")
"""See ``extract_solution`` of the scorer of GSM8K."""


class Gsm8kInteraction(BaseInteraction):
    """Score each answer, 1 if it is right and 0 if not, and ask again until one is right.

    The row's ``interaction_kwargs`` hold ``ground_truth``. ``config`` may have ``method``: ``strict`` (the default)
    reads the number after ``####``, ``flexible`` the last number.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self.method = config.get("method", "strict")
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} is unknown; there are {' and '.join(METHODS)}.")
        self._lock = threading.Lock()
        self._instance_dict: dict[str, JsonObject] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: object
    ) -> str:
        """Start a trajectory.

        Raises:
            ValueError: the row has no ``ground_truth``.
        """
        if ground_truth is None:
            raise ValueError("no ground_truth: the row needs extra_info.interaction_kwargs.ground_truth.")
        instance_id = await super().start_interaction(instance_id)
        with self._lock:
            self._instance_dict[instance_id] = {"response": "", "ground_truth": str(ground_truth), "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[JsonObject], **kwargs: object
    ) -> tuple[bool, str, float, JsonObject]:
        """Score the policy's last turn."""
        answers = [message.get("content") or "" for message in messages if message.get("role") == "assistant"]
        state = self._instance_dict[instance_id]
        state["response"] = answers[-1] if answers else ""
        state["reward"] = await self.calculate_score(instance_id)
        is_right = state["reward"] == 1.0
        return is_right, CORRECT_REPLY if is_right else INCORRECT_REPLY, state["reward"], {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: object) -> float:
        """Score of the last answer."""
        state = self._instance_dict[str(instance_id)]
        return float(gsm8k.compute_score(state["response"], state["ground_truth"], method=self.method))

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: object) -> None:
        """See :meth:`BaseInteraction.finalize_interaction`."""
        with self._lock:
            self._instance_dict.pop(str(instance_id), None)
