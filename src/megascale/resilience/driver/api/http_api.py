"""The driver's HTTP API: the questions and orders of the commands, with a token, described by OpenAPI.

uvicorn runs the API in the driver's loop, at the address where the driver listens. One token is for reading and one for
orders (access.py). http_limits.py refuses requests without a token before this module sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Path, Query, Response
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from megascale import __version__
from megascale.core.failure import log_failure
from megascale.errors import MegascaleError
from megascale.observe.prometheus import format_response
from megascale.resilience.cluster.base import format_address
from megascale.resilience.driver.api import http_limits, metrics
from megascale.resilience.driver.api.access import LOG_PIECE, create_server_context, make_tokens, read_log_piece
from megascale.resilience.driver.api.http_limits import Guard
from megascale.resilience.driver.process import raise_file_limit
from megascale.resilience.driver.recovery import hot_update
from megascale.services.http_protocol import make_http_protocol
from megascale.services.limited_listener import ConnectionLimits, LimitedListener

log = logging.getLogger("megascale.driver")

if TYPE_CHECKING:
    from megascale.resilience.driver.driver import Driver

WRITE_TIMEOUT = 10.0  # seconds in which received files must be written
MAX_INTEGER = 1 << 62  # below SQLite's largest integer, also after an addition
NODE = Path(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="the node's name")


class Reason(BaseModel):
    """Reason of an order, which goes into the journal."""

    model_config = ConfigDict(extra="forbid")
    why: str = Field("requested through the API", max_length=500)


class Restart(Reason):
    """Reason of a restart, and settings to change, such as lr.peak=1e-3."""

    settings: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_.]+=", max_length=1000)]] = Field(
        default_factory=list, max_length=100
    )
    from_folder: bool = Field(False, description="apply the settings stored in the run folder too")


class JobAnswer(BaseModel):
    """The job. recovery: recovery actions under way."""

    name: str
    phase: str
    attempt: int
    step: int
    world: int
    data_parallel: int
    nodes: list[str]
    epoch: int
    recovery: list[str]
    why: str


class RankAnswer(BaseModel):
    """One trainer process."""

    rank: int
    pid: int
    state: str
    phase: str
    step: int
    status_age: float
    rss: int


class NodeAnswer(BaseModel):
    """One node. seen: seconds since its last message, null if it is not connected; checks: its self-checks."""

    name: str
    address: str
    state: str
    cordoned: bool
    ranks: list[int]
    seen: float | None
    why: str
    workers: list[RankAnswer]
    checks: Literal["passed", "under way", "not run"]
    facts: dict[str, Any]


class EventAnswer(BaseModel):
    """One entry of the journal."""

    id: int
    time: float
    attempt: int
    kind: str
    action: str
    nodes: list[str]
    ranks: list[int]
    evidence: list[str]
    details: dict[str, Any]


class LogAnswer(BaseModel):
    """Bytes start to end of a rank's log."""

    rank: int
    start: int
    end: int
    text: str


class LookAnswer(BaseModel):
    """Result of watching the ranks. asked: number of ranks of the job; known: ranks with a report of their agent."""

    asked: int
    known: list[int]


class HealthAnswer(BaseModel):
    """The health of the job, with its phase and the reason."""

    healthy: bool
    state: str


class ActionResponse(BaseModel):
    """The phase of the job after an accepted order."""

    phase: str


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


