-- needs: rollouts/fair backends/pins
-- Who waits for room on the backends of a policy, and who gets it next: one order over all workers. The script that
-- makes room grants it, so whoever waits is told that it has a place, and nobody scrambles for it.
--
-- Next is the tenant that has least: what its rollouts reserve of the policy now, by its weight. Equal occupancy is
-- not yet equal service, for a large rollout overshoots: what a tenant had more than others, as tokens × s over the
-- last CORRECTED_S, counts as well, up to the largest rollout that is next. Within a tenant it goes by rank, as before
-- INIT. Once one fits nowhere, tenants that have what they are due wait with it: small ones would fill each gap.
--
-- One whose turn it is and that fits nowhere is passed by others until they reserve as much as it asks for. Then one
-- backend is kept for it (`kept`): nobody else starts there until it fits, and an empty backend takes anything. So it
-- waits for its turn, its own size in others, and the end of the rollouts on one backend; with a single backend small
-- ones wait for that end, too. At most one backend a policy is kept.

-- Pins a rollout where it starts.
local function enter_backend(ask, place, why)
  pin(ask, place, label_of(ask), 'placed on backend ' .. place.name .. (why and ', where its group is' or ''))
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'placed', '1')
  if why then redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'placed_group', 1) end
end

-- Counts what was granted for those who wait for that backend with other policies: it passed them.
local function count_granted(policies, own, weight)
  for policy in (policies or 'default'):gmatch('%S+') do
    local its = of(policy)
    if policy ~= own then redis.call('HINCRBY', KEY.backends_grants(its), 'granted', weight) end
  end
end

-- The facts of a backend that still serves the rollout, where it is pinned.
local function still(ask, backend, wish)
  if not backend or redis.call('HEXISTS', KEY.BACKENDS, backend) == 0 or wish.excluded[backend] then return end
  local fact = facts(backend, wish.of)
  local served = ' ' .. (fact.policies or 'default') .. ' '
  return not fact.error and served:find(' ' .. (ask.policy or 'default') .. ' ', 1, true) and fact
end

-- A place for a rollout that starts. Where others wait, one that asks for no less than some of them, and for the first
-- time, fits no more than they do.
local function look_for(ask, wish, line)
  if line and not ask.version and not ask.exclude[1] and redis.call('HEXISTS', KEY.BACKEND_ASKS, wish.id) == 0 then
    local least = redis.call('ZRANGE', KEY.backends_sizes(wish.of), 0, 0, 'WITHSCORES')[2]
    if least and ask.weight >= tonumber(least) then
      verdicts = {full = 1}
      return
    end
  end
  return find(ask, wish)
end

