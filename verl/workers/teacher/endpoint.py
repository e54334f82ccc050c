"""A teacher behind an OpenAI-compatible completions endpoint that gives the log-probs of prompts.

The prompt is sent as token ids. Two forms of answers are read:

``prompt_logprobs``
    vLLM's: of each place the token and the most likely ones, by id.
``echo``
    OpenAI's, with ``echo`` and ``logprobs``: the log-prob of each token. It names the most likely tokens by their text,
    which several may share, so these are not read.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from verl.base import env
from verl.base.requirements import install_command
from verl.config import DistillationTeacherModelConfig
from verl.errors import ConfigError, RolloutError
from verl.tools.threads import LoopThread
from verl.workers.rollout.scoring import ScoreRequest, TokenScores, scores_of_prompt

if TYPE_CHECKING:
    import openai

TIMEOUT_S = 600.0
"""Longest wait for one answer."""
ATTEMPTS = 6
"""Attempts of one request, with growing pauses; also after status 408, 409, 429 or 5xx."""
PROBED_TOKENS = 32
"""Tokens of the first request, spread over the vocabulary, whose texts are compared with the tokenizer's."""
SHOWN = 500
"""Longest part of an answer in a message, in characters."""
Body = dict[str, object]
Form = tuple[Callable[[ScoreRequest], Body], Callable[[ScoreRequest, Mapping[str, Any]], TokenScores]]


