-- needs: full backends/waiting
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

local function leave_heap(its, backend)
  redis.call('ZREM', KEY.backends_load(its), backend)
  redis.call('ZREM', KEY.backends_chosen(its), backend)
end

-- The policies that a backend serves, by what keys have of them, as `its` → true; and joined.
local function served(backend)
  local text = redis.call('HGET', KEY.backend(backend), 'policies') or 'default'
  local policies = {}
  for policy in text:gmatch('%S+') do policies[of(policy)] = true end
  return policies, text
end

-- {backend, described, capacity, most, policies, versions, drain}; versions by policy
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
    before[its] = nil
  end
  for its in pairs(before) do leave_heap(its, id) end
  redis.call('HSET', key, 'capacity', ask.capacity, 'most', ask.most)
  redis.call('HSETNX', key, 'live', 0)
  -- It comes to a fleet at work.
  if fresh and busy then redis.call('HSET', key, 'ramp', 1) end
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
  if redis.call('EXISTS', KEY.backends_line(its)) == 1 then grant(its) end
end

-- -- upkeep ---------------------------------------------------------------------------------------

-- Releases the pins of rollouts that nobody runs, and takes them out of the line; how many pins. A slot's serves while
-- the rollout is evaluated, too.
local function reclaim_pins()
  local reclaimed = 0
  for _, pinned in ipairs(redis.call('HKEYS', KEY.BACKEND_PINS)) do
    local rollout, slot = pinned:match('^([^|]+)(|?)')
    local r = redis.call('HMGET', KEY.record(rollout), 'state', 'owner')
    if not r[2] or r[1] ~= 'running' and not (slot == '|' and r[1] == 'evaluating') then
      if unpin(pinned) then reclaimed = reclaimed + 1 end
      redis.call('HDEL', KEY.record(rollout), 'reserved')
    end
  end
  for _, id in ipairs(redis.call('HKEYS', KEY.BACKEND_ASKS)) do
    local ask = asked(id)
    if is_gone(ask) then leave_line(id) end
  end
  return reclaimed
end

-- Makes the pins that Redis had lost again from the records of live rollouts; how many. A slot's is made again by its
-- next call.
local function restore_pins()
  local restored = 0
  for _, rollout in ipairs(redis.call('ZRANGE', KEY.by_state('running'), 0, -1)) do
    local r = redis.call('HMGET', KEY.record(rollout), 'backend', 'reserved', 'owner', 'group', 'pinned_for')
    if r[1] and r[2] and r[3] and not pin_of(rollout) and redis.call('HEXISTS', KEY.BACKENDS, r[1]) == 1 then
      redis.call('HSET', KEY.BACKEND_PINS, rollout, r[1] .. ' ' .. r[2] .. ' ' .. (r[5] or r[4]))
      restored = restored + 1
    end
  end
  return restored
end

-- What the pins say: load and number by backend, members by group, what each tenant reserves by policy.
local function sums()
  local load, live, groups, tenants = {}, {}, {}, {}
  for _, pin in ipairs(redis.call('HVALS', KEY.BACKEND_PINS)) do
    local backend, weight, label = pin:match('^(%S+) (%S+) (%S+)$')
    local policy, tenant = owners(label)
    weight = tonumber(weight)
    load[backend] = (load[backend] or 0) + weight
    live[backend] = (live[backend] or 0) + 1
    tenants[of(policy)] = tenants[of(policy)] or {}
    tenants[of(policy)][tenant] = (tenants[of(policy)][tenant] or 0) + weight
    if label:byte() ~= 45 then
      groups[label] = groups[label] or {backend = backend, members = 0}
      groups[label].members = groups[label].members + 1
    end
  end
  return load, live, groups, tenants
end

-- Makes the counters what the live rollouts say.
function operations.reconcile()
  local corrections = {reclaimed = reclaim_pins(), restored = restore_pins(), corrected = 0}
  local load, live, groups, tenants = sums()
  for _, backend in ipairs(redis.call('HKEYS', KEY.BACKENDS)) do
    local key, true_load, true_live, wrong = KEY.backend(backend), load[backend] or 0, live[backend] or 0, false
    local all = cjson.decode(redis.call('HGET', KEY.BACKENDS, backend)).policies
    local names = {}
    for policy in pairs(type(all) == 'table' and next(all) and all or {default = ''}) do names[#names + 1] = policy end
    if not (names[1] == 'default' and not names[2]) then
      redis.call('HSETNX', key, 'policies', table.concat(names, ' '))
    end
    for _, policy in ipairs(names) do
      local its = of(policy)
      local score = redis.call('ZSCORE', KEY.backends_load(its), backend)
      redis.call('ZADD', KEY.backends_chosen(its), 'NX', 0, backend)
      redis.call('ZADD', KEY.backends_load(its), exact(true_load), backend)
      wrong = wrong or tonumber(score or '-1') ~= true_load
      tenants[its] = tenants[its] or {}
    end
    wrong = wrong or tonumber(redis.call('HGET', key, 'live') or '-1') ~= true_live
    redis.call('HSET', key, 'live', true_live)
    if wrong then corrections.corrected = corrections.corrected + 1 end
    local giant = redis.call('HGET', key, 'kept')
    if giant and not asked(giant) then redis.call('HDEL', key, 'kept') end
  end
  for its, of_tenants in pairs(tenants) do
    redis.call('DEL', KEY.backends_reserved(its))
    for tenant, weight in pairs(of_tenants) do
      redis.call('HSET', KEY.backends_reserved(its), tenant, exact(weight))
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
  for its in pairs(tenants) do
    if redis.call('EXISTS', KEY.backends_line(its)) == 1 then grant(its) end
  end
  return corrections
end

though_full()
