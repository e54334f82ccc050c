"""Search in a corpus: on a retrieval server, or in an index of this machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import httpx2
from tenacity import Retrying

from verl.base.http_limits import UNCOMPRESSED, answer_limit
from verl.base.http_retries import retry_rule
from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import in_thread

RETRIES = 3
"""Repetitions of a request after errors of the connection or of the server."""


class RetrievalError(RuntimeError):
    """A retrieval server gives no answer that can be used."""


class CorpusSearchTool(BaseTool):
    """Answer a list of queries with the documents that fit each best; subclasses say where they come from.

    Its ``config``: ``topk`` documents of a query (3).
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.topk = int(config.get("topk", 3))
        if self.topk < 1:
            raise ConfigError(f"the tool {self.name}: config.topk={self.topk} must be at least 1.")

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return self.tool_schema or schema(
            "search",
            "Search for documents and return those that fit best.",
            ["query_list"],
            query_list={"type": "array", "items": {"type": "string"}, "description": "Queries, each a short text."},
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float, JsonObject]:
        """Answer ``parameters["query_list"]``."""
        queries = [str(query) for query in parameters["query_list"]]
        if not queries:
            return ToolResponse(text="Error: query_list is empty."), 0.0, {"query_count": 0, "total_results": 0}
        results = await in_thread(self.search, queries)
        total = sum(map(len, results))
        return (
            ToolResponse(text=format_results(queries, results)),
            0.0,
            {"query_count": len(queries), "total_results": total},
        )

    @abstractmethod
    def search(self, queries: Sequence[str]) -> list[list[str]]:
        """Return the contents of the documents for each query, the best first: a line of title, then the text."""
        raise NotImplementedError


class SearchTool(CorpusSearchTool):
    r"""Ask a retrieval server: ``POST`` of ``{"queries", "topk", "return_scores"}``.

    It answers ``{"result": [[{"document": {"contents": "title\ntext"}, "score": 0.9}, ...], ...]}``, a list for each
    query, with or without scores.

    Its ``config``: ``retrieval_service_url``, ``topk``, ``timeout`` in seconds of a request (30), ``num_workers`` or
    ``rate_limit`` requests at once (the smaller of both; 120). A request that fails for now is repeated.
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.retrieval_service_url = str(config.get("retrieval_service_url") or "")
        if not self.retrieval_service_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the search tool needs config.retrieval_service_url, http://HOST:PORT/retrieve, not "
                f"'{self.retrieval_service_url}'. LocalSearchTool searches a file instead."
            )
        at_once = min(int(config.get("num_workers", 120)), int(config.get("rate_limit", 120)))
        timeout_s = float(config.get("timeout", 30))
        # The limit of a call leaves room for the repetitions.
        super().__init__({"max_concurrent": at_once, "timeout_s": timeout_s * (RETRIES + 1), **config}, tool_schema)
        self._client = httpx2.Client(
            headers=UNCOMPRESSED,
            event_hooks=answer_limit(),
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None),
        )

    def search(self, queries: Sequence[str]) -> list[list[str]]:
        """See :meth:`CorpusSearchTool.search`.

        Raises:
            RetrievalError: the server fails, or answers in another form.
        """
        body = {"queries": list(queries), "topk": self.topk, "return_scores": True}
        try:
            answer = Retrying(**retry_rule(RETRIES))(
                lambda: self._client.post(self.retrieval_service_url, json=body).raise_for_status().json()
            )
            # Servers answer {"document": {"contents": ...}, "score": ...} or, without scores, the document itself.
            contents = [
                [str(document.get("document", document)["contents"]) for document in documents][: self.topk]
                for documents in answer["result"]
            ]
        except httpx2.HTTPError as error:
            raise RetrievalError(f"the retrieval server fails: {error or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetrievalError(f"the retrieval server answers in another form ({error!r}).") from error
        if len(contents) != len(queries):
            raise RetrievalError(f"the retrieval server answers {len(contents)} of {len(queries)} queries.")
        return contents


def format_results(queries: Sequence[str], results: Sequence[Sequence[str]]) -> str:
    """Write the documents for a model, under their query if there are several queries."""
    parts = []
    for query, documents in zip(queries, results, strict=True):
        heading = f"Results for {query!r}:\n" if len(queries) > 1 else ""
        shown = []
        for rank, contents in enumerate(documents, 1):
            title, _, text = contents.partition("\n")
            shown.append(f"Doc {rank} (Title: {title.strip().strip(chr(34))})\n{text.strip()}")
        parts.append(heading + ("\n\n".join(shown) or "No document was found."))
    return "\n\n".join(parts)
