-- needs: backends/pins
-- Weight updates: at most one under way, worked on by the holder of a lease. What the holder writes is
-- refused once the lease is another's, so a worker that was thought dead cannot undo its successor's work.

-- {id, identity, record, kept}: `word` is same, busy or created, `record` that of the update which it is about
function operations.create(ask)
  local active = redis.call('GET', KEY.POLICY_ACTIVE)
  local latest = active or redis.call('LINDEX', KEY.POLICY_ORDER, 0)
  local raw = latest and redis.call('HGET', KEY.POLICY_UPDATES, latest)
  if raw then
    local known = cjson.decode(raw)
    -- Weights that were forgotten since are to be brought again.
    local serves = known.update.state == 'done' and redis.call('EXISTS', KEY.POLICY_CURRENT) == 1
    if known.identity == ask.identity and (active or serves) then
      return {word = 'same', record = raw}
    end
    if active then return {word = 'busy', record = raw} end
  end
  redis.call('HSET', KEY.POLICY_UPDATES, ask.id, ask.record)
  redis.call('LPUSH', KEY.POLICY_ORDER, ask.id)
  for _, old in ipairs(redis.call('LRANGE', KEY.POLICY_ORDER, ask.kept, -1)) do
    redis.call('HDEL', KEY.POLICY_UPDATES, old)
  end
  redis.call('LTRIM', KEY.POLICY_ORDER, 0, ask.kept - 1)
  redis.call('SET', KEY.POLICY_ACTIVE, ask.id)
  -- One ring wakes one worker. Those left over from updates that nobody waited for would only add up.
  redis.call('LPUSH', KEY.POLICY_BELL, ask.id)
  redis.call('LTRIM', KEY.POLICY_BELL, 0, 0)
  return {word = 'created', record = ask.record}
end

-- Backends of any weights take rollouts from now on, unless there is an update under way (`record`), or `backends`
-- have the current ones.
function operations.forget()
  local active, version = redis.call('GET', KEY.POLICY_ACTIVE), redis.call('GET', KEY.BACKEND_VERSION)
  local record = active and redis.call('HGET', KEY.POLICY_UPDATES, active)
  if record then return {record = record} end
  local serving = {}
  for _, backend in ipairs(redis.call('HKEYS', KEY.BACKENDS)) do
    if version and redis.call('HGET', KEY.backend(backend), 'version') == version then
      serving[#serving + 1] = backend
    end
  end
  if not serving[1] then
    redis.call('DEL', KEY.BACKEND_VERSION, KEY.POLICY_CURRENT, KEY.POLICY_ACTIVE)
    tell_waiting()
  end
  return {backends = serving}
end

-- {token, id, record}; false: the lease is another's
function operations.save(ask)
  if redis.call('GET', KEY.POLICY_LEASE) ~= ask.token then return false end
  redis.call('HSET', KEY.POLICY_UPDATES, ask.id, ask.record)
  return true
end

-- As `save`, and {current, version, outcome, seconds}: the policy from now on and its version, missing = as before
function operations.finish(ask)
  if not operations.save(ask) then return false end
  if ask.current then
    redis.call('SET', KEY.POLICY_CURRENT, ask.current)
    -- Which came after which: labels need not say.
    redis.call('ZADD', KEY.POLICY_SEQUENCE, redis.call('HINCRBY', KEY.POLICY_TOTALS, 'changes', 1), ask.version)
    redis.call('ZREMRANGEBYRANK', KEY.POLICY_SEQUENCE, 0, -1001)
  end
  redis.call('DEL', KEY.POLICY_ACTIVE, KEY.POLICY_LEASE)
  redis.call('HINCRBY', KEY.POLICY_TOTALS, 'n_' .. ask.outcome, 1)
  redis.call('HINCRBYFLOAT', KEY.POLICY_TOTALS, 'seconds', ask.seconds)
  redis.call('XADD', KEY.POLICY_ENDED, 'MAXLEN', '~', 100, '*', 'id', ask.id)
  return true
end
