-- What is kept of a rollout's turns for forks. Takes `RETENTION_MS`.

-- Has a key live so long at least (ms); one that is not there stays so.
local function outlive(key, left)
  if redis.call('PTTL', key) < left then redis.call('PEXPIRE', key, left) end
end

-- Whether a rollout has checkpoints: they and the turns of the attempt then live as long as its record may.
local function keeps_turns(id, attempt, deadline)
  local kept, left = KEY.checkpoints(id), math.max(0, tonumber(deadline) - now) + RETENTION_MS
  outlive(kept, left)
  if redis.call('EXISTS', kept) == 0 then return false end
  outlive(KEY.turns(id, attempt), left)
  return true
end

-- {rollout, fence, turn} and the checkpoint; false: the rollout is not the caller's any more.
function operations.keep_checkpoint(ask)
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner', 'attempt', 'deadline')
  if tonumber(r[1] or '') ~= ask.fence or not r[2] then return false end
  redis.call('HSET', KEY.checkpoints(ask.rollout), ask.turn, ARGV[3])
  return keeps_turns(ask.rollout, r[3], r[4])
end

-- {rollout, attempt, ends}: what forks need lives until then (ms); false: it is not there any more.
function operations.hold_checkpoints(ask)
  local kept, turns = KEY.checkpoints(ask.rollout), KEY.turns(ask.rollout, ask.attempt)
  outlive(kept, ask.ends - now)
  outlive(turns, ask.ends - now)
  return redis.call('EXISTS', kept, turns) == 2
end
