"""From a sandbox without a network to anything that is not in it."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from tests.attacks import attack
from tests.attacks.calls import succeeds

OWN = "a network namespace of its own"
FILTER = "the filter of system calls: Unix, TCP and UDP only"


@attack(stopped_by=OWN)
def test_reach_a_service_of_the_node(target):
    """The gateway, Redis, an inference server, an SSH agent's forwarder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return succeeds(
            target,
            f"""
try: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5); won(True)
except OSError: won(False)
""",
        )


@attack(stopped_by=OWN)
def test_reach_an_abstract_socket_of_the_node(target):
    """containerd's CVE-2020-15257: abstract Unix sockets know no file permissions."""
    name = f"rollout-attack-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        return succeeds(
            target,
            f"""
try: socket.socket(socket.AF_UNIX).connect("\\0{name}"); won(True)
except OSError: won(False)
""",
        )


def _opens(target, family: int, kind: int, protocol: int) -> bool:
    return succeeds(
        target,
        f"""
try: socket.socket({family}, {kind}, {protocol}); won(True)
except OSError: won(False)
""",
    )


@attack(stopped_by=FILTER)
def test_talk_to_the_hypervisor(target):
    """VM sockets know no network namespaces: what listens on the machine's host is reached from anywhere."""
    return _opens(target, socket.AF_VSOCK, socket.SOCK_STREAM, 0)


@attack(stopped_by=FILTER)
def test_listen_to_packets(target):
    """CVE-2016-8655, CVE-2020-14386: packet sockets from a namespace where one is root."""
    return _opens(target, socket.AF_PACKET, socket.SOCK_RAW, 0)


@attack(stopped_by=FILTER)
def test_reach_the_packet_filter_of_the_kernel(target):
    """CVE-2022-32250, CVE-2024-1086: nf_tables, by netlink."""
    return _opens(target, socket.AF_NETLINK, socket.SOCK_RAW, 12)  # NETLINK_NETFILTER


@attack(stopped_by=FILTER)
def test_hear_of_the_machines_devices(target):
    return _opens(target, socket.AF_NETLINK, socket.SOCK_RAW, 15)  # NETLINK_KOBJECT_UEVENT


@attack(stopped_by=FILTER)
def test_load_a_protocol_of_the_kernel(target):
    """DCCP's CVE-2017-6074, SCTP's, MPTCP's: the socket loads the module."""
    return _opens(target, socket.AF_INET, socket.SOCK_STREAM, 262)  # IPPROTO_MPTCP


@attack(stopped_by="hosts and resolv.conf of its own")
def test_learn_the_machines_names_and_its_name_server(target):
    hosts, resolver = (Path("/etc", name).read_text() for name in ("hosts", "resolv.conf"))
    inside = target.client.bash("cat /etc/hosts; echo ---; cat /etc/resolv.conf").output
    return resolver.strip() != "" and (hosts in inside or resolver in inside)
