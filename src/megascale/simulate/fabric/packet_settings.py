"""Settings of a simulation at the packet level."""

from __future__ import annotations

from dataclasses import dataclass, field

from megascale.errors import ConfigError
from megascale.simulate.fabric.control_settings import SETS, DcqcnSettings, SwiftSettings, control_number


@dataclass(frozen=True)
class Flap:
    """A temporary outage of a link, in both directions.

    Attributes:
        link: index of the link in one direction.
        start: beginning of the outage, in seconds.
        duration: length of the outage, in seconds.
    """

    link: int
    start: float
    duration: float

    def __post_init__(self) -> None:
        if self.start < 0 or self.duration < 0:
            raise ConfigError(f"flap at {self.start:g} s for {self.duration:g} s: times must be 0 or more")


@dataclass(frozen=True)
class PacketSettings:
    """Settings of a simulation at the packet level.

    Attributes:
        control: congestion control: none, dcqcn, swift, hybrid-both or hybrid-cut.
        dcqcn, swift: settings of the two controls.
        mtu: payload bytes of a packet; the default is RoCE's maximum.
        header: bytes besides the payload: preamble, gap, Ethernet, IP, UDP, BTH, ICRC.
        pfc: whether switches pause their neighbours.
        pfc_alpha: share of the free shared memory that a link's packets may occupy (HPCC's setting, 1/8).
        window_mb: maximum MB in flight per flow; NCCL's buffer of a channel is 4 MiB.
        ack_every: packets per acknowledgement. Swift and the hybrids use 1, because they measure each round trip.
        timeout: exponent of a queue pair's retransmission timer, 4.096 us x 2^timeout (NCCL_IB_TIMEOUT).
        retries: number of retries (NCCL_IB_RETRY_CNT).
        adaptive_us: first adaptive retransmission timer, which doubles up to the queue pair's timer; 0: fixed timer.
        seed: seed of the random marking.
    """

    control: str = "dcqcn"
    dcqcn: DcqcnSettings = SETS["fast"]
    swift: SwiftSettings = field(default_factory=SwiftSettings)
    mtu: int = 4096
    header: int = 82
    pfc: bool = True
    pfc_alpha: float = 0.125
    window_mb: float = 4.194304
    ack_every: int = 4
    timeout: int = 14
    retries: int = 7
    adaptive_us: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        control_number(self.control)
        if self.mtu < 64 or self.header < 0 or self.ack_every < 1 or self.window_mb <= 0 or self.pfc_alpha <= 0:
            raise ConfigError(
                f"packets: mtu={self.mtu} must be at least 64, header={self.header} at least 0, ack_every="
                f"{self.ack_every} at least 1, window_mb={self.window_mb:g} and pfc_alpha={self.pfc_alpha:g} positive"
            )
        if not 1 <= self.timeout <= 31 or not 0 <= self.retries <= 7 or self.adaptive_us < 0:
            raise ConfigError(
                f"packets: timeout={self.timeout} must be in 1..31, retries={self.retries} in 0..7, adaptive_us="
                f"{self.adaptive_us:g} 0 or more"
            )

    @property
    def payload_share(self) -> float:
        """Share of a link's bandwidth that carries payload."""
        return self.mtu / (self.mtu + self.header)
