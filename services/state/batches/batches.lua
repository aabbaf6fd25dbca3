-- needs: batches/hooks requests
-- Batches: groups of rollouts, filtered, refilled and carried over.
-- A group's state: open (its rollouts are being submitted or run), undecided (all of them have ended), then one of
-- kept, filtered, failed, cancelled. What is not decided is in `batch:{B}:open`, of the batch it belongs to now.
-- Always: started + carried_in = kept + filtered + failed + cancelled + carried_out + open.

local ENDED = {done = true, exhausted = true, cancelled = true}

-- So many bytes of prompts more, or less, wait in a batch.
local function weigh_prompts(batch, bytes)
  local b = redis.call('HMGET', KEY.batch(batch), 'bytes', 'tenant')
  bytes = math.max(bytes, -tonumber(b[1] or '0'))
  if bytes == 0 then return end
  redis.call('HINCRBY', KEY.batch(batch), 'bytes', string.format('%d', bytes))
  count_bytes(b[2], bytes)
end

-- The prompts that came with an operation, and their bytes.
local function prompts_given()
  local prompts, bytes = {}, 0
  for i = 3, #ARGV do prompts[i - 2], bytes = ARGV[i], bytes + #ARGV[i] end
  return prompts, bytes
end

local function add_prompts(batch, prompts, bytes)
  weigh_prompts(batch, bytes)
  for _, prompt in ipairs(prompts) do redis.call('RPUSH', KEY.batch_prompts(batch), prompt) end
end

local function tell(batch, ...)
  redis.call('XADD', KEY.batch_events(batch), '*', ...)
  redis.call('XADD', KEY.BATCHES_EVENTS, 'MAXLEN', '~', 10000, '*', 'batch', batch)
end

local function finish(batch, state)
  redis.call('HSET', KEY.batch(batch), 'state', state, 'finished', now)
  redis.call('HINCRBY', KEY.BATCHES_TOTALS, 'ended_' .. state, 1)
  tell(batch, 'ended', state)
  batch_todo('end ' .. batch, now)
end

-- Nothing to start, nothing under way, and no prompt will come.
local function finish_if_exhausted(batch)
  local b = redis.call('HMGET', KEY.batch(batch), 'state', 'closed')
  if b[1] == 'running' and b[2] == '1' and redis.call('LLEN', KEY.batch_prompts(batch)) == 0
    and redis.call('SCARD', KEY.batch_open(batch)) == 0 then
    finish(batch, 'exhausted')
  end
end

-- {batch, digest, tenant, config, wanted, n, slots, most_open, closed, salt, most_bytes} and prompts; most_bytes, of the
-- tenant, may be missing. `word` is new, same or conflict.
function operations.create(ask)
  local batch, prompts, bytes = ask.batch, prompts_given()
  local known = redis.call('HMGET', KEY.batch(batch), 'digest', 'tenant')
  if known[1] then
    return {word = known[1] == ask.digest and known[2] == ask.tenant and 'same' or 'conflict'}
  end
  local over = over_bytes(ask.tenant, bytes, ask.most_bytes)
  if over then return {word = 'over', over = over} end
  redis.call('HSET', KEY.batch(batch), 'digest', ask.digest, 'tenant', ask.tenant, 'config', ask.config, 'wanted',
    ask.wanted, 'n', ask.n, 'slots', ask.slots, 'most_open', ask.most_open, 'closed', ask.closed and '1' or '0',
    'state', 'running', 'created', now, 'live', 0, 'next', 0, 'salt', ask.salt)
  add_prompts(batch, prompts, bytes)
  redis.call('ZADD', KEY.BATCHES, now, batch)
  redis.call('ZADD', KEY.batches_of(ask.tenant), now, batch)
  redis.call('HINCRBY', KEY.BATCHES_TOTALS, 'created', 1)
  batch_todo('fill ' .. batch, now)
  return {word = 'new'}
end

