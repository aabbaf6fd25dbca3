"""The addresses that webhooks may go to: whoever may submit must not reach the operator's own network so."""

from __future__ import annotations

import string
import unicodedata
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

Address = IPv4Address | IPv6Address
PUBLIC = "public"
"""Stands for every address that is routed on the internet."""
_NAT64 = IPv6Network("64:ff9b::/96")
REMEDY = "the operator's ROLLOUT_WEBHOOK_ALLOW says what is allowed"


class AddressRefused(OSError):
    """A webhook may not go there; the message says why. An OSError, as resolvers raise."""


class AllowedAddresses:
    """The list of the setting: `public`, names, `.domains`, addresses and networks."""

    def __init__(self, allow: str) -> None:
        """
        Raises:
            ValueError: An entry is neither a name nor an address.
        """
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        self._public = False
        for entry in filter(None, (entry.strip().lower() for entry in allow.split(","))):
            if entry == PUBLIC:
                self._public = True
            elif "/" in entry or ":" in entry or entry.replace(".", "").isdigit():
                self._networks.append(ip_network(entry, strict=False))
            elif all(part.replace("-", "").isalnum() for part in entry.removeprefix(".").split(".")):
                self._names.add(entry)
            else:
                raise ValueError(
                    f"{entry!r} is no host name, .domain, address or network, and not {PUBLIC!r}"
                )

    def check_url(self, url: str) -> SplitResult:
        """Refuse what can be refused before a name is resolved.

        Raises:
            AddressRefused: With the reason.
        """
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise AddressRefused(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise AddressRefused(f"{url!r} is no http or https URL with a host")
        if parts.username is not None or parts.password is not None:
            raise AddressRefused("a user name or password in the URL is not sent; leave it out")
        literal = _literal(host)
        if literal is None and (_is_number(host) or not host.isascii()):
            raise AddressRefused(
                f"{host!r} is read differently by different programs; write an address as four numbers, such "
                "as 192.0.2.7, and a name in ASCII (xn--…)"
            )
        if literal is not None:
            self.check_address(host, literal)
        elif not (self._public or self._networks or self._named(host)):
            raise AddressRefused(f"webhooks may not go to {host!r}; {REMEDY}")
        return parts

    def check_address(self, host: str, address: Address) -> None:
        """Refuse an address that a name turned out to have.

        Raises:
            AddressRefused: With the reason.
        """
        if self._named(host):
            return
        true = _embedded(address)
        if any(true.version == network.version and true in network for network in self._networks):
            return
        if not (self._public and true.is_global and not true.is_multicast):
            raise AddressRefused(f"webhooks may not go to {host!r}, which is {address}; {REMEDY}")

    def _named(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return host in self._names or any(host.endswith(name) for name in self._names if name.startswith("."))


def _is_number(host: str) -> bool:
    """Whether resolvers take a host for an IPv4 address (WHATWG URL, ends in a number): no name ends in one.

    `ip_address` takes the one form with four decimal numbers; `127.1`, `2130706433`, `0x7f.1` and
    `017700000001` are the same address to others. Digits of other scripts are digits to some, too.
    """
    last = unicodedata.normalize("NFKC", host).lower().rstrip(".").rpartition(".")[2]
    return last.isdigit() or (last.startswith("0x") and all(digit in string.hexdigits for digit in last[2:]))


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one leads to, where it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo and teredo[1]) or address
