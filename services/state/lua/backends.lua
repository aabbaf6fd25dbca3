-- Load of the LLM backends. `backends:load` is the min-heap: member = backend, score = what the rollouts
-- pinned to it reserve. Never ZPOPMIN: a crash between pop and push would lose the backend.
-- A pin (`<backend> <weight> <group>`) says what to give back and goes with it, so a release is idempotent.

local BACKENDS, LOAD, CHOSEN, TURN = 'backends', 'backends:load', 'backends:chosen', 'backends:turn'
local PINS, GROUPS, TOTALS = 'backends:pins', 'backends:groups', 'backends:totals'
local WANTED, WAITED, ROOM = 'backends:version', 'backends:waited', 'backends:room'

local function about(backend) return 'backend:' .. backend end

local function pin_of(id)
  local pin = redis.call('HGET', PINS, id)
  if pin then return pin:match('^(%S+) (%S+) (%S+)$') end
end

-- Those who wait for room are told; without any, nothing is sent.
local function tell_waiting()
  if redis.call('EXISTS', WAITED) == 1 then redis.call('PUBLISH', ROOM, '') end
end

local function reserve(backend, weight, rollouts)
  local load = tonumber(redis.call('ZINCRBY', LOAD, weight, backend))
  if load < 0 then redis.call('ZADD', LOAD, 0, backend) end
  if rollouts ~= 0 then redis.call('HINCRBY', about(backend), 'live', rollouts) end
end

-- `<backend> <members>`: where a group's rollouts went, for their prompt is cached there.
local function join_group(group, backend)
  if group == '-' then return end
  local members = (redis.call('HGET', GROUPS, group) or ''):match(' (%d+)$') or '0'
  redis.call('HSET', GROUPS, group, backend .. ' ' .. (tonumber(members) + 1))
end

local function leave_group(group)
  local home = group ~= '-' and redis.call('HGET', GROUPS, group)
  if not home then return end
  local backend, members = home:match('^(%S+) (%d+)$')
  if tonumber(members) > 1 then
    redis.call('HSET', GROUPS, group, backend .. ' ' .. (tonumber(members) - 1))
  else
    redis.call('HDEL', GROUPS, group)
  end
end

local function unpin(id)
  local backend, weight, group = pin_of(id)
  if not backend then return 0 end
  redis.call('HDEL', PINS, id)
  leave_group(group)
  -- A backend that was removed must not come back with a negative score.
  if redis.call('ZSCORE', LOAD, backend) then reserve(backend, '-' .. weight, -1) end
  return 1
end

local function release_backend(id)
  if unpin(id) == 0 then return 0 end
  redis.call('HDEL', 'rollout:{' .. id .. '}', 'reserved')
  tell_waiting()
  return 1
end
