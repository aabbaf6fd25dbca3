"""Images: finding them, building them, and the node's cache of unpacked ones.

A SIF is unpacked once per node into a directory that every sandbox shares read-only: it starts seven times
faster than a SIF (no FUSE mounts), and its pages are shared between sandboxes. `store` is what the host of
the sandboxes uses; `build` and `inspection` serve the command line.
"""

from sandbox.images.environment import ImageConfig, image_config
from sandbox.images.locks import Lease
from sandbox.images.squashfs import squashfs_offset
from sandbox.images.store import ImageStore

__all__ = ["ImageConfig", "ImageStore", "Lease", "image_config", "squashfs_offset"]
