"""The first process of a sandbox: `python3 start.py CONFIG`. Walls, then bash, then everything else.

To import all that the server needs takes longer than bash does to be ready. So bash is started with the few
modules that this takes; the shell's are imported while it starts, and the server's (`server.py`) while the
host looks at what runs and its client connects. One line goes to standard output when the shell is ready.

Standard input is a socket over which the listening socket comes, and a key. The configuration is a dict as
`marshal` writes it, which takes no module to read: `directory, workspace, env, limits, python, bash, walls,
binds` (`python`: command line of the interpreter that runs us; `bash`: one of our own, for images without;
null = the image's; `walls`: whether this is a container, see `put_up_walls`; `binds`: see `check_binds`).
"""

import _socket  # `socket` makes enumerations of it, which takes longer than all of this
import marshal
import os
import sys

import seccomp
from bash import Bash, find_program
from repair import Loader

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
FD_BYTES = 4


def main(config_path):
    """Serve until killed."""
    prefer_us_when_memory_is_short()
    with open(config_path, "rb") as file:
        serve(marshal.load(file))


def serve(config):
    """The same, of a process that is the sandbox's first."""
    if config["walls"]:
        put_up_walls()
    check_binds(config["binds"])
    listener, key = take_listener()
    # The init of a namespace of our own? Only then "all processes" are the agent's, and only then can none of
    # them signal us: the kernel spares an init, stopping and killing included.
    own_namespace = os.getpid() == 1
    if not own_namespace:  # what loses its parent becomes our child, and is found
        seccomp.prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(config["workspace"])
    loader = Loader(own_namespace)
    programs = programs_of_bash(config)
    directory, workspace, env, limits = (config[key] for key in ("directory", "workspace", "env", "limits"))
    bash = Bash(programs[0], directory, env, workspace, limits)
    from shell import Shell

    shell = Shell(directory, env, workspace, programs, limits, own_namespace, loader, bash)
    os.write(1, b"ready\n")
    os.dup2(0, 1)  # the host closes its end of the pipe now
    import server

    server.serve(config, shell, loader, listener, key)


def put_up_walls():
    """Close what the runtime left open, before any thread or other process. Raises OSError where the kernel
    cannot.

    We are the init of the PID namespace in both runtimes, so none inside is under no filter. The agent's
    processes have our uid: that we are not dumpable keeps them from tracing us, from reading our memory and
    from taking our descriptors.
    """
    seccomp.prctl(PR_SET_DUMPABLE, 0)
    seccomp.join_own_keyring()  # else it stays the host's, which is empty; through the filter none is reached
    seccomp.load()


def prefer_us_when_memory_is_short():
    """Should the node run out of memory, the kernel ends something here and not a worker or the host.

    For all of the sandbox, because the children of a process that is not dumpable cannot say it themselves.
    Nor can such a process itself. Of equals the kernel takes the largest, which is not the server.
    """
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, b"1000")
        os.close(file)
    except OSError:
        pass  # a machine without it; nothing depends on it


def take_listener():
    """Descriptor of the listening socket, and the key, which the host sends over our standard input.

    Sent and not inherited, because what the runtime runs in the container before us has the same.
    """
    source = _socket.socket(fileno=os.dup(0))
    key, messages, _, _ = source.recvmsg(64, _socket.CMSG_SPACE(FD_BYTES))
    source.close()
    if not messages:
        raise SystemExit("whoever starts sandboxes has ended")
    for level, kind, data in messages:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            listener = int.from_bytes(data[:FD_BYTES], sys.byteorder)
    os.set_inheritable(listener, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return listener, key.decode()


def check_binds(binds):
    """That each (place, device, inode) shows what the host had checked: runtimes mount by name, and who may
    write to the directory above may have given the name to something else meanwhile.
    """
    for place, *identity in binds:
        try:
            info = os.stat(place)
        except OSError as error:
            raise SystemExit("what is bound at %s cannot be seen: %s" % (place, error)) from None
        if [info.st_dev, info.st_ino] != identity:
            raise SystemExit("what is bound at %s was swapped between check and mount; ask again" % place)


def programs_of_bash(config):
    """The image's bash, else, or should the agent break it, the one that comes with our interpreter."""
    if not config["bash"]:
        return [["bash"]]
    image_has_one = find_program("bash", config["env"].get("PATH"))
    return [["bash"], config["bash"]] if image_has_one else [config["bash"]]


if __name__ == "__main__":
    main(sys.argv[1])
