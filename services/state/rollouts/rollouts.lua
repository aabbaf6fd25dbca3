-- needs: rollouts/record rollouts/waiting
-- What is asked of rollouts; see store.py. Takes the times of the settings in ms: `LEASE_MS`, `PATIENCE_MS`,
-- `REQUEUE_MS`, `LONGEST_REQUEUE_MS`, `ELSEWHERE_MS`.

-- -- submission ------------------------------------------------------------------------------------

-- Whether a tenant's quota has room for so many rollouts: takes it and answers nil, or takes nothing and says which
-- quota has none.
local function take_quota(ask, n)
  local tenant, per_minute = ask.tenant, ask.per_minute
  local live = tonumber(redis.call('HGET', KEY.TENANTS_LIVE, tenant) or '0')
  if ask.most_live and live + n > ask.most_live then return over_quota('live', ask.most_live, live, n) end
  if per_minute then
    -- A bucket that holds a minute's worth and is refilled steadily; a full one needs no key.
    local b = redis.call('HMGET', KEY.bucket(tenant), 'left', 'at')
    local tokens = per_minute
    if b[1] then tokens = math.min(tokens, tonumber(b[1]) + (now - tonumber(b[2])) * per_minute / 60000) end
    if n > tokens then
      return over_quota('rate', per_minute, math.floor(tokens), n, math.ceil((n - tokens) * 60000 / per_minute))
    end
    redis.call('HSET', KEY.bucket(tenant), 'left', tokens - n, 'at', now)
    redis.call('PEXPIRE', KEY.bucket(tenant), 60000)
  end
  redis.call('HINCRBY', KEY.TENANTS_LIVE, tenant, n)
end

-- Of each rollout: new, the state that it is in, or conflict. And how many new ones there are of each request.
local function judge_submission(ask)
  local words, new, digests, conflict = {}, {}, {}, false
  for i, rollout in ipairs(ask.rollouts) do
    local digest = ask.requests[rollout.request].digest
    local known = redis.call('HMGET', KEY.record(rollout.id), 'digest', 'state', 'tenant')
    local as = known[1] or digests[rollout.id]
    if as and (as ~= digest or (known[3] or ask.tenant) ~= ask.tenant) then
      words[i], conflict = 'conflict', true
    else
      words[i] = known[2] or (digests[rollout.id] and 'queued') or 'new'
      if words[i] == 'new' then new[rollout.request] = (new[rollout.request] or 0) + 1 end
    end
    digests[rollout.id] = digest
  end
  return words, new, conflict
end

local function write_rollout(rollout, request, tenant, at)
  local id, rank = rollout.id, exact(at - request.lift)
  redis.call('DEL', KEY.checkpoints(id), KEY.turns(id, 1)) -- of one of that name whose record has expired
  write(id, {tenant = tenant, group = rollout.group, index = rollout.index, handler = request.handler,
    digest = request.digest, tags = table.concat(request.tags, ','), most_attempts = request.most_attempts,
    state = 'queued', attempt = 1, fence = 0, kicks = 0, created = now, updated = now, since = now,
    deadline = now + request.deadline, rank = rank, batch_group = rollout.batch_group})
  queue_up(id, tenant, rank)
  redis.call('RPUSH', KEY.timeline(id), 'queued ' .. now .. ' 1 0 -')
  redis.call('SADD', KEY.group(tenant, rollout.group), id)
  redis.call('ZADD', KEY.CREATED, now, id)
  redis.call('ZADD', KEY.by_tenant(tenant), now, id)
  redis.call('ZADD', KEY.by_state('queued'), now, id)
  look_at(id, now + REQUEUE_MS)
  redis.call('HINCRBY', KEY.COUNTS, 'queued', 1)
  for _, tag in ipairs(request.tags) do redis.call('ZADD', KEY.by_tag(tenant, tag), now, id) end
end

