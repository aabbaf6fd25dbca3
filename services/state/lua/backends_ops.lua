-- What is asked of the heap. ARGV[1] is the operation; see backends.py for what each one means.

local op, id = ARGV[1], ARGV[2]

-- -- choosing -------------------------------------------------------------------------------------

local ask = {}  -- weight, version, excluded, limited, admit: the question of one acquire or extend

local function facts(backend)
  local r = redis.call('HMGET', about(backend), 'capacity', 'most', 'version', 'draining', 'paused', 'error',
    'rejected', 'live', 'ramp')
  return {capacity = tonumber(r[1]) or 0, most = tonumber(r[2]) or 0, version = r[3] or '', draining = r[4],
    paused = r[5], error = r[6] or r[7], live = tonumber(r[8]) or 0, ramp = r[9]}
end

local function excluded(backend) return ask.excluded:find(',' .. backend .. ',', 1, true) ~= nil end

-- Whether a rollout may enter: 'yes', 'full' (wait for room), or the reason why not.
local function judge(backend, load, fact)
  if excluded(backend) then return 'excluded' end
  if fact.error then return 'unhealthy' end
  if fact.draining then return 'draining' end
  if fact.paused then return 'paused' end
  if ask.version ~= '' and fact.version ~= ask.version then return 'version' end
  if fact.most > 0 and fact.live >= fact.most then return 'full' end
  -- An empty backend takes anything: a rollout larger than its cache must run somewhere.
  if ask.limited and fact.capacity > 0 and fact.live > 0 and load + ask.weight > ask.admit * fact.capacity then
    return 'full'
  end
  return 'yes'
end

local CHUNK = 16
local seen  -- verdict → how many backends, for the answer when none is left

local function try(backend, load, skip)
  if backend == skip then return end
  local fact = facts(backend)
  local verdict = judge(backend, load, fact)
  seen[verdict] = (seen[verdict] or 0) + 1
  if verdict == 'yes' then return {name = backend, load = load, fact = fact} end
end

-- The first of `rows` (name, score, … ascending) that may be entered; of equals the least recently chosen.
local function first_of(rows, skip)
  local i = 1
  while i <= #rows do
    local score, best, best_turn = rows[i + 1], nil, nil
    while i <= #rows and rows[i + 1] == score do
      local found = try(rows[i], tonumber(score), skip)
      if found then
        local turn = tonumber(redis.call('ZSCORE', CHOSEN, rows[i]) or 0)
        if not best or turn < best_turn then best, best_turn = found, turn end
      end
      i = i + 2
    end
    if best then return best end
  end
end

local function lowest(skip)
  seen = {}
  local rows = redis.call('ZRANGE', LOAD, 0, 1, 'WITHSCORES')
  if not rows[1] then return end
  if rows[2] ~= rows[4] then
    local found = rows[1] and try(rows[1], tonumber(rows[2]), skip)
    if found then return found end
  elseif redis.call('ZCOUNT', LOAD, rows[2], rows[2]) > CHUNK then
    -- Very many equals (an idle fleet): go from the least recently chosen instead of looking at all.
    local least, size = rows[2], 2
    local from = 0
    while true do
      local names = redis.call('ZRANGE', CHOSEN, from, from + size - 1)
      if #names == 0 then break end
      for _, backend in ipairs(names) do
        if redis.call('ZSCORE', LOAD, backend) == least then
          local found = try(backend, tonumber(least), skip)
          if found then return found end
        end
      end
      from, size = from + size, CHUNK
    end
  end
  if rows[2] and rows[2] == rows[4] then
    seen = {}
    local found = first_of(redis.call('ZRANGEBYSCORE', LOAD, rows[2], rows[2], 'WITHSCORES'), skip)
    if found then return found end
  end
  seen = {}
  return first_of(redis.call('ZRANGE', LOAD, 0, -1, 'WITHSCORES'), skip)
end

