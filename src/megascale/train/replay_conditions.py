"""Start of replays: whether replicas replay each other's micro-batches, and how often."""

from __future__ import annotations

from megascale.checkpoint.object_collectives import Peers
from megascale.core.rank_memory import explain_no_graphs
from megascale.core.replay_interval import compute_interval, explain_checked_step_cost, list_unsupported_settings
from megascale.train import determinism_choice, replay_response
from megascale.train.check_cost import CheckCost
from megascale.train.engine import Engine
from megascale.train.rank_info import find_device_kind
from megascale.train.replay_check import ReplayCheck, ReplayEvidence, find_obstacle
from megascale.train.reporter import Reporter
from megascale.train.run_folder import RunFolder


def start_replays(engine: Engine, rank: int, folder: RunFolder, reporter: Reporter) -> ReplayCheck | None:
    """Let replicas replay each other's micro-batches at intervals, if they can. Collective.

    Set `engine.replay_check`. Return None if resilience.replay_interval=auto leaves replays out.
    """
    settings, peers = engine.config.resilience, Peers()
    device_kind = find_device_kind(engine.device)
    interval = settings.replay_interval
    cost: CheckCost | None = None
    if interval == "auto":
        reason = find_reason_against_replays(engine, device_kind, peers)
        if reason is not None:
            share_exclusion(engine, peers)
            if reason:
                engine.active["replay"] = f"off (resilience.replay_interval=auto: {reason})"
            return None
        exclude_costly_graphs(engine)
        interval = compute_interval(engine.layout.microbatches)
        cost = CheckCost(engine.device, engine.world_axis)
    response = replay_response.ReplayResponse(settings, folder, reporter, rank, peers)

    def respond(evidence: ReplayEvidence) -> None:
        if settings.replay_action != "alert":
            # The next attempt must load a confirmed state.
            engine.runtime.state_obstacle = "a replay gave other bits than this training"
        response.act(evidence)

    replay_check = ReplayCheck(
        engine,
        rank,
        replay_response.describe_device(engine.device),
        device_kind,
        interval=interval,
        on_mismatch=respond,
        cost=cost,
        report=reporter.log_line,
    )
    engine.replay_check = replay_check
    return replay_check


def find_reason_against_replays(engine: Engine, device_kind: str, peers: Peers) -> str | None:
    """Return why replicas do not replay each other's micro-batches, or None if they do. Collective.

    The reason is "" if there is nothing to say: there is one replica, or determinism is off by the user's choice or on
    a CPU.
    """
    config, grid = engine.config, engine.layout.grid
    if grid.replicas < 2:
        return ""
    if not engine.runtime.kernels.deterministic:
        if config.requested_determinism is False or not determinism_choice.can_measure(engine.device):
            return ""
        return "kernels.deterministic=auto is off"
    unsupported = list_unsupported_settings(config, grid)
    if unsupported:
        return f"{unsupported[0][0]} is not supported yet"
    kinds = peers.all_gather(device_kind, str)
    obstacle = find_obstacle(engine, kinds) or _find_costly_graphs(engine)
    return peers.find_first_problem(obstacle or None)


def _find_costly_graphs(engine: Engine) -> str:
    """Return why a checked step would need much more time and memory than others, or "" if it would not.

    Such a step runs without the CUDA graphs that the engine has captured. Graphs that are expected to gain nothing do
    not count, since `exclude_costly_graphs` excludes them.
    """
    if engine.graphs is None or _has_unlikely_graphs(engine):
        return ""
    return explain_checked_step_cost(engine.config, engine.layout.grid)


def exclude_costly_graphs(engine: Engine) -> None:
    """Exclude graphs from a run with replays if a checked step would need much more time and memory without them."""
    if not _has_unlikely_graphs(engine):
        return
    cost = explain_checked_step_cost(engine.config, engine.layout.grid)
    if cost:
        engine.exclude_graphs(f"{cost}; --resilience.replay_interval=0 permits graphs")


def share_exclusion(engine: Engine, peers: Peers) -> None:
    """Exclude graphs on all ranks if a rank's engine excludes them since an earlier attempt. Collective.

    Otherwise the new ranks of an attempt without replays would await the decision of ranks that take no part in it.
    """
    reason = peers.find_first_problem(engine.graph_exclusion or None)
    if reason is not None:
        engine.exclude_graphs(reason)


def _has_unlikely_graphs(engine: Engine) -> bool:
    """Return whether a measurement decides about graphs that are expected to gain nothing. Equal on all ranks."""
    return engine.graph_choice is not None and bool(explain_no_graphs(engine.config, engine.layout.grid))
