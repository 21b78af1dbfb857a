"""Counters of a NIC's driver, which the kernel's files do not contain (`ethtool -S`)."""

from __future__ import annotations

import array
import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Callable

# Names of counters in the drivers. In mlx5 (see the kernel's documentation of mlx5 counters), rx_prioN_pause and
# tx_prioN_pause count received and sent PFC frames, and ..._duration the microseconds in which PFC paused traffic.
# rx_corrected_bits_phy counts bits that FEC corrected, and rx_symbol_err_phy symbols that FEC could not correct. With a
# failing fibre or transceiver, the first increases long before the second. Other names are from the drivers ice
# (priority), bnxt (pfc, fec) and similar drivers.
_LINK_COUNTERS = re.compile(
    r"[rt]x_prio\d_pause(_duration|_transition)?|[rt]x_pause_ctrl_phy|[rt]x_global_pause(_duration)?"
    r"|[rt]x_priority_\d_xo(n|ff)\.nic|[rt]x_pfc_ena_frames_pri\d|[rt]x_pause(_frames)?"
    r"|rx_corrected_bits_phy|rx_pcs_symbol_err_phy|rx_symbol_err_phy|rx_crc_errors_phy|link_down_events_phy"
    r"|rx_err_lane_\d_phy|rx_fec_(corrected|uncorrectable)_blocks|[rt]x_ecn_mark\w*|rx_discards_phy|rx_out_of_buffer"
)
# Request to the kernel, and its commands (linux/sockios.h, linux/ethtool.h).
_SIOCETHTOOL = 0x8946
_GET_STRINGS, _GET_STATISTICS, _GET_SIZES = 0x1B, 0x1D, 0x37
_STATISTICS_SET = 1  # the set of strings that names the statistics
_NAME_BYTES = 32
_MAX_STATISTICS = 4096


def is_link_counter(name: str) -> bool:
    """Return whether a driver's counter is about pauses, FEC, signal quality or congestion."""
    return _LINK_COUNTERS.fullmatch(name) is not None


class EthtoolCounters:
    """Reader of the counters of a NIC's driver, which the kernel's files do not contain (`ethtool -S`).

    Args:
        is_selected: whether to read a counter, by its name.

    Attributes:
        names: names of the selected counters, in the order of `read`; empty without such counters.
    """

    def __init__(self, nic: str, is_selected: Callable[[str], bool] = is_link_counter) -> None:
        self.nic = nic
        self.names: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._count = 0
        self._indices: list[int] = []
        with contextlib.suppress(OSError):
            driver_names = self._read_names()
            self._count = len(driver_names)
            self._indices = [i for i, name in enumerate(driver_names) if is_selected(name)]
            self.names = [driver_names[i] for i in self._indices]
        if not self.names:
            self.close()

    def _send_request(self, request: array.array[int]) -> bytes:
        """Send a request (linux/ethtool.h) to the kernel, which fills it, and return the filled request."""
        address, _ = request.buffer_info()
        fcntl.ioctl(self._socket.fileno(), _SIOCETHTOOL, struct.pack("16sP", self.nic.encode()[:15], address))
        return request.tobytes()

    def _read_names(self) -> list[str]:
        """Return the names of all statistics of the driver; empty if it has none or too many."""
        sizes = self._send_request(array.array("B", struct.pack("=IIQI", _GET_SIZES, 0, 1 << _STATISTICS_SET, 0)))
        _, _, sets, count = struct.unpack("=IIQI", sizes)
        if not sets or not 0 < count <= _MAX_STATISTICS:
            return []
        request = struct.pack("=III", _GET_STRINGS, _STATISTICS_SET, count) + bytes(count * _NAME_BYTES)
        text = self._send_request(array.array("B", request))[12:]
        names = (text[i : i + _NAME_BYTES] for i in range(0, len(text), _NAME_BYTES))
        return [name.split(b"\0", 1)[0].decode(errors="replace") for name in names]

    def read(self) -> list[int]:
        """Return the values of `names`; empty if the driver does not answer."""
        if not self.names:
            return []
        # The kernel writes all current values, whatever the requested count is. Queues may have been added since the
        # names were read, so the buffer has room for twice the accepted number of values.
        request = struct.pack("=II", _GET_STATISTICS, self._count) + bytes(8 * 2 * _MAX_STATISTICS)
        try:
            data = self._send_request(array.array("B", request))
        except OSError:
            return []
        (count,) = struct.unpack_from("=I", data, 4)
        if count != self._count:  # the names no longer fit the values
            return []
        return [int(struct.unpack_from("=Q", data, 8 + 8 * i)[0]) for i in self._indices]

    def close(self) -> None:
        self._socket.close()
