-- needs: rollouts/record
-- Rollouts that wait for workers of these nodes.
local function waiting_for(nodes)
  local ids, gone, rollouts = redis.call('ZRANGE', KEY.by_state('evaluating'), 0, -1), {}, {}
  for _, id in ipairs(redis.call('ZRANGE', KEY.by_state('running'), 0, -1)) do
    if field(id, 'owner') == NOBODY then ids[#ids + 1] = id end
  end
  for _, node in ipairs(nodes) do
    gone[node] = true
    for _, id in ipairs(redis.call('SMEMBERS', KEY.ahead(node))) do ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do
    local r = read(id, 'node')
    if (awaited(r) == 'run' or awaited(r) == 'eval') and gone[r.node or ''] then rollouts[#rollouts + 1] = r end
  end
  return rollouts
end
