-- needs: full backends/pins
-- The backends that there are, and the upkeep of their load; see store.py for what each operation means.


-- A call to the backend failed.
function operations.suspect(ask) return redis.call('HINCRBY', KEY.BACKEND_SUSPECTS, ask.backend, 1) end

-- Those entered since this was asked last → how often.
function operations.suspects()
  local suspects, rows = {}, redis.call('HGETALL', KEY.BACKEND_SUSPECTS)
  redis.call('DEL', KEY.BACKEND_SUSPECTS)
  for i = 1, #rows, 2 do suspects[rows[i]] = tonumber(rows[i + 1]) end
  return suspects
end

-- {backend, described, capacity, most, version, drain}
function operations.put(ask)
  local id = ask.backend
  local fresh = redis.call('HSET', KEY.BACKENDS, id, ask.described) == 1
  local busiest = redis.call('ZREVRANGE', KEY.BACKEND_LOAD, 0, 0, 'WITHSCORES')
  redis.call('ZADD', KEY.BACKEND_LOAD, 'NX', 0, id)
  redis.call('ZADD', KEY.BACKEND_CHOSEN, 'NX', 0, id)
  redis.call('HSET', KEY.backend(id), 'capacity', ask.capacity, 'most', ask.most, 'version', ask.version)
  if fresh then
    redis.call('HSET', KEY.backend(id), 'live', 0)
    -- It comes to a fleet at work.
    if busiest[1] and tonumber(busiest[2]) > 0 then redis.call('HSET', KEY.backend(id), 'ramp', 1) end
  end
  redis.call('HDEL', KEY.backend(id), 'error', 'rejected')
  if ask.drain then redis.call('HSET', KEY.backend(id), 'draining', 1) end
  tell_waiting()
  return fresh
end

function operations.remove(ask)
  -- Its pins go with it: released later, they would be taken off a backend added again by that name.
  local pins = redis.call('HGETALL', KEY.BACKEND_PINS)
  for i = 1, #pins, 2 do
    if pins[i + 1]:match('^(%S+)') == ask.backend then unpin(pins[i]) end
  end
  redis.call('ZREM', KEY.BACKEND_LOAD, ask.backend)
  redis.call('ZREM', KEY.BACKEND_CHOSEN, ask.backend)
  redis.call('DEL', KEY.backend(ask.backend))
  return redis.call('HDEL', KEY.BACKENDS, ask.backend) == 1
end

local ENDS_AN_ABSENCE = {error = true, rejected = true, draining = true}

-- {backend, field, value}; '' clears. False: there is no such backend.
function operations.set(ask)
  local key = KEY.backend(ask.backend)
  if redis.call('HEXISTS', KEY.BACKENDS, ask.backend) == 0 then return false end
  if ask.value ~= '' then
    redis.call('HSET', key, ask.field, ask.value)
  elseif redis.call('HDEL', key, ask.field) == 1 and ENDS_AN_ABSENCE[ask.field] then
    redis.call('HSET', key, 'ramp', 1)
  end
  tell_waiting()
  return true
end

-- -- upkeep ---------------------------------------------------------------------------------------

-- Releases the pins of rollouts that nobody runs; how many.
local function reclaim_pins()
  local reclaimed = 0
  for _, rollout in ipairs(redis.call('HKEYS', KEY.BACKEND_PINS)) do
    local r = redis.call('HMGET', KEY.record(rollout), 'state', 'owner')
    if r[1] ~= 'running' or not r[2] then
      release_backend(rollout)
      reclaimed = reclaimed + 1
    end
  end
  return reclaimed
end

-- Makes the pins that Redis had lost again from the records of live rollouts; how many.
local function restore_pins()
  local restored = 0
  for _, rollout in ipairs(redis.call('ZRANGE', KEY.by_state('running'), 0, -1)) do
    local r = redis.call('HMGET', KEY.record(rollout), 'backend', 'reserved', 'owner', 'group')
    if r[1] and r[2] and r[3] and not pin_of(rollout) and redis.call('ZSCORE', KEY.BACKEND_LOAD, r[1]) then
      redis.call('HSET', KEY.BACKEND_PINS, rollout, r[1] .. ' ' .. r[2] .. ' ' .. r[4])
      restored = restored + 1
    end
  end
  return restored
end

-- Makes the counters what the live rollouts say.
function operations.reconcile()
  for _, backend in ipairs(redis.call('HKEYS', KEY.BACKENDS)) do
    redis.call('ZADD', KEY.BACKEND_LOAD, 'NX', 0, backend)
    redis.call('ZADD', KEY.BACKEND_CHOSEN, 'NX', 0, backend)
  end
  local corrections = {reclaimed = reclaim_pins(), restored = restore_pins(), corrected = 0}
  local load, live, groups = {}, {}, {}
  for _, pin in ipairs(redis.call('HVALS', KEY.BACKEND_PINS)) do
    local backend, weight, group = pin:match('^(%S+) (%S+) (%S+)$')
    load[backend] = (load[backend] or 0) + tonumber(weight)
    live[backend] = (live[backend] or 0) + 1
    if group ~= '-' then
      groups[group] = groups[group] or {backend = backend, members = 0}
      groups[group].members = groups[group].members + 1
    end
  end
  local heap = redis.call('ZRANGE', KEY.BACKEND_LOAD, 0, -1, 'WITHSCORES')
  for i = 1, #heap, 2 do
    local backend, true_load, true_live = heap[i], load[heap[i]] or 0, live[heap[i]] or 0
    if tonumber(heap[i + 1]) ~= true_load
        or (tonumber(redis.call('HGET', KEY.backend(backend), 'live')) or 0) ~= true_live then
      redis.call('ZADD', KEY.BACKEND_LOAD, string.format('%.17g', true_load), backend)
      redis.call('HSET', KEY.backend(backend), 'live', true_live)
      corrections.corrected = corrections.corrected + 1
    end
  end
  local known = redis.call('HGETALL', KEY.BACKEND_GROUPS)
  for i = 1, #known, 2 do
    local group, home = known[i], known[i + 1]:match('^(%S+)')
    if groups[group] then groups[group].backend = home else redis.call('HDEL', KEY.BACKEND_GROUPS, group) end
  end
  for group, its in pairs(groups) do
    redis.call('HSET', KEY.BACKEND_GROUPS, group, its.backend .. ' ' .. its.members)
  end
  return corrections
end

though_full()
