"""The loader process of a host, which fills the ring ahead of its readers. No torch.

One thread fills the ring, and one thread per reader answers its messages. Threads do not poll: each reader and the
loader have a bell (an eventfd), by which others wake them. The loader has no state of its own to lose. Sample k is a
function of the seed and k, and the segment has the position of every process, so a new process resumes where a killed
loader stopped.

Run as `python -m megascale.data.loader.loader_service FOLDER --parent PID`; `host_loader.connect_loader` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.data.dataset.samples import hash_sample_ids
from megascale.data.loader import ring as rings
from megascale.data.loader.host_plan import FROM_LOADER, FROM_READER, SERVICE, Attach, Attached, HostPlan, Seated
from megascale.errors import MegascaleError, error_class_name
from megascale.services import host_service
from megascale.services.connection_server import ConnectionServer
from megascale.services.conversation import Conversation, ErrorReply
from megascale.services.host_service import ReadySignal
from megascale.services.service_location import ServiceLocation

log = logging.getLogger("megascale.data.loader")

# Files in the loader's folder: the plan, and the path of the segment.
PLAN, SEGMENT = "plan.json", "segment"
_LINGER_SECONDS = 2.0  # limit for waiting for readers whose connections have ended without a Bye


@dataclass
class ReaderState:
    """State of one reader of the plan.

    Attributes:
        bell: eventfd that wakes the reader; -1 before it connects.
        conversation: connection to the reader while the reader is connected.
        has_left: whether the reader has left or died.
    """

    bell: int = -1
    conversation: Conversation | None = None
    has_left: bool = False


class LoaderService:
    """The loader of one host and one start of a run.

    Args:
        folder: folder that loader and readers share.
        parent: id of the process that started this process.
    """

    server: ConnectionServer

    def __init__(self, folder: Path, parent: int) -> None:
        self.folder = folder
        self.parent = parent
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.segment = Path((folder / SEGMENT).read_text())
        for sentence in rings.remove_dead_segments(self.segment.parent):
            log.warning("%s", sentence)
        shape = self.plan.shape
        try:
            self.ring, is_continued = self._create_segment()
        except OSError as error:
            # Another user has created a file at the path since the segment was lost. A new path works, because readers
            # receive the open file and not the path.
            log.warning("%s; the segment gets another name", error)
            self.segment = rings.make_segment_path(self.segment.parent)
            (folder / SEGMENT).write_text(str(self.segment))
            self.ring, is_continued = self._create_segment()
        generation = int(self.ring.header["generation"])
        log.info("generation %d owns %s: %s bytes, streams %s", generation, self.segment, shape.size, shape.readers)
        if is_continued:
            log.info("resuming at micro-batches %s", [self.ring.count_produced(i) for i in range(len(shape.readers))])
        self.source = self.plan.open_source()
        self.reader_states = [[ReaderState() for _ in ranks] for ranks in shape.readers]
        self.failure: ErrorReply | None = None
        self.work_bell = os.eventfd(0, os.EFD_CLOEXEC)  # wakes this loader when slots may have become free
        self.state_lock = threading.RLock()  # guards reader states and stream positions
        self.filling_thread: threading.Thread | None = None
        self.has_readers = False  # whether a reader has joined
        self.is_ending = False
        self._hashed_step = -1  # step that the next two attributes describe
        self._ids_hash = 0
        self._epochs = 0.0
        self._weight_sums: dict[int, tuple[int, float]] = {}  # by stream: step, sum of its loss weights

    def _create_segment(self) -> tuple[rings.Ring, bool]:
        return rings.create_segment(self.segment, self.plan.shape, self.plan.hash, self.plan.run)

    # filling ----------------------------------------------------------------------------------------------------

    def fill_streams(self) -> None:
        """Keep all streams full, the emptiest first, until the service ends. Runs in the filling thread."""
        try:
            while not self.is_ending:
                stream = self._find_emptiest_stream()
                if stream is None:
                    started = time.perf_counter()
                    os.eventfd_read(self.work_bell)
                    if self.has_readers:
                        self.ring.header["full_seconds"] += time.perf_counter() - started
                    continue
                self._fill_slot(stream)
        except MegascaleError as error:
            self._fail(str(error), error_class_name(error))
        except Exception as error:
            log.exception("the loader failed")
            self._fail(f"the data loader failed: {type(error).__name__}: {error}", "TrainingError")

    def _fail(self, text: str, error_class: str) -> None:
        """Send a failure to all readers, and keep it for readers that connect later."""
        log.error("%s", text)
        with self.state_lock:
            self.failure = ErrorReply(text[:2000], error_class)
            for states in self.reader_states:
                for state in states:
                    if state.conversation is not None:
                        with contextlib.suppress(OSError):
                            state.conversation.send(self.failure)

    def _find_emptiest_stream(self) -> int | None:
        """Return the stream with the fewest ready micro-batches, or None if all are full or no reader has joined."""
        if int(self.ring.header["base"]) < 0:
            return None
        candidates = []
        for stream, states in enumerate(self.reader_states):
            released_counts = []
            for reader_index, state in enumerate(states):
                if not state.has_left:
                    released_counts.append(self.ring.count_released(stream, reader_index))
            if released_counts:
                ready = self.ring.count_produced(stream) - min(released_counts)
                if ready < self.plan.shape.depth:
                    candidates.append((ready, stream))
        if not candidates:
            return None
        _, stream = min(candidates)
        return stream

    def _fill_slot(self, stream: int) -> None:
        """Read the next micro-batch of a stream into its slot, and wake the readers."""
        plan, ring = self.plan, self.ring
        number, base = ring.count_produced(stream), int(ring.header["base"])
        first = plan.find_first_sample(base, stream, number)
        samples = self.source.read_samples(first, plan.shape.columns)
        step = number // plan.shares[stream][1]
        ids_hash, epochs = self._hash_step_ids(base, step) if plan.has_leader else (0, 0.0)
        weight_sum = self._sum_step_weights(base, stream, step)
        with self.state_lock:
            if ring.count_produced(stream) == number:  # no reader has rewound the stream meanwhile
                ring.put(stream, samples, first, ids_hash, epochs, weight_sum)
            for state in self.reader_states[stream]:
                if state.bell >= 0:
                    os.eventfd_write(state.bell, 1)
        meter = self.source.meter
        for name in rings.COUNTERS[:-1]:  # all but full_seconds, which this class counts
            ring.header[name] += getattr(meter, name)
            setattr(meter, name, 0)

    def _hash_step_ids(self, base: int, step: int) -> tuple[int, float]:
        """Return the hash of the ids of all samples of a step, and the epochs at its end."""
        if self._hashed_step != step:
            batch = self.plan.global_batch
            self._ids_hash = hash_sample_ids(self.source.find_sample_ids(base + step * batch, batch))
            self._epochs = self.source.count_epochs(base + (step + 1) * batch)
            self._hashed_step = step
        return self._ids_hash, self._epochs

    def _sum_step_weights(self, base: int, stream: int, step: int) -> float:
        """Return the sum of the loss weights of a stream's samples in a step; 0 if samples carry no weights."""
        plan = self.plan
        if not plan.shape.fields.loss_weights:
            return 0.0
        known_step, weight_sum = self._weight_sums.get(stream, (-1, 0.0))
        if known_step != step:
            _, count = plan.shares[stream]
            first = plan.find_first_sample(base, stream, step * count)
            weight_sum = self.source.sum_weights(first, count * plan.shape.columns)
            self._weight_sums[stream] = (step, weight_sum)
        return weight_sum

    # readers ----------------------------------------------------------------------------------------------------

    def serve(self, server: ConnectionServer) -> None:
        """Fill the ring and answer readers until all readers have left."""
        self.server = server
        self.filling_thread = threading.Thread(target=self.fill_streams, daemon=True)
        self.filling_thread.start()
        server.serve(self._is_done)

    def close(self) -> None:
        """Save the token counts of text. If no reader is connected, remove the segment and the folder."""
        self.is_ending = True
        os.eventfd_write(self.work_bell, 1)
        if self.filling_thread is not None:
            self.filling_thread.join(5.0)
        self.source.close()
        if not self.server.client_count:
            self.segment.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_done(self) -> bool:
        if self.server.client_count:
            return False
        if all(state.has_left for states in self.reader_states for state in states):
            return True
        if self.has_readers:
            return self.server.is_idle(_LINGER_SECONDS)
        # Until the first reader joins, the loader ends with the process that started it. A time limit would count the
        # load of the state, which may take long: readers join after it.
        return os.getppid() != self.parent

    def serve_reader(self, reader: Conversation) -> None:
        """Serve one reader until it leaves or dies. The ring then does not wait for it any more."""
        try:
            while True:
                message = reader.receive()
                try:
                    if isinstance(message, Attach):
                        self._attach(reader, message)
                    elif isinstance(message, Seated):
                        self._adopt_position(reader, message)
                    else:
                        self._leave(reader)
                except (ValueError, LookupError) as error:
                    reader.send(ErrorReply(str(error)[:2000], "TrainingError"))
        finally:
            self._leave(reader)
            os.eventfd_write(self.work_bell, 1)

    def _attach(self, reader: Conversation, message: Attach) -> None:
        """Keep a reader's bell, and send the reader the segment and the loader's bell."""
        (bell,) = reader.files
        stream, reader_index = self.plan.shape.find_reader(message.rank)
        with self.state_lock:
            header = self.ring.header
            if int(header["base"]) not in (-1, message.base):
                raise ValueError(
                    f"rank {message.rank} resumes after {message.base} samples and other ranks of this host after "
                    f"{int(header['base'])}: the ranks have loaded different checkpoints; start the run again"
                )
            if message.generation >= int(header["generation"]):
                # The segment with the count was lost, so continue the reader's count.
                header["generation"] = message.generation + 1
            state = self.reader_states[stream][reader_index]
            if state.bell >= 0:
                os.close(state.bell)
            state.bell = bell
            state.conversation = reader
            if self.failure is not None:
                reader.send(self.failure)
                return
            answer = Attached(int(header["generation"]), os.getpid())
            reader.send(answer, files=[self.ring.handle, self.work_bell])

    def _find_reader(self, reader: Conversation) -> tuple[int, int] | None:
        """Return stream and reader index of a connected reader, or None for a reader that has not attached."""
        for stream, states in enumerate(self.reader_states):
            for reader_index, state in enumerate(states):
                if state.conversation is reader:
                    return stream, reader_index
        return None

    def _adopt_position(self, reader: Conversation, message: Seated) -> None:
        """Adopt the position that a reader has written into the mapped segment."""
        with self.state_lock:
            indices = self._find_reader(reader)
            if indices is None:
                raise ValueError("the reader has not attached; start the run again")
            stream, reader_index = indices
            released, produced = self.ring.count_released(stream, reader_index), self.ring.count_produced(stream)
            # A new segment replaces a lost one: the first reader to join is ahead of the loader, which then continues
            # at the reader's position. A later reader may need an earlier micro-batch, which the new segment lacks.
            is_reader_ahead = produced < released and not self.has_readers
            lacks_micro_batch = released < produced and not self.ring.is_ready(stream, released)
            if is_reader_ahead or lacks_micro_batch:
                self.ring.rewind(stream, released)
            self.reader_states[stream][reader_index].has_left = False
            self.has_readers = True
            if int(self.ring.header["base"]) < 0:
                self.ring.header["base"] = message.base
        os.eventfd_write(self.work_bell, 1)

    def _leave(self, reader: Conversation) -> None:
        """Mark a reader as left, so that the ring does not wait for it."""
        with self.state_lock:
            indices = self._find_reader(reader)
            if indices is not None:
                stream, reader_index = indices
                self.reader_states[stream][reader_index].has_left = True
                self.reader_states[stream][reader_index].conversation = None