def _describe_refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for OpenAPI: four that every route has, and `codes`."""
    return {code: {"model": Problem} for code in (400, 401, 403, 413) + codes}


def build_application(driver: Driver, job_metrics: metrics.JobMetrics) -> FastAPI:
    """Build the application of one driver."""
    # The scheme is only described here; Guard checks the token.
    bearer = HTTPBearer(auto_error=False, description="the text of RUN/driver/token.read or, for orders, token.act")

    app = FastAPI(
        title="MegaScale driver",
        version=__version__,
        description="One training job: its state, its nodes, its decisions, and orders of people.",
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(bearer)],
    )

    _add_state_routes(app, driver, job_metrics)
    _add_record_routes(app, driver)
    _add_node_order_routes(app, driver)
    _add_job_order_routes(app, driver)
    return app


def _add_state_routes(app: FastAPI, driver: Driver, job_metrics: metrics.JobMetrics) -> None:
    """Add the routes for the state of the job and its nodes."""

    @app.get("/v1/job", responses=_describe_refusals())
    async def job() -> JobAnswer:
        """Return the job's state."""
        state = driver.job.state
        return JobAnswer(
            name=state.name,
            phase=state.phase,
            attempt=state.attempt,
            step=state.step,
            world=state.world,
            data_parallel=state.data,
            nodes=list(state.placement),
            epoch=driver.journal.epoch,
            recovery=[f"{action} {node}".strip() for node, action in state.recovery],
            why=state.reason,
        )

    @app.get("/metrics", responses=_describe_refusals(), response_class=PlainTextResponse)
    async def metrics_text(accept: Annotated[str, Header()] = "") -> PlainTextResponse:
        """Return the job in a few dozen series for Prometheus, in OpenMetrics if `accept` names it."""
        families = await job_metrics.read_families()
        text, content_type = format_response(families, job_metrics.labels, accept)
        return PlainTextResponse(text, media_type=content_type)

    @app.get("/health", responses=_describe_refusals() | {503: {"model": HealthAnswer}})
    async def health(response: Response) -> HealthAnswer:
        """Return 200 while the job is healthy, 503 once it has failed."""
        is_healthy, text = metrics.judge_health(driver)
        response.status_code = 200 if is_healthy else 503
        return HealthAnswer(healthy=is_healthy, state=text)

    @app.get("/v1/nodes", responses=_describe_refusals())
    async def nodes() -> list[NodeAnswer]:
        """Return all nodes."""
        return [_describe_node(driver, name) for name in driver.nodes.names()]


