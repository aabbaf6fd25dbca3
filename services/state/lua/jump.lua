-- Redis' clock has jumped: what is kept as a time of it moves along, for every rollout that has not ended.
-- ARGV: <ms> <token> <longest lease ms> <limit> <ms, at most, since the jump> <ms that all jumps before it had made, as
-- read then>. Answers how many are left to be moved; call again until none is.
-- Prepended: full.lua. All reapers see a jump, some of them long after: who comes later goes on with what the first has
-- begun, or finds it done.

local ms, token, longest, limit = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
though_full()

local JUMP = 'rollouts:jump'
-- When it jumped, by the new time. Forward: anywhere between the old time and the new parts the two.
local since = ms > 0 and now - ms / 2 or now - tonumber(ARGV[5])
local last = redis.call('HMGET', JUMP, 'token', 'ms', 'total', 'since', 'done')
if last[1] == token then
  since = tonumber(last[4])
elseif last[1] and math.abs(tonumber(last[3]) - tonumber(ARGV[6]) - ms) < math.max(2000, math.abs(ms) / 10) then
  if last[5] == '1' then return 0 end
  token, ms, since = last[1], tonumber(last[2]), tonumber(last[4])
else
  redis.call('HSET', JUMP, 'token', token, 'ms', ms, 'since', since, 'done', 0)
  redis.call('HINCRBY', JUMP, 'total', ms)
end

-- One that was submitted since is right already. Where the clock went back, an old one may have been submitted at the
-- same time of it: that has changed since, at a time that is yet to come, or waits so long that it was rung for. So may
-- a new one be later: it is known for one when the jump is first seen, and keeps the token.
local function is_new(created, updated, kicks)
  return tonumber(created) >= since and (ms > 0 or tonumber(updated) <= now and kicks == '0')
end

local left = 0
for _, id in ipairs(redis.call('ZRANGE', 'rollouts:due', 0, -1)) do
  local key = 'rollout:{' .. id .. '}'
  local r = redis.call('HMGET', key, 'jump', 'owner', 'lease', 'created', 'updated', 'kicks')
  if r[4] and r[1] ~= token and is_new(r[4], r[5], r[6]) then
    redis.call('HSET', key, 'jump', token)
  elseif r[4] and r[1] ~= token then
    if limit == 0 then
      left = left + 1
    else
      limit = limit - 1
      redis.call('HSET', key, 'jump', token)
      for _, name in ipairs({'deadline', 'since', 'claimed', 'cancel', 'elsewhere_since'}) do
        local at = redis.call('HGET', key, name)
        if at then redis.call('HSET', key, name, string.format('%.0f', at + ms)) end
      end
      -- Workers extend their leases by the new time. Where it went back, a dead one's must not last for ever.
      if r[2] and tonumber(r[3]) > now + longest then redis.call('HSET', key, 'lease', now + longest) end
      if tonumber(redis.call('ZSCORE', 'rollouts:due', id)) > now + longest then
        redis.call('ZADD', 'rollouts:due', now + longest, id)
      end
    end
  end
end
if left == 0 then redis.call('HSET', JUMP, 'done', 1) end
return left
