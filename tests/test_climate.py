"""What tests/conftest.py promises to every test."""

from __future__ import annotations

import os
import socket

import pytest


@pytest.mark.parametrize(("content", "text"), [(os.urandom(8), "a"), (os.urandom(8), "b")])
def test_bytes_are_not_in_the_name_of_a_test(
    request: pytest.FixtureRequest, content: bytes, text: str
) -> None:
    assert isinstance(content, bytes)
    assert request.node.name.endswith(f"[content-{text}]")


def test_no_other_machine_is_asked() -> None:
    with pytest.raises(RuntimeError, match="without the network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(RuntimeError, match="without the network"):
        socket.getaddrinfo("example.com", 80)
