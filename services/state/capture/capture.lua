-- needs: full
-- Captured model calls; what each operation takes and answers: see store.py. A call is `<digest> begun`, `<digest>
-- orphan` (its client went away), `<digest> <place>` (answered) or `<digest> <place> told`; under another id `= <id>`.

-- For how long a session outlives its rollout's deadline, as a turn log does; a process what it said last (ms).
local LEFT_MS, ALIVE_MS = 600000, 6000
-- Of a session's nodes: a program that begins anew with each of a thousand calls must not fill Redis.
local MOST_BYTES = 67108864
local NOT_OVER = {queued = true, initializing = true, ready = true, running = true}

-- A session that may be called, or nil and the answer that says why not.
local function session(ask)
  local id, attempt = ask.rollout, ask.attempt
  local r = redis.call('HMGET', KEY.record(id), 'state', 'attempt', 'cancel', 'deadline', 'fence')
  if not r[1] or attempt > tonumber(r[2]) then return nil, {word = 'unknown'} end
  if attempt < tonumber(r[2]) or not NOT_OVER[r[1]] or r[3] then return nil, {word = 'ended'} end
  local key = KEY.capture(id, attempt)
  local its = redis.call('HMGET', key, 'session', 'closed', 'margin', 'calls', 'sampled', 'bytes')
  if not its[1] or its[2] then return nil, {word = its[2] and 'ended' or 'early'} end
  return {key = key, calls = KEY.capture_calls(id, attempt), nodes = KEY.capture_nodes(id, attempt), text = its[1],
    deadline = tonumber(r[4]), fence = tonumber(r[5]), margin = tonumber(its[3]), count = tonumber(its[4]),
    sampled = tonumber(its[5]), bytes = tonumber(its[6] or 0)}
end

-- The deadline of a rollout that the caller holds; else nil.
local function held(ask)
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner', 'attempt', 'deadline')
  return r[2] and tonumber(r[1]) == ask.fence and tonumber(r[3]) == ask.attempt and tonumber(r[4]) or nil
end

local function lives(process) return process and redis.call('EXISTS', KEY.capture_alive(process)) == 1 end

-- A call by one of its ids; nil: there is none.
local function known(s, id)
  local entry = redis.call('HGET', s.calls, 'call:' .. id)
  local first = entry and entry:match('^= (.*)$')
  if first then return known(s, first) end
  if not entry then return end
  local digest, word, told = entry:match('^(%S+) (%S+)(.*)$')
  local token, process = (redis.call('HGET', s.key, 'flying:' .. id) or ''):match('^(%S+) (.*)$')
  return {id = id, digest = digest, word = word, place = tonumber(word), told = told ~= '', token = token,
    process = process}
end

local function enter(s, call, word) redis.call('HSET', s.calls, 'call:' .. call.id, call.digest .. ' ' .. word) end

local function keep(s)
  for _, key in ipairs({s.key, s.calls, s.nodes}) do
    redis.call('PEXPIRE', key, math.max(0, s.deadline - now) + LEFT_MS)
  end
end

-- The earlier call that this one repeats.
local function repeated(s, ask)
  local call, latest = known(s, ask.call), redis.call('HGET', s.calls, 'body:' .. ask.body)
  if call or not latest then return call end
  call = known(s, latest)
  if not call then return end
  local unheard = call.place and not call.told or call.word == 'orphan' or not call.place and not lives(call.process)
  if not (ask.retry or unheard) then return end
  -- A program that repeats itself without end must not fill Redis with further ids.
  local room = redis.call('HLEN', s.calls) < 100 + 4 * s.count
  if room then redis.call('HSET', s.calls, 'call:' .. ask.call, '= ' .. call.id) end
  return call
end

-- The limit that is reached; a call that was counted is not one more.
local function exhausted(s, counted)
  local limits = cjson.decode(s.text)
  if now + s.margin >= s.deadline then return 'time_limit' end
  if s.sampled >= (tonumber(limits.most_sampled) or math.huge) then return 'token_limit' end
  if not counted and s.count >= limits.most_calls or s.bytes >= MOST_BYTES then return 'turn_limit' end
end

function operations.open(ask)
  local deadline, key = held(ask), KEY.capture(ask.rollout, ask.attempt)
  if not deadline then return {word = 'lost'} end
  if redis.call('HEXISTS', key, 'session') == 0 then
    -- By how much it ends before the deadline, which moves along when the clock jumps.
    local margin = deadline - now - ask.ends_in
    redis.call('HSET', key, 'session', ARGV[3], 'margin', margin, 'calls', 0, 'sampled', 0)
    redis.call('PEXPIRE', key, math.max(0, deadline - now) + LEFT_MS)
  end
  return {word = 'ok'}
end

function operations.close(ask)
  if not held(ask) then return {word = 'lost'} end
  though_full()
  redis.call('HSET', KEY.capture(ask.rollout, ask.attempt), 'closed', 1)
  return {word = 'ok'}
end

function operations.alive(ask)
  though_full()
  redis.call('SET', KEY.capture_alive(ask.process), 1, 'PX', ALIVE_MS)
  return {word = 'ok'}