-- Undecided groups of a batch, those with most of their rollouts ended first.
local function groups_by_progress(batch)
  local groups = {}
  for _, group in ipairs(redis.call('SMEMBERS', KEY.batch_open(batch))) do
    local g = redis.call('HMGET', KEY.batch_group(group), 'ended', 'sent', 'n')
    groups[#groups + 1] = {id = group, ended = tonumber(g[1]), sent = tonumber(g[2]), n = tonumber(g[3])}
  end
  table.sort(groups, function(a, b) return a.ended > b.ended or (a.ended == b.ended and a.id < b.id) end)
  return groups
end

-- {batch, from, most}: takes over what another batch, which has ended, left undecided, at most so many groups.
function operations.adopt(ask)
  local batch, from = ask.batch, ask.from
  for moved, group in ipairs(groups_by_progress(from)) do
    if moved > ask.most then break end
    local running = group.sent - group.ended
    redis.call('SMOVE', KEY.batch_open(from), KEY.batch_open(batch), group.id)
    redis.call('HSET', KEY.batch_group(group.id), 'batch', batch, 'carried', '1')
    redis.call('PERSIST', KEY.batch_group(group.id))
    if running > 0 then  -- of no rollouts it would be '-0', which is no integer for Redis
      redis.call('HINCRBY', KEY.batch(from), 'live', -running)
      redis.call('HINCRBY', KEY.batch(batch), 'live', running)
    end
    redis.call('HINCRBY', KEY.batch(from), 'carried_out', 1)
    redis.call('HINCRBY', KEY.batch(batch), 'carried_in', 1)
    redis.call('HINCRBY', KEY.BATCHES_TOTALS, 'carried', 1)
    if redis.call('LREM', KEY.batch_partial(from), 0, group.id) == 1 then
      redis.call('RPUSH', KEY.batch_partial(batch), group.id)
    end
    if group.ended == group.n then batch_todo('decide ' .. group.id, now) end
  end
  -- Prompts that were never started go on, too, before the new ones.
  while true do
    local prompt = redis.call('RPOP', KEY.batch_prompts(from))
    if not prompt then break end
    redis.call('LPUSH', KEY.batch_prompts(batch), prompt)
    weigh_prompts(from, -#prompt)
    weigh_prompts(batch, #prompt)
  end
  batch_todo('fill ' .. batch, now)
end

-- {batch, closed, part, most_bytes} and prompts; all but the batch may be missing. A part comes once. `word` is ok, with
-- the number of prompts that wait, or says why not.
function operations.extend(ask)
  local batch, prompts, bytes = ask.batch, prompts_given()
  local b = redis.call('HMGET', KEY.batch(batch), 'state', 'closed', 'tenant')
  if not b[1] then return {word = 'gone'} end
  if ENDED[b[1]] then return {word = b[1]} end
  if not ask.part or redis.call('SISMEMBER', KEY.batch_parts(batch), ask.part) == 0 then
    if #prompts > 0 and b[2] == '1' then return {word = 'closed'} end
    local over = over_bytes(b[3], bytes, ask.most_bytes)
    if over then return {word = 'over', over = over} end
    if ask.part then redis.call('SADD', KEY.batch_parts(batch), ask.part) end
    add_prompts(batch, prompts, bytes)
  end
  if ask.closed ~= nil then redis.call('HSET', KEY.batch(batch), 'closed', ask.closed and '1' or '0') end
  finish_if_exhausted(batch)
  batch_todo('fill ' .. batch, now)
  return {word = 'ok', waiting = redis.call('LLEN', KEY.batch_prompts(batch))}
end

-- {batch, paused}
function operations.pause(ask)
  if redis.call('EXISTS', KEY.batch(ask.batch)) == 0 then return end
  redis.call('HSET', KEY.batch(ask.batch), 'paused', ask.paused and '1' or '0')
  if not ask.paused then batch_todo('fill ' .. ask.batch, now) end
end

function operations.cancel(ask)
  local batch = ask.batch
  local state = redis.call('HGET', KEY.batch(batch), 'state')
  if not state then return end
  redis.call('HSET', KEY.batch(batch), 'carry', 'none')
  if ENDED[state] then
    batch_todo('end ' .. batch, now)  -- what it had left to be carried over
    return
  end
  redis.call('DEL', KEY.batch_prompts(batch))
  weigh_prompts(batch, -math.huge)
  finish(batch, 'cancelled')
end

-- The group whose next members are to be submitted: one that has begun, or a new one while `most_open` allows it.
local function next_group(batch, most_open, n, salt)
  local group = redis.call('LINDEX', KEY.batch_partial(batch), 0)
  if group or redis.call('SCARD', KEY.batch_open(batch)) >= most_open then return group end
  local prompt = redis.call('LPOP', KEY.batch_prompts(batch))
  if not prompt then return end
  weigh_prompts(batch, -#prompt)
  group = batch .. '.' .. redis.call('HINCRBY', KEY.batch(batch), 'next', 1) .. salt
  redis.call('HSET', KEY.batch_group(group), 'batch', batch, 'state', 'open', 'size', n, 'n', n, 'sent', 0, 'ended', 0,
    'request', prompt)
  redis.call('SADD', KEY.batch_open(batch), group)
  redis.call('RPUSH', KEY.batch_partial(batch), group)
  redis.call('HINCRBY', KEY.batch(batch), 'started', 1)
  return group
end

-- {batch, limit, lease}: pieces of groups to submit. Each is marked as sent, and somebody else submits it should the
-- caller die. A group may be sent piece by piece: so no slot stays free until as many are free as a group has members.
function operations.fill(ask)
  local batch, pieces = ask.batch, {}
  local b = redis.call('HMGET', KEY.batch(batch), 'state', 'paused', 'slots', 'most_open', 'wanted', 'kept', 'n', 'salt')
  if b[1] ~= 'running' or b[2] == '1' then return pieces end
  local missing = tonumber(b[5]) - tonumber(b[6] or '0')
  local most_open = math.min(tonumber(b[4]), math.ceil(missing * tonumber(b[4]) / tonumber(b[5])))
  for _ = 1, ask.limit do
    local free = tonumber(b[3]) - tonumber(redis.call('HGET', KEY.batch(batch), 'live'))
    local group = free > 0 and next_group(batch, most_open, b[7], b[8])
    if not group then break end
    local g = redis.call('HMGET', KEY.batch_group(group), 'n', 'sent', 'request', 'size')
    local n, first = tonumber(g[1]), tonumber(g[2])
    local count = math.min(free, n - first)
    if first + count == n then redis.call('LPOP', KEY.batch_partial(batch)) end
    redis.call('HSET', KEY.batch_group(group), 'sent', first + count)
    redis.call('HINCRBY', KEY.batch(batch), 'live', count)
    redis.call('ZADD', KEY.BATCHES_TODO, now + ask.lease, 'start ' .. group .. ' ' .. first .. ' ' .. count)
    pieces[#pieces + 1] = {group_id = group, first = first, count = count, size = tonumber(g[4]), prompt = g[3]}
  end
  if #pieces == 0 then finish_if_exhausted(batch) end
  return pieces
end

-- {group, first, count}: this piece of it is submitted. Each has a note of its own: the caller with another piece may
-- have died before it submitted that. Answers whether the batch has ended.
function operations.started(ask)
  redis.call('ZREM', KEY.BATCHES_TODO, 'start ' .. ask.group .. ' ' .. ask.first .. ' ' .. ask.count)
  local batch = redis.call('HGET', KEY.batch_group(ask.group), 'batch')
  return batch and ENDED[redis.call('HGET', KEY.batch(batch), 'state')] or false
end

-- {group}: what of it was not submitted never will be
function operations.cut(ask)
  local key = KEY.batch_group(ask.group)
  local g = redis.call('HMGET', key, 'batch', 'state', 'sent', 'ended')
  if g[2] ~= 'open' then return end
  redis.call('LREM', KEY.batch_partial(g[1]), 0, ask.group)
  redis.call('HSET', key, 'n', g[3])
  if g[3] == g[4] then
    redis.call('HSET', key, 'state', 'undecided')
    batch_todo('decide ' .. ask.group, now)
  end
end

-- Filters are anybody's, and so are their reasons: of many different ones a metric says nothing.
local function count_reason(reason)
  local name = 'reason_' .. reason
  if redis.call('HEXISTS', KEY.BATCHES_TOTALS, name) == 0 and redis.call('HLEN', KEY.BATCHES_TOTALS) > 100 then
    name = 'reason_other'
  end
  redis.call('HINCRBY', KEY.BATCHES_TOTALS, name, 1)
end

-- {group, verdict, reason, scored, dropped, retention}: the state of the group, and that of its batch
function operations.decide(ask)
  local key, verdict = KEY.batch_group(ask.group), ask.verdict
  local g = redis.call('HMGET', key, 'state', 'batch')
  if g[1] ~= 'undecided' then return {group = g[1] or 'gone', batch = ''} end
  local batch = g[2]
  local b = redis.call('HMGET', KEY.batch(batch), 'state', 'wanted', 'kept')
  -- Whatever it is worth, its batch needs it no more: it stays for the next one, or was cancelled with its batch.
  if ENDED[b[1]] and verdict ~= 'cancelled' then return {group = 'undecided', batch = b[1]} end
  redis.call('HSET', key, 'state', verdict, 'reason', ask.reason, 'decided', now)
  -- Its rollouts ended before it was decided, so it is there for as long as they are.
  redis.call('PEXPIRE', key, ask.retention)
  redis.call('SREM', KEY.batch_open(batch), ask.group)
  redis.call('HINCRBY', KEY.batch(batch), verdict, 1)
  redis.call('HINCRBY', KEY.batch(batch), 'rollouts_scored', ask.scored)
  redis.call('HINCRBY', KEY.batch(batch), 'rollouts_dropped', ask.dropped)
  redis.call('HINCRBY', KEY.BATCHES_TOTALS, verdict, 1)
  if ask.reason ~= '' then
    redis.call('HINCRBY', KEY.batch(batch), 'reason:' .. ask.reason, 1)
    count_reason(ask.reason)
  end
  tell(batch, 'group', ask.group, 'verdict', verdict, 'reason', ask.reason)
  if verdict == 'kept' and tonumber(b[3] or '0') + 1 >= tonumber(b[2]) then
    finish(batch, 'done')
  else
    finish_if_exhausted(batch)
    if b[1] == 'running' then batch_todo('fill ' .. batch, now) end
  end
  return {group = verdict, batch = redis.call('HGET', KEY.batch(batch), 'state')}
end

-- {limit, lease}: things to do. Each is the caller's until its lease is over.
function operations.take(ask)
  local todo = {}
  for i, what in ipairs(redis.call('ZRANGEBYSCORE', KEY.BATCHES_TODO, '-inf', now, 'LIMIT', 0, ask.limit)) do
    -- A millisecond's fraction tells this lease from one that another call wrote in the meantime.
    redis.call('ZADD', KEY.BATCHES_TODO, string.format('%.3f', now + ask.lease + 2 * (i - 1) % 997 / 1000), what)
    todo[i] = {what = what, token = redis.call('ZSCORE', KEY.BATCHES_TODO, what)}
  end
  return todo
end

-- {what, token}: done with it, unless it was asked for again meanwhile
function operations.through(ask)
  if redis.call('ZSCORE', KEY.BATCHES_TODO, ask.what) == ask.token then
    redis.call('ZREM', KEY.BATCHES_TODO, ask.what)
  end
end

-- {what, delay}
function operations.later(ask) redis.call('ZADD', KEY.BATCHES_TODO, now + ask.delay, ask.what) end

-- {batch, groups, retention}: a batch that has ended, with what it left
function operations.expire(ask)
  local batch = ask.batch
  weigh_prompts(batch, -math.huge)
  for _, key in ipairs({KEY.batch(batch), KEY.batch_open(batch), KEY.batch_prompts(batch), KEY.batch_partial(batch),
    KEY.batch_parts(batch), KEY.batch_events(batch)}) do
    redis.call('PEXPIRE', key, ask.retention)
  end
  for _, group in ipairs(ask.groups) do redis.call('PEXPIRE', KEY.batch_group(group), ask.retention) end
end
