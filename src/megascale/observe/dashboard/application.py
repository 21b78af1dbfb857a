"""The dashboard's server: pages, questions as JSON, a live stream, and orders that go on to the run's driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.staticfiles import StaticFiles

from megascale import __version__
from megascale.errors import ConfigError, DataError, MegascaleError
from megascale.observe.dashboard.guard import bearer
from megascale.observe.dashboard.live import Live
from megascale.observe.dashboard.query_process import QueryProcesses
from megascale.observe.dashboard.questions import Sources
from megascale.observe.dashboard.run_list import RunList

PAGES = Path(__file__).parent / "pages"
VIEWS = ("overview", "heatmap", "timeline", "grid", "nodes", "plan")
_AT_ONCE = 8  # runs over each other

# (run folder, token shown, action, node, why) -> what the driver answers; PermissionError for a wrong token.
Order = Callable[[Path, bytes, str, str, str], dict[str, Any]]
# (question, name of the run, what else it is asked with) -> the JSON of a query process.
Answer = Callable[..., Awaitable[Response]]
Name = Annotated[str, Query(min_length=1, max_length=255)]
Names = Annotated[list[str], Query(alias="run", min_length=1, max_length=_AT_ONCE)]
Step = Annotated[int | None, Query(ge=0, lt=1 << 53)]


class Action(BaseModel):
    """What a person orders of a job."""

    model_config = ConfigDict(extra="forbid")
    run: str = Field(min_length=1, max_length=255)
    action: Literal["cordon", "uncordon", "evict", "pause", "resume", "restart"]
    node: str = Field("", max_length=100, pattern=r"^[A-Za-z0-9._-]*$")
    why: str = Field("asked for on the dashboard", min_length=1, max_length=500)


@dataclass(frozen=True)
class Outside:
    """What the dashboard knows of other packages: what it reads (sources) and whom it hands orders to."""

    sources: Sources
    order: Order


def build(runs: RunList, outside: Outside) -> FastAPI:
    """The application for one folder of runs. It starts its query processes when it starts and ends them at its end."""
    queries = QueryProcesses(outside.sources)
    live = Live(lambda name: queries.ask("pulse", runs.find_folder(name)))

    @asynccontextmanager
    async def lasting(app: FastAPI) -> AsyncIterator[None]:
        yield
        live.close()
        queries.close()

    app = FastAPI(title="MegaScale dashboard", version=__version__, docs_url=None, redoc_url=None, lifespan=lasting)
    app.state.live = live
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)

    @app.exception_handler(MegascaleError)
    async def refused(request: Request, error: MegascaleError) -> JSONResponse:
        status = 400 if isinstance(error, ConfigError) else 404 if isinstance(error, DataError) else 503
        return JSONResponse({"detail": str(error)[:2000]}, status)

    async def answer(question: str, run: str, **given: Any) -> Response:
        found = await queries.ask(question, runs.find_folder(run), **given)
        return Response(found, media_type="application/json", headers={"cache-control": "no-store"})

    _add_questions(app, runs, answer)
    _add_span_questions(app, answer)
    _add_job_questions(app, answer)
    _add_live_stream(app, runs, live)
    _add_orders(app, runs, outside.order)
    _add_pages(app)
    return app


def _add_questions(app: FastAPI, runs: RunList, answer: Answer) -> None:
    """Which runs there are, and what their files say: state, events, curves."""

    @app.get("/api/runs")
    async def list_runs() -> JSONResponse:
        """Names of runs, the newest first."""
        names = await asyncio.to_thread(runs.list_names)
        place = str(runs.place).encode(errors="replace").decode()
        return JSONResponse({"runs": names, "place": place, "single": runs.single, "version": __version__})

    @app.get("/api/overview")
    async def overview(run: Name) -> Response:
        """What stands beside the curves."""
        return await answer("overview", run)

    @app.get("/api/events")
    async def events(run: Name, count: Annotated[int, Query(ge=1, le=2000)] = 200) -> Response:
        """The newest events."""
        return await answer("events", run, count=count)

    @app.get("/api/series")
    async def series(
        run: Name,
        key: Annotated[list[str], Query(min_length=1)],
        x: Annotated[str, Query(max_length=20)] = "step",
        points: int = 500,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        """Curves of one run."""
        return await answer("series", run, keys=key, x=x, points=points, low=low, high=high)


def _add_span_questions(app: FastAPI, answer: Answer) -> None:
    """What the recorded spans say of steps and ranks."""

    @app.get("/api/heat")
    async def heat(
        run: Name,
        figure: Annotated[str, Query(max_length=100)] = "",
        first: Step = None,
        last: Step = None,
        among: Annotated[str, Query(max_length=20)] = "",
    ) -> Response:
        """A figure of every rank."""
        return await answer("spans_heat", run, figure=figure, first=first, last=last, among=among)

    @app.get("/api/stragglers")
    async def stragglers(run: Name, first: Step = None, last: Step = None) -> Response:
        """Slow ranks and links, since when and why."""
        return await answer("spans_stragglers", run, first=first, last=last)

    @app.get("/api/history")
    async def history(
        run: Name, figure: Annotated[str, Query(max_length=100)], rank: Annotated[int, Query(ge=0, lt=1 << 31)]
    ) -> Response:
        """A rank's figure by step."""
        return await answer("spans_history", run, figure=figure, rank=rank)

    @app.get("/api/rank")
    async def rank(
        run: Name, rank: Annotated[int, Query(ge=0, lt=1 << 31)], first: Step = None, last: Step = None
    ) -> Response:
        """All timings and traffic of one rank."""
        return await answer("spans_rank", run, rank=rank, first=first, last=last)

    @app.get("/api/timeline")
    async def timeline(
        run: Name,
        step: Step = None,
        ranks: Annotated[str, Query(max_length=2000)] = "",
        view: Annotated[str, Query(max_length=20)] = "pipeline",
    ) -> Response:
        """A step of some ranks."""
        return await answer("spans_timeline", run, step=step, ranks=ranks, view=view)


