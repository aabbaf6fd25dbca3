-- Batches: groups of rollouts, filtered, refilled and carried over. Prepended: batch_hooks.lua
-- and requests.lua.
-- A group's state: open (its rollouts are being submitted or run), undecided (all of them have ended), then one of
-- kept, filtered, failed, cancelled. What is not decided is in `batch:{B}:open`, of the batch it belongs to now.
-- Always: started + carried_in = kept + filtered + failed + cancelled + carried_out + open.

local op = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local ENDED = {done = true, exhausted = true, cancelled = true}
local DECIDED = {kept = true, filtered = true, failed = true, cancelled = true}

local function open_of(batch) return batch_key(batch) .. ':open' end
local function prompts_of(batch) return batch_key(batch) .. ':prompts' end
-- Groups of which some rollouts have not been submitted for want of slots.
local function partial_of(batch) return batch_key(batch) .. ':partial' end
local function parts_of(batch) return batch_key(batch) .. ':parts' end
local function events_of(batch) return batch_key(batch) .. ':events' end

-- So many bytes of prompts more, or less, wait in a batch.
local function weigh_prompts(batch, bytes)
  local b = redis.call('HMGET', batch_key(batch), 'bytes', 'tenant')
  bytes = math.max(bytes, -tonumber(b[1] or '0'))
  if bytes == 0 then return end
  redis.call('HINCRBY', batch_key(batch), 'bytes', string.format('%d', bytes))
  count_bytes(b[2], bytes)
end

local function weight_of_prompts(from)
  local bytes = 0
  for i = from, #ARGV do bytes = bytes + #ARGV[i] end
  return bytes
end

local function tell(batch, ...)
  redis.call('XADD', events_of(batch), '*', ...)
  redis.call('XADD', 'batches:events', 'MAXLEN', '~', 10000, '*', 'batch', batch)
end

local function finish(batch, state)
  redis.call('HSET', batch_key(batch), 'state', state, 'finished', now)
  redis.call('HINCRBY', 'batches:totals', 'ended_' .. state, 1)
  tell(batch, 'ended', state)
  batch_todo('end ' .. batch, now)
end

-- Nothing to start, nothing under way, and no prompt will come.
local function finish_if_exhausted(batch)
  local b = redis.call('HMGET', batch_key(batch), 'state', 'closed')
  if b[1] == 'running' and b[2] == '1' and redis.call('LLEN', prompts_of(batch)) == 0
    and redis.call('SCARD', open_of(batch)) == 0 then
    finish(batch, 'exhausted')
  end
end

-- create <id> <digest> <tenant> <config> <wanted> <n> <slots> <most open> <closed> <end of its groups' ids>
-- <most bytes of the tenant or ''> <prompt>...
if op == 'create' then
  local batch = ARGV[2]
  local key = batch_key(batch)
  local known = redis.call('HMGET', key, 'digest', 'tenant')
  if known[1] then return (known[1] == ARGV[3] and known[2] == ARGV[4]) and 'same' or 'conflict' end
  local over = over_bytes(ARGV[4], weight_of_prompts(13), tonumber(ARGV[12]), now)
  if over then return over end
  redis.call('HSET', key, 'digest', ARGV[3], 'tenant', ARGV[4], 'config', ARGV[5], 'wanted', ARGV[6], 'n', ARGV[7],
    'slots', ARGV[8], 'most_open', ARGV[9], 'closed', ARGV[10], 'state', 'running', 'created', now, 'live', 0,
    'next', 0, 'salt', ARGV[11])
  weigh_prompts(batch, weight_of_prompts(13))
  for i = 13, #ARGV do redis.call('RPUSH', prompts_of(batch), ARGV[i]) end
  redis.call('ZADD', 'batches', now, batch)
  redis.call('ZADD', 'batches:tenant:' .. ARGV[4], now, batch)
  redis.call('HINCRBY', 'batches:totals', 'created', 1)
  batch_todo('fill ' .. batch, now)
  return 'new'

