"""What every process of the agent is held to, set between fork and exec. The server itself is not limited."""

import _signal as signal  # to make enumerations of it takes as long as to start Python
import os
import resource

NAMES = {
    "processes": resource.RLIMIT_NPROC,
    "memory_bytes": resource.RLIMIT_DATA,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
}
# What is ignored when a program starts stays so, and no shell can change it. A host that was started by
# `nohup` or in the background of a script ignores the first three, and Python the last two.
HEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)


def confiner(limits, more=()):
    """A function for the child to call before exec. `limits`: names of NAMES → number; absent = not limited.
    `more`: kinds of the kernel's and numbers, which lower those where both say something.

    RLIMIT_DATA counts private writable memory and so bounds one process as soon as it asks, before the host's
    watchdog has seen it; it leaves address space that is only reserved alone, which RLIMIT_AS would not.
    """
    limited = [(NAMES[name], int(value)) for name, value in limits.items() if name in NAMES and value]
    limited += more
    niceness = int(limits.get("nice", 0))

    def confine():
        for number in HEARD:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, value in limited:
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.nice(niceness)

    return confine