-- The least loaded one. A backend that has just come is empty and would get *all* new rollouts, cold: until
-- it has caught up with the next one it is not chosen twice in a row. The second answer is a backend passed
-- over for that.
local function choose(skip)
  local best = lowest(skip)
  if not (best and best.fact.ramp) then return best end
  local verdicts = seen
  local second = lowest(best.name)
  seen = verdicts
  if second and second.name == skip then second = nil end
  if second and second.load <= best.load then
    redis.call('HDEL', about(best.name), 'ramp')
  elseif second and redis.call('ZSCORE', CHOSEN, best.name) == redis.call('GET', TURN) then
    return second, best.name
  end
  return best
end

-- -- pins -----------------------------------------------------------------------------------------

-- False: somebody else holds the rollout by now, or nobody.
local function holds(rollout, fence)
  if fence == '' then return true end
  local r = redis.call('HMGET', 'rollout:{' .. rollout .. '}', 'fence', 'owner')
  return r[1] == fence and r[2]
end

local function note(rollout, fence, backend, weight)
  if fence ~= '' then
    redis.call('HSET', 'rollout:{' .. rollout .. '}', 'backend', backend, 'reserved', weight)
  end
end

local function tell_of_place(rollout, fence, text)
  if fence ~= '' then
    tell(rollout, redis.call('HGET', 'rollout:{' .. rollout .. '}', 'attempt') or '0', fence, text)
  end
end

local function pin(rollout, fence, backend, weight, group)
  reserve(backend, weight, 1)
  redis.call('HSET', PINS, rollout, backend .. ' ' .. weight .. ' ' .. group)
  redis.call('ZADD', CHOSEN, redis.call('INCR', TURN), backend)
  note(rollout, fence, backend, weight)
end

local function answer(word, backend, why)
  if not backend then return {word, '', '', '', why} end
  local version = redis.call('HGET', about(backend), 'version') or ''
  return {word, backend, redis.call('HGET', BACKENDS, backend), version, why}
end

