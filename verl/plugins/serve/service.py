"""The service: a web server in a thread, and the ranks that compute in turns what its clients ask for.

::

    client ── HTTP ──► app ──► clients: checks ──► board ──► computing ──► worker group ──► ranks
    client ◄── result ◄────────────────────────── futures ◄────────┘

    of each model in order; of several models' passes at once, each row under its model's adapter
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from verl.base import env
from verl.config import ServeConfig, local_copies
from verl.errors import ConfigError, ProcessLostError
from verl.plugins.serve.app import tinker_app
from verl.plugins.serve.clients import Clients
from verl.plugins.serve.computing import Computing
from verl.plugins.serve.data import ModelLimits
from verl.plugins.serve.files import StateFiles
from verl.plugins.serve.jobs import JobBoard
from verl.plugins.serve.worker import AdapterWorker
from verl.tools.loopback import LoopbackServer
from verl.trainer.config.sizes import resolve_device
from verl.trainer.driver import load_controller
from verl.trainer.worker_groups import WorkerGroups
from verl.utils.console import show
from verl.utils.model import hf_config_of

logger = logging.getLogger(__name__)

PREFIX = "tml-"
"""Beginning of every key, without which clients send none."""
POLL_S = 0.5
"""Seconds between checks of the computing thread whether it is to end."""
ROLE = "adapters"


def service_key() -> str:
    """Return the key that clients send: ``TINKER_API_KEY``, or a new random one.

    Raises:
        ConfigError: clients would not send the one that is set.
    """
    key = env.tinker_api_key()
    if key is None:
        return f"{PREFIX}{secrets.token_urlsafe(24)}"
    if not key.startswith(PREFIX):
        raise ConfigError(
            f"TINKER_API_KEY must begin with {PREFIX!r}, or clients refuse it. Unset it for a random one."
        )
    return key


def limits_of(config: ServeConfig) -> ModelLimits:
    """Return what the base model takes.

    Raises:
        ConfigError: ``server.max_length`` is beyond its context.
    """
    text = hf_config_of(config.model).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and config.server.max_length > positions:
        raise ConfigError(
            f"server.max_length={config.server.max_length}, and the context of {config.model.path} has "
            f"max_position_embeddings={positions}. Lower it."
        )
    return ModelLimits(text.vocab_size, config.server.max_length)


class Service:
    """Serves clients until it is interrupted."""

    def run(self, config: ServeConfig) -> None:
        """Load the model, listen, and compute until Ctrl-C."""
        key, limits = service_key(), limits_of(local_copies(config))
        files, board = StateFiles(Path(config.server.state_dir)), JobBoard()
        controller, device = load_controller(config.trainer.controller), resolve_device(config)
        ranks = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        workers = WorkerGroups(
            worker_classes={ROLE: AdapterWorker},
            pools=controller.ResourcePoolManager({"global_pool": ranks}, {ROLE: "global_pool"}, device),
            group_class=controller.WorkerGroup,
            device_name=device,
            start_timeout_s=config.trainer.ray_wait_register_center_timeout,
        )
        arguments = {ROLE: {"config": config}}
        # Before the model loads, because the port may be taken.
        server = LoopbackServer(tinker_app(Clients(config, board, files, limits), key), config.server.port)
        most_responses = 4 * config.rollout.max_num_seqs
        try:
            computing = Computing(config, board, files, workers.start(arguments)[ROLE])
            show(f"{config.name} at {server.url}, until Ctrl-C; it answers this machine only. For clients:")
            show(f"export TINKER_BASE_URL={server.url} TINKER_API_KEY={key}")
            while True:
                jobs = board.take(config.server.max_models, most_responses, POLL_S)
                if not jobs:
                    continue
                try:
                    computing.do(jobs)
                except ProcessLostError as error:
                    logger.error("a rank was lost, and all are started again: %s", error)
                    board.lose(
                        f"a rank of the service died, and with it this model ({error}). Make a new one from its last "
                        "saved state (create_training_client_from_state_with_optimizer)."
                    )
                    workers.end()
                    computing.group = workers.start(arguments)[ROLE]
        finally:
            board.close("the service was ended.")
            server.close()
            workers.end()
