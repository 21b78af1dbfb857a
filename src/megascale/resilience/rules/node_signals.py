"""Signals of logs, devices and networks before any process ends."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from megascale.core.events import Event
from megascale.core.gpus import FATAL_XIDS, UNUSABLE_ACTIONS
from megascale.resilience.protocol.heartbeat import GpuReport, NetworkTraffic
from megascale.resilience.rules.foreign_messages import BROKEN_HARDWARE, find_fault
from megascale.resilience.rules.table import quick_rule, slow_rule
from megascale.resilience.rules.view import Action, NodeView, Verdict, View

HOT = 90.0  # degrees Celsius, from which a GPU slows down
DRIVER_SILENCE = 20.0  # seconds without an answer of the NVIDIA driver

QUIET_BEATS = 10  # last heartbeats, whose traffic is judged
BASE_BEATS = 20  # least number of heartbeats before them, for comparison
_STOP_FACTOR = 3  # times the longest earlier quiet stretch that a stop must last
_LINE_CHARACTERS = 300  # of a line of a log in a verdict
_STOPPED_FRACTION = 0.01  # fraction of the usual rate below which traffic has stopped
_DROPPED_FRACTION = 0.5  # fraction of the usual rate below which traffic has dropped
_LOOPBACK = frozenset({"lo", "lo0"})  # Processes of one machine exchange data over it even without training.
_MIN_RATE = 1e6  # bytes/s; below it an interface carries nothing that training needs


@quick_rule
def judge_log_lines(view: View) -> list[Verdict]:
    """Return a verdict for each matching line of trainers' logs: self-checks for broken hardware, else an alert."""
    verdicts = []
    for member, heartbeat in view.heartbeats():
        for match in heartbeat.logs:
            is_broken = find_fault(match.line, BROKEN_HARDWARE) is not None
            action: Action = "diagnose" if is_broken else "alert"
            text = f"rank {match.rank} on {member.node} logged {match.line[:_LINE_CHARACTERS]!r}"
            verdict = Verdict(
                Event.LOG_KEYWORD, nodes=(member.node,), ranks=(match.rank,), action=action, evidence=(text,)
            )
            verdicts.append(verdict)
    return verdicts


@slow_rule
def judge_devices(view: View) -> list[Verdict]:
    """Return a verdict for each device that reports errors (self-checks or eviction), is hot or slowed down (alert)."""
    verdicts = []
    for member, heartbeat in view.heartbeats():
        for gpu in heartbeat.gpus:
            reports = [report for _, earlier in member.history for report in earlier.gpus]
            answered = [report for report in reports if report.index == gpu.index and not report.silent_seconds]
            first = answered[0] if answered else gpu
            verdict = _judge_device(member, gpu, first)
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


def _judge_device(member: NodeView, gpu: GpuReport, first: GpuReport) -> Verdict | None:
    """Return the verdict on a GPU by its newest report and the first one of the attempt, None if it is healthy."""
    name = f"GPU {gpu.index} ({gpu.name}) of {member.node}"
    # A fatal Xid counts even if it came before this attempt: it may have ended the previous one.
    if gpu.xid in FATAL_XIDS:
        return _make_device_fault(member, "evict", f"{name} reported Xid {gpu.xid}, which needs a reset or a repair")
    if gpu.recovery in UNUSABLE_ACTIONS:
        return _make_device_fault(member, "evict", f"{name} needs a {gpu.recovery} according to its driver")
    if gpu.ecc_errors > first.ecc_errors:
        more = gpu.ecc_errors - first.ecc_errors
        return _make_device_fault(member, "diagnose", f"{name} counted {more} more uncorrected memory errors")
    if gpu.xid and gpu.xid != first.xid:
        text = f"{name} reported Xid {gpu.xid}"
    elif gpu.recovery:
        text = f"{name} needs recovery according to its driver: {gpu.recovery}"
    elif gpu.silent_seconds > DRIVER_SILENCE:
        text = f"{name}: its driver has not answered for {gpu.silent_seconds:.0f} s; look at dmesg and nvidia-smi there"
    elif gpu.temperature > HOT:
        text = f"{name} has {gpu.temperature:.0f} degrees; above {HOT:.0f} it slows down"
    elif gpu.throttled:
        text = f"{name} is slowed down by its driver at {gpu.temperature:.0f} degrees, {gpu.power_watts:.0f} W"
    else:
        return None
    return Verdict(Event.DEVICE_WARNING, nodes=(member.node,), action="alert", evidence=(text,))


def _make_device_fault(member: NodeView, action: Action, text: str) -> Verdict:
    return Verdict(Event.DEVICE_FAULT, nodes=(member.node,), action=action, evidence=(text,))


@slow_rule
def judge_traffic(view: View) -> list[Verdict]:
    """Return verdicts on network traffic, which is periodic in training (MegaScale section 4.2).

    A stop of traffic leads to recovery, a drop to an alert. Traffic is judged only while all ranks of the node train. A
    quiet stretch is a stop only if it is three times as long as any earlier one of the node and if no
    step was completed in it: an interface that is quiet while training continues is not used by training.
    """
    if view.phase != "running":
        return []
    verdicts = []
    for member in view.members:
        has_history = len(member.history) >= BASE_BEATS + QUIET_BEATS
        if member.ranks and has_history and member.heartbeat is not None and _is_training(member):
            interfaces = {sample.interface for sample in member.heartbeat.traffic} - _LOOPBACK
            for interface in sorted(interfaces):
                verdicts += _judge_interface(member, interface)
    return verdicts


