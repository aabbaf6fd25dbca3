-- Whose a reservation is, and what keeps count of it: a backend may serve several policies, and a rollout may have
-- slots, which are further reservations beside its own.

-- What keys have of a policy's name.
local function of(policy) return (policy or 'default') == 'default' and '' or '/' .. policy end

local function id_of(ask) return ask.slot and ask.rollout .. '|' .. ask.slot or ask.rollout end

-- Whose a pin is: one word, which earlier releases take for the group.
local function label_of(ask)
  if not (ask.policy or ask.tenant) then return ask.group end
  return ask.group .. ';' .. (ask.policy or 'default') .. ';' .. (ask.tenant or 'default')
end

local function owners(label)
  local policy, tenant = label:match(';([^;]*);([^;]*)$')
  return policy or 'default', tenant or 'default'
end

-- In all heaps that the backend is in.
local function reserve(backend, policies, weight, rollouts)
  local others = policies and policies:gmatch('%S+')
  local policy = others and others() or 'default'
  while policy do
    local its = of(policy)
    if redis.call('ZINCRBY', KEY.backends_load(its), weight, backend):byte() == 45 then
      redis.call('ZADD', KEY.backends_load(its), 0, backend)
    end
    policy = others and others()
  end
  if rollouts then redis.call('HINCRBY', KEY.backend(backend), 'live', rollouts) end
end

-- For the tenant.
local function book(label, weight)
  local policy, tenant = owners(label)
  local its = of(policy)
  redis.call('HINCRBY', KEY.backends_reserved(its), tenant, weight)
end

-- What must go with the rollout, and may have to be made again.
local function note(ask, backend, label)
  if not ask.fence then return end
  if not ask.slot then
    redis.call('HSET', KEY.record(ask.rollout), 'backend', backend, 'reserved', ask.weight, 'pinned_for', label)
    return
  end
  local slots = redis.call('HGET', KEY.record(ask.rollout), 'slots') or ''
  if not (' ' .. slots .. ' '):find(' ' .. ask.slot .. ' ', 1, true) then
    redis.call('HSET', KEY.record(ask.rollout), 'slots', (slots == '' and '' or slots .. ' ') .. ask.slot)
  end
end

-- False: somebody else holds the rollout by now, or nobody.
local function holds(ask)
  if not ask.fence then return true end
  local r = redis.call('HMGET', KEY.record(ask.rollout), 'fence', 'owner')
  return r[1] == ask.fence and r[2]
end
