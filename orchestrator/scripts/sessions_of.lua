#!lua flags=no-writes
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', key('worker_sessions', ARGV[1]))) do
  local session = read_session(id)
  if session and running(session) then found[#found + 1] = {id, session} end
end
return found
