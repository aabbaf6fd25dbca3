"""What workers do beside stages."""

from __future__ import annotations

from workers.chores.admission import Admission
from workers.chores.announce import Announcer, LoopLag, NodeReporter
from workers.chores.archive import Archiver
from workers.chores.backends import Keeper
from workers.chores.base import Chore
from workers.chores.batches import Batcher
from workers.chores.memory import Memory
from workers.chores.moving import Leftovers, Relief
from workers.chores.policy import Updater
from workers.chores.reaper import Reaper
from workers.chores.vocabulary import Vocabulary
from workers.chores.watch import Watch
from workers.chores.webhooks import Deliverer

CHORES: tuple[type[Chore], ...] = (
    Announcer,
    NodeReporter,
    Reaper,
    Batcher,
    Admission,
    Updater,
    Keeper,
    Deliverer,
    Archiver,
    Leftovers,
    Relief,
    Memory,
    LoopLag,
    Watch,
    Vocabulary,
)
"""All there are. A worker does those that its stages and settings call for; see `Chore.is_for`."""
