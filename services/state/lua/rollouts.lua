-- The life of a rollout: the only code that writes a state. Prepended: `ALLOWED` (the transition
-- table of rollouts.py), `ABSENT_MS`, full.lua, observations.lua, timeline.lua, backends.lua (a rollout that ends gives its
-- backend's load back), fair.lua, ahead.lua and requests.lua.
-- Times are milliseconds of Redis' own clock, so that nodes need not agree on theirs.

local op = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local TERMINAL = {completed = true, failed = true, cancelled = true, timed_out = true}
local WAITS_FOR = {queued = 'init', ready = 'run', evaluating = 'eval'}
local ENTERS = {init = 'initializing', run = 'running', eval = 'evaluating'}
local STAGE_IN = {initializing = 'init', running = 'run', evaluating = 'eval'}

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
  if from == 'queued' then leave_queue(id, get(id, 'tenant')[1]) end
  if from == 'initializing' or from == 'ready' then move_ahead(id, to) end
  redis.call('HINCRBY', 'rollouts:counts', from, -1)
  redis.call('HINCRBY', 'rollouts:counts', to, 1)
  redis.call('ZREM', 'rollouts:state:' .. from, id)
  redis.call('ZADD', 'rollouts:state:' .. to, created, id)
  redis.call('XADD', 'events', 'MAXLEN', '~', 100000, '*', 'id', id, 'state', to, 'attempt', attempt)
end

-- Adds the time since the rollout was claimed, or since it began to wait, to its account and to a histogram.
local function book(id, name, since, series)
  local spent = math.max(0, now - tonumber(since))
  redis.call('HINCRBY', record(id), 'ms_' .. name, spent)
  observe(series, spent)
end

local function wait_again(id, delay)
  redis.call('HDEL', record(id), 'owner', 'lease')
  redis.call('HSET', record(id), 'since', now, 'kicks', 0)
  redis.call('ZADD', 'rollouts:due', now + delay, id)
end

-- Has a queued rollout wait for INIT, if it does not yet.
local function wait_for_turn(id)
  local r = get(id, 'tenant', 'rank')
  queue_up(id, r[1], r[2])
end

-- A reason may name a class of a handler's own; beyond so many they are counted as one.
local MOST_TOTALS = 200
local function count_drop(reason)
  local name = 'drop_' .. reason
  if redis.call('HEXISTS', 'rollouts:totals', name) == 0 and redis.call('HLEN', 'rollouts:totals') >= MOST_TOTALS then
    name = 'drop_other'
  end
  redis.call('HINCRBY', 'rollouts:totals', name, 1)
end

local function finish_rollout(id, retention)
  redis.call('HDEL', record(id), 'owner', 'lease')
  redis.call('ZREM', 'rollouts:due', id)
  release_backend(id)
  local r = get(id, 'tags', 'group', 'state', 'blame', 'tenant', 'created', 'attempt', 'drop', 'drop_reason')
  local tenant = r[5]
  redis.call('HINCRBY', 'tenants:live', tenant, -1)
  -- Not trimmed by length: a reader's cursor must hold for as long as the records do (retention.lua trims by age).
  local entry = redis.call('XADD', 'completions', '*', 'id', id, 'tags', r[1], 'group', r[2], 'tenant', tenant)
  redis.call('HSET', record(id), 'finished', now, 'completion', entry)
  count_result(id, now + tonumber(retention))
  if r[4] then redis.call('HINCRBY', 'rollouts:totals', 'blame_' .. r[4], 1) end
  if r[8] == '1' then count_drop(r[9] or 'unknown') end
  redis.call('HINCRBY', 'rollouts:totals', 'attempts_' .. r[7], 1)
  observe('total_' .. r[3], math.max(0, now - tonumber(r[6])))
  for _, key in ipairs({record(id), record(id) .. ':timeline', record(id) .. ':trajectory'}) do
    redis.call('PEXPIRE', key, retention)
  end
  redis.call('PEXPIRE', 'group:{' .. tenant .. '/' .. r[2] .. '}', retention)
  release_request(tenant, get(id, 'digest')[1], now, tonumber(retention))
  batch_rollout_ended(id, now)
end

-- An attempt's error: the record keeps only that of the last one.
local function tell_error(id, attempt, fence, encoded)
  local read, e = pcall(cjson.decode, encoded)
  if not read or type(e) ~= 'table' then return end
  local stage = type(e.stage) == 'string' and e.stage .. ': ' or ''
  tell(id, attempt, fence, stage .. tostring(e.blame) .. ' is blamed: ' .. tostring(e.type) .. ': ' ..
    tostring(e.message))
end

local function lay_blame(id, blame, stage, kind, message, drop_reason)
  redis.call('HSET', record(id), 'blame', blame, 'drop', '1', 'drop_reason', drop_reason, 'error',
    cjson.encode({blame = blame, stage = stage, type = kind, message = message}))
end

-- Whether a node is to pass a rollout over, for it could not start its image a while ago. A time that is yet to come
-- is of before the clock went back.
local function is_absent(id, node)
  local at = tonumber(get(id, 'absent:' .. node)[1] or '')
  return at and at <= now and now - at < ABSENT_MS
end

local function forget_absence(id)
  for _, name in ipairs(redis.call('HKEYS', record(id))) do
    if name:sub(1, 7) == 'absent:' then redis.call('HDEL', record(id), name) end
  end
end

-- Gives a waiting rollout to an owner.
local function take(id, state, stage, owner, lease, token)
  local r = get(id, 'created', 'since', 'attempt')
  require_transition(id, state, ENTERS[stage])
  local fence = redis.call('HINCRBY', record(id), 'fence', 1)
  redis.call('HSET', record(id), 'owner', owner, 'token', token, 'lease', now + lease, 'claimed', now)
  redis.call('ZADD', 'rollouts:due', now + lease, id)
  book(id, 'queued', r[2], 'queue_' .. stage)
  set_state(id, state, ENTERS[stage], r[1], r[3], fence, owner)
end

-- The request of a rollout (JSON); '' = it is not there.
local function request_of(id)
  local r = get(id, 'tenant', 'digest')
  return redis.call('HGET', request_key(r[1], r[2]), 'body') or ''
end

-- Attempts that a rollout may have.
local function most_attempts(id) return tonumber(get(id, 'most_attempts')[1]) end

-- A rollout that saw so many workers end while they held it may be what ended them. It is carried alone among its
-- kind: one such rollout a worker at once. Before that no attempt is counted, for the many that a worker took along
-- did nothing; from then on each worker lost costs one. Who may be tried once only is not tried again for nothing.
local SPARED_DEATHS, ALONE_AGAIN_MS = 2, 1000

-- Whether the owner carries another suspect, beside which this one is not to be in the stage in which it saw them end.
local function crowded(id, stage, owner)
  local r = get(id, 'deaths', 'deaths_in')
  if tonumber(r[1] or '0') < SPARED_DEATHS or r[2] ~= stage then return false end
  local other = redis.call('HGET', 'rollouts:suspects', owner)
  if other and other ~= id and get(other, 'owner')[1] == owner then return true end
  redis.call('HSET', 'rollouts:suspects', owner, id)
  return false
end

-- It went through the stage, so it was not what ended the workers.
local function clear_suspicion(id, stage, owner)
  if get(id, 'deaths_in')[1] ~= stage then return end
  redis.call('HDEL', record(id), 'deaths', 'deaths_in')
  if redis.call('HGET', 'rollouts:suspects', owner) == id then redis.call('HDEL', 'rollouts:suspects', owner) end
end

-- Books a lost worker; how many there have been in that stage.
local function count_death(id, stage, most)
  local r = get(id, 'deaths_in', 'spared')
  if r[1] and r[1] ~= stage then redis.call('HDEL', record(id), 'deaths') end
  redis.call('HSET', record(id), 'deaths_in', stage)
  local deaths = redis.call('HINCRBY', record(id), 'deaths', 1)
  -- Of three stages, each of which may come again.
  if deaths <= SPARED_DEATHS and most > 1 and tonumber(r[2] or '0') < 3 * SPARED_DEATHS then
    redis.call('HINCRBY', record(id), 'spared', 1)
  end
  return deaths
end

-- Attempts that count. Those that a lost worker cost nothing are in the number of the attempt, which keeps old
-- messages and sandboxes apart, and are taken off here.
local function attempts_used(id, attempt) return tonumber(attempt) - tonumber(get(id, 'spared')[1] or '0') end

-- The same claim again, from a client that got no answer, perhaps long after: it holds the rollout from now.
local function renew(id, lease)
  redis.call('HSET', record(id), 'lease', now + lease)
  redis.call('ZADD', 'rollouts:due', now + lease, id)
end

-- What whoever holds a rollout must know of it.
local function claimed(id)
  local r = get(id, 'fence', 'deadline', 'sandbox', 'node', 'error', 'finish_reason', 'index', 'group', 'metrics',
    'tenant', 'attempt')
  return {'ok', id, r[11], r[1], now, r[2], request_of(id), r[3] or '', r[4] or '', r[5] or '', r[6] or '', r[7],
    r[8], r[9] or '', r[10]}
end

-- Whether a tenant's quota has room for `count` rollouts: takes it and answers nil, or takes nothing and
-- answers {'over', live or rate, limit, used or left, ms until there may be room (-1: never), count}.
local function take_quota(tenant, count, live_limit, per_minute)
  local live = tonumber(redis.call('HGET', 'tenants:live', tenant) or '0')
  if live_limit and live + count > live_limit then
    -- Nobody knows when one ends.
    return {'over', 'live', live_limit, live, count > live_limit and -1 or 5000, count}
  end
  if per_minute then
    -- A bucket that holds a minute's worth and is refilled steadily; a full one needs no key.
    local bucket = 'tenant:' .. tenant .. ':bucket'
    local b = redis.call('HMGET', bucket, 'left', 'at')
    local left = per_minute
    if b[1] then left = math.min(left, tonumber(b[1]) + (now - tonumber(b[2])) * per_minute / 60000) end
    if count > left then
      local wait = count > per_minute and -1 or math.ceil((count - left) * 60000 / per_minute)
      return {'over', 'rate', per_minute, math.floor(left), wait, count}
    end
    redis.call('HSET', bucket, 'left', left - count, 'at', now)
    redis.call('PEXPIRE', bucket, 60000)
  end
  redis.call('HINCRBY', 'tenants:live', tenant, count)
end

-- submit <requeue ms> <tenant> <most live or ''> <most a minute or ''> <most bytes or ''> <requests> <rollouts>, then 7
-- values a request: body, digest, handler, tags, deadline ms, ms of waiting that its priority is worth, most attempts;
-- then 5 a rollout: id, group, index, number of its request, group of a batch or ''.
-- All or nothing.
if op == 'submit' then
  local requeue, tenant, requests, n = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[7]), tonumber(ARGV[8])
  local function request(k, value) return ARGV[8 + (k - 1) * 7 + value] end
  local function rollout(i, value) return ARGV[8 + requests * 7 + (i - 1) * 5 + value] end
  local out, count, conflict, seen, new_of = {}, 0, false, {}, {}
  for i = 1, n do
    local id, k = rollout(i, 1), tonumber(rollout(i, 4))
    local digest = request(k, 2)
    local r = get(id, 'digest', 'state', 'tenant')
    local known = r[1] or seen[id]
    if known and (known ~= digest or (r[3] or tenant) ~= tenant) then
      out[i], conflict = 'conflict', true
    else
      out[i] = r[2] or (seen[id] and 'queued') or 'new'
      if out[i] == 'new' then count, new_of[k] = count + 1, (new_of[k] or 0) + 1 end
    end
    seen[id] = digest
  end
  if conflict then return out end
  local bytes = 0
  for k in pairs(new_of) do
    if redis.call('EXISTS', request_key(tenant, request(k, 2))) == 0 then bytes = bytes + #request(k, 1) end
  end
  local over = count > 0 and (over_bytes(tenant, bytes, tonumber(ARGV[6]), now)
    or take_quota(tenant, count, tonumber(ARGV[4]), tonumber(ARGV[5])))
  if over then return over end
  for k, members in pairs(new_of) do hold_request(tenant, request(k, 2), request(k, 1), members) end
  local at = count > 0 and submission_times(count, now)
  for i = 1, n do
    local id, group, k = rollout(i, 1), rollout(i, 2), tonumber(rollout(i, 4))
    if out[i] == 'new' then
      local rank = exact(at - tonumber(request(k, 6)))
      at = at + 1 / 1024
      redis.call('HSET', record(id), 'tenant', tenant, 'group', group, 'index', rollout(i, 3), 'handler', request(k, 3),
        'digest', request(k, 2), 'tags', request(k, 4), 'most_attempts', request(k, 7), 'state', 'queued',
        'attempt', 1, 'fence', 0, 'kicks', 0, 'created', now, 'updated', now, 'since', now,
        'deadline', now + tonumber(request(k, 5)), 'rank', rank)
      if rollout(i, 5) ~= '' then redis.call('HSET', record(id), 'batch_group', rollout(i, 5)) end
      queue_up(id, tenant, rank)
      redis.call('RPUSH', record(id) .. ':timeline', 'queued ' .. now .. ' 1 0 -')
      redis.call('SADD', 'group:{' .. tenant .. '/' .. group .. '}', id)
      redis.call('ZADD', 'rollouts:created', now, id)
      redis.call('ZADD', 'rollouts:tenant:' .. tenant, now, id)
      redis.call('ZADD', 'rollouts:state:queued', now, id)
      redis.call('ZADD', 'rollouts:due', now + requeue, id)
      redis.call('HINCRBY', 'rollouts:counts', 'queued', 1)
      for tag in request(k, 4):gmatch('[^,]+') do
        redis.call('ZADD', 'rollouts:tag:' .. tenant .. ':' .. tag, now, id)
      end
    end
  end
  return out

