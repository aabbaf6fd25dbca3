-- needs: rollouts/record rollouts/waiting
-- Rollouts whose sandboxes' files leave a node, to go on with them on another one. Takes `REQUEUE_MS` and `LEASE_MS`.

-- Where a rollout that waits for the node under that fence goes on; nil: it does not wait for it any more.
local function stage_here(r, ask)
  local stage = tonumber(r.fence) == ask.fence and r.node == ask.node and awaited(r)
  return (stage == 'run' or stage == 'eval') and stage or nil
end

-- {node}: those that wait for its workers. `driven`: a program in the sandbox is at work on it.
function operations.waiting(ask)
  local items = {}
  for _, its in ipairs(waiting_for({ask.node})) do
    local r = read(its.id, 'sandbox', 'handler', 'survives', 'ms_run')
    items[#items + 1] = {rollout_id = r.id, attempt = tonumber(r.attempt), fence = tonumber(r.fence),
      stage = awaited(r), begun = r.state ~= 'ready', sandbox = r.sandbox or '', handler = r.handler,
      survives = r.survives or '',
      run_ms = tonumber(r.ms_run or '0'),
      driven = r.state == 'running' and redis.call('EXISTS', KEY.capture(r.id, r.attempt)) == 1}
  end
  return {waiting = items}
end

-- {id, node, fence, files, bytes}: its files are away, packed, and its message is the caller's to send; false: it does
-- not wait for that node under that fence, and nothing is changed.
function operations.move(ask)
  local r = read(ask.id, 'node')
  if not stage_here(r, ask) then return false end
  though_full()
  write(r.id, {files = ask.files})
  forget_absence(r.id)
  forget(r.id, 'node', 'sandbox')
  if r.state == 'ready' then move_ahead(r.id, 'ready') end
  if r.owner then write(r.id, {lease = now + REQUEUE_MS + LEASE_MS}) end
  look_at(r.id, now + REQUEUE_MS)
  redis.call('HINCRBY', KEY.record(r.id), 'moved', 1)
  count('moved')
  redis.call('HINCRBY', KEY.TOTALS, 'moved_bytes', ask.bytes)
  tell(r.id, r.attempt, r.fence, string.format('its files (%.1f MB) leave node %s: processes in its sandbox end',
    ask.bytes / 1e6, ask.node))
  return true
end

-- {id, node, fence, why}: its files could not leave; false as for `move`
function operations.stay(ask)
  local r = read(ask.id, 'node')
  if not stage_here(r, ask) then return false end
  though_full()
  count('moves_failed')
  tell(r.id, r.attempt, r.fence, 'its files cannot leave node ' .. ask.node .. ': ' .. ask.why)
  return true
end
