-- needs: full
-- What workers and hosts say of themselves, each with Redis' own time: clocks of nodes need not agree.
-- Silence must mean a dead worker, never a full Redis.

local seconds = string.format('%.6f', clock[1] + clock[2] / 1000000)
though_full()

-- {place, name, fields}: a JSON object, kept with the time as its `at`
function operations.say(ask)
  redis.call('HSET', ask.place, ask.name, '{"at": ' .. seconds .. ', ' .. ask.fields:sub(2))
end

-- {worker, forget_s, stages}
function operations.announce(ask)
  local long_ago = string.format('%.6f', tonumber(seconds) - ask.forget_s)
  for _, stage in ipairs(ask.stages) do
    local workers = KEY.workers(stage)
    redis.call('ZADD', workers, seconds, ask.worker)
    for _, dead in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', long_ago)) do
      -- It may live in another stage, started again by that name.
      local spoke = (redis.call('HGET', KEY.FLEET_SLOTS, dead) or ''):match('^{"at": ([%d.]+)')
      if not spoke or tonumber(spoke) < tonumber(long_ago) then redis.call('HDEL', KEY.FLEET_SLOTS, dead) end
    end
    redis.call('ZREMRANGEBYSCORE', workers, '-inf', long_ago)
    -- The clock went back: one that died before must not live for hours.
    for _, ahead in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. seconds, '+inf')) do
      redis.call('ZADD', workers, seconds, ahead)
    end
  end
end
