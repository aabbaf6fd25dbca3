-- needs: full observations checkpoints rollouts/timeline backends/waiting rollouts/ahead batches/hooks results/account requests
-- A rollout's record and its states: the only code that writes a state. Takes `ALLOWED` (the transition table of
-- store.py), `RETENTION_MS` and `ABSENT_MS`.

local TERMINAL = {completed = true, failed = true, cancelled = true, timed_out = true}
local WAITS_FOR = {queued = 'init', ready = 'run', evaluating = 'eval'}
local STAGE_IN = {initializing = 'init', running = 'run', evaluating = 'eval'}
-- Owner of a rollout in RUN that waits for a worker to take it over. Releases before the turn log know of no such
-- wait: to them somebody holds it, and they let it be until its lease runs out.
local NOBODY = '-'

local function field(id, name) return redis.call('HGET', KEY.record(id), name) or nil end

-- A rollout: what a change of its state needs, and further fields of its record. Without a `state` there is none.
local function read(id, ...)
  local names = {'state', 'attempt', 'fence', 'owner', 'created', 'tenant', ...}
  local values, r = redis.call('HMGET', KEY.record(id), unpack(names)), {id = id}
  for i, name in ipairs(names) do r[name] = values[i] or nil end
  return r
end

local function write(id, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  if #flat > 0 then redis.call('HSET', KEY.record(id), unpack(flat)) end
end

local function forget(id, ...) redis.call('HDEL', KEY.record(id), ...) end

-- The stage that a rollout waits for, if nobody holds it.
local function awaited(r)
  if r.owner == NOBODY then return STAGE_IN[r.state] end
  return not r.owner and WAITS_FOR[r.state] or nil
end

local function count(name) redis.call('HINCRBY', KEY.TOTALS, name, 1) end

-- To be asked before anything is written: an error does not undo what a script has written already.
local function require_transition(r, to)
  if not (ALLOWED[r.state] and ALLOWED[r.state][to]) then
    error('rollout ' .. r.id .. ': no transition from ' .. r.state .. ' to ' .. to)
  end
end

-- Moves a rollout to a state, and tells everybody who keeps count. `by`: the worker that did it, '-' = none; `fields`
-- of its record are written with it.
local function enter(r, to, by, fields)
  require_transition(r, to)
  local id, from = r.id, r.state
  r.state = to
  fields = fields or {}
  fields.state, fields.updated = to, now
  write(id, fields)
  redis.call('RPUSH', KEY.timeline(id), to .. ' ' .. now .. ' ' .. r.attempt .. ' ' .. r.fence .. ' ' .. by)
  if from == to then return end
  if from == 'queued' then leave_queue(id, r.tenant) end
  if from == 'initializing' or from == 'ready' then move_ahead(id, to) end
  redis.call('HINCRBY', KEY.COUNTS, from, -1)
  redis.call('HINCRBY', KEY.COUNTS, to, 1)
  redis.call('ZREM', KEY.by_state(from), id)
  redis.call('ZADD', KEY.by_state(to), r.created, id)
  redis.call('XADD', KEY.EVENTS, 'MAXLEN', '~', 100000, '*', 'id', id, 'state', to, 'attempt', r.attempt)
end

-- Adds the time since the rollout was claimed, or since it began to wait, to its account and to a histogram.
local function book(id, name, since, series)
  local spent = math.max(0, now - tonumber(since))
  redis.call('HINCRBY', KEY.record(id), 'ms_' .. name, spent)
  observe(series, spent)
end

-- -- waiting --------------------------------------------------------------------------------------

local function look_at(id, at) redis.call('ZADD', KEY.DUE, at, id) end

-- Enters a state in which it waits for a worker.
local function wait_in(r, to, by, delay)
  enter(r, to, by, {since = now, kicks = 0})
  forget(r.id, 'owner', 'lease')
  look_at(r.id, now + delay)
end

-- Has a queued rollout wait for INIT, if it does not yet.
local function wait_for_turn(r) queue_up(r.id, r.tenant, field(r.id, 'rank')) end

-- What an attempt wrote of how it went.
local function forget_failure(id) forget(id, 'error', 'blame', 'drop', 'drop_reason', 'finish_reason') end

-- Another attempt: of the one before nothing counts any more.
local function next_attempt(r, blame)
  r.attempt = redis.call('HINCRBY', KEY.record(r.id), 'attempt', 1)
  count('retries')
  count('retry_' .. blame)
end

-- The turns of this attempt, and of the one before where that has just ended; of one with checkpoints they stay.
local function forget_turns(r)
  forget(r.id, 'handed')
  if keeps_turns(r.id, r.attempt, field(r.id, 'deadline')) then return end
  for attempt = r.attempt - 1, r.attempt do
    redis.call('DEL', KEY.turns(r.id, attempt), KEY.capture(r.id, attempt), KEY.capture_calls(r.id, attempt),
      KEY.capture_nodes(r.id, attempt))
  end
end

-- RUN waits for a worker that goes on with it. What the former one still does is void.
local function pass_on(r, delay)
  r.fence = redis.call('HINCRBY', KEY.record(r.id), 'fence', 1)
  enter(r, 'running', NOBODY, {owner = NOBODY, lease = now + delay + LEASE_MS, since = now, kicks = 0})
  look_at(r.id, now + delay)
end

-- Begins again from INIT, once it is its turn; with a delay only after that. What RUN did to the sandbox cannot be
-- undone, so nothing is left of what it did.
local function restart(r, by, delay, takes_its_turn)
  forget_failure(r.id)
  forget(r.id, 'sandbox', 'node', 'policy_versions', 'files', 'moves')
  redis.call('DEL', KEY.trajectory(r.id), KEY.checkpoints(r.id))
  forget_turns(r)
  release_backend(r.id)
  wait_in(r, 'queued', by, delay)
  if takes_its_turn then wait_for_turn(r) end
end

-- -- the end --------------------------------------------------------------------------------------

-- A reason may name a class of a handler's own; beyond so many they are counted as one.
local MOST_TOTALS = 200
local function count_drop(reason)
  local name = 'drop_' .. reason
  if redis.call('HEXISTS', KEY.TOTALS, name) == 0 and redis.call('HLEN', KEY.TOTALS) >= MOST_TOTALS then
    name = 'drop_other'
  end
  count(name)
end

-- Enters a state in which it stays.
local function finish_rollout(r, to, by)
  enter(r, to, by)
  local id = r.id
  forget(id, 'owner', 'lease')
  forget_turns(r)
  redis.call('ZREM', KEY.DUE, id)
  release_backend(id)
  local its = read(id, 'tags', 'group', 'blame', 'drop', 'drop_reason', 'digest', 'handler', 'reward', 'metrics')
  redis.call('HINCRBY', KEY.TENANTS_LIVE, r.tenant, -1)
  -- Not trimmed by length: a reader's cursor must hold for as long as the records do (results.lua trims by age).
  local entry = redis.call('XADD', KEY.RESULTS, '*', 'id', id, 'tags', its.tags, 'group', its.group,
    'tenant', r.tenant)
  write(id, {finished = now, completion = entry})
  count_result(id, now + RETENTION_MS)
  if its.blame then count('blame_' .. its.blame) end
  if its.drop == '1' then count_drop(its.drop_reason or 'unknown') else observe_score(its) end
  count('attempts_' .. r.attempt)
  observe('total_' .. to, math.max(0, now - tonumber(r.created)))
  for _, key in ipairs({KEY.record(id), KEY.timeline(id), KEY.trajectory(id), KEY.group(r.tenant, its.group)}) do
    redis.call('PEXPIRE', key, RETENTION_MS)
  end
  release_request(r.tenant, its.digest, RETENTION_MS)
  batch_rollout_ended(id)
end

local function lay_blame(id, blame, kind, message, drop_reason, finish_reason)
  write(id, {blame = blame, drop = '1', drop_reason = drop_reason, finish_reason = finish_reason,
    error = cjson.encode({blame = blame, stage = cjson.null, type = kind, message = message})})
end

local function mark_cancelled(id) write(id, {drop = '1', drop_reason = 'cancelled', finish_reason = 'cancelled'}) end

-- An attempt's error: the record keeps only that of the last one.
local function tell_error(r, encoded)
  local decodes, e = pcall(cjson.decode, encoded)
  if not decodes or type(e) ~= 'table' then return end
  local stage = type(e.stage) == 'string' and e.stage .. ': ' or ''
  tell(r.id, r.attempt, r.fence, stage .. tostring(e.blame) .. ' is blamed: ' .. tostring(e.type) .. ': ' ..
    tostring(e.message))
end

-- -- what happened to it ---------------------------------------------------------------------------

-- Whether a node is to pass a rollout over, for it could not start its image a while ago. A time that is yet to come
-- is of before the clock went back.
local function is_absent(id, node)
  local at = tonumber(field(id, 'absent:' .. node) or '')
  return at and at <= now and now - at < ABSENT_MS
end

local function forget_absence(id)
  for _, name in ipairs(redis.call('HKEYS', KEY.record(id))) do
    if name:sub(1, 7) == 'absent:' then forget(id, name) end
  end
end

-- Attempts that a rollout may have.
local function most_attempts(id) return tonumber(field(id, 'most_attempts')) end

-- Whether there is no attempt left. Those that a lost worker cost nothing are in the number of the attempt, which keeps
-- old messages and sandboxes apart, and are taken off here.
local function is_last_attempt(r)
  return tonumber(r.attempt) - tonumber(field(r.id, 'spared') or '0') >= most_attempts(r.id)
end

-- Workers lost while they held a rollout, without a new turn between them, count: it may be what ended them. The first
-- costs it nothing. From the second on it is carried alone among its kind, one such rollout a worker at once, and that
-- one costs an attempt where no other can have been it. The third ends it.
local SUSPECT, GUILTY, ALONE_AGAIN_MS = 2, 3, 1000

-- Of its own loop, or of the program that drives it.
local function turns(r)
  return redis.call('LLEN', KEY.turns(r.id, r.attempt)) + redis.call('LLEN', KEY.capture_nodes(r.id, r.attempt))
end

-- How many workers it saw end in this stage since its last turn.
local function deaths(r, stage)
  local its = read(r.id, 'deaths', 'deaths_in', 'deaths_at')
  if its.deaths_in ~= stage or turns(r) > tonumber(its.deaths_at or '0') then return 0 end
  return tonumber(its.deaths or '0')
end

-- Whether the owner carries another suspect, beside which this one, read with its `deaths`, is not to be in the stage in
-- which it saw them end.
local function crowded(r, stage, owner)
  if not r.deaths or deaths(r, stage) < SUSPECT then return false end
  local other = read(redis.call('HGET', KEY.SUSPECTS, owner) or '')
  if other.state and other.id ~= r.id and other.owner == owner and deaths(other, stage) >= SUSPECT then return true end
  redis.call('HSET', KEY.SUSPECTS, owner, r.id)
  return false
end

-- Whether no other rollout that has seen a worker end was with this one when its last worker was lost.
local function was_alone(r, stage)
  for _, other in ipairs(redis.call('SMEMBERS', KEY.unproven(r.owner))) do
    local its = other ~= r.id and read(other)
    if its and its.state and not TERMINAL[its.state] and deaths(its, stage) > 0 then return false end
  end
  return true
end

-- Notes who carries a rollout that saw a worker end, at its next claim.
local function note_unproven(r, stage, owner)
  if not r.deaths or deaths(r, stage) == 0 then return end
  redis.call('SADD', KEY.unproven(owner), r.id)
  redis.call('PEXPIRE', KEY.unproven(owner), RETENTION_MS)
end

-- It went through the stage in which it saw workers end, so it was not what ended them.
local function clear_suspicion(id, owner)
  forget(id, 'deaths', 'deaths_in', 'deaths_at')
  redis.call('SREM', KEY.unproven(owner), id)
  if redis.call('HGET', KEY.SUSPECTS, owner) == id then redis.call('HDEL', KEY.SUSPECTS, owner) end
end

-- Books a lost worker; how many there have been in that stage since the last turn.
local function count_death(r, stage)
  local count = deaths(r, stage) + 1
  write(r.id, {deaths = count, deaths_in = stage, deaths_at = turns(r)})
  redis.call('HDEL', KEY.SUSPECTS, r.owner)
  return count
end

-- Whether the handler says that another worker may do the stage again, or go on with it, in the same attempt. Who held
-- it must have been of a release that keeps a log of it.
local function repeatable(r, stage)
  local stamp, fence = (field(r.id, 'stamp') or ''):match('^(%d+) (%d+)$')
  if fence ~= r.fence or tonumber(stamp) < 2 then return false end
  local stages = redis.call('HGET', KEY.HANDLERS_REPEATABLE, field(r.id, 'handler')) or ''
  return stages:find(stage, 1, true) ~= nil
end
