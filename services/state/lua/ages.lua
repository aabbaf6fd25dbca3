-- How old things are now, for /metrics; it only reads. ARGV[1]: most rollouts of a stage to look at.
-- Answers {reaper's lag, then for init, run, eval: leases held, oldest heartbeat, then for each live state of ARGV
-- from 2 on: age of the oldest rollout}, in ms.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local most = tonumber(ARGV[1]) - 1

local due = redis.call('ZRANGE', 'rollouts:due', 0, 0, 'WITHSCORES')
local out = {due[2] and math.max(0, now - tonumber(due[2])) or 0}

for _, state in ipairs({'initializing', 'running', 'evaluating'}) do
  local held, oldest = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', 'rollouts:state:' .. state, 0, most)) do
    local r = redis.call('HMGET', 'rollout:{' .. id .. '}', 'owner', 'claimed', 'beat')
    if r[1] then
      held = held + 1
      oldest = math.max(oldest, now - math.max(tonumber(r[2]), tonumber(r[3] or 0)))
    end
  end
  out[#out + 1] = held
  out[#out + 1] = oldest
end

for i = 2, #ARGV do
  local first = redis.call('ZRANGE', 'rollouts:state:' .. ARGV[i], 0, 0, 'WITHSCORES')
  out[#out + 1] = first[2] and math.max(0, now - tonumber(first[2])) or 0
end
return out
