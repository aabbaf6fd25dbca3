-- What INIT has begun and RUN has not taken: a set for each node, as its sandboxes hold memory there, and one (`-`)
-- for the rollouts without a sandbox, which would fill RUN's queue in the order of arrival and so undo the fair one.

local NO_SANDBOX = '-'

local function ahead_at(place) return 'ahead:' .. place end

-- The place of which `node` and `most` say that INIT is far enough ahead there, or nil. '' = no bound.
local function full_place(node, most_on_node, most_without)
  for _, bound in ipairs({{node, most_on_node}, {NO_SANDBOX, most_without}}) do
    local most = tonumber(bound[2])
    if most and redis.call('SCARD', ahead_at(bound[1])) >= most then return bound[1] end
  end
end

local function begin_ahead(id, node)
  redis.call('SADD', ahead_at(node), id)
  redis.call('HSET', 'rollout:{' .. id .. '}', 'ahead', node)
end

-- After every change of state of one that INIT had begun. Until it is ready it counts on its node, for it may
-- be booting there.
local function move_ahead(id, to)
  local key = 'rollout:{' .. id .. '}'
  local r = redis.call('HMGET', key, 'ahead', 'node')
  if not r[1] or (to == 'ready' and r[2]) then return end
  redis.call('SREM', ahead_at(r[1]), id)
  if to == 'ready' then
    begin_ahead(id, NO_SANDBOX)
  else
    redis.call('HDEL', key, 'ahead')
  end
end