-- {tenant, most_live, per_minute, most_bytes, requests, rollouts} and the requests' bodies; quotas may be missing.
-- A request is {digest, handler, tags, deadline, lift, most_attempts}, `lift` being ms of waiting that its priority is
-- worth; a rollout {id, group, index, request, batch_group}, its request by number. All or nothing.
function operations.submit(ask)
  local words, new, conflict = judge_submission(ask)
  if conflict or not next(new) then return {words = words} end
  local n, bytes = 0, 0
  for k, members in pairs(new) do
    n = n + members
    if redis.call('EXISTS', KEY.request(ask.tenant, ask.requests[k].digest)) == 0 then bytes = bytes + #ARGV[2 + k] end
  end
  local over = over_bytes(ask.tenant, bytes, ask.most_bytes) or take_quota(ask, n)
  if over then return {over = over} end
  for k, members in pairs(new) do hold_request(ask.tenant, ask.requests[k].digest, ARGV[2 + k], members) end
  local at = submission_times(n)
  for i, rollout in ipairs(ask.rollouts) do
    if words[i] == 'new' then
      write_rollout(rollout, ask.requests[rollout.request], ask.tenant, at)
      at = at + 1 / 1024
    end
  end
  return {words = words}
end

-- {tenant}: takes off its account what has expired
function operations.forget(ask) forget_requests(ask.tenant) end

-- -- a stage ---------------------------------------------------------------------------------------

local ENTERS = {init = 'initializing', run = 'running', eval = 'evaluating'}

-- What whoever holds a rollout must know of it.
local function claimed(id)
  local claim = read(id, 'deadline', 'sandbox', 'node', 'error', 'finish_reason', 'index', 'group', 'metrics', 'digest',
    'resumed', 'handed', 'left_on', 'files', 'moves')
  claim.word, claim.now = 'ok', now
  claim.request = redis.call('HGET', KEY.request(claim.tenant, claim.digest), 'body') or ''
  return claim
end

-- Gives a waiting rollout, read with `since` and `deaths`, to an owner.
local function take(r, stage, ask)
  require_transition(r, ENTERS[stage])
  r.fence = redis.call('HINCRBY', KEY.record(r.id), 'fence', 1)
  note_unproven(r, stage, ask.owner)
  look_at(r.id, now + LEASE_MS)
  book(r.id, 'queued', r.since, 'queue_' .. stage)
  enter(r, ENTERS[stage], ask.owner,
    {owner = ask.owner, token = ask.token, lease = now + LEASE_MS, claimed = now, stamp = STAMP .. ' ' .. r.fence})
  return claimed(r.id)
end

-- The same claim again, from a client that got no answer, perhaps long after: it holds the rollout from now.
local function renew(id)
  write(id, {lease = now + LEASE_MS})
  look_at(id, now + LEASE_MS)
  return claimed(id)
end

-- {id, attempt, stage, owner, token}
-- The token makes a repeated claim harmless: a client that got no answer sends the same one again.
function operations.claim(ask)
  local r = read(ask.id, 'token', 'deadline', 'since', 'deaths')
  if not r.state then return {word = 'gone'} end
  if TERMINAL[r.state] then return {word = 'ended'} end
  if r.owner and r.token == ask.token then
    though_full()
    return renew(r.id)
  end
  if tonumber(r.attempt) ~= ask.attempt or awaited(r) ~= ask.stage then return {word = 'stale'} end
  if now >= tonumber(r.deadline) then
    look_at(r.id, now)
    return {word = 'overdue'}
  end
  though_full()
  if crowded(r, ask.stage, ask.owner) then
    look_at(r.id, now + ALONE_AGAIN_MS)
    return {word = 'crowded'}
  end
  return take(r, ask.stage, ask)
end

