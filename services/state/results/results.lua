-- needs: full results/account requests
-- Acknowledgement and retention of results.

local TERMINAL = {completed = true, failed = true, cancelled = true, timed_out = true}

-- Ids of the stream are compared by their two numbers.
local function not_after(entry, bound)
  local a, b = entry:match('^(%d+)'), bound:match('^(%d+)')
  if a ~= b then return tonumber(a) < tonumber(b) end
  return tonumber(entry:match('-(%d+)$') or 0) <= tonumber(bound:match('-(%d+)$') or 0)
end

-- Frees one trajectory and leaves a mark in the record. A live rollout is refused, whatever the account says.
local function drop(id, reason, dropped)
  local state = redis.call('HGET', KEY.record(id), 'state')
  if state and not TERMINAL[state] then
    forget_result(id)
    return
  end
  redis.call('DEL', KEY.trajectory(id))
  local acknowledged = redis.call('ZSCORE', KEY.RESULTS_ACKED, id) ~= false
  local size = forget_result(id)
  if not state then return end
  redis.call('HSET', KEY.record(id), 'trajectory_dropped', reason)
  redis.call('HDEL', KEY.record(id), 'record_bytes')
  redis.call('HINCRBY', KEY.RESULTS_TOTALS, 'dropped_' .. reason, 1)
  redis.call('HINCRBY', KEY.RESULTS_TOTALS, 'bytes_' .. reason, size)
  dropped[#dropped + 1] = {rollout_id = id, reason = reason, bytes = size, acknowledged = acknowledged}
end

-- acknowledged, already, live or unknown
local function acknowledge(id, tenant)
  local r = redis.call('HMGET', KEY.record(id), 'state', 'acked', 'tenant')
  if not r[1] or (tenant and tenant ~= r[3]) then return 'unknown' end
  if not TERMINAL[r[1]] then return 'live' end
  if r[2] then return 'already' end
  redis.call('HSET', KEY.record(id), 'acked', now)
  redis.call('HINCRBY', KEY.RESULTS_TOTALS, 'acknowledged', 1)
  if redis.call('HEXISTS', KEY.RESULTS_SIZES, id) == 1 then redis.call('ZADD', KEY.RESULTS_ACKED, now, id) end
  return 'acknowledged'
end

-- {ids, tenant}: a word for each; tenant may be missing
function operations.acknowledge(ask)
  local words = {}
  though_full()
  for i, id in ipairs(ask.ids) do words[i] = acknowledge(id, ask.tenant) end
  return words
end

-- {keep, most, limit}: ms for which acknowledged ones are kept, missing = no less than others; most bytes, 0 = any.
-- Answers what was dropped.
function operations.sweep(ask)
  local dropped = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEY.RESULTS_ENDED, '-inf', now, 'LIMIT', 0, ask.limit)) do
    -- Past its retention: Redis has deleted the record by itself.
    if redis.call('EXISTS', KEY.record(id)) == 0 then forget_result(id) end
  end
  if ask.keep then
    local archived = redis.call('GET', KEY.ARCHIVE_CURSOR)
    for _, id in ipairs(
        redis.call('ZRANGEBYSCORE', KEY.RESULTS_ACKED, '-inf', now - ask.keep, 'LIMIT', 0, ask.limit)) do
      local entry = redis.call('HGET', KEY.record(id), 'completion')
      -- What the archive has not read yet stays until it has.
      if not (archived and entry) or not_after(entry, archived) then drop(id, 'acknowledged', dropped) end
    end
  end
  if ask.most > 0 then
    for _ = 1, ask.limit do
      if tonumber(redis.call('GET', KEY.RESULTS_BYTES) or 0) <= ask.most then break end
      local id = redis.call('ZRANGE', KEY.RESULTS_ACKED, 0, 0)[1] or redis.call('ZRANGE', KEY.RESULTS_ENDED, 0, 0)[1]
      if not id then break end
      drop(id, 'size', dropped)
    end
  end
  return dropped
end

-- Takes a rollout whose record is gone out of the lists that name it.
local function forget_record(id, tenant, tags)
  if redis.call('EXISTS', KEY.record(id)) == 1 then return end  -- its retention was a longer one
  redis.call('ZREM', KEY.CREATED, id)
  redis.call('ZREM', KEY.by_tenant(tenant), id)
  for state in pairs(TERMINAL) do redis.call('ZREM', KEY.by_state(state), id) end
  for tag in tags:gmatch('[^,]+') do redis.call('ZREM', KEY.by_tag(tenant, tag), id) end
end

-- {retention, limit}, ms: forgets so many results whose records are gone, and what else names those; how many
function operations.trim(ask)
  local past, tenants = redis.call('XRANGE', KEY.RESULTS, '-', now - ask.retention - 1, 'COUNT', ask.limit), {}
  if #past == 0 then return 0 end
  though_full()
  for _, entry in ipairs(past) do
    local its = {}
    for i = 1, #entry[2], 2 do its[entry[2][i]] = entry[2][i + 1] end
    forget_record(its.id, its.tenant, its.tags)
    tenants[its.tenant] = true
  end
  for tenant in pairs(tenants) do forget_requests(tenant) end
  local millis, place = past[#past][1]:match('^(%d+)-(%d+)$')
  -- Readers compare their cursor with it, to learn that they have missed something.
  redis.call('SET', KEY.RESULTS_TRIMMED, millis)
  return redis.call('XTRIM', KEY.RESULTS, 'MINID', millis .. '-' .. place + 1)
end
