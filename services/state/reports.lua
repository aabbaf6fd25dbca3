-- What trainers report, by step. Takes `MOST_RUNS`, `MOST_REPORTS`, `MOST_RUN_BYTES`, `MOST_BYTES`, `KEEP_MS`.

local function forget_run(tenant, run)
  redis.call('DEL', KEY.reports(tenant, run))
  redis.call('HDEL', KEY.reports_bytes(tenant), run)
  redis.call('ZREM', KEY.reports_of(tenant), run)
end

-- Enters a report (`ARGV[3]`) in place of what was said of its step. Beyond the limits the first steps of the run make
-- room, and of runs the one of which nothing was said for the longest.
function operations.put(ask)
  local tenant, run, report = ask.tenant, ask.run, ARGV[3]
  local of, sizes, own = KEY.reports_of(tenant), KEY.reports_bytes(tenant), KEY.reports(tenant, run)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', of, '-inf', now - KEEP_MS)) do forget_run(tenant, old) end
  local bytes = tonumber(redis.call('HGET', sizes, run) or '0') + #report
  for _, former in ipairs(redis.call('ZRANGEBYSCORE', own, ask.step, ask.step)) do
    bytes = bytes - #former
    redis.call('ZREM', own, former)
  end
  redis.call('ZADD', own, ask.step, report)
  while bytes > MOST_RUN_BYTES or redis.call('ZCARD', own) > MOST_REPORTS do
    bytes = bytes - #redis.call('ZPOPMIN', own)[1]
  end
  redis.call('HSET', sizes, run, bytes)
  redis.call('ZADD', of, now, run)
  for _, key in ipairs({own, sizes, of}) do redis.call('PEXPIRE', key, KEEP_MS) end
  local all = 0
  for _, size in ipairs(redis.call('HVALS', sizes)) do all = all + size end
  for _, other in ipairs(redis.call('ZRANGE', of, 0, -1)) do
    if all <= MOST_BYTES and redis.call('ZCARD', of) <= MOST_RUNS then break end
    if other ~= run then
      all = all - redis.call('HGET', sizes, other)
      forget_run(tenant, other)
    end
  end
  return redis.call('ZCARD', own)
end
