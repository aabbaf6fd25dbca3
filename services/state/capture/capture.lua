-- needs: full
-- Captured model calls: a session an attempt, the calls of its program, and the turns that answered them. A call is
-- `<digest> begun`, `<digest> orphan` (its client went away), `<digest> <place>` (answered), or `<digest> <place> told`;
-- under a further id of the same call `= <its first id>`.

-- For how long a session outlives the deadline of its rollout, as the turn log does; how long a process is believed
-- to live (ms).
local LEFT_MS, ALIVE_MS = 600000, 6000
local NOT_OVER = {queued = true, initializing = true, ready = true, running = true}

-- Why the attempt may not be called: a word, or nil and the session.
local function stand(ask)
  local id, attempt = ask.rollout, ask.attempt
  local r = redis.call('HMGET', KEY.record(id), 'state', 'attempt', 'cancel', 'deadline', 'fence')
  if not r[1] or attempt > tonumber(r[2]) then return 'unknown' end
  if attempt < tonumber(r[2]) or not NOT_OVER[r[1]] or r[3] then return 'ended' end
  local s = {key = KEY.capture(id, attempt), calls = KEY.capture_calls(id, attempt),
    nodes = KEY.capture_nodes(id, attempt), deadline = tonumber(r[4]), fence = tonumber(r[5])}
  local its = redis.call('HMGET', s.key, 'session', 'closed', 'margin', 'calls', 'sampled')
  if not its[1] then return 'early' end
  if its[2] then return 'ended' end
  s.session, s.margin, s.count, s.sampled = its[1], tonumber(its[3]), tonumber(its[4]), tonumber(its[5])
  return nil, s
end

-- Whether the caller holds the rollout, and its deadline.
local function held(ask)
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner', 'attempt', 'deadline')
  return tonumber(r[1] or '') == ask.fence and r[2] and tonumber(r[3]) == ask.attempt, tonumber(r[4] or '')
end

local function lives(process, asking)
  return process and (process == asking or redis.call('EXISTS', KEY.capture_alive(process)) == 1)
end

local function show_alive(process) redis.call('SET', KEY.capture_alive(process), 1, 'PX', ALIVE_MS) end

-- A call by one of its ids; nil: there is none.
local function known(s, id)
  local entry = redis.call('HGET', s.calls, 'call:' .. id)
  local first = entry and entry:match('^= (.*)$')
  if first then id, entry = first, redis.call('HGET', s.calls, 'call:' .. first) end
  if not entry then return end
  local digest, word, told = entry:match('^(%S+) (%S+)(.*)$')
  local process = redis.call('HGET', s.key, 'flying:' .. id) or nil
  return {id = id, digest = digest, orphan = word == 'orphan', place = tonumber(word), told = told ~= '', process = process}
end

local function enter(s, call, word) redis.call('HSET', s.calls, 'call:' .. call.id, call.digest .. ' ' .. word) end

local function keep(s)
  redis.call('HSET', s.key, 'last_call_ms', now)
  for _, key in ipairs({s.key, s.calls, s.nodes}) do
    redis.call('PEXPIRE', key, math.max(0, s.deadline - now) + LEFT_MS)
  end
end

-- The earlier call that this one repeats.
local function repeated(s, ask)
  local call = known(s, ask.call)
  local latest = not call and redis.call('HGET', s.calls, 'body:' .. ask.body)
  if not latest then return call end
  call = known(s, latest)
  if not call then return end
  local unheard = call.orphan or call.place and not call.told or not call.place and not lives(call.process, ask.process)
  if not (ask.retry or unheard) then return end
  -- A program that repeats itself without end must not fill Redis with further ids.
  if redis.call('HLEN', s.calls) < 100 + 4 * s.count then redis.call('HSET', s.calls, 'call:' .. ask.call, '= ' .. call.id) end
  return call
end

-- The limit that the session has reached; a call that was counted is not one more.
local function exhausted(s, counted)
  local limits = cjson.decode(s.session)
  if now + s.margin >= s.deadline then return 'time_limit' end
  if s.sampled >= (tonumber(limits.most_sampled) or math.huge) then return 'token_limit' end
  if not counted and s.count >= limits.most_calls then return 'turn_limit' end
end

-- {rollout, attempt, fence, ends_in} and the session, of which the first counts, and when it ends.
function operations.open(ask)
  local holds, deadline = held(ask)
  if not holds then return {word = 'lost'} end
  local key = KEY.capture(ask.rollout, ask.attempt)
  if redis.call('EXISTS', key) == 0 then
    -- By how much it ends before the deadline, which moves along when the clock jumps.
    redis.call('HSET', key, 'session', ARGV[3], 'margin', deadline - now - ask.ends_in, 'calls', 0, 'sampled', 0)
    redis.call('PEXPIRE', key, math.max(0, deadline - now) + LEFT_MS)
  end
  return {word = 'ok'}
end

-- {rollout, attempt, fence}
function operations.close(ask)
  if not held(ask) then return {word = 'lost'} end
  though_full()
  local key = KEY.capture(ask.rollout, ask.attempt)
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'closed', 1) end
  return {word = 'ok'}
end