-- claim <id> <attempt> <stage> <owner> <lease ms> <token>
-- The token makes a repeated claim harmless: a client that got no answer sends the same one again.
elseif op == 'claim' then
  local id, attempt, stage = ARGV[2], ARGV[3], ARGV[4]
  local r = get(id, 'state', 'attempt', 'owner', 'token', 'deadline')
  if not r[1] then return {'gone'} end
  if TERMINAL[r[1]] then return {'ended'} end
  if not (r[3] and r[4] == ARGV[7]) then
    if r[2] ~= attempt or WAITS_FOR[r[1]] ~= stage or r[3] then return {'stale'} end
    if now >= tonumber(r[5]) then
      redis.call('ZADD', 'rollouts:due', now, id)
      return {'overdue'}
    end
    though_full()
    if crowded(id, stage, ARGV[5]) then
      redis.call('ZADD', 'rollouts:due', now + ALONE_AGAIN_MS, id)
      return {'crowded'}
    end
    take(id, r[1], stage, ARGV[5], tonumber(ARGV[6]), ARGV[7])
  else
    though_full()
    renew(id, tonumber(ARGV[6]))
  end
  return claimed(id)

-- claim_next <owner> <lease ms> <token> <node> <most ahead on it or ''> <most without sandbox or ''>
-- INIT of whoever's turn it is.
elseif op == 'claim_next' then
  local owner, lease, token, node = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
  local done = 'fair:claim:' .. token
  local before = redis.call('GET', done)
  if before then
    local r = get(before, 'owner', 'token')
    if not (r[1] and r[2] == token) then return {'stale'} end
    renew(before, lease)
    return claimed(before)
  end
  local full = full_place(node, ARGV[6], ARGV[7])
  if full then return {'full', full} end
  -- What cannot be claimed leaves the order; in one call not without end, for nobody else is served meanwhile.
  for _ = 1, 1000 do
    local id, tenant = first_in_order(function(waiting) return is_absent(waiting, node) end)
    if not id then return {tenant and 'passed over' or 'nobody'} end
    local r = get(id, 'state', 'owner', 'deadline')
    if r[1] ~= 'queued' or r[2] then
      leave_queue(id, tenant)
    elseif now >= tonumber(r[3]) then
      redis.call('ZADD', 'rollouts:due', now, id)
      leave_queue(id, tenant)
    elseif crowded(id, 'init', owner) then
      -- The reaper rings for it again.
      redis.call('ZADD', 'rollouts:due', now + ALONE_AGAIN_MS, id)
      leave_queue(id, tenant)
    else
      charge(tenant)
      -- An outage of Redis may lie between a claim and its repetition.
      redis.call('SET', done, id, 'PX', lease + 120000)
      begin_ahead(id, node)
      take(id, r[1], 'init', owner, lease, token)
      return claimed(id)
    end
  end
  return {'nobody'}

