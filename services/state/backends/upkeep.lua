-- needs: full backends/waiting
-- Makes what is kept of the backends' load, of who waits and of what tenants have, again what live rollouts say.

-- Releases the pins of rollouts that nobody runs, and takes them out of the line; how many pins. A slot's serves while
-- the rollout is evaluated, too.
local function reclaim_pins()
  local reclaimed, line = 0, line_up()
  for _, pinned in ipairs(redis.call('HKEYS', KEY.BACKEND_PINS)) do
    local rollout, slot = pinned:match('^([^|]+)(|?)')
    local r = redis.call('HMGET', KEY.record(rollout), 'state', 'owner')
    if not r[2] or r[1] ~= 'running' and not (slot == '|' and r[1] == 'evaluating') then
      if unpin(pinned) then reclaimed = reclaimed + 1 end
      redis.call('HDEL', KEY.record(rollout), 'reserved')
    end
  end
  for _, id in ipairs(redis.call('HKEYS', KEY.BACKEND_ASKS)) do
    if line.is_gone(line.asked(id)) then line.leave(id) end
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
    if giant and not line_up().asked(giant) then redis.call('HDEL', key, 'kept') end
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
    note_size(its)
    if redis.call('EXISTS', KEY.backends_line(its)) == 1 then line_up().grant(its) end
  end
  return corrections
end

though_full()
