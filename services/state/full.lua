-- A full Redis (maxmemory, noeviction) refuses a script at its first command that may take memory, unless it has
-- written by then. What ends rollouts, frees memory or keeps what is under way alive must go on: it writes a little
-- more, and is how room comes back. What brings work or results waits instead.
local function though_full() redis.call('DEL', 'memory:though-full') end
