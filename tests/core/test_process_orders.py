"""Orders arrive whole and in order, however the pipe cuts them, and damaged ones are passed over."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.process_orders import Park, Resume, encode_order, read_orders

orders = st.lists(
    st.builds(Park, st.integers(0, 2**40), st.booleans())
    | st.builds(Resume, st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3), st.integers(0, 99)),
    max_size=5,
)


@given(orders, st.integers(1, 40))
def test_orders_arrive_in_order_however_they_are_cut(sent, size):
    data = b"".join(encode_order(order) for order in sent)
    read, write = os.pipe()
    try:
        # All pieces fit into the pipe's buffer.
        for start in range(0, len(data), size):
            os.write(write, data[start : start + size])
        os.close(write)
        assert list(read_orders(read)) == sent
    finally:
        os.close(read)


def test_damaged_orders_are_passed_over():
    read, write = os.pipe()
    os.write(write, b'{"do":"leave"}\nnothing\n\n' + encode_order(Park(3)) + b'{"do":"park","att')
    os.close(write)
    assert list(read_orders(read)) == [Park(3)]
    os.close(read)


def test_an_order_that_a_pipe_may_tear_is_refused():
    with pytest.raises(ValueError, match="5"):
        encode_order(Resume({"A": "x" * 5000}))
