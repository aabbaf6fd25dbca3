-- Weight updates: at most one under way, worked on by the holder of a lease. What the holder writes is
-- refused once the lease is another's, so a worker that was thought dead cannot undo its successor's work.
--
-- ARGV: create <id> <identity> <record> <kept> | claim <token> <ms> | save <token> <id> <record>
--       | finish <token> <id> <record> <current or ''> <outcome> <seconds>

local UPDATES, ORDER, ACTIVE = 'policy:updates', 'policy:order', 'policy:active'
local LEASE, CURRENT, BELL = 'policy:lease', 'policy:current', 'policy:bell'
local ENDED, TOTALS, SEQUENCE = 'policy:ended', 'policy:totals', 'policy:sequence'
local op = ARGV[1]

if op == 'create' then
  local id, identity, record, kept = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
  local active = redis.call('GET', ACTIVE)
  local latest = active or redis.call('LINDEX', ORDER, 0)
  local raw = latest and redis.call('HGET', UPDATES, latest)
  if raw then
    local known = cjson.decode(raw)
    if known.identity == identity and (active or known.update.state == 'done') then return {'same', raw} end
    if active then return {'busy', raw} end
  end
  redis.call('HSET', UPDATES, id, record)
  redis.call('LPUSH', ORDER, id)
  for _, old in ipairs(redis.call('LRANGE', ORDER, kept, -1)) do redis.call('HDEL', UPDATES, old) end
  redis.call('LTRIM', ORDER, 0, kept - 1)
  redis.call('SET', ACTIVE, id)
  -- One ring wakes one worker. Those left over from updates that nobody waited for would only add up.
  redis.call('LPUSH', BELL, id)
  redis.call('LTRIM', BELL, 0, 0)
  return {'created', record}
end

if op == 'claim' then
  local active = redis.call('GET', ACTIVE)
  if not active or redis.call('EXISTS', LEASE) == 1 then return false end
  local raw = redis.call('HGET', UPDATES, active)
  if not raw then
    redis.call('DEL', ACTIVE)
    return false
  end
  redis.call('SET', LEASE, ARGV[2], 'PX', ARGV[3])
  return raw
end

if redis.call('GET', LEASE) ~= ARGV[2] then return 0 end
local id, record = ARGV[3], ARGV[4]
redis.call('HSET', UPDATES, id, record)
if op == 'finish' then
  if ARGV[5] ~= '' then
    redis.call('SET', CURRENT, ARGV[5])
    local version = cjson.decode(ARGV[5]).policy.version
    -- Which came after which: labels need not say.
    redis.call('ZADD', SEQUENCE, redis.call('HINCRBY', TOTALS, 'changes', 1), version)
    redis.call('ZREMRANGEBYRANK', SEQUENCE, 0, -1001)
  end
  redis.call('DEL', ACTIVE, LEASE)
  redis.call('HINCRBY', TOTALS, 'n_' .. ARGV[6], 1)
  redis.call('HINCRBYFLOAT', TOTALS, 'seconds', ARGV[7])
  redis.call('XADD', ENDED, 'MAXLEN', '~', 100, '*', 'id', id)
end
return 1
