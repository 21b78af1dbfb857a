"""The driver's HTTP API: the same questions and orders as the commands, with a token, described by OpenAPI.

It runs in the driver's own loop (uvicorn), listens where the driver does, and has tokens of its own for looking and for
orders (tokens.py). Whoever shows none is turned away by http_limits.py before anything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Path, Query, Response
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from megascale import __version__
from megascale.core.background import log_failure
from megascale.errors import MegascaleError
from megascale.observe.prometheus.exposition import CONTENT_TYPE, expose
from megascale.resilience.driver.api import http_limits, metrics, settable, tls, tokens
from megascale.resilience.driver.api.http_limits import HEAD_BYTES, Guard
from megascale.resilience.driver.api.log_pieces import LOG_PIECE, read_log_piece
from megascale.resilience.driver.process import descriptors
from megascale.services.door import Door, DoorLimits
from megascale.services.http_protocol import http_protocol

log = logging.getLogger("megascale.driver")

if TYPE_CHECKING:
    from megascale.resilience.driver.driver import Driver

WRITTEN = 10.0  # seconds in which what agents sent must have been written
NODE = Path(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="the node's name")


class Reason(BaseModel):
    """Why a person does something; it goes into the journal."""

    model_config = ConfigDict(extra="forbid")
    why: str = Field("asked for through the API", max_length=500)


class Restart(Reason):
    """Why, and settings to change, such as lr.peak=1e-3."""

    settings: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_.]+=", max_length=1000)]] = Field(
        default_factory=list, max_length=100
    )
    from_folder: bool = Field(False, description="also those that were left in the run folder, of any kind")


class JobAnswer(BaseModel):
    """The job now. recovery: recovery actions under way."""

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
    """One node now. seen: seconds since its last heartbeat, null if it is not connected; checks: its self-checks."""

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
    """Ranks that their agents were asked about, and those of which they knew something."""

    asked: int
    known: list[int]


class HealthAnswer(BaseModel):
    """Whether the job goes on, and in which phase and why."""

    healthy: bool
    state: str


class ActionResponse(BaseModel):
    """An order was taken."""

    phase: str


class Problem(BaseModel):
    """Why not."""

    detail: str


def _refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Problem} for code in (400, 401, 403, 413, *codes)}


def build(driver: Driver, scrapes: metrics.Scrapes) -> FastAPI:
    """The application for one driver."""
    # Described here, checked by Guard.
    bearer = HTTPBearer(auto_error=False, description="the text of RUN/driver/token.read or, for orders, token.act")

    app = FastAPI(
        title="MegaScale driver",
        version=__version__,
        description="One training job: its state, its nodes, its decisions, and what a person may ask of it.",
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(bearer)],
    )

    _add_job(app, driver, scrapes)
    _add_records(app, driver)
    _add_node_orders(app, driver)
    _add_job_orders(app, driver)
    return app


def _add_job(app: FastAPI, driver: Driver, scrapes: metrics.Scrapes) -> None:
    """How the job and its nodes do now."""

    @app.get("/v1/job", responses=_refusals())
    async def job() -> JobAnswer:
        """The job's state."""
        j = driver.job.state
        return JobAnswer(
            name=j.name,
            phase=j.phase,
            attempt=j.attempt,
            step=j.step,
            world=j.world,
            data_parallel=j.data,
            nodes=list(j.placement),
            epoch=driver.journal.epoch,
            recovery=[f"{action} {node}".strip() for node, action in j.recovery],
            why=j.why,
        )

    @app.get("/metrics", responses=_refusals(), response_class=PlainTextResponse)
    async def metrics_text() -> PlainTextResponse:
        """What Prometheus scrapes: the job in a few dozen series."""
        scrapes.note(time.monotonic())
        return PlainTextResponse(expose(metrics.families(driver)), media_type=CONTENT_TYPE)

    @app.get("/health", responses=_refusals() | {503: {"model": HealthAnswer}})
    async def health(response: Response) -> HealthAnswer:
        """Whether the job goes on: 200, or 503 once it has failed."""
        good, text = metrics.healthy(driver)
        response.status_code = 200 if good else 503
        return HealthAnswer(healthy=good, state=text)

    @app.get("/v1/nodes", responses=_refusals())
    async def nodes() -> list[NodeAnswer]:
        """All nodes."""
        return [_node(driver, name) for name in driver.nodes.names()]


