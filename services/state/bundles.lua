-- needs: full
-- Bundles of task directories, each tenant's its own. Takes `KEEP_MS` and `IDLE_MS`.

local function count(event) redis.call('HINCRBY', KEY.BUNDLES_TOTALS, event, 1) end

local function forget_bundle(tenant, digest)
  local bytes = tonumber(redis.call('HGET', KEY.bundles_sizes(tenant), digest) or '0')
  redis.call('DEL', KEY.bundle(tenant, digest))
  redis.call('HDEL', KEY.bundles_sizes(tenant), digest)
  redis.call('ZREM', KEY.bundles_of(tenant), digest)
  redis.call('HINCRBY', KEY.BUNDLES_BYTES, tenant, -bytes)
end

-- Forgets those that were not used since then, the longest unused first, until there is room.
local function make_room(tenant, since, most)
  local used = tonumber(redis.call('HGET', KEY.BUNDLES_BYTES, tenant) or '0')
  while used > most do
    local oldest = redis.call('ZRANGEBYSCORE', KEY.bundles_of(tenant), '-inf', since, 'LIMIT', 0, 1)[1]
    if not oldest then break end
    forget_bundle(tenant, oldest)
    used = tonumber(redis.call('HGET', KEY.BUNDLES_BYTES, tenant) or '0')
  end
  return used
end

-- Whether it is there; then it counts as used now.
local function use(tenant, digest)
  if redis.call('EXISTS', KEY.bundle(tenant, digest)) == 0 then
    if redis.call('HEXISTS', KEY.bundles_sizes(tenant), digest) == 1 then forget_bundle(tenant, digest) end
    return false
  end
  redis.call('ZADD', KEY.bundles_of(tenant), now, digest)
  redis.call('PEXPIRE', KEY.bundle(tenant, digest), KEEP_MS)  -- of a tenant, too, that sends no more
  return true
end

function operations.use(ask)
  though_full()
  local there = use(ask.tenant, ask.digest)
  local event = there and ask.event or not there and ask.absent
  if event then count(event) end
  return there
end

-- Makes a bundle of what was written as `part`: `new`, `there` already, `lost` (not all of it is there), or how many
-- bytes the tenant has of its quota where it has no room.
function operations.keep(ask)
  local tenant, digest, part = ask.tenant, ask.digest, KEY.bundle_part(ask.part)
  make_room(tenant, now - KEEP_MS, 0)
  if use(tenant, digest) then
    redis.call('DEL', part)
    count('there')
    return 'there'
  end
  if redis.call('LLEN', part) ~= ask.pieces then return 'lost' end
  local used = make_room(tenant, now - IDLE_MS, ask.most - ask.bytes)
  if used + ask.bytes > ask.most then
    redis.call('DEL', part)
    count('refused')
    return used
  end
  redis.call('RENAME', part, KEY.bundle(tenant, digest))
  redis.call('HSET', KEY.bundles_sizes(tenant), digest, ask.bytes)
  redis.call('HINCRBY', KEY.BUNDLES_BYTES, tenant, ask.bytes)
  use(tenant, digest)
  count('new')
  return 'new'
end
