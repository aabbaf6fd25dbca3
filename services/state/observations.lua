-- Times of stages, of waiting in queues and of whole rollouts, counted where they end: exact whatever becomes of
-- the worker. `BUCKETS_MS`, upper bounds, are from observations.py. The bound is part of the field's name,
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