def serve(folder: Path, parent: int, ready: ReadySignal) -> None:
    """Serve until all readers have left. Returns at once if another process already serves the folder.

    Args:
        folder: folder that loader and readers share.
        parent: id of the process that started this process; getppid would be wrong after that process has ended.
        ready: receives a signal when readers can connect.
    """
    services: list[LoaderService] = []

    def make_service() -> Callable[[Conversation], None]:
        services.append(LoaderService(folder, parent))
        return services[0].serve_reader

    owned = host_service.claim_service(
        ServiceLocation(folder, SERVICE), make_service, (FROM_LOADER, FROM_READER), ready
    )
    if owned is None:
        return
    (service,) = services
    try:
        service.serve(owned.server)
    finally:
        owned.server.stop()
        service.close()


def main() -> None:
    """Run the loader process, which `host_loader.connect_loader` starts."""
    parser = argparse.ArgumentParser(description="Data loader of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process that starts this one")
    parser.add_argument("--ready", type=int, help="descriptor that is written to when the loader is ready")
    parser.add_argument("--starting", type=int, help="descriptor of the lock that is released when the loader is ready")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda number, frame: sys.exit(0))
    ready = ReadySignal(arguments.ready, arguments.starting)
    try:
        serve(arguments.folder, arguments.parent, ready)
    except MegascaleError as error:
        ready.send(ErrorReply(str(error)[:2000], error_class_name(error)))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
