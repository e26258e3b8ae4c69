#!lua flags=allow-oom
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEY.deadlines, '-inf', instant(now),
    'LIMIT', 0, ARGV[1])) do
  local session = read_session(id)
  if session and running(session) then
    found[#found + 1] = {id, session}
  else
    redis.call('ZREM', KEY.deadlines, id)
  end
end
return found
