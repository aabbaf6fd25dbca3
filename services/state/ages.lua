-- How old things are now (s), for /metrics; it only reads.

local IN_STAGE = {init = 'initializing', run = 'running', eval = 'evaluating'}

local function since_first(key)
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return first[2] and math.max(0, now - tonumber(first[2])) / 1000 or 0
end

-- {most, states}: most rollouts of a stage to look at; live states
function operations.ages(ask)
  local ages = {reaper_lag = since_first(KEY.DUE), leases = {}, lease_age = {}, oldest = {}}
  for stage, state in pairs(IN_STAGE) do
    local held, oldest = 0, 0
    for _, id in ipairs(redis.call('ZRANGE', KEY.by_state(state), 0, ask.most - 1)) do
      local r = redis.call('HMGET', KEY.record(id), 'owner', 'claimed', 'beat')
      if r[1] then
        held = held + 1
        oldest = math.max(oldest, now - math.max(tonumber(r[2]), tonumber(r[3] or 0)))
      end
    end
    ages.leases[stage], ages.lease_age[stage] = held, oldest / 1000
  end
  for _, state in ipairs(ask.states) do ages.oldest[state] = since_first(KEY.by_state(state)) end
  return ages
end
