-- needs: backends/pins
-- Weight updates: at most one of a policy under way, worked on by the holder of a lease. What the holder writes is
-- refused once the lease is another's, so a worker that was thought dead cannot undo its successor's work.

-- Each is told the policy's name in keys, as `of`.

-- {policy, id, identity, record, kept}: `word` is same, busy or created, `record` that of the update which it is about
function operations.create(ask)
  local active = redis.call('GET', KEY.policy_active(ask.of))
  local latest = active or redis.call('LINDEX', KEY.policy_order(ask.of), 0)
  local raw = latest and redis.call('HGET', KEY.policy_updates(ask.of), latest)
  if raw then
    local known = cjson.decode(raw)
    -- Weights that were forgotten since are to be brought again.
    local serves = known.update.state == 'done' and redis.call('EXISTS', KEY.policy_current(ask.of)) == 1
    if known.identity == ask.identity and (active or serves) then
      return {word = 'same', record = raw}
    end
    if active then return {word = 'busy', record = raw} end
  end
  redis.call('HSET', KEY.policy_updates(ask.of), ask.id, ask.record)
  redis.call('LPUSH', KEY.policy_order(ask.of), ask.id)
  for _, old in ipairs(redis.call('LRANGE', KEY.policy_order(ask.of), ask.kept, -1)) do
    redis.call('HDEL', KEY.policy_updates(ask.of), old)
  end
  redis.call('LTRIM', KEY.policy_order(ask.of), 0, ask.kept - 1)
  redis.call('SET', KEY.policy_active(ask.of), ask.id)
  redis.call('SADD', KEY.POLICIES, ask.policy)
  -- One ring wakes one worker. Those left over from updates that nobody waited for would only add up.
  redis.call('LREM', KEY.POLICY_BELL, 0, ask.policy)
  redis.call('LPUSH', KEY.POLICY_BELL, ask.policy)
  return {word = 'created', record = ask.record}
end

-- Backends of any weights take the policy's rollouts from now on, unless there is an update under way (`record`), or
-- `backends` have the current ones. With `gone` its name and history are forgotten, too.
function operations.forget(ask)
  local active, version = redis.call('GET', KEY.policy_active(ask.of)), redis.call('GET', KEY.backends_version(ask.of))
  local record = active and redis.call('HGET', KEY.policy_updates(ask.of), active)
  if record then return {record = record} end
  local serving = {}
  for _, backend in ipairs(redis.call('HKEYS', KEY.BACKENDS)) do
    if version and redis.call('HGET', KEY.backend(backend), 'version' .. ask.of) == version then
      serving[#serving + 1] = backend
    end
  end
  if not serving[1] then
    redis.call('DEL', KEY.backends_version(ask.of), KEY.policy_current(ask.of), KEY.policy_active(ask.of))
    tell_waiting()
    if ask.gone then
      redis.call('DEL', KEY.policy_updates(ask.of), KEY.policy_order(ask.of))
      redis.call('SREM', KEY.POLICIES, ask.policy)
    end
  end
  return {backends = serving}
end

-- {token, id, record}; false: the lease is another's
function operations.save(ask)
  if redis.call('GET', KEY.policy_lease(ask.of)) ~= ask.token then return false end
  redis.call('HSET', KEY.policy_updates(ask.of), ask.id, ask.record)
  return true
end

-- As `save`, and {current, version, outcome, seconds}: the policy from now on and its version, missing = as before
function operations.finish(ask)
  if not operations.save(ask) then return false end
  if ask.current then
    redis.call('SET', KEY.policy_current(ask.of), ask.current)
    -- Which came after which: labels need not say.
    redis.call('ZADD', KEY.policy_sequence(ask.of), redis.call('HINCRBY', KEY.policy_totals(ask.of), 'changes', 1), ask.version)
    redis.call('ZREMRANGEBYRANK', KEY.policy_sequence(ask.of), 0, -1001)
  end
  redis.call('DEL', KEY.policy_active(ask.of), KEY.policy_lease(ask.of))
  redis.call('HINCRBY', KEY.policy_totals(ask.of), 'n_' .. ask.outcome, 1)
  redis.call('HINCRBYFLOAT', KEY.policy_totals(ask.of), 'seconds', ask.seconds)
  redis.call('XADD', KEY.POLICY_ENDED, 'MAXLEN', '~', 100, '*', 'id', ask.id)
  return true
end