-- {owner, token, node, most_on_node, most_without_sandbox, queue}, of which bounds and queue may be missing
-- INIT of whoever's turn it is. With a queue, of messages for INIT: if there is one, which is taken from it.
function operations.claim_next(ask)
  local noted = KEY.fair_claim(ask.token)
  local before = redis.call('GET', noted)
  if before then
    local r = read(before, 'token')
    if not (r.owner and r.token == ask.token) then return {word = 'stale'} end
    return renew(before)
  end
  if ask.queue and redis.call('EXISTS', ask.queue) == 0 then return {word = 'nobody'} end
  if is_full(ask.node, ask.most_on_node) or is_full(KEY.NO_SANDBOX, ask.most_without_sandbox) then
    return {word = 'full'}
  end
  -- What cannot be claimed leaves the order; in one call not without end, for nobody else is served meanwhile.
  for _ = 1, 1000 do
    local id, tenant = first_in_order(function(waiting) return is_absent(waiting, ask.node) end)
    if not id then return {word = tenant and 'passed over' or 'nobody'} end
    local r = read(id, 'deadline', 'since', 'deaths')
    if r.state ~= 'queued' or r.owner then
      leave_queue(id, tenant)
    elseif now >= tonumber(r.deadline) then
      look_at(id, now)
      leave_queue(id, tenant)
    elseif crowded(r, 'init', ask.owner) then
      -- The reaper rings for it again.
      look_at(id, now + ALONE_AGAIN_MS)
      leave_queue(id, tenant)
    else
      charge(tenant)
      -- An outage of Redis may lie between a claim and its repetition.
      redis.call('SET', noted, id, 'PX', LEASE_MS + 120000)
      begin_ahead(id, ask.node)
      if ask.queue then redis.call('RPOP', ask.queue) end
      return take(r, 'init', ask)
    end
  end
  return {word = 'nobody'}
end

-- A handler may ignore that it is to stop: the lease is not extended past the deadline, or past a cancel, by more than
-- the patience. Then the reaper ends the rollout.
local function beat(id, fence)
  local r = read(id, 'cancel', 'deadline')
  if tonumber(r.fence) ~= fence or not r.owner then return 'lost' end
  local deadline = tonumber(r.deadline)
  local lease = math.min(now + LEASE_MS, math.min(deadline, tonumber(r.cancel or deadline)) + PATIENCE_MS)
  write(id, {lease = lease, beat = now})
  look_at(id, lease)
  return r.cancel and 'cancel' or now >= deadline and 'overdue' or 'ok'
end

-- {held}: pairs of id and fence; answers one word each: ok, lost, cancel, overdue
function operations.heartbeat(ask)
  local words = {}
  though_full()
  for i, pair in ipairs(ask.held) do words[i] = beat(pair[1], pair[2]) end
  return words
end

-- {id, fence, fields, text}: facts learnt during a stage (the sandbox, before it is used), and a line for the timeline;
-- false: it is not the caller's any more
function operations.note(ask)
  local r = read(ask.id)
  if tonumber(r.fence) ~= ask.fence or not r.owner then return false end
  though_full()
  write(r.id, ask.fields)
  if ask.text ~= '' then tell(r.id, r.attempt, r.fence, ask.text) end
  return true
end

-- Another worker goes on with the attempt: with RUN at the turn it had reached, with INIT and EVAL from their beginning.
local function resume(r, stage, delay)
  redis.call('HINCRBY', KEY.record(r.id), 'resumed', 1)
  count('resumed_' .. stage)
  if stage == 'run' then
    pass_on(r, delay)
  elseif stage == 'init' then
    restart(r, '-', delay, true)
  else
    wait_in(r, 'evaluating', '-', delay)
  end
end

-- What becomes of a rollout whose stage ends with `next`, and after which delay.
local function judge_finish(r, ask)
  local to, delay = ask.next, ask.delay
  if r.cancel and not TERMINAL[to] then to = 'cancelled' end
  if to == 'again' and is_last_attempt(r) then to = 'failed' end
  if to == 'elsewhere' then
    -- A live node that has not tried to start the image may only be busy: the deadline ends that wait.
    if not ask.absent and r.elsewhere_since and now - tonumber(r.elsewhere_since) >= ELSEWHERE_MS then
      to = 'failed'
    else
      -- Ever more rarely: where one worker of many knows how, it is found soon; where none does, nobody spins.
      delay = math.min(delay * 2 ^ tonumber(r.elsewhere or '0'), 30000)
    end
  end
  return to, delay
end

-- The node could not start the image.
local function note_absence(r, absent, to)
  local why = 'node ' .. absent.node .. ' cannot start its image: ' .. absent.why
  if field(r.id, 'unstarted') ~= why then tell(r.id, r.attempt, r.fence, why) end
  -- All have tried: another attempt goes round the nodes again, and this one comes last.
  if to == 'again' then forget_absence(r.id) end
  write(r.id, {['absent:' .. absent.node] = now, unstarted = why})
