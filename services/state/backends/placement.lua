-- needs: full rollouts/timeline backends/pins
-- Where rollouts go: apart from the fleet's upkeep, for all of a script is read at each of its calls.

-- -- choosing -------------------------------------------------------------------------------------

local function facts(backend)
  local r = redis.call('HMGET', KEY.backend(backend), 'capacity', 'most', 'version', 'draining', 'paused', 'error',
    'rejected', 'live', 'ramp')
  return {capacity = tonumber(r[1]) or 0, most = tonumber(r[2]) or 0, version = r[3] or '', draining = r[4],
    paused = r[5], error = r[6] or r[7], live = tonumber(r[8]) or 0, ramp = r[9]}
end

-- What a rollout wants of a backend: weight, version, excluded, and, where it may be refused for want of room, admit.
local function wish_of(ask, admit)
  local excluded = {}
  for _, backend in ipairs(ask.exclude) do excluded[backend] = true end
  return {weight = ask.weight, excluded = excluded, admit = admit,
    version = ask.version or redis.call('GET', KEY.BACKEND_VERSION) or nil}
end

-- Whether a rollout may enter: 'yes', 'full' (wait for room), or the reason why not.
local function judge(backend, load, fact, wish)
  if wish.excluded[backend] then return 'excluded' end
  if fact.error then return 'unhealthy' end
  if fact.draining then return 'draining' end
  if fact.paused then return 'paused' end
  if wish.version and fact.version ~= wish.version then return 'version' end
  if fact.most > 0 and fact.live >= fact.most then return 'full' end
  -- An empty backend takes anything: a rollout larger than its cache must run somewhere.
  if wish.admit and fact.capacity > 0 and fact.live > 0 and load + wish.weight > wish.admit * fact.capacity then
    return 'full'
  end
  return 'yes'
end

local CHUNK = 16
local verdicts  -- verdict → how many backends, for the answer when none is left

local function try(backend, load, wish, skip)
  if backend == skip then return end
  local fact = facts(backend)
  local verdict = judge(backend, load, fact, wish)
  verdicts[verdict] = (verdicts[verdict] or 0) + 1
  if verdict == 'yes' then return {name = backend, load = load, fact = fact} end
end

-- The first of `rows` (name, score, … ascending) that may be entered; of equals the least recently chosen.
local function first_of(rows, wish, skip)
  verdicts = {}
  local i = 1
  while i <= #rows do
    local score, best, best_turn = rows[i + 1], nil, nil
    while i <= #rows and rows[i + 1] == score do
      local place = try(rows[i], tonumber(score), wish, skip)
      if place then
        local turn = tonumber(redis.call('ZSCORE', KEY.BACKEND_CHOSEN, rows[i]) or 0)
        if not best or turn < best_turn then best, best_turn = place, turn end
      end
      i = i + 2
    end
    if best then return best end
  end
end

-- Of very many equals (an idle fleet) the least recently chosen one, without a look at all of them.
local function first_in_turn(score, wish, skip)
  local from, size = 0, 2
  while true do
    local names = redis.call('ZRANGE', KEY.BACKEND_CHOSEN, from, from + size - 1)
    if #names == 0 then return end
    for _, backend in ipairs(names) do
      if redis.call('ZSCORE', KEY.BACKEND_LOAD, backend) == score then
        local place = try(backend, tonumber(score), wish, skip)
        if place then return place end
      end
    end
    from, size = from + size, CHUNK
  end
end

local function lowest(wish, skip)
  verdicts = {}
  local rows = redis.call('ZRANGE', KEY.BACKEND_LOAD, 0, 1, 'WITHSCORES')
  if not rows[1] then return end
  local place
  if rows[2] ~= rows[4] then
    place = try(rows[1], tonumber(rows[2]), wish, skip)
  else
    if redis.call('ZCOUNT', KEY.BACKEND_LOAD, rows[2], rows[2]) > CHUNK then
      place = first_in_turn(rows[2], wish, skip)
    end
    place = place or
      first_of(redis.call('ZRANGEBYSCORE', KEY.BACKEND_LOAD, rows[2], rows[2], 'WITHSCORES'), wish, skip)
  end
  return place or first_of(redis.call('ZRANGE', KEY.BACKEND_LOAD, 0, -1, 'WITHSCORES'), wish, skip)
end

-- The least loaded one. A backend that has just come is empty and would get *all* new rollouts, cold: until
-- it has caught up with the next one it is not chosen twice in a row. The second answer is a backend passed
-- over for that.
local function choose(wish, skip)
  local best = lowest(wish, skip)
  if not (best and best.fact.ramp) then return best end
  local of_all = verdicts
  local second = lowest(wish, best.name)
  verdicts = of_all
  if second and second.name == skip then second = nil end
  if second and second.load <= best.load then
    redis.call('HDEL', KEY.backend(best.name), 'ramp')
  elseif second and redis.call('ZSCORE', KEY.BACKEND_CHOSEN, best.name) == redis.call('GET', KEY.BACKEND_TURN) then
    return second, best.name
  end
  return best
end