-- heartbeat <lease ms> <patience ms> then id, fence pairs; answers one word each: ok, lost, cancel, overdue
-- A handler may ignore that it is to stop: the lease is not extended past the deadline, or past a cancel, by
-- more than the patience. Then the reaper ends the rollout.
elseif op == 'heartbeat' then
  local lease, patience, out = tonumber(ARGV[2]), tonumber(ARGV[3]), {}
  though_full()
  for i = 4, #ARGV, 2 do
    local id = ARGV[i]
    local r = get(id, 'fence', 'owner', 'cancel', 'deadline')
    local word = 'ok'
    if r[1] ~= ARGV[i + 1] or not r[2] then
      word = 'lost'
    else
      local stop_at = math.min(tonumber(r[4]), tonumber(r[3] or r[4]))
      local until_ms = math.min(now + lease, stop_at + patience)
      redis.call('HSET', record(id), 'lease', until_ms, 'beat', now)
      redis.call('ZADD', 'rollouts:due', until_ms, id)
      if r[3] then word = 'cancel' elseif now >= tonumber(r[4]) then word = 'overdue' end
    end
    out[#out + 1] = word
  end
  return out

-- note <id> <fence> <text for the timeline or ''> <field> <value> …: facts learnt during a stage (the sandbox,
-- before it is used)
elseif op == 'note' then
  local id = ARGV[2]
  local r = get(id, 'fence', 'owner', 'attempt')
  if r[1] ~= ARGV[3] or not r[2] then return 'lost' end
  though_full()
  if #ARGV > 4 then redis.call('HSET', record(id), unpack(ARGV, 5)) end
  if ARGV[4] ~= '' then tell(id, r[3], ARGV[3], ARGV[4]) end
  return 'ok'

-- finish <id> <fence> <stage> <next> <delay ms> <max attempts> <retention ms> <longest elsewhere ms>
-- <trajectory or ''> <field> <value> …
-- `next` is a state, `again` (another attempt from INIT if one is left, else failed), `handback` (a stopping worker
-- returns the rollout; no attempt is used up), or `elsewhere` (this worker cannot do it: the same after a delay, and
-- failed with the given fields once nobody could for so long; at once, and for as long as it takes, where its node
-- cannot start the image and another one has yet to try). The answer is the state entered, or `lost`. The same finish
-- again, from a client that got no answer, gets the same answer.
elseif op == 'finish' then
  local id, fence, stage, to = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local r = get(id, 'state', 'fence', 'owner', 'created', 'attempt', 'claimed', 'cancel', 'ended_fence',
    'ended_in')
  local state, attempt = r[1], r[5]
  if r[8] == fence then return r[9] end
  if not state or TERMINAL[state] or r[2] ~= fence or not r[3] then return 'lost' end
  local absent
  for i = 11, #ARGV, 2 do if ARGV[i]:sub(1, 7) == 'absent:' then absent = i end end
  if r[7] and not TERMINAL[to] then to = 'cancelled' end
  if to == 'again' and attempts_used(id, attempt) >= tonumber(ARGV[7]) then to = 'failed' end
  local delay = tonumber(ARGV[6])
  if to == 'elsewhere' then
    local e = get(id, 'elsewhere_since', 'elsewhere')
    -- A live node that has not tried to start the image may only be busy: the deadline ends that wait.
    if not absent and e[1] and now - tonumber(e[1]) >= tonumber(ARGV[9]) then
      to = 'failed'
    else
      -- Ever more rarely: where one worker of many knows how, it is found soon; where none does, nobody spins.
      delay = math.min(delay * 2 ^ tonumber(e[2] or '0'), 30000)
    end
  end
  local back = to == 'handback' or to == 'elsewhere'
  local enters = to
  if to == 'again' or back then
    enters = (back and stage == 'eval') and 'evaluating' or 'queued'
  end
  require_transition(id, state, enters)
  -- A trajectory waits until there is room.
  if ARGV[10] == '' then though_full() end
  redis.call('HSET', record(id), 'ended_fence', fence, 'ended_in', enters)
  book(id, stage, r[6], 'stage_' .. stage)
  if #ARGV > 10 then redis.call('HSET', record(id), unpack(ARGV, 11)) end
  local handed_on = 0
  if to == 'elsewhere' then
    if not absent then redis.call('HSETNX', record(id), 'elsewhere_since', now) end
    handed_on = redis.call('HINCRBY', record(id), 'elsewhere', 1)
  elseif not back then
    redis.call('HDEL', record(id), 'elsewhere_since', 'elsewhere')
    if to ~= 'again' then clear_suspicion(id, stage, r[3]) end
  end
  for i = 11, #ARGV, 2 do
    if ARGV[i] == 'error' and handed_on < 2 then tell_error(id, attempt, fence, ARGV[i + 1]) end
  end
  if absent then
    local why = 'node ' .. ARGV[absent]:sub(8) .. ' cannot start its image: ' .. ARGV[absent + 1]
    if get(id, 'unstarted')[1] ~= why then tell(id, attempt, fence, why) end
    -- All have tried: another attempt goes round the nodes again, and this one comes last.
    if to == 'again' then forget_absence(id) end
    redis.call('HSET', record(id), ARGV[absent], now, 'unstarted', why)
  end
  if to == 'handback' then tell(id, attempt, fence, 'handed back: worker ' .. r[3] .. ' stops') end
  if ARGV[10] ~= '' then redis.call('SET', record(id) .. ':trajectory', ARGV[10]) end
  if to == 'cancelled' then
    redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
    -- What the stage met before it heard of the cancel is nobody's failure.
    redis.call('HDEL', record(id), 'error', 'blame')
  end
  if to == 'again' or back then
    if to == 'again' then
      redis.call('HINCRBY', 'rollouts:totals', 'retry_' .. (get(id, 'blame')[1] or 'unknown'), 1)
      attempt = redis.call('HINCRBY', record(id), 'attempt', 1)
      redis.call('HINCRBY', 'rollouts:totals', 'retries', 1)
      redis.call('HDEL', record(id), 'error', 'blame', 'drop', 'drop_reason', 'finish_reason',
        'policy_versions')
      redis.call('DEL', record(id) .. ':trajectory')
    elseif to == 'elsewhere' then
      redis.call('HDEL', record(id), 'error', 'blame', 'drop', 'drop_reason', 'finish_reason')
    end
    if enters == 'queued' then
      -- What RUN did to the sandbox cannot be undone: a rollout handed back starts afresh.
      redis.call('HDEL', record(id), 'sandbox', 'node')
      release_backend(id)
    end
    set_state(id, state, enters, r[4], attempt, fence, r[3])
    wait_again(id, delay)
    -- Another attempt waits for its turn only once its delay is over and the reaper rings for it.
    if enters == 'queued' and (to == 'handback' or to == 'elsewhere' and absent) then wait_for_turn(id) end
    return enters
  end
  set_state(id, state, to, r[4], attempt, fence, r[3])
  if TERMINAL[to] then
    finish_rollout(id, ARGV[8])
  else
    wait_again(id, delay)
  end
  return to

-- cancel <retention ms> <id> <tenant or '' for any>: {word, state, node, attempt}
elseif op == 'cancel' then
  local id = ARGV[3]
  local r = get(id, 'state', 'owner', 'created', 'attempt', 'fence', 'node', 'tenant')
  if not r[1] or (ARGV[4] ~= '' and ARGV[4] ~= r[7]) then return {'gone', '', '', '0'} end
  though_full()
  if TERMINAL[r[1]] then return {'ended', r[1], '', r[4]} end
  if r[2] then
    if redis.call('HSETNX', record(id), 'cancel', now) == 1 then
      tell(id, r[4], r[5], 'cancel asked for; worker ' .. r[2] .. ' is told')
    end
    return {'cancelling', r[1], r[6] or '', r[4]}
  end
  redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
  set_state(id, r[1], 'cancelled', r[3], r[4], r[5], '-')
  finish_rollout(id, ARGV[2])
  return {'cancelled', 'cancelled', r[6] or '', r[4]}

-- overdue <limit> <requeue ms> <max requeue ms> <retention ms> <latest ms or ''>: what the reaper has to do, as
-- {action, id, attempt, stage, node of a sandbox to clean up}; action: send, ended
-- Nothing is judged, and the answer is `jumped`, where it is later than the reaper's own clock can explain: Redis'
-- time jumped, or stood still with the call, and nobody could extend a lease.
elseif op == 'overdue' then
  local requeue, longest, out = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
  if ARGV[6] ~= '' and now > tonumber(ARGV[6]) then return {'jumped'} end
  though_full()
  -- Once for all: each rollout that waits for INIT has its message, and needs no second one.
  local rung = redis.call('LLEN', 'init') >= redis.call('ZCARD', 'rollouts:state:queued')
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'rollouts:due', '-inf', now, 'LIMIT', 0, ARGV[2])) do
    local r = get(id, 'state', 'owner', 'lease', 'deadline', 'created', 'attempt', 'fence', 'node',
      'kicks', 'claimed', 'cancel')
    local state, attempt, node = r[1], r[6], r[8] or ''
    if not state or TERMINAL[state] then
      redis.call('ZREM', 'rollouts:due', id)
    elseif r[2] and tonumber(r[3]) > now then
      redis.call('ZADD', 'rollouts:due', r[3], id)
    elseif now >= tonumber(r[4]) then
      local why = state == 'queued' and get(id, 'unstarted')[1]
      lay_blame(id, 'timeout', cjson.null, 'Deadline',
        'the deadline of the rollout passed' .. (why and '; ' .. why or ''), 'deadline')
      redis.call('HSET', record(id), 'finish_reason', 'time_limit')
      set_state(id, state, 'timed_out', r[5], attempt, r[7], '-')
      finish_rollout(id, ARGV[5])
      out[#out + 1] = {'ended', id, attempt, '', node}
    elseif r[11] then
      redis.call('HSET', record(id), 'drop', '1', 'drop_reason', 'cancelled', 'finish_reason', 'cancelled')
      set_state(id, state, 'cancelled', r[5], attempt, r[7], '-')
      finish_rollout(id, ARGV[5])
      out[#out + 1] = {'ended', id, attempt, '', node}
    elseif r[2] then
      -- The lease ran out: whoever held the rollout is dead, stopped or cut off.
      redis.call('HINCRBY', 'rollouts:totals', 'lost_' .. STAGE_IN[state], 1)
      local most = most_attempts(id)
      local deaths = count_death(id, STAGE_IN[state], most)
      if attempts_used(id, attempt) >= most then
        lay_blame(id, 'infrastructure', cjson.null, 'WorkerLost',
          'worker ' .. r[2] .. ' was lost in state ' .. state .. ' at attempt ' .. attempt .. '; workers lost while they '
          .. 'held it: ' .. deaths, 'worker lost')
        redis.call('HSET', record(id), 'finish_reason', 'error')
        set_state(id, state, 'failed', r[5], attempt, r[7], '-')
        finish_rollout(id, ARGV[5])
        out[#out + 1] = {'ended', id, attempt, '', node}
      else
        tell(id, attempt, r[7], 'worker ' .. r[2] .. ' was lost in state ' .. state .. ': the next attempt')
        attempt = redis.call('HINCRBY', record(id), 'attempt', 1)
        redis.call('HINCRBY', 'rollouts:totals', 'retries', 1)
        redis.call('HINCRBY', 'rollouts:totals', 'retry_infrastructure', 1)
        -- EVAL can be done again on what RUN left; INIT and RUN start afresh.
        local stage = 'eval'
        if state ~= 'evaluating' then
          stage = 'init'
          redis.call('HDEL', record(id), 'sandbox', 'node')
          redis.call('DEL', record(id) .. ':trajectory')
          release_backend(id)
          set_state(id, state, 'queued', r[5], attempt, r[7], '-')
          wait_for_turn(id)
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
      if state == 'queued' then wait_for_turn(id) end
      if kicks == 1 then tell(id, attempt, r[7], 'still waits: its message is sent again') end
      redis.call('ZADD', 'rollouts:due', now + math.min(requeue * 2 ^ kicks, longest), id)
      if not (state == 'queued' and rung) then out[#out + 1] = {'send', id, attempt, WAITS_FOR[state], node} end
    end
  end
  return out

-- vacate <'lost' or ''> <requeue ms> <retention ms> <node> …: rollouts that wait for workers of these nodes, where
-- nobody will come for them, begin anew. `lost`: an attempt is used up, for nobody can tell what the node still does
-- and a message of the old attempt must not count; else the node ends in order. Answers as `overdue`.
elseif op == 'vacate' then
  local lost, requeue, retention, out = ARGV[2] == 'lost', tonumber(ARGV[3]), ARGV[4], {}
  though_full()
  local gone, candidates = {}, redis.call('ZRANGE', 'rollouts:state:evaluating', 0, -1)
  for i = 5, #ARGV do
    gone[ARGV[i]] = true
    for _, id in ipairs(redis.call('SMEMBERS', ahead_at(ARGV[i]))) do candidates[#candidates + 1] = id end
  end
  for _, id in ipairs(candidates) do
    local r = get(id, 'state', 'owner', 'node', 'created', 'attempt', 'fence')
    if (r[1] == 'ready' or r[1] == 'evaluating') and not r[2] and gone[r[3] or ''] then
      local attempt = r[5]
      if lost and attempts_used(id, attempt) >= most_attempts(id) then
        lay_blame(id, 'infrastructure', cjson.null, 'NodeLost',
          'node ' .. r[3] .. ' was lost with its sandbox in state ' .. r[1] .. ' at attempt ' .. attempt, 'node lost')
        redis.call('HSET', record(id), 'finish_reason', 'error')
        set_state(id, r[1], 'failed', r[4], attempt, r[6], '-')
        finish_rollout(id, retention)
        out[#out + 1] = {'ended', id, attempt, '', r[3]}
      else
        if lost then
          tell(id, attempt, r[6], 'node ' .. r[3] .. ' was lost with its sandbox: the next attempt')
          attempt = redis.call('HINCRBY', record(id), 'attempt', 1)
          redis.call('HINCRBY', 'rollouts:totals', 'retries', 1)
          redis.call('HINCRBY', 'rollouts:totals', 'retry_infrastructure', 1)
        else
          tell(id, attempt, r[6], 'handed back: node ' .. r[3] .. ' ends')
        end
        redis.call('HDEL', record(id), 'sandbox', 'node', 'error', 'blame', 'drop', 'drop_reason', 'finish_reason',
          'policy_versions')
        redis.call('DEL', record(id) .. ':trajectory')
        release_backend(id)
        set_state(id, r[1], 'queued', r[4], attempt, r[6], '-')
        wait_again(id, requeue)
        wait_for_turn(id)
        out[#out + 1] = {'restart', id, attempt, 'init', r[3]}
      end
    end
  end
  return out

-- forget <tenant>: takes off its account what has expired
elseif op == 'forget' then
  forget_requests(ARGV[2], now)
  return 1
end
return redis.error_reply('rollouts.lua: unknown operation ' .. tostring(op))