def _add_job_questions(app: FastAPI, answer: Answer) -> None:
    """What is known of the job besides its files: who hangs, its nodes, its plan."""

    @app.get("/api/hang")
    async def hang(run: Name) -> Response:
        """Who waits for whom."""
        return await answer("hang", run)

    @app.get("/api/nodes")
    async def nodes(run: Name) -> Response:
        """The job and its nodes."""
        return await answer("nodes", run)

    @app.get("/api/plan")
    async def plan(run: Name, cluster: Annotated[str, Query(max_length=60)] = "") -> Response:
        """The plan beside what is measured."""
        return await answer("plan", run, cluster=cluster)


def _add_live_stream(app: FastAPI, runs: RunList, live: Live) -> None:
    """Server-sent events for pages that are open."""

    @app.get("/api/live")
    async def stream(run: Names) -> StreamingResponse:
        """What changes in these runs, as it does."""
        for name in run:
            runs.find_folder(name)
        if live.full:
            raise HTTPException(503, "too many pages are open; close some")
        head = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(live.stream(list(dict.fromkeys(run))), media_type="text/event-stream", headers=head)


def _add_orders(app: FastAPI, runs: RunList, give: Order) -> None:
    """Orders, which the run's own driver takes or refuses."""

    @app.post("/api/act")
    async def act(order: Action, request: Request) -> JSONResponse:
        """Hand an order on to the run's driver; the acting token is the text of RUN/driver/token.act."""
        token = bearer(dict(request.scope["headers"]))
        run = runs.find_folder(order.run)
        if order.action in ("cordon", "uncordon", "evict") and not order.node:
            raise HTTPException(400, f"{order.action} needs a node")
        try:
            found = await asyncio.to_thread(give, run, token, order.action, order.node, order.why)
        except PermissionError as error:
            raise HTTPException(401, str(error)) from None
        return JSONResponse(found)


def _add_pages(app: FastAPI) -> None:
    """The page itself, under the address of each view."""
    page = FileResponse(PAGES / "index.html", headers={"cache-control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def first() -> FileResponse:
        return page

    for view in VIEWS:
        app.add_api_route(f"/{view}", first, include_in_schema=False)
    app.mount("/pages", StaticFiles(directory=PAGES), name="pages")
