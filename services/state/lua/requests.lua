-- Requests: each is kept once for all rollouts that were submitted with it, for as long as the last of their records,
-- and counts among its tenant's bytes all that time.

local function request_key(tenant, digest) return 'request:{' .. tenant .. '/' .. digest .. '}' end

-- `<digest> <bytes>` by when it expires, the inf of those in use.
local function requests_of(tenant) return 'requests:tenant:' .. tenant end

local function count_bytes(tenant, bytes)
  if bytes ~= 0 then redis.call('HINCRBY', 'tenants:bytes', tenant, string.format('%d', bytes)) end
end

-- Takes off the account what Redis has deleted by itself, so much at once.
local function forget_requests(tenant, now)
  local name = requests_of(tenant)
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', name, '-inf', now, 'LIMIT', 0, 1000)) do
    if redis.call('EXISTS', request_key(tenant, one:match('^%S+'))) == 0 then
      redis.call('ZREM', name, one)
      count_bytes(tenant, -tonumber(one:match('%d+$')))
    end
  end
end

-- For so many rollouts more.
local function hold_request(tenant, digest, body, count)
  local key = request_key(tenant, digest)
  redis.call('HSETNX', key, 'body', body)
  redis.call('HINCRBY', key, 'live', count)
  redis.call('PERSIST', key)
  if redis.call('ZADD', requests_of(tenant), '+inf', digest .. ' ' .. #body) == 1 then count_bytes(tenant, #body) end
end

-- One of them has ended, and its record expires then.
local function release_request(tenant, digest, now, retention)
  local key = request_key(tenant, digest)
  local bytes = redis.call('HSTRLEN', key, 'body')
  if bytes == 0 or redis.call('HINCRBY', key, 'live', -1) > 0 then return end
  redis.call('PEXPIRE', key, retention)
  redis.call('ZADD', requests_of(tenant), now + retention, digest .. ' ' .. bytes)
end

-- Bytes that a tenant would have more of, where it may not; nil where it may.
local function over_bytes(tenant, more, most, now)
  if not most or more == 0 then return nil end
  forget_requests(tenant, now)
  local used = tonumber(redis.call('HGET', 'tenants:bytes', tenant) or '0')
  -- Nobody knows when there is room.
  if used + more > most then return {'over', 'bytes', most, used, more > most and -1 or 5000, more} end
end
