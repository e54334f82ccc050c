"""The interface of an interaction, which answers the policy as a user would."""

from __future__ import annotations

from uuid import uuid4

from verl.base.types import JsonObject


class BaseInteraction:
    """A simulated user. One object serves all trajectories of a process, whose state it keeps by ``instance_id``.

    A trajectory calls ``start_interaction`` before its first turn, ``generate_response`` after each turn of the policy
    that calls no tool and after the last one, and ``finalize_interaction`` at its end. All of them run in a thread of
    this trajectory: blocking code delays no other. Keep no object of asyncio in the interaction itself, for each
    thread has an event loop of its own.

    Args:
        config: the interaction's ``config`` in the YAML file, with its ``name``.
    """

    asks_judge: bool = False
    """True if the methods ask the judge of the run, at ``kwargs["reward_router_address"]``. A run whose judge does not
    answer while conversations are held is then refused."""

    def __init__(self, config: JsonObject) -> None:
        self.config = config
        self.name: str = config.get("name", type(self).__name__)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: object) -> str:
        """Prepare the interaction for one trajectory.

        Args:
            instance_id: name of the trajectory's state; None draws one.
            **kwargs: the row's ``interaction_kwargs``.

        Returns:
            The name of the state.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[JsonObject], **kwargs: object
    ) -> tuple[bool, str | list[JsonObject], float | None, JsonObject]:
        """Answer the policy's last turn.

        Args:
            instance_id: name of the trajectory's state.
            messages: the conversation; the policy's turn is the last one. Images are parts ``{"type": "image"}``
                without the picture.
            **kwargs: the row's ``interaction_kwargs``.

        Returns:
            Whether the conversation ends here; what the user says, which nobody sees if it does: a text, or for a
            policy that reads images parts ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``;
            the score of the policy's turn, or None from an interaction that gives no scores; and further values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_response().")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: object) -> float:
        """Return the score of the trajectory's state; for :meth:`generate_response`, which alone calls it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: object) -> None:
        """Release the resources that :meth:`start_interaction` acquired."""
