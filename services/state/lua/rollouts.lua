-- The life of a rollout: the only code that writes a state. Prepended: `ALLOWED` (the transition
-- table of rollouts.py) and backends.lua (a rollout that ends gives its backend's load back).
-- Times are milliseconds of Redis' own clock, so that nodes need not agree on theirs.

local op = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local TERMINAL = {completed = true, failed = true, cancelled = true, timed_out = true}
local WAITS_FOR = {queued = 'init', ready = 'run', evaluating = 'eval'}
local ENTERS = {init = 'initializing', run = 'running', eval = 'evaluating'}

local function record(id) return 'rollout:{' .. id .. '}' end

local function get(id, ...) return redis.call('HMGET', record(id), ...) end

-- To be asked before anything is written: an error does not undo what a script has written already.
local function require_transition(id, from, to)
  if not (ALLOWED[from] and ALLOWED[from][to]) then
    error('rollout ' .. id .. ': no transition from ' .. from .. ' to ' .. to)
  end
end

-- Moves a rollout from `from` to `to` and tells everybody who keeps count.
local function set_state(id, from, to, created, attempt, fence, owner)
  require_transition(id, from, to)
  redis.call('HSET', record(id), 'state', to, 'updated', now)
  redis.call('RPUSH', record(id) .. ':timeline',
    to .. ' ' .. now .. ' ' .. attempt .. ' ' .. fence .. ' ' .. owner)
  if from == to then return end
  redis.call('HINCRBY', 'rollouts:counts', from, -1)
  redis.call('HINCRBY', 'rollouts:counts', to, 1)
  redis.call('ZREM', 'rollouts:state:' .. from, id)
  redis.call('ZADD', 'rollouts:state:' .. to, created, id)
  redis.call('XADD', 'events', 'MAXLEN', '~', 100000, '*', 'id', id, 'state', to, 'attempt', attempt)
end

-- Adds the time since the rollout was claimed, or since it began to wait, to its account.
local function book(id, name, since)
  local spent = math.max(0, now - tonumber(since))
  redis.call('HINCRBY', record(id), 'ms_' .. name, spent)
  redis.call('HINCRBY', 'rollouts:totals', 'ms_' .. name, spent)
  redis.call('HINCRBY', 'rollouts:totals', 'n_' .. name, 1)
end

local function wait_again(id, delay)
  redis.call('HDEL', record(id), 'owner', 'lease')
  redis.call('HSET', record(id), 'since', now, 'kicks', 0)
  redis.call('ZADD', 'rollouts:due', now + delay, id)
end

local function finish_rollout(id, retention, kept)
  redis.call('HDEL', record(id), 'owner', 'lease')
  redis.call('HSET', record(id), 'finished', now)
  redis.call('ZREM', 'rollouts:due', id)
  release_backend(id)
  local r = get(id, 'tags', 'group', 'state', 'blame')
  redis.call('XADD', 'completions', 'MAXLEN', '~', kept, '*', 'id', id, 'tags', r[1], 'group', r[2])
  if r[4] then redis.call('HINCRBY', 'rollouts:totals', 'blame_' .. r[4], 1) end
  for _, key in ipairs({record(id), record(id) .. ':timeline', record(id) .. ':trajectory'}) do
    redis.call('PEXPIRE', key, retention)
  end
  redis.call('PEXPIRE', 'group:{' .. r[2] .. '}', retention)
end

local function lay_blame(id, blame, stage, kind, message, drop_reason)
  redis.call('HSET', record(id), 'blame', blame, 'drop', '1', 'drop_reason', drop_reason, 'error',
    cjson.encode({blame = blame, stage = stage, type = kind, message = message}))
end

-- submit <requeue ms> <retention ms> <n> then 8 values a rollout:
-- id, group, index, handler, request, digest, tags, deadline ms. All or nothing.
if op == 'submit' then
  local requeue, n, out = tonumber(ARGV[2]), tonumber(ARGV[4]), {}
  local conflict = false
  local seen = {}
  for i = 0, n - 1 do
    local id, digest = ARGV[5 + i * 8], ARGV[10 + i * 8]
    local r = get(id, 'digest', 'state')
    local known = r[1] or seen[id]
    if known and known ~= digest then
      out[i + 1], conflict = 'conflict', true
    else
      out[i + 1] = r[2] or (seen[id] and 'queued') or 'new'
    end
    seen[id] = digest
  end
  if conflict then return out end
  for i = 0, n - 1 do
    local b = 5 + i * 8
    local id, group = ARGV[b], ARGV[b + 1]
    if out[i + 1] == 'new' then
      redis.call('HSET', record(id), 'group', group, 'index', ARGV[b + 2], 'handler', ARGV[b + 3],
        'request', ARGV[b + 4], 'digest', ARGV[b + 5], 'tags', ARGV[b + 6], 'state', 'queued',
        'attempt', 1, 'fence', 0, 'kicks', 0, 'created', now, 'updated', now, 'since', now,
        'deadline', now + tonumber(ARGV[b + 7]))
      redis.call('RPUSH', record(id) .. ':timeline', 'queued ' .. now .. ' 1 0 -')
      redis.call('SADD', 'group:{' .. group .. '}', id)
      redis.call('ZADD', 'rollouts:created', now, id)
      redis.call('ZADD', 'rollouts:state:queued', now, id)
      redis.call('ZADD', 'rollouts:due', now + requeue, id)
      redis.call('HINCRBY', 'rollouts:counts', 'queued', 1)
      for tag in ARGV[b + 6]:gmatch('[^,]+') do redis.call('ZADD', 'rollouts:tag:' .. tag, now, id) end
    end
  end
  return out

-- claim <id> <attempt> <stage> <owner> <lease ms> <token>
-- The token makes a repeated claim harmless: a client that got no answer sends the same one again.
elseif op == 'claim' then
  local id, attempt, stage, owner, lease = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
  local r = get(id, 'state', 'attempt', 'fence', 'owner', 'created', 'since', 'deadline', 'request',
    'sandbox', 'node', 'error', 'finish_reason', 'index', 'group', 'metrics', 'token')
  local state = r[1]
  if not state then return {'gone'} end
  if TERMINAL[state] then return {'ended'} end
  local fence = r[3]
  if not (r[4] and r[16] == ARGV[7]) then
    if r[2] ~= attempt or WAITS_FOR[state] ~= stage or r[4] then return {'stale'} end
    if now >= tonumber(r[7]) then
      redis.call('ZADD', 'rollouts:due', now, id)
      return {'overdue'}
    end
    require_transition(id, state, ENTERS[stage])
    fence = redis.call('HINCRBY', record(id), 'fence', 1)
    redis.call('HSET', record(id), 'owner', owner, 'token', ARGV[7], 'lease', now + lease, 'claimed', now)
    redis.call('ZADD', 'rollouts:due', now + lease, id)
    book(id, 'queued', r[6])
    set_state(id, state, ENTERS[stage], r[5], attempt, fence, owner)
  end
  return {'ok', fence, now, r[7], r[8], r[9] or '', r[10] or '', r[11] or '', r[12] or '', r[13], r[14],
    r[15] or '', stage == 'eval' and redis.call('GET', record(id) .. ':trajectory') or ''}

-- heartbeat <lease ms> then id, fence pairs; answers one word each: ok, lost, cancel, overdue
elseif op == 'heartbeat' then
  local lease, out = tonumber(ARGV[2]), {}
  for i = 3, #ARGV, 2 do
    local id = ARGV[i]
    local r = get(id, 'fence', 'owner', 'cancel', 'deadline')
    local word = 'ok'
    if r[1] ~= ARGV[i + 1] or not r[2] then
      word = 'lost'
    else
      redis.call('HSET', record(id), 'lease', now + lease)
      redis.call('ZADD', 'rollouts:due', now + lease, id)
      if r[3] then word = 'cancel' elseif now >= tonumber(r[4]) then word = 'overdue' end
    end
    out[#out + 1] = word
  end
  return out

-- note <id> <fence> <field> <value> …: facts learnt during a stage (the sandbox, before it is used)
elseif op == 'note' then
  local id = ARGV[2]
  local r = get(id, 'fence', 'owner')
  if r[1] ~= ARGV[3] or not r[2] then return 'lost' end
  redis.call('HSET', record(id), unpack(ARGV, 4))
  return 'ok'

-- finish <id> <fence> <stage> <next> <delay ms> <max attempts> <retention ms> <kept> <trajectory or ''>
-- <field> <value> …
-- `next` is a state, `again` (another attempt from INIT if one is left, else failed), or `handback`
-- (a stopping worker returns the rollout; no attempt is used up). The answer is the state entered,
-- or `lost`. The same finish again, from a client that got no answer, gets the same answer.
elseif op == 'finish' then
  local id, fence, stage, to = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local r = get(id, 'state', 'fence', 'owner', 'created', 'attempt', 'claimed', 'cancel', 'ended_fence',
    'ended_in')
  local state, attempt = r[1], r[5]
  if r[8] == fence then return r[9] end
  if not state or TERMINAL[state] or r[2] ~= fence or not r[3] then return 'lost' end
  if r[7] and not TERMINAL[to] then to = 'cancelled' end
  if to == 'again' and tonumber(attempt) >= tonumber(ARGV[7]) then to = 'failed' end
  local enters = to
  if to == 'again' or to == 'handback' then
    enters = (to == 'handback' and stage == 'eval') and 'evaluating' or 'queued'
  end
  require_transition(id, state, enters)
  redis.call('HSET', record(id), 'ended_fence', fence, 'ended_in', enters)
  book(id, stage, r[6])
  if #ARGV > 10 then redis.call('HSET', record(id), unpack(ARGV, 11)) end
  if ARGV[10] ~= '' then redis.call('SET', record(id) .. ':trajectory', ARGV[10]) end
  if to == 'cancelled' then
    redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
  end
  if to == 'again' or to == 'handback' then
    if to == 'again' then
      attempt = redis.call('HINCRBY', record(id), 'attempt', 1)
      redis.call('HINCRBY', 'rollouts:totals', 'retries', 1)
      redis.call('HDEL', record(id), 'error', 'blame', 'drop', 'drop_reason', 'finish_reason')
      redis.call('DEL', record(id) .. ':trajectory')
    end
    if enters == 'queued' then
      -- What RUN did to the sandbox cannot be undone: a rollout handed back starts afresh.
      redis.call('HDEL', record(id), 'sandbox', 'node')
      release_backend(id)
    end
    set_state(id, state, enters, r[4], attempt, fence, r[3])
    wait_again(id, tonumber(ARGV[6]))
    return enters
  end
  set_state(id, state, to, r[4], attempt, fence, r[3])
  if TERMINAL[to] then
    finish_rollout(id, ARGV[8], ARGV[9])
  else
    wait_again(id, tonumber(ARGV[6]))
  end
  return to

-- cancel <retention ms> <kept> <id>: {word, state, node, attempt}
elseif op == 'cancel' then
  local id = ARGV[4]
  local r = get(id, 'state', 'owner', 'created', 'attempt', 'fence', 'node')
  if not r[1] then return {'gone', '', '', '0'} end
  if TERMINAL[r[1]] then return {'ended', r[1], '', r[4]} end
  if r[2] then
    redis.call('HSET', record(id), 'cancel', '1')
    return {'cancelling', r[1], r[6] or '', r[4]}
  end
  redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
  set_state(id, r[1], 'cancelled', r[3], r[4], r[5], '-')
  finish_rollout(id, ARGV[2], ARGV[3])
  return {'cancelled', 'cancelled', r[6] or '', r[4]}

-- overdue <limit> <requeue ms> <max requeue ms> <retention ms> <kept>: what the reaper has to do, as
-- {action, id, attempt, stage, node of a sandbox to clean up}; action: send, ended
elseif op == 'overdue' then
  local requeue, longest, out = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'rollouts:due', '-inf', now, 'LIMIT', 0, ARGV[2])) do
    local r = get(id, 'state', 'owner', 'lease', 'deadline', 'created', 'attempt', 'fence', 'node',
      'kicks', 'request', 'claimed', 'cancel')
    local state, attempt, node = r[1], r[6], r[8] or ''
    if not state or TERMINAL[state] then
      redis.call('ZREM', 'rollouts:due', id)
    elseif r[2] and tonumber(r[3]) > now then
      redis.call('ZADD', 'rollouts:due', r[3], id)
    elseif now >= tonumber(r[4]) then
      lay_blame(id, 'timeout', cjson.null, 'Deadline', 'the deadline of the rollout passed', 'deadline')
      redis.call('HSET', record(id), 'finish_reason', 'time_limit')
      set_state(id, state, 'timed_out', r[5], attempt, r[7], '-')
      finish_rollout(id, ARGV[5], ARGV[6])
      out[#out + 1] = {'ended', id, attempt, '', node}
    elseif r[12] then
      redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
      set_state(id, state, 'cancelled', r[5], attempt, r[7], '-')
      finish_rollout(id, ARGV[5], ARGV[6])
      out[#out + 1] = {'ended', id, attempt, '', node}
    elseif r[2] then
      -- The lease ran out: whoever held the rollout is dead, stopped or cut off.
      local limits = cjson.decode(r[10]).limits or {}
      if tonumber(attempt) >= (limits.max_attempts or 3) then
        lay_blame(id, 'infrastructure', cjson.null, 'WorkerLost',
          'worker ' .. r[2] .. ' was lost in state ' .. state .. ' at attempt ' .. attempt, 'worker lost')
        redis.call('HSET', record(id), 'finish_reason', 'error')
        set_state(id, state, 'failed', r[5], attempt, r[7], '-')
        finish_rollout(id, ARGV[5], ARGV[6])
        out[#out + 1] = {'ended', id, attempt, '', node}
      else
        attempt = redis.call('HINCRBY', record(id), 'attempt', 1)
        redis.call('HINCRBY', 'rollouts:totals', 'retries', 1)
        -- EVAL can be done again on what RUN left; INIT and RUN start afresh.
        local stage = 'eval'
        if state ~= 'evaluating' then
          stage = 'init'
          redis.call('HDEL', record(id), 'sandbox', 'node')
          redis.call('DEL', record(id) .. ':trajectory')
          release_backend(id)
          set_state(id, state, 'queued', r[5], attempt, r[7], '-')
        else
          set_state(id, state, 'evaluating', r[5], attempt, r[7], '-')
        end
        wait_again(id, requeue)
        if stage == 'eval' then
          out[#out + 1] = {'send', id, attempt, stage, node}
        else
          out[#out + 1] = {'restart', id, attempt, stage, node}
        end
      end
    else
      -- It merely waits. The message may be lost or the queue may be long: send it again, ever rarer.
      local kicks = redis.call('HINCRBY', record(id), 'kicks', 1)
      redis.call('ZADD', 'rollouts:due', now + math.min(requeue * 2 ^ kicks, longest), id)
      out[#out + 1] = {'send', id, attempt, WAITS_FOR[state], node}
    end
  end
  return out
end
return redis.error_reply('rollouts.lua: unknown operation ' .. tostring(op))
