-- Times of stages, of waiting in queues and of whole rollouts, counted where they end: exact whatever becomes of
-- the worker. Likewise the rewards and turns of each handler, in thousandths, as times are in ms. `BUCKETS_MS`, upper bounds, are from observations.py. The bound is part of the field's name,
-- so that other bounds do not change the meaning of what was counted before.

local function observe(name, ms)
  local bound = 'inf'
  for _, upper in ipairs(BUCKETS_MS) do
    if ms <= upper then
      bound = upper
      break
    end
  end
  redis.call('HINCRBY', KEY.HISTOGRAMS, name .. ':' .. bound, 1)
  redis.call('HINCRBY', KEY.HISTOGRAMS, name .. ':sum', ms)
end

local function observe_number(name, number)
  observe(name, math.floor(math.max(-1e6, math.min(1e6, number)) * 1000 + 0.5))
end

-- `its`: handler, reward and metrics of a rollout that ended, as its record has them.
local function observe_score(its)
  local reward = tonumber(its.reward)
  if not reward then return end
  observe_number('reward_' .. its.handler, reward)
  local reads, metrics = pcall(cjson.decode, its.metrics or '')
  local turns = reads and type(metrics) == 'table' and tonumber(metrics.turns)
  if turns then observe_number('turns_' .. its.handler, turns) end
end
