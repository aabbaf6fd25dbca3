-- The account of trajectories of ended rollouts, by bytes as stored. Live rollouts are never in it.

-- Enters a rollout that has just ended; `expires` is when its keys go by themselves (ms).
local function count_result(id, expires)
  local size = redis.call('STRLEN', KEY.trajectory(id))
  if size == 0 then return end
  -- A record (payloads.py) begins with a byte that no text has: readers pass it on without looking at it.
  if redis.call('GETRANGE', KEY.trajectory(id), 0, 0):byte() >= 0x80 then
    redis.call('HSET', KEY.record(id), 'record_bytes', size)
  end
  redis.call('ZADD', KEY.RESULTS_ENDED, expires, id)
  redis.call('HSET', KEY.RESULTS_SIZES, id, size)
  redis.call('INCRBY', KEY.RESULTS_BYTES, size)
end

-- Takes one off the account and answers its bytes.
local function forget_result(id)
  local size = tonumber(redis.call('HGET', KEY.RESULTS_SIZES, id) or 0)
  redis.call('ZREM', KEY.RESULTS_ENDED, id)
  redis.call('ZREM', KEY.RESULTS_ACKED, id)
  redis.call('HDEL', KEY.RESULTS_SIZES, id)
  if size > 0 then redis.call('DECRBY', KEY.RESULTS_BYTES, size) end
  return size
end
