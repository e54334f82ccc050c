"""Continuous batching: the loop that admits requests, draws one token per row and pass, and removes finished rows."""

from __future__ import annotations

import functools
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import torch
from torch import Tensor, nn

from verl.errors import RolloutError
from verl.workers.rollout.native.memory import KeyValueMemory
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.native.prefixes import PAGE, Prefix, PrefixCache
from verl.workers.rollout.placed_images import ImageSpan, PlacedImages
from verl.workers.rollout.request import NOT_KEPT, DrawnPart, FinishReason, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import STREAM_EVERY_S, RequestQueue
from verl.workers.rollout.routing import RoutingTable
from verl.workers.rollout.sampling import StopRules, TokenSampler, enlarged
from verl.workers.routers import unknown

# Share of rows that must be free before requests are admitted: several prompts cost about the same pass as one.
_REFILL_AT = 0.125
# For the same reason a few requests wait for others while many rows run, for at most so many tokens.
_ENOUGH_FOR_A_PASS = 0.125
_MAX_WAIT = 4


@dataclass
class Group:
    """Waiting requests with the same prompt, which is computed once for all of them."""

    prompt_ids: list[int]
    images: PlacedImages | None = None
    members: list[tuple[int, RolloutRequest]] = field(default_factory=list)
    """Id of each request, and the request."""
    cached: Prefix = field(default_factory=Prefix)
    """The beginning of the prompt whose keys and values are cached."""

    @property
    def identity(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The tokens and the hashes of the images, by which prompts are equal."""
        return tuple(self.prompt_ids), () if self.images is None else self.images.digests

    @property
    def spans(self) -> Sequence[ImageSpan]:
        """The images of the prompt."""
        return () if self.images is None else self.images.spans


@dataclass(frozen=True)
class Arrivals:
    """Requests and signals that came from outside since the last token."""

    is_aborted: bool
    cancelled: set[int]
    """Ids of the requests that nobody waits for any more."""
    requests: list[tuple[int, RolloutRequest]]
    """New requests with their ids."""


class Generation:
    """The loop over the requests of a queue; those that come while it runs are admitted within four tokens.

    Running requests have rows of tables, which are used again after the response has ended.

    Args:
        queue: open, or closed once all requests were put.
        model: computes the passes.
        memory: empty, with room for the longest request.
        sampler: without rows.
        stop: without rows.
        prefill_tokens: largest number of prompt tokens in one pass; a longer prompt is computed alone.
        answer: makes the answer from the tokens, their log-probs and the finish reason.
        check: raises RolloutError if a request cannot be served, which is then the answer; None checks nothing.
        cache: keys and values of earlier requests, and then also of these.
        on_pass: called before each token, and once more at the end.
        kept_width: largest number of ids per token that is returned to requests that ask what sampling kept.
    """

    def __init__(
        self,
        queue: RequestQueue,
        model: NativeModel,
        memory: KeyValueMemory,
        sampler: TokenSampler,
        stop: StopRules,
        prefill_tokens: int,
        answer: Callable[[list[int], list[float], FinishReason], RolloutOutput],
        check: Callable[[RolloutRequest], None] | None = None,
        cache: PrefixCache | None = None,
        on_pass: Callable[[], object] | None = None,
        kept_width: int = 0,
    ) -> None:
        self._queue, self._model, self._memory, self._cache = queue, model, memory, cache
        self._sampler, self._stop = sampler, stop
        self._prefill_tokens = prefill_tokens
        self._answer, self._check, self._on_pass = answer, check, on_pass
        self.prompt_tokens = 0
        """Tokens of the prompts that were admitted; of a group of equal ones, once."""
        self.known_tokens = 0
        """Tokens of those prompts that were in the cache."""
        self.response_tokens = 0
        """Tokens that were drawn."""
        self._waiting: deque[Group] = deque()
        self._open: dict[tuple[tuple[int, ...], tuple[bytes, ...]], Group] = {}
        """Waiting groups that take further requests, by the prompt and the hashes of its images."""
        self._waited = 0
        """Tokens that were drawn for running rows since a request began to wait."""
        self._running: dict[int, tuple[int, int, Group]] = {}
        """Request of each row: its id, the number of response tokens drawn before, and its group."""
        self._free = list(range(memory.room))
        """A heap of the rows that are not in use."""
        none = torch.zeros(0, dtype=torch.long, device=model.device)
        self._routing: RoutingTable | None = None
        """Experts that routers chose for the rows, once a request has asked for them."""
        self._routed: set[int] = set()
        """Ids of the requests that asked."""
        self._kept_width = kept_width
        self._kept_ids: Tensor | None = None
        """(rows, longest response, ``kept_width``) int32 ids that sampling kept, once a request has asked for them."""
        self._masked: set[int] = set()
        """Ids of the requests that asked."""
        self._streamed: dict[int, int] = {}
        """Number of tokens that were already passed on in parts, for each request that streams."""
        self._streamed_at = 0.0
        self._drawn_counts = none
        """(rows,) number of tokens drawn."""
        self._tokens = none.view(0, 0)
        """(rows, longest response) tokens drawn, 0 or left from an earlier request beyond."""
        self._log_probs = none.view(0, 0).float()
        """(rows, longest response) log-prob of each."""

    @property
    def running(self) -> int:
        """Number of requests whose responses are being drawn."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room."""
        return sum(len(group.members) for group in self._waiting)

    def run(self, aborted: Event) -> None:
        """Draw tokens until no request runs or waits, or ``aborted`` is set, which ends them all."""
        rows, logits = self._drawn_counts[:0], None  # running rows, and the logits of the next token of each
        while not (news := self._news(aborted)).is_aborted:
            if news.cancelled:
                rows, logits = self._without(news.cancelled, rows, logits)
            self._take(news.requests)
            for new_rows, new_logits in self._admit(aborted):
                rows = torch.cat([rows, new_rows])
                logits = new_logits if logits is None else torch.cat([logits, new_logits])
            if self._on_pass is not None:
                self._on_pass()
            if logits is None:
                return
            rows, newest = self._draw(logits, rows)
            if self._streamed:
                self._stream_parts()
            logits = self._decode(rows, newest) if len(rows) else None
        self._finish(rows, places=None)
        for group in self._waiting:
            for request_id, _ in group.members:
                self._queue.answer(request_id, self._answer([], [], "abort"))

    # ---- requests that come

    def _news(self, aborted: Event) -> Arrivals:
        """Return what came since the last token."""
        queue, is_aborted = self._queue, aborted.is_set()
        # What is not begun stays in the queue.
        requests = [] if is_aborted else queue.take(None, wait=False)
        return Arrivals(is_aborted, queue.take_cancelled(), requests)

    def _take(self, requests: Sequence[tuple[int, RolloutRequest]]) -> None:
        """Group new requests by prompt, in the order of arrival."""
        for request_id, request in requests:
            if self._check is not None:
                try:
                    self._check(request)
                except RolloutError as error:
                    self._queue.answer(request_id, error)
                    continue
            images = PlacedImages.from_request(request, self._model.vision)
            new = Group(request.prompt_ids, images)
            group = self._open.get(new.identity)
            if group is None or len(group.members) == self._memory.room:
                group = self._open[new.identity] = new
                self._waiting.append(group)
            group.members.append((request_id, request))
            if request.returns_routing:
                self._routing = self._routing or RoutingTable()
                self._routed.add(request_id)
            if request.returns_kept_ids:
                self._masked.add(request_id)
            if request.streams:
                self._streamed[request_id] = request.drawn_count

    def _admit(self, aborted: Event) -> list[tuple[Tensor, Tensor]]:
        """Prefill requests for which there is room; one pair of rows and logits of their first tokens per pass."""
        memory = self._memory
        free = memory.room - memory.rows
        if not self._waiting or (memory.rows and free < max(_REFILL_AT * memory.room, len(self._waiting[0].members))):
            return []
        self._waited += 1
        waiting = sum(len(group.members) for group in self._waiting)
        if waiting < _ENOUGH_FOR_A_PASS * memory.rows and self._waited <= _MAX_WAIT:
            return []
        self._waited = 0
        passes = []
        while not aborted.is_set() and (groups := self._next_pass(memory.room - memory.rows)):
            rows = [heapq.heappop(self._free) for group in groups for _ in group.members]
            passes.append((self._start(groups, rows), self._prefill(groups, rows)))
        return passes

    def _next_pass(self, free: int) -> list[Group]:
        """Take the next groups whose prompts fit into one pass and whose rows fit into ``free`` rows of memory.

        With a cache, of several groups that begin with the same page that is not cached yet only the first is taken:
        the next pass finds its states in the cache.
        """
        groups: list[Group] = []
        later: list[Group] = []
        beginnings: set[tuple[tuple[int, ...], tuple[bytes, ...]]] = set()
        budget = self._prefill_tokens
        while self._waiting and (group := self._waiting[0]) and len(group.members) <= free:
            if self._cache is not None:
                group.cached = self._cache.find(group.prompt_ids, group.spans)
            new = len(group.prompt_ids) - len(group.cached)
            if groups and new > budget:
                break
            self._waiting.popleft()
            end = len(group.cached) + PAGE
            beginning = tuple(group.prompt_ids[:end]), () if group.images is None else group.images.before(end)
            if self._cache is not None and beginning in beginnings:
                later.append(group)
                continue
            beginnings.add(beginning)
            groups.append(group)
            free -= len(group.members)
            budget -= new
        self._waiting.extendleft(reversed(later))
        for group in groups:
            if self._open.get(group.identity) is group:
                del self._open[group.identity]
        return groups

    def _start(self, groups: Sequence[Group], rows: list[int]) -> Tensor:
        """Assign rows to the requests of the groups."""
        requests = [request for group in groups for _, request in group.members]
        params = [request.response_sampling for request in requests]
        members = [
            (request_id, request.drawn_count, group) for group in groups for request_id, request in group.members
        ]
        self._running.update(zip(rows, members, strict=True))
        self._sampler.put(rows, params)
        self._stop.put(rows, params)
        count, longest = max(rows) + 1, max(p.max_tokens for p in params)
        self._drawn_counts = enlarged(self._drawn_counts, count)
        self._tokens, self._log_probs = (enlarged(table, count, longest) for table in (self._tokens, self._log_probs))
        if self._masked or self._kept_ids is not None:
            table = self._tokens.new_zeros(0, 0, dtype=torch.int32) if self._kept_ids is None else self._kept_ids
            table = enlarged(table.flatten(1), len(self._tokens), self._tokens.shape[1] * self._kept_width)
            self._kept_ids = table.unflatten(1, (-1, self._kept_width))
        index = torch.tensor(rows, device=self._drawn_counts.device)
        self._drawn_counts[index] = torch.tensor(
            [request.drawn_count for request in requests], device=self._drawn_counts.device
        )
        for row, request in zip(rows, requests, strict=True):
            if request.drawn_count:
                self._tokens[row, : request.drawn_count] = torch.tensor(request.drawn_ids, device=self._tokens.device)
        return index

    def _prefill(self, groups: Sequence[Group], rows: list[int]) -> Tensor:
        """Compute the groups' prompts; return the logits of the first token of each of their rows."""
        cache, prompts = self._cache, [group.prompt_ids for group in groups]
        counts = [len(group.members) for group in groups]
        cached_states = (
            None if cache is None else [cache.states(group.cached) if group.cached else None for group in groups]
        )
        images = [group.images for group in groups]
        offsets = [0 if group_images is None else group_images.offset for group_images in images]
        self._memory.admit([len(prompt) for prompt in prompts], counts, cached_states, offsets)
        starts = [len(group.cached) for group in groups]
        self.prompt_tokens += sum(map(len, prompts))
        self.known_tokens += sum(starts)
        with self._model.routers.watched(None) as choices:
            logits = self._model.prefill(self._memory, prompts, starts, images)
        if self._routing is not None:
            expert_ids = choices.stacked(self._model.module)
            new = expert_ids.split([len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)])
            # Of tokens whose keys and values were kept the choice is not known any more.
            prompt_routing = [
                nn.functional.pad(x, (0, 0, 0, 0, n, 0), value=unknown(x.dtype))
                for x, n in zip(new, starts, strict=True)
            ]
            repeated = [x for x, count in zip(prompt_routing, counts, strict=True) for _ in range(count)]
            self._routing.start(rows, repeated)
        if cache is not None:
            for prompt_index, group in enumerate(groups):
                cache.add(group.prompt_ids, functools.partial(self._memory.prompt_states, prompt_index), group.spans)
        return logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)

    def _decode(self, rows: Tensor, newest: Tensor) -> Tensor:
        """Compute the newest token of each row; return the logits of the next."""
        if self._routing is None:
            return self._model.decode(self._memory, newest)
        with self._model.routers.watched(None) as choices:
            logits = self._model.decode(self._memory, newest)
        self._routing.add(rows, self._drawn_counts[rows] - 1, choices.stacked(self._model.module))
        return logits

    # ---- tokens that are drawn

    def _draw(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for each row; return the unfinished rows and their newest tokens."""
        step = self._drawn_counts[rows]
        kept_ids = self._kept_ids
        kept_now = None if kept_ids is None else kept_ids.new_full((len(rows), self._kept_width), NOT_KEPT)
        newest, log_probs = self._sampler(logits, rows, step, kept_now)
        if kept_ids is not None and kept_now is not None:
            kept_ids[rows, step] = kept_now
        self._tokens[rows, step], self._log_probs[rows, step] = newest, log_probs
        self._drawn_counts[rows] = step + 1
        self.response_tokens += len(rows)
        places = self._stop.unfinished(self._tokens, rows, step)
        if len(places) < len(rows):
            has_ended = torch.ones_like(rows, dtype=torch.bool)
            has_ended[places] = False
            self._finish(rows[has_ended], has_ended.nonzero().flatten().tolist())
            places = self._memory.keep(places)
            rows, newest = rows[places], newest[places]
        return rows, newest

    def _stream_parts(self) -> None:
        """Pass on the newest tokens of the requests that stream."""
        now = time.monotonic()
        if now - self._streamed_at < STREAM_EVERY_S:  # each part waits for the device
            return
        self._streamed_at = now
        for row, (request_id, before, _) in self._running.items():
            start = self._streamed.get(request_id)
            if start is not None:
                new = self._tokens[row, start : int(self._drawn_counts[row])].tolist()
                self._streamed[request_id] = start + len(new)
                self._queue.answer_part(request_id, DrawnPart(start - before, new))

    def _finish(self, rows: Tensor, places: list[int] | None) -> None:
        """Answer the requests of rows that have ended, and free the rows; keep states of those in ``places``."""
        counts = self._drawn_counts[rows]
        lengths, reasons = self._stop.results(counts, rows)
        longest = max(lengths, default=0)
        tokens, log_probs = (table[rows, :longest].tolist() for table in (self._tokens, self._log_probs))
        for at, (row, n, reason) in enumerate(zip(rows.tolist(), lengths, reasons, strict=True)):
            request_id, before, group = self._running[row]
            answer = self._answer(tokens[at][before:n], log_probs[at][before:n], reason)
            if self._routing is not None and request_id in self._routed:
                answer = replace(answer, routed_experts=self._routing.row_choices(row, before, n))
            if self._kept_ids is not None and request_id in self._masked:
                answer = replace(answer, kept_ids=self._kept_ids[row, before:n].to("cpu", copy=True))
            if self._cache is not None and places is not None:  # the last token has not gone into the model
                text = group.prompt_ids + answer.token_ids[:-1]
                self._cache.add(text, functools.partial(self._memory.row_states, places[at]), group.spans)
            self._queue.answer(request_id, answer)
        self._release(rows.tolist())

    def _without(self, cancelled: set[int], rows: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Drop cancelled requests; return the rows that go on, and their logits."""
        for request_id in cancelled:
            self._streamed.pop(request_id, None)
        for group in self._waiting:
            group.members = [member for member in group.members if member[0] not in cancelled]
        for prompt, group in list(self._open.items()):
            if not group.members:
                del self._open[prompt]
        self._waiting = deque(group for group in self._waiting if group.members)
        gone = [row for row in rows.tolist() if self._running[row][0] in cancelled]
        if logits is None or not gone:
            return rows, logits
        goes_on = torch.isin(rows, torch.tensor(gone, device=rows.device), invert=True)
        places = self._memory.keep(goes_on.nonzero().flatten())
        self._release(gone)
        return rows[places], logits[places] if len(places) else None

    def _release(self, rows: list[int]) -> None:
        self._sampler.drop(rows)
        self._stop.drop(rows)
        if self._routing is not None:
            self._routing.drop(rows)
        for row in rows:
            request_id, *_ = self._running.pop(row)
            self._routed.discard(request_id)
            self._masked.discard(request_id)
            self._streamed.pop(request_id, None)
            heapq.heappush(self._free, row)
