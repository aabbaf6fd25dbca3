"""Keys of the kernel belong to a user, not to a container: what one leaves there, another could read."""

from __future__ import annotations

from tests.attacks import attack
from tests.attacks.calls import CALLS, scripted, succeeds
from tests.helpers.blocking import sandbox_of

ONE_SANDBOX = True
FILTER = "keyctl refused by the filter; a session keyring of its own"
SESSION, USER = -3, -4  # KEY_SPEC_SESSION_KEYRING, KEY_SPEC_USER_KEYRING
LEAVE = """
won(call("add_key", b"user", b"{name}", b"text for the next", 17, {ring}) > 0)
"""
FIND = """
call("keyctl", 8, {ring}, -3)  # KEYCTL_LINK: what is linked to one's session keyring may be read
serial = call("keyctl", 10, {ring}, b"user", b"{name}", 0)  # KEYCTL_SEARCH
text = ctypes.create_string_buffer(100)
if serial > 0:
    call("keyctl", 11, serial, text, 100)  # KEYCTL_READ
    call("keyctl", 9, serial, {ring})  # KEYCTL_UNLINK
won(text.value == b"text for the next")
"""


def _passed_on(target, ring: int) -> bool:
    """Whether a second sandbox reads what the first left in a keyring."""
    name = f"note-{target.info.id}"
    target.python(CALLS + LEAVE.format(name=name, ring=ring))
    with sandbox_of(target.host, runtime=target.runtime) as (neighbour, client):
        path = f"{neighbour.workspace}/find.py"
        client.write_file(path, CALLS + FIND.format(name=name, ring=ring))
        return client.bash(f"python3 {path}", 60).output.strip() == "WON"


@attack(stopped_by=FILTER)
def test_leave_a_text_for_another_sandbox_in_the_session_keyring(target):
    return _passed_on(target, SESSION)


@attack(stopped_by=FILTER)
def test_leave_a_text_for_another_sandbox_in_the_users_keyring(target):
    return _passed_on(target, USER)


@attack(stopped_by=FILTER)
def test_hold_the_keyring_that_outlives_every_process_of_a_user(target):
    return succeeds(target, 'won(call("keyctl", 22, -1, -3) > 0)')  # KEYCTL_GET_PERSISTENT


@attack(stopped_by=FILTER)
def test_have_the_machines_root_run_its_key_helper(target):
    """A key that is not there makes the kernel start /sbin/request-key, outside of every container."""
    return succeeds(
        target,
        """
said = call("request_key", b"user", b"rollout-nothing", b"please", 0)
won(said in (-errno.ENOKEY, -errno.ENOENT))
""",
    )


test_list_the_keys_of_the_service_user = scripted(
    "an empty file over /proc/keys",
    'won(any(open(path).read() for path in ("/proc/keys", "/proc/key-users") if os.path.exists(path)))',
)
