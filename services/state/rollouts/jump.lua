-- needs: full
-- Redis' clock has jumped: what is kept as a time of it moves along, for every rollout that has not ended.
-- All reapers see a jump, some of them long after: who comes later goes on with what the first has begun, or finds it
-- done.

-- The jump that `ask` tells of, as the first to see it told it: token, ms, since; nil: its times have been moved.
local function known_jump(ask)
  -- When it jumped, by the new time. Forward: anywhere between the old time and the new parts the two.
  local jump = {token = ask.token, ms = ask.ms, since = ask.ms > 0 and now - ask.ms / 2 or now - ask.within}
  local last = redis.call('HMGET', KEY.JUMP, 'token', 'ms', 'total', 'since', 'done')
  if last[1] == ask.token then
    jump.since = tonumber(last[4])
  elseif last[1]
      and math.abs(tonumber(last[3]) - ask.known - ask.ms) < math.max(2000, math.abs(ask.ms) / 10) then
    if last[5] == '1' then return end
    jump = {token = last[1], ms = tonumber(last[2]), since = tonumber(last[4])}
  else
    redis.call('HSET', KEY.JUMP, 'token', jump.token, 'ms', jump.ms, 'since', jump.since, 'done', 0)
    redis.call('HINCRBY', KEY.JUMP, 'total', jump.ms)
  end
  return jump
end

-- One that was submitted since is right already. Where the clock went back, an old one may have been submitted at the
-- same time of it: that has changed since, at a time that is yet to come, or waits so long that it was rung for. So may
-- a new one be later: it is known for one when the jump is first seen, and keeps the token.
local function is_new(jump, created, updated, kicks)
  return tonumber(created) >= jump.since and (jump.ms > 0 or tonumber(updated) <= now and kicks == '0')
end

local function move(id, jump, longest_lease, lease)
  local key, latest = KEY.record(id), now + longest_lease
  for _, name in ipairs({'deadline', 'since', 'claimed', 'cancel', 'elsewhere_since'}) do
    local at = redis.call('HGET', key, name)
    if at then redis.call('HSET', key, name, string.format('%.0f', at + jump.ms)) end
  end
  -- Workers extend their leases by the new time. Where it went back, a dead one's must not last for ever.
  if lease and tonumber(lease) > latest then redis.call('HSET', key, 'lease', latest) end
  if tonumber(redis.call('ZSCORE', KEY.DUE, id)) > latest then redis.call('ZADD', KEY.DUE, latest, id) end
end

-- {ms, token, longest_lease, limit, within, known}: by how much; most rollouts to move now; ms, at most, since the jump;
-- ms that all jumps before it had made, as read then. Answers how many are left to be moved: call again until none is.
function operations.move(ask)
  though_full()
  local jump = known_jump(ask)
  if not jump then return 0 end
  local moved, waiting = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', KEY.DUE, 0, -1)) do
    local r = redis.call('HMGET', KEY.record(id), 'jump', 'owner', 'lease', 'created', 'updated', 'kicks')
    if r[4] and r[1] ~= jump.token then
      local new = is_new(jump, r[4], r[5], r[6])
      if not new and moved == ask.limit then
        waiting = waiting + 1
      else
        redis.call('HSET', KEY.record(id), 'jump', jump.token)
        if not new then
          move(id, jump, ask.longest_lease, r[2] and r[3])
          moved = moved + 1
        end
      end
    end
  end
  if waiting == 0 then redis.call('HSET', KEY.JUMP, 'done', 1) end
  return waiting
end
