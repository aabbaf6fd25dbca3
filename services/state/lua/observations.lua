-- Times of stages, of waiting in queues and of whole rollouts, counted where they end: exact whatever becomes of
-- the worker. Prepended: `BUCKETS`, upper bounds in ms, from observations.py. The bound is part of the field's
-- name, so that other bounds in a later release do not change the meaning of what was counted before.

local function observe(name, ms)
  local bound = 'inf'
  for _, upper in ipairs(BUCKETS) do
    if ms <= upper then
      bound = upper
      break
    end
  end
  redis.call('HINCRBY', 'rollouts:histograms', name .. ':' .. bound, 1)
  redis.call('HINCRBY', 'rollouts:histograms', name .. ':sum', ms)
end