end

function operations.begin(ask)
  local s, refusal = session(ask)
  if not s then return refusal end
  local call = repeated(s, ask)
  -- With its token it is sent anew, for the connection was lost.
  if call and call.token ~= ask.token then
    though_full()
    if ask.retry ~= nil then redis.call('HINCRBY', s.key, 'retries', 1) end
    if call.place then return {word = 'again', call = call.id, node = call.place} end
    if call.process == ask.process or lives(call.process) then
      enter(s, call, 'begun')
      return {word = 'joined', call = call.id, process = call.process}
    end
  end
  local why = exhausted(s, call)
  if why then
    though_full()
    redis.call('HSETNX', s.key, 'stopped', why)
    return {word = 'limit', why = why, answered = redis.call('HINCRBY', s.key, 'limited', 1)}
  end
  local count = call and s.count or redis.call('HINCRBY', s.key, 'calls', 1)
  call = call or {id = ask.call, digest = ask.body}
  enter(s, call, 'begun')
  redis.call('HSET', s.calls, 'body:' .. call.digest, call.id)
  redis.call('HSET', s.key, 'flying:' .. call.id, ask.token .. ' ' .. ask.process)
  operations.alive(ask)
  keep(s)
  return {word = 'ok', call = call.id, fence = s.fence, nodes = redis.call('LLEN', s.nodes), session = s.text,
    calls = count, sampled = s.sampled}
end

function operations.look(ask)
  local s, refusal = session(ask)
  return refusal or {word = 'ok', nodes = redis.call('LLEN', s.nodes), session = s.text, fence = s.fence}
end

function operations.add(ask)
  local s, refusal = session(ask)
  if not s then return refusal end
  local node, call = ARGV[3], known(s, ask.call)
  if call and call.place then
    local stored = redis.call('LINDEX', s.nodes, call.place)
    local other = stored:sub(1, -10) ~= node:sub(1, -2)
    return {word = 'ok', node = call.place, at = struct.unpack('>I8', stored:sub(-8)), other = other}
  end
  local there, parent = redis.call('LLEN', s.nodes), ask.parent_call and known(s, ask.parent_call)
  if ask.parent >= there or ask.parent_call and not (parent and parent.place == ask.parent) then
    return {word = 'behind', at = math.min(there, ask.parent)}
  end
  -- The time takes the place of its last field, a 0, as an integer of 64 bits.
  redis.call('RPUSH', s.nodes, node:sub(1, -2) .. struct.pack('>BI8', 0xcf, now))
  -- Redis may have lost how the call began.
  if not call then redis.call('HINCRBY', s.key, 'calls', 1) end
  call = call or {id = ask.call, digest = '-'}
  enter(s, call, there)
  redis.call('HDEL', s.key, 'flying:' .. call.id, 'fault')
  redis.call('HINCRBY', s.key, 'sampled', ask.sampled)
  redis.call('HINCRBY', s.key, 'bytes', #node)
  keep(s)
  return {word = 'ok', node = there, at = now, other = false}
end

function operations.note(ask)
  local s, refusal = session(ask)
  if not s then return refusal end
  though_full()
  local call = known(s, ask.call)
  local place = call and call.place
  if ask.word == 'told' and place then enter(s, call, place .. ' told') end
  if ask.word == 'orphan' and call and not place then enter(s, call, 'orphan') end
  if ask.kind and call and not place then
    redis.call('HINCRBY', s.key, 'refused:' .. ask.kind, 1)
    redis.call('HSET', s.key, 'fault', ask.kind)
    redis.call('HDEL', s.calls, 'call:' .. call.id)
    redis.call('HDEL', s.key, 'flying:' .. call.id)
    redis.call('HINCRBY', s.key, 'calls', -1)
  end
  return {word = 'ok'}
end

function operations.finish(ask)
  local s, refusal = session(ask)
  if not s then return refusal end
  if ask.reward then
    if not cjson.decode(s.text).rewarded then return {word = 'forbidden'} end
    if redis.call('HSETNX', s.key, 'reward', ask.reward) == 0 then return {word = 'again'} end
    redis.call('HSET', s.key, 'components', ask.components)
  end
  redis.call('HSET', s.key, 'finished', 1)
  return {word = 'ok'}
end

function operations.summary(ask)
  local flat = redis.call('HGETALL', KEY.capture(ask.rollout, ask.attempt))
  local nodes = redis.call('LLEN', KEY.capture_nodes(ask.rollout, ask.attempt))
  local its = {refused = {}, in_flight = 0, lost = 0, nodes = nodes, now_ms = now}
  for i = 1, #flat, 2 do
    local kind, rest = flat[i]:match('^(%l+):(.*)$')
    if kind == 'refused' then its.refused[rest] = flat[i + 1] end
    if kind == 'flying' then
      local where = lives(flat[i + 1]:match(' (.*)$')) and 'in_flight' or 'lost'
      its[where] = its[where] + 1
    end
    if not kind then its[flat[i]] = flat[i + 1] end
  end
  return its
end
