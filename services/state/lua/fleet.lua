-- What workers and hosts say of themselves, each with Redis' own time: clocks of nodes need not agree.
-- Prepended: full.lua. Silence must mean a dead worker, never a full Redis.

local op = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
though_full()

-- say <hash> <field> <json object, not empty>: kept with `at`
if op == 'say' then
  redis.call('HSET', ARGV[2], ARGV[3], string.format('{"at": %.6f, ', now) .. ARGV[4]:sub(2))

-- announce <worker> <forget after s> <stage> …
elseif op == 'announce' then
  local said = string.format('%.6f', now)
  for i = 4, #ARGV do
    local workers = 'workers:' .. ARGV[i]
    redis.call('ZADD', workers, said, ARGV[2])
    redis.call('ZREMRANGEBYSCORE', workers, '-inf', string.format('%.6f', now - tonumber(ARGV[3])))
    -- The clock went back: one that died before must not live for hours.
    for _, ahead in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. said, '+inf')) do
      redis.call('ZADD', workers, said, ahead)
    end
  end
end
return redis.status_reply('OK')
