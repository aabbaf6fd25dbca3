-- What INIT has begun and RUN has not taken: a set for each node, as its sandboxes hold memory there, and one (`-`)
-- for the rollouts without a sandbox, which would fill RUN's queue in the order of arrival and so undo the fair one.

-- Whether INIT is far enough ahead in a place; without a bound it never is.
local function is_full(place, most) return most and redis.call('SCARD', KEY.ahead(place)) >= most end

local function begin_ahead(id, node)
  redis.call('SADD', KEY.ahead(node), id)
  redis.call('HSET', KEY.record(id), 'ahead', node)
end

-- After every change of state of one that INIT had begun. Until it is ready it counts on its node, for it may
-- be booting there.
local function move_ahead(id, to)
  local key = KEY.record(id)
  local r = redis.call('HMGET', key, 'ahead', 'node')
  if not r[1] or (to == 'ready' and r[2]) then return end
  redis.call('SREM', KEY.ahead(r[1]), id)
  if to == 'ready' then
    begin_ahead(id, KEY.NO_SANDBOX)
  else
    redis.call('HDEL', key, 'ahead')
  end
end
