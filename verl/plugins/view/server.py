"""The application that answers the page: JSON about runs, and news of them while they are written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from verl.errors import DataError
from verl.plugins.view.ages import StepAges, ages_of, names_of_ages
from verl.plugins.view.comparison import best_of, csv_of, curves_of, experiment_of
from verl.plugins.view.curves import Curve, thinned
from verl.plugins.view.ranks import bounds_of, lanes_of, summary_of
from verl.plugins.view.runs import Library, Run, marks_of
from verl.plugins.view.samples import SampleFilter, find_samples, one_sample, place_of_sample, sample_values
from verl.plugins.view.timeline import StepSpans, chrome_trace, spans_of
from verl.plugins.view.tokens import tokens_of

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
REFRESH_S = 1.0
"""Seconds between two looks at the files, at least."""
REST = 10
"""Between two looks at the files, this many times as long as a look takes: a long run costs a tenth of a core."""
POINTS = 2000
"""Points of a curve that the page is sent, at most."""
POINTS_OF_ANSWER = 20_000
"""Points of all curves of one answer, about: of many curves in one picture each needs fewer."""


NumberType = TypeVar("NumberType", int, float)


class News:
    """Tells open pages which runs have something new; threads may call :meth:`tell`."""

    def __init__(self) -> None:
        self._pages: set[asyncio.Queue[dict[str, object]]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def tell(self, message: dict[str, object]) -> None:
        """Send a message to all open pages."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [page.put_nowait(message) for page in self._pages])

    async def stream(self) -> AsyncIterator[str]:
        """Yield messages as server-sent events, and a comment now and then that keeps the connection open."""
        self._loop = asyncio.get_running_loop()
        page: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._pages.add(page)
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
                    message = await asyncio.wait_for(page.get(), timeout=15)
                    yield f"data: {json.dumps(message)}\n\n"
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._pages.discard(page)


