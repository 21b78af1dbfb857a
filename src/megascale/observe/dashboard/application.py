"""The dashboard's web application: pages, questions as JSON, a live stream, and orders for the run's driver.

A *question* is a request for one view of a run. A query process (query_process.py) reads the run folder and answers it.
The *pulse* is the values of a live run that change often.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.staticfiles import StaticFiles

from megascale import __version__
from megascale.core import strict_json
from megascale.core.failure import FailureLog
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.observe.dashboard.guard import get_bearer_token
from megascale.observe.dashboard.query_process import QueryProcesses
from megascale.observe.dashboard.questions import Sources
from megascale.observe.dashboard.run_reader import RunList

log = logging.getLogger("megascale.dashboard")

PAGES = Path(__file__).parent / "pages"
VIEWS = ("fleet", "overview", "heatmap", "timeline", "grid", "nodes", "plan")
PULSE_SECONDS = 0.5  # time between two readings of a run's pulse
_KEEP_ALIVE_SECONDS = 15.0  # a stream without events sends a comment after this time
_MAX_STREAMS = 200  # open pages with a live stream
_MAX_QUEUED_EVENTS = 64  # per open page
_MAX_RUNS = 8  # runs in one view

# Sends an order to a run's driver and returns the driver's answer. Arguments: run folder, token, action, node, reason.
# Raises PermissionError for a wrong token.
SendOrder = Callable[[Path, bytes, str, str, str], dict[str, Any]]
# Returns the answer of a query process. Arguments: question, name of the run, options.
AskQuestion = Callable[..., Awaitable[Response]]
# Types of query parameters.
Name = Annotated[str, Query(min_length=1, max_length=255)]
Names = Annotated[list[str], Query(alias="run", min_length=1, max_length=_MAX_RUNS)]
Step = Annotated[int | None, Query(ge=0, lt=1 << 53)]
Rank = Annotated[int, Query(ge=0, lt=1 << 31)]


class Action(BaseModel):
    """An order for a job."""

    model_config = ConfigDict(extra="forbid")
    run: str = Field(min_length=1, max_length=255)
    action: Literal["cordon", "uncordon", "evict", "pause", "resume", "restart"]
    node: str = Field("", max_length=100, pattern=r"^[A-Za-z0-9._-]*$")
    why: str = Field("requested on the dashboard", min_length=1, max_length=500)


@dataclass(frozen=True)
class Integrations:
    """Functions of other packages: readers of data, and the sender of orders."""

    sources: Sources
    order: SendOrder


class LiveUpdates:
    """Server-sent events for open pages. The pulse of each run of an open page is read every half second.

    Args:
        read_pulse: returns the pulse of a run as JSON, by the run's name.
    """

    def __init__(self, read_pulse: Callable[[str], Awaitable[bytes]]) -> None:
        self._read_pulse = read_pulse
        self._queues: dict[str, set[asyncio.Queue[bytes]]] = {}  # queues of the open pages, by name of the run
        self._newest_events: dict[str, bytes] = {}  # by name of the run
        self._tasks: dict[str, asyncio.Task[None]] = {}  # task that reads the run's pulse, by name of the run

    @property
    def is_full(self) -> bool:
        """Return whether the limit of streams is reached."""
        return sum(len(queues) for queues in self._queues.values()) >= _MAX_STREAMS

    async def stream(self, names: list[str]) -> AsyncIterator[bytes]:
        """Yield a `pulse` event with the current values of each run, and another event whenever they change."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=_MAX_QUEUED_EVENTS)
        for name in names:
            self._queues.setdefault(name, set()).add(queue)
            if name in self._newest_events:
                queue.put_nowait(self._newest_events[name])
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._watch(name))
        try:
            yield b": open\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    event = b": keep-alive\n\n"
                if not event:  # sent by `close`
                    return
                yield event
        finally:
            for name in names:
                self._queues[name].discard(queue)
                if not self._queues[name]:
                    del self._queues[name]
                    self._newest_events.pop(name, None)
                    self._tasks.pop(name).cancel()

    async def _watch(self, name: str) -> None:
        """Read a run's pulse until the task is cancelled, and send each changed pulse to the pages."""
        previous_pulse = b""
        failures = FailureLog(log, f"the check of run {name}")
        while True:
            try:
                pulse = await self._read_pulse(name)
            except MegascaleError as error:
                pulse = strict_json.dumps({"error": str(error)}).encode()
            except Exception as error:
                failures.note(error, "pages show the error, and the check is repeated")
                pulse = strict_json.dumps({"error": f"the run cannot be read: {type(error).__name__}"}).encode()
            if pulse != previous_pulse:
                previous_pulse = pulse
                head = b'event: pulse\ndata: {"run": ' + strict_json.dumps(name).encode() + b', "pulse": '
                self._newest_events[name] = head + pulse + b"}\n\n"
                for queue in self._queues.get(name, ()):
                    # A slow page misses some events, which is harmless, since each event has all values.
                    with contextlib.suppress(asyncio.QueueFull):
                        queue.put_nowait(self._newest_events[name])
            await asyncio.sleep(PULSE_SECONDS)

    def close(self) -> None:
        """End all streams and readings."""
        for task in self._tasks.values():
            task.cancel()
        for queue in {queue for queues in self._queues.values() for queue in queues}:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(b"")  # ends the stream