def _add_record_routes(app: FastAPI, driver: Driver) -> None:
    """Add the routes for records: events, logs, and reports of agents about their ranks."""

    @app.get("/v1/events", responses=_describe_refusals(422))
    async def events(
        after: Annotated[int, Query(ge=0, lt=MAX_INTEGER)] = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> list[EventAnswer]:
        """Return events with an id above `after`, oldest first."""
        answers = []
        for entry in driver.journal.events(after, limit):
            fields = dataclasses.asdict(entry)
            for name in ("nodes", "ranks", "evidence"):  # tuples in the journal's entry, lists in the answer
                fields[name] = list(fields[name])
            answers.append(EventAnswer.model_validate(fields))
        return answers

    @app.get("/v1/logs/{rank}", responses=_describe_refusals(404, 422))
    def logs(
        rank: Annotated[int, Path(ge=0, lt=1 << 31)],
        after: Annotated[int, Query(ge=-LOG_PIECE, lt=MAX_INTEGER)] = -LOG_PIECE,
    ) -> LogAnswer:
        """Return at most 64 KiB of a rank's log from byte `after` on. An `after` below 0 counts from the log's end."""
        # LOG_PIECE, the limit of `read_log_piece`, is 64 KiB.
        piece = read_log_piece(driver.run_folder / "logs" / f"rank-{rank}.log", after)
        if piece is None:
            raise HTTPException(404, f"there is no log of rank {rank} yet")
        start, data = piece
        return LogAnswer(rank=rank, start=start, end=start + len(data), text=data.decode(errors="replace"))

    @app.get("/v1/ranks", responses=_describe_refusals(409, 422))
    async def ranks(watch: Annotated[float, Query(ge=0, le=10)] = 2.0) -> LookAnswer:
        """Have agents watch their ranks for `watch` seconds: calls, stacks, flight records.

        The reports about ranks that write elsewhere are in the run folder afterwards, for `megascale hang`.
        """
        if driver.rank_investigation.is_running:
            raise HTTPException(409, "the agents are being asked already; try again in some seconds")
        scene, _ = await driver.rank_investigation.gather(watch)
        await asyncio.to_thread(driver.received_files.flush, WRITE_TIMEOUT)
        return LookAnswer(asked=driver.job.state.world, known=sorted(scene.ranks))


def _add_node_order_routes(app: FastAPI, driver: Driver) -> None:
    """Add the orders about a node."""

    def require_known(node: str) -> str:
        if node not in driver.nodes:
            raise HTTPException(404, f"there is no node {node!r}; known: {', '.join(driver.nodes.names())}"[:500])
        return node

    @app.post("/v1/nodes/{node}/evict", responses=_describe_refusals(404, 422))
    async def evict(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Take a node out; its ranks move to a spare or a new node."""
        driver.operations.evict(require_known(node), reason.why)
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/nodes/{node}/cordon", responses=_describe_refusals(404, 422))
    async def cordon(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Give the node no new ranks; its present ranks continue."""
        driver.operations.cordon(require_known(node), reason.why)
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/nodes/{node}/uncordon", responses=_describe_refusals(404, 422))
    async def uncordon(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Allow the node to get ranks again, an evicted node too."""
        driver.operations.uncordon(require_known(node), reason.why)
        return ActionResponse(phase=driver.job.phase)


def _add_job_order_routes(app: FastAPI, driver: Driver) -> None:
    """Add the orders about the whole job."""

    @app.post("/v1/job/pause", responses=_describe_refusals(409, 422))
    async def pause(reason: Reason) -> ActionResponse:
        """Save and stop training; the nodes stay."""
        if not driver.operations.pause(reason.why):
            raise HTTPException(409, f"the job is {driver.job.phase}: nothing to pause")
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/job/resume", responses=_describe_refusals(409, 422))
    async def resume(reason: Reason) -> ActionResponse:
        """Continue after a pause."""
        if not driver.operations.resume(reason.why):
            raise HTTPException(409, f"the job is {driver.job.phase}, not paused")
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/job/restart", responses=_describe_refusals(409, 422))
    async def restart(reason: Restart) -> ActionResponse:
        """Save, then start the trainers anew with freshly imported code and changed settings.

        New settings are undone if no step completes with them. An order can change only settings whose values are
        numbers, yes or no, or listed words. Other settings must be stored in the run folder (from_folder).
        """
        settings = list(reason.settings)
        try:
            hot_update.check_settings(settings)
            if reason.from_folder:
                try:
                    settings += hot_update.take_stored_settings(driver.run_folder)
                except MegascaleError as error:
                    raise HTTPException(409, str(error)) from None
            is_restarting = driver.operations.restart(reason.why, settings)
        except MegascaleError as error:
            raise HTTPException(400, str(error)) from None
        if not is_restarting:
            raise HTTPException(409, f"the job is {driver.job.phase}: it can be restarted only while it runs")
        return ActionResponse(phase=driver.job.phase)


def _describe_node(driver: Driver, name: str) -> NodeAnswer:
    """Return the answer about one node. A node that its cluster drains counts as cordoned."""
    node = driver.nodes[name]
    return NodeAnswer(
        name=name,
        address=node.record.address,
        state=node.state,
        cordoned=node.record.cordoned or bool(node.drain_reason),
        ranks=list(driver.job.state.ranks(name)),
        seen=round(time.monotonic() - node.last_seen, 3) if node.channel is not None else None,
        why=node.record.reason,
        workers=[
            RankAnswer(
                rank=worker.rank,
                pid=worker.pid,
                state=worker.state,
                phase=worker.phase,
                step=worker.step,
                status_age=round(worker.status_age, 3),
                rss=worker.rss,
            )
            for worker in node.workers
        ],
        checks=node.self_check.value,
        facts=dict(node.record.facts),
    )


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the driver decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def serve(driver: Driver, host: str, port: int, job_metrics: metrics.JobMetrics) -> tuple[str, Any]:
    """Start serving; return (base URL, function whose coroutine ends serving).

    Args:
        host, port: address to listen at, over TLS if `host` is not loopback or a certificate is configured.

    Raises:
        OSError: the address cannot be used.
        ConfigError: no certificate can be used.
    """
    raise_file_limit()
    limits = driver.limits
    context = create_server_context(driver.run_folder, host, limits.tls_certificate, limits.tls_key)
    if ":" in host:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    application = build_application(driver, job_metrics)
    guard = Guard(application, make_tokens(driver.run_folder), (host, socket.gethostname()))
    settings = uvicorn.Config(
        guard,
        log_level="critical",  # Malformed requests must not fill the log. Guard logs failures of the application.
        proxy_headers=False,
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        server_header=False,
        headers=[("connection", "close")],
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=http_limits.HEAD_BYTES,
    )
    server = _Server(settings)
    # uvicorn gets no socket: LimitedListener accepts connections within limits that uvicorn lacks.
    server_task = asyncio.get_running_loop().create_task(server.serve([]))
    log_failure(server_task, "the API's server", log)
    while not server.started and not server_task.done():
        await asyncio.sleep(0.01)
    connection_limits = ConnectionLimits(http_limits.CONNECTIONS, http_limits.HEAD_SECONDS)
    limited_listener = LimitedListener(
        [listener], make_http_protocol(settings, server.server_state), connection_limits, context
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def close() -> None:
        await limited_listener.close()
        server.should_exit = True
        await server_task

    address, bound_port = listener.getsockname()[:2]
    scheme = "https" if context else "http"
    return f"{scheme}://{format_address(address, bound_port)}", close