def _is_training(member: NodeView) -> bool:
    """Return True if all ranks of a node were in a training step in the last heartbeats."""
    recent = list(member.history)[-QUIET_BEATS - 2 :]
    workers = [worker for _, heartbeat in recent for worker in heartbeat.workers]
    return all(worker.phase == "train" and worker.state == "running" for worker in workers)


def _judge_interface(member: NodeView, interface: str) -> list[Verdict]:
    """Return the verdicts on the errors and the traffic of one network interface of a node."""
    all_samples = [sample for _, heartbeat in member.history for sample in heartbeat.traffic]
    samples = [sample for sample in all_samples if sample.interface == interface]
    if len(samples) < BASE_BEATS + QUIET_BEATS:
        return []
    name = f"{interface} of {member.node}"
    nodes = (member.node,)
    verdicts = []
    errors = samples[-1].errors
    if errors and not any(sample.errors for sample in samples[:-QUIET_BEATS]):
        text = f"{name} counted {errors} errors or drops since its last heartbeat, none before"
        verdicts.append(Verdict(Event.LINK_ERRORS, nodes=nodes, action="alert", evidence=(text,)))
    rates = [sample.rx_bytes_per_s + sample.tx_bytes_per_s for sample in samples]
    earlier_rates = rates[:-QUIET_BEATS]
    recent_rates = rates[-QUIET_BEATS:]
    usual_rate = median(earlier_rates)
    if usual_rate < _MIN_RATE:
        return verdicts
    quiet_count = _count_trailing_quiet(rates, usual_rate)
    longest_quiet = _find_longest_quiet(earlier_rates, usual_rate)
    is_quiet_now = _compute_peak(samples[-1]) < usual_rate * _STOPPED_FRACTION
    has_stopped = is_quiet_now and quiet_count >= max(QUIET_BEATS, _STOP_FACTOR * longest_quiet)
    # A step that was under way when traffic stopped may be reported some heartbeats later, so only the second half of
    # the quiet stretch must be without a step.
    if has_stopped and not _has_stepped(member, quiet_count // 2):
        evidence = (
            f"no traffic on {name} for {quiet_count} heartbeats; usual are {usual_rate / 1e6:.1f} MB/s",
            f"its longest quiet stretch before was {longest_quiet} heartbeats",
        )
        verdict = Verdict(Event.TRAFFIC_STOPPED, nodes=nodes, ranks=member.ranks, action="recover", evidence=evidence)
        verdicts.append(verdict)
    elif max(recent_rates) < _DROPPED_FRACTION * min(_compute_low_rate(earlier_rates), usual_rate):
        text = f"traffic on {name} fell to {median(recent_rates) / 1e6:.1f} MB/s from {usual_rate / 1e6:.1f} MB/s"
        verdicts.append(Verdict(Event.TRAFFIC_DROPPED, nodes=nodes, action="alert", evidence=(text,)))
    return verdicts


def _has_stepped(member: NodeView, beats: int) -> bool:
    """Return True if a rank of the node has begun another step within the last `beats` heartbeats."""
    recent = [heartbeat.workers for _, heartbeat in list(member.history)[-beats:]]
    first = {worker.rank: worker.step for worker in recent[0]}
    return any(worker.step > first.get(worker.rank, worker.step) for worker in recent[-1])


def _compute_low_rate(rates: list[float]) -> float:
    """Return the lower quartile of the rates, which oscillate if steps are longer than the heartbeat interval."""
    return sorted(rates)[len(rates) // 4]


def _compute_peak(sample: NetworkTraffic) -> float:
    """Return the highest rate in a heartbeat, in bytes/s."""
    return max(sample.rx_max, sample.tx_max, sample.rx_bytes_per_s, sample.tx_bytes_per_s)


def _measure_quiet_stretches(rates: list[float], usual: float) -> list[int]:
    """Return the lengths of the stretches without traffic, in heartbeats. The last one is 0 if traffic has resumed."""
    stretches = []
    ends_quiet = False
    for is_quiet, group in groupby(rates, lambda rate: rate < usual * _STOPPED_FRACTION):
        ends_quiet = is_quiet
        if is_quiet:
            stretches.append(len(list(group)))
    if not ends_quiet:
        stretches.append(0)
    return stretches


def _count_trailing_quiet(rates: list[float], usual: float) -> int:
    """Return the number of heartbeats without traffic at the end."""
    return _measure_quiet_stretches(rates, usual)[-1]


def _find_longest_quiet(rates: list[float], usual: float) -> int:
    """Return the length of the longest stretch without traffic, except one at the end, which may be the stop itself."""
    stretches = _measure_quiet_stretches(rates, usual)
    last = stretches[-1]
    longest = max(stretches)
    if last == longest:
        return max(stretches[:-1], default=0)
    return longest
