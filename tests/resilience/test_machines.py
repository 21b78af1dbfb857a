"""Machines with addresses of their own (network namespaces) and a real sshd: what one machine cannot show.

The campaigns are `python -m tests.chaos faults --site machines`; this is what each run of the suite can afford.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.machines.network import Machines, impossible, wait

WHY = impossible()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

# Started on the driver's machine: a cluster of two machines by ssh, a machine that goes, one that is cut off.
DRIVER = """
import asyncio, json, shlex, sys
from pathlib import Path
from megascale.config import Config, ResilienceConfig, TrainConfig
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.driver.api.access import create_agents_tls
from megascale.resilience.driver.telemetry.agent_server import AgentServer
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.job_description import JobDescription

TOKEN = b"t" * 64
run, ssh, hosts = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
limits = ResilienceConfig(cluster="ssh", hosts=hosts, ssh=ssh, nodes=2, window=2.0)
config = Config(resilience=limits, train=TrainConfig(device="cpu"))

def tell(**words):
    print(json.dumps(words), flush=True)

class Listener:
    def handle_hello(self, channel, hello):
        channel.send_message(do="welcome", epoch=1, version=agent_channel.VERSION)
        tell(joined=hello.node, address=hello.address, encrypted=channel.is_encrypted)
        return ""
    def handle_heartbeat(self, *_): ...
    def handle_message(self, *_): ...
    def handle_disconnect(self, node, channel):
        tell(left=node)
    def record_refusal(self, peer, node, why):
        tell(refused=why)

async def main():
    _, address = CLUSTERS["ssh"].describe_remote_machines(config)
    server = AgentServer("job", TOKEN, listener := Listener(), listener)
    place = await server.open(address, 0, create_agents_tls(address, None, None))
    cluster = CLUSTERS["ssh"](ClusterRequest(run, config, (), lambda who, text: tell(said=text)))
    cluster.announce(JobDescription("job", 1, place, limits), TOKEN)
    tell(given=[await cluster.request(), await cluster.request()])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        do, name = line.split()
        if do == "fence":
            tell(fenced=await cluster.fence(name))

asyncio.run(main())
"""


class Driver:
    """The process on the driver's machine, and what it tells."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        hosts = machines.hosts_file(["n0", "n1"])
        ssh = f"{machines.ssh} -o ConnectTimeout=3"
        arguments = [sys.executable, "-c", DRIVER, str(folder / "runs" / "job"), ssh, str(hosts)]
        self.process = subprocess.Popen(
            machines["head"].inside(arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.messages: list[dict[str, Any]] = []

    def wait_until(self, enough: Callable[[list[dict[str, Any]]], object]) -> None:
        """Read on until what it has told is enough."""
        assert self.process.stdout is not None
        while not enough(self.messages):
            line = self.process.stdout.readline()
            assert line, f"it ended after {self.messages}"
            self.messages.append(json.loads(line))

    def fence(self, name: str) -> bool:
        before = len(self.messages)
        assert self.process.stdin is not None
        self.process.stdin.write(f"fence {name}\n")
        self.process.stdin.flush()
        self.wait_until(lambda messages: any("fenced" in arguments for arguments in messages[before:]))
        return next(message["fenced"] for message in self.messages[before:] if "fenced" in message)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines") / "net", ["head", "n0", "n1"]) as present:
        yield present


def test_agents_are_started_by_ssh_and_what_becomes_of_their_machines_is_seen(machines, tmp_path):
    driver = Driver(machines, tmp_path)
    try:
        driver.wait_until(
            lambda messages: len([w for w in messages if "joined" in w]) == 2 and any("given" in w for w in messages)
        )
        joined = {w["joined"]: (w["address"], w["encrypted"]) for w in driver.messages if "joined" in w}
        assert joined == {n: (machines[n].address, True) for n in ("n0", "n1")}
        assert {"given": ["n0", "n1"]} in driver.messages

        # Cut off: its agent gives the connection up within 2 windows, and comes again as soon as there is a way.
        machines["n1"].cut()
        log = machines["n1"].folder / "n1" / "agent.log"
        wait(lambda: "no driver" in log.read_text(), "the agent to notice")
        machines["n1"].heal()
        driver.wait_until(lambda messages: len([w for w in messages if w.get("joined") == "n1"]) == 2)

        machines["n0"].power_off()
        assert not driver.fence("n0")  # Its processes cannot be known.
        assert driver.fence("n1")
        machines["n0"].heal()
        machines["n0"].power_on()
        assert not [w for w in driver.messages if "refused" in w]
    finally:
        driver.process.kill()
        driver.process.wait()


def test_a_connection_to_a_machine_that_is_gone_ends_within_seconds(machines):
    arguments = """
import socket, sys, time
from megascale.services.conversation import set_peer_timeout
listener = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
sock, _ = listener.accept()
set_peer_timeout(sock, 2.0)
print("met", flush=True)
began = time.monotonic()
try:
    sock.recv(1)  # from a machine that says nothing: only keepalive can tell
except OSError:
    print(time.monotonic() - began, flush=True)
"""
    near, far = machines["head"], machines["n0"]
    listening = subprocess.Popen(
        near.inside([sys.executable, "-c", arguments, near.address]), stdout=subprocess.PIPE, text=True
    )
    connect = f"import socket; s = socket.create_connection(('{near.address}', 7000)); s.recv(1)"
    second = None
    try:
        assert listening.stdout is not None
        assert listening.stdout.readline() == "listening\n"
        second = subprocess.Popen(far.inside([sys.executable, "-c", connect]))
        assert listening.stdout.readline() == "met\n"
        far.power_off()
        assert 0.5 < float(listening.stdout.readline()) < 20.0
        far.heal()
        far.power_on()
    finally:
        for process in filter(None, (listening, second)):
            process.kill()
            process.wait()
