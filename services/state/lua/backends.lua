-- Load of the LLM backends. `backends:load` is the min-heap: member = backend, score = load of the
-- rollouts pinned to it. Never ZPOPMIN: a crash between pop and push would lose the backend.
-- A release is idempotent, because the pin says what to give back and goes away with it.

local BACKENDS, LOAD = 'backends', 'backends:load'
local CHOSEN, PINS = 'backends:chosen', 'backends:pins'

local function release_backend(id)
  local pin = redis.call('HGET', PINS, id)
  if not pin then return 0 end
  redis.call('HDEL', PINS, id)
  local backend, load = pin:match('^(%S+) (%S+)$')
  -- A backend that was removed must not come back with a negative score.
  if redis.call('ZSCORE', LOAD, backend) then
    local left = tonumber(redis.call('ZINCRBY', LOAD, '-' .. load, backend))
    if left < 0 then redis.call('ZADD', LOAD, 0, backend) end
  end
  return 1
end
