"""GPUs that a node does not have, told to its kubelet by a real device plugin: `python -m ... FLAG COUNT`.

It answers the kubelet's protocol (deviceplugin/v1beta1) over the unix socket that kubelets open. Numbers of GPUs that
stand in the file FLAG are unhealthy, until they are taken out of it. Needs grpcio, as the tests' extra brings it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESOURCE = "nvidia.com/gpu"
_FOLDER = Path("/var/lib/kubelet/device-plugins")
_LOOK = 0.1  # seconds between looks at the flag
# Messages of deviceplugin/v1beta1 that are used: fields as (name, number, type, of which message, repeated).
_MESSAGES: dict[str, tuple[tuple[str, int, str, str, bool], ...]] = {
    "Empty": (),
    "DevicePluginOptions": (),
    "RegisterRequest": (
        ("version", 1, "string", "", False),
        ("endpoint", 2, "string", "", False),
        ("resource_name", 3, "string", "", False),
    ),
    "Device": (("ID", 1, "string", "", False), ("health", 2, "string", "", False)),
    "ListAndWatchResponse": (("devices", 1, "message", "Device", True),),
    "ContainerAllocateRequest": (("devicesIDs", 1, "string", "", True),),
    "AllocateRequest": (("container_requests", 1, "message", "ContainerAllocateRequest", True),),
    "EnvsEntry": (("key", 1, "string", "", False), ("value", 2, "string", "", False)),
    "ContainerAllocateResponse": (("envs", 1, "message", "EnvsEntry", True),),
    "AllocateResponse": (("container_responses", 1, "message", "ContainerAllocateResponse", True),),
}


def messages() -> dict[str, Any]:
    """A class for each message that is used, by its name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    types = {"string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING}
    types["message"] = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    file = descriptor_pb2.FileDescriptorProto(name="deviceplugin.proto", package="v1beta1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            added = message.field.add(name=field, number=number, type=types[kind], label=3 if repeated else 1)
            if of:
                added.type_name = f".v1beta1.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1beta1.{n}")) for n in _MESSAGES}


def serve(flag: Path, count: int) -> None:
    """Serve until ended; registers again when the kubelet was started anew."""
    import grpc

    kinds = messages()

    def devices(request: Any, context: Any) -> Iterator[Any]:
        last: set[str] | None = None
        while context.is_active():
            bad = set(flag.read_text().split()) if flag.exists() else set()
            if bad != last:
                last = bad
                health = {i: "Unhealthy" if str(i) in bad else "Healthy" for i in range(count)}
                result = [kinds["Device"](ID=f"GPU-{i}", health=text) for i, text in health.items()]
                yield kinds["ListAndWatchResponse"](devices=result)
            time.sleep(_LOOK)

    def allocate(request: Any, context: Any) -> Any:
        answers = []
        for each in request.container_requests:
            entry = kinds["EnvsEntry"](key="MEGASCALE_BENCH_DEVICES", value=",".join(each.devicesIDs))
            answers.append(kinds["ContainerAllocateResponse"](envs=[entry]))
        return kinds["AllocateResponse"](container_responses=answers)

    def options(request: Any, context: Any) -> Any:
        return kinds["DevicePluginOptions"]()

    def out(message: Any) -> bytes:
        return bytes(message.SerializeToString())

    single, large = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    calls = {
        "GetDevicePluginOptions": single(options, kinds["Empty"].FromString, out),
        "ListAndWatch": large(devices, kinds["Empty"].FromString, out),
        "Allocate": single(allocate, kinds["AllocateRequest"].FromString, out),
    }
    while True:
        while not (_FOLDER / "kubelet.sock").exists():
            time.sleep(_LOOK)
        server = grpc.server(ThreadPoolExecutor(8))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", calls),))
        socket = _FOLDER / "bench-gpu.sock"
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        try:
            with grpc.insecure_channel(f"unix://{_FOLDER}/kubelet.sock") as channel:
                register = channel.unary_unary("/v1beta1.Registration/Register", out, kinds["Empty"].FromString)
                local = kinds["RegisterRequest"](version="v1beta1", endpoint=socket.name, resource_name=RESOURCE)
                register(local, timeout=5.0)
            while socket.exists():  # a kubelet that starts removes all sockets here
                time.sleep(_LOOK)
        except grpc.RpcError:
            time.sleep(_LOOK)
        server.stop(None)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