end

-- {id, fence, stage, next, delay, fields, absent} and the trajectory, if there is one; `absent`, {node, why}, may be
-- missing.
-- `next` is a state, `again` (another attempt from INIT if one is left, else failed), `handback` (a stopping worker
-- returns the rollout; no attempt is used up), `passed on` (the same of RUN, with which another worker goes on), or `elsewhere` (this worker cannot do it: the same after a delay, and
-- failed with the given fields once nobody could for so long; at once, and for as long as it takes, where its node
-- cannot start the image and another one has yet to try). The answer is the state entered, or `lost`. The same finish
-- again, from a client that got no answer, gets the same answer.
function operations.finish(ask)
  local r = read(ask.id, 'claimed', 'cancel', 'ended_fence', 'ended_in', 'elsewhere_since', 'elsewhere',
    'decided', 'deaths_in')
  local id, stage, owner, trajectory = ask.id, ask.stage, r.owner, not ask.queue and ARGV[3]
  if tonumber(r.ended_fence) == ask.fence then return r.ended_in end
  if not r.state or TERMINAL[r.state] or tonumber(r.fence) ~= ask.fence or not owner then return 'lost' end
  local to, delay = judge_finish(r, ask)
  local back = to == 'handback' or to == 'elsewhere'
  local enters = to
  if to == 'again' or back then enters = back and stage == 'eval' and 'evaluating' or 'queued' end
  if to == 'passed on' then enters = 'running' end
  require_transition(r, enters)
  -- A trajectory waits until there is room, and so does what takes further work.
  if not trajectory and not ask.queue then though_full() end
  ask.fields.ended_fence, ask.fields.ended_in = ask.fence, enters
  write(id, ask.fields)
  if r.decided then forget(id, 'decided') end
  book(id, stage, r.claimed, 'stage_' .. stage)
  local handed_on = 0
  if to == 'elsewhere' then
    if not ask.absent then redis.call('HSETNX', KEY.record(id), 'elsewhere_since', now) end
    handed_on = redis.call('HINCRBY', KEY.record(id), 'elsewhere', 1)
  elseif not back and to ~= 'passed on' then
    if r.elsewhere then forget(id, 'elsewhere_since', 'elsewhere') end
    if to ~= 'again' and r.deaths_in == stage then clear_suspicion(id, owner) end
  end
  if ask.fields.error and handed_on < 2 then tell_error(r, ask.fields.error) end
  if ask.absent then note_absence(r, ask.absent, to) end
  if (to == 'handback' or to == 'passed on') and not ask.absent then tell(id, r.attempt, r.fence, 'handed back: worker ' .. owner .. ' stops') end
  if trajectory then redis.call('SET', KEY.trajectory(id), trajectory) end
  if stage == 'run' and to ~= 'passed on' then forget_turns(r) end
  if to == 'cancelled' then
    mark_cancelled(id)
    -- What the stage met before it heard of the cancel is nobody's failure.
    forget(id, 'error', 'blame')
  end
  if to == 'again' then next_attempt(r, field(id, 'blame') or 'unknown') end
  if enters == 'queued' then
    -- Another attempt waits for its turn only once its delay is over and the reaper rings for it.
    restart(r, owner, delay, to == 'handback' or to == 'elsewhere' and ask.absent)
  elseif TERMINAL[enters] then
    finish_rollout(r, enters, owner)
  elseif to == 'passed on' then
    write(id, {handed = '1'})
    resume(r, stage, delay)
  else
    if to == 'elsewhere' then forget_failure(id) end
    wait_in(r, enters, owner, delay)
  end
  return enters
end

-- What `finish` and `claim_next` take, and next_queue with a message for it: ends INIT of a rollout that is ready and
-- claims the next one. Answers as `claim_next`, or the state that was entered instead as the word.
function operations.go_on(ask)
  local entered = operations.finish(ask)
  if entered ~= 'ready' then return {word = entered} end
  redis.call('LPUSH', ask.next_queue, ARGV[3])
  return operations.claim_next(ask)
end

