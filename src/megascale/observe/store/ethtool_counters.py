"""What a NIC's driver counts beyond the kernel's own counters (`ethtool -S`): pauses by priority, FEC, signal errors.

Names are the drivers'. Of mlx5 (the kernel's documentation: device_drivers/ethernet/mellanox/mlx5/counters)
rx_prioN_pause are PFC frames that came, tx_prioN_pause those that were sent, ..._duration the microseconds that
they held traffic up; rx_corrected_bits_phy is what FEC mended, rx_symbol_err_phy what it could not. A fibre or
transceiver that goes bad counts the former up long before the latter.
"""

from __future__ import annotations

import array
import contextlib
import re
import socket
import struct
from collections.abc import Callable

_SIOCETHTOOL = 0x8946
_GET_STRINGS, _GET_STATISTICS, _GET_SIZES = 0x1B, 0x1D, 0x37
_STATISTICS = 1  # the set of strings that names them
_NAME = 32
_MOST = 4096

# Of mlx5, ice (priority), bnxt (pfc, fec), and drivers that say it alike.
_WANTED = re.compile(
    r"[rt]x_prio\d_pause(_duration|_transition)?|[rt]x_pause_ctrl_phy|[rt]x_global_pause(_duration)?"
    r"|[rt]x_priority_\d_xo(n|ff)\.nic|[rt]x_pfc_ena_frames_pri\d|[rt]x_pause(_frames)?"
    r"|rx_corrected_bits_phy|rx_pcs_symbol_err_phy|rx_symbol_err_phy|rx_crc_errors_phy|link_down_events_phy"
    r"|rx_err_lane_\d_phy|rx_fec_(corrected|uncorrectable)_blocks|[rt]x_ecn_mark\w*|rx_discards_phy|rx_out_of_buffer"
)


class EthtoolCounters:
    """Of one NIC; `names` is empty where it counts nothing of it.

    Args:
        wanted: which of its counters to read, by name.

    Attributes:
        names: of the counters that `read` gives, in order.
    """

    def __init__(self, nic: str, wanted: Callable[[str], bool] | None = None) -> None:
        self._nic = nic.encode()[:15]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._count = 0
        self._which: list[int] = []
        self.names: list[str] = []
        with contextlib.suppress(OSError, ImportError):
            every = self._all_names()
            self._count = len(every)
            self._which = [i for i, name in enumerate(every) if (wanted or is_link_counter)(name)]
            self.names = [every[i] for i in self._which]
        if not self.names:
            self.close()

    def _ask(self, request: array.array[int]) -> None:
        """Have the kernel fill a request."""
        import fcntl

        address, _ = request.buffer_info()
        fcntl.ioctl(self._socket.fileno(), _SIOCETHTOOL, struct.pack("16sP", self._nic, address))

    def _all_names(self) -> list[str]:
        sizes = array.array("B", struct.pack("=IIQI", _GET_SIZES, 0, 1 << _STATISTICS, 0))
        self._ask(sizes)
        _, _, there, count = struct.unpack("=IIQI", sizes)
        if not there or not 0 < count <= _MOST:
            return []
        strings = array.array("B", struct.pack("=III", _GET_STRINGS, _STATISTICS, count) + bytes(count * _NAME))
        self._ask(strings)
        text = strings.tobytes()[12:]
        return [text[i : i + _NAME].split(b"\0", 1)[0].decode(errors="replace") for i in range(0, len(text), _NAME)]

    def read(self) -> list[int]:
        """The values of `names`; none if the driver does not answer now."""
        if not self.names:
            return []
        # The kernel fills as many as there are, by its own count: a queue may have come since the names were asked for.
        request = array.array("B", struct.pack("=II", _GET_STATISTICS, self._count) + bytes(8 * 2 * _MOST))
        try:
            self._ask(request)
        except OSError:
            return []
        data = request.tobytes()
        if struct.unpack_from("=I", data, 4)[0] != self._count:
            return []
        return [int(struct.unpack_from("=Q", data, 8 + 8 * i)[0]) for i in self._which]

    def close(self) -> None:
        """Ask no more."""
        self._socket.close()


def is_link_counter(name: str) -> bool:
    """Whether a driver's counter tells of pauses, FEC, signal or congestion."""
    return _WANTED.fullmatch(name) is not None
