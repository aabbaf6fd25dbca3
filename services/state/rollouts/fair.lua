-- Whose rollout INIT takes next: start-time fair queueing between tenants (Goyal, Vin, Cheng 1996), and within a
-- tenant by rank. A rank is the time of submission (ms) less a step for each priority, so waiting lifts a rollout
-- as priority does, without a job that ages anybody.

local function exact(number) return string.format('%.17g', number) end

-- Read at every claim, so that another weight holds from the next one on.
local function weight_of(tenant)
  local raw = redis.call('HGET', KEY.TENANTS, tenant)
  local read, limits = pcall(cjson.decode, raw or '{}')
  local weight = read and type(limits) == 'table' and tonumber(limits.weight)
  return weight and weight > 0 and weight or 1
end

-- Of a line: its tenants, each one's rollouts, and where a tenant starts that had nobody waiting. The one before INIT:
-- at the present virtual time, for what it left unused is not saved up. What it was served just before still counts,
-- else one that submits singly would take a turn between all others.
local INIT_LINE = {tenants = KEY.FAIR_TENANTS, waiting = function(tenant) return KEY.fair_waiting(tenant) end, start = function(tenant)
  return math.max(tonumber(redis.call('GET', KEY.FAIR_CLOCK) or '0'),
    tonumber(redis.call('HGET', KEY.FAIR_SERVED, tenant) or '0'))
end}

-- Times of submission for `count` rollouts: those of one millisecond follow each other, so that the members of a
-- group stay neighbours. Answers the first; each next one is a 1024th of a millisecond later.
local function submission_times(count)
  local first = math.max(now, tonumber(redis.call('GET', KEY.FAIR_ORDER) or '0') + 1 / 1024)
  redis.call('SET', KEY.FAIR_ORDER, exact(first + (count - 1) / 1024))
  return first
end

local function queue_up(id, tenant, rank, line)
  line = line or INIT_LINE
  if redis.call('ZADD', line.waiting(tenant), rank, id) == 0 then return end
  if redis.call('ZSCORE', line.tenants, tenant) then return end
  redis.call('ZADD', line.tenants, exact(line.start(tenant)), tenant)
end

local function leave_queue(id, tenant, line)
  line = line or INIT_LINE
  local waiting = line.waiting(tenant)
  if redis.call('ZREM', waiting, id) == 1 and redis.call('EXISTS', waiting) == 0 then
    redis.call('ZREM', line.tenants, tenant)
  end
end

-- The rollout whose turn it is and its tenant. Those that are `passed_over(id)` keep their places; nil when nobody
-- else waits, and then whether there were such. Nothing is taken yet.
local MOST_PASSED_OVER = 1000
local function first_in_order(passed_over)
  local passed, tenants = 0, 0
  while true do
    local tenant = redis.call('ZRANGE', KEY.FAIR_TENANTS, tenants, tenants)[1]
    if not tenant then return nil, passed > 0 end
    local place = 0
    while true do
      local id = redis.call('ZRANGE', KEY.fair_waiting(tenant), place, place)[1]
      if not id then break end
      if not passed_over(id) then return id, tenant end
      place, passed = place + 1, passed + 1
      if passed >= MOST_PASSED_OVER then return nil, true end
    end
    if place == 0 then redis.call('ZREM', KEY.FAIR_TENANTS, tenant) else tenants = tenants + 1 end
  end
end

-- Books one claim, whatever it goes on to cost: before it has run nobody knows.
local function charge(tenant)
  local start = redis.call('ZSCORE', KEY.FAIR_TENANTS, tenant)
  local finish = exact(tonumber(start) + 1 / weight_of(tenant))
  redis.call('SET', KEY.FAIR_CLOCK, start)
  redis.call('ZADD', KEY.FAIR_TENANTS, 'XX', finish, tenant)
  redis.call('HSET', KEY.FAIR_SERVED, tenant, finish)
  redis.call('HINCRBY', KEY.FAIR_CLAIMS, tenant, 1)
end