def _add_records(app: FastAPI, driver: Driver) -> None:
    """What was written down: events, logs, and what agents find when they look at their ranks."""

    @app.get("/v1/events", responses=_refusals(422))
    async def events(
        after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> list[EventAnswer]:
        """Events with an id above `after`, oldest first."""
        return [
            EventAnswer(**vars(e) | {"nodes": list(e.nodes), "ranks": list(e.ranks), "evidence": list(e.evidence)})
            for e in driver.journal.events(after, limit)
        ]

    @app.get("/v1/logs/{rank}", responses=_refusals(404, 422))
    def logs(
        rank: Annotated[int, Path(ge=0, lt=1 << 31)],
        after: Annotated[int, Query(ge=-LOG_PIECE, lt=1 << 62)] = -LOG_PIECE,
    ) -> LogAnswer:
        """A piece of a rank's log from byte `after` on, below 0 from its end: 64 KiB at most."""
        found = read_log_piece(driver.run_folder / "logs" / f"rank-{rank}.log", after)
        if found is None:
            raise HTTPException(404, f"there is no log of rank {rank} yet")
        return LogAnswer(
            rank=rank, start=found[0], end=found[0] + len(found[1]), text=found[1].decode(errors="replace")
        )

    @app.get("/v1/ranks", responses=_refusals(409, 422))
    async def ranks(watch: Annotated[float, Query(ge=0, le=10)] = 2.0) -> LookAnswer:
        """Have agents look at their ranks for `watch` seconds: calls, stacks, flight records.

        What is known of ranks that write elsewhere lies in the run folder afterwards, for `megascale hang`.
        """
        if driver.standing.asking:
            raise HTTPException(409, "the agents are being asked already; ask again in some seconds")
        scene, _ = await driver.standing.gather(watch)
        await asyncio.to_thread(driver.files.flush, WRITTEN)
        return LookAnswer(asked=driver.job.state.world if driver.job.state.placement else 0, known=sorted(scene.ranks))


def _add_node_orders(app: FastAPI, driver: Driver) -> None:
    """What a person may order of a node."""

    def known(node: str) -> str:
        if node not in driver.nodes:
            raise HTTPException(404, f"there is no node {node!r}; known: {', '.join(driver.nodes.names())}"[:500])
        return node

    @app.post("/v1/nodes/{node}/evict", responses=_refusals(404, 422))
    async def evict(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Take a node out; its ranks move to a spare or a new node."""
        driver.operations.evict(known(node), reason.why)
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/nodes/{node}/cordon", responses=_refusals(404, 422))
    async def cordon(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Give the node nothing new; what it runs goes on."""
        driver.operations.cordon(known(node), True, reason.why)
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/nodes/{node}/uncordon", responses=_refusals(404, 422))
    async def uncordon(node: Annotated[str, NODE], reason: Reason) -> ActionResponse:
        """Allow the node again, an evicted one too."""
        driver.operations.cordon(known(node), False, reason.why)
        return ActionResponse(phase=driver.job.phase)


def _add_job_orders(app: FastAPI, driver: Driver) -> None:
    """What a person may order of the whole job."""

    @app.post("/v1/job/pause", responses=_refusals(409, 422))
    async def pause(reason: Reason) -> ActionResponse:
        """Save and stop training; the nodes stay."""
        if not driver.operations.pause(reason.why):
            raise HTTPException(409, f"the job is {driver.job.phase}: nothing to pause")
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/job/resume", responses=_refusals(409, 422))
    async def resume(reason: Reason) -> ActionResponse:
        """Go on after a pause."""
        if not driver.operations.resume(reason.why):
            raise HTTPException(409, f"the job is {driver.job.phase}, not paused")
        return ActionResponse(phase=driver.job.phase)

    @app.post("/v1/job/restart", responses=_refusals(409, 422))
    async def restart(reason: Restart) -> ActionResponse:
        """Save, then start the trainers anew with freshly imported code and changed settings.

        Settings that bring no step are taken back. Only those whose values are numbers, yes or no, or listed words can
        be changed by an order; others must have been left in the run folder (from_folder).
        """
        try:
            settable.check_settings(reason.settings)
            try:
                left = settable.take_stored_settings(driver.run_folder) if reason.from_folder else []
            except MegascaleError as error:
                raise HTTPException(409, str(error)) from None
            done = driver.operations.restart(reason.why, [*reason.settings, *left])
        except MegascaleError as error:
            raise HTTPException(400, str(error)) from None
        if not done:
            raise HTTPException(409, f"the job is {driver.job.phase}: it can be restarted only while it runs")
        return ActionResponse(phase=driver.job.phase)


def _node(driver: Driver, name: str) -> NodeAnswer:
    n = driver.nodes[name]
    workers = n.heartbeat.workers if n.heartbeat is not None else ()
    return NodeAnswer(
        name=name,
        address=n.record.address,
        state=n.state,
        cordoned=n.record.cordoned or bool(n.drained),
        ranks=list(driver.job.state.ranks(name)),
        seen=round(time.monotonic() - n.last_seen, 3) if n.channel is not None else None,
        why=n.record.why,
        workers=[
            RankAnswer(
                rank=w.rank,
                pid=w.pid,
                state=w.state,
                phase=w.phase,
                step=w.step,
                status_age=round(w.status_age, 3),
                rss=w.rss,
            )
            for w in workers
        ],
        checks="passed" if n.tested else "under way" if n.checking else "not run",
        facts=dict(n.record.facts),
    )


class _Server(uvicorn.Server):
    """uvicorn without hands on the process's signals: the driver decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def serve(driver: Driver, host: str, port: int, scrapes: metrics.Scrapes | None = None) -> tuple[str, Any]:
    """Start serving; returns (base URL, coroutine function that ends it). `scrapes` takes down reads of the metrics.

    Over TLS where `host` is not loopback, or a certificate is given. OSError if it cannot listen there, ConfigError
    if it has no certificate to show.
    """
    descriptors.raise_limit()
    limits = driver.limits
    context = tls.server_context(driver.run_folder, host, limits.tls_certificate, limits.tls_key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    application = build(driver, scrapes if scrapes is not None else metrics.Scrapes())
    guard = Guard(application, tokens.make_tokens(driver.run_folder), (host, socket.gethostname()))
    settings = uvicorn.Config(
        guard,
        log_level="critical",  # what strangers send wrong must not fill the log; Guard tells what fails here
        proxy_headers=False,
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    server = _Server(settings)
    task = asyncio.get_running_loop().create_task(server.serve([]))
    log_failure(task, "the API's server", log)
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    door_limits = DoorLimits(http_limits.CONNECTIONS, http_limits.HEAD_SECONDS)
    door = Door([listener], http_protocol(settings, server.server_state), door_limits, context)
    name = listener.getsockname()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def end() -> None:
        await door.close()
        server.should_exit = True
        await task

    shown = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if context else 'http'}://{shown}:{name[1]}", end
