#!lua flags=no-writes
-- A page of what belongs to a session: ARGV names the two kinds of key.
local session_id, order, values, cursors = unpack(ARGV, 1, 4)
local after, limit, direction = unpack(ARGV, 5, 7)
local ids = page(key(order, session_id), cursors ~= '' and key(cursors, session_id), after,
  tonumber(limit), direction)
if not ids then return {'unknown_cursor'} end
local found = {}
for _, id in ipairs(ids) do
  found[#found + 1] = {id, redis.call('HGET', key(values, session_id), id)}
end
return {'ok', found}
