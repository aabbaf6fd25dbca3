"""Writes docs/settings.md from the settings: `python -m services.settings_table > docs/settings.md`."""
# ruff: noqa: E501 (rows of a Markdown table cannot be broken)

from __future__ import annotations

from pydantic import SecretStr

from services.settings import ENV_PREFIX, Settings

HEAD = """# Settings

Environment variables of the gateway and the workers; the same on every node but `ROLLOUT_NODE`. A value that
does not fit ends the process with the variable's name. This table is made from `services/settings.py`.

| variable | default | |
|---|---|---|
"""

ELSEWHERE = """
Read by other parts:

| variable | default | |
|---|---|---|
| `ROLLOUT_URL` | that of the account's running `rollout up`, else `http://127.0.0.1:8080` | Gateway that the client and the command line speak to. |
| `ROLLOUT_API_KEY` | that of the account's own service at that address | [Key](tenants.md) that they send. |
| `XDG_STATE_HOME` | `~/.local/state` | Where `rollout up` writes, and clients of the same account find, [address and key](tenants.md#the-key-of-rollout-up). |
| `ROLLOUT_HOME` | `.local` in the checkout | Where the set-up installs: virtual environments, Apptainer, images. |
| `ROLLOUT_IMAGES` | `images` in `ROLLOUT_HOME` | Images of sandboxes by name; all nodes may share it. |
| `ROLLOUT_SANDBOX_DIR` | `/tmp/sbx-<uid>` | Sockets and scratch of the node's sandboxes; keep the path short. |
| `ROLLOUT_IMAGE_CACHE` | `/var/tmp/rollout-images-<uid>` | Unpacked images of the node. |
| `ROLLOUT_IMAGE_CACHE_GB` | `50` | What they may take together; the least recently used make room. |
| `ROLLOUT_APPTAINER` | found on `PATH`, then in `ROLLOUT_HOME` | The container runtime's binary. |
| `ROLLOUT_SANDBOX_UID` | `65534` | User of the sandboxes where the host runs as root. |
"""


def table() -> str:
    """The whole page."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "the host name" if field.default_factory else field.default
        if isinstance(default, SecretStr):
            default = default.get_secret_value()
        shown = f"`{default}`" if default != "" and not field.default_factory else default or "none"
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return HEAD + "\n".join(rows) + "\n" + ELSEWHERE


if __name__ == "__main__":
    print(table(), end="")
