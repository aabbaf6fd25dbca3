"""What the first process in a container does before anything else: it closes what the runtime left open.

It is the server, and the init of the PID namespace, in both runtimes; so none inside is under no filter.
"""

import keyring
import seccomp

PR_SET_DUMPABLE = 4


def put_up():
    """Before any thread or other process. Raises OSError where the kernel cannot.

    The agent's processes have our uid: that we are not dumpable keeps them from tracing us, from reading our
    memory and from taking our descriptors.
    """
    seccomp.prctl(PR_SET_DUMPABLE, 0)
    keyring.join_own()  # else it stays the host's, which is empty; through the filter none can be reached
    seccomp.load()
