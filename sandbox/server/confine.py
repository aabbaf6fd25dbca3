"""What every process of the agent is held to, set between fork and exec. The server itself is not limited."""

import os
import resource

NAMES = {
    "processes": resource.RLIMIT_NPROC,
    "memory_bytes": resource.RLIMIT_DATA,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
}


def confiner(limits):
    """A function for the child to call before exec. `limits`: names of NAMES → number; absent = not limited.

    RLIMIT_DATA counts private writable memory and so bounds one process as soon as it asks, before the host's
    watchdog has seen it; it leaves address space that is only reserved alone, which RLIMIT_AS would not.
    """
    wanted = [(NAMES[name], int(value)) for name, value in limits.items() if name in NAMES and value]
    niceness = int(limits.get("nice", 0))

    def confine():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, value in wanted:
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                value = min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.nice(niceness)

    return confine
