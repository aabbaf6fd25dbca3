-- Requests: each is kept once for all rollouts that were submitted with it, for as long as the last of their records,
-- and counts among its tenant's bytes all that time.

local function count_bytes(tenant, bytes)
  if bytes ~= 0 then redis.call('HINCRBY', KEY.TENANTS_BYTES, tenant, string.format('%d', bytes)) end
end

-- Takes off the account what Redis has deleted by itself, so much at once.
local function forget_requests(tenant)
  local name = KEY.requests_of(tenant)
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', name, '-inf', now, 'LIMIT', 0, 1000)) do
    if redis.call('EXISTS', KEY.request(tenant, entry:match('^%S+'))) == 0 then
      redis.call('ZREM', name, entry)
      count_bytes(tenant, -tonumber(entry:match('%d+$')))
    end
  end
end

-- For so many rollouts more.
local function hold_request(tenant, digest, body, count)
  local key = KEY.request(tenant, digest)
  redis.call('HSETNX', key, 'body', body)
  redis.call('HINCRBY', key, 'live', count)
  redis.call('PERSIST', key)
  if redis.call('ZADD', KEY.requests_of(tenant), '+inf', digest .. ' ' .. #body) == 1 then count_bytes(tenant, #body) end
end

-- One of them has ended, and its record expires then.
local function release_request(tenant, digest, retention)
  local key = KEY.request(tenant, digest)
  local bytes = redis.call('HSTRLEN', key, 'body')
  if bytes == 0 or redis.call('HINCRBY', key, 'live', -1) > 0 then return end
  redis.call('PEXPIRE', key, retention)
  redis.call('ZADD', KEY.requests_of(tenant), now + retention, digest .. ' ' .. bytes)
end

-- A quota that has no room for what is asked for. There may be room after `wait_ms`, or nobody knows when; there never
-- is for more than the quota.
local function over_quota(kind, limit, used, asked, wait_ms)
  return {kind = kind, limit = limit, used = used, asked = asked, wait_ms = asked <= limit and (wait_ms or 5000) or nil}
end

-- The quota of bytes, of which a tenant would have more than it may; nil where it may.
local function over_bytes(tenant, more, most)
  if not most or more == 0 then return nil end
  forget_requests(tenant)
  local used = tonumber(redis.call('HGET', KEY.TENANTS_BYTES, tenant) or '0')
  if used + more > most then return over_quota('bytes', most, used, more) end
end
