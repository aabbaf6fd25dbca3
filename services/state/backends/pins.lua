-- Load of the LLM backends. `KEY.BACKEND_LOAD` is the min-heap: member = backend, score = what the rollouts
-- pinned to it reserve. Never ZPOPMIN: a crash between pop and push would lose the backend.
-- A pin (`<backend> <weight> <group>`) says what to give back and goes with it, so a release is idempotent.

local function pin_of(id)
  local pin = redis.call('HGET', KEY.BACKEND_PINS, id)
  if pin then return pin:match('^(%S+) (%S+) (%S+)$') end
end

-- Those who wait for room are told; without any, nothing is sent.
local function tell_waiting()
  if redis.call('EXISTS', KEY.BACKEND_WAITED) == 1 then redis.call('PUBLISH', KEY.BACKEND_ROOM_CHANNEL, '') end
end

local function reserve(backend, weight, rollouts)
  local load = tonumber(redis.call('ZINCRBY', KEY.BACKEND_LOAD, weight, backend))
  if load < 0 then redis.call('ZADD', KEY.BACKEND_LOAD, 0, backend) end
  if rollouts ~= 0 then redis.call('HINCRBY', KEY.backend(backend), 'live', rollouts) end
end

-- `<backend> <members>`: where a group's rollouts went, for their prompt is cached there.
local function join_group(group, backend)
  if group == '-' then return end
  local members = (redis.call('HGET', KEY.BACKEND_GROUPS, group) or ''):match(' (%d+)$') or '0'
  redis.call('HSET', KEY.BACKEND_GROUPS, group, backend .. ' ' .. (tonumber(members) + 1))
end

local function leave_group(group)
  local home = group ~= '-' and redis.call('HGET', KEY.BACKEND_GROUPS, group)
  if not home then return end
  local backend, members = home:match('^(%S+) (%d+)$')
  if tonumber(members) > 1 then
    redis.call('HSET', KEY.BACKEND_GROUPS, group, backend .. ' ' .. (tonumber(members) - 1))
  else
    redis.call('HDEL', KEY.BACKEND_GROUPS, group)
  end
end

local function unpin(id)
  local backend, weight, group = pin_of(id)
  if not backend then return false end
  redis.call('HDEL', KEY.BACKEND_PINS, id)
  leave_group(group)
  -- A backend that was removed must not come back with a negative score.
  if redis.call('ZSCORE', KEY.BACKEND_LOAD, backend) then reserve(backend, '-' .. weight, -1) end
  return true
end

local function release_backend(id)
  if not unpin(id) then return false end
  redis.call('HDEL', KEY.record(id), 'reserved')
  tell_waiting()
  return true
end
