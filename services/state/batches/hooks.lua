-- What the end of a rollout means to its batch. A rollout of a batch names its group in `batch_group`, and the group
-- names its batch: it may be carried over into another one while the rollout runs.

-- Some worker shall do this; the score is when somebody else may, should that one die.
local function batch_todo(what, at)
  redis.call('ZADD', KEY.BATCHES_TODO, at, what)
  redis.call('PUBLISH', KEY.BATCHES_BELL, what)
end

local function batch_rollout_ended(id)
  local group = redis.call('HGET', KEY.record(id), 'batch_group')
  if not group then return end
  local key = KEY.batch_group(group)
  local g = redis.call('HMGET', key, 'batch', 'n')
  if not g[1] then return end
  redis.call('HINCRBY', KEY.batch(g[1]), 'live', -1)
  if redis.call('HINCRBY', key, 'ended', 1) == tonumber(g[2]) then
    redis.call('HSET', key, 'state', 'undecided')
    batch_todo('decide ' .. group, now)
  end
  -- A slot is free.
  batch_todo('fill ' .. g[1], now)
end
