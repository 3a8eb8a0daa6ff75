"""HTTP to services of one's own, past any proxy: `http_proxy` is for the world outside."""

from __future__ import annotations

import ipaddress
import ssl
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPResponse

# What a request ends with where nobody answers, or something that speaks no HTTP.
FAILURES = (OSError, ValueError, HTTPException)


def is_local(url: str) -> bool:
    """Whether a URL is of this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a URL, without its password; None where there is none."""
    parts = urllib.parse.urlsplit(url)
    named = urllib.request.getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    if proxy is None or is_local(url) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy.rpartition("@")[2] if "@" in proxy else proxy


def open_url(
    url: str | urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None = None
) -> HTTPResponse:
    """Opens a URL as urllib's urlopen does, past any proxy. One of FAILURES, or HTTPError for a status from 400 on."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    return opener.open(url, timeout=timeout_s)