-- As `finish`, before the stage's sandbox is released: should its worker be lost meanwhile, the reaper has it end so.
-- false: it is not the caller's any more.
function operations.decide(ask)
  local r = read(ask.id)
  if tonumber(r.fence) ~= ask.fence or not r.owner then return false end
  if ARGV[3] then redis.call('SET', KEY.trajectory(r.id), ARGV[3]) else though_full() end
  -- What is given back is done again in this attempt, whoever has released its sandbox.
  if ask.next ~= 'handback' and ask.next ~= 'elsewhere' then write(r.id, {decided = ARGV[2]}) end
  return true
end

-- {id, tenant}: tenant may be missing; {word, state, node, attempt}
function operations.cancel(ask)
  local r = read(ask.id, 'node')
  if not r.state or (ask.tenant and ask.tenant ~= r.tenant) then return {word = 'gone', state = '', attempt = 0} end
  local answer = {word = 'cancelled', state = r.state, node = r.node, attempt = tonumber(r.attempt)}
  though_full()
  if TERMINAL[r.state] then
    answer.word, answer.node = 'ended', nil
  elseif r.owner and r.owner ~= NOBODY then
    answer.word = 'cancelling'
    if redis.call('HSETNX', KEY.record(r.id), 'cancel', now) == 1 then
      tell(r.id, r.attempt, r.fence, 'cancel asked for; worker ' .. r.owner .. ' is told')
    end
  else
    mark_cancelled(r.id)
    finish_rollout(r, 'cancelled', '-')
    answer.state = 'cancelled'
  end
  return answer
end

-- -- upkeep ----------------------------------------------------------------------------------------

-- Something the caller has to do: `send` a message, `restart` from INIT, clean up after one that `ended`.
local function to_do(action, r, stage)
  return {action = action, rollout_id = r.id, attempt = tonumber(r.attempt), stage = stage, node = r.node}
end

local function fail(r, blame, kind, message, drop_reason)
  lay_blame(r.id, blame, kind, message, drop_reason, 'error')
  finish_rollout(r, 'failed', '-')
  return to_do('ended', r, '')
end

-- Does another worker's stage again or goes on with it; what the caller has to do.
local function take_over(r, stage, from)
  forget(r.id, 'handed')
  if stage == 'init' and r.node then write(r.id, {left_on = r.node}) end
  tell(r.id, r.attempt, r.fence, from .. (stage == 'run' and ': another one goes on at its turn' or ': done again'))
  resume(r, stage, REQUEUE_MS)
  return to_do('resume', r, stage)
end

-- The lease ran out: whoever held the rollout is dead, stopped or cut off.
local function bury(r)
  local stage, owner, state = STAGE_IN[r.state], r.owner, r.state
  count('lost_' .. stage)
  local lost, from = count_death(r, stage), 'worker ' .. owner .. ' was lost in state ' .. state
  if lost >= GUILTY then
    return fail(r, 'handler', 'WorkerLost', from .. ' at attempt ' .. r.attempt .. ', the ' .. lost ..
      'rd in a row that ended while it held this rollout: its handler is what ends them', 'it ends workers')
  end
  local again = repeatable(r, stage)
  if again and (lost < SUSPECT or not was_alone(r, stage)) then return take_over(r, stage, from) end
  if is_last_attempt(r) then
    return fail(r, 'infrastructure', 'WorkerLost', from .. ' at attempt ' .. r.attempt ..
      '; workers lost while they held it: ' .. lost, 'worker lost')
  end
  tell(r.id, r.attempt, r.fence, from .. ': the next attempt')
  next_attempt(r, 'infrastructure')
  -- The many that a worker took along did nothing. Of three stages, each of which may come again.
  if not again and most_attempts(r.id) > 1 and tonumber(field(r.id, 'spared') or '0') < 3 * SUSPECT then
    redis.call('HINCRBY', KEY.record(r.id), 'spared', 1)
  end
  if state ~= 'evaluating' then
    restart(r, '-', REQUEUE_MS, true)
    return to_do('restart', r, 'init')
  end
  -- EVAL can be done again on what RUN left.
  wait_in(r, 'evaluating', '-', REQUEUE_MS)
  return to_do('send', r, 'eval')
