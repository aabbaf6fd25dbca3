-- Notes in a rollout's timeline: what happened to it beside its changes of state. Bounded in number and in size;
-- the first ones are kept, for how the rollout ended is in its record.

local MAX_NOTES, MAX_NOTE_BYTES = 64, 400

-- The record must exist.
local function tell(id, attempt, fence, text) -- lazy
  local told = redis.call('HINCRBY', KEY.record(id), 'notes', 1)
  if told > MAX_NOTES then return end
  if told == MAX_NOTES then text = 'further notes are left out' end
  text = text:gsub('%s+', ' ')
  if #text > MAX_NOTE_BYTES then
    -- A character that is cut in half would make the whole list unreadable.
    text = text:sub(1, MAX_NOTE_BYTES):gsub('[\192-\255]?[\128-\191]*$', '') .. '…'
  end
  redis.call('RPUSH', KEY.timeline(id), 'note ' .. now .. ' ' .. attempt .. ' ' .. fence .. ' ' .. text)
end