-- Made where somebody waits, or is to: a script makes anew what it defines at each call, and most need nothing of it.
local function line_up() -- lazy
  local CORRECTED_S = 10
  -- Of one script, for nobody else is served meanwhile. Where they end it, the next event or look goes on.
  local MOST_GRANTS, MOST_LOOKS, MOST_TENANTS, FIRST_LOOKS, LOOKS_AT_ONCE = 64, 256, 64, 2, 16
  -- A rollout without a fence (of no worker) that has not asked for so long waits no more.
  local FORGOTTEN_MS = 10000

  local function room_line(its)
    return {tenants = KEY.backends_tenants(its), start = function()
      return tonumber(redis.call('HGET', KEY.backends_grants(its), 'mean') or '0')
    end, waiting = function(tenant) return KEY.backends_waiting(its, tenant) end}
  end

  local function parsed(raw) return raw and cjson.decode(raw:match(' (.*)$')) end

  local function asked(id) return parsed(redis.call('HGET', KEY.BACKEND_ASKS, id)) end

  -- The kept backend of a policy and whom it is kept for.
  local function kept(its) return (redis.call('GET', KEY.backends_line(its)) or '-'):match('^(%S+) (.+)$') end

  local function let_go(its, backend)
    redis.call('HDEL', KEY.backend(backend), 'kept')
    redis.call('SET', KEY.backends_line(its), '-')
  end

  -- Takes one out of the line, if it is there; what it asked for, and the backend that was kept for it.
  local function leave_line(id, ask)
    ask = ask or asked(id)
    if not ask then return end
    local its, tenant = of(ask.policy), ask.tenant or 'default'
    redis.call('HDEL', KEY.BACKEND_ASKS, id)
    redis.call('ZREM', KEY.backends_sizes(its), id)
    leave_queue(id, tenant, room_line(its))
    local backend, giant = kept(its)
    if giant == id then let_go(its, backend) else backend = nil end
    if redis.call('EXISTS', KEY.backends_sizes(its)) == 0 then redis.call('DEL', KEY.backends_line(its)) end
    local whose = (ask.policy or 'default') .. ' ' .. tenant
    redis.call('HINCRBY', KEY.BACKEND_WAITS, whose, math.max(0, now - ask.since))
    redis.call('HINCRBY', KEY.BACKEND_WAITS, whose .. ' n', 1)
    return ask, backend
  end

  local function granted_to_others(its)
    return tonumber(redis.call('HGET', KEY.backends_grants(its), 'granted') or '0')
  end

  -- Has one wait, or go on waiting with what it asks for now.
  local function join_line(ask)
    local id, its, tenant = id_of(ask), of(ask.policy), ask.tenant or 'default'
    local before = asked(id)
    ask.since, ask.seen = before and before.since or now, now
    ask.past = before and before.past or -granted_to_others(its)
    redis.call('HSET', KEY.BACKEND_ASKS, id, ask.weight .. ' ' .. cjson.encode(ask))
    redis.call('ZADD', KEY.backends_sizes(its), ask.weight, id)
    if before then return end
    queue_up(id, tenant, exact(submission_times(1) - ask.lift), room_line(its))
    if redis.call('SETNX', KEY.backends_line(its), '-') == 1 then
      redis.call('HSET', KEY.backends_grants(its), 'at', now)
    end
  end

  -- -- whose turn it is -----------------------------------------------------------------------------

  -- The tenants that wait, with what they have, and what each unit of weight is due of so much. `freed`: what has just
  -- been given back, for it counted until now.
  local function standing(its, line, freed)
    local rows = redis.call('ZRANGE', line.tenants, 0, MOST_TENANTS - 1, 'WITHSCORES')
    if not rows[3] then
      -- One has nobody to be compared with.
      redis.call('HSET', KEY.backends_grants(its), 'at', now, 'mean', rows[2] or '0')
      return {rows[1] and {name = rows[1], weight = 1, passed = 0, at = 1, ids = {}, asks = {}, reserved = 0, ahead = 0}}
    end
    local tenants, sum, weights, moved, reserved, others = {}, 0, 0, {}, {}, 0
    local has = redis.call('HGETALL', KEY.backends_reserved(its))
    for i = 1, #has, 2 do
      reserved[has[i]], others = tonumber(has[i + 1]), others + tonumber(has[i + 1])
    end
    local at = tonumber(redis.call('HGET', KEY.backends_grants(its), 'at') or now)
    local seconds = math.max(0, now - at) / 1000
    for i = 1, #rows, 2 do
      local name = rows[i]
      local t = {name = name, weight = weight_of(name), passed = 0, at = 1, ids = {}, asks = {},
        reserved = reserved[name] or 0}
      local before = t.reserved + (freed and freed.tenant == name and freed.weight or 0)
      t.served = tonumber(rows[i + 1]) + seconds * before / t.weight
      sum, weights, others = sum + t.served * t.weight, weights + t.weight, others - t.reserved
      tenants[#tenants + 1] = t
    end
    local mean = sum / weights
    local size = 0
    for _, t in ipairs(tenants) do
      local first = redis.call('ZRANGE', line.waiting(t.name), 0, 0)[1]
      size = math.max(size, tonumber((redis.call('HGET', KEY.BACKEND_ASKS, first or '') or '0'):match('^%S+')))
    end
    for _, t in ipairs(tenants) do
      t.ahead = (t.served - mean) * t.weight / CORRECTED_S
      t.ahead = math.max(-size, math.min(size, t.ahead))
      moved[#moved + 1] = exact(mean + t.ahead * CORRECTED_S / t.weight)
      moved[#moved + 1] = t.name
    end
    if moved[1] then redis.call('ZADD', line.tenants, unpack(moved)) end
    redis.call('HSET', KEY.backends_grants(its), 'at', now, 'mean', exact(mean))
    return tenants, function(size) return (size - others) / weights end
  end

  local function share_of(t) return (t.reserved + t.ahead) / t.weight end

  -- The tenant that has least and anybody left to be looked at.
  local function next_tenant(tenants)
    local best, least
    for _, t in ipairs(tenants) do
      if not t.over and (not best or share_of(t) < least) then best, least = t, share_of(t) end
    end
    return best
  end

  -- Its next rollout by rank, and what that asks for.
  local function next_of(t, line)
    if t.at > #t.ids then
      local last = t.passed + (t.at == 1 and FIRST_LOOKS or LOOKS_AT_ONCE) - 1
      t.ids = redis.call('ZRANGE', line.waiting(t.name), t.passed, last)
      t.at, t.over = 1, not t.ids[1]
      if t.over then return end
      t.asks = redis.call('HMGET', KEY.BACKEND_ASKS, unpack(t.ids))
    end
    t.at = t.at + 1
    return t.ids[t.at - 1], t.asks[t.at - 1]
  end

  -- -- granting -------------------------------------------------------------------------------------

  local function is_gone(ask) return not holds(ask) or not ask.fence and now - ask.seen > FORGOTTEN_MS end

  local function try_at(backend, wish)
    verdicts = {}
    local load = redis.call('ZSCORE', KEY.backends_load(wish.of), backend)
    return load and try(backend, tonumber(load), wish)
  end

  -- Whoever asks by a process that hears of it; others ask again.
  local function tell_of(id, ask, told)
    told.n = told.n + 1
    if not ask.process then return end
    told.by[ask.process] = told.by[ask.process] or {}
    table.insert(told.by[ask.process], id)
  end

  local function tell_all(told)
    for process, ids in pairs(told.by) do
      redis.call('PUBLISH', KEY.room_of(process), table.concat(ids, ' '))
    end
  end

  local function give(id, ask, place, why, told)
    leave_line(id, ask)
    enter_backend(ask, place, why)
    count_granted(place.fact.policies, ask.policy or 'default', ask.weight)
    tell_of(id, ask, told)
  end

  -- Keeps the backend for one that is likely to have room soonest: one that can hold it beside others rather than one
  -- that must be empty for it, and of those the one with the most room.
  local function keep_one(its, id, wish)
    local rows = redis.call('ZRANGE', KEY.backends_load(its), 0, -1, 'WITHSCORES')
    local best, best_holds, most
    for i = 1, #rows, 2 do
      local load, fact = tonumber(rows[i + 1]), facts(rows[i], its)
      local room, holds_it = fact.capacity - load, wish.weight <= (wish.admit or 0) * fact.capacity
      if not fact.kept and judge(rows[i], load, fact, wish) == 'full'
          and (not best or holds_it and not best_holds or holds_it == best_holds and room > most) then
        best, best_holds, most = rows[i], holds_it, room
      end
    end
    if not best then return end
    redis.call('HSET', KEY.backend(best), 'kept', id)
    redis.call('SET', KEY.backends_line(its), best .. ' ' .. id)
  end

  -- The one that a backend is kept for comes first there. Whoever has left, or a backend that cannot serve it any more,
  -- ends that.
  local function serve_kept(its, only, wanted, told)
    local backend, id = kept(its)
    if not backend or only and only ~= backend then return end
    local ask = asked(id)
    if not ask then return let_go(its, backend) end
    if is_gone(ask) then return leave_line(id) end
    local place = try_at(backend, wish_of(ask, wanted, ask.admit, true))
    if place then
      give(id, ask, place, nil, told)
    elseif not verdicts.full then
      let_go(its, backend)
    end
  end

  -- Whether not even the smallest of the line fits on the one backend.
  local function fits_nobody(its, only)
    local id = redis.call('ZRANGE', KEY.backends_sizes(its), 0, 0)[1]
    local ask = id and asked(id)
    if not ask then return not id end
    local wish = wish_of(ask, nil, ask.admit, true)
    wish.version, wish.excluded = nil, {}
    return not try_at(only, wish)
  end

  -- Gives room to those who wait for it, in their order. `only`: the one backend on which there may be some; missing =
  -- all are looked at, and whoever no backend could take is told and waits no more.
  local function grant(its, only, freed)
    local line, told, wanted = room_line(its), {n = 0, by = {}}, redis.call('GET', KEY.backends_version(its))
    serve_kept(its, only, wanted, told)
    if only and fits_nobody(its, only) then return tell_all(told) end
    local tenants, due = standing(its, line, freed)
    local refused, head, passed, level = {}, nil, 0, nil
    for _ = 1, MOST_LOOKS do
      local t = next_tenant(tenants)
      if not t or told.n >= MOST_GRANTS or level and share_of(t) > level then break end
      local id, raw = next_of(t, line)
      local plain = raw and raw:find('"exclude":{}', 1, true) and not raw:find('"version":', 1, true)
      local hopeless = plain and tonumber(raw:match('^%S+')) >= (refused[''] or math.huge)
      local ask = id and not hopeless and parsed(raw)
      if hopeless then
        -- Whoever asks for as much as one that did not fit does not fit either.
        t.passed = t.passed + 1
      elseif id and not ask then
        leave_queue(id, t.name, line)
      elseif id and is_gone(ask) then
        leave_line(id)
      elseif id then
        local alike, wish, place, why = plain and '' or (ask.version or id), wish_of(ask, wanted, ask.admit, true), nil, nil
        verdicts = {full = 1}
        if ask.weight < (refused[alike] or math.huge) then
          if only then place = try_at(only, wish) else place, why = find(ask, wish) end
        end
        if place then
          give(id, ask, place, why, told)
          t.reserved, passed = t.reserved + ask.weight, passed + (head and ask.weight or 0)
        elseif verdicts.full then
          refused[alike], t.passed = math.min(ask.weight, refused[alike] or math.huge), t.passed + 1
          if not head then
            head = {id = id, ask = ask}
            if granted_to_others(its) + ask.past >= ask.weight and not kept(its) then keep_one(its, id, wish) end
            -- Small ones of a tenant that has its share already would fill every gap before a large one of others fits.
            local size = due and tonumber(redis.call('HGET', KEY.backends_grants(its), 'size') or '0')
            level = due and ask.admit and size > 0 and due(ask.admit * size)
          end
          if plain and ask.weight <= tonumber(redis.call('ZRANGE', KEY.backends_sizes(its), 0, 0, 'WITHSCORES')[2]) then
            break
          end
        elseif only then
          t.passed = t.passed + 1
        else
          leave_line(id)
          tell_of(id, ask, told)
        end
      end
    end
    if passed > 0 then
      head.ask.past = head.ask.past + passed
      redis.call('HSET', KEY.BACKEND_ASKS, head.id, head.ask.weight .. ' ' .. cjson.encode(head.ask))
    end
    tell_all(told)
  end

  return {join = join_line, leave = leave_line, grant = grant, asked = asked, is_gone = is_gone, turn = clock[2]}
end

-- Notes how much all backends of a policy hold.
local function note_size(its)
  local size = 0
  for _, backend in ipairs(redis.call('ZRANGE', KEY.backends_load(its), 0, -1)) do
    size = size + (tonumber(redis.call('HGET', KEY.backend(backend), 'capacity') or '0'))
  end
  redis.call('HSET', KEY.backends_grants(its), 'size', size)
end

-- Something is better on a backend of these policies. `freed`: what `unpin` gave back.
local function room(backend, policies, freed) -- lazy
  local its = of(policies)
  -- The default policy alone, and nobody waits.
  if its == '' and redis.call('EXISTS', KEY.BACKEND_WAITED, KEY.backends_line(its)) == 0 then return end
  local names, watched = {}, {KEY.BACKEND_WAITED}
  for policy in (policies or 'default'):gmatch('%S+') do
    its, names[#names + 1] = of(policy), policy
    watched[#watched + 1] = KEY.backends_line(its)
  end
  local there = redis.call('MGET', unpack(watched))
  if there[1] then redis.call('PUBLISH', KEY.BACKEND_ROOM_CHANNEL, '') end
  local line
  for i = 1, #names do
    if there[i + 1] then line = line or line_up() end
  end
  for i = 1, line and #names or 0 do
    -- No policy is always the first.
    local k = (i + line.turn) % #names + 1
    if there[k + 1] then
      local policy, tenant
      if freed then policy, tenant = owners(freed.label) end
      line.grant(of(names[k]), backend, policy == names[k] and {tenant = tenant, weight = freed.weight})
    end
  end
end

-- -- giving back ----------------------------------------------------------------------------------

-- A reservation, or a place in the line; false: there was no reservation.
local function give_back(id) -- lazy
  local freed = unpin(id)
  if freed then
    redis.call('HDEL', KEY.record(id), 'reserved')
    room(freed.backend, freed.policies, freed)
    return true
  end
  local ask, backend = line_up().leave(id)
  if backend then line_up().grant(of(ask.policy), backend) end
  return false
end

-- All that a rollout has, its slots included. Workers are told, and the first who waits there asks again.
local function release_backend(id)
  local ids = {id}
  for slot in (redis.call('HGET', KEY.record(id), 'slots') or ''):gmatch('%S+') do ids[#ids + 1] = id .. '|' .. slot end
  for _, each in ipairs(ids) do
    local freed = unpin(each)
    if not freed then line_up().leave(each) end
    for policy in (freed and (freed.policies or 'default') or ''):gmatch('%S+') do
      if redis.call('EXISTS', KEY.BACKEND_WAITED, KEY.backends_line(of(policy))) > 0 then
        redis.call('PUBLISH', KEY.BACKEND_ROOM_CHANNEL, '')
      end
    end
  end
  redis.call('HDEL', KEY.record(id), 'reserved', 'slots')
end
