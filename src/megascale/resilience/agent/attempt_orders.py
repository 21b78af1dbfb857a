"""Start orders of attempts: their environment and data-parallel size, and whether processes can stay between orders."""

from __future__ import annotations

import json
import os
import tomllib

from megascale.core.addresses import find_interface, is_loopback
from megascale.core.process_orders import DYING_VARIABLE, MISSING_VARIABLE
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.resilience.protocol.agent_messages import Start
from megascale.services.shared_token import derive_token

_DATA_SIZE_OPTION = "--parallel.data="
# Environment variables that an attempt changes. A rank that continues in its process receives them again.
RESUMED_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGASCALE_ATTEMPT",
    "MEGASCALE_NODE_ADDRESS",
    MISSING_VARIABLE,
    DYING_VARIABLE,
)


def explain_change(previous: Start | None, order: Start) -> str:
    """Return why processes of the previous attempt cannot be used in the next one, or an empty text if they can.

    Args:
        previous: start order of the previous attempt, or None before the first attempt.
    """
    if order.fresh:
        return "the fork server of its node is renewed"
    if previous is None or (len(previous.ranks), previous.job) != (len(order.ranks), order.job):
        return "the number of ranks of its node changes"
    has_same_options = _list_fixed_options(previous) == _list_fixed_options(order)
    if previous.settings != order.settings or not has_same_options or previous.env != order.env:
        return "the settings change"
    return ""


def _list_fixed_options(order: Start) -> list[str]:
    """Return the options of the trainers' command line except the data-parallel size.

    A process can stay if only that size changes.
    """
    return [option for option in order.words if not option.startswith(_DATA_SIZE_OPTION)]


def read_data_size(order: Start) -> int:
    """Return the data-parallel size of an attempt, or 0 if neither the command line nor the settings give it."""
    sizes = [option.removeprefix(_DATA_SIZE_OPTION) for option in order.words if option.startswith(_DATA_SIZE_OPTION)]
    if sizes:
        return int(sizes[-1])  # a later option overrides earlier ones
    return _read_configured_data_size(order)


def _read_configured_data_size(order: Start) -> int:
    """Return the data-parallel size of the settings, or 0 if they do not give it.

    The settings have the size of the job with all nodes. The driver changes the size by options only.
    """
    return int(tomllib.loads(order.settings).get("parallel", {}).get("data", 0))


def compute_missing_fraction(order: Start) -> float:
    """Return the fraction of replicas that are missing in an attempt, or 0 if the job has shrunk permanently.

    Replicas are missing as long as the job's state has the time since when (`missing_since`).
    """
    is_degraded = bool(order.state) and json.loads(order.state).get("missing_since", 0) > 0
    if not is_degraded:
        return 0.0
    configured_size = _read_configured_data_size(order)
    if not configured_size:
        return 0.0
    return 1 - read_data_size(order) / configured_size


def make_network_variables(address: str) -> dict[str, str]:
    """Return environment variables that bind gloo and NCCL to the interface of `address`, except variables already set.

    By default both libraries use the interface of the host's name or the first interface. Other nodes may not reach it.
    """
    if is_loopback(address):
        return {}
    interface = find_interface(address)
    if not interface:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ}


def make_common_environment(order: Start, address: str, *, token: bytes, node: str) -> dict[str, str]:
    """Return the environment variables of all ranks of an attempt.

    Args:
        address: address of this node.
        token: token of the job. The token of replicas derives from it unless the agent's environment has one.
        node: name of this node.
    """
    replica_token = os.environ.get(REPLICA_VARIABLE) or derive_token(token, f"replicas of {order.job}")
    variables = {
        "LOCAL_WORLD_SIZE": str(len(order.ranks)),
        "WORLD_SIZE": str(order.world),
        "MASTER_ADDR": order.master[0],
        "MASTER_PORT": str(order.master[1]),
        "MEGASCALE_JOB": order.job,
        REPLICA_VARIABLE: replica_token,
        "MEGASCALE_ATTEMPT": str(order.attempt),
        "MEGASCALE_NODE": node,
        "MEGASCALE_NODE_ADDRESS": address,
        MISSING_VARIABLE: f"{compute_missing_fraction(order):g}",
    }
    # Variables of the order have precedence over the interface that this node chooses.
    return make_network_variables(address) | order.env | variables
