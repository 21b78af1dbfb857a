"""Tables as the packet kernel's loop has them: views that own nothing.

Each time that a table is handed on, the compiler counts one more owner and then one fewer, with a locked instruction
each; for the twenty tables of every event that is ten times the event. Views of plain memory are not counted. The
caller of the kernel owns what they show for as long as it runs.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from megascale.simulate.fabric.jit import inlined, memory_view
from megascale.simulate.fabric.packet_tables import Links, Outages, Paths, Tables

view = memory_view()


@inlined
def unowned(table):
    """The same memory, not counted."""
    return view(table.ctypes.data, table.shape, table.dtype)


@inlined
def unowned_tables(t):
    """See packet_tables.Tables."""
    return Tables(
        unowned(t.head), unowned(t.pk), unowned(t.count), unowned(t.lk), unowned(t.used), unowned(t.fl), unowned(t.cc),
        unowned(t.turn), unowned(t.totals), unowned(t.random), unowned(t.rtt), t.pool, t.wakes, t.pauses, t.resumes,
        t.timers,
    )  # fmt: skip


@inlined
def unowned_links(links):
    """See packet_tables.Links."""
    return Links(
        links.nics, unowned(links.speed), unowned(links.delay), unowned(links.node), unowned(links.capacity),
        unowned(links.shared), links.pfc_alpha, unowned(links.kmin), unowned(links.kmax), links.pmax,
    )  # fmt: skip


@inlined
def unowned_paths(paths):
    """See packet_tables.Paths."""
    return Paths(
        unowned(paths.path), unowned(paths.hops), unowned(paths.packets), unowned(paths.last), unowned(paths.start),
        unowned(paths.back), unowned(paths.by_nic), unowned(paths.nic_first),
    )  # fmt: skip


@inlined
def unowned_outages(outages):
    """See packet_tables.Outages."""
    return Outages(unowned(outages.down), unowned(outages.up), unowned(outages.flow))
