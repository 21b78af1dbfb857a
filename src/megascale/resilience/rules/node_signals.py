"""What logs, devices and networks say before anything ends."""

from __future__ import annotations

import re
from statistics import median

from megascale.core.events import Event
from megascale.core.xid import FATAL_XIDS, UNUSABLE
from megascale.resilience.protocol.heartbeat import GpuReport, NetworkTraffic
from megascale.resilience.rules.table import quick, slow
from megascale.resilience.rules.verdicts import Action, Verdict
from megascale.resilience.rules.view import RankView, View

# Lines that mean a broken machine even while its processes live; any other match is worth a person's look.
_BROKEN = re.compile(r"uncorrectable|double.bit|fallen off the bus|Xid.*\b(48|64|74|79|92|94|95|119|120)\b", re.I)
HOT = 90.0  # degrees Celsius
SILENT = 20.0  # seconds

# Traffic: this many heartbeats of quiet, and this many before them to compare with.
QUIET_BEATS = 10
BASE_BEATS = 20
_STOPPED = 0.01  # of the usual rate
_DROPPED = 0.5
_LOOPBACK = frozenset({"lo", "lo0"})  # whatever processes of one machine say to each other, training or not
_LEAST_RATE = 1e6  # bytes/s; below it an interface carries nothing that training needs


@quick
def log_lines(view: View) -> list[Verdict]:
    """Lines of trainers' logs that matched: an alert at once, self-checks where they mean broken hardware."""
    found = []
    for member in view.members:
        for match in member.heartbeat.logs if member.heartbeat else ():
            action: Action = "diagnose" if _BROKEN.search(match.line) else "alert"
            text = f"rank {match.rank} on {member.node} logged {match.line[:300]!r}"
            found.append(Verdict(Event.LOG_KEYWORD, (member.node,), (match.rank,), action, (text,)))
    return found


@slow
def devices(view: View) -> list[Verdict]:
    """Devices that report errors (self-checks) or run hot or slowed (an alert)."""
    found = []
    for member in view.members:
        for gpu in member.heartbeat.gpus if member.heartbeat else ():
            history = (g for _, h in member.history for g in h.gpus)
            first = next((g for g in history if g.index == gpu.index and not g.silent_seconds), gpu)
            found += _device(member, gpu, first)
    return found


def _device(member: RankView, gpu: GpuReport, first: GpuReport) -> list[Verdict]:
    name = f"GPU {gpu.index} ({gpu.name}) of {member.node}"
    # Whenever it came in this agent's life: what came while an attempt ended is there from the next one's beginning.
    if gpu.xid in FATAL_XIDS:
        return [_fault(member, "evict", f"{name} reported Xid {gpu.xid}, which needs a reset or a repair")]
    if gpu.recovery in UNUSABLE:
        return [_fault(member, "evict", f"{name} needs a {gpu.recovery}, its driver says")]
    if gpu.ecc_errors > first.ecc_errors:
        more = gpu.ecc_errors - first.ecc_errors
        return [_fault(member, "diagnose", f"{name} counted {more} more uncorrected memory errors")]
    if gpu.xid and gpu.xid != first.xid:
        text = f"{name} reported Xid {gpu.xid}"
    elif gpu.recovery:
        text = f"{name} needs recovery, its driver says: {gpu.recovery}"
    elif gpu.silent_seconds > SILENT:
        text = f"{name}: its driver has not answered for {gpu.silent_seconds:.0f} s; look at dmesg and nvidia-smi there"
    elif gpu.temperature > HOT:
        text = f"{name} has {gpu.temperature:.0f} degrees; above {HOT:.0f} it slows down"
    elif gpu.throttled:
        text = f"{name} is slowed down by its driver at {gpu.temperature:.0f} degrees, {gpu.power_watts:.0f} W"
    else:
        return []
    return [Verdict(Event.DEVICE_WARNING, (member.node,), (), "alert", (text,))]


def _fault(member: RankView, action: Action, text: str) -> Verdict:
    return Verdict(Event.DEVICE_FAULT, (member.node,), (), action, (text,))


