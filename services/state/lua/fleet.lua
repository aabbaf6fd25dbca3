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
  for i = 4, #ARGV do
    redis.call('ZADD', 'workers:' .. ARGV[i], string.format('%.6f', now), ARGV[2])
    redis.call('ZREMRANGEBYSCORE', 'workers:' .. ARGV[i], '-inf', string.format('%.6f', now - tonumber(ARGV[3])))
  end
end
return redis.status_reply('OK')