-- -- pins -----------------------------------------------------------------------------------------

-- False: somebody else holds the rollout by now, or nobody.
local function holds(ask)
  if not ask.fence then return true end
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner')
  return r[1] == ask.fence and r[2]
end

local function note(ask, backend)
  if ask.fence then redis.call('HSET', KEY.record(ask.rollout), 'backend', backend, 'reserved', ask.weight) end
end

local function pin(ask, backend, group, why)
  join_group(group, backend)
  reserve(backend, ask.weight, 1)
  redis.call('HSET', KEY.BACKEND_PINS, ask.rollout, backend .. ' ' .. ask.weight .. ' ' .. group)
  redis.call('ZADD', KEY.BACKEND_CHOSEN, redis.call('INCR', KEY.BACKEND_TURN), backend)
  note(ask, backend)
  if ask.fence then
    tell(ask.rollout, redis.call('HGET', KEY.record(ask.rollout), 'attempt') or '0', ask.fence, why)
  end
end

local function placed(backend, fact, why)
  return {word = 'ok', backend = backend, why = why or '', described = redis.call('HGET', KEY.BACKENDS, backend),
    version = fact.version}
end

-- Nobody may take the rollout now. `full`: room comes by itself; `none`: somebody must do something.
local function refused()
  local why = {}
  for verdict, count in pairs(verdicts) do why[#why + 1] = count .. ' ' .. verdict end
  table.sort(why)
  redis.call('SET', KEY.BACKEND_WAITED, '1', 'PX', 5000)
  local word = verdicts.full and 'full' or 'none'
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'refused_' .. word, 1)
  return {word = word, why = table.concat(why, ', ')}
end

-- {rollout, fence, group, weight, version, exclude, admit, group_slack}; fence, version and admit may be missing
function operations.acquire(ask)
  if not holds(ask) then return {word = 'lost', why = ''} end
  local wish = wish_of(ask, ask.admit)
  local pinned = pin_of(ask.rollout)
  if pinned then
    -- A pin outlives draining and a pause: the prefix cache is there.
    if redis.call('HEXISTS', KEY.BACKENDS, pinned) == 1 and not wish.excluded[pinned] then
      local fact = facts(pinned)
      if not fact.error then return placed(pinned, fact) end
    end
    release_backend(ask.rollout)
  end
  local best, barred = choose(wish)
  if not best then return refused() end
  local why
  local home = ask.group ~= '-' and (redis.call('HGET', KEY.BACKEND_GROUPS, ask.group) or ''):match('^(%S+)')
  if home and home ~= best.name and home ~= barred then
    local load = tonumber(redis.call('ZSCORE', KEY.BACKEND_LOAD, home))
    local fact = load and load - best.load <= ask.group_slack * ask.weight and facts(home)
    if fact and judge(home, load, fact, wish) == 'yes' then
      best, why = {name = home, fact = fact}, 'group'
      redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'placed_group', 1)
    end
  end
  pin(ask, best.name, ask.group, 'placed on backend ' .. best.name .. (why and ', where its group is' or ''))
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'placed', 1)
  return placed(best.name, best.fact, why)
end

local function move(ask, to, group, why, text)
  unpin(ask.rollout)
  pin(ask, to.name, group, 'moved to backend ' .. to.name .. ': ' .. text)
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'moved_' .. why, 1)
  return placed(to.name, to.fact, why)
end

-- {rollout, fence, weight, version, exclude, limited, spill_at, spill_to, spill_gap}
function operations.extend(ask)
  if not holds(ask) then return {word = 'lost', why = ''} end
  -- A rollout under way is never refused for want of room.
  local wish = wish_of(ask)
  local home, old, group = pin_of(ask.rollout)
  local fact = home and redis.call('HEXISTS', KEY.BACKENDS, home) == 1 and facts(home)
  if not fact or fact.error or wish.excluded[home] then
    local best = choose(wish, home)
    -- The version counts where a rollout starts. One under way goes on wherever its ids can be continued.
    if not best and wish.version then
      wish.version = nil
      best = choose(wish, home)
    end
    if not best then return refused() end
    return move(ask, best, group or '-', 'failover',
      home and home .. ' failed or is gone' or 'its place was gone')
  end
  if ask.weight ~= tonumber(old) then
    reserve(home, string.format('%.17g', ask.weight - tonumber(old)), 0)
    redis.call('HSET', KEY.BACKEND_PINS, ask.rollout, home .. ' ' .. ask.weight .. ' ' .. group)
    note(ask, home)
  end
  if ask.limited and fact.capacity > 0 and not fact.paused
      and tonumber(redis.call('ZSCORE', KEY.BACKEND_LOAD, home)) > ask.spill_at * fact.capacity then
    wish.admit = ask.spill_to
    local best = choose(wish, home)
    if best and fact.live - best.fact.live > ask.spill_gap then
      local answer = move(ask, best, group, 'spill', home .. ' is full')
      tell_waiting()
      return answer
    end
  end
  return placed(home, fact)
end

function operations.release(ask) return release_backend(ask.rollout) end

though_full()
