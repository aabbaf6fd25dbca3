-- needs: checkpoints
-- The turn log of an attempt: a list of entries, to which whoever holds the rollout adds; see entries.py.

-- For how long it outlives the deadline of its rollout (ms): releases that know of no log do not delete it.
local LEFT_MS = 600000

-- {rollout, attempt, fence, at} and the entries, the first of which is the log's `at`-th, from 0. What is there
-- already was written by this very call, whose answer was lost. `lost`: the rollout is not the caller's any more;
-- `behind`: Redis has lost entries, the caller is to begin at the `at` of the answer.
function operations.append(ask)
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner', 'deadline')
  if tonumber(r[1] or '') ~= ask.fence or not r[2] then return {word = 'lost'} end
  local log = KEY.turns(ask.rollout, ask.attempt)
  local there = redis.call('LLEN', log)
  if there < ask.at then return {word = 'behind', at = there} end
  for i = 3 + there - ask.at, #ARGV do redis.call('RPUSH', log, ARGV[i]) end
  outlive(log, math.max(0, tonumber(r[3]) - now) + LEFT_MS)
  return {word = 'ok'}
end
