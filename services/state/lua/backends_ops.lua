-- ARGV: acquire <rollout> <load> <version or ''> <excluded, comma separated> | release <rollout>
--       | remove <backend>
local op, id = ARGV[1], ARGV[2]
if op == 'release' then return release_backend(id) end
if op == 'remove' then
  -- Its pins go with it: released later, they would be taken off a backend added again by that name.
  local pins = redis.call('HGETALL', PINS)
  for i = 1, #pins, 2 do
    if pins[i + 1]:match('^(%S+)') == id then redis.call('HDEL', PINS, pins[i]) end
  end
  redis.call('ZREM', LOAD, id)
  redis.call('HDEL', CHOSEN, id)
  return redis.call('HDEL', BACKENDS, id)
end

local load, version, excluded = ARGV[3], ARGV[4], ',' .. ARGV[5] .. ','

local function usable(raw, backend)
  if not raw or excluded:find(',' .. backend .. ',', 1, true) then return false end
  local info = cjson.decode(raw)
  if info.draining then return false end
  return version == '' or info.policy_version == version
end

local pin = redis.call('HGET', PINS, id)
if pin then
  local backend = pin:match('^(%S+)')
  local raw = redis.call('HGET', BACKENDS, backend)
  -- A pin outlives draining: the prefix cache is there, and draining means "no new rollouts".
  if raw and not excluded:find(',' .. backend .. ',', 1, true) then return raw end
  release_backend(id)
end

local heap = redis.call('ZRANGE', LOAD, 0, -1, 'WITHSCORES')
local best, best_score, best_chosen
for i = 1, #heap, 2 do
  local backend, score = heap[i], tonumber(heap[i + 1])
  if best and score > best_score then break end
  if usable(redis.call('HGET', BACKENDS, backend), backend) then
    local chosen = tonumber(redis.call('HGET', CHOSEN, backend) or '0')
    -- Equal scores break ties by name, which would pin everything to one backend at the start.
    if not best or chosen < best_chosen then best, best_score, best_chosen = backend, score, chosen end
  end
end
if not best then return false end
redis.call('ZINCRBY', LOAD, load, best)
redis.call('HSET', PINS, id, best .. ' ' .. load)
redis.call('HSET', CHOSEN, best, redis.call('HINCRBY', CHOSEN, '', 1))
return redis.call('HGET', BACKENDS, best)