-- adopt <id> <from> <most>: takes over what another batch, which has ended, left undecided: those with most of their
-- rollouts ended first, at most so many. Answers how many.
elseif op == 'adopt' then
  local batch, from, most, moved = ARGV[2], ARGV[3], tonumber(ARGV[4]), 0
  local found = {}
  for _, group in ipairs(redis.call('SMEMBERS', open_of(from))) do
    local g = redis.call('HMGET', batch_group_key(group), 'ended', 'sent', 'n')
    found[#found + 1] = {group, tonumber(g[1]), tonumber(g[2]), tonumber(g[3])}
  end
  table.sort(found, function(a, b) return a[2] > b[2] or (a[2] == b[2] and a[1] < b[1]) end)
  for _, one in ipairs(found) do
    if moved == most then break end
    local group, running = one[1], one[3] - one[2]
    redis.call('SMOVE', open_of(from), open_of(batch), group)
    redis.call('HSET', batch_group_key(group), 'batch', batch, 'carried', '1')
    redis.call('PERSIST', batch_group_key(group))
    if running > 0 then  -- of no rollouts it would be '-0', which is no integer for Redis
      redis.call('HINCRBY', batch_key(from), 'live', -running)
      redis.call('HINCRBY', batch_key(batch), 'live', running)
    end
    redis.call('HINCRBY', batch_key(from), 'carried_out', 1)
    redis.call('HINCRBY', batch_key(batch), 'carried_in', 1)
    redis.call('HINCRBY', 'batches:totals', 'carried', 1)
    if redis.call('LREM', partial_of(from), 0, group) == 1 then redis.call('RPUSH', partial_of(batch), group) end
    if one[2] == one[4] then batch_todo('decide ' .. group, now) end
    moved = moved + 1
  end
  -- Prompts that were never started go on, too, before the new ones.
  while true do
    local prompt = redis.call('RPOP', prompts_of(from))
    if not prompt then break end
    redis.call('LPUSH', prompts_of(batch), prompt)
    weigh_prompts(from, -#prompt)
    weigh_prompts(batch, #prompt)
  end
  batch_todo('fill ' .. batch, now)
  return moved

-- extend <id> <closed or ''> <part or ''> <most bytes of the tenant or ''> <prompt>...: {state, prompts that wait}.
-- A part comes once.
elseif op == 'extend' then
  local batch = ARGV[2]
  local state = redis.call('HGET', batch_key(batch), 'state')
  if not state then return {'gone', 0} end
  if ENDED[state] then return {state, 0} end
  if ARGV[4] == '' or redis.call('SISMEMBER', parts_of(batch), ARGV[4]) == 0 then
    local b = redis.call('HMGET', batch_key(batch), 'closed', 'tenant')
    if #ARGV > 5 and b[1] == '1' then return {'closed', 0} end
    local over = over_bytes(b[2], weight_of_prompts(6), tonumber(ARGV[5]), now)
    if over then return over end
    if ARGV[4] ~= '' then redis.call('SADD', parts_of(batch), ARGV[4]) end
    weigh_prompts(batch, weight_of_prompts(6))
    for i = 6, #ARGV do redis.call('RPUSH', prompts_of(batch), ARGV[i]) end
  end
  if ARGV[3] ~= '' then redis.call('HSET', batch_key(batch), 'closed', ARGV[3]) end
  finish_if_exhausted(batch)
  batch_todo('fill ' .. batch, now)
  return {'ok', redis.call('LLEN', prompts_of(batch))}

-- pause <id> <0 or 1>
elseif op == 'pause' then
  local state = redis.call('HGET', batch_key(ARGV[2]), 'state')
  if not state then return 'gone' end
  redis.call('HSET', batch_key(ARGV[2]), 'paused', ARGV[3])
  if ARGV[3] == '0' then batch_todo('fill ' .. ARGV[2], now) end
  return state

-- cancel <id>
elseif op == 'cancel' then
  local state = redis.call('HGET', batch_key(ARGV[2]), 'state')
  if not state then return 'gone' end
  redis.call('HSET', batch_key(ARGV[2]), 'carry', 'none')
  if ENDED[state] then
    batch_todo('end ' .. ARGV[2], now)  -- what it had left to be carried over
    return state
  end
  redis.call('DEL', prompts_of(ARGV[2]))
  weigh_prompts(ARGV[2], -math.huge)
  finish(ARGV[2], 'cancelled')
  return 'cancelled'

-- fill <id> <limit> <lease ms>: what to submit, as group, first member, number of members, size, prompt. It is marked
-- as sent, and somebody else submits it should the caller die. A group may be sent piece by piece: so no slot
-- stays free until as many are free as a group has members.
elseif op == 'fill' then
  local batch, out = ARGV[2], {}
  local key = batch_key(batch)
  local b = redis.call('HMGET', key, 'state', 'paused', 'slots', 'most_open', 'wanted', 'kept', 'n', 'salt')
  if b[1] ~= 'running' or b[2] == '1' then return out end
  local missing = tonumber(b[5]) - tonumber(b[6] or '0')
  local most_open = math.min(tonumber(b[4]), math.ceil(missing * tonumber(b[4]) / tonumber(b[5])))
  local n, slots = tonumber(b[7]), tonumber(b[3])
  for _ = 1, tonumber(ARGV[3]) do
    local free = slots - tonumber(redis.call('HGET', key, 'live'))
    if free <= 0 then break end
    local group = redis.call('LINDEX', partial_of(batch), 0)
    if not group then
      if redis.call('SCARD', open_of(batch)) >= most_open then break end
      local prompt = redis.call('LPOP', prompts_of(batch))
      if not prompt then break end
      weigh_prompts(batch, -#prompt)
      group = batch .. '.' .. redis.call('HINCRBY', key, 'next', 1) .. (b[8] or '')
      redis.call('HSET', batch_group_key(group), 'batch', batch, 'state', 'open', 'size', n, 'n', n, 'sent', 0, 'ended', 0,
        'request', prompt)
      redis.call('SADD', open_of(batch), group)
      redis.call('RPUSH', partial_of(batch), group)
      redis.call('HINCRBY', key, 'started', 1)
    end
    local g = redis.call('HMGET', batch_group_key(group), 'n', 'sent', 'request', 'size')
    local first = tonumber(g[2])
    local count = math.min(free, tonumber(g[1]) - first)
    if first + count == tonumber(g[1]) then redis.call('LPOP', partial_of(batch)) end
    redis.call('HSET', batch_group_key(group), 'sent', first + count)
    redis.call('HINCRBY', key, 'live', count)
    redis.call('ZADD', 'batches:todo', now + tonumber(ARGV[4]), 'start ' .. group .. ' ' .. first .. ' ' .. count)
    for _, value in ipairs({group, first, count, g[4], g[3]}) do out[#out + 1] = value end
  end
  if #out == 0 then finish_if_exhausted(batch) end
  return out

-- started <group> <first> <count>: this piece of it is submitted. Each has a note of its own: the caller with another
-- piece may have died before it submitted that. Answers 1 if the batch has ended.
elseif op == 'started' then
  redis.call('ZREM', 'batches:todo', 'start ' .. ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
  local batch = redis.call('HGET', batch_group_key(ARGV[2]), 'batch')
  return (batch and ENDED[redis.call('HGET', batch_key(batch), 'state')]) and 1 or 0

-- cut <group>: what of it was not submitted never will be
elseif op == 'cut' then
  local key = batch_group_key(ARGV[2])
  local g = redis.call('HMGET', key, 'batch', 'state', 'sent', 'ended')
  if g[2] ~= 'open' then return 0 end
  redis.call('LREM', partial_of(g[1]), 0, ARGV[2])
  redis.call('HSET', key, 'n', g[3])
  if g[3] == g[4] then
    redis.call('HSET', key, 'state', 'undecided')
    batch_todo('decide ' .. ARGV[2], now)
  end
  return 1

-- decide <group> <verdict> <reason> <scored> <dropped> <retention ms>: the state of the group, and that of its batch
elseif op == 'decide' then
  local group, verdict = ARGV[2], ARGV[3]
  local key = batch_group_key(group)
  local g = redis.call('HMGET', key, 'state', 'batch')
  if g[1] ~= 'undecided' then return {g[1] or 'gone', ''} end
  local batch = g[2]
  local b = redis.call('HMGET', batch_key(batch), 'state', 'wanted', 'kept')
  -- Whatever it is worth, its batch needs it no more: it stays for the next one, or was cancelled with its batch.
  if ENDED[b[1]] and verdict ~= 'cancelled' then return {'undecided', b[1]} end
  redis.call('HSET', key, 'state', verdict, 'reason', ARGV[4], 'decided', now)
  -- Its rollouts ended before it was decided, so it is there for as long as they are.
  redis.call('PEXPIRE', key, ARGV[7])
  redis.call('SREM', open_of(batch), group)
  redis.call('HINCRBY', batch_key(batch), verdict, 1)
  redis.call('HINCRBY', batch_key(batch), 'rollouts_scored', ARGV[5])
  redis.call('HINCRBY', batch_key(batch), 'rollouts_dropped', ARGV[6])
  redis.call('HINCRBY', 'batches:totals', verdict, 1)
  if ARGV[4] ~= '' then
    redis.call('HINCRBY', batch_key(batch), 'reason:' .. ARGV[4], 1)
    -- Filters are anybody's, and so are their reasons: of many different ones a metric says nothing.
    local name = 'reason_' .. ARGV[4]
    if redis.call('HEXISTS', 'batches:totals', name) == 0 and redis.call('HLEN', 'batches:totals') > 100 then
      name = 'reason_other'
    end
    redis.call('HINCRBY', 'batches:totals', name, 1)
  end
  tell(batch, 'group', group, 'verdict', verdict, 'reason', ARGV[4])
  if verdict == 'kept' and tonumber(b[3] or '0') + 1 >= tonumber(b[2]) then
    finish(batch, 'done')
  else
    finish_if_exhausted(batch)
    if b[1] == 'running' then batch_todo('fill ' .. batch, now) end
  end
  return {verdict, redis.call('HGET', batch_key(batch), 'state')}

-- take <limit> <lease ms>: things to do, as thing, token pairs. Each is the caller's until its lease is over.
elseif op == 'take' then
  local out = {}
  for _, what in ipairs(redis.call('ZRANGEBYSCORE', 'batches:todo', '-inf', now, 'LIMIT', 0, ARGV[2])) do
    -- A millisecond's fraction tells this lease from one that another call wrote in the meantime.
    local token = string.format('%.3f', now + tonumber(ARGV[3]) + (#out % 997) / 1000)
    redis.call('ZADD', 'batches:todo', token, what)
    out[#out + 1] = what
    out[#out + 1] = redis.call('ZSCORE', 'batches:todo', what)
  end
  return out

-- through <thing> <token>: done with it, unless it was asked for again meanwhile
elseif op == 'through' then
  if redis.call('ZSCORE', 'batches:todo', ARGV[2]) == ARGV[3] then return redis.call('ZREM', 'batches:todo', ARGV[2]) end
  return 0

-- later <thing> <delay ms>
elseif op == 'later' then
  return redis.call('ZADD', 'batches:todo', now + tonumber(ARGV[3]), ARGV[2])

-- expire <id> <retention ms> <group>...: a batch that has ended, with what it left
elseif op == 'expire' then
  local batch = ARGV[2]
  weigh_prompts(batch, -math.huge)
  for _, key in ipairs({batch_key(batch), open_of(batch), prompts_of(batch), partial_of(batch),
    parts_of(batch), events_of(batch)}) do
    redis.call('PEXPIRE', key, ARGV[3])
  end
  return 1
end
return redis.error_reply('batches.lua: unknown operation ' .. tostring(op))
