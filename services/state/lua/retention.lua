-- Acknowledgement and retention of results. Prepended: full.lua, retention_account.lua.

local op = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local TOTALS = 'results:totals'
local TERMINAL = {completed = true, failed = true, cancelled = true, timed_out = true}

local function record(id) return 'rollout:{' .. id .. '}' end

-- Ids of the stream are compared by their two numbers.
local function not_after(one, other)
  local a, b = one:match('^(%d+)'), other:match('^(%d+)')
  if a ~= b then return tonumber(a) < tonumber(b) end
  return tonumber(one:match('-(%d+)$') or 0) <= tonumber(other:match('-(%d+)$') or 0)
end

-- Frees one trajectory and leaves a mark in the record. A live rollout is refused, whatever the account says.
local function drop(id, reason, out)
  local state = redis.call('HGET', record(id), 'state')
  if state and not TERMINAL[state] then
    forget_result(id)
    return
  end
  redis.call('DEL', record(id) .. ':trajectory')
  local acked = redis.call('ZSCORE', ACKED, id)
  local size = forget_result(id)
  if not state then return end
  redis.call('HSET', record(id), 'trajectory_dropped', reason)
  redis.call('HDEL', record(id), 'record_bytes')
  redis.call('HINCRBY', TOTALS, 'dropped_' .. reason, 1)
  redis.call('HINCRBY', TOTALS, 'bytes_' .. reason, size)
  out[#out + 1] = {id, reason, size, acked and 1 or 0}
end

-- ack <tenant or ''> <id> …: one word each: acknowledged, already, live or unknown
if op == 'ack' then
  local out = {}
  though_full()
  for i = 3, #ARGV do
    local id = ARGV[i]
    local r = redis.call('HMGET', record(id), 'state', 'acked', 'tenant')
    local word = 'acknowledged'
    if not r[1] or (ARGV[2] ~= '' and ARGV[2] ~= r[3]) then
      word = 'unknown'
    elseif not TERMINAL[r[1]] then
      word = 'live'
    elseif r[2] then
      word = 'already'
    else
      redis.call('HSET', record(id), 'acked', now)
      redis.call('HINCRBY', TOTALS, 'acknowledged', 1)
      if redis.call('HEXISTS', SIZES, id) == 1 then redis.call('ZADD', ACKED, now, id) end
    end
    out[#out + 1] = word
  end
  return out

-- sweep <keep acked ms or -1> <most bytes or 0> <limit>: what was dropped, as {id, reason, bytes, acknowledged}
elseif op == 'sweep' then
  local keep, most, limit, out = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ENDED, '-inf', now, 'LIMIT', 0, limit)) do
    -- Past its retention: Redis has deleted the record by itself.
    if redis.call('EXISTS', record(id)) == 0 then forget_result(id) end
  end
  if keep >= 0 then
    local archived = redis.call('GET', 'archive:cursor')
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', ACKED, '-inf', now - keep, 'LIMIT', 0, limit)) do
      local entry = redis.call('HGET', record(id), 'completion')
      -- What the archive has not read yet stays until it has.
      if not (archived and entry) or not_after(entry, archived) then drop(id, 'acknowledged', out) end
    end
  end
  if most > 0 then
    local left = limit
    while left > 0 and tonumber(redis.call('GET', BYTES) or 0) > most do
      local id = redis.call('ZRANGE', ACKED, 0, 0)[1] or redis.call('ZRANGE', ENDED, 0, 0)[1]
      if not id then break end
      drop(id, 'size', out)
      left = left - 1
    end
  end
  return out

-- trim <retention ms>: forget completions whose records are gone; how many
elseif op == 'trim' then
  local before = now - tonumber(ARGV[2])
  though_full()
  local oldest = redis.call('XRANGE', 'completions', '-', '+', 'COUNT', 1)[1]
  if not oldest or tonumber(oldest[1]:match('^(%d+)')) >= before then return 0 end
  -- Readers compare their cursor with it, to learn that they have missed something.
  redis.call('SET', 'completions:trimmed', before)
  return redis.call('XTRIM', 'completions', 'MINID', before)
end
return redis.error_reply('retention.lua: unknown operation ' .. tostring(op))