@slow
def traffic(view: View) -> list[Verdict]:
    """Network traffic of training is periodic: a full stop means recovery, a lasting drop a person's look.

    (MegaScale section 4.2.) Judged only over a time in which all ranks of the node were in a training step; a quiet
    stretch counts as a stop only if it is three times as long as any that the node had before, and if no step was done
    in it: an interface that is quiet while training goes on did not carry training.
    """
    if view.phase != "running":
        return []
    found = []
    for member in view.members:
        if not member.ranks or len(member.history) < BASE_BEATS + QUIET_BEATS or not _training(member):
            continue
        names = {t.interface for t in member.heartbeat.traffic} if member.heartbeat else set()
        for name in sorted(names - _LOOPBACK):
            found += _interface(member, name)
    return found


def _training(member: RankView) -> bool:
    recent = list(member.history)[-QUIET_BEATS - 2 :]
    return all(w.phase == "train" and w.state == "running" for _, h in recent for w in h.workers)


def _interface(member: RankView, name: str) -> list[Verdict]:
    samples = [t for _, h in member.history for t in h.traffic if t.interface == name]
    if len(samples) < BASE_BEATS + QUIET_BEATS:
        return []
    rates = [t.rx_bytes_per_s + t.tx_bytes_per_s for t in samples]
    before, recent = rates[:-QUIET_BEATS], rates[-QUIET_BEATS:]
    usual = median(before)
    errors = samples[-1].errors
    found = []
    if errors and not any(t.errors for t in samples[:-QUIET_BEATS]):
        text = f"{name} of {member.node} counted {errors} errors or drops since its last heartbeat, none before"
        found.append(Verdict(Event.LINK_ERRORS, (member.node,), (), "alert", (text,)))
    if usual < _LEAST_RATE:
        return found
    quiet = _trailing_quiet(rates, usual)
    longest = _longest_quiet(before, usual)
    stopped = quiet >= max(QUIET_BEATS, 3 * longest) and _peak(samples[-1]) < usual * _STOPPED
    # The step under way when it fell quiet may have been told of a few heartbeats later.
    if stopped and not _stepped(member, quiet // 2):
        text = f"no traffic on {name} of {member.node} for {quiet} heartbeats; usual are {usual / 1e6:.1f} MB/s"
        longest_text = f"its longest quiet stretch before was {longest} heartbeats"
        found.append(Verdict(Event.TRAFFIC_STOPPED, (member.node,), member.ranks, "recover", (text, longest_text)))
    elif max(recent) < _DROPPED * min(_typical(before), usual):
        now = median(recent) / 1e6
        text = f"traffic on {name} of {member.node} fell to {now:.1f} MB/s from {usual / 1e6:.1f} MB/s"
        found.append(Verdict(Event.TRAFFIC_DROPPED, (member.node,), (), "alert", (text,)))
    return found


def _stepped(member: RankView, beats: int) -> bool:
    """Whether a rank of the node has gone on to another step within its last so many heartbeats."""
    recent = [h.workers for _, h in list(member.history)[-beats:]]
    first = {w.rank: w.step for w in recent[0]}
    return any(w.step > first.get(w.rank, w.step) for w in recent[-1])


def _typical(rates: list[float]) -> float:
    """A rate that most heartbeats exceed: steps may be longer than a heartbeat, so rates swing."""
    return sorted(rates)[len(rates) // 4]


def _peak(sample: NetworkTraffic) -> float:
    return max(sample.rx_max, sample.tx_max, sample.rx_bytes_per_s, sample.tx_bytes_per_s)


def _trailing_quiet(rates: list[float], usual: float) -> int:
    count = 0
    for rate in reversed(rates):
        if rate >= usual * _STOPPED:
            break
        count += 1
    return count


def _longest_quiet(rates: list[float], usual: float) -> int:
    longest = count = 0
    for rate in rates:
        count = count + 1 if rate < usual * _STOPPED else 0
        longest = max(longest, count)
    # What is quiet up to the end may be the stop itself.
    return longest if count != longest else max((0, *_stretches(rates, usual)[:-1]))


def _stretches(rates: list[float], usual: float) -> list[int]:
    found, count = [], 0
    for rate in rates:
        if rate < usual * _STOPPED:
            count += 1
        elif count:
            found.append(count)
            count = 0
    return [*found, count] if count else found
