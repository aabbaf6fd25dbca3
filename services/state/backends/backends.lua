-- needs: full backends/waiting
-- The backends that there are; see store.py for what each operation means.

-- A call to the backend failed.
function operations.suspect(ask) return redis.call('HINCRBY', KEY.BACKEND_SUSPECTS, ask.backend, 1) end

-- Those entered since this was asked last → how often.
function operations.suspects()
  local suspects, rows = {}, redis.call('HGETALL', KEY.BACKEND_SUSPECTS)
  redis.call('DEL', KEY.BACKEND_SUSPECTS)
  for i = 1, #rows, 2 do suspects[rows[i]] = tonumber(rows[i + 1]) end
  return suspects
end

local function leave_heap(its, backend)
  redis.call('ZREM', KEY.backends_load(its), backend)
  redis.call('ZREM', KEY.backends_chosen(its), backend)
  note_size(its)
end

-- The policies that a backend serves, by what keys have of them, as `its` → true; and joined.
local function served(backend)
  local text = redis.call('HGET', KEY.backend(backend), 'policies') or 'default'
  local policies = {}
  for policy in text:gmatch('%S+') do policies[of(policy)] = true end
  return policies, text
end

-- {backend, described, capacity, most, policies, versions, rejected, drain}; versions and what is wrong by policy
function operations.put(ask)
  local id, key, before = ask.backend, KEY.backend(ask.backend), served(ask.backend)
  local fresh = redis.call('HSET', KEY.BACKENDS, id, ask.described) == 1
  local load, busy
  for its in pairs(before) do load = load or redis.call('ZSCORE', KEY.backends_load(its), id) end
  if ask.policies[1] == 'default' and not ask.policies[2] then
    redis.call('HDEL', key, 'policies')
  else
    redis.call('HSET', key, 'policies', table.concat(ask.policies, ' '))
  end
  for _, policy in ipairs(ask.policies) do
    local its = of(policy)
    local busiest = redis.call('ZREVRANGE', KEY.backends_load(its), 0, 0, 'WITHSCORES')
    busy = busy or busiest[1] and tonumber(busiest[2]) > 0
    redis.call('ZADD', KEY.backends_load(its), 'NX', load or 0, id)
    redis.call('ZADD', KEY.backends_chosen(its), 'NX', 0, id)
    redis.call('HSET', key, 'version' .. its, ask.versions[policy] or '')
    redis.call('HDEL', key, 'rejected' .. its)
    if ask.rejected[policy] then redis.call('HSET', key, 'rejected' .. its, ask.rejected[policy]) end
    before[its] = nil
  end
  redis.call('HSET', key, 'capacity', ask.capacity, 'most', ask.most)
  for its in pairs(before) do
    leave_heap(its, id)
    redis.call('HDEL', key, 'version' .. its, 'rejected' .. its)
  end
  for _, policy in ipairs(ask.policies) do note_size(of(policy)) end
  redis.call('HSETNX', key, 'live', 0)
  if fresh and busy then redis.call('HSET', key, 'ramp', 1) end  -- it comes to a fleet at work
  redis.call('HDEL', key, 'error')
  if ask.drain then redis.call('HSET', key, 'draining', 1) end
  room(id, table.concat(ask.policies, ' '))
  return fresh
end

function operations.remove(ask)
  -- Its pins go with it: released later, they would be taken off a backend added again by that name.
  local pins = redis.call('HGETALL', KEY.BACKEND_PINS)
  for i = 1, #pins, 2 do
    if pins[i + 1]:match('^(%S+)') == ask.backend then unpin(pins[i]) end
  end
  for its in pairs(served(ask.backend)) do leave_heap(its, ask.backend) end
  redis.call('DEL', KEY.backend(ask.backend))
  return redis.call('HDEL', KEY.BACKENDS, ask.backend) == 1
end

local ENDS_AN_ABSENCE = {error = true, draining = true}

-- {backend, field, value}; '' clears. False: there is no such backend.
function operations.set(ask)
  local key = KEY.backend(ask.backend)
  if redis.call('HEXISTS', KEY.BACKENDS, ask.backend) == 0 then return false end
  if ask.value ~= '' then
    redis.call('HSET', key, ask.field, ask.value)
  elseif redis.call('HDEL', key, ask.field) == 1
      and (ENDS_AN_ABSENCE[ask.field] or ask.field:match('^rejected')) then
    redis.call('HSET', key, 'ramp', 1)
  end
  if ask.field ~= 'stats' then
    local _, policies = served(ask.backend)
    room(ask.backend, policies)
  end
  return true
end

-- {policy, version}: which weights new rollouts of a policy get; a missing version: any
function operations.want(ask)
  local its = of(ask.policy)
  if ask.version then
    redis.call('SET', KEY.backends_version(its), ask.version)
  else
    redis.call('DEL', KEY.backends_version(its))
  end
  tell_waiting()
  if redis.call('EXISTS', KEY.backends_line(its)) == 1 then line_up().grant(its) end
end

though_full()
