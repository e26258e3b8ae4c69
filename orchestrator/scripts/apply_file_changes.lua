#!lua
-- ARGV: session, number written, five values for each of these, then the removed paths.
-- A file is `created_at bytes source artifact path`, separated by NUL, which no path can hold.
local session_id, written = ARGV[1], tonumber(ARGV[2])
if not read_session(session_id) then return {'session_missing'} end
local files, order = key('files', session_id), key('file_order', session_id)
local paths, cursors = key('paths', session_id), key('file_cursors', session_id)

local function remove(path)
  local id = redis.call('HGET', paths, path)
  if not id then return end
  redis.call('HDEL', paths, path)
  redis.call('HDEL', files, id)
  local position = redis.call('ZSCORE', order, id)
  redis.call('ZREM', order, id)
  remember_position(cursors, id, position)
end

local place = 3
local found = {}
for _ = 1, written do
  local path, new_id, bytes, source, artifact = unpack(ARGV, place, place + 4)
  place = place + 5
  local id = redis.call('HGET', paths, path)
  local created_at
  if id then
    created_at = string.match(redis.call('HGET', files, id), '^[^%z]*')
  else
    id, created_at = new_id, instant(now)
    redis.call('HSET', paths, path, id)
    redis.call('ZADD', order, next_position(order), id)
  end
  local value = table.concat({created_at, bytes, source, artifact, path}, '\0')
  redis.call('HSET', files, id, value)
  if artifact ~= '' then redis.call('SADD', key('artifacts', session_id), artifact) end
  found[#found + 1] = {id, value}
end
for i = place, #ARGV do remove(ARGV[i]) end
expire_with_session(session_id, 'files', 'file_order', 'paths', 'artifacts')
return {'ok', found}
