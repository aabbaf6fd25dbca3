-- The account of trajectories of ended rollouts, by bytes as stored. Live rollouts are never in it.

local ENDED, ACKED, SIZES, BYTES = 'results:ended', 'results:acked', 'results:sizes', 'results:bytes'

-- Enters a rollout that has just ended; `expires` is when its keys go by themselves (ms).
local function count_result(id, expires)
  local key = 'rollout:{' .. id .. '}:trajectory'
  local size = redis.call('STRLEN', key)
  if size == 0 then return end
  -- A record (payloads.py) begins with a byte that no text has: readers pass it on without looking at it.
  if redis.call('GETRANGE', key, 0, 0):byte() >= 0x80 then
    redis.call('HSET', 'rollout:{' .. id .. '}', 'record_bytes', size)
  end
  redis.call('ZADD', ENDED, expires, id)
  redis.call('HSET', SIZES, id, size)
  redis.call('INCRBY', BYTES, size)
end

-- Takes one off the account and answers its bytes.
local function forget_result(id)
  local size = tonumber(redis.call('HGET', SIZES, id) or 0)
  redis.call('ZREM', ENDED, id)
  redis.call('ZREM', ACKED, id)
  redis.call('HDEL', SIZES, id)
  if size > 0 then redis.call('DECRBY', BYTES, size) end
  return size
end
