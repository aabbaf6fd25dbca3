-- The account of trajectories of ended rollouts, by bytes as stored. Live rollouts are never in it.

local ENDED, ACKED, SIZES, BYTES = 'results:ended', 'results:acked', 'results:sizes', 'results:bytes'

-- Enters a rollout that has just ended; `expires` is when its keys go by themselves (ms).
local function count_result(id, expires)
  local size = redis.call('STRLEN', 'rollout:{' .. id .. '}:trajectory')
  if size == 0 then return end
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
