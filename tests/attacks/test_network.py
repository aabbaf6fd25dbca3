"""From a sandbox without a network to anything that is not in it."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from tests.attacks import attack
from tests.attacks.calls import scripted, succeeds

ONE_SANDBOX = True
OWN = "a network namespace of its own"


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


def opens(family: int, kind: int, protocol: int):
    """An attack that opens a socket."""
    return scripted(
        "the filter of system calls: Unix, TCP and UDP only",
        f"""
try: socket.socket({family}, {kind}, {protocol}); won(True)
except OSError: won(False)
""",
    )


# VM sockets know no network namespaces: what listens on the machine's host is reached from anywhere.
test_talk_to_the_hypervisor = opens(socket.AF_VSOCK, socket.SOCK_STREAM, 0)

# CVE-2016-8655, CVE-2020-14386: packet sockets from a namespace where one is root.
test_listen_to_packets = opens(socket.AF_PACKET, socket.SOCK_RAW, 0)

# CVE-2022-32250, CVE-2024-1086: nf_tables, by NETLINK_NETFILTER; and NETLINK_KOBJECT_UEVENT.
test_reach_the_packet_filter_of_the_kernel = opens(socket.AF_NETLINK, socket.SOCK_RAW, 12)
test_hear_of_the_machines_devices = opens(socket.AF_NETLINK, socket.SOCK_RAW, 15)

# DCCP's CVE-2017-6074, SCTP's, MPTCP's: the socket loads the module. Here: IPPROTO_MPTCP.
test_load_a_protocol_of_the_kernel = opens(socket.AF_INET, socket.SOCK_STREAM, 262)


@attack(stopped_by="hosts and resolv.conf of its own")
def test_learn_the_machines_names_and_its_name_server(target):
    hosts, resolver = (Path("/etc", name).read_text() for name in ("hosts", "resolv.conf"))
    inside = target.client.bash("cat /etc/hosts; echo ---; cat /etc/resolv.conf").output
    return resolver.strip() != "" and (hosts in inside or resolver in inside)