class Answers:
    """Answers to the page's requests; each method serves one address from its query.

    Raises:
        DataError: a run, sample or file is not there any more.
        ValueError: a number of the address is none.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.index = library.index

    def routes(self) -> list[Route]:
        """The addresses."""
        answers = {
            "/api/runs": self.runs,
            "/api/details": self.details,
            "/api/series": self.series,
            "/api/best": self.best,
            "/api/csv": self.csv,
            "/api/alerts": self.alerts,
            "/api/samples": self.samples,
            "/api/sample_values": self.sample_values,
            "/api/sample/{number:int}": self.sample,
            "/api/tokens/{number:int}": self.tokens,
            "/api/spans": self.spans,
            "/api/ages": self.ages,
            "/api/ranks": self.ranks,
            "/api/lanes": self.lanes,
            "/api/trace": self.trace,
        }
        return [Route(path, _answering(answer)) for path, answer in answers.items()]

    def _known(self, key: str) -> Run:
        run = self.library.runs.get(key)
        if run is None:
            raise DataError("there is no such run any more. Load the page again.")
        return run

    def _run(self, request: Request) -> Run:
        return self._known(request.query_params.get("run", ""))

    def _runs(self, request: Request) -> dict[str, Run]:
        return {key: self._known(key) for key in request.query_params.getlist("run")}

    def runs(self, request: Request) -> object:
        """All runs, those that changed last first."""
        summaries = self.library.summaries().values()
        return {"runs": sorted(summaries, key=lambda run: -run["changed"]), "indexing": self.library.is_indexing}

    def details(self, request: Request) -> object:
        """Metrics' names, settings and marks of runs, by run, and which of them differ in seeds alone."""
        return {key: run.details() | {"experiment": experiment_of(run)} for key, run in self._runs(request).items()}

    def series(self, request: Request) -> object:
        """Curves by run (or, as means, by experiment) and name."""
        names = request.query_params.getlist("name")
        series = self._curves(request)
        points = min(POINTS, POINTS_OF_ANSWER // max(1, len(series) * len(names)))
        return {key: {name: thinned(curve, points) for name, curve in curves.items()} for key, curves in series.items()}

    def best(self, request: Request) -> object:
        """Lowest, highest and last values of curves, each with its step, by run (or experiment) and name."""
        return {
            key: {name: asdict(best) for name, curve in curves.items() if (best := best_of(curve))}
            for key, curves in self._curves(request).items()
        }

    def csv(self, request: Request) -> Response:
        """The whole curves of runs as a file; of all metrics, or of those whose names have a text."""
        runs, text = list(self._runs(request).values()), request.query_params.get("text", "").lower()
        names = sorted({name for run in runs for name in run.metrics.names if text in name.lower()})
        saved = {"content-disposition": 'attachment; filename="metrics.csv"'}
        return StreamingResponse(csv_of(runs, names, self.index), media_type="text/csv", headers=saved)

    def _curves(self, request: Request) -> dict[str, dict[str, Curve]]:
        names, averages = request.query_params.getlist("name"), request.query_params.get("averages") == "1"
        return curves_of(list(self._runs(request).values()), names, self.index, averages)

    def alerts(self, request: Request) -> object:
        """Alerts of runs, newest first, and the rules that they are tested by, by run."""
        return {
            key: {"alerts": run.alerts(self.index), "rules": run.rules()} for key, run in self._runs(request).items()
        }

    def samples(self, request: Request) -> object:
        """One page of the samples that a filter chooses."""
        self._run(request)
        return find_samples(self.index, filter_of(request.query_params))

    def sample_values(self, request: Request) -> object:
        """Return the values that filters can choose from."""
        return sample_values(self.index, self._run(request).files.id, request.query_params.get("kind", "train"))

    def sample(self, request: Request) -> object:
        """One sample with siblings and history."""
        return one_sample(self.index, request.path_params["number"])

    def tokens(self, request: Request) -> object:
        """The tokens of a sample, or null."""
        return tokens_of(place_of_sample(self.index, request.path_params["number"]))

    def spans(self, request: Request) -> object:
        """The stages of steps."""
        return spans_of(self._run(request).events, *_step_range(request))

    def ages(self, request: Request) -> list[StepAges]:
        """Shares of tokens by age, step by step; nothing of a run without them."""
        metrics = self._run(request).metrics
        return ages_of(metrics.series(self.index, names_of_ages(metrics.names)), *_step_range(request))

    def ranks(self, request: Request) -> object:
        """Return the times in which ranks were busy and waited, over the newest steps."""
        run, (first, last) = self._run(request), _step_range(request)
        return summary_of(run.ranks, spans_of(run.events, first, last), run.ranks.steps(first, last))

    def lanes(self, request: Request) -> object:
        """Return the activity of driver and ranks in one step."""
        run, step = self._run(request), int(request.query_params.get("step", ""))
        (stages,) = spans_of(run.events, step, step) or [StepSpans(step=step, spans=[], beside=[])]
        spans = stages["spans"]
        calls = run.ranks.calls(step) if run.ranks.steps(step, step) else []
        return {**stages, "lanes": lanes_of(calls, *bounds_of(spans)) if spans else []}

    def trace(self, request: Request) -> object:
        """Stages and calls as a trace for Perfetto."""
        run = self._run(request)
        steps, recorded = spans_of(run.events, *_step_range(request)), set(run.ranks.steps(None, None))
        numbers = [step["step"] for step in steps if step["step"] in recorded]
        calls = ((step, call) for step in numbers for call in run.ranks.calls(step))
        return chrome_trace(run.files.name, steps, calls, marks_of(run.events))


def make_app(library: Library) -> Starlette:
    """Make the application; :class:`verl.plugins.view.guard.Guard` stands before it."""
    news = News()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        ended = threading.Event()
        for look in (library.refresh, library.refresh_samples):
            threading.Thread(target=_keep_fresh, args=(look, news, ended), daemon=True).start()
        yield
        ended.set()

    async def events(request: Request) -> Response:
        return StreamingResponse(news.stream(), media_type="text/event-stream")

    async def page(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    files = Mount("/page", StaticFiles(directory=PAGE))
    routes = [Route("/", page), Route("/api/events", events), files, *Answers(library).routes()]
    return Starlette(routes=routes, lifespan=lifespan)


def _keep_fresh(look: Callable[[], list[str]], news: News, ended: threading.Event) -> None:
    """Look at the files again and again; a look that fails is told once and tried again."""
    last_message = ""
    while not ended.is_set():
        began = time.monotonic()
        try:
            if changed := look():
                news.tell({"changed": changed})
        except (OSError, ValueError, sqlite3.Error) as error:
            if str(error) != last_message:
                last_message = str(error)
                logger.warning("files of runs cannot be read (%s); trying again.", error)
        ended.wait(max(REFRESH_S, REST * (time.monotonic() - began)))


def _answering(answer: Callable[[Request], object]) -> Callable[[Request], object]:
    async def respond(request: Request) -> Response:
        try:
            result = await run_in_threadpool(answer, request)
            return result if isinstance(result, Response) else JSONResponse(sendable(result))
        except DataError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except (ValueError, OverflowError) as error:  # a number of the address that is none, or has more than 64 bits
            return JSONResponse({"error": f"the address is not understood: {error}"}, status_code=400)
        except sqlite3.Error as error:  # it was deleted a moment ago, or the disk is full
            message = f"the index cannot be read ({error}); it is made again. Load the page again."
            return JSONResponse({"error": message}, status_code=503)

    return respond


def sendable(value: object) -> object:
    """Return a value as JSON can have it: not finite numbers become texts, halves of surrogate pairs question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {sendable(str(name)): sendable(item) for name, item in value.items()}
    return [sendable(item) for item in value] if isinstance(value, list | tuple) else value


def filter_of(query: Mapping[str, str]) -> SampleFilter:
    """Read a filter from an address.

    Raises:
        ValueError: a number is none.
    """

    def number(name: str, kind: type[NumberType]) -> NumberType | None:
        return kind(query[name]) if query.get(name) else None

    return SampleFilter(
        run=query.get("run", ""),
        kind=query.get("kind", "train"),
        step_from=number("step_from", int),
        step_to=number("step_to", int),
        score_from=number("score_from", float),
        score_to=number("score_to", float),
        length_from=number("length_from", int),
        length_to=number("length_to", int),
        status=query.get("status", ""),
        source=query.get("source", ""),
        text=query.get("text", ""),
        sort=query.get("sort", "step"),
        descending=query.get("descending", "1") != "0",
        limit=min(number("limit", int) or 100, 500),
        skip=max(number("skip", int) or 0, 0),
    )


def _step_range(request: Request) -> tuple[int | None, int | None]:
    query = request.query_params
    first, last = query.get("step_from"), query.get("step_to")
    return int(first) if first else None, int(last) if last else None