def build_application(runs: RunList, integrations: Integrations) -> FastAPI:
    """Build the application for a folder of runs. Its query processes end with the application."""
    queries = QueryProcesses(integrations.sources)
    live = LiveUpdates(lambda name: queries.ask("pulse", runs.find_folder(name)))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        live.close()
        queries.close()

    app = FastAPI(title="MegaScale dashboard", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.live = live
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)

    @app.exception_handler(MegascaleError)
    async def report_error(request: Request, error: MegascaleError) -> JSONResponse:
        status = 503
        if isinstance(error, ConfigError):
            status = 400
        elif isinstance(error, DataError):
            status = 404
        return JSONResponse({"detail": str(error)[:2000]}, status)

    async def ask(question: str, run: str, **options: Any) -> Response:
        text = await queries.ask(question, runs.find_folder(run), **options)
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/api/fleet")
    async def fleet() -> Response:
        """Return state, progress, speed, effective time and last event of all runs."""
        text = await queries.ask("fleet", runs.folder)  # a question about the folder of runs instead of one run
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    _add_run_questions(app, runs, ask)
    _add_span_questions(app, ask)
    _add_live_stream(app, runs, live)
    _add_orders(app, runs, integrations.order)
    _add_pages(app)
    return app


def _add_run_questions(app: FastAPI, runs: RunList, ask: AskQuestion) -> None:
    """Add questions about runs and their files: state, events, curves, hang, nodes, plan."""

    @app.get("/api/runs")
    async def list_runs() -> JSONResponse:
        """Return the names of runs, the newest first."""
        names = await asyncio.to_thread(runs.list_names)
        folder = str(runs.folder).encode(errors="replace").decode()  # a path may hold bytes that are not UTF-8
        return JSONResponse({"runs": names, "place": folder, "single": runs.is_single, "version": __version__})

    @app.get("/api/overview")
    async def overview(run: Name) -> Response:
        """Return the content of the overview except its curves."""
        return await ask("overview", run)

    @app.get("/api/events")
    async def events(run: Name, count: Annotated[int, Query(ge=1, le=2000)] = 200) -> Response:
        """Return the newest events."""
        return await ask("events", run, count=count)

    @app.get("/api/series")
    async def series(
        run: Name,
        key: Annotated[list[str], Query(min_length=1)],
        x: Annotated[str, Query(max_length=20)] = "step",
        points: int = 500,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        """Return curves of one run."""
        return await ask("series", run, keys=key, x=x, points=points, low=low, high=high)

    @app.get("/api/experts")
    async def experts(run: Name, step: Step = None) -> Response:
        """Return the loads of experts by layer at a step."""
        return await ask("experts", run, step=step)

    @app.get("/api/hang")
    async def hang(run: Name) -> Response:
        """Return the verdict on a hang, and which ranks wait for which ranks."""
        return await ask("hang", run)

    @app.get("/api/nodes")
    async def nodes(run: Name) -> Response:
        """Return the job and its nodes."""
        return await ask("nodes", run)

    @app.get("/api/plan")
    async def plan(run: Name, cluster: Annotated[str, Query(max_length=60)] = "") -> Response:
        """Return the plan and the measured values."""
        return await ask("plan", run, cluster=cluster)


def _add_span_questions(app: FastAPI, ask: AskQuestion) -> None:
    """Add questions about the recorded spans of steps and ranks."""

    @app.get("/api/heat")
    async def heat(
        run: Name,
        figure: Annotated[str, Query(max_length=100)] = "",
        first: Step = None,
        last: Step = None,
        among: Annotated[str, Query(max_length=20)] = "",
    ) -> Response:
        """Return a figure of every rank."""
        return await ask("spans_heat", run, figure=figure, first=first, last=last, among=among)

    @app.get("/api/stragglers")
    async def stragglers(run: Name, first: Step = None, last: Step = None) -> Response:
        """Return slow ranks and links with their steps and causes."""
        return await ask("spans_stragglers", run, first=first, last=last)

    @app.get("/api/history")
    async def history(run: Name, figure: Annotated[str, Query(max_length=100)], rank: Rank) -> Response:
        """Return a rank's figure by step."""
        return await ask("spans_history", run, figure=figure, rank=rank)

    @app.get("/api/rank")
    async def rank(run: Name, rank: Rank, first: Step = None, last: Step = None) -> Response:
        """Return all timings and traffic of one rank."""
        return await ask("spans_rank", run, rank=rank, first=first, last=last)

    @app.get("/api/timeline")
    async def timeline(
        run: Name,
        step: Step = None,
        ranks: Annotated[str, Query(max_length=2000)] = "",
        view: Annotated[str, Query(max_length=20)] = "pipeline",
    ) -> Response:
        """Return the timeline of a step of some ranks."""
        return await ask("spans_timeline", run, step=step, ranks=ranks, view=view)


def _add_live_stream(app: FastAPI, runs: RunList, live: LiveUpdates) -> None:
    """Add the server-sent events for open pages."""

    @app.get("/api/live")
    async def stream(run: Names) -> StreamingResponse:
        """Stream the changes of these runs."""
        for name in run:
            runs.find_folder(name)  # raises DataError for an unknown name
        if live.is_full:
            raise HTTPException(503, "too many pages are open; close some")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx sends each event at once
        names = list(dict.fromkeys(run))
        return StreamingResponse(live.stream(names), media_type="text/event-stream", headers=headers)


def _add_orders(app: FastAPI, runs: RunList, send_order: SendOrder) -> None:
    """Add the orders, which the run's own driver accepts or refuses."""

    @app.post("/api/act")
    async def act(order: Action, request: Request) -> JSONResponse:
        """Send an order to the run's driver. The request's bearer token must be the text of RUN/driver/token.act."""
        token = get_bearer_token(dict(request.scope["headers"]))
        run = runs.find_folder(order.run)
        if order.action in ("cordon", "uncordon", "evict") and not order.node:
            raise HTTPException(400, f"the action {order.action} needs a node")
        try:
            result = await asyncio.to_thread(send_order, run, token, order.action, order.node, order.why)
        except PermissionError as error:
            raise HTTPException(401, str(error)) from None
        return JSONResponse(result)


def _add_pages(app: FastAPI) -> None:
    """Add the page under the address of each view, and its files."""
    page = FileResponse(PAGES / "index.html", headers={"cache-control": "no-cache"})

    async def serve_page() -> FileResponse:
        return page

    for path in ("/",) + tuple(f"/{view}" for view in VIEWS):
        app.add_api_route(path, serve_page, include_in_schema=False)
    app.mount("/pages", StaticFiles(directory=PAGES), name="pages")