-- Nobody may take the rollout now. `full`: room comes by itself; `none`: somebody must do something.
local function refused()
  local why = {}
  for verdict, count in pairs(seen) do why[#why + 1] = count .. ' ' .. verdict end
  table.sort(why)
  redis.call('SET', WAITED, '1', 'PX', 5000)
  local word = seen.full and 'full' or 'none'
  redis.call('HINCRBY', TOTALS, 'refused_' .. word, 1)
  return answer(word, nil, table.concat(why, ', '))
end

local function ask_for(weight, version, excluded_ids, limited, admit)
  if version == '' then version = redis.call('GET', WANTED) or '' end
  ask = {weight = tonumber(weight), version = version, excluded = ',' .. excluded_ids .. ',',
    limited = limited == '1', admit = tonumber(admit)}
end

-- acquire <rollout> <fence> <group> <weight> <version> <excluded, comma separated> <limited> <admit>
-- <group slack>
though_full()

if op == 'acquire' then
  local fence, group, weight = ARGV[3], ARGV[4], ARGV[5]
  if not holds(id, fence) then return answer('lost', nil, '') end
  ask_for(weight, ARGV[6], ARGV[7], ARGV[8], ARGV[9])
  local pinned = pin_of(id)
  if pinned then
    -- A pin outlives draining and a pause: the prefix cache is there.
    if redis.call('HEXISTS', BACKENDS, pinned) == 1 and not excluded(pinned)
        and not facts(pinned).error then
      return answer('ok', pinned, '')
    end
    release_backend(id)
  end
  local best, barred = choose()
  local why = ''
  if not best then return refused() end
  local home = group ~= '-' and (redis.call('HGET', GROUPS, group) or ''):match('^(%S+)')
  if home and home ~= best.name and home ~= barred then
    local load = tonumber(redis.call('ZSCORE', LOAD, home))
    if load and load - best.load <= tonumber(ARGV[10]) * ask.weight
        and judge(home, load, facts(home)) == 'yes' then
      best, why = {name = home}, 'group'
      redis.call('HINCRBY', TOTALS, 'placed_group', 1)
    end
  end
  join_group(group, best.name)
  pin(id, fence, best.name, weight, group)
  redis.call('HINCRBY', TOTALS, 'placed', 1)
  tell_of_place(id, fence, 'placed on backend ' .. best.name .. (why ~= '' and ', where its group is' or ''))
  return answer('ok', best.name, why)

-- extend <rollout> <fence> <weight> <version> <excluded> <limited> <spill at> <spill to> <spill gap>
elseif op == 'extend' then
  local fence, weight = ARGV[3], ARGV[4]
  if not holds(id, fence) then return answer('lost', nil, '') end
  -- A rollout under way is never refused for want of room.
  ask_for(weight, ARGV[5], ARGV[6], '0', '0')
  local home, old, group = pin_of(id)
  local fact = home and redis.call('HEXISTS', BACKENDS, home) == 1 and facts(home)
  if not fact or fact.error or excluded(home) then
    local best = choose(home)
    -- The version counts where a rollout starts. One under way goes on wherever its ids can be continued.
    if not best and ask.version ~= '' then
      ask.version = ''
      best = choose(home)
    end
    if not best then return refused() end
    unpin(id)
    group = group or '-'
    join_group(group, best.name)
    pin(id, fence, best.name, weight, group)
    redis.call('HINCRBY', TOTALS, 'moved_failover', 1)
    tell_of_place(id, fence, 'moved to backend ' .. best.name .. ': ' ..
      (home and home .. ' failed or is gone' or 'its place was gone'))
    return answer('ok', best.name, 'failover')
  end
  if weight ~= old then
    reserve(home, string.format('%.17g', ask.weight - tonumber(old)), 0)
    redis.call('HSET', PINS, id, home .. ' ' .. weight .. ' ' .. group)
    note(id, fence, home, weight)
  end
  if ARGV[7] == '1' and fact.capacity > 0 and not fact.paused then
    local load = tonumber(redis.call('ZSCORE', LOAD, home))
    if load > tonumber(ARGV[8]) * fact.capacity then
      ask.limited, ask.admit = true, tonumber(ARGV[9])
      local best = choose(home)
      if best and fact.live - best.fact.live > tonumber(ARGV[10]) then
        unpin(id)
        join_group(group, best.name)
        pin(id, fence, best.name, weight, group)
        redis.call('HINCRBY', TOTALS, 'moved_spill', 1)
        tell_of_place(id, fence, 'moved to backend ' .. best.name .. ': ' .. home .. ' is full')
        tell_waiting()
        return answer('ok', best.name, 'spill')
      end
    end
  end
  return answer('ok', home, '')

-- release <rollout>
elseif op == 'release' then
  return release_backend(id)

-- suspect <backend>: a call to it failed
elseif op == 'suspect' then
  return redis.call('HINCRBY', 'backends:suspects', id, 1)

-- suspects: those entered since this was asked last, with how often
elseif op == 'suspects' then
  local found = redis.call('HGETALL', 'backends:suspects')
  redis.call('DEL', 'backends:suspects')
  return found

-- put <backend> <description> <capacity> <most rollouts> <version>
elseif op == 'put' then
  local fresh = redis.call('HSET', BACKENDS, id, ARGV[3])
  local busiest = redis.call('ZREVRANGE', LOAD, 0, 0, 'WITHSCORES')
  redis.call('ZADD', LOAD, 'NX', 0, id)
  redis.call('ZADD', CHOSEN, 'NX', 0, id)
  redis.call('HSET', about(id), 'capacity', ARGV[4], 'most', ARGV[5], 'version', ARGV[6])
  if fresh == 1 then
    redis.call('HSET', about(id), 'live', 0)
    -- It comes to a fleet at work.
    if busiest[1] and tonumber(busiest[2]) > 0 then redis.call('HSET', about(id), 'ramp', 1) end
  end
  redis.call('HDEL', about(id), 'error', 'rejected')
  tell_waiting()
  return fresh

-- remove <backend>
elseif op == 'remove' then
  -- Its pins go with it: released later, they would be taken off a backend added again by that name.
  local pins = redis.call('HGETALL', PINS)
  for i = 1, #pins, 2 do
    if pins[i + 1]:match('^(%S+)') == id then unpin(pins[i]) end
  end
  redis.call('ZREM', LOAD, id)
  redis.call('ZREM', CHOSEN, id)
  redis.call('DEL', about(id))
  return redis.call('HDEL', BACKENDS, id)

-- set <backend> <field> <value or ''>: '' clears. Answers 0 when there is no such backend.
elseif op == 'set' then
  if redis.call('HEXISTS', BACKENDS, id) == 0 then return 0 end
  local field, value = ARGV[3], ARGV[4]
  if value ~= '' then
    redis.call('HSET', about(id), field, value)
  elseif redis.call('HDEL', about(id), field) == 1 and (field == 'error' or field == 'rejected' or field == 'draining') then
    redis.call('HSET', about(id), 'ramp', 1)
  end
  tell_waiting()
  return 1

-- reconcile: make the counters what the live rollouts say; answers {reclaimed, restored, corrected}
elseif op == 'reconcile' then
  local reclaimed, restored, corrected = 0, 0, 0
  for _, backend in ipairs(redis.call('HKEYS', BACKENDS)) do
    redis.call('ZADD', LOAD, 'NX', 0, backend)
    redis.call('ZADD', CHOSEN, 'NX', 0, backend)
  end
  local pins = redis.call('HGETALL', PINS)
  for i = 1, #pins, 2 do
    local r = redis.call('HMGET', 'rollout:{' .. pins[i] .. '}', 'state', 'owner')
    if r[1] ~= 'running' or not r[2] then
      release_backend(pins[i])
      reclaimed = reclaimed + 1
    end
  end
  for _, rollout in ipairs(redis.call('ZRANGE', 'rollouts:state:running', 0, -1)) do
    local r = redis.call('HMGET', 'rollout:{' .. rollout .. '}', 'backend', 'reserved', 'owner', 'group')
    if r[1] and r[2] and r[3] and not pin_of(rollout) and redis.call('ZSCORE', LOAD, r[1]) then
      redis.call('HSET', PINS, rollout, r[1] .. ' ' .. r[2] .. ' ' .. r[4])
      restored = restored + 1
    end
  end
  local load, live, groups = {}, {}, {}
  pins = redis.call('HGETALL', PINS)
  for i = 2, #pins, 2 do
    local backend, weight, group = pins[i]:match('^(%S+) (%S+) (%S+)$')
    load[backend] = (load[backend] or 0) + tonumber(weight)
    live[backend] = (live[backend] or 0) + 1
    if group ~= '-' then
      groups[group] = groups[group] or {backend = backend, members = 0}
      groups[group].members = groups[group].members + 1
    end
  end
  local heap = redis.call('ZRANGE', LOAD, 0, -1, 'WITHSCORES')
  for i = 1, #heap, 2 do
    local backend, true_load, true_live = heap[i], load[heap[i]] or 0, live[heap[i]] or 0
    if tonumber(heap[i + 1]) ~= true_load
        or (tonumber(redis.call('HGET', about(backend), 'live')) or 0) ~= true_live then
      redis.call('ZADD', LOAD, string.format('%.17g', true_load), backend)
      redis.call('HSET', about(backend), 'live', true_live)
      corrected = corrected + 1
    end
  end
  local known = redis.call('HGETALL', GROUPS)
  for i = 1, #known, 2 do
    local group, home = known[i], known[i + 1]:match('^(%S+)')
    if groups[group] then groups[group].backend = home else redis.call('HDEL', GROUPS, group) end
  end
  for group, its in pairs(groups) do redis.call('HSET', GROUPS, group, its.backend .. ' ' .. its.members) end
  return {reclaimed, restored, corrected}
end
return redis.error_reply('backends_ops.lua: unknown operation ' .. tostring(op))