class EndpointTeacher:
    """Scores tokens by an endpoint.

    Args:
        setting: names the teacher in messages, ``distillation.teacher_models.NAME``.
        teacher: its address and model.
        tokenizer: the policy's.
        top_k: how many most likely tokens the divergence reads.

    Raises:
        ConfigError: the endpoint cannot be reached, gives no log-probs of prompts, names most likely tokens by text
            alone where these are read, or its tokens are not the policy's.
    """

    def __init__(
        self, setting: str, teacher: DistillationTeacherModelConfig, tokenizer: PreTrainedTokenizerBase, top_k: int
    ) -> None:
        inference = teacher.inference
        assert inference.base_url is not None, "the configuration was not checked: the endpoint has no base_url"
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ConfigError(f"a teacher behind an endpoint needs openai: {install_command('judge')}.") from error
        key = inference.api_key_env and env.secret(inference.api_key_env, f"{setting}.inference.api_key_env")
        self._where = f"{setting} at {inference.base_url}"
        self._model = teacher.model_path
        self._vocab_size = len(tokenizer)
        self._thread = LoopThread("teacher-endpoint")
        self._room = asyncio.Semaphore(inference.max_num_seqs)
        self._client: openai.AsyncOpenAI = openai.AsyncOpenAI(
            base_url=inference.base_url, api_key=key or "none", timeout=TIMEOUT_S, max_retries=ATTEMPTS - 1
        )
        self._form = self._probe(setting, tokenizer, top_k)

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """Compute the log-probs of given tokens, in the order of the requests.

        Raises:
            RolloutError: a request has images or a temperature other than 1, or the endpoint does not answer it.
        """
        for request in requests:
            if request.temperature != 1:
                raise RolloutError(
                    f"{self._where}: an endpoint gives log-probs at temperature 1, and {request.temperature:g} is "
                    "asked for. Set inference.temperature=1, or take a teacher of another name."
                )
            if request.images is not None:
                raise RolloutError(f"{self._where}: a row has images, and a completions endpoint takes text alone.")

        async def all_of_them() -> list[TokenScores]:
            return list(await asyncio.gather(*(self._ask(self._form, request) for request in requests)))

        return self._thread.submit(all_of_them()).result()

    async def _ask(self, form: Form, request: ScoreRequest) -> TokenScores:
        """Send one request and read its answer.

        Raises:
            RolloutError: after all attempts there is no answer, or it lacks what was asked for.
        """
        import openai

        body, read = form
        try:
            async with self._room:
                answer = await self._client.post("/completions", cast_to=object, body=body(request))
        except openai.APIStatusError as error:
            raise RolloutError(
                f"{self._where} answered with status {error.status_code}: {error.response.text[:SHOWN]}"
            ) from error
        except openai.APIConnectionError as error:  # also after a time limit
            raise RolloutError(
                f"{self._where} gave no answer in {ATTEMPTS} attempts of at most {TIMEOUT_S:g} s each: {error}"
            ) from error
        return read(request, self._choice(answer))

    def _choice(self, answer: object) -> Mapping[str, Any]:
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise RolloutError(f"{self._where} answered without choices: {_shown(answer)}")
        return choices[0]

    # ---- forms of requests and answers

    def _prompt_logprobs(self, request: ScoreRequest) -> Body:
        return self._body(request) | {"prompt_logprobs": request.top_k}

    def _read_prompt_logprobs(self, request: ScoreRequest, choice: Mapping[str, Any]) -> TokenScores:
        places = choice.get("prompt_logprobs")
        if not isinstance(places, list):
            raise RolloutError(f"{self._where} gave no prompt_logprobs: {_shown(choice)}")
        return scores_of_prompt(request, places, self._where, vocab_size=self._vocab_size)

    def _echo(self, request: ScoreRequest) -> Body:
        return self._body(request) | {"echo": True, "logprobs": 1}

    def _read_echo(self, request: ScoreRequest, choice: Mapping[str, Any]) -> TokenScores:
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
        end = len(request.token_ids)
        if not isinstance(values, list) or not end <= len(values) <= end + 1:  # with the token that is drawn
            raise RolloutError(f"{self._where} gave no log-prob for each of {end} tokens: {_shown(choice)}")
        scored = [math.nan if value is None else float(value) for value in values[request.start : end]]
        return TokenScores.from_report(request, scored, [[] for _ in scored], self._where)

    def _body(self, request: ScoreRequest) -> Body:
        return {"model": self._model, "prompt": request.token_ids, "max_tokens": 1, "temperature": 0}

    # ---- at the start

    def _probe(self, setting: str, tokenizer: PreTrainedTokenizerBase, top_k: int) -> Form:
        """Ask for the scores of some tokens, in both forms, and return the one that is answered."""
        special = set(tokenizer.all_special_ids)
        ids = [token_id for token_id in sorted(tokenizer.get_vocab().values()) if token_id not in special]
        request = ScoreRequest(ids[:: max(1, len(ids) // PROBED_TOKENS)], 1, top_k)
        refusals = []
        for name, body, read in (
            ("prompt_logprobs", self._prompt_logprobs, self._read_prompt_logprobs),
            ("echo", self._echo, self._read_echo),
        ):
            if name == "echo" and top_k:
                refusals.append("echo names most likely tokens by their text, and this divergence reads their ids.")
                break
            texts: list[str | None] = []

            def read_with_texts(
                score_request: ScoreRequest,
                choice: Mapping[str, Any],
                read: Any = read,
                texts: list[str | None] = texts,
            ) -> TokenScores:
                scores = read(score_request, choice)
                texts += _texts_of(score_request, choice)
                return scores

            try:
                self._thread.submit(self._ask((body, read_with_texts), request)).result()
            except RolloutError as error:
                refusals.append(f"Asked for {name}: {error}")
                continue
            self._check_texts(request.token_ids, texts, tokenizer)
            return body, read
        raise ConfigError(
            f"{setting}.inference.base_url: this endpoint gives no log-probs of prompts, so it cannot be a teacher. "
            f"{' '.join(refusals)} Serve the model with vLLM (`vllm serve`), or set {setting}.inference.name to "
            "another kind of teacher."
        )

    def _check_texts(self, ids: Sequence[int], texts: Sequence[str | None], tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the texts that the endpoint gives to tokens with the policy's; incomplete characters are left out."""
        for token_id, text in zip(ids, texts, strict=False):
            expected = str(tokenizer.decode([token_id]))
            if text is None or "\ufffd" in text + expected or text.strip() == expected.strip():
                continue
            raise ConfigError(
                f"{self._where} has another tokenizer than the policy: token {token_id} is {expected!r} to the policy "
                f"and {text!r} to the teacher. Take a teacher of the policy's model family."
            )


def _texts_of(request: ScoreRequest, choice: Mapping[str, Any]) -> list[str | None]:
    """Return the texts that an answer gives to the tokens of a request, None where it gives none."""
    if choice.get("prompt_logprobs"):
        pairs = zip(request.token_ids, choice["prompt_logprobs"], strict=False)
        return [(entries or {}).get(str(token), {}).get("decoded_token") for token, entries in pairs]
    return list(choice["logprobs"].get("tokens") or [])


def _shown(answer: object) -> str:
    return json.dumps(answer, default=str)[:SHOWN]
