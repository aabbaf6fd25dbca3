-- What the end of a rollout means to its batch. A rollout of a batch names its group in `batch_group`, and the group
-- names its batch: it may be carried over into another one while the rollout runs.

local function batch_key(batch) return 'batch:{' .. batch .. '}' end

local function batch_group_key(group) return 'batch:group:{' .. group .. '}' end

-- Some worker shall do this; the score is when somebody else may, should that one die.
local function batch_todo(what, at)
  redis.call('ZADD', 'batches:todo', at, what)
  redis.call('PUBLISH', 'batches:bell', what)
end

local function batch_rollout_ended(id, now)
  local group = redis.call('HGET', 'rollout:{' .. id .. '}', 'batch_group')
  if not group then return end
  local key = batch_group_key(group)
  local g = redis.call('HMGET', key, 'batch', 'n')
  if not g[1] then return end
  redis.call('HINCRBY', batch_key(g[1]), 'live', -1)
  if redis.call('HINCRBY', key, 'ended', 1) == tonumber(g[2]) then
    redis.call('HSET', key, 'state', 'undecided')
    batch_todo('decide ' .. group, now)
  end
  -- A slot is free.
  batch_todo('fill ' .. g[1], now)
end
