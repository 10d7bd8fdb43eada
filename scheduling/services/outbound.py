"""Requests to addresses that users have typed: only to where they may go, never longer than a deadline.

The name is resolved and the address checked at the moment of connecting, and the connection goes to the address that
was checked, so a name that points elsewhere a moment later reaches nothing. Redirects are not followed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpcore

#: Seconds for everything: resolving, connecting, TLS, sending, the beginning of the answer.
DEADLINE = 10.0
CONNECT = 5.0
#: What is kept of an answer's body, bytes.
EXCERPT = 2048
LONGEST_URL = 500

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
#: Shared by carriers and overlay networks: neither global nor private to Python.
_SHARED = ipaddress.IPv4Network("100.64.0.0/10")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forbidden(Exception):
    """The address is one that must not be reached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: a status code with the beginning of the body, or an error in words."""

    code: int | None
    excerpt: str
    error: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.code is not None and 200 <= self.code < 300


def may_reach(address: Address, *, private: bool) -> bool:
    """Public addresses; with ``private`` also loopback and private networks, but never link-local (where clouds keep
    their metadata), multicast or reserved ones. Addresses inside other addresses are looked at too."""
    inner: Address | None = None
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo
        inner = address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return may_reach(inner, private=private)
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if address.is_global:
        return not address.is_reserved
    inside = address.is_private or address in _SHARED
    return private and (address.is_loopback or (inside and not address.is_reserved))


def url_problems(url: str, *, private: bool) -> list[str]:
    """Why the portal will not send to ``url``; empty = it may."""
    if len(url) > LONGEST_URL:
        return [f"{len(url)} characters are too many; at most {LONGEST_URL} are allowed."]
    if not url.isascii() or not url.isprintable() or " " in url:
        return [f"{url[:80]!r}: only visible ASCII characters are allowed; write others percent-encoded."]
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return [f"{url[:80]!r} is not an address: {error}."]
    allowed = ("https", "http") if private else ("https",)
    if parts.scheme not in allowed or not parts.hostname or port == 0:
        return [f"{url[:80]!r} is not an address that begins with {' or '.join(f'{name}://' for name in allowed)}."]
    if parts.username is not None or parts.password is not None or parts.fragment:
        return [f"{parts.hostname}: no user name, password or fragment is allowed in the address."]
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        return []
    return [] if may_reach(address, private=private) else [f"{address} is not an address that webhooks may go to."]


class _Timed(httpcore.NetworkStream):
    """A stream whose reads and writes all end at one deadline, however slowly the other side drips."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the deadline has passed")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._left())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Timed(self._inner.start_tls(ssl_context, server_hostname, self._left()), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Guarded(httpcore.NetworkBackend):
    """Connects only to addresses that may be reached."""

    def __init__(self, deadline: float, *, private: bool) -> None:
        self._deadline, self._private = deadline, private

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        addresses = _resolve(host, port)
        open_to_us = [address for address in addresses if may_reach(address, private=self._private)]
        if not open_to_us:
            named = ", ".join(str(address) for address in addresses)
            raise Forbidden(f"{host} is at {named}, which webhooks may not reach")
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in open_to_us[:4]:
            left = min(CONNECT, self._deadline - time.monotonic())
            if left <= 0:
                raise httpcore.ConnectTimeout("the deadline has passed")
            try:
                stream = httpcore.SyncBackend().connect_tcp(str(address), port, left)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _Timed(stream, self._deadline)
        raise failure


def _resolve(host: str, port: int) -> list[Address]:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(f"the name {host} cannot be resolved: {error}") from error
    found: dict[Address, None] = {}
    for row in rows:
        # A scope such as %eth0 belongs to link-local addresses only.
        found[ipaddress.ip_address(str(row[4][0]).split("%")[0])] = None
    return list(found)


def post(url: str, body: bytes, headers: dict[str, str], *, private: bool, deadline: float = DEADLINE) -> Answer:
    """Send ``body`` and read the beginning of the answer. Never raises for what the other side does."""
    began = time.monotonic()
    try:
        code, excerpt = _post(url, body, headers, _Guarded(began + deadline, private=private))
    except Forbidden as error:
        return Answer(None, "", f"Refused: {error}.", time.monotonic() - began)
    except httpcore.TimeoutException:
        return Answer(None, "", f"No answer within {deadline:g} s.", time.monotonic() - began)
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
        words = str(error) or type(error).__name__
        return Answer(None, "", f"No answer: {words}."[:300], time.monotonic() - began)
    error_text = ""
    if 300 <= code < 400:
        error_text = f"Answered {code}: redirects are not followed; enter the final address."
    elif not 200 <= code < 300:
        error_text = f"Answered {code}; a code from 200 to 299 means that it was taken."
    return Answer(code, excerpt, error_text, time.monotonic() - began)


def _post(url: str, body: bytes, headers: dict[str, str], backend: _Guarded) -> tuple[int, str]:
    with (
        httpcore.ConnectionPool(ssl_context=_trust(), network_backend=backend, retries=0) as pool,
        pool.stream("POST", url, headers=list(headers.items()), content=body) as response,
    ):
        taken = b""
        # With the code the answer is there; a body that drips or breaks off changes nothing about it.
        with contextlib.suppress(httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
            for chunk in response.iter_stream():
                taken += chunk
                if len(taken) >= EXCERPT:
                    break
        return response.status, _printable(taken[:EXCERPT].decode(errors="replace"))


@cache
def _trust() -> ssl.SSLContext:
    context = httpcore.default_ssl_context()
    context.load_default_certs()  # an organisation's own authority too
    return context


def _printable(text: str) -> str:
    """Without NUL, which no database keeps."""
    return text.replace("\x00", "\ufffd")