-- {rollout, attempt, call, body, retry, process, waits}
function operations.begin(ask)
  local word, s = stand(ask)
  if word then return {word = word} end
  local call = repeated(s, ask)
  if call then
    though_full()
    if not ask.waits then redis.call('HINCRBY', s.key, 'retries', 1) end
    if call.place then return {word = 'again', call = call.id, node = call.place} end
    if lives(call.process, ask.process) and not (ask.lost and call.process == ask.process) then
      enter(s, call, 'begun')
      return {word = 'joined', call = call.id, process = call.process}
    end
    redis.call('HDEL', s.key, 'flying:' .. call.id)
  end
  local why = exhausted(s, call)
  if why then
    though_full()
    redis.call('HSETNX', s.key, 'stopped', why)
    return {word = 'limit', why = why, answered = redis.call('HINCRBY', s.key, 'limited', 1)}
  end
  if not call then
    call = {id = ask.call, digest = ask.body}
    s.count = redis.call('HINCRBY', s.key, 'calls', 1)
  end
  enter(s, call, 'begun')
  redis.call('HSET', s.calls, 'body:' .. call.digest, call.id)
  redis.call('HSET', s.key, 'flying:' .. call.id, ask.process)
  show_alive(ask.process)
  keep(s)
  return {word = 'ok', call = call.id, fence = s.fence, nodes = redis.call('LLEN', s.nodes), session = s.session,
    calls = s.count, sampled = s.sampled}
end

-- {rollout, attempt}: as `begin`, of which nothing is counted
function operations.look(ask)
  local word, s = stand(ask)
  if word then return {word = word} end
  return {word = 'ok', nodes = redis.call('LLEN', s.nodes), session = s.session}
end

-- {rollout, attempt, call, parent, parent_call, sampled} and the node
function operations.add(ask)
  local word, s = stand(ask)
  if word then return {word = word} end
  local node, call = ARGV[3], known(s, ask.call)
  if call and call.place then
    local stored = redis.call('LINDEX', s.nodes, call.place)
    return {word = 'ok', node = call.place, at = struct.unpack('>I8', stored:sub(-8)),
      other = stored:sub(1, -10) ~= node:sub(1, -2)}
  end
  local there, parent = redis.call('LLEN', s.nodes), ask.parent_call and known(s, ask.parent_call)
  if ask.parent >= there or ask.parent_call and not (parent and parent.place == ask.parent) then
    return {word = 'behind', at = math.min(there, ask.parent)}
  end
  -- The time takes the place of its last field, a 0, as an integer of 64 bits.
  redis.call('RPUSH', s.nodes, node:sub(1, -2) .. struct.pack('>BI8', 0xcf, now))
  -- Without a call Redis has lost how it began.
  if not call then redis.call('HINCRBY', s.key, 'calls', 1) end
  enter(s, call or {id = ask.call, digest = '-'}, there)
  redis.call('HDEL', s.key, 'flying:' .. (call or {id = ask.call}).id)
  redis.call('HINCRBY', s.key, 'sampled', ask.sampled)
  keep(s)
  return {word = 'ok', node = there, at = now, other = false}
end

-- {rollout, attempt, call, event, kind}
function operations.note(ask)
  local word, s = stand(ask)
  if word then return {word = word} end
  though_full()
  local call = known(s, ask.call)
  local answered = call and call.place
  if ask.event == 'told' and answered and not call.told then enter(s, call, answered .. ' told') end
  if ask.event == 'orphan' and call and not answered then enter(s, call, 'orphan') end
  if ask.event == 'fail' and not answered then
    redis.call('HINCRBY', s.key, 'refused:' .. ask.kind, 1)
    if call then
      redis.call('HDEL', s.calls, 'call:' .. call.id)
      redis.call('HDEL', s.key, 'flying:' .. call.id)
      redis.call('HINCRBY', s.key, 'calls', -1)
    end
  end
  return {word = 'ok'}
end

-- {rollout, attempt, reward, components}: texts, both missing where the program only ends
function operations.finish(ask)
  local word, s = stand(ask)
  if word then return {word = word} end
  if ask.reward then
    if not cjson.decode(s.session).rewarded then return {word = 'forbidden'} end
    if redis.call('HSETNX', s.key, 'reward', ask.reward) == 0 then return {word = 'again'} end
    redis.call('HSET', s.key, 'components', ask.components)
  end
  redis.call('HSET', s.key, 'finished', 1)
  return {word = 'ok'}
end

-- {process}
function operations.alive(ask)
  though_full()
  show_alive(ask.process)
  return {word = 'ok'}
end

-- {rollout, attempt}: the session's fields, and how many calls living processes have in flight; empty: there is none
function operations.summary(ask)
  local key, its = KEY.capture(ask.rollout, ask.attempt), {refused = {}, in_flight = 0}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local kind, rest = flat[i]:match('^(%l+):(.*)$')
    if kind == 'refused' then its.refused[rest] = flat[i + 1]
    elseif not kind then its[flat[i]] = flat[i + 1]
    elseif lives(flat[i + 1]) then its.in_flight = its.in_flight + 1 end
  end
  its.now_ms, its.nodes = now, redis.call('LLEN', KEY.capture_nodes(ask.rollout, ask.attempt))
  return its.session and its or {}
end
