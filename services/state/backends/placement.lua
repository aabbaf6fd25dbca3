-- needs: full backends/waiting
-- Where rollouts go: apart from the fleet's upkeep, for all of a script is read at each of its calls.

local function placed(ask, backend, fact, why)
  return {word = 'ok', backend = backend, why = why or '', described = redis.call('HGET', KEY.BACKENDS, backend),
    version = fact.version, policy = ask.policy}
end

-- Nobody may take the rollout now. `full`: it waits in line for room; `none`: somebody must do something.
local function refused(word)
  local why = {}
  for verdict, count in pairs(verdicts) do why[#why + 1] = count .. ' ' .. verdict end
  table.sort(why)
  if word == 'none' then redis.call('SET', KEY.BACKEND_WAITED, '1', 'PX', 5000) end
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'refused_' .. word, 1)
  return {word = word, why = table.concat(why, ', ')}
end

-- {rollout, slot, fence, policy, tenant, process, lift, group, weight, version, exclude, admit, group_slack}; slot, fence,
-- policy and tenant (`default`), process, version and admit may be missing; lift: ms of waiting that priority is worth
function operations.acquire(ask)
  though_full()
  if not holds(ask) then return {word = 'lost', why = ''} end
  local id, its = id_of(ask), of(ask.policy)
  local state = redis.call('MGET', KEY.backends_version(its), KEY.backends_line(its))
  local wish, pinned = wish_of(ask, state[1], ask.admit, true), pin_of(id)
  if pinned then
    -- A pin outlives draining and a pause: the prefix cache is there.
    local fact = still(ask, pinned, wish)
    if fact then return placed(ask, pinned, fact) end
    give_back(id)
  end
  -- Who holds a place and waits for another could wait for those who wait so for its own. It takes the backend that it
  -- has, if that serves the policy, or one by load alone.
  local home = ask.slot and pin_of(ask.rollout)
  if home then
    local fact = still(ask, home, wish)
    local fine = fact and not fact.paused and (not wish.version or fact.version == wish.version)
    local beside = fine and {name = home, fact = fact} or choose(wish_of(ask, state[1]))
    if beside then
      if state[2] then line_up().leave(id) end
      enter_backend(ask, beside)
      return placed(ask, beside.name, beside.fact)
    end
  end
  local place, why = look_for(ask, wish, state[2])
  if not (state[2] and place) and not (not place and verdicts.full) then
    if place then
      enter_backend(ask, place, why)
      if place.fact.policies then count_granted(place.fact.policies, ask.policy or 'default', ask.weight) end
      return placed(ask, place.name, place.fact, why)
    end
    if state[2] then line_up().leave(id) end
    return refused('none')
  end
  -- Others wait, or it has to.
  local line = line_up()
  line.join(ask)
  if place then line.grant(its) end
  pinned = place and pin_of(id)
  if pinned then return placed(ask, pinned, facts(pinned, its)) end
  if place then verdicts = {['before it in line'] = redis.call('ZCARD', KEY.backends_sizes(its)) - 1} end
  return refused('full')
end

local function move(ask, to, label, why, text) -- lazy
  local freed = unpin(id_of(ask))
  pin(ask, to, label, 'moved to backend ' .. to.name .. ': ' .. text)
  redis.call('HINCRBY', KEY.BACKEND_TOTALS, 'moved_' .. why, 1)
  if freed then room(freed.backend, freed.policies, freed) end
  return placed(ask, to.name, to.fact, why)
end

-- {rollout, slot, fence, policy, tenant, weight, version, exclude, limited, spill_at, spill_to, spill_gap}
function operations.extend(ask)
  though_full()
  if not holds(ask) then return {word = 'lost', why = ''} end
  -- A rollout under way is never refused for want of room.
  local its = of(ask.policy)
  local wish = wish_of(ask, redis.call('GET', KEY.backends_version(its)))
  local home, old, label = pin_of(wish.id)
  local fact = still(ask, home, wish)
  if not fact then
    local best = choose(wish, home)
    -- The version counts where a rollout starts. One under way goes on wherever its ids can be continued.
    if not best and wish.version then
      wish.version = nil
      best = choose(wish, home)
    end
    if not best then return refused(verdicts.full and 'full' or 'none') end
    ask.group = '-'
    return move(ask, best, label or label_of(ask), 'failover',
      home and home .. ' failed or is gone' or 'its place was gone')
  end
  local more = exact(ask.weight - tonumber(old))
  if more ~= '0' then
    reserve(home, fact.policies, more)
    book(label, more)
    redis.call('HSET', KEY.BACKEND_PINS, wish.id, home .. ' ' .. ask.weight .. ' ' .. label)
    note(ask, home, label)
  end
  if more:byte() == 45 then
    room(home, fact.policies, {label = label, weight = -more})
  elseif ask.limited and fact.capacity > 0 and not fact.paused
      and tonumber(redis.call('ZSCORE', KEY.backends_load(wish.of), home)) > ask.spill_at * fact.capacity then
    wish.admit, wish.starts = ask.spill_to, true
    local best = choose(wish, home)
    if best and fact.live - best.fact.live > ask.spill_gap then
      return move(ask, best, label, 'spill', home .. ' is full')
    end
  end
  return placed(ask, home, fact)
end

-- Its first write needs no memory.
function operations.release(ask) return give_back(id_of(ask)) end
