-- needs: rollouts/timeline backends/served
-- Load of the LLM backends, and the choice between them. `KEY.backends_load(of)` is a policy's min-heap: member =
-- backend, score = what the rollouts pinned to it reserve, of all policies that it serves. Never ZPOPMIN: a crash
-- between pop and push would lose the backend.
-- A pin (`<backend> <weight> <label>`) says what to give back and goes with it, so a release is idempotent.

local function pin_of(id)
  local pin = redis.call('HGET', KEY.BACKEND_PINS, id)
  if pin then return pin:match('^(%S+) (%S+) (%S+)$') end
end

-- Those whom no backend could take are told; without any, nothing is sent.
local function tell_waiting()
  if redis.call('EXISTS', KEY.BACKEND_WAITED) == 1 then redis.call('PUBLISH', KEY.BACKEND_ROOM_CHANNEL, '') end
end

-- `<backend> <members>`: where a group's rollouts went, for their prompt is cached there.
local function home_of(label)
  return label:byte() ~= 45 and redis.call('HGET', KEY.BACKEND_GROUPS, label) or ''
end

local function leave_group(label)
  local backend, members = home_of(label):match('^(%S+) (%d+)$')
  if not backend then return end
  if tonumber(members) > 1 then
    redis.call('HSET', KEY.BACKEND_GROUPS, label, backend .. ' ' .. (tonumber(members) - 1))
  else
    redis.call('HDEL', KEY.BACKEND_GROUPS, label)
  end
end

-- What was given back, and where: nil where there was none.
local function unpin(id)
  local backend, weight, label = pin_of(id)
  if not backend then return end
  redis.call('HDEL', KEY.BACKEND_PINS, id)
  leave_group(label)
  book(label, '-' .. weight)
  local its = redis.call('HMGET', KEY.backend(backend), 'live', 'policies')
  -- A backend that was removed must not come back with a negative score.
  if its[1] then reserve(backend, its[2], '-' .. weight, '-1') end
  return {backend = backend, policies = its[2], label = label, weight = tonumber(weight)}
end

-- -- choosing -------------------------------------------------------------------------------------

local function facts(backend, its)
  local r = redis.call('HMGET', KEY.backend(backend), 'capacity', 'most', 'version' .. its, 'draining', 'paused', 'error',
    'rejected' .. its, 'live', 'ramp', 'kept', 'policies')
  return {capacity = tonumber(r[1]) or 0, most = tonumber(r[2]) or 0, version = r[3] or '', draining = r[4],
    paused = r[5], error = r[6] or r[7], live = tonumber(r[8]) or 0, ramp = r[9], kept = r[10], policies = r[11]}
end

-- What a rollout wants of a backend: weight, version, excluded, and, where it may be refused for want of room, admit.
local function wish_of(ask, wanted, admit, starts)
  local excluded = {}
  for _, backend in ipairs(ask.exclude) do excluded[backend] = true end
  return {id = id_of(ask), of = of(ask.policy), weight = ask.weight, excluded = excluded, admit = admit,
    starts = starts, version = ask.version or wanted or nil}
end

-- Whether a rollout may enter: 'yes', 'full' (wait for room), or the reason why not.
local function judge(backend, load, fact, wish)
  if wish.excluded[backend] then return 'excluded' end
  if fact.error then return 'unhealthy' end
  if fact.draining then return 'draining' end
  if fact.paused then return 'paused' end
  if wish.version and fact.version ~= wish.version then return 'version' end
  if fact.most > 0 and fact.live >= fact.most then return 'full' end
  if fact.kept and wish.starts and fact.kept ~= wish.id then return 'full' end
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
  local fact = facts(backend, wish.of)
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
        local turn = tonumber(redis.call('ZSCORE', KEY.backends_chosen(wish.of), rows[i]) or 0)
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
    local names = redis.call('ZRANGE', KEY.backends_chosen(wish.of), from, from + size - 1)
    if #names == 0 then return end
    for _, backend in ipairs(names) do
      if redis.call('ZSCORE', KEY.backends_load(wish.of), backend) == score then
        local place = try(backend, tonumber(score), wish, skip)
        if place then return place end
      end
    end
    from, size = from + size, CHUNK
  end
end

local function lowest(wish, skip)
  verdicts = {}
  local heap = KEY.backends_load(wish.of)
  local rows = redis.call('ZRANGE', heap, 0, 1, 'WITHSCORES')
  if not rows[1] then return end
  local place
  if rows[2] ~= rows[4] then
    place = try(rows[1], tonumber(rows[2]), wish, skip)
  else
    if redis.call('ZCOUNT', heap, rows[2], rows[2]) > CHUNK then place = first_in_turn(rows[2], wish, skip) end
    place = place or first_of(redis.call('ZRANGEBYSCORE', heap, rows[2], rows[2], 'WITHSCORES'), wish, skip)
  end
  return place or first_of(redis.call('ZRANGE', heap, 0, -1, 'WITHSCORES'), wish, skip)
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
  elseif second and redis.call('ZSCORE', KEY.backends_chosen(wish.of), best.name)
      == redis.call('GET', KEY.backends_turn(wish.of)) then
    return second, best.name
  end
  return best
end

-- Where a rollout is to go, and why there: its group's backend, unless that is loaded, or the one of `choose`.
local function find(ask, wish)
  local best, barred = choose(wish)
  if not best then return end
  best.home = home_of(label_of(ask))
  local home, why = best.home:match('^(%S+)'), nil
  if home and home ~= best.name and home ~= barred then
    local load = tonumber(redis.call('ZSCORE', KEY.backends_load(wish.of), home) or nil)
    local fact = load and load - best.load <= ask.group_slack * ask.weight and facts(home, wish.of)
    if fact and judge(home, load, fact, wish) == 'yes' then best.name, best.fact, why = home, fact, 'group' end
  end
  return best, why
end

-- -- pinning --------------------------------------------------------------------------------------

local function pin(ask, place, label, text)
  -- As texts, for a number is made one at each use.
  local its, weight = of(ask.policy), tostring(ask.weight)
  if label:byte() ~= 45 then
    local members = tonumber((place.home or home_of(label)):match(' (%d+)$') or '0') + 1
    redis.call('HSET', KEY.BACKEND_GROUPS, label, place.name .. ' ' .. members)
  end
  reserve(place.name, place.fact.policies, weight, '1')
  book(label, weight)
  redis.call('HSET', KEY.BACKEND_PINS, id_of(ask), place.name .. ' ' .. weight .. ' ' .. label)
  redis.call('ZADD', KEY.backends_chosen(its), redis.call('INCR', KEY.backends_turn(its)), place.name)
  note(ask, place.name, label)
  if ask.fence then
    tell(ask.rollout, redis.call('HGET', KEY.record(ask.rollout), 'attempt') or '0', ask.fence,
      (ask.slot and ask.slot .. ': ' or '') .. text)
  end
end
