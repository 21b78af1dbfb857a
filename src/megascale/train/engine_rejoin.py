"""Change of an engine's groups between two attempts, with its weights and optimizer state in place.

`leave_groups` drops the failed step, `find_complete_step` returns the step of the state, and `rejoin_groups` sets new
groups.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from megascale.config.parts import OPTIMIZERS
from megascale.core.calls import NullCallLog
from megascale.core.group_names import remove_attempt
from megascale.core.spans import Recorder
from megascale.parallel import rejoin as rejoin_axes
from megascale.rendezvous.groups import Groups
from megascale.train.attention_choice import Choices
from megascale.train.engine import Engine


def find_rejoin_obstacle(engine: Engine) -> str:
    """Return why this engine cannot continue with new groups (`rejoin_groups`), "" if it can."""
    has_exchange = any(axis.exchange is not None for axis in rejoin_axes.list_axes(engine.runtime))
    if has_exchange or engine.gather_exchange is not None or engine.reduction_exchange is not None:
        return "its peers' memory is mapped for the exchange between GPUs"
    if engine.optimizer.rule.has_collective_init:
        return f"optimizer.name={engine.config.optimizer.name} exchanges its layout when it is made"
    if engine.config.optimizer.offload:
        return "optimizer.offload=true may still copy state of the failed update"
    return engine.runtime.state_obstacle or engine.runtime.rejoin_obstacle


def find_state_obstacle(engine: Engine) -> str:
    """Return why another engine cannot take over the weights and the optimizer state, "" if it can.

    Exchanges hold activations and gradients, which are not part of the state. Only gathers by copies read weights
    where they are, in memory of the exchange that peers have mapped.
    """
    if engine.config.optimizer.offload:
        return "optimizer.offload=true may still copy state of the failed update"
    has_copies = any(state.master is not state.shard.params for state in engine.optimizer.states)
    if engine.gather_exchange is not None and not has_copies:
        return "its weights are in memory that is mapped for the exchange between GPUs"
    return engine.runtime.state_obstacle


def leave_groups(engine: Engine, has_abort: bool = True, end_phase: Callable[[str], None] = lambda phase: None) -> None:
    """Drop the failed step and the groups; weights and optimizer state stay. `rejoin_groups` sets new groups.

    Captured graphs are dropped too, since they hold communicators. Raises RuntimeError if the GPU has failed.

    Args:
        has_abort: whether the communicators are aborted next.
        end_phase: called with the name of each part that has ended.
    """
    engine.runtime.weight_gradients.clear()
    engine.data_parallel.drop_communication()
    if engine.graph_choice is not None:
        engine.graph_choice.restart()
    if engine.graphs is not None:
        engine.graphs.restart()
        end_phase("graphs")
        if has_abort:
            gc.collect()  # NCCL keeps a communicator, and its abort waits, until no graph holds it
            end_phase("garbage")
    engine.chunk_forward.end_step()
    engine.before_update_hooks.clear()
    engine.after_update_hooks.clear()
    if engine.replay_check is not None:
        engine.replay_check.restart()
        engine.replay_check = None
    engine.runtime.calls = NullCallLog()
    engine.runtime.recorder = Recorder()
    rejoin_axes.drop_groups(engine.runtime, engine.pipeline.streams)
    end_phase("engine")
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
        end_phase("device")


def find_complete_step(engine: Engine) -> int:
    """Return the step whose state the optimizer has after its groups were aborted.

    Return -1 if an update ended in the middle, or may have. Call it after `leave_groups`.
    """
    assert engine.optimizer.update_hold is not None
    step = engine.optimizer.update_hold.read_step()
    # The device counts an update at its beginning, so a counted update need not have ended on the host.
    is_partial = engine.begun_update != engine.ended_update and step == engine.begun_update
    # On a GPU, an optimizer with collectives of its own may have continued with wrong values after the abort.
    is_uncertain = engine.device.type == "cuda" and OPTIMIZERS[engine.config.optimizer.name].communicates
    return -1 if is_partial or is_uncertain else step


def rejoin_groups(engine: Engine, groups: Groups, earlier_choices: Choices) -> None:
    """Continue with the groups of the next attempt. Collective, like the construction of an engine."""
    members = [*groups.by_kind.values(), *(channel.group for channel in groups.p2p.values())]
    groups_by_name: dict[str, Any] = {remove_attempt(group.group_name): group for group in members}
    groups_by_name["world"] = groups.world
    rejoin_axes.adopt_groups(engine.runtime, engine.pipeline.streams, groups_by_name)
    engine.kernel_selection.repeat(earlier_choices)