end

-- The worker that had decided it was lost, perhaps with the sandbox released.
local function end_as_decided(r)
  count('lost_' .. STAGE_IN[r.state])
  local entered = operations.finish(cjson.decode(r.decided))
  r.attempt = field(r.id, 'attempt')
  if TERMINAL[entered] then return to_do('ended', r, '') end
  return to_do('restart', r, 'init')
end

-- It merely waits. The message may be lost or the queue may be long: send it again, ever rarer.
local function ring_again(r, rung)
  local kicks = redis.call('HINCRBY', KEY.record(r.id), 'kicks', 1)
  if r.state == 'queued' then wait_for_turn(r) end
  if kicks == 1 then tell(r.id, r.attempt, r.fence, 'still waits: its message is sent again') end
  local next_look = now + math.min(REQUEUE_MS * 2 ^ kicks, LONGEST_REQUEUE_MS)
  if r.owner then write(r.id, {lease = next_look + LEASE_MS}) end
  look_at(r.id, next_look)
  if not (r.state == 'queued' and rung) then return to_do('send', r, awaited(r)) end
end

-- What is to be done about a rollout that is due; nil: nothing.
local function judge_due(id, rung)
  local r = read(id, 'lease', 'deadline', 'node', 'cancel', 'decided')
  if not r.state or TERMINAL[r.state] then
    redis.call('ZREM', KEY.DUE, id)
  elseif r.owner and r.owner ~= NOBODY and tonumber(r.lease) > now then
    look_at(id, r.lease)
  elseif r.decided then
    return end_as_decided(r)
  elseif now >= tonumber(r.deadline) then
    local why = r.state == 'queued' and field(id, 'unstarted')
    lay_blame(id, 'timeout', 'Deadline', 'the deadline of the rollout passed' .. (why and '; ' .. why or ''),
      'deadline', 'time_limit')
    finish_rollout(r, 'timed_out', '-')
    return to_do('ended', r, '')
  elseif r.cancel then
    mark_cancelled(id)
    finish_rollout(r, 'cancelled', '-')
    return to_do('ended', r, '')
  elseif awaited(r) then
    return ring_again(r, rung)
  else
    return bury(r)
  end
end

-- {limit, latest}: what the reaper has to do, as `todo`. Nothing is judged, and the answer is `jumped`, where it is
-- later than the reaper's own clock can explain (`latest`, may be missing): Redis' time jumped, or stood still with the
-- call, and nobody could extend a lease.
function operations.overdue(ask)
  if ask.latest and now > ask.latest then return {jumped = true} end
  though_full()
  local todo = {}
  -- Once for all: each rollout that waits for INIT has its message, and needs no second one.
  local rung = redis.call('LLEN', 'init') >= redis.call('ZCARD', KEY.by_state('queued'))
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEY.DUE, '-inf', now, 'LIMIT', 0, ask.limit)) do
    todo[#todo + 1] = judge_due(id, rung)
  end
  return {todo = todo}
end

-- A rollout waits for workers of a node on which nobody will come for it.
local function vacate(r, lost)
  if lost and is_last_attempt(r) then
    return fail(r, 'infrastructure', 'NodeLost',
      'node ' .. r.node .. ' was lost with its sandbox in state ' .. r.state .. ' at attempt ' .. r.attempt, 'node lost')
  end
  if lost then
    tell(r.id, r.attempt, r.fence, 'node ' .. r.node .. ' was lost with its sandbox: the next attempt')
    next_attempt(r, 'infrastructure')
  else
    tell(r.id, r.attempt, r.fence, 'handed back: node ' .. r.node .. ' ends')
  end
  restart(r, '-', REQUEUE_MS, true)
  return to_do('restart', r, 'init')
end

-- {nodes, lost}: rollouts that wait for workers of these nodes begin anew. `lost`: an attempt is used up, for nobody
-- can tell what the node still does and a message of the old attempt must not count; else the node ends in order.
function operations.vacate(ask)
  local todo = {}
  though_full()
  for _, r in ipairs(waiting_for(ask.nodes)) do todo[#todo + 1] = vacate(r, ask.lost) end
  return {todo = todo}
end
